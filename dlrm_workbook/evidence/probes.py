"""Parts of the training step alone, before and after a change: what a prediction rests on.

The step is run in two halves (docs/reliability.md): the *dense* half is the real step on tables
of one row, the *sparse* half the real step with MLPs of one layer. Making batches is timed by
itself, and beside the halves where a thread makes them. Loops take turns until their times
are known well enough.
"""

from __future__ import annotations

import functools
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from dlrm_core.base.errors import InputError
from dlrm_core.base.machine import available_memory, cpu_flags, keep_freed_memory
from dlrm_core.base.text import format_bytes
from dlrm_core.config import ModelConfig, Parameters, mean_bag_size
from dlrm_core.data.loader import make_generator
from dlrm_core.dense import resolve_dense
from dlrm_core.interactions import CatInteraction
from dlrm_core.losses import MeanSquaredError
from dlrm_core.model import DLRM, ClickLoss
from dlrm_core.operations import FLOAT_BYTES
from dlrm_core.parts import log_spans, parse_span
from dlrm_core.precision import CPU_FLAGS
from dlrm_core.step import TrainingStep
from dlrm_kernels.embeddings.choose import resolve
from dlrm_kernels.embeddings.pages import tables_on_huge_pages, touched_beside
from dlrm_kernels.memory import forecast_memory
from dlrm_kernels.products import set_fp32_products
from dlrm_kernels.tiles import machine as tiles
from dlrm_workbook.evidence.ceilings import last_level_cache
from dlrm_workbook.evidence.dependence import (
    Change,
    affected_components,
    affected_phases,
    changed_parameters,
    signature,
)
from dlrm_workbook.ground.processes import Say, say_nothing
from dlrm_workbook.ground.turns import (
    CPU,
    CacheFlush,
    back_and_forth,
    elapsed_ms,
    median_error,
    take_turns,
    waited_ns,
)

Times = dict[tuple[str, str], float]
"""Component and phase to milliseconds."""

HALVES = {"dense": ("bottom_mlp", "interaction", "top_mlp", "loss"), "sparse": ("embedding",)}
"""Half of the step to the components that it runs as they are."""

SHARED = ("optimizer", "other")
"""Dropping gradients and freeing activations: some of it in either half."""

FLUSH_BYTES = (16 << 20, 192 << 20)
"""Least and most streamed over between two runs of a half."""

PROBED = (*HALVES, "data")
"""The loops that are timed alone, in their order."""

UNCHANGED = ""
"""Key of the parameters as they are, among those that a half is timed under."""

MIN_ROUNDS, MAX_ROUNDS = 4, 40
"""Rounds of a probe: at least and at most."""

SETTLED = 0.01
"""A probe ends when the standard error that it leaves in the predicted step is smaller, relative.
The step itself is predicted to 3 % at best, so a range gets at most 5 % wider by it."""

TRIES, DISTURBED = 3, 0.05
"""A run that waited for a core more than this share of its time is repeated, so often in all."""

CACHE_BYTES = 32 << 20
"""Last-level cache, assumed where the system names none."""

PROBE_MEMORY_SHARE = 0.6
"""Share of the available memory that probes may use."""

OVERLAP_SECONDS = 5.0
"""Time for probing how batches made in a thread and the step slow each other down."""

LEAST_OVERLAPS, MOST_OVERLAPS, OVERLAP_SETTLED = 3, 12, 0.025
"""Turns of that in each half, and the relative standard error of the slow-down at which they end:
a step beside which batches are made is predicted to 8 % at best."""

PROBE_SECONDS = 12.0
"""Time for all default candidates together; a change gets its share of it."""

Loop = TypeVar("Loop", "StepLoop", "DataLoop")
Result = TypeVar("Result")


@dataclass(eq=False)
class Tables:
    """A model whose tables others may train on, so that they need none of their own."""

    model: DLRM
    huge_pages: bool


_FLUSHES: WeakValueDictionary[int, CacheFlush] = WeakValueDictionary()


def cache_flush(size_bytes: int) -> CacheFlush:
    """A flush of this size, shared by the loops that live: its buffer may be 192 MiB."""
    return _FLUSHES.get(size_bytes) or _FLUSHES.setdefault(size_bytes, CacheFlush(size_bytes))


# Loops that run some parts of a training step alone, in the state the step has them in.


def reduced(parameters: Parameters, half: str) -> Parameters:
    """Parameters under which a step costs no more than one of its halves.

    Equal reduced parameters mean an equal half.
    """
    model, data, training = parameters.model, parameters.data, parameters.training
    tables = len(model.table_rows)
    training = replace(training, seed=0, learning_rate=1e-4)
    if half == "dense":
        training = replace(training, embedding_backend="torch")
        model = replace(model, table_rows=(1,) * tables)
        data = replace(
            data,
            generator="uniform",
            indices_per_lookup=1,
            fixed_pooling=True,
            multi_hot_sizes=None,
            loader="synchronous",
            place="cpu",
        )
    else:
        training = replace(
            training,
            precision="fp32",
            micro_batch=None,
            compile=False,
            cuda_graphs=False,
            fp32_matmul="default",
            dense_backend="torch",
            fused_optimizer=False,
        )
        without: dict[str, Any] = dict.fromkeys(model.interaction_kind.left_out())
        model = replace(
            model,
            mlp_sizes="facebook",
            dense_features=1,
            bottom_mlp=(1, model.embedding_dim),
            top_mlp=(1,),
            interaction=CatInteraction.kind,
            loss=MeanSquaredError.kind,
            **without,
        )
        law = "facebook" if data.generator == "facebook_loop" else data.generator
        data = replace(data, generator=law, loader="synchronous", place="cpu")
    return replace(parameters, model=model, data=data, training=training)


def half_bytes(parameters: Parameters, half: str) -> int:
    """Bytes that one iteration of a half moves through the caches, about.

    Sparse: lookups x d, read, written as gradients, and read and written by the
    update. Dense: activations and their gradients, and the weights three times.
    """
    model, size = parameters.model, parameters.training.batch_size
    if half == "sparse":
        tables = range(len(model.table_rows))
        lookups = sum(size * mean_bag_size(parameters, t) for t in tables)
        return int(lookups * model.embedding_dim * 4 * 4)
    widths = (model.bottom_widths, model.top_widths)
    weights = sum(model.dense_weights.values())
    features = len(model.table_rows) + 1
    kept, _, _ = model.interaction_kind.memory(FLOAT_BYTES, widens=False)
    values = sum(map(sum, widths)) + kept + features * (features + model.embedding_dim)
    return 4 * (2 * size * values + 3 * weights)


class _FlushedDense:
    """The dense part of a step behind a flush that stands for what it moved at full size."""

    def __init__(self, dense: Any, flush: CacheFlush) -> None:
        self._dense, self._flush = dense, flush

    def __call__(self, *arguments: Any) -> Any:
        self._flush()
        return self._dense(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dense, name)


class ReadyStep(Tables):
    """A step and its batches, ready to run again and again, on the tables of ``tables_from`` where
    they are alike: new ones can be gigabytes."""

    def __init__(self, parameters: Parameters, tables_from: Tables | None) -> None:
        self.parameters, self.notices = apply_settings(parameters)
        self.generator = make_generator(self.parameters, CPU)
        huge_pages = needs_huge_pages(self.parameters)
        super().__init__(model_for(self.parameters.model, tables_from, huge_pages), huge_pages)
        self.parameters, chosen = resolve(self.parameters, CPU, self.model.embeddings)
        loss = ClickLoss.of(self.parameters.model)
        self.step = TrainingStep(self.model, loss, self.parameters.training)
        self.notices += chosen + self.step.dense.notices


class StepLoop(ReadyStep):
    """One half of the step."""

    def __init__(
        self, parameters: Parameters, half: str, tables_from: Tables | None = None
    ) -> None:
        super().__init__(reduced(parameters, half), tables_from)
        self.half = half
        other = "sparse" if half == "dense" else "dense"
        least, most = FLUSH_BYTES
        self.flush = cache_flush(min(max(half_bytes(parameters, other), least), most))
        if half == "sparse":
            # the dense half runs between the lookups and their gradients
            self.step.dense = _FlushedDense(self.step.dense, self.flush)  # type: ignore[assignment]

    def run(self) -> Times:
        """One iteration; the times of its parts, and of what is outside them (``other``)."""
        if self.half == "dense":
            self.flush()
        # a new one, as in a run: the rows of one seen before would be in the cache
        batch = self.generator.next_batch()
        before = self.flush.taken_ns
        with log_spans() as rows:
            started = time.time_ns()
            self.step(batch)
            whole = time.time_ns() - started
        return part_times(rows, whole - (self.flush.taken_ns - before), HALVES[self.half])


class DataLoop:
    """The generator of a run, alone."""

    def __init__(self, parameters: Parameters) -> None:
        parameters, self.notices = apply_settings(parameters)
        data = replace(parameters.data, loader="synchronous", place="cpu")
        alone = replace(parameters, data=data)
        self.parameters = parameters
        self.generator = make_generator(alone, CPU)
        self.flush = cache_flush(FLUSH_BYTES[1])

    def run(self) -> Times:
        self.flush()
        return {("data", "forward"): elapsed_ms(self.generator.next_batch)}

    @contextmanager
    def beside(self) -> Iterator[list[float]]:
        """Make batches in another thread for as long as the context is open.

        Yields:
            The milliseconds of each batch made meanwhile, growing. The first, which begins before
            the context opens, is made beside nothing and is not among them.
        """
        made: list[float] = []
        stop, ready = threading.Event(), threading.Event()

        def produce() -> None:
            try:
                self.generator.next_batch()
            finally:
                ready.set()
            while not stop.is_set():
                made.append(elapsed_ms(self.generator.next_batch))

        thread = threading.Thread(target=produce, name="dlrm-probe", daemon=True)
        thread.start()
        ready.wait()
        try:
            yield made
        finally:
            stop.set()
            thread.join()


def part_times(rows: list[tuple[str, int, int]], whole_ns: int, kept: tuple[str, ...]) -> Times:
    """Logged ranges as times of the kept components, of ``optimizer`` and ``other``."""
    times: Times = {}
    inside = 0
    for name, start, end in rows:
        if part := parse_span(name):
            inside += end - start
            if part[0] in (*kept, "optimizer"):
                times[part] = times.get(part, 0.0) + (end - start) / 1e6
    times["other", ""] = max(0.0, (whole_ns - inside) / 1e6)
    return times


def apply_settings(parameters: Parameters) -> tuple[Parameters, list[str]]:
    """Set what is global in torch, as :class:`~dlrm_core.train.Trainer` does; give the parameters
    with the dense part's back end in place of ``auto``, and notices."""
    training = parameters.training
    if training.threads is not None and training.threads != torch.get_num_threads():
        torch.set_num_threads(training.threads)
    parameters, chosen = resolve_dense(parameters, CPU)
    return parameters, chosen + set_fp32_products(parameters.training, parameters.model, CPU)


def needs_huge_pages(parameters: Parameters) -> bool:
    """Whether a run lays its tables in large pages (:func:`~dlrm_core.train.prepare_model`)."""
    return parameters.training.embedding_backend != "torch"


def model_for(config: ModelConfig, tables_from: Tables | None, huge_pages: bool) -> DLRM:
    """A model with any weights, to be timed: drawing them would take longer than the probe. Tables
    of ``tables_from`` that are alike, and lie in such pages, are used."""
    on_pages = functools.partial(
        tables_on_huge_pages, config.table_rows, config.embedding_dim, config.embedding_precision
    )
    model = DLRM(config, on_pages if huge_pages else None)
    can_lend = tables_from is not None and tables_from.huge_pages == huge_pages
    given = list(tables_from.model.embeddings.weights) if tables_from and can_lend else []
    fresh = []
    for i, table in enumerate(model.embeddings.weights):
        alike = i < len(given) and given[i].shape == table.shape
        if alike and given[i].dtype == table.dtype:
            table.data = given[i].data
        else:
            fresh.append(table)
    with torch.no_grad(), touched_beside(fresh):
        for table in fresh:
            # written, not lazily zero: untouched pages are all one page
            table.fill_(1.0 / math.sqrt(table.shape[0]) / 2)
    return model


# Turns, and what they say.


def interleave(
    loops: Sequence[Any], seconds: float, settled: Callable[[int, list[Times], list[Times]], bool]
) -> list[list[Times]]:
    """Run loops in turns, all beside the first, until what each takes is known well enough.

    A loop leaves when it is settled; the first runs until all others have left. Every second
    round runs backwards, so that a drift cancels. Loops that need the same settings of torch
    follow one another, and a run after a switch is not counted.

    Args:
        loops: each has run before.
        seconds: after :data:`MIN_ROUNDS` rounds no further one begins later than this.
        settled: is given the place of a loop, the runs of the first loop and its own in the same
            rounds (of one loop alone: twice the same).

    Returns:
        the runs of each loop, from the first round on.
    """
    runs: list[list[Times]] = [[] for _ in loops]
    kinds = [_settings(loop.parameters) for loop in loops]
    distinct = list(dict.fromkeys(kinds))
    order = sorted(range(len(loops)), key=lambda place: distinct.index(kinds[place]))
    left = set(range(1, len(loops))) or {0}
    started = time.perf_counter()

    def enough(done: int) -> bool:
        if done < MIN_ROUNDS:
            return False
        late = time.perf_counter() - started > seconds
        for place in sorted(left):
            if late or settled(place, runs[0][: len(runs[place])], runs[place]):
                left.remove(place)
        return not left

    apply_settings(loops[0].parameters)
    # with settings of one kind nothing is ever switched
    now = kinds[0] if len(distinct) == 1 else None
    for _, turns in take_turns(order, MAX_ROUNDS, back_and_forth, enough):
        for place in turns:
            if place not in left and place != 0:
                continue
            if kinds[place] != now:
                apply_settings(loops[place].parameters)
                loops[place].run()
                now = kinds[place]
            runs[place].append(undisturbed(loops[place].run, TRIES, started + 2 * seconds))
    return runs


def _settings(parameters: Parameters) -> tuple[Any, ...]:
    """The values that :func:`apply_settings` sets."""
    training = parameters.training
    return training.threads, training.fp32_matmul, training.tf32


def undisturbed(run: Callable[[], Result], tries: int, deadline: float) -> Result:
    """The result of a run during which nobody else had the core, or of the last try."""
    for _ in range(tries):
        before, started = waited_ns(), time.perf_counter_ns()
        result = run()
        whole, after = time.perf_counter_ns() - started, waited_ns()
        waited = after - before if before is not None and after is not None else 0
        if waited < DISTURBED * whole or time.perf_counter() > deadline:
            break
    return result


def medians(runs: list[Times]) -> Times:
    """Median of each part's time over the runs, ms."""
    return {part: statistics.median(_values(runs, part)) for part in runs[-1]}


def ratio_errors(before: list[Times], after: list[Times]) -> Times:
    """Relative standard error of each part's ratio of medians."""
    return {
        part: math.hypot(*(median_error(_values(runs, part)) for runs in (before, after)))
        for part in after[-1]
    }


def _values(runs: list[Times], part: tuple[str, str]) -> list[float]:
    """A part's time in each run, ms."""
    return [run.get(part, 0.0) for run in runs]


def _total_error(before: list[Times], after: list[Times]) -> float:
    """Relative standard error of the ratio of whole runs."""
    return math.hypot(*(median_error(list(map(sum_ms, runs))) for runs in (before, after)))


def joint_error_ms(
    before: list[Times], after: list[Times], counts: Callable[[tuple[str, str]], bool]
) -> float:
    """Standard error of the time after a change, ms, as the parts' ratios leave it.

    The parts' errors are partly the same, partly their own: halfway between their sum and the
    root of their squares, as the range of a prediction has them.
    """
    errors = ratio_errors(before, after)
    reach = [ms * errors[part] for part, ms in medians(after).items() if counts(part)]
    return (sum(reach) + math.hypot(*reach)) / 2


def sum_ms(times: Times) -> float:
    return sum(times.values())


def _nested(times: Times) -> dict[str, dict[str, float]]:
    """Component to phase to figure, as JSON has it."""
    components: dict[str, dict[str, float]] = {}
    for (component, phase), figure in times.items():
        components.setdefault(component, {})[phase] = figure
    return components


# Parts of the step under changed parameters.


def default_changes(parameters: Parameters) -> list[dict[str, Any]]:
    """The changes worth a prediction in every report: those that apply to the run."""
    data, training = parameters.data, parameters.training
    changes: list[dict[str, Any]] = []
    # a Python loop beside the step only takes the interpreter's lock from it: make it fast first
    faster = {"data.generator": "facebook"} if data.generator == "facebook_loop" else {}
    if faster:
        changes.append(faster)
    if data.loader == "synchronous" and data.place == "cpu":
        changes.append({**faster, "data.loader": "prefetch"})
    if training.fp32_matmul == "default" and training.precision == "fp32":
        changes.append({"training.fp32_matmul": "onednn"})
    may_round = training.precision == "fp32" and training.lowest_precision != "fp32"
    if may_round and cpu_flags() & set(CPU_FLAGS["bf16"]):
        changes.append({"training.precision": "bf16"})
    if "fused dense part" in parameters.model.interaction_kind.engines:
        changes += _fused_changes(training)
    if training.embedding_backend == "torch":
        changes.append({"training.embedding_backend": "fused"})
    if not training.fused_optimizer:
        changes.append({"training.fused_optimizer": True})
    rows = training.batch_size
    spills = half_bytes(parameters, "dense") > (last_level_cache(CPU) or CACHE_BYTES)
    if training.micro_batch is None and rows > 2048 and spills:
        changes.append({"training.micro_batch": 2048})
    changes.append({"training.batch_size": 2 * rows})
    return changes


def probe_changes(
    parameters: Parameters,
    changes: Iterable[Change] | None = None,
    seconds: float = PROBE_SECONDS,
    say: Say = say_nothing,
    lenders: list[Tables] | None = None,
) -> dict[str, Any]:
    """Time the parts that each change affects, beside the same parts as they are.

    Each half of the step is timed as it is and under all changes in the same rounds, until every
    prediction is known well enough (:data:`SETTLED`), for about ``seconds`` at most, and with
    memory for the tables twice at most, never more than is available. Settings of torch are
    put back.

    Args:
        changes: :func:`default_changes` if None.
        seconds: building loops and overlapped loading come on top.
        lenders: whose tables are trained on instead of new ones, where they are alike; tables
            of the same shapes that a change needed are added, for whoever measures next.

    Returns:
        ``base``: component to phase to ms, each part alone; ``changes``: for each a dict of
        ``change``, ``parts`` and ``base`` (the affected parts after and before the change,
        timed in turns), ``spread`` (of each ratio, relative standard error), ``overlap``
        where batches are made beside the step, ``notices`` and, where it could not
        be timed, ``refused`` with the reason; ``seconds`` taken.
    """
    chosen = default_changes(parameters) if changes is None else [dict(each) for each in changes]
    started = time.perf_counter()
    threads = torch.get_num_threads()
    keep_freed_memory()
    try:
        probes = _Probes(parameters, chosen, lenders)
        say("timing the parts alone", 0, 1)
        probes.begin()
        shares = {half: 1 + len(probes.wanted(half)) for half in PROBED}
        for number, half in enumerate(PROBED):
            words = f"{half} part, {shares[half]} ways"
            say("timing alternatives", number, len(PROBED) + 1, words)
            probes.compare(half, seconds * shares[half] / sum(shares.values()))
        say("timing alternatives", len(PROBED), len(PROBED) + 1, "batches beside the step")
        results = [probes.result(candidate) for candidate in probes.candidates]
    finally:
        torch.set_num_threads(threads)
        apply_settings(parameters)
    return {
        "base": _nested(probes.base()),
        "changes": results,
        "threads": parameters.training.threads or threads,
        "seconds": time.perf_counter() - started,
    }


@dataclass(frozen=True)
class _Candidate:
    change: dict[str, Any]
    changed: Parameters
    """The same as unchanged where it is refused."""
    notices: list[str]
    affected: set[str]
    keys: dict[str, str]
    """The loops that differ under the change, by name, with what tells equal ones."""
    refused: str = ""


class _Probes:
    """Times the loops of the unchanged parameters, and beside them those of every change.

    Attributes:
        alone: runs of the unchanged loops.
        step_ms: about what a step takes, the loops added up.
    """

    def __init__(
        self,
        parameters: Parameters,
        changes: Iterable[dict[str, Any]],
        lenders: list[Tables] | None = None,
    ) -> None:
        self.parameters = parameters
        self.lenders: list[Tables] = [] if lenders is None else lenders
        self.candidates = [self._candidate(change) for change in changes]
        self.alone: dict[str, list[Times]] = {}
        self.step_ms = 0.0
        self._loops: dict[str, StepLoop | DataLoop] = {}
        self._runs: dict[tuple[str, str], tuple[list[Times], list[Times], list[str]]] = {}
        """Loop and key to the times before and after, of the same rounds, and notices."""
        self._refused: dict[tuple[str, str], str] = {}
        self._overlaps: dict[tuple[Any, ...], dict[str, Any]] = {}

    def _candidate(self, change: dict[str, Any]) -> _Candidate:
        base = self.parameters
        try:
            changed, notices = changed_parameters(base, change)
        except InputError as error:
            return _Candidate(change, base, [], set(), {}, str(error))
        affected = affected_components(base, changed)
        touched = [half for half, parts in HALVES.items() if affected & set(parts)]
        keys = {half: str(reduced(changed, half)) for half in touched}
        if "data" in affected_components(_synchronous(base), _synchronous(changed)):
            # several changes may make the same batches, in the step or beside it
            keys["data"] = str(_synchronous(changed))
        return _Candidate(change, changed, notices, affected, keys)

    def wanted(self, half: str) -> dict[str, Parameters]:
        """The parameters under which a loop is to be timed, beside the unchanged ones."""
        return {each.keys[half]: each.changed for each in self.candidates if half in each.keys}

    def begin(self) -> None:
        """Build the loops of the unchanged parameters, and see about how long a step takes."""
        for half in PROBED:
            try:
                if half == "data":
                    self._loops[half] = _ready(DataLoop(self.parameters))
                else:
                    lender = next(iter(self.lenders), None)
                    if lender is None or half == "dense":
                        require_memory(reduced(self.parameters, half), f"probing the {half} half")
                    self._loops[half] = loop = _ready(StepLoop(self.parameters, half, lender))
                    if lender is None and half != "dense":
                        self.lenders.append(Tables(loop.model, loop.huge_pages))
            except InputError as error:
                self._refused[half, UNCHANGED] = str(error)
            else:
                self.step_ms += sum_ms(self._loops[half].run())

    def compare(self, half: str, seconds: float) -> None:
        """Time a loop as it is and under every change that affects it."""
        waiting = self.wanted(half)
        if half not in self._loops:
            why = self._refused[half, UNCHANGED]
            self._refused |= {(half, key): why for key in waiting}
            return
        self.alone[half] = []
        while waiting or not self.alone[half]:
            loops: dict[str, StepLoop | DataLoop] = {}
            later: dict[str, Parameters] = {}
            for key, changed in waiting.items():
                try:
                    loops[key] = self._changed_loop(half, changed)
                except InputError as error:
                    if loops:  # without the others there may be room for it
                        later[key] = changed
                    else:
                        self._refused[half, key] = str(error)
            if not loops and self.alone[half]:
                break
            keys, together = [UNCHANGED, *loops], [self._loops[half], *loops.values()]
            before, *others = interleave(
                together,
                seconds,
                lambda place, *runs, keys=keys: self._settled(half, keys[place], *runs),
            )
            self.alone[half] += before
            for key, after in zip(loops, others, strict=True):
                self._runs[half, key] = before[: len(after)], after, loops[key].notices
            waiting = later
            together.clear()

    def _settled(self, half: str, key: str, before: list[Times], after: list[Times]) -> bool:
        """Whether the predictions that rest on these runs would get no better with more."""
        now, then = (statistics.median(map(sum_ms, runs)) for runs in (before, after))
        changed_ms = max(self.step_ms - now, 0.0) + then
        users = [each for each in self.candidates if each.keys.get(half) == key]

        def counts(part: tuple[str, str]) -> bool:
            return not users or any(self._concerns(each, *part) for each in users)

        return joint_error_ms(before, after, counts) < SETTLED * changed_ms

    def _concerns(self, candidate: _Candidate, component: str, phase: str) -> bool:
        """Whether a change affects a phase of a part."""
        if component in SHARED:
            return True
        only = affected_phases(self.parameters, candidate.changed, component)
        return component in candidate.affected and (only is None or phase in only)

    def base(self) -> Times:
        """Every part alone, unchanged: medians in ms."""
        times: Times = {}
        for runs in self.alone.values():
            for part, ms in medians(runs).items():
                times[part] = times.get(part, 0.0) + ms
        return times

    def result(self, candidate: _Candidate) -> dict[str, Any]:
        times: dict[str, Times] = {"parts": {}, "base": {}, "spread": {}}
        result: dict[str, Any] = {"change": candidate.change, "notices": list(candidate.notices)}
        refused = [candidate.refused]
        refused += [self._refused.get((half, key), "") for half, key in candidate.keys.items()]
        if any(refused):
            return result | times | {"refused": next(filter(None, refused))}
        for half, key in candidate.keys.items():
            said = self._runs[half, key][2]
            result["notices"] += [text for text in said if text not in result["notices"]]
            self._add(times, half, candidate)
        result |= {name: _nested(figures) for name, figures in times.items()}
        try:
            if self.parameters.data.loader == "prefetch":
                result["overlap_base"] = self._overlap(self.parameters)
            if candidate.changed.data.loader == "prefetch":
                result["overlap"] = self._overlap(candidate.changed)
        except InputError as error:
            return result | {"refused": str(error), "parts": {}, "base": {}, "spread": {}}
        return result

    def _add(self, times: dict[str, Times], half: str, candidate: _Candidate) -> None:
        """Add the parts of one loop to the times of a change."""
        before, after, _ = self._runs[half, candidate.keys[half]]
        now, then, spread = medians(before), medians(after), ratio_errors(before, after)
        together, same = self.base(), medians(self.alone[half])
        for part, ms in then.items():
            if part[0] in SHARED:
                # some of it is in the other half, which has not changed or comes later
                for known, found in ((times["base"], now), (times["parts"], then)):
                    usual = same.get(part, 0.0)
                    known[part] = known.get(part, together.get(part, 0.0))
                    known[part] += found.get(part, usual) - usual
            elif part[0] in candidate.affected and part in now and self._concerns(candidate, *part):
                times["parts"][part], times["base"][part] = ms, now[part]
            else:
                continue
            times["spread"][part] = spread[part]

    def _base_loop(self, half: str) -> StepLoop | DataLoop:
        if half not in self._loops:
            raise InputError(self._refused[half, UNCHANGED])
        return self._loops[half]

    def _changed_loop(self, half: str, changed: Parameters) -> StepLoop | DataLoop:
        base = self._base_loop(half)
        if half == "data":
            return _ready(DataLoop(changed))
        assert isinstance(base, StepLoop)
        shapes = [(rows, changed.model.embedding_dim) for rows in base.parameters.model.table_rows]
        same = [tuple(table.shape) for table in base.model.embeddings.weights] == shapes
        if half == "sparse":
            mine, theirs = self.parameters.model, changed.model
            same &= mine.table_rows == theirs.table_rows
            same &= mine.embedding_precision == theirs.embedding_precision
        wanted = needs_huge_pages(reduced(changed, half))
        lender = next((each for each in (base, *self.lenders) if each.huge_pages == wanted), None)
        if not same or lender is None:
            require_memory(reduced(changed, half), f"probing the {half} half")
        loop = _ready(StepLoop(changed, half, tables_from=lender))
        if same and lender is None:
            self.lenders.append(Tables(loop.model, loop.huge_pages))
        return loop

    def _overlap(self, parameters: Parameters) -> dict[str, Any]:
        """How much making batches in a thread slows the halves, and they it."""
        key = signature(parameters, "data"), *(str(reduced(parameters, half)) for half in HALVES)
        if key in self._overlaps:
            return self._overlaps[key]
        self._base_loop("data")
        data = DataLoop(parameters)
        slow: dict[str, dict[str, float]] = {}
        made_ms = {}
        made_alone = self._runs.get(("data", str(_synchronous(parameters))))
        # a loader alone makes the batches that the run has
        runs = self.alone["data"] if made_alone is None else made_alone[1]
        alone = medians(runs)["data", "forward"]
        for half in HALVES:
            same = reduced(parameters, half) == reduced(self.parameters, half)
            loop = self._base_loop(half) if same else self._changed_loop(half, parameters)
            apply_settings(parameters)
            quiet: list[Times] = []
            beside: list[Times] = []
            made: list[float] = []
            deadline = time.perf_counter() + OVERLAP_SECONDS / 3
            while len(quiet) < LEAST_OVERLAPS or (
                len(quiet) < MOST_OVERLAPS
                and time.perf_counter() < deadline
                and _total_error(quiet, beside) > OVERLAP_SETTLED
            ):
                quiet.append(loop.run())
                with data.beside() as times:
                    turn = [loop.run()]
                    # a batch that takes longer would else be made half beside nothing
                    while not times and (
                        len(turn) < MOST_OVERLAPS or time.perf_counter() < deadline
                    ):
                        turn.append(loop.run())
                    # the batch that is being made now ends beside nothing
                    made += times
                beside += turn
            if not made:
                raise InputError(
                    f"no batch was finished beside {len(beside)} runs of the {half} half, so what "
                    "data.loader: prefetch brings was not measured"
                )
            now, then = medians(quiet), medians(beside)
            slow[half] = {"alone_ms": sum_ms(now), "beside_ms": sum_ms(then)}
            made_ms[half] = statistics.median(made)
        found = {"data_alone_ms": alone, "data_beside_ms": made_ms, "halves": slow}
        self._overlaps[key] = found
        return found


def _ready(loop: Loop) -> Loop:
    """A loop that has run once: what it allocates and compiles is there."""
    apply_settings(loop.parameters)
    loop.run()
    return loop


def _synchronous(parameters: Parameters) -> Parameters:
    """The parameters with batches made in the step."""
    return replace(parameters, data=replace(parameters.data, loader="synchronous"))


def require_memory(parameters: Parameters, what: str) -> None:
    """Refuse to build a step that would not fit beside what is there already."""
    needed = sum(item.bytes for item in forecast_memory(parameters))
    available = available_memory(CPU)
    if available is not None and needed > PROBE_MEMORY_SHARE * available:
        raise InputError(
            f"{what} needs {format_bytes(needed)}, more than "
            f"{PROBE_MEMORY_SHARE:.0%} of the {format_bytes(available)} available"
        )


def _fused_changes(training: Any) -> list[dict[str, Any]]:
    """The fused dense part, where the processor has the tiles for it."""
    if training.dense_backend != "torch" or training.compile or tiles.why_no_tiles():
        return []
    fused: dict[str, Any] = {"training.dense_backend": "fused"}
    if training.precision == "bf16":
        return [fused]
    if training.precision != "fp32":
        return []
    exact = training.lowest_precision == "fp32"
    changes = [{**fused, "training.fp32_matmul": "bf16x3" if exact else "bf16x2"}]
    if not exact:
        changes.append({**fused, "training.precision": "bf16"})
    return changes
