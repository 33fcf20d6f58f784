"""A seeded part of the campaigns in tests/campaigns: hostile files are read or refused."""

import gzip
import json
import math
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import time
import tracemalloc
from collections import Counter
from itertools import permutations
from pathlib import Path

import gpu_trace
import pytest
from commands import run_python
from databases import written
from recordings import RECORDINGS

from dlrm_core.base.errors import InputError
from dlrm_workbook.recordings.hpctoolkit.database import read_database
from dlrm_workbook.recordings.hpctoolkit.to_profile import profile_from_database
from dlrm_workbook.recordings.open import open_recording, require_recording
from dlrm_workbook.samples import __file__ as samples

SAMPLE = Path(samples).parent / "seed-cpu"


HOSTILE = """
import json, sys
from tests.campaigns.attacks import attack
tallies = {what: attack(what, count) for what, count in json.loads(sys.argv[1]).items()}
print(json.dumps({what: [one.outcomes, one.failures] for what, one in tallies.items()}))
"""


@pytest.mark.parametrize(
    "counts", [{"parameters": 300, "pages": 12, "checkpoints": 75}, {"databases": 600}], ids=list
)
def test_hostile_files_are_read_or_refused_in_a_sentence(counts: dict[str, int]) -> None:
    # a process of its own: the campaign limits its address space
    printed = run_python(HOSTILE, json.dumps(counts), cwd=Path(__file__).parents[2])
    for what, (outcomes, failures) in json.loads(printed.splitlines()[-1]).items():
        assert failures == [] and sum(outcomes.values()) == counts[what], (what, outcomes)


def test_files_of_different_databases_are_refused_or_named(tmp_path: Path) -> None:
    places = sorted((RECORDINGS.parent / "hpctoolkit-databases").glob("[ls]*.d"))
    if not places:
        pytest.skip("the real databases are not here")
    names = ("meta.db", "profile.db", "cct.db", "trace.db")
    told: Counter[str] = Counter()
    for here, other in permutations(places, 2):
        for swapped in names:
            folder = tmp_path / "mixed"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for name in names:
                shutil.copyfile((other if name == swapped else here) / name, folder / name)
            try:
                database = read_database(folder)
                profile = profile_from_database(database)
            except InputError:
                told["refused"] += 1
                continue
            told["caution" if database.cautions else f"{here.stem} {swapped} {other.stem}"] += 1
            assert set(database.cautions) <= set(profile.meta["cautions"])
    assert set(told) == {"refused", "caution"}, told
    assert told["refused"] > 20 and told["caution"] > 12


def test_whole_databases_have_no_doubts(tmp_path: Path) -> None:
    for place in [written(tmp_path), *sorted(RECORDINGS.parent.glob("*/*.d"))]:
        assert read_database(place).cautions == []


def test_a_context_with_a_huge_number_takes_no_memory(tmp_path: Path) -> None:
    folder = written(tmp_path)
    path = folder / "profile.db"
    data = bytearray(path.read_bytes())
    (section,) = struct.unpack_from("<Q", data, 24)
    profiles, number, stride = struct.unpack_from("<QIB", data, section)
    for profile in range(number):
        contexts, first = struct.unpack_from("<I4xQ", data, profiles + profile * stride + 16)
        if contexts:  # the last one of every profile, the summary too
            struct.pack_into("<I", data, first + 12 * (contexts - 1), 2**32 - 9)
    path.write_bytes(bytes(data))
    tracemalloc.start()
    database = read_database(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10e6
    (said,) = (text for text in database.cautions if text.startswith("cct.db"))
    assert f"the other files {2**32 - 8:,}" in said and "differs in 2." in said


def test_what_is_no_recording_is_refused_at_a_glance(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "folder").mkdir()
    for place, why in (
        (tmp_path / "text", r"is no recording: it begins with b'hello'"),
        (tmp_path / "folder", "holds no profile"),
        (tmp_path / "gone", "no such file"),
        (Path("/dev/zero"), "no regular file"),
    ):
        with pytest.raises(InputError, match=why):
            require_recording(place)
    (tmp_path / "trace.json").write_text("  []")
    require_recording(tmp_path / "trace.json")
    require_recording(written(tmp_path / "database"))


def test_a_category_is_quoted_whatever_it_holds(tmp_path: Path) -> None:
    events = gpu_trace.events()
    events.append({**events[0], "ph": "X", "cat": "odd {0} } {s!r}", "ts": 1, "dur": 1})
    path = gpu_trace.write(tmp_path / "trace.json", events)
    said = open_recording(path).profile.meta["cautions"]
    assert "1 event of category 'odd {0} } {s!r}' was not read." in said


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
@pytest.mark.parametrize("after_a_trace", [False, True])
def test_a_header_of_an_archive_takes_no_memory(tmp_path, kind, after_a_trace) -> None:
    # tarfile reads a header whole: one of 3 GB takes 14 MB of gzip
    path, size = tmp_path / "ranks.tar.gz", 100 << 20
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, size
    with gzip.open(path, "wb", compresslevel=1) as file:
        if after_a_trace:
            data = gpu_trace.write(tmp_path / "rank0.json", gpu_trace.events()).read_bytes()
            member = tarfile.TarInfo("rank0.json")
            member.size = len(data)
            file.write(member.tobuf() + data + bytes(-len(data) % 512))
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="cannot be read"):
            open_recording(path)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


ODD = "\x1b]0;title\x07\ud800\u202e"
"""Sets a terminal's title, cannot be written as UTF-8, and turns the direction of what follows."""


def test_odd_characters_of_a_trace_are_shown_as_escapes(tmp_path: Path) -> None:
    events = gpu_trace.events()
    for event in events:
        if event.get("ph") == "X":
            event["name"] += ODD
        if event.get("ph") == "M":
            event["args"]["name"] = ODD
    path = tmp_path / "trace.json"
    devices = [{"id": 0, "name": ODD}]
    path.write_text(json.dumps({"traceEvents": events, "deviceProperties": devices}))
    profile = open_recording(path).profile
    shown = r"\x1b]0;title\x07\ud800\u202e"
    assert profile.contexts["name"].str.endswith(shown).sum() >= 3
    assert profile.meta["device_name"] == shown
    assert profile.save(tmp_path / "profile").is_dir()


def test_a_terminal_gets_no_control_characters(tmp_path: Path) -> None:
    name = os.fsencode(f"{tmp_path}/\x1b]0;title\x07\u202e") + b"\xff.json"
    command = [sys.executable, "-m", "dlrm_workbook", "inspect", name]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    ours, theirs = pty.openpty()
    done = subprocess.run(command, stdout=theirs, stderr=theirs, env=environment, check=False)
    os.close(theirs)
    said = os.read(ours, 10_000)
    os.close(ours)
    assert done.returncode == 2
    assert rb"/\x1b]0;title\x07\u202e\udcff.json does not exist" in said and b"\x1b" not in said
    shutil.copy(gpu_trace.write(tmp_path / "trace.json", gpu_trace.events()), name)
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, "a name that is no UTF-8 can be said in a pipe too"
    assert rb"\udcff.json: torch" in done.stdout


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("passes", True, "meta.passes is True, expected a list of names with values"),
        ("passes", ["x"], "meta.passes is ['x'], expected a list of names with values"),
        ("iteration_ms", [1.0, math.nan], "meta.iteration_ms is [1.0, nan], expected a list of nu"),
        ("not_measured", [[]], "meta.not_measured is [[]], expected names with values"),
        ("title", {"a": 1}, "meta.title is {'a': 1}, expected a text"),
        ("", ["x"], "meta is ['x'], expected names with values"),
    ],
)
def test_what_a_saved_profile_says_of_itself_is_checked(tmp_path, name, value, expected) -> None:
    folder = tmp_path / "profile"
    shutil.copytree(SAMPLE, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    head = json.loads((folder / "profile.json").read_text())
    head["meta"] = head["meta"] | {name: value} if name else value
    (folder / "profile.json").write_text(json.dumps(head))
    with pytest.raises(InputError, match=re.escape(expected)):
        open_recording(folder)
    assert open_recording(SAMPLE).profile.meta["passes"]


@pytest.mark.parametrize("threads", [1, 20_000])
def test_spans_that_overlap_in_any_way_nest_in_seconds(tmp_path: Path, threads: int) -> None:
    # 8,000 of them took 13 s before a span was cut a few times only: these would take over a minute
    spans = [
        {"ph": "X", "cat": ("cpu_op", "python_function")[i % 2], "name": f"f{i % 50}", "pid": 1,
         "tid": i % threads, "ts": i * 7919 % 20_011, "dur": 1 + i * 104_729 % 20_011, "args": {}}
        for i in range(20_000)
    ]  # fmt: skip
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": spans}))
    start = time.process_time()
    profile = open_recording(tmp_path / "trace.json").profile
    assert time.process_time() - start < 40
    own = profile.values.query("metric == 'cpu_time_ms' and scope == 'exclusive'")["value"]
    assert (own >= 0).all() and (profile.threads["kind"] == "cpu_thread").sum() == threads
