"""One run of a benchmark: our workload or facebookresearch/dlrm, in a fresh process."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.errors import InputError, MissingToolError
from dlrm_core.machine import ending_with_us

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

    def to_dict(self) -> dict[str, Any]:
        """As a benchmark's JSON keeps it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Run:
        """From a row of a benchmark's JSON; keys that are not a run's are passed over."""
        return cls(
            float(row["step_ms"]),
            float(row["end_to_end_ms"]),
            [float("nan") if loss is None else float(loss) for loss in row["losses"]],
            list(row.get("notices") or []),
        )


PEER_PACKAGES = {"sklearn": "scikit-learn", "tensorboard": "tensorboard", "tqdm": "tqdm"}
"""What dlrm_s_pytorch.py imports beside torch and numpy, and what pip calls it."""


def require_peer(peer: Path) -> None:
    """Refuse a folder that is no facebookresearch/dlrm checkout (InputError)."""
    if not (peer / "dlrm_s_pytorch.py").is_file():
        raise InputError(f"{peer}: is no facebookresearch/dlrm checkout (no dlrm_s_pytorch.py)")


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@contextlib.contextmanager
def cores_of(count: int | None) -> Iterator[int]:
    """Confine this process and those it starts to the first ``count`` usable cores.

    A contestant that makes its batches in a thread of its own works on a second core
    unless it is kept from it.

    Yields:
        how many cores there are then; None leaves them.

    Raises:
        InputError: fewer are usable.
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
    """What every contestant gets: equal threads, threads that do not spin, one allocator."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "MALLOC_TRIM_THRESHOLD_": "4000000000",
        "MALLOC_MMAP_THRESHOLD_": "1073741824",
    }


def environment_of(threads: int) -> dict[str, str]:
    """A contestant's whole environment: :func:`settings`, and that ours end with the benchmark."""
    return {**os.environ, **settings(threads), **ending_with_us()}


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
            env=environment_of(threads),
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            # a traceback's last line says what happened; ours are a sentence, maybe with a table
            said = lines[-1] if any("Traceback" in line for line in lines) else "; ".join(lines)
            raise InputError(f"dlrm train failed: {said}")
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
    steps: list[float] = []
    losses: list[float] = []
    ends: list[float] = []
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment_of(threads),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := LINE.search(line):
                    ends.append(time.perf_counter())
                    steps.append(float(found[2]))
                    losses.append(float(found[3]))
            code = process.wait()
        finally:
            if process.poll() is None:  # interrupted: it must not go on beside what comes next
                process.kill()
                process.wait()
        if code != 0 or len(steps) != iterations + WARMUP:
            errors.seek(0)
            raise _peer_failure(errors.read(), code)
    whole = np.diff(ends)[WARMUP - 1 :] * 1e3
    return Run(statistics.median(steps[WARMUP:]), float(np.median(whole)), losses)


def _peer_failure(stderr: str, code: int) -> InputError:
    """What a failed run of facebookresearch/dlrm means for whoever asked for it."""
    lines = stderr.strip().splitlines()
    last = lines[-1] if lines else f"it printed nothing and ended with exit code {code}"
    if found := re.search(r"No module named '([\w.]+)'", last):
        first = found[1].partition(".")[0]
        # all at once, or whoever installs one meets the next
        lacking = dict.fromkeys([first, *(name for name in PEER_PACKAGES if not _has(name))])
        packages = " ".join(PEER_PACKAGES.get(name, name) for name in lacking)
        return MissingToolError(
            f"facebookresearch/dlrm needs packages that {sys.executable} lacks: "
            f"pip install {packages}"
        )
    return InputError(f"dlrm_s_pytorch.py failed: {last}")
