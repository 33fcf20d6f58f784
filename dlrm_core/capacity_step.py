"""What is alive while the dense part of a step runs: activations and their gradients.

The step (:mod:`dlrm_core.dense`) is followed part by part with the sizes of its tensors,
as autograd keeps and frees them, up to the moment at which most is alive.

Shapes: M rows at a time, widths b_0..b_k of the bottom MLP and t_0..t_m of the top MLP,
F = T + 1 features of width d that interact, n bytes of a number.
"""

from __future__ import annotations

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
