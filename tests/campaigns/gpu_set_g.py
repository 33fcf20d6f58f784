"""Set G of faults: practice. Its kinds are ones that no set from A to F has.

Kinds, answers and harmless edits were decided before any of them was run, by an author who had
not read the rules. They are one half of a list of faults that training programs have in practice;
lot decided which half is here, for those who write rules, and which is the sealed set H. The
first run is in ``benchmarks/results/gpu_faults_set_g.json``. Set H uses the building blocks.

An answer is what a reader must learn in order to mend the fault: mostly the operator, call,
kernel or range that was planted.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

from gpu_kinds import (
    FILL,
    OPEN_ENDED,
    SMALL,
    SORT,
    Draw,
    Fault,
    Plant,
    add_copy,
    add_loading,
    annotation,
    backward,
    batch_start,
    before_optimizer,
    floats,
    numbered,
    operator,
    slower,
)
from trace_edits import Event, Insertion, Trace

LOOKUPS = r"sparse_arch|EmbeddingBagCollection|ebc"

# ---- building blocks --------------------------------------------------------------------

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


# ---- work of the GPU --------------------------------------------------------------------

DOUBLE_SIGMOID = (
    "void at::native::vectorized_elementwise_kernel<2, at::native::log_sigmoid_forward_kernel("
    "at::TensorIteratorBase&)::{lambda()#2}::operator()() const::{lambda()#1}::operator()() "
    "const::{lambda(double)#1}, at::detail::Array<char*, 2> >(int, at::native::"
    "log_sigmoid_forward_kernel(at::TensorIteratorBase&)::{lambda(double)#1}, "
    "at::detail::Array<char*, 2>)"
)
DOUBLE_PRODUCT = (
    "void at::native::vectorized_elementwise_kernel<2, at::native::BinaryFunctor<double, double, "
    "double, at::native::binary_internal::MulFunctor<double> >, at::detail::Array<char*, 3> >"
    "(int, at::native::BinaryFunctor<double, double, double, at::native::binary_internal::"
    "MulFunctor<double> >, at::detail::Array<char*, 3>)"
)
SCAN = (
    "void at::native::tensor_kernel_scan_innermost_dim<float, std::plus<float> >(float*, float "
    "const*, unsigned int, unsigned int, unsigned int, float, std::plus<float>)"
)
NORMALISED_ROWS = "void at::native::(anonymous namespace)::renormRowsL1<float>(float*, long, long)"
MULTINOMIAL = (
    "void at::native::(anonymous namespace)::sampleMultinomialWithReplacement<float>("
    "at::PhiloxCudaState, int, long*, long, int, float const*)"
)
PADDED = (
    "void fbgemm_gpu::(anonymous namespace)::jagged_dense_elementwise_dense_output_kernel_<1, "
    "long, float, fbgemm_gpu::(anonymous namespace)::jagged_to_padded_dense_forward::"
    "{lambda(float, float)#1}>(at::GenericPackedTensorAccessor<float, 2ul>, float)"
)
INDEX_ADD = (
    "void at::native::(anonymous namespace)::indexFuncLargeIndex<float, long, unsigned int, 2, 2, "
    "-2, true, at::native::(anonymous namespace)::ReduceAdd>(at::cuda::detail::TensorInfo<float, "
    "unsigned int>, int, int, unsigned int, unsigned int, long, long, float)"
)
WEIGHT_NORM = (
    "void at::native::(anonymous namespace)::weight_norm_fwd_first_dim_kernel<float, float>("
    "float*, float*, float const*, float const*, int)"
)
WEIGHT_NORM_BACKWARD = (
    "void at::native::(anonymous namespace)::weight_norm_bwd_first_dim_kernel<float, float>("
    "float*, float*, float const*, float const*, float const*, float const*, int)"
)
RENORM = (
    "void at::native::(anonymous namespace)::renorm_kernel<float, float, long>(float*, long*, "
    "float, float, long, long, long)"
)

double_loss = gpu_work(
    "loss",
    {
        "aten::binary_cross_entropy_with_logits > aten::log_sigmoid": (DOUBLE_SIGMOID, 0.6),
        "aten::binary_cross_entropy_with_logits > aten::mul": (DOUBLE_PRODUCT, 0.4),
    },
    counts=(1, 6),
)
"""The loss is computed in float64, as its labels came as such."""

single_block_scan = gpu_work(
    "forward", {"aten::cumsum": (SCAN, 1.0)}, rate=(4.0, 9.0), blocks=1, counts=(1, 3)
)
"""A running sum over one long row: one block of the GPU does it."""

sampled_on_gpu = gpu_work(
    "forward",
    {
        "aten::multinomial > aten::div": (NORMALISED_ROWS, 0.3),
        "aten::multinomial": (MULTINOMIAL, 0.7),
    },
    counts=(1, 8),
)
"""Negative samples are drawn from all items by their frequency."""

padded_histories = gpu_work(
    "forward", {"fbgemm::jagged_to_padded_dense": (PADDED, 1.0)}, counts=(1, 8)
)
"""Histories of users are padded to the longest."""

sparse_to_dense = gpu_work(
    "backward",
    {
        "aten::to_dense > aten::_to_dense > aten::zeros": (FILL, 0.4),
        "aten::to_dense > aten::_to_dense > aten::index_add_": (INDEX_ADD, 0.6),
    },
    counts=(1, 4, 26),
)
"""Sparse gradients of tables are made dense, for an optimizer that takes no others."""

weight_norm = together(
    gpu_work("forward", {"aten::_weight_norm > aten::_weight_norm_interface": (WEIGHT_NORM, 1.0)}),
    gpu_work(
        "backward",
        {
            "WeightNormInterfaceBackward0 > aten::_weight_norm_interface_backward": (
                WEIGHT_NORM_BACKWARD,
                1.0,
            )
        },
    ),
)
"""Weights are normalised anew in each forward, and so are their gradients."""

renormed_tables = gpu_work(
    "lookups",
    {
        "aten::embedding_renorm_ > aten::_unique2": (SORT, 0.35),
        "aten::embedding_renorm_": (RENORM, 0.65),
    },
    counts=(2, 8, 26),
)
"""``max_norm``: each lookup first makes its indices unique and scales their rows."""

# ---- the host ---------------------------------------------------------------------------

guard_checks = host_work("forward", {"TorchDynamo Cache Lookup": 1.0}, each=(200.0, 1500.0))
"""torch.compile checks the guards of hundreds of compiled versions before each call."""

python_backward = host_work(
    "backward",
    {
        "autograd::engine::evaluate_function: InteractionFunctionBackward"
        " > InteractionFunctionBackward": 1.0
    },
    each=(500.0, 4000.0),
)
"""The backward of an autograd function of the program's own is slow Python."""

pinned_checks = host_work(
    "forward", {"aten::is_pinned > cudaPointerGetAttributes": 1.0}, each=(15.0, 40.0)
)
"""The program asks of each tensor whether its memory is pinned."""

unused_search = host_work("loss", {"torch.distributed.ddp.reducer::search_unused_parameters": 1.0})
"""``find_unused_parameters``: the whole graph is walked before each backward."""

modules_loaded = host_work("forward", {"cuModuleLoadDataEx": 1.0}, each=(600.0, 3000.0))
"""Kernels made for each shape are loaded into the driver in each step."""


def double_batches(trace: Trace, draw: Draw, loss: float) -> str:
    """The host converts each batch from float64, which NumPy made, before it is copied."""
    for points in visits(trace, "batch"):
        size, length = floats(loss, 2.0), 0.92 * loss
        host = [
            (float(depth), length - 2.0 * depth - 1.0, operator(trace, name, [size], "double"))
            for depth, name in enumerate(("aten::to", "aten::_to_copy", "aten::copy_"))
        ]
        trace.insert(Insertion(points[0], length, host))
        add_copy(trace, points[0], "HtoD (Pinned -> Device)", 0.08 * loss, 22.0)
    return f"the host converts batches for {0.92 * loss / 1e3:.1f} ms per step: aten::copy_"


def collation(trace: Trace, draw: Draw, loss: float) -> str:
    """The loader stacks thousands of samples into a batch on the thread that steps."""
    for step in range(len(trace.steps)):
        add_loading(trace, step, loss, ("aten::stack", "aten::cat"))
    return f"aten::stack makes the batch for {loss / 1e3:.1f} ms per step"


# ---- copies and ranks -------------------------------------------------------------------


def grown_copies(trace: Trace, draw: Draw, loss: float) -> str:
    """Batches hold many features that the model does not use: all copies are larger."""
    rows = [row for row in trace.device if "HtoD" in trace.events[row]["name"]]
    rows = [row for row in rows if trace.launch(row) > -1e11]
    chosen = sorted(rows, key=lambda row: -trace.length[row])[: max(len(rows) // 4, 1)]
    before = sum(float(trace.length[row]) for row in chosen)
    factor = 1.0 + loss * len(trace.steps) / before
    for row in chosen:
        args = trace.events[row]["args"]
        rate = draw.uniform(9.0, 11.0)
        trace.length[row] *= factor
        if "bytes" in args:
            args["bytes"] = int(trace.length[row] * rate * 1e3)
        if "memory bandwidth (GB/s)" in args:
            args["memory bandwidth (GB/s)"] = rate
    return f"{len(chosen)} copies to the GPU take {factor:.0f} times as long"


def gathered_weights(trace: Trace, draw: Draw, loss: float) -> str:
    """Parameters are sharded and gathered before each forward, which waits for them."""
    count = draw.choice([1, 6])
    for points in visits(trace, "forward"):
        for _ in range(count):
            names = "nccl:_all_gather_base > c10d::_allgather_base_"
            add_collective(trace, points[0], "AllGather", names, loss / count)
    return f"{count} all-gathers per step, {loss / 1e3:.1f} ms in all"


def logging_rank(trace: Trace, launched: float, loss: float) -> None:
    """One rank computes statistics on its host before a collective, for which it is late."""
    at = [at for at in trace.points(0) if at < launched][-1]
    add_copy(trace, at, "DtoH (Device -> Pageable)", 0.1 * loss, 4.0, waits=True)
    host = nested(trace, "aten::quantile > aten::sort", 0.5, 0.9 * loss - 1.0)
    trace.insert(Insertion(at, 0.9 * loss, host))


# ---- kinds and answers ------------------------------------------------------------------

ANY_FINDING = "."
OF_HOST = r"launch_bound|cop(y|ies)\b|communicat"
OF_WORK = r"launch_bound|gpu_idle|pageable"
sealed = partial(Fault, held_out=True, advice_counts=False, small=SMALL, listed=True)


def answer(
    plant: Plant, recordings: str, pattern: str, unless: str = "", heads: str = ANY_FINDING
) -> Fault:
    """A kind whose recordings have blanks between, and that one pattern of the text names."""
    return sealed(plant, tuple(recordings.split()), ((heads, pattern),), unless=unless)


FAULTS = {
    "double_loss": answer(
        double_loss,
        "rank5*8 meta bert*8 rank0",
        r"{kernel}|float64|[Dd]ouble|cross_entropy|log_sigmoid",
        OF_WORK,
    ),
    "single_block_scan": answer(
        single_block_scan, "rank0 resnet meta rank5*8", r"{kernel}|cumsum|scan", OF_WORK
    ),
    "sampled_on_gpu": answer(
        sampled_on_gpu, "meta rank5*8 rank0", r"{kernel}|[Mm]ultinomial", OF_WORK
    ),
    "padded_histories": answer(
        padded_histories, "rank5*8 graphs meta", r"{kernel}|jagged_to_padded|[Pp]added", OF_WORK
    ),
    "sparse_to_dense": answer(
        sparse_to_dense, "meta rank0 rank5*8", r"{kernel}|to_dense|index_add", OF_WORK
    ),
    "weight_norm": answer(
        weight_norm, "rank5*8 rank0 meta resnet", r"{kernel}|[Ww]eight_?[Nn]orm", OF_WORK
    ),
    "renormed_tables": answer(renormed_tables, "meta rank5*8 rank0", r"{kernel}|renorm", OF_WORK),
    "guard_checks": answer(
        guard_checks,
        "bert*8 meta resnet rank5*8",
        r"Dynamo|Cache Lookup|\bguard|[Cc]ompil",
        OF_HOST,
    ),
    "double_batches": answer(
        double_batches,
        "rank0 meta resnet bert*8",
        r"aten::(to|_to_copy|copy_)|[Cc]onver(t|sion)|float64|double",
        OF_HOST,
    ),
    "python_backward": answer(
        python_backward, "rank5*8 meta rank0 resnet", r"InteractionFunction", OF_HOST
    ),
    "pinned_checks": answer(
        pinned_checks, "rank0 bert meta rank5*8", r"is_pinned|PointerGetAttributes", OF_HOST
    ),
    "collation": sealed(
        collation,
        ("meta", "resnet", "rank5*8", "bert*8"),
        (
            (r"data_generation|\bdata\b|load", ""),
            (ANY_FINDING, r"aten::(stack|cat)\b|[Cc]ollat|DataLoader"),
        ),
        unless=r"launch_bound|small_batch|batch is too small",
    ),
    "unused_search": answer(
        unused_search, "meta graphs rank0 rank5*8", r"search_unused|[Uu]nused", OF_HOST
    ),
    "modules_loaded": answer(
        modules_loaded,
        "bert resnet rank0 meta",
        r"ModuleLoad|[Ll]oad\w* (of )?(\w+ )?(kernel|module|code|librar)",
        OF_HOST,
    ),
    "grown_copies": answer(
        grown_copies, "meta resnet rank5*8 graphs", "", heads=r"cop(y|ies)\b|transfer"
    ),
    "gathered_weights": answer(
        gathered_weights, "rank0 meta graphs rank5*8", r"[Aa]ll_?-?[Gg]ather", "launch_bound"
    ),
    "logging_rank": sealed(
        lambda *_: "",
        ("archive",),
        ((r"rank|imbalance|uneven|straggl", "{rank}"),),
        delay=logging_rank,
    ),
    "converted_batches": sealed(
        slower("astype"),
        ("h100-host", "cpu-python"),
        ((r"data_generation|\bdata\b", ""), (ANY_FINDING, r"astype|[Cc]onver(t|sion)")),
        unless=r"small_batch|batch is too small",
    ),
}

# ---- edits that change nothing that matters ---------------------------------------------


def edited(trace: Trace, edit: Callable[[Event], Event]) -> Trace:
    """The trace with each event edited."""
    return Trace(trace.document | {"traceEvents": [edit(event) for event in trace.events]})


def more_arguments(trace: Trace, draw: Draw) -> Trace:
    """Each event has arguments that no reader knows."""
    more = {"Trace iter": draw.randrange(9), "fwd thread": "main", "Collection": [1, None, {}]}
    return edited(trace, lambda event: event | {"args": (event.get("args") or {}) | more})


def other_process(trace: Trace, draw: Draw) -> Trace:
    """The host's process has another number."""
    own, new = trace.thread[0], draw.randrange(10**6, 4 * 10**6)
    return edited(trace, lambda event: event | ({"pid": new} if event.get("pid") == own else {}))


def more_marks(trace: Trace, draw: Draw) -> Trace:
    """Instants, labels and orders of threads are recorded, as the profiler's version likes."""
    process, thread = trace.thread
    first, last = (trace.base + float(at) for at in (trace.steps[0][0], trace.steps[-1][1]))
    marks: list[Event] = [
        {
            "ph": "i",
            "s": "g",
            "name": "Iteration Start: PyTorch Profiler",
            "ts": round(first - 1.0, 3),
        },
        {"ph": "i", "s": "g", "name": "Record Window End", "ts": round(last + 1.0, 3)},
        {"ph": "M", "name": "process_labels", "args": {"labels": "CPU"}},
        {"ph": "M", "name": "thread_sort_index", "args": {"sort_index": draw.randrange(10**6)}},
    ]
    made = [{"pid": process, "tid": thread, "ts": trace.base} | mark for mark in marks]
    return Trace(trace.document | {"traceEvents": [*trace.events, *made]})


CLEAN: dict[str, Callable[[Trace, Draw], Trace]] = {
    "more_arguments": more_arguments,
    "other_process": other_process,
    "more_marks": more_marks,
}
