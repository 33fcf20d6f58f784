"""Matrices as tiles in memory, and the operations on them.

A matrix (R, C) is padded to blocks of 32 x 32. An entry is the sum of ``parts`` bf16
numbers: 1 (bf16 itself), 2 (16 bits of mantissa) or 3 (24 bits, float32's). A block is
two tiles a part. In *rows* form, the left operand of a product, blocks of a row of
blocks lie side by side, and a tile is 16 rows of 32 numbers. In *columns* form, the right
operand, blocks of a column of blocks lie side by side, and a tile is 16 columns whose
32-bit lanes hold two rows each. Padding is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dlrm_kernels.embeddings.pages import empty_table
from dlrm_kernels.native import compile_kernel
from dlrm_kernels.tiles import kernels as k
from dlrm_kernels.tiles.kernels_interaction import dot_backward, dot_forward
from dlrm_kernels.tiles.machine import cpu_caches, tile_config, why_no_tiles
from dlrm_kernels.vectors import Job

BLOCK = 32

LINE_BYTES = 64

DEPTH_BYTES = 128 << 10
"""Bytes of a panel multiplied at once: several rows of the left operand are to fit in the cache."""

CACHE_SHARE = 0.4
"""Share of the second-level cache that a unit's left operand may fill; it was fastest so."""

L2_BYTES = 2 << 20
"""Second-level cache, assumed where the system does not say."""


def blocks_of(count: int) -> int:
    """Blocks that hold so many rows or columns."""
    return -(-count // BLOCK)


class Arena:
    """Memory on huge pages, handed out piece by piece.

    The forms of one block lie far apart, so small pages would cost a look-up in the page
    tables for every 2 KiB written: huge ones made a step up to a tenth faster.

    Args:
        chunk_bytes: asked of the system at a time; what is never written takes none.
    """

    def __init__(self, chunk_bytes: int = 64 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self.taken_bytes = 0
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """So many bytes, aligned to a cache line, never given back."""
        if self._rest.numel() < size:
            floats = -(-max(size, self._chunk_bytes) // 4)
            self._rest = empty_table(1, floats).view(-1).view(torch.uint8)
        self.taken_bytes += size
        found = self._rest[:size]
        self._rest = self._rest[-(-size // LINE_BYTES) * LINE_BYTES :]
        return found

    def floats(self, *shape: int) -> torch.Tensor:
        return self.take(4 * math.prod(shape)).view(torch.float32).view(shape)


@dataclass
class Tiled:
    """A tiled matrix in one form.

    Attributes:
        memory: its tiles, bf16 as int16.
        panels: rows of blocks (rows form) or columns of blocks (columns form).
        depth: blocks of a panel.
        parts: bf16 numbers an entry.
    """

    memory: torch.Tensor
    panels: int
    depth: int
    parts: int

    @classmethod
    def empty(cls, panels: int, depth: int, parts: int, arena: Arena | None = None) -> Tiled:
        """Memory for a matrix of so many blocks."""
        size = panels * depth * parts * k.BLOCK_BYTES // 2
        memory = (arena or Arena(size)).take(size).view(torch.int16)
        return cls(memory, panels, depth, parts)

    def first(self, panels: int, depth: int) -> Tiled:
        """The same memory for a smaller matrix, whatever it held before."""
        size = panels * depth * self.parts * BLOCK * BLOCK
        return Tiled(self.memory[:size], panels, depth, self.parts)

    @property
    def panel_bytes(self) -> int:
        """Bytes of a row of blocks (rows form) or of a column of blocks."""
        return self.depth * self.parts * k.BLOCK_BYTES // 2


@dataclass
class Result:
    """What becomes of a matrix that is computed or packed, in this order.

    Attributes:
        bias: (padded columns,) float32, added to each row.
        relu: max(x, 0).
        mask: rows form of the same shape; where it is not positive the result becomes 0.
        sums: (rows of blocks, padded columns) float32, gets each block's column sums.
        target: (R, C) float32, gets the result, or with ``accumulate`` it is added.
        rows, columns: the result in either form. rows_t, columns_t: its transpose.
    """

    bias: torch.Tensor | None = None
    relu: bool = False
    mask: Tiled | None = None
    sums: torch.Tensor | None = None
    target: torch.Tensor | None = None
    accumulate: bool = False
    rows: Tiled | None = None
    columns: Tiled | None = None
    rows_t: Tiled | None = None
    columns_t: Tiled | None = None


class Engine:
    """Runs the kernels on torch's threads.

    Args:
        tiles: use the processor's matrix tiles; without them products are slow.
    """

    def __init__(self, tiles: bool = True) -> None:
        reason = why_no_tiles() if tiles else ""
        if reason:
            raise RuntimeError(reason)
        self._config = tile_config() if tiles else None
        self._left_bytes = int(CACHE_SHARE * cpu_caches().get(2, L2_BYTES))
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def product(self, left: Tiled, right: Tiled, shape: tuple[int, int], result: Result) -> None:
        """``left`` (rows form) times ``right`` (columns form), a matrix of the given shape."""
        if left.depth != right.depth or left.parts != right.parts:
            raise ValueError(
                f"left has {left.depth} blocks of {left.parts} parts along the sum, right "
                f"{right.depth} of {right.parts}"
            )
        block_bytes = left.parts * k.BLOCK_BYTES // 2
        pieces = range(0, left.depth, DEPTH_BYTES // block_bytes)
        if len(pieces) > 1 and not _is_sum_only(result):
            # what follows needs the whole sum
            pieces = range(0, left.depth, left.depth)
        for start in pieces:
            depth = min(pieces.step, left.depth - start)
            job = self._job(shape, left.parts, result)
            fields = job.fields
            fields[k.LEFT] = left.memory.data_ptr() + start * block_bytes
            fields[k.RIGHT] = right.memory.data_ptr() + start * block_bytes
            fields[k.DEPTH] = depth
            fields[k.LEFT_STRIDE], fields[k.RIGHT_STRIDE] = left.panel_bytes, right.panel_bytes
            fields[k.ACCUMULATE] = result.accumulate or start > 0
            self._run(k.product, job, most=max(1, self._left_bytes // (depth * block_bytes)))

    def pack(self, matrix: torch.Tensor, parts: int, result: Result) -> None:
        """Tile a float32 matrix (R, C) whose rows have no gaps."""
        job = self._job((matrix.shape[0], matrix.shape[1]), parts, result)
        _set_matrix(job, k.SOURCE, k.SOURCE_STRIDE, matrix)
        self._run(k.pack, job, most=4)

    def dot_forward(
        self, features: Sequence[torch.Tensor], itself: bool, parts: int, result: Result
    ) -> None:
        """Dot interaction of F features (B, d) float32 into tiled (B, d + pairs)."""
        size, dim = features[0].shape
        count = len(features)
        width = dim + count * (count + (1 if itself else -1)) // 2
        job = self._job((size, width), parts, result)
        block_bytes = self._set_features(job, features, itself, parts)
        panels = 2 * blocks_of(count) * blocks_of(dim) * block_bytes
        job.fields[k.SCRATCH_BYTES] += k.BLOCK_BYTES * (blocks_of(width) + 2) + panels
        self._run(dot_forward, job, most=4)

    def dot_backward(
        self,
        gradient: torch.Tensor,
        features: Sequence[torch.Tensor],
        itself: bool,
        parts: int,
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """Write the features' gradients (B, d), given that of the output (B, d + pairs)."""
        job = self._job((gradient.shape[0], gradient.shape[1]), parts, Result())
        block_bytes = self._set_features(job, features, itself, parts)
        _set_matrix(job, k.SOURCE, k.SOURCE_STRIDE, gradient)
        _set_alike(job, k.GRADIENTS, k.GRADIENT_STRIDES, gradients)
        blocks, columns = blocks_of(len(features)), blocks_of(features[0].shape[1])
        panels, tiles = blocks * (blocks + columns) * block_bytes, k.BLOCK_BYTES // 2
        job.fields[k.SCRATCH_BYTES] += tiles + k.BLOCK_BYTES * (2 + blocks * blocks) + panels
        self._run(dot_backward, job, most=4)

    def _set_features(
        self, job: Job, features: Sequence[torch.Tensor], itself: bool, parts: int
    ) -> int:
        """Fill in the interaction's fields; bytes of a block of features.

        Features are of two parts at least: an interaction is fp32 in bf16 too.
        """
        _set_alike(job, k.FEATURES, k.STRIDES, features)
        job.fields[[k.COUNT, k.DIM, k.ITSELF]] = len(features), features[0].shape[1], itself
        job.fields[k.DOT_PARTS] = max(2, parts)
        return max(2, parts) * k.BLOCK_BYTES // 2

    def _job(self, shape: tuple[int, int], parts: int, result: Result) -> Job:
        job = Job(k.FIELDS)
        fields = job.fields
        fields[k.CONFIG] = self._config.ctypes.data if self._config is not None else 0
        rows, columns = shape
        row_blocks, column_blocks = blocks_of(rows), blocks_of(columns)
        fields[[k.ROWS, k.COLUMNS, k.PARTS]] = rows, columns, parts
        fields[[k.ROW_BLOCKS, k.COLUMN_BLOCKS]] = row_blocks, column_blocks
        fields[k.SCRATCH_BYTES] = k.SCRATCH_LEAST
        fields[[k.RELU, k.ACCUMULATE]] = result.relu, result.accumulate
        floats = (
            (k.BIAS, result.bias, BLOCK * column_blocks),
            (k.SUMS, result.sums, BLOCK * column_blocks * row_blocks),
        )
        for field, tensor, size in floats:
            if tensor is not None:
                if tensor.numel() != size or not tensor.is_contiguous():
                    raise ValueError(f"{tuple(tensor.shape)} floats given, expected {size}")
                fields[field] = tensor.data_ptr()
        if result.target is not None:
            if tuple(result.target.shape) != shape:
                raise ValueError(f"target is {tuple(result.target.shape)}, the result {shape}")
            _set_matrix(job, k.TARGET, k.TARGET_STRIDE, result.target)
        upright, mirrored = (row_blocks, column_blocks), (column_blocks, row_blocks)
        forms = (
            (k.MASK, result.mask, upright),
            (k.OUT_ROWS, result.rows, upright),
            (k.OUT_COLUMNS_T, result.columns_t, upright),
            (k.OUT_COLUMNS, result.columns, mirrored),
            (k.OUT_ROWS_T, result.rows_t, mirrored),
        )
        for field, form, blocks in forms:
            if form is None:
                continue
            if (form.panels, form.depth) != blocks or (form.parts != parts and field != k.MASK):
                raise ValueError(
                    f"{form.panels} x {form.depth} blocks of {form.parts} parts given, expected "
                    f"{blocks[0]} x {blocks[1]} of {parts}"
                )
            fields[field] = form.memory.data_ptr()
        if result.mask is not None:
            fields[k.MASK_PARTS] = result.mask.parts
        return job

    def _run(self, kernel: Callable[[int], None], job: Job, most: int) -> None:
        """Run a job in units of at most ``most`` rows of blocks."""
        count = torch.get_num_threads()
        blocks = int(job.fields[k.ROW_BLOCKS])
        # several units a thread, so that a disturbed one does not hold up the others
        group = min(most, max(1, blocks // (4 * count))) if count > 1 else most
        units = -(-blocks // group)
        needed = max(1, min(count, units)) * int(job.fields[k.SCRATCH_BYTES])
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        job.fields[[k.GROUP, k.SCRATCH]] = group, self._scratch.data_ptr()
        job.run(kernel, units, count)


def compile_all() -> list[str]:
    """Compile every kernel now, not in the first step; notices (an unwritable cache)."""
    notices = {
        compile_kernel(kernel)[1] for kernel in (k.product, k.pack, dot_forward, dot_backward)
    }
    return sorted(notices - {""})


def _is_sum_only(result: Result) -> bool:
    """Whether a result is nothing but its float32 target, so that it can be added up."""
    others = (result.bias, result.mask, result.sums, result.rows, result.columns)
    unwanted = (*others, result.rows_t, result.columns_t)
    return result.target is not None and not result.relu and all(o is None for o in unwanted)


def _check_rows(matrix: torch.Tensor) -> None:
    if matrix.dtype != torch.float32 or matrix.device.type != "cpu" or matrix.dim() != 2:
        raise ValueError(f"{matrix.dtype} {tuple(matrix.shape)} on {matrix.device}, not float32")
    if matrix.shape[1] > 1 and matrix.stride(1) != 1:
        raise ValueError(f"rows have gaps: strides {matrix.stride()}")


def _set_matrix(job: Job, place: int, stride: int, matrix: torch.Tensor) -> None:
    """Fill in where a matrix lies, and the bytes between its rows."""
    _check_rows(matrix)
    job.fields[[place, stride]] = matrix.data_ptr(), 4 * matrix.stride(0)


def _set_alike(job: Job, places: int, strides: int, tensors: Sequence[torch.Tensor]) -> None:
    """Fill in where tensors (B, d) lie, and the bytes between their rows."""
    for tensor in tensors:
        _check_rows(tensor)
        if tensor.shape != tensors[0].shape:
            raise ValueError(f"features of shapes {tensor.shape} and {tensors[0].shape}")
    job.set_rows(places, strides, tensors)
