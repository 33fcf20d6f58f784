"""``dlrm stability``: the same training with N seeds, as one line of JSON at the end."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dlrm_core.config import load_parameters
from dlrm_core.errors import InputError
from dlrm_core.files import plain
from dlrm_core.stability import SUMMARY, SeedRun, measure_stability


def command_stability(arguments: argparse.Namespace) -> int:
    """Run what is missing; a line a run, then one JSON object with the spreads.

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
    found = measure_stability(parameters, seeds, folder, print_run)
    summary = found.to_json()
    del summary["runs"], summary["parameters"]
    summary |= {"finished": len(found.finished), "asked": len(seeds), "file": str(folder / SUMMARY)}
    print(json.dumps(plain(summary)), flush=True)
    return 0 if len(found.finished) == len(seeds) else 1


def print_run(run: SeedRun, number: int, count: int) -> None:
    """A line on standard error: what a run came to."""
    if run.status == "failed":
        said = f"failed: {run.error}"
    else:
        quality = f"AUC {run.auc:.6f}" if run.auc is not None else f"loss {run.loss}"
        speed = f"{run.samples_per_second:,.0f} samples/s" if run.samples_per_second else ""
        said = f"{run.status}, {quality}, {speed}"
    print(f"seed {run.seed} ({number} of {count}): {said}", file=sys.stderr, flush=True)
