"""Kernels of the ``fused`` back end on the CPU: all tables in one call.

A kernel reads a job (:mod:`dlrm_kernels.vectors`) whose fields are below. What a unit of
work computes does not depend on which thread takes it, nor (race-free kernels) on how
many units there are, so results are the same bits for every number of threads.

A row of 64 floats lives in four vector registers while its bag is summed or its
gradient subtracted; the row some lookups ahead is prefetched meanwhile. Rows of
other widths are done 64, 16 and then 1 column at a time.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Any

from dlrm_kernels.embeddings.checks import BAD_INDEX, BAD_OFFSET
from dlrm_kernels.embeddings.kernels_narrow import (
    FLOAT,
    Lookups,
    Share,
    draw_words,
    fetched,
    owns,
    subtract_narrow,
    sum_narrow,
    words_bytes,
)
from dlrm_kernels.vectors import (
    UNITS,
    add,
    compiled,
    enter,
    field,
    item,
    load_float,
    load_vector,
    loads,
    multiply,
    prefetch,
    splat,
    store_float,
    store_int,
    store_vector,
    subtract,
    take_unit,
    vector,
    warm,
    zeros_in,
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


@compiled
def bag_begin(job, table, bag):
    """Where a bag begins among all lookups; the bag behind the last ends the table."""
    starts = field(job, STARTS)
    bags = field(job, BAGS)
    if bag == bags:
        return item(starts, table + 1)
    return item(starts, table) + item(field(job, OFFSETS), table * bags + bag)


def _summing(registers: int) -> Any:
    """Make the part of :func:`sum_bag` for so many vectors of columns.

    A function of its own: in one with the loops over other widths LLVM spent 25 % more
    time in this loop at 50 lookups a bag, and 75 % more at 1.
    """
    zeros, load, line = zeros_in(registers), loads(vector, registers), 64 * registers

    @compiled
    def sum_columns(table, size, rows, lookups, out):
        total = zeros()
        for i in range(lookups.begin, lookups.end):
            if registers > 1:
                warm(table + fetched(lookups, i) * size, line, lookups.step)
            else:
                prefetch(table + fetched(lookups, i) * size)
            row = item(lookups.indices, i)
            if row < 0 or row >= rows:
                return i
            total = add(total, load(table + row * size))
        store_vector(out, total)
        return -1

    return sum_columns


sum_64, sum_16 = _summing(4), _summing(1)


@compiled
def sum_few(table, size, rows, lookups, out, count):
    """Fewer than 16 columns of :func:`sum_bag`."""
    for k in range(count):
        store_float(out + 4 * k, 0)
    for i in range(lookups.begin, lookups.end):
        prefetch(table + fetched(lookups, i) * size)
        row = item(lookups.indices, i)
        if row < 0 or row >= rows:
            return i
        for k in range(count):
            p = out + 4 * k
            store_float(p, load_float(p) + load_float(table + row * size + 4 * k))
    return -1


@compiled
def sum_bag(table, rows, dim, lookups, out):
    """Sum a bag's rows into ``out``; the position of a bad index, or -1."""
    size, column, bad = 4 * dim, 0, -1
    while column + 64 <= dim and bad < 0:
        bad = sum_64(table + 4 * column, size, rows, lookups, out + 4 * column)
        column += 64
    while column + 16 <= dim and bad < 0:
        bad = sum_16(table + 4 * column, size, rows, lookups, out + 4 * column)
        column += 16
    if column < dim and bad < 0:
        bad = sum_few(table + 4 * column, size, rows, lookups, out + 4 * column, dim - column)
    return bad


@compiled
def pool_bags(job, table, bag, behind, fault):
    """Pool bags ``bag`` to ``behind`` of a table; what is wrong goes to ``fault``."""
    bags, dim, indices = field(job, BAGS), field(job, DIM), field(job, INDICES)
    weights, rows = item(field(job, WEIGHTS), table), item(field(job, ROWS), table)
    ahead, step, kind = field(job, AHEAD), field(job, STEP), field(job, FORMAT)
    start = item(field(job, STARTS), table)
    stop = item(field(job, STARTS), table + 1)
    offsets = field(job, OFFSETS) + 8 * table * bags
    out = field(job, POOLED) + 4 * dim * (table * bags + bag)
    begin = start + item(offsets, bag)
    if begin < start or (bag == 0 and begin != start):
        store_int(fault, BAD_OFFSET)
        store_int(fault + 8, table * bags + bag)
        return False
    while bag < behind:
        end = stop if bag + 1 == bags else start + item(offsets, bag + 1)
        if begin > end or end > stop:
            store_int(fault, BAD_OFFSET)
            store_int(fault + 8, table * bags + bag)
            return False
        lookups = Lookups(indices, begin, end, stop - 1, ahead, step)
        if kind == FLOAT:
            bad = sum_bag(weights, rows, dim, lookups, out)
        else:
            bad = sum_narrow(weights, rows, dim, lookups, out, kind)
        if bad >= 0:
            store_int(fault, BAD_INDEX)
            store_int(fault + 8, bad)
            return False
        begin = end
        bag += 1
        out += 4 * dim
    return True


def forward(job):
    """Pool every bag of every table; a unit is a range of bags."""
    tables, bags = field(job, TABLES), field(job, BAGS)
    units, faults = field(job, UNITS), field(job, FAULTS)
    unit = take_unit(job)
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
        unit = take_unit(job)


def _subtracting(registers: int, shared: bool) -> Any:
    """Make the part of :func:`subtract_bag` for so many vectors of columns.

    Args:
        shared: whether some rows may belong to others.
    """
    load, line = loads(vector, registers), 64 * registers

    @compiled
    def subtract_columns(table, size, lookups, gradient, rate, share):
        change = multiply(splat(rate), load(gradient))
        for i in range(lookups.begin, lookups.end):
            soon = fetched(lookups, i)
            if not shared or owns(share, soon):
                if registers > 1:
                    warm(table + soon * size, line, lookups.step)
                else:
                    prefetch(table + soon * size)
            row = item(lookups.indices, i)
            if not shared or owns(share, row):
                p = table + row * size
                store_vector(p, subtract(load(p), change))

    return subtract_columns


subtract_64, subtract_64_shared = _subtracting(4, False), _subtracting(4, True)
subtract_16 = _subtracting(1, True)


@compiled
def subtract_few(table, size, lookups, gradient, rate, share, count):
    """Fewer than 16 columns of :func:`subtract_bag`."""
    for i in range(lookups.begin, lookups.end):
        soon = fetched(lookups, i)
        if owns(share, soon):
            prefetch(table + soon * size)
        row = item(lookups.indices, i)
        if owns(share, row):
            for k in range(count):
                p = table + row * size + 4 * k
                store_float(p, load_float(p) - rate * load_float(gradient + 4 * k))


@compiled
def subtract_bag(table, dim, lookups, gradient, rate, share):
    """w[row] -= rate g for each lookup of a bag whose row is of that share."""
    size, column = 4 * dim, 0
    while column + 64 <= dim:
        t, g = table + 4 * column, gradient + 4 * column
        if share.slices == 1:
            subtract_64(t, size, lookups, g, rate, share)
        else:
            subtract_64_shared(t, size, lookups, g, rate, share)
        column += 64
    while column + 16 <= dim:
        t, g = table + 4 * column, gradient + 4 * column
        subtract_16(t, size, lookups, g, rate, share)
        column += 16
    if column < dim:
        t, g, rest = table + 4 * column, gradient + 4 * column, dim - column
        subtract_few(t, size, lookups, g, rate, share, rest)


@compiled
def subtract_scaled(row, gradient, scale, dim):
    """w -= scale g."""
    scales, column = splat(scale), 0
    while column + 16 <= dim:
        at = 4 * column
        change = multiply(scales, load_vector(gradient + at))
        store_vector(row + at, subtract(load_vector(row + at), change))
        column += 16
    while column < dim:
        at = 4 * column
        store_float(row + at, load_float(row + at) - scale * load_float(gradient + at))
        column += 1


def sgd_owned(job):
    """SGD fused into backward without races: a unit owns all rows, or a share, of a table.

    Every row's updates are done by one thread in the order of the lookups. Numbers of 2 bytes
    are rounded after each.
    """
    kind, seed, update = field(job, FORMAT), field(job, SEED), field(job, UPDATE)
    bags, dim, units = field(job, BAGS), field(job, DIM), field(job, UNITS)
    starts, indices, plan = field(job, STARTS), field(job, INDICES), field(job, PLAN)
    ahead, step = field(job, AHEAD), field(job, STEP)
    rate = load_float(field(job, RATES))
    drawn = field(job, WORDS) + enter(job) * words_bytes(dim)
    unit = take_unit(job)
    while unit < units:
        table = item(plan, 3 * unit)
        share = Share(item(plan, 3 * unit + 1), item(plan, 3 * unit + 2))
        weights = item(field(job, WEIGHTS), table)
        gradient, stride = item(field(job, GRADIENTS), table), item(field(job, STRIDES), table)
        last = item(starts, table + 1) - 1
        begin = item(starts, table)
        for bag in range(bags):
            end = bag_begin(job, table, bag + 1)
            lookups = Lookups(indices, begin, end, last, ahead, step)
            if kind == FLOAT:
                subtract_bag(weights, dim, lookups, gradient, rate, share)
            elif begin < end:
                draw_words(drawn, seed, bag, item(field(job, NUMBERS), table), update, dim)
                subtract_narrow(weights, dim, lookups, gradient, rate, share, drawn, kind)
            begin = end
            gradient += stride
        unit = take_unit(job)
