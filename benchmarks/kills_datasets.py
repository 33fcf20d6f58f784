"""Kills while data sets are made: generation with a teacher, and conversion of Criteo's text.

The same command is given again after every kill. What was noted as done must never become
less, the data set must not be seen before it is whole, and in the end its files must be,
byte for byte, those of a run never killed.
"""

from __future__ import annotations

import filecmp
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dlrm_core.data.files import criteo as preprocessing
from dlrm_core.data.files import generate as generating
from dlrm_core.data.files.criteo import Request, preprocess
from dlrm_core.data.files.generate import Law, SampleMaker, Variant, generate
from dlrm_core.data.files.resumable import NOTE
from dlrm_core.data.files.teacher import TeacherConfig
from dlrm_core.errors import InputError
from dlrm_core.files import read_json
from dlrm_kernels.data_sets import SIGNATURES, kernel

LAW = Law(Variant("custom", 5, (50_000, 400, 7), 1.45), 11, TeacherConfig())
SAMPLES = {"train": 400_000, "test": 50_000}
TEXT_ROWS = 12_000


@dataclass
class Killed:
    """What came of killing one data set's making again and again."""

    kills: int = 0
    faults: list[str] = field(default_factory=list)


def make_set(target: Path) -> None:
    """Generate with labels of a teacher; a note after every few blocks."""
    generating.SYNC_BYTES = 300_000
    # seconds of Monte Carlo at the end would hide the short part where files are written
    generating.best_figures = lambda *_: {"bayes_auc": 0.8}  # type: ignore[assignment]
    generate(LAW, SAMPLES, target, threads=2, block=2048)


def convert_text(target: Path) -> None:
    """Preprocess; a note after every few pieces, and hash tables that overflow to disk."""
    preprocessing.SYNC_BYTES = 60_000
    text = target.parent / "text.txt"
    preprocess(Request("kaggle", [text], 2, threads=2, memory=1 << 13, piece=40_000), target)


WORK: dict[str, Callable[[Path], None]] = {
    "generate, teacher": make_set,
    "preprocess Criteo's text": convert_text,
}


def prepare(top: Path) -> None:
    """The text that is converted; and machine code, so that forked processes have it."""
    draw, lines = random.Random(3), []
    for _ in range(TEXT_ROWS):
        numbers = [str(draw.randrange(100)) if draw.random() < 0.9 else "" for _ in range(13)]
        hashes = [f"{int(9000 * draw.random() ** 3) * 4_000_037 % 2**32:08x}" for _ in range(26)]
        lines.append("\t".join([str(draw.randrange(2)), *numbers, *hashes]))
    (top / "text.txt").write_text("\n".join(lines) + "\n", encoding="ascii")
    SampleMaker(LAW, "train").block(0, 1)
    for function in SIGNATURES:
        kernel(function)  # type: ignore[arg-type]


def forked(work: Callable[[Path], None], target: Path) -> int:
    """The number of a process that does the work."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work(target)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def make_whole(work: Callable[[Path], None], target: Path) -> float:
    """Make a data set undisturbed; seconds it took.

    Raises:
        InputError: it failed.
    """
    started = time.perf_counter()
    if os.waitpid(forked(work, target), 0)[1]:
        raise InputError(f"{target.name}: the run without kills failed")
    return time.perf_counter() - started


def kill_until_whole(
    work: Callable[[Path], None],
    target: Path,
    whole: Path,
    seconds: float,
    moments: random.Random,
    most: int,
) -> Killed:
    """One data set, its making killed up to ``most`` times within ``seconds`` of a beginning."""
    found, done = Killed(), -1
    while True:
        pid = forked(work, target)
        if found.kills < most:
            time.sleep(moments.uniform(0.0, 0.5) * seconds)
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        now = _noted(target)
        if now < done:
            found.faults.append(f"{target.name}: {done} were noted as done, after a kill {now}")
        done = max(done, now)
        if os.WIFSIGNALED(status):
            found.kills += 1
            if target.exists() and not (target / NOTE).exists():
                break
        elif os.WEXITSTATUS(status):
            found.faults.append(f"{target.name}: a run ended by itself with an error")
            return found
        else:
            break
    different = differences(whole, target)
    if different:
        found.faults.append(
            f"{target.name}: after {found.kills} kills {', '.join(different)} differ from the "
            "whole run's"
        )
    return found


def _noted(target: Path) -> int:
    """How much is noted as done, all counts together; −1 where nothing was begun."""
    note = target.with_name(target.name + ".partial") / NOTE
    if target.exists():
        return 1 << 62
    if not note.exists():
        return -1
    return _total(read_json(note).get("done", {}))


def _total(value: object) -> int:
    if isinstance(value, dict):
        return sum(_total(inner) for inner in value.values())
    if isinstance(value, list):
        return sum(_total(inner) for inner in value)
    return int(value) if isinstance(value, int) else 0


def differences(one: Path, other: Path) -> list[str]:
    """Files that only one of two folders has, or that differ."""
    names = {
        str(file.relative_to(folder))
        for folder in (one, other)
        for file in folder.rglob("*")
        if file.is_file()
    }
    return [
        name
        for name in sorted(names)
        if not ((one / name).is_file() and (other / name).is_file())
        or not filecmp.cmp(one / name, other / name, shallow=False)
    ]
