"""What the ``benchmark`` notebook measures besides contestants: protocols, and N seeds."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrm_core.config import Parameters
from dlrm_core.errors import InputError
from dlrm_core.files import write_json
from dlrm_core.protocols_command import read_document
from dlrm_core.stability import SUMMARY, Stability, measure_stability, read_stability

RECORD = "protocols.json"


def protocols(
    parameters: Parameters,
    folder: Path,
    iterations: int,
    batch_sizes: Sequence[int],
    results: str = "",
) -> dict[str, Any] | None:
    """The document of ``dlrm protocols``, measured now in a fresh process.

    Args:
        folder: gets ``protocols.json``.
        iterations: of training; 0: nothing is measured.
        batch_sizes: of inference.
        results: a finished benchmark: nothing is measured, the record beside it is read.

    Returns:
        None where nothing was measured.

    Raises:
        InputError: the run cannot be made; the message is the process's own.
    """
    if results:
        beside = Path(results).expanduser().absolute().with_name(RECORD)
        return read_document(beside) if beside.exists() else None
    if not iterations:
        return None
    record, given = folder / RECORD, folder / "protocols-parameters.json"
    write_json(given, _once(parameters).to_sections())
    command = [
        *(sys.executable, "-m", "dlrm_core", "protocols", "-f", str(given)),
        *("--iterations", str(iterations), "--seconds", "4", "--json", str(record)),
        *("--batch-sizes", ",".join(map(str, batch_sizes))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise InputError(said[-1].removeprefix("dlrm protocols: "))
    return read_document(record)


def _once(parameters: Parameters) -> Parameters:
    """Without what belongs to a run of its own: checkpoints, a sweep."""
    training = dataclasses.replace(
        parameters.training, resume="", checkpoint_every=None, checkpoint_folder=""
    )
    return dataclasses.replace(parameters, training=training, sweep={})


def stability(
    parameters: Parameters, folder: Path, seeds: int, finished: str = ""
) -> dict[str, Stability]:
    """Trainings with N seeds, by label; none if none were asked for.

    Args:
        folder: gets a folder ``stability``.
        seeds: how many are trained now; 0: none.
        finished: a folder of ``dlrm stability``, or one that holds several, each named by
            what sets it apart (``fp32``, ``bf16``).

    Raises:
        InputError: no such folder, or it holds no result.
    """
    if finished:
        place = Path(finished).expanduser().absolute()
        if (place / SUMMARY).is_file():
            return {_label(found := read_stability(place)): found}
        found_in = sorted(file.parent for file in place.glob(f"*/{SUMMARY}"))
        if not found_in:
            raise InputError(f"stability: {place} holds no {SUMMARY} of dlrm stability")
        return {one.name: read_stability(one) for one in found_in}
    if not seeds:
        return {}
    made = measure_stability(parameters, range(seeds), folder / "stability")
    return {_label(made): made}


def _label(found: Stability) -> str:
    return str(found.parameters.get("training", {}).get("precision", "")) or found.title
