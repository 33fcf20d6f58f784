"""The same training with N seeds: how much AUC (or loss), speed, memory and power scatter.

Each seed trains in a fresh process, so that nothing of one run (caches, compiled kernels,
the allocator's state) is in the next. ``training.seed`` seeds weights and data alike. A
folder keeps one run a seed; runs that finished are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import plain, read_json, write_json
from dlrm_core.base.settings import coerce_section, setting, shown
from dlrm_core.config import Parameters, load_parameters
from dlrm_studies.runs import run_of_study
from dlrm_workbook.ground.intervals import holm, p_value, t_interval
from dlrm_workbook.ground.ledger import read_document, require_same
from dlrm_workbook.ground.processes import python_module, run_child

SUMMARY = "stability.json"
STABILITY_VERSION = 1

AT_THE_END = 2**31 - 1
"""``training.eval_every`` of a run that evaluates only once, at its end."""

PEAK = "peak_memory_bytes_"
"""How the name of a device's peak memory among the spreads begins."""

NAMES = {"auc": "AUC", "loss": "loss"}

FIGURES = ("auc", "best_auc", "loss", "samples_per_second", "power_w", "samples_per_joule")
"""What is averaged of the runs' results, where it was measured."""

SeedRun = dict[str, Any]
"""One training run, as its ``result.json`` tells it: ``seed``, ``status`` (``finished``,
``diverged``, ``interrupted``, or ``failed`` without a result), ``error`` (the last line of what a
failed run said), ``iterations``, :data:`FIGURES` (``loss`` is the mean over the last interval),
``elapsed_s``, ``peak_memory_by_device``, ``device``, and ``not_measured`` (devices whose power
was not measured, with the reason)."""


@dataclass(frozen=True)
class Stability:
    """All runs and what they amount to.

    Attributes:
        metric: 'auc' where every finished run has one, else 'loss'.
        spreads: of :data:`FIGURES`, and of ``peak_memory_bytes_DEVICE``, see :func:`spread`.
    """

    title: str
    parameters: dict[str, Any]
    metric: str
    runs: list[SeedRun]
    spreads: dict[str, dict[str, Any]]

    @property
    def finished(self) -> list[SeedRun]:
        """The runs that count."""
        return [run for run in self.runs if run["status"] == "finished"]

    @property
    def label(self) -> str:
        """What sets it apart from others: its precision, else its title."""
        return str(self.parameters.get("training", {}).get("precision", "")) or self.title

    @property
    def values(self) -> list[float]:
        """The metric of each finished run, in the order of the seeds."""
        return [run[self.metric] for run in self.finished if run[self.metric] is not None]

    def to_json(self) -> dict[str, Any]:
        """As stability.json has it."""
        return {"version": STABILITY_VERSION, **asdict(self)}


def read_stability(path: Path) -> Stability:
    """The result in a folder, or in a file.

    Raises:
        InputError: it is not there, or is something else.
    """
    file = path / SUMMARY if path.is_dir() else path
    tree = read_document(file, "result of dlrm stability", version=STABILITY_VERSION)
    del tree["version"]
    return Stability(**tree)


def measure_stability(
    parameters: Parameters,
    seeds: Sequence[int],
    folder: Path,
    on_run: Callable[[SeedRun, int, int], None] = lambda run, number, count: None,
) -> Stability:
    """Train once a seed, keep what is there already, and sum up.

    Ctrl-C ends the run of the moment; the summary is then of the runs before it.

    Args:
        folder: gets ``seed-NNNNN/`` a seed and ``stability.json`` after each.
        on_run: called with each run, its number from 1, and how many there will be.

    Raises:
        InputError: the folder holds runs of other parameters (the first that differs is
            named), or cannot be written.
    """
    sections = with_seed(parameters, 0).to_sections()
    path = folder / "parameters.json"
    if path.exists():
        begun = read_json(path) | {"title": sections["title"]}
        require_same(f"--output {folder}", begun, sections, "name another folder")
    else:
        write_json(path, sections)
    runs: list[SeedRun] = []
    for number, seed in enumerate(seeds, 1):
        place = folder / f"seed-{seed:05d}"
        run = _result(seed, place)
        if run is None or run["status"] not in ("finished", "diverged"):
            run = _train(with_seed(parameters, seed), seed, place)
        runs.append(run)
        summary = summarise(parameters, runs)
        write_json(folder / SUMMARY, summary.to_json())
        on_run(run, number, len(seeds))
    return summary


def with_seed(parameters: Parameters, seed: int) -> Parameters:
    """The parameters of one run: from the beginning, evaluated at least at the end."""
    training = parameters.training
    return run_of_study(
        parameters,
        seed=seed,
        # they lie in the run's own folder
        checkpoint_every=training.checkpoint_every,
        eval_every=training.eval_every or (None if training.evals_per_epoch else AT_THE_END),
    )


def summarise(parameters: Parameters, runs: Sequence[SeedRun]) -> Stability:
    """What the runs amount to; those that did not finish are listed and not counted."""
    finished = [run for run in runs if run["status"] == "finished"]
    columns: dict[str, list[float]] = {
        name: [run[name] for run in finished if run[name] is not None] for name in FIGURES
    }
    for run in finished:
        for device, size in run["peak_memory_by_device"].items():
            columns.setdefault(PEAK + device, []).append(size)
    has_auc = bool(finished) and len(columns["auc"]) == len(finished)
    return Stability(
        parameters.title,
        with_seed(parameters, 0).to_sections(),
        "auc" if has_auc else "loss",
        list(runs),
        {name: spread(values) for name, values in columns.items() if values},
    )


def stability_table(series: Mapping[str, Stability]) -> pd.DataFrame:
    """Throughput, power, memory and spread of AUC or loss, a row a series of seeds.

    Returns:
        Columns as in ``dlrm help columns stability_table``.
    """
    rows = []
    for label, stability in series.items():
        spreads = stability.spreads
        seeds = f"{len(stability.finished)} of {len(stability.runs)}"
        row: dict[str, Any] = {"run": label, "seeds": seeds}
        for name in ("samples_per_second", "power_w", "samples_per_joule"):
            row[name] = spreads[name]["mean"] if name in spreads else math.nan
        for name in sorted(spreads, reverse=True):
            if name.startswith(PEAK):
                row[f"peak_memory_{name.removeprefix(PEAK)}_bytes"] = spreads[name]["most"]
        quality = spreads.get(stability.metric)
        row["metric"] = NAMES[stability.metric]
        for name in ("mean", "sd", "least", "most"):
            row[name] = quality[name] if quality else math.nan
        rows.append(row)
    return pd.DataFrame(rows)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """``count``, ``mean``, ``sd`` (of the sample; None of one), ``least`` and ``most``."""
    return {
        "count": len(values),
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "least": min(values),
        "most": max(values),
    }


def _train(parameters: Parameters, seed: int, place: Path) -> SeedRun:
    """One run in a process of its own, which ends its iteration when we are interrupted."""
    file = place / "parameters.yaml"
    # JSON is YAML, but for numbers such as 1e-05, which our reader takes as well
    write_json(file, parameters.to_sections())
    done = run_child(
        python_module("dlrm_workbook", "train", "-f", file, "--output", place),
        stage="run",
        logs=place,
    )
    return _result(seed, place) or _seed_run(seed, {}, done.last_words())


def _result(seed: int, place: Path) -> SeedRun | None:
    """The run that a folder holds; None if it has no result."""
    try:
        result = read_json(place / "result.json")
    except InputError:
        return None
    complete = isinstance(result, dict) and {"status", "power", *FIGURES} <= result.keys()
    return _seed_run(seed, result) if complete else None


def _seed_run(seed: int, result: Mapping[str, Any], error: str = "") -> SeedRun:
    """A run by its result; without one it failed."""
    return {
        "seed": seed,
        "status": result.get("status", "failed"),
        "error": error,
        "iterations": result.get("iterations", 0),
        **{name: result.get(name) for name in (*FIGURES, "elapsed_s")},
        "peak_memory_by_device": result.get("peak_memory_by_device", {}),
        "not_measured": result.get("power", {}).get("not_measured", {}),
        "device": result.get("device", ""),
    }


PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
"""Those whose trainings are compared; tf32 is a GPU's."""


@dataclass(frozen=True)
class Series:
    """The notebook's parameter ``stability``: which trainings with several seeds it shows.

    Raises:
        InputError: there are precisions without seeds, or seeds beside a finished folder.
    """

    seeds: int = setting(0, "trainings, each with a seed of its own; 0: none", minimum=0)
    precisions: tuple[str, ...] | None = setting(
        None, "each is trained with those seeds; none: that of the parameters", choices=PRECISIONS
    )
    folder: str = setting("", "of finished `dlrm stability`, or one that holds several")

    def __post_init__(self) -> None:
        coerce_section(self, "stability")
        if self.precisions and not self.seeds:
            raise InputError(
                "stability.precisions is given, but stability.seeds is 0: say how many are trained"
            )
        if self.folder and self.seeds:
            raise InputError(
                f"stability.seeds is {self.seeds}, but stability.folder names finished trainings: "
                "give one of the two"
            )
        if self.folder and not self.places():
            raise InputError(
                f"stability.folder is {shown(self.folder)}, which holds no {SUMMARY} of "
                "dlrm stability"
            )

    def places(self) -> list[Path]:
        """Folders with a finished result each: the given one, or those within it."""
        place = Path(self.folder).expanduser().absolute()
        if (place / SUMMARY).is_file():
            return [place]
        return sorted(file.parent for file in place.glob(f"*/{SUMMARY}"))

    def variants(self, parameters: Parameters) -> dict[str, Parameters]:
        """The parameters to train with, by precision; none where no precision is named.

        Raises:
            InputError: a precision cannot be had here.
        """
        return {name: with_precision(parameters, name) for name in self.precisions or ()}


def trained_or_read(parameters: Parameters, folder: Path, wanted: Series) -> dict[str, Stability]:
    """Trainings with N seeds by label, as the ``benchmark`` notebook shows them.

    Args:
        folder: gets a folder ``stability``, with a folder a precision where these are given.

    Returns:
        The series by what sets them apart: a folder's name or the precision.

    Raises:
        InputError: a precision cannot be had here, or a finished result cannot be read.
    """
    if wanted.folder:
        series = [read_stability(place) for place in wanted.places()]
        if (Path(wanted.folder).expanduser() / SUMMARY).is_file():
            return {series[0].label: series[0]}
        return {place.name: one for place, one in zip(wanted.places(), series, strict=True)}
    if not wanted.seeds:
        return {}
    if not wanted.precisions:
        stability = measure_stability(parameters, range(wanted.seeds), folder / "stability")
        return {stability.label: stability}
    return {
        name: measure_stability(one, range(wanted.seeds), folder / "stability" / name)
        for name, one in wanted.variants(parameters).items()
    }


def with_precision(parameters: Parameters, name: str) -> Parameters:
    """The same training in another precision.

    Raises:
        InputError: tf32 without a GPU.
    """
    if name == "tf32":
        from dlrm_core.base.machine import resolve_device

        device = resolve_device(parameters.training)
        if device.type != "cuda":
            raise InputError(
                f"stability.precisions has 'tf32', which is a GPU's; this runs on {device}"
            )
    lowered = "fp32" if name == "tf32" else name
    return parameters.with_training(precision=lowered, tf32=name == "tf32")


def precision_table(series: Mapping[str, Stability]) -> pd.DataFrame:
    """Test whether other precisions train to another AUC (or loss) than the first series.

    The same seed has the same data and initial weights in each series, so the differences seed
    by seed are tested (Student's t, two-sided), and the p-values of several series corrected
    for their number (Holm).

    Args:
        series: series by label; the first is the reference. Seeds that finished in both count.

    Returns:
        Columns as in ``dlrm help columns precision_table``; no rows of fewer than two series.
    """
    rows: list[dict[str, Any]] = []
    labels = list(series)
    for label in labels[1:]:
        reference, other = series[labels[0]], series[label]
        metric = "auc" if reference.metric == other.metric == "auc" else "loss"
        first, second = (
            {run["seed"]: run[metric] for run in one.finished if run[metric] is not None}
            for one in (reference, other)
        )
        both = [second[seed] - first[seed] for seed in first if seed in second]
        error = statistics.stdev(both) / math.sqrt(len(both)) if len(both) > 1 else math.nan
        mean, degrees = statistics.fmean(both or [math.nan]), len(both) - 1
        interval = t_interval(mean, error, degrees)
        rows.append(
            {
                "run": label,
                "reference": labels[0],
                "metric": NAMES[metric],
                "seeds": len(both),
                "difference": mean,
                "difference_low": interval.low,
                "difference_high": interval.high,
                "p_value": p_value(mean, error, degrees),
            }
        )
    table = pd.DataFrame(rows)
    return table.assign(p_value=holm(table["p_value"].tolist())) if rows else table


def command_stability(arguments: argparse.Namespace) -> int:
    """``dlrm stability``: run what is missing; a line a run, then a JSON object of the spreads.

    Returns:
        0 if every run finished, else 1.

    Raises:
        InputError: too few seeds, or a folder of other parameters.
    """
    if arguments.seeds < 1:
        raise InputError(f"--seeds is {arguments.seeds}, expected at least 1")
    if arguments.first_seed < 0:
        raise InputError(f"--first-seed is {arguments.first_seed}, expected at least 0")
    parameters = load_parameters(arguments.file, arguments.parameter)
    folder = Path(arguments.output)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    stability = measure_stability(parameters, seeds, folder, print_run)
    summary = stability.to_json()
    del summary["runs"], summary["parameters"]
    summary |= {
        "finished": len(stability.finished),
        "asked": len(seeds),
        "file": str(folder / SUMMARY),
    }
    print(json.dumps(plain(summary)), flush=True)
    return 0 if len(stability.finished) == len(seeds) else 1


def print_run(run: SeedRun, number: int, count: int) -> None:
    """A line on standard error: what a run came to."""
    if run["status"] == "failed":
        outcome = f"failed: {run['error']}"
    else:
        quality = f"AUC {run['auc']:.6f}" if run["auc"] is not None else f"loss {run['loss']}"
        speed = run["samples_per_second"]
        outcome = f"{run['status']}, {quality}, {f'{speed:,.0f} samples/s' if speed else ''}"
    print(f"seed {run['seed']} ({number} of {count}): {outcome}", file=sys.stderr, flush=True)
