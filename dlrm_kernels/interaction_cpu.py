"""The dot interaction by vector instructions, for a CPU with AVX-512 and without matrix tiles.

The plain one (:class:`dlrm_core.interactions.DotInteraction`) is its oracle. That writes all
features side by side in x's type, all their products and then the chosen ones; here a sample's
features and products stay in the core's first cache. Features, products and sums are float32
whatever the type of x, so that pooled vectors are not rounded.

With X (F, d) a sample's features and G the gradient of the lower triangle of X X', backward
computes G X + G' X. A block of both products is four features high.

Shapes: B samples, T tables, d embedding width (a multiple of 16), F = T + 1 features, H = F
rounded up to a multiple of 4, W = F rounded up to a multiple of 16.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# the type checker sees untyped decorators: numba has no stubs
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from dlrm_core.base.machine import cpu_flags
from dlrm_core.interactions import DotInteraction
from dlrm_kernels import vectors as v
from dlrm_kernels.native import compile_kernel

HIGH = 4
"""Features in a block."""

SAMPLES_AHEAD = 2
"""Samples between the fetching of a row and its use."""

SAMPLES = 32
"""Samples in a unit of work."""

# Fields of a job, behind those that every job has.
(
    SIZE,  # B
    DIM,  # d
    COUNT,  # F
    DIAGONAL,  # 1: each feature's product with itself is wanted; 0: not
    NARROW,  # 1: x, z and their gradients are bf16; 0: float32
    FEATURES,  # addresses of the features, x first
    STRIDES,  # bytes from one sample to the next, of each
    GRADIENTS,  # addresses of their gradients
    GRADIENT_STRIDES,  # bytes from one sample to the next, of each
    Z,  # address of z, or of its gradient
    Z_STRIDE,  # bytes from one sample to the next
    SCRATCH,  # memory of the first thread: X (H, d), the gradient of X (H, d), a square (H, W)
    SCRATCH_BYTES,  # size of a thread's
    FIELDS,
) = range(3, 17)

_QUARTER = ir.VectorType(v.F32, HIGH)


def _places(numbers: Sequence[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(v.I32, len(numbers)), list(numbers))


def _multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, sums: ir.Value) -> None:
    """Add a b to the vector that the address ``sums`` holds, rounding once."""
    builder.store(v.call(builder, f"fma.v{v.LANES}f32", v.FLOATS, a, b, builder.load(sums)), sums)


def _sums(builder: ir.IRBuilder, number: int) -> list[ir.Value]:
    """Make so many vectors of zeros, which the optimiser keeps in registers."""
    places = [cgutils.alloca_once(builder, v.FLOATS) for _ in range(number)]
    for place in places:
        builder.store(ir.Constant(v.FLOATS, [0.0] * v.LANES), place)
    return places


@v.instruction(types.void(*[types.int64] * 6))
def multiply_four(builder, left, right, row_bytes, chunks, target, target_bytes):
    """Products of 4 rows with 4 rows of ``chunks`` times 16 float32, as rows of 4 float32."""
    sums = _sums(builder, HIGH * HIGH)
    with cgutils.for_range(builder, chunks) as loop:
        ahead = builder.mul(loop.index, v.I64(4 * v.LANES))
        a, b = (
            [_row(builder, builder.add(start, ahead), row_bytes, row) for row in range(HIGH)]
            for start in (left, right)
        )
        for place, total in enumerate(sums):
            _multiply_add(builder, a[place // HIGH], b[place % HIGH], total)
    # neighbours are added up four times: lane i holds the sum of vector i in the end
    vectors = [builder.load(total) for total in sums]
    even, odd = _places(range(0, 2 * v.LANES, 2)), _places(range(1, 2 * v.LANES, 2))
    while len(vectors) > 1:
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    for row in range(HIGH):
        four = _places(range(HIGH * row, HIGH * (row + 1)))
        quarter = builder.shuffle_vector(vectors[0], vectors[0], four)
        place = builder.add(target, builder.mul(target_bytes, v.I64(row)))
        builder.store(quarter, v.pointer_to(builder, place, _QUARTER), align=4)


def _row(builder: ir.IRBuilder, start: ir.Value, row_bytes: ir.Value, row: int) -> ir.Value:
    place = builder.add(start, builder.mul(row_bytes, v.I64(row)))
    return builder.load(v.pointer_to(builder, place, v.FLOATS), align=4)


def _weighing(width: int) -> Any:
    @v.instruction(types.void(*[types.int64] * 7))
    def weigh(builder, lower, square_bytes, first, count, rows, row_bytes, target):
        """Rows ``first`` to ``first`` + 3 of G X + G' X, ``width`` times 16 columns of them.

        ``lower`` is G (H, W), ``rows`` the first of the columns in X, ``target`` their place
        in the result, whose rows lie as those of X do.
        """
        sums, one = _sums(builder, HIGH * width), v.I64(4)
        block_rows = builder.add(lower, builder.mul(first, square_bytes))
        block_columns = builder.add(lower, builder.mul(first, one))
        beyond = builder.add(first, v.I64(HIGH))
        end = builder.select(builder.icmp_signed("<", beyond, count), beyond, count)
        # G holds zeros beside and above its triangle
        for weights, down, along, begin, stop in (
            (block_rows, square_bytes, one, v.I64(0), end),
            (block_columns, one, square_bytes, first, count),
        ):
            with cgutils.for_range_slice(builder, begin, stop, v.I64(1)) as (other, _):
                start = builder.add(rows, builder.mul(other, row_bytes))
                vectors = [_row(builder, start, v.I64(4 * v.LANES), i) for i in range(width)]
                at = builder.add(weights, builder.mul(other, along))
                for row in range(HIGH):
                    place = builder.add(at, builder.mul(down, v.I64(row)))
                    number = builder.load(v.pointer_to(builder, place, v.F32), align=4)
                    weight = v.spread(builder, number, v.FLOATS)
                    for vector, total in zip(
                        vectors, sums[width * row : width * (row + 1)], strict=True
                    ):
                        _multiply_add(builder, weight, vector, total)
        for number, total in enumerate(sums):
            row, vector = divmod(number, width)
            place = builder.add(target, builder.mul(row_bytes, builder.add(first, v.I64(row))))
            place = builder.add(place, v.I64(4 * v.LANES * vector))
            builder.store(builder.load(total), v.pointer_to(builder, place, v.FLOATS), align=4)

    return weigh


weigh_64, weigh_16 = _weighing(4), _weighing(1)
"""Instructions: 64, 16 columns of the features' gradients."""


@v.compiled
def load_numbers(address, count, narrow):
    """The first ``count`` of sixteen numbers, zeros behind them."""
    if narrow == 1:
        return v.from_bf16(v.load_first_shorts(address, count))
    return v.load_first(address, count)


@v.compiled
def store_numbers(address, value, count, narrow):
    """The first ``count`` of sixteen numbers, bf16 to nearest."""
    if narrow == 1:
        v.store_first_shorts(address, v.nearest_bf16(value), count)
    else:
        v.store_first(address, value, count)


@v.compiled
def number_bytes(job):
    return 4 - 2 * v.field(job, NARROW)


@v.compiled
def place_of(job, addresses, strides, feature, sample):
    """Return the address of a sample's feature, or of its gradient."""
    stride = v.item(v.field(job, strides), feature)
    return v.item(v.field(job, addresses), feature) + sample * stride


@v.compiled
def thread_scratch(job):
    """This thread's X, the gradient of X, and the square, which begins as zeros."""
    features = v.field(job, SCRATCH) + v.enter(job) * v.field(job, SCRATCH_BYTES)
    high = (v.field(job, COUNT) + HIGH - 1) // HIGH * HIGH
    size = 4 * high * v.field(job, DIM)
    for line in range(features, features + v.field(job, SCRATCH_BYTES), 64):
        v.store_vector(line, v.zeros())
    return features, features + size, features + 2 * size


@v.compiled
def gather(job, sample, features):
    """Write a sample's X."""
    dim, narrow = v.field(job, DIM), v.field(job, NARROW)
    first = place_of(job, FEATURES, STRIDES, 0, sample)
    for column in range(0, dim, v.LANES):
        value = load_numbers(first + number_bytes(job) * column, v.LANES, narrow)
        v.store_vector(features + 4 * column, value)
    ahead = SAMPLES_AHEAD if sample + SAMPLES_AHEAD < v.field(job, SIZE) else 0
    for feature in range(1, v.field(job, COUNT)):
        source = place_of(job, FEATURES, STRIDES, feature, sample)
        target = features + 4 * dim * feature
        v.warm(source + ahead * v.item(v.field(job, STRIDES), feature), 4 * dim, 64)
        for column in range(0, dim, v.LANES):
            v.store_vector(target + 4 * column, v.load_vector(source + 4 * column))


@v.compiled
def square_bytes(job):
    return (v.field(job, COUNT) + v.LANES - 1) // v.LANES * v.LANES * 4


def dot_forward(job):
    """Write z (B, d + pairs) from the features."""
    features, _, square = thread_scratch(job)
    dim, count, narrow = v.field(job, DIM), v.field(job, COUNT), v.field(job, NARROW)
    row_bytes, wide = 4 * dim, square_bytes(job)
    while True:
        unit = v.take_unit(job)
        if unit >= v.field(job, v.UNITS):
            break
        for sample in range(unit * SAMPLES, min(v.field(job, SIZE), (unit + 1) * SAMPLES)):
            gather(job, sample, features)
            for row in range(0, count, HIGH):
                left = features + row * row_bytes
                for column in range(0, row + HIGH, HIGH):
                    target = square + row * wide + 4 * column
                    right = features + column * row_bytes
                    multiply_four(left, right, row_bytes, dim // v.LANES, target, wide)
            z = v.field(job, Z) + sample * v.field(job, Z_STRIDE)
            for column in range(0, dim, v.LANES):
                store_numbers(z, v.load_vector(features + 4 * column), v.LANES, narrow)
                z += v.LANES * number_bytes(job)
            for row in range(count):
                pairs = row + v.field(job, DIAGONAL)
                for column in range(0, pairs, v.LANES):
                    value = v.load_vector(square + row * wide + 4 * column)
                    place = z + column * number_bytes(job)
                    store_numbers(place, value, min(v.LANES, pairs - column), narrow)
                z += pairs * number_bytes(job)


def dot_backward(job):
    """Write the gradients of the features from that of z."""
    features, gradients, square = thread_scratch(job)
    dim, count, narrow = v.field(job, DIM), v.field(job, COUNT), v.field(job, NARROW)
    row_bytes, wide = 4 * dim, square_bytes(job)
    while True:
        unit = v.take_unit(job)
        if unit >= v.field(job, v.UNITS):
            break
        for sample in range(unit * SAMPLES, min(v.field(job, SIZE), (unit + 1) * SAMPLES)):
            gather(job, sample, features)
            given = v.field(job, Z) + sample * v.field(job, Z_STRIDE)
            place = given + dim * number_bytes(job)
            for row in range(count):
                pairs = row + v.field(job, DIAGONAL)
                for column in range(0, pairs, v.LANES):
                    here = place + column * number_bytes(job)
                    value = load_numbers(here, min(v.LANES, pairs - column), narrow)
                    v.store_vector(square + row * wide + 4 * column, value)
                place += pairs * number_bytes(job)
            for row in range(0, count, HIGH):
                column = 0
                while column + 64 <= dim:
                    source, target = features + 4 * column, gradients + 4 * column
                    weigh_64(square, wide, row, count, source, row_bytes, target)
                    column += 64
                while column < dim:
                    source, target = features + 4 * column, gradients + 4 * column
                    weigh_16(square, wide, row, count, source, row_bytes, target)
                    column += v.LANES
            first = place_of(job, GRADIENTS, GRADIENT_STRIDES, 0, sample)
            for column in range(0, dim, v.LANES):
                # x also went straight into z
                straight = load_numbers(given + number_bytes(job) * column, v.LANES, narrow)
                value = v.add(v.load_vector(gradients + 4 * column), straight)
                store_numbers(first + number_bytes(job) * column, value, v.LANES, narrow)
            for feature in range(1, count):
                target = place_of(job, GRADIENTS, GRADIENT_STRIDES, feature, sample)
                source = gradients + row_bytes * feature
                for column in range(0, dim, v.LANES):
                    v.store_vector(target + 4 * column, v.load_vector(source + 4 * column))


def why_not(dim: int, precision: str) -> str:
    """Why the kernels cannot be used; empty if they can."""
    missing = {"avx512f", "avx512bw", "avx512vl"} - cpu_flags()
    if missing:
        return f"this CPU has no {', '.join(sorted(missing))}"
    if dim % v.LANES:
        return f"embeddings of width {dim}, the kernels take multiples of {v.LANES}"
    if precision not in ("fp32", "bf16"):
        return f"the kernels compute in fp32 or bf16, not {precision}"
    return ""


def compile_all() -> list[str]:
    """Compile both kernels now, not in the first step; notices (an unwritable cache)."""
    return sorted({compile_kernel(kernel)[1] for kernel in (dot_forward, dot_backward)} - {""})


def vectorised(interaction: DotInteraction) -> Callable[..., torch.Tensor]:
    """Make a function that takes the place of an interaction that :func:`why_not` allows.

    It takes x (B, d) float32 or bf16 and T pooled vectors (B, d) float32, and returns
    (B, d + pairs) in x's type.
    """

    def interact(x: torch.Tensor, pooled: Sequence[torch.Tensor]) -> torch.Tensor:
        return _Dot.apply(interaction.interaction_itself, x, *pooled)

    return interact


class _Dot(torch.autograd.Function):
    """The kernels as a node of torch's graph."""

    @staticmethod
    def forward(ctx: Any, itself: bool, *features: torch.Tensor) -> torch.Tensor:
        features = tuple(map(_with_rows, features))
        ctx.itself = itself
        ctx.save_for_backward(*features)
        x, count = features[0], len(features)
        pairs = count * (count + (1 if itself else -1)) // 2
        z = x.new_empty(x.shape[0], x.shape[1] + pairs)
        _run(dot_forward, features, itself, z)
        return z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        features = ctx.saved_tensors
        pooled = torch.empty(len(features) - 1, *features[0].shape).unbind()
        results = (torch.empty_like(features[0]), *pooled)
        _run(dot_backward, features, ctx.itself, _with_rows(gradients[0]), results)
        return None, *results


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same (B, n) with a row's numbers side by side."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _run(
    kernel: Callable[[int], None],
    features: Sequence[torch.Tensor],
    itself: bool,
    z: torch.Tensor,
    gradients: Sequence[torch.Tensor] = (),
) -> None:
    """Run a kernel on torch's threads."""
    (size, dim), count = features[0].shape, len(features)
    assert {vector.dtype for vector in features[1:]} <= {torch.float32}
    assert z.dtype == features[0].dtype and z.dtype in (torch.float32, torch.bfloat16)
    units = -(-size // SAMPLES)
    threads = max(1, min(torch.get_num_threads(), units))
    high, wide = -(-count // HIGH) * HIGH, -(-count // v.LANES) * v.LANES
    own = 4 * high * (2 * dim + wide)
    scratch = np.empty(threads * own + 64, np.int8)
    job = v.Job(FIELDS)
    job.fields[[SIZE, DIM, COUNT]] = size, dim, count
    job.fields[[DIAGONAL, NARROW]] = itself, z.dtype == torch.bfloat16
    job.set_rows(FEATURES, STRIDES, features)
    job.set_rows(GRADIENTS, GRADIENT_STRIDES, gradients)
    job.fields[[Z, Z_STRIDE]] = z.data_ptr(), z.element_size() * z.stride(0)
    # a vector that crosses a cache line takes two loads
    job.fields[[SCRATCH, SCRATCH_BYTES]] = -(-scratch.ctypes.data // 64) * 64, own
    job.run(kernel, units, threads)
