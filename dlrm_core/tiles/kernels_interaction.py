"""The dot interaction of a few samples at a time, straight into the top MLP's input.

Of features F_0 (the bottom MLP's output) to F_T, each (B, d) float32: beside F_0 all
products F_i . F_j, j < i (or j <= i), row by row of the lower triangle, as in
:class:`dlrm_core.model.DotInteraction`. Sums are fp32 in every precision.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from dlrm_core.embeddings.vectors import (
    add,
    compiled,
    lane_sum,
    load_float,
    load_int,
    load_vector,
    multiply,
    splat,
    store_float,
    store_vector,
    zeros,
)
from dlrm_core.tiles.kernels import (
    COLUMN_BLOCKS,
    COUNT,
    DIM,
    FEATURES,
    GRADIENT_STRIDES,
    GRADIENTS,
    GROUP,
    ITSELF,
    ROW_BLOCKS,
    ROWS,
    SCRATCH_LEAST,
    SOURCE,
    SOURCE_STRIDE,
    STRIDES,
    UNITS,
    emit,
    field,
    own_scratch,
    take_unit,
)


@compiled
def row_of(job, addresses, strides, number, sample):
    """Where a sample's feature (or its gradient) lies."""
    base = load_int(field(job, addresses) + 8 * number)
    return base + sample * load_int(field(job, strides) + 8 * number)


@compiled
def dot(a, b, dim):
    """Scalar product of two vectors of ``dim`` floats."""
    acc = zeros()
    column = 0
    while column + 16 <= dim:
        acc = add(acc, multiply(load_vector(a + 4 * column), load_vector(b + 4 * column)))
        column += 16
    total = lane_sum(acc)
    while column < dim:
        total += load_float(a + 4 * column) * load_float(b + 4 * column)
        column += 1
    return total


@compiled
def copy_row(source, target, dim):
    """``dim`` floats to another place."""
    column = 0
    while column + 16 <= dim:
        store_vector(target + 4 * column, load_vector(source + 4 * column))
        column += 16
    while column < dim:
        store_float(target + 4 * column, load_float(source + 4 * column))
        column += 1


@compiled
def add_row(source, factor, target, dim):
    """``target += factor source``, ``dim`` floats."""
    factors = splat(factor)
    column = 0
    while column + 16 <= dim:
        place = target + 4 * column
        more = multiply(factors, load_vector(source + 4 * column))
        store_vector(place, add(load_vector(place), more))
        column += 16
    while column < dim:
        place = target + 4 * column
        store_float(place, load_float(place) + factor * load_float(source + 4 * column))
        column += 1


@compiled
def interact(job, sample, target):
    """One sample's input of the top MLP."""
    dim, itself = field(job, DIM), field(job, ITSELF)
    copy_row(row_of(job, FEATURES, STRIDES, 0, sample), target, dim)
    place = target + 4 * dim
    for i in range(field(job, COUNT)):
        a = row_of(job, FEATURES, STRIDES, i, sample)
        for j in range(i + itself):
            store_float(place, dot(a, row_of(job, FEATURES, STRIDES, j, sample), dim))
            place += 4


def dot_forward(job):
    """The interaction's output, in the forms wanted."""
    scratch = own_scratch(job)
    blocks, group, rows = field(job, COLUMN_BLOCKS), field(job, GROUP), field(job, ROWS)
    width = 128 * blocks
    output = scratch + SCRATCH_LEAST
    for place in range(0, 32 * width, 64):
        store_vector(output + place, zeros())
    unit = take_unit(job)
    while unit < field(job, UNITS):
        begin = unit * group
        for row in range(begin, min(begin + group, field(job, ROW_BLOCKS))):
            for r in range(min(32, rows - 32 * row)):
                interact(job, 32 * row + r, output + r * width)
            for column in range(blocks):
                emit(job, output + 128 * column, width, row, column, scratch)
        unit = take_unit(job)


def dot_backward(job):
    """Gradients of all features from the gradient of the interaction's output (SOURCE)."""
    dim, itself, count = field(job, DIM), field(job, ITSELF), field(job, COUNT)
    group, rows = field(job, GROUP), field(job, ROWS)
    unit = take_unit(job)
    while unit < field(job, UNITS):
        begin = 32 * unit * group
        for sample in range(begin, min(begin + 32 * group, rows)):
            source = field(job, SOURCE) + sample * field(job, SOURCE_STRIDE)
            pairs = source + 4 * dim
            for i in range(count):
                target = row_of(job, GRADIENTS, GRADIENT_STRIDES, i, sample)
                if i == 0:
                    copy_row(source, target, dim)
                else:
                    clear_row(target, dim)
                for j in range(count):
                    high, low = max(i, j), min(i, j)
                    if high == low and itself == 0:
                        continue
                    place = high * (high - 1) // 2 + low + (high if itself != 0 else 0)
                    factor = load_float(pairs + 4 * place)
                    if high == low:
                        factor += factor
                    other = row_of(job, FEATURES, STRIDES, j, sample)
                    add_row(other, factor, target, dim)
        unit = take_unit(job)


@compiled
def clear_row(target, dim):
    """``dim`` zeros."""
    column = 0
    while column + 16 <= dim:
        store_vector(target + 4 * column, zeros())
        column += 16
    while column < dim:
        store_float(target + 4 * column, 0.0)
        column += 1
