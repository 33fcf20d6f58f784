"""Parts by order in written databases of a DLRM that is not ours."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_workbook.recordings.hpctoolkit.database import read_database
from dlrm_workbook.recordings.hpctoolkit.to_profile import profile_from_database
from dlrm_workbook.recordings.profile import Profile
from tests.hpctoolkit_tree import tree_of
from tests.hpctoolkit_writer import Measured, write_database

NODE = "torch::autograd::generated::{}Backward0::apply(std::vector<at::Tensor>&&)"
NODES: list[tuple[str, int, int]] = [
    # name (of a Python function without parentheses), parent (−1 the main thread), line
    ("forward", -1, 0),  # 0
    ("", 0, 10),  # 1
    ("apply_emb", 1, 0),  # 2
    ("embedding_bag_kernel(float*)", 2, 0),  # 3
    ("", 0, 11),  # 4
    ("apply_mlp", 4, 0),  # 5
    ("gemm(float*)", 5, 0),  # 6
    ("", 0, 12),  # 7
    ("interact_features", 7, 0),  # 8
    ("bmm(float*)", 8, 0),  # 9
    ("", 0, 13),  # 10
    ("apply_mlp", 10, 0),  # 11
    ("gemm(float*)", 11, 0),  # 12
    ("torch::autograd::Engine::thread_main(x)", -2, 0),  # 13
    (NODE.format("MseLoss"), 13, 0),  # 14
    ("mse(float*)", 14, 0),  # 15
    (NODE.format("Addmm"), 13, 0),  # 16
    ("gemm(float*)", 16, 0),  # 17
    ("sum_of_bias(float*)", 13, 0),  # 18
    (NODE.format("Bmm"), 13, 0),  # 19
    ("bmm(float*)", 19, 0),  # 20
    (NODE.format("EmbeddingBag"), 13, 0),  # 21
    ("index_select(float*)", 21, 0),  # 22
]
STEP = ((3, 5), (6, 4), (9, 3), (12, 9), (15, 1), (17, 30), (18, 6), (20, 7), (22, 8), (17, 10))
STEP_WITH_BIAS = (*STEP, (18, 2))
"""Kernel and microseconds of each operation of one iteration, in order."""


def recorded(folder: Path, iterations: int, trace: bool = True) -> Profile:
    """A database of that many iterations, each kernel below a ``<gpu kernel>``."""
    rows: list[tuple[str, int, int]] = []
    place: dict[int, int] = {}
    for number, (name, parent, line) in enumerate(NODES):
        above = place[parent] if parent >= 0 else parent
        if name.endswith("(float*)"):
            rows.append(("<gpu kernel>", above, 0))
            above = len(rows) - 1
        place[number] = len(rows)
        rows.append((name, above, line))
    tree = tree_of(rows, lambda name: "(" not in name and "<" not in name)
    time, count = np.zeros(len(rows)), np.zeros(len(rows))
    samples: list[tuple[int, int]] = []
    clock = 1_000
    for _ in range(iterations):
        for kernel, micros in STEP_WITH_BIAS:
            row = place[kernel]
            time[row] += micros * 1e-6
            count[row] += 1
            samples += [(clock, row), (clock + micros, -1)]
            clock += micros + 2
        clock += 100
    line = (
        np.array([1000 * at for at, _ in samples], np.uint64) + np.uint64(10**18),
        np.array([0 if row < 0 else row + tree.first for _, row in samples], np.uint32),
    )
    values = {"GPUOP (sec)": time, "GKER (sec)": time, "GKER:COUNT": count}
    none = {metric: np.zeros(len(rows)) for metric in values}
    gpu = (("NODE", 0, 99), ("GPUCONTEXT", 0, 1), ("GPUSTREAM", 7, 7))
    threads = [Measured(values), Measured(none, gpu, line if trace else None)]
    write_database(folder, tree, threads, traces=trace)
    return profile_from_database(read_database(folder))


def by_part(run: Profile, metric: str) -> dict[tuple[str, str], float]:
    keys = [run.contexts["component"], run.contexts["phase"]]
    return run.value_table(metric).groupby(keys).sum().to_dict()


@settings(max_examples=10)
@given(iterations=st.integers(5, 30))
def test_kernels_of_one_call_path_are_divided_by_order(iterations, tmp_path_factory) -> None:
    run = recorded(tmp_path_factory.mktemp("database") / "made.d", iterations)
    assert len(run.iterations) == iterations
    expected = {
        ("embedding", "forward"): 5,
        ("bottom_mlp", "forward"): 4,
        ("interaction", "forward"): 3,
        ("top_mlp", "forward"): 9,
        ("loss", "backward"): 1,
        ("top_mlp", "backward"): 36,
        ("interaction", "backward"): 7,
        ("embedding", "backward"): 8,
        ("bottom_mlp", "backward"): 12,
    }
    found = by_part(run, "gpu_time_ms")
    for part, micros in expected.items():
        assert found[part] == pytest.approx(iterations * micros / 1e3), part
    assert found["other", ""] == pytest.approx(0, abs=1e-12)
    launches = by_part(run, "launches")
    assert launches["top_mlp", "backward"] == pytest.approx(2 * iterations)
    assert launches["bottom_mlp", "backward"] == pytest.approx(2 * iterations)
    inclusive = run.value_table("gpu_time_ms", "inclusive")
    assert inclusive[0] == pytest.approx(iterations * 85 / 1e3)


def test_without_a_trace_what_only_order_tells_is_unknown(tmp_path: Path) -> None:
    run = recorded(tmp_path / "made.d", 9, trace=False)
    found = by_part(run, "gpu_time_ms")
    assert found["bottom_mlp", "forward"] == pytest.approx(9 * 4 / 1e3)  # by its line
    assert found["top_mlp", "forward"] == pytest.approx(9 * 9 / 1e3)
    assert found["interaction", "backward"] == pytest.approx(9 * 7 / 1e3)  # by its node
    assert ("top_mlp", "backward") not in found and ("bottom_mlp", "backward") not in found
    assert run.iterations.empty
