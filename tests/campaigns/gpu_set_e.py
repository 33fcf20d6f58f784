"""Set E of faults: known. Its kinds are those that the author of the rules thought of himself.

Each is a fault that training programs have in practice and that no other set plants. Rules were
changed with these kinds in sight, so the set shows that they are still named, and nothing about
faults that nobody had in mind.
"""

from __future__ import annotations

from functools import partial

from gpu_kinds import (
    DLRM,
    OPEN_ENDED,
    Draw,
    Fault,
    add_kernel,
    each_step,
    numbered,
)
from trace_edits import Insertion, Trace

COPY = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::"
    "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::"
    "{lambda()#7}::operator()() const::{lambda(float)#1}>(at::TensorIteratorBase&, at::native::"
    "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::"
    "{lambda()#7}::operator()() const::{lambda(float)#1} const&)::{lambda(int)#1}>(int, "
    "at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda("
    "at::TensorIteratorBase&)::{lambda()#3}>)"
)
POINTWISE = {
    "aten::mul": "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::"
    "MulFunctor<float> >",
    "aten::add": "at::native::CUDAFunctor_add<float>",
    "aten::tanh": "at::native::tanh_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}",
    "aten::pow": "at::native::(anonymous namespace)::pow_tensor_scalar_kernel_impl<float, float>",
    "aten::div": "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::"
    "DivFunctor<float> >",
    "aten::where": "at::native::where_kernel_impl(at::TensorIterator&)::{lambda(bool, float, "
    "float)#1}",
    "aten::exp": "at::native::exp_kernel_cuda(at::TensorIteratorBase&)::{lambda(float)#1}",
    "aten::clamp": "at::native::clamp_kernel_impl(at::TensorIteratorBase&)::{lambda(float)#1}",
}
SEARCHED = (
    "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(cudnn::ops::"
    "nchw2nhwc_params_t<float>, float const*, float*)",
    "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int)",
    "void fft2d_r2c_32x32<float, false, 1u, false>(float2*, float const*, int, int, int)",
    "volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
    "volta_scudnn_128x64_relu_interior_nn_v1",
    "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(int)",
)


def blocking_launches(trace: Trace, draw: Draw, loss: float) -> str:
    """CUDA_LAUNCH_BLOCKING=1: each launch returns when its kernel has ended."""
    calls = [
        trace.call[trace.events[row]["args"]["correlation"]]
        for step in range(len(trace.steps))
        for row in trace.launched_in(step)
    ]
    calls = [row for row in calls if "Launch" in trace.events[row]["name"]]
    each = loss * len(trace.steps) / len(calls)
    for row in sorted(set(calls), key=lambda row: trace.start[row]):
        at = float(trace.start[row] + 0.9 * trace.length[row])
        trace.insert(Insertion(at, max(0.2 * each, 1.0), drains=True))
    return f"each of {len(calls)} launches waits for its kernel"


def synchronised(trace: Trace, draw: Draw, loss: float) -> str:
    """torch.cuda.synchronize() after operators, to time them."""
    count = max(int(loss / 40.0), 8)
    for points in each_step(trace):
        for at in sorted(draw.choice(points) for _ in range(count)):
            host = [(1.0, OPEN_ENDED, trace.runtime_call("cudaDeviceSynchronize"))]
            trace.insert(Insertion(at, 25.0, host, drains=True))
    return f"torch.cuda.synchronize() {count} times per step"


def layout_copies(trace: Trace, draw: Draw, loss: float) -> str:
    """Transposed views are made contiguous again and again."""
    count = draw.choice([10, 40])
    for points in each_step(trace):
        for _ in range(count):
            names = ["aten::contiguous", "aten::clone", "aten::copy_"]
            add_kernel(trace, draw.choice(points), names, COPY, loss / count)
    return f"{count} copies to another layout per step, {loss / 1e3:.1f} ms in all"


def pointwise_chain(trace: Trace, draw: Draw, loss: float) -> str:
    """An activation written by hand: dozens of pointwise operators where one would do."""
    count = draw.choice([5, 12]) * len(POINTWISE)
    for points in each_step(trace):
        for number in range(count):
            operator, functor = list(POINTWISE.items())[number % len(POINTWISE)]
            kernel = (
                f"void at::native::vectorized_elementwise_kernel<4, {functor}, at::detail::"
                f"Array<char*, 3> >(int, {functor}, at::detail::Array<char*, 3>)"
            )
            add_kernel(trace, draw.choice(points), [operator], kernel, loss / count)
    return f"{count} pointwise kernels per step, {loss / 1e3:.1f} ms in all"


def recompiled(trace: Trace, draw: Draw, loss: float) -> str:
    """A guard fails in each step, and the compiled part is compiled anew."""
    for points in each_step(trace):
        frames = trace.python("torch/_dynamo/convert_frame.py(921): _compile")
        region = trace.operator("Torch-Compiled Region: 0/1")
        host = [
            (1.0 + depth, loss - 2.0 - 2 * depth, e) for depth, e in enumerate([*frames, region])
        ]
        trace.insert(Insertion(points[0], loss, host))
    return f"compiling takes {loss / 1e3:.1f} ms in each step"


def algorithm_search(trace: Trace, draw: Draw, loss: float) -> str:
    """cudnn.benchmark with changing shapes: each step tries algorithms and times them."""
    for points in each_step(trace):
        at = draw.choice(points)
        for kernel in SEARCHED:
            names = ["aten::conv2d", "aten::convolution", "aten::cudnn_convolution"]
            for _ in range(3):
                add_kernel(trace, at, names, kernel, loss / len(SEARCHED) / 3)
                operators = [(0.1, OPEN_ENDED, trace.operator(name)) for name in names]
                call = (3.0, OPEN_ENDED, trace.runtime_call("cudaEventSynchronize"))
                trace.insert(Insertion(at, 12.0, [*operators, call], drains=True))
    return f"{3 * len(SEARCHED)} trials of algorithms per step, {loss / 1e3:.1f} ms in all"


def captured_anew(trace: Trace, draw: Draw, loss: float) -> str:
    """A CUDA graph is instantiated in each step."""
    for points in each_step(trace):
        host = [(1.0, loss - 2.0, trace.runtime_call("cudaGraphInstantiate"))]
        trace.insert(Insertion(draw.choice(points), loss, host))
    return f"cudaGraphInstantiate takes {loss / 1e3:.1f} ms per step"


def tiny_copies(trace: Trace, draw: Draw, loss: float) -> str:
    """Each of many small tensors goes to the GPU by a copy of its own."""
    each = draw.uniform(15.0, 30.0)
    count = max(int(loss / each), 26)
    for step in range(len(trace.steps)):
        at = (trace.within("copy_batch|load_batch", step) or trace.points(step))[0]
        operators = [trace.operator(name) for name in ("aten::to", "aten::_to_copy", "aten::copy_")]
        call = trace.runtime_call("cudaMemcpyAsync")
        work = trace.gpu_work("memcpy", "Memcpy HtoD (Pinned -> Device)", 0)
        work["args"] |= {"bytes": 8192, "memory bandwidth (GB/s)": 5.0}
        host, device = [], []
        for number in range(count):
            begins, own = number * each, trace.new_id()
            for depth, operator in enumerate(operators):
                length = each - 0.5 - 2 * depth
                host.append((begins + depth, length, numbered(operator, own)))
            host.append((begins + 5.0, each - 10.0, numbered(call, own)))
            device.append((begins + 6.0, 1.6, numbered(work, own)))
        trace.insert(Insertion(at, count * each, host, device))
    return f"{count} copies of 8 kB per step"


known = partial(Fault, advice_counts=False)
EVERY = ("bert*8", "rank5*8", "meta", "resnet")

FAULTS = {
    "blocking_launches": known(
        blocking_launches, EVERY, ((r"block|synchron|wait", r"[Ll]aunch|BLOCKING"),)
    ),
    "synchronised": known(synchronised, EVERY, ((r"synchron", ""),)),
    "layout_copies": known(layout_copies, EVERY, ((r"layout|cop(y|ies)", r"contiguous|clone"),)),
    "pointwise_chain": known(pointwise_chain, EVERY, ((r"pointwise|elementwise", ""),)),
    "recompiled": known(
        recompiled, EVERY, ((r"idle|compil", r"_compile|Torch-Compiled"),), unless="launch_bound"
    ),
    "algorithm_search": known(
        algorithm_search, ("resnet",), ((r"synchron|kernel", r"EventSynchronize|convolution"),)
    ),
    "captured_anew": known(
        captured_anew, EVERY, (("idle", "GraphInstantiate"),), unless="launch_bound"
    ),
    "tiny_copies": known(
        tiny_copies, (*DLRM[2:], "meta", "resnet"), ((r"cop(y|ies)", r"per (iteration|step)"),)
    ),
}
