"""Runs training for long, many runs at once, and ranks that are disturbed; counts what is left.

``long``: 20,000 iterations with checkpoints in one process, whose memory, open files and
threads are sampled; the same in two processes, the second of which goes on from the first.
``at-once``: 50 times ``dlrm run train -f parameters/quick.yaml``, or as many as there is memory
for (which it says), all started together, into one folder of outputs. ``ranks``: four ranks
under torchrun of which one is killed, stopped, slowed, or finds its checkpoint damaged. Every
result must be, bit for bit, that of a run that nothing disturbed; no process and no file that
belongs to no result may be left. ``eight``: eight ranks train DeepSpark's preset, fp16, with
small tables; their predictions must be those of one process, bit for bit.

    python -m tests.campaigns.soak --json benchmarks/results/soak.json

``--part`` runs one part; the file keeps the others. ``--short`` runs less of each part.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json, write_json
from dlrm_core.run.checkpoint import MANIFEST, WEIGHTS, steps_in
from dlrm_workbook.ground.machine import machine_facts, versions
from tests.small_terabyte import deepspark, make_terabyte

ROOT = Path(__file__).resolve().parents[2]

MOST_GROWTH_MIB = 4.0
"""Between the medians of the second and the last quarter of a long run."""

SECTIONS: dict[str, Any] = {
    "model": {
        "bottom_mlp": "8-16-16",
        "top_mlp": "16-1",
        "embedding_dim": 16,
        "table_rows": [5000, 40, 20_000],
        "loss": "bce",
    },
    "data": {"indices_per_lookup": 4, "round_targets": True},
    "training": {
        "batch_size": 32,
        "threads": 1,
        "device": "cpu",
        "optimizer": "adagrad",
        "embedding_backend": "torch",
        "log_every": 100,
    },
}


WHOLE = {"iterations": 20_000, "runs": 50, "rounds": 3}
SHORT = {"iterations": 2_000, "runs": 6, "rounds": 1}
"""Sizes where none are given."""

OF_TORCH = ("torchinductor_", "torchelastic_")
"""Folders that torch's compiler and torchrun leave themselves, for a next process and for logs."""


class Ground:
    """The scratch folder of a part; its path names its processes too."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.temporary = scratch / "temporary"
        self.temporary.mkdir()
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.temporary),
            "DLRM_SOAK": str(scratch),
        }

    def parameters(self, name: str, **training: Any) -> Path:
        """A parameters file of the small model."""
        file = self.scratch / f"{name}.yaml"
        sections = SECTIONS | {"training": SECTIONS["training"] | training}
        file.write_text(yaml.safe_dump(sections))
        return file

    def start(self, name: str, *command: str | Path) -> subprocess.Popen[bytes]:
        """Start one of our modules; what it says lies in ``NAME.out`` and ``NAME.err``."""
        with (
            (self.scratch / f"{name}.out").open("wb") as out,
            (self.scratch / f"{name}.err").open("wb") as err,
        ):
            return subprocess.Popen(
                [sys.executable, "-m", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self.environment,
                cwd=self.scratch,
                start_new_session=True,
            )

    def said(self, name: str) -> str:
        """The end of a program's standard error."""
        return (self.scratch / f"{name}.err").read_text(errors="replace")[-4000:]

    def processes(self) -> list[psutil.Process]:
        """Living processes that were started here, by whomever."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = process.environ().get("DLRM_SOAK") == str(self.scratch)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def left_over(self) -> list[str]:
        """What should not be there once everything has ended: processes, files half written."""
        until = time.monotonic() + 10
        while (alive := self.processes()) and time.monotonic() < until:
            time.sleep(0.2)
        names = [f"process {process.pid}" for process in alive]
        temporary = (p for p in self.temporary.iterdir() if not p.name.startswith(OF_TORCH))
        names += [f"temporary/{path.name}" for path in temporary]
        hidden = (p for p in self.scratch.rglob(".*") if not p.name.endswith("lock"))
        return names + [str(path.relative_to(self.scratch)) for path in hidden]

    def end(self) -> None:
        """Kill what is left."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def ground() -> Iterator[Ground]:
    """A place that is empty again afterwards."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        place = Ground(Path(folder))
        try:
            yield place
        finally:
            place.end()


def same_end(one: Path, other: Path) -> bool:
    """The newest checkpoints of two runs hold the same steps, tensors and state."""
    folders = [
        run / "checkpoint" / f"step-{steps_in(run / 'checkpoint')[-1]:08d}" for run in (one, other)
    ]
    first, second = (read_json(folder / MANIFEST) for folder in folders)
    return all(first[key] == second[key] for key in ("step", "state", "tensors")) and all(
        file.read_bytes() == (folders[1] / WEIGHTS / file.name).read_bytes()
        for file in (folders[0] / WEIGHTS).iterdir()
    )


# ---- a long run -----------------------------------------------------------------------


def long_run(place: Ground, iterations: int) -> dict[str, Any]:
    """Train for long, watched; and once more in two processes."""
    faults = []
    options = {
        "batches": iterations,
        "checkpoint_every": 100,
        "eval_every": 1000,
        "eval_batches": 4,
    }
    file = place.parameters("long", **options)
    samples: list[tuple[float, int, int]] = []
    began = time.monotonic()
    trainer = place.start(
        "whole", "dlrm_core", "train", "-f", file, "--output", place.scratch / "whole"
    )
    process = psutil.Process(trainer.pid)
    while trainer.poll() is None:
        with contextlib.suppress(psutil.Error):
            sample = process.memory_info().rss / 2**20, process.num_fds(), process.num_threads()
            if steps_in(place.scratch / "whole" / "checkpoint"):
                samples.append(sample)
        time.sleep(0.1)
    seconds = time.monotonic() - began
    if trainer.returncode:
        raise InputError(f"the long run failed: {place.said('whole')}")

    half = iterations // 200 * 100
    for name, more in (("first", ["-p", f"training.max_steps={half}"]), ("second", [])):
        output = place.scratch / "halves"
        again = place.start(
            name, "dlrm_core", "train", "-f", file, "--output", output, "--resume", "latest", *more
        )
        if again.wait():
            raise InputError(f"the {name} half failed: {place.said(name)}")
    same = same_end(place.scratch / "whole", place.scratch / "halves")
    if not same:
        faults.append("a run in two halves ended with other weights than the whole one")

    quarters = [samples[len(samples) * i // 4 : len(samples) * (i + 1) // 4] for i in range(4)]
    medians = [[statistics.median(column) for column in zip(*q, strict=True)] for q in quarters]
    growth = medians[3][0] - medians[1][0]
    if growth > MOST_GROWTH_MIB:
        faults.append(f"memory grew by {growth:.1f} MiB from the second to the last quarter")
    for index, what in ((1, "open files"), (2, "threads")):
        if medians[3][index] > medians[1][index]:
            faults.append(f"{what} grew from {medians[1][index]} to {medians[3][index]}")
    left = place.left_over()
    return {
        "iterations": iterations,
        "checkpoints_written": iterations // 100,
        "seconds": seconds,
        "samples": len(samples),
        "rss_mib_by_quarter": [median[0] for median in medians],
        "rss_growth_mib": growth,
        "open_files_by_quarter": [median[1] for median in medians],
        "threads_by_quarter": [median[2] for median in medians],
        "same_as_two_halves": same,
        "left_over": left,
        "faults": faults + left,
    }


# ---- many runs at once ----------------------------------------------------------------


def at_once(place: Ground, runs: int) -> dict[str, Any]:
    """Start ``dlrm run train`` many times together, into one folder of outputs."""
    preset = ROOT / "parameters" / "quick.yaml"
    outputs = place.scratch / "outputs"
    command = ("dlrm_workbook", "run", "train", "-f", preset, "--output-root", outputs)
    alone = place.start("alone", *command)
    largest = 0.0
    while alone.poll() is None:
        largest = max(largest, sum(map(own_memory_mib, place.processes())))
        time.sleep(0.2)
    if alone.returncode:
        raise InputError(f"a run alone failed: {place.said('alone')}")
    # more than there is memory for would show how the machine ends, not how the runs do; the
    # peaks of many runs on few cores do not coincide, and that is the margin
    asked, there = runs, psutil.virtual_memory().available / 2**20
    runs = max(1, min(runs, int(there / largest)))
    print(
        f"at-once: {runs} of {asked} runs are started together: one holds {largest:,.0f} MiB of "
        f"its own, and {there:,.0f} MiB are free",
        flush=True,
    )
    before = place.left_over()
    began = time.monotonic()
    names = [f"run-{number:02d}" for number in range(runs)]
    started = [place.start(name, *command) for name in names]
    most = 0
    while any(process.poll() is None for process in started):
        most = max(most, sum(process.poll() is None for process in started))
        time.sleep(1.0)
    seconds = time.monotonic() - began

    faults = [
        f"{name} ended with code {process.returncode}: {place.said(name)[-300:]}"
        for name, process in zip(names, started, strict=True)
        if process.returncode
    ]
    folders = [
        Path(lines[-1])
        for name in ("alone", *names)
        if (lines := (place.scratch / f"{name}.out").read_text().split())
    ]
    if len(set(folders)) != runs + 1:
        faults.append(f"{runs + 1} runs named {len(set(folders))} folders")
    expected, right = final_loss(folders[0]), 0
    for folder in folders[1:]:
        record = read_json(folder / "run.json")
        complete = all((folder / name).exists() for name in record["artifacts"])
        if record["status"] == "finished" and complete and final_loss(folder) == expected:
            right += 1
        else:
            faults.append(f"{folder.name}: {record['status']}, loss {final_loss(folder)}")
    listed = (outputs / "index.html").read_text()
    unlisted = [folder.name for folder in folders if folder.name not in listed]
    if unlisted:
        faults.append(f"index.html lacks {len(unlisted)} of {runs + 1} runs")
    left = [name for name in place.left_over() if name not in before]
    return {
        "asked": asked,
        "runs": runs,
        "at_the_same_time": most,
        "seconds": seconds,
        "memory_of_one_mib": largest,
        "right": right,
        "left_over": left,
        "faults": faults + left,
    }


def own_memory_mib(process: psutil.Process) -> float:
    """Memory that no other process shares."""
    with contextlib.suppress(psutil.Error):
        return float(process.memory_full_info().uss) / 2**20
    return 0.0


def final_loss(folder: Path) -> Any:
    """The losses of a run, which its seed decides."""
    return read_json(folder / "result.json")["losses"]


# ---- disturbed ranks ------------------------------------------------------------------

RANKS = 4


def ranks(place: Ground, rounds: int, seed: int) -> dict[str, Any]:
    """Disturb one of four ranks in each way, ``rounds`` times."""
    moments = random.Random(seed)
    file = place.parameters("ranks", batches=400, checkpoint_every=20, rank_timeout_s=20.0)
    launch(place, "undisturbed", file)
    ways: dict[str, Callable[[Ground, str, Path, random.Random], list[str]]] = {
        "killed": partial(signalled, signal.SIGKILL, "is gone"),
        "stopped": partial(signalled, signal.SIGSTOP, "is stopped (SIGSTOP)"),
        "slowed": slowed,
        "checkpoint damaged": damaged,
    }
    counts: dict[str, Any] = {}
    faults: list[str] = []
    for name, disturb in ways.items():
        began, bad = time.monotonic(), 0
        for number in range(rounds):
            run = f"{name.replace(' ', '-')}-{number}"
            found = disturb(place, run, file, moments)
            if not same_end(place.scratch / "undisturbed", place.scratch / run):
                found.append("it ended with other weights than the undisturbed run")
            bad += bool(found)
            faults += [f"{run}: {fault}" for fault in found]
        counts[name] = {"times": rounds, "wrong": bad, "seconds": time.monotonic() - began}
    left = place.left_over()
    return {"ranks": RANKS, "by_kind": counts, "left_over": left, "faults": faults + left}


def begin(place: Ground, run: str, file: Path) -> subprocess.Popen[bytes]:
    """Four ranks under torchrun, from the newest checkpoint if there is one."""
    return place.start(
        run,
        *under_torchrun(RANKS),
        *("dlrm_core", "train", "-f", file, "--output", place.scratch / run),
        *("--resume", "latest"),
    )


def under_torchrun(count: int) -> list[str]:
    """Words that have so many ranks run the module named behind them."""
    return ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m"]


def launch(place: Ground, run: str, file: Path) -> None:
    """Train with four ranks to the end.

    Raises:
        InputError: they fail.
    """
    if begin(place, run, file).wait(timeout=600):
        raise InputError(f"{run}: the ranks failed: {place.said(run)}")


def begun(
    place: Ground, run: str, file: Path, moments: random.Random
) -> tuple[Any, psutil.Process]:
    """Ranks that have written a checkpoint, at a random moment; the launcher, and one of them."""
    launcher = begin(place, run, file)
    until = time.monotonic() + 300
    while len(steps_in(place.scratch / run / "checkpoint")) < 2:
        if launcher.poll() is not None or time.monotonic() > until:
            raise InputError(f"{run}: the ranks did not begin: {place.said(run)}")
        time.sleep(0.02)
    time.sleep(moments.uniform(0.0, 0.5))
    rank = str(moments.randrange(RANKS))
    children = psutil.Process(launcher.pid).children()
    return launcher, next(child for child in children if child.environ().get("RANK") == rank)


def ended(place: Ground, run: str, launcher: Any, word: str) -> list[str]:
    """Faults of a run that must end by itself, not well, and say why."""
    code = launcher.wait(timeout=120)
    faults = [] if code else ["it ended well, though it had lost a rank"]
    if word not in place.said(run):
        faults.append(f"it did not say {word!r}: {place.said(run)[-500:]}")
    return faults


def signalled(
    signum: signal.Signals, said: str, place: Ground, run: str, file: Path, moments: random.Random
) -> list[str]:
    """A signal to a rank, of which the run ends with that sentence; then the same command again."""
    launcher, rank = begun(place, run, file, moments)
    rank.send_signal(signum)
    faults = ended(place, run, launcher, said)
    launch(place, run, file)
    return faults


def slowed(place: Ground, run: str, file: Path, moments: random.Random) -> list[str]:
    """A rank that stands still for most of the time, but never for long."""
    launcher, rank = begun(place, run, file, moments)
    until = time.monotonic() + 10
    with contextlib.suppress(psutil.NoSuchProcess):
        while launcher.poll() is None and time.monotonic() < until:
            rank.suspend()
            time.sleep(moments.uniform(0.1, 0.5))
            rank.resume()
            time.sleep(0.05)
    code = launcher.wait(timeout=600)
    return [f"it ended with code {code}: {place.said(run)[-500:]}"] if code else []


def damaged(place: Ground, run: str, file: Path, moments: random.Random) -> list[str]:
    """A flipped bit in the newest checkpoint of a killed run: refused, and the one before taken."""
    launcher, rank = begun(place, run, file, moments)
    rank.send_signal(signal.SIGKILL)
    faults = ended(place, run, launcher, "is gone")
    checkpoints = place.scratch / run / "checkpoint"
    newest = checkpoints / f"step-{steps_in(checkpoints)[-1]:08d}"
    damaged_file = moments.choice(sorted((newest / WEIGHTS).iterdir()))
    data = bytearray(damaged_file.read_bytes())
    data[moments.randrange(len(data))] ^= 1 << moments.randrange(8)
    damaged_file.write_bytes(data)
    faults += ended(place, run, begin(place, run, file), "the file is corrupted")
    shutil.rmtree(newest)
    launch(place, run, file)
    return faults


# ---- eight ranks ----------------------------------------------------------------------

EIGHT = 8

FIGURES = ("samples", "iteration", "auc", "loss", "log_loss", "accuracy")
"""What an evaluation prints that does not depend on the clock."""


def eight(place: Ground) -> dict[str, Any]:
    """Train on eight ranks, and predict from their checkpoint on eight ranks and in one process."""
    make_terabyte(place.scratch / "terabyte", train=4096, test=3001)
    tree = deepspark(place.scratch / "terabyte")
    tree["training"] |= {"batch_size": 64, "checkpoint_every": 1000, "rank_timeout_s": 240.0}
    file = place.scratch / "deepspark.yaml"
    file.write_text(yaml.safe_dump(tree))
    run = place.scratch / "run"
    trained = ("dlrm_core", "train", "-f", file, "--output", run)
    asked = ("dlrm_core", "evaluate", "-f", file, "--checkpoint", run / "checkpoint")
    for name, command in {"train": trained, "ranks": asked, "alone": asked}.items():
        launcher = [] if name == "alone" else under_torchrun(EIGHT)
        if place.start(name, *launcher, *command).wait(timeout=900):
            raise InputError(f"{name}: failed: {place.said(name)}")
    many, one = (
        json.loads((place.scratch / f"{name}.out").read_text().splitlines()[-1])
        for name in ("ranks", "alone")
    )
    faults = [
        f"{figure}: {many[figure]!r} on {EIGHT} ranks, {one[figure]!r} in one process"
        for figure in FIGURES
        if many[figure] != one[figure]
    ]
    left = place.left_over()
    figures = {figure: many[figure] for figure in FIGURES}
    return {"ranks": EIGHT, "figures": figures, "left_over": left, "faults": faults + left}


# ---- the campaign ---------------------------------------------------------------------


def main() -> int:
    """Exit code 0 if nothing grew, nothing was left and every result was right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("long", "at-once", "ranks", "eight"), action="append")
    parser.add_argument("--short", action="store_true", help="about ten minutes on two cores")
    parser.add_argument("--iterations", type=int, help="of the long run")
    parser.add_argument("--runs", type=int, help="at most, at once")
    parser.add_argument("--rounds", type=int, help="of each disturbance")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="keeps what it has of other parts")
    given = parser.parse_args()
    for name, size in (SHORT if given.short else WHOLE).items():
        if getattr(given, name) is None:
            setattr(given, name, size)
    parts: dict[str, Callable[[Ground], dict[str, Any]]] = {
        "long": lambda place: long_run(place, given.iterations),
        "at-once": lambda place: at_once(place, given.runs),
        "ranks": lambda place: ranks(place, given.rounds, given.seed),
        "eight": eight,
    }
    file = Path(given.json) if given.json else None
    record: dict[str, Any] = read_json(file) if file and file.exists() else {}
    failed = False
    for name in given.part or parts:
        with ground() as place:
            found = parts[name](place)
        failed |= bool(found["faults"])
        found |= {"machine": machine_facts(), "versions": versions()}
        found["command"] = " ".join(["python", "-m", "tests.campaigns.soak", *sys.argv[1:]])
        record[name] = found
        shown = {k: v for k, v in found.items() if k not in ("machine", "versions")}
        print(json.dumps({name: shown}, indent=1), flush=True)
        if file is not None:
            write_json(file, record)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(str(error))
