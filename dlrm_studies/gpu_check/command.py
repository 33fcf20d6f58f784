"""``dlrm gpu-check``: on a GPU node, is the GPU right, how fast is it, where does its time go?

Needs torch, triton, numpy, pyyaml and pandas only. Stages run one after the other and the
results are written after every line of theirs, so that whatever ends the run, what was
found is on disk. A budget of seconds is kept: a stage that it leaves no time for is
skipped with a sentence.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import write_json
from dlrm_core.config import load_parameters
from dlrm_core.train import Trainer
from dlrm_studies.gpu_check import timings
from dlrm_studies.gpu_check.paths import checks
from dlrm_studies.gpu_check.timings import FAST, PRESETS
from dlrm_workbook.evidence.contestants import describe as describe_case
from dlrm_workbook.evidence.contestants import require_peer
from dlrm_workbook.ground.machine import machine_facts
from dlrm_workbook.recordings.torch.recorder import information, record_iterations
from dlrm_workbook.recordings.torch.session import Lengths

BUDGET_S = 450.0
"""Seconds for everything; ``--budget`` sets it."""

RECORDED = 5
"""Iterations in a recording: a trace of a few megabytes."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Rows of one kind of results.

    Attributes:
        name: key of its rows in the results.
        least_s: it is skipped when less time is left.
        rows: makes them, one after the other; it may be left off between two.
    """

    name: str
    least_s: float
    rows: Callable[[], Iterable[dict[str, Any]]]


def gpu_check(arguments: argparse.Namespace) -> int:
    """Check, time and record; exit code 1 if anything is wrong or failed.

    Raises:
        InputError: torch sees no GPU, or the peer is no facebookresearch/dlrm checkout.
    """
    if not torch.cuda.is_available():
        raise InputError(
            f"torch {torch.__version__} sees no GPU; run this on a node with an NVIDIA GPU and "
            "a CUDA build of torch"
        )
    peer = Path(arguments.peer) if arguments.peer else None
    if peer is not None:
        require_peer(peer)
    target = Path(arguments.json)
    device = torch.device("cuda")
    seed = int(time.time())
    results: dict[str, Any] = {
        # to be repeated anywhere: where the checkout lies here is nobody's business
        "command": " ".join("DIR" if a == arguments.peer else a for a in arguments.argv),
        "date": time.strftime("%Y-%m-%d"),
        "seed": seed,
        "machine": machine_facts(),
        "gpu": gpu_facts(device),
        "versions": versions(),
        "budget_s": arguments.budget,
    }
    run_stages(stages(device, seed, peer, target), results, target, arguments.budget)
    print(target)
    return 0 if all_well(results) else 1


def stages(device: torch.device, seed: int, peer: Path | None, target: Path) -> list[Stage]:
    """What a check consists of, the most important first."""
    planned = [
        Stage("checks", 0.0, lambda: checks(device, seed)),
        Stage("steps", 20.0, lambda: timings.step_timings(timings.experiment(device))),
        Stage("nvidia_small", 20.0, timings.nvidia_timings),
        Stage("latencies", 15.0, timings.prediction_timings),
    ]
    if peer is not None:
        threads = min(8, os.cpu_count() or 1)
        planned.append(Stage("peer", 120.0, lambda: [timings.peer_timings(peer, 1, 15, threads)]))
    planned += [
        Stage("recordings", 20.0, lambda: recordings(target.with_suffix(""))),
        Stage("host_data", 30.0, timings.host_timings),
    ]
    return planned


def run_stages(
    given: list[Stage],
    results: dict[str, Any],
    target: Path,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Run stages into ``results`` and write them to ``target`` after every row.

    An error ends its stage, not the others; it is kept under ``failed``.
    """
    started = clock()
    results |= {"skipped": {}, "failed": {}, "stage_s": {}}
    for stage in given:
        begun = clock()
        left = budget_s - (begun - started)
        if left <= stage.least_s:
            results["skipped"][stage.name] = (
                f"{left:.0f} s of {budget_s:.0f} s were left, it takes at least "
                f"{stage.least_s:.0f} s"
            )
            write_json(target, results)
            continue
        rows: list[dict[str, Any]] = []
        results[stage.name] = rows
        print(f"{stage.name}:", flush=True)
        try:
            for row in stage.rows():
                rows.append(row)
                print(f"  {describe_row(row)}", flush=True)
                write_json(target, results)
                if clock() - started > budget_s:
                    results["skipped"][stage.name] = (
                        f"the {budget_s:.0f} s were over after {len(rows)} of its rows"
                    )
                    break
        except Exception as error:  # whatever a driver or a compiler may raise
            results["failed"][stage.name] = timings.reason(error)
            print(f"  FAILED: {timings.reason(error)}", flush=True)
        results["stage_s"][stage.name] = clock() - begun
        write_json(target, results)
        timings.forget()


def describe_row(row: dict[str, Any]) -> str:
    """One row as a line of text."""
    if "ok" in row:
        verdict = "ok" if row["ok"] else "WRONG"
        return f"{verdict:<6}{row['name']}: {row['error']:.1e} (at most {row['bound']:.0e})"
    name = ", ".join(str(row[key]) for key in ("model", "variant", "name") if key in row)
    if "failed" in row:
        return f"{name}: FAILED: {row['failed']}"
    if "latency_ms" in row:
        mean, p99 = row["latency_ms"]["mean"], row["latency_ms"]["p99"]
        return f"{name}: {mean:.3f} ms mean, {p99:.3f} ms p99"
    if "step_ms" in row:
        return (
            f"{name}: {row['step_ms']:.3f} ms per step, {row['end_to_end_ms']:.3f} ms with data, "
            f"{row['samples_per_second']:,.0f} samples/s"
        )
    if "ratios" in row:
        return describe_case(row).replace("\n", "\n  ")
    return name


def all_well(results: dict[str, Any]) -> bool:
    """Whether every check passed and nothing failed; what was skipped does not count."""
    rows = [row for value in results.values() if isinstance(value, list) for row in value]
    return (
        bool(results.get("checks"))
        and all(row.get("ok", True) and "failed" not in row for row in rows)
        and all(row.get("losses_agree") is not False for row in rows)
        and not any(row.get("failures") for row in rows)
        and not results["failed"]
    )


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """What the results depend on."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
    }


def versions() -> dict[str, str | None]:
    """Of what computes."""
    try:
        import triton

        has: str | None = triton.__version__
    except ImportError:
        has = None
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "triton": has,
    }


def recordings(folder: Path) -> Iterator[dict[str, Any]]:
    """Profiles of facebook's benchmark shape, its data replayed, and of the fast step."""
    seed = load_parameters(
        PRESETS / "seed.yaml", ["training.device=cuda", "data.generator=facebook"]
    )
    fast = timings.experiment(torch.device("cuda")).with_training(**FAST)
    for name, parameters in (("seed", seed), ("fast", fast)):
        place = folder.with_name(f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}-{name}")
        trainer = Trainer(parameters)
        try:
            iterate = trainer.iterate
            record_iterations(
                lambda iteration, iterate=iterate: iterate(),  # type: ignore[misc]
                place,
                Lengths(RECORDED, warmup=3, unprofiled=RECORDED),
                device=trainer.device,
                information=information(parameters, trainer.device, trainer.notices),
            )
        finally:
            trainer.close()
        yield {"name": name, "folder": place.name}
