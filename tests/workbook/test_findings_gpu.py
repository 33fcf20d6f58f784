"""Rules of the GPU on traces made by hand: synchronisation, copies, launches, tensor cores."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_database
import gpu_trace
import pandas as pd
import pytest
from finding_profiles import found, listed, made, ordered

from dlrm_workbook.analysis.attribution import attribute
from dlrm_workbook.analysis.findings import findings, gpu_idle
from dlrm_workbook.analysis.findings.evidence import Evidence
from dlrm_workbook.analysis.findings.finding import LIMITS, Finding
from dlrm_workbook.analysis.idleness import overlaps
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.trace import read_trace
from dlrm_workbook.show.profile import findings_text

STEP_US = 1000
STEPS = 4
STEP_OF_OTHERS = "ProfilerStep#{}"


class Trace:
    """Iterations of 1000 us on the host; work is put on one stream as it is launched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 10, "args": {"name": "python"}}
        ]
        self.correlation = 100

    def host(self, category: str, name: str, start: float, end: float, **args: Any) -> None:
        self.events.append(gpu_trace.span(category, name, start, end, **args))

    def launch(self, at: float, name: str, start: float, end: float, **args: Any) -> None:
        """A call of 2 us on the host and what it runs on the device."""
        self.correlation += 1
        copy = name.startswith("Memcpy")
        call = "cudaMemcpyAsync" if copy else "cudaLaunchKernel"
        self.host("cuda_runtime", call, at, at + 2, correlation=self.correlation)
        category = "gpu_memcpy" if copy else "kernel"
        stream = 9 if copy else 7
        self.events.append(
            gpu_trace.on_gpu(
                category, name, start, end, stream, correlation=self.correlation, **args
            )
        )

    def step(self, number: int, name: str = "dlrm::iteration") -> float:
        """Begin an iteration whose host is in the top MLP nearly throughout."""
        begin = float(number * STEP_US)
        self.host("user_annotation", name.format(number), begin, begin + STEP_US - 5)
        return begin

    def steps(self, name: str = "dlrm::iteration") -> Iterator[float]:
        """Begin one iteration after the other."""
        for number in range(STEPS):
            yield self.step(number, name)

    def part(self, name: str, start: float, end: float) -> None:
        self.host("user_annotation", f"dlrm::{name}", start, end)

    def read(self, **meta: Any) -> Profile:
        profile = read_trace(gpu_trace.write(self.path / "trace.json", self.events))
        profile.meta |= {"device": "cuda"} | meta
        return profile


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return Trace(tmp_path)


def busy(trace: Trace, kernel: str = "sm80_xmma_gemm_bf16_tensorop", gap_us: float = 5) -> None:
    """A step that keeps the GPU at work with long kernels."""
    for begin in trace.steps():
        trace.part("top_mlp::forward", begin + 1, begin + 900)
        for i in range(4):
            at = begin + 5 + 10 * i
            trace.launch(at, kernel, begin + 10 + 245 * i, begin + 255 - gap_us + 245 * i)


def test_a_busy_gpu_has_no_finding(trace: Trace) -> None:
    busy(trace)
    assert listed(trace.read()) == []


def growing(trace: Trace, lengths: list[list[float]]) -> None:
    """Steps of two kernels of these lengths (us, one list a step), both launched at its begin."""
    begin = 0.0
    for first, second in lengths:
        end = begin + 20 + first + second
        trace.host("user_annotation", "dlrm::iteration", begin, end)
        trace.launch(begin + 2, "sm90_bf16_gemm", begin + 6, begin + 6 + first)
        trace.launch(begin + 4, "sm90_bf16_conv", begin + 7 + first, begin + 7 + first + second)
        begin = end


SLOW, FAST = [500.0, 460.0], [250.0, 230.0]


def test_a_gpu_that_becomes_slower_is_named_with_the_iteration_and_the_factor(trace) -> None:
    growing(trace, [FAST, FAST, FAST, SLOW, SLOW, SLOW])
    first = listed(trace.read())[0]
    assert first.id == "slower_gpu" and "from iteration 4 of 6 on" in first.title
    assert "2.0x slower" in first.title
    # three of six steps take 980 us and not 500
    assert first.share_of_step == pytest.approx(1440 / 4440, abs=0.01)
    assert ordered(first.predicted_speedup)


@pytest.mark.parametrize(
    "lengths",
    [
        [FAST, FAST, FAST, [250.0, 600.0], [250.0, 600.0], [250.0, 600.0]],  # one kernel's data
        [SLOW, SLOW, SLOW, FAST, FAST, FAST],  # a beginning
        [FAST, SLOW, FAST, SLOW, FAST, SLOW],  # now and then
        [FAST, FAST, FAST, FAST, FAST, SLOW],  # one straggler
        [FAST] * 6,
    ],
)
def test_other_changes_are_no_slower_gpu(trace: Trace, lengths: list[list[float]]) -> None:
    growing(trace, lengths)
    assert "slower_gpu" not in found(trace.read())


def test_a_program_that_becomes_slower_is_named_with_the_part_that_grew(trace: Trace) -> None:
    begin = 0.0
    for host_us in (100, 100, 100, 600, 600, 600):
        trace.host("user_annotation", "dlrm::iteration", begin, begin + 400 + host_us)
        trace.part("data::forward", begin + 1, begin + host_us)
        trace.launch(begin + host_us + 2, "gemm_bf16", begin + host_us + 6, begin + host_us + 380)
        begin += 400 + host_us
    later = found(trace.read())["slower_later"]
    assert later.component == "data" and "from iteration 4 of 6 on" in later.title
    assert later.share_of_step == pytest.approx(1500 / 4500, abs=0.01)
    assert "slower_gpu" not in found(trace.read())


def in_slices(trace: Trace, launch_ahead: bool) -> None:
    """A GPU that runs two kernels in 100 us and then does nothing for 400 us, again and again."""
    for begin in trace.steps():
        trace.part("top_mlp::forward", begin + 1, begin + 900)
        for slice_ in range(2):
            start = begin + 10 + 500 * slice_
            at = begin + 5 + 5 * slice_ if launch_ahead else start - 5
            for i in range(2):
                kernel = start + 50 * i, start + 49 + 51 * i
                trace.launch(at + 2 * i, "sm90_bf16_gemm", *kernel)
        trace.host("cuda_runtime", "cudaStreamSynchronize", begin + 700, begin + 990)


def test_idle_time_with_work_in_the_queue_is_not_the_hosts(trace: Trace) -> None:
    in_slices(trace, launch_ahead=True)
    first = listed(trace.read())[0]
    assert first.id == "gpu_taken"
    # 400 us before a step's third kernel, which was launched 500 us before it began
    assert first.share_of_step == pytest.approx(400 / 995, abs=0.02)
    assert "400 µs (median)" in first.evidence or "0.400 ms (median)" in first.evidence
    assert "where the GPU is free, work begins 5 µs after its launch" in first.evidence


def test_gaps_after_all_that_waits_are_work_that_is_not_recorded(trace: Trace) -> None:
    """Of the kernels of a busy GPU only some are recorded: nothing that waits begins soon."""
    for begin in trace.steps():
        trace.part("top_mlp::forward", begin + 1, begin + 900)
        for i, start in enumerate([25, 105, 260, 300, 520, 600, 790, 860]):
            kernel = begin + start, begin + start + 10 + i
            trace.launch(begin + 5 + 2 * i, "sm90_bf16_gemm", *kernel)
    rules = found(trace.read())
    assert "gpu_taken" not in rules
    idle = rules["gpu_idle"]
    assert idle.title == "The GPU is idle 89% of the time, most while launched work waits"
    assert "for work not recorded" in idle.evidence and "holds all work" in idle.advice


@pytest.mark.parametrize("started", [600.0, 200.0])
def test_a_gap_of_few_iterations_is_not_one_in_each(trace: Trace, started: float) -> None:
    for number in range(STEPS):
        begin = 1000.0 * number
        trace.host("user_annotation", f"ProfilerStep#{number}", begin, begin + 995)
        trace.host("cpu_op", "aten::sort", begin + 100, begin + 595)
        if started > 500 or number % 2:
            trace.launch(begin + 5, "sm90_bf16_gemm", begin + 10, begin + 99)
            trace.launch(begin + started, "sm90_bf16_gemm", begin + 600, begin + 700)
    said = found(trace.read())["gpu_idle"]
    assert ("are one gap in each iteration" in said.evidence) == (started > 500)


@pytest.mark.parametrize("before", [True, False])
def test_work_behind_a_function_of_the_host_is_no_other_process(trace: Trace, before: bool) -> None:
    in_slices(trace, launch_ahead=True)
    for number in range(STEPS):
        # the step's kernels are launched at 5 and 7, 10 and 12 us
        at = number * STEP_US + (9.1 if before else 15.0)
        trace.host("cuda_runtime", "cudaLaunchHostFunc", at, at + 0.8)
    rules = found(trace.read())
    assert ("host_functions" in rules, "gpu_taken" in rules) == (before, not before)
    if before:
        said = rules["host_functions"]
        assert "functions of the host" in said.title and "cudaLaunchHostFunc" in said.evidence
        assert said.share_of_step == pytest.approx(400 / 995, abs=0.02)


@pytest.mark.parametrize(
    ("name", "in_call"),
    [
        ("Activity Buffer Request", True),
        ("Activity Buffer Request", False),
        ("Lazy Function Loading", True),
    ],
)
def test_time_that_the_profiler_takes_for_itself_is_named_as_its_own(trace, name, in_call) -> None:
    for number in range(STEPS):
        begin = trace.step(number)
        trace.launch(begin + 5, "sm90_bf16_gemm", begin + 10, begin + 500)
        called = (begin + 505, begin + 950) if in_call else (begin + 505, begin + 506)
        trace.host("cuda_runtime", "cudaLaunchKernel", *called, correlation=900 + number)
        trace.events.append(gpu_trace.span("overhead", name, begin + 510, begin + 910, tid=999))
        trace.launch(begin + 955, "sm90_bf16_gemm", begin + 960, begin + 990)
    rules = found(trace.read())
    named = in_call and name == "Activity Buffer Request"
    assert ("profiler_overhead" in rules) == named
    if named:
        said = listed(trace.read())[0]
        assert said.id == "profiler_overhead" and f"{name} 0.400 ms" in said.evidence
        assert said.share_of_step == pytest.approx(400 / 995, abs=0.02)


@pytest.mark.parametrize("again", [False, True])
def test_memory_is_taken_once_or_again_and_again(trace: Trace, again: bool) -> None:
    """The first call of a library takes long; of an allocator many do."""
    for i in range(20):
        at = 100.0 * i + (2900 if i else 0)
        trace.launch(at, "sm90_bf16_gemm", at + 4, at + 10)
        trace.host("cuda_runtime", "cudaMalloc", at + 12, at + (60 if again or i else 2900))
        if not again and i:
            trace.events[-1]["dur"] = 5.0
    every = found(trace.read())
    assert ("allocation" in every) == again
    said = every["allocation" if again else "gpu_idle_otherwise"]
    assert "cudaMalloc" in said.title + said.evidence
    assert ("a pool (cudaMallocAsync)" in said.advice) == again
    assert ("record later iterations" in said.advice) != again
    assert ("First calls, which load or compile, take 62%" in said.evidence) != again


@pytest.mark.parametrize("followed", [True, False])
def test_a_wait_for_the_end_of_the_recording_holds_nothing_up(trace: Trace, followed: bool) -> None:
    for i in range(50):
        trace.launch(10.0 * i, "sm90_bf16_gemm", 10.0 * i + 5, 10.0 * i + 12)
    trace.launch(500, "sm90_bf16_gemm", 505, 900)
    trace.host("cuda_runtime", "cudaDeviceSynchronize", 503, 902)
    if followed:
        trace.launch(1000, "sm90_bf16_gemm", 1004, 1010)
    assert ("synchronisation" in found(trace.read())) == followed


def test_a_share_of_the_idle_time_is_not_all_of_it(trace: Trace) -> None:
    """30% of the step in a sort, 40% in memory calls, and the GPU idles in both."""
    for begin in trace.steps(STEP_OF_OTHERS):
        trace.launch(begin + 5, "sm90_bf16_gemm", begin + 10, begin + 270)
        trace.host("cpu_op", "aten::sort", begin + 275, begin + 575)
        trace.host("cuda_runtime", "cudaFree", begin + 580, begin + 980)
        trace.launch(begin + 985, "sm90_bf16_gemm", begin + 988, begin + 990)
    said = found(trace.read())["gpu_idle_otherwise"]
    assert said.title == "The GPU is idle 74% of the step, 30% while the host is in aten::sort"
    assert said.share_of_step == pytest.approx(0.33, abs=0.02)
    assert "of it have no finding of their own" in said.evidence


@pytest.mark.parametrize("place", ["CompiledFunction", "aten::sort"])
def test_one_operator_that_launches_late_is_one_cause(trace: Trace, place: str) -> None:
    """Its own body is long as well; another operator's body is another cause."""
    for begin in trace.steps(STEP_OF_OTHERS):
        trace.host("cpu_op", "CompiledFunction", begin + 2, begin + 655)
        for i in range(60):
            at = begin + 5 + 10.5 * i
            trace.launch(at, "elementwise_kernel", at + 3, at + 5)
        trace.host("cpu_op", place, begin + 660, begin + 960)
        trace.launch(begin + 970, "elementwise_kernel", begin + 973, begin + 975)
    rules = found(trace.read())
    assert ("gpu_idle_otherwise" in rules) == (place == "aten::sort")
    if place != "aten::sort":
        said = rules["launch_bound"]
        assert said.share_of_step == pytest.approx(0.876, abs=0.01) and "88%" in said.title
        assert "in 53% of the time the GPU waits in gaps" in said.evidence
        assert "in all, the host is longest in CompiledFunction 0." in said.evidence
        assert "fused" not in said.advice


def test_collectives_have_one_time(trace: Trace) -> None:
    """They run on two streams at once, so that their lengths add up to more."""
    for begin in trace.steps():
        for stream, start in ((7, 10), (9, 60)):
            trace.launch(begin + 2 + stream, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0, 1)
            trace.events[-1] |= {"tid": stream, "ts": gpu_trace.BASE_US + begin + start, "dur": 600}
            trace.events[-1]["args"]["stream"] = stream
        trace.launch(begin + 30, "Memcpy HtoD (Pinned -> Device)", begin + 500, begin + 610)
    profile = trace.read()
    first, _ = found(profile)["exposed_communication"].evidence.split(". ", 1)
    assert first.startswith("Collectives run 0.650 ms per iteration, 0.540 ms of it while")
    assert first.endswith(" 0.650 ms"), first
    table = overlaps(profile).set_index("what")[["total_ms", "exposed_ms"]]
    assert table.loc["communication"].to_list() == pytest.approx([0.65, 0.54])
    assert table.loc["copies"].to_list() == pytest.approx([0.11, 0.0])


def test_one_collective_of_many_that_is_late_is_told_as_such(trace: Trace) -> None:
    for number in range(3):
        begin, at = trace.step(number), 5.0
        for call in range(4):
            end = at + (700 if (number, call) == (1, 2) else 10)
            trace.launch(begin + 2 + call, "ncclDevKernel_SendRecv", begin + at, begin + end)
            at = end + 20
    said = found(trace.read())["exposed_communication"].evidence
    assert (
        "Of 12 collectives the longest, 1, last up to 0.700 ms, others of their names 0.0100"
        in said
    )
    assert "The recording of one rank" not in said
    assert said.endswith("In one iteration, number 2 of 3, is 90% of it.")


@pytest.mark.parametrize("waits", [False, True])
def test_what_takes_long_the_first_time_only_is_told_as_loading(trace: Trace, waits: bool) -> None:
    trace.launch(0, "fill", 3, 5)
    for number in range(4):
        at, length = 100 + 20_000.0 * number, 15_000.0 if number == 0 else 30.0
        trace.host("cpu_op", "aten::mm", at, at + length)
        if waits and number == 0:
            trace.host("cuda_runtime", "cudaDeviceSynchronize", at + 1, at + length - 15)
        trace.launch(at + length - 10, "sm90_gemm", at + length, at + length + 50)
    first = next(each for each in listed(trace.read()) if each.id.startswith("gpu_idle"))
    assert ("First calls" in first.evidence) == (not waits)
    if not waits:
        assert "First calls, which load or compile, take 25% of that: aten::mm 15.0 ms" in (
            first.evidence
        )
        assert "first calls" not in first.title  # it is not most of the time


def test_a_recording_of_first_calls_is_advised_to_begin_later(trace: Trace) -> None:
    trace.launch(0, "fill", 3, 5)
    for at, length in ((100, 30_000.0), (31_000, 4000.0), (36_000, 30.0), (36_100, 20.0)):
        trace.host("cpu_op", "aten::mm", at, at + length + 500)
        trace.launch(at + 5, "sm90_gemm", at + length, at + length + 50)
        trace.events[-2] |= {"dur": length}  # the launch itself
    said = listed(trace.read())[0]
    assert said.title.endswith("of that in first calls, which load or compile")
    assert said.advice.startswith("Few calls take so long while libraries load")


def test_launches_that_all_take_long_load_nothing(trace: Trace) -> None:
    for at in range(0, 40_000, 4000):  # as where counters are read around each
        trace.launch(at, "sm90_gemm", at + 2500, at + 2600)
        trace.events[-2] |= {"dur": 2500.0}
    assert "irst calls" not in "".join(
        f"{one.title} {one.evidence}" for one in listed(trace.read())
    )


@pytest.mark.parametrize("name", ["copy(float*, int)", "at::native::copy_kernel<float>"])
def test_kernels_of_no_framework_are_not_judged_by_their_bare_names(trace, name) -> None:
    for begin in trace.steps("mine"):
        trace.launch(begin + 2, name, begin + 5, begin + 990)
    assert ("layout_copies" in found(trace.read())) == name.startswith("at::")


def test_one_launch_that_has_most_of_the_time_of_all_is_told(trace: Trace) -> None:
    for number, begin in enumerate(trace.steps(STEP_OF_OTHERS)):
        end = begin + (900 if number == 2 else 20)
        trace.launch(begin + 2, "ampere_sgemm_128x64_nn", begin + 10, end)
    said = found(trace.read())["tensor_cores_unused"].evidence
    assert "One launch of ampere sgemm 128x64 nn takes 0.890 ms of that, as a rule 0.0100" in said


def test_launches_of_different_lengths_have_no_mean(trace: Trace) -> None:
    for at, length in ((0, 40), (100, 9000)):
        trace.launch(at, "scan_of_mine", at + 5, at + 5 + length, grid=[1, 1, 1], block=[32, 1, 1])
    said = found(trace.read(devices=[{"sms": 100}]))["heavy_kernel"].evidence
    assert "in 2 launches of 0.0400 ms to 9.00 ms." in said


def test_pages_of_unified_memory_are_no_launches_and_the_reason_of_gaps(trace: Trace) -> None:
    trace.launch(0, "scan_of_mine", 3, 50)
    # those in the kernel are the kernel's
    for at in (*(10.0 + number for number in range(30)), *(60 + 100.0 * n for n in range(150))):
        trace.events.append(
            gpu_trace.on_gpu("gpu_memcpy", "Memcpy DtoH (unified memory)", at, at + 1, 9, bytes=9)
        )
    rules = found(trace.read())
    assert "launch_bound" not in rules
    said = rules["gpu_idle"]
    assert "Meanwhile 150 pieces of unified memory move" in said.evidence
    assert said.advice.startswith("Move the data ahead of who uses it (cudaMemPrefetchAsync")


def test_most_is_more_than_half() -> None:
    rows = pd.DataFrame(
        {"component": ["loss", "data", "other"], "phase": "forward", "ms": [3, 2, 0]}
    )
    assert gpu_idle._mostly_in(rows, "ms") == ", most in loss forward"
    assert gpu_idle._mostly_in(rows.assign(ms=[4, 3, 2]), "ms") == (
        ", the largest part in loss forward"
    )
    assert gpu_idle._mostly_in(rows.assign(ms=[0, 0, 1]), "ms") == ""


def test_what_the_host_is_in_before_the_first_operation_is_named(trace: Trace) -> None:
    trace.host("cpu_op", "aten::empty", 0, 1000)
    trace.host("cuda_runtime", "cudaFree", 20, 920)
    for i in range(20):
        trace.launch(1000.0 + 300 * i, "sm90_bf16_gemm", 1003.0 + 300 * i, 1290.0 + 300 * i)
    profile = trace.read()
    sentence = gpu_idle.left_out(Evidence(profile, attribute(profile)), 0.5)
    assert sentence == "The 1.00 ms before that are left out, 0.900 ms of it in cudaFree. "
    assert not gpu_idle.left_out(Evidence(profile, attribute(profile)), 2.0)


def test_idle_time_before_a_launch_is_no_other_process(trace: Trace) -> None:
    in_slices(trace, launch_ahead=False)
    assert "gpu_taken" not in found(trace.read())


def test_synchronising_calls_are_named_with_their_part(trace: Trace) -> None:
    for begin in trace.steps():
        trace.part("loss::forward", begin + 1, begin + 900)
        for i in range(3):
            at = begin + 10 + 290 * i
            trace.launch(at, "sm90_bf16_gemm", at + 5, at + 100)
            trace.host("cpu_op", "aten::item", at + 9, at + 125)
            trace.host("cpu_op", "aten::_local_scalar_dense", at + 10, at + 122)
            trace.host("cuda_runtime", "cudaStreamSynchronize", at + 12, at + 120)
    first = listed(trace.read())[0]
    assert (first.id, first.component) == ("synchronisation", "loss")
    assert "The host calls cudaStreamSynchronize 3 times per iteration" in first.evidence
    assert "aten::_local_scalar_dense" in first.evidence
    # the host waits 108 us in each call, so the step would be 324 of 995 us shorter without
    assert first.share_of_step == pytest.approx(324 / 995, abs=0.001)
    assert first.predicted_speedup["mid"] == pytest.approx(995 / 671, abs=0.01)
    assert ordered(first.predicted_speedup)


def test_indexing_by_a_mask_is_named_with_its_operator_and_line(trace: Trace) -> None:
    """A copy to the host's pageable memory returns when it has ended."""
    for at in trace.steps():
        trace.launch(at + 5, "sm90_bf16_gemm", at + 10, at + 700)
        trace.host("python_function", "masks.py(12): select", at + 20, at + 722)
        trace.host("cpu_op", "aten::index", at + 21, at + 720)
        trace.host("cpu_op", "aten::nonzero", at + 22, at + 715)
        trace.launch(at + 25, "Memcpy DtoH (Device -> Pageable)", at + 701, at + 703)
        trace.events[-2]["dur"] = 685.0
        trace.host("cuda_runtime", "cudaStreamSynchronize", at + 711, at + 713)
        trace.launch(at + 980, "sm90_bf16_gemm", at + 985, at + 990)
    first = listed(trace.read())[0]
    assert first.id == "synchronisation"  # two calls in one operator are one wait
    assert "once in each step, 0.687 ms in aten::nonzero at `select`" in first.title
    assert "| operator | aten::index | " in findings_text([first]).markdown
    # it waits for more than half of the step: all idle time could be hidden
    assert first.share_of_step == pytest.approx(0.30, abs=0.01)


def test_waits_for_long_copies_to_the_host_are_those_of_the_copies(trace: Trace) -> None:
    for at in trace.steps():
        trace.launch(at + 5, "sm90_bf16_gemm", at + 10, at + 300)
        trace.launch(at + 310, "Memcpy DtoH (Device -> Pageable)", at + 320, at + 700, bytes=4e6)
        trace.events[-2]["dur"] = 395.0  # it returns when the copy has ended
        trace.launch(at + 980, "sm90_bf16_gemm", at + 985, at + 990)
    first = listed(trace.read())[0]
    assert first.id == "pageable_copies" and "synchronisation" not in found(trace.read())
    # the copy, and the idle time of 20 before and 285 after it, and between the steps
    assert "The GPU idles 0.314 ms more" in first.evidence
    assert first.share_of_step == pytest.approx((380 + 314) / 995, abs=0.001)


@pytest.mark.parametrize("read", [False, True])
def test_a_gradient_that_no_node_takes(trace: Trace, read: bool) -> None:
    kernel = "void split_embedding_codegen_grad_indice_weights_kernel<float, float>(float const*)"
    lookup = "fbgemm::split_embedding_codegen_lookup_sgd_function"
    for at in trace.steps():
        shapes = [[0], [256], [5000], [9], [9], [5000]]
        trace.host("cpu_op", lookup, at + 5, at + 10, **{"Input Dims": shapes})
        for place, node in enumerate(["CppNode<SplitLookupFunction>", "IndexBackward0"]):
            dims = [[5000 if read and place else 4096]]
            start = at + 20 + 20 * place
            trace.host("cpu_op", node, start, start + 15, **{"Input Dims": dims})
            trace.launch(start + 1, ("gemm", kernel)[1 - place], start + 5, start + 15)
        trace.launch(at + 61, kernel, at + 65, at + 900)
    titles = [finding.title for finding in listed(trace.read()) if "unread" in finding.id]
    assert bool(titles) != read


def copied(trace: Trace, name: str, overlapped: bool) -> None:
    for begin in trace.steps():
        trace.part("transfer::forward", begin + 1, begin + 60)
        trace.part("top_mlp::forward", begin + 61, begin + 900)
        trace.launch(begin + 5, name, begin + 10, begin + 360, bytes=4_000_000)
        start = begin + 15 if overlapped else begin + 365
        trace.launch(begin + 70, "sm90_bf16_gemm", start, begin + 990)


@pytest.mark.parametrize(
    ("name", "overlapped", "id_"),
    [
        ("Memcpy HtoD (Pageable -> Device)", False, "pageable_copies"),
        ("Memcpy HtoD (Pinned -> Device)", False, "copies_not_overlapped"),
        ("Memcpy HtoD (Pinned -> Device)", True, None),
        ("Memcpy DtoD (Device -> Device)", False, None),
    ],
)
def test_copies(trace: Trace, name: str, overlapped: bool, id_: str | None) -> None:
    copied(trace, name, overlapped)
    parameters = {"data": {"loader": "synchronous", "place": "cpu"}}
    ids = [finding.id for finding in listed(trace.read(parameters=parameters))]
    copying = [name for name in ids if "copies" in name]
    assert copying == ([id_] if id_ else [])
    if id_:
        first = listed(trace.read(parameters=parameters))[0]
        assert first.id == id_ and first.component == "transfer"
        assert first.change == {"data.loader": "prefetch"}
        # the copy takes 350 us; the product that waits for it is launched 60 us after its start
        assert first.share_of_step == pytest.approx(0.29, abs=0.02)
        assert "4.00 MB per iteration, in 1 piece" in first.evidence


def test_launches_that_cannot_keep_up(trace: Trace) -> None:
    for begin in trace.steps():
        trace.part("top_mlp::forward", begin + 1, begin + 990)
        for i in range(90):
            at = begin + 5 + 10.5 * i
            trace.launch(at, "elementwise_kernel", at + 3, at + 5)
    first = listed(trace.read())[0]
    assert (first.id, first.limit) == ("launch_bound", "launches")
    assert "90 kernels per iteration of 2.0 µs" in first.evidence
    assert first.change == {"training.cuda_graphs": True, "training.embedding_backend": "fused"}
    assert first.component == "top_mlp"
    fused = {"training": {"embedding_backend": "fused"}}
    assert listed(trace.read(parameters=fused))[0].change == {"training.cuda_graphs": True}


@pytest.mark.parametrize(
    ("part", "outer", "inner", "work", "said"),
    [
        (
            *("embedding", "aten::embedding_bag", "aten::_embedding_bag", "embedding_bag_kernel"),
            "them by",
        ),
        ("transfer", "aten::to", "aten::copy_", "Memcpy HtoD (Pinned -> Device)", "them copies by"),
    ],
)
def test_the_operator_that_makes_most_launches_is_named(
    trace: Trace, part: str, outer: str, inner: str, work: str, said: str
) -> None:
    for begin in trace.steps():
        trace.part("top_mlp::forward", begin + 1, begin + 200)
        trace.launch(begin + 5, "sm90_bf16_gemm", begin + 10, begin + 200)
        trace.part(f"{part}::forward", begin + 210, begin + 990)
        for i in range(70):
            at = begin + 215 + 10.5 * i
            trace.host("cpu_op", outer, at - 1, at + 8)
            trace.host("cpu_op", inner, at - 0.5, at + 7)
            trace.launch(at, work, at + 3, at + (4 if part == "transfer" else 5), bytes=800)
    first = listed(trace.read())[0]
    assert (first.id, first.component) == ("launch_bound", part)
    assert first.title.endswith(f"launches, 99% of {said} {outer} in {part} forward")
    assert f"70 of them are launched by {outer}" in first.evidence


@pytest.mark.parametrize("marked", ["## evaluate ##", "Optimizer.step#SGD.step"])
def test_the_marked_range_that_makes_most_launches_is_named(trace: Trace, marked: str) -> None:
    for begin in trace.steps(STEP_OF_OTHERS):
        trace.launch(begin + 5, "sm90_bf16_gemm", begin + 10, begin + 200)
        trace.host("user_annotation", "Optimizer.step#SGD.step", begin + 210, begin + 992)
        trace.host("user_annotation", marked, begin + 212, begin + 990)
        for i in range(70):
            at = begin + 215 + 10.5 * i
            trace.host("cpu_op", ("aten::addmm", "aten::relu", "aten::cat")[i % 3], at - 1, at + 8)
            trace.launch(at, "elementwise_kernel", at + 3, at + 5)
    said = found(trace.read())["launch_bound"].title
    assert ("by the range '## evaluate ##' in optimizer" in said) == ("##" in marked)
    assert ("aten::addmm" in said) != ("##" in marked)


def test_a_range_with_much_of_the_step_is_named_whatever_its_kernels_are(trace: Trace) -> None:
    for begin in trace.steps(STEP_OF_OTHERS):
        trace.launch(begin + 5, "sm90_bf16_tensorop_gemm", begin + 10, begin + 400)
        trace.host("user_annotation", "## evaluate ##", begin + 402, begin + 900)
        for i in range(16):  # none of which is worth a finding of its own
            at = begin + 410 + 30 * i
            trace.host("cpu_op", f"aten::step_{i}", at - 1, at + 28)
            trace.launch(at, f"sm90_kind{i}", at + 3, at + 28)
    place = found(trace.read())["largest_place"]
    assert place.title == "## evaluate ## takes 50% of the step"
    assert "the GPU works 0.400 ms and is idle 0.0980 ms" in place.evidence
    assert "By range it is ## evaluate ##" in place.evidence


def test_one_call_goes_before_launches_that_take_more_in_all(trace: Trace) -> None:
    for begin in trace.steps(STEP_OF_OTHERS):
        for i in range(5):
            trace.host("cuda_runtime", "cudaMemGetInfo", begin + 190 * i + 5, begin + 190 * i + 95)
            for k in range(9):
                at = begin + 190 * i + 100 + 10 * k
                trace.host("cpu_op", f"aten::op_{k}", at - 1, at + 8)
                trace.launch(at, "sm90_norm", at + 3, at + 5)
    profile = trace.read()
    first, second, *_ = listed(profile)
    assert first.id == "gpu_idle_otherwise" and "cudaMemGetInfo" in first.title
    assert first.share_of_step == pytest.approx(5 * 90 / 995, abs=0.05)
    assert second.id == "launch_bound"


@pytest.mark.parametrize("sorted_in", [(3,), (), (0, 1, 2, 3, 4, 5, 6)])
def test_what_few_iterations_do_is_told_though_they_take_no_longer(trace, sorted_in) -> None:
    for number in range(7):
        begin = trace.step(number, STEP_OF_OTHERS)
        sort = 500.0 if number in sorted_in else 0.0
        trace.launch(begin + 5, "sm90_bf16_tensorop_gemm", begin + 10, begin + 990 - sort)
        if sort:
            trace.launch(begin + 8, "radix_sort", begin + 991 - sort, begin + 990)
    named = found(trace.read()).get("now_and_then")
    assert (named is not None) == (len(sorted_in) == 1)
    if named is not None:
        assert named.title.startswith("1 of 7 iterations does what the others do not: radix sort")
        assert "iterations 4 (counted" in named.evidence
        assert named.share_of_step == pytest.approx(0.5 / 7, abs=0.01)


def test_one_long_operator_between_short_launches_is_no_cost_of_launching(trace: Trace) -> None:
    for begin in trace.steps():
        trace.part("top_mlp::forward", begin + 1, begin + 990)
        for i in range(60):
            at = begin + 5 + 10.5 * i
            trace.launch(at, "elementwise_kernel", at + 3, at + 5)
        trace.host("cpu_op", "aten::sort", begin + 660, begin + 960)
        trace.launch(begin + 970, "elementwise_kernel", begin + 973, begin + 975)
    rules = found(trace.read())
    assert rules["launch_bound"].share_of_step == pytest.approx(60 * 8.5 / 995, abs=0.05)
    other = rules["gpu_idle_otherwise"]
    assert other.share_of_step > 0.3
    # all of its idle time, and what of the step the host spends there
    assert other.title == "The GPU is idle 88% of the step, 30% while the host is in aten::sort"


@pytest.mark.parametrize(
    ("waits", "marks"),  # traces of 2021 have ranges as operators
    [(True, "user_annotation"), (True, "cpu_op"), (False, "user_annotation")],
)
def test_an_exchange_on_another_thread_is_named_where_the_step_waits_for_it(
    trace: Trace, waits: bool, marks: str
) -> None:
    for begin in trace.steps(STEP_OF_OTHERS):
        trace.launch(begin + 5, "sm90_bf16_gemm", begin + 10, begin + 290)
        trace.host(marks, "Optimizer.step#SGD.step", begin + 300, begin + 990)
        if not waits:
            trace.host("cpu_op", "aten::sort", begin + 301, begin + 960)
        trace.host("user_annotation", "gloo:all_reduce", begin + 310, begin + 950)
        trace.events[-1]["tid"] = 44
        trace.launch(begin + 970, "sm90_bf16_gemm", begin + 975, begin + 990)
    said = listed(trace.read())[0]
    assert said.id.startswith("gpu_idle") and ("gloo:all_reduce" in said.title) == waits
    if waits:
        assert (said.component, said.limit) == ("communication", "network")
        assert "gloo:all_reduce takes 0.640 ms" in said.evidence


@pytest.mark.parametrize("length_us", [600, 150])
def test_the_operator_that_makes_the_batch_of_another_program_is_named(trace, length_us) -> None:
    for begin in trace.steps(STEP_OF_OTHERS):
        trace.host("user_annotation", "## load_batch ##", begin + 10, begin + 710)
        trace.host("cpu_op", "aten::randn", begin + 20, begin + 24 + length_us)
        trace.host("cpu_op", "aten::normal_", begin + 22, begin + 22 + length_us)
        trace.launch(begin + 720, "sm90_bf16_gemm", begin + 725, begin + 990)
    said = found(trace.read())["data_generation"]
    named = length_us > 350
    assert said.title.endswith(", most of it in aten::normal_" if named else "of each step")


def test_copies_of_a_batch_are_not_the_making_of_it(trace: Trace) -> None:
    for begin in trace.steps(STEP_OF_OTHERS):
        trace.host(
            "user_annotation", "enumerate(DataLoader)#_Iter.__next__", begin + 1, begin + 800
        )
        for i in range(70):
            at = begin + 60 + 10.5 * i
            trace.host("cpu_op", "aten::to", at - 1, at + 8)
            trace.launch(at, "Memcpy HtoD (Pinned -> Device)", at + 3, at + 4, bytes=800)
        trace.launch(begin + 805, "sm90_bf16_tensorop_gemm", begin + 810, begin + 990)
    first, *_ = listed(trace.read())
    assert first.id == "launch_bound" and "copies by aten::to" in first.title
    assert found(trace.read())["data_generation"].share_of_step < 0.3


def test_the_largest_kernels_of_another_program_are_listed(trace: Trace) -> None:
    for begin in trace.steps(STEP_OF_OTHERS):
        trace.host("cpu_op", "my::lookup", begin + 2, begin + 30)
        trace.launch(begin + 5, "sm90_bf16_tensorop_gemm", begin + 10, begin + 900)
        trace.launch(begin + 12, "scan_of_mine", begin + 901, begin + 991)
    said = found(trace.read())["largest_kernels"]
    assert said.title.startswith("2 kernels take 98% of the step")
    assert "scan of mine 0.0900 ms." in said.evidence and "my::lookup" in said.evidence
    assert "The GPU works 98% of the step: computing" in said.evidence


def test_products_among_the_largest_kernels_are_summed(trace: Trace) -> None:
    for begin in trace.steps(STEP_OF_OTHERS):
        for i, name in enumerate(("sm90_bf16_tensorop_gemm", "sm80_bf16_gemm", "scan_of_mine")):
            trace.launch(begin + 5 + i, name, begin + 10 + 300 * i, begin + 300 + 300 * i)
    said = found(trace.read())["largest_kernels"]
    assert said.title.startswith("Matrix products take 58% of the step: ")
    assert "sm80 bf16 gemm 0.290 ms, sm90 bf16 gemm 0.290 ms." in said.evidence
    assert "Beside them: scan of mine 0.290 ms." in said.evidence


def test_calls_that_wait_stand_before_the_launches_that_they_hold_up(trace: Trace) -> None:
    for begin in trace.steps():
        trace.part("top_mlp::forward", begin + 1, begin + 990)
        for i in range(40):
            at = begin + 5 + 24 * i
            trace.launch(at, "elementwise_kernel", at + 3, at + 5)
            trace.host("cuda_runtime", "cudaDeviceSynchronize", at + 6, at + 14)
    profile = trace.read()
    first, second = listed(profile)[:2]
    assert (first.id, second.id) == ("synchronisation", "launch_bound")
    assert first.share_of_step < second.share_of_step


@pytest.mark.parametrize("blocking", [True, False])
def test_launches_that_wait_for_their_kernels(trace: Trace, blocking: bool) -> None:
    for begin in trace.steps():
        trace.part("top_mlp::forward", begin + 1, begin + 900)
        for i in range(9):
            at = begin + 5 + 100 * i
            trace.correlation += 1
            to = {"correlation": trace.correlation}
            returned = at + 60 if blocking else at + 2
            trace.host("cuda_runtime", "cudaLaunchKernel", at, returned, **to)
            trace.events.append(gpu_trace.on_gpu("kernel", "sm90_gemm", at + 3, at + 55, 7, **to))
    rules = found(trace.read())
    assert ("blocking_launches" in rules) == blocking
    if blocking:
        said = rules["blocking_launches"]
        # the host waits 57 of each 100 us, and the GPU is idle in the other 48
        assert said.share_of_step == pytest.approx(0.532, abs=0.05)
        assert "CUDA_LAUNCH_BLOCKING" in said.advice
        assert "9 of 9 calls per iteration" in said.evidence


FUNCTORS = ("MulFunctor<float>", "CUDAFunctor_add<float>", "tanh_kernel_cuda", "DivFunctor<float>")


@pytest.mark.parametrize("kinds", [1, 4])
def test_pointwise_operators_are_named_together(trace: Trace, kinds: int) -> None:
    for begin in trace.steps():
        trace.part("top_mlp::forward", begin + 1, begin + 900)
        for i in range(12):
            at = begin + 5 + 20 * i
            trace.host("cpu_op", "aten::gelu_by_hand", at - 1, at + 8)
            functor = f"at::native::{FUNCTORS[i % kinds]}"
            name = f"void at::native::vectorized_elementwise_kernel<4, {functor}>(int, {functor})"
            trace.launch(at, name, begin + 10 + 80 * i, begin + 85 + 80 * i)
    rules = found(trace.read())
    assert ("pointwise_operators" in rules) == (kinds == 4)  # one kernel is a case for others
    if kinds == 4:
        assert rules["pointwise_operators"].share_of_step == pytest.approx(0.9, abs=0.02)
        assert "aten::gelu_by_hand" in rules["pointwise_operators"].evidence
        assert "in 12 launches of 4 kernels" in rules["pointwise_operators"].evidence


def test_copies_to_another_layout_are_named_by_their_operator(trace: Trace) -> None:
    name = (
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<"
        "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}> >(int)"
    )
    for begin in trace.steps():
        trace.part("interaction::forward", begin + 1, begin + 900)
        trace.launch(begin + 5, "sm90_bf16_tensorop_gemm", begin + 10, begin + 700)
        trace.host("cpu_op", "aten::contiguous", begin + 20, begin + 40)
        trace.host("cpu_op", "aten::clone", begin + 21, begin + 39)
        trace.launch(begin + 25, name, begin + 705, begin + 990)
    said = found(trace.read())["layout_copies"]
    assert said.title.endswith("most by aten::contiguous")
    assert (said.component, said.limit) == ("interaction", "memory bandwidth")
    assert said.share_of_step == pytest.approx(0.285, abs=0.01)


def test_products_without_tensor_cores(trace: Trace) -> None:
    busy(trace, kernel="ampere_sgemm_128x64_tn")
    (first,) = listed(trace.read())  # one rule names a kernel
    assert first.id == "tensor_cores_unused"
    assert first.change == {"training.precision": "bf16"}
    only_fp32 = {"training": {"precision": "fp32", "lowest_precision": "fp32"}}
    second = found(trace.read(parameters=only_fp32))["tensor_cores_unused"]
    assert second.change == {"training.tf32": True}
    allowed = {"training": {"precision": "fp32", "lowest_precision": "fp32", "tf32": True}}
    assert "tensor_cores_unused" not in found(trace.read(parameters=allowed))


def test_stalls_of_a_sampled_database(tmp_path: Path) -> None:
    profile = gpu_database.made(tmp_path / "d")
    profile.meta["device"] = "cuda"
    names = found(profile)
    stall = next(finding for name, finding in names.items() if name.startswith("stall_"))
    assert "warp samples" in stall.evidence and stall.limit in LIMITS
    (tmp_path / "e").mkdir()
    without = gpu_database.made(tmp_path / "e" / "d", stalls=False)
    without.meta["device"] = "cuda"
    assert not any(name.startswith("stall_") for name in found(without))


# ---- ranks ------------------------------------------------------------------------


def ranks(*busy_ms: float, communication: float = 0.0, **meta: Any) -> dict[str, Finding]:
    """A run of several ranks, each with some milliseconds of work."""
    one = made({("top_mlp", "forward", "aten::mm"): 1.0, ("communication", "forward", "c"): 1.0})
    values, threads = [], []
    for rank, ms in enumerate(busy_ms):
        threads.append(
            {"profile": rank, "kind": "cpu_thread", "name": "main", "rank": rank, "thread": rank}
        )
        for context, value in ((0, ms), (1, communication)):
            for scope in ("exclusive", "inclusive"):
                row = {"profile": rank, "context": context, "metric": "cpu_time_ms"}
                values.append(row | {"scope": scope, "value": value})
    profile = Profile.build(
        contexts=one.contexts,
        metrics=one.metrics,
        values=values,
        threads=threads,
        meta={"device": "cpu", **meta},
    )
    return found(profile)


def test_load_imbalance_over_ranks() -> None:
    uneven = ranks(100.0, 60.0, 60.0)["load_imbalance"]
    assert "Rank 0" in uneven.title and uneven.limit == "load imbalance"
    assert uneven.share_of_step == pytest.approx((100 - 220 / 3) / 100)
    assert uneven.title.endswith("x the mean work; the others wait for it")
    some = ranks(100.0, 60.0, 60.0, distributed={"world_size": 128})["load_imbalance"].title
    assert some.endswith("x the mean work of the 3 ranks of 128 that are recorded")
    assert "load_imbalance" not in ranks(100.0, 97.0, 99.0)
    assert "load_imbalance" not in ranks(100.0)


def test_a_rank_is_late_by_a_share_of_the_step(tmp_path: Path) -> None:
    """It works 60% more than the other, in 3% of a step that is mostly idle."""
    profiles = {}
    for rank, length in enumerate((100, 160)):
        (tmp_path / str(rank)).mkdir()
        trace = Trace(tmp_path / str(rank))
        for number in range(STEPS):
            begin = trace.step(number)
            trace.launch(begin + 5, "sm90_bf16_gemm", begin + 10, begin + 10 + length)
        profiles[rank] = trace.read()
    every = findings(profiles[1], attribute(profiles[1]), profiles)
    assert "load_imbalance" not in {finding.id for finding in every}
