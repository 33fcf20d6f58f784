"""Best times of short operations, measured in turns, on the CPU or on a GPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)

SAMPLE_MS = 0.3
"""Calls are timed together until they last this long: the clock and a GPU's events are coarse."""

MAX_CALLS = 400
LEAST_ROUNDS = 2
"""Every operation is timed this often, however long it takes ..."""
MAX_ROUNDS = 25
"""... and this often if its equal share of the budget lasts."""
OVERRUN = 2.0
"""First calls may take this many times the budget before the rest is left out."""


@dataclass(frozen=True)
class Action:
    """Something to time, and the setting that it needs while it is timed."""

    call: Callable[[], object]
    setting: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext


def best_times_ms(
    actions: Mapping[Key, Action], device: torch.device, budget_s: float
) -> tuple[dict[Key, float], dict[Key, str]]:
    """Least milliseconds of one call of each action: a ceiling, not a typical time.

    Each is called once or twice to warm up; then all are timed in turns, so that a
    busy moment of the machine does not fall on one kind alone. On a GPU the time is
    the device's own, between two events around the calls.

    Returns:
        milliseconds a call; and, for the actions that could not be timed, why not.
    """
    started = time.perf_counter()
    best: dict[Key, float] = {}
    calls: dict[Key, int] = {}
    failed: dict[Key, str] = {}
    for key, action in actions.items():
        if time.perf_counter() - started > OVERRUN * budget_s:
            failed[key] = f"the {budget_s:.1f} s meant for such measurements were over"
            continue
        try:
            estimate = _sample(action, device, 1)
            # the first call pays for packing, code generation, libraries loaded
            if estimate < 20.0:
                estimate = _sample(action, device, 1)
        except (RuntimeError, NotImplementedError) as error:
            failed[key] = str(error).strip().splitlines()[0]
            continue
        best[key] = estimate
        calls[key] = max(1, min(MAX_CALLS, round(SAMPLE_MS / max(estimate, 1e-4))))
    spent = dict.fromkeys(best, 0.0)
    for done in range(MAX_ROUNDS):
        for key in best:
            used = time.perf_counter() - started
            if used > budget_s * (OVERRUN if done < LEAST_ROUNDS else 1.0):
                return best, failed
            if done < LEAST_ROUNDS or spent[key] < budget_s / len(best):
                found = _sample(actions[key], device, calls[key])
                spent[key] += found * calls[key] / 1e3
                best[key] = min(best[key], found)
    return best, failed


def _sample(action: Action, device: torch.device, count: int) -> float:
    """Milliseconds a call, over ``count`` calls."""
    call = action.call
    with action.setting(), torch.no_grad():
        if device.type != "cuda":
            started = time.perf_counter()
            for _ in range(count):
                call()
            return 1e3 * (time.perf_counter() - started) / count
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        first.record()
        for _ in range(count):
            call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / count


@contextlib.contextmanager
def threads_of(count: int | None) -> Iterator[None]:
    """torch's CPU threads for a while; None leaves them."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
