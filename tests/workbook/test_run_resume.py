"""A comparison or a measurement that was killed goes on where it was."""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import yaml
from commands import wait_until
from compare_profiles import TINY

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import write_json
from dlrm_core.config import parameters_from_sections
from dlrm_workbook.ground.processes import only_process
from dlrm_workbook.ground.runs import claim_run_folder
from dlrm_workbook.runner.command import command_run, unfinished_record
from dlrm_workbook.trials.compare import comparison
from dlrm_workbook.trials.compare.comparison import earlier_try, whole_profile

CHANGE = {"training.batch_size": 8}

PROGRAM = """
import json, sys
from pathlib import Path
from dlrm_workbook.trials.compare import comparison
from dlrm_core.config import parameters_from_sections
sections, change, folder = json.loads(sys.argv[1])
compared = comparison.comparison_of(
    parameters_from_sections(sections), Path(folder), change=change, rounds=1
)
compared.profile_baseline()
compared.predict()
compared.measure()
"""


def test_what_had_finished_is_not_done_again(tmp_path: Path) -> None:
    """Killed with -9 in its first round: profile, prediction and finished runs stay."""
    given = json.dumps([TINY, CHANGE, str(tmp_path)])
    first = subprocess.Popen([sys.executable, "-c", PROGRAM, given], start_new_session=True)
    rounds = tmp_path / "rounds" / "rounds.json"
    wait_until(rounds.is_file, 200, [first])
    os.killpg(first.pid, signal.SIGSTOP)  # however long the rest takes, the next run is not made
    with pytest.raises(InputError, match="is being run by another process"):
        resumed(tmp_path).measure()
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    before = json.loads((tmp_path / "compare.json").read_text())
    kept = json.loads(rounds.read_text())["runs"]
    assert before["status"] == "running" and before["predicted_at"] and len(kept) == 1
    profile = whole_profile(tmp_path, "baseline")
    assert profile is not None
    written = (profile / "profile" / "profile.json").stat().st_mtime_ns

    compared = resumed(tmp_path)
    compared.profile_baseline()
    compared.predict()
    compared.measure()
    after = json.loads((tmp_path / "compare.json").read_text())
    for name in ("predicted_at", "measured_from", "change", "settings"):
        assert after[name] == before[name], name
    foretold = [outcome["predicted"] for outcome in before["outcomes"]]
    assert foretold[0] and [outcome["predicted"] for outcome in after["outcomes"]] == foretold
    assert (profile / "profile" / "profile.json").stat().st_mtime_ns == written
    assert json.loads(rounds.read_text())["runs"][0] == kept[0]
    assert [run["setting"] for run in after["rounds"]] == ["baseline", "change"]
    assert after["outcomes"][0]["measured"]
    assert "stopped and gone on with" in after["notices"][0]


def resumed(folder: Path) -> comparison.Comparison:
    return comparison.comparison_of(parameters_from_sections(TINY), folder, change=CHANGE, rounds=1)


def test_a_profile_cut_short_is_made_anew_beside_it(tmp_path: Path) -> None:
    (tmp_path / "baseline" / "recording").mkdir(parents=True)
    assert whole_profile(tmp_path, "baseline") is None
    (tmp_path / "baseline-2" / "profile").mkdir(parents=True)
    (tmp_path / "baseline-2" / "profile" / "profile.json").write_text("{}")
    assert whole_profile(tmp_path, "baseline") == tmp_path / "baseline-2"


def test_other_versions_are_told(tmp_path: Path) -> None:
    assert earlier_try(tmp_path) == {}
    write_json(
        tmp_path / "compare.json",
        {"rounds": [{}], "versions": {"torch": "1.0"}, "notices": ["kept"], "change": CHANGE},
    )
    earlier = earlier_try(tmp_path)
    assert earlier["change"] == CHANGE
    assert earlier["notices"][0] == "kept" and "torch 1.0, now " in earlier["notices"][-1]


def test_only_the_same_unfinished_comparison_is_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(TINY))
    sections = parameters_from_sections(TINY).to_sections()
    given = {**sections, "change": CHANGE, "rounds": 2}
    folder = claim_run_folder(tmp_path, "compare", "tiny", parameters=given, command="x")
    record = unfinished_record(folder.path, "compare", given)
    assert record == folder.record
    for other, message in (
        ({**given, "rounds": 3}, "begun with rounds 2, but now it is 3"),
        ({**given, "change": {"training.batch_size": 4}}, "begun with change.training.batch_size"),
        ({**sections, "change": CHANGE}, "begun with rounds 2, which is not given now"),
    ):
        with pytest.raises(InputError, match=message):
            unfinished_record(folder.path, "compare", other)
    typed = Namespace(
        file=str(file), parameter=["change.training.batch_size=4"], cell_timeout=60,
        resume=str(folder.path), argv=["dlrm"], notebook="compare", output_root=None,
    )  # fmt: skip
    with pytest.raises(InputError, match="begun with"):
        command_run(typed)
    folder.close("finished")
    with pytest.raises(InputError, match="has finished"):
        unfinished_record(folder.path, "compare", given)
    ranks = claim_run_folder(tmp_path, "scaling", "tiny", parameters=given, command="x")
    assert unfinished_record(ranks.path, "scaling", given)["notebook"] == "scaling"
    ranks.close("finished")
    with pytest.raises(InputError, match="this measurement has finished"):
        unfinished_record(ranks.path, "scaling", given)
    other = claim_run_folder(tmp_path, "train", "tiny", parameters={}, command="x")
    with pytest.raises(InputError, match="is no run of compare"):
        unfinished_record(other.path, "compare", given)
    with pytest.raises(InputError, match=r"it has no run\.json"):
        unfinished_record(tmp_path, "scaling", given)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with (
        only_process(tmp_path / "new"),
        pytest.raises(InputError, match="is being run by another process"),
        only_process(tmp_path / "new"),
    ):
        pass
    with only_process(tmp_path / "new"):
        pass
