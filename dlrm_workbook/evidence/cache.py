"""How many lookups a cache of embedding rows would answer, by the order in which rows are used.

A cache of C rows that drops the least recently used one still holds a row when fewer than C
other rows were looked up since its last use (Mattson et al. 1970). This number, the stack
distance, is counted for the most used rows and for others chosen by a hash of their place, each
of which stands for several (rows are chosen so by Waldspurger et al. 2015).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlrm_core.data.files.draws import mixed, uniform

FOLLOWED = 1 << 20
"""Lookups whose stack distances are counted, up to half of them of the most used rows."""

LEAST_ROWS = 64
"""Smallest cache asked about."""

OFTEN = 8
"""Uses in a sample of about :data:`FOLLOWED` lookups from which a row may count as most used."""


def hit_curve(
    lookups: Sequence[Sequence[np.ndarray]], followed: int = FOLLOWED
) -> list[dict[str, float]]:
    """Hit rates of one cache for the rows of all tables, by its size.

    The rates are of the last batch's lookups, in a cache that the batches before it have
    filled. They hold for a stream that goes on alike as long as those batches looked up at
    least as many rows as the cache has; larger caches are left out.

    Args:
        lookups: rows looked up, (N,) int64, by batch and table, in the order of the lookups.
        followed: about how many lookups to follow; if there are fewer, all are.

    Returns:
        ``rows`` (of the cache, powers of two), ``hit_share`` (of the lookups) and ``error``
        (its standard error from the choice of rows; 0 where all were followed).
    """
    if len(lookups) < 2 or not sum(rows.size for rows in lookups[-1]):
        return []
    total = sum(rows.size for batch in lookups for rows in batch)
    most, share = np.zeros(0, np.int64), 1.0
    if total > followed:
        step = -(-total // followed)
        some = np.concatenate([_keys([rows[::step] for rows in batch]) for batch in lookups])
        most, many = _most_used(some, followed // (2 * step))
        # one row may take all the room; of the others some are followed all the same
        share = min(1.0, max(0.01, (followed - many * step) / max(1, total - many * step)))
    kept = [_followed(_keys(batch), most, share) for batch in lookups]
    keys, weights = (np.concatenate(column) for column in zip(*kept, strict=True))
    last = np.arange(keys.size) >= keys.size - kept[-1][0].size
    previous = previous_uses(keys)
    distances = stack_distances(previous, weights)
    seen = weights[(previous < 0) & ~last].sum()
    distances, weights = distances[last], weights[last]
    _, first, rows = np.unique(keys[last], return_index=True, return_inverse=True)
    left_out = 1.0 - 1.0 / weights[first]
    rates, size = [], LEAST_ROWS
    while size <= seen:
        hits = distances < size
        share = float(weights[hits].sum() / weights.sum())
        # a row is followed or not as a whole: the variance of Horvitz and Thompson (1952)
        excess = np.bincount(rows, (hits - share) * weights)
        error = float(np.sqrt((left_out * excess**2).sum()) / weights.sum())
        rates.append({"rows": size, "hit_share": share, "error": error})
        size *= 2
    return rates


def _keys(batch: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of all tables as one array: the same row of two tables is two rows of the cache."""
    return np.concatenate([rows | (table << 40) for table, rows in enumerate(batch)])


def _most_used(keys: np.ndarray, room: int) -> tuple[np.ndarray, int]:
    """Rows that come up most among ``keys``, about ``room`` times in all; and how often they do."""
    rows, counts = np.unique(keys, return_counts=True)
    rows, counts = rows[counts >= OFTEN], counts[counts >= OFTEN]
    order = np.argsort(-counts, kind="stable")
    chosen = order[: 1 + int(np.searchsorted(counts[order].cumsum(), room))]
    return np.sort(rows[chosen]), int(counts[chosen].sum())


def _followed(keys: np.ndarray, most: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The lookups of rows that are followed, and how many rows each of these stands for."""
    sure = np.zeros(keys.size, bool)
    if most.size:
        sure = most[np.minimum(np.searchsorted(most, keys), most.size - 1)] == keys
    kept = sure | (uniform(mixed(keys.astype(np.uint64))) < share)
    return keys[kept], np.where(sure[kept], 1.0, 1.0 / share)


def previous_uses(keys: np.ndarray) -> np.ndarray:
    """Place of the last use of the same row before each use, -1 for the first; (N,) int64."""
    order = np.argsort(keys, kind="stable")
    previous = np.full(keys.size, -1)
    again = keys[order[1:]] == keys[order[:-1]]
    previous[order[1:][again]] = order[:-1][again]
    return previous


def stack_distances(previous: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Rows used between a use and the last one of the same row; infinite for a first use.

    A row used in between has one use there whose own previous use lies before: these are all
    earlier uses with a previous use no later than mine, without those up to mine. Earlier uses
    are counted by merging, block by block.

    Each use's row stands for ``weights`` rows; ``previous`` is of :func:`previous_uses`.
    """
    count = previous.size
    ranks = np.empty(count, np.int64)
    ranks[np.argsort(previous, kind="stable")] = np.arange(count)
    earlier, order, width = np.zeros(count), np.arange(count), 1
    while width < count:
        blocks = order // (2 * width)
        order = order[np.argsort(blocks * count + ranks[order], kind="stable")]
        left = (order // width) % 2 == 0
        sums = np.append(0.0, np.where(left, weights[order], 0.0).cumsum())
        begins = order // (2 * width) * (2 * width)
        earlier[order] += np.where(left, 0.0, sums[1:] - sums[begins])
        width *= 2
    upto = np.append(0.0, weights.cumsum())[previous + 1]
    return np.where(previous < 0, np.inf, earlier - upto)
