"""Kernels of the ``fused`` back end on the CPU: all tables in one call.

Each kernel is one C function ``void kernel(int64 job)``: ``job`` is the address of a
block of int64 (fields below), so that any thread pool can run it. Every thread that
enters takes units of work by an atomic counter until none is left; what a unit
computes does not depend on which thread takes it, nor (race-free kernels) on how
many units there are, so results are the same bits for every number of threads.

A row of 64 floats lives in four vector registers while its bag is summed or its
gradient subtracted; the row some lookups ahead is prefetched meanwhile. Rows of
other widths are done 64, 16 and then 1 column at a time.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from dlrm_core.embeddings.checks import BAD_INDEX, BAD_OFFSET, NO_FAULT
from dlrm_core.embeddings.vectors import (
    add,
    atomic_add_int,
    compiled,
    load_float,
    load_int,
    load_vector,
    multiply,
    prefetch,
    splat,
    store_float,
    store_int,
    store_vector,
    subtract,
    zeros,
)

# Fields of a job. Addresses unless another unit is given.
NEXT_UNIT = 0  # number of units taken so far
UNITS = 1  # number of units
ENTERED = 2  # number of threads that have entered
TABLES = 3  # T
BAGS = 4  # B, bags of each table
DIM = 5  # d, floats of a row
WEIGHTS = 6  # T addresses of tables
ROWS = 7  # T numbers of rows
INDICES = 8  # all lookups, table after table
OFFSETS = 9  # T x B, where each bag begins in its table's lookups
STARTS = 10  # T + 1, where each table's lookups begin
POOLED = 11  # forward: T x B x d floats
GRADIENTS = 12  # T addresses of B x d gradients
STRIDES = 13  # T distances between their rows, bytes
STATES = 14  # T addresses of optimiser states
RATES = 15  # two floats: learning rate, epsilon
PLAN = 16  # UNITS x 3: table, slice, number of slices
FAULTS = 17  # forward: UNITS x 2: kind of fault (0: none), position
SCRATCH = 18  # per thread or per lookup, as the kernel says
AHEAD = 19  # how many lookups ahead a row is prefetched
STEP = 22  # bytes from one prefetch of a row to the next
KEYS = 20  # sorted kernels: 2 x N int64
KIND = 21  # sorted kernels: 0 Adagrad, 1 row-wise Adagrad
FIELDS = 23

_HASH = 0x9E3779B1  # 2^32 / golden ratio: spreads neighbouring rows over the owners


@compiled
def field(job, number):
    """One field of a job."""
    return load_int(job + 8 * number)


@compiled
def item(array, place):
    """One int64 of an array."""
    return load_int(array + 8 * place)


@compiled
def take_unit(job):
    """The next unit of work, or one past the last."""
    return atomic_add_int(job + 8 * NEXT_UNIT, 1)


@compiled
def bag_begin(job, table, bag):
    """Where a bag begins among all lookups; the bag behind the last ends the table."""
    starts = field(job, STARTS)
    bags = field(job, BAGS)
    if bag == bags:
        return item(starts, table + 1)
    return item(starts, table) + item(field(job, OFFSETS), table * bags + bag)


@compiled
def owner(row, slices):
    """Which of ``slices`` owns a row: a hash, so that hot neighbours are spread."""
    if slices == 1:
        return 0
    return (((row * _HASH) & 0xFFFFFFFF) * slices) >> 32


@compiled
def warm(address, size, step):
    """Prefetch ``size`` bytes (to be written as well: prefetching for writing is slower)."""
    for line in range(0, size, step):
        prefetch(address + line)


@compiled
def sum_bag(table, rows, dim, indices, begin, end, last, out, ahead, step):
    """Sum rows ``indices[begin:end]`` into ``out``; the position of a bad index, or -1."""
    size = 4 * dim
    column = 0
    while column + 64 <= dim:
        a, b, c, d = zeros(), zeros(), zeros(), zeros()
        here = table + 4 * column
        for i in range(begin, end):
            warm(here + item(indices, min(i + ahead, last)) * size, 256, step)
            row = item(indices, i)
            if row < 0 or row >= rows:
                return i
            p = here + row * size
            a = add(a, load_vector(p))
            b = add(b, load_vector(p + 64))
            c = add(c, load_vector(p + 128))
            d = add(d, load_vector(p + 192))
        p = out + 4 * column
        store_vector(p, a)
        store_vector(p + 64, b)
        store_vector(p + 128, c)
        store_vector(p + 192, d)
        column += 64
    while column + 16 <= dim:
        a = zeros()
        here = table + 4 * column
        for i in range(begin, end):
            prefetch(here + item(indices, min(i + ahead, last)) * size)
            row = item(indices, i)
            if row < 0 or row >= rows:
                return i
            a = add(a, load_vector(here + row * size))
        store_vector(out + 4 * column, a)
        column += 16
    if column < dim:
        for k in range(column, dim):
            store_float(out + 4 * k, 0)
        here = table + 4 * column
        for i in range(begin, end):
            prefetch(here + item(indices, min(i + ahead, last)) * size)
            row = item(indices, i)
            if row < 0 or row >= rows:
                return i
            for k in range(column, dim):
                p = out + 4 * k
                store_float(p, load_float(p) + load_float(table + row * size + 4 * k))
    return -1


def forward(job):
    """Pool every bag of every table; a unit is a range of bags."""
    tables, bags, dim = field(job, TABLES), field(job, BAGS), field(job, DIM)
    weights, rows, starts = field(job, WEIGHTS), field(job, ROWS), field(job, STARTS)
    indices, pooled, ahead = field(job, INDICES), field(job, POOLED), field(job, AHEAD)
    units, faults, step = field(job, UNITS), field(job, FAULTS), field(job, STEP)
    unit = take_unit(job)
    while unit < units:
        first = tables * bags * unit // units
        behind = tables * bags * (unit + 1) // units
        for place in range(first, behind):
            table = place // bags
            bag = place - table * bags
            begin, end = bag_begin(job, table, bag), bag_begin(job, table, bag + 1)
            start, last = item(starts, table), item(starts, table + 1) - 1
            fault, where = NO_FAULT, 0
            if begin < start or begin > end or end > last + 1 or (bag == 0 and begin != start):
                fault, where = BAD_OFFSET, place
            else:
                out = pooled + 4 * dim * place
                bad = sum_bag(
                    item(weights, table),
                    item(rows, table),
                    dim,
                    indices,
                    begin,
                    end,
                    last,
                    out,
                    ahead,
                    step,
                )
                if bad >= 0:
                    fault, where = BAD_INDEX, bad
            if fault != NO_FAULT:
                store_int(faults + 16 * unit, fault)
                store_int(faults + 16 * unit + 8, where)
                break
        unit = take_unit(job)


@compiled
def subtract_bag(table, dim, indices, begin, end, last, gradient, rate, ahead, step, mine, slices):
    """w[row] -= rate g for each lookup of a bag whose row belongs to slice ``mine``."""
    size = 4 * dim
    rates = splat(rate)
    column = 0
    while column + 64 <= dim:
        p = gradient + 4 * column
        a = multiply(rates, load_vector(p))
        b = multiply(rates, load_vector(p + 64))
        c = multiply(rates, load_vector(p + 128))
        d = multiply(rates, load_vector(p + 192))
        here = table + 4 * column
        for i in range(begin, end):
            soon = item(indices, min(i + ahead, last))
            if slices == 1 or owner(soon, slices) == mine:
                warm(here + soon * size, 256, step)
            row = item(indices, i)
            if slices == 1 or owner(row, slices) == mine:
                p = here + row * size
                store_vector(p, subtract(load_vector(p), a))
                store_vector(p + 64, subtract(load_vector(p + 64), b))
                store_vector(p + 128, subtract(load_vector(p + 128), c))
                store_vector(p + 192, subtract(load_vector(p + 192), d))
        column += 64
    while column + 16 <= dim:
        a = multiply(rates, load_vector(gradient + 4 * column))
        here = table + 4 * column
        for i in range(begin, end):
            soon = item(indices, min(i + ahead, last))
            if slices == 1 or owner(soon, slices) == mine:
                prefetch(here + soon * size)
            row = item(indices, i)
            if slices == 1 or owner(row, slices) == mine:
                p = here + row * size
                store_vector(p, subtract(load_vector(p), a))
        column += 16
    if column < dim:
        for i in range(begin, end):
            soon = item(indices, min(i + ahead, last))
            if slices == 1 or owner(soon, slices) == mine:
                prefetch(table + soon * size + 4 * column)
            row = item(indices, i)
            if slices == 1 or owner(row, slices) == mine:
                for k in range(column, dim):
                    p = table + row * size + 4 * k
                    store_float(p, load_float(p) - rate * load_float(gradient + 4 * k))


def sgd_owned(job):
    """SGD fused into backward without races: a unit owns all rows, or a share, of a table.

    Every row's updates are done by one thread in the order of the lookups.
    """
    bags, dim, units = field(job, BAGS), field(job, DIM), field(job, UNITS)
    weights, starts, indices = field(job, WEIGHTS), field(job, STARTS), field(job, INDICES)
    gradients, strides = field(job, GRADIENTS), field(job, STRIDES)
    plan, ahead, step = field(job, PLAN), field(job, AHEAD), field(job, STEP)
    rate = load_float(field(job, RATES))
    unit = take_unit(job)
    while unit < units:
        table = item(plan, 3 * unit)
        mine, slices = item(plan, 3 * unit + 1), item(plan, 3 * unit + 2)
        last = item(starts, table + 1) - 1
        for bag in range(bags):
            subtract_bag(
                item(weights, table),
                dim,
                indices,
                bag_begin(job, table, bag),
                bag_begin(job, table, bag + 1),
                last,
                item(gradients, table) + bag * item(strides, table),
                rate,
                ahead,
                step,
                mine,
                slices,
            )
        unit = take_unit(job)
