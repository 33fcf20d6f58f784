"""Contestants: programs that train the same model, in turns, each run in a fresh process.

Ours with any parameters, facebookresearch/dlrm, or whatever else yields a :class:`Run`. A
ratio is the median of the rounds' own ratios with its interval
(:mod:`dlrm_workbook.ground.turns`); six rounds or more give 95 %. That all train the same is told
by the losses of the very runs that are timed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.base.files import read_json, write_json
from dlrm_core.config import Parameters
from dlrm_core.interactions import CatInteraction, DotInteraction
from dlrm_workbook.ground.intervals import Interval, median_interval
from dlrm_workbook.ground.processes import ALLOCATOR, python_module, run_child
from dlrm_workbook.ground.turns import rotated, round_ratios, take_turns
from dlrm_workbook.ground.units import faster, from_to, ratio

PEER = "facebook"
"""Name of facebookresearch/dlrm as a contestant."""

PEER_INTERACTIONS = (DotInteraction.kind, CatInteraction.kind)
"""Kinds of interactions that it has."""

BESIDE = "beside the contestants"
"""The turn in each round that is no contestant's."""

FIGURES = ("step_ms", "end_to_end_ms")

WARMUP = 3
"""Iterations of each run that are not counted."""

LOSS_TOLERANCE = {"fp32": 1e-5, "tf32": 5e-3, "bf16": 5e-3, "fp16": 5e-3}
"""Largest difference of a loss from the reference's that is still the same training."""

Row = dict[str, Any]
"""One run: ``contestant``, ``round``, ``place``, and the fields of :class:`Run`."""


@dataclass(frozen=True)
class Run:
    """Medians of one process, milliseconds per iteration, and the losses it saw.

    Attributes:
        step_ms: forward, backward and update; without making the batch.
        end_to_end_ms: the whole iteration.
        losses: of every iteration, warm-up included.
    """

    step_ms: float
    end_to_end_ms: float
    losses: list[float]
    notices: list[str] = field(default_factory=list)


# One run.


@contextlib.contextmanager
def cores_of(count: int | None) -> Iterator[int]:
    """Confine this process and those it starts to the first ``count`` usable cores (None leaves
    them), and yield how many there are then; an InputError says that fewer are usable.

    A contestant that makes its batches in a thread of its own works on a second core unless it is
    kept from it.
    """
    before = os.sched_getaffinity(0)
    if count is not None and not 1 <= count <= len(before):
        raise InputError(f"--cores is {count}, expected 1 to {len(before)} (usable cores)")
    if count is not None:
        os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield count or len(before)
    finally:
        os.sched_setaffinity(0, before)


def settings(threads: int) -> dict[str, str]:
    """Environment of every contestant: equal threads that do not spin, one allocator."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        **ALLOCATOR,
    }


def environment_of(threads: int) -> dict[str, str]:
    """A contestant's whole environment: this process's with :func:`settings`."""
    return {**os.environ, **settings(threads)}


def run_ours(parameters: Parameters, iterations: int, threads: int) -> Run:
    """``dlrm train`` in its own process; an InputError says what it said if it fails."""
    given = parameters.with_training(batches=iterations + WARMUP, threads=threads, log_every=1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        write_json(file, given.to_sections())
        command = python_module("dlrm_workbook", "train", "-f", file, "--output", folder)
        done = run_child(command, stage="dlrm train", environment=environment_of(threads))
        done.require_success("dlrm train")
        result = read_json(Path(folder) / "result.json")
    whole, data = result["iteration_ms"][WARMUP:], result["data_ms"][WARMUP:]
    return Run(
        statistics.median(a - b for a, b in zip(whole, data, strict=True)),
        statistics.median(whole),
        # facebook prints six decimals
        [round(loss, 6) for loss in result["losses"]],
        result["notices"],
    )


def require_peer(peer: Path) -> None:
    """Refuse a folder that is no facebookresearch/dlrm checkout (InputError)."""
    if not (peer / "dlrm_s_pytorch.py").is_file():
        raise InputError(f"{peer} is no facebookresearch/dlrm checkout (no dlrm_s_pytorch.py)")


PEER_LINE = re.compile(rb"it (\d+)/\d+ of epoch 0, ([\d.]+) ms/it, loss ([\d.]+)")


def run_peer(peer: Path, parameters: Parameters, iterations: int, threads: int) -> Run:
    """dlrm_s_pytorch.py in its own process: its own ms/it, and our clock for the whole.

    Each line it prints ends an iteration, so the time between lines is the
    iteration with its data. It runs in a folder of its own, since it leaves event files
    where it runs: the checkout stays as it is.

    Raises:
        MissingToolError: a package that it imports is not there.
        InputError: the run fails; with what it said last.
    """
    require_peer(peer)
    model, training = parameters.model, parameters.training
    script = str((peer / "dlrm_s_pytorch.py").resolve())
    command = [
        *(sys.executable, "-u", script, "--print-freq=1", "--print-time"),
        f"--arch-sparse-feature-size={model.embedding_dim}",
        f"--arch-embedding-size={'-'.join(map(str, model.table_rows))}",
        f"--arch-mlp-bot={'-'.join(map(str, model.bottom_widths))}",
        f"--arch-mlp-top={'-'.join(map(str, model.top_mlp))}",
        f"--arch-interaction-op={model.interaction}",
        f"--loss-function={model.loss}",
        f"--mini-batch-size={training.batch_size}",
        f"--num-batches={iterations + WARMUP}",
        f"--num-indices-per-lookup={parameters.data.indices_per_lookup}",
        f"--learning-rate={training.learning_rate}",
        f"--numpy-rand-seed={training.seed}",
    ]
    if parameters.data.fixed_pooling:
        command.append("--num-indices-per-lookup-fixed=1")
    if training.device == "cuda":
        command.append("--use-gpu")
    # when each iteration ended, its own ms, and its loss
    iterations_seen: list[tuple[float, float, float]] = []

    def note(line: bytes) -> None:
        if found := PEER_LINE.search(line):
            iterations_seen.append((time.perf_counter(), float(found[2]), float(found[3])))

    with tempfile.TemporaryDirectory() as folder:
        done = run_child(
            command,
            stage="dlrm_s_pytorch.py",
            environment=environment_of(threads),
            folder=folder,
            on_line=note,
        )
    if done.exit_code != 0 or len(iterations_seen) != iterations + WARMUP:
        raise _peer_failure(done.stderr, done.exit_code)
    ends, steps, losses = zip(*iterations_seen, strict=True)
    whole = np.diff(ends)[WARMUP - 1 :] * 1e3
    return Run(statistics.median(steps[WARMUP:]), float(np.median(whole)), list(losses))


PEER_PACKAGES = {"sklearn": "scikit-learn", "tensorboard": "tensorboard", "tqdm": "tqdm"}
"""What dlrm_s_pytorch.py imports beside torch and numpy, and what pip calls it."""


def _peer_failure(stderr: str, code: int) -> InputError:
    """What a failed run of facebookresearch/dlrm means for whoever asked for it."""
    lines = stderr.strip().splitlines()
    last = lines[-1] if lines else f"it printed nothing and ended with exit code {code}"
    if found := re.search(r"No module named '([\w.]+)'", last):
        # all at once, or whoever installs one is told of the next
        absent = [name for name in PEER_PACKAGES if importlib.util.find_spec(name) is None]
        lacking = dict.fromkeys([found[1].partition(".")[0], *absent])
        packages = " ".join(PEER_PACKAGES.get(name, name) for name in lacking)
        return MissingToolError(
            f"facebookresearch/dlrm needs packages that {sys.executable} lacks: "
            f"pip install {packages}"
        )
    return InputError(f"dlrm_s_pytorch.py failed: {last}")


# All runs in turns, and what they say.


def compare(
    contestants: Mapping[str, Parameters],
    *,
    peer: Path | None,
    rounds: int,
    iterations: int,
    threads: int,
    run: Callable[[Parameters, int, int], Run] = run_ours,
    extra: Mapping[str, Callable[[], Run]] | None = None,
    rows: list[Row] | None = None,
    on_run: Callable[[Row], object] = lambda row: None,
    on_failure: Callable[[str, InputError], object] = lambda name, error: None,
    each_round: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Run every contestant once a round, and judge them.

    Args:
        contestants: name to parameters; the first is the reference for losses.
        peer: a facebookresearch/dlrm checkout, run with the reference's parameters.
        run: runs one of our own contestants.
        extra: further contestants, name to what runs each once.
        rows: the runs so far, to which each new one is added; what is there is not run again.
        each_round: called once a round with its number, in its turn with the contestants.

    Returns:
        what :func:`judge` does, and the ``runs``. A contestant that fails is in ``failures``
        with the reason, and does not run any more; the others' figures stand.

    Raises:
        InputError: a count is impossible, or the peer is no facebookresearch/dlrm checkout.
    """
    if rounds < 1 or iterations < 1:
        needs = "a benchmark needs rounds >= 1 and iterations >= 1"
        raise InputError(f"{needs}, not {rounds} and {iterations}")
    reference = next(iter(contestants))
    rows = [] if rows is None else rows
    failures: dict[str, str] = {}
    runs: dict[str, Callable[[], Run]] = {}
    if peer is not None:
        require_peer(peer)
        # first, so that a peer that lacks a package is known before minutes of work
        runs[PEER] = lambda: run_peer(peer, contestants[reference], iterations, threads)
    for name, given in contestants.items():
        runs[name] = lambda given=given: run(given, iterations, threads)  # type: ignore[misc]
    runs |= extra or {}
    have = {(row["contestant"], row["round"]) for row in rows}
    turns = [*runs, *([BESIDE] if each_round is not None else [])]
    for number, names in take_turns(turns, rounds, rotated):
        for place, name in enumerate(names):
            if name == BESIDE and each_round is not None:
                each_round(number)
                continue
            if name in failures or (name, number) in have:
                continue
            try:
                found = runs[name]()
            except InputError as error:
                failures[name] = str(error)
                on_failure(name, error)
            else:
                rows.append({"contestant": name, "round": number, "place": place} | asdict(found))
                on_run(rows[-1])
    precisions = {
        name: "tf32" if given.training.tf32 else given.training.precision
        for name, given in contestants.items()
    }
    return judge(rows, reference, precisions, failures) | {"runs": rows}


def judge(
    rows: Sequence[Row], reference: str, precisions: Mapping[str, str], failures: Mapping[str, str]
) -> dict[str, Any]:
    """What the rounds say.

    Args:
        reference: contestant whose losses the others are held against.
        precisions: contestant to its precision, which decides what is still the same
            training; fp32 where it is not named.
        failures: contestant to why it did not run (to its end).

    Returns:
        ``against`` (whom the ratios compare with: facebook where it ran, else the
        reference), ``contestants`` (name to medians), ``ratios`` (name to figure to
        speed-up: ``low``, ``mid``, ``high``, ``confidence``, ``rounds``),
        ``loss_reference``, ``loss_difference`` (name to the largest), ``losses_agree`` (None
        where nothing could be compared), ``notices`` (name to sentences), ``failures``.
    """
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(row["contestant"], []).append(row)
    names = list(runs)
    against = PEER if PEER in runs else reference if reference in runs else (names or [""])[0]
    oracle = reference if reference in runs else against
    difference = {
        name: largest_difference(runs[name], runs[oracle]) for name in names if name != oracle
    }
    ratios: dict[str, dict[str, Any]] = {}
    for name, kind in itertools.product(names, FIGURES):
        interval = round_ratio(rows, against, name, kind)
        if name != against and interval is not None:
            shared = {row["round"] for row in runs[name]} & {row["round"] for row in runs[against]}
            ratios.setdefault(name, {})[kind] = interval.to_dict() | {"rounds": len(shared)}
    # NaN is never below a tolerance
    agree = all(
        value <= LOSS_TOLERANCE[precisions.get(name, "fp32")] for name, value in difference.items()
    )
    notices = {
        name: list(dict.fromkeys(text for row in runs[name] for text in row["notices"]))
        for name in names
    }
    return {
        "against": against,
        "loss_reference": oracle,
        "contestants": {
            name: {kind: statistics.median(row[kind] for row in runs[name]) for kind in FIGURES}
            for name in names
        },
        "ratios": ratios,
        "loss_difference": difference,
        "losses_agree": agree if difference else None,
        "notices": {name: texts for name, texts in notices.items() if texts},
        "failures": dict(failures),
    }


def round_ratio(rows: Sequence[Row], base: str, name: str, kind: str) -> Interval | None:
    """The speed-up of ``name`` over ``base``; None where no round has both."""
    base_ms, other_ms = (
        {row["round"]: float(row[kind]) for row in rows if row["contestant"] == who}
        for who in (base, name)
    )
    ratios = round_ratios(base_ms, other_ms)
    return median_interval(ratios) if ratios else None


def largest_difference(mine: Sequence[Row], others: Sequence[Row]) -> float:
    """Largest difference of the losses, over all rounds and iterations; NaN if one is NaN.

    Every run begins from the same seed, so each is held against the reference's first.
    """
    wanted, *runs = (np.array(row["losses"], dtype=float) for row in (others[0], *mine))
    gaps = [np.abs(losses[: len(wanted)] - wanted[: len(losses)]) for losses in runs]
    return float(np.concatenate(gaps).max()) if all(map(len, gaps)) else math.nan


# In words.


def describe(case: Mapping[str, Any]) -> str:
    """What :func:`judge` found, as lines of text: times, ratios, losses, what failed; the case's
    ``meaning`` and ``threads``, where it has them, are the title."""
    width = max((len(name) for name in case["contestants"]), default=0) + 2
    title, threads = case.get("meaning", ""), case.get("threads")
    if threads is not None:
        title += f", {threads} thread{'s' if threads != 1 else ''}"
    lines = [title] if title else []
    if case["contestants"]:
        lines.append(f"{'':<{width}}{'step ms':>10}{'end to end ms':>16}")
    for name, figures in case["contestants"].items():
        lines.append(f"{name:<{width}}{figures['step_ms']:>10.1f}{figures['end_to_end_ms']:>16.1f}")
    for name, ratios in case["ratios"].items():
        step, whole = ratios["step_ms"], ratios["end_to_end_ms"]
        lines.append(
            f"{name} is {gain_text(whole, case['against'])} end to end and "
            f"{gain_text(step)} per step; {certainty(step)}"
        )
    lines.append(_same_training(case))
    lines += [f"{name} FAILED: {reason}" for name, reason in case["failures"].items()]
    for name, notices in case["notices"].items():
        lines += [f"{name}: {notice}" for notice in notices]
    return "\n".join(lines)


def _same_training(case: Mapping[str, Any]) -> str:
    found = case["loss_difference"]
    if not found:
        return "losses: nothing to compare with"
    each = ", ".join(f"{name} {difference_text(value)}" for name, value in found.items())
    verdict = "the same training" if case["losses_agree"] else "NOT the same training"
    return f"largest difference of a loss from {case['loss_reference']}'s: {each}: {verdict}"


def certainty(ratio: Mapping[str, float]) -> str:
    if ratio["rounds"] == 1:
        return "one round: no interval"
    return f"{ratio['rounds']} rounds, {ratio['confidence']:.0%} confidence"


def difference_text(value: float | None) -> str:
    """A difference of losses: ``3.0e-06``, and 0 where they are equal."""
    if value is None or math.isnan(value):
        return "not a number"
    return f"{value:.1e}" if value else "0"


def gain_text(measured: Mapping[str, float], against: str = "") -> str:
    """A ratio in words: ``2.10x faster (1.95x to 2.24x) than torch``, ``not shown to differ from
    torch (0.97x to 1.08x)``; one round has no range."""
    low, high = (math.nan if measured["rounds"] == 1 else measured[end] for end in ("low", "high"))
    if low < 1 < high:
        return f"not shown to differ{against and f' from {against}'} ({from_to(low, high, ratio)})"
    return faster(measured["mid"], low, high) + (against and f" than {against}")
