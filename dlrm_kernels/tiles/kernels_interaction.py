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

from dlrm_kernels import vectors as v
from dlrm_kernels.tiles import kernels as k
from dlrm_kernels.tiles.instructions import configure_tiles, release_tiles, transpose_tile

AHEAD = 2
"""Samples between the fetching of a row and its use."""


@v.compiled
def row_of(job, addresses, strides, number, sample):
    """Where a sample's feature (or its gradient) lies."""
    return v.item(v.field(job, addresses), number) + sample * v.item(v.field(job, strides), number)


@v.compiled
def copy_row(source, target, count):
    """``count`` floats to another place."""
    for column in range(0, count, 16):
        here = min(16, count - column)
        v.store_first(target + 4 * column, v.load_first(source + 4 * column, here), here)


@v.compiled
def clear(place, size):
    """Zeros; a multiple of 64 bytes."""
    for line in range(place, place + size, 64):
        v.store_vector(line, v.zeros())


@v.compiled
def multiply_block(job, left, right, depth, target):
    """``target`` (32 x 32 float32) = sum over ``depth`` blocks of left times right."""
    if v.field(job, k.CONFIG) != 0:
        k.block_by_tiles(left, right, depth, v.field(job, k.DOT_PARTS), target, 0, 0, (0, 0, 0))
    else:
        k.block_by_vectors(left, right, depth, v.field(job, k.DOT_PARTS), target)


@v.compiled
def gather_block(job, sample, row, column, block):
    """Features 32 row ... of a sample, their columns 32 column ..., zeros beyond them."""
    height = min(32, v.field(job, k.COUNT) - 32 * row)
    width = min(32, v.field(job, k.DIM) - 32 * column)
    if (height < 32 and row > 0) or (width < 32 and column > 0):
        # the block held a larger one before; where all are alike its padding stays clear
        clear(block, k.BLOCK_BYTES)
    ahead = AHEAD if sample + AHEAD < v.field(job, k.ROWS) else 0
    for r in range(height):
        stride = v.item(v.field(job, k.STRIDES), 32 * row + r)
        source = row_of(job, k.FEATURES, k.STRIDES, 32 * row + r, sample) + 128 * column
        v.prefetch(source + ahead * stride)
        v.prefetch(source + ahead * stride + 4 * (width - 1))
        if width == 32:
            v.store_vector(block + 128 * r, v.load_vector(source))
            v.store_vector(block + 128 * r + 64, v.load_vector(source + 64))
        else:
            copy_row(source, block + 128 * r, width)
    return height


@v.compiled
def pack_features(job, sample, block, left, right):
    """A sample's features as left operand, and transposed as right operand."""
    size = 2048 * v.field(job, k.DOT_PARTS)
    depth = (v.field(job, k.DIM) + 31) // 32
    for row in range((v.field(job, k.COUNT) + 31) // 32):
        for column in range(depth):
            height = gather_block(job, sample, row, column, block)
            here = (row * depth + column) * size
            pairs = (height + 1) // 2
            k.emit_block(block, 128, pairs, v.field(job, k.DOT_PARTS), left + here, 0)
            for tile in range(here, here + size, 1024):
                # of a part the second tile holds features 16 to 31
                if height > 16 or tile % 2048 == 0:
                    transpose_tile(left + tile, right + tile)


@v.compiled
def store_products(job, block, row, column, target):
    """Of a block of Z what belongs to the output, to the places of its pairs."""
    itself = v.field(job, k.ITSELF)
    for r in range(min(32, v.field(job, k.COUNT) - 32 * row)):
        i = 32 * row + r
        count = min(32, i + itself - 32 * column)
        if count > 0:
            pairs = i * (i - 1) // 2 + (i if itself != 0 else 0)
            copy_row(block + 128 * r, target + 4 * (pairs + 32 * column), count)


def dot_forward(job):
    """The interaction's output, in the forms wanted."""
    scratch = k.own_scratch(job)
    config = v.field(job, k.CONFIG)
    if config != 0:
        configure_tiles(config)
    blocks, group, rows = v.field(job, k.COLUMN_BLOCKS), v.field(job, k.GROUP), v.field(job, k.ROWS)
    dim, features = v.field(job, k.DIM), (v.field(job, k.COUNT) + 31) // 32
    depth = (dim + 31) // 32
    panel = 2048 * v.field(job, k.DOT_PARTS) * depth
    width = 128 * blocks
    output = scratch + k.SCRATCH_LEAST
    block = output + 32 * width
    products = block + k.BLOCK_BYTES
    left = products + k.BLOCK_BYTES
    right = left + features * panel
    clear(output, 32 * width + 2 * k.BLOCK_BYTES + 2 * features * panel)
    unit = v.take_unit(job)
    while unit < v.field(job, v.UNITS):
        begin = unit * group
        for row in range(begin, min(begin + group, v.field(job, k.ROW_BLOCKS))):
            for r in range(min(32, rows - 32 * row)):
                sample, target = 32 * row + r, output + r * width
                copy_row(row_of(job, k.FEATURES, k.STRIDES, 0, sample), target, dim)
                pack_features(job, sample, block, left, right)
                for i in range(features):
                    for j in range(i + 1):
                        multiply_block(job, left + i * panel, right + j * panel, depth, products)
                        store_products(job, products, i, j, target + 4 * dim)
            for column in range(blocks):
                k.emit(job, output + 128 * column, width, row, column, scratch)
        unit = v.take_unit(job)
    if config != 0:
        release_tiles()


@v.compiled
def load_triangle(job, pairs, a, b, tile):
    """Tile (a, b) of G: 16 x 16 float32, zeros where the output has no such pair."""
    itself, features = v.field(job, k.ITSELF), v.field(job, k.COUNT)
    for r in range(16):
        i = 16 * a + r
        count = min(16, i + itself - 16 * b) if i < features else 0
        if count > 0:
            place = i * (i - 1) // 2 + (i if itself != 0 else 0) + 16 * b
            v.store_vector(tile + 64 * r, v.load_first(pairs + 4 * place, count))
        else:
            v.store_vector(tile + 64 * r, v.zeros())


@v.compiled
def add_mirrored(job, pairs, tile, target, stride):
    """G + G', row by row."""
    tiles = (v.field(job, k.COUNT) + 15) // 16
    mirrored = tile + 1024
    for a in range(tiles):
        for b in range(a + 1):
            load_triangle(job, pairs, a, b, tile)
            transpose_tile(tile, mirrored)
            for r in range(16):
                upright, flipped = v.load_vector(tile + 64 * r), v.load_vector(mirrored + 64 * r)
                if a == b:
                    upright = v.add(upright, flipped)
                else:
                    v.store_vector(target + (16 * b + r) * stride + 64 * a, flipped)
                v.store_vector(target + (16 * a + r) * stride + 64 * b, upright)


@v.compiled
def store_gradients(job, sample, products, row, column, source):
    """A block of (G + G') X to the gradients; F_0 is itself a part of the output too."""
    width = min(32, v.field(job, k.DIM) - 32 * column)
    for r in range(min(32, v.field(job, k.COUNT) - 32 * row)):
        number = 32 * row + r
        target = row_of(job, k.GRADIENTS, k.GRADIENT_STRIDES, number, sample) + 128 * column
        here = products + 128 * r
        for start in range(0, width, 16):
            count = min(16, width - start)
            value = v.load_vector(here + 4 * start)
            if number == 0:
                place = source + 128 * column + 4 * start
                value = v.add(value, v.load_first(place, count))
            v.store_first(target + 4 * start, value, count)


def dot_backward(job):
    """Gradients of all features from the gradient of the interaction's output (k.SOURCE)."""
    scratch = k.own_scratch(job)
    config = v.field(job, k.CONFIG)
    if config != 0:
        configure_tiles(config)
    dim, parts = v.field(job, k.DIM), v.field(job, k.DOT_PARTS)
    group, rows = v.field(job, k.GROUP), v.field(job, k.ROWS)
    features, columns = (v.field(job, k.COUNT) + 31) // 32, (dim + 31) // 32
    size, stride = 2048 * parts, 128 * features
    panel = size * features
    tile = scratch + k.SCRATCH_LEAST
    block = tile + 2048
    products = block + k.BLOCK_BYTES
    both = products + k.BLOCK_BYTES
    left = both + 32 * features * stride
    right = left + features * panel
    clear(tile, right + columns * panel - tile)
    unit = v.take_unit(job)
    while unit < v.field(job, v.UNITS):
        begin = 32 * unit * group
        for sample in range(begin, min(begin + 32 * group, rows)):
            source = v.field(job, k.SOURCE) + sample * v.field(job, k.SOURCE_STRIDE)
            add_mirrored(job, source + 4 * dim, tile, both, stride)
            for i in range(features):
                height = min(32, v.field(job, k.COUNT) - 32 * i)
                for j in range(features):
                    place = left + i * panel + j * size
                    here = both + 32 * i * stride + 128 * j
                    k.emit_block(here, stride, (height + 1) // 2, parts, place, 0)
            for column in range(columns):
                for j in range(features):
                    gather_block(job, sample, j, column, block)
                    place = right + column * panel + j * size
                    k.emit_block(block, 128, 16, parts, 0, place)
                for i in range(features):
                    here = left + i * panel
                    multiply_block(job, here, right + column * panel, features, products)
                    store_gradients(job, sample, products, i, column, source)
        unit = v.take_unit(job)
    if config != 0:
        release_tiles()
