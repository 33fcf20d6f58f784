"""``dlrm export``: a recording for other people's viewers.

``perfetto`` is a Chrome trace (JSON), as ui.perfetto.dev and chrome://tracing open it: every span
of every thread and GPU stream with its part and phase, and the iterations in a row of their own.
Format: the "Trace Event Format" document of the Chromium project.

``speedscope`` is a call tree with the time in each call, as www.speedscope.app opens it: whole
recordings, also of tools that keep no order of events. Format:
https://www.speedscope.app/file-format-schema.json.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import whole_file
from dlrm_core.parts import part_label
from dlrm_workbook.analysis.context_tree import missing_reason
from dlrm_workbook.ground.runs import named_run
from dlrm_workbook.recordings.nesting import lanes, start_and_end
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.recordings.profile import Profile

DEEPEST = 100
"""Callers shown of a sample, the innermost ones; Python frameworks nest deeper than one reads."""

SPEEDSCOPE = "https://www.speedscope.app/file-format-schema.json"

TIMES = ("cpu_time_ms", "gpu_time_ms")


def perfetto(ranks: dict[int, Profile]) -> Iterator[dict[str, Any]]:
    """Events of a Chrome trace, one process a rank, one thread a CPU thread or GPU stream.

    Args:
        ranks: rank to its profile; a recording of one process has rank 0.

    Yields:
        Complete events (``ph: X``) with ``ts`` and ``dur`` in µs from the first one of the rank,
        and metadata with the names of threads. Of a sampled recording, equal callers of
        neighbouring samples are one event, so that call paths read as in a traced one.
    """
    for rank, profile in ranks.items():
        yield _named("process_name", rank, 0, f"rank {rank}" if len(ranks) > 1 else "recording")
        yield _named("thread_name", rank, 0, "iterations")
        trace = profile.trace
        begin = int(trace["start_ns"].min()) if len(trace) else 0
        marks = (profile.iterations[name].tolist() for name in ("iteration", "start_ns", "end_ns"))
        for number, start, end in zip(*marks, strict=True):
            yield _event(rank, 0, f"iteration {number}", start, end, begin)
        contexts = profile.contexts
        names, kinds = contexts["name"].tolist(), contexts["kind"].tolist()
        parts = list(map(part_label, contexts["component"], contexts["phase"]))
        shapes = contexts["shapes"].tolist()
        sampled = profile.meta.get("engine") == "hpctoolkit"
        threads = (profile.threads[name].tolist() for name in ("profile", "name", "kind"))
        further = len(profile.threads)
        for number, name, kind in zip(*threads, strict=True):
            rows = trace[trace["profile"] == number].sort_values(["start_ns", "depth"])
            # the callers of a kernel are on the thread that launched it
            by_calls = sampled and kind == "cpu_thread"
            place = np.zeros(len(rows), dtype=np.int64)
            if kind == "gpu_stream":  # of two that overlap on one line, Perfetto drops one
                place = lanes(*start_and_end(rows))
            for beside in range(place.max(initial=0) + 1):
                further += beside > 0
                lane = further if beside else number + 1  # 0 has the iterations
                yield _named("thread_name", rank, lane, f"{name}, at once" if beside else name)
                some = rows[place == beside]
                if kind == "gpu_stream":  # the last line has all for which there is no other
                    begins = np.append(some["start_ns"].to_numpy()[1:], np.iinfo(np.int64).max)
                    some = some.assign(end_ns=np.minimum(some["end_ns"], begins))
                spans = _flame(profile, some) if by_calls else _as_they_are(some)
                for context, start, end in spans:
                    arguments = {"part": parts[context], "kind": kinds[context]}
                    if shapes[context]:
                        arguments["shapes"] = shapes[context]
                    yield _event(rank, lane, names[context], start, end, begin, arguments)


def _named(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": {"name": name}}


def _event(
    rank: int,
    lane: int,
    name: str,
    start_ns: int,
    end_ns: int,
    begin_ns: int,
    arguments: dict[str, str] | None = None,
) -> dict[str, Any]:
    times = {"ts": (start_ns - begin_ns) / 1e3, "dur": (end_ns - start_ns) / 1e3}
    return {"ph": "X", "name": name, "pid": rank, "tid": lane, **times, "args": arguments or {}}


def _as_they_are(rows: Any) -> Iterator[tuple[int, int, int]]:
    columns = (rows[name].tolist() for name in ("context", "start_ns", "end_ns"))
    yield from zip(*columns, strict=True)


def _flame(profile: Profile, rows: Any) -> Iterator[tuple[int, int, int]]:
    """(context, start_ns, end_ns) of samples and all their callers; outer ones end last."""
    parent = profile.contexts["parent"].to_numpy()
    kinds = profile.contexts["kind"].to_numpy()
    paths: dict[int, list[int]] = {}

    def path_of(context: int) -> list[int]:
        if context not in paths:
            path, at = [], context
            while at >= 0:
                if kinds[at] not in ("root", "thread"):
                    path.append(at)
                at = int(parent[at])
            paths[context] = path[:DEEPEST][::-1]
        return paths[context]

    open_calls: list[tuple[int, int]] = []  # context and when it began, outermost first
    ended = 0
    for context, start, end in _as_they_are(rows):
        path = path_of(context)
        same = 0
        if start <= ended:  # the call goes on only where nothing lies between
            pairs = zip(open_calls, path, strict=False)
            same = next((i for i, (was, now) in enumerate(pairs) if was[0] != now), -1)
            same = min(len(open_calls), len(path)) if same < 0 else same
        for call, began in reversed(open_calls[same:]):
            yield call, began, ended
        open_calls = open_calls[:same] + [(call, start) for call in path[same:]]
        ended = end
    for call, began in reversed(open_calls):
        yield call, began, ended


def speedscope(ranks: dict[int, Profile], name: str) -> dict[str, Any]:
    """A speedscope document with one profile for each rank and kind of time. ``ranks`` has rank to
    profile, ``name`` is the document's. An InputError says that no time was measured."""
    frames: list[dict[str, Any]] = []
    numbers: dict[tuple[str, str, int], int] = {}
    profiles = []
    for rank, profile in ranks.items():
        contexts = profile.contexts
        parent = contexts["parent"].to_numpy()
        numbered = []
        columns = (contexts[column] for column in ("name", "file", "line"))
        for key in zip(*columns, strict=True):
            if key not in numbers:
                numbers[key] = len(frames)
                frame = {"name": str(key[0])}
                if key[1]:
                    frame |= {"file": key[1]} | ({"line": int(key[2])} if key[2] > 0 else {})
                frames.append(frame)
            numbered.append(numbers[key])
        for metric in TIMES:
            if not profile.has(metric):
                continue
            exclusive = profile.value_table(metric).to_numpy()
            samples, weights = [], []
            for context in np.flatnonzero(exclusive > 0).tolist():
                stack, at = [], context
                while at >= 0:
                    stack.append(numbered[at])
                    at = int(parent[at])
                samples.append(stack[::-1])
                weights.append(float(exclusive[context]))
            which = f"rank {rank}, " if len(ranks) > 1 else ""
            profiles.append(
                {
                    "type": "sampled",
                    "name": f"{which}{'GPU' if metric.startswith('gpu') else 'CPU'} time",
                    "unit": "milliseconds",
                    "startValue": 0,
                    "endValue": sum(weights),
                    "samples": samples,
                    "weights": weights,
                }
            )
    if not profiles:
        raise InputError(f"{name} holds no times: {missing_reason(profile, TIMES, 'none')}")
    shared = {"frames": frames}
    return {"$schema": SPEEDSCOPE, "name": name, "shared": shared, "profiles": profiles}


# ---- the command ----------------------------------------------------------------------


def command_export(arguments: argparse.Namespace) -> int:
    """``dlrm export RECORDING --to FORMAT FILE``: the last line is the file."""
    target = Path(arguments.output).expanduser()
    suffixes = (".json", ".json.gz")
    if not target.name.endswith(suffixes):
        raise InputError(f"{target}: expected a file that ends in {' or '.join(suffixes)}")
    recording = open_recording(named_run(arguments.path, "profile"))
    ranks = recording.ranks or {recording.rank or 0: recording.profile}
    write = {"perfetto": _write_perfetto, "speedscope": _write_speedscope}[arguments.to]
    with whole_file(target) as file, ExitStack() as packed:
        out: Any = file
        if target.name.endswith(".gz"):
            # no name and time in the file, so that equal recordings make equal files
            out = gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0)
            packed.enter_context(out)
        text = io.TextIOWrapper(out, encoding="utf-8")
        write(text, ranks, str(arguments.path))
        text.flush()
        text.detach()
    print(target)
    return 0


def _write_perfetto(file: IO[str], ranks: dict[int, Profile], name: str) -> None:
    if all(profile.trace.empty for profile in ranks.values()):
        why = missing_reason(next(iter(ranks.values())), ("trace",), "it has no order of events")
        raise InputError(f"{name} holds no timeline ({why}); --to speedscope needs none")
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    before = ""
    for event in perfetto(ranks):
        file.write(before + json.dumps(event))
        before = ",\n"
    file.write("\n]}\n")


def _write_speedscope(file: IO[str], ranks: dict[int, Profile], name: str) -> None:
    json.dump(speedscope(ranks, Path(name).name), file)
    file.write("\n")
