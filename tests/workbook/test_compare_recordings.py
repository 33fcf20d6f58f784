"""Two recordings of any programs side by side: device, host and idle time; what makes a ratio."""

import json
from pathlib import Path
from typing import Any

import gpu_trace
import pytest
from profile_rows import bare_profile
from recordings import SEVERAL, TRACES, expected, recording
from test_compare import tiny

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis import compare
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.trace import read_trace
from dlrm_workbook.runner.run import recording_name
from dlrm_workbook.trials.compare import comparison
from dlrm_workbook.trials.compare import show as shown

META = "meta-dlrm-a100x8-rank3"


@pytest.fixture(scope="module")
def meta() -> Profile:
    return open_recording(recording(TRACES[META])).profile


@pytest.fixture(scope="module")
def ranks() -> dict[int, Profile]:
    return open_recording(recording(SEVERAL)).ranks


def test_device_time_and_launches_are_those_of_the_raw_events(meta, ranks) -> None:
    table = compare.recorded_differences(meta, ranks[0])
    truth = expected(META)
    # six iterations of one, one of the other
    assert table["device_ms_before"].sum() * 6 == pytest.approx(
        truth["device_time_sum_us"] / 1e3, abs=0.02
    )
    assert table["launches_before"].sum() * 6 == truth["kernels"]
    one = next(
        row for row in expected("torchrec-dlrm-v100x8").values() if row["distributed"]["rank"] == 0
    )
    assert table["device_ms_after"].sum() == pytest.approx(one["device_time_sum_us"] / 1e3)
    assert table["launches_after"].sum() == one["kernels"]
    step = meta.iterations["end_ns"].sub(meta.iterations["start_ns"]).sum() / 1e6 / 6
    busy = truth["gpu_busy_us"] / 1e3 / 6
    assert table["idle_ms_before"].sum() == pytest.approx(step - busy, abs=0.05)
    by_operator = compare.device_differences(meta, ranks[0])
    assert by_operator["before_ms"].sum() == pytest.approx(table["device_ms_before"].sum())
    assert by_operator["difference_ms"].abs().is_monotonic_decreasing


def test_programs_are_alike_by_their_operators(meta: Profile, ranks: dict[int, Profile]) -> None:
    same = compare.likeness(ranks[0], ranks[7])
    assert same is not None and same[0] == 1 and same[1] > 0.95
    other = compare.likeness(meta, ranks[7])
    assert other is not None and other[0] < 0.3 and other[1] < 0.1


def test_different_programs_make_no_speed_up(tmp_path: Path) -> None:
    runs = [str(recording(TRACES[META])), str(recording(SEVERAL))]
    compared = comparison.comparison_of(tiny(), tmp_path, change={}, runs=runs)
    (outcome,) = compared.outcomes
    assert outcome.speedup is None and "different programs" in outcome.doubt
    said = shown.outcome_text(compared).markdown
    assert "12.5 ms per iteration" in said and "77.5 ms" in said and "x faster" not in said
    assert "this is rank 7" in compared.sentence
    document = json.loads(compared.finish().read_text())
    assert document["per"] == "per iteration"
    (written,) = document["outcomes"]
    assert written["doubt"] and written["measured"]["speedup"] is None
    assert len(compared.of_first_and_last(compare.recorded_differences))
    assert len(compared.of_first_and_last(compare.device_differences))


def write(folder: Path, name: str, events: list[dict[str, Any]]) -> str:
    folder.mkdir(exist_ok=True)
    return str(gpu_trace.write(folder / f"{name}.json", events))


def renamed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same without a mark of its iteration."""
    return [event for event in events if event["name"] != "dlrm::iteration"]


def test_recordings_of_one_program_have_a_ratio(tmp_path: Path) -> None:
    slow = gpu_trace.events()
    for event in slow:
        if event.get("ph") == "X":
            event["dur"] *= 2
            event["ts"] = gpu_trace.BASE_US + 2 * (event["ts"] - gpu_trace.BASE_US)
    runs = [write(tmp_path, "slow", slow), write(tmp_path, "fast", gpu_trace.events())]
    compared = comparison.comparison_of(tiny(), tmp_path / "out", change={}, runs=runs)
    (outcome,) = compared.outcomes
    assert outcome.speedup is not None and outcome.speedup.mid == pytest.approx(2.0)
    assert "2.00x faster" in shown.outcome_text(compared).markdown
    table = compared.of_first_and_last(compare.recorded_differences)
    assert table["device_ms_before"].sum() == pytest.approx(0.14)
    assert table["device_ms_after"].sum() == pytest.approx(0.07)
    assert table["idle_ms_after"].sum() == pytest.approx(0.041)


def test_whole_recordings_are_compared_where_one_has_no_iterations(tmp_path: Path) -> None:
    unmarked = write(tmp_path, "unmarked", renamed(gpu_trace.events()))
    assert read_trace(unmarked).iterations.empty
    runs = [write(tmp_path, "marked", gpu_trace.events()), unmarked]
    compared = comparison.comparison_of(tiny(), tmp_path / "out", change={}, runs=runs)
    assert compared.per == "in the whole recording"
    (outcome,) = compared.outcomes
    assert outcome.speedup is None and outcome.before_ms == pytest.approx(0.1)
    said = shown.outcome_text(compared).markdown
    assert "in the whole recording" in said and "unmarked" in said
    figure = shown.part_differences(outcome.parts, compared.per)
    assert "whole recording" in figure.layout.xaxis.title.text


def test_what_no_gpu_measured_is_not_zero(tmp_path: Path) -> None:
    on_host = [e for e in gpu_trace.events() if e.get("ph") == "X" and e["pid"] == 1]
    runs = [write(tmp_path, "host", on_host), write(tmp_path, "gpu", gpu_trace.events())]
    profiles = [read_trace(path) for path in runs]
    table = compare.recorded_differences(*profiles)
    assert table["device_ms_before"].isna().all() and table["idle_ms_before"].isna().all()
    assert table["device_ms_after"].sum() == pytest.approx(0.07)
    empty = compare.device_differences(*profiles)
    assert empty.empty and "not recorded in both" in empty.attrs["not_measured"]


def test_a_recording_without_times_has_no_parts() -> None:
    nothing = bare_profile()
    assert compare.recorded_parts(nothing).empty
    assert compare.recorded_differences(nothing, nothing).empty


def test_no_parameters_file_is_needed_for_recordings() -> None:
    own = {"runs": ["/a/one.json.gz", "/b/two.d"]}
    assert recording_name(["compare"], own) == "one-two"
    with pytest.raises(InputError, match="needs a parameters file"):
        recording_name(["compare"], {})
