"""Kernels on tiled matrices: products, what follows them, packing.

Blocks are 32 x 32. A block of a tiled matrix is, for each of its 1 to 3 parts (the bf16
numbers whose sum an entry is), two tiles side by side. Two forms (see
:mod:`dlrm_kernels.tiles.layout`): *rows*, for the left operand of a product, and *columns*, for
the right one, whose 32-bit lanes are pairs of rows. What follows a block of float32: bias,
ReLU, mask, sums, and the forms wanted of it.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dlrm_kernels import vectors as v
from dlrm_kernels.tiles.instructions import (
    clear_tile,
    configure_tiles,
    first_floats,
    first_pairs,
    halves_of,
    last_floats,
    last_pairs,
    load_tile,
    lower_halves,
    multiply_tiles,
    release_tiles,
    relu,
    splat_integer,
    store_tile,
    transpose_tile,
    upper_halves,
    where_positive,
)

# Fields of a job behind the first three (:mod:`dlrm_kernels.vectors`). Addresses unless another
# unit is given; an address of 0: not wanted.
(
    SCRATCH,  # SCRATCH_BYTES a thread
    SCRATCH_BYTES,
    GROUP,  # rows of blocks in a unit
    ROW_BLOCKS,
    COLUMN_BLOCKS,
    ROWS,  # of them real, the rest is padding
    COLUMNS,
    PARTS,  # 1, 2 or 3
    # the operands of a product
    CONFIG,  # shapes of the tiles; 0: no tiles, multiply by vector instructions
    LEFT,
    RIGHT,
    DEPTH,  # blocks along the sum
    LEFT_STRIDE,  # bytes from one row of blocks to the next
    RIGHT_STRIDE,
    # what happens to a block of the result, or of a matrix that is packed
    BIAS,  # float32 a column, padded
    RELU,  # 0 or 1
    MASK,  # rows form of the same shape: where it is not positive, the result is 0
    MASK_PARTS,
    SUMS,  # ROW_BLOCKS x (32 COLUMN_BLOCKS) float32: sums of each block's columns
    TARGET,  # float32, row by row
    TARGET_STRIDE,  # bytes
    ACCUMULATE,  # 0 or 1: add to the target
    OUT_ROWS,  # the result in rows form
    OUT_COLUMNS,
    OUT_ROWS_T,  # its transpose in rows form
    OUT_COLUMNS_T,
    SOURCE,  # packing: float32, row by row
    SOURCE_STRIDE,
    # the interaction
    FEATURES,  # F addresses of float32 (B, d)
    STRIDES,  # F distances between their rows, bytes
    COUNT,  # F
    DIM,  # d
    ITSELF,  # 0 or 1: products of a feature with itself too
    GRADIENTS,  # F addresses of float32 (B, d), written
    GRADIENT_STRIDES,
    DOT_PARTS,  # as PARTS, of the features
    FIELDS,
) = range(3, 40)

BLOCK_BYTES = 32 * 32 * 4
"""A block in float32; in bf16 half of it for each part."""

SCRATCH_LEAST = BLOCK_BYTES + 3 * 2 * 2 * 1024
"""Bytes: a block in float32, and in both forms."""

_clear0, _clear1, _clear2, _clear3 = (clear_tile(i) for i in range(4))
_store0, _store1, _store2, _store3 = (store_tile(i) for i in range(4))
_left0, _left1, _right0, _right1 = (load_tile(i) for i in (4, 5, 6, 7))
_multiply00, _multiply01 = multiply_tiles(0, 4, 6), multiply_tiles(1, 4, 7)
_multiply10, _multiply11 = multiply_tiles(2, 5, 6), multiply_tiles(3, 5, 7)


@v.compiled
def own_scratch(job):
    """This thread's part of the scratch memory."""
    return v.field(job, SCRATCH) + v.enter(job) * v.field(job, SCRATCH_BYTES)


@v.compiled
def emit_two(a, b, c, d, parts, pair, rows, columns):
    """Two rows (a, b) and (c, d) of a block in rows form, in columns form; 0: not wanted."""
    for part in range(parts):
        even, odd = halves_of(a, b), halves_of(c, d)
        if rows != 0:
            place = rows + 2048 * part + 128 * pair
            v.store_words(place, even)
            v.store_words(place + 64, odd)
        if columns != 0:
            place = columns + 2048 * part + 64 * pair
            v.store_words(place, first_pairs(even, odd))
            v.store_words(place + 1024, last_pairs(even, odd))
        if part + 1 < parts:
            a, b = v.subtract(a, first_floats(even)), v.subtract(b, last_floats(even))
            c, d = v.subtract(c, first_floats(odd)), v.subtract(d, last_floats(odd))


@v.compiled
def emit_block(source, stride, pairs, parts, rows, columns):
    """The first pairs of rows of a block of float32, in the forms wanted (0: not)."""
    for pair in range(pairs):
        here = source + 2 * pair * stride
        a, b = v.load_vector(here), v.load_vector(here + 64)
        c, d = v.load_vector(here + stride), v.load_vector(here + stride + 64)
        emit_two(a, b, c, d, parts, pair, rows, columns)


@v.compiled
def places_wanted(job, row, column, scratch):
    """Where a block's forms go: rows, columns (0: not wanted), and their transposes."""
    size = 2048 * v.field(job, PARTS)
    here = (row * v.field(job, COLUMN_BLOCKS) + column) * size
    mirrored = (column * v.field(job, ROW_BLOCKS) + row) * size
    rows, rows_t = v.field(job, OUT_ROWS), v.field(job, OUT_ROWS_T)
    columns, columns_t = v.field(job, OUT_COLUMNS), v.field(job, OUT_COLUMNS_T)
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


@v.compiled
def transpose_forms(parts, places):
    """The transposes wanted, from the forms just written."""
    rows, columns, columns_t, rows_t = places
    if columns_t != 0:
        for tile in range(0, 2048 * parts, 1024):
            transpose_tile(rows + tile, columns_t + tile)
    if rows_t != 0:
        for tile in range(0, 2048 * parts, 1024):
            transpose_tile(columns + tile, rows_t + tile)


@v.compiled
def emit(job, source, stride, row, column, scratch):
    """A block of float32 in the forms that the job wants."""
    places = places_wanted(job, row, column, scratch)
    emit_block(source, stride, 16, v.field(job, PARTS), places[0], places[1])
    transpose_forms(v.field(job, PARTS), places)


@v.compiled
def store_row(job, a, b, row, column, r):
    """A row of a block to the float32 target, without padding."""
    place = 32 * row + r
    if place < v.field(job, ROWS):
        target = v.field(job, TARGET) + place * v.field(job, TARGET_STRIDE) + 128 * column
        width = v.field(job, COLUMNS) - 32 * column
        low, high = min(16, width), max(0, min(16, width - 16))
        if v.field(job, ACCUMULATE) != 0:
            a = v.add(a, v.load_first(target, low))
            b = v.add(b, v.load_first(target + 64, high))
        v.store_first(target, a, low)
        v.store_first(target + 64, b, high)


@v.compiled
def finish(job, block, row, column, scratch):
    """Bias, ReLU, mask and column sums of a block of float32; then target and forms."""
    bias, mask, sums = v.field(job, BIAS), v.field(job, MASK), v.field(job, SUMS)
    rectify, target = v.field(job, RELU) != 0, v.field(job, TARGET)
    parts, columns = v.field(job, PARTS), v.field(job, COLUMN_BLOCKS)
    places = places_wanted(job, row, column, scratch)
    low, high, sum_low, sum_high = v.zeros(), v.zeros(), v.zeros(), v.zeros()
    if bias != 0:
        low, high = v.load_vector(bias + 128 * column), v.load_vector(bias + 128 * column + 64)
    if mask != 0:
        mask += (row * columns + column) * 2048 * v.field(job, MASK_PARTS)
    for pair in range(16):
        here = block + 256 * pair
        a, b = v.load_vector(here), v.load_vector(here + 64)
        c, d = v.load_vector(here + 128), v.load_vector(here + 192)
        if bias != 0:
            a, b, c, d = v.add(a, low), v.add(b, high), v.add(c, low), v.add(d, high)
        if rectify:
            a, b, c, d = relu(a), relu(b), relu(c), relu(d)
        if mask != 0:
            place = mask + 128 * pair
            a, b = where_positive(a, place), where_positive(b, place + 32)
            c, d = where_positive(c, place + 64), where_positive(d, place + 96)
        if sums != 0:
            sum_low, sum_high = v.add(v.add(sum_low, a), c), v.add(v.add(sum_high, b), d)
        if target != 0:
            store_row(job, a, b, row, column, 2 * pair)
            store_row(job, c, d, row, column, 2 * pair + 1)
        emit_two(a, b, c, d, parts, pair, places[0], places[1])
    if sums != 0:
        place = sums + 128 * (row * columns + column)
        v.store_vector(place, sum_low)
        v.store_vector(place + 64, sum_high)
    transpose_forms(parts, places)


@v.compiled
def multiply_quarters():
    """The loaded tiles' products, added to the four quarters of a block."""
    _multiply00()
    _multiply01()
    _multiply10()
    _multiply11()


@v.compiled
def fetch(place, size):
    """Begin to load ``size`` bytes; nothing at address 0. Returns what comes behind them."""
    if place != 0:
        for line in range(0, size, 64):
            v.prefetch(place + line)
        place += size
    return place


@v.compiled
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


@v.compiled
def block_by_vectors(left, right, depth, parts, target):
    """The same without tiles: slow, so that the rest can be tested on any CPU."""
    for place in range(0, BLOCK_BYTES, 64):
        v.store_vector(target + place, v.zeros())
    for _ in range(depth):
        for total in range(parts - 1, -1, -1):
            for i in range(total + 1):
                for row in range(32):
                    pairs = left + 2048 * i + 64 * row
                    for half in range(2):
                        others = right + 2048 * (total - i) + 1024 * half
                        here = target + 128 * row + 64 * half
                        acc = v.load_vector(here)
                        for p in range(16):
                            a = splat_integer(pairs + 4 * p)
                            b = v.load_words(others + 64 * p)
                            acc = v.add(acc, v.multiply(lower_halves(a), lower_halves(b)))
                            acc = v.add(acc, v.multiply(upper_halves(a), upper_halves(b)))
                        v.store_vector(here, acc)
        left += 2048 * parts
        right += 2048 * parts


@v.compiled
def load_block(job, row, column, block):
    """A block of the float32 source, zeros where the matrix ends."""
    stride = v.field(job, SOURCE_STRIDE)
    height = min(32, v.field(job, ROWS) - 32 * row)
    width = min(32, v.field(job, COLUMNS) - 32 * column)
    base = v.field(job, SOURCE) + 32 * row * stride + 128 * column
    for r in range(32):
        target = block + 128 * r
        if r < height and width == 32:
            v.store_vector(target, v.load_vector(base + r * stride))
            v.store_vector(target + 64, v.load_vector(base + r * stride + 64))
        else:
            v.store_vector(target, v.zeros())
            v.store_vector(target + 64, v.zeros())
            if r < height:
                for c in range(0, 4 * width, 4):
                    v.store_float(target + c, v.load_float(base + r * stride + c))


@v.compiled
def places_of_forms(job, row, column):
    """Where a block's forms and its mask lie: rows, columns or transpose, mask; 0 if not wanted."""
    size = 2048 * v.field(job, PARTS)
    here = row * v.field(job, COLUMN_BLOCKS) + column
    mirrored = column * v.field(job, ROW_BLOCKS) + row
    rows, mask = v.field(job, OUT_ROWS), v.field(job, MASK)
    other = v.field(job, OUT_COLUMNS)
    if other == 0:
        other = v.field(job, OUT_ROWS_T)
    return (
        rows + here * size if rows != 0 else 0,
        other + mirrored * size if other != 0 else 0,
        mask + here * 2048 * v.field(job, MASK_PARTS) if mask != 0 else 0,
    )


def product(job):
    """Left times right, and what follows, block by block of the result.

    The left operand's rows of a unit stay in the second-level cache while the right
    operand goes by.
    """
    scratch = own_scratch(job)
    config = v.field(job, CONFIG)
    if config != 0:
        configure_tiles(config)
    left, right = v.field(job, LEFT), v.field(job, RIGHT)
    depth, parts, group = v.field(job, DEPTH), v.field(job, PARTS), v.field(job, GROUP)
    columns, stride = v.field(job, COLUMN_BLOCKS), v.field(job, RIGHT_STRIDE)
    unit = v.take_unit(job)
    while unit < v.field(job, v.UNITS):
        begin = unit * group
        end = min(begin + group, v.field(job, ROW_BLOCKS))
        # of the next right panel each row of blocks fetches a part, a share of it a step
        share = 64 * ((32 * parts + end - begin - 1) // (end - begin))
        for column in range(columns):
            b = right + column * stride
            following = b + stride if column + 1 < columns else b
            for row in range(begin, end):
                a = left + row * v.field(job, LEFT_STRIDE)
                if config != 0:
                    coming = following + (row - begin) * share * depth
                    forms = places_of_forms(job, row, column)
                    block_by_tiles(a, b, depth, parts, scratch, coming, share, forms)
                else:
                    block_by_vectors(a, b, depth, parts, scratch)
                finish(job, scratch, row, column, scratch)
        unit = v.take_unit(job)
    if config != 0:
        release_tiles()


def pack(job):
    """A float32 matrix in the forms wanted, after mask and sums."""
    scratch = own_scratch(job)
    group = v.field(job, GROUP)
    unit = v.take_unit(job)
    while unit < v.field(job, v.UNITS):
        begin = unit * group
        for row in range(begin, min(begin + group, v.field(job, ROW_BLOCKS))):
            for column in range(v.field(job, COLUMN_BLOCKS)):
                load_block(job, row, column, scratch)
                finish(job, scratch, row, column, scratch)
        unit = v.take_unit(job)
