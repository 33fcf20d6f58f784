"""SQLite exports of Nsight Systems: a real one, ones made from torch traces, and broken ones."""

import gzip
import json
import shutil
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_core.base.errors import InputError
from dlrm_workbook import explain
from dlrm_workbook.analysis.export import perfetto
from dlrm_workbook.analysis.inspect import inspect_profile, inspect_recording
from dlrm_workbook.recordings.nesting import union_ns
from dlrm_workbook.recordings.nsight import COPIES, NVTX, PLACES, RUNTIME, WORK
from dlrm_workbook.recordings.open import Recording, open_recording, require_recording
from dlrm_workbook.recordings.profile import Profile

SHARED = Path(__file__).parents[3] / "shared" / "recordings"
KERNEL, MEMCPY, MEMSET, GRAPH = WORK


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


def exported(trace: Path, target: Path) -> Path:
    """A torch trace as Nsight Systems would have recorded the program under ``emit_nvtx``."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    export = Export(target)
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


def test_an_export_of_a_program_agrees_with_its_torch_trace(tmp_path: Path) -> None:
    trace = shared("traces/meta-dlrm-a100x8-rank3.json.gz")
    recording = open_recording(exported(trace, tmp_path / "export.sqlite"))
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


STEPS = 4


def training(path: Path, modern: bool = True, process: int = 7, gpu: int = 0) -> Export:
    """Four steps of a program: a copy, two operators with a kernel each, their backward."""
    export = Export(path, modern)
    tid, own = gid(process, 8), {"globalPid": gid(process), "deviceId": gpu}
    for step in range(STEPS):
        at, launch = 100_000 * step, 10 * step
        export.range(at, at + 90_000, f"train_step {step}", tid)
        export.call(at + 1_000, at + 3_000, "cudaMemcpyAsync", launch + 1, tid)
        kinds = {"copyKind": 1, "srcKind": 1, "dstKind": 2, "bytes": 4096}
        export.work(MEMCPY, at + 2_000, at + 4_000, launch + 1, **own, **kinds)
        names = [f"aten::embedding_bag, seq = {2 * step}, op_id = 1, sizes = [[9, 4], [8], [2]]"]
        names += [f"aten::addmm, seq = {2 * step + 1}, op_id = 2, sizes = [[4], [2, 4], [4, 4]]"]
        names += [f"AddmmBackward0, seq = {2 * step + 1}, op_id = 3"]
        names += [
            f"autograd::engine::evaluate_function: EmbeddingBagBackward0, stashed seq={2 * step}"
        ]
        for place, name in enumerate(names):
            begin = at + 10_000 * (place + 1)
            export.range(begin, begin + 8_000, name, tid)
            export.call(begin + 1_000, begin + 3_000, "cudaLaunchKernel", launch + place + 2, tid)
            size = dict.fromkeys(("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"), 2)
            kernel = {"name": f"kernel_{place}", "registersPerThread": 32, **own, **size}
            export.work(KERNEL, begin + 2_000, begin + 7_000, launch + place + 2, **kernel)
    export.rows["TARGET_INFO_GPU"] = [
        {"id": n, "name": "NVIDIA H100", "smCount": 132} for n in (0, 1)
    ]
    export.rows["ThreadNames"].append({"globalTid": tid, "nameId": export.text("python")})
    return export


@pytest.mark.parametrize("modern", [True, False])
def test_operators_of_emit_nvtx_have_parts_and_steps(tmp_path: Path, modern: bool) -> None:
    export = training(tmp_path / "export.sqlite", modern)
    if not modern:  # of 2021: no type of names, no process, no kind of event
        for row in export.rows[KERNEL]:
            row["shortName"] = row.pop("demangledName")
            del row["globalPid"], row["contextId"]
        for row in export.rows[NVTX]:
            del row["textId"], row["eventType"]
    profile = open_recording(export.write()).profile
    facts = inspect_profile(profile)
    counts = [facts[name] for name in ("kernels", "copies", "iterations", "threads", "streams")]
    assert counts == [16, 4, STEPS, 1, 1]
    assert facts["devices"] == ["NVIDIA H100"]
    assert profile.threads["name"].tolist() == ["python", "GPU 0 stream 7"]
    assert profile.contexts["shapes"].isin(["[[9, 4], [8], [2]]"]).any()
    parts = {
        (row["component"], row["phase"]): row["time_ms"]
        for row in facts["attribution"]
        if row["device"] == "gpu"
    }
    each = pytest.approx(5_000 * STEPS / 1e6)
    assert parts["embedding", "forward"] == parts["embedding", "backward"] == each
    assert parts["transfer", "forward"] == pytest.approx(2_000 * STEPS / 1e6)
    assert facts["coverage"] == pytest.approx(12 / 22)  # without an interaction, no MLP is told


def test_ranges_that_cross_calls_are_shown_beside_their_thread(tmp_path: Path) -> None:
    export = training(tmp_path / "export.sqlite")
    export.range(15_000, 215_000, "crosses steps", type=60)
    export.range(105_000, 260_000, "crosses too", type=60)
    export.range(0, 90_000, "holds a step", type=60)
    export.range(330_000, None, "still open")
    export.range(5, None, "a mark", type=34)
    recording = open_recording(export.write())
    profile = recording.profile
    beside = profile.threads["name"].str.startswith("ranges beside python")
    assert beside.sum() == 2
    times = profile.value_table("cpu_time_ms", "inclusive").groupby(profile.contexts["name"]).sum()
    assert times["crosses steps"] == pytest.approx(0.2)
    assert times["crosses too"] == pytest.approx(0.155)
    assert times["cudaLaunchKernel"] == pytest.approx(16 * 2_000 / 1e6)
    assert "a mark" not in times
    cautions = " ".join(profile.meta["cautions"])
    assert "1 NVTX range was still open" in cautions
    assert "2 NVTX ranges begin in one call or range of their thread" in cautions
    assert no_overlaps(recording)


def test_graphs_streams_samples_and_what_nsight_systems_says(tmp_path: Path) -> None:
    export = training(tmp_path / "export.sqlite")
    export.call(11_500, 12_500, "cuLaunchKernel", 2)  # within the runtime's call, of its number
    export.call(400_000, 402_000, "cudaGraphLaunch", 90)
    export.call(403_000, 405_000, "cudaGraphLaunch", 91)
    export.work(GRAPH, 401_000, 430_000, 90, graphId=3, graphExecId=4)
    export.work(GRAPH, 430_000, 450_000, 91, graphId=5, graphExecId=6)
    for start in (430_000, 440_000):  # the second graph node by node, overlapping on its stream
        export.work(KERNEL, start, start + 15_000, 91, name="node", graphNodeId=1)
    export.rows["CUBLAS_EVENTS"].append(
        {"start": 0, "end": 500, "globalTid": gid(7, 8), "nameId": export.text("cublasSgemm_v2")}
    )
    seldom = [1_000_000, 1_900_000]  # a thread that sleeps between two samples
    for number, start in enumerate([*range(1_000_000, 1_010_000, 1_000), *seldom]):
        row = {"id": number, "start": start, "globalTid": gid(7, 9 + number // 10)}
        export.rows["COMPOSITE_EVENTS"].append(row)
        stack = {"id": number, "symbol": export.text("spin"), "module": export.text("/lib/a.so")}
        export.rows["SAMPLING_CALLCHAINS"] += [stack | {"stackDepth": depth} for depth in (0, 1)]
    export.rows["DIAGNOSTIC_EVENT"].append({"severity": 2, "text": "Some <b>events</b> were lost"})
    recording = open_recording(export.write())
    facts = inspect_profile(recording.profile)
    assert (facts["kernels"], facts["graph_launches"]) == (16 + 1 + 2, 2)
    assert facts["gpu_busy_ms"] == pytest.approx((16 * 5 + 4 * 2 + 29 + 25) / 1e3)
    profile = recording.profile
    times = profile.value_table("cpu_time_ms").groupby(profile.contexts["name"]).sum()
    assert times["spin"] == pytest.approx(0.012)
    assert calls_of(profile, "function") == {"spin": 12, "cublasSgemm_v2": 1}
    cautions = " ".join(facts["cautions"])
    assert "1 launch of CUDA graphs was recorded as a whole" in cautions
    assert "share the number" not in cautions
    assert "Nsight Systems says: Some <b>events</b> were lost" in cautions
    assert no_overlaps(recording)


def test_a_graph_that_was_recorded_as_a_whole_is_called_one(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    for number in range(3):
        at = 100_000 * number
        export.call(at, at + 5_000, "cudaGraphLaunch", 90 + number)
        export.work(GRAPH, at + 6_000, at + 99_000, 90 + number, graphId=4)
    first = explain(export.write()).ranked_findings[0]
    assert first.title.startswith("CUDA graph 4 takes 9")
    assert "its kernels were not recorded" in first.title and "=node" in first.advice


def test_what_the_profiler_does_is_counted_from_the_first_event(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.call(1_000_000, 1_010_000, "cudaLaunchKernel", 1)
    export.work(KERNEL, 1_020_000, 1_030_000, 1)
    own = {"start": 1_400_000, "end": 1_450_000, "globalTid": gid(7, 8)}
    export.rows["PROFILER_OVERHEAD"].append(own | {"nameId": export.text("CUPTI Buffer flush")})
    overhead = open_recording(export.write()).profile.meta["profiler_overhead"]
    assert overhead == {"name": ["Buffer Flush"], "start": [400_000], "end": [450_000]}


def test_what_no_table_holds_is_to_be_sampled_by_nsight_systems(tmp_path: Path) -> None:
    export = Export(tmp_path / "a.sqlite")
    export.call(0, 1_000, "cudaGetDeviceCount")
    export.call(9_000_000, 9_001_000, "cudaGetDevice")
    first = explain(export.write()).ranked_findings[0]
    assert first.title == "Time in no recorded call takes 100% of the recording"
    assert "nsys profile --sample" in first.advice and "torch" not in first.advice


def test_processes_with_gpus_of_their_own_are_ranks(tmp_path: Path) -> None:
    one, other = training(tmp_path / "a.sqlite"), training(tmp_path / "b.sqlite", process=9, gpu=1)
    for table, rows in other.rows.items():
        numbers = {number: text for text, number in other.texts.items()}
        for row in rows:  # both number their launches, and texts, from 1
            texts = {k: one.text(numbers[v]) for k, v in row.items() if "ame" in k and v in numbers}
            one.rows[table].append(row | texts)
    recording = open_recording(one.write())
    assert sorted(recording.ranks) == [0, 1]
    for profile in recording.ranks.values():
        facts = inspect_profile(profile)
        assert (facts["kernels"], facts["copies"], facts["launched_before_trace"]) == (16, 4, 0)
        assert facts["coverage"] == pytest.approx(12 / 22)
    # in the order in which they see the GPUs, whatever the machine calls these
    one.rows["TARGET_INFO_CUDA_DEVICE"] = [
        {"gpuId": 1 - seen, "cudaId": seen, "pid": pid} for pid in (7, 9) for seen in (0, 1)
    ]
    one.path = tmp_path / "seen.sqlite"
    ranks = open_recording(one.write()).ranks
    streams = [set(profile.threads["name"]) for _, profile in sorted(ranks.items())]
    assert "GPU 1 stream 7" in streams[0] and "GPU 0 stream 7" in streams[1]
    del one.rows["TARGET_INFO_CUDA_DEVICE"]
    # on one GPU they are no ranks, and each has streams of its own
    for row in [*one.rows[KERNEL], *one.rows[MEMCPY]]:
        row["deviceId"] = 0
    one.path = tmp_path / "c.sqlite"
    recording = open_recording(one.write())
    assert not recording.ranks
    facts = inspect_profile(recording.profile)
    assert (facts["kernels"], facts["streams"], facts["threads"]) == (32, 2, 2)
    names = set(recording.profile.threads["name"])
    assert {"GPU 0 of process 7 stream 7", "GPU 0 of process 9 stream 7"} <= names


def test_a_folder_of_exports_holds_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        training(tmp_path / f"report.{rank}.sqlite").write()
    require_recording(tmp_path)
    assert sorted(open_recording(tmp_path).ranks) == [0, 1]
    shutil.copy(tmp_path / "report.0.sqlite", tmp_path / "report.sqlite")
    with pytest.raises(InputError, match="names do not tell one rank each"):
        open_recording(tmp_path)


def test_a_report_says_how_to_export_it_or_is_exported(tmp_path: Path, monkeypatch: Any) -> None:
    report = tmp_path / "my report.nsys-rep"
    report.write_bytes(b"\0report")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="nsys export --type sqlite"):
        open_recording(report)
    source = training(tmp_path / "made.sqlite").write()
    tool = tmp_path / "nsys"
    tool.write_text(f'#!/bin/sh\n/bin/cp "{source}" "$5"\n')
    tool.chmod(0o755)
    assert inspect_profile(open_recording(report).profile)["kernels"] == 16
    tool.write_text("#!/bin/sh\necho this report is too new >&2; exit 1\n")
    with pytest.raises(InputError, match="nsys export says: this report is too new"):
        open_recording(report)


def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_recording(path)
    said = str(caught.value)
    assert path.name in said
    assert "\n" not in said
    return said


def test_what_is_no_export_is_refused_in_one_sentence(tmp_path: Path) -> None:
    good = training(tmp_path / "good.sqlite").write().read_bytes()
    bad = tmp_path / "bad.sqlite"
    bad.write_bytes(good[: len(good) // 2])
    assert "malformed" in refused(bad)
    bad.write_bytes(good[:100] + bytes(4096) + good[4196:])
    refused(bad)
    bad.write_bytes(b"")
    assert "empty" in refused(bad)
    bad.unlink()
    with sqlite3.connect(bad) as database:
        database.execute("CREATE TABLE users (name TEXT)")
    assert "no export of Nsight Systems" in refused(bad)
    with sqlite3.connect(bad) as database:
        database.execute(f"CREATE TABLE {KERNEL} (start INTEGER)")
    assert "lacks the column 'end'" in refused(bad)
    with sqlite3.connect(bad) as database:
        database.execute(f"ALTER TABLE {KERNEL} ADD COLUMN end INTEGER")
    assert "holds no kernel, CUDA call or NVTX range" in refused(bad)
    database.execute("BEGIN EXCLUSIVE")
    assert "locked" in refused(bad)
    database.close()


odd = st.sampled_from([None, -1, 0, "text", 1.5, float("inf"), 2**62, -(2**63), b"\xff", 7 * 10**9])


@settings(max_examples=30)
@given(data=st.data())
def test_odd_values_neither_crash_nor_count(data: st.DataObject, tmp_path_factory: Any) -> None:
    export = training(tmp_path_factory.mktemp("odd") / "export.sqlite")
    rows = [row for table in (RUNTIME, NVTX, KERNEL, MEMCPY) for row in export.rows[table]]
    for _ in range(data.draw(st.integers(1, 12))):
        row = data.draw(st.sampled_from(rows))
        row[data.draw(st.sampled_from(sorted(row)))] = data.draw(odd)
    try:
        facts = inspect_recording(open_recording(export.write()))
    except InputError as error:
        assert "export.sqlite" in str(error)
        return
    assert facts["kernels"] is None or facts["kernels"] <= 16
    if facts["gpu_busy_ms"] is not None:
        assert 0 <= facts["gpu_busy_ms"] <= facts["gpu_span_ms"] + 1e-9
