"""Recording the iterations of any training loop with torch.profiler.

A :class:`Session` learns where each iteration ends and decides the rest: which iterations warm
up, which are timed without the profiler and which with it. Our own workload
(:mod:`dlrm_workbook.recordings.torch.recorder`), programs that are measured without being edited
(:mod:`dlrm_workbook.recordings.torch.inject`) and loops that say it themselves (:class:`record`)
are recorded by it alike. Needs torch and numpy only.

Times and details of a foreign program are recorded in iterations of their own, since shapes and
memory slow down what they describe. One iteration alone under the profiler decides how many more
are recorded, and with what.

The folder that it leaves holds

* ``trace.json.gz``: torch's chrome trace,
* ``trace_details.json.gz``: the same of some later iterations, with shapes and memory, where the
  former has none,
* ``key_averages.json``: per operator and shapes, with the FLOPs that no trace has,
* ``recording.json``: iteration times, the system's counters of each iteration, dilation,
  circumstances, what was not measured,
* ``python.json``: the Python stacks of a foreign program, sampled meanwhile,
* ``lines.json``: the stacks of all threads, sampled in iterations without the profiler, and what
  :mod:`~dlrm_workbook.recordings.torch.counting` saw in the last iteration.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import shlex
import statistics
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import whole_folder, write_text
from dlrm_workbook.evidence.counters import NO_GPU_USED, IterationCounters
from dlrm_workbook.ground import heap
from dlrm_workbook.ground.machine import machine_facts, memory_limit, ranks_here
from dlrm_workbook.ground.marks import PART_PREFIX, STEP_MARK, parse_part
from dlrm_workbook.ground.processes import without_collection
from dlrm_workbook.recordings.torch import RECORDED_PASS, RECORDING_VERSION, UNKNOWN_MODEL
from dlrm_workbook.recordings.torch.counting import LineCounter
from dlrm_workbook.recordings.torch.modules import ModuleRanges
from dlrm_workbook.recordings.torch.sampling import SOON, StackSampler, sources
from dlrm_workbook.recordings.torch.seen_model import SeenModel
from dlrm_workbook.recordings.torch.workers import WorkerSamples

if TYPE_CHECKING:
    from dlrm_workbook.recordings.torch.trials import Trials

WARM_UP, BEFORE, FIRST, PROFILED = "warm-up", "before", "first", "profiled"
DETAILS, AFTER, SAMPLED, COUNTED = "details", "after", "sampled", "counted"
"""Phases of a session, in their order: not measured, timed, recorded alone to see how much that
is, recorded, recorded with shapes and memory, timed, run with nothing but Python stacks sampled,
and one iteration whose lines are counted."""

PAUSES = ("first pause", "second pause")
"""An iteration between two recordings. An iteration ends in the range of an optimizer's step: torch
writes into freed memory, and crashes later, where such a range was opened under one profiler and
is closed under the next."""

DOING = {
    WARM_UP: "iterations to warm up",
    BEFORE: "iterations timed without the profiler",
    FIRST: "iteration recorded to see how much that is",
    PROFILED: "iterations recorded",
    DETAILS: "iterations recorded with shapes and memory",
    AFTER: "iterations timed without the profiler",
    SAMPLED: "iterations with Python's stacks sampled",
    COUNTED: "iteration with its lines counted",
    **dict.fromkeys(PAUSES, "iteration between two recordings"),
}
WRITING = "writing what was recorded"
"""What a session does in each phase, for whoever waits, and after the last."""

TRACES = {FIRST: "trace.json.gz", PROFILED: "trace.json.gz", DETAILS: "trace_details.json.gz"}
"""The file for the trace of a phase; the recorded iterations replace the first one."""

DETAILED_ITERATIONS = 3
"""Iterations of a foreign program in which shapes and memory are recorded."""

MOST_EVENTS = 300_000
"""Events that are recorded with their times at most, but never less than one iteration. Each takes
1.5 kB of memory, and 20 to 50 us to be written, read and explained."""

MOST_DETAILED = 75_000
"""The same with shapes and memory, whose averages by shapes take 4.5 kB and 30 us an event."""

SLOWEST = 3
"""Recorded iterations take so many times as long as without the profiler at most,"""

SLOW_S = 10.0
"""and so many seconds more; fewer are recorded where they would take longer."""

MAX_COUNTING_SHARE = 0.005
"""Profiled iterations are counted as long as that takes no larger share of their time."""

FAULT_MS, LEAST_SPARED = 1e-3, 0.15
"""Time of a page fault, and the least share of an iteration that fewer of them must spare."""

SHORTEST = 5
"""An iteration of a foreign program must be so many times as long as reading the counters."""


@dataclass(frozen=True)
class Lengths:
    """How many iterations a session has of each kind.

    First ``warmup`` iterations run unmeasured, then ``profiled`` are recorded. Of ``unprofiled``
    ones, half run before and half after those, timed without the profiler: against them its
    dilation is stated, and a machine that slows down or speeds up meanwhile does not pass for it.
    In ``sampled`` ones after those the Python stacks are sampled, and then the lines of one are
    counted. An InputError says that a count is impossible.
    """

    profiled: int
    warmup: int = 2
    unprofiled: int = 0
    sampled: int = 0

    def __post_init__(self) -> None:
        if self.profiled < 1 or self.warmup < 0 or self.unprofiled < 0:
            raise InputError(
                "a recording needs iterations >= 1, warmup >= 0 and unprofiled >= 0, "
                f"not {self.profiled}, {self.warmup} and {self.unprofiled}"
            )

    def phases(self, detail: Detail, ours: bool) -> list[Phase]:
        """What is switched on in which iterations, in their order."""
        full = {
            "record_shapes": detail.record_shapes,
            "profile_memory": detail.profile_memory,
            "with_flops": detail.record_shapes,  # torch counts them from shapes
        }
        times = {"with_stack": detail.with_stack}
        apart = not ours and any(full.values())
        recorded = full | times if ours else times
        return [
            Phase(WARM_UP, self.warmup),
            Phase(BEFORE, self.unprofiled - self.unprofiled // 2, plain=True),
            Phase(FIRST, 0 if ours else 1, profiler=recorded, sampler=not ours),
            Phase(PAUSES[0], 0 if ours else 1),
            Phase(PROFILED, self.profiled, profiler=recorded, sampler=not ours),
            Phase(PAUSES[1], 1 if apart else 0),
            Phase(DETAILS, DETAILED_ITERATIONS if apart else 0, profiler=full | times),
            Phase(AFTER, self.unprofiled // 2, plain=True),
            Phase(SAMPLED, self.sampled, lines=True),
            Phase(COUNTED, min(self.sampled, 1), counted=True),
        ]


@dataclass
class Phase:
    """Successive iterations in which the same is switched on, and what was seen of them.

    Attributes:
        plain: nothing is; the system's counters are read after each, and laps are times.
        profiler: options of torch.profiler; None: it is off.
        sampler: whether the Python stack is sampled.
        lines: whether the stacks of all threads are.
        counted: whether runs of lines are counted.
        times_ms: how long each iteration that has ended took the host.
        all_ms: how long all of them took, with the device's work done.
        marks: when a mark was set between them, ns.
        moments: those that divide each of them; its end is last.
    """

    name: str
    iterations: int
    plain: bool = False
    profiler: dict[str, bool] | None = None
    sampler: bool = False
    lines: bool = False
    counted: bool = False
    times_ms: list[float] = field(default_factory=list)
    all_ms: float = 0.0
    marks: list[int] = field(default_factory=list)
    moments: list[list[tuple[str, float]]] = field(default_factory=list)
    stacks: StackSampler | None = None


@dataclass(frozen=True)
class Detail:
    """What is recorded besides when operators ran.

    Attributes:
        with_stack, record_shapes, profile_memory: as torch.profiler has them.
        ceilings: the limits of this machine, measured afterwards at the shapes that were
            recorded. Where the iterations are ours, that is done elsewhere.
    """

    with_stack: bool = False
    record_shapes: bool = True
    profile_memory: bool = False
    ceilings: bool = False


USUAL_DETAIL = Detail()


class Session:
    """Some iterations of a loop, recorded in a new folder.

    After each iteration, with the profiler and without, the system's counters are read
    (:mod:`dlrm_workbook.evidence.counters`).

    Args:
        folder: Must not exist. It appears only when whole.
        ours: The iterations open the range ``parts.ITERATION_SPAN`` and those of their parts.
            Where they do not, the session marks the end of each in the trace, opens ranges
            around groups of modules, times the laps between them with the profiler and
            without, and samples the Python stack while it records, so that what runs
            outside of operators has a name.
        information: Goes into ``recording.json`` as it is: ``parameters``,
            ``machine``, ``versions``, ``probes``, ``command``, ...
        progress: Called with (iterations done, iterations in all) after each.
        doing: Called with what is done next, whenever that changes.

    Raises:
        InputError: ``device`` is a GPU that is not there.
    """

    def __init__(
        self,
        folder: str | Path,
        lengths: Lengths,
        detail: Detail = USUAL_DETAIL,
        *,
        device: str | torch.device = "cpu",
        ours: bool = True,
        information: dict[str, Any] | None = None,
        progress: Callable[[int, int], object] | None = None,
        doing: Callable[[str], object] = lambda what: None,
    ) -> None:
        self.folder, self.device = Path(folder), torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        if self.on_gpu and not torch.cuda.is_available():
            raise InputError(f"cannot record on {self.device}: torch sees no GPU")
        self._detail = detail
        self._phases = {phase.name: phase for phase in lengths.phases(detail, ours)}
        self.information = dict(information or {})
        self.ours, self._progress, self._doing = ours, progress, doing
        self.done = 0
        """Iterations that have ended."""
        self._phase: Phase | None = None
        self._began = self._ended = self._phase_began = self._read_before = 0.0
        self._events = 0
        """Recorded in the first iteration."""
        self._profiler: profile
        """The one that runs, or that ran last."""
        self._cuts: dict[str, str] = {}
        """What is not measured since it would be too much, with the reason."""
        self._workers = WorkerSamples(self.folder)
        self._counter = LineCounter()
        self._sampled_ns: list[tuple[int, int]] = []
        """When each sampled iteration began and ended, ``perf_counter_ns``."""
        self._modules: ModuleRanges | None = None
        self._seen: SeenModel | None = None
        self._no_laps: str | None = None
        """Why no laps are timed."""
        self._counted: bool | None = None
        """Whether the counters read now are of iterations with a profiler; None reads none."""
        self._cheap = True
        self._threads = 0
        self._spared = False
        """Whether the program has fewer page faults since it was recorded."""
        self._stack = contextlib.ExitStack()

    @property
    def total(self) -> int:
        """Iterations in all, as far as that is known."""
        return sum(phase.iterations for phase in self._phases.values())

    @property
    def finished(self) -> bool:
        """Whether every iteration that is to be recorded or timed has ended."""
        return self.done >= self.total

    def __enter__(self) -> Session:
        """Begin the first iteration. An InputError says that the folder exists or cannot be
        written."""
        self._part = self._stack.enter_context(whole_folder(self.folder, "recording"))
        self._counters = self._stack.enter_context(IterationCounters(self.device))
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        if not self.ours:
            self._modules = ModuleRanges()
            self._start_laps(self._modules)
            if self._modules.missing is None and self._phases[WARM_UP].iterations > 0:
                self._seen = SeenModel(self._modules.roots)
                self._seen.start()  # in the first iteration, which is not measured
        self._begin_phase()
        return self

    @SOON
    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        """Write the folder; after an error there is none. An InputError says that the loop ended
        before an iteration was recorded, or that its iterations are too short to be measured."""
        with self._stack:
            self._end_phase()
            for hooked in (self._modules, self._seen):
                if hooked is not None:
                    hooked.stop()
            if error is not None:
                raise error  # through what is on the stack, which leaves no folder then
            if not self._recorded.times_ms:
                # two more: those before the session begins, see inject.py
                needed = 3 + sum(self._phases[name].iterations for name in (WARM_UP, BEFORE))
                raise InputError(
                    f"the training ended after {self.done} of {self.total} iterations to measure, "
                    f"before one was recorded; train at least {needed}, or lower "
                    "profiling.warmup and profiling.iterations"
                )
            self._refuse_too_short()
            self._write()

    def _refuse_too_short(self) -> None:
        """Refuse iterations of a foreign program that are hardly longer than what follows each. The
        InputError says how long both take."""
        cost_ms = self._counters.cost_ms()
        if self.ours or not self._plain_ms or cost_ms is None:
            return
        usual_ms = statistics.median(self._plain_ms)
        if usual_ms < SHORTEST * cost_ms:
            raise InputError(
                f"an iteration takes {usual_ms:.3f} ms, and reading the system's counters after it "
                f"{cost_ms:.3f} ms, so it is too short to be measured; train larger batches"
            )

    def step(self) -> None:
        """Say that an iteration has ended and the next one begins."""
        phase = self._phase
        if phase is None:
            return
        self._ended = time.perf_counter()
        self._counter.stop()
        phase.times_ms.append((self._ended - self._began) * 1e3)
        if phase.lines:
            self._sampled_ns.append((round(self._began * 1e9), round(self._ended * 1e9)))
        self._mark()
        if self._seen is not None:
            self._seen.stop()
        self._take_laps()
        if self._counted is not None:
            self._counters.snapshot(self.done, profiled=self._counted)
        self.done += 1
        if self._progress is not None:
            self._progress(self.done, self.total)
        if len(phase.times_ms) == phase.iterations:
            self._end_phase()
            if phase.name == FIRST:
                self._fit()
            self._begin_phase()
        self._began = time.perf_counter()

    # ---- phases ---------------------------------------------------------------------

    @SOON
    def _begin_phase(self) -> None:
        """Begin the first phase that has iterations to come; none where all are done."""
        left = (each for each in self._phases.values() if len(each.times_ms) < each.iterations)
        self._phase = phase = next(left, None)
        if phase is None:
            self._doing(WRITING)
            return
        self._counted = False if phase.plain else None
        self._doing(f"{phase.iterations} {DOING[phase.name]}")
        if phase.profiler is not None:
            self._start_profiler(phase.profiler)
        if (phase.lines or phase.counted) and self._modules is not None:
            self._modules.stop()
        if phase.sampler or phase.lines:
            plain = self._phases[BEFORE].times_ms
            usual_s = statistics.median(plain) / 1e3 if plain else None
            phase.stacks = StackSampler(threading.get_ident(), usual_s, others=phase.lines)
            phase.stacks.start()
        if phase.lines:
            self._workers.start()
        self._wait()
        self._read_before = sum(self._counters.cost_s)
        if self._counted is not None:
            self._counters.start()
        self._mark()
        self._phase_began = self._ended = self._began = time.perf_counter()
        if phase.counted:
            self._counter.start(sys._getframe())

    @SOON
    def _end_phase(self) -> None:
        """Note how long a phase took, whole or cut short; end the profiler after its own."""
        phase = self._phase
        if phase is None:
            return
        self._counter.stop()
        # No waiting in between: work that the GPU does while the host runs ahead
        # would otherwise be profiled as if it could not.
        self._wait()
        whole = len(phase.times_ms) == phase.iterations
        total_s = (time.perf_counter() if whole else self._ended) - self._phase_began
        if not self.on_gpu:  # a GPU computes while its host reads counters
            total_s -= sum(self._counters.cost_s) - self._read_before
        phase.all_ms = total_s * 1e3
        if phase.stacks is not None:
            phase.stacks.stop()
        if phase.lines:
            self._workers.stop()
        if phase.profiler is not None:
            if self._modules is not None:
                self._modules.ranges = False
            self._profiler.stop()
            if phase.times_ms:
                self._profiler.export_chrome_trace(str(self._part / TRACES[phase.name]))
            self._events = events_of(self._profiler) if phase.name == FIRST else self._events
            if phase.name != (PROFILED if self.ours else DETAILS):  # has no averages
                del self._profiler
                gc.collect()  # results are circles of objects, and large
            heap.restore()
        self._phase = None

    def _start_profiler(self, options: dict[str, Any]) -> None:
        heap.keep()
        self._threads = max(self._threads, threading.active_count())
        if self._phase is self._phases[PROFILED]:
            cost_ms, plain = self._counters.cost_ms(), self._phases[BEFORE].times_ms
            # whether reading the counters would not show in iterations of such length
            self._cheap = cost_ms is None or cost_ms <= MAX_COUNTING_SHARE * statistics.median(
                plain
            )
            self._counted = True if self._cheap else None
        gpu = [ProfilerActivity.CUDA] if self.on_gpu else []
        self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu], **options)
        if self._modules is not None:
            self._modules.start()
            self._modules.ranges = True
        self._profiler.start()

    def _fit(self) -> None:
        """Record no more than can be held and read, judged by the first recorded iteration."""
        profiled, details = self._phases[PROFILED], self._phases[DETAILS]
        events, took_ms = self._events, self._phases[FIRST].times_ms[0]
        plain, asked = self._phases[BEFORE].times_ms, profiled.iterations
        limit = MOST_EVENTS // max(events, 1)
        if plain:
            spent_ms = SLOWEST * asked * statistics.median(plain) + SLOW_S * 1e3
            limit = min(limit, int(spent_ms / took_ms))
        fitting = min(asked, limit)
        profiled.iterations = fitting if fitting > 1 else 0  # else the first is the recording
        if profiled.iterations < asked:
            size = f"An iteration runs {events:,} operators and ranges and takes {took_ms:,.0f} ms"
            recorded = max(fitting, 1)
            said = (
                f"{size} under the profiler, so {recorded} of {asked} iterations "
                f"{'is' if recorded == 1 else 'are'} recorded: times of parts scatter more."
            )
            self.information["notices"] = [*self.information.get("notices", []), said]
            print(f"dlrm: {said}", file=sys.stderr, flush=True)
        wanted = details.iterations
        details.iterations = min(wanted, MOST_DETAILED // max(events, 1), limit)
        if wanted and not details.iterations:
            why = (
                f"an iteration runs {events:,} operators and ranges, and their shapes and memory "
                f"are recorded up to {MOST_DETAILED:,}"
            )
            self._cuts = dict.fromkeys(("shapes", "allocated_bytes", "flops"), why)

    def _mark(self) -> None:
        phase = self._phase
        if phase is not None and phase.profiler is not None and not self.ours:
            phase.marks.append(time.perf_counter_ns())
            with record_function(STEP_MARK):
                pass

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    # ---- laps -----------------------------------------------------------------------

    def _start_laps(self, modules: ModuleRanges) -> None:
        """Time the laps of iterations from now on, unless that is known to tell nothing."""
        if self.on_gpu:
            self._no_laps = "on a GPU the time of a part is that of its kernels"
        elif modules.missing is not None:
            self._no_laps = modules.missing
        elif self._phases[WARM_UP].iterations < 1:
            self._no_laps = "no iteration warmed up, from which their cost would be known"
        else:
            modules.timed = True
            self._lap_cost_ms = modules.cost_s() * 1e3

    def _take_laps(self) -> None:
        """Keep the laps of the iteration that ended; after the warm-up time none that cost much."""
        phase = self._phase
        if self._modules is None or self._no_laps is not None or phase is None:
            return
        if phase.lines or phase.counted:
            return
        calls, moments = self._modules.calls, self._modules.take()
        if phase.name == WARM_UP:
            cost_ms, took_ms = calls * self._lap_cost_ms, phase.times_ms[-1]
            if cost_ms > MAX_COUNTING_SHARE * took_ms:
                self._modules.stop()
                self._modules.timed = False
                self._no_laps = (
                    f"noting {calls} calls of modules takes {cost_ms:.3f} ms, more than "
                    f"{MAX_COUNTING_SHARE:.1%} of an iteration"
                )
            return
        phase.moments.append([("begins", self._began), *moments, ("ends", self._ended)])

    def _laps_document(self) -> dict[str, Any] | None:
        """Laps with the profiler and without, of iterations that are divided as most are.

        An iteration that is divided otherwise is null.
        """
        phases = {"profiled": [self._recorded], "unprofiled": self._plain}
        divided = {
            name: [tuple(zip(*one, strict=True)) for phase in chosen for one in phase.moments]
            for name, chosen in phases.items()
        }
        orders = Counter(order for iterations in divided.values() for order, _ in iterations)
        if not orders or self._no_laps is not None:
            return None
        usual = orders.most_common(1)[0][0]
        laps = {
            name: [
                (np.diff(at) * 1e3).round(6).tolist() if order == usual else None
                for order, at in iterations
            ]
            for name, iterations in divided.items()
        }
        return {"between": list(usual[1:-1]), **laps}

    # ---- what is left -----------------------------------------------------------------

    @property
    def _recorded(self) -> Phase:
        """The phase whose trace the recording is."""
        return self._phases[PROFILED if self._phases[PROFILED].times_ms else FIRST]

    @property
    def _plain(self) -> list[Phase]:
        """Phases without the profiler, as the program runs by itself."""
        return [self._phases[name] for name in (BEFORE, AFTER)[: 1 if self._spared else 2]]

    @property
    def _plain_ms(self) -> list[float]:
        """Times of the iterations without the profiler."""
        return [time for phase in self._plain for time in phase.times_ms]

    def _leave_out_spared(self, columns: dict[str, list[Any]]) -> None:
        """Leave the iterations after the recording out, also of the counters, if the program is
        spared page faults since: memory that the recording freed is there for it."""
        plain = np.flatnonzero(~np.asarray(columns.get("profiled") or [], dtype=bool))
        first = len(self._phases[BEFORE].times_ms)
        earlier, later = plain[:first], plain[first:]
        faults = np.asarray(columns.get("minor_faults") or [], dtype=float)
        if not (len(earlier) and len(later) and len(faults)):
            return
        before, after = np.median(faults[earlier]), np.median(faults[later])
        if (before - after) * FAULT_MS < LEAST_SPARED * np.median(self._phases[BEFORE].times_ms):
            return
        self._spared = True
        for values in columns.values():
            values[:] = np.delete(np.array(values, dtype=object), later).tolist()
        self.information["notices"] = [
            *self.information.get("notices", []),
            f"{len(later)} iterations after the recording are left out: the program has "
            f"{after:,.0f} page faults in each since, and {before:,.0f} by itself.",
        ]

    def _write(self) -> None:
        averages, details, recorded = [], self._phases[DETAILS], self._recorded
        if self.ours or details.times_ms:
            averages = key_averages(self._profiler)
        elif details.iterations:
            why = "the program ended before the iterations that record shapes and memory"
            self._cuts = dict.fromkeys(("shapes", "allocated_bytes", "flops"), why)
        documents = {
            "key_averages": {"format_version": RECORDING_VERSION, "rows": averages},
            "recording": self._head(averages),
        }
        if recorded.stacks is not None:
            documents["python"] = recorded.stacks.document() | {
                "marks": recorded.marks,
                "iteration_ms": recorded.times_ms,
            }
        sampler = self._phases[SAMPLED].stacks
        if sampler is not None and self._sampled_ns:
            documents["lines"] = self._lines_document(sampler)
        for name, document in documents.items():
            indent = None if name in ("python", "lines") else 1
            text = json.dumps(document, indent=indent, default=str) + "\n"
            write_text(self._part / f"{name}.json", text)

    def _lines_document(self, sampler: StackSampler) -> dict[str, Any]:
        """What tells the user's lines: samples of all threads, counts and source text."""
        document = self._workers.added_to(sampler.document())
        own = sources([*sampler.codes(), *self._counter.codes()])
        return document | {
            "iterations": self._sampled_ns,
            "counted": self._counter.document()
            if self._phases[COUNTED].times_ms
            else {"missing": "the program ended before an iteration whose lines are counted"},
            "sources": [*own, *document["sources"]],
        }

    def _head(self, averages: list[dict[str, Any]]) -> dict[str, Any]:
        counted = self._counters.evidence()
        self._leave_out_spared(counted.get("counters") or {})
        information, recorded, plain = self.information, self._recorded, self._plain_ms
        plain_all = sum(phase.all_ms for phase in self._plain)
        options = asdict(self._detail) | {"warmup": self._phases[WARM_UP].iterations}
        del options["ceilings"]
        missing = self._not_measured(averages)
        if self._threads > 1:
            missing["other_threads"] = (
                "torch.profiler sees the thread that starts it and autograd's; what other "
                "Python threads do (making batches ahead) is not in the trace"
            )
        missing |= counted.pop("not_measured")
        if not self._cheap:
            missing["counters.profiled"] = (
                f"reading the counters takes {self._counters.cost_ms():.3f} ms, more than "
                f"{MAX_COUNTING_SHARE:.1%} of an iteration, so it was left out under the profiler"
            )
        ceilings, late = ({}, {}) if self.ours else self._measure_ceilings(averages)
        missing |= late
        head = {
            **information,
            **counted,
            **ceilings,
            "format_version": RECORDING_VERSION,
            "engine": "torch",
            "device": str(self.device),
            "torch": torch.__version__,
            "options": options,
            "passes": [
                *information.get("passes", []),
                {
                    **self._pass_of(RECORDED_PASS, recorded),
                    "unprofiled_ms_per_iteration": plain_all / len(plain) if plain else None,
                    "command": information.get("command", ""),
                },
            ],
            "iteration_ms": recorded.times_ms,
            "unprofiled_iteration_ms": plain,
            "not_measured": {**missing, **information.get("not_measured", {})},
        }
        if self._phases[SAMPLED].times_ms:  # in which nothing but the stack was sampled
            sampled = self._pass_of("Python stack sampled", self._phases[SAMPLED])
            head["passes"].append(sampled)
        if laps := self._laps_document():
            head["laps_ms"] = laps
        if self._seen is not None:
            head["seen_model"] = self._seen.document()
        if self.on_gpu:
            head["gpu_peak_allocated_bytes"] = torch.cuda.max_memory_allocated(self.device)
        return head

    def _measure_ceilings(
        self, averages: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """``ceilings`` of this machine at the recorded shapes, and reasons of what is missing."""
        why = None
        if not self._detail.ceilings:
            why = "the recording was made without them (profiling.probes, or record's ceilings)"
        elif self.on_gpu:
            why = "a GPU's limits are those of its data sheet"
        elif rank_of_process()[1] > 1:
            why = "several ranks share this machine, and what it leaves to one was not measured"
        elif "shapes" in self._cuts:
            why = "no shapes are known at which to measure them: " + self._cuts["shapes"]
        elif not self._detail.record_shapes:
            why = "input shapes were not recorded (`-p profiling.record_shapes=true` records them)"
        if why is None:
            try:
                from dlrm_workbook.evidence.ceilings import measure_ceilings
                from dlrm_workbook.recordings.torch.seen_shapes import seen_shapes

                shapes = seen_shapes(averages, torch.get_num_threads())
                ceilings, missing = measure_ceilings(shapes, self.device)
                return {"ceilings": ceilings}, missing
            except Exception as error:  # what is trained is worth more than any figure of ours
                why = f"measuring them failed: {type(error).__name__}: {error}"
        return {}, {"ceilings": why}

    def _pass_of(self, name: str, phase: Phase) -> dict[str, Any]:
        """What the iterations of a phase cost."""
        times, plain = phase.times_ms, self._plain_ms
        return {
            "name": name,
            "iterations": len(times),
            "ms_per_iteration": phase.all_ms / len(times),
            # Medians: one disturbed iteration must not pass for the profiler's cost.
            "dilation": statistics.median(times) / statistics.median(plain) if plain else None,
        }

    def _not_measured(self, averages: list[dict[str, Any]]) -> dict[str, str]:
        """What this recording cannot tell, name to reason."""
        if self.on_gpu:
            missing = {
                "gpu_stall_reasons": "torch.profiler does not sample GPU instructions; with "
                "HPCToolkit, `dlrm run profile -f FILE -p profiling.engine=hpctoolkit` does"
            }
        else:
            absent = ("gpu_time_ms", "launches", "copy_bytes", "gpu_stall_reasons")
            missing = dict.fromkeys(absent, NO_GPU_USED)
        if self._modules is not None and self._modules.missing is not None:
            missing["modules"] = self._modules.missing
        if self._modules is not None and self._seen is None:
            missing["seen_model"] = self._modules.missing or "no iteration warmed up"
        if self._no_laps is not None and not self.on_gpu:
            missing["laps"] = (
                "parts were not timed without the profiler, so one factor scales them all: "
                + self._no_laps
            )
        if not self._detail.record_shapes:
            missing["shapes"] = (
                "input shapes were not recorded; `-p profiling.record_shapes=true` records them"
            )
        if not self._detail.profile_memory:
            missing["allocated_bytes"] = (
                "memory was not recorded; `-p profiling.profile_memory=true` records it"
            )
        missing |= self._cuts
        if "flops" not in missing and not any(row["flops"] for row in averages):
            missing["flops"] = "torch counted no floating point operations in this run"
        if not self._plain_ms:
            missing["dilation"] = "no iterations were timed without the profiler"
        return missing


def events_of(profiler: profile) -> int:
    """How many operators and ranges a profiler that is stopped has recorded."""
    results = getattr(profiler.profiler, "kineto_results", None)
    return len(results.events()) if results is not None else 0


@without_collection()
def key_averages(profiler: profile) -> list[dict[str, Any]]:
    """torch's own averages as plain rows, one per name and input shapes.

    ``self_cpu_ns`` and ``cpu_ns`` are totals over ``count`` calls. ``flops`` is 0
    where torch has no formula for the operator. ``shapes`` is spelt as in the trace.
    """
    return [
        {
            "name": average.key,
            "shapes": str(average.input_shapes) if average.input_shapes else "",
            "count": average.count,
            "device": str(average.device_type).rpartition(".")[2],
            "self_cpu_ns": round(average.self_cpu_time_total * 1e3),
            "cpu_ns": round(average.cpu_time_total * 1e3),
            "self_device_ns": round(average.self_device_time_total * 1e3),
            "device_ns": round(average.device_time_total * 1e3),
            "flops": average.flops or 0,
            "self_cpu_memory_bytes": average.self_cpu_memory_usage,
            "self_device_memory_bytes": average.self_device_memory_usage,
        }
        for average in profiler.key_averages(group_by_input_shape=True)
    ]


# ---- programs that are not ours ----------------------------------------------------------


def rank_of_process() -> tuple[int | None, int]:
    """(rank, number of ranks) of this process; (None, 1) where it is alone."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdigit() and world.isdigit() and int(world) > 1:
        return int(rank), int(world)
    return None, 1


def recorded_circumstances() -> dict[str, Any]:
    """Threads, machine and versions that a process computes with."""
    return {
        "threads": torch.get_num_threads(),
        "machine": machine_facts() | {"ranks": ranks_here()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }


def begin(
    folder: Path,
    lengths: Lengths,
    detail: Detail,
    doing: Callable[[str], object] = lambda what: None,
) -> Session:
    """Begin to record a program that is not ours, in whose first iterations we are. An InputError
    says that the folder exists, or that the program is being profiled already."""
    if torch.autograd._profiler_enabled():
        raise InputError(
            "the program runs torch.profiler itself, and only one profiler can record a thread: "
            "switch its own off, or open its own trace with dlrm run bottlenecks -p profile_run="
        )
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    device = torch.device("cuda", torch.cuda.current_device()) if used else torch.device("cpu")
    limit = torch.cuda.mem_get_info(device)[1] if used else memory_limit()
    information = {
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "device_name": torch.cuda.get_device_name(device) if used else "CPU",
        "memory_limit_bytes": limit,
        **recorded_circumstances(),
        "not_measured": dict.fromkeys(("part_probes", "data_statistics"), UNKNOWN_MODEL),
    }
    session = Session(
        folder, lengths, detail, device=device, ours=False, information=information, doing=doing
    )
    return session.__enter__()


class record:
    """Records some iterations of a training loop of one's own.

    ::

        from dlrm_workbook import record

        with record("runs/mine") as step:
            for batch in loader:
                with record.part("embedding"):
                    ...
                step()

    Call ``step()`` at the end of each iteration. The first iteration and ``warmup`` more are
    not measured; ``iterations`` are recorded with torch.profiler, and as many, half of them
    before and half after, are timed without it; in as many the stacks of all threads are
    sampled, and in one more lines are counted. After that the loop runs on as it would. The
    folder is then there: ``dlrm run bottlenecks -p profile_run=runs/mine``. Of several ranks
    each writes a folder of its own inside. Needs torch and numpy only.

    Args:
        folder: Must not exist.
        iterations, warmup: as above.
        record_shapes, profile_memory, with_stack: as torch.profiler has them.
        ceilings: measure this machine's limits at the recorded shapes, once, for about six
            seconds (programs on a CPU).
        trials: seconds in which remedies are then switched on and off in this process
            (:mod:`dlrm_workbook.recordings.torch.trials`). The training goes on meanwhile, some
            of its iterations with other numbers: throw the run away afterwards. 0: none.

    Raises:
        InputError: ``folder`` exists, or a count is impossible.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        iterations: int = 20,
        warmup: int = 3,
        record_shapes: bool = True,
        profile_memory: bool = True,
        with_stack: bool = False,
        ceilings: bool = True,
        trials: int = 0,
    ) -> None:
        self._budget_s = trials
        self._trials: Trials | None = None
        self._folder = Path(folder).absolute()
        self._lengths = Lengths(iterations, warmup, unprofiled=iterations, sampled=iterations)
        if self._folder.exists():
            raise InputError(f"{self._folder} exists already; record never writes over a folder")
        self._detail = Detail(with_stack, record_shapes, profile_memory, ceilings)
        self._session: Session | None = None
        self._over = False

    @staticmethod
    @contextlib.contextmanager
    def part(said: str) -> Iterator[None]:
        """Say which part of the step the block is, such as ``embedding`` or ``top_mlp forward``. An
        InputError says that there is no such part."""
        try:
            parse_part(said)
        except ValueError as error:
            raise InputError(f"record.part({said!r}): {error}") from None
        with record_function(PART_PREFIX + said):
            yield

    def __enter__(self) -> Callable[[], None]:
        return self._step

    def _step(self) -> None:
        if self._trials is not None:
            self._trials.step()
        if self._over:
            return
        if self._session is None:
            rank, _ = rank_of_process()
            place = self._folder if rank is None else self._folder / f"rank{rank}"
            self._session = begin(place, self._lengths, self._detail)
            return
        self._session.step()
        if self._session.finished:
            self._end(self._session, None)
            if self._budget_s and self._session.folder.is_dir():
                from dlrm_workbook.recordings.torch.trials import Trials

                self._trials = Trials(self._session.folder, self._budget_s, may_end=False)
                self._trials.step()
            else:
                heap.release()

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        """Write what was recorded of a loop that ended early; it is never ended by us."""
        if self._trials is not None:
            self._trials.close("the loop ended")
        if self._session is not None and not self._over:
            self._end(self._session, error)
        elif self._session is None and error is None:
            warnings.warn(
                "record: nothing was recorded, since step() was never called", stacklevel=2
            )

    def _end(self, session: Session, error: BaseException | None) -> None:
        self._over = True
        try:
            session.__exit__(None, error, None)
        except InputError as refusal:
            if refusal is error:
                raise
            # what is trained is worth more than the recording that failed
            warnings.warn(f"record: nothing was recorded: {refusal}", stacklevel=3)
