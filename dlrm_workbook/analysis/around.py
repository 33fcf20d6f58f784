"""What a training loop does beside its model, its optimizer and its batch, by what it calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from dlrm_workbook.analysis.context_tree import unmeasured
from dlrm_workbook.analysis.lines import LineTable, growth, known_moments, place
from dlrm_workbook.ground.arrays import Floats
from dlrm_workbook.recordings.profile import Profile

AROUND = ["file", "line", "function", "caller", "time_ms", "share", "in_iterations", "growth_ms"]
AROUND += ["iterations"]

MOST_OF_IT = 0.7
"""Share of a time from which on the function that has it is named instead of its caller."""

LEAST_GROWN = 0.3
"""Share of a time by which it must grow within the sampled iterations."""


def around(profile: Profile) -> pd.DataFrame:
    """What the loop does beside the model, its optimizer and its batch, most time first.

    Returns:
        One row for each line of the step that calls a function of the user's, and one for all
        lines of a step function that call none: ``file``, ``line`` and ``function`` where most of
        that time is, ``caller`` (FILE:LINE in the step), ``time_ms`` (of a mean iteration, with
        all that is called), ``share`` (of the time of all iterations), ``in_iterations`` and
        ``growth_ms`` as in :func:`~dlrm_workbook.analysis.lines.lines`, ``iterations`` (how many
        were sampled). Empty where no stack is known, or none of them runs a step.
    """
    known = known_moments(profile)
    if known is None or not known["iteration_ms"]:
        return unmeasured(AROUND, "no stack was sampled", profile, "lines")
    table: pd.DataFrame = profile.once("lines around", lambda: _Around(known).rows())
    if step := profile.meta.get("reference"):  # sampling costs time of its own
        pace = step["ms"] / np.mean(known["iteration_ms"])
        table = table.assign(**{name: table[name] * pace for name in ("time_ms", "growth_ms")})
    return table


class _Around(LineTable):
    """The paths that lie around the model, each from the statement of the step downwards."""

    def rows(self) -> pd.DataFrame:
        """Rows of :func:`around`, at the samples' pace."""
        main = self.moments[self.moments["thread"].eq(0)]
        below: dict[int, list[int]] = {}
        of_model: set[Any] = set()
        for number in main["path"].unique().tolist():
            path = self.paths[number]
            role, depth = self.roles.of(path)
            if role != "around":
                of_model |= {self.frames[frame][:2] for frame, _ in path}
            elif path and self.roles._instance(path, depth) in self.roles.steps:
                below[number] = [frame for frame, _ in path[depth:]]
        main = main[main["path"].isin(list(below))]
        units: dict[Any, list[int]] = {}
        for number, frames in below.items():
            file, first, _, line = self.frames[frames[0]]
            units.setdefault((file, first, line if len(frames) > 1 else 0), []).append(number)
        rows = [self._row(main[main["path"].isin(own)], below, of_model) for own in units.values()]
        table = pd.DataFrame(rows, columns=AROUND)
        return table.sort_values("time_ms", ascending=False, ignore_index=True)

    def _row(self, own: pd.DataFrame, below: dict[int, list[int]], of_model: set[Any]) -> list[Any]:
        chains = [below[path] for path in own["path"]]
        times = own["ms"].tolist()
        statement = self._most(times, [chain[0] for chain in chains])
        named, depth = statement, 1
        while True:  # as far down as most of the time goes one way, but not into the model
            reached = [self.frames[c[depth]][:2] if len(c) > depth else None for c in chains]
            function = self._most(times, reached)
            held = sum(t for t, name in zip(times, reached, strict=True) if name == function)
            if function is None or function in of_model or held < MOST_OF_IT * sum(times):
                break
            here = [
                c[depth] if name == function else None
                for c, name in zip(chains, reached, strict=True)
            ]
            named, depth = self._most(times, here), depth + 1
        by_step = own.groupby("iteration")[["ms", "samples"]].sum()
        by_step = by_step.reindex(range(self.count), fill_value=0.0)
        file, _, function_name, line = self.frames[named]
        caller = place(self.frames[statement][0], self.frames[statement][3])
        presence = self._presence(by_step["samples"].to_numpy()[None])[0]
        time = sum(times) / self.count
        slope = self._growth(by_step["ms"].to_numpy(), time)
        shares = [time, time / self.step_ms, presence, slope, self.count]
        return [file, line, function_name, caller, *shares]

    def _growth(self, ms: Floats, time: float) -> float:
        """Slope of a time (iterations,) whose mean is given; 0 where it grows by little, or no
        more than the rest of the iteration, as where the machine is slowed down."""
        rest = np.maximum(np.asarray(self.known["iteration_ms"]) - ms, 1e-9)
        slope = float(min(growth(np.stack([ms, ms / rest * rest.mean()]))))
        return slope if slope * self.count > LEAST_GROWN * time else 0.0

    @staticmethod
    def _most(times: Sequence[float], names: Sequence[Any]) -> Any:
        """The name, other than None, that has most of the time; None where there is no other."""
        held: dict[Any, float] = {}
        for time, name in zip(times, names, strict=True):
            held[name] = held.get(name, 0.0) + time
        held.pop(None, None)
        return max(held, key=lambda name: held[name], default=None)
