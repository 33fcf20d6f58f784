"""Set F of faults: sealed. **Do not read it, nor run rules on it, before rules stand as they are.**

The kinds are of the forward, the backward, the host and the ranks of recommendation models in
training; sets A to E have none of them. Kinds and answers were decided by an author who had read
neither the rules nor the sets D and E, and nothing but the edits themselves was tested before the
one run that is in ``benchmarks/results/gpu_faults_set_f.json``. An answer is what a reader must
learn in order to mend the fault: mostly the operator, call, kernel or range that was planted.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from database_edits import DatabaseCopy
from gpu_kinds import (
    OPEN_ENDED,
    Draw,
    Fault,
    Plant,
    add_copy,
    add_kernel,
    each_step,
    kernels,
    numbered,
)
from gpu_set_d import before_optimizer, operator
from trace_edits import Event, Insertion, Trace

SMALL = (0.055, 0.11)
"""What a small plant adds, over the step's own: 5 to 10 % of the longer step."""

NORM = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps"
    "<float, float, float>, unsigned int, float, 4> >(at::native::ReduceOp<float, "
    "at::native::NormTwoOps<float, float, float>, unsigned int, float, 4>)"
)
CONCATENATION = (
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 1, 64, 64>"
    "(float*, at::native::(anonymous namespace)::CatArrInputTensorMetadata<float, unsigned int, "
    "64, 64>, at::native::(anonymous namespace)::TensorSizeStride<unsigned int, 4u>, int, "
    "unsigned int)"
)
FILL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<long>, "
    "at::detail::Array<char*, 1> >(int, at::native::FillFunctor<long>, "
    "at::detail::Array<char*, 1>)"
)
SCATTER = (
    "void at::native::_scatter_gather_elementwise_kernel<128, 8, "
    "at::native::_cuda_scatter_fill_internal_kernel<false, long>::operator()<at::native::"
    "TensorAssign>(at::TensorIterator&, long, long, long, at::native::TensorAssign const&)::"
    "{lambda(int)#1}>(int, at::native::_cuda_scatter_fill_internal_kernel<false, long>)"
)
TO_FLOAT = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda("
    "at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda()#7}::operator()() "
    "const::{lambda(float)#1}, at::detail::Array<char*, 2>, TrivialOffsetCalculator<1, unsigned "
    "int>, TrivialOffsetCalculator<1, unsigned int>, at::native::memory::LoadWithCast<1>, "
    "at::native::memory::StoreWithCast<1> >(int)"
)
SORT = (
    "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, long, int>::"
    "Policy800, false, long, long, int, int>(int*, int*, int*, long*, long const*, long*, "
    "long const*, int, int, int)"
)
ORDERED_SUM = (
    "void at::native::(anonymous namespace)::indexing_backward_kernel<float, 4>(long const*, "
    "long const*, float const*, float*, long, long, long, long, bool)"
)
NOT_EQUAL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::"
    "CompareEqFunctor<float>, at::detail::Array<char*, 3> >(int, at::native::"
    "(anonymous namespace)::CompareEqFunctor<float>, at::detail::Array<char*, 3>)"
)
ANY = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<bool, "
    "at::native::func_wrapper_t<bool, at::native::or_kernel_cuda(at::TensorIterator&)::"
    "{lambda(bool, bool)#1}>, unsigned int, bool, 4> >(at::native::ReduceOp<bool>)"
)

# ---- building blocks --------------------------------------------------------------------


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


def annotation(trace: Trace, name: str) -> Event:
    """A range that a program marks, as the recording has its iterations marked."""
    return trace.operator(name) | {"cat": trace.events[trace.marks[0]]["cat"]}


def callers(trace: Trace, rows: list[int]) -> list[str]:
    """The innermost operators that launched some operations of the GPU."""
    own = sorted(
        (float(trace.start[row]), row)
        for row in trace.operators
        if (trace.events[row]["pid"], trace.events[row]["tid"]) == trace.thread
    )
    found = []
    for row in rows:
        launch = trace.launch(row)
        last = bisect.bisect_right(own, (launch, 1 << 60))
        inside = (
            trace.events[each]["name"]
            for start, each in reversed(own[max(last - 60, 0) : last])
            if start + trace.length[each] > launch
        )
        found.append(next(inside, "aten::to"))
    return found


def run_again(
    trace: Trace, names: dict[int, str], at: float, loss: float, around: list[Event]
) -> int:
    """Launch kernels (rows and their operators) again at another time, as many and as often as
    take so many microseconds, inside nested events; returns how many."""
    rows = list(names)
    pace = min(max((trace.launch(rows[-1]) - trace.launch(rows[0])) / len(rows), 10.0), 40.0)
    launch = trace.runtime_call("cudaLaunchKernel")
    host: list[tuple[float, float, Event]] = []
    device: list[tuple[float, float, Event]] = []
    begins, work = 3.0, 0.0
    while max(begins, work) < loss:
        row, own = rows[len(device) % len(rows)], trace.new_id()
        host.append((begins, pace - 1.0, numbered(trace.operator(names[row]), own)))
        host.append((begins + 2.0, 5.0, numbered(launch, own)))
        device.append((begins + 2.0, float(trace.length[row]), numbered(trace.events[row], own)))
        begins += pace
        work += float(trace.length[row])
    length = begins + 3.0
    outer = [(0.5 * depth, length - depth, event) for depth, event in enumerate(around)]
    trace.insert(Insertion(at, length, [*outer, *host], device))
    return len(device)


def forwards(trace: Trace) -> list[dict[int, str]]:
    """Rows of the kernels that each iteration's forward launched, with their operators."""
    rows = []
    for row in kernels(trace, r"^(?!nccl)"):
        call = trace.call.get(trace.events[row]["args"].get("correlation"))
        if call is not None and "LaunchKernel" in trace.events[call]["name"]:
            event = trace.events[call]
            if (event["pid"], event["tid"]) == trace.thread:
                rows.append(row)
    rows.sort(key=trace.launch)
    found = []
    for step in range(len(trace.steps)):
        points = trace.model_points(step)
        own = [row for row in rows if points[0] <= trace.launch(row) <= points[-1]]
        found.append(dict(zip(own, callers(trace, own), strict=True)))
    return found


def add_sized(
    trace: Trace, at: float, names: list[str], kernel: str, length: float, shapes: list[list[int]]
) -> None:
    """A kernel of so many microseconds in nested operators that recorded these inputs."""
    number = trace.new_id()
    host: list[tuple[float, float, Event]] = []
    for depth, name in enumerate(names):
        event = operator(trace, name, shapes[0])
        if "Input Dims" in event["args"]:
            event["args"] |= {"Input Dims": shapes, "Input type": ["float"] * len(shapes)}
        host.append((1.0 * depth, 20.0 - 2.0 * depth, event))
    host.append((8.0, 6.0, trace.runtime_call("cudaLaunchKernel", number)))
    work = trace.gpu_work("kernel", kernel, number)
    trace.insert(Insertion(at, 24.0, host, [(8.0, length, work)]))


def floats(length: float, rate: float) -> int:
    """Numbers of 4 bytes that pass in so many microseconds at so many GB/s."""
    return max(int(length * rate * 1e3 / 4.0), 1)


def batch_start(trace: Trace, step: int) -> float:
    """When the batch of an iteration is made ready; its first operator where nothing says."""
    return (trace.within("copy_batch|load_batch", step) or trace.points(step))[0]


# ---- the forward and the backward -------------------------------------------------------


def recomputed_forward(trace: Trace, draw: Draw, loss: float) -> str:
    """Activations are checkpointed: the backward runs the forward's segments again."""
    segments, count = draw.choice([1, 3]), 0
    for step, names in enumerate(forwards(trace)):
        with backward(trace):
            points = trace.points(step)
            for at in sorted(draw.sample(points[: len(points) // 2], segments)):
                around = [trace.operator("CheckpointFunctionBackward")]
                if any("evaluate_function" in trace.events[row]["name"] for row in trace.operators):
                    name = "autograd::engine::evaluate_function: CheckpointFunctionBackward"
                    around.insert(0, trace.operator(name))
                count += run_again(trace, names, at, loss / segments, around)
    return f"{count / len(trace.steps):.0f} kernels of the forward run again in the backward"


def evaluation(trace: Trace, draw: Draw, loss: float) -> str:
    """The model is evaluated on other samples after each update."""
    count = 0
    for step, names in enumerate(forwards(trace)):
        at = trace.points(step)[-1]
        around = [annotation(trace, "## evaluate ##")]
        count += run_again(trace, names, at, loss, around)
    return f"{count / len(trace.steps):.0f} kernels per step evaluate the model"


ACCUMULATES = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"


def backward_hooks(trace: Trace, draw: Draw, loss: float) -> str:
    """Hooks in Python run for each gradient, before it is accumulated."""
    rows = [row for row in trace.operators if trace.events[row]["name"] == ACCUMULATES]
    inner = {
        float(trace.start[row])
        for row in trace.operators
        if trace.events[row]["name"] == ACCUMULATES.split(": ")[1]
    }
    count = 0
    for first, last in trace.steps:
        own = [
            float(trace.start[row])
            for row in rows
            if first < trace.start[row] < last and float(trace.start[row]) not in inner
        ]
        for start in own:
            trace.insert(Insertion(start + 0.4, loss / len(own)))
        count += len(own)
    return f"{count / len(trace.steps):.0f} hooks per step take {loss / 1e3:.1f} ms"


def nan_checks(trace: Trace, draw: Draw, loss: float) -> str:
    """Anomaly detection: each gradient is searched for NaN, and the host waits for the answer."""
    count = min(max(int(loss / 75.0), 4), 2500)
    with backward(trace):
        for step in range(len(trace.steps)):
            points = trace.points(step)
            for _ in range(count):
                checked, found, copied = trace.new_id(), trace.new_id(), trace.new_id()
                value = trace.gpu_work("memcpy", "Memcpy DtoH (Device -> Pageable)", copied)
                value["args"] |= {"bytes": 1, "memory bandwidth (GB/s)": 0.001}
                host = [
                    (0.0, 14.0, operator(trace, "aten::isnan", [1024, 64])),
                    (1.5, 11.0, operator(trace, "aten::ne", [1024, 64])),
                    (5.0, 5.0, trace.runtime_call("cudaLaunchKernel", checked)),
                    (15.0, 13.0, operator(trace, "aten::any", [1024, 64])),
                    (20.0, 5.0, trace.runtime_call("cudaLaunchKernel", found)),
                    (29.0, OPEN_ENDED, trace.operator("aten::item")),
                    (30.0, OPEN_ENDED, trace.operator("aten::_local_scalar_dense")),
                    (32.0, 8.0, trace.runtime_call("cudaMemcpyAsync", copied)),
                    (41.0, OPEN_ENDED, trace.runtime_call("cudaStreamSynchronize")),
                ]
                device = [
                    (5.0, 2.5, trace.gpu_work("kernel", NOT_EQUAL, checked)),
                    (20.0, 3.5, trace.gpu_work("kernel", ANY, found)),
                    (32.0, 1.5, value),
                ]
                trace.insert(Insertion(draw.choice(points), 56.0, host, device, drains=True))
    return f"{count} checks for NaN per step in the backward"


def gradient_norms(trace: Trace, draw: Draw, loss: float) -> str:
    """The norms of all gradients are computed before each update."""
    count, rate = draw.choice([1, 8, 26]), draw.uniform(400.0, 650.0)
    for step in range(len(trace.steps)):
        at = before_optimizer(trace, step)
        for _ in range(count):
            numbers = floats(loss / count, rate)
            add_sized(trace, at, ["aten::linalg_vector_norm"], NORM, loss / count, [[numbers]])
    return f"{count} norms per step: {NORM}"


def one_hot_lookup(trace: Trace, draw: Draw, loss: float) -> str:
    """Categories become one-hot vectors, which are multiplied with the tables."""
    tables, rows, width = draw.choice([2, 8]), 2048, 64
    times: dict[str, float] = {}
    for row in kernels(trace, r"gemm"):
        name = trace.events[row]["name"]
        times[name] = times.get(name, 0.0) + float(trace.length[row])
    product = max(times, key=lambda name: times[name])
    each = loss / tables
    size = max(int(0.7 * each * 8e6 / (2 * rows * width)), 2)  # 8 TFLOP/s
    for points in each_step(trace, r"sparse_arch|EmbeddingBagCollection|ebc"):
        at = draw.choice(points)
        for _ in range(tables):
            hot, table = [rows, size], [size, width]
            add_sized(trace, at, ["aten::one_hot", "aten::zeros"], FILL, 0.12 * each, [hot])
            add_sized(trace, at, ["aten::one_hot", "aten::scatter_"], SCATTER, 0.03 * each, [hot])
            add_sized(trace, at, ["aten::to", "aten::copy_"], TO_FLOAT, 0.15 * each, [hot])
            add_sized(trace, at, ["aten::matmul", "aten::mm"], product, 0.7 * each, [hot, table])
    return f"{tables} one-hot products per step with tables of {size} rows: {product}"


def deterministic_gradient(trace: Trace, draw: Draw, loss: float) -> str:
    """The gradient of an indexed tensor is summed in order: sorted, then row by row."""
    count = draw.choice([1, 4])
    names = ["IndexBackward0", "aten::_index_put_impl_"]
    with backward(trace):
        for step in range(len(trace.steps)):
            at = draw.choice(trace.points(step)[:-1])
            for _ in range(count):
                add_kernel(trace, at, names, SORT, 0.15 * loss / count)
                add_kernel(trace, at, names, ORDERED_SUM, 0.85 * loss / count)
    return f"{count} gradients of indexed tensors summed in order per step: {ORDERED_SUM}"


def growing_history(trace: Trace, draw: Draw, loss: float) -> str:
    """Predictions are appended to a tensor on the GPU that grows from step to step."""
    steps, rate = len(trace.steps), draw.uniform(400.0, 650.0)
    for step in range(steps):
        length = 2.0 * loss * (step + 1) / (steps + 1)
        at, shapes = trace.points(step)[-1], [[floats(length, rate / 2.0)], [2048]]
        add_sized(trace, at, ["aten::cat"], CONCATENATION, length, shapes)
    return f"predictions of all steps are copied in each: {CONCATENATION}"


# ---- the host ---------------------------------------------------------------------------


def random_on_host(trace: Trace, draw: Draw, loss: float) -> str:
    """Random numbers are drawn on the host in each step, and sent to the GPU."""
    tensors, sent = draw.choice([1, 4]), draw.uniform(0.05, 0.12)
    for step in range(len(trace.steps)):
        at, each = batch_start(trace, step), loss / tensors
        length = (1.0 - sent) * each
        shape = [floats(sent * each, 5.0)]
        for _ in range(tensors):
            host = [
                (0.0, length - 1.0, operator(trace, "aten::randn", shape)),
                (1.0, length - 3.0, operator(trace, "aten::normal_", shape)),
            ]
            trace.insert(Insertion(at, length, host))
            add_copy(trace, at, "HtoD (Pageable -> Device)", sent * each, 5.0, waits=True)
    return f"the host draws random numbers for {(1.0 - sent) * loss / 1e3:.1f} ms per step"


def memory_queries(trace: Trace, draw: Draw, loss: float) -> str:
    """The program asks the driver for the free memory at every operator."""
    each = min(draw.uniform(80.0, 400.0), loss / 3.0)
    count = max(int(loss / each), 3)
    for points in each_step(trace):
        for _ in range(count):
            host = [(1.0, each - 2.0, trace.runtime_call("cudaMemGetInfo"))]
            trace.insert(Insertion(draw.choice(points), each, host))
    return f"{count} calls of cudaMemGetInfo per step, {loss / 1e3:.1f} ms in all"


def streams_anew(trace: Trace, draw: Draw, loss: float) -> str:
    """Streams are made and given back for each piece of work."""
    each = min(draw.uniform(100.0, 300.0), loss / 3.0)
    count = max(int(loss / each), 3)
    for points in each_step(trace):
        for _ in range(count):
            host = [
                (1.0, 0.6 * each, trace.runtime_call("cudaStreamCreateWithPriority")),
                (0.7 * each, 0.28 * each, trace.runtime_call("cudaStreamDestroy")),
            ]
            trace.insert(Insertion(draw.choice(points), each, host))
    return f"{count} streams made and destroyed per step, {loss / 1e3:.1f} ms in all"


def mapped_anew(trace: Trace, draw: Draw, loss: float) -> str:
    """Segments of memory are mapped and unmapped in each step, as they expand and shrink."""
    each = min(draw.uniform(300.0, 1200.0), loss / 2.0)
    count = max(int(loss / each), 2)
    names = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease")
    shares = (0.15, 0.05, 0.45, 0.25, 0.08)
    modern = str(trace.events[trace.runtime[0]]["cat"]) == "cuda_runtime"
    for points in each_step(trace):
        for _ in range(count):
            host: list[tuple[float, float, Event]] = []
            host.append((0.0, 0.65 * each + 2.0, operator(trace, "aten::empty")))
            begins = 1.0
            for name, share in zip(names, shares, strict=True):
                call = trace.runtime_call(name)
                call |= {"cat": "cuda_driver"} if modern else {}
                host.append((begins, share * each - 0.5, call))
                begins += share * each
            trace.insert(Insertion(draw.choice(points), each + 2.0, host))
    return f"{count} segments mapped and unmapped per step, {loss / 1e3:.1f} ms in all"


def profiler_overhead(trace: Trace, draw: Draw, loss: float) -> str:
    """The profiler itself holds launches up while it gets buffers for its records."""
    each = min(draw.uniform(500.0, 2500.0), loss / 2.0)
    count = max(int(loss / each), 2)
    for step in range(len(trace.steps)):
        calls = [
            call
            for row in trace.launched_in(step)
            if (call := trace.call[trace.events[row]["args"]["correlation"]])
            and "LaunchKernel" in trace.events[call]["name"]
        ]
        chosen = draw.sample(calls, min(count, len(calls)))
        for row in sorted(chosen, key=lambda row: trace.start[row]):
            at = float(trace.start[row] + 0.4 * max(trace.length[row], 1.0))
            name = draw.choice(["Activity Buffer Request", "Buffer Flush"])
            event = {"ph": "X", "cat": "overhead", "name": name, "pid": -1, "tid": 0}
            length = loss / len(chosen)
            trace.insert(Insertion(at, length, [(0.0, length, event | {"dur": 0.0})]))
    return f"{count} stops of {each / 1e3:.1f} ms per step by the profiler's buffers"


def host_functions(trace: Trace, draw: Draw, loss: float) -> str:
    """A stream waits for functions of the host that were put into it, with launches behind."""
    each = min(draw.uniform(300.0, 2500.0), loss / 2.0)
    count = max(int(loss / each), 2)
    for points in each_step(trace):
        for at in sorted(draw.choices(points, k=count)):
            number = trace.new_id()
            work = trace.gpu_work("kernel", "", number)
            # no profiler of these recordings has a record of the wait: this one holds the stream
            held = {"ph": "M", "name": "thread_sort_index", "pid": work["pid"], "tid": work["tid"]}
            held["args"] = {"sort_index": work["args"]["stream"]}
            host = [(1.0, 6.0, trace.runtime_call("cudaLaunchHostFunc", number))]
            trace.insert(Insertion(at, 8.0, host, [(1.0, loss / count, held)]))
    return f"{count} host functions of {loss / count / 1e3:.1f} ms in the stream per step"


# ---- copies and ranks -------------------------------------------------------------------


def peer_copies(trace: Trace, draw: Draw, loss: float) -> str:
    """The model is sent to another GPU before each forward."""
    count, rate = draw.choice([4, 20]), draw.uniform(8.0, 20.0)
    for points in each_step(trace):
        for _ in range(count):
            add_copy(trace, points[0], "PtoP (Device -> Device)", loss / count, rate)
    return f"{count} copies to another GPU per step at {rate:.1f} GB/s"


def offloaded_activations(trace: Trace, draw: Draw, loss: float) -> str:
    """Activations go to pinned memory in the forward, and come back in the backward."""
    count, rate = draw.choice([4, 12]), draw.uniform(12.0, 24.0)
    for step in range(len(trace.steps)):
        for _ in range(count):
            at = draw.choice(trace.model_points(step))
            add_copy(trace, at, "DtoH (Device -> Pinned)", loss / count / 2.0, rate)
        with backward(trace):
            for _ in range(count):
                at = draw.choice(trace.points(step)[:-1])
                add_copy(trace, at, "HtoD (Pinned -> Device)", loss / count / 2.0, rate)
    return f"{count} activations per step to the host and back at {rate:.1f} GB/s"


def broadcast_parameters(trace: Trace, draw: Draw, loss: float) -> str:
    """One rank sends all parameters to the others before each forward, which waits for them."""
    count = draw.choice([1, 5])
    for points in each_step(trace):
        for _ in range(count):
            number = trace.new_id()
            work = trace.collective(number)
            work["name"] = re.sub(
                r"_(AllReduce|SendRecv|ReduceScatter|AllGather)(\w*)_Sum_\w+?\(",
                r"_Broadcast\2_Sum_int8_t(",
                work["name"],
            )
            host = [
                (0.0, 34.0, annotation(trace, "nccl:broadcast")),
                (1.0, 32.0, trace.operator("c10d::broadcast_")),
                (5.0, 26.0, trace.operator("record_param_comms")),
                (14.0, 8.0, trace.runtime_call("cudaLaunchKernel", number)),
                (36.0, OPEN_ENDED, trace.runtime_call("cudaStreamSynchronize")),
            ]
            device = [(14.0, loss / count, work)]
            trace.insert(Insertion(points[0], 50.0, host, device, drains=True))
    return f"{count} broadcasts per step, {loss / 1e3:.1f} ms in all"


def gloo_reduction(trace: Trace, draw: Draw, loss: float) -> str:
    """Gradients are reduced over the ranks' hosts: copied there, summed by gloo, copied back."""
    copied, count = draw.uniform(0.05, 0.12), draw.choice([1, 4])
    for step in range(len(trace.steps)):
        at, each = before_optimizer(trace, step), loss / count
        for _ in range(count):
            add_copy(trace, at, "DtoH (Device -> Pageable)", copied * each, 6.0, waits=True)
            length = (1.0 - 2.0 * copied) * each
            reduces = annotation(trace, "gloo:all_reduce")
            thread = trace.thread[1]
            reduces["tid"] = type(thread)(int(thread) + 301)
            host = [
                (0.0, 20.0, trace.operator("c10d::allreduce_")),
                (15.0, length - 17.0, reduces),
            ]
            trace.insert(Insertion(at, length, host))
            add_copy(trace, at, "HtoD (Pageable -> Device)", copied * each, 6.0, waits=True)
    return f"{count} reductions by gloo per step take {(1 - 2 * copied) * loss / 1e3:.1f} ms"


def throttled_rank(trace: Trace, launched: float, loss: float) -> None:
    """The GPU of one rank is slow: its kernels before a collective take many times as long."""
    before = [at for row in kernels(trace, "nccl") if (at := trace.launch(row)) < launched]
    since = max(before, default=-1e11)
    works = kernels(trace, r"^(?!nccl)")
    rows = [row for row in works if since < trace.launch(row) < launched]
    rows = rows or [max((row for row in works if trace.launch(row) < launched), key=trace.launch)]
    own = sum(float(trace.length[row]) for row in rows)
    for row in rows:
        trace.length[row] *= 1.0 + loss / own


def slow_copies_of_rank(trace: Trace, launched: float, loss: float) -> None:
    """One rank copies from pageable memory before a collective, for which it is late."""
    at = [at for at in trace.points(0) if at < launched][-1]
    add_copy(trace, at, "HtoD (Pageable -> Device)", loss, 3.0, waits=True)


# ---- databases of HPCToolkit ------------------------------------------------------------


def slower(function: str) -> Plant:
    """One function takes longer: its instructions and calls, or the kernels that it launched."""

    def plant(database: DatabaseCopy, draw: Draw, loss: float) -> str:
        return f"{function} takes {database.stretch_function(function, loss):.0f} times as long"

    return plant


# ---- kinds and answers ------------------------------------------------------------------

ANY_FINDING = "."
OF_HOST = r"launch_bound|cop(y|ies)\b|communicat"
OF_WORK = r"launch_bound|gpu_idle|pageable"
sealed = partial(Fault, held_out=True, advice_counts=False, small=SMALL, listed=True)

FAULTS = {
    "recomputed_forward": sealed(
        recomputed_forward,
        ("rank5*8", "meta", "rank0", "resnet"),
        ((ANY_FINDING, r"CheckpointFunction|[Rr]ecomput|[Cc]heckpoint"),),
    ),
    "evaluation": sealed(
        evaluation,
        ("rank5*8", "meta", "rank0*12"),
        ((ANY_FINDING, r"\b[Ee]valuate\b|[Ee]valuation|[Vv]alidation"),),
    ),
    "backward_hooks": sealed(
        backward_hooks,
        ("rank0", "meta", "rank5*8", "graphs"),
        ((ANY_FINDING, r"AccumulateGrad|\bhook"),),
        unless=OF_HOST,
    ),
    "nan_checks": sealed(
        nan_checks,
        ("rank5*8", "meta", "rank0"),
        (
            (r"synchron|readback|read back|\.item", ""),
            (ANY_FINDING, r"isnan|\bNaN|anomaly"),
        ),
    ),
    "gradient_norms": sealed(
        gradient_norms,
        ("meta", "rank5*8"),
        ((ANY_FINDING, r"{kernel}|vector_norm|NormTwoOps|gradient norm"),),
        unless=OF_WORK,
    ),
    "one_hot_lookup": sealed(
        one_hot_lookup,
        ("rank5*8", "meta", "rank0", "graphs"),
        ((ANY_FINDING, r"{kernel}|one_hot|one-hot|aten::mm\b"),),
        unless=OF_WORK,
    ),
    "deterministic_gradient": sealed(
        deterministic_gradient,
        ("rank0", "meta", "rank5*8"),
        ((ANY_FINDING, r"{kernel}|index_put|IndexBackward|determinis"),),
        unless=OF_WORK,
    ),
    "growing_history": sealed(
        growing_history,
        ("rank5*8", "meta", "bert*8"),
        (
            (r"irregular|grow|trend|iterations (take|are)", ""),
            (ANY_FINDING, r"{kernel}|CatArray|aten::cat\b"),
        ),
        unless=OF_WORK,
    ),
    "random_on_host": sealed(
        random_on_host,
        ("bert", "meta", "rank5*8", "rank0", "bert*8"),
        ((ANY_FINDING, r"randn|\bnormal_|[Rr]andom number"),),
        unless=OF_HOST,
    ),
    "memory_queries": sealed(
        memory_queries,
        ("rank0", "resnet", "bert", "rank5*8", "bert*8"),
        ((ANY_FINDING, r"MemGetInfo|(free|available) memory"),),
        unless=OF_HOST,
    ),
    "streams_anew": sealed(
        streams_anew,
        ("bert", "resnet", "rank5*8", "rank0"),
        ((ANY_FINDING, r"StreamCreate|StreamDestroy|(creat|mak|destroy)\w+ (of )?streams"),),
        unless=OF_HOST,
    ),
    "mapped_anew": sealed(
        mapped_anew,
        ("rank5*8", "graphs", "bert", "rank0", "bert*8"),
        (
            (r"alloc", ""),
            (ANY_FINDING, r"cuMem(Create|Map|SetAccess|Unmap|Release)|expandable|alloc\w+ memory"),
        ),
        unless=OF_HOST,
    ),
    "profiler_overhead": sealed(
        profiler_overhead,
        ("rank0", "meta", "rank5*8", "bert", "bert*8"),
        ((ANY_FINDING, r"[Pp]rofiler('s)? (over|buffer|itself|flush)|Buffer (Request|Flush)"),),
    ),
    "host_functions": sealed(
        host_functions,
        ("rank0", "graphs", "rank5*8", "meta"),
        (
            (ANY_FINDING, r"HostFunc|host function|callback"),
            ("idle", r"queued|already launched|had been launched|waits? in (its|the|a) stream"),
        ),
        unless=OF_HOST,
    ),
    "peer_copies": sealed(
        peer_copies,
        ("rank0", "resnet", "meta", "rank5*8"),
        ((r"cop(y|ies)|communicat|peer", r"PtoP|P2P|\bpeer|(another|other|between) GPU"),),
    ),
    "offloaded_activations": sealed(
        offloaded_activations,
        ("rank0", "meta", "rank5*8"),
        ((r"cop(y|ies)\b", ""),),
        unless="pageable",
    ),
    "broadcast_parameters": sealed(
        broadcast_parameters,
        ("rank0", "meta", "rank5*8", "rank0*12"),
        ((ANY_FINDING, r"Broadcast\b|Broadcast_|broadcast_?\b|broadcasts"),),
        unless="launch_bound",
    ),
    "gloo_reduction": sealed(
        gloo_reduction,
        ("rank5*8", "resnet", "rank0", "rank0*12"),
        ((ANY_FINDING, r"\b[Gg]loo\b"),),
    ),
    "throttled_rank": sealed(
        lambda *_: "",
        ("archive",),
        ((r"rank|imbalance|uneven|straggl", "{rank}"),),
        delay=throttled_rank,
    ),
    "slow_copies_of_rank": sealed(
        lambda *_: "",
        ("archive",),
        ((r"rank|imbalance|uneven|straggl|cop(y|ies)\b", "{rank}"),),
        delay=slow_copies_of_rank,
    ),
    "slow_loss": sealed(
        slower("loss_fn_wrap"),
        ("h100-pc",),
        ((ANY_FINDING, r"loss_fn_wrap|mse_loss|MseLoss|[Tt]he loss\b|loss function|\bloss$"),),
        unless=OF_WORK,
    ),
    "slow_lookup": sealed(
        slower("apply_emb"),
        ("h100-pc", "h100-host"),
        ((ANY_FINDING, r"mbedding|apply_emb"),),
        unless=OF_WORK,
    ),
    "sorted_batches": sealed(
        slower("sort"),
        ("h100-host", "cpu-python"),
        (
            (r"\bdata\b|data_generation", ""),
            (ANY_FINDING, r"\bsort\b|array_sort|PyArray_Sort|\b[Ss]orting"),
        ),
        unless="small_batch|batch is too small",
    ),
    "cleared_gradients": sealed(
        slower("zero_grad"),
        ("h100-host",),
        ((ANY_FINDING, r"zero_grad|[Zz]ero\w* (of )?(the )?gradient|gradients? to zero"),),
    ),
    "slow_activation": sealed(
        slower("relu"),
        ("h100-host", "h100-pc", "cpu-python"),
        ((ANY_FINDING, r"\b[Rr]e[Ll][Uu]\b|[Aa]ctivation|clamp_min|\brelu_?\b"),),
        unless=OF_WORK,
    ),
}

# ---- edits that change nothing that matters ---------------------------------------------


def _edited(trace: Trace, edit: Callable[[Event], Event], more: list[Event]) -> Trace:
    """The trace with each event edited, and others added."""
    events = [edit(event) for event in trace.events]
    return Trace(trace.document | {"traceEvents": [*events, *more]})


def rebased(trace: Trace, draw: Draw) -> Trace:
    """Times count from a moment that the head of the file tells, as newer profilers write them."""
    base = trace.base - draw.randrange(1, 10**6)

    def edit(event: Event) -> Event:
        return event | ({"ts": round(event["ts"] - base, 3)} if "ts" in event else {})

    edited = _edited(trace, edit, [])
    edited.document |= {"baseTimeNanoseconds": base * 1000, "displayTimeUnit": "ms"}
    return edited


def memory_events(trace: Trace, draw: Draw) -> Trace:
    """What the allocator gives and takes is recorded too."""
    held, more = 10**9, []
    for step in range(len(trace.steps)):
        for at in trace.points(step)[::3]:
            size = draw.choice([-1, 1]) * 512 * draw.randrange(1, 4096)
            held += size
            args = {"Device Type": 1, "Device Id": 0, "Addr": draw.randrange(2**40), "Bytes": size}
            args |= {"Total Allocated": held, "Total Reserved": 2 * 10**9}
            event: Event = {"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]"}
            event |= {"pid": trace.thread[0], "tid": trace.thread[1], "args": args}
            more.append(event | {"ts": round(trace.base + float(at) + 0.1, 3)})
    return _edited(trace, dict, more)


def python_frames(trace: Trace, draw: Draw) -> Trace:
    """The Python functions that hold the loop are recorded, one inside another."""
    first, last = trace.steps[0][0], trace.steps[-1][1]
    spans = [("train.py(12): main", first - 3.0, last + 3.0)]
    spans += [("train.py(48): train_step", start + 0.1, end - 0.1) for start, end in trace.steps]
    more: list[Event] = []
    for name, start, end in spans:
        event: Event = {"ph": "X", "cat": "python_function", "name": name}
        event |= {"pid": trace.thread[0], "tid": trace.thread[1]}
        event |= {"ts": round(trace.base + start, 3), "dur": round(end - start, 3)}
        parent = 900001 if more else None
        more.append(event | {"args": {"Python id": 900001 + len(more), "Python parent id": parent}})
    return _edited(trace, dict, more)


def other_demangler(trace: Trace, draw: Draw) -> Trace:
    """Names of kernels are written as newer compilers' tools write them."""
    rows = {id(trace.events[row]) for row in trace.device}

    def edit(event: Event) -> Event:
        if id(event) not in rows:
            return event
        return event | {"name": str(event["name"]).replace("> >", ">>").replace("u>", ">")}

    return _edited(trace, edit, [])


CLEAN: dict[str, Callable[[Trace, Draw], Trace]] = {
    "rebased": rebased,
    "memory_events": memory_events,
    "python_frames": python_frames,
    "other_demangler": other_demangler,
}
