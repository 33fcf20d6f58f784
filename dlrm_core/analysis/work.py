"""Operations and bytes of one training iteration, from the model's shapes alone.

Every operator that computes or moves data is a row of :func:`operator_work`, with the
arithmetic it must do and the bytes of the tensors that go into it and come out of it;
views cost nothing and are left out. :func:`part_work` sums them by part and phase.
Formulas and sources: docs/roofline.md. Tests hold them against the operators that torch
really runs.

Notation: B samples, d embedding width, T tables, F = T + 1 features, P pairs of features,
N_t lookups a batch in table t.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pandas as pd

from dlrm_core.analysis.embedding_work import embedding_rows, lookups
from dlrm_core.analysis.fused_work import (
    fused_backward,
    fused_forward,
    fused_weights,
    is_fused,
)
from dlrm_core.analysis.interaction_work import interaction_backward, interaction_forward
from dlrm_core.analysis.work_rows import FLOAT_BYTES, INDEX_BYTES, Ledger
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.parts import COMPONENTS, PHASES

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

AMOUNTS = ["flops", "read_bytes", "written_bytes", "gather_bytes"]


def part_work(
    parameters: Parameters | Mapping[str, Any],
    statistics: Mapping[str, Any] | None = None,
    device: str | None = None,
) -> pd.DataFrame:
    """Work of each part and phase in one iteration.

    Args:
        parameters: a run's, or its sections as dicts.
        statistics: ``meta["data_statistics"]`` of a recording, measured bag sizes; without
            it the mean of the generator's law.
        device: ``cpu`` or ``cuda``, where ``training.device`` is ``auto``; on a GPU a batch
            is copied to it.

    Returns:
        ``component``, ``phase``, ``flops``, ``read_bytes``, ``written_bytes`` (operands of
        every operator), ``gather_bytes`` (of those read, in scattered rows), ``operators``
        (how many run). Rows in the order of a step.

    Raises:
        InputError: the parameters are not valid.
    """
    rows = operator_work(parameters, statistics, device)
    totals = rows[AMOUNTS].mul(rows["count"], axis=0)
    totals["operators"] = rows["count"].where(~rows["merged"], 0)
    keys = [rows["component"], rows["phase"]]
    table = totals.groupby(keys, sort=False).sum().reset_index()
    order = table["component"].map(COMPONENTS.index) * 10 + table["phase"].map(PHASES.index)
    return table.iloc[order.argsort(kind="stable")].reset_index(drop=True)


def operator_work(
    parameters: Parameters | Mapping[str, Any],
    statistics: Mapping[str, Any] | None = None,
    device: str | None = None,
) -> pd.DataFrame:
    """Every operator of an iteration, a row each: the attributes of ``work_rows.Work``.

    Raises:
        InputError: the parameters are not valid.
    """
    if not isinstance(parameters, Parameters):
        parameters = parameters_from_sections(parameters)
    ledger = Ledger()
    looked_up = lookups(parameters, statistics)
    on_gpu = (device or parameters.training.device).startswith("cuda")
    _data(ledger, parameters, sum(table.count for table in looked_up), on_gpu)
    element = ELEMENT_BYTES[setting_of(parameters, "precision", "fp32")]
    fused = is_fused(parameters) and not on_gpu
    for rows, count in micro_batches(parameters):
        if fused:
            fused_forward(ledger, parameters, rows, count)
            _losses(ledger, parameters, rows, count)
            fused_backward(ledger, parameters, rows, count)
        else:
            _dense_forward(ledger, parameters, rows, count, element)
            _dense_backward(ledger, parameters, rows, count, element)
    if fused:
        fused_weights(ledger, parameters)
    else:
        _whole_batch(ledger, parameters, element)
    embedding_rows(ledger, parameters, looked_up)
    _updates(ledger, parameters)
    return ledger.table()


def setting_of(parameters: Parameters, name: str, default: Any) -> Any:
    """``training.name``; the default where this version has no such parameter."""
    value = getattr(parameters.training, name, default)
    return default if value is None else value


def micro_batches(parameters: Parameters) -> list[tuple[int, int]]:
    """(rows, how often) of the pieces in which the dense part computes a batch."""
    size = parameters.training.batch_size
    piece = min(int(setting_of(parameters, "micro_batch", size)), size)
    whole, rest = divmod(size, piece)
    return [(piece, whole)] + ([(rest, 1)] if rest else [])


# ---- data -----------------------------------------------------------------------


def batch_bytes(parameters: Parameters, looked_up: float) -> float:
    """Bytes of one batch: dense features, indices, offsets, targets."""
    size, model = parameters.training.batch_size, parameters.model
    assert model.dense_features is not None
    floats = size * (model.dense_features + 1)
    integers = looked_up + size * len(model.table_rows)
    return FLOAT_BYTES * floats + INDEX_BYTES * integers


def _data(ledger: Ledger, parameters: Parameters, looked_up: float, on_gpu: bool) -> None:
    """A batch must at least be written once, and copied where the model is on a GPU."""
    total = batch_bytes(parameters, looked_up)
    with ledger.part("data", "forward"):
        ledger.add("make_batch", 0, total)
    if parameters.data.place == "cpu" and on_gpu:
        with ledger.part("transfer", "forward"):
            ledger.add("copy_batch", total, total, on_link=True)


# ---- the dense part -------------------------------------------------------------


def _dense_forward(
    ledger: Ledger, parameters: Parameters, rows: int, count: int, element: int
) -> None:
    model = parameters.model
    with ledger.part("bottom_mlp", "forward", count):
        _mlp_forward(ledger, model.bottom_widths, rows, element, sigmoid_output=False)
    with ledger.part("interaction", "forward", count):
        interaction_forward(ledger, parameters, rows, element)
    with ledger.part("top_mlp", "forward", count):
        _mlp_forward(ledger, model.top_widths, rows, element, sigmoid_output=True)
        if 0.0 < model.loss_threshold < 1.0:
            _pointwise(ledger, "clamp", rows, 1, FLOAT_BYTES)
    with ledger.part("loss", "forward", count):
        _loss_forward(ledger, parameters, rows)


def _dense_backward(
    ledger: Ledger, parameters: Parameters, rows: int, count: int, element: int
) -> None:
    model = parameters.model
    with ledger.part("loss", "backward", count):
        _loss_backward(ledger, parameters, rows)
    with ledger.part("top_mlp", "backward", count):
        if 0.0 < model.loss_threshold < 1.0:
            _clamp_backward(ledger, rows, FLOAT_BYTES)
        _mlp_backward(ledger, model.top_widths, rows, element, True, needs_input=True)
    with ledger.part("interaction", "backward", count):
        interaction_backward(ledger, parameters, rows, element)
    with ledger.part("bottom_mlp", "backward", count):
        # nobody asks for the gradient of the dense features
        _mlp_backward(ledger, model.bottom_widths, rows, element, False, needs_input=False)


def _losses(ledger: Ledger, parameters: Parameters, rows: int, count: int) -> None:
    with ledger.part("loss", "forward", count):
        _loss_forward(ledger, parameters, rows)
    with ledger.part("loss", "backward", count):
        _loss_backward(ledger, parameters, rows)


def _pointwise(ledger: Ledger, operator: str, elements: float, operands: int, element: int) -> None:
    """One operation an element; ``operands`` tensors in, one out."""
    ledger.add(operator, operands * elements * element, elements * element, flops=elements)


def _clamp_backward(ledger: Ledger, rows: int, element: int) -> None:
    """A gradient passes where the prediction was within the bounds."""
    for operator in ("ge", "le"):
        ledger.add(operator, rows * element, rows, flops=rows)
    ledger.add("logical_and", 2 * rows, rows, flops=rows)
    ledger.add("scalar_tensor", 0, element)
    ledger.add("where", rows * (1 + element) + element, rows * element, flops=rows)


def _mlp_forward(
    ledger: Ledger, widths: tuple[int, ...], rows: int, element: int, sigmoid_output: bool
) -> None:
    """(B, n) times (n, m) plus bias, and the activation, layer by layer."""
    narrow = element != FLOAT_BYTES
    last = len(widths) - 2
    for layer, (n, m) in enumerate(itertools.pairwise(widths)):
        if narrow and layer == 0 and not sigmoid_output:
            # what reaches the top MLP is narrow already
            ledger.cast(rows * n, FLOAT_BYTES, element)
        ledger.product("addmm", "forward", rows, m, n, element, layer=layer, bias=True)
        if not (sigmoid_output and layer == last):
            _pointwise(ledger, "relu", rows * m, 1, element)
            continue
        # a probability needs more digits than a narrow format has
        if narrow:
            ledger.cast(rows * m, element, FLOAT_BYTES)
        _pointwise(ledger, "sigmoid", rows * m, 1, FLOAT_BYTES)


def _mlp_backward(
    ledger: Ledger,
    widths: tuple[int, ...],
    rows: int,
    element: int,
    sigmoid_output: bool,
    needs_input: bool,
) -> None:
    """Two products a layer, of the size of the forward one; one where no input gradient is due."""
    narrow = element != FLOAT_BYTES
    last = len(widths) - 2
    for layer in range(last, -1, -1):
        n, m = widths[layer], widths[layer + 1]
        if sigmoid_output and layer == last:
            _pointwise(ledger, "sigmoid_backward", rows * m, 2, FLOAT_BYTES)
            if narrow:
                ledger.cast(rows * m, FLOAT_BYTES, element)
        else:
            _pointwise(ledger, "threshold_backward", rows * m, 2, element)
        if layer > 0 or needs_input:
            ledger.product("mm", "backward_input", rows, n, m, element, layer=layer)
        ledger.product("mm", "backward_weight", m, n, rows, element, layer=layer)
        # the bias's gradient
        ledger.add("sum", rows * m * element, m * element, flops=rows * m)
        if narrow:
            ledger.cast(n * m, element, FLOAT_BYTES)
            ledger.cast(m, element, FLOAT_BYTES)


# ---- loss -----------------------------------------------------------------------


def _loss_forward(ledger: Ledger, parameters: Parameters, rows: int) -> None:
    kind, four = parameters.model.loss, FLOAT_BYTES
    if kind in ("mse", "bce"):
        name = {"mse": "mse_loss", "bce": "binary_cross_entropy"}[kind]
        ledger.add(name, 2 * rows * four, four, flops=3 * rows)
        return
    # the weights of the two targets are float64, and so is what follows from them
    ledger.add("_to_copy", rows * four, rows * INDEX_BYTES)
    ledger.add("index", rows * (8 + INDEX_BYTES), rows * 8)  # a weight a sample
    ledger.add("binary_cross_entropy", 2 * rows * four, rows * four, flops=3 * rows)
    ledger.add("mul", rows * (8 + four), rows * 8, flops=rows)
    ledger.add("mean", rows * 8, 8, flops=rows)


def _loss_backward(ledger: Ledger, parameters: Parameters, rows: int) -> None:
    kind, four = parameters.model.loss, FLOAT_BYTES
    if kind in ("mse", "bce"):
        name = {"mse": "mse_loss_backward", "bce": "binary_cross_entropy_backward"}[kind]
        ledger.add("full_like", 0, four)
        ledger.add(name, 2 * rows * four + four, rows * four, flops=3 * rows)
        return
    ledger.add("full_like", 0, 8)
    ledger.add("div", 8, rows * 8, flops=rows)
    ledger.add("mul", rows * 16, rows * 8, flops=rows)
    ledger.add("_to_copy", rows * 8, rows * four)
    ledger.add("binary_cross_entropy_backward", 3 * rows * four, rows * four, flops=3 * rows)


# ---- update of the dense weights ------------------------------------------------


def _weights(widths: tuple[int, ...]) -> list[int]:
    """Elements of each weight and bias, in the optimiser's order."""
    return [size for n, m in itertools.pairwise(widths) for size in (n * m, m)]


def _whole_batch(ledger: Ledger, parameters: Parameters, element: int) -> None:
    """What is done once however many pieces a batch has, and what only pieces need."""
    pieces = sum(count for _, count in micro_batches(parameters))
    for part, widths in _mlps(parameters):
        if element != FLOAT_BYTES:
            with ledger.part(part, "forward"):
                # autocast keeps a weight's copy until the step is done
                for size in _weights(widths):
                    ledger.cast(size, FLOAT_BYTES, element)
        if pieces > 1:
            with ledger.part(part, "backward", pieces - 1):
                # weight gradients are added to those of the first piece
                for size in _weights(widths):
                    ledger.add("add_", 2 * size * FLOAT_BYTES, size * FLOAT_BYTES, flops=size)


def _updates(ledger: Ledger, parameters: Parameters) -> None:
    """SGD: w −= η g. Adagrad: s += g², w −= η g / (√s + ε)."""
    adagrad = "adagrad" in setting_of(parameters, "optimizer", "sgd")
    fused = parameters.training.fused_optimizer
    for part, widths in _mlps(parameters):
        sizes = _weights(widths)
        with ledger.part(part, "update"):
            for size in [sum(sizes)] if fused else sizes:
                whole = size * FLOAT_BYTES
                if not adagrad:
                    ledger.add("add_", 2 * whole, whole, flops=2 * size)
                elif fused:
                    ledger.add("_fused_adagrad_", 3 * whole, 2 * whole, flops=7 * size)
                else:
                    ledger.add("addcmul_", 2 * whole, whole, flops=2 * size)
                    ledger.add("sqrt", whole, whole, flops=size)
                    ledger.add("add_", whole, whole, flops=size)
                    ledger.add("addcdiv_", 3 * whole, whole, flops=3 * size)


def _mlps(parameters: Parameters) -> list[tuple[str, tuple[int, ...]]]:
    model = parameters.model
    return [("top_mlp", model.top_widths), ("bottom_mlp", model.bottom_widths)]
