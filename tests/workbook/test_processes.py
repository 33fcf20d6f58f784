"""Children: run, watched, and ended with the process that started them."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlrm_core.base.errors import InputError
from dlrm_core.base.machine import STARTER, end_with_starter
from dlrm_workbook.evidence.contestants import environment_of, settings
from dlrm_workbook.ground import processes
from dlrm_workbook.ground.processes import (
    MeasurementError,
    Progress,
    run_child,
    started,
    without_collection,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")

CHILD = (
    "import sys, time; from dlrm_core.base.machine import end_with_starter; "
    "end_with_starter(); print('here', flush=True); time.sleep(600)"
)
PARENT = f"""
import os, subprocess, sys
from dlrm_core.base.machine import STARTER
child = subprocess.Popen(
    [sys.executable, "-c", {CHILD!r}],
    env=os.environ | {{STARTER: str(os.getpid())}},
    stdout=subprocess.PIPE,
)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def is_there(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_a_child_ends_with_its_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_there(pid)
        parent.kill()
    ends = time.monotonic() + 100
    while is_there(pid) and time.monotonic() < ends:
        time.sleep(0.02)
    assert not is_there(pid)


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    other = os.environ | {STARTER: "1"} if os.getpid() != 1 else os.environ | {STARTER: "2"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=other, timeout=200, check=False)
    assert done.returncode == -signal.SIGKILL


def test_without_being_asked_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STARTER, raising=False)
    end_with_starter()
    assert environment_of(1).items() >= settings(1).items()
    assert STARTER not in settings(1), "what is recorded and compared on --resume"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_what_a_child_printed_is_kept(tmp_path: Path) -> None:
    lines: list[bytes] = []
    code = """
import json, os, sys
print(json.dumps({"iteration": 4, "ms": 2}))
print("{ no json")
print(json.dumps({"spans": "x" * 3_000_000, "folder": os.getcwd()}))
print("the end", file=sys.stderr)
"""
    done = run_child(python(code), stage="t", logs=tmp_path, folder=tmp_path, on_line=lines.append)
    assert done.exit_code == 0 and not done.timed_out and done.iteration == 4
    assert done.last_object() == done.last_object("spans") and done.last_object("none") is None
    assert (done.last_object() or {})["folder"] == str(tmp_path)
    assert done.last_object("ms") == {"iteration": 4, "ms": 2}
    assert done.last_words() == "the end" and done.stderr == "the end\n"
    assert b"".join(lines).decode() == done.stdout == (tmp_path / "t.out").read_text()
    done.require_success("it")


TALKS = """
import sys, time
from pathlib import Path
from dlrm_workbook.ground.processes import print_stage
def wait_until_seen(name):
    while not Path(sys.argv[1], name).exists():
        time.sleep(0.01)
print_stage("timing alternatives", 7, 24, "backend=fused")
wait_until_seen("7")
print('{"stage": 3, "done": "x"}', flush=True)
print('{"iteration": 2, "of": 9}', flush=True)
wait_until_seen("2")
"""


def test_what_a_child_says_of_its_stage_is_passed_on(tmp_path: Path) -> None:
    seen: list[Progress] = []

    def note(progress: Progress) -> None:
        seen.append(progress)
        (tmp_path / str(progress.iteration)).touch()

    command = [sys.executable, "-c", TALKS, str(tmp_path)]
    run_child(command, stage="recording", progress=note)
    said = [(each.stage, each.iteration, each.of, each.detail) for each in seen]
    told = list(dict.fromkeys(said))
    assert told[-2:] == [("timing alternatives", 7, 24, "backend=fused"), ("recording", 2, 9, "")]


def test_the_sentence_about_a_failure(tmp_path: Path) -> None:
    def sentence(code: str, **options: object) -> str:
        with pytest.raises(InputError) as caught:
            run_child(python(code), stage="t", **options).require_success("the run")  # type: ignore
        assert isinstance(caught.value, MeasurementError) == ("sys.exit(2)" not in code)
        return str(caught.value)

    said = sentence("1 / 0", logs=tmp_path)
    assert said.startswith("the run failed with exit code 1: ZeroDivisionError: division by zero")
    assert said.endswith(f"; see {tmp_path / 't.err'}")
    ours = "from dlrm_core.base.errors import InputError; raise InputError('no such row')"
    assert sentence(ours) == "the run failed with exit code 1: no such row"
    refused = "import sys; print('dlrm train: x is 3', file=sys.stderr); sys.exit(2)"
    assert sentence(refused) == "the run: x is 3"
    assert "still going after" in sentence("import time; time.sleep(60)", timeout_s=0.1)


def test_a_child_that_is_not_waited_for_is_ended() -> None:
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with started(["/bin/sleep", "60"], stage="t", **streams) as process:
        assert is_there(process.pid)
    assert not is_there(process.pid)


def test_only_our_interpreter_is_told_who_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STARTER, "1")
    assert STARTER not in run_child(["/usr/bin/env"], stage="t").stdout
    told = run_child(python(f"import os; print(os.environ['{STARTER}'])"), stage="t").stdout
    assert int(told) == os.getpid()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_of_endless_output_the_begin_and_the_end_are_kept(stream, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(processes, "KEPT_OUTPUT", 400_000)
    monkeypatch.setattr(processes, "KEPT_BEGIN", 50_000)
    monkeypatch.setattr(processes, "KEPT_END", 50_000)
    # what came since the last look is there in full, so each line waits for three looks: the
    # first may have begun before the line, and before it came through the pipe
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "looks = Path(sys.argv[1])\n"
        "def looked():\n"
        "    return looks.stat().st_size if looks.exists() else 0\n"
        "for number in range(30):\n"
        f"    print('line', number, 'x' * 100_000, file=sys.{stream}, flush=True)\n"
        "    begun = looked()\n"
        "    while looked() < begun + 3:\n"
        "        time.sleep(0.001)\n"
        f"print('the end', file=sys.{stream})"
    )
    monkeypatch.setattr(processes, "POLL_S", 0.02)
    looks = tmp_path / "looks"

    def look(progress: Progress) -> None:
        with looks.open("a") as file:
            file.write("x")

    command = [sys.executable, "-c", program, str(looks)]
    done = run_child(command, stage="s", logs=tmp_path, progress=look)
    text = (tmp_path / ("s.out" if stream == "stdout" else "s.err")).read_text()
    assert text.startswith("line 0 ") and text.endswith("the end\n")
    assert len(text) < 2_000_000  # of 3 MB
    told = [line for line in text.splitlines() if line.startswith("[dlrm: ")]
    assert len(told) == 1 and told[0].endswith("bytes of output are left out here]")
    assert int(told[0].split()[1].replace(",", "")) > 1_000_000
    assert done.last_words() == "the end"


def test_the_collector_is_paused_and_left_as_it_was() -> None:
    with pytest.raises(KeyError), without_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled(), "whoever has switched it off wants it off"
    finally:
        gc.enable()
