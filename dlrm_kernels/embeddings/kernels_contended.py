"""The updates that race-free ownership is compared with (Kalamkar et al. 2020, section III).

``naive``: backward writes the sparse gradient, one row a lookup (the paper's
algorithm 2), and the update adds its rows one after the other on one thread.
``atomic``: all threads share the lookups, every float is added atomically.
``locked``: the same, with a lock a row (hashed) held while the row is updated; the
paper used hardware transactions, which current CPUs no longer have. The order of the
adds, and so the last bits of a weight, differ from run to run in the last two.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dlrm_kernels.embeddings import kernels as k
from dlrm_kernels.vectors import (
    UNITS,
    atomic_add_float,
    compiled,
    field,
    item,
    load_float,
    peek_lock,
    take_unit,
    try_lock,
    unlock,
    warm,
)

LOCKS = 1 << 14
"""Locks of all rows together, each on a cache line of its own."""

LOCK_BYTES = 64


@compiled
def gradient_of(job, table, bag):
    """Address of the gradient (d floats) of a bag's pooled vector."""
    return item(field(job, k.GRADIENTS), table) + bag * item(field(job, k.STRIDES), table)


def expand(job):
    """Naive, backward: copy each bag's gradient to every one of its lookups (N x d floats)."""
    tables, bags, dim = field(job, k.TABLES), field(job, k.BAGS), field(job, k.DIM)
    units, rows = field(job, UNITS), field(job, k.SCRATCH)
    unit = take_unit(job)
    while unit < units:
        for place in range(tables * bags * unit // units, tables * bags * (unit + 1) // units):
            table = place // bags
            bag = place - table * bags
            gradient = gradient_of(job, table, bag)
            for i in range(k.bag_begin(job, table, bag), k.bag_begin(job, table, bag + 1)):
                out = rows + 4 * dim * i
                k.copy_numbers(gradient, out, dim)
        unit = take_unit(job)


def apply_serially(job):
    """Naive, update: w[row] -= rate g over the sparse gradient; one unit, so one thread."""
    dim, ahead, step = field(job, k.DIM), field(job, k.AHEAD), field(job, k.STEP)
    rate = load_float(field(job, k.RATES))
    indices, starts, rows = field(job, k.INDICES), field(job, k.STARTS), field(job, k.SCRATCH)
    if take_unit(job) > 0:
        return
    for table in range(field(job, k.TABLES)):
        weights = item(field(job, k.WEIGHTS), table)
        end = item(starts, table + 1)
        for i in range(item(starts, table), end):
            warm(weights + 4 * dim * item(indices, min(i + ahead, end - 1)), 4 * dim, step)
            k.subtract_scaled(weights + 4 * dim * item(indices, i), rows + 4 * dim * i, rate, dim)


def sgd_atomic(job):
    """w[row] -= rate g by one atomic add a float; a unit is a range of bags."""
    tables, bags, dim = field(job, k.TABLES), field(job, k.BAGS), field(job, k.DIM)
    units, indices, ahead = field(job, UNITS), field(job, k.INDICES), field(job, k.AHEAD)
    step = field(job, k.STEP)
    rate = load_float(field(job, k.RATES))
    unit = take_unit(job)
    while unit < units:
        for place in range(tables * bags * unit // units, tables * bags * (unit + 1) // units):
            table = place // bags
            bag = place - table * bags
            weights = item(field(job, k.WEIGHTS), table)
            last = item(field(job, k.STARTS), table + 1) - 1
            gradient = gradient_of(job, table, bag)
            for i in range(k.bag_begin(job, table, bag), k.bag_begin(job, table, bag + 1)):
                warm(weights + 4 * dim * item(indices, min(i + ahead, last)), 4 * dim, step)
                row = weights + 4 * dim * item(indices, i)
                for column in range(dim):
                    change = rate * load_float(gradient + 4 * column)
                    atomic_add_float(row + 4 * column, -change)
        unit = take_unit(job)


def sgd_locked(job):
    """w[row] -= rate g under the row's lock; a unit is a range of bags."""
    tables, bags, dim = field(job, k.TABLES), field(job, k.BAGS), field(job, k.DIM)
    units, indices, ahead = field(job, UNITS), field(job, k.INDICES), field(job, k.AHEAD)
    step = field(job, k.STEP)
    rate, locks = load_float(field(job, k.RATES)), field(job, k.SCRATCH)
    unit = take_unit(job)
    while unit < units:
        for place in range(tables * bags * unit // units, tables * bags * (unit + 1) // units):
            table = place // bags
            bag = place - table * bags
            weights = item(field(job, k.WEIGHTS), table)
            last = item(field(job, k.STARTS), table + 1) - 1
            gradient = gradient_of(job, table, bag)
            for i in range(k.bag_begin(job, table, bag), k.bag_begin(job, table, bag + 1)):
                warm(weights + 4 * dim * item(indices, min(i + ahead, last)), 4 * dim, step)
                row = item(indices, i)
                lock = locks + LOCK_BYTES * ((row * tables + table) & (LOCKS - 1))
                while try_lock(lock) != 0:
                    while peek_lock(lock) != 0:
                        pass
                k.subtract_scaled(weights + 4 * dim * row, gradient, rate, dim)
                unlock(lock)
        unit = take_unit(job)
