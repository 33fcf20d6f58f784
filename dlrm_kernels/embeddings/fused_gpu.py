"""The ``fused`` back end on a GPU: one launch looks all tables up, the update inside backward.

As on the CPU every ``backward()`` is a step: the tables get no ``.grad``. Nothing here
waits for the GPU, and nothing depends on what a batch holds: with the batch in buffers
that stay where they are, all of it can be captured in a CUDA graph.

Backward sorts the lookups by table and row (stably, torch's radix sort), adds up the
gradients of each run of equal rows by a tree of fixed shape, and updates each row once.
The same batch gives the same bits every time, however skewed.

Shapes: B samples, T tables of R rows, d embedding width, N lookups of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.data.batch import Batch, extents_of
from dlrm_core.embeddings import ROW_DTYPES, EmbeddingTables
from dlrm_core.optimizers import EPSILON, OPTIMIZERS
from dlrm_kernels.embeddings.checks import (
    BAD_INDEX,
    BAD_OFFSET,
    KINDS,
    InBackward,
    check_batch,
    check_rows,
    describe_values,
)

MAX_DIM = 1024
"""Widest row: a program holds whole rows in registers."""


@dataclass(frozen=True)
class Tiles:
    """How much of the work one program does; what it computes is the same for any.

    Attributes:
        bags: bags side by side in a lookup.
        unroll: rows of each bag asked for before the first is added.
        listed: bags side by side where lookups are listed.
        run: elements of a tile of the sorted lookups.
        run_warps: warps that share such a tile.
    """

    bags: int
    unroll: int
    listed: int
    run: int
    run_warps: int


def tiles_for(width: int, bag_size: float) -> Tiles:
    """Tiles for rows of ``width`` floats (a power of two) and bags of that mean size.

    A warp has some 4 KiB of rows on their way, which hides the memory's latency on a
    Hopper GPU when 25 or more warps share a multiprocessor. Not measured yet.
    """
    long = bag_size >= 4
    bags = max(1, (256 if long else 1024) // width)
    run = max(8, min(64, 4096 // width))
    return Tiles(
        bags=bags,
        unroll=4 if long else 1,
        listed=32 if long else 128,
        run=run,
        run_warps=max(1, min(8, run * width // 1024)),
    )


class FusedGpu(InBackward):
    """Tables on a GPU by Triton kernels (:mod:`dlrm_kernels.embeddings.kernels_gpu`).

    Args:
        tables: float32, bfloat16 or float16.
        learning_rate: read by the kernels from the device, so it may change between
            replays of a captured graph.
        pooled_dtype: type of the pooled vectors. They are summed in fp32; bf16 is what
            the dense part would round them to at once, so nothing else changes.
        seed: of the random words by which numbers of 2 bytes are rounded.
    """

    name = "fused"

    def __init__(
        self,
        tables: EmbeddingTables,
        optimizer: str,
        learning_rate: float,
        pooled_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        require_triton()
        weights = tables.weights
        self.device = weights[0].device
        stored = weights[0].dtype
        self.dtype = stored if stored in ROW_DTYPES.values() else torch.float32
        self.seed = seed
        # counted on the device, where a captured graph reads it
        self._updates = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._numbers = torch.tensor(tables.numbers, device=self.device)
        self.optimizer = optimizer
        self.pooled_dtype = pooled_dtype
        self.notices: list[str] = []
        self._rates = torch.full((1,), learning_rate, device=self.device)
        self._learning_rate = learning_rate
        width = OPTIMIZERS[optimizer].row_state(weights[0].shape[1])
        self.states = [
            torch.zeros(weight.shape[0] if width else 0, width, device=self.device)
            for weight in weights
        ]
        self.note_tables(tables)
        self._anchor = torch.zeros(0, device=self.device, requires_grad=True)
        self._fault = torch.zeros(4, dtype=torch.int64, device=self.device)
        self._seen = torch.zeros(4, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._extents: tuple[tuple[int, ...], torch.Tensor] | None = None

    @property
    def learning_rate(self) -> float:
        """What gradients are multiplied by; setting it takes effect at the next step."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._learning_rate = rate
        self._rates.fill_(rate)

    @property
    def updates(self) -> int:
        """Number of updates so far, which random words depend on; waits for the GPU."""
        return int(self._updates)

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates.fill_(count)

    def check(self) -> None:
        """Wait for the GPU, and report what a batch so far asked for and must not.

        Every forward does the same without waiting, so it may report a batch that is
        one or a few steps old. From the wrong batch on no table has been updated.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.raise_if_seen()

    def pool(self, tables: EmbeddingTables, batch: Batch) -> torch.Tensor:
        """Pooled vectors (T, B, d) outside of any graph.

        An index outside its table counts as no lookup; it is reported by a later call
        (see :meth:`check`), and until then no table is updated.
        """
        from dlrm_kernels.embeddings import kernels_gpu as k

        self.note_tables(tables)
        check_batch(batch, self._tables, self.device.type)
        # a copy of the past may still be under way while a graph is being captured
        if not _capturing(self.device):
            self.raise_if_seen()
        size = batch.offsets.shape[1]
        pooled = torch.empty(
            self._tables, size, self._dim, dtype=self.pooled_dtype, device=self.device
        )
        if size == 0:
            return pooled
        _require_32_bits("lookups", batch.indices.numel())
        _require_32_bits("bags (tables x samples)", self._tables * size)
        tiles = self._tiles(batch.indices.numel(), size)
        blocks = -(-size // tiles.bags)
        k.pool[(self._tables * blocks,)](
            *(self._weights[0], self._places, self._rows, batch.indices, batch.offsets),
            *(self.extents(batch), self._fault, pooled, self._tables, size, blocks),
            BAD_INDEX=BAD_INDEX,
            BAD_OFFSET=BAD_OFFSET,
            DIM=self._dim,
            WIDTH=self._width,
            VEC=self._vector,
            BAGS=tiles.bags,
            UNROLL=tiles.unroll,
            num_warps=max(1, tiles.bags * self._width // 2048),
        )
        self._seen.copy_(self._fault, non_blocking=True)
        return pooled

    def backpropagate(
        self,
        tables: EmbeddingTables,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        extents: torch.Tensor,
        gradients: list[torch.Tensor],
    ) -> None:
        self.note_tables(tables)
        if indices.numel() and offsets.shape[1]:
            self._settle(indices, offsets, extents, gradients)
        if self.dtype != torch.float32:
            self._updates.add_(1)

    def _settle(
        self,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        extents: torch.Tensor,
        gradients: list[torch.Tensor],
    ) -> None:
        from dlrm_kernels.embeddings import kernels_gpu as k

        count, size = indices.numel(), offsets.shape[1]
        tiles = self._tiles(count, size)
        limit = self._tables << self._row_bits
        keys = torch.full((count,), limit, dtype=self._key_dtype, device=self.device)
        sources = torch.empty(count, dtype=torch.int32, device=self.device)
        blocks = -(-size // tiles.listed)
        k.list_lookups[(self._tables * blocks,)](
            *(self._rows, indices, offsets, extents, keys, sources, self._tables, size, blocks),
            ROW_BITS=self._row_bits,
            BAGS=tiles.listed,
            num_warps=max(1, tiles.listed // 32),
        )
        # stable: equal rows stay in the order of their lookups, so sums have one order
        sorted_keys, order = torch.sort(keys, stable=True)
        values, table_stride, bag_stride = in_one(gradients)
        lookups = True
        while True:
            programs = -(-count // tiles.run)
            next_keys = torch.empty(2 * programs, dtype=self._key_dtype, device=self.device)
            next_sums = torch.empty(2 * programs, self._dim, device=self.device)
            k.settle_runs[(programs,)](
                *(sorted_keys, order, sources, values, table_stride, bag_stride, size, count),
                *(limit, next_keys, next_sums, self._fault),
                *(self._weights[0], self._places, self.states[0], self._state_places),
                self._rates,
                *(self.seed, self._updates, self._numbers),
                EPSILON=EPSILON,
                ROW_BITS=self._row_bits,
                DIM=self._dim,
                WIDTH=self._width,
                VEC=self._vector,
                TILE=tiles.run,
                KIND=KINDS[self.optimizer],
                LOOKUPS=lookups,
                num_warps=tiles.run_warps,
            )
            if programs == 1:
                return
            sorted_keys, values, lookups, count = next_keys, next_sums, False, 2 * programs

    def extents(self, batch: Batch) -> torch.Tensor:
        """(2, T) int64 on the device: where each table's indices begin, and how many there are."""
        if batch.extents is not None:
            return batch.extents
        starts = batch.table_starts
        if self._extents is None or self._extents[0] != starts:
            self._extents = (starts, extents_of(starts).to(self.device))
        return self._extents[1]

    def _tiles(self, count: int, size: int) -> Tiles:
        return tiles_for(self._width, count / (self._tables * size))

    def raise_if_seen(self) -> None:
        """What :meth:`check` does, as far as the GPU has got; without waiting for it."""
        if int(self._seen[0]):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the other words may still be on their way
            kind, table, place, value = self._seen.tolist()
            self._fault.zero_()
            self._seen.zero_()
            rows = int(self._weights[table].shape[0])
            raise InputError(describe_values(kind, table, place, value, rows))

    def _note(self, weights: list[torch.nn.Parameter]) -> None:
        addresses = [weight.data_ptr() for weight in weights]
        dim = weights[0].shape[1]
        for t, weight in enumerate(weights):
            if weight.device != self.device or weight.dtype != self.dtype:
                raise InputError(
                    f"embedding table {t} is {weight.dtype} on {weight.device}; the fused back "
                    f"end works on {self.dtype} tables that are all on one device ({self.device})"
                )
            check_rows(t, weight)
        if dim > MAX_DIM:
            raise InputError(
                f"model.embedding_dim is {dim}, but the fused back end of the GPU holds rows of "
                f"at most {MAX_DIM} numbers; choose training.embedding_backend: torch"
            )
        self._weights = [weight.detach() for weight in weights]
        self._tables, self._dim = len(weights), dim
        self._width = 1 << (dim - 1).bit_length()
        rows = [weight.shape[0] for weight in weights]
        self._row_bits = max(1, (max(rows) - 1).bit_length())
        # half as many passes of the sort for keys of 32 bits
        long = self._tables << self._row_bits >= 1 << 31
        self._key_dtype = torch.int64 if long else torch.int32
        self._rows = torch.tensor(rows, device=self.device)
        states = [state.data_ptr() for state in self.states]
        wide = 16 // self.dtype.itemsize  # numbers that a thread loads at once
        aligned = (
            dim % wide == 0
            and all(address % 16 == 0 for address in addresses)
            and all(address % (4 * wide) == 0 for address in states)
        )
        self._vector = wide if aligned else 1
        self._places = self._distances(addresses, self._vector * self.dtype.itemsize)
        by_row = OPTIMIZERS[self.optimizer].per_row
        self._state_places = self._distances(states, 4 if by_row else 4 * self._vector)

    def _distances(self, addresses: list[int], unit: int) -> torch.Tensor:
        """(T,) int64: how many times ``unit`` bytes each address is from the first."""
        away = [(address - addresses[0]) // unit for address in addresses]
        return torch.tensor(away, device=self.device)


def in_one(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, int, int]:
    """T tensors (B, d) as a first one, and the strides from table to table and row to row.

    Tensors that lie at equal distances, as the parts of one tensor do, stay where they
    are; others are copied into one.
    """
    first = tensors[0]
    size = first.element_size()
    addresses = [tensor.data_ptr() for tensor in tensors]
    step = addresses[1] - addresses[0] if len(tensors) > 1 else 0
    alike = all(
        tensor.dtype == first.dtype
        and tensor.stride() == first.stride()
        and (tensor.shape[1] == 1 or tensor.stride(1) == 1)
        and address == addresses[0] + t * step
        for t, (tensor, address) in enumerate(zip(tensors, addresses, strict=True))
    )
    if alike and step % size == 0:
        return first, step // size, first.stride(0)
    one = torch.stack(tensors)
    return one, one.stride(0), one.stride(1)


def _require_32_bits(what: str, count: int) -> None:
    if count >= 1 << 31:
        raise InputError(
            f"the batch has {count:,} {what}, the fused back end of the GPU takes at most "
            f"{(1 << 31) - 1:,}"
        )


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def require_triton() -> None:
    try:
        import triton  # noqa: F401
    except ImportError:
        raise MissingToolError(
            "training.embedding_backend is 'fused' on a GPU, which needs Triton: pip install "
            "triton (torch's CUDA builds bring it), or choose torch"
        ) from None
