"""Kernels on tiled matrices: products, what follows them, packing.

Blocks are 32 x 32. A block of a tiled matrix is, for each of its 1 to 3 parts (the bf16
numbers whose sum an entry is), two tiles side by side. Two forms (see
:mod:`dlrm_kernels.tiles.layout`): *rows*, for the left operand of a product, and *columns*, for
the right one, whose 32-bit lanes are pairs of rows.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dlrm_kernels.tiles.instructions import (
    BLOCK_BYTES,
    COLUMN_BLOCKS,
    COLUMNS,
    CONFIG,
    DEPTH,
    GROUP,
    LEFT,
    LEFT_STRIDE,
    MASK,
    MASK_PARTS,
    OUT_COLUMNS,
    OUT_ROWS,
    OUT_ROWS_T,
    PARTS,
    RIGHT,
    RIGHT_STRIDE,
    ROW_BLOCKS,
    ROWS,
    SOURCE,
    SOURCE_STRIDE,
    UNITS,
    clear_tile,
    configure_tiles,
    field,
    load_integers,
    load_tile,
    lower_halves,
    multiply_tiles,
    own_scratch,
    release_tiles,
    splat_integer,
    store_tile,
    take_unit,
    upper_halves,
)
from dlrm_kernels.tiles.kernels_follow import finish
from dlrm_kernels.vectors import (
    add,
    compiled,
    load_float,
    load_vector,
    multiply,
    prefetch,
    store_float,
    store_vector,
    zeros,
)

_clear0, _clear1, _clear2, _clear3 = (clear_tile(i) for i in range(4))
_store0, _store1, _store2, _store3 = (store_tile(i) for i in range(4))
_left0, _left1, _right0, _right1 = (load_tile(i) for i in (4, 5, 6, 7))
_multiply00, _multiply01 = multiply_tiles(0, 4, 6), multiply_tiles(1, 4, 7)
_multiply10, _multiply11 = multiply_tiles(2, 5, 6), multiply_tiles(3, 5, 7)


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
