"""Set C of faults: sealed. **Do not read it, nor run rules on it, before rules stand as they are.**

Kinds and answers were decided by an author who had not read the rules, and nothing but the edits
themselves has been tested. It measures how rules name faults that nobody had in mind, and can do
so once: run it when rules have been mended by set B, and put what it shows on record as it is.
"""

from __future__ import annotations

from functools import partial

from database_edits import DatabaseCopy
from gpu_kinds import (
    DLRM,
    ELSEWHERE,
    IDLE,
    OPEN_ENDED,
    Draw,
    Fault,
    add_copy,
    add_kernel,
    each_step,
    kernels,
)
from trace_edits import Insertion, Trace

CAST = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda("
    "at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#7}::operator()() "
    "const::{lambda(float)#1}, at::detail::Array<char*, 2>, TrivialOffsetCalculator<1, unsigned "
    "int>, char*, at::native::memory::LoadWithCast<1>, at::detail::Array<char*, 2>::StoreWithCast>"
    "(int, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&))"
)
SORT = (
    "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, long, int>::"
    "Policy800, false, long, long, int, int>(int*, int*, int*, long*, long const*, long*, "
    "long const*, int, int, int)"
)
LOOKUPS = r"sparse_arch|EmbeddingBagCollection|ebc"


def polling(trace: Trace, draw: Draw, loss: float) -> str:
    """The host asks again and again whether an event has come, and nothing is launched."""
    each = draw.uniform(15.0, 40.0)
    count = max(int(loss / each), 5)
    for points in each_step(trace):
        at = draw.choice(points)
        host = [
            (number * each, 0.7 * each, trace.runtime_call("cudaEventQuery"))
            for number in range(count)
        ]
        trace.insert(Insertion(at, count * each, host))
    return f"{count} calls of cudaEventQuery per step, {count * each / 1e3:.1f} ms in all"


def lookups_on_host(trace: Trace, draw: Draw, loss: float) -> str:
    """Tables are in the host's memory: it looks rows up and sends what it has summed."""
    sent, tables = draw.uniform(0.1, 0.2), draw.choice([4, 8, 26])
    for points in each_step(trace, LOOKUPS):
        at, length = draw.choice(points), (1.0 - sent) * loss / tables
        for _ in range(tables):
            nested = ["aten::embedding_bag", "aten::_embedding_bag"]
            host = [
                (0.5 * depth, length - 1.0 - depth, trace.operator(name))
                for depth, name in enumerate(nested)
            ]
            trace.insert(Insertion(at, length, host))
        add_copy(trace, at, "HtoD (Pinned -> Device)", sent * loss, 20.0, waits=True)
    return f"the host looks up rows of {tables} tables in {(1 - sent) * loss / 1e3:.1f} ms per step"


def casts(trace: Trace, draw: Draw, loss: float) -> str:
    """Weights and activations are converted in each step, again and again."""
    count = draw.choice([8, 20, 40])
    for points in each_step(trace):
        for _ in range(count):
            names = ["aten::to", "aten::_to_copy", "aten::copy_"]
            add_kernel(trace, draw.choice(points), names, CAST, loss / count)
    return f"{count} conversions per step, {loss / 1e3:.1f} ms in all"


def sorted_indices(trace: Trace, draw: Draw, loss: float) -> str:
    """Indices are made unique on the GPU before each lookup, which sorts them."""
    count = draw.choice([2, 8])
    for points in each_step(trace, LOOKUPS):
        at = draw.choice(points)
        for _ in range(count):
            names = ["aten::unique", "aten::_unique2", "aten::sort"]
            for _ in range(4):  # one pass for each byte or two of an index
                add_kernel(trace, at, names, SORT, loss / count / 4)
            number = trace.new_id()
            value = trace.gpu_work("memcpy", "Memcpy DtoH (Device -> Pageable)", number)
            value["args"] |= {"bytes": 8, "memory bandwidth (GB/s)": 0.004}
            host = [
                (0.0, OPEN_ENDED, trace.operator("aten::_unique2")),
                (3.0, 9.0, trace.runtime_call("cudaMemcpyAsync", number)),
                (13.0, OPEN_ENDED, trace.runtime_call("cudaStreamSynchronize")),
            ]
            trace.insert(Insertion(at, 30.0, host, [(4.0, 1.5, value)], drains=True))
    return f"unique of indices {count} times per step, {loss / 1e3:.1f} ms of sorting"


def copies_in_line(trace: Trace, draw: Draw, loss: float) -> str:
    """Batches are copied from pinned memory, but on the stream of the kernels that need them."""
    count, rate = draw.choice([1, 4]), draw.uniform(10.0, 24.0)
    for step in range(len(trace.steps)):
        at = (trace.within("copy_batch|load_batch", step) or trace.points(step))[0]
        for _ in range(count):
            add_copy(trace, at, "HtoD (Pinned -> Device)", loss / count, rate)
    return f"{count} pinned copies per step in line with kernels, {loss / 1e3:.1f} ms in all"


def preempted(trace: Trace, draw: Draw, loss: float) -> str:
    """The host's thread is taken off its core at any moment, for milliseconds."""
    for step in range(len(trace.steps)):
        first, last = trace.steps[step]
        loading = [
            (trace.start[row], trace.start[row] + trace.length[row])
            for row, event in enumerate(trace.events)
            if str(event["name"]).startswith("enumerate(DataLoader)")
        ]
        moments = [
            at + draw.uniform(0.0, 2.0)
            for at in trace.points(step)
            if first < at < last - 5.0 and not any(a <= at <= b for a, b in loading)
        ]
        count = min(max(int(loss / draw.uniform(1000.0, 4000.0)), 3), len(moments))
        for at in draw.sample(moments, count):
            trace.insert(Insertion(at, loss / count))
    return f"the host loses its core for {loss / 1e3:.1f} ms per step, {count} times in the last"


def uneven_lookups(trace: Trace, launched: float, loss: float) -> None:
    """The lookups of one rank take longer than those of the others."""
    rows = [row for row in kernels(trace, "embedding|[Ii]ndex") if trace.launch(row) < launched]
    others = [row for row in kernels(trace, "^(?!nccl)") if trace.launch(row) < launched]
    trace.length[(rows or others)[-1]] += loss


def larger_copies(database: DatabaseCopy, draw: Draw, loss: float) -> str:
    """One of the batch's copies holds many times the bytes."""
    copies = [row for row, name in enumerate(database.database.names) if name == "<gpu copyin>"]
    row = max(copies, key=lambda row: database.seconds((row,)))
    return f"copies to the device of {database.stretch_copies(row, loss):.0f} times the bytes"


def slow_update(database: DatabaseCopy, draw: Draw, loss: float) -> str:
    """The optimiser's step takes long on the host."""
    return f"the optimiser takes {database.stretch_function('step', loss):.0f} times as long"


sealed = partial(Fault, held_out=True, advice_counts=False)

FAULTS = {
    "polling": sealed(
        polling,
        ("bert", *DLRM, "resnet"),
        ((r"idle|idles|synchron|host|wait|poll", r"EventQuery|poll"),),
        unless=r"launch_bound|cop(y|ies)\b|communicat",
    ),
    "lookups_on_host": sealed(
        lookups_on_host,
        DLRM,
        ((IDLE, r"mbedding"), (r"embedding", r"host|CPU|idle")),
        unless=ELSEWHERE,
    ),
    "casts": sealed(
        casts,
        (*DLRM, "resnet", "bert*8"),
        ((r"conver|cast|kernel|heavy_copy|memory|foreign", r"copy_kernel|_to_copy|cast|conver"),),
        unless=r"launch_bound|gpu_idle|pageable|copies_not",
    ),
    "sorted_indices": sealed(
        sorted_indices,
        DLRM,
        ((r"kernel|sort|unique|embedding|readbacks|foreign", r"[Ss]ort|[Uu]nique"),),
        unless=r"launch_bound|gpu_idle",
    ),
    "copies_in_line": sealed(
        copies_in_line,
        ("meta", "graphs", "resnet", "rank0", "rank5*8"),
        ((r"cop(y|ies)\b", ""),),
        unless="pageable",
    ),
    "preempted": sealed(
        preempted,
        ("bert*8", "meta", "resnet", "rank5*8"),
        ((r"other_process|preempt|scheduling|waiting_for_cores", ""), (IDLE, "")),
        unless=ELSEWHERE,
    ),
    "uneven_lookups": sealed(
        lambda *_: "",
        ("archive",),
        ((r"rank|imbalance|uneven", "{rank}"),),
        delay=uneven_lookups,
    ),
    "larger_copies": sealed(
        larger_copies,
        ("h100-pc",),
        ((r"cop(y|ies)\b", ""),),
    ),
    "slow_update": sealed(
        slow_update,
        ("h100-host", "cpu-python"),
        ((r"optimi[sz]er|update", ""), (r"python|outside|slow", r"optimi[sz]er|update")),
    ),
}
