"""Adagrad and row-wise Adagrad fused into the backward pass, on the CPU; SGD rounded once a row.

Both need a row's whole gradient before its update (unlike SGD, which may subtract
lookup by lookup), so a unit sorts its lookups by row: a stable radix sort of keys
``row B' + bag`` (B' the least power of two not below B) by the bits of the row. Then
each row's gradients are summed in the order of the bags and the row is updated once.
Where most rows come up once, those rows' gradient is their bag's: they are updated bag after
bag, as SGD updates, and only the rows that come up again are sorted.
A unit owns all rows of a table or a hashed share of them, so no two threads meet,
and every row's sum has one order: the bits do not depend on the number of threads.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dlrm_kernels import vectors as v
from dlrm_kernels.embeddings import kernels as k
from dlrm_kernels.embeddings.checks import ADAGRAD, ROWWISE, SGD
from dlrm_kernels.embeddings.kernels_narrow import (
    FLOAT,
    Lookups,
    Share,
    changing_numbers,
    changing_rows,
    draw_words,
    fetched,
    loading_numbers,
    member_words,
    owns,
    store_16,
    words_bytes,
)
from dlrm_kernels.rounding import GROUP_BITS

DIGIT_BITS = 11
"""Most bits sorted in one pass: 2048 counters fit the first-level cache."""

MOST_SLOT_BITS = 20
"""Slots of the map of rows, at most: at two bits each they take 256 KiB of the second-level cache.
Rows of a larger table share slots; one that shares is sorted, as if it came up again."""

MAP_BYTES = (2 << MOST_SLOT_BITS) // 8

FEW = 0.5
"""Share of a unit's lookups that may find their slot taken, for the others to be done unsorted."""


class Run(NamedTuple):
    """Sorted keys of one row, and the gradients of the bags that they name."""

    keys: int
    begin: int
    end: int
    mask: int
    """Of a key's bits those of the bag."""
    gradients: int
    stride: int


class Rates(NamedTuple):
    """Learning rate and epsilon."""

    rate: float
    epsilon: float


class Marks(NamedTuple):
    """The map of :func:`mark_rows`, and the bits of a slot's number."""

    slots: int
    bits: int


load_64, load_words_64, zeros_64 = v.loads(v.vector, 4), v.loads(v.word_vector, 4), v.zeros_in(4)
load_16, change_row = loading_numbers(1, False), changing_rows(False)
change_64 = changing_numbers(4, False)


@v.compiled
def thread_bytes(dim):
    """Bytes of scratch of one thread: counters of the sort, the map of rows, a row's gradient."""
    return 8 * (1 << DIGIT_BITS) + MAP_BYTES + 4 * ((dim + 15) // 16 * 16)


@v.compiled
def bits_for(count):
    """Bits that tell 0 .. count - 1 apart."""
    bits = 0
    while (1 << bits) < count:
        bits += 1
    return bits


@v.compiled
def first_place(job, table, share):
    """The place of a slice's first key: slices of a table share its region, one by one."""
    indices, starts = v.field(job, k.INDICES), v.field(job, k.STARTS)
    begin, end = v.item(starts, table), v.item(starts, table + 1)
    place = begin
    if share.slices > 1:
        for i in range(begin, end):
            if v.owner(v.item(indices, i), share.slices) < share.mine:
                place += 1
    return place


@v.compiled
def comes_again(marks, row):
    """Whether the map of :func:`mark_rows` has a row's slot as taken more than once."""
    slot = row & ((1 << marks.bits) - 1)
    return (v.item(marks.slots, slot >> 5) >> (2 * (slot & 31) + 1)) & 1


@v.compiled
def collect(job, table, share, shift, keys, few, marks):
    """Write the keys of a slice's lookups, bag after bag; their number.

    Args:
        few: whether only those that come again are written.
    """
    indices, count = v.field(job, k.INDICES), 0
    for bag in range(v.field(job, k.BAGS)):
        for i in range(k.bag_begin(job, table, bag), k.bag_begin(job, table, bag + 1)):
            row = v.item(indices, i)
            if few and not comes_again(marks, row):
                continue
            if share.slices == 1 or owns(share, row):
                v.store_int(keys + 8 * count, (row << shift) | bag)
                count += 1
    return count


@v.compiled
def mark_rows(job, table, share, marks):
    """Note in two bits a slot which rows a slice looks up, and which it looks up again.

    Returns:
        Whether few lookups found their slot taken; the map is whole only then.
    """
    indices, starts = v.field(job, k.INDICES), v.field(job, k.STARTS)
    begin, end = v.item(starts, table), v.item(starts, table + 1)
    mask, again, counted = (1 << marks.bits) - 1, 0, 0
    early = begin + (end - begin) // 8
    for word in range(((1 << marks.bits) + 31) // 32):
        v.store_int(marks.slots + 8 * word, 0)
    for i in range(begin, end):
        if i == early and again > FEW * counted:
            return False
        row = v.item(indices, i)
        if share.slices == 1 or owns(share, row):
            slot = row & mask
            at, shift = marks.slots + 8 * (slot >> 5), 2 * (slot & 31)
            word = v.item(at, 0)
            taken = (word >> shift) & 1
            v.store_int(at, word | ((1 | (taken << 1)) << shift))
            again += taken
            counted += 1
    return again <= FEW * counted


@v.compiled
def sort_keys(keys, other, count, shift, bits, counters):
    """Radix sort of ``count`` keys by ``bits`` bits from ``shift`` up; where the result is."""
    passes = (bits + DIGIT_BITS - 1) // DIGIT_BITS
    if passes == 0:
        return keys
    width = (bits + passes - 1) // passes
    mask = (1 << width) - 1
    for number in range(passes):
        low = shift + number * width
        for digit in range(mask + 1):
            v.store_int(counters + 8 * digit, 0)
        for i in range(count):
            slot = counters + 8 * ((v.item(keys, i) >> low) & mask)
            v.store_int(slot, v.item(slot, 0) + 1)
        total = 0
        for digit in range(mask + 1):
            here = v.item(counters, digit)
            v.store_int(counters + 8 * digit, total)
            total += here
        for i in range(count):
            key = v.item(keys, i)
            slot = counters + 8 * ((key >> low) & mask)
            place = v.item(slot, 0)
            v.store_int(slot, place + 1)
            v.store_int(other + 8 * place, key)
        keys, other = other, keys
    return keys


def _summing(registers: int) -> Any:
    """Make the part of :func:`sum_gradients` for so many vectors of columns.

    The sum stays in registers.
    """
    zeros, load = v.zeros_in(registers), v.loads(v.vector, registers)

    @v.inlined
    def sum_columns(run, at):
        total = zeros()
        for i in range(run.begin, run.end):
            total = v.add(
                total, load(run.gradients + at + (v.item(run.keys, i) & run.mask) * run.stride)
            )
        return total

    return sum_columns


sum_64, sum_16 = _summing(4), _summing(1)


@v.inlined
def squares_of(total):
    """The sum of the squares of a vector, or of several."""
    return v.lane_sum(v.register_sum(v.multiply(total, total)))


@v.compiled
def sum_few(run, at, out, count):
    """Fewer than 16 columns of :func:`sum_gradients`."""
    squares = np.float32(0)
    for column in range(count):
        one = np.float32(0)
        for i in range(run.begin, run.end):
            place = run.gradients + at + (v.item(run.keys, i) & run.mask) * run.stride
            one += v.load_float(place + 4 * column)
        v.store_float(out + 4 * column, one)
        squares += one * one
    return squares


@v.compiled
def sum_gradients(run, dim, out):
    """Sum the gradients of a row's bags into ``out``; its sum of squares."""
    squares, column = np.float32(0), 0
    while column + 64 <= dim:
        whole = sum_64(run, 4 * column)
        v.store_vector(out + 4 * column, whole)
        squares += squares_of(whole)
        column += 64
    while column + 16 <= dim:
        total = sum_16(run, 4 * column)
        v.store_vector(out + 4 * column, total)
        squares += squares_of(total)
        column += 16
    if column < dim:
        squares += sum_few(run, 4 * column, out + 4 * column, dim - column)
    return squares


@v.compiled
def rowwise_scale(state, mean_square, rates):
    """s += mean(g^2) of a row; rate / (sqrt(s) + eps)."""
    total = v.load_float(state) + mean_square
    v.store_float(state, total)
    return rates.rate / (np.sqrt(total) + rates.epsilon)


@v.inlined
def adagrad_change(state, gradient, count, rates):
    """s += g^2 of at most 16 weights; rate g / (sqrt(s) + eps)."""
    g = load_16(gradient, count, FLOAT)
    s = v.add(load_16(state, count, FLOAT), v.multiply(g, g))
    store_16(state, s, count)
    root = v.add(v.square_root(s), v.splat(rates.epsilon))
    return v.divide(v.multiply(v.splat(rates.rate), g), root)


@v.compiled
def end_of_row(keys, begin, count, shift):
    """Behind the last of the keys that have the row of ``keys[begin]``."""
    row, end = v.item(keys, begin) >> shift, begin + 1
    while end < count and v.item(keys, end) >> shift == row:
        end += 1
    return end


@v.compiled
def rates_of(job):
    return Rates(v.load_float(v.field(job, k.RATES)), v.load_float(v.field(job, k.RATES) + 4))


@v.compiled
def table_of(job, table):
    """Addresses of a table's weights, state and gradients, and bytes from bag to bag of these."""
    return (
        v.item(v.field(job, k.WEIGHTS), table),
        v.item(v.field(job, k.STATES), table),
        v.item(v.field(job, k.GRADIENTS), table),
        v.item(v.field(job, k.STRIDES), table),
    )


def _rowwise_64(narrow: bool) -> Any:
    change_numbers = changing_numbers(4, narrow)

    @v.compiled
    def update_row(row, state, run, rates, drawn, member, form):
        """Row-wise Adagrad of a row of 64 numbers, its gradient in registers throughout.

        The same operations in the same order as for other widths.
        """
        gradient = sum_64(run, 0)
        scale = rowwise_scale(state, squares_of(gradient) / np.float32(64), rates)
        words = member_words(load_words_64(drawn), member) if narrow else 0
        change_numbers(row, v.multiply(v.splat(scale), gradient), words, v.LANES, form)

    return update_row


def _adagrad(narrow: bool) -> Any:
    change_numbers, size = changing_numbers(1, narrow), 2 if narrow else 4

    @v.compiled
    def update_row(row, state, gradient, dim, rates, drawn, member, form):
        """s += g^2; w -= rate g / (sqrt(s) + eps), weight by weight."""
        for column in range(0, dim, v.LANES):
            at, count = 4 * column, min(v.LANES, dim - column)
            change = adagrad_change(state + at, gradient + at, count, rates)
            words = member_words(v.load_words(drawn + at), member) if narrow else 0
            change_numbers(row + size * column, change, words, count, form)

    return update_row


def _updating(narrow: bool) -> Any:
    """Make what updates every row of the sorted keys, once.

    Args:
        narrow: whether numbers have 2 bytes, and are rounded.
    """
    rowwise_64, adagrad, change = _rowwise_64(narrow), _adagrad(narrow), changing_rows(narrow)
    number = 2 if narrow else 4

    @v.compiled
    def update_rows(job, table, keys, count, shift, thread, out):
        dim, kind, form = v.field(job, k.DIM), v.field(job, k.KIND), v.field(job, k.FORMAT)
        ahead, step, size = v.field(job, k.AHEAD), v.field(job, k.STEP), number * dim
        weights, states, gradients, stride = table_of(job, table)
        drawn = v.field(job, k.WORDS) + thread * words_bytes(dim)
        state_bytes = 4 * dim if kind == ADAGRAD else 4
        rates, mask, begin, group, member = rates_of(job), (1 << shift) - 1, 0, -1, 0
        while begin < count:
            end = end_of_row(keys, begin, count, shift)
            soon = v.item(keys, min(end + ahead, count - 1)) >> shift
            v.warm(weights + soon * size, size, step)
            if kind != SGD:
                v.warm(states + soon * state_bytes, state_bytes, step)
            row, run = v.item(keys, begin) >> shift, Run(keys, begin, end, mask, gradients, stride)
            begin = end
            if narrow:
                if row >> GROUP_BITS != group:
                    group, seed = row >> GROUP_BITS, v.field(job, k.SEED)
                    named, update = v.item(v.field(job, k.NUMBERS), table), v.field(job, k.UPDATE)
                    draw_words(drawn, seed, group, named, update, dim)
                member = row & ((1 << GROUP_BITS) - 1)
            w, s = weights + row * size, states + row * state_bytes
            if kind == ROWWISE and dim == 64:
                rowwise_64(w, s, run, rates, drawn, member, form)
                continue
            squares, scale = sum_gradients(run, dim, out), rates.rate
            if kind == ADAGRAD:
                adagrad(w, s, out, dim, rates, drawn, member, form)
                continue
            if kind == ROWWISE:
                scale = rowwise_scale(s, squares / np.float32(dim), rates)
            change(w, out, scale, dim, drawn, member, form)

    return update_rows


adagrad_row, update_rows, update_narrow_rows = _adagrad(False), _updating(False), _updating(True)


@v.compiled
def rowwise_lone_64(w, s, g, lookups, share, rates, marks, place, keys, count):
    """Row-wise Adagrad of a bag's lone rows of 64 floats, the bag's gradient in registers.

    Args:
        place: the bag's number, and the bits that a key has for one.

    Returns:
        Number of keys, with those of the bag's other rows.
    """
    bag, shift = place
    gradient = v.add(zeros_64(), load_64(g))
    mean_square = squares_of(gradient) / np.float32(64)
    for i in range(lookups.begin, lookups.end):
        soon = fetched(lookups, i)
        if share.slices == 1 or owns(share, soon):
            v.warm(w + soon * 256, 256, lookups.step)
            v.prefetch(s + soon * 4)
        row = v.item(lookups.indices, i)
        if share.slices == 1 or owns(share, row):
            if comes_again(marks, row):
                v.store_int(keys + 8 * count, (row << shift) | bag)
                count += 1
            else:
                scale = rowwise_scale(s + row * 4, mean_square, rates)
                change = v.multiply(v.splat(scale), gradient)
                change_64(w + row * 256, change, 0, v.LANES, FLOAT)
    return count


@v.compiled
def update_lone_rows(job, table, share, shift, keys, marks, number, out):
    """Update the rows whose slot was taken once, bag after bag; the others' keys are written.

    A lone row gets the bits that it would get if it were sorted.

    Args:
        number: place for a bag's number.

    Returns:
        Number of keys.
    """
    dim, kind = v.field(job, k.DIM), v.field(job, k.KIND)
    ahead, step = v.field(job, k.AHEAD), v.field(job, k.STEP)
    indices, last = v.field(job, k.INDICES), v.item(v.field(job, k.STARTS), table + 1) - 1
    w, s, g, stride = table_of(job, table)
    rates, size, state_size, count = rates_of(job), 4 * dim, 4 * dim, 0
    if kind == ROWWISE:
        state_size = 4
    for bag in range(v.field(job, k.BAGS)):
        begin, end = k.bag_begin(job, table, bag), k.bag_begin(job, table, bag + 1)
        lookups = Lookups(indices, begin, end, last, ahead, step)
        if kind == ROWWISE and dim == 64:
            count = rowwise_lone_64(
                w, s, g + bag * stride, lookups, share, rates, marks, (bag, shift), keys, count
            )
            continue
        v.store_int(number, bag)
        mean_square = sum_gradients(Run(number, 0, 1, -1, g, stride), dim, out) / np.float32(dim)
        for i in range(begin, end):
            soon = fetched(lookups, i)
            if share.slices == 1 or owns(share, soon):
                v.warm(w + soon * size, size, step)
                v.warm(s + soon * state_size, state_size, step)
            row = v.item(indices, i)
            if share.slices > 1 and not owns(share, row):
                continue
            if comes_again(marks, row):
                v.store_int(keys + 8 * count, (row << shift) | bag)
                count += 1
            elif kind == ROWWISE:
                scale = rowwise_scale(s + row * 4, mean_square, rates)
                change_row(w + row * size, out, scale, dim, 0, 0, FLOAT)
            else:
                adagrad_row(w + row * size, s + row * size, out, dim, rates, 0, 0, FLOAT)
    return count


@v.compiled
def sorted_lookups(job, unit, thread, updates):
    """Sort a unit's lookups by row, less those of lone rows where they are many.

    Args:
        updates: whether lone rows are updated meanwhile.

    Returns:
        The sorted keys and their number.
    """
    plan, starts, region = v.field(job, k.PLAN), v.field(job, k.STARTS), v.field(job, k.REGION)
    table = v.item(plan, 3 * unit)
    share = Share(v.item(plan, 3 * unit + 1), v.item(plan, 3 * unit + 2))
    counters = v.field(job, k.SCRATCH) + thread * thread_bytes(v.field(job, k.DIM))
    slots = counters + 8 * (1 << DIGIT_BITS)
    shift, bits = bits_for(v.field(job, k.BAGS)), bits_for(v.item(v.field(job, k.ROWS), table))
    base, apart = v.field(job, k.KEYS), 8 * v.item(starts, v.field(job, k.TABLES))
    if region > 0:
        # the same memory for table after table: it stays in the cache
        base += thread * region - 8 * v.item(starts, table)
        apart = region // 2
    keys = base + 8 * first_place(job, table, share)
    marks = Marks(slots, min(bits, MOST_SLOT_BITS))
    few = v.field(job, k.FORMAT) == FLOAT and mark_rows(job, table, share, marks)
    if few and updates:
        out = slots + MAP_BYTES
        count = update_lone_rows(job, table, share, shift, keys, marks, counters, out)
    else:
        count = collect(job, table, share, shift, keys, few, marks)
    return sort_keys(keys, keys + apart, count, shift, bits, counters), count


def adagrad_owned(job):
    """Update every row that was looked up, once; a unit owns rows of a table."""
    thread, shift = v.enter(job), bits_for(v.field(job, k.BAGS))
    out = v.field(job, k.SCRATCH) + thread * thread_bytes(v.field(job, k.DIM))
    out += 8 * (1 << DIGIT_BITS) + MAP_BYTES
    unit = v.take_unit(job)
    while unit < v.field(job, v.UNITS):
        table = v.item(v.field(job, k.PLAN), 3 * unit)
        keys, count = sorted_lookups(job, unit, thread, True)
        if v.field(job, k.FORMAT) != FLOAT:
            update_narrow_rows(job, table, keys, count, shift, thread, out)
        else:
            update_rows(job, table, keys, count, shift, thread, out)
        unit = v.take_unit(job)


def sort_alone(job):
    """Sort as :func:`adagrad_owned` does and update no row: what sorting takes, timed apart."""
    thread, unit = v.enter(job), v.take_unit(job)
    while unit < v.field(job, v.UNITS):
        sorted_lookups(job, unit, thread, False)
        unit = v.take_unit(job)
