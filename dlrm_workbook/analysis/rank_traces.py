"""Several ranks' traces side by side: which rank does what, and who waits for whom.

A collective's kernel runs on every rank from when that rank arrives until all have arrived and
the data has moved, so it ends on all of them at about the same time. Collectives are matched by
kind, communicator and order of issue; where recordings were begun or cut at different moments,
by the shift at which their ends fall together. The shortest time that any rank spends in a
collective is then the most that the transfer takes; each rank's time beyond it is waiting for
the last one. Clocks of ranks differ by whatever makes the ends meet; waiting is a difference of
durations and does not need them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dlrm_workbook.analysis.attribution import PART, as_one, in_step_order, parts_at, segments
from dlrm_workbook.analysis.context_tree import extent, unmeasured
from dlrm_workbook.ground.arrays import Floats, Ints
from dlrm_workbook.recordings.foreign import exchange_kernels
from dlrm_workbook.recordings.nesting import start_and_end, union_ns
from dlrm_workbook.recordings.profile import Profile, of_streams

Ranks = Mapping[int, Profile]

COLLECTIVE_COLUMNS = ["collective", "kind", "what", "ranks", "elements", "transfer_us", "wait_us"]
COLLECTIVE_COLUMNS += ["longest_wait_us", "last_rank", "late_us", *PART, "where", "longer_us"]
COLLECTIVE_COLUMNS += ["spread_us", "counted"]

RANK_COLUMNS = ["rank", "iterations", "step_ms", "busy_ms", "idle_ms", "compute_ms"]
RANK_COLUMNS += ["communication_ms", "exposed_ms", "transfer_ms", "waiting_ms", "start_ms"]
RANK_COLUMNS += ["last_in", "others_wait_ms"]

PART_COLUMNS = [*PART, "mean_ms", "least_ms", "most_ms", "most_rank"]

_KINDS = (
    (re.compile(r"all_?gather", re.I), "all-gather"),
    (re.compile(r"reduce_?scatter", re.I), "reduce-scatter"),
    (re.compile(r"all_?reduce|cross_device_reduce|quick_?reduce", re.I), "all-reduce"),
    (re.compile(r"all_?to_?all|sendrecv|::\w*(?:dispatch|combine|notify)", re.I), "all-to-all"),
    (re.compile(r"broadcast", re.I), "broadcast"),
    (re.compile(r"^i?send|^i?recv|(nccl|rccl):(send|recv)|coalesced", re.I), "send or receive"),
    (re.compile(r"reduce", re.I), "reduce"),
)
"""In the names of kernels and of what launches them. NCCL sends an all-to-all as pairs, by the
kernel that sends anything else to one rank too: there what launched it knows better."""

LEVEL = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
"""End on all ranks at about the same time; a broadcast's root may leave long before."""

SHIFTS = 500
"""Collectives that one recording may have before another one's first, at most."""

TOGETHER_NS = 10**6
"""Ends of one collective may lie apart by this, after the clocks are aligned; farther apart in
the median, the sequences are not of the same collectives."""

LEAST_SPREAD_US = 100.0
SPREAD_SHARE = 0.1
"""A collective's waiting is counted if its ends lie within this, or within a tenth of its
longest time."""

NEIGHBOURS = 41
"""Collectives over which the difference of two clocks is taken for constant."""

PER_ITERATION = "per iteration"
ONE = "the recording is of one rank; `-p profile_run=FOLDER` takes the traces of several ranks"

LATE = 0.1
LATE_US = 5.0
"""A rank is called late if the others wait longer than this, and than a tenth of the transfer."""


@dataclass
class _Channel:
    """One rank's kernels of one communicator, or of one stream where none is named."""

    rank: int
    key: str
    table: pd.DataFrame
    """start, end (ns of the rank's own time), kind, what, elements; in order of start."""


# ---- one rank's collectives -----------------------------------------------------------


def collective_kernels(profile: Profile) -> pd.DataFrame:
    """Kernels that exchange data, in order of start.

    Returns:
        ``start_ns``, ``end_ns``, ``stream`` (row of ``threads``), ``context``, ``kind``,
        ``what`` (the range or autograd node that asked for it), ``elements`` (of its input; NaN
        where unknown), ``group`` (the communicator's name and ranks; "" where unknown).
    """
    trace = of_streams(profile)
    trace = trace[exchange_kernels(profile)[trace["context"].to_numpy()]]
    trace = trace.sort_values("start_ns", kind="stable")
    table = trace.rename(columns={"profile": "stream"}).reset_index(drop=True)
    described = {context: _described(profile, context) for context in table["context"].unique()}
    rows_of = [described[context] for context in table["context"]]
    table = table.join(pd.DataFrame(rows_of, columns=["kind", "what", "elements"]))
    given = profile.meta.get("collectives") or {}
    places = zip(*(given.get(name, []) for name in ("stream", "start_ns", "row")), strict=True)
    rows = {(stream, start): given["arguments"][row] for stream, start, row in places}
    keys = zip(table["stream"], table["start_ns"], strict=True)
    arguments = [rows.get(key, {}) for key in keys]
    table["group"] = [f"{one.get('group', '')} {one.get('ranks', '')}".strip() for one in arguments]
    kinds = [_kind(one.get("name", "")) for one in arguments]
    table["kind"] = [named or kind for named, kind in zip(kinds, table["kind"], strict=True)]
    sizes = pd.to_numeric([one.get("in_elements") for one in arguments], errors="coerce")
    table["elements"] = pd.Series(sizes, dtype=float).fillna(table["elements"])
    return table


def _kind(text: str) -> str:
    return next((kind for pattern, kind in _KINDS if pattern.search(text)), "")


def _described(profile: Profile, context: int) -> tuple[str, str, float]:
    """(kind, what asked for it, elements of its input) by names and shapes around a kernel."""
    names, shapes = (profile.contexts[column].to_numpy() for column in ("name", "shapes"))
    kinds, parent = (profile.contexts[column].to_numpy() for column in ("kind", "parent"))
    kind, what, elements = _kind(names[context]), "", np.nan
    above = parent[context]
    while above >= 0 and not what:
        name = str(names[above])
        if re.search(r"^(nccl|rccl|c10d)::?|^record_param_comms", name):
            pairs = "sendrecv" in names[context].lower()
            kind = (_kind(name) or kind) if pairs else (kind or _kind(name))
            if np.isnan(elements):
                elements = _elements(str(shapes[above]))
        elif kinds[above] in ("annotation", "operator", "python"):
            what = name.strip("# ")
        above = parent[above]
    return kind or "unknown", what, elements


def _elements(shapes: str) -> float:
    """Numbers in the first input of ``[[6144], [24, 2]]``; NaN where it says nothing."""
    first = re.match(r"\[+([\d, ]+)\]", shapes)
    sizes = [int(size) for size in first[1].split(",") if size.strip()] if first else []
    return float(np.prod(sizes)) if sizes else np.nan


# ---- matching -------------------------------------------------------------------------


def matched(ranks: Ranks) -> tuple[list[tuple[pd.DataFrame, Ints, Ints]], dict[int, int]]:
    """Collectives that ranks took part in together.

    Returns:
        For each communicator (``kind``, ``what``, ``elements`` a row a collective; start and
        end, (collectives, ranks) ns of each rank's own clock, −1 for ranks that are not in it);
        and each rank's number of kernels that no other rank has.
    """
    order = list(ranks)
    left = [channel for rank in order for channel in _channels(rank, ranks[rank])]
    alone = dict.fromkeys(order, 0)
    sets = []
    while left:
        first = left.pop(0)
        joined: list[tuple[_Channel, int]] = [(first, 0)]
        for rank in order:
            partner = _partner(first, [one for one in left if one.rank == rank])
            if rank != first.rank and partner is not None:
                joined.append(partner)
                left.remove(partner[0])
        if len(joined) == 1:
            alone[first.rank] += len(first.table)
            continue
        begin = max(0, *(-shift for _, shift in joined))
        beyond = min(len(one.table) - shift for one, shift in joined)
        if beyond <= begin:
            for one, _ in joined:
                alone[one.rank] += len(one.table)
            continue
        start = np.full((beyond - begin, len(order)), -1, dtype=np.int64)
        end = start.copy()
        table = first.table[["kind", "what"]].iloc[begin:beyond].reset_index(drop=True)
        table["elements"] = np.nan
        for one, shift in joined:
            rows = one.table.iloc[begin + shift : beyond + shift].reset_index(drop=True)
            place = order.index(one.rank)
            start[:, place], end[:, place] = rows["start_ns"], rows["end_ns"]
            table["elements"] = np.fmax(table["elements"], rows["elements"])
            alone[one.rank] += len(one.table) - len(rows)
        sets.append((table, start, end))
    return sets, alone


def _channels(rank: int, profile: Profile) -> Iterator[_Channel]:
    table = collective_kernels(profile)
    named = table["group"].ne("")
    for key, rows in table[named].groupby("group", sort=False):
        yield _Channel(rank, str(key), rows.reset_index(drop=True))
    for _, rows in table[~named].groupby("stream"):
        yield _Channel(rank, "", rows.reset_index(drop=True))


def _partner(first: _Channel, others: list[_Channel]) -> tuple[_Channel, int] | None:
    """The channel of another rank that is of the same collectives, and its shift; or None."""
    candidates = [
        (residual, place, shift)
        for place, other in enumerate(others)
        if other.key == first.key
        for residual, shift in [_aligned(first.table, other.table)]
        if residual <= TOGETHER_NS
    ]
    if not candidates:
        return None
    _, place, shift = min(candidates)
    return others[place], shift


def _aligned(first: pd.DataFrame, other: pd.DataFrame) -> tuple[float, int]:
    """(median distance of ends, shift): the row i of ``first`` is i + shift of ``other``.

    The kinds must be the same, one by one. Of several shifts that is the one at which ends
    fall together best; that of two recordings begun together goes first.
    """
    kinds, others = first["kind"].to_numpy(), other["kind"].to_numpy()
    ends, other_ends = first["end_ns"].to_numpy(), other["end_ns"].to_numpy()
    least = max(1, min(len(kinds), len(others)) // 2)
    best = (np.inf, 0)
    reach = min(SHIFTS, max(len(kinds), len(others)))
    for shift in sorted(range(-reach, reach + 1), key=abs):
        begin, beyond = max(0, -shift), min(len(kinds), len(others) - shift)
        if beyond - begin < least:
            continue
        if (kinds[begin:beyond] != others[begin + shift : beyond + shift]).any():
            continue
        apart = other_ends[begin + shift : beyond + shift] - ends[begin:beyond]
        residual = float(np.median(np.abs(apart - np.median(apart))))
        if shift == 0 and len(kinds) == len(others) and residual <= 1e3 * LEAST_SPREAD_US:
            return residual, 0
        best = min(best, (residual, shift), key=lambda pair: pair[0])
    return best


# ---- tables ---------------------------------------------------------------------------


def collectives(ranks: Ranks) -> pd.DataFrame:
    """Every matched collective, in order of time.

    A collective is ``counted`` where its waiting counts: not the first, before which nobody knows
    the ranks to be level, nor where the ends do not meet or need not. ``component``, ``phase``,
    ``where`` and ``longer_us`` are of what the last rank did since the collective before.

    Empty, with the reason, without any. ``attrs["unmatched"]``: rank to kernels that no other rank
    has. ``attrs["waits"]``: (rows, ranks) µs, NaN for ranks that took no part.
    """
    if len(ranks) < 2:
        return unmeasured(COLLECTIVE_COLUMNS, ONE)
    order = list(ranks)
    sets, alone = matched(ranks)
    if not sets:
        reason = "no communication kernels are recorded"
        if any(alone.values()):
            reason = "the ranks' collectives do not match one by one"
        table = unmeasured(COLLECTIVE_COLUMNS, reason)
        table.attrs["unmatched"] = alone
        return table
    busy = [_PartClock(ranks[rank]) for rank in order]
    frames, waits = [], []
    for table, start, end in sets:
        there = start[0] >= 0
        duration = np.where(there, (end - start) / 1e3, np.nan)
        transfer = np.nanmin(duration, axis=1)
        wait = duration - transfer[:, None]
        table = table.assign(ranks=int(there.sum()), transfer_us=transfer)
        table["wait_us"], table["longest_wait_us"] = np.nanmean(wait, axis=1), np.nanmax(wait, 1)
        table["spread_us"] = _spread_us(end[:, there])
        met = table["spread_us"] <= np.maximum(
            LEAST_SPREAD_US, SPREAD_SHARE * np.nanmax(duration, axis=1)
        )
        table["counted"] = met & table["kind"].isin(LEVEL)
        table.loc[0, "counted"] = False
        last = np.nanargmin(duration, axis=1)
        late = table["longest_wait_us"] > np.maximum(LATE_US, LATE * transfer)
        table["last_rank"] = np.where(late, np.array(order)[last], -1)
        table["late_us"] = np.where(late, np.sort(wait[:, there], axis=1)[:, 1], 0.0)
        _explain(table, start, end, last, busy)
        table["at_ns"] = end[:, np.flatnonzero(there)[0]]
        frames.append(table)
        waits.append(wait)
    matches = pd.concat(frames, ignore_index=True)
    sequence = np.argsort(matches["at_ns"].to_numpy(), kind="stable")
    matches = matches.iloc[sequence].reset_index(drop=True)
    matches.insert(0, "collective", np.arange(len(matches)))
    matches = matches[COLLECTIVE_COLUMNS]
    matches.attrs["unmatched"] = alone
    matches.attrs["waits"] = np.concatenate(waits)[sequence]
    matches.attrs["starts"] = np.concatenate([start for _, start, _ in sets])[sequence]
    return matches


def _spread_us(end: Ints) -> Floats:
    """How far the ends (n, ranks) of each collective lie apart, clocks aligned."""
    apart = pd.DataFrame(end - end[:, :1])
    apart -= apart.rolling(NEIGHBOURS, center=True, min_periods=1).median()
    return (apart.max(axis=1) - apart.min(axis=1)).to_numpy() / 1e3


class _PartClock:
    """How long a rank had been in each part up to any moment."""

    def __init__(self, profile: Profile) -> None:
        pieces = segments(profile if len(profile.iterations) else as_one(profile))
        part = parts_at(profile, pieces["context"].to_numpy())
        what = pieces[["where"]].assign(**{name: part[name] for name in PART})
        self.parts = what.drop_duplicates().reset_index(drop=True)
        self.code = what.merge(self.parts.reset_index(), how="left")["index"].to_numpy()
        self.start, self.end = start_and_end(pieces)

    def between(self, begin: Ints, beyond: Ints) -> pd.DataFrame:
        """Microseconds in each part, (windows, parts): columns (component, phase, where)."""
        edges = np.stack([self.start, self.end], axis=1).ravel()
        columns = {}
        for number, row in enumerate(self.parts.itertuples(index=False)):
            length = np.where(self.code == number, self.end - self.start, 0)
            total = np.cumsum(length)
            at = np.stack([total - length, total], axis=1).ravel()
            spent = np.interp(beyond, edges, at) - np.interp(begin, edges, at)
            columns[row.component, row.phase, row.where] = spent / 1e3
        return pd.DataFrame(columns)


def _explain(
    table: pd.DataFrame, start: Ints, end: Ints, last: Ints, busy: list[_PartClock]
) -> None:
    """Put into ``table`` what the last rank did longer than others since the collective before."""
    table[[*PART, "where"]], table["longer_us"] = "", np.nan
    if len(table) < 2:
        return
    there = np.flatnonzero(start[0] >= 0)
    spent = {
        place: busy[place].between(end[:-1, place], np.maximum(start[1:, place], end[:-1, place]))
        for place in there
    }
    every = sorted({part for durations in spent.values() for part in durations.columns})
    if not every:
        return
    cube = np.stack([spent[p].reindex(columns=every, fill_value=0.0).to_numpy() for p in there])
    for row in np.flatnonzero(table["last_rank"].to_numpy()[1:] >= 0):
        mine = int(np.flatnonzero(there == last[row + 1])[0])
        others = np.median(np.delete(cube[:, row], mine, axis=0), axis=0)
        longer = cube[mine, row] - others
        most = int(longer.argmax())
        if longer[most] > 0:
            table.loc[row + 1, [*PART, "where"]] = every[most]
            table.loc[row + 1, "longer_us"] = longer[most]


def rank_table(ranks: Ranks, matches: pd.DataFrame | None = None) -> pd.DataFrame:
    """What each rank did: per iteration where every rank has iterations, else in all.

    NaN where not measured. ``attrs["per"]`` says which of the two it is. ``matches`` is what
    :func:`collectives` gives.
    """
    if len(ranks) < 2:
        return unmeasured(RANK_COLUMNS, ONE)
    matches = collectives(ranks) if matches is None else matches
    marked = all(len(profile.iterations) for profile in ranks.values())
    rows = []
    for place, (rank, profile) in enumerate(ranks.items()):
        first, last, length = window(profile, marked)
        count = len(profile.iterations) if marked else 1
        row: dict[str, Any] = {"rank": rank, "iterations": len(profile.iterations)}
        row["step_ms"] = length / 1e6 / count
        row |= _gpu_ms(profile, first, last, count)
        row["idle_ms"] = row["step_ms"] - row["busy_ms"]
        if len(matches):
            wait, start = matches.attrs["waits"][:, place], matches.attrs["starts"][:, place]
            inside = (start >= first) & (start < last)
            counted = inside & matches["counted"].to_numpy()
            late = counted & matches["last_rank"].eq(rank).to_numpy()
            took_part = matches["ranks"].to_numpy()[late]
            others = matches["wait_us"].to_numpy()[late] * took_part / (took_part - 1)
            sums = {
                "transfer_ms": matches["transfer_us"].to_numpy()[counted].sum(),
                "waiting_ms": wait[counted].sum(),
                "start_ms": wait[inside & ~counted].sum(),
                "others_wait_ms": others.sum(),
            }
            row |= {name: value / 1e3 / count for name, value in sums.items()}
            row["last_in"] = int(late.sum())
        rows.append(row)
    table = pd.DataFrame(rows).reindex(columns=RANK_COLUMNS)
    table.attrs["per"] = PER_ITERATION if marked else "in the whole recording"
    return table


def window(profile: Profile, marked: bool) -> tuple[int, int, int]:
    """(first, last, summed length) of the iterations, or of the recording; ns."""
    spans = profile.iterations if marked else profile.trace
    first, last = extent(spans)
    length = int((spans["end_ns"] - spans["start_ns"]).sum()) if marked else last - first
    return first, last, length


def work_within(profile: Profile, first: int, last: int) -> pd.DataFrame:
    """Rows of the GPU's trace within a window, cut at its ends."""
    work = of_streams(profile)
    work = work[(work["end_ns"] > first) & (work["start_ns"] < last)]
    return work.assign(
        start_ns=work["start_ns"].clip(lower=first), end_ns=work["end_ns"].clip(upper=last)
    )


def _gpu_ms(profile: Profile, first: int, last: int, count: int) -> dict[str, float]:
    """``busy_ms``, ``compute_ms``, ``communication_ms``, ``exposed_ms``; NaN without a GPU."""
    work = work_within(profile, first, last)
    names = ("busy_ms", "compute_ms", "communication_ms", "exposed_ms")
    if work.empty:
        return dict.fromkeys(names, np.nan)
    context = work["context"].to_numpy()
    kernel, exchanges = profile.of_kind("kernel")[context], exchange_kernels(profile)[context]
    busy, compute, communication, rest = (
        union_ns(*start_and_end(some)) / 1e6 / count
        for some in (work, work[kernel & ~exchanges], work[exchanges], work[~exchanges])
    )
    return dict(zip(names, (busy, compute, communication, busy - rest), strict=True))


def parts_over_ranks(ranks: Ranks) -> pd.DataFrame:
    """Device time of each part over the ranks, per iteration where every rank has iterations.

    Durations of kernels and copies are summed, so that what runs at once counts twice. In the order
    of a step; empty, with the reason, without a GPU. ``attrs["per"]``, ``attrs["each"]``: the same,
    a column a rank.
    """
    if len(ranks) < 2:
        return unmeasured(PART_COLUMNS, ONE)
    marked = all(len(profile.iterations) for profile in ranks.values())
    columns = {}
    for rank, profile in ranks.items():
        first, last, _ = window(profile, marked)
        work = work_within(profile, first, last)
        part = parts_at(profile, work["context"].to_numpy())
        part["ms"] = (work["end_ns"] - work["start_ns"]).to_numpy() / 1e6
        count = len(profile.iterations) if marked else 1
        columns[rank] = part.groupby(PART)["ms"].sum() / count
    rank_ms = pd.DataFrame(columns).fillna(0.0)
    if rank_ms.empty:
        return unmeasured(PART_COLUMNS, "no work of a GPU is recorded")
    table = pd.DataFrame(
        {
            "mean_ms": rank_ms.mean(axis=1),
            "least_ms": rank_ms.min(axis=1),
            "most_ms": rank_ms.max(axis=1),
            "most_rank": rank_ms.idxmax(axis=1),
        }
    )
    table = in_step_order(table.rename_axis(index=PART).reset_index())
    table.attrs["per"] = PER_ITERATION if marked else "in the whole recording"
    table.attrs["each"] = rank_ms
    return table
