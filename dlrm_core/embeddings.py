"""Embedding tables, torch's own lookups and updates, and how a faster back end is attached."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import mmap
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from dlrm_core.base.engines import PACKAGE, engine, find_engine
from dlrm_core.base.errors import InputError
from dlrm_core.base.machine import numa_nodes
from dlrm_core.config import Parameters, TrainingConfig
from dlrm_core.data.batch import Batch
from dlrm_core.rounding import GROUP_BITS, round_rows, words

_HUGE_PAGE = 1 << 21
_PAIR_OF_LINES = 128
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23  # linux/mman.h
_TOUCHED_AT_ONCE = 1 << 24
_WORTH_A_THREAD = 1 << 28

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


class Update(Protocol):
    """What the step calls after backward: torch's optimisers and every back end."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that are kept between backward and step."""

    def step(self) -> None:
        """Update the tables with those gradients of the last backward pass not applied yet."""


class Backend(Update, Protocol):
    """Lookups, their gradients and the update of the tables, all of them in one place."""

    name: str

    def forward(self, tables: EmbeddingTables, batch: Batch) -> list[torch.Tensor]:
        """T pooled vectors, each (B, d) float32; their backward pass makes, or already applies,
        the tables' gradients."""


class EmbeddingTables(nn.Module):
    """T tables of rows x d; a bag of rows is summed into one vector a sample.

    Without a back end the lookups are torch's own, one call a table. Whatever the
    back end, the weights are the same parameters under the same names.

    Args:
        huge_pages: lay the tables one behind the other and ask the system for 2 MiB pages
            (Linux, CPU): random rows then miss the address cache less, and a back end that
            wants all tables in one piece can use them where they are. Before the weights
            are filled it costs nothing.
        memory: where the weights are to lie, (R, d) each; left out, on the device that torch
            allocates on.
        dtype: of the weights that are allocated (:data:`dlrm_core.rounding.ROW_DTYPES`).

    Attributes:
        numbers: of the tables in the whole model, where these are some of its tables.
    """

    def __init__(
        self,
        table_rows: Sequence[int],
        dim: int,
        huge_pages: bool = False,
        memory: Sequence[torch.Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if memory is None:
            memory = empty_tables(table_rows, dim, huge_pages, dtype)
        self.numbers = tuple(range(len(memory)))
        self.tables = nn.ModuleList(
            # the weights are filled by the caller; the default filling costs seconds a table
            nn.EmbeddingBag(weight.shape[0], dim, mode="sum", sparse=True, _weight=weight)
            for weight in memory
        )
        self.backend: Backend | None = None

    @property
    def weights(self) -> list[nn.Parameter]:
        """The tables' weights, each (R, d)."""
        return list(self.parameters())

    def own_backend(self, config: TrainingConfig) -> Backend | None:
        """A back end that tables of this kind need, whatever the parameters say; None: none."""
        return None

    def forward(self, batch: Batch) -> list[torch.Tensor]:
        """T pooled vectors, each (B, d) float32."""
        if self.backend is not None:
            return self.backend.forward(self, batch)
        return [
            table(batch.table_indices(t), batch.offsets[t]) for t, table in enumerate(self.tables)
        ]


def empty_tables(
    table_rows: Sequence[int], dim: int, huge_pages: bool, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Memory for tables (R, d), in one piece where huge pages are asked for."""
    if not huge_pages:
        return [torch.empty(rows, dim, dtype=dtype) for rows in table_rows]
    return list(empty_table(sum(table_rows), dim, huge_pages, dtype).split(list(table_rows)))


def empty_table(
    rows: int, dim: int, huge_pages: bool, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Memory for a table (rows, dim), on huge pages where asked for and offered."""
    if not huge_pages or torch.empty(0).device.type != "cpu" or sys.platform != "linux":
        return torch.empty(rows, dim, dtype=dtype)
    memory = torch.empty(rows * dim + _PAIR_OF_LINES // dtype.itemsize, dtype=dtype)
    _advise_huge_pages(memory)
    # a row of 64 floats is then two aligned pairs of cache lines, which CPUs fetch together
    skipped = -memory.data_ptr() % _PAIR_OF_LINES // dtype.itemsize
    return memory[skipped : skipped + rows * dim].view(rows, dim)


def _advise_huge_pages(weight: torch.Tensor) -> None:
    """Ask for huge pages behind a tensor's memory; where the kernel declines, nothing changes."""
    begin, end = _whole_pages(weight, _HUGE_PAGE)
    if begin < end:
        _advise(begin, end, _MADV_HUGEPAGE)


def _whole_pages(weight: torch.Tensor, page: int) -> tuple[int, int]:
    """First and last address of the pages that a tensor fills."""
    begin, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
    return -(-begin // page) * page, end // page * page


def _advise(begin: int, end: int, advice: int) -> bool:
    """Advise the system about memory; whether it took the advice. Other threads run meanwhile."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(advise(begin, end - begin, advice) == 0)


@contextlib.contextmanager
def touched_beside(weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Another thread touches the weights' memory, from its end, while the caller fills them.

    The system clears memory at its first touch, which takes longer than drawing the weights. On
    several NUMA nodes memory lies where it is touched first, so there the caller touches all.
    """
    large = sum(weight.nbytes for weight in weights) >= _WORTH_A_THREAD
    on_cpu = all(weight.device.type == "cpu" for weight in weights)
    if not (large and on_cpu) or sys.platform != "linux" or len(numa_nodes()) > 1:
        yield
        return
    stop = threading.Event()

    def touch() -> None:
        for weight in reversed(weights):
            first, end = _whole_pages(weight, mmap.PAGESIZE)
            while end > first:
                begin = max(first, end - _TOUCHED_AT_ONCE)
                # kernels before 5.14 refuse
                if stop.is_set() or not _advise(begin, end, _MADV_POPULATE_WRITE):
                    return
                end = begin

    thread = threading.Thread(target=touch, name="dlrm-touch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# torch's own embeddings and optimisers: the oracle that every other back end is held to.

EPSILON = 1e-10
"""Added to the root in both Adagrads: torch's default, and facebook's for row-wise Adagrad."""

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
def without_compiler(optimizer: type[Optimizer]) -> type[Optimizer]:
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
    weights = tables.weights
    if optimizer == "rowwise_adagrad":
        return without_compiler(RowwiseAdagrad)(weights, learning_rate)
    # foreach and fused variants refuse sparse gradients
    if optimizer == "adagrad":
        adagrad = without_compiler(torch.optim.Adagrad)
        return adagrad(weights, learning_rate, eps=EPSILON, foreach=False)
    if optimizer == "adam":
        return without_compiler(torch.optim.SparseAdam)(weights, learning_rate)
    return without_compiler(torch.optim.SGD)(weights, learning_rate, foreach=False)


class TorchRows:
    """Lookups and updates of rows of 2 bytes a number by torch's operators, the oracle of others.

    Each row that a batch looked up is updated once, with the float32 sum of its gradients.

    Args:
        tables: bfloat16 or float16; Adagrad's state is laid out beside them.
        optimizer: 'sgd', 'adagrad' or 'rowwise_adagrad'.
        seed: of the random numbers.

    Attributes:
        states: for each table Adagrad's (R, d), or row-wise Adagrad's (R, 1), sums of squares.
        updates: number of updates so far, which random numbers depend on.
    """

    name = "torch"

    def __init__(
        self, tables: EmbeddingTables, optimizer: str, learning_rate: float, seed: int
    ) -> None:
        self.optimizer, self.learning_rate = optimizer, learning_rate
        self.seed, self.updates = seed, 0
        self._tables = tables
        width = {"sgd": 0, "adagrad": tables.weights[0].shape[1], "rowwise_adagrad": 1}[optimizer]
        self.states = [
            torch.zeros(weight.shape[0] if width else 0, width, device=weight.device)
            for weight in tables.weights
        ]
        self._anchor = torch.zeros(0, requires_grad=True)
        self._made: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def forward(self, tables: EmbeddingTables, batch: Batch) -> list[torch.Tensor]:
        """T pooled vectors, each (B, d) float32."""
        return list(_NarrowLookup.apply(self._anchor, self, tables, batch))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that have not been applied."""
        self._made.clear()

    @torch.no_grad()
    def step(self) -> None:
        """Update every row that has a gradient."""
        if not self._made:
            return
        for table, rows, gradient in self._made:
            self._update(table, rows, gradient)
        self.updates += 1
        self._made.clear()

    def note(self, batch: Batch, gradients: tuple[torch.Tensor, ...]) -> None:
        """Keep, for each table, the rows of a batch (n,) and their float32 gradients (n, d)."""
        for table, gradient in enumerate(gradients):
            ends = torch.tensor([len(batch.table_indices(table))], device=gradient.device)
            sizes = torch.diff(torch.cat([batch.offsets[table], ends]))
            rows, place = torch.unique(batch.table_indices(table), return_inverse=True)
            bags = torch.repeat_interleave(torch.arange(len(sizes), device=sizes.device), sizes)
            total = torch.zeros(len(rows), gradient.shape[1], device=gradient.device)
            self._made.append((table, rows, total.index_add_(0, place, gradient.float()[bags])))

    def _update(self, table: int, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        weight = self._tables.weights[table]
        change = self.learning_rate * gradient
        if self.optimizer != "sgd":
            by_row = self.optimizer == "rowwise_adagrad"
            squares = gradient.square()
            total = self.states[table].index_add_(
                0, rows, squares.mean(dim=1, keepdim=True) if by_row else squares
            )
            root = total[rows].sqrt() + EPSILON
            change = gradient * (self.learning_rate / root) if by_row else change / root
        groups, members = rows >> GROUP_BITS, rows & ((1 << GROUP_BITS) - 1)
        number = self._tables.numbers[table]
        drawn = words(self.seed, self.updates, number, groups, members, weight.shape[1])
        weight[rows] = round_rows(weight[rows].float() - change, drawn, weight.dtype)


class _NarrowLookup(torch.autograd.Function):
    """Pooling as a node of torch's graph whose backward notes the rows' gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, backend: TorchRows, tables: EmbeddingTables, batch: Batch
    ) -> tuple[torch.Tensor, ...]:
        ctx.rest = (backend, batch)
        pooled = []
        for t, weight in enumerate(tables.weights):
            rows = weight[batch.table_indices(t)].float()
            each = torch.arange(len(rows), device=rows.device)
            pooled.append(
                torch.nn.functional.embedding_bag(each, rows, batch.offsets[t], mode="sum")
            )
        return tuple(pooled)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        backend, batch = ctx.rest
        backend.note(batch, gradients)
        return None, None, None, None


# Which code looks rows up and updates them: ``training.embedding_backend``.


def attach(tables: EmbeddingTables, config: TrainingConfig) -> Update:
    """Make the tables use ``config.embedding_backend``; what updates them.

    Optimiser state starts anew. The weights stay where they are.

    Raises:
        InputError: the back end cannot work on these tables or this device.
        MissingToolError: a package that the back end needs is not installed.
        ValueError: 'auto', which :func:`resolve_backend` resolves.
    """
    backend, rate = config.embedding_backend, config.learning_rate
    tables.backend = tables.own_backend(config)
    if tables.backend is not None:
        return tables.backend
    if backend == "torch":
        if tables.weights[0].dtype.itemsize > 2:
            return torch_optimizer(tables, config.optimizer, rate)
        rows = TorchRows(tables, config.optimizer, rate, config.seed)
        tables.backend = rows
        return rows
    if backend == "fbgemm":
        tables.backend = engine("FBGEMM").Fbgemm(tables, config.optimizer, rate)
    elif backend != "fused":
        raise ValueError(f"embedding_backend {backend!r} names no one back end")
    elif tables.weights[0].device.type != "cuda":
        kernels = engine("fused embeddings")
        tables.backend = kernels.FusedCpu(
            tables, config.optimizer, rate, config.embedding_update, config.seed
        )
    elif config.embedding_update != "race_free":
        raise InputError(
            f"training.embedding_update is {config.embedding_update!r}, but the tables are on "
            "a GPU, where 'race_free' is the only update: the others are for CPU threads"
        )
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

    Raises:
        InputError: no back end works on the tables or on the run's first batches.
    """
    training = parameters.training
    if training.embedding_backend != "auto":
        return parameters, []
    chooser = find_engine("choice of back end")
    if chooser is not None:
        parameters, notices = chooser.resolve(parameters, device, tables)
        return parameters, notices
    notice = f"training.embedding_backend auto: torch; {PACKAGE}, which has others, is not there"
    return parameters.with_training(embedding_backend="torch"), [notice]
