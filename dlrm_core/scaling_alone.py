"""One process alone: this machine's times of each part, for predictions without TorchRec."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from dlrm_core.config import Parameters
from dlrm_core.errors import InputError
from dlrm_core.parts import parse_span

PROFILE_ITERATIONS = 6
"""Of each batch size where this machine's parts are timed without TorchRec."""

WARMUP = 2


def timed_alone(
    parameters: Parameters, folder: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Parts of one ``dlrm train`` at several batch sizes, a process each.

    Args:
        folder: gets the parameters of each process.
        say: is told of each batch size that is done.

    Returns:
        Rows of a record's ``compute_profile``.

    Raises:
        InputError: a process failed.
    """
    most = parameters.training.batch_size
    rows: list[dict[str, Any]] = []
    # predictions for many ranks rest on what few samples cost
    for size in sorted({max(1, most // 64), max(1, most // 4), most}):
        rows += parts_of(parameters, size, folder)
        say(f"batch {size:,} alone")
    return rows


def parts_of(parameters: Parameters, batch_size: int, folder: Path) -> list[dict[str, Any]]:
    """Rows of ``compute_profile`` from one process of ``dlrm train`` with its spans."""
    sections = parameters.to_sections()
    sections["training"] |= {
        "batch_size": batch_size,
        "batches": WARMUP + PROFILE_ITERATIONS,
        "epochs": None,
        "max_steps": None,
        "eval_every": None,
        "auc_target": None,
        "checkpoint_every": None,
        "resume": "",
        "log_every": WARMUP + PROFILE_ITERATIONS,
        # ranks have torch's dense part, whatever one process would use
        "dense_backend": "torch",
    }
    if parameters.training.fp32_matmul.startswith("bf16"):
        sections["training"]["fp32_matmul"] = "default"
    file = folder / f"alone-{batch_size}.yaml"
    file.write_text(yaml.safe_dump(sections), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "dlrm_core", "train", "-f", str(file), "--spans"],
        capture_output=True,
        text=True,
        check=False,
        timeout=parameters.profiling.timeout_s,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"one process with a batch of {batch_size} failed: {last}")
    spans = json.loads(done.stdout.strip().splitlines()[-1])["spans"]
    return _profile_rows(spans, batch_size)


def _profile_rows(spans: Sequence[Any], batch_size: int) -> list[dict[str, Any]]:
    """Parts by iteration; those of the warm-up are left out."""
    ends = [end for name, _, end in spans if name.endswith("::iteration")]
    rows: dict[tuple[int, str, str], float] = {}
    for name, begun, end in spans:
        part = parse_span(name)
        if part is None:
            continue
        iteration = sum(done < begun for done in ends)
        key = (iteration, *part)
        rows[key] = rows.get(key, 0.0) + 1e-6 * (end - begun)
    return [
        {
            "concurrent": 1,
            "batch_size": batch_size,
            "iteration": iteration - WARMUP,
            "component": component,
            "phase": phase,
            "time_ms": time,
        }
        for (iteration, component, phase), time in rows.items()
        if WARMUP <= iteration < len(ends)
    ]
