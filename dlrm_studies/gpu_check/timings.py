"""How fast is the GPU? Steps, whole iterations, predictions, and a peer beside them.

A step is timed on batches that lie on the device; an iteration makes its batch as well.
Times are of many steps back to back, waited for at the end: medians of rounds.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from dlrm_core.config import PRESETS, DataConfig, Parameters, TrainingConfig, load_parameters
from dlrm_core.data.batch import Batch
from dlrm_core.train import Trainer
from dlrm_studies.gpu_check.paths import FUSED, GRAPHS
from dlrm_workbook.evidence.contestants import compare
from dlrm_workbook.evidence.dependence import changed_parameters
from dlrm_workbook.evidence.latency import LATENCIES, measure_latency, pool_of
from dlrm_workbook.ground.turns import elapsed_ms

POOL = 8
"""Batches that steps are timed on, in turns: more rows than any cache holds."""

WARM_UP, ROUNDS, ROUND_S = 5, 5, 0.25

VARIANTS: dict[str, dict[str, Any]] = {
    "plain, fp32": {},
    "plain, tf32": {"tf32": True},
    "plain, bf16": {"precision": "bf16"},
    "fused embeddings, fp32": {"embedding_backend": "fused"},
    "fused, fp32": FUSED,
    "fused, fp32, graphs": GRAPHS,
    "fused, tf32, graphs": GRAPHS | {"tf32": True},
    "fused, bf16": FUSED | {"precision": "bf16"},
    "fused, bf16, graphs": GRAPHS | {"precision": "bf16"},
    "fused embeddings, bf16, compile": (
        {"embedding_backend": "fused", "precision": "bf16", "compile": True}
    ),
}
"""Options of ``training``; in the order in which one explains the next."""

FAST = VARIANTS["fused, bf16, graphs"]

COMPARED = ("plain, tf32", "fused, tf32, graphs", "fused, bf16, graphs")
"""Variants that stand beside published figures."""


def nvidia_small() -> Parameters:
    """NVIDIA DeepLearningExamples, DLRM for PyTorch: one-hot, synthetic power law (alpha 1.45)."""
    return Parameters(
        model=load_parameters(PRESETS / "nvidia_t15.yaml").model,
        data=DataConfig(
            generator="zipf",
            zipf_exponent=1.45,
            indices_per_lookup=1,
            fixed_pooling=True,
            round_targets=True,
            place="device",
        ),
        training=TrainingConfig(batch_size=65536, learning_rate=0.1, device="cuda", seed=1),
    )


def experiment(device: torch.device) -> Parameters:
    """The experiment's shape; weights and batches made on the device."""
    seed = load_parameters(PRESETS / "seed.yaml", [f"training.device={device.type}"])
    data = dataclasses.replace(seed.data, generator="uniform", place="device")
    return dataclasses.replace(seed, data=data, model=dataclasses.replace(seed.model, init="torch"))


def step_timings(parameters: Parameters) -> Iterator[dict[str, Any]]:
    """Every variant of a run: a row each (see :func:`timed`), or why it failed."""
    for name, options in VARIANTS.items():
        yield {"variant": name} | timed_or_reason(parameters.with_training(**options))


def host_timings() -> Iterator[dict[str, Any]]:
    """The experiment with facebook's own stream, made on the host, as it came and prefetched."""
    seed = load_parameters(PRESETS / "seed.yaml", ["training.device=cuda", "model.init=torch"])
    fast = seed.with_training(**FAST)
    yield {"variant": "plain, the loop of the experiment"} | timed_or_reason(seed)
    for name, generator in (("replay", "facebook"), ("uniform", "uniform")):
        change = {"data.generator": generator, "data.loader": "prefetch"}
        changed = changed_parameters(fast, change)[0]
        yield {"variant": f"fused, bf16, graphs, {name} prefetched"} | timed_or_reason(changed)


def nvidia_timings() -> Iterator[dict[str, Any]]:
    """NVIDIA's small model at batch 65536, samples per second beside the published ones."""
    # it brings pandas along, which a check must not need before anything else is measured
    from dlrm_studies.published import published_runs

    shape = nvidia_small()
    same = "mode == 'training' and batch_samples == 65536 and hardware == '1 × A100-80GB'"
    published = published_runs().query(same).set_index("precision")["samples_per_second"]
    for name in COMPARED:
        row = {"variant": name} | timed_or_reason(shape.with_training(**VARIANTS[name]))
        if "end_to_end_ms" in row:
            row["samples_per_second"] = 1e3 * shape.training.batch_size / row["end_to_end_ms"]
            reference = float(published["TF32" if "tf32" in name else "mixed"])
            row["times_published_a100"] = row["samples_per_second"] / reference
        yield row


def prediction_timings() -> Iterator[dict[str, Any]]:
    """Predictions at batch 2048 by NVIDIA's protocol, synchronised."""
    models = {"NVIDIA small": nvidia_small(), "experiment": experiment(torch.device("cuda"))}
    for (model, given), name in itertools.product(models.items(), COMPARED):
        sized = given.with_training(**VARIANTS[name], batch_size=2048)
        asked = dataclasses.replace(sized, data=dataclasses.replace(sized.data, place="cpu"))
        yield {"model": model, "variant": name} | or_reason(latency, asked)


def latency(parameters: Parameters, steps: int = 300, seconds: float = 5.0) -> dict[str, Any]:
    """Latency of predictions on batches in page-locked memory, as ``dlrm infer`` measures it."""
    trainer = Trainer(parameters)
    try:
        pool = pool_of(trainer.batches, steps, pin=trainer.device.type == "cuda")
        measured = measure_latency(
            trainer.predict, trainer.loss, pool, trainer.device, steps, seconds, "nvidia"
        )
    finally:
        trainer.close()
    latency_ms = {name: measured[name] for name in LATENCIES}
    return {"latency_ms": latency_ms, "samples_per_second": measured["samples_per_second"]}


def peer_timings(peer: Path, rounds: int, iterations: int, threads: int) -> dict[str, Any]:
    """facebookresearch/dlrm with ``--use-gpu`` beside ours, in turns, each in a fresh process."""
    seed = load_parameters(PRESETS / "seed.yaml", ["training.device=cuda"])
    replay = {"data.generator": "facebook", "data.loader": "prefetch"}
    on_device = {"data.generator": "uniform", "data.place": "device", "model.init": "torch"}
    fast = {f"training.{name}": value for name, value in FAST.items()}
    exact = {f"training.{name}": value for name, value in GRAPHS.items()}
    changes = {"fp32, its data replayed": exact | replay, "bf16, its data replayed": fast | replay}
    contestants = {"plain": seed}
    contestants |= {name: changed_parameters(seed, change)[0] for name, change in changes.items()}
    row = compare(contestants, peer=peer, rounds=rounds, iterations=iterations, threads=threads)
    # other batches of the same law, so no losses to compare: its end-to-end time is the point
    on_gpu = changed_parameters(seed, fast | on_device)[0]
    row["bf16, data made on the GPU"] = timed_or_reason(on_gpu)
    return row


def timed_or_reason(parameters: Parameters) -> dict[str, Any]:
    """Times of a run (:func:`timed`), or why it failed."""
    return or_reason(timed, parameters)


def or_reason(
    measure: Callable[[Parameters], dict[str, Any]], parameters: Parameters
) -> dict[str, Any]:
    """What is measured, or ``failed`` with the reason: one variant must not end the others."""
    try:
        return measure(parameters)
    except Exception as error:
        return {"failed": reason(error)}
    finally:
        forget()


def timed(parameters: Parameters) -> dict[str, Any]:
    """Milliseconds of a step and of a whole iteration: median, lowest and highest round."""
    trainer = Trainer(parameters)
    step_on = trainer.step
    try:
        pool = [own(next(trainer.batches).to(trainer.device)) for _ in range(POOL)]
        turns = iter(range(1 << 62))
        step = rounds_ms(lambda: step_on(pool[next(turns) % POOL]), trainer.device)
        pool.clear()
        whole = rounds_ms(trainer.iterate, trainer.device)
        loss = float(trainer.iterate())
        return {
            **{f"step_{name}": value for name, value in step.items()},
            **{f"end_to_end_{name}": value for name, value in whole.items()},
            "samples_per_second": 1e3 * parameters.training.batch_size / whole["ms"],
            "loss": loss,
            "notices": trainer.notices,
        }
    finally:
        trainer.close()


def own(batch: Batch) -> Batch:
    """A copy that stays when a loader uses its buffers again."""
    tensors: dict[str, Any] = {n: v for n, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    return dataclasses.replace(batch, **{name: tensor.clone() for name, tensor in tensors.items()})


def rounds_ms(work: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Milliseconds per call, back to back, in rounds of about ROUND_S after a warm-up."""
    for _ in range(WARM_UP):
        work()
    once = elapsed_ms(work, 3, device)
    count = max(3, min(500, round(1e3 * ROUND_S / max(once, 1e-3))))
    rounds = 2 if once > 1e3 * ROUND_S else ROUNDS
    times = [elapsed_ms(work, count, device) for _ in range(rounds)]
    return {"ms": statistics.median(times), "ms_low": min(times), "ms_high": max(times)}


def forget() -> None:
    """Give memory back before the next model: tables take gigabytes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
