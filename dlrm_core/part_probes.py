"""Times parts of the step under changed parameters: what a what-if prediction rests on.

The whole changed step is never run: that would be measuring, not predicting. Each half
that a change touches (:mod:`dlrm_core.probe_loops`) runs alone, as it is and as
changed, in turns, in the measuring process, with its threads and its allocator. The
prediction (:mod:`dlrm_core.analysis.whatif`) scales the measured times of the touched
parts by the ratios found here and leaves all else as measured.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from dlrm_core.allocator import settle_allocator
from dlrm_core.capacity import available_memory, forecast_memory, format_bytes
from dlrm_core.config import Parameters
from dlrm_core.errors import InputError
from dlrm_core.probe_loops import (
    HALVES,
    SHARED,
    DataLoop,
    StepLoop,
    Times,
    apply_settings,
    half_bytes,
    reduced,
)
from dlrm_core.probe_turns import interleave, medians, ratio_errors, total
from dlrm_core.touched import (
    Change,
    changed_parameters,
    signature,
    touched_components,
    touched_phases,
)

MEMORY_SHARE = 0.6
"""Of the available memory that probes may use."""

OVERLAP_SECONDS = 5.0
"""Time for probing how batches made in a thread and the step slow each other down."""

PROBE_SECONDS = 20.0
"""Time for all default candidates together; a change gets its share of it."""


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
    if training.fp32_matmul == "default" and getattr(training, "precision", "fp32") == "fp32":
        changes.append({"training.fp32_matmul": "onednn"})
    if getattr(training, "precision", None) == "fp32" and _bf16_pays(training):
        changes.append({"training.precision": "bf16"})
    changes += _fused_changes(training)
    if getattr(training, "embedding_backend", None) == "torch":
        changes.append({"training.embedding_backend": "fused"})
    if not training.fused_optimizer:
        changes.append({"training.fused_optimizer": True})
    rows = training.batch_size
    spills = half_bytes(parameters, "dense") > _last_level_cache()
    if getattr(training, "micro_batch", 0) is None and rows > 2048 and spills:
        changes.append({"training.micro_batch": 2048})
    changes.append({"training.batch_size": 2 * rows})
    if rows > 1:
        changes.append({"training.batch_size": rows // 2})
    return changes


def probe_changes(
    parameters: Parameters,
    changes: Iterable[Change] | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Time what each change touches, beside the same parts as they are.

    Costs about ``seconds`` for all changes together, and memory for the tables twice at
    most, never more than is available. Settings of torch are put back.

    Args:
        changes: :func:`default_changes` if None.
        seconds: about so long for all of them; :data:`PROBE_SECONDS` if None.

    Returns:
        ``base``: component to phase to ms, each part alone; ``changes``: for each a dict of
        ``change``, ``parts`` and ``base`` (the touched parts after and before the change,
        timed in turns), ``spread`` (of each ratio, relative standard error), ``overlap``
        where batches are made beside the step, ``notices`` and, where it could not
        be timed, ``refused`` with the reason; ``seconds`` taken.
    """
    chosen = [
        dict(change) for change in (default_changes(parameters) if changes is None else changes)
    ]
    started = time.perf_counter()
    threads = torch.get_num_threads()
    settle_allocator()
    share = (PROBE_SECONDS if seconds is None else seconds) / (len(chosen) + 1)
    try:
        bench = _Bench(parameters)
        base = bench.base(share)
        results = [bench.change(change, share) for change in chosen]
    finally:
        torch.set_num_threads(threads)
        apply_settings(parameters)
    return {
        "base": base,
        "changes": results,
        "threads": parameters.training.threads or threads,
        "seconds": time.perf_counter() - started,
    }


class _Bench:
    """Keeps the loops of the unchanged parameters, which every change is compared with."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.loops: dict[str, StepLoop | DataLoop] = {}
        self.alone: dict[str, Times] = {}
        self.refused: dict[str, str] = {}
        self.overlaps: dict[tuple[Any, ...], dict[str, Any]] = {}

    def base(self, seconds: float) -> Times:
        """Every part alone, unchanged: medians in ms."""
        times: Times = {}
        for half in (*HALVES, "data"):
            try:
                loop = self._base_loop(half)
            except InputError as error:
                self.refused[half] = str(error)
                continue
            rounds = interleave([loop], seconds / 3)[0]
            self.alone[half] = medians(rounds)
            for component, phases in self.alone[half].items():
                known = times.setdefault(component, {})
                for phase, ms in phases.items():
                    known[phase] = known.get(phase, 0.0) + ms
        return times

    def change(self, change: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The touched parts before and after one change."""
        result: dict[str, Any] = {"change": change, "parts": {}, "base": {}, "spread": {}}
        result["notices"] = []
        started = time.perf_counter()
        try:
            changed, result["notices"] = changed_parameters(self.parameters, change)
            touched = touched_components(self.parameters, changed)
            result["touched"] = sorted(touched)
            halves = [h for h, parts in HALVES.items() if touched & set(parts)]
            if _data_alone_differs(self.parameters, changed):
                halves.append("data")
            for half in halves:
                self._compare(half, changed, touched, seconds / max(len(halves), 1), result)
            if self.parameters.data.loader == "prefetch":
                result["overlap_base"] = self._overlap(self.parameters)
            if changed.data.loader == "prefetch":
                result["overlap"] = self._overlap(changed)
        except InputError as error:
            result |= {"refused": str(error), "parts": {}, "base": {}, "spread": {}}
        finally:
            apply_settings(self.parameters)
        result["seconds"] = time.perf_counter() - started
        return result

    def _base_loop(self, half: str) -> StepLoop | DataLoop:
        if half in self.refused:
            raise InputError(self.refused[half])
        if half not in self.loops:
            _require(self.parameters, half, self.loops)
            self.loops[half] = (
                DataLoop(self.parameters) if half == "data" else StepLoop(self.parameters, half)
            )
        return self.loops[half]

    def _changed_loop(self, half: str, changed: Parameters) -> StepLoop | DataLoop:
        base = self._base_loop(half)
        if half == "data":
            return DataLoop(changed)
        assert isinstance(base, StepLoop)
        same = [t.shape for t in base.model.embeddings.weights] == [
            (rows, changed.model.embedding_dim) for rows in base.parameters.model.table_rows
        ] and (half == "dense" or base.parameters.model.table_rows == changed.model.table_rows)
        if not same:
            _require(changed, half, self.loops)
        return StepLoop(changed, half, tables_from=base)

    def _compare(
        self,
        half: str,
        changed: Parameters,
        touched: set[str],
        seconds: float,
        result: dict[str, Any],
    ) -> None:
        loop = self._changed_loop(half, changed)
        result["notices"] += [text for text in loop.notices if text not in result["notices"]]
        before, after = interleave([self._base_loop(half), loop], seconds)
        now, then, spread = medians(before), medians(after), ratio_errors(before, after)
        for component, phases in then.items():
            if component in SHARED:
                # some of it is in the other half, which has not changed or comes later
                for key, found in (("base", now), ("parts", then)):
                    for phase in phases:
                        known = result[key].setdefault(component, {})
                        if phase not in known:
                            known[phase] = sum(
                                alone.get(component, {}).get(phase, 0.0)
                                for alone in self.alone.values()
                            )
                        alone = self.alone.get(half, {}).get(component, {}).get(phase, 0.0)
                        known[phase] += found.get(component, {}).get(phase, alone) - alone
                    result["spread"].setdefault(component, {}).update(spread.get(component, {}))
            elif component in touched:
                only = touched_phases(self.parameters, changed, component)
                kept = [p for p in phases if p in now[component] and (only is None or p in only)]
                for key, found in (("parts", then), ("base", now), ("spread", spread)):
                    result[key][component] = {phase: found[component][phase] for phase in kept}

    def _overlap(self, parameters: Parameters) -> dict[str, Any]:
        """How much making batches in a thread slows the halves, and they it."""
        key = signature(parameters, "data"), *(str(reduced(parameters, half)) for half in HALVES)
        if key in self.overlaps:
            return self.overlaps[key]
        data = DataLoop(parameters)
        slow: dict[str, dict[str, float]] = {}
        made_ms = {}
        alone = medians(interleave([data], OVERLAP_SECONDS / 3)[0])["data"]["forward"]
        for half in HALVES:
            loop = self._changed_loop(half, parameters)
            apply_settings(parameters)
            quiet: list[Times] = []
            beside: list[Times] = []
            made: list[float] = []
            deadline = time.perf_counter() + OVERLAP_SECONDS / 3
            while len(quiet) < 3 or (len(quiet) < 12 and time.perf_counter() < deadline):
                quiet.append(loop.run())
                with data.beside() as times:
                    # the first batch begins while the caches are scrubbed
                    loop.run()
                    beside.append(loop.run())
                made += times
            now, then = medians(quiet), medians(beside)
            slow[half] = {"alone_ms": total(now), "beside_ms": total(then)}
            made_ms[half] = statistics.median(made) if made else math.nan
        found = {"data_alone_ms": alone, "data_beside_ms": made_ms, "halves": slow}
        self.overlaps[key] = found
        return found


def _data_alone_differs(base: Parameters, changed: Parameters) -> bool:
    """Whether making a batch takes another time, whichever thread makes it."""

    def synchronous(parameters: Parameters) -> Parameters:
        return replace(parameters, data=replace(parameters.data, loader="synchronous"))

    return "data" in touched_components(synchronous(base), synchronous(changed))


def _require(parameters: Parameters, half: str, loops: Mapping[str, Any]) -> None:
    """Refuse to build a half that would not fit beside what is built already."""
    if half == "data":
        return
    needed = sum(item.bytes for item in forecast_memory(reduced(parameters, half)))
    available = available_memory(torch.device("cpu"))
    if available is not None and needed > MEMORY_SHARE * available:
        raise InputError(
            f"probing the {half} half needs {format_bytes(needed)}, more than "
            f"{MEMORY_SHARE:.0%} of the {format_bytes(available)} available"
        )


def _fused_changes(training: Any) -> list[dict[str, Any]]:
    """The fused dense part, where the processor has the tiles for it."""
    from dlrm_core.tiles.machine import why_no_tiles

    if training.dense_backend != "torch" or training.compile or why_no_tiles():
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


def _bf16_pays(training: Any) -> bool:
    """Whether bf16 is allowed and computed by the processor itself."""
    if getattr(training, "lowest_precision", "bf16") == "fp32":
        return False
    from dlrm_core.doctor import machine_facts

    flags = set(machine_facts().get("isa") or ())
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def _last_level_cache() -> int:
    """Bytes of the largest cache that the system names; 32 MiB where it names none."""
    import os

    sizes = [
        os.sysconf(name)
        for name in ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE")
        if name in os.sysconf_names
    ]
    return max([size for size in sizes if size > 0], default=32 << 20)
