"""``dlrm data variants``: what each published data set takes, on disk, in memory and in time.

Sizes follow from the layout and are computed; times and the memory of making a data set are
measured, on request, with the share of it that the machine at hand is asked to make.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from dlrm_core.base.machine import number_in
from dlrm_core.data.files.teacher import Law
from dlrm_workbook.datasets.criteo import RAW_ROW_BYTES
from dlrm_workbook.datasets.generate import VARIANTS, bytes_of_sample, generate, scaled_variant
from dlrm_workbook.ground.processes import do_job, run_job

CRITEO_ROWS = 4_373_472_329
"""Lines of Criteo's Terabyte text, 24 days."""

PRESETS = {
    "criteo_t15_synthetic": "nvidia_t15",
    "criteo_t3_synthetic": "nvidia_t3",
    "criteo_t0_synthetic": "nvidia_t0",
    "deepspark_synthetic": "deepspark",
}
"""The parameters file that trains on each."""

DOCUMENT_SAMPLES = 1100 * 65536
"""Samples of the synthetic sets that NVIDIA's document describes (1,000 batches to train on and
100 to test, of 65,536): its 6 GiB."""

MEASURED_COLUMNS = ("share_made", "making_s", "whole_s", "making_peak_mib")


def variants(samples: int, share: float | None, folder: Path, threads: int) -> list[dict[str, Any]]:
    """A row for each synthetic variant, and for each that Criteo's text gives.

    Args:
        samples: of a whole synthetic data set, train and test.
        share: of its rows and samples to be made now, in ``folder``; None: nothing is measured.

    Returns:
        ``data_set``, ``made_by``, ``accuracy`` (whether an AUC on it says something),
        ``embedding_rows``, ``embedding_gib``, ``parameters`` (of the preset's model),
        ``samples``, ``final_gib``, ``intermediate_gib`` (disk beside it while it is made) and
        ``training_gib`` (of the preset on one GPU), all computed; and, measured or None,
        ``share_made``, ``making_s``, ``whole_s`` (the whole set at the same rate) and
        ``making_peak_mib``.

    Raises:
        InputError: the share is not in (0, 1], or a process failed.
    """
    # the memory of training is torch's business: loaded after what is measured
    found = {name: _measured(name, samples, share, folder, threads) for name in VARIANTS}
    rows = []
    for name, variant in VARIANTS.items():
        about, training = _model(PRESETS[name])
        size = bytes_of_sample(variant)
        rows.append(
            {"data_set": name, "made_by": "generate", "accuracy": "no, random labels", **about}
            | _sizes(size, samples, 0)
            | {"training_gib": training}
            | found[name]
        )
        if name.startswith("criteo"):
            text = name.removesuffix("_synthetic")
            rows.append(
                {"data_set": text, "made_by": "preprocess", "accuracy": "yes", **about}
                | _sizes(size, CRITEO_ROWS, RAW_ROW_BYTES)
                | {"training_gib": training}
                | dict.fromkeys(MEASURED_COLUMNS)
            )
    return rows


def _sizes(bytes_a_sample: int, samples: int, beside: int) -> dict[str, Any]:
    return {
        "samples": samples,
        "final_gib": bytes_a_sample * samples / 2**30,
        "intermediate_gib": beside * samples / 2**30,
    }


def _model(preset: str) -> tuple[dict[str, Any], float]:
    """A preset's model, and GiB that training it takes on one GPU."""
    from dlrm_core.config import load_parameters
    from dlrm_kernels.memory import forecast_memory, total_bytes

    parameters = load_parameters(f"{preset}.yaml")
    model = parameters.model
    rows = sum(model.table_rows)
    about = {
        "embedding_rows": rows,
        "embedding_gib": rows * model.row_bytes / 2**30,
        "parameters": rows * model.embedding_dim + sum(model.dense_weights.values()),
    }
    return about, total_bytes(forecast_memory(parameters, gpu=True), "gpu") / 2**30


def _measured(
    name: str, samples: int, share: float | None, folder: Path, threads: int
) -> dict[str, Any]:
    """Make a share of a data set in a process of its own, and remove it."""
    if share is None:
        return dict.fromkeys(MEASURED_COLUMNS)
    target = folder / f"{name}.measured"
    job = {"name": name, "share": share, "samples": max(9, round(samples * share))}
    job |= {"target": str(target), "threads": threads}
    try:
        result = run_job(__name__, job, stage=f"making {name}")
        return {"share_made": share, "whole_s": result["making_s"] / share} | result
    finally:
        for path in (target, target.with_name(target.name + ".partial")):
            shutil.rmtree(path, ignore_errors=True)


def make_and_time(job: dict[str, Any]) -> dict[str, float]:
    variant = scaled_variant(VARIANTS[job["name"]], job["share"])
    test = job["samples"] // 9
    counts = {"train": job["samples"] - test, "test": test}
    started = time.perf_counter()
    generate(Law(variant, 12345, None), counts, Path(job["target"]), job["threads"])
    seconds = time.perf_counter() - started
    # of this program alone: ru_maxrss has that of the process that started it, too
    peak_kib = number_in(Path("/proc/self/status"), "VmHWM:") or 0
    return {"making_s": seconds, "making_peak_mib": peak_kib / 1024}


if __name__ == "__main__":
    do_job(make_and_time)
