"""Tries remedies in turns on the running program: off, on, on, off ..., each row written at once.

A :class:`Trials` is told where iterations end. It looks at one iteration
(:mod:`~dlrm_workbook.recordings.torch.trials.seen`), switches each remedy that the recording makes
plausible on and off between iterations, and at last those that paid together. What it finds is
``trials.json`` in the recording's folder. Needs torch and the standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from dlrm_core.base.files import read_json, write_json
from dlrm_core.base.machine import kernel_text, number_in
from dlrm_workbook.ground import heap
from dlrm_workbook.ground.speed_range import (
    FEWEST,
    FILE,
    MOST,
    NARROW,
    PAID,
    speed_range,
    status_of,
)
from dlrm_workbook.recordings.torch.trials.remedies import REMEDIES, Facts, Remedy, Spoilt, TooLong
from dlrm_workbook.recordings.torch.trials.seen import Looking, Seen, tensors

BLOCK_S, BLOCK_ITERATIONS = 0.15, 2
"""A block of iterations in one state takes at least so long, and has at least so many."""

LONGEST_S = 4.0
"""The turns of a remedy end then, if there are enough of them."""

FAR_SLOWER = 2.0
"""What is slower by so much is not timed for long."""

BUSY = 0.1
"""Other processes that use a larger share of the cores are named in a row."""

COMPILE_S = 15.0
HANGS, HANGS_S = 30.0, 20.0
"""A remedy hangs when an iteration takes so many times as long as usual, and so many seconds."""

Work = Generator[None, None, Any]
"""Goes on at the end of each iteration."""


class Trials:
    """Tries remedies on the program that calls :meth:`step` at the end of each iteration.

    Args:
        folder: the recording, which is whole; gets ``trials.json``.
        budget_s: seconds for all of it.
        only: ids of the remedies to try; None: all that are plausible.
        may_end: whether a remedy that hangs may end the program.
        tell: called with what is being tried.
    """

    def __init__(
        self,
        folder: Path,
        budget_s: float,
        *,
        only: Sequence[str] | None = None,
        may_end: bool = True,
        tell: Callable[[str], object] = lambda _text: None,
    ) -> None:
        self._file, self._budget_s, self._only = folder / FILE, budget_s, only
        self._may_end, self._tell = may_end, tell
        self._began = time.perf_counter()
        self.rows: list[dict[str, Any]] = []
        self._not_tried: dict[str, str] = {}
        self._missing: str | None = None
        self._later: list[dict[str, Any]] = []
        """Rows, with what to change, of remedies for another process."""
        self._active: list[Remedy] = []
        self._trying: Remedy | None = None
        self._outputs: list[torch.Tensor] = []
        self._hooks: list[Any] = []
        self._deadline = math.inf
        self._points = 0
        self._over = False
        self._rank, self._world = _ranks()
        self._base_s = 0.0
        self._work: Work = self._all()

    def step(self) -> bool:
        """Say that an iteration has ended; whether more are needed."""
        if self._over:
            return False
        try:
            next(self._work)
        except StopIteration:
            self.close(None)
        except Exception as error:
            self.close(f"trying remedies failed: {type(error).__name__}: {error}")
        return not self._over

    def close(self, reason: str | None) -> None:
        """Switch everything off and write what there is; ``reason``: why before all is tried."""
        if self._over:
            return
        trying, error = self._trying, getattr(sys, "last_value", None)
        self._over, self._deadline = True, math.inf
        if trying is not None and reason is not None:
            text = f"{type(error).__name__}: {error}" if error is not None else reason
            if error is not None and self._active:
                self._fail(trying, f"the program ended while this was on: {_line(text)}")
            else:
                self._not_tried[trying.name] = f"{reason} while it was being tried"
        self._missing = reason
        try:
            self._work.close()  # what is on is switched off in there
        except Exception as late:
            self._missing = f"{reason or ''} switching off failed: {late}".strip()
        for hook in self._hooks:
            hook.remove()
        self._outputs = []
        heap.release()
        self._write()

    # ---- the plan ---------------------------------------------------------------------

    def _all(self) -> Work:
        folder = self._file.parent
        averages = read_json(folder / "key_averages.json")["rows"]
        device = torch.device(read_json(folder / "recording.json").get("device", "cpu"))
        self._facts = Facts(averages, device)
        looking = Looking()
        with looking as seen:
            yield
        self._base_s = yield from self._baseline(seen)
        remedies = self._plan(seen)
        threading.Thread(target=self._watch, daemon=True, name="trials' watch").start()
        paid: list[tuple[Remedy, dict[str, Any]]] = []
        for number, remedy in enumerate(remedies):
            reserve = self._need_s(remedy) if paid or number else 0.0
            left = self._left_s()
            if self._need_s(remedy) > left - (reserve if paid else 0.0):
                self._not_tried[remedy.name] = (
                    f"{FEWEST} turns take about {self._need_s(remedy):.0f} s, and "
                    f"{max(left, 0):.0f} of {self._budget_s:.0f} s are left"
                )
                continue
            row = yield from self._try([remedy], min(LONGEST_S, left - reserve), seen)
            if row["status"] == "paid":
                paid.append((remedy, row))
        yield from self._together(paid, seen)
        for remedy in remedies:
            remedy.end()

    def _baseline(self, seen: Seen) -> Generator[None, None, float]:
        """Seconds of an iteration as it is, and what collecting garbage takes of it."""
        collected, began = [0.0], [0.0]

        def note(phase: str, _information: dict[str, Any]) -> None:
            if phase == "start":
                began[0] = time.perf_counter()
            else:
                collected[0] += time.perf_counter() - began[0]

        for call in seen.models:
            self._hooks.append(call.module.register_forward_hook(self._keep))
        yield  # looking at an iteration leaves the next one slow
        gc.callbacks.append(note)
        try:
            first = yield from self._timed(1)
            count = min(200, max(BLOCK_ITERATIONS, math.ceil(0.3 / first)))
            count = int(max(self._agree(count)))
            mean_s = yield from self._timed(count)
        finally:
            gc.callbacks.remove(note)
        share = collected[0] / (first + count * mean_s)
        self._facts = Facts(self._facts.averages, self._facts.device, share)
        return statistics.fmean(self._agree(mean_s))

    def _plan(self, seen: Seen) -> list[Remedy]:
        """The remedies to try, in their order; why the others are not is noted."""
        found: dict[str, Remedy] = {}
        for kind in REMEDIES:
            if self._only is not None and kind.id not in self._only:
                continue
            if self._world > 1 and not kind.ranks:
                self._not_tried[kind.id.replace("_", " ")] = "several ranks train together"
                continue
            try:
                remedy = kind.refusal(seen, self._facts) or kind.find(seen, self._facts)
            except Exception as error:
                remedy = f"looking for it failed: {_said(error)}"
            if isinstance(remedy, Remedy) and remedy.new_process:
                row = _row(remedy) | {"numerics": remedy.numbers(seen, 0.0)}
                self._later.append(
                    row | {"environment": remedy.environment, "options": remedy.options}
                )
            elif isinstance(remedy, str):
                self._not_tried[kind.id.replace("_", " ")] = remedy
            else:
                found[kind.id] = remedy
        # what must be compiled takes most of the time, whatever it gains
        order = sorted(found, key=lambda name: (name == "compile", -found[name].gain))
        plans = self._agree(order)
        self._not_tried |= dict.fromkeys(
            [name for name in found if not all(name in plan for plan in plans)],
            "not every rank could switch it",
        )
        return [found[name] for name in plans[0] if all(name in plan for plan in plans)]

    def _together(self, paid: list[tuple[Remedy, dict[str, Any]]], seen: Seen) -> Work:
        """Try what paid together: of each family the best."""
        paid = sorted(paid, key=lambda pair: -pair[1]["speedup"]["mid"])
        best_of: dict[str, Remedy] = {}
        for remedy, _row in paid:
            best_of.setdefault(remedy.family or remedy.id, remedy)
        chosen = list(best_of.values())
        if len(chosen) < 2:
            return
        need_s = max(self._need_s(one) for one in chosen)
        if need_s > self._left_s():
            self._not_tried["together"] = "no time is left of the budget"
            return
        row = yield from self._try(chosen, min(2 * LONGEST_S, self._left_s()), seen)
        best = paid[0][1]
        if row["status"] == "failed" or row["speedup"]["high"] < best["speedup"]["low"]:
            row["reason"] = f"{row['reason'] or ''} {best['remedy']} alone is the best.".strip()
            self._write()

    def _need_s(self, remedy: Remedy) -> float:
        iterations = FEWEST * 2 * self._block() + FEWEST + 2 * remedy.settle
        return iterations * self._base_s

    def _block(self) -> int:
        return max(BLOCK_ITERATIONS, math.ceil(BLOCK_S / self._base_s))

    def _left_s(self) -> float:
        return self._budget_s - max(self._agree(time.perf_counter() - self._began))

    # ---- one row ------------------------------------------------------------------------

    def _try(
        self, remedies: list[Remedy], limit_s: float, seen: Seen
    ) -> Generator[None, None, dict[str, Any]]:
        remedy = remedies[0] if len(remedies) == 1 else _Together(remedies)
        self._trying = remedy
        self._tell(f"trying {remedy.name}")
        row, error = _row(remedy), ""
        try:
            compile_s = max(1.0, min(COMPILE_S, self._left_s() / 2))
            row["numerics"] = remedy.numbers(seen, compile_s)
        except Spoilt as spoilt:
            error = str(spoilt)
        except (Exception, TooLong) as failure:
            error = _said(failure)
        heap.restore()
        failures = self._failures(error) or (yield from self._turns(remedy, row, limit_s))
        if failures:
            row |= {"status": "failed", "reason": failures[0]}
        row["compile_s"], row["code"] = remedy.compile_s, remedy.code
        self._trying = None
        self.rows.append(row)
        self._write()
        return row

    def _turns(
        self, remedy: Remedy, row: dict[str, Any], limit_s: float
    ) -> Generator[None, None, list[str]]:
        """Time blocks without and with a remedy until the range is narrow; what failed."""
        began, order, is_on, first = time.perf_counter(), [False, True], False, True
        others_s = _others_s()
        logs: list[float] = []
        count = self._block()
        blocks: dict[bool, list[tuple[float, int | None]]] = {False: [], True: []}
        spoilt = not self._finite()
        yield  # numbers were computed in between
        try:
            while True:
                for wanted in order:
                    if wanted != is_on:
                        (remedy.on if wanted else remedy.off)()
                        is_on = wanted
                        self._active = [remedy] if is_on else []
                        for _ in range(remedy.settle if first and wanted else 1):
                            self._expect(wanted)
                            yield
                        first = first and not wanted
                    self._expect(wanted, count)
                    _reset_peak(self._facts.device)
                    block_s = yield from self._timed(count)
                    blocks[wanted].append((block_s, _peak(self._facts.device)))
                    error = _said(remedy.error())
                    if wanted and not spoilt and not self._finite():
                        error = error or "outputs are not finite (NaN or infinity) with it"
                    if failures := self._failures(error):
                        return failures
                order.reverse()
                pair = math.log(blocks[False][-1][0] / blocks[True][-1][0])
                logs.append(statistics.fmean(self._agree(pair)))
                self._base_s = statistics.fmean(self._agree(blocks[False][-1][0]))
                left_s = self._left_s()
                spent_s = max(self._agree(time.perf_counter() - began))
                if left_s <= 0 or self._enough(logs, spent_s, min(limit_s, spent_s + left_s)):
                    break
        finally:
            self._deadline = math.inf
            self._active = []
            if is_on:
                remedy.off()
        if len(logs) < 2:
            reason = f"the budget of {self._budget_s:.0f} s ended after one turn"
            row |= {"status": "unclear", "turns": len(logs), "reason": reason}
            return []
        low, mid, high = speed_range(logs)
        off_ms, on_ms = (statistics.median(s for s, _ in blocks[on]) * 1e3 for on in (False, True))
        status = status_of(low, high)
        more = [
            peak - before
            for (_, before), (_, peak) in zip(blocks[False], blocks[True], strict=True)
            if peak is not None and before is not None
        ]
        row |= {"status": status, "speedup": {"low": low, "mid": mid, "high": high}}
        row |= {"off_ms": off_ms, "on_ms": on_ms}
        row |= {"turns": len(logs), "iterations": 2 * len(logs) * count}
        row["memory_bytes"] = int(statistics.median(more)) if more else None
        reasons = ["the range is too wide to tell"] if status == "unclear" else []
        if self._world == 1 and (used := _share_of_others(began, others_s)) > BUSY:
            reasons.append(f"other processes used {used:.0%} of the cores meanwhile")
        row["reason"] = "; ".join(reasons) or None
        return []

    def _enough(self, logs: list[float], spent_s: float, limit_s: float) -> bool:
        """Whether the turns can end: where they began in alternating order, after both orders."""
        if len(logs) >= 2 and max(logs) < -math.log(FAR_SLOWER):
            return True
        if len(logs) < FEWEST:
            return False
        per_turn = spent_s / len(logs)
        if len(logs) >= MOST or spent_s + per_turn > limit_s:
            return True
        low, _, high = speed_range(logs)
        return len(logs) % 2 == 0 and (high / low < NARROW or high < 1 / PAID)

    def _timed(self, count: int) -> Generator[None, None, float]:
        """Seconds of an iteration, mean of the next ones."""
        _wait(self._facts.device)
        began = time.perf_counter()
        for _ in range(count):
            yield
        _wait(self._facts.device)
        return (time.perf_counter() - began) / count

    def _keep(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        self._outputs = [one.detach() for one in tensors(output)]

    def _finite(self) -> bool:
        return all(bool(torch.isfinite(one).all()) for one in self._outputs)

    def _fail(self, remedy: Remedy, reason: str) -> None:
        self.rows.append(_row(remedy) | {"reason": reason})

    # ---- a remedy that hangs -----------------------------------------------------------

    def _expect(self, is_on: bool, count: int = 1) -> None:
        """Say by when the next iterations must have ended."""
        allowed = max(HANGS_S, HANGS * self._base_s) + 2 * count * self._base_s
        self._deadline = time.perf_counter() + allowed if is_on and self._may_end else math.inf

    def _watch(self) -> None:
        """End the program when a remedy hangs: nothing else ends what the program waits for."""
        while not self._over:
            time.sleep(0.5)
            if time.perf_counter() > self._deadline and self._trying is not None:
                self._fail(self._trying, "no iteration ended in time with it on; it hangs")
                self._missing = "the program was ended while a remedy hung"
                self._write()
                print("dlrm: a remedy hangs; the program is ended here", file=sys.stderr)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)

    # ---- ranks, files ----------------------------------------------------------------------

    def _agree(self, value: Any) -> list[Any]:
        """What each rank says here; all decide by the same values in the same iteration."""
        if self._world == 1:
            return [value]
        from torch.distributed import distributed_c10d

        store: Any = distributed_c10d._get_default_store()
        self._points += 1
        keys = [f"dlrm-trials/{self._points}/{rank}" for rank in range(self._world)]
        store.set(keys[self._rank], json.dumps(value))
        return [json.loads(store.get(key)) for key in keys]

    def _failures(self, error: str) -> list[str]:
        return [one for one in self._agree(error) if one]

    def _write(self) -> None:
        document = {
            "budget_s": self._budget_s,
            "spent_s": time.perf_counter() - self._began,
            "rows": self.rows,
            "not_tried": [
                {"remedy": name, "reason": reason} for name, reason in self._not_tried.items()
            ],
            "not_measured": self._missing,
            "whole_runs": self._later,
        }
        write_json(self._file, document)


def _others_s() -> float:
    """Seconds that other processes computed since the machine began, as far as that can be told."""
    fields = [int(text) for text in kernel_text("/proc/stat").partition("\n")[0].split()[1:9]]
    busy, mine = sum(fields) - sum(fields[3:5]), time.process_time()
    return busy / os.sysconf("SC_CLK_TCK") - mine if fields else 0.0


def _share_of_others(began: float, before_s: float) -> float:
    """What others used of the cores since; 0 where we may use only some of the machine's."""
    cores = os.cpu_count() or 1
    if len(os.sched_getaffinity(0)) < cores:
        return 0.0
    return max(0.0, _others_s() - before_s) / ((time.perf_counter() - began) * cores)


class _Together(Remedy):
    id = "together"

    def __init__(self, remedies: Sequence[Remedy]) -> None:
        ordered = sorted(remedies, key=lambda one: one.layer)
        code = "\n\n".join(
            f"# {one.place}\n{one.code}" if one.place else one.code for one in ordered
        )
        name = "together: " + ", ".join(one.name for one in remedies)
        super().__init__(name, 0.0, code, "", " ".join({one.note: 0 for one in remedies}))
        self._ordered = ordered
        self.settle = max(one.settle for one in remedies)  # type: ignore[misc]

    def switched(self) -> Work:
        for one in self._ordered:
            one.on()
        yield
        for one in reversed(self._ordered):
            one.off()

    def error(self) -> BaseException | None:
        return next((one.failed for one in self._ordered if one.failed), None)


def _row(remedy: Remedy) -> dict[str, Any]:
    """The row of a remedy of which nothing is known yet."""
    unknown = ("speedup", "off_ms", "on_ms", "numerics", "memory_bytes", "reason")
    return {
        "id": remedy.id,
        "remedy": remedy.name,
        "status": "failed",
        **dict.fromkeys(unknown),
        **{"turns": 0, "iterations": 0},
        **{"compile_s": remedy.compile_s, "code": remedy.code, "place": remedy.place},
    }


def _line(error: object) -> str:
    """The first line of what an error says, cut to one that fits a table."""
    return (str(error).strip().splitlines() or [""])[0][:200]


def _said(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {_line(error)}"


def _ranks() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak(device: torch.device) -> int | None:
    """Bytes at the highest point since :func:`_reset_peak`; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak_kib = number_in("/proc/self/status", "VmHWM:")
    return None if peak_kib is None else 1024 * peak_kib
