"""Operations and bytes of the fused dense part (``training.dense_backend: fused``).

A kernel is a row. Its operands are tiles of bf16, two bytes for each of the 1 to 3 numbers
that an entry is made of; activations and gradients are written in two forms, for the two
products that read them (:mod:`dlrm_core.tiles.layout`). Operations are those of the model:
that an fp32 product takes three or six products on the tiles is its ceiling's affair.
"""

from __future__ import annotations

import itertools

from dlrm_core.analysis.work_rows import FLOAT_BYTES, Ledger
from dlrm_core.config import Parameters

PARTS = {"bf16x2": 2, "bf16x3": 3}


def is_fused(parameters: Parameters) -> bool:
    """Whether the parameters ask for the fused dense part and it can do what they ask."""
    training = parameters.training
    possible = training.precision == "bf16" or (
        training.precision == "fp32" and training.fp32_matmul in PARTS
    )
    return training.dense_backend == "fused" and possible and training.device != "cuda"


def entry_bytes(parameters: Parameters) -> int:
    """Bytes of an entry of an operand."""
    return (
        2 if parameters.training.precision == "bf16" else 2 * PARTS[parameters.training.fp32_matmul]
    )


def fused_weights(ledger: Ledger, parameters: Parameters) -> None:
    """Each weight is tiled once a step, for the forward and for the backward product."""
    element, model = entry_bytes(parameters), parameters.model
    for part, widths in (("bottom_mlp", model.bottom_widths), ("top_mlp", model.top_widths)):
        with ledger.part(part, "forward"):
            for layer, (n, m) in enumerate(itertools.pairwise(widths)):
                forms = 2 if layer > 0 or part == "top_mlp" else 1
                ledger.add("fused_pack", n * m * FLOAT_BYTES, forms * n * m * element)


def fused_forward(ledger: Ledger, parameters: Parameters, rows: int, count: int) -> None:
    """Bottom MLP, interaction, top MLP; the loss is torch's."""
    element, model = entry_bytes(parameters), parameters.model
    with ledger.part("bottom_mlp", "forward", count):
        inputs = rows * model.bottom_widths[0]
        ledger.add("fused_pack", inputs * FLOAT_BYTES, 2 * inputs * element)
        _products_forward(ledger, model.bottom_widths, rows, element)
    with ledger.part("interaction", "forward", count):
        features = rows * (len(model.table_rows) + 1) * model.embedding_dim
        ledger.add(
            "fused_interaction",
            features * FLOAT_BYTES,
            2 * rows * model.interaction_width * element,
            flops=_interaction_flops(parameters, rows),
        )
    with ledger.part("top_mlp", "forward", count):
        _products_forward(ledger, model.top_widths, rows, element)
        ledger.add("sigmoid", rows * FLOAT_BYTES, rows * FLOAT_BYTES, flops=rows)


def fused_backward(ledger: Ledger, parameters: Parameters, rows: int, count: int) -> None:
    """The same backwards; masks and bias gradients are in the products' kernels."""
    element, model = entry_bytes(parameters), parameters.model
    with ledger.part("top_mlp", "backward", count):
        ledger.add("sigmoid_backward", 2 * rows * FLOAT_BYTES, rows * FLOAT_BYTES, flops=rows)
        _products_backward(ledger, model.top_widths, rows, element, needs_input=True)
    with ledger.part("interaction", "backward", count):
        features = rows * (len(model.table_rows) + 1) * model.embedding_dim
        ledger.add(
            "fused_interaction_backward",
            (features + rows * model.interaction_width) * FLOAT_BYTES,
            features * FLOAT_BYTES,
            flops=2 * _interaction_flops(parameters, rows),
        )
    with ledger.part("bottom_mlp", "backward", count):
        _products_backward(ledger, model.bottom_widths, rows, element, needs_input=False)


def _interaction_flops(parameters: Parameters, rows: int) -> float:
    model = parameters.model
    if model.interaction == "cat":
        return 0.0
    return 2.0 * rows * (model.interaction_width - model.embedding_dim) * model.embedding_dim


def _products_forward(ledger: Ledger, widths: tuple[int, ...], rows: int, element: int) -> None:
    for layer, (n, m) in enumerate(itertools.pairwise(widths)):
        ledger.product("fused_product", "forward", rows, m, n, element, layer=layer, bias=True)


def _products_backward(
    ledger: Ledger, widths: tuple[int, ...], rows: int, element: int, needs_input: bool
) -> None:
    last = widths[-1] * rows
    ledger.add("fused_pack", last * FLOAT_BYTES, 2 * last * element)
    for layer in range(len(widths) - 2, -1, -1):
        n, m = widths[layer], widths[layer + 1]
        if layer > 0 or needs_input:
            ledger.product("fused_product", "backward_input", rows, n, m, element, layer=layer)
        ledger.product("fused_product", "backward_weight", m, n, rows, element, layer=layer)
