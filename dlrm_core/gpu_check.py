"""``dlrm gpu-check``: on a GPU node, is the GPU right, and where does its time go?

Needs torch, numpy and pyyaml only. Every check draws fresh random input and
compares with the CPU; then the experiment is timed and recorded.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm_core.config import Parameters, load_parameters, parameters_from_sections
from dlrm_core.data.synthetic import SyntheticBatches
from dlrm_core.errors import InputError
from dlrm_core.files import write_json
from dlrm_core.profiling.torch_recorder import record
from dlrm_core.profiling.workload import information
from dlrm_core.training import Trainer, train

PRESETS = Path(__file__).resolve().parent.parent / "parameters"
TOLERANCE = 1e-4
"""Largest relative error of a GPU's fp32 weights and losses against the CPU's."""

OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "tf32": ({"tf32": True}, 1e-2),
    "bf16": ({"precision": "bf16"}, 5e-2),
    "fp16": ({"precision": "fp16"}, 5e-2),
    "micro-batches": ({"micro_batch": 200}, TOLERANCE),
    "fused optimizer": ({"fused_optimizer": True}, TOLERANCE),
    "CUDA graphs": ({"cuda_graphs": True}, TOLERANCE),
    "CUDA graphs, bf16": ({"cuda_graphs": True, "precision": "bf16"}, 5e-2),
    "torch.compile": ({"compile": True}, TOLERANCE),
}
"""Options of ``training`` and the largest relative error of weights and losses they may make."""


def gpu_check(arguments: argparse.Namespace) -> int:
    """Check, time and record; exit code 1 if the GPU disagrees with the CPU.

    Raises:
        InputError: torch sees no GPU.
    """
    if not torch.cuda.is_available():
        raise InputError(
            f"torch {torch.__version__} sees no GPU; run this on a node with an NVIDIA GPU and "
            "a CUDA build of torch"
        )
    target = Path(arguments.json)
    results = check(torch.device("cuda"))
    results["timings"] = timings()
    results["recording"] = _record(target.with_suffix(""))
    results["command"] = " ".join(arguments.argv)
    write_json(target, results)
    for row in results["checks"]:
        print(f"{'ok' if row['ok'] else 'WRONG':<6}{row['name']}: {row['error']:.1e}")
    for name, row in results["timings"].items():
        print(f"{name}: {row['compute_ms']:.2f} ms a step, {row['ms']:.2f} ms with data")
    print(target)
    return 0 if all(row["ok"] for row in results["checks"]) else 1


def check(device: torch.device) -> dict[str, Any]:
    """Compare what the device computes with what the CPU computes.

    Works on any device, so that its logic is tested where there is no GPU.
    """
    seed = int(time.time())
    checks = []
    for interaction in ("dot", "cat"):
        for loss in ("mse", "bce", "wbce"):
            error = _training_error(device, interaction, loss, seed)
            checks.append(
                {
                    "name": f"20 steps, {interaction}, {loss}",
                    "error": error,
                    "ok": error < TOLERANCE,
                }
            )
    for exponent in (None, 1.05):
        error = _generator_error(device, exponent, seed)
        name = "uniform" if exponent is None else "zipf"
        checks.append({"name": f"{name} batches", "error": error, "ok": error < 0.01})
    checks += _option_checks(device, seed)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "seed": seed,
        "checks": checks,
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "numpy": np.__version__,
        },
        "date": time.strftime("%Y-%m-%d"),
    }


def _option_checks(device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Each option of the dense part on the device, against plain fp32 on the CPU."""
    checks = []
    for name, (options, tolerance) in OPTIONS.items():
        error = _training_error(device, "dot", "mse", seed, options)
        checks.append({"name": f"20 steps, {name}", "error": error, "ok": error < tolerance})
    return checks


def timings() -> dict[str, dict[str, float]]:
    """Milliseconds an iteration of the experiment, plain and with data made on the GPU."""
    seed = load_parameters(PRESETS / "seed.yaml", ["training.device=cuda"])
    on_device = dataclasses.replace(seed.data, generator="uniform", place="device")
    rows = {}
    cases = {
        "experiment": seed,
        "experiment, data made on the GPU": dataclasses.replace(seed, data=on_device),
    }
    for name, (options, _) in OPTIONS.items():
        training = dataclasses.replace(seed.training, **options)
        cases[f"data made on the GPU, {name}"] = dataclasses.replace(
            seed, data=on_device, training=training
        )
    for name, parameters in cases.items():
        training = dataclasses.replace(parameters.training, batches=30)
        result = train(dataclasses.replace(parameters, training=training), progress=False)
        times = result.iteration_ms[5:]
        waits = result.data_ms[5:]
        rows[name] = {
            "ms": float(np.median(times)),
            "compute_ms": float(np.median(np.array(times) - np.array(waits))),
        }
    return rows


def _small(device: torch.device, interaction: str, loss: str, seed: int) -> Parameters:
    return parameters_from_sections(
        {
            "model": {
                "bottom_mlp": "64-128-32",
                "top_mlp": "128-64-1",
                "embedding_dim": 32,
                "table_rows": [5000, 300, 7, 1],
                "interaction": interaction,
                "loss": loss,
                "loss_weights": [0.5, 2.0],
            },
            "data": {"indices_per_lookup": 20, "round_targets": True},
            "training": {
                "batch_size": 512,
                "batches": 20,
                "learning_rate": 0.1,
                "seed": seed % 2**32,
                "device": device.type,
            },
        }
    )


def _training_error(
    device: torch.device,
    interaction: str,
    loss: str,
    seed: int,
    options: dict[str, Any] | None = None,
) -> float:
    """Largest relative difference of any weight tensor and of the losses after 20 steps."""
    results = []
    # the options are the device's: the CPU computes what is right
    for where, chosen in ((torch.device("cpu"), {}), (device, options or {})):
        small = _small(where, interaction, loss, seed)
        training = dataclasses.replace(small.training, **chosen)
        trainer = Trainer(dataclasses.replace(small, training=training))
        losses = torch.tensor(trainer.train().losses, dtype=torch.float64)
        trainer.close()
        weights = [weight.detach().cpu().double() for weight in trainer.model.parameters()]
        results.append([losses, *weights])
    return max(
        float((ours - theirs).norm() / theirs.norm()) for theirs, ours in zip(*results, strict=True)
    )


def _generator_error(device: torch.device, exponent: float | None, seed: int) -> float:
    """Kolmogorov-Smirnov distance between the device's rows and the CPU's; bounds are checked."""
    rows, count = 10_000, 200_000
    drawn = []
    for where in (torch.device("cpu"), device):
        make = SyntheticBatches(4, (rows,), count, 1, True, False, seed, exponent, where)
        indices = make.next_batch().indices.cpu()
        if int(indices.min()) < 0 or int(indices.max()) >= rows:
            return float("inf")
        drawn.append(torch.bincount(indices, minlength=rows).double().cumsum(0) / count)
    return float((drawn[0] - drawn[1]).abs().max())


def _record(folder: Path) -> str:
    """Record 10 iterations of the experiment, facebook's data replayed; the folder's name."""
    parameters = load_parameters(
        PRESETS / "seed.yaml", ["training.device=cuda", "data.generator=facebook"]
    )
    trainer = Trainer(parameters)
    name = folder.with_name(f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    record(
        lambda iteration: trainer.iterate(),
        10,
        name,
        device=trainer.device,
        warmup=3,
        unprofiled=10,
        information=information(parameters, trainer.device, trainer.notices),
    )
    return name.name


__all__ = ["check", "gpu_check", "timings"]
