"""The dot interaction on tiles, sample by sample, straight into the top MLP's input.

Of features F_0 (the bottom MLP's output) to F_T, each (B, d) float32: beside F_0 all
products F_i . F_j, j < i (or j <= i), row by row of the lower triangle, as in
:class:`dlrm_core.interactions.DotInteraction`. With X (F, d) a sample's features, forward is
Z = X X', backward (G + G') X with G the gradient of the lower triangle of Z. Both are
products of blocks as in :mod:`dlrm_kernels.tiles.kernels`, of at least two bf16 numbers an
entry in every precision, and nothing of them leaves the core's own caches.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dlrm_kernels.tiles.instructions import configure_tiles, release_tiles, transpose_tile
from dlrm_kernels.tiles.kernels import (
    BLOCK_BYTES,
    COLUMN_BLOCKS,
    CONFIG,
    COUNT,
    DIM,
    DOT_PARTS,
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
    block_by_tiles,
    block_by_vectors,
    emit,
    emit_block,
    own_scratch,
)
from dlrm_kernels.vectors import (
    UNITS,
    add,
    compiled,
    field,
    item,
    load_first,
    load_vector,
    prefetch,
    store_first,
    store_vector,
    take_unit,
    zeros,
)

AHEAD = 2
"""Samples between the fetching of a row and its use."""


@compiled
def row_of(job, addresses, strides, number, sample):
    """Where a sample's feature (or its gradient) lies."""
    return item(field(job, addresses), number) + sample * item(field(job, strides), number)


@compiled
def copy_row(source, target, count):
    """``count`` floats to another place."""
    for column in range(0, count, 16):
        here = min(16, count - column)
        store_first(target + 4 * column, load_first(source + 4 * column, here), here)


@compiled
def clear(place, size):
    """Zeros; a multiple of 64 bytes."""
    for line in range(place, place + size, 64):
        store_vector(line, zeros())


@compiled
def multiply_block(job, left, right, depth, target):
    """``target`` (32 x 32 float32) = sum over ``depth`` blocks of left times right."""
    if field(job, CONFIG) != 0:
        block_by_tiles(left, right, depth, field(job, DOT_PARTS), target, 0, 0, (0, 0, 0))
    else:
        block_by_vectors(left, right, depth, field(job, DOT_PARTS), target)


@compiled
def gather_block(job, sample, row, column, block):
    """Features 32 row ... of a sample, their columns 32 column ..., zeros beyond them."""
    height = min(32, field(job, COUNT) - 32 * row)
    width = min(32, field(job, DIM) - 32 * column)
    if (height < 32 and row > 0) or (width < 32 and column > 0):
        # the block held a larger one before; where all are alike its padding stays clear
        clear(block, BLOCK_BYTES)
    ahead = AHEAD if sample + AHEAD < field(job, ROWS) else 0
    for r in range(height):
        stride = item(field(job, STRIDES), 32 * row + r)
        source = row_of(job, FEATURES, STRIDES, 32 * row + r, sample) + 128 * column
        prefetch(source + ahead * stride)
        prefetch(source + ahead * stride + 4 * (width - 1))
        if width == 32:
            store_vector(block + 128 * r, load_vector(source))
            store_vector(block + 128 * r + 64, load_vector(source + 64))
        else:
            copy_row(source, block + 128 * r, width)
    return height


@compiled
def pack_features(job, sample, block, left, right):
    """A sample's features as left operand, and transposed as right operand."""
    size = 2048 * field(job, DOT_PARTS)
    depth = (field(job, DIM) + 31) // 32
    for row in range((field(job, COUNT) + 31) // 32):
        for column in range(depth):
            height = gather_block(job, sample, row, column, block)
            here = (row * depth + column) * size
            pairs = (height + 1) // 2
            emit_block(block, 128, pairs, field(job, DOT_PARTS), left + here, 0)
            for tile in range(here, here + size, 1024):
                # of a part the second tile holds features 16 to 31
                if height > 16 or tile % 2048 == 0:
                    transpose_tile(left + tile, right + tile)


@compiled
def store_products(job, block, row, column, target):
    """Of a block of Z what belongs to the output, to the places of its pairs."""
    itself = field(job, ITSELF)
    for r in range(min(32, field(job, COUNT) - 32 * row)):
        i = 32 * row + r
        count = min(32, i + itself - 32 * column)
        if count > 0:
            pairs = i * (i - 1) // 2 + (i if itself != 0 else 0)
            copy_row(block + 128 * r, target + 4 * (pairs + 32 * column), count)


def dot_forward(job):
    """The interaction's output, in the forms wanted."""
    scratch = own_scratch(job)
    config = field(job, CONFIG)
    if config != 0:
        configure_tiles(config)
    blocks, group, rows = field(job, COLUMN_BLOCKS), field(job, GROUP), field(job, ROWS)
    dim, features = field(job, DIM), (field(job, COUNT) + 31) // 32
    depth = (dim + 31) // 32
    panel = 2048 * field(job, DOT_PARTS) * depth
    width = 128 * blocks
    output = scratch + SCRATCH_LEAST
    block = output + 32 * width
    products = block + BLOCK_BYTES
    left = products + BLOCK_BYTES
    right = left + features * panel
    clear(output, 32 * width + 2 * BLOCK_BYTES + 2 * features * panel)
    unit = take_unit(job)
    while unit < field(job, UNITS):
        begin = unit * group
        for row in range(begin, min(begin + group, field(job, ROW_BLOCKS))):
            for r in range(min(32, rows - 32 * row)):
                sample, target = 32 * row + r, output + r * width
                copy_row(row_of(job, FEATURES, STRIDES, 0, sample), target, dim)
                pack_features(job, sample, block, left, right)
                for i in range(features):
                    for j in range(i + 1):
                        multiply_block(job, left + i * panel, right + j * panel, depth, products)
                        store_products(job, products, i, j, target + 4 * dim)
            for column in range(blocks):
                emit(job, output + 128 * column, width, row, column, scratch)
        unit = take_unit(job)
    if config != 0:
        release_tiles()


@compiled
def load_triangle(job, pairs, a, b, tile):
    """Tile (a, b) of G: 16 x 16 float32, zeros where the output has no such pair."""
    itself, features = field(job, ITSELF), field(job, COUNT)
    for r in range(16):
        i = 16 * a + r
        count = min(16, i + itself - 16 * b) if i < features else 0
        if count > 0:
            place = i * (i - 1) // 2 + (i if itself != 0 else 0) + 16 * b
            store_vector(tile + 64 * r, load_first(pairs + 4 * place, count))
        else:
            store_vector(tile + 64 * r, zeros())


@compiled
def add_mirrored(job, pairs, tile, target, stride):
    """G + G', row by row."""
    tiles = (field(job, COUNT) + 15) // 16
    mirrored = tile + 1024
    for a in range(tiles):
        for b in range(a + 1):
            load_triangle(job, pairs, a, b, tile)
            transpose_tile(tile, mirrored)
            for r in range(16):
                upright, flipped = load_vector(tile + 64 * r), load_vector(mirrored + 64 * r)
                if a == b:
                    upright = add(upright, flipped)
                else:
                    store_vector(target + (16 * b + r) * stride + 64 * a, flipped)
                store_vector(target + (16 * a + r) * stride + 64 * b, upright)


@compiled
def store_gradients(job, sample, products, row, column, source):
    """A block of (G + G') X to the gradients; F_0 is itself a part of the output too."""
    width = min(32, field(job, DIM) - 32 * column)
    for r in range(min(32, field(job, COUNT) - 32 * row)):
        number = 32 * row + r
        target = row_of(job, GRADIENTS, GRADIENT_STRIDES, number, sample) + 128 * column
        here = products + 128 * r
        for start in range(0, width, 16):
            count = min(16, width - start)
            value = load_vector(here + 4 * start)
            if number == 0:
                place = source + 128 * column + 4 * start
                value = add(value, load_first(place, count))
            store_first(target + 4 * start, value, count)


def dot_backward(job):
    """Gradients of all features from the gradient of the interaction's output (SOURCE)."""
    scratch = own_scratch(job)
    config = field(job, CONFIG)
    if config != 0:
        configure_tiles(config)
    dim, parts = field(job, DIM), field(job, DOT_PARTS)
    group, rows = field(job, GROUP), field(job, ROWS)
    features, columns = (field(job, COUNT) + 31) // 32, (dim + 31) // 32
    size, stride = 2048 * parts, 128 * features
    panel = size * features
    tile = scratch + SCRATCH_LEAST
    block = tile + 2048
    products = block + BLOCK_BYTES
    both = products + BLOCK_BYTES
    left = both + 32 * features * stride
    right = left + features * panel
    clear(tile, right + columns * panel - tile)
    unit = take_unit(job)
    while unit < field(job, UNITS):
        begin = 32 * unit * group
        for sample in range(begin, min(begin + 32 * group, rows)):
            source = field(job, SOURCE) + sample * field(job, SOURCE_STRIDE)
            add_mirrored(job, source + 4 * dim, tile, both, stride)
            for i in range(features):
                height = min(32, field(job, COUNT) - 32 * i)
                for j in range(features):
                    place = left + i * panel + j * size
                    here = both + 32 * i * stride + 128 * j
                    emit_block(here, stride, (height + 1) // 2, parts, place, 0)
            for column in range(columns):
                for j in range(features):
                    gather_block(job, sample, j, column, block)
                    place = right + column * panel + j * size
                    emit_block(block, 128, 16, parts, 0, place)
                for i in range(features):
                    here = left + i * panel
                    multiply_block(job, here, right + column * panel, features, products)
                    store_gradients(job, sample, products, i, column, source)
        unit = take_unit(job)
    if config != 0:
        release_tiles()
