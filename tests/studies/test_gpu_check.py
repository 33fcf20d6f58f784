"""``dlrm gpu-check``: its checks, stages and timings, on the CPU and on little input."""

import argparse
import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import run_python
from small_training import parameters

pytest.importorskip("triton", reason="triton is not installed: the GPU's kernels cannot run")

import dlrm_studies.gpu_check.paths as paths
from dlrm_core.base.errors import InputError
from dlrm_studies.gpu_check.command import (
    Stage,
    all_well,
    describe_row,
    gpu_check,
    run_stages,
    stages,
)
from dlrm_studies.gpu_check.paths import CHECKED_OPTIONS, check_of, checks, training_error
from dlrm_studies.gpu_check.timings import (
    VARIANTS,
    experiment,
    latency,
    nvidia_small,
    timed,
    timed_or_reason,
)
from dlrm_workbook.evidence.contestants import Run, compare

CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


tiny = partial(parameters, {"generator": "uniform"}, {"init": "torch"})


def test_every_check_passes_on_the_cpu_itself(monkeypatch):
    # torch.compile has a test of its own, and takes as long as all of these
    monkeypatch.delitem(CHECKED_OPTIONS, "torch.compile")
    monkeypatch.setattr(paths, "SIZE", 64)
    # on a CPU the fused dense part is other code, with tests of its own
    for name, (options, bound) in list(CHECKED_OPTIONS.items()):
        monkeypatch.setitem(CHECKED_OPTIONS, name, (options | {"dense_backend": "torch"}, bound))
    monkeypatch.setattr(paths, "GRAPHS", paths.GRAPHS | {"dense_backend": "torch"})
    monkeypatch.setitem(CHECKED_OPTIONS, "micro-batches", ({"micro_batch": 20}, 1e-4))
    found = list(checks(CPU, seed=4))
    assert len({row["name"] for row in found}) == len(found) >= 6 + len(CHECKED_OPTIONS) + 14
    for row in found:
        assert row["ok"], row


def test_the_checks_see_a_device_that_computes_something_else(monkeypatch):
    made = paths.small

    def wrong(device, seed, model, training, data=None):
        # the oracle asks without options
        return made(device, seed + bool(training), model, training, data)

    monkeypatch.setattr(paths, "small", wrong)
    monkeypatch.setattr(paths, "SIZE", 64)
    for options, bound in (CHECKED_OPTIONS["fused"], CHECKED_OPTIONS["bf16"]):
        assert not check_of("", training_error(CPU, 5, {}, options), bound)["ok"]


def test_the_kernel_checks_see_wrong_kernels(monkeypatch):
    right = paths.FusedGpu.backpropagate

    def twice(self, *arguments):
        right(self, *arguments)
        right(self, *arguments)

    monkeypatch.setattr(paths.FusedGpu, "backpropagate", twice)
    plain = paths.dot_interaction
    monkeypatch.setattr(paths, "dot_interaction", lambda *given: plain(*given) * 1.1)
    monkeypatch.setattr(paths.FusedGpu, "check", lambda self: None)
    assert paths.embedding_error(CPU, "sgd", True, 3) > 1e-4
    assert paths.fault_error(CPU, 3) == 1.0  # nobody is told
    assert paths.interaction_error(CPU, torch.float32, False, 3) > 1e-5


def test_no_number_is_no_agreement():
    assert not check_of("", float("nan"), 1.0)["ok"]
    assert check_of("", 0.0, 0.0)["ok"]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_budget_is_kept_and_everything_found_is_on_disk(tmp_path):
    clock, target, seen = Clock(), tmp_path / "check.json", []

    def rows(count, seconds):
        for number in range(count):
            clock.now += seconds
            yield check_of(f"row {number}", 0.0, 1.0)
            seen.append(json.loads(target.read_text()))

    given = [
        Stage("first", 0.0, lambda: rows(3, 10.0)),
        Stage("long", 50.0, lambda: rows(9, 30.0)),
        Stage("last", 5.0, lambda: rows(1, 1.0)),
    ]
    results = {}
    run_stages(given, results, target, budget_s=100.0, clock=clock)
    # a row is on disk before the next one is made
    assert [len(found["first"]) for found in seen[:3]] == [1, 2, 3]
    assert len(results["long"]) == 3 and "after 3 of its rows" in results["skipped"]["long"]
    assert results["skipped"]["last"].startswith("-20 s of 100 s were left, it takes at least 5 s")
    assert json.loads(target.read_text()) == results
    assert results["stage_s"] == {"first": 30.0, "long": 90.0}


def test_a_stage_that_fails_ends_alone_and_counts(tmp_path):
    def broken():
        yield check_of("one", 0.0, 1.0)
        raise RuntimeError("CUDA error: out of memory\nsecond line")

    fine = Stage("checks", 0.0, lambda: [check_of("a", 0.0, 1.0)])
    results = {}
    run_stages([Stage("bad", 0.0, broken), fine], results, tmp_path / "x.json", 100.0)
    assert results["failed"] == {"bad": "RuntimeError: CUDA error: out of memory"}
    assert len(results["bad"]) == 1 and len(results["checks"]) == 1
    assert not all_well(results)
    assert all_well(results | {"failed": {}})
    wrong = [
        {"failed": "no memory"},
        {"losses_agree": False},
        {"failures": {"facebook": "no tqdm"}},
    ]
    for rows in ([check_of("a", 2.0, 1.0)], [], *([row] for row in wrong)):
        assert not all_well(results | {"failed": {}, "checks": rows})


def test_stages_are_of_the_peer_only_where_one_is_given(tmp_path):
    names = [stage.name for stage in stages(CPU, 1, None, tmp_path / "x.json")]
    assert names[0] == "checks" and "peer" not in names
    peer = [stage.name for stage in stages(CPU, 1, tmp_path, tmp_path / "x.json")]
    assert set(peer) - set(names) == {"peer"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_check_says_so(tmp_path):
    asked = argparse.Namespace(json=str(tmp_path / "x.json"), argv=[], peer=None, budget=450.0)
    with pytest.raises(InputError, match="sees no GPU"):
        gpu_check(asked)
    assert not list(Path(tmp_path).iterdir())


@pytest.mark.parametrize("loader", ["synchronous", "prefetch"])
def test_steps_and_iterations_are_timed(loader):
    chosen = tiny()
    data = dataclasses.replace(chosen.data, loader=loader)
    row = timed(dataclasses.replace(chosen, data=data))
    assert 0 < row["step_ms_low"] <= row["step_ms"] <= row["step_ms_high"]
    assert row["samples_per_second"] == pytest.approx(16e3 / row["end_to_end_ms"])
    assert "ms per step" in describe_row({"variant": "x"} | row)


def test_a_variant_that_fails_says_why_and_ends_alone():
    row = timed_or_reason(tiny(device="cuda"))
    assert row["failed"].startswith("InputError: training.device is 'cuda'")
    assert "FAILED" in describe_row({"variant": "x"} | row)


def test_a_comparison_is_told_as_dlrm_bench_tells_it():
    def run(parameters, iterations, threads):
        return Run(2.0, 4.0, [0.5] * iterations)

    fast = tiny(precision="bf16")
    row = compare({"a": tiny(), "b": fast}, peer=None, rounds=1, iterations=2, threads=1, run=run)
    assert "b is 1.00x" in describe_row(row) and all_well({"checks": [row], "failed": {}})


def test_the_check_needs_only_what_a_gpu_node_has():
    blocked = "pandas plotly papermill hatchet nbformat nbconvert numba tqdm psutil pyarrow IPython"
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked.split()}));"
        "import dlrm_studies.gpu_check.command, dlrm_workbook.cli"
    )
    run_python(code)


def test_latency_is_measured_with_its_percentiles():
    row = latency(tiny(), steps=30, seconds=5.0)
    assert 0 < row["latency_ms"]["p50"] <= row["latency_ms"]["p99"]
    assert "p99" in describe_row({"model": "m", "variant": "v"} | row)


def test_shapes_and_variants_are_what_they_are_called():
    nvidia = nvidia_small()
    assert sum(nvidia.model.table_rows) == 32_709_138 and len(nvidia.model.table_rows) == 26
    assert nvidia.model.top_widths == (479, 1024, 1024, 512, 256, 1)
    for options in VARIANTS.values():
        for shape in (nvidia, experiment(CPU)):
            assert shape.with_training(**options).training.batch_size == shape.training.batch_size
    assert experiment(CPU).data.place == "device" and experiment(CPU).model.tables == 8
