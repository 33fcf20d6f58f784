"""Which code looks rows up and updates them: ``training.embedding_backend``."""

from __future__ import annotations

from typing import Protocol

import torch

from dlrm_core.config import TrainingConfig
from dlrm_core.embeddings import Backend, EmbeddingTables, torch_optimizer
from dlrm_core.errors import InputError
from dlrm_kernels.embeddings.host_tables import PlacedTables, SplitTables


class Update(Protocol):
    """What the step calls after backward: torch's optimisers and every back end."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the step before."""

    def step(self) -> None:
        """Apply what backward has only made."""


def attach(tables: EmbeddingTables, config: TrainingConfig) -> Update:
    """Make the tables use ``config.embedding_backend``; what updates them.

    Optimiser state starts anew. The weights stay where they are.

    Raises:
        InputError: the back end cannot work on these tables or this device.
        MissingToolError: a package that the back end needs is not installed.
        ValueError: 'auto', which :func:`dlrm_kernels.embeddings.choose.choose` resolves.
    """
    tables.backend = None
    if isinstance(tables, PlacedTables) and tables.placement.split:
        tables.backend = SplitTables(tables, config)
        return tables.backend
    if config.embedding_backend == "torch":
        return torch_optimizer(tables, config.optimizer, config.learning_rate)
    if config.embedding_backend == "fused":
        tables.backend = _fused(tables, config)
        return tables.backend
    if config.embedding_backend == "fbgemm":
        from dlrm_kernels.embeddings.fbgemm import Fbgemm

        tables.backend = Fbgemm(tables, config.optimizer, config.learning_rate)
        return tables.backend
    raise ValueError(f"embedding_backend {config.embedding_backend!r} names no one back end")


def _fused(tables: EmbeddingTables, config: TrainingConfig) -> Backend:
    if tables.weights[0].device.type == "cuda":
        from dlrm_kernels.embeddings.fused_gpu import FusedGpu

        if config.embedding_update != "race_free":
            raise InputError(
                f"training.embedding_update is {config.embedding_update!r}, but the tables are on "
                "a GPU, where 'race_free' is the only update: the others are for CPU threads"
            )
        # the dense part rounds to bf16 at once; fp16 would lose gradients before they are unscaled
        low = config.precision == "bf16"
        pooled = torch.bfloat16 if low else torch.float32
        return FusedGpu(tables, config.optimizer, config.learning_rate, pooled)
    from dlrm_kernels.embeddings.fused_cpu import FusedCpu

    return FusedCpu(tables, config.optimizer, config.learning_rate, config.embedding_update)
