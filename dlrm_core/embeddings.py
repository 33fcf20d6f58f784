"""Embedding tables, torch's own lookups and updates, and how a faster back end is attached."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from dlrm_core.base.engines import choose, engine
from dlrm_core.config import Parameters, TrainingConfig
from dlrm_core.data.batch import Batch
from dlrm_core.optimizers import EPSILON, OPTIMIZERS

ROW_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""``model.embedding_precision`` to the type of the tables' numbers."""

TorchOptimizer = TypeVar("TorchOptimizer", bound=torch.optim.Optimizer)


class Update(Protocol):
    """What the step calls after backward: torch's optimisers and every back end."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that are kept between backward and step."""

    def step(self) -> None:
        """Update the tables with those gradients of the last backward pass not applied yet."""


def set_rate(update: Any, rate: float) -> None:
    """Set the learning rate of torch's optimiser, or of what has a ``learning_rate``."""
    if not isinstance(update, torch.optim.Optimizer):
        update.learning_rate = rate
        return
    for group in update.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)  # where captured graphs read it
        else:
            group["lr"] = rate


class Backend(Update, Protocol):
    """Lookups, their gradients and the update of the tables, all of them in one place."""

    name: str

    def forward(self, tables: EmbeddingTables, batch: Batch) -> list[torch.Tensor]:
        """T pooled vectors, each (B, d) float32; their backward pass makes, or already applies,
        the tables' gradients."""


class EmbeddingTables(nn.Module):
    """T tables of rows x d; a bag of rows is summed into one vector a sample.

    Without a back end the lookups are torch's own, one call a table. Whatever the back end, the
    weights are the same parameters under the same names. They lie in ``memory``, (R, d) each, or
    are allocated as ``dtype``. ``numbers`` are those of the tables in the whole model.
    """

    def __init__(
        self,
        table_rows: Sequence[int],
        dim: int,
        memory: Sequence[torch.Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if memory is None:
            memory = [torch.empty(rows, dim, dtype=dtype) for rows in table_rows]
        self.numbers = tuple(range(len(memory)))
        self.tables = nn.ModuleList(
            # the weights are filled by the caller; the default filling costs seconds a table
            nn.EmbeddingBag(weight.shape[0], dim, mode="sum", sparse=True, _weight=weight)
            for weight in memory
        )
        self.backend: Backend | None = None

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.parameters())

    def own_backend(self, config: TrainingConfig) -> Backend | None:
        """A back end that tables of this kind need, whatever the parameters say; None: none."""
        return None

    def forward(self, batch: Batch) -> list[torch.Tensor]:
        if self.backend is not None:
            return self.backend.forward(self, batch)
        return [
            table(batch.table_indices(t), batch.offsets[t]) for t, table in enumerate(self.tables)
        ]


# torch's own embeddings and optimisers: the oracle that every other back end is held to.

FBGEMM_LANES = 4
"""FBGEMM, which also updates the tables on several ranks, works on multiples of this width."""

FBGEMM_ROWWISE_ELEMENTS = 2**30
"""Floats of a table up to which FBGEMM's row-wise Adagrad on a CPU is right: beyond, its byte
offsets wrap at 2^32 and the update lands in other rows (seen in 1.8.0; SGD and Adagrad are
right beyond 2^31 floats)."""


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator a row instead of one a weight.

    For a row with gradient g of width d (the sum over its lookups):
    s += mean(g^2); w -= rate g / (sqrt(s) + eps), as facebookresearch/dlrm's
    ``RWSAdagrad`` and FBGEMM's EXACT_ROWWISE_ADAGRAD define it. Gradients are sparse.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float, eps: float = EPSILON) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["sum"] = weight.new_zeros(weight.shape[0])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every row that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                gradient = weight.grad.coalesce()
                rows, values = gradient.indices()[0], gradient.values()
                total = self.state[weight]["sum"]
                total.index_add_(0, rows, values.square().mean(dim=1))
                scale = group["lr"] / (total[rows].sqrt() + group["eps"])
                weight.index_add_(0, rows, values * scale[:, None], alpha=-1.0)


@functools.cache
def without_compiler(optimizer: type[TorchOptimizer]) -> type[TorchOptimizer]:
    """A torch optimiser that does not load torch's compiler; nothing else differs.

    torch's methods import ``torch._dynamo`` when they are first called, to keep the compiler
    out of themselves. That takes a second of every process that trains, and nothing here
    compiles an optimiser. Its name stays, by which profilers know its calls.
    """
    names = ("add_param_group", "zero_grad", "step")
    own = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    own["step"] = torch.no_grad()(own["step"])
    return type(optimizer.__name__, (optimizer,), own)


def torch_optimizer(
    tables: EmbeddingTables, optimizer: str, learning_rate: float
) -> torch.optim.Optimizer:
    """torch's optimiser of the tables, for their sparse gradients."""
    name, options = OPTIMIZERS[optimizer].tables
    kind = getattr(torch.optim, name, None) or globals()[name]
    return without_compiler(kind)(tables.weights, lr=learning_rate, **options)


# Which code looks rows up and updates them: ``training.embedding_backend``.


def attach(tables: EmbeddingTables, config: TrainingConfig) -> Update:
    """Make the tables use ``config.embedding_backend``; what updates them.

    Optimiser state starts anew. The weights stay where they are. Raises InputError if the back end
    cannot work on these tables or this device. Raises MissingToolError if a package that the back
    end needs is not installed. Raises ValueError at 'auto', which :func:`resolve_backend` resolves.
    """
    backend, rate = config.embedding_backend, config.learning_rate
    tables.backend = tables.own_backend(config)
    if tables.backend is not None:
        return tables.backend
    if backend == "torch" and tables.weights[0].dtype.itemsize > 2:
        return torch_optimizer(tables, config.optimizer, rate)
    if backend == "torch":
        tables.backend = engine("rows of 2 bytes").TorchRows(
            tables, config.optimizer, rate, config.seed
        )
    elif backend == "fbgemm":
        tables.backend = engine("FBGEMM").Fbgemm(tables, config.optimizer, rate)
    elif backend != "fused":
        raise ValueError(f"embedding_backend {backend!r} names no one back end")
    elif tables.weights[0].device.type != "cuda":
        kernels = engine("fused embeddings")
        tables.backend = kernels.FusedCpu(tables, config.optimizer, rate, config.seed)
    else:
        # the dense part rounds to bf16 at once; fp16 would lose gradients before they are unscaled
        pooled = torch.bfloat16 if config.precision == "bf16" else torch.float32
        kernels = engine("fused embeddings on a GPU")
        tables.backend = kernels.FusedGpu(tables, config.optimizer, rate, pooled, config.seed)
    assert tables.backend is not None
    return tables.backend


def resolve_backend(
    parameters: Parameters, device: torch.device, tables: EmbeddingTables
) -> tuple[Parameters, list[str]]:
    """The parameters with a back end in place of ``auto``, and the notice that says why.

    Raises InputError if no back end works on the tables or on the run's first batches.
    """
    plain = {"embedding_backend": "torch"}
    return choose("choice of back end", parameters, plain, device, tables)
