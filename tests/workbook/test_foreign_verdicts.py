"""Verdicts on small recordings of other programs: nothing is claimed that they do not hold."""

import json
from pathlib import Path
from typing import Any

import gpu_trace
import pandas as pd
import pytest
from gpu_trace import call, kernel, launched, mark, operator
from test_nsight import KERNEL, MEMCPY, Export, gid

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis.attribution import UNRECORDED, unattributed
from dlrm_workbook.analysis.findings.evidence import listed_times
from dlrm_workbook.analysis.first_calls import first_calls
from dlrm_workbook.recordings.nsight import WAITING_CALLS
from dlrm_workbook.recordings.torch.chrome_trace import read_events
from dlrm_workbook.report import Report, explain

LAUNCH = "cudaLaunchKernel"


def report(folder: Path, events: list[Any]) -> Report:
    return explain(gpu_trace.write(folder / "trace.json", events))


def operators(steps: int = 10) -> list[Any]:
    """Steps of 1 ms, of which 700 µs are in one operator, 100 µs in another."""
    events = []
    for at in range(0, 1000 * steps, 1000):
        events.append(mark(f"ProfilerStep#{at}", at, at + 1000))
        events.append(operator("aten::mm", at + 100, at + 800))
        events.append(operator("aten::add", at + 850, at + 950))
    return events


def test_times_of_operators_are_those_of_the_recording(tmp_path: Path) -> None:
    told = report(tmp_path, operators())
    assert "aten::mm takes 70% of the step" in told.headline
    assert "aten::mm 0.700 ms" in told.ranked_findings[0].evidence
    # and nothing is said to be measured without a profiler
    assert told.quality["level"] == "green"
    assert "10 iterations under a profiler and none without it" in told.quality["sentence"]


def test_time_between_operators_is_in_none(tmp_path: Path) -> None:
    events = [event for event in operators() if event["cat"] == "cpu_op"]
    told = report(tmp_path, events)
    table = unattributed(told.profile).set_index("name")["share"]
    assert table.sum() == pytest.approx(1.0) and table[UNRECORDED] > 0.15
    assert "88% of the time in recorded calls and 7" in told.headline


def test_a_range_is_not_said_to_take_what_its_own_code_takes(tmp_path: Path) -> None:
    events = [mark("model_forward", 0, 1000)]
    calls = [operator("aten::mm", 600 + 15 * n, 615 + 15 * n) for n in range(26)]
    head = report(tmp_path, [*events, *calls]).headline
    assert "The code of model_forward itself, outside what it calls, takes 61%" in head


def test_time_in_a_range_without_operators_is_not_called_computing(tmp_path: Path) -> None:
    events = [mark("ProfilerStep#1", 0, 100_000)]
    events.append(mark("## forward:top_mlp ##", 0, 40_000))
    events.append(operator("aten::mm", 0, 40_000))
    events.append(mark("## backward ##", 40_000, 95_000))
    first = report(tmp_path, events).ranked_findings[0]
    assert "passes in ## backward ##, in no recorded operator" in first.title
    assert "whether the thread computes or waits" in first.evidence
    assert "on a core" not in first.evidence and "numpy" not in first.advice


def test_calls_that_wait_are_no_work(tmp_path: Path) -> None:
    export = Export(tmp_path / "waits.sqlite")
    tables = ("TARGET_INFO_SYSTEM_ENV", "OSRT_API")
    for start, end, name in ((0, 800, "poll"), (800, 900, "ioctl")):
        row = {"start": start * 1000, "end": end * 1000, "globalTid": gid(7, 8)}
        export.rows[tables[1]].append(row | {"nameId": export.text(name)})
    export.rows[tables[0]].append({"name": 1})
    told = explain(export.write())
    assert "Waiting in poll takes 89% of the recording" in told.headline
    assert "poll (waits)" in told.ranked_findings[0].evidence
    assert "hat a GPU did, and when it was idle, is not known" in told.quality["sentence"]


@pytest.mark.parametrize("name", ["pthread_cond_timedwait", "sem_wait", "nanosleep", "waitpid"])
def test_waiting_calls_have_names(name: str) -> None:
    assert WAITING_CALLS.fullmatch(name)
    assert not WAITING_CALLS.fullmatch("pthread_mutex_unlock")
    assert not WAITING_CALLS.fullmatch("read")


def test_waits_of_an_accelerators_streams_are_no_work(tmp_path: Path) -> None:
    events = [gpu_trace.span("mtia_runtime", "run", 0, 10, correlation=1)]
    for name, start, end in (("event_wait", 0, 800), ("merge", 800, 900), ("wait_merge", 0, 9)):
        events.append(gpu_trace.on_gpu("mtia_ccp_events", name, start, end, 7, correlation=1))
    # a kernel of a GPU may have any name
    events.append(kernel("wait", 900, 950, 1))
    found = read_events(gpu_trace.write(tmp_path / "trace.json", events))
    assert found.device["name"].tolist() == ["merge", "wait_merge", "wait"]
    assert found.marks[["name", "kind"]].to_numpy().tolist() == [["event_wait", "sync"]]


@pytest.mark.parametrize(
    ("process", "tool"),
    [("/device:GPU:0 Stream", "TensorFlow's or XLA's profiler"), ("CPU HIP API", "rocprof")],
)
def test_traces_of_other_profilers_are_refused_by_name(process, tool, tmp_path) -> None:
    name = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": process}}
    span = {"ph": "X", "name": "Conv2D", "pid": 1, "tid": 2, "ts": 5, "dur": 9}
    path = gpu_trace.write(tmp_path / "trace.json", [{}, name, span, {}])
    with pytest.raises(InputError, match=f"{tool} wrote it, whose traces are not read"):
        read_events(path)


def test_the_ranks_of_one_file_are_a_doubt(tmp_path: Path) -> None:
    events = []
    for rank in range(2):
        for number in range(3):
            at = 1000 * number
            step = mark(f"ProfilerStep#{number}", at, at + 900)
            events.append(step | {"pid": 100 + rank})
            events.append(gpu_trace.on_gpu("kernel", "k", at, at + 300, 7) | {"pid": rank})
    quality = report(tmp_path, events).quality
    assert quality["level"] == "red" and "steps of 2 processes are in one" in quality["sentence"]


def test_without_operators_the_thread_that_calls_the_driver_is_the_main_one(tmp_path) -> None:
    events = [mark("poll()", at, at + 1, tid=77) for at in range(0, 200, 2)]
    for number in range(3):
        at = 50 * number
        events += launched(number + 1, (at, at + 9), "k", (at + 12, at + 40))
    threads = gpu_trace.read(tmp_path, events).threads
    assert threads["name"].tolist()[:2] == ["thread 10", "thread 77"]


def test_a_list_of_other_entries_is_no_trace_and_not_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "requests.json"
    path.write_text(json.dumps([{"id": 1, "timestamps": [{"name": "A", "ns": 2}]}] * 20))
    with pytest.raises(InputError, match=r"no trace .* no 'ph', of 20 in its list"):
        read_events(path)


def test_copies_that_wait_since_before_the_recording_hold_it_up(tmp_path: Path) -> None:
    name, events = "Memcpy HtoD (Pinned -> Device)", []
    for at in range(0, 1000, 100):
        events.append(gpu_trace.on_gpu("gpu_memcpy", name, at, at + 95, 9, bytes=95_000_000))
    events.append(gpu_trace.on_gpu("kernel", "gemm", 1000, 1010, 7))
    events += [operator("aten::mm", 0, 1000), call(LAUNCH, 1, 2, 1)]
    first = report(tmp_path, events).ranked_findings[0]
    assert first.id == "copies_not_overlapped"
    assert first.share_of_step == pytest.approx(0.94, abs=0.01)
    assert "pinned already" in first.advice


@pytest.mark.parametrize(("name", "said"), [(LAUNCH, "is recorded"), ("cudaFree", "was launched")])
def test_a_gpu_that_was_given_no_kernel_hides_none(name: str, said: str, tmp_path: Path) -> None:
    moved = gpu_trace.on_gpu("gpu_memcpy", "Memcpy DtoH", 12, 19, 7, correlation=1)
    told = report(tmp_path, [call(name, 0, 5, 2), call("cudaMemcpyAsync", 10, 20, 1), moved])
    assert f"since no kernel {said}." in told.quality["sentence"]


def test_batches_made_beside_the_gpus_work_are_said_to_be(tmp_path: Path) -> None:
    events = []
    for at in range(0, 3000, 1000):
        events.append(mark(f"ProfilerStep#{at}", at, at + 1000))
        events.append(operator("aten::randn", at + 20, at + 820))
        events += launched(at + 1, (at + 5, at + 10), "gemm", (at + 11, at + 420))
    first = report(tmp_path, events).ranked_findings[0]
    assert "Data generation keeps the GPU idle for 40%" in first.title
    assert "The host takes 0.800 ms for it" in first.evidence


def test_lines_of_a_part_have_their_time_within_it(tmp_path: Path) -> None:
    frame = "/home/me/run.py(7): <cell line: 0>"
    events = [mark("ProfilerStep#1", 0, 1000)]
    ids = {"Python id": 1, "Python parent id": None}
    events.append(gpu_trace.span("python_function", frame, 0, 1000, **ids))
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    events.append(mark(loader, 100, 600))
    events += launched(5, (610, 620), "gemm", (630, 990))
    first = (told := report(tmp_path, events)).ranked_findings[0]
    assert first.id == "data_generation" and "1.00 ms" not in first.evidence.partition("%")[2]
    assert "by Python function `<cell line: 0>` (`run.py:7`) 0.500 ms" in first.evidence
    assert r"run.py:7 | \<cell line: 0\> | 1.00 ms |" in told.markdown()


def test_long_names_of_one_sentence_that_look_the_same_are_one(tmp_path: Path) -> None:
    names = [f"{'layer' * 20} of shape ({n}, 3)" for n in (1, 2)]
    listed = listed_times(pd.Series([1.0, 2.0], names))
    assert listed == f"{'layer' * 14}… 3.00 ms"


def test_what_ascends_profiler_records_of_an_npu_is_a_devices_work(tmp_path: Path) -> None:
    """Without categories: calls of CANN, and what they launch, by their connection."""
    place = {"ph": "X", "pid": 12, "tid": 7, "ts": 0, "dur": 95}
    events: list[dict[str, Any]] = [place | {"cat": "cpu_op", "name": "aten::mm"}]
    for number in range(1, 5):
        at, connection = 20.0 * number, {"connection_id": number}
        call = {"ph": "X", "name": "AscendCL@aclopCompileAndExecute", "pid": 1202, "tid": 7}
        kernel = {"ph": "X", "name": "MatMul", "pid": 1204, "tid": 3}
        events.append(call | {"ts": at, "dur": 9, "args": connection | {"level": "acl"}})
        events.append(kernel | {"ts": at + 9, "dur": 6, "args": connection | {"Stream Id": 3}})
    told = report(tmp_path, events)
    assert told.headline.startswith("**The NPU is idle 64% of the time")
    said = told.ranked_findings[0].evidence
    assert "First calls, which load or compile, take 64% of that: AscendCL@acl" in said
    assert told.table("kernels")["launches"].sum() == 4


def test_an_exchange_of_npus_is_one_and_its_waits_are_no_work(tmp_path: Path) -> None:
    """63 % of a step in all-reduce was waiting in ``item``: "none of its work is recorded"."""
    spans = (
        ("AscendCL@aclnnMm", 1, 9, 10, None),
        ("MatMul", 13, 20, 10, 3),  # layers of a process: its calls, what the NPU does, HCCL
        ("hcom_allReduce__586_0_1", 15, 30, 60, None),
        ("Notify Wait", 13, 30, 55, 4),
    )
    place = {"ph": "X", "pid": 3_000_000, "tid": 7, "ts": 0, "dur": 95}
    events: list[dict[str, Any]] = [place | {"cat": "cpu_op", "name": "aten::mm"}]
    for name, layer, ts, dur, stream in spans:
        args = {"connection_id": 1} | ({"Physic Stream Id": stream} if stream else {})
        row = {"ph": "X", "name": name, "pid": 3_000_000 << 10 | layer << 5 | 1, "tid": 7}
        events.append(row | {"ts": ts, "dur": dur, "args": args})
    told = report(tmp_path, events)
    assert told.headline.startswith("**Exposed communication takes 86% of the recording's NPU")
    assert "waiting for others.** The NPU works 0.0700 ms" in told.headline
    said = told.ranked_findings[0].evidence + told.ranked_findings[0].advice
    assert "In 0.0550 ms of it the recording shows" in said and "of one rank does not" not in said


@pytest.mark.parametrize(
    ("busy", "named", "idle"),
    [
        (900, "cudaMalloc", 97),
        (9_000, "cudaMalloc", 77),
        (40_000, "cudaMalloc", 0),  # less than what the GPU does
        (9_000, "cudaStreamSynchronize", 0),  # of what was launched before
    ],
)
def test_what_lies_before_the_gpus_work_is_said(busy, named, idle, tmp_path) -> None:
    events = [call(named, 0, 90_000)]
    for number in range(3):
        at = 90_000 + number * (busy + 100)
        events += launched(number + 1, (at, at + 9), "k", (at + 12, at + busy))
    told = report(tmp_path, events)
    if idle:
        title = f"idle {idle}% of the time, 100% of that before it begins, most while"
        assert f"{title} the host is in cudaMalloc; 100% of that in first calls" in told.headline
        assert all("idle" not in one.title for one in told.ranked_findings[1:])
        # and every table of idle time is of the same time
        assert told.table("blame")["blamed_ms"].sum() == pytest.approx(90.236, abs=0.2)
    else:
        assert "of the recording's GPU part" in told.headline
        assert f"The 90.0 ms before that are left out, 90.0 ms of it in {named}" in told.headline


def test_idle_time_before_a_wait_is_not_what_it_costs(tmp_path: Path) -> None:
    events = [operator("aten::mm", 0, 30_000)]
    for number, (launch, start, end) in enumerate(((1, 10, 20), (30_000, 30_020, 99_900))):
        events += launched(number + 1, (launch, launch + 8), "k", (start, end))
    events += [call("cudaStreamSynchronize", at, at + 29_000) for at in (30_100, 60_000)]
    every = report(tmp_path, events).ranked_findings
    assert "idle 30% of the time" in every[0].title or "idle 30% of the time" in every[1].title
    assert not any("could be hidden" in one.evidence for one in every)


def calls_and_waits(torch: bool) -> list[Any]:
    """Ten times: memory taken for 8 ms, 1 ms of work, and a wait for it."""
    events = [operator("aten::add", 0, 2)] if torch else []
    for number, at in enumerate(range(0, 100_000, 10_000)):
        events.append(call("cudaMalloc", at + 10, at + 8_010))
        events += launched(number, (at + 8_020, at + 8_030), "k", (at + 8_035, at + 9_035))
        events.append(call("cudaDeviceSynchronize", at + 8_040, at + 9_040))
    return events


@pytest.mark.parametrize("torch", [True, False])
def test_waits_do_not_cost_what_passes_in_other_calls(torch: bool, tmp_path: Path) -> None:
    every = report(tmp_path, calls_and_waits(torch)).ranked_findings
    assert every[0].id == "allocation" and every[0].share_of_step > 0.75
    assert ("PYTORCH_CUDA_ALLOC_CONF" in every[0].advice) == torch
    assert ("a pool (cudaMallocAsync)" in every[0].advice) != torch
    assert sum(one.share_of_step for one in every if one.id == "synchronisation") < 0.15


@pytest.mark.parametrize(("begin", "found"), [(0, 4), (500_000, 0)])
def test_ranges_with_little_of_the_work_are_no_iterations(begin, found, tmp_path) -> None:
    """Four layers, each of its own length; other work as long as ``begin`` runs before them."""
    events, number = [], 1
    if begin:
        events += launched(number, (0, 5), "k", (10, begin - 10))
    for at, length in ((0, 9_000), (12_000, 8_000), (23_000, 7_000), (35_000, 9_500)):
        start = begin + at
        events.append(mark("Layer", start, start + length))
        for part in range(start + 10, start + length - 900, 1000):
            number += 1
            events += launched(number, (part, part + 5), "k", (part + 9, part + 700))
    assert len(report(tmp_path, events).profile.iterations) == found


def test_little_of_a_recording_and_operators_of_a_missing_gpu_are_said(tmp_path: Path) -> None:
    events = [*operators(), operator("aten::cudnn_convolution", 60_000, 99_000)]
    told = report(tmp_path, events)
    said = "The iterations that are explained take 10.0 ms of a recording of 99.0 ms."
    assert said in told.headline
    assert "none of its work is recorded" in told.quality["sentence"]


def test_a_copy_in_whose_call_the_host_waits_is_felt(tmp_path: Path) -> None:
    events, name = [], "Memcpy HtoD (Pageable -> Device)"
    for at in range(0, 100_000, 10_000):
        events.append(call("cudaMemcpy", at, at + 9_995, at + 1))
        moved = {"correlation": at + 1, "bytes": 50_000_000}
        events.append(gpu_trace.on_gpu("gpu_memcpy", name, at + 5, at + 9_990, 7, **moved))
    first = report(tmp_path, events).ranked_findings[0]
    assert "Copies from pageable memory take 100%" in first.title
    assert "brings nothing" not in first.evidence


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("aten::item", "cpu_op", "Waiting for the device in aten::item takes"),
        ("cudaEventSynchronize", "cuda_runtime", "Waiting for the GPU in cuStreamSynchronize and"),
        ("cudaFree", "cuda_runtime", "Taking or giving back memory of the GPU in cudaFree takes"),
        ("rpc_async#f(a -> b)", "cpu_op", "Waiting for another process in rpc_async#f(a -> b)"),
    ],
)
def test_calls_that_compute_nothing_are_called_what_they_do(name, kind, said, tmp_path) -> None:
    events = [operator("aten::add", at, at + 5) for at in range(0, 5000, 500)]
    events += [gpu_trace.span(kind, name, at, at + 450) for at in range(10, 5000, 500)]
    if said.startswith("Waiting for the GPU"):  # the calls that wait count together
        for event in events[10::2]:
            event["name"] = "cuStreamSynchronize"
    first = report(tmp_path, [mark("infer", 0, 5000), *events]).ranked_findings[0]
    assert said in first.title and "computing takes the time" not in first.evidence
    assert "By range it is infer 4.50 ms" in first.evidence


def test_calling_operators_is_named_where_kernels_are_not_recorded(tmp_path: Path) -> None:
    events = []
    for at in range(0, 5000, 10):
        events += [operator("aten::add", at, at + 9), call(LAUNCH, at + 4, at + 7, at + 1)]
    first = report(tmp_path, events).ranked_findings[0]
    assert first.id == "dispatch_bound" and "500 operators" in first.evidence


def test_the_largest_range_without_operators_has_its_own_share(tmp_path: Path) -> None:
    events = [operator("aten::add", 0, 1)]
    for name, start, end in (("find", 0, 500), ("look", 500, 700), ("read", 700, 1000)):
        events.append(mark(name, start * 1000, end * 1000))
    first = report(tmp_path, events).ranked_findings[0]
    assert "50% of the recording passes in find, in no recorded operator" in first.title
    assert "In find 500 ms of 1,000 ms pass outside of operators" in first.evidence


def test_the_caller_of_several_functions_is_named(tmp_path: Path) -> None:
    def frame(name: str, start: float, end: float) -> Any:
        return gpu_trace.span("python_function", f"{name}(1): {name[0]}", start, end)

    events = [frame("run.py", 0, 1000), frame("p.py", 10, 900)]
    calls = {"a": 11, "b": 301, "c": 591}
    events += [frame(f"{name}.py", at, at + 290) for name, at in calls.items()]
    events += launched(1, (905, 910), "gemm", (910, 990))
    assert "most while the host is in `p` (`p.py:1`)" in report(tmp_path, events).headline


def test_two_kinds_of_pointwise_kernels_are_pointwise_work(tmp_path: Path) -> None:
    events = []
    spelt = "void at::native::vectorized_elementwise_kernel<4, at::native::{}>(int)"
    mangled = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEEEEviT0_"
    for at in range(0, 6000, 60):
        for place, name in enumerate((spelt.format("CUDAFunctor_add<float>"), mangled, "gemm")):
            start, number = at + 20 * place, 3 * at + place + 1
            events += launched(number, (start - 9, start - 6), name, (start, start + 20))
    by_id = {one.id: one for one in report(tmp_path, events).ranked_findings}
    assert by_id["pointwise_operators"].share_of_step == pytest.approx(2 / 3, abs=0.01)


def test_a_part_that_takes_more_than_any_name_without_one_is_named(tmp_path: Path) -> None:
    events = [operator("aten::item", at, at + 300) for at in range(0, 3000, 1000)]
    for at in range(0, 3000, 1000):
        events.append(mark("Optimizer.step#AdamW.step", at + 300, at + 900))
        events.append(operator("aten::addcdiv_", at + 310, at + 890))
    first = report(tmp_path, events).ranked_findings[0]
    assert "Optimizer update takes 62% of the recording" in first.title
    assert "aten::addcdiv_ 1.74 ms" in first.evidence
    # and where nearly all is in parts
    told = report(tmp_path, [event for event in events if event["name"] != "aten::item"])
    assert "Optimizer update takes 69% of the recording" in told.headline


def test_pages_of_unified_memory_are_no_batches_to_pin(tmp_path: Path) -> None:
    export = Export(tmp_path / "managed.sqlite")
    export.rows["TARGET_INFO_SYSTEM_ENV"].append({"name": 1})
    moved = {"copyKind": 11, "srcKind": 7, "dstKind": 7, "bytes": 65_536}
    for number in range(20):
        at = 100_000 * number
        export.call(at, at + 5_000, "cudaLaunchKernel", number + 1)
        export.work(MEMCPY, at + 5_000, at + 85_000, 0, **moved)
        export.work(KERNEL, at + 85_000, at + 99_000, number + 1)
    first = explain(export.write()).ranked_findings[0]
    assert "Moving pages of unified memory takes 8" in first.title
    assert "cudaMemPrefetchAsync" in first.advice and "DataLoader" not in first.advice


def test_what_a_process_gives_back_at_its_end_is_left_out_and_loads_nothing(tmp_path: Path) -> None:
    export = Export(tmp_path / "end.sqlite")
    export.call(0, 9_000_000, "cudaFree")  # begins the context
    for at in range(10_000_000, 30_000_000, 1_000_000):
        export.call(at, at + 5_000, LAUNCH, at)
        export.work(KERNEL, at + 5_000, at + 950_000, at)
        export.call(4 * at, 4 * at + (60_000_000 if at < 11_000_000 else 9_000), "cuModuleUnload")
    told = explain(export.write())
    assert "86.1 ms after that are left out, 60.0 ms of it in cuModuleUnload" in told.headline
    assert list(first_calls(told.profile)["name"]) == ["cudaFree"]


def test_calls_of_a_range_count_with_what_passes_between_them(tmp_path: Path) -> None:
    events = [mark("infer", 0, 5000)]
    for at in range(0, 5000, 10):
        events.append(operator("aten::select", at, at + 4))
        events += [operator("aten::as_strided", at + n, at + n + 1) for n in (1, 2)]
    first = report(tmp_path, events).ranked_findings[0]
    assert "Calling operators, not computing, takes 100% of the recording" in first.title
    assert "500 of the calls those of aten::select" in first.title


def test_spans_without_a_category_are_said_to_be_left_out(tmp_path: Path) -> None:
    bare = {"ph": "X", "name": "MatMul", "pid": 7, "tid": 0, "ts": gpu_trace.BASE_US, "dur": 9}
    name = {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "Ascend Hardware"}}
    told = report(tmp_path, [*operators(), bare, name, bare])
    said = "2 spans of 'Ascend Hardware' were not read: no category."
    assert said in told.document["cautions"]
    with pytest.raises(InputError, match=r"no operator, .* 2 of its events have no category"):
        read_events(gpu_trace.write(tmp_path / "bare.json", [bare, bare]))


@pytest.mark.parametrize("kind", ["float", "double"])
def test_what_an_operator_was_given_goes_before_its_kernels_name(kind: str, tmp_path: Path) -> None:
    given = {"Input Dims": [[9, 9], [9, 9]], "Input type": [kind, kind]}
    events = []
    for at in range(0, 10_000, 1000):
        events.append(operator("aten::mm", at, at + 20, **given))
        events += launched(at + 1, (at + 5, at + 9), "dgemm", (at + 9, at + 900))
    found = {one.id for one in report(tmp_path, events).ranked_findings}
    assert ("float64" in found) is (kind == "double")


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("python_function", "ninja.py(5): run", "`rope` (`rope.py:27`) 40.0 ms (then 0.800"),
        ("cuda_runtime", LAUNCH, "cudaLaunchKernel 39.9 ms (then 0.00900 ms each)"),
        ("cuda_runtime", "cudaStreamSynchronize", ""),  # for work of others: nothing loads
    ],
)
def test_the_first_of_equal_calls_is_one_first_call_with_all_in_it(
    kind: str, name: str, said: str, tmp_path: Path
) -> None:
    events = [mark("loop", 0, 60_000)]
    events += [gpu_trace.span(kind, name, 110, 40_000)]
    for number in range(10):
        at, end = 40_100 + 1_000 * number, 40_900 + 1_000 * number
        begin = at if number else 100
        events.append(gpu_trace.span("python_function", "rope.py(27): rope", begin, end))
        events += launched(number + 1, (at, at + 9), "k", (at + 12, end))
    first = report(tmp_path, events).ranked_findings[0]
    assert ("in first calls, which load or compile" in first.title) is bool(said)
    assert said in first.evidence and ("libraries load" in first.advice) is bool(said)


def test_launches_that_a_wait_made_late_belong_to_it(tmp_path: Path) -> None:
    """A blocking copy empties the queue; each of the launches after it then comes too late."""
    events, number = [], 0
    for at in range(0, 20_000, 1_000):
        spans = [(LAUNCH, at, at + 5, "kernel", at + 8, at + 300)]
        spans.append(("cudaMemcpyAsync", at + 10, at + 305, "gpu_memcpy", at + 301, at + 303))
        late = range(at + 340, at + 980, 40)
        spans += [(LAUNCH, one, one + 5, "kernel", one + 8, one + 12) for one in late]
        for called, begin, end, kind, first, last in spans:
            number += 1
            name = "k" if kind == "kernel" else "Memcpy DtoH (Device -> Pageable)"
            events.append(call(called, begin, end, number))
            events.append(gpu_trace.on_gpu(kind, name, first, last, 7, correlation=number))
    found = report(tmp_path, events).ranked_findings
    assert next(one.share_of_step for one in found if one.id == "synchronisation") > 0.25
