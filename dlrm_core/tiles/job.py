"""What a kernel is told: the fields of a job, and how threads share its work.

A kernel is a C function ``void kernel(int64 job)`` that any number of threads may enter
(:mod:`dlrm_core.embeddings.kernels`): they take units, a few rows of blocks each, until none
is left. What a unit computes does not depend on which thread takes it, and no two units
write the same place, so results are the same bits for every number of threads.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from dlrm_core.embeddings.vectors import atomic_add_int, compiled, load_int

# Fields of a job. Addresses unless another unit is given; an address of 0: not wanted.
NEXT_UNIT = 0
UNITS = 1
ENTERED = 2
SCRATCH = 3  # SCRATCH_BYTES a thread
SCRATCH_BYTES = 4
GROUP = 5  # rows of blocks in a unit
ROW_BLOCKS = 6
COLUMN_BLOCKS = 7
ROWS = 8  # of them real, the rest is padding
COLUMNS = 9
PARTS = 10  # 1, 2 or 3
# the operands of a product
CONFIG = 11  # shapes of the tiles; 0: no tiles, multiply by vector instructions
LEFT = 12
RIGHT = 13
DEPTH = 14  # blocks along the sum
LEFT_STRIDE = 15  # bytes from one row of blocks to the next
RIGHT_STRIDE = 16
# what happens to a block of the result, or of a matrix that is packed
BIAS = 17  # float32 a column, padded
RELU = 18  # 0 or 1
MASK = 19  # rows form of the same shape: where it is not positive, the result is 0
MASK_PARTS = 20
SUMS = 21  # ROW_BLOCKS x (32 COLUMN_BLOCKS) float32: sums of each block's columns
TARGET = 22  # float32, row by row
TARGET_STRIDE = 23  # bytes
ACCUMULATE = 24  # 0 or 1: add to the target
OUT_ROWS = 25  # the result in rows form
OUT_COLUMNS = 26
OUT_ROWS_T = 27  # its transpose in rows form
OUT_COLUMNS_T = 28
SOURCE = 29  # packing: float32, row by row
SOURCE_STRIDE = 30
# the interaction
FEATURES = 31  # F addresses of float32 (B, d)
STRIDES = 32  # F distances between their rows, bytes
COUNT = 33  # F
DIM = 34  # d
ITSELF = 35  # 0 or 1: products of a feature with itself too
GRADIENTS = 36  # F addresses of float32 (B, d), written
GRADIENT_STRIDES = 37
DOT_PARTS = 38  # as PARTS, of the features
FIELDS = 39

BLOCK_BYTES = 32 * 32 * 4
SCRATCH_LEAST = BLOCK_BYTES + 3 * 2 * 2 * 1024
"""Bytes: a block in float32, and in both forms."""


@compiled
def field(job, number):
    """One field of a job."""
    return load_int(job + 8 * number)


@compiled
def own_scratch(job):
    """This thread's part of the scratch memory."""
    number = atomic_add_int(job + 8 * ENTERED, 1)
    return field(job, SCRATCH) + number * field(job, SCRATCH_BYTES)


@compiled
def take_unit(job):
    """The next unit of work, or one past the last."""
    return atomic_add_int(job + 8 * NEXT_UNIT, 1)
