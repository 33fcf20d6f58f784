"""What the rules look at, computed once from a profile.

A step's wall time on its thread splits into time on a core, time ready but without a
core (``run_queue``) and time in which it waited for something (``blocked``). Time on a
core splits by part, and a part's time into what it takes alone (its probe) and an
excess. Every rule explains one of these pieces; what no rule explains is left to the
rule of last resort, so no cause goes unreported because nobody foresaw it.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.parts import ITERATION_SPAN, SPAN_PREFIX
from dlrm_workbook.analysis.attribution import (
    basis,
    by_part,
    coverage,
    iteration_count,
    of_steady,
    parts_at,
    per,
    per_iteration,
    segments,
    windows,
)
from dlrm_workbook.analysis.findings.where import code_line, merged
from dlrm_workbook.analysis.gpu import kernel_table
from dlrm_workbook.analysis.gpu_limits import kernel_paces
from dlrm_workbook.analysis.idleness import Stretches, idle_pieces
from dlrm_workbook.analysis.kernel_names import kernel_name
from dlrm_workbook.analysis.launches import exchanging, launched_operations
from dlrm_workbook.analysis.lines import lines, statements
from dlrm_workbook.analysis.operators import top_operators
from dlrm_workbook.analysis.roofline import roofline
from dlrm_workbook.ground.arrays import Bools, Ints
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.foreign import is_iteration_function
from dlrm_workbook.recordings.nesting import overlap, stretches, union
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.chrome_trace import GRAPH_LAUNCH
from dlrm_workbook.recordings.torch.lines import MAIN
from dlrm_workbook.recordings.torch.sampling import is_user_code

Part = tuple[str, str]

ALL = 100_000
"""More operators than any trace has."""

MOST_LINES = 3
"""Lines of Python that a sentence names."""

PROFILER_MS = 0.01
"""Most that torch.profiler adds to an operator, with shapes and memory recorded."""


MOST_LISTED = 5
"""Names that a sentence lists of what the host was in, or of kernels."""

SLOWED_LAUNCHES = "PC sampling slowed the launches, so it caused part of this time itself."
UPPER_BOUND = (
    "CUDA graphs were launched, of whose kernels a profiler may record only some: it is an upper "
    "bound."
)


def heaviest(operators: pd.DataFrame, count: int = 4, column: str = "cpu_self_ms") -> str | None:
    """The operators that take most of the time, with their milliseconds; None if none does."""
    top = merged(operators.groupby("name")[column].sum()).nlargest(count)
    return listed_times(top[top > 0]) or None


def listed_times(times: pd.Series, more: str = "") -> str:
    """Names with their milliseconds, in the order given; ``more`` stands behind each."""
    return ", ".join(f"{name} {milliseconds(ms)}{more}" for name, ms in merged(times).items())


def by_kernel(profile: Profile, context: Any, ms: Any) -> pd.Series:
    """Time (ms) by the short names of kernels, of the ``MOST_LISTED`` that take most.

    Args:
        context: (m,) contexts of kernels, with the time (m,) of each.
    """
    names = profile.contexts["name"].iloc[context]
    short = [kernel_name(kernel).short or kernel for kernel in names]
    return pd.Series(np.asarray(ms)).groupby(short).sum().nlargest(MOST_LISTED)


def joined(*spans: Stretches) -> Stretches:
    """(start, end) of the time that any of these cover, ns."""
    return union(np.concatenate([s[0] for s in spans]), np.concatenate([s[1] for s in spans]))


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
        measured_here = self.is_ours and "database" not in self.meta
        self.basis = "the step" if measured_here else basis(profile)
        """What shares are shares of, in words: the step, the recording, ..."""
        self.per = "per iteration" if measured_here else per(profile)

    @cached_property
    def is_ours(self) -> bool:
        """Whether the program is this project's, by its parts: only then have parameters effect."""
        if self.meta.get("parameters") is not None:
            return True
        contexts = self.profile.contexts
        any_program = {ITERATION_SPAN} if self.meta.get("engine") == "hpctoolkit" else set[str]()
        parts = [n for n in set(contexts["name"]) - any_program if n.startswith(SPAN_PREFIX)]
        frames = contexts.loc[self.profile.of_kind("python"), ["name", "file"]].drop_duplicates()
        return bool(parts) or any(map(is_iteration_function, frames["name"], frames["file"]))

    # ---- parameters ---------------------------------------------------------------

    def parameter(self, name: str, default: Any = None) -> Any:
        """The value of ``section.leaf`` in the measured run."""
        section, _, leaf = name.partition(".")
        value = ((self.meta.get("parameters") or {}).get(section) or {}).get(leaf)
        return default if value is None else value

    @cached_property
    def parameters(self) -> Parameters | None:
        """The run's parameters, if they are whole and valid."""
        if not self.is_ours:
            return None
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
        """Cores that the process may use; of several ranks on a machine, its part of them."""
        machine = self.meta.get("machine") or {}
        cores = machine.get("usable_cores") or machine.get("cores")
        return max(1, int(cores) // int(machine.get("ranks") or 1)) if cores else None

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
        if self.attribution.attrs.get("left_out") or not self.is_ours:
            # the operators' table is of all iterations and all threads, the attribution of the
            # steady ones and the step's own thread
            table["python_ms"] = self._steady_python_ms().reindex(table.index)
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

    def _steady_python_ms(self) -> pd.Series:
        """Time of each part outside every operator in a mean steady iteration."""
        pieces = segments(self.profile, device=False)
        own = self.profile.of_kind("annotation", "python")[pieces["context"]]
        own &= pieces["context"].ge(0).to_numpy() & self.inside(pieces["start_ns"].to_numpy())
        pieces = pieces[own]
        length = (pieces["end_ns"] - pieces["start_ns"]) / 1e6 / len(self.windows[0])
        return by_part(self.profile, pieces["context"], pd.DataFrame({"ms": length}))["ms"]

    def lines_of(self, component: str) -> pd.DataFrame:
        """The user's lines of the step's thread that are for the same as a part is: making the
        batch, the optimizer, the model, or what is around it; most time first. Batches that
        workers or other threads make are made by lines of theirs."""
        roles = {"data": "batch", "optimizer": "optimizer", "other": "around"}
        table = lines(self.profile)
        chosen = table["role"].eq(roles.get(component, "model"))
        chosen &= table["file"].ne("") & table["time_ms"].gt(0)
        ahead = chosen & table["thread"].ne(MAIN) & (component == "data")
        return table[ahead if ahead.any() else chosen & table["thread"].eq(MAIN)]

    @cached_property
    def batch_ms(self) -> float:
        """Time of the statements that make the batch, ms per iteration; 0 where not known."""
        steps = statements(self.profile)
        chosen = steps["thread"].eq("main") & steps["role"].eq("batch")
        return float(steps.loc[chosen, "time_ms"].sum())

    def python_lines(self, component: str, phase: str) -> pd.DataFrame:
        """The user's lines whose own code, outside every operator, runs in a part; most first."""
        rows = self.pieces[self.pieces["where"].eq("host") & self.pieces["context"].ge(0)]
        code = self.profile.contexts.loc[rows["context"]]
        code = code.assign(time_ms=rows["ms"].to_numpy())
        code = code[code["component"].eq(component) & code["phase"].eq(phase) & code["line"].gt(0)]
        code = code.assign(function=code["name"].str.split(": ", n=1).str[-1])
        users = [is_user_code(*place) for place in zip(code["file"], code["function"], strict=True)]
        keys = ["file", "line", "function"]
        times = code[np.array(users, dtype=bool)].groupby(keys, as_index=False)[["time_ms"]].sum()
        return times.sort_values("time_ms", ascending=False)

    def said_lines(self, component: str, phase: str | None = None) -> str | None:
        """The lines that take most, as a sentence lists them: those of :meth:`lines_of`, or with a
        phase those of :meth:`python_lines`. None of a trace with frames of Python, which may be in
        other parts as well."""
        if not self.meta.get("lines") and not self.profile.trace.empty:
            return None
        table = self.lines_of(component) if phase is None else self.python_lines(component, phase)
        listed = [
            f"{code_line(str(row['function']), str(row['file']), int(row['line']))} "
            f"{milliseconds(float(row['time_ms']))}"
            for _, row in table.head(MOST_LINES).iterrows()
        ]
        return ", ".join(listed) or None

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

    @property
    def recorded_ms(self) -> float:
        """Mean steady iteration under the profiler, whatever the profile was scaled to."""
        reference = self.meta.get("reference") or {}
        return float(reference.get("recorded_ms", self.total_ms))

    # ---- the GPU ------------------------------------------------------------------

    @cached_property
    def device_ms(self) -> float:
        """Time of a mean step in which the GPU works."""
        on_gpu = self.attribution["where"].eq("device")
        return float(self.attribution.loc[on_gpu, "time_ms"].sum())

    def of_device(self, text: str) -> str:
        """The text with the device's own name where it is no GPU."""
        word = str(self.meta.get("accelerator") or "")
        return re.sub(r"\bGPU\b", lambda _: word, text) if word else text

    @property
    def whole(self) -> tuple[float, float]:
        """Time in which the GPU works, and from its first operation to its last, of the whole
        recording; ms."""
        start, end = stretches(launched_operations(self.profile))
        return (end - start).sum() / 1e6, (end[-1] - start[0]) / 1e6

    @property
    def low_coverage(self) -> bool:
        """Whether less than half of the time is in named parts."""
        return not coverage(self.attribution) >= 0.5

    @cached_property
    def has_timeline(self) -> bool:
        """Whether the recording says when the GPU worked, and so when it idled."""
        return self.on_gpu and self.device_ms > 0 and len(self.work) > 0

    @property
    def idle_ms(self) -> float:
        """Time of a mean step in which the GPU does nothing; 0 where that was not measured."""
        return self.total_ms - self.device_ms if self.has_timeline else 0.0

    @cached_property
    def windows(self) -> tuple[Ints, Ints]:
        """(start, end) of the iterations that the attribution is of, in order, ns."""
        table = of_steady(self.profile, windows(self.profile))
        return table["start_ns"].to_numpy(), table["end_ns"].to_numpy()

    @property
    def iterations(self) -> int:
        """Number of these iterations, no less than 1."""
        return max(len(self.windows[0]), 1)

    def inside(self, at: Ints) -> Bools:
        """Which moments (n,) lie in these iterations."""
        start, end = self.windows
        row = np.searchsorted(start, at, side="right") - 1
        if not len(start):
            return np.zeros(len(at), dtype=bool)
        return (row >= 0) & (at < end[np.maximum(row, 0)])

    @cached_property
    def pieces(self) -> pd.DataFrame:
        """The :func:`segments` of these iterations, with ``ms`` of a mean one: every moment belongs
        to the GPU's work, or while the GPU is idle to what the host is in."""
        pieces = segments(self.profile)
        pieces = pieces[self.inside(pieces["start_ns"].to_numpy())].reset_index(drop=True)
        length = pieces["end_ns"] - pieces["start_ns"]
        return pieces.assign(ms=length / 1e6 / self.iterations)

    def named(self, pattern: re.Pattern[str]) -> Bools:
        """Which contexts (n,) have a name in which the pattern is found."""
        return self.profile.which("name", lambda name: bool(pattern.search(name)))

    def spans(self, chosen: Bools) -> pd.DataFrame:
        """Rows of the trace that lie in the contexts chosen (n,)."""
        trace = self.profile.trace
        return trace[chosen[trace["context"].to_numpy()]]

    def calls(self, pattern: re.Pattern[str]) -> pd.DataFrame:
        """Rows of the trace, begun in these iterations, of calls in whose name it is found."""
        calls = self.spans(self.named(pattern))
        return calls[self.inside(calls["start_ns"].to_numpy())]

    def of_kernels(self, names: Iterable[str]) -> tuple[Ints, Any]:
        """Contexts and time (ms of a mean step) of the pieces in which kernels of these names run,
        those that begin the soonest where several run at once."""
        named = np.append(self.profile.which("name", set(names).__contains__), False)
        rows = self.pieces[named[self.pieces["context"]] & self.pieces["where"].eq("device")]
        return rows["context"].to_numpy(), rows["ms"].to_numpy()

    @cached_property
    def work(self) -> pd.DataFrame:
        """As :func:`launched_operations`, begun in these iterations."""
        work = launched_operations(self.profile)
        return work[self.inside(work["start_ns"].to_numpy())] if len(work) else work

    @cached_property
    def idle(self) -> pd.DataFrame:
        """As :func:`idle_pieces`, with ``component`` and ``phase`` of what the host is in: the
        stretches of these iterations in which the GPU does nothing, ``idle_ms`` of a mean one."""
        pieces = idle_pieces(self.profile)
        if pieces.empty:
            return pieces.assign(component=[], phase=[])
        start = pieces["start_ns"].to_numpy()
        pieces = pieces[self.inside(start) & ~pieces["copying"]].reset_index(drop=True)
        pieces["idle_ms"] /= len(self.windows[0])
        return pieces.join(parts_at(self.profile, pieces["context"].to_numpy()))

    @cached_property
    def feeding_ms(self) -> float:
        """Idle time of the GPU in a mean step while the host launches work in the data part, such
        as copies of the batch: that is no time in which the batch is made."""
        if self.is_ours or not self.has_timeline:
            return 0.0
        rows = self.idle[self.idle["component"].eq("data") & self.idle["cause"].ne("data")]
        return float(rows["idle_ms"].sum())

    def alone_ms(self, chosen: pd.DataFrame, beside: pd.DataFrame) -> tuple[float, float]:
        """Time of a mean step in which any of some operations runs, and that of it in which no
        operation of ``beside`` does; rows of :attr:`work`, of which what runs on after their
        iteration is left out."""
        begun, windows = chosen["start_ns"].to_numpy(), self.windows
        row = np.searchsorted(windows[0], begun, side="right") - 1
        start, end = union(begun, np.minimum(chosen["end_ns"].to_numpy(), windows[1][row]))
        count = 1e6 * self.iterations
        whole = float((end - start).sum())
        both = float(overlap(start, end, *stretches(beside)).sum())
        return whole / count, (whole - both) / count

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """As :func:`kernel_table`, with ``ms`` of a mean step."""
        table = kernel_table(self.profile)
        each = table["time_ms"] / iteration_count(self.profile)
        table = table.astype({"kernel": object, "short_name": object})  # also where there is none
        return table.assign(ms=table["per_iteration_ms"].fillna(each))

    @cached_property
    def paces(self) -> dict[str, tuple[str, str]]:
        """As :func:`dlrm_workbook.analysis.gpu_limits.kernel_paces`."""
        return kernel_paces(self.profile) if self.on_gpu else {}

    def pace_of(self, kernel: str) -> str | None:
        """How near the limits the operator runs at which a kernel does most, as a sentence."""
        place, pace = self.paces.get(kernel, ("", ""))
        return f"{place} {pace}." if pace else None

    @property
    def is_exchange(self) -> pd.Series:
        """Which rows of :attr:`work` are kernels that exchange data between ranks."""
        return exchanging(self.profile, self.work)

    @cached_property
    def exchange_ms(self) -> tuple[float, float]:
        """Time of a mean step in which ranks exchange data, and that of it in which the GPU does
        nothing else."""
        exchange = self.is_exchange
        return self.alone_ms(self.work[exchange], self.work[~exchange])

    @property
    def has_graphs(self) -> bool:
        """Whether CUDA graphs were launched, of whose kernels a profiler may record only some."""
        calls = self.profile.contexts.loc[self.profile.of_kind("runtime"), "name"]
        return bool(calls.str.match(GRAPH_LAUNCH).any())

    @property
    def doubt(self) -> str | None:
        """Why idle time and gaps of this recording are not to be taken at their word."""
        reasons = [SLOWED_LAUNCHES] if self.meta.get("serialised") else []
        reasons += [UPPER_BOUND] if self.has_graphs else []
        return " ".join(reasons) or None

    @property
    def capability(self) -> int | None:
        """First figure of the GPU's compute capability."""
        for device in self.meta.get("devices") or []:
            major = str(device.get("compute") or "").partition(".")[0]
            if major.isdigit():
                return int(major)
        return None

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

    @property
    def meanwhile(self) -> str | None:
        """A sentence on what the system counted of the step's thread, as far as it is unusual."""
        counted = []
        for name, label in (
            ("run_queue_ms", "waited for a core"),
            ("blocked_ms", "waited for something else"),
            ("gc_ms", "collected garbage"),
        ):
            share = self.share_of_wall(name)
            if share >= 0.01:
                counted.append(f"{label} in {share:.0%} of the time")
        faults = self.counted("minor_faults")
        if faults >= 1000:
            counted.append(f"met {faults:,.0f} page faults per iteration")
        return f"Meanwhile the step's thread {', '.join(counted)}." if counted else None

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
        probed = self.parts.dropna(subset=["alone_ms"])
        return (probed["time_ms"] - probed["alone_ms"]).clip(lower=0.0)
