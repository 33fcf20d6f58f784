"""``dlrm bench``: step times side by side, interleaved, each run in a fresh process.

A machine's speed drifts, so figures of different minutes are not compared:
every round runs all contestants one after the other, in an order that changes
from round to round, and the ratio is the median over the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from dlrm_core.config import Parameters, load_parameters, parameters_from_sections
from dlrm_core.doctor import machine_facts
from dlrm_core.errors import InputError
from dlrm_core.files import write_json

PRESETS = Path(__file__).resolve().parent.parent / "parameters"
LOSS_TOLERANCE = 1e-5
WARMUP = 2
"""Iterations of each run that are not counted."""


@dataclass(frozen=True)
class Run:
    """Medians of one process, milliseconds an iteration, and the losses it saw.

    Attributes:
        step_ms: forward, backward and update; without making the batch.
        end_to_end_ms: the whole iteration.
    """

    step_ms: float
    end_to_end_ms: float
    losses: list[float]


def bench(arguments: argparse.Namespace) -> int:
    """``dlrm bench``: print the ratios; with ``--json`` keep them."""
    reference = load_parameters(arguments.reference or PRESETS / "seed.yaml", arguments.parameter)
    tuned = load_parameters(arguments.file or PRESETS / "tuned.yaml", arguments.parameter)
    results = compare(
        reference,
        tuned,
        peer=Path(arguments.peer) if arguments.peer else None,
        rounds=arguments.rounds,
        iterations=arguments.iterations,
        threads=arguments.threads,
    )
    # to be repeated anywhere: where the checkout lies here is nobody's business
    results["command"] = " ".join("DIR" if a == arguments.peer else a for a in arguments.argv)
    if arguments.json:
        write_json(Path(arguments.json), results)
    print(describe(results))
    return 0 if results["losses_agree"] else 1


def compare(
    reference: Parameters,
    tuned: Parameters,
    *,
    peer: Path | None,
    rounds: int,
    iterations: int,
    threads: int,
) -> dict[str, Any]:
    """Run reference, tuned and peer in turns.

    Returns:
        ``contestants``: name to medians; ``ratios``: contestant to how many times
        faster than the peer (or the reference, without one) it is, with the
        lowest and highest round; machine, versions, settings.

    Raises:
        InputError: the peer is not a facebookresearch/dlrm checkout, or a run fails.
    """
    if peer is not None and not (peer / "dlrm_s_pytorch.py").is_file():
        raise InputError(f"{peer}: is no facebookresearch/dlrm checkout (no dlrm_s_pytorch.py)")
    contestants: dict[str, Any] = {}
    if peer is not None:
        # first, so that a peer that lacks a package is known before minutes of work
        contestants["facebook"] = lambda: _run_facebook(peer, reference, iterations, threads)
    contestants["reference"] = lambda: _run_ours(reference, iterations, threads)
    contestants["tuned"] = lambda: _run_ours(tuned, iterations, threads)
    done: dict[str, list[Run]] = {name: [] for name in contestants}
    for number in range(rounds):
        # whoever runs second inherits warm caches and a busy machine: take turns at that too
        names = list(contestants)
        names = names[number % len(names) :] + names[: number % len(names)]
        for name in names:
            done[name].append(contestants[name]())
            run = done[name][-1]
            print(
                f"round {number + 1}/{rounds} {name}: step {run.step_ms:.1f} ms, "
                f"end to end {run.end_to_end_ms:.1f} ms",
                file=sys.stderr,
                flush=True,
            )
    against = "facebook" if peer is not None else "reference"
    worst = max(
        float(np.abs(np.array(run.losses) - np.array(other.losses)).max())
        for runs in done.values()
        for run, other in zip(runs, done["reference"], strict=True)
    )
    return {
        "against": against,
        "contestants": {
            name: {
                "step_ms": statistics.median(run.step_ms for run in runs),
                "end_to_end_ms": statistics.median(run.end_to_end_ms for run in runs),
            }
            for name, runs in done.items()
        },
        "ratios": {
            name: {kind: _ratio(done[against], runs, kind) for kind in ("step_ms", "end_to_end_ms")}
            for name, runs in done.items()
            if name != against
        },
        "largest_loss_difference": worst,
        "losses_agree": worst <= LOSS_TOLERANCE,
        "settings": {
            "threads": threads,
            "rounds": rounds,
            "iterations": iterations,
            "warmup": WARMUP,
            "environment": _settings(threads),
            "reference": reference.to_sections(),
            "tuned": tuned.to_sections(),
        },
        "machine": machine_facts(),
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "date": time.strftime("%Y-%m-%d"),
    }


def describe(results: dict[str, Any]) -> str:
    """The results as a table of text."""
    lines = [f"{'':<12}{'step ms':>10}{'end to end ms':>16}"]
    for name, figures in results["contestants"].items():
        lines.append(f"{name:<12}{figures['step_ms']:>10.1f}{figures['end_to_end_ms']:>16.1f}")
    for name, ratios in results["ratios"].items():
        step, whole = ratios["step_ms"], ratios["end_to_end_ms"]
        lines.append(
            f"{name} is {step['median']:.2f}x ({step['low']:.2f} to {step['high']:.2f}) as fast as "
            f"{results['against']} a step, {whole['median']:.2f}x ({whole['low']:.2f} to "
            f"{whole['high']:.2f}) end to end"
        )
    lines.append(
        f"losses differ by at most {results['largest_loss_difference']:.1e}: "
        + ("the same training" if results["losses_agree"] else "NOT the same training")
    )
    return "\n".join(lines)


def _ratio(base: list[Run], runs: list[Run], kind: str) -> dict[str, float]:
    ratios = [getattr(b, kind) / getattr(r, kind) for b, r in zip(base, runs, strict=True)]
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def _settings(threads: int) -> dict[str, str]:
    """What every contestant gets: equal threads, threads that do not spin, one allocator."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "MALLOC_TRIM_THRESHOLD_": "4000000000",
        "MALLOC_MMAP_THRESHOLD_": "1073741824",
    }


def _run_ours(parameters: Parameters, iterations: int, threads: int) -> Run:
    sections = parameters.to_sections()
    sections["training"] |= {"batches": iterations + WARMUP, "threads": threads, "log_every": 1}
    checked = parameters_from_sections(sections)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.yaml"
        file.write_text(yaml.safe_dump(checked.to_sections()))
        done = subprocess.run(
            [sys.executable, "-m", "dlrm_core", "train", "-f", str(file), "--output", folder],
            env=os.environ | _settings(threads),
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise InputError(f"dlrm train failed: {done.stderr.strip()}")
        result = json.loads((Path(folder) / "result.json").read_text())
    whole, data = result["iteration_ms"][WARMUP:], result["data_ms"][WARMUP:]
    return Run(
        statistics.median(a - b for a, b in zip(whole, data, strict=True)),
        statistics.median(whole),
        # facebook prints six decimals
        [round(loss, 6) for loss in result["losses"]],
    )


LINE = re.compile(r"it (\d+)/\d+ of epoch 0, ([\d.]+) ms/it, loss ([\d.]+)")


def _run_facebook(peer: Path, parameters: Parameters, iterations: int, threads: int) -> Run:
    """dlrm_s_pytorch.py in its own process: its own ms/it, and our clock for the whole.

    Each line it prints ends an iteration, so the time between lines is the
    iteration with its data.
    """
    model, training = parameters.model, parameters.training
    command = [
        *(sys.executable, "-u", "dlrm_s_pytorch.py", "--print-freq=1", "--print-time"),
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
    steps: list[float] = []
    losses: list[float] = []
    ends: list[float] = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=peer,
            env=os.environ | _settings(threads),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if found := LINE.search(line):
                ends.append(time.perf_counter())
                steps.append(float(found[2]))
                losses.append(float(found[3]))
        if process.wait() != 0 or len(steps) != iterations + WARMUP:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["it printed nothing"])[-1]
            raise InputError(f"{peer}/dlrm_s_pytorch.py failed: {last}")
    whole = np.diff(ends)[WARMUP - 1 :] * 1e3
    return Run(statistics.median(steps[WARMUP:]), float(np.median(whole)), losses)
