"""Children that end with the process that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlrm_workbook.processes import STARTER, end_with_starter, ending_with_us
from dlrm_workbook.studies.bench.runs import environment_of, settings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")

CHILD = (
    "import sys, time; from dlrm_workbook.processes import end_with_starter; "
    "end_with_starter(); print('here', flush=True); time.sleep(60)"
)
PARENT = f"""
import os, subprocess, sys
from dlrm_workbook.processes import ending_with_us
child = subprocess.Popen(
    [sys.executable, "-c", {CHILD!r}], env=os.environ | ending_with_us(), stdout=subprocess.PIPE
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
    ends = time.monotonic() + 10
    while is_there(pid) and time.monotonic() < ends:
        time.sleep(0.02)
    assert not is_there(pid)


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    other = os.environ | {STARTER: "1"} if os.getpid() != 1 else os.environ | {STARTER: "2"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=other, timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL


def test_without_being_asked_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STARTER, raising=False)
    end_with_starter()
    assert ending_with_us() == {STARTER: str(os.getpid())}
    assert environment_of(1).items() >= (settings(1) | ending_with_us()).items()
    assert STARTER not in settings(1), "what is recorded and compared on --resume"
