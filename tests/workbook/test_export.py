"""``dlrm export``: what other viewers are given is what the recording holds."""

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import gpu_trace
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_workbook import cli
from dlrm_workbook.analysis.export import perfetto, speedscope
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.samples import sample_profile
from tests.recordings import recording


def lanes(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    held: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            held[names[event["tid"]]].append(event)
    return held


def is_nested(events: list[dict[str, Any]]) -> bool:
    """Whether each event lies within, or outside, each other one."""
    open_until: list[float] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while open_until and open_until[-1] <= event["ts"] + 1e-3:
            open_until.pop()
        if open_until and event["ts"] + event["dur"] > open_until[-1] + 1e-3:
            return False
        open_until.append(event["ts"] + event["dur"])
    return True


def test_every_span_of_a_trace_is_exported_with_its_part() -> None:
    profile = sample_profile()
    held = lanes(list(perfetto({0: profile})))
    assert len(held.pop("iterations")) == len(profile.iterations)
    assert sum(map(len, held.values())) == len(profile.trace)
    total_us = (profile.trace["end_ns"] - profile.trace["start_ns"]).sum() / 1e3
    assert sum(e["dur"] for events in held.values() for e in events) == pytest.approx(total_us)
    parts = {e["args"]["part"] for events in held.values() for e in events}
    assert {"data forward", "embedding backward"} <= parts


def test_samples_become_calls_that_nest_and_fill_the_same_time() -> None:
    profile = open_recording(recording("dlrm-h100-host.d")).profile
    held = lanes(list(perfetto({0: profile})))
    held.pop("iterations")
    threads = profile.threads[profile.threads["kind"] == "cpu_thread"]
    for thread in threads.itertuples():
        events = held[thread.name]
        rows = profile.trace[profile.trace["profile"] == thread.profile]
        sampled_us = (rows["end_ns"] - rows["start_ns"]).sum() / 1e3
        assert is_nested(events)
        outermost_us = sum(e["dur"] for e in events) - sum(e["dur"] for e in _inner(events))
        assert outermost_us == pytest.approx(sampled_us, rel=1e-6)


def _inner(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that lie within another one."""
    inner, until = [], -1.0
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        if event["ts"] + event["dur"] <= until + 1e-3:
            inner.append(event)
        else:
            until = event["ts"] + event["dur"]
    return inner


def test_a_call_tree_adds_up_to_the_recording() -> None:
    profile = sample_profile()
    document = speedscope({0: profile}, "sample")
    assert document["$schema"].endswith("file-format-schema.json")
    (made,) = document["profiles"]
    own = profile.value_table("cpu_time_ms")
    assert sum(made["weights"]) == pytest.approx(own[own > 0].sum())
    assert made["endValue"] == pytest.approx(sum(made["weights"]))
    frames = document["shared"]["frames"]
    for stack in made["samples"]:
        assert all(0 <= number < len(frames) for number in stack)
    leaves = {frames[stack[-1]]["name"] for stack in made["samples"]}
    assert "aten::addmm" in leaves


@pytest.mark.parametrize("to", ["perfetto", "speedscope"])
def test_the_command_writes_a_whole_file_and_names_it(to, tmp_path, capsys) -> None:
    run = sample_profile().save(tmp_path / "profile")
    plain, packed = tmp_path / "out.json", tmp_path / "out.json.gz"
    for target in (plain, packed):
        assert cli.main(["export", str(run), "--to", to, str(target)]) == 0
        assert capsys.readouterr().out == f"{target}\n"
    document = json.loads(plain.read_text())
    assert document == json.loads(gzip.decompress(packed.read_bytes()))
    assert document["traceEvents" if to == "perfetto" else "profiles"]


def test_what_has_no_timeline_is_refused_with_the_other_way(tmp_path, capsys) -> None:
    whole = sample_profile()
    tables = {n: getattr(whole, n) for n in ("contexts", "metrics", "values", "threads")}
    run = Profile.build(meta=whole.meta, **tables).save(tmp_path / "profile")
    target = tmp_path / "out.json"
    assert cli.main(["export", str(run), "--to", "perfetto", str(target)]) == 2
    assert "holds no timeline" in capsys.readouterr().err
    assert not target.exists()
    assert cli.main(["export", str(run), "--to", "perfetto", str(tmp_path / "out.txt")]) == 2
    assert "expected a file that ends in .json" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "none"), "--to", "speedscope", str(target)]) == 2
    assert "does not exist" in capsys.readouterr().err


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30), st.sampled_from("kco")), min_size=1)
)
def test_no_two_events_of_a_track_overlap(drawn: list[tuple[int, int, str]]) -> None:
    """Spans of a thread nest, as Perfetto draws them; those of a stream follow each other."""
    events = gpu_trace.events()
    for number, (start, length, what) in enumerate(drawn):
        if what == "o":
            events.append(gpu_trace.operator("a", start, start + length))
        else:
            kind = {"k": "kernel", "c": "gpu_memcpy"}[what]
            end = start + length
            events.append(gpu_trace.on_gpu(kind, "b", start, end, 7, correlation=1000 + number))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(json.dumps({"traceEvents": events}))
        exported = [e for e in perfetto({0: open_recording(path).profile}) if e["ph"] == "X"]
    tracks: dict[int, list[tuple[float, float]]] = {}
    for event in exported:
        tracks.setdefault(event["tid"], []).append((event["ts"], -event["dur"]))
    for spans in tracks.values():
        ends: list[float] = []
        for start, negative in sorted(spans):
            while ends and ends[-1] <= start + 1e-6:
                ends.pop()
            assert not ends or start - negative <= ends[-1] + 1e-6
            ends.append(start - negative)
