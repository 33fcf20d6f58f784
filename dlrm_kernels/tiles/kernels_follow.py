"""What follows a block of float32: bias, ReLU, mask, sums, and the forms wanted of it."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dlrm_kernels.tiles.instructions import (
    ACCUMULATE,
    BIAS,
    BLOCK_BYTES,
    COLUMN_BLOCKS,
    COLUMNS,
    MASK,
    MASK_PARTS,
    OUT_COLUMNS,
    OUT_COLUMNS_T,
    OUT_ROWS,
    OUT_ROWS_T,
    PARTS,
    RELU,
    ROW_BLOCKS,
    ROWS,
    SUMS,
    TARGET,
    TARGET_STRIDE,
    field,
    first_floats,
    first_pairs,
    halves_of,
    last_floats,
    last_pairs,
    relu,
    store_integers,
    transpose_tile,
    where_positive,
)
from dlrm_kernels.vectors import (
    add,
    compiled,
    load_first,
    load_vector,
    store_first,
    store_vector,
    subtract,
    zeros,
)


@compiled
def emit_two(a, b, c, d, parts, pair, rows, columns):
    """Two rows (a, b) and (c, d) of a block in rows form, in columns form; 0: not wanted."""
    for part in range(parts):
        even, odd = halves_of(a, b), halves_of(c, d)
        if rows != 0:
            place = rows + 2048 * part + 128 * pair
            store_integers(place, even)
            store_integers(place + 64, odd)
        if columns != 0:
            place = columns + 2048 * part + 64 * pair
            store_integers(place, first_pairs(even, odd))
            store_integers(place + 1024, last_pairs(even, odd))
        if part + 1 < parts:
            a, b = subtract(a, first_floats(even)), subtract(b, last_floats(even))
            c, d = subtract(c, first_floats(odd)), subtract(d, last_floats(odd))


@compiled
def emit_block(source, stride, pairs, parts, rows, columns):
    """The first pairs of rows of a block of float32, in the forms wanted (0: not)."""
    for pair in range(pairs):
        here = source + 2 * pair * stride
        a, b = load_vector(here), load_vector(here + 64)
        c, d = load_vector(here + stride), load_vector(here + stride + 64)
        emit_two(a, b, c, d, parts, pair, rows, columns)


@compiled
def places_wanted(job, row, column, scratch):
    """Where a block's forms go: rows, columns (0: not wanted), and their transposes."""
    size = 2048 * field(job, PARTS)
    here = (row * field(job, COLUMN_BLOCKS) + column) * size
    mirrored = (column * field(job, ROW_BLOCKS) + row) * size
    rows, rows_t = field(job, OUT_ROWS), field(job, OUT_ROWS_T)
    columns, columns_t = field(job, OUT_COLUMNS), field(job, OUT_COLUMNS_T)
    spare = scratch + BLOCK_BYTES
    if rows != 0:
        rows += here
    elif columns_t != 0:
        rows = spare
    if columns != 0:
        columns += mirrored
    elif rows_t != 0:
        columns = spare + size
    return (
        rows,
        columns,
        columns_t + here if columns_t != 0 else 0,
        rows_t + mirrored if rows_t != 0 else 0,
    )


@compiled
def transpose_forms(parts, places):
    """The transposes wanted, from the forms just written."""
    rows, columns, columns_t, rows_t = places
    if columns_t != 0:
        for tile in range(0, 2048 * parts, 1024):
            transpose_tile(rows + tile, columns_t + tile)
    if rows_t != 0:
        for tile in range(0, 2048 * parts, 1024):
            transpose_tile(columns + tile, rows_t + tile)


@compiled
def emit(job, source, stride, row, column, scratch):
    """A block of float32 in the forms that the job wants."""
    places = places_wanted(job, row, column, scratch)
    emit_block(source, stride, 16, field(job, PARTS), places[0], places[1])
    transpose_forms(field(job, PARTS), places)


@compiled
def store_row(job, a, b, row, column, r):
    """A row of a block to the float32 target, without padding."""
    place = 32 * row + r
    if place < field(job, ROWS):
        target = field(job, TARGET) + place * field(job, TARGET_STRIDE) + 128 * column
        width = field(job, COLUMNS) - 32 * column
        low, high = min(16, width), max(0, min(16, width - 16))
        if field(job, ACCUMULATE) != 0:
            a = add(a, load_first(target, low))
            b = add(b, load_first(target + 64, high))
        store_first(target, a, low)
        store_first(target + 64, b, high)


@compiled
def finish(job, block, row, column, scratch):
    """Bias, ReLU, mask and column sums of a block of float32; then target and forms."""
    bias, mask, sums = field(job, BIAS), field(job, MASK), field(job, SUMS)
    rectify, target = field(job, RELU) != 0, field(job, TARGET)
    parts, columns = field(job, PARTS), field(job, COLUMN_BLOCKS)
    places = places_wanted(job, row, column, scratch)
    low, high, sum_low, sum_high = zeros(), zeros(), zeros(), zeros()
    if bias != 0:
        low, high = load_vector(bias + 128 * column), load_vector(bias + 128 * column + 64)
    if mask != 0:
        mask += (row * columns + column) * 2048 * field(job, MASK_PARTS)
    for pair in range(16):
        here = block + 256 * pair
        a, b = load_vector(here), load_vector(here + 64)
        c, d = load_vector(here + 128), load_vector(here + 192)
        if bias != 0:
            a, b, c, d = add(a, low), add(b, high), add(c, low), add(d, high)
        if rectify:
            a, b, c, d = relu(a), relu(b), relu(c), relu(d)
        if mask != 0:
            place = mask + 128 * pair
            a, b = where_positive(a, place), where_positive(b, place + 32)
            c, d = where_positive(c, place + 64), where_positive(d, place + 96)
        if sums != 0:
            sum_low, sum_high = add(add(sum_low, a), c), add(add(sum_high, b), d)
        if target != 0:
            store_row(job, a, b, row, column, 2 * pair)
            store_row(job, c, d, row, column, 2 * pair + 1)
        emit_two(a, b, c, d, parts, pair, places[0], places[1])
    if sums != 0:
        place = sums + 128 * (row * columns + column)
        store_vector(place, sum_low)
        store_vector(place + 64, sum_high)
    transpose_forms(parts, places)
