"""Measurements in turns: contestants or probes interleaved round by round, and what rounds say.

A machine's speed drifts by more than many differences that are to be measured, so times of
different minutes are not compared. Every round runs all contestants one after the other, a
ratio is taken within the round, and the rounds' own ratios are summed up by their median and
an interval. Protocols differ in the order within a round and in when the rounds suffice; what
a turn is (a call, an iteration, a fresh process) is the caller's business:

    for number, names in take_turns(["plain", "tuned"], rounds=6, order=rotated):
        for name in names:
            times[name][number] = run(name)
    median_interval(round_ratios(times["plain"], times["tuned"]))
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Contestant = TypeVar("Contestant")
Order = Callable[[Sequence[Contestant], int], Sequence[Contestant]]
"""Who runs after whom: (contestants, number of the round from 0) to their order."""

CPU = torch.device("cpu")


def in_order(contestants: Sequence[Contestant], number: int) -> Sequence[Contestant]:
    """The same order in every round: A B C, A B C."""
    return contestants


def rotated(contestants: Sequence[Contestant], number: int) -> Sequence[Contestant]:
    """Whoever was first moves to the end in the next round: A B C, B C A, C A B."""
    shift = number % len(contestants)
    return [*contestants[shift:], *contestants[:shift]]


def back_and_forth(contestants: Sequence[Contestant], number: int) -> Sequence[Contestant]:
    """Every second round runs backwards, so that a steady drift cancels: A B C, C B A."""
    return contestants if number % 2 == 0 else contestants[::-1]


def take_turns(
    contestants: Sequence[Contestant],
    rounds: int,
    order: Order[Contestant] = in_order,
    enough: Callable[[int], bool] = lambda done: False,
    first: int = 0,
) -> Iterator[tuple[int, Sequence[Contestant]]]:
    """Number of each round from ``first`` on (of a measurement that goes on after a stop) and its
    contestants in their order; so many ``rounds`` at most, unless ``enough``, called before each
    with the number of rounds done, ends them."""
    for number in range(first, rounds):
        if enough(number):
            return
        yield number, order(contestants, number)


def least_and_seconds(least: int, seconds: float) -> Callable[[int], bool]:
    """The usual end of rounds: so many at least, then until so many seconds from now."""
    deadline = time.perf_counter() + seconds
    return lambda done: done >= least and time.perf_counter() >= deadline


def round_ratios(base: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """Time of ``base`` over time of ``other``, both by round, in each round that has both."""
    return [base[number] / ms for number, ms in other.items() if number in base]


def median_error(values: Sequence[float]) -> float:
    """Relative standard error of the median, from the quartiles; 0 of fewer than two values.

    Of a normal distribution sigma is the quartiles' distance over 1.349, and the median's
    standard error is 1.253 sigma / sqrt(n).
    """
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return 1.253 * (high - low) / 1.349 / math.sqrt(len(values)) / middle if middle > 0 else 0.0


# What a turn needs.


def elapsed_ms(call: Callable[[], object], count: int = 1, device: torch.device = CPU) -> float:
    """Milliseconds per call, from the first call's begin to the last one's end on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(count):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - started) / count


def waited_ns() -> int | None:
    """Nanoseconds that this thread was ready to run and had no core; None where nobody says."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None


class CacheFlush:
    """Streams over a buffer, so that what was in the caches no longer is."""

    def __init__(self, size_bytes: int) -> None:
        self.buffer = torch.zeros(size_bytes // 4)
        self.taken_ns = 0
        """Time that all calls took."""

    def __call__(self) -> None:
        started = time.time_ns()
        self.buffer.add_(1.0)
        self.taken_ns += time.time_ns() - started


@contextlib.contextmanager
def threads_of(count: int | None) -> Iterator[None]:
    """Give torch so many CPU threads for a while; None leaves them."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Best times of short operations.

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
    for done, keys in take_turns(list(best), MAX_ROUNDS):
        for key in keys:
            used = time.perf_counter() - started
            if used > budget_s * (OVERRUN if done < LEAST_ROUNDS else 1.0):
                return best, failed
            if done < LEAST_ROUNDS or spent[key] < budget_s / len(best):
                sample_ms = _sample(actions[key], device, calls[key])
                spent[key] += sample_ms * calls[key] / 1e3
                best[key] = min(best[key], sample_ms)
    return best, failed


def _sample(action: Action, device: torch.device, count: int) -> float:
    """Milliseconds per call, over ``count`` calls; on a GPU the device's own time."""
    with action.setting(), torch.no_grad():
        if device.type != "cuda":
            return elapsed_ms(action.call, count)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        first.record()
        for _ in range(count):
            action.call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / count
