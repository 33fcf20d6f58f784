"""A full disk, a reader that went away, a process that was killed: sentences, and nothing lost."""

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import run_commands

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import JsonLines, whole_folder, write_json
from dlrm_workbook.ground.processes import MeasurementError, run_child
from dlrm_workbook.ground.runs import GONE, RunFolder, claim_run_folder
from dlrm_workbook.runner.index import write_index

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/dev/full and limits are Linux's")

ROOT = Path(__file__).parents[2]
QUICK = ["-f", "quick", "-p", "training.batches=4", "-p", "training.batch_size=32"]
MODULE = [sys.executable, "-m", "dlrm_workbook"]
FULL = "No space left on device"
LIMITED = "File too large"
"""What the system says of a file that grows beyond RLIMIT_FSIZE."""
NO_BYTECODE = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
"""Under such a limit bytecode would be cut short too, and break whoever imports it next."""


def dlrm(*words: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.run(
        [*MODULE, *words], text=True, cwd=ROOT, env=NO_BYTECODE, check=False, timeout=120, **given
    )


def one_sentence(text: str) -> bool:
    return "Traceback" not in text and text.strip().count("\n") == 0 and bool(text.strip())


def test_output_that_cannot_be_written_is_a_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        for words in (["parameters"], ["train", *QUICK]):
            done = dlrm(*words, stdout=full)
            assert done.returncode == 1
            assert done.stderr == f"dlrm {words[0]}: the output cannot be written: {FULL}\n"
        mute = dlrm("train", "-f", "nothing-of-that-name", stderr=full)
    assert mute.returncode == 2, "even where the sentence itself cannot be written"
    for closed in ((1,), (1, 2), (0, 1, 2)):
        gone = [f"{number}>&-" for number in closed]
        shell = ["bash", "-c", shlex.join([*MODULE, "parameters"]) + " " + " ".join(gone)]
        done = subprocess.run(shell, cwd=ROOT, capture_output=True, check=False)
        assert (done.returncode, done.stdout) == (0, b"") and b"Traceback" not in done.stderr


def test_too_few_open_files_and_too_long_names_are_sentences() -> None:
    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (40, 40))
    done = dlrm("run", "bottlenecks", "-p", "profile_run=latest", preexec_fn=few)
    assert done.returncode == 2 and "ulimit -n allows 40" in done.stderr
    assert one_sentence(done.stderr)
    for words in (["inspect"], ["data", "inspect"], ["train", "-f"]):
        for name in ("n" * 300, "/proc/kmsg"):
            done = dlrm(*words, name)
            assert done.returncode == 2 and one_sentence(done.stderr) and len(done.stderr) < 500
            assert name[0] == "n" or "it is no regular file" in done.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m dlrm_workbook parameters | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == [str(128 + signal.SIGPIPE)] and not done.stderr


@pytest.mark.notebook
def test_a_full_disk_is_a_sentence_and_nothing_stays_cut_short(tmp_path: Path) -> None:
    train = ["train", *QUICK, "-p", "training.log_every=1", "--output", str(tmp_path / "metrics")]
    saving = [*train[:-1], str(tmp_path / "saving"), "-p", "training.checkpoint_every=2"]
    run = ["run", "train", *QUICK, "--output-root"]
    commands = [train, saving, [*run, str(tmp_path / "none")], [*run, str(tmp_path / "some")]]
    *trained, refused, failed = run_commands(commands, ROOT, NO_BYTECODE, (400, 400, 0, 9000))
    for done in trained:
        assert done.code == 2 and LIMITED in done.err and str(tmp_path) in done.err
        assert one_sentence(done.err), done.err
    assert not list(tmp_path.rglob("step-*")), "no part of a checkpoint stays"
    # before the run begins: no empty dated folder
    assert refused.code == 2 and one_sentence(refused.err)
    assert LIMITED in refused.err and "choose another with --output-root" in refused.err
    assert not list((tmp_path / "none").iterdir())
    # run.json and the metrics fit, the notebook does not
    assert failed.code == 1 and "Traceback" not in failed.err
    folder = Path(failed.out.strip())
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "failed" and LIMITED in record["error"]
    assert f"{folder.name}/train.ipynb cannot be written" in record["error"]
    assert not (folder / "train.ipynb").exists() and not list(folder.glob(".train*"))


def test_what_is_there_stays_where_the_new_does_not_fit(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from dlrm_core.base.files import write_json\n"
        f"write_json(Path({str(tmp_path / 'a.json')!r}), 'x' * 5000)"
    )
    write_json(tmp_path / "a.json", {"old": 1})
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=NO_BYTECODE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )
    assert done.stderr.strip().endswith(f"a.json cannot be written: {LIMITED}")
    assert json.loads((tmp_path / "a.json").read_text()) == {"old": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_lines_that_do_not_fit_are_told_and_do_not_hide_another_error() -> None:
    with pytest.raises(InputError, match=rf"/dev/full cannot be written: {FULL}"):
        JsonLines(Path("/dev/full")).write({"a": 1})
    with pytest.raises(ZeroDivisionError), JsonLines(Path("/dev/full")) as lines:
        lines._file.write("x")
        raise ZeroDivisionError


def test_a_silent_child_whose_output_cannot_be_kept_is_ended(tmp_path, monkeypatch) -> None:
    from dlrm_workbook.ground import processes

    (tmp_path / "full").symlink_to("/dev/full")
    monkeypatch.setattr(processes, "fresh_path", lambda path: tmp_path / "full")
    code = "import time; print('words', flush=True); time.sleep(600)"
    with pytest.raises(MeasurementError, match=f"s was ended: its output cannot .*{FULL}"):
        run_child([sys.executable, "-c", code], stage="s", logs=tmp_path)


def test_a_folder_is_whole_or_absent_where_nobody_may_write(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match=rf"cannot write the thing to .*{FULL}"),
        whole_folder(tmp_path / "thing", "thing") as part,
    ):
        (part / "file").symlink_to("/dev/full")
        (part / "file").write_text("words")
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from dlrm_workbook.ground.runs import claim_run_folder
folder = claim_run_folder(sys.argv[1], "train", "q", parameters={}, command="x")
print(folder.path, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


def status(folder: Path) -> str:
    return json.loads((folder / "run.json").read_text())["status"]


def test_a_run_that_was_killed_is_interrupted_for_the_next_command(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    killed = subprocess.run([*command, "killed"], capture_output=True, text=True, check=False)
    dead = Path(killed.stdout.strip())
    with subprocess.Popen([*command, "alive"], **streams) as alive:  # type: ignore[call-overload]
        going = Path(alive.stdout.readline().strip())
        assert status(dead) == status(going) == "running"
        write_index(tmp_path)
        assert status(going) == "running"
        with pytest.raises(InputError, match="is being run by another process"):
            RunFolder.reopen(going, {"notebook": "train"})
        alive.stdin.close()
    record = json.loads((dead / "run.json").read_text())
    assert record["status"] == "interrupted" and record["error"] == f"train: {GONE}"
    assert "interrupted" in (tmp_path / "index.html").read_text()
    reopened = RunFolder.reopen(dead, record)
    assert status(dead) == "running" and "error" not in reopened.record
    write_index(tmp_path)
    assert status(dead) == "running", "this process has it"
    reopened.close("finished")
    write_index(tmp_path)
    assert status(dead) == "finished"


def test_closed_folders_are_free_again(tmp_path: Path) -> None:
    folder = claim_run_folder(tmp_path, "train", "q", parameters={}, command="x")
    folder.close("failed")
    RunFolder.reopen(folder.path, folder.record).close("finished")
