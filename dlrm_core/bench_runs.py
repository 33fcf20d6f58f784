"""One run of a benchmark: our workload or facebookresearch/dlrm, in a fresh process."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import yaml

from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.errors import InputError

WARMUP = 3
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
    notices: list[str] = field(default_factory=list)


def require_peer(peer: Path) -> None:
    """Refuse a folder that is no facebookresearch/dlrm checkout (InputError)."""
    if not (peer / "dlrm_s_pytorch.py").is_file():
        raise InputError(f"{peer}: is no facebookresearch/dlrm checkout (no dlrm_s_pytorch.py)")


def settings(threads: int) -> dict[str, str]:
    """What every contestant gets: equal threads, threads that do not spin, one allocator."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "MALLOC_TRIM_THRESHOLD_": "4000000000",
        "MALLOC_MMAP_THRESHOLD_": "1073741824",
    }


def run_ours(parameters: Parameters, iterations: int, threads: int) -> Run:
    """``dlrm train`` in its own process.

    Raises:
        InputError: the run fails; with what it said.
    """
    sections = parameters.to_sections()
    sections["training"] |= {"batches": iterations + WARMUP, "threads": threads, "log_every": 1}
    checked = parameters_from_sections(sections)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.yaml"
        file.write_text(yaml.safe_dump(checked.to_sections()))
        done = subprocess.run(
            [sys.executable, "-m", "dlrm_core", "train", "-f", str(file), "--output", folder],
            env=os.environ | settings(threads),
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
        result["notices"],
    )


LINE = re.compile(r"it (\d+)/\d+ of epoch 0, ([\d.]+) ms/it, loss ([\d.]+)")


def run_facebook(peer: Path, parameters: Parameters, iterations: int, threads: int) -> Run:
    """dlrm_s_pytorch.py in its own process: its own ms/it, and our clock for the whole.

    Each line it prints ends an iteration, so the time between lines is the
    iteration with its data.

    Raises:
        InputError: the run fails; with what it said last.
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
            env=os.environ | settings(threads),
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
