"""Tables in two places: some beside the dense part on the GPU, the others with the CPU.

Tables beyond ``training.embeddings_on_gpu_bytes`` stay in host memory
(:mod:`dlrm_kernels.memory`). Their rows never move: the CPU looks them up while the GPU looks
up its own, all their pooled vectors cross in one copy from page-locked memory, and all
gradients come back in one. Both sides may be the CPU, which tests use and which rehearses
a run.

Shapes: B samples, T tables of R rows, d embedding width, H of the tables on the host.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from dlrm_core.base.text import format_bytes
from dlrm_core.config import Parameters, TrainingConfig
from dlrm_core.data.batch import Batch
from dlrm_core.embeddings import ROW_DTYPES, EmbeddingTables, attach, set_rate
from dlrm_core.parts import part
from dlrm_kernels.embeddings.pages import empty_tables
from dlrm_kernels.placement import Placement, plan_placement


@dataclass(frozen=True)
class SplitBatch(Batch):
    """A batch whose lookups are those of the GPU's tables.

    The host's are in ``host``, and stay there when the batch moves to a device.
    """

    host: Batch | None = None


def divide(batch: Batch, placement: Placement) -> SplitBatch:
    """A batch of all tables, its lookups sorted by the side of their table."""
    if isinstance(batch, SplitBatch):
        return batch
    gpu = _lookups(batch, placement.on_gpu)
    host = _lookups(batch, placement.on_host)
    if host.indices.device.type != "cpu":
        host = host.to(torch.device("cpu"))
    return SplitBatch(gpu.dense, gpu.indices, gpu.offsets, gpu.table_starts, gpu.targets, host=host)


def _lookups(batch: Batch, ids: Sequence[int]) -> Batch:
    """The same samples with the lookups of some tables only."""
    pieces = [batch.table_indices(t) for t in ids]
    starts = [0, *itertools.accumulate(len(piece) for piece in pieces)]
    indices = torch.cat(pieces) if pieces else batch.indices[:0]
    return Batch(batch.dense, indices, batch.offsets[list(ids)], tuple(starts), batch.targets)


GPU_SPAN, HOST_SPAN = "tables on the GPU", "tables on the host"
"""Ranges of the two sides inside the embedding's forward and backward pass, by which a profile's
tree shows how long each takes."""


class PlacedTables(EmbeddingTables):
    """Tables of which some stay on the host, whatever device the model is moved to.

    Those beside the dense part are made on torch's default device.

    Attributes:
        placement: which tables are where.
        host_backend: back end of the host's side where it is not the parameters' own.
    """

    def __init__(
        self,
        table_rows: Sequence[int],
        dim: int,
        placement: Placement,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        memory: list[torch.Tensor] = [torch.empty(0)] * len(table_rows)
        for ids, device in (
            (placement.on_gpu, torch.get_default_device()),
            (placement.on_host, torch.device("cpu")),
        ):
            with device:
                made = empty_tables([table_rows[t] for t in ids], dim, dtype) if ids else []
            for t, tensor in zip(ids, made, strict=True):
                memory[t] = tensor
        super().__init__(table_rows, dim, memory=memory)
        self.placement = placement
        self.host_backend: str | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> PlacedTables:
        """Move or convert what lies beside the dense part, and nothing else."""
        for t in self.placement.on_gpu:
            self.tables[t]._apply(fn, recurse)
        return self

    def own_backend(self, config: TrainingConfig) -> SplitTables:
        return SplitTables(self, config)

    def side(self, ids: Sequence[int]) -> EmbeddingTables:
        """Some of the tables: the same parameters, with a back end of their own."""
        tables = EmbeddingTables((), 0, memory=())
        tables.tables.extend(self.tables[t] for t in ids)
        tables.numbers = tuple(ids)
        return tables


class Places(NamedTuple):
    """Where a run's tables lie.

    Attributes:
        notice: which tables are where, in words.
        make_tables: makes the model's tables.
        divide: what becomes of each batch before it is copied anywhere.
    """

    notice: str
    make_tables: Callable[[], EmbeddingTables]
    divide: Callable[[Batch], Batch]


def places_of(parameters: Parameters, device: torch.device) -> Places:
    """Where ``training.embeddings_on_gpu_bytes``, which is given, has the tables lie."""
    placement, model = plan_placement(parameters, device.type == "cuda"), parameters.model
    return Places(
        notice=_notice(parameters, placement, device),
        make_tables=lambda: PlacedTables(
            model.table_rows, model.embedding_dim, placement, ROW_DTYPES[model.embedding_precision]
        ),
        divide=lambda batch: divide(batch, placement),
    )


def _notice(parameters: Parameters, placement: Placement, device: torch.device) -> str:
    rows, row_bytes = parameters.model.table_rows, parameters.model.row_bytes

    def those(ids: Sequence[int]) -> str:
        size = format_bytes(sum(rows[t] for t in ids) * row_bytes)
        if not ids:
            return "no tables"
        named = f"table {ids[0]}" if len(ids) == 1 else f"tables {ranges(ids)}"
        return f"{named} ({size})"

    where = "on the GPU" if device.type == "cuda" else "beside the dense part"
    rehearsal = "" if device.type == "cuda" else "; without a GPU both sides are the CPU"
    return (
        f"training.embeddings_on_gpu_bytes: {those(placement.on_gpu)} lie {where}, "
        f"{those(placement.on_host)} on the host{rehearsal}"
    )


def ranges(ids: Sequence[int]) -> str:
    """Rising numbers in few words: 0-3, 5, 7-8."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


class SplitTables:
    """The back end that hands each table to its side.

    Args:
        tables: whose sides are attached to back ends of their own.
        config: of both sides; what does not exist on a side is its nearest there.

    Attributes:
        sides: (numbers of the tables, the tables, what updates them); a side without
            tables is left out.
        notices: of both sides.
    """

    name = "split"

    def __init__(self, tables: PlacedTables, config: TrainingConfig) -> None:
        self.placement, self._learning_rate = tables.placement, config.learning_rate
        self._gpu: EmbeddingTables | None = None
        self._host: EmbeddingTables | None = None
        self.sides: list[tuple[tuple[int, ...], EmbeddingTables, Any]] = []
        if self.placement.on_gpu:
            self._gpu = tables.side(self.placement.on_gpu)
            self.sides.append((self.placement.on_gpu, self._gpu, attach(self._gpu, config)))
        if self.placement.on_host:
            self._host = tables.side(self.placement.on_host)
            settings = _host_settings(config, tables.host_backend)
            self.sides.append((self.placement.on_host, self._host, attach(self._host, settings)))
        self._anchor = torch.zeros(0, requires_grad=True)
        self.crossing = Crossing()
        self.notices = [
            notice for _, side, _ in self.sides for notice in getattr(side.backend, "notices", [])
        ]

    @property
    def learning_rate(self) -> float:
        """Step size of both sides' updates."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._learning_rate = rate
        for _, _, update in self.sides:
            set_rate(update, rate)

    def forward(self, tables: EmbeddingTables, batch: Batch) -> list[torch.Tensor]:
        recorded = torch.is_grad_enabled()
        return list(_Split.apply(self._anchor, self, divide(batch, self.placement), recorded))

    def zero_grad(self, set_to_none: bool = True) -> None:
        for _, _, update in self.sides:
            update.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        for _, _, update in self.sides:
            update.step()

    def look_up(self, batch: SplitBatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Pooled vectors of the GPU's tables and of the host's, each (B, d) where it was made.

        The GPU's first: its kernels run while the CPU looks up.
        """
        assert batch.host is not None
        gpu: list[torch.Tensor] = []
        host: list[torch.Tensor] = []
        if self._gpu is not None:
            with record_function(GPU_SPAN):
                gpu = self._gpu(batch)
        if self._host is not None:
            with record_function(HOST_SPAN):
                host = self._host(batch.host)
        return gpu, host

    def in_order(self, gpu: Sequence[Any], host: Sequence[Any]) -> list[Any]:
        """The entries of both sides as one list, by number of table."""
        by_table = dict(zip(self.placement.on_gpu, gpu, strict=True))
        by_table |= zip(self.placement.on_host, host, strict=True)
        return [by_table[t] for t in sorted(by_table)]

    def backpropagate(
        self,
        gpu: list[torch.Tensor],
        host: list[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """Backward pass of both sides from the gradients of T pooled vectors.

        The copy back is begun first, then the GPU's kernels, and only then does the CPU wait
        for the copy.
        """
        gpu_gradients = [gradients[t] for t in self.placement.on_gpu]
        host_gradients = [gradients[t] for t in self.placement.on_host]
        back = transfer_backward(self.crossing, host_gradients) if host_gradients else None
        with torch.autograd.set_multithreading_enabled(False):
            if gpu:
                with record_function(GPU_SPAN):
                    torch.autograd.backward(gpu, gpu_gradients)
            if back is not None:
                with record_function(HOST_SPAN):
                    torch.autograd.backward(host, list(self.crossing.arrived(back)))


class Crossing:
    """Page-locked memory through which vectors pass, one copy each way.

    Both buffers are kept, since locking pages takes longer than copying them.
    """

    def __init__(self) -> None:
        self._there: torch.Tensor | None = None
        self._back: torch.Tensor | None = None
        self._left: torch.cuda.Event | None = None
        self._returned: torch.cuda.Event | None = None

    def to_device(self, vectors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
        """H vectors (B, d) on the host as (H, B, d) on the device."""
        if self._left is not None:
            # without a backward pass in between, the copy before may still be reading
            self._left.synchronize()
        self._there = _buffer(self._there, vectors, device.type == "cuda")
        torch.stack([vector.detach() for vector in vectors], out=self._there)
        if device.type != "cuda":
            # its own memory, as on a GPU: the next batch overwrites the buffer
            return self._there.clone()
        arrived = self._there.to(device, non_blocking=True)
        self._left = torch.cuda.Event()
        self._left.record()
        return arrived

    def begin_return(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Begin to copy H gradients (B, d) to the host; where they will be, (H, B, d)."""
        cuda = gradients[0].device.type == "cuda"
        self._back = _buffer(self._back, gradients, cuda)
        if not cuda:
            torch.stack([gradient.float() for gradient in gradients], out=self._back)
            return self._back
        together = torch.stack(gradients).float()
        self._back.copy_(together, non_blocking=True)
        self._returned = torch.cuda.Event()
        self._returned.record()
        return self._back

    def arrived(self, back: torch.Tensor) -> torch.Tensor:
        """The gradients on the host, waited for."""
        if self._returned is not None:
            self._returned.synchronize()
        return back


def _buffer(
    kept: torch.Tensor | None, vectors: Sequence[torch.Tensor], pinned: bool
) -> torch.Tensor:
    """Memory on the host for H vectors (B, d) float32; what is kept, if it has that shape."""
    shape = (len(vectors), *vectors[0].shape)
    if kept is not None and tuple(kept.shape) == shape:
        return kept
    return torch.empty(shape, dtype=torch.float32, device="cpu", pin_memory=pinned)


class _Split(torch.autograd.Function):
    """Both sides' lookups as one node, so that the order of their work is ours to choose.

    Each side keeps a graph of its own, of which backward is called in turn.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, backend: SplitTables, batch: SplitBatch, recorded: bool
    ) -> tuple[torch.Tensor, ...]:
        with torch.set_grad_enabled(recorded):
            gpu, host = backend.look_up(batch)
        crossed = transfer_forward(backend.crossing, host, batch.dense.device) if host else []
        ctx.rest = (backend, gpu, host)
        return tuple(backend.in_order([vector.detach() for vector in gpu], crossed))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        backend, gpu, host = ctx.rest
        ctx.rest = None
        with torch.enable_grad():
            backend.backpropagate(gpu, host, gradients)
        return None, None, None, None


@part("transfer", "forward")
def transfer_forward(
    crossing: Crossing, pooled: list[torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    """Copy the host's pooled vectors to the dense part's device, in one piece."""
    return list(crossing.to_device(pooled, device))


@part("transfer", "backward")
def transfer_backward(crossing: Crossing, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Begin to copy the gradients of the host's vectors back, in one piece."""
    return crossing.begin_return(gradients)


def _host_settings(config: TrainingConfig, backend: str | None) -> TrainingConfig:
    """Settings of the host's side: the parameters' back end where it is fast on a CPU.

    FBGEMM's package for GPUs may come without its CPU kernels; ``fused`` takes its place.
    """
    if backend is None:
        backend = "fused" if config.embedding_backend == "fbgemm" else config.embedding_backend
    return dataclasses.replace(config, embedding_backend=backend)
