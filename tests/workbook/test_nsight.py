"""SQLite exports of Nsight Systems: a real one, ones made from torch traces, and broken ones."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_workbook.analysis.export import perfetto
from dlrm_workbook.analysis.inspect import inspect_profile, inspect_recording
from dlrm_workbook.recordings.nesting import union_ns
from dlrm_workbook.recordings.nsight import COPIES, NVTX, PLACES, RUNTIME, WORK
from dlrm_workbook.recordings.open import Recording, open_recording, require_recording
from dlrm_workbook.recordings.profile import Profile

SHARED = Path(__file__).parents[3] / "shared" / "recordings"
KERNEL, MEMCPY, MEMSET, GRAPH = WORK
SYNC = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"


def shared(name: str) -> Path:
    if not (SHARED / name).is_file():
        pytest.skip(f"{SHARED / name} is not there: the real recordings lie beside the project")
    return SHARED / name


def gid(process: int, thread: int = 0) -> int:
    """A ``globalTid`` as exports have them, with the number of a machine above."""
    return 1 << 48 | process << 24 | thread


class Export:
    """Writes exports: tables of whatever columns the rows have, texts by number.

    Args:
        modern: names as numbers, and tables that exports of 2021 lack.
    """

    def __init__(self, path: Path, modern: bool = True) -> None:
        self.path, self.modern = path, modern
        self.rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.texts: dict[str, int] = {}

    def text(self, value: str) -> int:
        return self.texts.setdefault(value, len(self.texts) + 1)

    def call(self, start: int, end: int, name: str, launch: int = 0, tid: int = gid(7, 8)) -> None:
        row = {"start": start, "end": end, "globalTid": tid, "correlationId": launch}
        self.rows[RUNTIME].append(row | {"nameId": self.text(f"{name}_v7000")})

    def range(self, start: int, end: int | None, name: str, tid: int = gid(7, 8), type: int = 59):
        by_number = self.modern and len(name) % 2
        named = (
            {"text": None, "textId": self.text(name)}
            if by_number
            else {"text": name, "textId": None}
        )
        row = {"start": start, "end": end, "globalTid": tid, "eventType": type}
        self.rows[NVTX].append(row | named)

    def work(self, table: str, start: int, end: int, launch: int, **more: Any) -> None:
        row = {"start": start, "end": end, "deviceId": 0, "contextId": 1, "streamId": 7}
        row |= {"correlationId": launch, "globalPid": gid(7)}
        if table == KERNEL:
            name = self.text(more.pop("name", "gemm"))
            row |= {"demangledName": name, "shortName": name}
        self.rows[table].append(row | more)

    def write(self) -> Path:
        strings = [{"id": number, "value": text} for text, number in self.texts.items()]
        with sqlite3.connect(self.path) as database:
            for table, rows in {**self.rows, "StringIds": strings}.items():
                columns = list(dict.fromkeys(name for row in rows for name in row))
                database.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
                values = [[row.get(name) for name in columns] for row in rows]
                marks = ", ".join("?" * len(columns))
                database.executemany(f"INSERT INTO {table} VALUES ({marks})", values)
        database.close()
        return self.path


def exported(trace: Path, target: Path, modern: bool) -> Path:
    """A torch trace as Nsight Systems would have recorded the program under ``emit_nvtx``."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    export = Export(target, modern)
    for event in events:
        if event.get("ph") != "X":
            continue
        start, args, name = round(event["ts"] * 1000), event.get("args", {}), event["name"]
        end = start + round(event["dur"] * 1000)
        category, launch = event["cat"], args.get("correlation", 0)
        tid = gid(event["pid"], event["tid"]) if isinstance(event["tid"], int) else 0
        own = {
            "globalPid": gid(3113936),
            "deviceId": args.get("device"),
            "streamId": args.get("stream"),
        }
        if category == "cpu_op":
            sequence = args.get("Sequence number", -1)
            added = f", seq = {sequence}" if sequence >= 0 else ""
            sizes = f", sizes = {args['Input Dims']}" if "Input Dims" in args else ""
            export.range(start, end, f"{name}{added}, op_id = 5{sizes}", tid)
        elif category == "user_annotation":
            export.range(start, end, name, tid)
        elif category == "cuda_runtime":
            export.call(start, end, name, launch, tid)
        elif category == "kernel":
            grid, block = args["grid"], args["block"]
            size = {f"grid{axis}": n for axis, n in zip("XYZ", grid, strict=True)}
            size |= {f"block{axis}": n for axis, n in zip("XYZ", block, strict=True)}
            size |= {"registersPerThread": args["registers per thread"], "staticSharedMemory": 0}
            size |= {"dynamicSharedMemory": args["shared memory"]}
            export.work(KERNEL, start, end, launch, name=name, **own, **size)
        elif category == "gpu_memcpy":
            way, places = name.removeprefix("Memcpy ").rstrip(")").split(" (")
            source, target_kind = (PLACES.index(place) for place in places.split(" -> "))
            kinds = {"copyKind": COPIES.index(way), "srcKind": source, "dstKind": target_kind}
            export.work(MEMCPY, start, end, launch, bytes=args["bytes"], **own, **kinds)
        elif category == "gpu_memset":
            export.work(MEMSET, start, end, launch, bytes=args["bytes"], memKind=2, **own)
    return export.write()


def no_overlaps(recording: Recording) -> bool:
    """Whether the events of each track of an export to Perfetto nest."""
    tracks = defaultdict(list)
    for event in perfetto(recording.ranks or {0: recording.profile}):
        if event["ph"] == "X":
            start = round(1000 * event["ts"])
            tracks[event["pid"], event["tid"]].append((start, -start - round(1000 * event["dur"])))
    for events in tracks.values():
        open_until: list[int] = []
        for start, end in sorted(events):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            if open_until and -end > open_until[-1]:
                return False
            open_until.append(-end)
    return True


def calls_of(profile: Profile, kind: str) -> dict[str, float]:
    calls, contexts = profile.value_table("calls"), profile.contexts
    chosen = contexts["kind"].eq(kind)
    return calls[chosen].groupby(contexts["name"][chosen]).sum().to_dict()


def test_the_real_export_has_the_counts_and_times_of_its_tables() -> None:
    path = shared("nsight/cloverleaf-a100.sqlite")
    require_recording(path)
    recording = open_recording(path)
    facts = inspect_recording(recording)
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        one = lambda sql: database.execute(sql).fetchone()  # noqa: E731
        kernels, kernel_ns = one(f"SELECT count(*), sum(end - start) FROM {KERNEL}")
        copies, copy_ns = one(f"SELECT count(*), sum(end - start) FROM {MEMCPY}")
        calls = one(f"SELECT count(*), sum(end - start) FROM {RUNTIME}")
        polls = one(
            "SELECT count(*), sum(end - start) FROM OSRT_API JOIN StringIds ON id = nameId "
            "WHERE value = 'poll'"
        )
        work = np.array(
            database.execute(
                f"SELECT start, end FROM {KERNEL} UNION ALL SELECT start, end FROM {MEMCPY}"
            ).fetchall()
        )
        copied = one(f"SELECT sum(bytes) FROM {MEMCPY}")[0]
    database.close()
    assert (facts["kind"], facts["devices"]) == ("nsight", ["NVIDIA A100-SXM4-80GB"])
    assert (facts["kernels"], facts["copies"]) == (kernels, copies) == (1312, 279)
    assert facts["gpu_time_ms"] == pytest.approx((kernel_ns + copy_ns) / 1e6, abs=1e-6)
    assert facts["compute_ms"] == pytest.approx(kernel_ns / 1e6, abs=1e-6)
    assert facts["gpu_busy_ms"] == pytest.approx(union_ns(work[:, 0], work[:, 1]) / 1e6, abs=1e-6)
    span = work[:, 1].max() - work[:, 0].min()
    assert facts["gpu_span_ms"] == pytest.approx(span / 1e6, abs=1e-6)
    assert facts["launched_before_trace"] == 0
    assert facts["iterations"] == 10  # of cloverleaf's hydro loop
    profile = recording.profile
    assert profile.value_table("copy_bytes").sum() == copied
    assert sum(calls_of(profile, "runtime").values()) == calls[0]
    assert calls_of(profile, "function")["poll"] == polls[0]
    time = profile.value_table("cpu_time_ms")[profile.contexts["name"].eq("poll")].sum()
    assert time == pytest.approx(polls[1] / 1e6, abs=1e-6)
    assert no_overlaps(recording)


@pytest.mark.parametrize("modern", [True, False])
def test_an_export_of_a_program_agrees_with_its_torch_trace(tmp_path: Path, modern: bool) -> None:
    trace = shared("traces/meta-dlrm-a100x8-rank3.json.gz")
    recording = open_recording(exported(trace, tmp_path / "export.sqlite", modern))
    theirs, ours = open_recording(trace).profile, recording.profile
    for kind in ("kernel", "copy", "runtime", "operator", "annotation"):
        assert calls_of(ours, kind) == calls_of(theirs, kind)
    facts, expected = inspect_profile(ours), inspect_profile(theirs)
    alike = set(expected) - {"kind", "devices", "not_measured", "cautions"}
    for name in alike - {"attribution"}:
        assert facts[name] == pytest.approx(expected[name]), name
    parts, known = (
        {(row["component"], row["phase"], row["device"]): row["time_ms"] for row in table}
        for table in (facts["attribution"], expected["attribution"])
    )
    assert parts == pytest.approx(known)
    assert no_overlaps(recording)
