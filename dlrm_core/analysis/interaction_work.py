"""Operations and bytes of the interaction: rows of :func:`dlrm_core.analysis.work.operator_work`.

Notation: B samples, d embedding width, F features, P pairs of features.
"""

from __future__ import annotations

from dlrm_core.analysis.work_rows import FLOAT_BYTES, INDEX_BYTES, Ledger
from dlrm_core.config import Parameters


def interaction_forward(ledger: Ledger, parameters: Parameters, rows: int, element: int) -> None:
    """B = ``rows`` samples of ``element`` bytes a number: products of pairs, then what is kept."""
    model = parameters.model
    dim, features = model.embedding_dim, len(model.table_rows) + 1
    whole = rows * features * dim
    if element != FLOAT_BYTES:
        for _ in range(features - 1):
            ledger.cast(rows * dim, FLOAT_BYTES, element)
    ledger.add("cat", whole * element, whole * element)
    if model.interaction == "cat":
        return
    pairs = model.interaction_width - dim
    ledger.product(
        "bmm",
        "forward",
        features,
        features,
        dim,
        element,
        batch=rows,
        layer=0,
        symmetric=True,
    )
    _gathered(ledger, parameters, rows, features * features, pairs, element)
    out = rows * (dim + pairs) * element
    ledger.add("cat", out, out)


def _gathered(
    ledger: Ledger, parameters: Parameters, rows: int, source: int, wanted: int, element: int
) -> None:
    """``wanted`` of ``source`` columns by an index; on a CPU 2-byte numbers are widened first."""
    widened = element != FLOAT_BYTES and parameters.training.device != "cuda"
    wide = FLOAT_BYTES if widened else element
    if widened:
        ledger.cast(rows * source, element, wide)
    least = rows * min(source, wanted) * wide
    ledger.add("index_select", least + wanted * INDEX_BYTES, rows * wanted * wide)
    if widened:
        ledger.cast(rows * wanted, wide, element)


def interaction_backward(ledger: Ledger, parameters: Parameters, rows: int, element: int) -> None:
    """The gradients of the features, and of each table's vectors in one piece."""
    model = parameters.model
    dim, features = model.embedding_dim, len(model.table_rows) + 1
    vector = rows * dim * element
    narrow = element != FLOAT_BYTES
    if model.interaction == "dot":
        pairs = model.interaction_width - dim
        # the gradients of the pairs at their place in (B, F, F), zeros elsewhere
        picked = rows * pairs * element
        ledger.add("constant_pad_nd", picked, picked + rows * element)
        _gathered(ledger, parameters, rows, pairs + 1, features * features, element)
        if narrow and model.interaction_itself:
            diagonal = rows * features * element
            ledger.add("mul_", diagonal, diagonal, flops=rows * features)
        shape = (features, dim, features, element)
        ledger.product("bmm", "backward_input", *shape, batch=rows, layer=0)
        if not narrow:
            ledger.product(
                "baddbmm_", "backward_input", *shape, batch=rows, layer=0, accumulate=True
            )
        # x goes to the interaction's output as it is, too
        ledger.add("add", 2 * vector, vector, flops=rows * dim)
    elif rows > 1:
        ledger.add("copy_", vector, vector)
    for _ in range(features - 1):
        _leaf_gradient(ledger, parameters, rows, dim, element)


def _leaf_gradient(
    ledger: Ledger, parameters: Parameters, rows: int, dim: int, element: int
) -> None:
    """The gradient of one table's vectors: a slice of the features', made contiguous."""
    if element != FLOAT_BYTES:
        ledger.cast(rows * dim, element, FLOAT_BYTES)
    vector = rows * dim * FLOAT_BYTES
    if rows < parameters.training.batch_size:
        # a piece is added to the place that the whole batch's gradient has for it
        ledger.add("add_", 2 * vector, vector, flops=rows * dim)
    elif element == FLOAT_BYTES and rows > 1:
        # of a single sample the slice is in one piece already
        ledger.add("copy_", vector, vector)
