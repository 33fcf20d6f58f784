"""What kinds of faults on GPUs are made of: work to insert into a trace, and ``Fault``."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
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


# ---- work at a place of each iteration ---------------------------------------------------

LOOKUPS = r"sparse_arch|EmbeddingBagCollection|ebc"


PLACES: dict[str, Callable[[Trace, int], list[float]]] = {
    "batch": lambda trace, step: [batch_start(trace, step)],
    "forward": Trace.model_points,
    "lookups": lambda trace, step: trace.within(LOOKUPS, step) or trace.model_points(step),
    "loss": lambda trace, step: trace.model_points(step)[-1:],
    "backward": lambda trace, step: trace.points(step)[:-1],
    "optimizer": lambda trace, step: [before_optimizer(trace, step)],
    "end": lambda trace, step: trace.points(step)[-1:],
}
"""Name of a place in an iteration to the points in it."""


def visits(trace: Trace, place: str) -> Iterator[list[float]]:
    """The points of each iteration at a place, on whose thread edits are made meanwhile."""
    with backward(trace) if place == "backward" else nullcontext():
        for step in range(len(trace.steps)):
            yield PLACES[place](trace, step)


def host_event(trace: Trace, name: str, shape: list[int] | None = None, kind: str = "") -> Event:
    """A call of the CUDA runtime or driver, a range or an operator, as its name tells."""
    if name.startswith("cu"):
        call = trace.runtime_call(name)
        modern = str(call["cat"]) == "cuda_runtime" and not name.startswith("cuda")
        return call | ({"cat": "cuda_driver"} if modern else {})
    if name.startswith(("## ", "nccl:")):
        return annotation(trace, name)
    return operator(trace, name, shape, kind)


def nested(
    trace: Trace, names: str, begins: float, length: float, shape: list[int] | None = None
) -> list[tuple[float, float, Event]]:
    """Events of the host one inside another, outermost first, with " > " between their names."""
    return [
        (begins + 1.0 * depth, length - 2.0 * depth, host_event(trace, name, shape, "float"))
        for depth, name in enumerate(names.split(" > "))
    ]


def host_work(place: str, calls: dict[str, float], each: tuple[float, float] = (1e9, 1e9)) -> Plant:
    """Nested calls hold the host for their shares of the time, again and again for so many
    microseconds, or once."""

    def plant(trace: Trace, draw: Draw, loss: float) -> str:
        count = max(round(loss / draw.uniform(*each)), 1)
        for points in visits(trace, place):
            for _ in range(count):
                host, begins = [], 0.5
                for names, share in calls.items():
                    length = share * loss / count
                    host += nested(trace, names, begins, length - 1.0)
                    begins += length
                trace.insert(Insertion(draw.choice(points), loss / count, host))
        return f"{', '.join(calls)}: {count} times per step, {loss / 1e3:.1f} ms in all"

    return plant


def add_wide(
    trace: Trace, at: float, names: str, kernel: str, length: float, rate: float, blocks: int = 0
) -> None:
    """A kernel over as many numbers as pass in so many microseconds at so many GB/s."""
    number, size = trace.new_id(), floats(length, rate)
    host = nested(trace, names, 0.0, 22.0, [size])
    host[-1] = (*host[-1][:2], numbered(host[-1][2], number))
    host.append((9.0, 6.0, trace.runtime_call("cudaLaunchKernel", number)))
    work = trace.gpu_work("kernel", kernel, number)
    blocks = blocks or -(-size // 512)
    full = blocks >= 1024
    shape = {
        "grid": [blocks, 1, 1],
        "block": [128, 1, 1],
        "blocks per SM": round(blocks / 100, 2),
        "warps per SM": round(blocks / 25, 2),
        "est. achieved occupancy %": 100 if full else round(min(blocks / 16, 100)),
    }
    work["args"] |= {name: value for name, value in shape.items() if name in work["args"]}
    trace.insert(Insertion(at, 24.0, host, [(9.0, length, work)]))


def gpu_work(
    place: str,
    operations: dict[str, tuple[str, float]],
    counts: tuple[int, ...] = (1, 4),
    rate: tuple[float, float] = (400.0, 650.0),
    blocks: int = 0,
    reads_back: bool = False,
) -> Plant:
    """Kernels of nested operators take their shares of the time, in that order, again and again;
    the host may then read back a value."""
    kernel = max(operations.values(), key=lambda each: each[1])[0]

    def plant(trace: Trace, draw: Draw, loss: float) -> str:
        count, speed = draw.choice(counts), draw.uniform(*rate)
        for points in visits(trace, place):
            for _ in range(count):
                at = draw.choice(points)
                for names, (own, share) in operations.items():
                    add_wide(trace, at, names, own, share * loss / count, speed, blocks)
                if reads_back:
                    add_readback(trace, at, names)
        return f"{', '.join(operations)} {count} times per step: {kernel}"

    return plant


def add_readback(trace: Trace, at: float, names: str) -> None:
    """A value is copied to the host, which waits for it in nested operators."""
    number = trace.new_id()
    value = trace.gpu_work("memcpy", "Memcpy DtoH (Device -> Pageable)", number)
    value["args"] |= {"bytes": 4, "memory bandwidth (GB/s)": 0.003}
    host = nested(trace, f"{names} > aten::item > aten::_local_scalar_dense", 0.0, OPEN_ENDED)
    host.append((6.0, 9.0, trace.runtime_call("cudaMemcpyAsync", number)))
    host.append((16.0, OPEN_ENDED, trace.runtime_call("cudaStreamSynchronize")))
    trace.insert(Insertion(at, 32.0, host, [(6.0, 1.5, value)], drains=True))


def together(*plants: Plant) -> Plant:
    """Each plant takes an equal part of the time; the last tells what it did."""

    def plant(trace: Trace, draw: Draw, loss: float) -> str:
        return [each(trace, draw, loss / len(plants)) for each in plants][-1]

    return plant


def add_collective(trace: Trace, at: float, kind: str, names: str, length: float) -> None:
    """A collective of all ranks, for which the host waits."""
    number = trace.new_id()
    work = trace.collective(number)
    recorded = r"_(AllReduce|SendRecv|ReduceScatter|AllGather)(\w*)_Sum_\w+?\("
    work["name"] = re.sub(recorded, rf"_{kind}\2_Sum_float(", work["name"])
    host = nested(trace, f"{names} > record_param_comms", 0.0, 36.0)
    host.append((14.0, 8.0, trace.runtime_call("cudaLaunchKernel", number)))
    host.append((38.0, OPEN_ENDED, trace.runtime_call("cudaStreamSynchronize")))
    trace.insert(Insertion(at, 52.0, host, [(14.0, length, work)], drains=True))


OF_WORK = r"launch_bound|gpu_idle|pageable"


sealed = partial(Fault, held_out=True, advice_counts=False, small=SMALL, listed=True)


def answer(
    plant: Plant, recordings: str, pattern: str, unless: str = "", heads: str = "."
) -> Fault:
    """A kind whose recordings have blanks between, and that one pattern of the text names."""
    return sealed(plant, tuple(recordings.split()), ((heads, pattern),), unless=unless)


def edited(trace: Trace, edit: Callable[[Event], Event]) -> Trace:
    """The trace with each event edited."""
    return Trace(trace.document | {"traceEvents": [edit(event) for event in trace.events]})
