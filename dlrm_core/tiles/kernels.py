"""Kernels on tiled matrices: products, what follows them, packing.

A kernel is a C function ``void kernel(int64 job)`` that any number of threads may enter
(:mod:`dlrm_core.embeddings.kernels`): they take units, a few rows of blocks each, until none
is left. What a unit computes does not depend on which thread takes it, and no two units
write the same place, so results are the same bits for every number of threads.

Blocks are 32 x 32. A block of a tiled matrix is, for each of its 1 to 3 parts (the bf16
numbers whose sum an entry is), two tiles side by side. Two forms (see
:mod:`dlrm_core.tiles.layout`): *rows*, for the left operand of a product, and *columns*, for
the right one, whose 32-bit lanes are pairs of rows.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from dlrm_core.embeddings.vectors import (
    add,
    atomic_add_int,
    compiled,
    load_float,
    load_int,
    load_vector,
    multiply,
    prefetch,
    store_float,
    store_vector,
    subtract,
    zeros,
)
from dlrm_core.tiles.instructions import (
    as_floats,
    clear_tile,
    configure_tiles,
    load_integers,
    load_tile,
    lower_halves,
    multiply_tiles,
    paired,
    release_tiles,
    relu,
    rounded,
    splat_integer,
    store_halves,
    store_integers,
    store_tile,
    transpose_tile,
    upper_halves,
    where_positive,
)

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

_clear0, _clear1, _clear2, _clear3 = (clear_tile(i) for i in range(4))
_store0, _store1, _store2, _store3 = (store_tile(i) for i in range(4))
_left0, _left1, _right0, _right1 = (load_tile(i) for i in (4, 5, 6, 7))
_multiply00, _multiply01 = multiply_tiles(0, 4, 6), multiply_tiles(1, 4, 7)
_multiply10, _multiply11 = multiply_tiles(2, 5, 6), multiply_tiles(3, 5, 7)


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


# ---- a block of a product -------------------------------------------------------------


@compiled
def multiply_quarters():
    """The loaded tiles' products, added to the four quarters of a block."""
    _multiply00()
    _multiply01()
    _multiply10()
    _multiply11()


@compiled
def fetch(place, size):
    """Begin to load ``size`` bytes; nothing at address 0. Returns what comes behind them."""
    if place != 0:
        for line in range(0, size, 64):
            prefetch(place + line)
        place += size
    return place


@compiled
def block_by_tiles(left, right, depth, parts, target, coming, share, forms):
    """``target`` (32 x 32 float32) = sum over ``depth`` blocks of left times right.

    Meanwhile what is needed next is fetched, step by step, since a core waits for few
    lines at once: ``share`` bytes a step of what is ``coming``, and the places of the
    result's three ``forms``, to be written or read next; 32 lines a form and part.

    Of two parts the product of the smaller ones is left out, of three all those beneath
    the smallest part's size.
    """
    first, second, third = forms
    own = 64 * ((32 * parts + depth - 1) // depth)
    _clear0()
    _clear1()
    _clear2()
    _clear3()
    for _ in range(depth):
        coming = fetch(coming, share)
        first, second, third = fetch(first, own), fetch(second, own), fetch(third, own)
        if parts == 1:
            _left0(left, 64)
            _right0(right, 64)
            _left1(left + 1024, 64)
            _right1(right + 1024, 64)
            multiply_quarters()
        elif parts == 2:
            _right0(right, 64)
            _right1(right + 1024, 64)
            _left0(left + 2048, 64)
            _left1(left + 3072, 64)
            multiply_quarters()
            _left0(left, 64)
            _left1(left + 1024, 64)
            multiply_quarters()
            _right0(right + 2048, 64)
            _right1(right + 3072, 64)
            multiply_quarters()
        else:
            for total in range(2, -1, -1):
                for i in range(total + 1):
                    _left0(left + 2048 * i, 64)
                    _left1(left + 2048 * i + 1024, 64)
                    _right0(right + 2048 * (total - i), 64)
                    _right1(right + 2048 * (total - i) + 1024, 64)
                    multiply_quarters()
        left += 2048 * parts
        right += 2048 * parts
    _store0(target, 128)
    _store1(target + 64, 128)
    _store2(target + 2048, 128)
    _store3(target + 2112, 128)


@compiled
def block_by_vectors(left, right, depth, parts, target):
    """The same without tiles: slow, so that the rest can be tested on any CPU."""
    for place in range(0, BLOCK_BYTES, 64):
        store_vector(target + place, zeros())
    for _ in range(depth):
        for total in range(parts - 1, -1, -1):
            for i in range(total + 1):
                for row in range(32):
                    pairs = left + 2048 * i + 64 * row
                    for half in range(2):
                        others = right + 2048 * (total - i) + 1024 * half
                        here = target + 128 * row + 64 * half
                        acc = load_vector(here)
                        for p in range(16):
                            a = splat_integer(pairs + 4 * p)
                            b = load_integers(others + 64 * p)
                            acc = add(acc, multiply(lower_halves(a), lower_halves(b)))
                            acc = add(acc, multiply(upper_halves(a), upper_halves(b)))
                        store_vector(here, acc)
        left += 2048 * parts
        right += 2048 * parts


# ---- what follows ---------------------------------------------------------------------


@compiled
def emit_rows(source, stride, height, parts, target):
    """The first rows of a block of float32 in rows form."""
    for row in range(height):
        a = load_vector(source + row * stride)
        b = load_vector(source + row * stride + 64)
        for part in range(parts):
            near_a, near_b = rounded(a), rounded(b)
            store_halves(target + 2048 * part + 64 * row, near_a, near_b)
            if part + 1 < parts:
                a = subtract(a, as_floats(near_a))
                b = subtract(b, as_floats(near_b))


@compiled
def emit_columns(source, stride, parts, target):
    """A block of float32 in columns form."""
    for pair in range(16):
        for half in range(2):
            here = source + 2 * pair * stride + 64 * half
            a, b = load_vector(here), load_vector(here + stride)
            for part in range(parts):
                near_a, near_b = rounded(a), rounded(b)
                place = target + 2048 * part + 1024 * half + 64 * pair
                store_integers(place, paired(near_a, near_b))
                if part + 1 < parts:
                    a = subtract(a, as_floats(near_a))
                    b = subtract(b, as_floats(near_b))


@compiled
def emit(job, source, stride, row, column, scratch):
    """A block of float32 in the forms that the job wants."""
    parts = field(job, PARTS)
    size = 2048 * parts
    here = (row * field(job, COLUMN_BLOCKS) + column) * size
    mirrored = (column * field(job, ROW_BLOCKS) + row) * size
    rows, rows_t = field(job, OUT_ROWS), field(job, OUT_ROWS_T)
    columns, columns_t = field(job, OUT_COLUMNS), field(job, OUT_COLUMNS_T)
    if rows != 0 or columns_t != 0:
        place = rows + here if rows != 0 else scratch + BLOCK_BYTES
        emit_rows(source, stride, 32, parts, place)
        if columns_t != 0:
            for tile in range(0, size, 1024):
                transpose_tile(place + tile, columns_t + here + tile)
    if columns != 0 or rows_t != 0:
        place = columns + mirrored if columns != 0 else scratch + BLOCK_BYTES
        emit_columns(source, stride, parts, place)
        if rows_t != 0:
            for tile in range(0, size, 1024):
                transpose_tile(place + tile, rows_t + mirrored + tile)


@compiled
def store_block(job, block, row, column):
    """A block to the float32 target, without padding."""
    stride = field(job, TARGET_STRIDE)
    height = min(32, field(job, ROWS) - 32 * row)
    width = min(32, field(job, COLUMNS) - 32 * column)
    accumulate = field(job, ACCUMULATE) != 0
    base = field(job, TARGET) + 32 * row * stride + 128 * column
    for r in range(height):
        source, target = block + 128 * r, base + r * stride
        if width == 32:
            a, b = load_vector(source), load_vector(source + 64)
            if accumulate:
                a, b = add(a, load_vector(target)), add(b, load_vector(target + 64))
            store_vector(target, a)
            store_vector(target + 64, b)
        else:
            for c in range(0, 4 * width, 4):
                value = load_float(source + c)
                if accumulate:
                    value += load_float(target + c)
                store_float(target + c, value)


@compiled
def finish(job, block, row, column, scratch):
    """Bias, ReLU, mask and column sums of a block of float32; then all forms wanted."""
    bias, mask, sums = field(job, BIAS), field(job, MASK), field(job, SUMS)
    rectify = field(job, RELU) != 0
    if bias != 0 or mask != 0 or sums != 0:
        columns = field(job, COLUMN_BLOCKS)
        low, high, sum_low, sum_high = zeros(), zeros(), zeros(), zeros()
        if bias != 0:
            low, high = load_vector(bias + 128 * column), load_vector(bias + 128 * column + 64)
        if mask != 0:
            mask += (row * columns + column) * 2048 * field(job, MASK_PARTS)
        for r in range(32):
            here = block + 128 * r
            a, b = load_vector(here), load_vector(here + 64)
            if bias != 0:
                a, b = add(a, low), add(b, high)
            if rectify:
                a, b = relu(a), relu(b)
            if mask != 0:
                a = where_positive(a, mask + 64 * r)
                b = where_positive(b, mask + 64 * r + 32)
            if sums != 0:
                sum_low, sum_high = add(sum_low, a), add(sum_high, b)
            store_vector(here, a)
            store_vector(here + 64, b)
        if sums != 0:
            place = sums + 128 * (row * columns + column)
            store_vector(place, sum_low)
            store_vector(place + 64, sum_high)
    if field(job, TARGET) != 0:
        store_block(job, block, row, column)
    emit(job, block, 128, row, column, scratch)


@compiled
def load_block(job, row, column, block):
    """A block of the float32 source, zeros where the matrix ends."""
    stride = field(job, SOURCE_STRIDE)
    height = min(32, field(job, ROWS) - 32 * row)
    width = min(32, field(job, COLUMNS) - 32 * column)
    base = field(job, SOURCE) + 32 * row * stride + 128 * column
    for r in range(32):
        target = block + 128 * r
        if r < height and width == 32:
            store_vector(target, load_vector(base + r * stride))
            store_vector(target + 64, load_vector(base + r * stride + 64))
        else:
            store_vector(target, zeros())
            store_vector(target + 64, zeros())
            if r < height:
                for c in range(0, 4 * width, 4):
                    store_float(target + c, load_float(base + r * stride + c))


@compiled
def places_of_forms(job, row, column):
    """Where a block's forms and its mask lie: rows, columns or transpose, mask; 0 if not wanted."""
    size = 2048 * field(job, PARTS)
    here = row * field(job, COLUMN_BLOCKS) + column
    mirrored = column * field(job, ROW_BLOCKS) + row
    rows, mask = field(job, OUT_ROWS), field(job, MASK)
    other = field(job, OUT_COLUMNS)
    if other == 0:
        other = field(job, OUT_ROWS_T)
    return (
        rows + here * size if rows != 0 else 0,
        other + mirrored * size if other != 0 else 0,
        mask + here * 2048 * field(job, MASK_PARTS) if mask != 0 else 0,
    )


# ---- kernels --------------------------------------------------------------------------


def product(job):
    """Left times right, and what follows, block by block of the result.

    The left operand's rows of a unit stay in the second-level cache while the right
    operand goes by.
    """
    scratch = own_scratch(job)
    config = field(job, CONFIG)
    if config != 0:
        configure_tiles(config)
    left, right = field(job, LEFT), field(job, RIGHT)
    depth, parts, group = field(job, DEPTH), field(job, PARTS), field(job, GROUP)
    columns, stride = field(job, COLUMN_BLOCKS), field(job, RIGHT_STRIDE)
    unit = take_unit(job)
    while unit < field(job, UNITS):
        begin = unit * group
        end = min(begin + group, field(job, ROW_BLOCKS))
        # of the next right panel each row of blocks fetches a part, a share of it a step
        share = 64 * ((32 * parts + end - begin - 1) // (end - begin))
        for column in range(columns):
            b = right + column * stride
            following = b + stride if column + 1 < columns else b
            for row in range(begin, end):
                a = left + row * field(job, LEFT_STRIDE)
                if config != 0:
                    coming = following + (row - begin) * share * depth
                    forms = places_of_forms(job, row, column)
                    block_by_tiles(a, b, depth, parts, scratch, coming, share, forms)
                else:
                    block_by_vectors(a, b, depth, parts, scratch)
                finish(job, scratch, row, column, scratch)
        unit = take_unit(job)
    if config != 0:
        release_tiles()


def pack(job):
    """A float32 matrix in the forms wanted, after mask and sums."""
    scratch = own_scratch(job)
    group = field(job, GROUP)
    unit = take_unit(job)
    while unit < field(job, UNITS):
        begin = unit * group
        for row in range(begin, min(begin + group, field(job, ROW_BLOCKS))):
            for column in range(field(job, COLUMN_BLOCKS)):
                load_block(job, row, column, scratch)
                finish(job, scratch, row, column, scratch)
        unit = take_unit(job)
