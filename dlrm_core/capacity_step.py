"""What is alive while the dense part of a step runs: activations and their gradients.

The step (:mod:`dlrm_core.dense`) is followed part by part with the sizes of its tensors,
as autograd keeps and frees them, up to the moment at which most is alive.

Shapes: M rows at a time, widths b_0..b_k of the bottom MLP and t_0..t_m of the top MLP,
F = T + 1 features of width d that interact, n bytes of a number.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_core.config import Parameters

NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""``training.precision`` to the bytes of an activation."""


@dataclass(frozen=True)
class DensePeak:
    """Bytes alive at the highest point of the dense part.

    Attributes:
        activations: what forward has left for backward.
        gradients: gradients of activations, and an operator's temporaries.
        where: the part and phase in which that is.
    """

    activations: int
    gradients: int
    where: str


def dense_peak(parameters: Parameters, gpu: bool = False) -> DensePeak:
    """The highest point of the dense part's forward and backward pass.

    Not counted: pooled vectors and their gradients, weights' gradients and the batch,
    which live longer than the dense part runs. With ``training.compile`` a part keeps no
    more than this.
    """
    model, training = parameters.model, parameters.training
    rows = min(training.batch_size, training.micro_batch or training.batch_size)
    if training.dense_backend == "fused" and not gpu:
        # here, since what it imports imports this
        import torch

        from dlrm_core.dense_fused import parts_of, why_not_fused

        if not why_not_fused(training, torch.device("cpu")):
            return fused_peak(parameters, rows, parts_of(training))
    n = NUMBER_BYTES[training.precision]
    bottom, top = model.bottom_widths, model.top_widths
    dim, features = model.embedding_dim, len(model.table_rows) + 1
    # autocast saves the input that it has cast; in fp32 it is the batch's own tensor
    bottom_kept = sum(bottom[1:]) + (bottom[0] if n < 4 else 0)
    wide = features * dim
    pairs = model.interaction_width - dim if model.interaction == "dot" else 0
    square = features * features if model.interaction == "dot" else 0
    z = model.interaction_width
    # concatenation is its own result
    kept = wide if model.interaction == "dot" else 0

    # a CPU widens what it gathers from 2-byte numbers
    half = (square + pairs) * (4 // n) if n < 4 and not gpu else 0
    moments = [
        DensePeak(bottom_kept + kept + z, square + pairs + half, "interaction forward"),
        *(
            DensePeak(bottom_kept + kept + z + acts, gradients, "top MLP backward")
            for acts, gradients in _mlp_backward(top)
        ),
        DensePeak(
            bottom_kept + kept + z,
            z + (pairs + 1) + square + wide + half if square else z + wide,
            "interaction backward",
        ),
        *(
            DensePeak(acts + z, gradients + z, "bottom MLP backward")
            for acts, gradients in _mlp_backward(bottom)
        ),
    ]
    peak = max(moments, key=lambda moment: moment.activations + moment.gradients)
    return DensePeak(rows * n * peak.activations, rows * n * peak.gradients, peak.where)


def fused_peak(parameters: Parameters, rows: int, parts: int) -> DensePeak:
    """The buffers of the fused dense part (:mod:`dlrm_core.tiles.mlp`), which it keeps.

    Matrices are padded to 32, an entry is 2 bytes a part, and activations, gradients and
    weights are there in two forms each; the weights' count as activations here.
    """
    model = parameters.model
    activations = gradients = 0
    for widths, inputs in ((model.bottom_widths, 0), (model.top_widths, model.top_widths[0])):
        padded = [_padded(width) for width in widths]
        entries = _padded(rows) * (sum(padded) + sum(padded[:-1]))
        entries += 2 * sum(a * b for a, b in itertools.pairwise(padded))
        activations += 2 * parts * entries + 4 * rows * widths[-1]
        # those of two layers at a time, and in float32 that of the input
        gradients += 2 * parts * 4 * _padded(rows) * max(padded[1:]) + 4 * rows * inputs
    gradients += 4 * rows * model.embedding_dim
    return DensePeak(activations, gradients, "fused kernels")


def _padded(width: int) -> int:
    return -(-width // 32) * 32


def _mlp_backward(widths: Sequence[int]) -> list[tuple[int, int]]:
    """(activations, gradients) in numbers a row while each layer's backward runs, last first.

    A layer's output is saved once: ReLU works in place. Its gradient is made anew by ReLU's
    backward, before the output is freed.
    """
    moments = []
    for layer in range(len(widths) - 1, 0, -1):
        moments.append((sum(widths[1 : layer + 1]), 2 * widths[layer]))
        moments.append((sum(widths[1:layer]), widths[layer] + widths[layer - 1]))
    return moments
