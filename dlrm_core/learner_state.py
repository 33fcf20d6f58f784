"""What training has made so far: weights and optimiser state, by names that no back end owns.

``embeddings.tables.3.weight`` has its state under ``embeddings.tables.3.weight.sum``
(Adagrads: (R, d), row-wise (R,)), ``.exp_avg`` and ``.exp_avg_sq`` (Adam), whether torch,
the fused kernels or FBGEMM updates the table, so that a checkpoint moves between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from dlrm_core.dense import DensePart
from dlrm_core.embeddings.host_tables import SplitTables
from dlrm_core.model import DLRM


class Learner(Protocol):
    """A step, of one process or of a rank, as far as its state goes."""

    @property
    def model(self) -> DLRM:
        """Trained in place."""

    @property
    def dense(self) -> DensePart:
        """The dense part and its precision."""

    @property
    def bottom_optimizer(self) -> torch.optim.Optimizer:
        """Of the bottom MLP."""

    @property
    def top_optimizer(self) -> torch.optim.Optimizer:
        """Of the top MLP."""

    @property
    def embedding_optimizer(self) -> Any:
        """What updates the tables."""

    def set_learning_rate(self, rate: float) -> None:
        """Learning rate of all updates from the next one on."""


def weights_of(model: DLRM) -> dict[str, torch.Tensor]:
    """Every weight by its name, none of them copied."""
    return {name: weight.detach() for name, weight in model.named_parameters()}


def optimizer_state(step: Learner) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """State of all updates.

    Returns:
        tensors by name, none of them copied; and for each weight that counts its updates,
        their number. A weight that was never updated may have neither.
    """
    tensors: dict[str, torch.Tensor] = {}
    counts: dict[str, float] = {}
    for name, weight, optimizer in _torch_weights(step):
        for key, value in optimizer.state.get(weight, {}).items():
            if key == "step":
                counts[name] = float(value)
            elif isinstance(value, torch.Tensor):
                tensors[f"{name}.{key}"] = _flat(value)
    tensors |= _backend_sums(step)
    return tensors, counts


def make_room(
    step: Learner, names: Mapping[str, Any], counts: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """The tensors of this step into which a saved state is to be copied, by name.

    State that an optimiser would make at its first update is made now, where ``names``
    has something for it.
    """
    for name, weight, optimizer in _torch_weights(step):
        state = optimizer.state[weight]
        for key in ("exp_avg", "exp_avg_sq"):
            if f"{name}.{key}" in names and key not in state:
                state[key] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        if name in counts:
            state["step"] = _count(optimizer, weight, counts[name])
    return optimizer_state(step)[0]


def _count(optimizer: torch.optim.Optimizer, weight: torch.Tensor, count: float) -> Any:
    """A number of updates in the form that the optimiser keeps it."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return int(count)
    fused = optimizer.param_groups[0].get("fused")
    return torch.tensor(count, dtype=torch.float32, device=weight.device if fused else "cpu")


def _torch_weights(
    step: Learner,
) -> Iterator[tuple[str, torch.nn.Parameter, torch.optim.Optimizer]]:
    """Name and weight of everything that an optimiser of torch updates."""
    names = {weight: name for name, weight in step.model.named_parameters()}
    for optimizer in (step.bottom_optimizer, step.top_optimizer, *_embedding_updates(step)):
        if not isinstance(optimizer, torch.optim.Optimizer):
            continue
        for group in optimizer.param_groups:
            for weight in group["params"]:
                yield names[weight], weight, optimizer


def _backend_sums(step: Learner) -> dict[str, torch.Tensor]:
    """Adagrads' sums of a back end that keeps them itself."""
    names = {weight: name for name, weight in step.model.named_parameters()}
    found: dict[str, torch.Tensor] = {}
    for update in _embedding_updates(step):
        states = getattr(update, "states", None)
        if states is None:
            continue
        tables = step.model.embeddings.weights
        if isinstance(step.embedding_optimizer, SplitTables):
            tables = next(
                side.weights for _, side, own in step.embedding_optimizer.sides if own is update
            )
        for weight, state in zip(tables, states, strict=True):
            if state.numel():
                found[f"{names[weight]}.sum"] = _flat(state)
    return found


def _embedding_updates(step: Learner) -> list[Any]:
    """What updates the tables: one, or one a side where tables lie in two places."""
    update = step.embedding_optimizer
    return [own for _, _, own in update.sides] if isinstance(update, SplitTables) else [update]


def _flat(state: torch.Tensor) -> torch.Tensor:
    """(R, 1) as (R,): back ends differ in how they keep one number a row."""
    return state[:, 0] if state.dim() == 2 and state.shape[1] == 1 else state
