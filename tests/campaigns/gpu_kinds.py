"""What kinds of faults on GPUs are made of: work to insert into a trace, and ``Fault``."""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from database_edits import DatabaseCopy
from trace_edits import Event, Insertion, Trace

OPEN_ENDED = float("inf")

Draw = random.Random
Plant = Callable[[Any, Draw, float], str]
"""Edits a recording (a trace, a database) so that each step loses so many microseconds; tells
what it did."""
Delay = Callable[[Trace, float, float], None]
"""Edits the trace of one rank so that what it launches at a time comes so much later, us."""

ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<float>, "
    "at::detail::Array<char*, 3>)"
)

FILL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<long>, "
    "at::detail::Array<char*, 1> >(int, at::native::FillFunctor<long>, "
    "at::detail::Array<char*, 1>)"
)
SORT = (
    "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, long, int>::"
    "Policy800, false, long, long, int, int>(int*, int*, int*, long*, long const*, long*, "
    "long const*, int, int, int)"
)

OPTIMIZER = r"^Optimizer\.step|## optimizer"
SMALL = (0.055, 0.11)
"""What a small plant adds, over the step's own: 5 to 10 % of the longer step."""


@dataclass(frozen=True)
class Fault:
    """What is planted, where, and which findings name it."""

    plant: Plant
    recordings: tuple[str, ...]
    named: tuple[tuple[str, str], ...]
    """(pattern of an id or title, pattern of the whole text); one pair must match."""
    held_out: bool = False
    unless: str = ""
    """Pattern of ids and titles that name something else."""
    advice_counts: bool = True
    """Whether advice, which may list parts to change that are not at fault, can tell where."""
    delay: Delay | None = None
    """What holds up one rank, where the recording is of several."""
    small: tuple[float, float] = (0.25, 0.4)
    """Time that a small plant adds, over the step's own."""
    listed: bool = False
    """Whether a small plant needs only be listed anywhere among the findings."""


def add_copy(
    trace: Trace, at: float, what: str, length: float, rate: float, waits: bool = False
) -> None:
    """A copy of so many microseconds at so many GB/s, for which the host waits or not."""
    number = trace.new_id()
    copied = trace.gpu_work("memcpy", f"Memcpy {what}", number)
    copied["args"] |= {"bytes": int(length * rate * 1e3), "memory bandwidth (GB/s)": rate}
    last = OPEN_ENDED if waits else 18.0
    host = [
        (0.0, last, trace.operator("aten::copy_")),
        (4.0, last if waits else 10.0, trace.runtime_call("cudaMemcpyAsync", number)),
    ]
    trace.insert(Insertion(at, 20.0, host, [(4.0, length, copied)], drains=waits))


def add_tiny_kernels(
    trace: Trace, at: float, count: int, each: float, names: list[str], kernel: str = ADD
) -> None:
    """So many operators of one short kernel each, one after the other."""
    operators = [trace.operator(name) for name in names]
    launch = trace.runtime_call("cudaLaunchKernel")
    work = trace.gpu_work("kernel", kernel, 0)
    host, device = [], []
    for number in range(count):
        begins = number * each
        own = trace.new_id()
        host.append((begins, each - 0.5, numbered(operators[number % len(names)], own)))
        host.append((begins + 1.5, each - 2.5, numbered(launch, own)))
        device.append((begins + 1.5, 1.6, numbered(work, own)))
    trace.insert(Insertion(at, count * each, host, device))


def numbered(event: dict[str, Any], number: int) -> dict[str, Any]:
    """The event with another number of its launch."""
    args = dict(event.get("args") or {})
    for name in ("correlation", "External id", "external id"):
        if name in args:
            args[name] = number
    return event | {"args": args}


def add_loading(trace: Trace, step: int, length: float, names: tuple[str, ...] = ()) -> None:
    """The step waits so long for its batch, in nested operators if any are named."""
    first, last = trace.steps[step]
    loads = [
        row
        for row, event in enumerate(trace.events)
        if event.get("ph") == "X"
        and str(event["name"]).startswith("enumerate(DataLoader)")
        and first <= trace.start[row] < last
    ]
    spans: list[dict[str, Any]] = []
    if not loads:
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        span = trace.operator(name) | {"cat": trace.events[trace.marks[0]]["cat"]}
        spans = [*trace.python("torch/utils/data/dataloader.py(733): __next__"), span]
    spans += [trace.operator(name) for name in names]
    at = float(trace.start[loads[0]]) + 0.5 if loads else trace.points(step)[0]
    host = [(1.0 + depth, length - 2.0 - depth, event) for depth, event in enumerate(spans)]
    trace.insert(Insertion(at, length, host))


def kernels(trace: Trace, pattern: str) -> list[int]:
    """Rows of the kernels whose name matches."""
    return [
        row
        for row in trace.device
        if str(trace.events[row]["cat"]).lower() == "kernel"
        and re.search(pattern, trace.events[row]["name"])
    ]


def operator(trace: Trace, name: str, shape: list[int] | None = None, kind: str = "float") -> Event:
    """An operator on the stepping thread whose recorded inputs are its own."""
    event = trace.operator(name)
    args = numbered(event, trace.new_id())["args"]
    event["args"] = args
    if shape is not None and "Input Dims" in args:
        args |= {"Input Dims": [shape], "Input type": [kind]}
    else:
        args.pop("Input Dims", None)
        args.pop("Input type", None)
    for name in ("Concrete Inputs", "Input Strides"):
        args.pop(name, None)
    return event


def annotation(trace: Trace, name: str) -> Event:
    """A range that a program marks, as the recording has its iterations marked."""
    return trace.operator(name) | {"cat": trace.events[trace.marks[0]]["cat"]}


@contextmanager
def backward(trace: Trace) -> Iterator[None]:
    """Edits are made on the thread that runs the backward."""
    own = trace.thread
    threads = Counter(
        (trace.events[row]["pid"], trace.events[row]["tid"])
        for row in trace.operators
        if re.search(r"Backward\d*$", trace.events[row]["name"])
    )
    trace.thread = threads.most_common(1)[0][0]
    try:
        yield
    finally:
        trace.thread = own


def batch_start(trace: Trace, step: int) -> float:
    """When the batch of an iteration is made ready; its first operator where nothing says."""
    return (trace.within("copy_batch|load_batch", step) or trace.points(step))[0]


def before_optimizer(trace: Trace, step: int) -> float:
    """When an iteration's update starts; near its end where that is not marked."""
    return (trace.within(OPTIMIZER, step) or trace.points(step)[-3:])[0]


def floats(length: float, rate: float) -> int:
    """Numbers of 4 bytes that pass in so many microseconds at so many GB/s."""
    return max(int(length * rate * 1e3 / 4.0), 1)


def slower(function: str) -> Plant:
    """One function takes longer: its instructions and calls, or the kernels that it launched."""

    def plant(database: DatabaseCopy, draw: Draw, loss: float) -> str:
        return f"{function} takes {database.stretch_function(function, loss):.0f} times as long"

    return plant
