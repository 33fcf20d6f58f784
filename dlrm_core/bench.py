"""``dlrm bench``: step times side by side, interleaved, each run in a fresh process.

A machine's speed drifts, so figures of different minutes are not compared:
every round runs all contestants one after the other, in an order that changes
from round to round, and the ratio is the median over the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm_core.bench_cases import Case, growth_cases, shape_cases
from dlrm_core.bench_runs import WARMUP, Run, require_peer, run_facebook, run_ours, settings
from dlrm_core.config import Parameters, load_parameters
from dlrm_core.doctor import machine_facts
from dlrm_core.errors import InputError
from dlrm_core.files import write_json
from dlrm_core.touched import changed_parameters

PRESETS = Path(__file__).resolve().parent.parent / "parameters"
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 5e-3}
"""Largest difference of a loss from the reference's that is still the same training."""

FIGURES = ("step_ms", "end_to_end_ms")


def bench(arguments: argparse.Namespace) -> int:
    """``dlrm bench``: print the ratios; with ``--json`` keep them, case after case."""
    reference = load_parameters(arguments.reference or PRESETS / "seed.yaml", arguments.parameter)
    tuned = load_parameters(arguments.file or PRESETS / "tuned.yaml", arguments.parameter)
    contestants = {"plain": reference, "tuned": tuned}
    for precision in arguments.precision.split(",") if arguments.precision else ():
        change = {"training.precision": precision.strip()}
        contestants[f"tuned {precision.strip()}"] = changed_parameters(tuned, change)[0]
    peer = Path(arguments.peer) if arguments.peer else None
    if peer is not None:
        require_peer(peer)
    cases = shape_cases(arguments.shape) if arguments.shape else [Case("given", "as given", {})]
    if arguments.growth:
        cases = growth_cases(arguments.growth)
    results: dict[str, Any] = {
        # to be repeated anywhere: where the checkout lies here is nobody's business
        "command": " ".join("DIR" if a == arguments.peer else a for a in arguments.argv),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine_facts(),
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "settings": {
            "threads": arguments.threads,
            "rounds": arguments.rounds,
            "iterations": arguments.iterations,
            "warmup": WARMUP,
            "environment": settings(arguments.threads),
            "contestants": {name: given.to_sections() for name, given in contestants.items()},
        },
        "cases": [],
    }
    for case in cases:
        compared = compare(
            {name: _of_case(given, case) for name, given in contestants.items()},
            peer=peer,
            rounds=arguments.rounds,
            iterations=arguments.iterations,
            threads=arguments.threads,
        )
        head = {"case": case.name, "meaning": case.meaning, "change": dict(case.change)}
        results["cases"].append(head | compared)
        if arguments.json:
            write_json(Path(arguments.json), results)
        print(describe(results["cases"][-1]), flush=True)
    return 0 if all(case["losses_agree"] for case in results["cases"]) else 1


def compare(
    contestants: Mapping[str, Parameters],
    *,
    peer: Path | None,
    rounds: int,
    iterations: int,
    threads: int,
    run: Callable[[Parameters, int, int], Run] = run_ours,
) -> dict[str, Any]:
    """Run all contestants in turns.

    Args:
        contestants: name to parameters; the first is the reference for losses.
        peer: a facebookresearch/dlrm checkout, run with the reference's parameters.
        rounds: how often each runs.
        iterations: counted in each run.
        threads: CPU threads of each.

    Returns:
        ``against`` (whom the ratios compare with: the peer, else the reference),
        ``contestants`` (name to medians), ``rounds`` (name to the figures of each),
        ``ratios`` (name to how many times as fast, with the lowest and highest round),
        ``loss_difference`` (name to the largest), ``losses_agree``.

    Raises:
        InputError: a count is impossible, the peer is not a facebookresearch/dlrm
            checkout, or a run fails.
    """
    if rounds < 1 or iterations < 1:
        raise InputError(
            f"a benchmark needs rounds >= 1 and iterations >= 1, not {rounds} and {iterations}"
        )
    reference = next(iter(contestants))
    runs: dict[str, Callable[[], Run]] = {}
    if peer is not None:
        require_peer(peer)
        # first, so that a peer that lacks a package is known before minutes of work
        runs["facebook"] = lambda: run_facebook(peer, contestants[reference], iterations, threads)
    for name, given in contestants.items():
        runs[name] = lambda given=given: run(given, iterations, threads)  # type: ignore[misc]
    done: dict[str, list[Run]] = {name: [] for name in runs}
    for number in range(rounds):
        # whoever runs second inherits warm caches and a busy machine: take turns at that too
        names = list(runs)
        names = names[number % len(names) :] + names[: number % len(names)]
        for name in names:
            done[name].append(runs[name]())
            _say(number, rounds, name, done[name][-1])
    against = "facebook" if peer is not None else reference
    difference = {
        name: max(_difference(*pair) for pair in zip(mine, done[reference], strict=True))
        for name, mine in done.items()
    }
    tolerance = {name: LOSS_TOLERANCE[p.training.precision] for name, p in contestants.items()}
    return {
        "against": against,
        "contestants": {
            name: {kind: statistics.median(getattr(run, kind) for run in mine) for kind in FIGURES}
            for name, mine in done.items()
        },
        "rounds": {
            name: [{kind: getattr(run, kind) for kind in FIGURES} for run in mine]
            for name, mine in done.items()
        },
        "ratios": {
            name: {kind: _ratio(done[against], mine, kind) for kind in FIGURES}
            for name, mine in done.items()
            if name != against
        },
        "loss_difference": difference,
        "losses_agree": all(
            value <= tolerance.get(name, LOSS_TOLERANCE["fp32"])
            for name, value in difference.items()
        ),
        "notices": {name: mine[0].notices for name, mine in done.items() if mine[0].notices},
    }


def describe(case: Mapping[str, Any]) -> str:
    """One case as a table of text."""
    width = max(len(name) for name in case["contestants"]) + 2
    title = case.get("meaning", "")
    lines = [f"{title}"] if title else []
    lines.append(f"{'':<{width}}{'step ms':>10}{'end to end ms':>16}")
    for name, figures in case["contestants"].items():
        lines.append(f"{name:<{width}}{figures['step_ms']:>10.1f}{figures['end_to_end_ms']:>16.1f}")
    for name, ratios in case["ratios"].items():
        step, whole = ratios["step_ms"], ratios["end_to_end_ms"]
        lines.append(
            f"{name} is {step['median']:.2f}x ({step['low']:.2f} to {step['high']:.2f}) as fast as "
            f"{case['against']} a step, {whole['median']:.2f}x ({whole['low']:.2f} to "
            f"{whole['high']:.2f}) end to end"
        )
    worst = ", ".join(f"{name} {value:.1e}" for name, value in case["loss_difference"].items())
    verdict = "the same training" if case["losses_agree"] else "NOT the same training"
    lines.append(f"largest difference of a loss: {worst}: {verdict}")
    for name, notices in case.get("notices", {}).items():
        lines += [f"{name}: {notice}" for notice in notices]
    return "\n".join(lines)


def _of_case(parameters: Parameters, case: Case) -> Parameters:
    return changed_parameters(parameters, case.change)[0] if case.change else parameters


def _say(number: int, rounds: int, name: str, run: Run) -> None:
    print(
        f"round {number + 1}/{rounds} {name}: step {run.step_ms:.1f} ms, "
        f"end to end {run.end_to_end_ms:.1f} ms",
        file=sys.stderr,
        flush=True,
    )


def _difference(run: Run, other: Run) -> float:
    return float(np.abs(np.array(run.losses) - np.array(other.losses)).max())


def _ratio(base: list[Run], runs: list[Run], kind: str) -> dict[str, float]:
    ratios = [getattr(b, kind) / getattr(r, kind) for b, r in zip(base, runs, strict=True)]
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
