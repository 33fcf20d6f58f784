"""Rows of 2 bytes a number on the CPU: widened, summed, changed and rounded stochastically.

What :mod:`dlrm_kernels.embeddings.kernels` and ``kernels_sorted`` do with a row of float32
is done here with one of bf16 or fp16. The law of the random words is that of
:mod:`dlrm_kernels.rounding`: a block of words is drawn once for a group of rows or for a bag,
and a member of the group adds its multiple of the golden ratio.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dlrm_kernels.rounding import GOLDEN, LANES, MULTIPLIERS, PHILOX_ROUNDS, WEYL, WORDS
from dlrm_kernels.vectors import (
    add,
    add_words,
    compiled,
    from_bf16,
    from_half,
    item,
    lane_numbers,
    load_first,
    load_first_shorts,
    load_shorts,
    load_vector,
    load_words,
    multiply,
    multiply_high,
    multiply_low,
    owner,
    prefetch,
    round_to_bf16,
    round_to_half,
    splat,
    splat_word,
    store_first,
    store_first_shorts,
    store_shorts,
    store_vector,
    store_words,
    subtract,
    warm,
    xor_words,
    zeros,
)

FLOAT, BF16, HALF = 0, 1, 2
"""Formats of a table's numbers."""


@compiled
def words_bytes(dim):
    """Bytes of the random words of a row."""
    return 4 * ((dim + 63) // 64 * 64)


@compiled
def draw_words(out, seed, group, table, update, dim):
    """Philox4x32 of all columns' counters (block, group, table, update) to ``out``."""
    for block in range((dim + 63) // 64):
        a = add_words(lane_numbers(), splat_word(block * LANES))
        b, c, d = splat_word(group), splat_word(table), splat_word(update)
        factor, other_factor = splat_word(MULTIPLIERS[0]), splat_word(MULTIPLIERS[1])
        key, other_key = seed, 0
        for _ in range(PHILOX_ROUNDS):
            high, low = multiply_high(a, factor), multiply_low(a, factor)
            a = xor_words(xor_words(multiply_high(c, other_factor), b), splat_word(key))
            b = multiply_low(c, other_factor)
            c, d = xor_words(xor_words(high, d), splat_word(other_key)), low
            key += WEYL[0]
            other_key += WEYL[1]
        at = out + 4 * LANES * WORDS * block
        store_words(at, a)
        store_words(at + 64, b)
        store_words(at + 128, c)
        store_words(at + 192, d)


@compiled
def widen(shorts, kind):
    """Sixteen numbers of 2 bytes as float32."""
    if kind == BF16:
        return from_bf16(shorts)
    return from_half(shorts)


@compiled
def load_narrow(address, count, kind):
    """The first ``count`` of sixteen numbers, at most, as float32."""
    if count >= LANES:
        return widen(load_shorts(address), kind)
    return widen(load_first_shorts(address, count), kind)


@compiled
def change_narrow(address, change, drawn, count, kind):
    """w - change of the first ``count`` of sixteen numbers, at most, rounded by words."""
    value = subtract(load_narrow(address, count, kind), change)
    if kind == BF16:
        rounded = round_to_bf16(value, drawn)
    else:
        rounded = round_to_half(value, drawn)
    if count >= LANES:
        store_shorts(address, rounded)
    else:
        store_first_shorts(address, rounded, count)


@compiled
def sum_narrow_64(table, size, rows, indices, begin, end, last, out, ahead, step, kind):
    """64 columns of :func:`sum_narrow`."""
    a, b, c, d = zeros(), zeros(), zeros(), zeros()
    for i in range(begin, end):
        warm(table + item(indices, min(i + ahead, last)) * size, 128, step)
        row = item(indices, i)
        if row < 0 or row >= rows:
            return i
        p = table + row * size
        a = add(a, widen(load_shorts(p), kind))
        b = add(b, widen(load_shorts(p + 32), kind))
        c = add(c, widen(load_shorts(p + 64), kind))
        d = add(d, widen(load_shorts(p + 96), kind))
    store_vector(out, a)
    store_vector(out + 64, b)
    store_vector(out + 128, c)
    store_vector(out + 192, d)
    return -1


@compiled
def sum_narrow_16(table, size, rows, indices, begin, end, last, out, ahead, count, kind):
    """At most 16 columns of :func:`sum_narrow`."""
    a = zeros()
    for i in range(begin, end):
        prefetch(table + item(indices, min(i + ahead, last)) * size)
        row = item(indices, i)
        if row < 0 or row >= rows:
            return i
        a = add(a, load_narrow(table + row * size, count, kind))
    store_first(out, a, count)
    return -1


@compiled
def sum_narrow(table, rows, dim, indices, begin, end, last, out, ahead, step, kind):
    """Sum rows ``indices[begin:end]`` into ``out``; the position of a bad index, or -1."""
    size, column, bad = 2 * dim, 0, -1
    while column + 64 <= dim and bad < 0:
        t, o = table + 2 * column, out + 4 * column
        bad = sum_narrow_64(t, size, rows, indices, begin, end, last, o, ahead, step, kind)
        column += 64
    while column < dim and bad < 0:
        t, o, count = table + 2 * column, out + 4 * column, min(LANES, dim - column)
        bad = sum_narrow_16(t, size, rows, indices, begin, end, last, o, ahead, count, kind)
        column += LANES
    return bad


@compiled
def subtract_narrow_64(
    table, size, indices, begin, end, last, gradient, rate, ahead, step, mine, slices, drawn, kind
):
    """64 columns of :func:`subtract_narrow`."""
    rates = splat(rate)
    a = multiply(rates, load_vector(gradient))
    b = multiply(rates, load_vector(gradient + 64))
    c = multiply(rates, load_vector(gradient + 128))
    d = multiply(rates, load_vector(gradient + 192))
    e, f = load_words(drawn), load_words(drawn + 64)
    g, h = load_words(drawn + 128), load_words(drawn + 192)
    for i in range(begin, end):
        soon = item(indices, min(i + ahead, last))
        if owner(soon, slices) == mine:
            warm(table + soon * size, 128, step)
        row = item(indices, i)
        if owner(row, slices) == mine:
            p, own = table + row * size, splat_word((i - begin) * GOLDEN)
            change_narrow(p, a, add_words(e, own), LANES, kind)
            change_narrow(p + 32, b, add_words(f, own), LANES, kind)
            change_narrow(p + 64, c, add_words(g, own), LANES, kind)
            change_narrow(p + 96, d, add_words(h, own), LANES, kind)


@compiled
def subtract_narrow_16(
    table, size, indices, begin, end, last, gradient, rate, ahead, mine, slices, drawn, count, kind
):
    """At most 16 columns of :func:`subtract_narrow`."""
    change, base = multiply(splat(rate), load_first(gradient, count)), load_words(drawn)
    for i in range(begin, end):
        soon = item(indices, min(i + ahead, last))
        if owner(soon, slices) == mine:
            prefetch(table + soon * size)
        row = item(indices, i)
        if owner(row, slices) == mine:
            own = add_words(base, splat_word((i - begin) * GOLDEN))
            change_narrow(table + row * size, change, own, count, kind)


@compiled
def subtract_narrow(
    table, dim, indices, begin, end, last, gradient, rate, ahead, step, mine, slices, drawn, kind
):
    """w[row] -= rate g for each lookup of a bag whose row is ours, rounded after each.

    The bag's words are in ``drawn``; a lookup is a member of the bag by its place in it.
    """
    size, column = 2 * dim, 0
    while column + 64 <= dim:
        t, g, words = table + 2 * column, gradient + 4 * column, drawn + 4 * column
        subtract_narrow_64(
            *(t, size, indices, begin, end, last, g, rate, ahead, step, mine, slices, words, kind)
        )
        column += 64
    while column < dim:
        t, g, words = table + 2 * column, gradient + 4 * column, drawn + 4 * column
        count = min(LANES, dim - column)
        subtract_narrow_16(
            *(t, size, indices, begin, end, last, g, rate, ahead, mine, slices, words, count, kind)
        )
        column += LANES


@compiled
def change_row(row, gradient, scale, dim, drawn, member, kind):
    """w -= scale g of a whole row, rounded once; ``member`` of the group of ``drawn``."""
    scales, own, column = splat(scale), splat_word(member * GOLDEN), 0
    while column < dim:
        count = min(LANES, dim - column)
        change = multiply(scales, load_first(gradient + 4 * column, count))
        words = add_words(load_words(drawn + 4 * column), own)
        change_narrow(row + 2 * column, change, words, count, kind)
        column += LANES
