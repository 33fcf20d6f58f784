"""Kills training and the making of data sets at random moments (SIGKILL), and goes on.

After every kill of a training run each checkpoint that had been announced must be there
and whole, and at its end weights and optimiser state must be, bit for bit, those of the
same run never killed. The making of a data set (generation with a teacher, conversion of
Criteo's text) is started again after every kill: what was noted as done must never become
less, the data set must not be seen before it is whole, and in the end its files must be,
byte for byte, those of a run never killed. Each run is a process forked from one that has
loaded torch but never computed, so a kill costs a tenth of a second instead of the seconds
of a start.

    python tests/campaigns/kills.py --kills 200 --json benchmarks/results/kills.json

Given again with the same file it goes on, so it can be done in pieces (--seconds).
"""

import argparse
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json, write_json
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.run.checkpoint import find_checkpoint, read_checkpoint, steps_in
from dlrm_workbook.datasets.resumable import NOTE
from dlrm_workbook.ground.machine import machine_facts, versions

sys.path[:0] = [str(Path(__file__).parents[1])]
import killed_work  # noqa: E402
from observers import Calling  # noqa: E402
from same_files import differing_files  # noqa: E402
from small_data_set import write_text  # noqa: E402


@dataclass
class Tally:
    """What came of the kills."""

    kills: int = 0
    """SIGKILLs that hit a run."""
    runs: int = 0
    """Runs killed again and again until they finished."""
    while_writing: int = 0
    """Kills that left an unfinished checkpoint behind: they fell into its writing."""
    checkpoints_verified: int = 0
    data_sets_compared: int = 0
    faults: list[str] = field(default_factory=list)
    by_kind: dict[str, int] = field(default_factory=dict)


def forked(work: Callable[[], object]) -> int:
    """The number of a process that does the work and ends: with code 1 after an exception."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


# Training runs.

STEPS = 120
TRAININGS: dict[str, dict[str, dict[str, Any]]] = {
    "facebook, sgd, torch": {"training": {"embedding_backend": "torch"}},
    "facebook ahead, adagrad, fused": {
        "data": {"loader": "prefetch"},
        "training": {"embedding_backend": "fused", "optimizer": "adagrad"},
    },
    "uniform ahead, adam, torch": {
        "data": {"generator": "uniform", "loader": "prefetch"},
        "training": {"optimizer": "adam"},
    },
    "zipf, rowwise_adagrad, bf16": {
        "data": {"generator": "zipf"},
        "training": {
            "optimizer": "rowwise_adagrad",
            "embedding_backend": "fused",
            "precision": "bf16",
        },
    },
}
"""What is trained in turns: every stream, loader, kind of optimiser state."""


def parameters_of(kind: str, every: int) -> Parameters:
    """A small model with tables large enough that writing them takes a while."""
    chosen = TRAININGS[kind]
    return parameters_from_sections(
        {
            "model": {
                "bottom_mlp": "16-32-16",
                "top_mlp": "32-1",
                "embedding_dim": 16,
                "table_rows": [60_000, 500, 3, 20_000],
                "loss": "bce",
            },
            "data": {"indices_per_lookup": 6, "round_targets": True} | chosen.get("data", {}),
            "training": {
                "batch_size": 32,
                "batches": STEPS,
                "log_every": 50,
                "threads": 1,
                "device": "cpu",
                "checkpoint_every": every,
                "learning_rate": 0.05,
                "lr_warmup_steps": 20,
                "lr_decay_start": 60,
                "lr_decay_steps": 50,
            }
            | chosen["training"],
        }
    )


def start_training(parameters: Parameters, output: Path, announced: int) -> int:
    """Train in a forked process; every checkpoint's step is announced once it is written."""
    from dlrm_core.train import train

    def announce(line: Mapping[str, Any]) -> None:
        if line.get("kind") == "checkpoint":
            os.write(announced, f"{line['iteration']}\n".encode())

    return forked(lambda: train(parameters, output, observer=Calling(announce)))


def resumed(parameters: Parameters, place: Path) -> Parameters:
    """The same run, going on from its newest checkpoint if there is one."""
    resume = "latest" if steps_in(place) else ""
    return replace(parameters, training=replace(parameters.training, resume=resume))


def kill_training(kind: str, top: Path, moments: random.Random, most: int) -> Tally:
    """One training run, killed up to ``most`` times until it finishes."""
    output, parameters = top / "run", parameters_of(kind, moments.choice((1, 2, 5)))
    place, tally = output / "checkpoint", Tally(runs=1)
    finished = False
    while not finished:
        left = set(place.glob(".step-*"))
        reader, writer = os.pipe()
        pid = start_training(resumed(parameters, place), output, writer)
        os.close(writer)
        text = b""
        if tally.kills < most:
            text = wait_for_a_moment(reader, moments)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        while more := os.read(reader, 1 << 16):
            text += more
        os.close(reader)
        said = [int(line) for line in text.split(b"\n")[:-1]]
        finished = not os.WIFSIGNALED(status)
        if not finished:
            tally.kills += 1
            tally.while_writing += bool(set(place.glob(".step-*")) - left)
        elif os.WEXITSTATUS(status):
            tally.faults.append("a run ended by itself with an error")
            break
        verify(place, said, tally)
    else:
        if not same_checkpoint(place, undisturbed(kind, top) / "checkpoint"):
            tally.faults.append(
                f"after {tally.kills} kills the weights differ from the whole run's"
            )
    shutil.rmtree(output)
    tally.by_kind[kind] = tally.kills
    return tally


def wait_for_a_moment(announced: int, moments: random.Random) -> bytes:
    """Until a random time: of the start in one of four cases, else some checkpoints on.

    Returns:
        what was announced until then.
    """
    if moments.random() < 0.25:
        time.sleep(moments.uniform(0.0, 1.0))
        return b""
    text = b""
    for _ in range(moments.randrange(1, 9)):
        more = os.read(announced, 1 << 16)
        text += more
        if not more:  # the run has ended
            return text
    # a step and the writing of a checkpoint take less than this together
    time.sleep(moments.uniform(0.0, 0.06))
    return text


def verify(place: Path, announced: list[int], tally: Tally) -> None:
    """All checkpoints that can be seen are whole, and the newest announced one can be seen."""
    steps = steps_in(place)
    if announced and (not steps or steps[-1] < announced[-1]):
        tally.faults.append(f"checkpoint {announced[-1]} was announced, but there are {steps}")
    for step in steps:
        try:
            for tensors in read_checkpoint(place / f"step-{step:08d}").tensors.values():
                for tensor in tensors.values():
                    tensor.check()
            tally.checkpoints_verified += 1
        except InputError as error:
            tally.faults.append(str(error))


def same_checkpoint(one: Path, other: Path) -> bool:
    """The newest checkpoints' tensors and positions are the same bytes."""
    folders = [find_checkpoint(str(place)) for place in (one, other)]
    first, second = (read_checkpoint(folder) for folder in folders)
    tensors = [
        {file.name: file.read_bytes() for file in folder.glob("*/*.npy")} for folder in folders
    ]
    return (
        first.step == second.step == STEPS
        and tensors[0] == tensors[1]
        and {**first.state, "position": 0} == {**second.state, "position": 0}
    )


# Data sets.

# longer work than the tests'
killed_work.SAMPLES = {"train": 400_000, "test": 50_000}
killed_work.SYNC_BYTES = 300_000
TEXT_ROWS = 12_000

DATA_SETS: dict[str, Callable[[Path], None]] = {
    "generate, teacher": killed_work.make_set,
    "preprocess Criteo's text": killed_work.convert_text,
}


def kill_making(kind: str, top: Path, seconds: float, moments: random.Random, most: int) -> Tally:
    """One data set, its making killed up to ``most`` times within ``seconds`` of a beginning."""
    target, tally, done = top / "set", Tally(runs=1, data_sets_compared=1), -1
    finished = False
    while not finished:
        pid = forked(lambda: DATA_SETS[kind](target))
        if tally.kills < most:
            time.sleep(moments.uniform(0.0, 0.5) * seconds)
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        now = noted(target)
        if now < done:
            tally.faults.append(f"{target.name}: {done} were noted as done, after a kill {now}")
        done = max(done, now)
        finished = not os.WIFSIGNALED(status)
        if not finished:
            tally.kills += 1
            finished = target.exists() and not (target / NOTE).exists()
        elif os.WEXITSTATUS(status):
            tally.faults.append(f"{target.name}: a run ended by itself with an error")
            break
    else:
        if different := differing_files(undisturbed(kind, top), target):
            tally.faults.append(
                f"{target.name}: after {tally.kills} kills {', '.join(different)} differ from "
                "the whole run's"
            )
    shutil.rmtree(target, ignore_errors=True)
    tally.by_kind[kind] = tally.kills
    return tally


def noted(target: Path) -> int:
    """How much is noted as done, all counts together; −1 where nothing was begun."""
    note = target.with_name(target.name + ".partial") / NOTE
    if target.exists():
        return 1 << 62
    if not note.exists():
        return -1
    return total(read_json(note).get("done", {}))


def total(value: object) -> int:
    """All whole numbers inside lists and dictionaries together."""
    if isinstance(value, dict):
        return sum(total(inner) for inner in value.values())
    if isinstance(value, list):
        return sum(total(inner) for inner in value)
    return int(value) if isinstance(value, int) else 0


# The campaign.

KINDS = (*TRAININGS, *DATA_SETS)


def undisturbed(kind: str, top: Path) -> Path:
    """The folder of a kind's work that was never killed."""
    return top / f"whole-{KINDS.index(kind)}"


def work_undisturbed(top: Path) -> dict[str, float]:
    """Every kind's work done once without kills; seconds that each took.

    Raises:
        InputError: one of them failed.
    """
    write_text(top, TEXT_ROWS)
    seconds = {}
    for kind in KINDS:
        started, target = time.perf_counter(), undisturbed(kind, top)
        if kind in TRAININGS:
            reader, writer = os.pipe()
            pid = start_training(parameters_of(kind, STEPS), target, writer)
            os.close(writer)
        else:
            reader, work = -1, DATA_SETS[kind]
            pid = forked(lambda work=work, target=target: work(target))  # type: ignore[misc]
        if os.waitpid(pid, 0)[1]:
            raise InputError(f"{kind}: the run without kills failed")
        if reader >= 0:
            os.close(reader)
        seconds[kind] = time.perf_counter() - started
    return seconds


def begun(file: Path | None) -> dict[str, Any]:
    """The record so far: that of the file, or an empty one.

    Raises:
        InputError: it was made with another processor or other versions.
    """
    here = {"machine": machine_facts(), "versions": versions()}
    if file is None or not file.exists():
        return asdict(Tally()) | {"pieces": []} | here
    record = read_json(file)
    for part, name in (("machine", "cpu"), ("versions", "torch"), ("versions", "numpy")):
        was, now = record.get(part, {}).get(name), here[part].get(name)
        if was != now:
            raise InputError(f"{file} has kills with {name} {was}, but it is {now} here")
    return {**record, **here}


def add(record: dict[str, Any], found: Tally) -> None:
    """Count one more run in a record."""
    for name, value in asdict(found).items():
        if name == "by_kind":
            for kind, kills in value.items():
                record["by_kind"][kind] = record["by_kind"].get(kind, 0) + kills
        else:
            record[name] += value


def main() -> int:
    """Exit code 0 if nothing was lost and nothing went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="in all, those of the file included")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new run after so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="goes on with it if it is there")
    given = parser.parse_args()
    file = Path(given.json) if given.json else None
    record, started = begun(file), time.perf_counter()
    before = record["kills"]
    # a piece of its own goes on elsewhere in the sequence of random moments
    moments = random.Random(f"{given.seed} {len(record['pieces'])}")
    # torch's optimisers load this when they are made: two seconds of every process otherwise
    importlib.import_module("torch._dynamo")
    top = Path(tempfile.mkdtemp(prefix="kills-"))
    try:
        seconds = work_undisturbed(top)
        while record["kills"] < given.kills and time.perf_counter() - started < given.seconds:
            kind = KINDS[record["runs"] % len(KINDS)]
            most = min(given.kills - record["kills"], moments.randrange(4, 13))
            if kind in TRAININGS:
                add(record, kill_training(kind, top, moments, most))
            else:
                add(record, kill_making(kind, top, seconds[kind], moments, most))
            print(
                f"{record['kills']} kills, {record['while_writing']} of them while a checkpoint "
                f"was written, {len(record['faults'])} faults ({kind})",
                flush=True,
            )
    finally:
        shutil.rmtree(top, ignore_errors=True)
    piece = {
        "command": " ".join(["python", *sys.argv]),
        "kills": record["kills"] - before,
        "seconds": time.perf_counter() - started,
        "commit": record["versions"].get("commit"),
    }
    record["pieces"] = [*record["pieces"], piece]
    if file is not None:
        write_json(file, record)
    for fault in record["faults"]:
        print(fault, file=sys.stderr)
    return 1 if record["faults"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(str(error))
