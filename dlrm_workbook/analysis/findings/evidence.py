"""What the rules look at, computed once from a profile.

A step's wall time on its thread splits into time on a core, time ready but without a
core (``run_queue``) and time in which it waited for something (``blocked``). Time on a
core splits by part, and a part's time into what it takes alone (its probe) and an
excess. Every rule explains one of these pieces; what no rule explains is left to the
rule of last resort, so no cause goes unreported because nobody foresaw it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import pandas as pd

from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.errors import InputError
from dlrm_core.units import milliseconds
from dlrm_workbook.analysis.attribution import per_iteration
from dlrm_workbook.analysis.operators import top_operators
from dlrm_workbook.analysis.roofline import roofline
from dlrm_workbook.recordings.profile import Profile

Part = tuple[str, str]

ALL = 100_000
"""More operators than any trace has."""

PROFILER_MS = 0.01
"""Most that torch.profiler adds to an operator, with shapes and memory recorded."""


def heaviest(operators: pd.DataFrame, count: int = 4, column: str = "cpu_self_ms") -> str | None:
    """The operators that take most of the time, with their milliseconds; None if none does."""
    top = operators.groupby("name")[column].sum().nlargest(count)
    listed = [f"{name} {milliseconds(ms)}" for name, ms in top.items() if ms > 0]
    return ", ".join(listed) or None


class Evidence:
    """A profile and its attribution, with the figures that rules ask for.

    Every figure is None (or an empty table) where it was not measured.
    """

    def __init__(
        self,
        profile: Profile,
        attribution: pd.DataFrame,
        ranks: Mapping[int, Profile] | None = None,
    ) -> None:
        self.profile = profile
        self.attribution = attribution
        self.ranks = ranks or {}
        self.meta = profile.meta
        self.device = profile.device
        self.on_gpu = profile.device == "cuda"
        self.total_ms = float(attribution["time_ms"].sum()) if len(attribution) else 0.0

    # ---- parameters ---------------------------------------------------------------

    def parameter(self, name: str, default: Any = None) -> Any:
        """The value of ``section.leaf`` in the measured run."""
        section, _, leaf = name.partition(".")
        value = ((self.meta.get("parameters") or {}).get(section) or {}).get(leaf)
        return default if value is None else value

    @cached_property
    def parameters(self) -> Parameters | None:
        """The run's parameters, if they are whole and valid."""
        try:
            return parameters_from_sections(self.meta.get("parameters") or {})
        except (InputError, TypeError):
            return None

    @property
    def threads(self) -> int | None:
        """Threads of one operator."""
        threads = self.meta.get("threads") or self.parameter("training.threads")
        return int(threads) if threads else None

    @property
    def cores(self) -> int | None:
        """Cores that the process may use."""
        machine = self.meta.get("machine") or {}
        cores = machine.get("usable_cores") or machine.get("cores")
        return int(cores) if cores else None

    # ---- parts --------------------------------------------------------------------

    @cached_property
    def operators(self) -> pd.DataFrame:
        """All rows of :func:`top_operators`; ``cpu_self_ms`` of a mean iteration."""
        return top_operators(self.profile, count=ALL)

    @cached_property
    def called(self) -> pd.DataFrame:
        """Operators alone (no ranges, no Python), as in :attr:`operators`."""
        return self.operators[self.operators["kind"] == "operator"]

    def of_part(self, component: str, phase: str | None = None) -> pd.DataFrame:
        """Rows of :attr:`operators` of a component, or of one phase of it."""
        table = self.operators[self.operators["component"] == component]
        return table if phase is None else table[table["phase"] == phase]

    @cached_property
    def parts(self) -> pd.DataFrame:
        """One row per (component, phase): ``time_ms`` without the profiler's cost,
        ``traced_ms`` as attributed, ``calls`` (operators per iteration), ``python_ms``
        (the range's own time, outside every operator), ``alone_ms`` (its probe; NaN)."""
        keys = ["component", "phase"]
        table = self.attribution.groupby(keys, sort=False)[["time_ms"]].sum()
        table = table.rename(columns={"time_ms": "traced_ms"})
        calls = self.called.groupby(keys)["calls"].sum()
        table["calls"] = calls.reindex(table.index).fillna(0.0)
        ranges = self.operators[self.operators["kind"].isin(["annotation", "python"])]
        table["python_ms"] = ranges.groupby(keys)["cpu_self_ms"].sum().reindex(table.index)
        # The profiler's cost goes with the operators, up to what it can be; what is left of
        # the difference was the machine's, and goes with the time.
        cost = min(max(0.0, self.total_ms - self.step_ms), PROFILER_MS * table["calls"].sum())
        weight = table["calls"] / table["calls"].sum() if table["calls"].sum() else 0.0
        table["time_ms"] = (table["traced_ms"] - cost * weight).clip(lower=0.0)
        total = float(table["time_ms"].sum())
        if total > self.step_ms > 0:
            table["time_ms"] *= self.step_ms / total
        table["alone_ms"] = [self.alone(*part) for part in table.index]
        table["alone_ms"] = table["alone_ms"].astype(float)
        return table

    def time(self, component: str, phase: str | None = None) -> float:
        """Time of a component, or of one phase of it, ms per iteration."""
        chosen = self.attribution["component"] == component
        if phase is not None:
            chosen &= self.attribution["phase"] == phase
        return float(self.attribution.loc[chosen, "time_ms"].sum())

    def share(self, component: str, phase: str | None = None) -> float:
        """Share of the step, 0 to 1; 0 if nothing was measured."""
        return self.time(component, phase) / self.total_ms if self.total_ms > 0 else 0.0

    def alone(self, component: str, phase: str) -> float | None:
        """Milliseconds that the part's probe took, alone, before the run."""
        base = (self.meta.get("part_probes") or {}).get("base") or {}
        value = (base.get(component) or {}).get(phase)
        return float(value) if value is not None and math.isfinite(value) else None

    @cached_property
    def steps(self) -> pd.DataFrame:
        """Time of each part (columns) in each iteration (rows), ms."""
        each = per_iteration(self.profile)
        if each.empty:
            return pd.DataFrame()
        return each.pivot_table(
            "time_ms", "iteration", ["component", "phase"], aggfunc="sum", fill_value=0.0
        )

    @cached_property
    def step_ms(self) -> float:
        """Usual time of an iteration without the profiler; with it where only that is known."""
        plain = self.meta.get("unprofiled_iteration_ms") or []
        # the median: one disturbed iteration must not pass for the step
        return min(self.total_ms, statistics.median(plain)) if plain else self.total_ms

    # ---- probes -------------------------------------------------------------------

    @property
    def probed(self) -> list[dict[str, Any]]:
        """The changes whose parts were timed beside the run: ``dlrm_workbook.evidence.probes``."""
        results = (self.meta.get("part_probes") or {}).get("changes") or []
        return [result for result in results if not result.get("refused")]

    # ---- counters -----------------------------------------------------------------

    @cached_property
    def counters(self) -> pd.DataFrame:
        """The system's counters, one row per iteration: without the profiler where there are
        at least three such, else all. Empty if nothing was counted."""
        columns: Mapping[str, Any] = self.meta.get("counters") or {}
        length = len(columns.get("wall_ms") or [])
        table = pd.DataFrame(
            {name: value for name, value in columns.items() if len(value) == length}
        )
        if "profiled" in table:
            plain = table[~table["profiled"].astype(bool)]
            if len(plain) >= 3:
                table = plain
        return table.reset_index(drop=True)

    def counter(self, name: str) -> float | None:
        """Mean of a counter per iteration."""
        if name not in self.counters or self.counters.empty:
            return None
        value = float(pd.to_numeric(self.counters[name], errors="coerce").mean())
        return value if math.isfinite(value) else None

    def counted(self, name: str) -> float:
        """Mean of a counter per iteration; 0 where it was not measured."""
        return self.counter(name) or 0.0

    def share_of_wall(self, name: str) -> float:
        """A time counter over the wall time of the same iterations; 0 where not measured."""
        wall = self.counter("wall_ms")
        return self.counted(name) / wall if wall else 0.0

    def machine_share(self, name: str) -> float:
        """As :meth:`share_of_wall`, or that of all iterations if it is larger: what disturbed
        only the profiled ones also disturbed the profile."""
        columns = self.meta.get("counters") or {}
        walls, values = columns.get("wall_ms") or [], columns.get(name) or []
        every = sum(values) / sum(walls) if len(walls) == len(values) and sum(walls) else 0.0
        return max(every, self.share_of_wall(name))

    @cached_property
    def wall_ms(self) -> float:
        """Mean wall time of the counted iterations, else of the step."""
        return self.counter("wall_ms") or self.step_ms

    def ceiling(self, name: str) -> Any:
        """An entry of the machine's measured ceilings, or None."""
        return (self.meta.get("ceilings") or {}).get(name)

    @property
    def dispatch_ms(self) -> float | None:
        """Host cost of one tiny operator."""
        value = self.ceiling("dispatch_us")
        return 1e-3 * float(value) if value else None

    @cached_property
    def roofline(self) -> pd.DataFrame:
        """As :func:`dlrm_workbook.analysis.roofline.roofline`; empty without ceilings."""
        columns = ["component", "phase", "time_ms", "gb_per_s", "gflops", "ceiling_ms"]
        nothing = pd.DataFrame({c: [] for c in [*columns, "share_of_ceiling", "limit", "ceiling"]})
        if not self.meta.get("ceilings"):
            return nothing
        try:
            table = roofline(self.profile, self.attribution)
        except (InputError, KeyError):
            return nothing
        return table.dropna(subset=["share_of_ceiling", "ceiling_ms"])

    @property
    def tables(self) -> list[Mapping[str, Any]]:
        """What was counted of each embedding table's indices; empty if nothing was."""
        return (self.meta.get("data_statistics") or {}).get("tables") or []

    @property
    def table_rows(self) -> list[int]:
        """Rows of each embedding table; empty if the parameters are not known."""
        rows = [int(row) for row in self.parameter("model.table_rows", [])]
        count = int(self.parameter("model.tables", 0) or 0)
        return rows * count if len(rows) == 1 and count else rows

    @cached_property
    def excess_ms(self) -> pd.Series:
        """What each part takes beyond what it takes alone; only parts with a probe."""
        known = self.parts.dropna(subset=["alone_ms"])
        return (known["time_ms"] - known["alone_ms"]).clip(lower=0.0)
