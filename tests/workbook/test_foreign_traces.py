"""Traces of programs that are not ours: parts, steps and kernels, of real and of small ones."""

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import gpu_trace
import numpy as np
import pandas as pd
import pytest
import torch
from gpu_trace import call, kernel, mark, operator
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.parts import COMPONENTS, PHASES
from dlrm_workbook.analysis.attribution import attribute, time_unit, unattributed
from dlrm_workbook.analysis.gpu import kernel_table
from dlrm_workbook.recordings.foreign import PartNames
from dlrm_workbook.recordings.profile import Profile, of_streams
from dlrm_workbook.recordings.torch import steps
from dlrm_workbook.recordings.torch.chrome_trace import STEP_PREFIX, Events, read_events
from dlrm_workbook.recordings.torch.trace import profile_of, read_trace

TRACES = Path(__file__).parents[3] / "shared" / "recordings" / "traces"

META = "meta-dlrm-a100x8-rank3.json.gz"
GRAPHS = "torchrec-cuda-graphs-a100x16-rank0.json.gz"
RESNET = "resnet50-v100-2021.json.gz"
BERT = "bert-small-h100.json.gz"
V100 = "torchrec-dlrm-v100x8.tar.gz"


def events_of(name: str, rank: int = 0) -> Events:
    path = TRACES / name
    if not path.is_file():
        pytest.skip(f"{path} is not there: the real recordings lie beside the project")
    if not name.endswith(".tar.gz"):
        return read_events(path)
    with tarfile.open(path) as archive:
        (member,) = (m for m in archive.getmembers() if f"worker{rank}_" in m.name)
        file = archive.extractfile(member)
        assert file is not None
        return read_events(Path(member.name), io.BytesIO(file.read()), path.stat().st_size)


def device_ms(profile: Profile) -> pd.Series:
    """Device time by component and phase."""
    table = profile.contexts.assign(ms=profile.value_table("gpu_time_ms"))
    return table.groupby(["component", "phase"])["ms"].sum()


def covered(profile: Profile) -> float:
    times = device_ms(profile)
    return 1 - float(times.get("other", pd.Series([0.0])).sum() / times.sum())


@pytest.mark.parametrize(
    ("name", "rank"), [*((V100, rank) for rank in range(8)), (META, 0), (GRAPHS, 0)]
)
def test_device_time_of_real_dlrms_is_in_named_parts(name: str, rank: int) -> None:
    profile = profile_of(events_of(name, rank))
    assert covered(profile) > 0.98
    assert {"bottom_mlp", "embedding", "top_mlp"} <= set(device_ms(profile).index.levels[0])


def test_kernels_stand_under_the_part_that_their_names_fit() -> None:
    contexts = profile_of(events_of(META)).contexts
    kernels = contexts[contexts["kind"].isin(["kernel", "copy"])]

    def parts(pattern: str) -> set[tuple[str, str]]:
        found = kernels[kernels["name"].str.contains(pattern)]
        assert len(found)
        return set(zip(found["component"], found["phase"], strict=True))

    assert parts("AdamFunctor") == {("optimizer", "update")}
    assert parts("split_embedding_backward") == {("embedding", "backward")}
    assert parts("split_embedding_codegen_forward") == {("embedding", "forward")}
    assert parts("AllReduce") == {("communication", "backward")}
    # the metrics, which count as the loss, copy labels
    assert parts("Memcpy HtoD") <= {("transfer", "forward"), ("loss", "forward")}
    mlps = {(mlp, phase) for mlp in ("bottom_mlp", "top_mlp") for phase in ("forward", "backward")}
    assert parts(r"cutlass|sgemm") <= mlps and parts("layer_norm") <= mlps


def test_meta_dlrm_by_hand() -> None:
    """Sums over raw kernels launched within the ranges, checked once by hand."""
    events = events_of(META)
    times = device_ms(profile_of(events))
    device = events.device.assign(ms=(events.device["end"] - events.device["start"]) / 1e6)
    nccl = device[device["name"].str.startswith("nccl")]["ms"].sum()
    assert nccl == pytest.approx(163.535, abs=1e-3)
    assert times["communication"].sum() > nccl
    adam = device[device["name"].str.contains("AdamFunctor")]["ms"].sum()
    assert times["optimizer", "update"] == pytest.approx(adam)
    runtime = events.host[events.host["kind"].eq("runtime")].set_index("correlation")
    launched = runtime["start"].reindex(device["correlation"]).to_numpy()
    line = runtime["line"].reindex(device["correlation"]).to_numpy()
    over = events.host[events.host["name"] == "## forward:over_arch ##"]
    inside = np.zeros(len(device), dtype=bool)
    for start, end in zip(over["start"], over["end"], strict=True):
        inside |= (launched >= start) & (launched < end) & (line == over["line"].iloc[0])
    assert times["top_mlp", "forward"] == pytest.approx(device["ms"][inside].sum())


@pytest.mark.parametrize("name", [RESNET, BERT])
def test_other_models_have_no_parts_of_a_dlrm(name: str) -> None:
    components = set(profile_of(events_of(name)).contexts["component"])
    assert not components & {"bottom_mlp", "interaction", "top_mlp"}


def test_what_is_left_is_listed_with_its_share() -> None:
    profile = profile_of(events_of(RESNET))
    table = unattributed(profile)
    assert table["device_ms"].sum() == pytest.approx(device_ms(profile)["other"].sum())
    assert table["share"].sum() == pytest.approx(1 - covered(profile))
    assert table["share"].is_monotonic_decreasing and table["kind"][0] == "kernel"


def test_overlapped_time_is_computations() -> None:
    """Launched by rank 3 of a DLRM: its bottom MLP runs while an all-to-all does."""
    profile = profile_of(events_of(META))
    times = attribute(profile).set_index(["component", "phase", "where"])["time_ms"]
    for phase in ("forward", "backward"):
        alone = device_ms(profile)["bottom_mlp", phase] / 6
        assert times["bottom_mlp", phase, "device"] == pytest.approx(alone, rel=0.01)
        assert (
            times["communication", phase, "device"] < device_ms(profile)["communication", phase] / 6
        )


def test_launches_of_graphs_without_kernels_are_named() -> None:
    profile = profile_of(events_of(GRAPHS))
    (said,) = (text for text in profile.meta["cautions"] if "CUDA graphs" in text)
    assert said.startswith("70 launches of CUDA graphs") and "upper bound" in said
    assert any("Compiled functions" in text for text in profile.meta["cautions"])
    assert any("same name, grid and block" in text for text in profile.meta["cautions"])
    roots = profile.contexts["name"].eq("launched before the trace")
    before = profile.value_table("gpu_time_ms", "inclusive")[roots]
    assert before.sum() == pytest.approx(59.526, abs=1e-3)


def test_properties_of_kernels_are_means_over_launches() -> None:
    table = kernel_table(profile_of(events_of(BERT)))
    flash = table[table["kernel"].str.contains("flash_fwd_kernel")].iloc[0]
    # its raw events: grid [2, 1, 8], block [128, 1, 1], 255 registers, 49152 B, occupancy 1 %
    assert flash["threads_per_block"] == 128 and flash["blocks"] == 16
    assert flash["registers"] == 255 and flash["shared_memory_bytes"] == 49152
    assert flash["occupancy_percent"] == 1


# ---- small traces, made by hand ---------------------------------------------------------


def dlrm_step(at: float, number: int, annotated: bool = True) -> list[dict[str, Any]]:
    """A step of 100 us without a name of any part: two MLPs, a lookup, an interaction, a loss.

    Every operator launches one kernel of 1 us; autograd runs on a thread of its own.
    """
    order = ["aten::linear", "aten::embedding_bag", "aten::cat", "aten::bmm", "aten::index"]
    order += ["aten::linear", "aten::binary_cross_entropy"]
    nodes = ["AddmmBackward0", "EmbeddingBagBackward0", "CatBackward0", "BmmBackward0"]
    nodes += ["IndexBackward0", "AddmmBackward0", "BinaryCrossEntropyBackward0"]
    shape = {"grid": [4, 2, 1], "block": [64, 1, 1], "registers per thread": 32}
    events = []
    if annotated:
        events.append(mark(f"iteration {number}", at, at + 99))
    calls = [(name, 10, 5.0 * place, 0) for place, name in enumerate(order)]
    calls += [
        (f"autograd::engine::evaluate_function: {name}", 11, 40 + 5.0 * place, 1)
        for place, name in enumerate(reversed(nodes))
    ]
    calls += [("autograd::engine::evaluate_function: AccumulateGrad", 11, 76.0, -1)]
    calls += [("Optimizer.step#SGD.step", 10, 85.0, -1)]
    for place, (name, thread, begin, side) in enumerate(calls):
        begun, identity = at + begin + 1, 100 * number + place
        sequence = {0: place, 1: len(order) - 1 - (place - len(order))}.get(side, -1)
        numbers = {} if side < 0 else {"Sequence number": 100 * number + sequence}
        category = "user_annotation" if name.startswith("Optimizer") else "cpu_op"
        events += [
            gpu_trace.span(
                category, name, begun, begun + 4, tid=thread, **numbers, **{"Fwd thread id": side}
            ),
            call("cudaLaunchKernel", begun + 1, begun + 2, identity) | {"tid": thread},
            kernel(f"kernel of {name}", begun + 3, begun + 4, identity, **shape),
        ]
    return events


def without(events: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    for event in events:
        event.get("args", {}).pop(key, None)
    return events


STEP_US = {
    ("bottom_mlp", "forward"): 1,
    ("bottom_mlp", "backward"): 2,  # with the gradient's accumulation
    ("embedding", "forward"): 1,
    ("embedding", "backward"): 1,
    ("interaction", "forward"): 3,  # with what is joined before it and picked after it
    ("interaction", "backward"): 3,
    ("top_mlp", "forward"): 1,
    ("top_mlp", "backward"): 1,
    ("loss", "forward"): 1,
    ("loss", "backward"): 1,
    ("optimizer", "update"): 1,
}
"""Device time of each part in :func:`dlrm_step`."""


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("annotated", [True, False])
def test_parts_follow_from_order_where_nothing_names_them(tmp_path, numbered, annotated) -> None:
    events = [event for n in range(8) for event in dlrm_step(100.0 * n, n, annotated)]
    profile = gpu_trace.read(tmp_path, events if numbered else without(events, "Sequence number"))
    assert len(profile.iterations) == 8
    assert profile.meta["iterations_from"].startswith("the r")
    times = device_ms(profile) / 8 * 1e3
    assert times[times > 0].round(6).to_dict() == STEP_US


def test_flows_join_nodes_to_their_operators_where_numbers_do_not(tmp_path: Path) -> None:
    events = []
    for number in range(8):
        step = dlrm_step(100.0 * number, number)
        called = {}
        for event in step:
            sequence = event.get("args", {}).get("Sequence number")
            if sequence is not None:
                side = "f" if "autograd" in event["name"] else "s"
                flow = {"ph": side, "id": sequence, "cat": "fwdbwd", "name": "fwdbwd", "bp": "e"}
                called[sequence, side] = flow | {name: event[name] for name in ("pid", "tid", "ts")}
        events += [*step, *called.values()]
    for event in events:  # so that order tells nothing
        if event["ph"] == "X" and "Backward0" in str(event["name"]) and event["cat"] == "cpu_op":
            event["name"] = "autograd::engine::evaluate_function: MineBackward0"
    profile = gpu_trace.read(tmp_path, without(events, "Sequence number"))
    times = device_ms(profile) / 8 * 1e3
    assert times[times > 0].round(6).to_dict() == STEP_US


def test_a_users_map_comes_first(tmp_path: Path) -> None:
    profile = gpu_trace.read(tmp_path, dlrm_step(0, 0), {"aten::linear": "embedding"})
    assert "bottom_mlp" not in set(profile.contexts["component"])


def test_properties_of_kernels_are_named_as_hpctoolkits(tmp_path: Path) -> None:
    table = kernel_table(gpu_trace.read(tmp_path, dlrm_step(0, 0)))
    assert set(table["blocks"]) == {8} and set(table["threads_per_block"]) == {64}
    assert set(table["registers"]) == {32} and table["shared_memory_bytes"].isna().all()


class Net(torch.nn.Module):
    """A DLRM as people write it: nothing in it is named as our parts are."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(
            [torch.nn.EmbeddingBag(100, 8, mode="sum", sparse=True) for _ in range(3)]
        )
        self.first = torch.nn.Sequential(torch.nn.Linear(13, 8), torch.nn.ReLU())
        self.second = torch.nn.Sequential(torch.nn.Linear(24, 1), torch.nn.Sigmoid())

    def forward(self, dense: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x = self.first(dense)
        rows = [table(index) for table in self.tables]
        joined = torch.stack([x, *rows], 1)
        products = torch.bmm(joined, joined.transpose(1, 2)).flatten(1)
        return self.second(torch.cat([x, products], 1))


def recorded(tmp_path: Path, steps: int, **options: bool) -> Profile:
    torch.manual_seed(0)
    net, batch = Net(), (torch.rand(16, 13), torch.randint(0, 100, (16, 5)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], **options
    ) as profiler:
        for _ in range(steps):
            loss = torch.nn.functional.binary_cross_entropy(net(*batch), torch.ones(16, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    return read_trace(path)


@pytest.mark.parametrize("options", [{}, {"with_stack": True}, {"record_shapes": True}])
def test_a_program_that_names_nothing(tmp_path: Path, options: dict[str, bool]) -> None:
    profile = recorded(tmp_path, 6, **options)
    contexts = profile.contexts.assign(calls=profile.value_table("calls"))
    operators = contexts[contexts["kind"].eq("operator")]
    parts = operators.groupby(["name", "component", "phase"])["calls"].sum()
    for name, component, phase, calls in (
        ("aten::_embedding_bag", "embedding", "forward", 18),
        ("aten::stack", "interaction", "forward", 6),
        ("aten::bmm", "interaction", "forward", 6),
        ("aten::bmm", "interaction", "backward", 12),
        ("aten::addmm", "bottom_mlp", "forward", 6),
        ("aten::addmm", "top_mlp", "forward", 6),
        ("aten::mm", "bottom_mlp", "backward", 6),  # its input needs no gradient
        ("aten::mm", "top_mlp", "backward", 12),
        ("aten::sigmoid", "top_mlp", "forward", 6),
        ("aten::binary_cross_entropy", "loss", "forward", 6),
        ("aten::binary_cross_entropy_backward", "loss", "backward", 6),
    ):
        assert parts.get((name, component, phase)) == calls, (name, component, phase)
    nodes = operators["name"].str.contains("Backward0")
    assert set(operators["phase"][nodes]) == {"backward"}
    assert "other" not in set(operators["component"][nodes])
    assert len(profile.iterations) == 6


NAMES = ("aten::linear", "aten::bmm", "aten::embedding_bag", "aten::add", "CompiledFunction")
NAMES += ("autograd::engine::evaluate_function: AddmmBackward0", "aten::mse_loss")
NAMES += ("autograd::engine::evaluate_function: AccumulateGrad", "## forward:over_arch ##")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.integers(0, 60),
            st.integers(0, 20),
            st.integers(10, 12),
            st.integers(-1, 6),
            st.integers(0, 12),
        ),
        min_size=1,
        max_size=25,
    )
)
def test_any_spans_keep_all_device_time(tmp_path_factory: Any, drawn: list[Any]) -> None:
    events = []
    for name, start, length, thread, sequence, correlation in drawn:
        numbers = {"Sequence number": sequence, "Fwd thread id": int("Backward" in name)}
        kind = "user_annotation" if name.startswith("#") else "cpu_op"
        events += [
            gpu_trace.span(kind, name, start, start + length, tid=thread, **numbers),
            call("cudaLaunchKernel", start, start + 1, correlation) | {"tid": thread},
            kernel(f"k{sequence}", start + 2, start + 5, correlation + sequence),
        ]
    profile = gpu_trace.read(tmp_path_factory.mktemp("drawn"), events)
    assert device_ms(profile).sum() == pytest.approx(3e-3 * len(drawn))
    assert set(profile.contexts["component"]) <= set(COMPONENTS)
    assert set(profile.contexts["phase"]) <= {"", *PHASES}


# ---- steps ------------------------------------------------------------------------------


def unmarked(name: str) -> Events:
    events = events_of(name)
    marks = events.host["name"].str.startswith(STEP_PREFIX)
    events.host = events.host[~marks].reset_index(drop=True)
    return events


@pytest.mark.parametrize("name", [META, RESNET, GRAPHS])
def test_steps_without_their_marks_are_found_again(name: str) -> None:
    events = events_of(name)
    first, second = profile_of(events), profile_of(unmarked(name))
    assert second.meta["iterations_from"] == "the repeating sequence of launches"
    assert second.meta["main_thread"] == 0
    assert second.threads["name"][0] == first.threads["name"][0]
    assert covered(second) == pytest.approx(covered(first), abs=0.01)
    pd.testing.assert_series_equal(device_ms(second), device_ms(first), rtol=0.02, atol=1.0)
    launches = events.host[events.host["correlation"].isin(events.device["correlation"])]
    at = np.sort(launches["start"].to_numpy())
    begins = [profile.iterations["start_ns"].to_numpy() for profile in (first, second)]
    assert len(begins[0]) == len(begins[1])
    between = np.searchsorted(at, begins[1]) - np.searchsorted(at, begins[0])
    assert (np.abs(between) <= 1).all()


def test_the_loop_of_an_optimizer_is_no_iteration() -> None:
    assert unmarked(V100).host["name"].str.startswith("Optimizer.step").any()
    profile = profile_of(unmarked(V100))
    assert profile.iterations.empty
    whole = attribute(profile)
    assert time_unit(profile) == "ms in the recording's GPU part"
    work = of_streams(profile)
    span = work["end_ns"].max() - work["start_ns"].min()
    assert whole["time_ms"].sum() == pytest.approx(span / 1e6)
    assert whole.loc[whole["where"] == "device", "time_ms"].sum() == pytest.approx(6.590)  # busy


@pytest.mark.parametrize("around", ["module", "graph", "nothing", "batches"])
def test_equal_layers_of_one_forward_pass_are_no_iterations(tmp_path: Path, around: str) -> None:
    """Layers repeat without a pause of the host; batches do so with one."""
    whole = {
        "module": gpu_trace.span("python_function", "nn.Module: Transformer_0", 90, 700),
        "graph": call("cudaGraphLaunch", 90, 95, 1),
        "nothing": operator("aten::zeros", 90, 95),
        "batches": operator("aten::zeros", 90, 95),
    }
    events = [whole[around]]
    for place, name in enumerate(["norm", "attention", "gemm", "relu"] * 12):
        at, launch = 100 + 10 * place, 1 if around == "graph" else 2 + place
        at += 30 * (place // 4) * (around == "batches")
        if around != "graph":
            events.append(call("cudaLaunchKernel", at, at + 2, launch))
        events.append(kernel(name, at + 5, at + 9, launch))
    profile = gpu_trace.read(tmp_path, events)
    assert len(profile.iterations) == (12 if around == "batches" else 0)
    assert kernel_table(profile)["launches"].sum() == 48


def test_a_range_within_which_little_is_launched_marks_no_iteration() -> None:
    host = pd.DataFrame(
        [(10 * n, 10 * n + 3, "lookup 1", "annotation", -1, 0) for n in range(9)]
        + [(10 * n + 5, 10 * n + 6, "aten::mm", "operator", -1, 0) for n in range(9)],
        columns=["start", "end", "name", "kind", "parent", "profile"],
    )
    assert steps._annotated(host, np.ones(9), np.arange(9, 18), PartNames()) is None


def test_nothing_that_repeats_is_the_whole_recording(tmp_path: Path) -> None:
    events = [e for e in gpu_trace.events() if not str(e["name"]).startswith("dlrm::")]
    profile = gpu_trace.read(tmp_path, events)
    assert profile.iterations.empty and profile.meta["iterations_from"] == ""


def test_a_gzipped_trace_is_the_same(tmp_path: Path) -> None:
    path = gpu_trace.write(tmp_path / "trace.json", dlrm_step(0, 0))
    packed = tmp_path / "trace.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    pd.testing.assert_frame_equal(read_trace(path).contexts, read_trace(packed).contexts)
