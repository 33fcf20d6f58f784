"""kill -9 at any moment: the same command goes on and the same bytes come out."""

import importlib
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
from same_files import assert_same_files
from small_data_set import write_text

KILLS, AT_ONCE = 6, 4


@pytest.fixture(scope="module")
def processes():
    """Fresh processes in milliseconds: forked from one that has imported and compiled."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed_work"])
    with pytest.MonkeyPatch.context() as patch:
        # the server that forks has no other way to find the tests' folder
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        context.Process(target=print).start()
    return context


def start(processes, work, target):
    process = processes.Process(target=work, args=(target,))
    process.start()
    return process


@pytest.mark.parametrize("work", ["make_set", "convert_text"], ids=["generate", "preprocess"])
def test_a_killed_run_goes_on_to_the_same_bytes(processes, work, tmp_path):
    # not imported above: it warms up what other test processes have no need of
    work = getattr(importlib.import_module("killed_work"), work)
    write_text(tmp_path)
    started = time.monotonic()
    whole = start(processes, work, tmp_path / "whole")
    whole.join()
    seconds = time.monotonic() - started
    assert whole.exitcode == 0
    draw, kills, notes = random.Random(5), 0, set()
    for trial in range(12):
        target, killed = tmp_path / f"set {trial}", 0
        note = tmp_path / f"set {trial}.partial" / "progress.json"
        while not target.exists() or (target / "progress.json").exists():
            started = time.monotonic()
            process = start(processes, work, target)
            # in the end it may finish, however slow the machine is to begin
            process.join(draw.uniform(0.0, 0.4) * seconds if killed < AT_ONCE else None)
            process.kill()
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL), f"after {killed} kills"
            if process.exitcode == 0:
                seconds = min(seconds, time.monotonic() - started)
            else:
                killed += 1
                notes.add(note.read_text() if note.exists() else "")
        kills += killed
        assert_same_files(tmp_path / "whole", target)
        assert not note.parent.exists()
        if kills >= KILLS:
            break
    # where nothing can be caught in the act this would be a test of nothing
    assert kills >= KILLS and len(notes) > 1


def test_two_processes_do_not_write_one_data_set(processes, tmp_path):
    import fcntl

    folder = tmp_path / "set.partial"
    folder.mkdir()
    (folder / "progress.json").write_text('{"request": {}, "done": {}}')
    from dlrm_core.base.errors import InputError
    from dlrm_workbook.datasets.resumable import workplace

    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    making = workplace(tmp_path / "set", {}, "dlrm data generate")
    with pytest.raises(InputError, match="another process is writing it"), making:
        pass
    os.close(other)
    with workplace(tmp_path / "set", {}, "dlrm data generate"):
        pass
    assert (tmp_path / "set").is_dir()
