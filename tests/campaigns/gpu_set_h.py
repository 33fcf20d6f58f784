"""Set H of faults: sealed. **Do not read it, nor run rules on it, before rules stand as they are.**

Kinds, answers and harmless edits were decided together with those of set G, of which lot parted
them, by an author who had not read the rules and before anything of either was run. Nothing but
the edits themselves was tested before the one run that is in
``benchmarks/results/gpu_faults_set_h.json``. A sentence that names what was planted on the host
is right whatever its finding is called; with work on the GPU, it must not be of another cause.
"""

from collections.abc import Callable

from gpu_kinds import OPEN_ENDED, SORT, Draw, add_tiny_kernels, numbered, slower
from gpu_set_g import (
    OF_WORK,
    add_collective,
    add_readback,
    answer,
    edited,
    gpu_work,
    host_work,
    nested,
    sealed,
    together,
    visits,
)
from trace_edits import Event, Insertion, Trace

# ---- work of the GPU --------------------------------------------------------------------

PERMUTE = (
    "void fbgemm_gpu::permute_2D_data_kernel<true, long, float, float>(int, int, int, int const*, "
    "float const*, long const*, long const*, int const*, float const*, float*, float*)"
)
TRIDIAGONAL = (
    "void sytd2_upper_cta<float, float, 5>(int, float*, unsigned long, float*, float*, float*)"
)
UNSCALE = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
    "namespace)::TensorListMetadata<1>, at::native::(anonymous namespace)::UnaryOpFunctor<float, "
    "1, 1, 0>, at::native::_amp_foreach_non_finite_check_and_unscale_cuda_(c10::ArrayRef<"
    "at::Tensor>, at::Tensor&, at::Tensor const&)::{lambda(float)#1}>()"
)
POWER = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::"
    "pow_tensor_scalar_kernel_impl<float, float>(at::TensorIteratorBase&, float)::"
    "{lambda(float)#1}, at::detail::Array<char*, 2> >(int, float)"
)
SUM = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::"
    "func_wrapper_t<float, at::native::sum_functor<float, float, float>::operator()("
    "at::TensorIterator&)::{lambda(float, float)#1}>, unsigned int, float, 4> >(float)"
)
PRODUCT = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float, float, "
    "float, at::native::binary_internal::MulFunctor<float> >, at::detail::Array<char*, 2> >"
    "(int, at::native::AUnaryFunctor<float, float, float, at::native::binary_internal::"
    "MulFunctor<float> >, at::detail::Array<char*, 2>)"
)
COALESCE = (
    "void at::native::apply::coalesceValuesKernel<float, float>(long*, long*, float*, float*, "
    "long, long, long)"
)
FIND_KTH = (
    "void at::native::mbtopk::radixFindKthValues<float, unsigned int, unsigned int, 2>("
    "at::cuda::detail::TensorInfo<float const, unsigned int>, unsigned int, unsigned int*, "
    "unsigned int, bool, int, unsigned int, unsigned int, unsigned int, unsigned int*, short*)"
)
GATHER_TOP = (
    "void at::native::mbtopk::gatherTopK<float, unsigned int, 2>(at::cuda::detail::TensorInfo<"
    "float const, unsigned int>, unsigned int, unsigned int, bool, unsigned int, unsigned int)"
)
DROPOUT = (
    "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, "
    "1, 4, bool>(at::cuda::detail::TensorInfo<float, unsigned int>, at::cuda::detail::TensorInfo<"
    "float, unsigned int>, at::cuda::detail::TensorInfo<bool, unsigned int>, unsigned int, float)"
)
MASKED_SCALE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::"
    "masked_scale_kernel<bool, float, float>(at::Tensor&, at::Tensor const&, at::Tensor const&, "
    "float)::{lambda(float, bool)#1}, at::detail::Array<char*, 3> >(int, float)"
)
FIND_UNCACHED = (
    "void (anonymous namespace)::lru_cache_find_uncached_kernel<long>(at::"
    "GenericPackedTensorAccessor<long, 1ul, at::RestrictPtrTraits, int>, int const*, long, long)"
)
INSERT_CACHED = (
    "void (anonymous namespace)::lru_cache_insert_kernel<float, float>(at::"
    "GenericPackedTensorAccessor<float, 1ul, at::RestrictPtrTraits, long>, at::"
    "GenericPackedTensorAccessor<int, 1ul, at::RestrictPtrTraits, int>, long, bool, long)"
)
SMALL_PRODUCT = "ampere_sgemm_32x32_sliced1x4_tn"
MATMUL = "triton_tem_fused_addmm_relu_{}"

permuted_features = gpu_work(
    "lookups", {"fbgemm::permute_2D_sparse_data": (PERMUTE, 1.0)}, counts=(1, 4)
)
"""Features come in another order than the tables: all indices are moved in each step."""

eigen_preconditioner = gpu_work(
    "optimizer",
    {"aten::linalg_eigh > aten::_linalg_eigh": (TRIDIAGONAL, 1.0)},
    counts=(3, 12),
    rate=(10.0, 40.0),
    blocks=16,
    reads_back=True,
)
"""An optimizer of second order computes the eigenvectors of its statistics in each step."""

loss_scaling = gpu_work(
    "optimizer",
    {"aten::_amp_foreach_non_finite_check_and_unscale_": (UNSCALE, 1.0)},
    counts=(1, 3),
    reads_back=True,
)
"""A scaler of losses goes through all gradients, those of whole tables too, and then asks."""

table_penalty = together(
    gpu_work("loss", {"aten::pow": (POWER, 0.6), "aten::sum": (SUM, 0.4)}, counts=(1, 26)),
    gpu_work("backward", {"PowBackward0 > aten::mul": (PRODUCT, 1.0)}, counts=(1, 26)),
)
"""The loss has a penalty on all rows of all tables."""

coalesced_gradients = gpu_work(
    "optimizer",
    {
        "aten::coalesce > aten::_coalesce > aten::sort": (SORT, 0.4),
        "aten::coalesce > aten::_coalesce": (COALESCE, 0.6),
    },
    counts=(1, 8, 26),
)
"""Sparse gradients are coalesced before each update."""

hard_negatives = gpu_work(
    "forward",
    {"aten::topk": (FIND_KTH, 0.7), "aten::topk > aten::gather": (GATHER_TOP, 0.3)},
    counts=(1, 4),
)
"""The hardest negatives of all items are searched for in each step."""

dropout = together(
    gpu_work("forward", {"aten::dropout > aten::native_dropout": (DROPOUT, 1.0)}, counts=(3, 8)),
    gpu_work(
        "backward",
        {"NativeDropoutBackward0 > aten::native_dropout_backward": (MASKED_SCALE, 1.0)},
        counts=(3, 8),
    ),
)
"""Dropout of wide activations, which writes masks and reads them again."""

cache_populate = gpu_work(
    "lookups",
    {
        "fbgemm::lru_cache_populate > fbgemm::lru_cache_find_uncached": (FIND_UNCACHED, 0.2),
        "fbgemm::lru_cache_populate": (INSERT_CACHED, 0.8),
    },
    counts=(1, 4),
    rate=(8.0, 20.0),
)
"""A cache of rows on the GPU is too small: each step fetches most of its rows from the host."""

# ---- the host ---------------------------------------------------------------------------

bucketized_on_host = host_work("batch", {"fbgemm::block_bucketize_sparse_features": 1.0})
"""The host sorts each batch's indices by rank, as they were not sent to the GPU before."""

annotated_sampling = host_work("forward", {"## negative sampling ##": 1.0})
"""Negatives are sampled in Python, in a range that the program marks."""

hashing_on_host = host_work(
    "batch",
    {"aten::bitwise_xor": 0.3, "aten::__rshift__": 0.2, "aten::mul": 0.15, "aten::remainder": 0.35},
    each=(2000.0, 9000.0),
)
"""The host hashes raw categories to rows of tables."""

ipc_handles = host_work(
    "batch", {"cudaIpcOpenMemHandle": 0.7, "cudaIpcCloseMemHandle": 0.3}, each=(200.0, 900.0)
)
"""Batches come from another process as handles of memory on the GPU, opened one by one."""


def views(trace: Trace, draw: Draw, loss: float) -> str:
    """Python goes through the rows of a tensor: a view each, and no work for the GPU."""
    each = draw.uniform(7.0, 12.0)
    count = max(int(loss / each), 8)
    names = ("aten::unbind", "aten::select", "aten::as_strided")
    for points in visits(trace, "forward"):
        host = []
        for number in range(count):
            host += nested(trace, " > ".join(names[1:]), number * each + 1.0, each - 2.0)
        whole = nested(trace, names[0], 0.0, count * each + 1.0)
        trace.insert(Insertion(draw.choice(points), count * each + 2.0, [*whole, *host]))
    return f"{count} views of rows per step, {loss / 1e3:.1f} ms in all"


def conditions(trace: Trace, draw: Draw, loss: float) -> str:
    """``if (loss > limit):`` in each layer: the host waits for a value of the GPU's."""
    count = min(max(int(loss / 60.0), 4), 2500)
    for points in visits(trace, "forward"):
        for _ in range(count):
            add_readback(trace, draw.choice(points), "aten::is_nonzero")
    return f"{count} conditions on tensors per step"


def per_field_layers(trace: Trace, draw: Draw, loss: float) -> str:
    """Each field has a small layer of its own: thousands of tiny matrix products."""
    each = draw.uniform(9.0, 15.0)
    count = max(int(loss / each), 10)
    for points in visits(trace, "forward"):
        add_tiny_kernels(trace, draw.choice(points), count, each, ["aten::addmm"], SMALL_PRODUCT)
    return f"{count} tiny products per step, {loss / 1e3:.1f} ms in all"


# ---- copies, trials and ranks -----------------------------------------------------------


def reduced_tables(trace: Trace, draw: Draw, loss: float) -> str:
    """Small tables are copied to each rank: their dense gradients are summed over ranks."""
    count = draw.choice([1, 4])
    for points in visits(trace, "optimizer"):
        for _ in range(count):
            names = "nccl:all_reduce > c10d::allreduce_"
            add_collective(trace, points[0], "AllReduce", names, loss / count)
    return f"{count} all-reduces of tables per step, {loss / 1e3:.1f} ms in all"


def waited_copies(trace: Trace, draw: Draw, loss: float) -> str:
    """Batches are copied from pinned memory, but without ``non_blocking``: the host waits."""
    count, rate = draw.choice([2, 8]), draw.uniform(10.0, 24.0)
    for points in visits(trace, "batch"):
        for _ in range(count):
            number, length = trace.new_id(), loss / count
            copied = trace.gpu_work("memcpy", "Memcpy HtoD (Pinned -> Device)", number)
            copied["args"] |= {"bytes": int(length * rate * 1e3), "memory bandwidth (GB/s)": rate}
            names = "aten::to > aten::_to_copy > aten::copy_"
            host = nested(trace, names, 0.0, OPEN_ENDED)
            host.append((6.0, 9.0, trace.runtime_call("cudaMemcpyAsync", number)))
            host.append((17.0, OPEN_ENDED, trace.runtime_call("cudaStreamSynchronize")))
            work = [(6.0, length, copied)]
            trace.insert(Insertion(points[0], 26.0, host, work, drains=True))
    return f"the host waits for {count} pinned copies per step at {rate:.1f} GB/s"


def autotuning(trace: Trace, draw: Draw, loss: float) -> str:
    """Each batch has a shape of its own, for which Triton times all variants of a kernel."""
    variants, flush = draw.choice([4, 9]), draw.uniform(120.0, 200.0)
    for points in visits(trace, "forward"):
        at, turns = points[0], max(round(loss / (1.6 * flush)), 1)
        device: list[tuple[float, float, Event]] = []
        host: list[tuple[float, float, Event]] = []
        for turn in range(turns):
            cleared, run = trace.new_id(), trace.new_id()
            memset = trace.gpu_work("memset", "Memset (Device)", cleared)
            memset["args"] |= {"bytes": 256 * 2**20}
            kernel = MATMUL.format(turn * variants // turns)
            begins = 30.0 * turn
            host += nested(trace, "aten::zero_", begins, 14.0)
            host.append((begins + 3.0, 8.0, trace.runtime_call("cudaMemsetAsync", cleared)))
            launch = numbered(trace.runtime_call("cudaLaunchKernel"), run)
            host.append((begins + 16.0, 8.0, launch | {"name": "cuLaunchKernel"}))
            device.append((begins + 3.0, flush, memset))
            device.append((begins + 16.0, 0.6 * flush, trace.gpu_work("kernel", kernel, run)))
        synchronised = trace.runtime_call("cudaDeviceSynchronize")
        host.append((30.0 * turns, OPEN_ENDED, synchronised))
        trace.insert(Insertion(at, 30.0 * turns + 9.0, host, device, drains=True))
    return f"{variants} variants of a kernel are timed in each step for {loss / 1e3:.1f} ms"


def allocating_rank(trace: Trace, launched: float, loss: float) -> None:
    """One rank runs out of cached memory before a collective: it frees and takes anew."""
    at = [at for at in trace.points(0) if at < launched][-1]
    for name, share in (("cudaFree", 0.6), ("cudaMalloc", 0.4)):
        host = nested(trace, f"aten::empty > {name}", 0.5, share * loss - 1.0)
        trace.insert(Insertion(at, share * loss, host))


# ---- kinds and answers ------------------------------------------------------------------

FAULTS = {
    "permuted_features": answer(
        permuted_features, "rank5*8 meta rank0", r"{kernel}|[Pp]ermut", OF_WORK
    ),
    "eigen_preconditioner": answer(
        eigen_preconditioner, "rank0 resnet rank5*8", r"{kernel}|eigh\b|linalg|[Ee]igen", OF_WORK
    ),
    "loss_scaling": answer(
        loss_scaling,
        "rank5*8 meta rank0",
        r"{kernel}|_amp_|[Uu]nscale|non_finite|[Ll]oss.scal|GradScaler",
        OF_WORK,
    ),
    "table_penalty": answer(
        table_penalty,
        "rank0 meta rank5*8",
        r"{kernel}|aten::(pow|sum|mul)\b|pow_tensor|PowBackward|penalt",
        OF_WORK,
    ),
    "coalesced_gradients": answer(
        coalesced_gradients, "rank5*8 meta", r"{kernel}|aten::_?coalesce|coalesceValues", OF_WORK
    ),
    "hard_negatives": answer(
        hard_negatives, "rank0 meta rank5*8", r"{kernel}|topk|TopK|radixFindKth", OF_WORK
    ),
    "dropout": answer(dropout, "rank0 meta rank5*8 resnet", r"{kernel}|[Dd]ropout", OF_WORK),
    "cache_populate": answer(
        cache_populate, "rank5*8 meta rank0", r"{kernel}|lru_cache|cache_(populate|insert)", OF_WORK
    ),
    "bucketized_on_host": answer(bucketized_on_host, "rank0 meta rank5*8 graphs", r"[Bb]ucketi"),
    "annotated_sampling": answer(annotated_sampling, "rank5*8 resnet bert*8", r"negative.sampling"),
    "hashing_on_host": answer(
        hashing_on_host, "bert meta rank0 resnet", r"remainder|bitwise|rshift|[Hh]ash"
    ),
    "ipc_handles": answer(ipc_handles, "rank0 resnet rank5*8 bert", r"cudaIpc|\bIPC\b"),
    "views": answer(
        views, "rank5*8 resnet rank0 bert", r"aten::(unbind|select|as_strided)|\bviews?\b"
    ),
    "conditions": sealed(
        conditions,
        ("rank5*8", "bert", "rank0"),
        ((r"synchron|readback|read back|\.item", ""), (".", r"is_nonzero")),
    ),
    "per_field_layers": sealed(
        per_field_layers,
        ("rank0", "bert", "rank5*8"),
        ((r"launch|tiny|small|idle", r"addmm|[Ll]inear|gemm|[Mm]atrix product"),),
        unless=r"synchron|cop(y|ies)\b|communicat|small_batch",
    ),
    "reduced_tables": answer(
        reduced_tables, "rank0 meta rank5*8 graphs", r"[Aa]ll_?-?[Rr]educe", "launch_bound"
    ),
    "waited_copies": sealed(
        waited_copies,
        ("rank0", "meta", "bert*8", "resnet"),
        ((r"cop(y|ies)\b|transfer", ""), (r"synchron", r"Memcpy|aten::copy_|\bcop(y|ies)\b|HtoD")),
        unless="pageable",
    ),
    "autotuning": answer(
        autotuning, "rank5*8 meta bert*8", r"triton|[Aa]utotun|[Mm]emset|[Mm]emory set", OF_WORK
    ),
    "allocating_rank": sealed(
        lambda *_: "",
        ("archive",),
        ((r"rank|imbalance|uneven|straggl|alloc", "{rank}"),),
        delay=allocating_rank,
    ),
    "slow_mlp": answer(
        slower("apply_mlp"),
        "h100-host h100-pc cpu-python",
        r"mlp|MLP|[Ll]inear|addmm|gemm",
        OF_WORK,
    ),
}

# ---- edits that change nothing that matters ---------------------------------------------


def other_device(trace: Trace, draw: Draw) -> Trace:
    """The GPU has another number in its machine."""
    pids = {trace.events[row]["pid"] for row in trace.device}
    own, new = next(iter(pids)), draw.randrange(8, 16)

    def edit(event: Event) -> Event:
        args = event.get("args") or {}
        changed = event | ({"pid": type(own)(new)} if event.get("pid") == own else {})
        if "device" in args:
            changed["args"] = args | {"device": type(args["device"])(new)}
        return changed

    changed = edited(trace, edit)
    if "deviceProperties" in changed.document:
        changed.document["deviceProperties"] = [
            each | ({"id": new} if str(each.get("id")) == str(own) else {})
            for each in changed.document["deviceProperties"]
        ]
    return changed


def background_range(trace: Trace, draw: Draw) -> Trace:
    """Another thread marks all its life as one range."""
    first, last = trace.steps[0][0], trace.steps[-1][1]
    mark = trace.events[trace.marks[0]]
    thread = 92_000_000 + draw.randrange(1000)
    made: Event = {"ph": "X", "cat": mark["cat"], "name": "metrics server"}
    made |= {"pid": trace.thread[0], "tid": thread, "args": {}}
    made |= {"ts": round(trace.base + first - 2.0, 3), "dur": round(last - first + 4.0, 3)}
    return Trace(trace.document | {"traceEvents": [*trace.events, made]})


def newer_launches(trace: Trace, draw: Draw) -> Trace:
    """Kernels are launched by the call that newer versions of CUDA have for it."""
    names = {"cudaLaunchKernel": "cudaLaunchKernelExC", "cuLaunchKernel": "cuLaunchKernelEx"}
    return edited(trace, lambda event: event | {"name": names.get(event["name"], event["name"])})


def gpu_marks(trace: Trace, draw: Draw) -> Trace:
    """Iterations are marked on the GPU too, from their first work to their last."""
    if any(event.get("cat") == "gpu_user_annotation" for event in trace.events):
        return trace
    mark, made = trace.events[trace.marks[0]], []
    for step, row in enumerate(trace.marks):
        rows = trace.launched_in(step)
        main = [row for row in rows if trace.events[row]["tid"] == trace._main_stream["tid"]]
        start = min(float(trace.start[row]) for row in main)
        end = max(float(trace.start[row] + trace.length[row]) for row in main)
        event = {"ph": "X", "cat": "gpu_user_annotation", "name": trace.events[row]["name"]}
        event |= {"pid": trace._main_stream["pid"], "tid": trace._main_stream["tid"]}
        event |= {"ts": round(trace.base + start, 3), "dur": round(end - start, 3)}
        made.append(event | {"args": dict(mark.get("args") or {})})
    return Trace(trace.document | {"traceEvents": [*trace.events, *made]})


CLEAN: dict[str, Callable[[Trace, Draw], Trace]] = {
    "other_device": other_device,
    "background_range": background_range,
    "newer_launches": newer_launches,
    "gpu_marks": gpu_marks,
}
