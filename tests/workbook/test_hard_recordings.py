"""Recordings that are long, broken, or odd in one way: they take their time, and no more."""

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_trace
import numpy as np
import pandas as pd
import pytest
from recordings import TRACES, recording

from dlrm_core.base.errors import InputError
from dlrm_workbook import explain
from dlrm_workbook.analysis.inspect import inspect_recording
from dlrm_workbook.analysis.lanes import MOST_LANES, thread_timeline
from dlrm_workbook.recordings import cache
from dlrm_workbook.recordings import open as opening
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.recordings.profile import SCHEMA
from dlrm_workbook.show.gpu import DRAWN_LANES, lane_timeline


def span(category: str, at: float, length: float, named: str = "aten::mm", /, **more: Any) -> Any:
    fields = {name: more.pop(name) for name in ("tid", "ph", "id") if name in more}
    return gpu_trace.span(category, named, at, at + length) | fields | {"args": more}


def kernel(at: float, length: float, number: int, stream: int = 7) -> Any:
    return gpu_trace.on_gpu("kernel", "gemm", at, at + length, stream, correlation=number)


def launched(i: int) -> list[Any]:
    return [span("cuda_runtime", 9 * i, 2, "cudaLaunchKernel", correlation=i), kernel(9 * i, 5, i)]


KINDS: dict[str, Callable[[int, int], list[Any]]] = {
    "operators": lambda i, n: [span("cpu_op", 9 * i, 5, **{"Input Dims": [[i]]})],
    "names": lambda i, n: [span("cpu_op", 9 * i, 5, f"operator {i}")],
    "levels": lambda i, n: [span("cpu_op", i, 3 * n - 2 * i)],
    "frames that overlap": lambda i, n: [span("python_function", 9 * i, 14, f"a.py({i}): f")],
    "threads": lambda i, n: [span("cpu_op", 9 * i, 5, tid=i)],
    "ranges": lambda i, n: [span("user_annotation", 9 * i, 8, f"step {i}"), *launched(i)],
    "kernels": lambda i, n: launched(i),
    "kernels at once": lambda i, n: [kernel(i, n, i)],
    "streams": lambda i, n: [kernel(i, 9, i, i)],
    "copies": lambda i, n: [kernel(9 * i, 5, i) | {"cat": "gpu_memcpy"}],
    "flows": lambda i, n: [
        span("fwdbwd", 9 * i, 0, "fwdbwd", ph=phase, id=i) for phase in ("s", "f")
    ],
    "memory": lambda i, n: [span("cpu_instant_event", i, 0, "[memory]", ph="i", Bytes=i)],
    "threads' names": lambda i, n: [span("", 0, 0, "thread_name", ph="M", tid=i, name="a" * 40)],
    "counters": lambda i, n: [span("cpu_op", i, 0, "memory", ph="C", bytes=i)],
    "unknown": lambda i, n: [span(f"category {i}", i, 1)],
}


def seconds(path: Path, kind: Callable[[int, int], list[Any]], count: int) -> float:
    events = [event for i in range(count) for event in kind(i, count)]
    path.write_text(json.dumps({"traceEvents": [*gpu_trace.events(), *events]}))
    began = time.process_time()
    inspect_recording(open_recording(path))
    return time.process_time() - began


@pytest.mark.parametrize("kind", KINDS)
def test_four_times_the_events_take_four_times_the_time(kind: str, tmp_path: Path) -> None:
    once, four = np.inf, np.inf
    for _ in range(4):  # the least of some: other programs run beside
        once = min(once, seconds(tmp_path / "a.json", KINDS[kind], 2000))
        four = min(four, seconds(tmp_path / "a.json", KINDS[kind], 8000))
        if four <= 4.5 * once:
            break
    assert four <= 8 * once  # 16 times where each event looks at all others


def step(i: int) -> list[Any]:
    return [
        span("user_annotation", 1000 * i, 900, f"ProfilerStep#{i}"),
        span("python_function", 1000 * i + 1, 880, "train.py(3): step"),
        span("cpu_op", 1000 * i + 10, 200),
        span("cuda_runtime", 1000 * i + 50, 10, "cudaLaunchKernel", correlation=i),
        kernel(1000 * i + 80, 300, i),
    ]


STEPS = [event for i in range(30) for event in step(i)]
BROKEN: dict[str, list[Any]] = {
    "all ranges are steps": [event | {"name": "ProfilerStep#3"} for event in STEPS],
    "begin times are mixed": [e | {"ts": STEPS[(7 * i) % 97]["ts"]} for i, e in enumerate(STEPS)],
    "copies without kernels": [
        event | {"cat": {"kernel": "gpu_memcpy"}.get(event["cat"], event["cat"])} for event in STEPS
    ],
    "copies alone": [e | {"cat": "gpu_memcpy"} for e in STEPS if e["cat"] == "kernel"],
    "shapes of a copy, beside a graph's kernel": [
        span("cpu_op", 0, 200, **{"Input Dims": [[9]], "Input type": ["float"]}),
        span("cuda_runtime", 10, 99, "cudaMemcpyAsync", correlation=1),
        kernel(20, 50, 1) | {"cat": "gpu_memcpy"},
        kernel(100, 300, 2),
    ],
    "deep": [span("cpu_op", i, 90_000 - 2 * i) for i in range(30_000)],
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_recordings_are_explained(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": BROKEN[name]}))
    report = explain(path)
    assert report.headline and json.dumps(report.document)
    assert thread_timeline(report.profile)["duration_ms"].gt(0).all()


def test_what_cannot_be_explained_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event | {"dur": 0} for event in STEPS]}))
    with pytest.raises(InputError, match="none of its spans lasts"):
        explain(path)
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b"{}," * 2_000_000 + b"{}]}"))
    with pytest.raises(InputError, match="most of its events are empty"):
        open_recording(path)
    path.write_text(json.dumps({"traceEvents": STEPS, "distributedInfo": {"rank": 2**63 + 5}}))
    assert open_recording(path).profile.threads["rank"].eq(0).all()


def test_of_many_threads_those_are_drawn_that_ran_longest(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [span("cpu_op", 9 * i, 5 + i, tid=i) for i in range(2 * MOST_LANES)]
    path.write_text(json.dumps({"traceEvents": events}))
    spans = thread_timeline(open_recording(path).profile)
    assert spans["lane"].nunique() == MOST_LANES
    drawn = lane_timeline(spans)
    assert f"the {DRAWN_LANES} of {MOST_LANES} that run longest" in drawn.layout.title.text
    assert len(drawn.layout.yaxis.ticktext) == DRAWN_LANES


def test_a_second_opening_reads_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for limit in ("LEAST_BYTES", "LEAST_SPANS", "SETTLED_S"):
        monkeypatch.setattr(cache, limit, 0)
    changing = tmp_path / "changing.json"
    changing.write_text("[]")
    key = cache.key_of(changing, [changing], None)
    assert cache.key_of(changing, [changing], None) == key
    changing.write_text("{}")
    assert cache.key_of(changing, [changing], None) != key
    path = recording(TRACES["torchrec-cuda-graphs-a100x16-rank0"])
    read = open_recording(path)
    with monkeypatch.context() as patch:
        patch.setattr(opening, "_open_file", lambda *_: pytest.fail("read again"))
        kept = open_recording(path)
    for table in SCHEMA:
        pd.testing.assert_frame_equal(getattr(kept.profile, table), getattr(read.profile, table))
    assert inspect_recording(kept) == inspect_recording(read)
    parts = {"aten::mm": "top_mlp"}
    assert cache.key_of(path, [path], parts) != cache.key_of(path, [path], None)
    (entry,) = cache.folder().iterdir()
    (entry / "one" / "trace.parquet").write_bytes(b"PAR1")
    assert inspect_recording(open_recording(path)) == inspect_recording(read)
    monkeypatch.setattr(cache, "MOST_BYTES", 1)  # an entry that has no room is not kept
    (entry / "one" / "trace.parquet").write_bytes(b"PAR1")
    assert len(open_recording(path).profile.trace) == len(read.profile.trace)


def test_what_is_kept_follows_from_the_tables_of_the_readers(tmp_path, monkeypatch) -> None:
    for limit in ("LEAST_BYTES", "SETTLED_S"):
        monkeypatch.setattr(cache, limit, 0)
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "cache.py"))
    trace, names = tmp_path / "trace.json", tmp_path / "names.csv"
    trace.write_text("[]")
    keys = set()
    for text in ("kind,pattern", "kind,other"):
        names.write_text(text)
        keys.add(cache.key_of(trace, [trace], None))
    assert len(keys) == 2
