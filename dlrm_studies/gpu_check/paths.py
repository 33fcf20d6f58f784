"""Is the GPU right? Every path of the workload that runs on it, against the CPU.

Each check draws fresh random input. A result is an error and the bound that it must
stay below; the bound follows from the precision that the path computes in.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any

import torch

from dlrm_core.base.errors import InputError
from dlrm_core.config import LAWS, Parameters, TrainingConfig, parameters_from_sections
from dlrm_core.data.batch import Batch
from dlrm_core.data.synthetic import SyntheticBatches
from dlrm_core.embeddings import EmbeddingTables, attach
from dlrm_core.interactions import DotInteraction
from dlrm_core.model import InteractionLayer
from dlrm_core.train import Trainer
from dlrm_kernels.embeddings.fused_gpu import FusedGpu
from dlrm_kernels.interaction_gpu import dot_interaction

TOLERANCE = 1e-4
"""Largest relative error of a GPU's fp32 weights and losses against the CPU's, 20 steps."""

LOW = 5e-2
"""The same where products are rounded to 16 bits."""

SIZE = 512
"""Samples in a batch of these runs."""

FUSED = {"embedding_backend": "fused", "dense_backend": "fused"}
GRAPHS = FUSED | {"cuda_graphs": True}

CHECKED_OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "tf32": ({"tf32": True}, 1e-2),
    "bf16": ({"precision": "bf16"}, LOW),
    "fp16": ({"precision": "fp16"}, LOW),
    "micro-batches": ({"micro_batch": 200}, TOLERANCE),
    "fused optimizer": ({"fused_optimizer": True}, TOLERANCE),
    "torch.compile": ({"compile": True}, TOLERANCE),
    "fused": (FUSED, TOLERANCE),
    "fused, bf16": (FUSED | {"precision": "bf16"}, LOW),
    "fused, fp16": (FUSED | {"precision": "fp16"}, LOW),
    "CUDA graphs": (GRAPHS, TOLERANCE),
    "CUDA graphs, tf32": (GRAPHS | {"tf32": True}, 1e-2),
    "CUDA graphs, bf16": (GRAPHS | {"precision": "bf16"}, LOW),
}
"""Options of ``training`` and the largest relative error of weights and losses they may make."""

Check = dict[str, Any]
"""``name``, ``error``, ``bound``, ``ok``."""


def check_of(name: str, error: float, bound: float) -> Check:
    """One line of the results; an error that is no number is wrong."""
    return {"name": name, "error": error, "bound": bound, "ok": bool(error <= bound)}


def checks(device: torch.device, seed: int) -> Iterator[Check]:
    """Every check, one after the other.

    Works on any device, so that its logic is tested where there is no GPU.
    """
    for interaction, loss in itertools.product(("dot", "cat"), ("mse", "bce", "wbce")):
        model = {"interaction": interaction, "loss": loss}
        error = training_error(device, seed, model)
        yield check_of(f"20 steps, {interaction}, {loss}", error, TOLERANCE)
    prefetched = {"loader": "prefetch", "generator": "facebook"}
    runs: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], float]] = {
        **{name: (options, {}, {}, bound) for name, (options, bound) in CHECKED_OPTIONS.items()},
        # a gradient of almost nothing moves a weight by a whole step, up or down
        "CUDA graphs, adagrad": (GRAPHS, {"optimizer": "adagrad"}, {}, 2e-2),
        "CUDA graphs, rowwise_adagrad": (GRAPHS, {"optimizer": "rowwise_adagrad"}, {}, 2e-2),
        "batches staged by a thread": (GRAPHS, {}, prefetched, TOLERANCE),
    }
    for name, (options, law, data, bound) in runs.items():
        error = training_error(device, seed, {}, options, law, data)
        yield check_of(f"20 steps, {name}", error, bound)
    for name in LAWS:
        yield check_of(f"{name} batches", generator_error(device, name, seed), 0.01)
    yield from kernel_checks(device, seed)


def kernel_checks(device: torch.device, seed: int) -> Iterator[Check]:
    """The Triton kernels alone; on a CPU Triton's interpreter runs them, on little input."""
    laws = {"uniform": False, "skewed": True}
    for optimizer, law in itertools.product(("sgd", "adagrad", "rowwise_adagrad"), laws):
        error = embedding_error(device, optimizer, laws[law], seed)
        yield check_of(f"embedding kernels, {optimizer}, {law}", error, 1e-4)
    yield check_of("embedding kernels, the same bits twice", repeated_error(device, seed), 0.0)
    yield check_of("embedding kernels, a wrong index is named", fault_error(device, seed), 0.0)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        for itself in (False, True):
            name = f"interaction kernels, {dtype}{', with itself' if itself else ''}"
            yield check_of(name, interaction_error(device, dtype, itself, seed), bound)
    if device.type == "cuda":
        yield check_of("a table of more than 2^31 elements", large_table_error(device), 1e-6)
        yield check_of("batches made on the GPU, padded", padded_error(device, seed), TOLERANCE)


def small(
    device: torch.device,
    seed: int,
    model: dict[str, Any],
    training: dict[str, Any],
    data: dict[str, Any] | None = None,
) -> Parameters:
    """A run of 20 steps with every kind of table: large, small, of one row."""
    return parameters_from_sections(
        {
            "model": {
                "bottom_mlp": "64-128-32",
                "top_mlp": "128-64-1",
                "embedding_dim": 32,
                "table_rows": [5000, 300, 7, 1],
                "loss_weights": [0.5, 2.0],
            }
            | model,
            "data": {"indices_per_lookup": 20, "round_targets": True, "generator": "facebook"}
            | (data or {}),
            "training": {
                "batch_size": SIZE,
                "batches": 20,
                "learning_rate": 0.1,
                "seed": seed % 2**32,
                "device": device.type,
            }
            | training,
        }
    )


def training_error(
    device: torch.device,
    seed: int,
    model: dict[str, Any],
    options: dict[str, Any] | None = None,
    law: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
) -> float:
    """Largest relative difference of any weight tensor and of the losses after 20 steps.

    Args:
        options: of ``training``, on the device only: the CPU computes what is right.
        law: of ``training``, on both.
        data: of ``data``, on the device only.
    """
    oracle = _oracle(seed, json.dumps([model, law or {}]))
    given = outcome(small(device, seed, model, (law or {}) | (options or {}), data))
    return difference(given, oracle)


@functools.lru_cache(maxsize=16)
def _oracle(seed: int, asked: str) -> list[torch.Tensor]:
    """What the CPU computes, plainly: once for all options that are to compute the same."""
    model, law = json.loads(asked)
    return outcome(small(torch.device("cpu"), seed, model, law))


def outcome(parameters: Parameters) -> list[torch.Tensor]:
    """Losses and weights of a run."""
    trainer = Trainer(parameters)
    try:
        losses = torch.tensor(trainer.train().losses, dtype=torch.float64)
    finally:
        trainer.close()
    weights = [weight.detach().cpu().double() for weight in trainer.model.parameters()]
    return [losses, *weights]


def difference(given: list[torch.Tensor], oracle: list[torch.Tensor]) -> float:
    """Largest ||a - b|| / ||b|| of any pair; NaN if any of it is no number."""
    pairs = ((a.double(), b.double()) for a, b in zip(given, oracle, strict=True))
    errors = [float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs]
    return float(torch.tensor(errors).max())


def generator_error(device: torch.device, law: str, seed: int) -> float:
    """Kolmogorov-Smirnov distance between the device's rows and the CPU's; bounds are checked."""
    rows, count = 10_000, 200_000
    drawn = []
    for where in (torch.device("cpu"), device):
        exponent = 1.05 if law == "zipf" else None
        make = SyntheticBatches(
            *(4, (rows,), count, 1, True, False, seed, exponent, where), reuse=law == "reuse"
        )
        indices = make.next_batch().indices.cpu()
        if int(indices.min()) < 0 or int(indices.max()) >= rows:
            return float("inf")
        drawn.append(torch.bincount(indices, minlength=rows).double().cumsum(0) / count)
    return float((drawn[0] - drawn[1]).abs().max())


def _embedding_case(
    device: torch.device, skew: bool, seed: int, where: torch.device
) -> tuple[EmbeddingTables, Batch, list[torch.Tensor]]:
    """Tables, a batch and gradients on ``where``; large where a GPU is checked."""
    tiny = device.type == "cpu"
    rows, dim, size, bag = ([40, 3, 1], 12, 6, 4) if tiny else ([200_000, 999, 3, 1], 96, 4096, 30)
    exponent, cpu = 1.2 if skew else None, torch.device("cpu")
    make = SyntheticBatches(3, tuple(rows), size, bag, False, False, seed, exponent, cpu)
    random = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(size, dim, generator=random).to(where) for _ in rows]
    tables = EmbeddingTables(rows, dim)
    random.manual_seed(seed)
    with torch.no_grad():
        for weight in tables.weights:
            weight.uniform_(-1, 1, generator=random)
    return tables.to(where), make.next_batch().to(where), gradients


def _after_two_steps(
    tables: EmbeddingTables, batch: Batch, gradients: list[torch.Tensor], update: Any
) -> list[torch.Tensor]:
    """Pooled vectors and weights, on the CPU."""
    pooled: list[torch.Tensor] = []
    for _ in range(2):
        pooled = tables(batch)
        update.zero_grad()
        torch.autograd.backward(pooled, gradients)
        update.step()
    return [t.detach().cpu().clone() for t in (*pooled, *tables.weights)]


def embedding_error(device: torch.device, optimizer: str, skew: bool, seed: int) -> float:
    """Lookups and updated weights of the kernels against torch's on the CPU, two steps."""
    plain, batch, gradients = _embedding_case(device, skew, seed, torch.device("cpu"))
    update = attach(plain, TrainingConfig(optimizer=optimizer, learning_rate=0.1))
    expected = _after_two_steps(plain, batch, gradients, update)
    return difference(_fused_steps(device, optimizer, skew, seed), expected)


def _fused_steps(device: torch.device, optimizer: str, skew: bool, seed: int) -> list[torch.Tensor]:
    ours, batch, gradients = _embedding_case(device, skew, seed, device)
    ours.backend = backend = FusedGpu(ours, optimizer, 0.1)
    outcomes = _after_two_steps(ours, batch, gradients, backend)
    backend.check()
    return outcomes


def repeated_error(device: torch.device, seed: int) -> float:
    """0 if two runs over skewed rows leave the same bits, else the share that differ."""
    once, again = (_fused_steps(device, "adagrad", True, seed) for _ in range(2))
    return max(float((a != b).double().mean()) for a, b in zip(once, again, strict=True))


def fault_error(device: torch.device, seed: int) -> float:
    """0 if a row outside its table is named and no table changes, else 1."""
    tables, batch, gradients = _embedding_case(device, False, seed, device)
    rows = len(tables.weights[1])
    tables.backend = backend = FusedGpu(tables, "sgd", 0.1)
    before = [weight.detach().clone() for weight in tables.weights]
    batch.indices[batch.table_starts[1]] = rows
    torch.autograd.backward(tables(batch), gradients)
    try:
        backend.check()
    except InputError as error:
        named = f"table 1 has {rows:,} rows" in str(error) and f"row {rows}," in str(error)
        same = all(map(torch.equal, before, tables.weights))
        return 0.0 if named and same else 1.0
    return 1.0


def interaction_error(device: torch.device, dtype: torch.dtype, itself: bool, seed: int) -> float:
    """Products and gradients of the kernels against the plain ones in fp32."""
    size, tables, dim = (3, 5, 12) if device.type == "cpu" else (333, 26, 128)
    random = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(size, dim, generator=random).to(dtype) for _ in range(tables + 1)]
    plain = InteractionLayer(DotInteraction(tables + 1, dim, interaction_itself=itself))
    results = []
    for where, kind, interaction in (
        (device, dtype, lambda x, pooled: dot_interaction(x, pooled, itself)),
        (torch.device("cpu"), torch.float32, plain),
    ):
        x, *pooled = [v.clone().to(where, kind).requires_grad_() for v in vectors]
        z = interaction(x, pooled)
        waves = torch.sin(torch.arange(z.numel())).view(z.shape).to(dtype)
        z.backward(waves.to(where, kind))
        gradients = [v.grad for v in (x, *pooled) if v.grad is not None]
        results.append([t.detach().cpu() for t in (z, *gradients)])
    return difference(*results)


def large_table_error(device: torch.device) -> float:
    """Rows at both ends and beyond element 2^31, looked up and updated."""
    rows, dim = 2**31 // 64 + 1000, 64
    tables = EmbeddingTables([1], dim).to(device)
    table = torch.zeros(rows, dim, device=device)
    tables.weights[0].data = table
    wanted = torch.tensor([rows - 1, 3, rows - 1, 2**31 // 64], device=device)
    table[wanted] = 1.0
    tables.backend = FusedGpu(tables, "sgd", 0.5)
    none = torch.zeros(2, 1, device=device)
    offsets = torch.tensor([[0, 2]], device=device)
    (pooled,) = tables(Batch(none, wanted, offsets, (0, 4), none))
    pooled.backward(torch.full((2, dim), 0.25, device=device))
    expected = torch.tensor([0.75, 0.875, 0.75, 0.875], device=device)[:, None].expand(4, dim)
    others = float(table.sum()) - float(expected[[0, 1, 3]].sum())
    return float((pooled - 2).abs().max() + (table[wanted] - expected).abs().max() + abs(others))


def padded_error(device: torch.device, seed: int) -> float:
    """Batches of which only the device knows the size: in graphs, against torch's own path."""
    results = []
    for options in ({}, GRAPHS):
        trainer = Trainer(small(device, seed, {"init": "torch"}, options))
        rows = trainer.parameters.model.table_rows
        make = SyntheticBatches(64, rows, 512, 20, False, True, seed, 1.1, device, padded=True)
        losses = [trainer.step(make.next_batch()).cpu() for _ in range(10)]
        trainer.close()
        weights = [weight.detach().cpu() for weight in trainer.model.parameters()]
        results.append([torch.stack(losses), *weights])
    return difference(results[1], results[0])
