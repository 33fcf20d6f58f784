"""Rows of 2 bytes a number on the CPU: widened, summed, changed and rounded stochastically.

What :mod:`dlrm_kernels.embeddings.kernels` and ``kernels_sorted`` do with a row of float32
is done here with one of bf16 or fp16. The law of the random words is that of
:mod:`dlrm_core.rounding`: a block of words is drawn once for a group of rows or for a bag,
and a member of the group adds its multiple of the golden ratio.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any, NamedTuple

from dlrm_core.rounding import GOLDEN, LANES, MULTIPLIERS, PHILOX_ROUNDS, WEYL, WORDS
from dlrm_kernels.vectors import (
    add,
    add_words,
    compiled,
    from_bf16,
    from_half,
    inlined,
    item,
    lane_numbers,
    load_first,
    load_first_shorts,
    load_words,
    loads,
    multiply,
    multiply_high,
    multiply_low,
    owner,
    prefetch,
    round_to_bf16,
    round_to_half,
    short_vector,
    splat,
    splat_word,
    store_first,
    store_first_shorts,
    store_shorts,
    store_vector,
    store_words,
    subtract,
    vector,
    warm,
    word_vector,
    xor_words,
    zeros_in,
)

FLOAT, BF16, HALF = 0, 1, 2
"""Formats of a table's numbers."""


class Lookups(NamedTuple):
    """Lookups of a bag, and how far before its use a row is fetched."""

    indices: int
    """Address of all lookups."""
    begin: int
    end: int
    last: int
    """The table's last lookup."""
    ahead: int
    step: int


class Share(NamedTuple):
    """Which of the slices of a table's rows a unit of work owns."""

    mine: int
    slices: int


@compiled
def fetched(lookups, i):
    """The row to fetch while that of lookup ``i`` is used."""
    return item(lookups.indices, min(i + lookups.ahead, lookups.last))


@compiled
def owns(share, row):
    """Whether a row belongs to a share."""
    return owner(row, share.slices) == share.mine


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


def _loading(registers: int) -> Any:
    load = loads(short_vector, registers)

    @compiled
    def load_narrow(address, count, kind):
        """So many vectors as float32; of a single one the first ``count``, at most."""
        if registers > 1 or count >= LANES:
            return widen(load(address), kind)
        return widen(load_first_shorts(address, count), kind)

    return load_narrow


def _changing(registers: int) -> Any:
    load = _loading(registers)

    @inlined
    def change_numbers(address, change, drawn, count, kind):
        """w - change of the numbers that :func:`_loading` names, rounded by words."""
        value = subtract(load(address, count, kind), change)
        if kind == BF16:
            rounded = round_to_bf16(value, drawn)
        else:
            rounded = round_to_half(value, drawn)
        if registers > 1 or count >= LANES:
            store_shorts(address, rounded)
        else:
            store_first_shorts(address, rounded, count)

    return change_numbers


change_64, change_16 = _changing(4), _changing(1)


def _summing(registers: int) -> Any:
    """Make the part of :func:`sum_narrow` for so many vectors of columns."""
    zeros, load, line = zeros_in(registers), _loading(registers), 32 * registers

    @compiled
    def sum_columns(table, size, rows, lookups, out, count, kind):
        total = zeros()
        for i in range(lookups.begin, lookups.end):
            if registers > 1:
                warm(table + fetched(lookups, i) * size, line, lookups.step)
            else:
                prefetch(table + fetched(lookups, i) * size)
            row = item(lookups.indices, i)
            if row < 0 or row >= rows:
                return i
            total = add(total, load(table + row * size, count, kind))
        if registers > 1:
            store_vector(out, total)
        else:
            store_first(out, total, count)
        return -1

    return sum_columns


sum_narrow_64, sum_narrow_16 = _summing(4), _summing(1)


@compiled
def sum_narrow(table, rows, dim, lookups, out, kind):
    """Sum a bag's rows into ``out``; the position of a bad index, or -1."""
    size, column, bad = 2 * dim, 0, -1
    while column + 64 <= dim and bad < 0:
        t, o = table + 2 * column, out + 4 * column
        bad = sum_narrow_64(t, size, rows, lookups, o, LANES, kind)
        column += 64
    while column < dim and bad < 0:
        t, o, count = table + 2 * column, out + 4 * column, min(LANES, dim - column)
        bad = sum_narrow_16(t, size, rows, lookups, o, count, kind)
        column += LANES
    return bad


def _subtracting(registers: int) -> Any:
    """Make the part of :func:`subtract_narrow` for so many vectors of columns."""
    load, load_drawn = loads(vector, registers), loads(word_vector, registers)
    change_numbers, line = _changing(registers), 32 * registers

    @compiled
    def subtract_columns(table, size, lookups, gradient, rate, share, drawn, count, kind):
        if registers > 1:
            change = multiply(splat(rate), load(gradient))
        else:
            change = multiply(splat(rate), load_first(gradient, count))
        words = load_drawn(drawn)
        for i in range(lookups.begin, lookups.end):
            soon = fetched(lookups, i)
            if owns(share, soon):
                if registers > 1:
                    warm(table + soon * size, line, lookups.step)
                else:
                    prefetch(table + soon * size)
            row = item(lookups.indices, i)
            if owns(share, row):
                member = splat_word((i - lookups.begin) * GOLDEN)
                change_numbers(table + row * size, change, add_words(words, member), count, kind)

    return subtract_columns


subtract_narrow_64, subtract_narrow_16 = _subtracting(4), _subtracting(1)


@compiled
def subtract_narrow(table, dim, lookups, gradient, rate, share, drawn, kind):
    """w[row] -= rate g for each lookup of a bag whose row is ours, rounded after each.

    The bag's words are in ``drawn``; a lookup is a member of the bag by its place in it.
    """
    size, column = 2 * dim, 0
    while column + 64 <= dim:
        t, g, words = table + 2 * column, gradient + 4 * column, drawn + 4 * column
        subtract_narrow_64(t, size, lookups, g, rate, share, words, LANES, kind)
        column += 64
    while column < dim:
        t, g, words = table + 2 * column, gradient + 4 * column, drawn + 4 * column
        count = min(LANES, dim - column)
        subtract_narrow_16(t, size, lookups, g, rate, share, words, count, kind)
        column += LANES


@compiled
def change_row(row, gradient, scale, dim, drawn, member, kind):
    """w -= scale g of a whole row, rounded once; ``member`` of the group of ``drawn``."""
    scales, added, column = splat(scale), splat_word(member * GOLDEN), 0
    while column < dim:
        count = min(LANES, dim - column)
        change = multiply(scales, load_first(gradient + 4 * column, count))
        words = add_words(load_words(drawn + 4 * column), added)
        change_16(row + 2 * column, change, words, count, kind)
        column += LANES
