"""Triton kernels of the dot interaction: products of pairs, forward and backward, one launch each.

Shapes: B samples, F = T + 1 features of width d (DIM), P pairs. Feature 0 is the bottom
MLP's output, the others are pooled vectors.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# the type checker sees untyped decorators: triton's parameters are told by the call
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _features(
    x,
    pooled,
    sample,
    x_stride,
    table_stride,
    bag_stride,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The features of one sample (ROWS, WIDTH) in x's type, zeros beyond FEATURES and DIM."""
    feature, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    first = tl.load(x + sample * x_stride + column, mask=column < DIM, other=0.0)
    at = (feature - 1).to(tl.int64) * table_stride + sample * bag_stride
    wanted = ((feature > 0) & (feature < FEATURES))[:, None] & (column < DIM)[None, :]
    others = tl.load(pooled + at[:, None] + column[None, :], mask=wanted, other=0.0)
    return tl.where((feature == 0)[:, None], first[None, :], others.to(x.dtype.element_ty))


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    """a @ b in fp32 sums. Triton's interpreter takes bf16 for whole numbers, so it widens."""
    if PRECISION == "interpreted":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def dot_forward(
    x,
    pooled,
    z,
    x_stride,
    table_stride,
    bag_stride,
    z_stride,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ITSELF: tl.constexpr,
    PRECISION: tl.constexpr,
    USED: tl.constexpr,
    ROOM: tl.constexpr,
):
    """z (B, DIM + P): x, and beside it the lower triangle of the features' products.

    Rows lie ROOM numbers apart, USED = DIM + P of them in use, at most 7 zeros beyond.

    A program makes one sample; its features are read once and their products never
    leave the registers but for the pairs that are wanted.
    """
    sample = tl.program_id(0).to(tl.int64)
    features = _features(
        x, pooled, sample, x_stride, table_stride, bag_stride, FEATURES, ROWS, DIM, WIDTH
    )
    products = _product(features, tl.trans(features), PRECISION)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    if ITSELF:
        pair, wanted = row * (row + 1) // 2 + column, column <= row
    else:
        pair, wanted = row * (row - 1) // 2 + column, column < row
    into = z + sample * z_stride
    products = products.to(z.dtype.element_ty)
    tl.store(into + DIM + pair, products, mask=wanted & (row < FEATURES))
    at = tl.arange(0, WIDTH)
    kept = tl.load(x + sample * x_stride + at, mask=at < DIM, other=0.0)
    tl.store(into + at, kept, mask=at < DIM)
    beyond = USED + tl.arange(0, 8)
    tl.store(into + beyond, tl.zeros([8], tl.float32).to(z.dtype.element_ty), beyond < ROOM)


@triton.jit
def dot_backward(
    x,
    pooled,
    gradient,
    x_gradient,
    pooled_gradient,
    x_stride,
    table_stride,
    bag_stride,
    gradient_stride,
    bags,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ITSELF: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of x (B, DIM) and of the pooled vectors (T, B, DIM), from z's.

    With G the pairs' gradients at their place in (F, F) it is (G + G^T) F; both triangles
    are read from the same pairs.
    """
    sample = tl.program_id(0).to(tl.int64)
    features = _features(
        x, pooled, sample, x_stride, table_stride, bag_stride, FEATURES, ROWS, DIM, WIDTH
    )
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    high, low = tl.maximum(row, column), tl.minimum(row, column)
    if ITSELF:
        pair, wanted = high * (high + 1) // 2 + low, high < FEATURES
    else:
        pair, wanted = high * (high - 1) // 2 + low, (high < FEATURES) & (high != low)
    given = gradient + sample * gradient_stride
    placed = tl.load(given + DIM + pair, mask=wanted, other=0.0)
    if ITSELF:
        # G and G^T meet on the diagonal
        whole = placed.to(tl.float32)
        placed = tl.where(row == column, whole * 2.0, whole)
    result = _product(placed.to(features.dtype), features, PRECISION)
    feature, at = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    first = tl.load(given + at, mask=at < DIM, other=0.0).to(tl.float32)
    # of feature 0: it also went straight into z
    result += tl.where((feature == 0)[:, None], first[None, :], 0.0)
    in_row = (at < DIM)[None, :]
    to_x = x_gradient + sample * DIM + feature[:, None] * 0 + at[None, :]
    tl.store(to_x, result.to(x_gradient.dtype.element_ty), (feature == 0)[:, None] & in_row)
    place = ((feature - 1).to(tl.int64) * bags + sample) * DIM
    others = ((feature > 0) & (feature < FEATURES))[:, None] & in_row
    to_pooled = pooled_gradient + place[:, None] + at[None, :]
    tl.store(to_pooled, result.to(pooled_gradient.dtype.element_ty), others)
