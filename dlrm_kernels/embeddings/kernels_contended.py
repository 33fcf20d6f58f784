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

from dlrm_kernels import vectors as v
from dlrm_kernels.embeddings import kernels as k

LOCKS = 1 << 14
"""Locks of all rows together, each on a cache line of its own."""

LOCK_BYTES = 64


@v.compiled
def gradient_of(job, table, bag):
    """Address of the gradient (d floats) of a bag's pooled vector."""
    return v.item(v.field(job, k.GRADIENTS), table) + bag * v.item(v.field(job, k.STRIDES), table)


def expand(job):
    """Naive, backward: copy each bag's gradient to every one of its lookups (N x d floats)."""
    tables, bags, dim = v.field(job, k.TABLES), v.field(job, k.BAGS), v.field(job, k.DIM)
    units, rows = v.field(job, v.UNITS), v.field(job, k.SCRATCH)
    unit = v.take_unit(job)
    while unit < units:
        for place in range(tables * bags * unit // units, tables * bags * (unit + 1) // units):
            table = place // bags
            bag = place - table * bags
            gradient = gradient_of(job, table, bag)
            for i in range(k.bag_begin(job, table, bag), k.bag_begin(job, table, bag + 1)):
                out = rows + 4 * dim * i
                k.copy_numbers(gradient, out, dim)
        unit = v.take_unit(job)


def apply_serially(job):
    """Naive, update: w[row] -= rate g over the sparse gradient; one unit, so one thread."""
    dim, ahead, step = v.field(job, k.DIM), v.field(job, k.AHEAD), v.field(job, k.STEP)
    rate = v.load_float(v.field(job, k.RATES))
    indices, starts, rows = v.field(job, k.INDICES), v.field(job, k.STARTS), v.field(job, k.SCRATCH)
    if v.take_unit(job) > 0:
        return
    for table in range(v.field(job, k.TABLES)):
        weights = v.item(v.field(job, k.WEIGHTS), table)
        end = v.item(starts, table + 1)
        for i in range(v.item(starts, table), end):
            v.warm(weights + 4 * dim * v.item(indices, min(i + ahead, end - 1)), 4 * dim, step)
            k.subtract_scaled(weights + 4 * dim * v.item(indices, i), rows + 4 * dim * i, rate, dim)


def sgd_atomic(job):
    """w[row] -= rate g by one atomic add a float; a unit is a range of bags."""
    tables, bags, dim = v.field(job, k.TABLES), v.field(job, k.BAGS), v.field(job, k.DIM)
    units, indices, ahead = v.field(job, v.UNITS), v.field(job, k.INDICES), v.field(job, k.AHEAD)
    step = v.field(job, k.STEP)
    rate = v.load_float(v.field(job, k.RATES))
    unit = v.take_unit(job)
    while unit < units:
        for place in range(tables * bags * unit // units, tables * bags * (unit + 1) // units):
            table = place // bags
            bag = place - table * bags
            weights = v.item(v.field(job, k.WEIGHTS), table)
            last = v.item(v.field(job, k.STARTS), table + 1) - 1
            gradient = gradient_of(job, table, bag)
            for i in range(k.bag_begin(job, table, bag), k.bag_begin(job, table, bag + 1)):
                v.warm(weights + 4 * dim * v.item(indices, min(i + ahead, last)), 4 * dim, step)
                row = weights + 4 * dim * v.item(indices, i)
                for column in range(dim):
                    change = rate * v.load_float(gradient + 4 * column)
                    v.atomic_add_float(row + 4 * column, -change)
        unit = v.take_unit(job)


def sgd_locked(job):
    """w[row] -= rate g under the row's lock; a unit is a range of bags."""
    tables, bags, dim = v.field(job, k.TABLES), v.field(job, k.BAGS), v.field(job, k.DIM)
    units, indices, ahead = v.field(job, v.UNITS), v.field(job, k.INDICES), v.field(job, k.AHEAD)
    step = v.field(job, k.STEP)
    rate, locks = v.load_float(v.field(job, k.RATES)), v.field(job, k.SCRATCH)
    unit = v.take_unit(job)
    while unit < units:
        for place in range(tables * bags * unit // units, tables * bags * (unit + 1) // units):
            table = place // bags
            bag = place - table * bags
            weights = v.item(v.field(job, k.WEIGHTS), table)
            last = v.item(v.field(job, k.STARTS), table + 1) - 1
            gradient = gradient_of(job, table, bag)
            for i in range(k.bag_begin(job, table, bag), k.bag_begin(job, table, bag + 1)):
                v.warm(weights + 4 * dim * v.item(indices, min(i + ahead, last)), 4 * dim, step)
                row = v.item(indices, i)
                lock = locks + LOCK_BYTES * ((row * tables + table) & (LOCKS - 1))
                while v.try_lock(lock) != 0:
                    while v.peek_lock(lock) != 0:
                        pass
                k.subtract_scaled(weights + 4 * dim * row, gradient, rate, dim)
                v.unlock(lock)
        unit = v.take_unit(job)
