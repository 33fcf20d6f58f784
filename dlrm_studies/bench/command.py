"""The command ``dlrm bench``: its options as a plan, its results in words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_core.base.machine import resolve_device
from dlrm_core.config import Parameters, load_parameters
from dlrm_core.dense import resolve_dense
from dlrm_studies.bench import cases
from dlrm_studies.bench.bare import rounded_fp32
from dlrm_studies.bench.embeddings import bench_embeddings
from dlrm_studies.bench.measure import BenchEffort, BenchPlan, Others, run_plan
from dlrm_workbook.evidence.contestants import PEER
from dlrm_workbook.ground.turns import threads_of


def bench(arguments: argparse.Namespace) -> int:
    """``dlrm bench``: print the ratios; with ``--json`` keep every run as it ends.

    Returns:
        0; 1 if a contestant failed or does not train the same.
    """
    if arguments.resume and not arguments.json:
        raise InputError("--resume goes on with the benchmark in --json FILE, but none is given")
    # to be repeated anywhere: where the checkout lies here is nobody's business
    command = " ".join("DIR" if word == arguments.peer else word for word in arguments.argv)
    if arguments.embeddings:
        return bench_embeddings(arguments, command)
    results = run_plan(
        plan_of(arguments),
        Path(arguments.json) if arguments.json else None,
        command=command,
        resume=arguments.resume,
        say=lambda text: print(text, file=sys.stderr, flush=True),
        show=lambda text: print(text + "\n", flush=True),
    )
    return exit_status(results["cases"])


def exit_status(cases: Sequence[Mapping[str, Any]]) -> int:
    """1 if a contestant failed, trained something else or is called fp32 and rounds more.

    A missing peer is said once. A case that an earlier call was cut short in has its runs alone:
    nothing is wrong with it.
    """
    finished = [case for case in cases if "failures" in case]
    for case in finished:
        if PEER in case["failures"]:
            reason = case["failures"][PEER]
            print(
                f"dlrm bench: no comparison with facebookresearch/dlrm: {reason}", file=sys.stderr
            )
            break
    fine = all(case["losses_agree"] is not False and not case["failures"] for case in finished)
    fine &= not any(rounded_fp32(case["bare"]) for case in finished if "bare" in case)
    return 0 if fine else 1


def plan_of(arguments: argparse.Namespace) -> BenchPlan:
    """The plan that the command line asks for.

    Raises:
        InputError: a name or count cannot be used.
    """
    if arguments.file:
        given = load_parameters(arguments.file, arguments.parameter)
        plain = (
            load_parameters(arguments.reference, arguments.parameter)
            if arguments.reference
            else cases.plain_of(given)
        )
        tuned = cases.tuned_of(given)
    else:
        reference = arguments.reference or cases.PRESETS / "seed.yaml"
        plain = load_parameters(reference, arguments.parameter)
        tuned = load_parameters(cases.PRESETS / "tuned.yaml", arguments.parameter)
    counts = cases.thread_counts(arguments.threads)
    tuned = settled(tuned, counts[0])
    chosen = [
        *cases.shape_cases(arguments.shape or ""),
        *cases.growth_cases(arguments.growth or ""),
    ]
    return BenchPlan(
        plain,
        tuned,
        Others(
            cases.precisions_of(arguments.precision or ""),
            Path(arguments.peer) if arguments.peer else None,
            arguments.torchrec,
        ),
        chosen or ([] if arguments.ablation else [cases.AS_GIVEN]),
        BenchEffort(
            *(arguments.rounds, arguments.iterations, counts, arguments.cores),
            arguments.ablation,
            bare=True,
        ),
        run_plain=not arguments.no_plain,
    )


def settled(tuned: Parameters, threads: int) -> Parameters:
    """The parameters with one choice for all rounds where the dense part's back end is ``auto``."""
    with threads_of(threads):
        tuned, notices = resolve_dense(tuned, resolve_device(tuned.training))
    for notice in notices:
        print(notice, file=sys.stderr)
    return tuned
