"""Profiles made of rows: a test says what matters to it, everything else has a plain value."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from dlrm_workbook.recordings.profile import Profile

CONTEXT = {"parent": -1, "kind": "annotation", "shapes": "", "file": "", "line": 0, "module": ""}
CONTEXT |= {"component": "other", "phase": ""}
"""What a context is where nothing is said."""

BOTH = ("exclusive", "inclusive")


def bare_profile(**meta: Any) -> Profile:
    """A profile that says something of itself and holds nothing."""
    return Profile.build(contexts=None, metrics=None, values=None, threads=None, meta=meta)


def profile_of_rows(
    contexts: Mapping[str, Any],
    values: Sequence[tuple[int, int, str, str, float]] = (),
    trace: Sequence[tuple[int, int, int, int, int]] = (),
    iterations: Sequence[tuple[int, int, int]] = (),
    streams: Sequence[str] = (),
    **meta: Any,
) -> Profile:
    """A profile of one CPU thread (number 0), and of streams of a GPU (from 1).

    Args:
        contexts: columns; ``name`` and those of :data:`CONTEXT` that differ from it.
        values: thread, context, metric, scope and value.
        trace: thread, start and end in ns, context, depth.
        iterations: number, start and end in ns.
        streams: names.
    """
    columns = ["profile", "start_ns", "end_ns", "context", "depth"]
    threads = [{"profile": 0, "kind": "cpu_thread", "name": "main", "rank": 0, "thread": 1}]
    for number, name in enumerate(streams, 1):
        stream = {"profile": number, "kind": "gpu_stream", "name": name}
        threads.append(stream | {"rank": 0, "thread": number + 1})
    table = pd.DataFrame(values, columns=["profile", "context", "metric", "scope", "value"])
    plain = {"unit": "ms", "meaning": "time", "source": "test"}
    return Profile.build(
        contexts={"context": range(len(contexts["name"])), **CONTEXT, **contexts},
        metrics=[{"metric": name, **plain} for name in dict.fromkeys(table["metric"])],
        values=table if len(table) else None,
        threads=threads,
        trace=pd.DataFrame(trace, columns=columns),
        iterations=pd.DataFrame(iterations, columns=["iteration", "start_ns", "end_ns"]),
        meta=meta,
    )
