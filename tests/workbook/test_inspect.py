"""``dlrm inspect``: every figure of the real recordings against the raw events' own."""

import json
import re
from typing import Any

import gpu_trace
import pytest
from databases import NAMES, expected_of, folder_of
from recordings import SEVERAL, TRACES, expected, recording

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis.inspect import facts_as_text, inspect_recording
from dlrm_workbook.cli import main
from dlrm_workbook.recordings.open import open_recording, require_recording
from dlrm_workbook.samples import SAMPLE

COUNTS = {
    "kernels": "kernels",
    "copies": "copies_and_memsets",
    "communication_kernels": "nccl_kernels",
    "graph_launches": "graph_launches",
    "launched_before_trace": "launched_before_trace",
    "iterations": "profiler_steps",
    "streams": "streams",
    "devices": "gpu",
}
TIMES = {
    "gpu_span_ms": "gpu_span_us",
    "gpu_busy_ms": "gpu_busy_us",
    "gpu_time_ms": "device_time_sum_us",
    "compute_ms": "compute_us",
    "communication_ms": "communication_us",
    "overlap_ms": "overlap_us",
    "launched_before_trace_ms": "launched_before_trace_us",
}


def agree(found: dict[str, Any], truth: dict[str, Any]) -> None:
    assert {ours: found[ours] for ours in COUNTS} == {
        ours: truth[theirs] for ours, theirs in COUNTS.items()
    }
    for ours, theirs in TIMES.items():
        assert found[ours] * 1000 == pytest.approx(truth[theirs], abs=1.0), ours
    assert [found["steps_thread"]] == truth["steps_thread"]
    gpu = sum(row["time_ms"] for row in found["attribution"] if row["device"] == "gpu")
    assert gpu == pytest.approx(found["gpu_time_ms"], abs=1e-3)
    assert 0 <= found["coverage"] <= 1
    assert found["share_of"] == "the whole recording"
    missing = {name for name, value in found.items() if value is None}
    assert missing <= found["not_measured"].keys()


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_holds_what_its_raw_events_say(name: str) -> None:
    found = inspect_recording(open_recording(recording(TRACES[name])))
    assert found["kind"] == "torch" and found["ranks"] == 1 and "per_rank" not in found
    agree(found, expected(name))


def test_an_archive_holds_every_rank() -> None:
    opened = open_recording(recording(SEVERAL))
    found = inspect_recording(opened)
    truth = {one["distributed"]["rank"]: one for one in expected("torchrec-dlrm-v100x8").values()}
    assert [one["rank"] for one in found["per_rank"]] == sorted(truth) == list(opened.ranks)
    for one in found["per_rank"]:
        agree(one, truth[one["rank"]])
    assert found["ranks"] == 8
    for name in ("kernels", "copies", "streams"):
        assert found[name] == sum(one[COUNTS[name]] for one in truth.values())
    assert found["gpu_span_ms"] is None and "per_rank" in found["not_measured"]["gpu_span_ms"]
    # the last to arrive at collectives waits the least
    assert opened.rank == min(truth, key=lambda rank: truth[rank]["communication_us"])
    assert opened.profile is opened.ranks[opened.rank] and str(opened.rank) in opened.sentence


@pytest.mark.parametrize("name", NAMES)
def test_a_database_holds_what_its_metrics_say(name: str) -> None:
    truth = expected_of(name)
    found = inspect_recording(open_recording(folder_of(name)))
    sums = truth["summary_root"]
    assert found["kind"] == "hpctoolkit"

    def root(metric: str) -> float | None:
        values = [v for key, v in sums.items() if key.startswith(f"{metric}|execution|")]
        return values[0] if values else None

    operations = root("GPUOP (sec)")
    if operations is None:
        assert found["gpu_time_ms"] is None and found["kernels"] is None
        assert "gpu_time_ms" in found["not_measured"]
    else:
        assert found["gpu_time_ms"] == pytest.approx(operations * 1000)
        assert found["kernels"] == root("GKER:COUNT")


def test_the_experiment_on_its_h100() -> None:
    found = inspect_recording(open_recording(recording("dlrm-h100-pc.d")))
    assert (found["kernels"], found["streams"]) == (7400, 1)
    assert found["copies"] == 1315, "1,015 copies and 300 memsets"
    assert found["gpu_time_ms"] == pytest.approx(139.8, abs=0.05)
    assert found["gpu_span_ms"] == pytest.approx(80_286, abs=1)
    assert found["gpu_busy_ms"] == pytest.approx(170.5, abs=0.1)


def test_the_command_prints_json_and_text(tmp_path, capsys) -> None:
    trace = gpu_trace.write(tmp_path / "trace.json", gpu_trace.events())
    assert main(["inspect", str(trace), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpu_busy_ms"] == pytest.approx(0.059)
    assert found["gpu_time_ms"] == pytest.approx(0.070)
    assert found["gpu_span_ms"] == pytest.approx(0.063)
    assert (found["kernels"], found["copies"], found["streams"]) == (3, 1, 2)
    assert found["coverage"] == 1.0
    assert found["devices"] is None and "names no device" in found["not_measured"]["devices"]
    assert main(["inspect", str(trace)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"GPU busy, ms +0\.059", said) and "bottom_mlp" in said


def test_a_run_without_gpu_says_so() -> None:
    recorded = open_recording(SAMPLE)
    found = inspect_recording(recorded)
    assert found["gpu_time_ms"] is None and found["kernels"] is None
    assert found["not_measured"]["kernels"]
    assert found["coverage"] > 0.9 and {row["device"] for row in found["attribution"]} == {"cpu"}
    assert "Not measured:" in facts_as_text(recorded, found)


@pytest.mark.parametrize("content", [b"", b"x", b"\x00" * 600, b"\x7fELF\x02", b'{"nodes": []}'])
def test_what_is_no_recording_is_one_sentence_in_the_same_words(tmp_path, capsys, content) -> None:
    file = tmp_path / "odd.json"
    file.write_bytes(content)
    assert main(["inspect", str(file)]) == 2
    said = capsys.readouterr().err
    assert "odd.json" in said and "Traceback" not in said and len(said.splitlines()) == 1
    if len(content) < 2:
        begins = "begins with b'x'" if content else "is empty"
        begins = re.escape(f"{file} is no recording: it {begins}")
        with pytest.raises(InputError, match=begins) as one:
            open_recording(file)
        with pytest.raises(InputError) as other:
            require_recording(file)
        assert str(one.value) == str(other.value)
