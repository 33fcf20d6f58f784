"""Set D of faults: kinds from production training, and harmless edits of its own.

Kinds, answers and harmless edits were decided before any rule had seen one of them, by an author
who had not read the rules. Its first run is in ``benchmarks/results/gpu_faults_set_d.json``.

Here a small plant takes 5 to 10 % of the step and must be listed anywhere among the findings.
What an expert would have to be told decides which answers are right: a reader who is only told
"the GPU is idle" learns what is wrong if the host is slow as a whole, but not if it waits for a
lookup of the host's that the finding never mentions.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from database_edits import DatabaseCopy
from gpu_kinds import (
    IDLE,
    OPEN_ENDED,
    Draw,
    Fault,
    add_copy,
    each_step,
    kernels,
    numbered,
)
from trace_edits import WAITS, Event, Insertion, Trace, repeated

OPTIMIZER = r"^Optimizer\.step|## optimizer"
LOADING = "copy_batch|load_batch|## sdd_input_dist ##"
TENTH = (0.055, 0.11)
"""What a small plant adds, over the step's own: 5 to 10 % of the longer step."""

LONG = ("meta", "resnet", "graphs", "rank5*8", "bert*8")
"""Recordings of several iterations."""
ALL = ("bert", "rank0", *LONG)
DLRM = ("meta", "graphs", "rank0", "rank5*8")

LAYOUT = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::"
    "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#2}::operator()() const::"
    "{lambda()#7}::operator()() const::{lambda(float)#1}>(at::TensorIteratorBase&)>(int)"
)
POINTWISE = {
    "aten::clamp": "(anonymous namespace)::launch_clamp_scalar(at::TensorIteratorBase&)",
    "aten::log1p": "log1p_kernel_cuda(at::TensorIteratorBase&)",
    "aten::mul": "BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor>",
    "aten::where": "where_kernel_impl(at::TensorIterator&)",
    "aten::sub": "CUDAFunctorOnSelf_add<float>",
}
NONZERO = "void at::native::write_indices<int>(long*, at::native::TensorDims<int>, int, int)"
COUNT = (
    "void at_cuda_detail::cub::DeviceReduceSingleTileKernel<at_cuda_detail::cub::"
    "DeviceReducePolicy<int, int, int, cub::Sum>::Policy600, int*, int*, int, cub::Sum, int>()"
)
MULTI_TENSOR = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::TensorListMetadata<4>, at::native::(anonymous namespace)::"
    "PointwiseOpListFunctor<float, 4, 3, 0>, std::divides<float>, float>()"
)


# ---- building blocks --------------------------------------------------------------------


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


def stepping(trace: Trace, step: int, every: float) -> list[float]:
    """Times in an iteration, so far apart, at which no call waits for the GPU."""
    waits = [
        (float(trace.start[row]), float(trace.start[row] + trace.length[row]))
        for row in trace.runtime
        if WAITS.match(trace.events[row]["name"])
    ]
    first, last = trace.steps[step]
    count = max(int((last - first) / every), 1)
    times = [first + (last - first) * (place + 0.5) / count for place in range(count)]
    return [at for at in times if not any(start <= at <= end for start, end in waits)]


def launches(trace: Trace, step: int) -> list[int]:
    """Rows of the calls that launch kernels in an iteration, but those during another wait."""
    waits = [
        (float(trace.start[row]), float(trace.start[row] + trace.length[row]))
        for row in trace.runtime
        if WAITS.match(trace.events[row]["name"])
    ]
    calls = [
        trace.call[trace.events[row]["args"]["correlation"]] for row in trace.launched_in(step)
    ]
    return [
        row
        for row in dict.fromkeys(calls)
        if "LaunchKernel" in trace.events[row]["name"]
        and not any(start <= trace.start[row] <= end for start, end in waits)
    ]


def before_optimizer(trace: Trace, step: int) -> float:
    """When an iteration's update starts; near its end where that is not marked."""
    return (trace.within(OPTIMIZER, step) or trace.points(step)[-3:])[0]


def add_work(
    trace: Trace, at: float, names: list[str], kernel: str, length: float, rate: float
) -> None:
    """A pointwise kernel that reads and writes as many floats as it can at so many GB/s."""
    number, floats = trace.new_id(), int(length * rate * 1e3 / 8)
    shape = [max(floats // 128, 1), 128]
    host = [
        (1.0 * depth, 18.0 - 2.0 * depth, numbered(operator(trace, name, shape), number))
        for depth, name in enumerate(names)
    ]
    host.append((7.0, 5.0, trace.runtime_call("cudaLaunchKernel", number)))
    work = trace.gpu_work("kernel", kernel, number)
    trace.insert(Insertion(at, 20.0, host, [(7.0, length, work)]))


def stretched(trace: Trace, rows: list[int], loss: float) -> float:
    """Kernels take so much longer in each step, together; returns how many times as long."""
    own = sum(float(trace.length[row]) for row in rows)
    factor = 1.0 + loss * len(trace.steps) / own
    for row in rows:
        trace.length[row] *= factor
    return factor


# ---- the host ---------------------------------------------------------------------------


def slow_host(trace: Trace, draw: Draw, loss: float) -> str:
    """The processor's clock is low: all that the host does between waits takes longer."""
    for step in range(len(trace.steps)):
        times = stepping(trace, step, max(20.0, trace.step_us / 1500))
        for at in times:
            trace.insert(Insertion(at, loss / len(times)))
    return f"the host takes {loss / 1e3:.1f} ms per step more, evenly"


def cpu_quota(trace: Trace, draw: Draw, loss: float) -> str:
    """The container has used its share of the processor: all its threads stop until the next
    period."""
    whole = trace.steps[-1][1] - trace.steps[0][0]
    period = max(each for each in (100e3, 40e3, 20e3, 10e3, 5e3) if each < whole / 4 or each == 5e3)
    size = loss / trace.step_us
    runs, stops = period / (1.0 + size), period * size / (1.0 + size)
    points = [at for step in range(len(trace.steps)) for at in trace.points(step)]
    at, count = trace.steps[0][0] + draw.uniform(0.1, 0.9) * runs, 0
    while at < points[-1]:
        trace.insert(Insertion(next(point for point in points if point >= at), stops))
        at, count = at + runs, count + 1
    return f"{count} stops of {stops / 1e3:.1f} ms, one per {period / 1e3:.0f} ms"


def logger_thread(trace: Trace, draw: Draw, loss: float) -> str:
    """A thread that computes statistics for the log holds the interpreter's lock."""
    count = max(round(loss / 5000.0), 1)
    process, _ = trace.thread
    thread = 90_000_000 + draw.randrange(1000)
    for step in range(len(trace.steps)):
        points = trace.model_points(step)
        for at in sorted(draw.sample(points, min(count, len(points)))):
            length = loss / min(count, len(points))
            host = []
            for place, name in enumerate(("aten::histc", "aten::topk", "aten::quantile")):
                event = operator(trace, name) | {"pid": process, "tid": thread}
                host.append((length * (0.02 + 0.32 * place), 0.3 * length, event))
            trace.insert(Insertion(at, length, host))
    return (
        f"another thread holds the interpreter {count} times per step, {loss / 1e3:.1f} ms in all"
    )


def metrics_on_host(trace: Trace, draw: Draw, loss: float) -> str:
    """The AUC of each batch is computed on the host, from predictions copied there."""
    for step in range(len(trace.steps)):
        at = trace.points(step)[-1]
        add_copy(trace, at, "DtoH (Device -> Pageable)", 12.0, 5.0, waits=True)
        names = {"aten::sort": 0.55, "aten::cumsum": 0.2, "aten::div": 0.1, "aten::trapezoid": 0.13}
        host, begins = [], 1.0
        for name, share in names.items():
            host.append((begins, share * loss, operator(trace, name)))
            begins += (share + 0.004) * loss
        trace.insert(Insertion(at, loss + 3.0, host))
    return f"a metric of each step takes {loss / 1e3:.1f} ms on the host, mostly aten::sort"


def checkpoint(trace: Trace, draw: Draw, loss: float) -> str:
    """One step writes a checkpoint: tables go to the host, which then writes a file."""
    step = draw.randrange(1, len(trace.steps) - 1)
    at, whole = trace.points(step)[-1], loss * len(trace.steps)
    for _ in range(4):
        add_copy(trace, at, "DtoH (Device -> Pageable)", 0.1 * whole, 3.0, waits=True)
    frames = trace.python("torch/serialization.py(626): save")
    host = [(1.0, 0.6 * whole - 2.0, frame) for frame in frames]
    trace.insert(Insertion(at, 0.6 * whole, host))
    return f"step {step} of {len(trace.steps)} writes a checkpoint for {whole / 1e3:.0f} ms"


def recompiles(trace: Trace, draw: Draw, loss: float) -> str:
    """A batch of another shape makes torch.compile compile again, in two of the steps."""
    chosen = sorted(draw.sample(range(1, len(trace.steps)), 2))
    length = loss * len(trace.steps) / len(chosen)
    for step in chosen:
        frames = trace.python("torch/_dynamo/convert_frame.py(642): _compile")
        whole = operator(trace, "_compile.compile_inner (dynamo_timed)")
        inner = operator(trace, "GraphLowering.compile_to_module (dynamo_timed)")
        host = [(0.5, length - 1.0, event) for event in frames]
        host += [(1.0, length - 2.0, whole), (0.35 * length, 0.6 * length, inner)]
        trace.insert(Insertion(trace.model_points(step)[0], length, host))
    return f"{len(chosen)} of {len(trace.steps)} steps compile for {length / 1e3:.0f} ms"


# ---- host and GPU -----------------------------------------------------------------------


def launches_that_wait(trace: Trace, draw: Draw, loss: float) -> str:
    """CUDA_LAUNCH_BLOCKING: a launch returns when its kernel is done and the host has woken."""
    count = 0
    for step in range(len(trace.steps)):
        calls = launches(trace, step)
        calls = sorted(draw.sample(calls, min(len(calls), max(int(loss / 25.0), 1))))
        for row in calls:
            at = float(trace.start[row] + 0.4 * max(trace.length[row], 1.0))
            trace.insert(Insertion(at, 2.0, drains=True))
            trace.insert(Insertion(at, loss / len(calls)))
        count += len(calls)
    return f"{count / len(trace.steps):.0f} launches per step return after their kernel's end"


def dynamic_shapes(trace: Trace, draw: Draw, loss: float) -> str:
    """Boolean masks: the host waits for the GPU to count what is left."""
    total = 0
    for step in range(len(trace.steps)):
        points = trace.model_points(step)
        for _ in range(min(max(int(loss / 75.0), 4), 3000)):
            at, counted, read, written = draw.choice(points), *(trace.new_id() for _ in range(3))
            value = trace.gpu_work("memcpy", "Memcpy DtoH (Device -> Pageable)", read)
            value["args"] |= {"bytes": 4, "memory bandwidth (GB/s)": 0.003}
            host = [
                (0.0, OPEN_ENDED, operator(trace, "aten::index")),
                (2.0, OPEN_ENDED, numbered(operator(trace, "aten::nonzero"), read)),
                (5.0, 6.0, trace.runtime_call("cudaLaunchKernel", counted)),
                (13.0, 8.0, trace.runtime_call("cudaMemcpyAsync", read)),
                (23.0, OPEN_ENDED, trace.runtime_call("cudaStreamSynchronize")),
            ]
            device = [
                (6.0, 3.0, trace.gpu_work("kernel", COUNT, counted)),
                (14.0, 1.5, value),
            ]
            trace.insert(Insertion(at, 36.0, host, device, drains=True))
            host = [
                (0.0, 22.0, operator(trace, "aten::index")),
                (1.0, 20.0, numbered(operator(trace, "aten::nonzero"), written)),
                (8.0, 6.0, trace.runtime_call("cudaLaunchKernel", written)),
            ]
            work = trace.gpu_work("kernel", NONZERO, written)
            trace.insert(Insertion(at, 24.0, host, [(8.0, 4.0, work)]))
            total += 1
    return f"aten::nonzero {total / len(trace.steps):.0f} times per step"


def timers(trace: Trace, draw: Draw, loss: float) -> str:
    """torch.cuda.synchronize() around every module, to time it."""
    total, stacks = 0, bool(trace.python("timing.py(27): stop"))
    for step in range(len(trace.steps)):
        points = trace.points(step)[5:-5]
        for _ in range(min(max(int(loss / 50.0), 4), 4000)):
            frames = trace.python("timing.py(27): stop") if stacks else []
            host = [(0.0, OPEN_ENDED, frame) for frame in frames]
            host.append((4.0, OPEN_ENDED, trace.runtime_call("cudaDeviceSynchronize")))
            trace.insert(Insertion(draw.choice(points), 20.0, host, drains=True))
            trace.insert(Insertion(draw.choice(points), 12.0))
            total += 1
    return f"cudaDeviceSynchronize {total / len(trace.steps):.0f} times per step"


def small_copies(trace: Trace, draw: Draw, loss: float) -> str:
    """Each feature of a batch is copied on its own, by hundreds of tiny copies."""
    each = draw.uniform(10.0, 16.0)
    count = max(int(loss / each), 8)
    to, copy_ = operator(trace, "aten::to"), operator(trace, "aten::copy_")
    call = trace.runtime_call("cudaMemcpyAsync")
    work = trace.gpu_work("memcpy", "Memcpy HtoD (Pinned -> Device)", 0)
    work["args"] |= {"bytes": 2048, "memory bandwidth (GB/s)": 2048 / 1.4e3}
    for step in range(len(trace.steps)):
        at = (trace.within(LOADING, step) or trace.points(step))[0]
        host, device = [], []
        for number in range(count):
            begins, own = number * each, trace.new_id()
            host.append((begins, each - 0.5, numbered(to, own)))
            host.append((begins + 1.5, each - 2.5, numbered(copy_, own)))
            host.append((begins + 3.0, each - 5.0, numbered(call, own)))
            device.append((begins + 3.0, 1.4, numbered(work, own)))
        trace.insert(Insertion(at, count * each, host, device))
    return f"{count} copies of 2 KB to the GPU per step"


def slow_link(trace: Trace, launched: float, loss: float) -> None:
    """This rank's batch comes over a bad link."""
    at = [point for point in trace.points(0) if point < launched][-1]
    add_copy(trace, at, "HtoD (Pageable -> Device)", loss, 0.7, waits=True)


# ---- kernels ----------------------------------------------------------------------------


def far_tables(trace: Trace, draw: Draw, loss: float) -> str:
    """Tables in managed memory: lookups fetch their rows from the host."""
    rows = kernels(trace, r"embedding_codegen_forward|EmbeddingBag_update")
    return f"the lookups of the forward take {stretched(trace, rows, loss):.0f} times as long"


def hot_rows(trace: Trace, draw: Draw, loss: float) -> str:
    """A few rows take most of the gradients, which are added one after the other."""
    rows = kernels(trace, r"embedding_backward_codegen.*kernel_cta_per_row")
    return f"gradients of long segments take {stretched(trace, rows, loss):.0f} times as long"


def dense_update(trace: Trace, draw: Draw, loss: float) -> str:
    """Adam with dense gradients: it reads and writes all rows of all tables."""
    names = ["aten::_foreach_lerp_", "aten::_foreach_addcmul_", "aten::_foreach_addcdiv_"]
    for step in range(len(trace.steps)):
        at = (trace.within(OPTIMIZER, step) or trace.points(step)[-1:])[-1]
        for name in names * 2:
            add_work(trace, at, [name], MULTI_TENSOR, loss / 6, 900.0)
    return f"6 kernels over whole tables take {loss / 1e3:.1f} ms per step in the optimiser"


def transposed_anew(trace: Trace, draw: Draw, loss: float) -> str:
    """Activations are transposed in memory before each use."""
    count = draw.choice([4, 8, 16])
    names = ["aten::contiguous", "aten::clone", "aten::copy_"]
    for points in each_step(trace):
        for _ in range(count):
            add_work(trace, draw.choice(points), names, LAYOUT, loss / count, 500.0)
    return f"contiguous() {count} times per step, {loss / 1e3:.1f} ms of kernels"


def unfused_features(trace: Trace, draw: Draw, loss: float) -> str:
    """Features are prepared on the GPU by a long chain of pointwise operators."""
    count = draw.choice([20, 40])
    for step in range(len(trace.steps)):
        at = trace.model_points(step)[0]
        for place in range(count):
            name = list(POINTWISE)[place % len(POINTWISE)]
            kernel = (
                "void at::native::vectorized_elementwise_kernel<4, at::native::"
                f"{POINTWISE[name]}, at::detail::Array<char*, 2> >(int)"
            )
            add_work(trace, at, [name], kernel, loss / count, 700.0)
    return f"{count} pointwise kernels per step, {loss / 1e3:.1f} ms in all"


def misaligned_products(trace: Trace, draw: Draw, loss: float) -> str:
    """A layer's width is odd: its product runs in small tiles with narrow loads."""
    rows = kernels(trace, r"_align\d")
    times: dict[str, float] = {}
    for row in rows:
        name = trace.events[row]["name"]
        times[name] = times.get(name, 0.0) + float(trace.length[row])
    chosen = sorted(times, key=lambda name: -times[name])[draw.randrange(2)]
    rows = [row for row in rows if trace.events[row]["name"] == chosen]
    narrow = "align2" if "bf16" in chosen else "align1"
    new = re.sub(r"align\d", narrow, re.sub(r"_\d+x\d+_\d+x\d_", "_64x64_32x6_", chosen))
    factor = stretched(trace, rows, loss)
    for row in rows:
        trace.events[row]["name"] = new
    return f"{len(rows)} products take {factor:.0f} times as long in {new[:70]}"


# ---- several ranks ----------------------------------------------------------------------


def barrier(trace: Trace, draw: Draw, loss: float) -> str:
    """A barrier in each step: the host waits for the slowest of the ranks."""
    for step in range(len(trace.steps)):
        number = trace.new_id()
        host = [
            (0.0, OPEN_ENDED, operator(trace, "c10d::barrier")),
            (5.0, 20.0, numbered(operator(trace, "record_param_comms"), number)),
            (12.0, 8.0, trace.runtime_call("cudaLaunchKernel", number)),
            (27.0, OPEN_ENDED, trace.runtime_call("cudaDeviceSynchronize")),
        ]
        device = [(12.0, loss, trace.collective(number))]
        trace.insert(Insertion(trace.points(step)[-1], 40.0, host, device, drains=True))
    return f"a barrier per step takes {loss / 1e3:.1f} ms"


def small_collectives(trace: Trace, draw: Draw, loss: float) -> str:
    """Gradients are summed over ranks one parameter at a time, and waited for."""
    each = draw.uniform(45.0, 80.0)
    count = max(int(loss / each), 4)
    for step in range(len(trace.steps)):
        host, device = [], []
        for place in range(count):
            begins, number = place * each, trace.new_id()
            reduce = operator(trace, "c10d::allreduce_", [256])
            host.append((begins, 0.8 * each, numbered(reduce, number)))
            inner = operator(trace, "record_param_comms", [256])
            host.append((begins + 4.0, 0.6 * each, numbered(inner, number)))
            call = trace.runtime_call("cudaLaunchKernel", number)
            host.append((begins + 10.0, 7.0, call))
            device.append((begins + 10.0, 0.75 * each, trace.collective(number)))
        host.append((count * each, OPEN_ENDED, trace.runtime_call("cudaStreamSynchronize")))
        at = before_optimizer(trace, step)
        trace.insert(Insertion(at, count * each + 8.0, host, device, drains=True))
    return f"{count} all-reduces per step of {0.75 * each:.0f} us each"


def slow_exchange(trace: Trace, draw: Draw, loss: float) -> str:
    """The exchange of embeddings goes over sockets, as direct access to peers is off."""
    rows = [row for row in kernels(trace, "SendRecv") if trace.launch(row) > -1e11]
    return f"all-to-all takes {stretched(trace, rows, loss):.1f} times as long"


# ---- databases of HPCToolkit ------------------------------------------------------------


def slow_interaction(database: DatabaseCopy, draw: Draw, loss: float) -> str:
    """The interaction of the features takes long."""
    factor = database.stretch_function("interact_features", loss)
    return f"interact_features takes {factor:.0f} times as long"


def linear_backward(database: DatabaseCopy, draw: Draw, loss: float) -> str:
    """The backward of the linear layers takes long."""
    name = max(
        (name for name in set(database.database.names) if "AddmmBackward0::apply(" in name),
        key=lambda name: (database.seconds(database.rows(name)), name),
    )
    return f"AddmmBackward0 takes {database.stretch_function(name, loss):.0f} times as long"


def _fault(
    plant: Callable[[Any, Draw, float], str],
    recordings: tuple[str, ...],
    *named: tuple[str, str],
    unless: str = "",
    delay: Callable[[Trace, float, float], None] | None = None,
) -> Fault:
    return Fault(
        plant,
        recordings,
        named,
        held_out=True,
        unless=unless,
        advice_counts=False,
        delay=delay,
        small=TENTH,
        listed=True,
    )


HOST = r"idle|host|outside|python|processor|CPU"
IRREGULAR = r"irregular|outlier|spike|every|vary|varies|uneven|iterations? (take|are|is|takes)"
COMMUNICATION = r"communicat|nccl|collective|exchange|network|rank|peer|all.to.all|all.?reduce"
KERNEL = r"kernel|memory|ceiling|bandwidth|slow|elementwise|pointwise|fus"

FAULTS = {
    "slow_host": _fault(
        slow_host,
        ("resnet", "bert", "rank0", "meta", "graphs", "rank5*8"),
        (rf"{HOST}|launch|dispatch", ""),
        unless=r"synchron|cop(y|ies)\b|communicat|\bdata\b",
    ),
    "cpu_quota": _fault(
        cpu_quota,
        LONG,
        (rf"{HOST}|{IRREGULAR}|preempt|throttl|quota|stall", ""),
        unless=r"launch_bound|synchron|cop(y|ies)\b|communicat|\bdata\b",
    ),
    "logger_thread": _fault(
        logger_thread,
        ("rank5*8", "resnet", "meta", "bert", "rank0"),
        (rf"{HOST}|other_threads|thread|GIL|lock|contention", ""),
        unless=r"launch|synchron|cop(y|ies)\b|communicat|\bdata\b|batch",
    ),
    "metrics_on_host": _fault(
        metrics_on_host,
        ("graphs", "rank0", "resnet", "meta", "bert", "rank5*8"),
        (HOST, r"sort|cumsum|[Mm]etric|AUC"),
        (r"sort|cumsum|metric|AUC", ""),
        unless=r"launch_bound",
    ),
    "checkpoint": _fault(
        checkpoint,
        ("meta", "bert*8", "rank5*8", "graphs", "resnet"),
        (rf"{IRREGULAR}|checkpoint|serializ", ""),
        (r"cop(y|ies)\b|read ?back", r"DtoH|to the host|Device -> Pageable|[Dd]evice.to.[Hh]ost"),
    ),
    "recompiles": _fault(
        recompiles,
        ("bert*8", "meta", "resnet", "graphs", "rank5*8"),
        (rf"{IRREGULAR}|compil", ""),
        (IDLE, r"compil|dynamo"),
    ),
    "launches_that_wait": _fault(
        launches_that_wait,
        ("rank0", "bert", "resnet", "rank5*8"),
        (r"launch|synchron|block", ""),
        (HOST, r"cudaLaunchKernel|cuLaunchKernel|launch"),
        unless=r"cop(y|ies)\b|communicat",
    ),
    "dynamic_shapes": _fault(
        dynamic_shapes,
        ("resnet", "rank5*8", "meta", "bert", "rank0"),
        (r"synchron|read ?back|nonzero|dynamic", ""),
        (HOST, r"nonzero|ynchron"),
    ),
    "timers": _fault(
        timers,
        ("rank5*8", "meta", "rank0", "bert", "resnet"),
        (r"synchron", ""),
        (HOST, r"DeviceSynchronize|ynchroni[sz]"),
    ),
    "small_copies": _fault(
        small_copies,
        ("bert", "rank0", "meta", "rank5*8", "resnet", "graphs"),
        (r"cop(y|ies)\b|transfer", ""),
        (
            rf"launch|tiny|small|{HOST}",
            r"HtoD|[Hh]ost.to.[Dd]evice|cudaMemcpyAsync|aten::(copy_|to)\b",
        ),
    ),
    "slow_link": _fault(
        lambda *_: "",
        ("archive",),
        (r"rank|straggl|imbalance|wait|late|cop(y|ies)\b", "{rank}"),
        delay=slow_link,
    ),
    "far_tables": _fault(
        far_tables,
        ("meta", "rank5*8", "rank0"),
        (r"embedding|lookup", ""),
        (KERNEL, r"[Ee]mbedding|[Ll]ookup"),
        unless=r"launch_bound|idle|cop(y|ies)\b",
    ),
    "hot_rows": _fault(
        hot_rows,
        ("rank5*8", "meta"),
        (r"embedding|lookup|hot|skew|atomic", ""),
        (KERNEL, r"[Ee]mbedding|[Ll]ookup"),
        unless=r"launch_bound|idle|cop(y|ies)\b",
    ),
    "dense_update": _fault(
        dense_update,
        ("resnet", "meta", "graphs", "rank5*8"),
        (r"optimi[sz]er|update|dense_gradient|adam", ""),
        (KERNEL, r"ptimi[sz]er|multi_tensor|[Aa]dam|addcdiv|_foreach"),
        unless=r"launch_bound|idle|\bcop(y|ies)\b",
    ),
    "transposed_anew": _fault(
        transposed_anew,
        ("rank0", "meta", "resnet", "bert*8", "rank5*8"),
        (
            rf"{KERNEL}|cop(y|ies)\b|cast|contiguous|layout|transpos",
            r"direct_copy|aten::copy_|contiguous|clone|elementwise|pointwise|cop(y|ies)\b",
        ),
        unless=r"launch_bound|idle|pageable",
    ),
    "unfused_features": _fault(
        unfused_features,
        ("meta", "rank0", "bert*8", "resnet", "rank5*8"),
        (rf"{KERNEL}|unfused", r"elementwise|pointwise|clamp|log1p|aten::(mul|where|sub)|where"),
        (r"elementwise|pointwise|unfused", ""),
        unless=r"launch_bound|idle|cop(y|ies)\b",
    ),
    "misaligned_products": _fault(
        misaligned_products,
        ("bert*8", "meta", "graphs"),
        (r"tensor.core|matrix|product|gemm|align|mlp|compute|precision", ""),
        (KERNEL, r"gemm|cutlass|[Mm]atrix"),
        unless=r"launch_bound|idle|cop(y|ies)\b",
    ),
    "barrier": _fault(
        barrier,
        ("rank0", "graphs", "meta", "rank5*8"),
        (rf"{COMMUNICATION}|barrier", ""),
        (r"synchron", r"nccl|collective|ommunicat|barrier|[Rr]educe"),
        unless="occupancy",
    ),
    "small_collectives": _fault(
        small_collectives,
        ("rank5*8", "meta", "graphs", "rank0"),
        (COMMUNICATION, ""),
        (r"launch|tiny|small|synchron", r"nccl|collective|ommunicat|[Rr]educe"),
        unless="occupancy",
    ),
    "slow_exchange": _fault(slow_exchange, DLRM, (COMMUNICATION, ""), unless="occupancy"),
    "slow_interaction": _fault(
        slow_interaction,
        ("h100-host", "cpu-python", "h100-pc"),
        (r"interact", ""),
        (rf"{KERNEL}|{HOST}|time|operator|function", r"interact"),
    ),
    "linear_backward": _fault(
        linear_backward,
        ("cpu-python", "h100-pc", "h100-host"),
        (r"mlp|linear|addmm|matrix|product|gemm|tensor.core|compute", ""),
        (rf"{KERNEL}|{HOST}|time|operator|function", r"mlp|MLP|[Ll]inear|Addmm|gemm|[Mm]atrix"),
        unless=r"launch_bound|small_batch|batch is too small|spinning|too_many",
    ),
}


# ---- harmless edits ---------------------------------------------------------------------


def scaled(trace: Trace, draw: Draw) -> Trace:
    """Everything takes up to a tenth longer or shorter."""
    factor = draw.uniform(0.9, 1.1)
    events = copy.deepcopy(trace.events)
    for event in events:
        if "ts" in event:
            event["ts"] = round(trace.base + (event["ts"] - trace.base) * factor, 3)
        if "dur" in event:
            event["dur"] = round(event["dur"] * factor, 3)
        args = event.get("args") or {}
        rate = args.get("memory bandwidth (GB/s)")
        if isinstance(rate, int | float):
            args["memory bandwidth (GB/s)"] = rate / factor
    return Trace(trace.document | {"traceEvents": events})


def other_threads(trace: Trace, draw: Draw) -> Trace:
    """Threads of the host have other numbers and names."""
    streams = {(trace.events[row]["pid"], str(trace.events[row]["tid"])) for row in trace.device}
    more = draw.randrange(100_000, 900_000)
    host = {trace.events[row]["pid"] for row in trace.runtime}
    events = copy.deepcopy(trace.events)
    for event in events:
        tid = str(event.get("tid", ""))
        if event.get("pid") not in host or (event["pid"], tid) in streams:
            continue
        if tid.isdigit() and int(tid) > 0:
            event["tid"] = type(event["tid"])(int(tid) + more)
        if event.get("ph") == "M" and event["name"] == "thread_name" and int(more) % 2:
            event["args"]["name"] = f"worker {event['tid']}"
    return Trace(trace.document | {"traceEvents": events})


def more_steps(trace: Trace, draw: Draw) -> Trace:
    """The same iterations once or twice more."""
    return repeated(trace, draw.choice([2, 3]))


def other_streams(trace: Trace, draw: Draw) -> Trace:
    """The GPU's streams have other numbers."""
    more = draw.randrange(100, 400)
    streams = {(trace.events[row]["pid"], str(trace.events[row]["tid"])) for row in trace.device}
    events = copy.deepcopy(trace.events)
    for event in events:
        found = re.fullmatch(r"(stream )?(\d+)", str(event.get("tid", "")))
        if (event.get("pid"), str(event.get("tid"))) in streams and found:
            new = int(found[2]) + more
            event["tid"] = f"stream {new}" if found[1] else new
            if event.get("ph") == "M" and event["name"] == "thread_name":
                event["args"]["name"] = f"stream {new}"
        args = event.get("args") or {}
        if isinstance(args.get("stream"), int):
            args["stream"] += more
    return Trace(trace.document | {"traceEvents": events})


def annotated(trace: Trace, draw: Draw) -> Trace:
    """The program marks a few places of each step with ranges of its own."""
    process, thread = trace.thread
    mark = trace.events[trace.marks[0]]
    made: list[Event] = []
    for step in range(len(trace.steps)):
        points = trace.points(step)
        for place in range(3):
            first, last = points[place * len(points) // 4], points[(place + 1) * len(points) // 4]
            times = {"ts": round(trace.base + first - 0.5, 3), "dur": round(last - first - 1.0, 3)}
            args = {name: trace.new_id() for name in ("External id",) if name in mark["args"]}
            made.append(
                {"ph": "X", "cat": mark["cat"], "name": f"stage {place}", "args": args}
                | {"pid": process, "tid": thread}
                | times
            )
    return Trace(trace.document | {"traceEvents": [*trace.events, *made]})


def heartbeat(trace: Trace, draw: Draw) -> Trace:
    """Another thread wakes up in each step for a few microseconds."""
    process, _ = trace.thread
    thread = 91_000_000 + draw.randrange(1000)
    made: list[Event] = [
        {"ph": "M", "name": "thread_name", "pid": process, "tid": thread}
        | {"ts": trace.base, "args": {"name": "heartbeat"}}
    ]
    for start, end in trace.steps:
        for share in (0.2, 0.7):
            event = operator(trace, "aten::empty") | {"pid": process, "tid": thread}
            made.append(
                event | {"ts": round(trace.base + start + share * (end - start), 3), "dur": 4}
            )
    return Trace(trace.document | {"traceEvents": [*trace.events, *made]})


def error_checks(trace: Trace, draw: Draw) -> Trace:
    """The program asks for the last error now and then, in less than a microsecond."""
    for step in range(len(trace.steps)):
        for at in trace.points(step)[:: draw.choice([10, 25])]:
            call = trace.runtime_call("cudaGetLastError")
            trace.insert(Insertion(at, 0.5, [(0.1, 0.3, call)]))
    return trace.replay()


def counters(trace: Trace, draw: Draw) -> Trace:
    """A monitor adds the GPU's load, power and memory as counters."""
    process, thread = trace.thread
    first, last = trace.steps[0][0], trace.steps[-1][1]
    made: list[Event] = []
    for place in range(200):
        ts = round(trace.base + first + (last - first) * place / 200, 3)
        for name, most in (("GPU 0 Utilization", 100), ("Power (W)", 400), ("Memory (MB)", 40_000)):
            value = {"value": round(draw.uniform(0.5, 1.0) * most, 1)}
            made.append(
                {"ph": "C", "name": name, "pid": process, "tid": thread} | {"ts": ts, "args": value}
            )
    return Trace(trace.document | {"traceEvents": [*trace.events, *made]})


CLEAN: dict[str, Callable[[Trace, Draw], Trace]] = {
    "scaled": scaled,
    "other_threads": other_threads,
    "more_steps": more_steps,
    "other_streams": other_streams,
    "annotated": annotated,
    "heartbeat": heartbeat,
    "error_checks": error_checks,
    "counters": counters,
}
