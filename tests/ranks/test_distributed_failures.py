"""A rank that dies, stops or gets stuck ends the run with its name, and nothing is lost."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml
from commands import wait_until
from optional_tools import needs_torchrec
from small_training import SMALL, sections_with, whole_checkpoint

from dlrm_core.base.errors import InputError
from dlrm_core.run.checkpoint import steps_in
from dlrm_ranks import watch
from dlrm_ranks.trainer import require_same_start
from dlrm_ranks.watch import Sign, judge, own_start, process_state
from dlrm_studies.scaling.launch import RanksFailed, how_it_ended, launch_lines, run_ranks

ENDLESS = sections_with(
    SMALL,
    {"bottom_mlp": "5-12-16", "embedding_dim": 16},
    batches=1_000_000,
    log_every=1000,
    checkpoint_every=40,
    optimizer="adagrad",
    sharding="row_wise",
)


def has_ended(process):
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def endless(folder, timeout_s):
    training = ENDLESS["training"] | {"rank_timeout_s": timeout_s}
    file = folder / "endless.yaml"
    file.write_text(yaml.safe_dump(ENDLESS | {"training": training}))
    return file, folder / "out"


@needs_torchrec
def test_a_killed_rank_is_named_and_checkpoints_stay(tmp_path):
    """With torchrun itself, as one types it."""
    file, output = endless(tmp_path, 250.0)
    errors = tmp_path / "errors"
    with errors.open("w") as said:
        launcher = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", "2", "-m", "dlrm_core", "train"),
                *("-f", str(file), "--output", str(output), "--resume", "latest"),
            ],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
    try:
        wait_until(lambda: steps_in(output / "checkpoint"))
        victim = int(re.search(r"rank 1 \(host .*?, process (\d+)\)", errors.read_text())[1])
        ranks = psutil.Process(launcher.pid).children()
        os.kill(victim, signal.SIGKILL)
        # long before the ranks' own time is up
        assert launcher.wait(timeout=120) != 0
    finally:
        launcher.kill()
        launcher.wait()
    text = errors.read_text()
    named = re.search(r"dlrm train: rank 1 \(host (\S+), process (\d+)\) is gone", text)
    assert named and int(named[2]) == victim, text[-3000:]
    assert re.search(r"its last iteration was [\d,]+", text)
    begins = f"no checkpoint in {output / 'checkpoint'} yet: starting from the beginning"
    assert text.count(begins) == 1, "one rank says it, at once"
    assert "exitcode: -9" in text or "SIGKILL" in text
    # the newest that is there is whole
    last = steps_in(output / "checkpoint")[-1]
    whole_checkpoint(output / "checkpoint" / f"step-{last:08d}")
    wait_until(lambda: all(has_ended(rank) for rank in ranks))


def test_ranks_that_see_other_checkpoints_are_refused():
    require_same_start([0, 0, 0])
    require_same_start([40, 40])
    with pytest.raises(InputError, match=r"rank 0 finds no checkpoint, but rank 2 the .* step 40"):
        require_same_start([0, 0, 40])


@needs_torchrec
def test_a_stopped_rank_is_named_and_ended_in_time(tmp_path):
    """With our own launcher, which knows how each rank ended."""
    file, output = endless(tmp_path, 15.0)
    others = set(psutil.Process().children())  # such as torch's compiling processes
    stopped = []

    def is_reported():
        # the checkpoint is there some time before its line is
        file = output / "metrics.jsonl"
        return file.is_file() and '"checkpoint"' in file.read_text()

    def stop():
        wait_until(is_reported)
        for child in psutil.Process().children():
            if child.environ().get("RANK") == "1":
                stopped.append(child.pid)
                child.send_signal(signal.SIGSTOP)

    thread = threading.Thread(target=stop)
    thread.start()
    command = (sys.executable, "-m", "dlrm_core", "train", "-f", file, "--output", output)
    try:
        with pytest.raises(RanksFailed) as failed:
            run_ranks(command, 2, 120.0, {"PYTHONPATH": str(Path(__file__).parents[2])})
    finally:
        thread.join()
    said = str(failed.value)
    assert re.search(rf"rank 1 of 2 \(host \S+, process {stopped[0]}\) was ended by SIGKILL", said)
    assert re.search(r"after iteration [\d,]+|before any of its iterations was recorded", said)
    assert "has given no sign of life for" in said and "is stopped (SIGSTOP)" in said
    assert set(psutil.Process().children()) <= others
    last = steps_in(output / "checkpoint")[-1]
    whole_checkpoint(output / "checkpoint" / f"step-{last:08d}")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines if "kind" in line} == {"checkpoint"}


def sign(rank, now, *, silent=0.0, kept=0.0, waiting=False, state="running", progress=10):
    told = {
        **{"host": "h", "pid": 100 + rank, "begun": "1", "iteration": 7, "message": "no space"},
        **{"waiting": waiting, "state": state, "progress": progress},
    }
    return Sign(told, now - silent, progress, now - kept)


BEHIND = {"waiting": True, "kept": 12, "progress": 9}


@pytest.mark.parametrize(
    ("signs", "seen", "lost", "how"),
    [
        ([{}, {}], "R", None, ""),
        ([{}, {"silent": 9}], "R", None, ""),
        ([{}, {"silent": 11}], "T", 1, "no sign of life for 11 s and is stopped"),
        ([{}, {"silent": 11}], "", 1, "no sign of life for 11 s \\("),
        ([{}, {"state": "failed"}], "R", 1, "failed: no space"),
        ([{}, {"state": "refused"}], "R", 1, "failed: no space"),
        ([{}, {"state": "done", "silent": 99}], "gone", None, ""),
        # all stand still: who waits is not to blame
        ([{"waiting": True, "kept": 12}, {"kept": 11}], "R", 1, "kept the others waiting for 11 s"),
        # all wait: who is behind
        ([BEHIND, BEHIND | {"progress": 8}], "R", 1, "kept the others waiting"),
        # nobody waits (all make a large batch), or one goes on: nothing is wrong
        ([{"kept": 50}, {"kept": 50}], "R", None, ""),
        ([{"waiting": True, "kept": 50}, {"kept": 1}], "R", None, ""),
    ],
)
def test_who_is_lost(signs, seen, lost, how):
    now = 1000.0
    given = {rank: sign(rank, now, **about) for rank, about in enumerate(signs)}
    alive = "R" if seen == "gone" else seen

    def process(told):
        return "gone" if told["state"] == "done" else (alive if told["pid"] == 101 else "R")

    found = judge(given, now, 10.0, process)
    assert (found.rank if found else None) == lost
    if found:
        assert re.search(how, found.how)
        assert found.speaks == (signs[lost].get("state") == "refused")
        assert "process 101" in found.sentence() and "last iteration was 7" in found.sentence()


def test_a_silent_rank_is_lost_sooner_once_an_exchange_failed():
    given = {rank: sign(rank, 50.0, silent=5.0 * rank) for rank in range(2)}
    assert judge(given, 50.0, 10.0, lambda told: "") is None
    found = judge(given, 50.0, 10.0, lambda told: "", 4.0)
    assert found.how == "has given no sign of life for 5 s (an exchange failed meanwhile)"


def test_a_rank_that_is_cut_off_says_so(monkeypatch, capsys):
    """The call to the launcher's store neither answers nor fails, as when a link is cut."""
    ended = queue.Queue()
    mute = SimpleNamespace(set=lambda *told: None, wait=lambda *asked: None)
    mute.multi_get = lambda keys: threading.Event().wait()
    monkeypatch.setattr(watch, "launcher_store", lambda: mute)
    monkeypatch.setattr(watch.os, "_exit", ended.put)
    monkeypatch.setenv("MASTER_ADDR", "first")
    world = SimpleNamespace(rank=3, local_rank=0, size=4, host="second")
    with watch.Watch(world, SimpleNamespace(calls=1, waiting=True), 0.3) as it:
        it.iteration = 7
        assert ended.get(timeout=30) == 3
    said = capsys.readouterr().err.splitlines()[0]
    assert said.startswith("dlrm train: rank 0 (host first) cannot be asked: the launcher's store ")
    assert "has not answered for 0.3 s; its last iteration was 7: the run ends" in said


def test_a_process_is_known_by_its_start():
    child = subprocess.Popen(["sleep", "600"])
    try:
        begun = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        assert process_state(child.pid, begun) in "RSD"
        assert process_state(child.pid, "1") == "gone"  # its number was given to another
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: process_state(child.pid, begun) == "T")
        child.kill()
        wait_until(lambda: process_state(child.pid, begun) == "gone")  # a zombie
    finally:
        child.kill()
        child.wait()
    assert process_state(os.getpid(), own_start()) in "RSD"


def test_how_a_rank_ended_and_how_others_are_started():
    assert how_it_ended(-9) == "was ended by SIGKILL"
    assert how_it_ended(2) == "exited with 2"
    lines = launch_lines("my file.yaml", ["training.sharding=row_wise"], 8, 4)
    train = "-m dlrm_core train -f 'my file.yaml' -p training.sharding=row_wise"
    assert lines["one_node"] == f"torchrun --standalone --nproc-per-node 8 {train}"
    assert "--nnodes 4 --nproc-per-node 8" in lines["each_node"] and train in lines["each_node"]
    assert "#SBATCH --nodes=4" in lines["slurm"] and train in lines["slurm"]
