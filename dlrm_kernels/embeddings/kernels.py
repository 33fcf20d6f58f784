"""Kernels of the ``fused`` back end on the CPU: all tables in one call.

A kernel reads a job (:mod:`dlrm_kernels.vectors`) whose fields are below. What a unit of
work computes does not depend on which thread takes it, nor (race-free kernels) on how
many units there are, so results are the same bits for every number of threads.

A row of 64 floats lives in four vector registers while its bag is summed or its
gradient subtracted; the row some lookups ahead is prefetched meanwhile. Rows of
other widths are done 64 columns at a time, and then at most 16.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any

from dlrm_kernels import vectors as v
from dlrm_kernels.embeddings.checks import BAD_INDEX, BAD_OFFSET
from dlrm_kernels.embeddings.kernels_narrow import (
    FLOAT,
    Lookups,
    Share,
    changing_numbers,
    draw_words,
    fetched,
    loading_numbers,
    member_words,
    owns,
    store_16,
    words_bytes,
)

# Fields of a job behind the first three. Addresses unless another unit is given.
(
    TABLES,  # T
    BAGS,  # B, bags of each table
    DIM,  # d, floats of a row
    WEIGHTS,  # T addresses of tables
    ROWS,  # T numbers of rows
    INDICES,  # all lookups, table after table
    OFFSETS,  # T x B, where each bag begins in its table's lookups
    STARTS,  # T + 1, where each table's lookups begin
    POOLED,  # forward: T x B x d floats
    GRADIENTS,  # T addresses of B x d gradients
    STRIDES,  # T distances between their rows, bytes
    STATES,  # T addresses of optimiser states
    RATES,  # two floats: learning rate, epsilon
    PLAN,  # UNITS x 3: table, slice, number of slices
    FAULTS,  # forward: UNITS x 2: kind of fault (0: none), position
    SCRATCH,  # per thread or per lookup, as the kernel says
    AHEAD,  # how many lookups ahead a row is prefetched
    KEYS,  # sorted kernels: 2 x N int64, or a region a thread
    KIND,  # sorted kernels: checks.ADAGRAD, ROWWISE or SGD
    STEP,  # bytes from one prefetch of a row to the next
    REGION,  # sorted kernels: bytes of a thread's region of keys; 0: the tables have regions
    FORMAT,  # of the tables' numbers: kernels_narrow.FLOAT, BF16 or HALF
    SEED,  # of the random words by which numbers of 2 bytes are rounded
    UPDATE,  # number of updates before this one
    NUMBERS,  # T numbers of the tables in the model
    WORDS,  # per thread, the random words of a row
    FIELDS,
) = range(3, 30)


@v.compiled
def bag_begin(job, table, bag):
    """Where a bag begins among all lookups; the bag behind the last ends the table."""
    starts = v.field(job, STARTS)
    bags = v.field(job, BAGS)
    if bag == bags:
        return v.item(starts, table + 1)
    return v.item(starts, table) + v.item(v.field(job, OFFSETS), table * bags + bag)


def _summing(registers: int, narrow: bool) -> Any:
    """Make the part of :func:`_bag_sum` for so many vectors of columns.

    A function of its own: in one with the loops over other widths LLVM spent 25 % more
    time in this loop at 50 lookups a bag, and 75 % more at 1.
    """
    zeros, load = v.zeros_in(registers), loading_numbers(registers, narrow)
    line = registers * v.LANES * (2 if narrow else 4)

    @v.compiled
    def sum_columns(table, size, rows, lookups, out, count, kind):
        total = zeros()
        for i in range(lookups.begin, lookups.end):
            if registers > 1:
                v.warm(table + fetched(lookups, i) * size, line, lookups.step)
            else:
                v.prefetch(table + fetched(lookups, i) * size)
            row = v.item(lookups.indices, i)
            if row < 0 or row >= rows:
                return i
            total = v.add(total, load(table + row * size, count, kind))
        if registers > 1:
            v.store_vector(out, total)
        else:
            store_16(out, total, count)
        return -1

    return sum_columns


def _bag_sum(narrow: bool) -> Any:
    sum_64, sum_16, number = _summing(4, narrow), _summing(1, narrow), 2 if narrow else 4

    @v.compiled
    def sum_bag(table, rows, dim, lookups, out, kind):
        """Sum a bag's rows into ``out``; the position of a bad index, or -1."""
        size, column, bad = number * dim, 0, -1
        while column + 64 <= dim and bad < 0:
            t, o = table + number * column, out + 4 * column
            bad = sum_64(t, size, rows, lookups, o, v.LANES, kind)
            column += 64
        while column < dim and bad < 0:
            t, o, count = table + number * column, out + 4 * column, min(v.LANES, dim - column)
            bad = sum_16(t, size, rows, lookups, o, count, kind)
            column += v.LANES
        return bad

    return sum_bag


sum_floats, sum_narrow = _bag_sum(False), _bag_sum(True)


@v.compiled
def pool_bags(job, table, bag, behind, fault):
    """Pool bags ``bag`` to ``behind`` of a table; what is wrong goes to ``fault``."""
    bags, dim, indices = v.field(job, BAGS), v.field(job, DIM), v.field(job, INDICES)
    weights, rows = v.item(v.field(job, WEIGHTS), table), v.item(v.field(job, ROWS), table)
    ahead, step, kind = v.field(job, AHEAD), v.field(job, STEP), v.field(job, FORMAT)
    start = v.item(v.field(job, STARTS), table)
    stop = v.item(v.field(job, STARTS), table + 1)
    offsets = v.field(job, OFFSETS) + 8 * table * bags
    out = v.field(job, POOLED) + 4 * dim * (table * bags + bag)
    begin = start + v.item(offsets, bag)
    if begin < start or (bag == 0 and begin != start):
        v.store_int(fault, BAD_OFFSET)
        v.store_int(fault + 8, table * bags + bag)
        return False
    while bag < behind:
        end = stop if bag + 1 == bags else start + v.item(offsets, bag + 1)
        if begin > end or end > stop:
            v.store_int(fault, BAD_OFFSET)
            v.store_int(fault + 8, table * bags + bag)
            return False
        lookups = Lookups(indices, begin, end, stop - 1, ahead, step)
        if kind == FLOAT:
            bad = sum_floats(weights, rows, dim, lookups, out, kind)
        else:
            bad = sum_narrow(weights, rows, dim, lookups, out, kind)
        if bad >= 0:
            v.store_int(fault, BAD_INDEX)
            v.store_int(fault + 8, bad)
            return False
        begin = end
        bag += 1
        out += 4 * dim
    return True


def forward(job):
    """Pool every bag of every table; a unit is a range of bags."""
    tables, bags = v.field(job, TABLES), v.field(job, BAGS)
    units, faults = v.field(job, v.UNITS), v.field(job, FAULTS)
    unit = v.take_unit(job)
    while unit < units:
        place = tables * bags * unit // units
        behind = tables * bags * (unit + 1) // units
        while place < behind:
            table = place // bags
            bag = place - table * bags
            here = min(bags, bag + behind - place)
            if not pool_bags(job, table, bag, here, faults + 16 * unit):
                break
            place += here - bag
        unit = v.take_unit(job)


def _subtracting(registers: int, narrow: bool, shared: bool) -> Any:
    """Make the part of :func:`_bag_subtraction` for so many vectors of columns.

    Args:
        shared: whether some rows may belong to others.
    """
    load, load_words = loading_numbers(registers, False), v.loads(v.word_vector, registers)
    change_numbers = changing_numbers(registers, narrow)
    line = registers * v.LANES * (2 if narrow else 4)

    @v.compiled
    def subtract_columns(table, size, lookups, gradient, rate, share, drawn, count, kind):
        change = v.multiply(v.splat(rate), load(gradient, count, FLOAT))
        words = load_words(drawn)
        for i in range(lookups.begin, lookups.end):
            soon = fetched(lookups, i)
            if not shared or owns(share, soon):
                if registers > 1:
                    v.warm(table + soon * size, line, lookups.step)
                else:
                    v.prefetch(table + soon * size)
            row = v.item(lookups.indices, i)
            if not shared or owns(share, row):
                member = member_words(words, i - lookups.begin)
                change_numbers(table + row * size, change, member, count, kind)

    return subtract_columns


def _bag_subtraction(narrow: bool) -> Any:
    subtract_64, shared_64 = _subtracting(4, narrow, False), _subtracting(4, narrow, True)
    subtract_16, number = _subtracting(1, narrow, True), 2 if narrow else 4

    @v.compiled
    def subtract_bag(table, dim, lookups, gradient, rate, share, drawn, kind):
        """w[row] -= rate g for each lookup of a bag whose row is of that share.

        Numbers of 2 bytes are rounded after each. The bag's words are in ``drawn``; a lookup
        is a member of the bag by its place in it.
        """
        size, column = number * dim, 0
        while column + 64 <= dim:
            t, g, words = table + number * column, gradient + 4 * column, drawn + 4 * column
            if share.slices == 1:
                subtract_64(t, size, lookups, g, rate, share, words, v.LANES, kind)
            else:
                shared_64(t, size, lookups, g, rate, share, words, v.LANES, kind)
            column += 64
        while column < dim:
            t, g, words = table + number * column, gradient + 4 * column, drawn + 4 * column
            count = min(v.LANES, dim - column)
            subtract_16(t, size, lookups, g, rate, share, words, count, kind)
            column += v.LANES

    return subtract_bag


subtract_floats, subtract_narrow = _bag_subtraction(False), _bag_subtraction(True)


def sgd_owned(job):
    """SGD fused into backward without races: a unit owns all rows, or a share, of a table.

    Every row's updates are done by one thread in the order of the lookups. Numbers of 2 bytes
    are rounded after each.
    """
    kind, seed, update = v.field(job, FORMAT), v.field(job, SEED), v.field(job, UPDATE)
    bags, dim, units = v.field(job, BAGS), v.field(job, DIM), v.field(job, v.UNITS)
    starts, indices, plan = v.field(job, STARTS), v.field(job, INDICES), v.field(job, PLAN)
    ahead, step = v.field(job, AHEAD), v.field(job, STEP)
    rate = v.load_float(v.field(job, RATES))
    drawn = v.field(job, WORDS) + v.enter(job) * words_bytes(dim)
    unit = v.take_unit(job)
    while unit < units:
        table = v.item(plan, 3 * unit)
        share = Share(v.item(plan, 3 * unit + 1), v.item(plan, 3 * unit + 2))
        weights = v.item(v.field(job, WEIGHTS), table)
        gradient = v.item(v.field(job, GRADIENTS), table)
        stride = v.item(v.field(job, STRIDES), table)
        last = v.item(starts, table + 1) - 1
        begin = v.item(starts, table)
        for bag in range(bags):
            end = bag_begin(job, table, bag + 1)
            lookups = Lookups(indices, begin, end, last, ahead, step)
            if kind == FLOAT:
                subtract_floats(weights, dim, lookups, gradient, rate, share, drawn, kind)
            elif begin < end:
                draw_words(drawn, seed, bag, v.item(v.field(job, NUMBERS), table), update, dim)
                subtract_narrow(weights, dim, lookups, gradient, rate, share, drawn, kind)
            begin = end
            gradient += stride
        unit = v.take_unit(job)
