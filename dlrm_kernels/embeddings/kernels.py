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

from dlrm_kernels.embeddings.checks import BAD_INDEX, BAD_OFFSET
from dlrm_kernels.embeddings.kernels_narrow import (
    FLOAT,
    draw_words,
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
    multiply,
    owner,
    prefetch,
    splat,
    store_float,
    store_int,
    store_vector,
    subtract,
    take_unit,
    warm,
    zeros,
)

# Fields of a job behind the first three. Addresses unless another unit is given.
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
KEYS = 20  # sorted kernels: 2 x N int64, or a region a thread
KIND = 21  # sorted kernels: 0 Adagrad, 1 row-wise Adagrad
STEP = 22  # bytes from one prefetch of a row to the next
REGION = 23  # sorted kernels: bytes of a thread's region of keys; 0: the tables have regions
FORMAT = 24  # of the tables' numbers: kernels_narrow.FLOAT, BF16 or HALF
SEED = 25  # of the random words by which numbers of 2 bytes are rounded
UPDATE = 26  # number of updates before this one
NUMBERS = 27  # T numbers of the tables in the model
WORDS = 28  # per thread, the random words of a row
FIELDS = 29


@compiled
def bag_begin(job, table, bag):
    """Where a bag begins among all lookups; the bag behind the last ends the table."""
    starts = field(job, STARTS)
    bags = field(job, BAGS)
    if bag == bags:
        return item(starts, table + 1)
    return item(starts, table) + item(field(job, OFFSETS), table * bags + bag)


@compiled
def sum_64(table, size, rows, indices, begin, end, last, out, ahead, step):
    """64 columns of :func:`sum_bag`.

    A function of its own: in one with the loops over other widths LLVM spent 25 % more
    time in this loop at 50 lookups a bag, and 75 % more at 1.
    """
    a, b, c, d = zeros(), zeros(), zeros(), zeros()
    for i in range(begin, end):
        warm(table + item(indices, min(i + ahead, last)) * size, 256, step)
        row = item(indices, i)
        if row < 0 or row >= rows:
            return i
        p = table + row * size
        a = add(a, load_vector(p))
        b = add(b, load_vector(p + 64))
        c = add(c, load_vector(p + 128))
        d = add(d, load_vector(p + 192))
    store_vector(out, a)
    store_vector(out + 64, b)
    store_vector(out + 128, c)
    store_vector(out + 192, d)
    return -1


@compiled
def sum_16(table, size, rows, indices, begin, end, last, out, ahead):
    """16 columns of :func:`sum_bag`."""
    a = zeros()
    for i in range(begin, end):
        prefetch(table + item(indices, min(i + ahead, last)) * size)
        row = item(indices, i)
        if row < 0 or row >= rows:
            return i
        a = add(a, load_vector(table + row * size))
    store_vector(out, a)
    return -1


@compiled
def sum_few(table, size, rows, indices, begin, end, last, out, ahead, count):
    """Fewer than 16 columns of :func:`sum_bag`."""
    for k in range(count):
        store_float(out + 4 * k, 0)
    for i in range(begin, end):
        prefetch(table + item(indices, min(i + ahead, last)) * size)
        row = item(indices, i)
        if row < 0 or row >= rows:
            return i
        for k in range(count):
            p = out + 4 * k
            store_float(p, load_float(p) + load_float(table + row * size + 4 * k))
    return -1


@compiled
def sum_bag(table, rows, dim, indices, begin, end, last, out, ahead, step):
    """Sum rows ``indices[begin:end]`` into ``out``; the position of a bad index, or -1."""
    size, column, bad = 4 * dim, 0, -1
    while column + 64 <= dim and bad < 0:
        at = 4 * column
        bad = sum_64(table + at, size, rows, indices, begin, end, last, out + at, ahead, step)
        column += 64
    while column + 16 <= dim and bad < 0:
        at = 4 * column
        bad = sum_16(table + at, size, rows, indices, begin, end, last, out + at, ahead)
        column += 16
    if column < dim and bad < 0:
        at, rest = 4 * column, dim - column
        bad = sum_few(table + at, size, rows, indices, begin, end, last, out + at, ahead, rest)
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
        last = stop - 1
        if kind == FLOAT:
            bad = sum_bag(weights, rows, dim, indices, begin, end, last, out, ahead, step)
        else:
            bad = sum_narrow(weights, rows, dim, indices, begin, end, last, out, ahead, step, kind)
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


@compiled
def subtract_64(table, size, indices, begin, end, last, gradient, rate, ahead, step):
    """64 columns of :func:`subtract_bag`, all rows ours."""
    rates = splat(rate)
    a = multiply(rates, load_vector(gradient))
    b = multiply(rates, load_vector(gradient + 64))
    c = multiply(rates, load_vector(gradient + 128))
    d = multiply(rates, load_vector(gradient + 192))
    for i in range(begin, end):
        warm(table + item(indices, min(i + ahead, last)) * size, 256, step)
        p = table + item(indices, i) * size
        store_vector(p, subtract(load_vector(p), a))
        store_vector(p + 64, subtract(load_vector(p + 64), b))
        store_vector(p + 128, subtract(load_vector(p + 128), c))
        store_vector(p + 192, subtract(load_vector(p + 192), d))


@compiled
def subtract_64_shared(
    table, size, indices, begin, end, last, gradient, rate, ahead, step, mine, slices
):
    """64 columns of :func:`subtract_bag`, other rows belong to others."""
    rates = splat(rate)
    a = multiply(rates, load_vector(gradient))
    b = multiply(rates, load_vector(gradient + 64))
    c = multiply(rates, load_vector(gradient + 128))
    d = multiply(rates, load_vector(gradient + 192))
    for i in range(begin, end):
        soon = item(indices, min(i + ahead, last))
        if owner(soon, slices) == mine:
            warm(table + soon * size, 256, step)
        row = item(indices, i)
        if owner(row, slices) == mine:
            p = table + row * size
            store_vector(p, subtract(load_vector(p), a))
            store_vector(p + 64, subtract(load_vector(p + 64), b))
            store_vector(p + 128, subtract(load_vector(p + 128), c))
            store_vector(p + 192, subtract(load_vector(p + 192), d))


@compiled
def subtract_16(table, size, indices, begin, end, last, gradient, rate, ahead, mine, slices):
    """16 columns of :func:`subtract_bag`."""
    a = multiply(splat(rate), load_vector(gradient))
    for i in range(begin, end):
        soon = item(indices, min(i + ahead, last))
        if owner(soon, slices) == mine:
            prefetch(table + soon * size)
        row = item(indices, i)
        if owner(row, slices) == mine:
            p = table + row * size
            store_vector(p, subtract(load_vector(p), a))


@compiled
def subtract_few(
    table, size, indices, begin, end, last, gradient, rate, ahead, mine, slices, count
):
    """Fewer than 16 columns of :func:`subtract_bag`."""
    for i in range(begin, end):
        soon = item(indices, min(i + ahead, last))
        if owner(soon, slices) == mine:
            prefetch(table + soon * size)
        row = item(indices, i)
        if owner(row, slices) == mine:
            for k in range(count):
                p = table + row * size + 4 * k
                store_float(p, load_float(p) - rate * load_float(gradient + 4 * k))


@compiled
def subtract_bag(table, dim, indices, begin, end, last, gradient, rate, ahead, step, mine, slices):
    """w[row] -= rate g for each lookup of a bag whose row belongs to slice ``mine``."""
    size, column = 4 * dim, 0
    while column + 64 <= dim:
        t, g = table + 4 * column, gradient + 4 * column
        if slices == 1:
            subtract_64(t, size, indices, begin, end, last, g, rate, ahead, step)
        else:
            subtract_64_shared(
                t, size, indices, begin, end, last, g, rate, ahead, step, mine, slices
            )
        column += 64
    while column + 16 <= dim:
        t, g = table + 4 * column, gradient + 4 * column
        subtract_16(t, size, indices, begin, end, last, g, rate, ahead, mine, slices)
        column += 16
    if column < dim:
        t, g, rest = table + 4 * column, gradient + 4 * column, dim - column
        subtract_few(t, size, indices, begin, end, last, g, rate, ahead, mine, slices, rest)


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
        mine, slices = item(plan, 3 * unit + 1), item(plan, 3 * unit + 2)
        weights = item(field(job, WEIGHTS), table)
        gradient, stride = item(field(job, GRADIENTS), table), item(field(job, STRIDES), table)
        last = item(starts, table + 1) - 1
        begin = item(starts, table)
        for bag in range(bags):
            end = bag_begin(job, table, bag + 1)
            if kind == FLOAT:
                subtract_bag(
                    *(weights, dim, indices, begin, end, last, gradient, rate),
                    *(ahead, step, mine, slices),
                )
            elif begin < end:
                draw_words(drawn, seed, bag, item(field(job, NUMBERS), table), update, dim)
                subtract_narrow(
                    *(weights, dim, indices, begin, end, last, gradient, rate),
                    *(ahead, step, mine, slices, drawn, kind),
                )
            begin = end
            gradient += stride
        unit = take_unit(job)
