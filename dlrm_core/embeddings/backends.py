"""Which code looks rows up and updates them: ``training.embedding_backend``."""

from __future__ import annotations

from typing import Protocol

from dlrm_core.config import TrainingConfig
from dlrm_core.embeddings.tables import EmbeddingTables
from dlrm_core.embeddings.torch_backend import torch_optimizer


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
        ValueError: 'auto', which :func:`dlrm_core.embeddings.choose.choose` resolves.
    """
    tables.backend = None
    return torch_optimizer(tables, config.optimizer, config.learning_rate)
