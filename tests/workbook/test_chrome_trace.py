"""Chrome traces of any program: what is read of them, and what in them is named as wrong."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import gpu_trace
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import TRACES, recording

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis.inspect import inspect_recording
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.recordings.torch import json_stream
from dlrm_workbook.recordings.torch.chrome_trace import Events, NoTraceError, read_events

TABLES = ("host", "device", "memory", "marks", "flows", "collectives")


def written(folder: Path, events: list[Any], **beside: Any) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events} | beside))
    return path


def read(folder: Path, events: list[Any], **beside: Any) -> Events:
    return read_events(written(folder, events, **beside))


def facts(folder: Path) -> dict[str, Any]:
    return inspect_recording(open_recording(folder / "trace.json"))


def on_gpu(name: str, start: float, duration: Any, correlation: int = 1, **more: Any) -> Any:
    event = gpu_trace.on_gpu("kernel", name, start, start, 7, correlation=correlation)
    return event | {"dur": duration} | more


def launch(start: float, correlation: int, name: str = "cudaLaunchKernel") -> Any:
    return gpu_trace.span("cuda_runtime", name, start, start + 1, correlation=correlation)


def caution(events: Events, words: str) -> str:
    (said,) = [caution for caution in events.cautions if words in caution]
    return said


# ---- schemas ----------------------------------------------------------------------


def test_the_schema_of_2021_reads_as_todays(tmp_path: Path) -> None:
    today = gpu_trace.events()
    old = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "cuda_driver": "Runtime"}
    old |= {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "user_annotation": "Operator"}
    then = []
    for event in json.loads(json.dumps(today)):
        if event["ph"] == "X":
            event["cat"] = old.get(event["cat"], event["cat"])
            args = event["args"]
            if "External id" in args:
                args["external id"] = args.pop("External id")
            if "stream" in args:
                event["tid"] = f"stream {event['tid']}"
                args.pop("stream")
            else:
                event["tid"] = str(event["tid"])
        then.append(event)
    new, found = read(tmp_path, today), read(tmp_path, then)
    pd.testing.assert_frame_equal(found.device, new.device.assign(stream=-1))
    spans = ["start", "end", "line", "name", "kind", "correlation", "external"]
    pd.testing.assert_frame_equal(found.host[spans], new.host[spans])


def test_autograds_own_profiler_writes_operators_without_category(tmp_path: Path) -> None:
    """Up to torch 1.7: each operator, then its time on the GPU, which nests as operators do."""

    def row(process: str, name: str, ts: float, duration: float) -> dict[str, Any]:
        row = {"ph": "X", "name": name, "pid": f"{process} functions", "tid": 0, "args": {}}
        return row | {"ts": ts, "dur": duration}

    events = []
    for name, at, duration in (("outer", 0, 100), ("first", 10, 20), ("then", 70, 29.5)):
        events += [row("CPU", f"aten::{name}", at / 2, duration / 2)]
        events += [row("CUDA", f"aten::{name}", at, duration)]
    events += [row("CPU", "aten::thin", 60, 1), row("CUDA", "aten::thin", 69.5, 30.2)]
    (tmp_path / "trace.json").write_text(json.dumps(events))  # the list alone
    found = read_events(tmp_path / "trace.json")
    assert list(found.host["name"]) == ["aten::outer", "aten::first", "aten::then", "aten::thin"]
    device = found.device.sort_values("start").set_index("name")[["start", "duration"]] / 1e3
    work = {"aten::first": [10, 20], "aten::outer": [30, 39.5], "aten::then": [70, 29.5]}
    assert device.T.to_dict("list") == work
    assert caution(found, "without Kineto")
    assert facts(tmp_path)["gpu_busy_ms"] == pytest.approx(0.089, abs=1e-9)


@pytest.mark.parametrize("vendor", ["hip", "xpu", "privateuse1"])
def test_other_vendors_calls_launch_too(tmp_path: Path, vendor: str) -> None:
    events = gpu_trace.events()
    for event in events:
        if event.get("cat") == "cuda_runtime":
            event["cat"] = f"{vendor}_runtime"
    found = read(tmp_path, events)
    assert found.host["kind"].eq("runtime").sum() == 5
    assert found.launched_before == (0, 0)
    assert read(tmp_path, [*events, {**events[1], "cat": "npu_thing"}]).cautions == [
        "1 event of category 'npu_thing' was not read."
    ]


def test_what_repeats_time_is_kept_apart(tmp_path: Path) -> None:
    found = read(tmp_path, gpu_trace.events())
    assert found.marks["kind"].tolist() == ["overhead", "annotation", "sync"]
    own = found.circumstances()["profiler_overhead"]
    assert own == {"name": ["Activity Buffer Request"], "start": [20000], "end": [24000]}
    assert len(found.device) == 4 and found.cautions == []


def test_arguments_become_columns(tmp_path: Path) -> None:
    args = {"grid": [64, 2, 1], "block": [128, 1, 1], "registers per thread": 90}
    args |= {"shared memory": 49152, "blocks per SM": 0.5, "warps per SM": 2.5, "stream": 7}
    args |= {"est. achieved occupancy %": 4, "correlation": 9, "device": 3, "graph id": 5}
    args |= {"Collective name": "all_to_allv", "In msg nelems": 8, "Out msg nelems": 6}
    args |= {"dtype": "Float", "Group size": 4, "Process Group Name": "0"}
    kernel = on_gpu("ncclDevKernel_SendRecv", 5, 3) | {"args": args}
    operator = gpu_trace.span("cpu_op", "MmBackward0", 0, 9, **{"Sequence number": 12})
    operator["args"] |= {"Fwd thread id": 1, "Input Dims": [[2, 3]], "Input type": ["double"]}
    frame = gpu_trace.span("python_function", "nn.Module: Linear_0", 0, 9)
    frame["args"] |= {"Python id": 7, "Python parent id": 6, "Python module id": 0}
    flow = {"cat": "fwdbwd", "name": "fwdbwd", "id": 3, "pid": 1, "ts": gpu_trace.BASE_US}
    flows = [flow | {"ph": "s", "tid": 10}, flow | {"ph": "f", "tid": 11, "bp": "e"}]
    properties = [{"id": 3, "name": "GPU X", "numSms": 132, "computeMajor": 9, "computeMinor": 0}]
    properties[0] |= {"maxThreadsPerMultiprocessor": 2048, "regsPerMultiprocessor": 65536}
    found = read(tmp_path, [kernel, operator, frame, *flows], deviceProperties=properties)
    row = found.device.iloc[0]
    assert (row["grid"], row["block"], row["registers"]) == ("[64, 2, 1]", "[128, 1, 1]", 90)
    assert (row["shared_memory"], row["warps_per_sm"], row["occupancy"]) == (49152, 2.5, 4)
    assert (row["graph"], row["gpu"], row["stream"], row["line"]) == (5, 3, 7, "3/7")
    collective = found.collectives.iloc[row["collective"]]
    assert collective["name"] == "all_to_allv" and collective["in_elements"] == "8"
    assert collective["group_size"] == "4"
    host = found.host.set_index("name")
    assert host.loc["MmBackward0", ["sequence", "forward_thread"]].tolist() == [12, 1]
    assert host.loc["MmBackward0", "types"] == "['double']"
    module = host.loc["nn.Module: Linear_0"]
    assert (module["python_id"], module["python_parent"], module["sequence"]) == (7, 6, -1)
    assert found.flows.iloc[0].tolist() == [0, "1/10", 0, "1/11"]
    known = {"id": 3, "name": "GPU X", "sms": 132, "compute": "9.0"}
    known |= {"threads_per_sm": 2048, "registers_per_sm": 65536}
    assert found.devices == [known | {"memory_bytes": None, "shared_memory_per_sm": None}]


# ---- units ------------------------------------------------------------------------


def test_display_units_change_nothing_and_a_bare_list_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps(gpu_trace.events()))
    for found in (read(tmp_path, gpu_trace.events(), displayTimeUnit="ns"), read_events(path)):
        assert found.device["duration"].tolist()[:2] == [20_000, 15_000] and len(found.device) == 4


def test_nanoseconds_are_told_by_the_bandwidth_of_copies(tmp_path: Path) -> None:
    events = gpu_trace.events()
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] * 1000)
        if "dur" in event:
            event["dur"] = round(event["dur"] * 1000)
        if event.get("cat") == "gpu_memcpy":
            event["args"]["memory bandwidth (GB/s)"] = 4096 / 10_000
    found = read(tmp_path, events)
    assert found.device["duration"].tolist() == [20_000, 15_000, 10_000, 25_000]
    assert "read as nanoseconds" in found.cautions[0]


def test_nanoseconds_since_1970_are_told_by_their_size(tmp_path: Path) -> None:
    event = gpu_trace.span("cpu_op", "aten::mm", 0, 0)
    event |= {"ts": 1_712_195_495_505_583_001, "dur": 7}
    found = read(tmp_path, [event, event | {"ts": event["ts"] + 3}])
    assert found.host[["start", "end"]].to_numpy().tolist() == [[0, 7], [3, 10]]
    assert found.clock_ns == event["ts"]


# ---- torch's invalid JSON ---------------------------------------------------------


def test_invalid_events_are_repaired_or_left_out_and_counted(tmp_path: Path) -> None:
    good = json.dumps(gpu_trace.span("cpu_op", "aten::mm", 0, 5, correlation=3))
    quoted = r'{"device": "cpu", "dtype": "float32"}(12): run'
    names = [quoted, "C:\\User(1): f", "a\x01b\tc"]
    invalid = [good.replace("aten::mm", name) for name in names]
    invalid.append(good.replace('"args": {', '"args": {"memory bandwidth (GB/s)": -nan, '))
    hopeless = good.replace('"ph": "X"', '"ph": "X" "cat" 1')
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [\n' + ",\n".join([*invalid, hopeless, good]) + "\n]}")
    found = read_events(path)
    shown = [*names[:2], r"a\x01b" + "\tc"]  # control characters are written out
    assert found.host["name"].tolist() == [*shown, "aten::mm", "aten::mm"]
    assert caution(found, "repaired").startswith("3 events were not valid JSON")
    assert caution(found, "left out").startswith("1 event was not valid JSON")


@settings(max_examples=25)
@given(st.integers(20, 400), st.integers(500, 3000), st.booleans(), st.integers(1, 3))
def test_windows_of_any_size_give_the_same(piece, ahead, packed, processes) -> None:
    import tempfile

    nested = gpu_trace.span("cpu_op", "aten::mm", 0, 5, given=[{"a": 1}, {"b": ["}, {"]}])
    texts = [json.dumps(event) for event in [*gpu_trace.events(), nested]]
    texts.append(texts[4].replace("aten::addmm", 'a "quoted" name'))
    events = ", ".join([*texts, *texts])
    text = f'{{"a": {{"b": [1, "}}, {{"]}}, "traceEvents": [{events}], "z": ["traceEvents"]}}'
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "trace"
        path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
        whole = read_events(path)
        patch.setattr(json_stream, "BYTES_AT_ONCE", piece)
        patch.setattr(json_stream, "PIECE", ahead)
        patch.setattr(json_stream, "BLOCK", 3 * ahead)
        patch.setattr(json_stream, "usable_cores", lambda: processes)
        found = read_events(path)
    for table in TABLES:
        given = getattr(found, table), getattr(whole, table)
        pd.testing.assert_frame_equal(*given, check_categorical=False)
    assert found.header == whole.header == {"a": {"b": [1, "}, {"]}, "z": ["traceEvents"]}
    assert found.cautions == whole.cautions
    assert caution(found, "repaired").startswith("2 events")


def test_a_helper_that_is_killed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = gpu_trace.write(tmp_path / "trace.json", 20 * gpu_trace.events())
    for name, value in (("BYTES_AT_ONCE", 512), ("BLOCK", 1024), ("usable_cores", lambda: 2)):
        monkeypatch.setattr(json_stream, name, value)
    monkeypatch.setattr(json_stream, "die_with_parent", lambda: os.kill(os.getpid(), 9))
    with pytest.raises(InputError, match=r"trace\.json cannot be read: a process .* was ended"):
        read_events(path)


# ---- what cannot be ---------------------------------------------------------------


def test_times_that_are_none_are_named(tmp_path: Path) -> None:
    span = gpu_trace.span("cpu_op", "aten::mm", 1, 2)
    events = gpu_trace.events() + [span] * 10
    events += [span | {"dur": -4}, span | {"ts": None}, span | {"ts": "soon"}]
    events += [{name: value for name, value in span.items() if name != "dur"}]
    events += [span | {"name": 5}, span | {"ts": gpu_trace.BASE_US + 3e9}]
    found = read(tmp_path, events)
    assert "1 event has a negative duration" in caution(found, "negative")
    assert "1 event has no duration" in caution(found, "no duration")
    assert "2 events have a time that is no number" in caution(found, "no number, and were")
    assert "1 event lacks a name" in caution(found, "lacks")
    assert "1 event lies far away from the" in caution(found, "far away")
    assert facts(tmp_path)["gpu_time_ms"] == pytest.approx(0.070)


def test_a_kernel_longer_than_the_recording_is_not_counted_so(tmp_path: Path) -> None:
    events = gpu_trace.events()
    events[13]["dur"] = 1000e6
    found = read(tmp_path, events)
    assert "1 GPU operation lasts up to 1,000 s" in caution(found, "cannot be")
    whole = facts(tmp_path)
    assert whole["kernels"] == 3 and whole["gpu_span_ms"] == pytest.approx(0.063)


def test_overlap_on_a_stream_is_said(tmp_path: Path) -> None:
    found = read(
        tmp_path, [launch(0, 1), on_gpu("a", 5, 20.0), launch(2, 2), on_gpu("b", 15, 9, 2)]
    )
    assert "by up to 10 µs" in caution(found, "next one on its stream")
    whole = facts(tmp_path)
    assert whole["gpu_time_ms"] == pytest.approx(0.029)
    assert whole["gpu_busy_ms"] == pytest.approx(0.020)


def test_one_number_for_all_launches_is_no_launch(tmp_path: Path) -> None:
    events = [launch(at, 4) for at in (0, 10, 20)]
    events += [on_gpu("k", at + 3, 2, 4) for at in (0, 10, 20)]
    found = read(tmp_path, events)
    assert "3 GPU operations share the number" in caution(found, "share")
    assert found.device["correlation"].eq(-1).all()
    # a graph's launch is of many kernels
    graph = [launch(0, 4, "cudaGraphLaunch"), *events[3:]]
    found = read(tmp_path, graph)
    assert found.device["correlation"].eq(4).all()
    assert "upper bound" in caution(found, "1 launch of CUDA graphs has 3 to 3")
    assert facts(tmp_path)["graph_launches"] == 1


def test_kernels_without_a_launch_and_before_it_are_said(tmp_path: Path) -> None:
    events = [launch(0, 1), on_gpu("a", 5, 2), on_gpu("b", 9, 4, 77), launch(50, 2)]
    found = read(tmp_path, [*events, on_gpu("c", 20, 1, 2)])
    assert found.launched_before == (1, 4000)
    assert "1 GPU operation, 0.004 ms in all, has no recorded launch" in caution(
        found, "before the r"
    )
    assert "by up to 30 µs" in caution(found, "clocks of GPU and CPU")
    assert facts(tmp_path)["launched_before_trace_ms"] == pytest.approx(0.004)


@settings(max_examples=30)
@given(st.data())
def test_nothing_in_an_event_crashes_the_reader(data: Any) -> None:
    import tempfile

    odd = st.sampled_from([None, "x", [], {}, float("nan"), -1, 1e300, 2**70, True, "7", [[1], 2]])
    events = json.loads(json.dumps(gpu_trace.events()))
    for _ in range(data.draw(st.integers(1, 8))):
        event = data.draw(st.sampled_from(events))
        inside = isinstance(event.get("args"), dict) and event["args"] and data.draw(st.booleans())
        place = event["args"] if inside else event
        place[data.draw(st.sampled_from(sorted(place)))] = data.draw(odd)
    with tempfile.TemporaryDirectory() as folder:
        try:
            json.dumps(inspect_recording(open_recording(written(Path(folder), events))))
        except InputError as error:
            assert "\n" not in str(error)


# ---- what is refused --------------------------------------------------------------


def test_every_cut_is_refused(tmp_path: Path) -> None:
    text = json.dumps({"a": 1, "traceEvents": gpu_trace.events(), "b": {"c": [2]}})
    path = tmp_path / "trace.json"
    for length in range(1, len(text), 31):
        path.write_text(text[:length])
        with pytest.raises(InputError, match=r"trace\.json cannot be read: it is cut short"):
            read_events(path)


@pytest.mark.parametrize("name", TRACES)
def test_a_real_trace_that_is_cut_short_is_refused(tmp_path: Path, name: str) -> None:
    data = recording(TRACES[name]).read_bytes()
    path = tmp_path / "trace.json.gz"
    for share in (0.3, 0.99):
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(InputError, match="cut short"):
            open_recording(path)


def test_bombs_and_pipes_and_depths_are_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(json_stream, "UNSUSPICIOUS", 1 << 20)
    bomb = tmp_path / "bomb.json.gz"
    bomb.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (12 << 20)))
    with pytest.raises(InputError, match=r"bomb\.json\.gz is not read: .* which no trace does"):
        read_events(bomb)
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="no regular file"):
        open_recording(pipe)
    trace = tmp_path / "trace.json"
    for error, text, words in (
        (InputError, '{"traceEvents": [' + "[" * 100_000, r"trace\.json cannot be read"),
        (NoTraceError, '[{"ph": "X", "cat": "blink", "name": "a", "ts": 1}]', "holds no operator"),
        (InputError, '{"traceEvents": []} {"traceEvents": []}', "text follows"),
    ):
        trace.write_text(text)
        with pytest.raises(error, match=words):
            read_events(trace)


def test_copies_without_sizes_and_memory_without_totals_are_not_measured(tmp_path: Path) -> None:
    events = json.loads(json.dumps(gpu_trace.events()))
    copy = next(event for event in events if event.get("cat") == "gpu_memcpy")
    grown = {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 10, "ts": copy["ts"]}
    events.append(grown | {"args": {"Device Type": 0, "Bytes": 4}})
    second = json.loads(json.dumps(copy)) | {"ts": copy["ts"] + 40}
    del second["args"]["bytes"]
    some = open_recording(written(tmp_path, [*events, second])).profile
    assert some.value_table("copy_bytes").sum() == 4096
    assert any("1 of 2 copies and memsets do not say" in said for said in some.meta["cautions"])
    del copy["args"]["bytes"]
    none = open_recording(written(tmp_path, events)).profile
    assert not none.has("copy_bytes") and "bytes" in none.not_measured["copy_bytes"]
    assert "memory" not in none.meta and "no totals" in none.not_measured["memory"]
