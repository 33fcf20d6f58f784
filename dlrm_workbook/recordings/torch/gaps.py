"""Parts of the time that passes on the training thread outside of operators.

Between two operators Python runs, or autograd's engine. Names give the part of much of it
(:mod:`dlrm_workbook.recordings.foreign`); the neighbours give the rest, where they leave no
doubt:

* what lies between two calls of the same part and phase, of one pass, is that part's, unless
  operators of no known part take a third of it: then another part of the model runs there;
* what autograd does before its first node belongs to the loss, whose gradient it makes;
* what it does after its last node, in a program with DistributedDataParallel, is that one's final
  callback: it waits for the exchange of gradients and copies them back.

Everything else stays ``other``, above all what lies between two different parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from dlrm_workbook.ground.arrays import Bools, Ints, Names
from dlrm_workbook.recordings.foreign import ENGINE_PREFIX
from dlrm_workbook.recordings.nesting import innermost
from dlrm_workbook.recordings.profile import matching, nearest

GAP = "between operators"
"""Name of the spans that stand for such time within a longer one of several parts."""

PASSING = ("data", "bottom_mlp", "embedding", "interaction", "top_mlp", "communication")
"""Parts whose calls enclose nothing of other parts; code between two steps of an optimizer, or
two losses, may be anything."""

MOST_UNKNOWN = 0.35
"""Share of the time between two calls of a part that operators of no known part may take."""

ENGINE_CALL = "_engine_run_backward"
"""The Python function within which autograd's engine runs."""

REDUCER = "torch::distributed::reducer::"
"""What operators of DistributedDataParallel's reducer are called after."""


def fill_gaps(
    host: pd.DataFrame, component: Names, phase: Names, iterations: Sequence[tuple[int, int]]
) -> tuple[pd.DataFrame, Names, Names]:
    """The spans with further ones for time outside of operators whose part is known.

    Args:
        host: nested spans, callers before callees, those of profile 0 first: the training thread.
        component, phase: (n,) of every span, ``other`` where no name tells.
        iterations: (start, end) ns of each.

    Returns:
        The spans, new ones at their end (kind ``python``, name :data:`GAP`), and component and
        phase of all of them.
    """
    main = host[host["profile"].eq(0)]
    if main.empty or not main["kind"].eq("python").any():
        return host, component, phase
    start, end, parent = (main[name].to_numpy() for name in ("start", "end", "parent"))
    edges = np.unique(np.concatenate([start, end]))
    begin, until = edges[:-1], edges[1:]
    owner = innermost(start, end, parent, begin)
    held = owner >= 0
    if not held.any():  # no span lasts
        return host, component, phase
    begin, until, owner = begin[held], until[held], owner[held]
    components = np.append(component[owner], ["loss", "communication"])
    phases = np.append(phase[owner], ["backward", "backward"])
    part, parts = pd.factorize(pd.MultiIndex.from_arrays([components, phases]))
    part, (loss, exchange) = part[: len(owner)], part[len(owner) :]
    operates = nearest(parent, main["kind"].eq("operator").to_numpy()) >= 0
    given = _by_neighbours(begin, until, part, parts, operates[owner], iterations)
    given = np.where(given >= 0, given, part)
    table = list(parts)
    unknown = np.array([name == "other" for name, _ in table], dtype=bool)
    waits = matching(main["name"], lambda name: name.startswith(REDUCER)).any()
    nodes = matching(main["name"], lambda name: name.startswith(ENGINE_PREFIX))
    node_start, node_end = start[nodes], end[nodes]
    calls = matching(main["name"], lambda name: name.endswith(ENGINE_CALL))
    for call_start, call_end in zip(start[calls].tolist(), end[calls].tolist(), strict=True):
        inside = slice(*np.searchsorted(node_start, [call_start, call_end]))
        if not len(node_start[inside]):
            continue  # the nodes run on a thread of the engine's own
        here = unknown[given] & (begin >= call_start) & (until <= call_end)
        given[here & (until <= node_start[inside].min())] = loss
        if waits:
            given[here & (begin >= node_end[inside].max())] = exchange
    return _with_gaps(host, component, phase, (begin, until, owner), given, table)


def _by_neighbours(
    begin: Ints,
    until: Ints,
    part: Ints,
    parts: pd.Index,
    operates: Bools,
    iterations: Sequence[tuple[int, int]],
) -> Ints:
    """Part (n,) of stretches that lie between two of the same, −1 where that tells nothing.
    ``operates``: whether an operator runs during each stretch (n,)."""
    passing = np.array([name in PASSING for name, _ in parts], dtype=bool)
    has_part = np.array([name != "other" for name, _ in parts], dtype=bool)[part]
    place = np.arange(len(part))
    before = np.maximum.accumulate(np.where(has_part, place, -1))
    after = np.minimum.accumulate(np.where(has_part, place, len(part))[::-1])[::-1]
    inner = ~has_part & (before >= 0) & (after < len(part))
    before, after = np.maximum(before, 0), np.minimum(after, len(part) - 1)
    unknown = np.where(has_part, 0, until - begin)
    between = np.bincount(before, unknown, len(part))
    inner &= np.bincount(before, unknown * operates, len(part))[before] <= (
        MOST_UNKNOWN * between[before]
    )
    begins = np.array([first for first, _ in iterations], dtype=np.int64)
    inner &= np.searchsorted(begins, begin[before], "right") == np.searchsorted(
        begins, begin[after], "right"
    )
    inner &= (part[before] == part[after]) & passing[part[before]]
    return np.where(inner, part[before], -1)


def _with_gaps(
    host: pd.DataFrame,
    component: Names,
    phase: Names,
    stretches: tuple[Ints, Ints, Ints],
    part: Ints,
    table: list[tuple[str, str]],
) -> tuple[pd.DataFrame, Names, Names]:
    """Spans that are wholly one part's get that part; of others, a span of their own is cut."""
    begin, until, owner = stretches
    names, phases = (np.array(column, dtype=object) for column in zip(*table, strict=True))
    pieces = pd.DataFrame({"owner": owner, "told": part, "begin": begin, "until": until})
    pieces = pieces[component[owner] == "other"]
    several = pieces.groupby("owner")["told"].transform("nunique").to_numpy() > 1
    whole = pieces[~several].drop_duplicates("owner")
    component, phase = component.copy(), phase.copy()
    rows, given = whole["owner"].to_numpy(), whole["told"].to_numpy()
    component[rows], phase[rows] = names[given], phases[given]
    cut = pieces[several & (names[pieces["told"]] != "other")]
    if cut.empty:
        return host, component, phase
    added = host.iloc[cut["owner"].to_numpy()].assign(
        name=GAP,
        kind="python",
        start=cut["begin"].to_numpy(),
        end=cut["until"].to_numpy(),
        parent=cut["owner"].to_numpy(),
    )
    added["duration"] = added["end"] - added["start"]
    given = cut["told"].to_numpy()
    return (
        pd.concat([host, added], ignore_index=True),
        np.concatenate([component, names[given]]),
        np.concatenate([phase, phases[given]]),
    )
