"""Operations and bytes of one training iteration, from the model's shapes alone.

Every operator that computes or moves data is a row of :func:`operator_work`, with the
arithmetic it must do and the bytes of the tensors that go into it and come out of it;
views cost nothing and are left out. :func:`part_work` sums them by part and phase.
Tests hold them against the operators that torch really runs.

Notation: B samples, d embedding width, T tables, F = T + 1 features, P pairs of features,
N_t lookups a batch in table t.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.config import Parameters
from dlrm_core.data.reuse import ReuseLaw
from dlrm_core.losses import LOSSES
from dlrm_core.operations import FLOAT_BYTES, INDEX_BYTES, NUMBER_BYTES, Operations, Work
from dlrm_core.optimizers import OPTIMIZERS, Lookups, rows_work
from dlrm_workbook.analysis.attribution import PART, in_step_order

FUSED_PARTS = {"bf16x2": 2, "bf16x3": 3}
"""bf16 numbers that stand for one fp32 number in the fused dense part."""

AMOUNTS = ["flops", "read_bytes", "written_bytes", "gather_bytes"]


def part_work(
    parameters: Parameters, statistics: Mapping[str, Any] | None = None, device: str | None = None
) -> pd.DataFrame:
    """Work of each part and phase in one iteration.

    Args:
        parameters: a run's.
        statistics: ``meta["data_statistics"]`` of a recording, measured bag sizes; without
            it the mean of the generator's law.
        device: ``cpu`` or ``cuda``, where ``training.device`` is ``auto``; on a GPU a batch
            is copied to it.

    Returns:
        ``component``, ``phase``, ``flops``, ``read_bytes``, ``written_bytes`` (operands of
        every operator), ``gather_bytes`` (of those read, in scattered rows), ``operators``
        (how many run). Rows in the order of a step.
    """
    rows = operator_work(parameters, statistics, device)
    totals = rows[AMOUNTS].mul(rows["count"], axis=0)
    totals["operators"] = rows["count"].where(~rows["merged"], 0)
    return in_step_order(totals.groupby([rows[name] for name in PART]).sum().reset_index())


def operator_work(
    parameters: Parameters, statistics: Mapping[str, Any] | None = None, device: str | None = None
) -> pd.DataFrame:
    """Every operator of an iteration, a row each: the attributes of :class:`Work`. ``parameters``,
    ``statistics`` and ``device`` are as for :func:`part_work`."""
    on_gpu = (device or parameters.training.device).startswith("cuda")
    looked_up = lookups(parameters, statistics)
    step = _Step(parameters)
    step.data(sum(table.count for table in looked_up), on_gpu)
    kind = _FusedDense if is_fused(parameters) and not on_gpu else _TorchDense
    kind(step).iteration()
    step.embeddings(looked_up)
    step.dense_updates()
    return pd.DataFrame([asdict(row) for row in step.work], columns=list(Work.__dataclass_fields__))


def micro_batches(parameters: Parameters) -> list[tuple[int, int]]:
    """(rows, how often) of the pieces in which the dense part computes a batch."""
    size = parameters.training.batch_size
    piece = min(parameters.training.micro_batch or size, size)
    whole, rest = divmod(size, piece)
    return [(piece, whole)] + ([(rest, 1)] if rest else [])


def is_fused(parameters: Parameters) -> bool:
    """Whether the parameters ask for the fused dense part and it can do what they ask."""
    training = parameters.training
    possible = training.precision == "bf16" or (
        training.precision == "fp32" and training.fp32_matmul in FUSED_PARTS
    )
    known = "fused dense part" in parameters.model.interaction_kind.engines
    possible &= known and training.device != "cuda"
    return training.dense_backend == "fused" and possible


# ---- lookups -----------------------------------------------------------------------------


def lookups(parameters: Parameters, statistics: Mapping[str, Any] | None = None) -> list[Lookups]:
    """Indices and different rows a batch, table by table. Where ``statistics``
    (``meta["data_statistics"]``) list a table, its measured ``lookups_per_batch`` and
    ``unique_rows_per_batch`` count, else the law of the generator."""
    measured = {int(row["table"]): row for row in (statistics or {}).get("tables") or []}
    result = []
    for table, rows in enumerate(parameters.model.table_rows):
        known = measured.get(table) or {}
        if known.get("rows") not in (None, rows):
            known = {}
        count = known.get("lookups_per_batch")
        if count is None:
            bags = parameters.data.multi_hot_sizes
            mean = bags[table] if bags else mean_lookups(parameters, rows)
            count = parameters.training.batch_size * mean
        unique = known.get("unique_rows_per_batch")
        if unique is None:
            unique = expected_unique(parameters, rows, count)
        by_chance = _unique_of_uniform(rows, count)
        scattered = count * min(1.0, unique / by_chance) if by_chance > 0 else 0.0
        result.append(Lookups(table, rows, float(count), float(unique), float(scattered)))
    return result


def mean_lookups(parameters: Parameters, rows: int) -> float:
    """Mean indices of a bag in a table of ``rows`` rows, as the generator leaves it.

    A bag holds c = k draws, or max(1, round(r min(R, k))), r ~ U[0,1). facebook's law
    draws round(u (R − 1)) and removes duplicates: its two end rows have half the chance
    of the others, so E[different of c] = (R − 2)(1 − (1 − p)^c) + 2 (1 − (1 − p/2)^c),
    p = 1 / (R − 1).
    """
    sizes, chances = _bag_law(parameters, rows)
    if parameters.data.generator.startswith("facebook"):
        sizes = _different(sizes, rows)
    return float((sizes * chances).sum())


def _bag_law(parameters: Parameters, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws of a bag and how likely each number of them is."""
    data = parameters.data
    if data.fixed_pooling:
        return np.array([float(data.indices_per_lookup)]), np.ones(1)
    bound = min(rows, data.indices_per_lookup)
    if bound == 1:
        return np.ones(1), np.ones(1)
    sizes = np.arange(1.0, bound + 1)
    chances = np.full(bound, 1.0 / bound)
    # max(1, round(r k)): what rounds to 0 becomes 1; only half a unit rounds to k
    chances[0], chances[-1] = 1.5 / bound, 0.5 / bound
    if bound == 2:
        chances[:] = 0.75, 0.25
    return sizes, chances


def _different(draws: np.ndarray, rows: int) -> np.ndarray:
    """Expected different rows of so many draws by facebook's law."""
    if rows == 1:
        return np.ones_like(draws)
    chance = 1.0 / (rows - 1)
    ends = 2.0 * (1.0 - (1.0 - chance / 2) ** draws)
    return (rows - 2) * (1.0 - (1.0 - chance) ** draws) + ends


def expected_unique(parameters: Parameters, rows: int, count: float) -> float:
    """Expected different rows among ``count`` lookups, R (1 − (1 − 1/R)^N) for uniform ones.

    With zipf: the sum over rows of 1 − (1 − p_i)^N, p_i = ((i+1)^(1−a) − (i+2)^(1−a)) / (1 −
    (R+1)^(1−a)); with reuse the same sum by classes of rows.
    """
    if parameters.data.generator == "reuse":
        return ReuseLaw(rows).unique(count)
    if parameters.data.generator not in ("zipf", "teacher"):
        return _unique_of_uniform(rows, count)
    edges, exponent = np.arange(1.0, rows + 2), parameters.data.zipf_exponent
    law = np.log(edges) if exponent == 1.0 else edges ** (1.0 - exponent)
    chances = np.diff(law) / (law[-1] - law[0])
    return float(-np.expm1(count * np.log1p(-np.minimum(chances, 1 - 1e-12))).sum())


def _unique_of_uniform(rows: int, count: float) -> float:
    return float(-rows * np.expm1(count * np.log1p(-1.0 / rows))) if rows > 1 else min(1.0, count)


# ---- operators ------------------------------------------------------------------------


class _Step(Operations):
    """Collects the operators of an iteration."""

    def __init__(self, parameters: Parameters) -> None:
        training = parameters.training
        super().__init__(NUMBER_BYTES[training.precision], widens=training.device != "cuda")
        self.parameters = parameters
        self.model, self.training = parameters.model, training
        self.optimizer = OPTIMIZERS[training.optimizer]
        self.interaction, self.loss = self.model.interaction_kind, LOSSES[self.model.loss]
        self.dim, self.features = self.interaction.dim, self.interaction.features
        self.mlps = {"top_mlp": self.model.top_widths, "bottom_mlp": self.model.bottom_widths}

    # ---- data, loss, updates of the dense weights -------------------------------------

    def data(self, looked_up: float, on_gpu: bool) -> None:
        """A batch must at least be written once, and copied where the model is on a GPU."""
        size = self.training.batch_size
        assert self.model.dense_features is not None
        floats = size * (self.model.dense_features + 1)
        integers = looked_up + size * len(self.model.table_rows)
        total = FLOAT_BYTES * floats + INDEX_BYTES * integers
        with self.part("data", "forward"):
            self.add("make_batch", 0, total)
        if self.parameters.data.place == "cpu" and on_gpu:
            with self.part("transfer", "forward"):
                self.add("copy_batch", total, total, on_link=True)

    def loss_forward(self, rows: int, count: int) -> None:
        """Add the loss's forward, ``count`` times of so many rows."""
        with self.part("loss", "forward", count):
            self.loss.forward_work(self, rows)

    def loss_backward(self, rows: int, count: int) -> None:
        """Add the loss's backward."""
        with self.part("loss", "backward", count):
            self.loss.backward_work(self, rows)

    def dense_updates(self) -> None:
        """Add the updates of the dense weights, part by part."""
        fused = self.training.fused_optimizer
        for part, sizes in self.model.weight_sizes.items():
            with self.part(part, "update"):
                self.optimizer.dense_work(self, [sum(sizes)] if fused else sizes, fused)

    # ---- embedding tables ---------------------------------------------------------------

    def embeddings(self, looked_up: list[Lookups]) -> None:
        """Forward, backward and update of all tables, by the back end that runs them."""
        fused = self.training.embedding_backend != "torch"
        narrow = self.model.embedding_precision != "fp32"
        with self.part("embedding", "forward"):
            for table in looked_up:
                self._pooled(table, fused)
        with self.part("embedding", "backward"):
            for table in looked_up:
                if fused:
                    # the tables change while backward runs; nothing is left for the update
                    self._fused_update(table)
                elif narrow:
                    self._merged_gradient(table)
                else:
                    self._sparse_gradient(table)
        if not fused:
            with self.part("embedding", "update"):
                for table in looked_up:
                    if narrow:
                        self._rounded_update(table)
                    else:
                        self.optimizer.table_work(self, table, self.dim)

    def _pooled(self, table: Lookups, fused: bool) -> None:
        """A row a lookup, an index each, an offset a bag; one pooled vector a bag.

        torch's own operators copy rows of 2 bytes a number to float32 before they add them.
        """
        size, vector, row = self.training.batch_size, self.dim * FLOAT_BYTES, self.model.row_bytes
        if widened := row != vector and not fused:
            read = table.count * (row + INDEX_BYTES)
            scattered = table.scattered * row
            self.add("index", read, table.count * row, gather_bytes=scattered, table=table.table)
            self.cast(table.count * self.dim, row // self.dim, FLOAT_BYTES)
            row = vector
        self.add(
            "fused_lookup" if fused else "_embedding_bag",
            table.count * row + (table.count + size) * INDEX_BYTES,
            size * vector,
            flops=table.count * self.dim,
            gather_bytes=0 if widened else table.scattered * row,
            table=table.table,
            merged=fused and table.table > 0,
        )

    def _sparse_gradient(self, table: Lookups) -> None:
        """torch copies a bag's gradient once for every row that was looked up."""
        size, vector = self.training.batch_size, self.dim * FLOAT_BYTES
        read = size * vector + (table.count + size) * INDEX_BYTES
        self.add("_embedding_bag_backward", read, table.count * vector, table=table.table)

    def _merged_gradient(self, table: Lookups) -> None:
        """Rows of 2 bytes: the gradients of each row's bags are added up in float32."""
        vector, rows = self.dim * FLOAT_BYTES, table.unique * self.dim * FLOAT_BYTES
        copied = table.count * vector
        self.add("index", copied + table.count * INDEX_BYTES, copied, table=table.table)
        read = copied + table.count * INDEX_BYTES + rows
        self.add("index_add_", read, rows, flops=table.count * self.dim, table=table.table)

    def _rounded_update(self, table: Lookups) -> None:
        """Rows of 2 bytes: gathered, widened, changed, rounded and written back, once each.

        Integer operations (random numbers and the rounding) are not counted.
        """
        values, indices = table.unique * self.dim, table.unique * INDEX_BYTES
        rows, gradient = table.unique * self.model.row_bytes, values * FLOAT_BYTES
        if width := self.optimizer.row_state(self.dim):
            self.add("pow", gradient, gradient, flops=values)
            rows_work(self, "index_add_", table, table.unique, table.unique, width)
        self.add("index", rows + indices, rows, gather_bytes=rows, table=table.table)
        self.cast(values, self.model.row_bytes // self.dim, FLOAT_BYTES)
        self.add("sub", 2 * gradient, gradient, flops=2 * values)
        self.add("index_put_", gradient + indices, rows, table=table.table)

    def _fused_update(self, table: Lookups) -> None:
        """Each row that was looked up is read and written once, with its optimiser's state.

        The pooled gradients are read from where the interaction left them; nothing of the
        size of the lookups is written.
        """
        size, vector = self.training.batch_size, self.dim * FLOAT_BYTES
        state = FLOAT_BYTES * self.optimizer.row_state(self.dim)
        rows = table.unique * (self.model.row_bytes + state)
        self.add(
            "fused_update",
            size * vector + (table.count + size) * INDEX_BYTES + rows,
            rows,
            flops=2 * table.count * self.dim,
            gather_bytes=rows,
            table=table.table,
            merged=table.table > 0,
        )


class _TorchDense:
    """The MLPs and the interaction as torch's own operators run them."""

    def __init__(self, step: _Step) -> None:
        self.step, self.model = step, step.model
        self.element, self.narrow = step.element, step.narrow
        self.clamped = 0.0 < self.model.loss_threshold < 1.0

    def iteration(self) -> None:
        """The dense part of a batch, piece by piece."""
        pieces = micro_batches(self.step.parameters)
        for rows, count in pieces:
            self._forward(rows, count)
            self._backward(rows, count)
        self._whole_batch(sum(count for _, count in pieces))

    def _forward(self, rows: int, count: int) -> None:
        step = self.step
        with step.part("bottom_mlp", "forward", count):
            self._mlp_forward(rows, top=False)
        with step.part("interaction", "forward", count):
            self._interaction_forward(rows)
        with step.part("top_mlp", "forward", count):
            self._mlp_forward(rows, top=True)
            if self.clamped:
                step.pointwise("clamp", rows, 1, FLOAT_BYTES)
        step.loss_forward(rows, count)

    def _backward(self, rows: int, count: int) -> None:
        step, four = self.step, FLOAT_BYTES
        step.loss_backward(rows, count)
        with step.part("top_mlp", "backward", count):
            if self.clamped:
                # a gradient passes where the prediction was within the bounds
                for operator in ("ge", "le"):
                    step.add(operator, rows * four, rows, flops=rows)
                step.add("logical_and", 2 * rows, rows, flops=rows)
                step.add("scalar_tensor", 0, four)
                step.add("where", rows * (1 + four) + four, rows * four, flops=rows)
            self._mlp_backward(rows, top=True)
        with step.part("interaction", "backward", count):
            step.interaction.backward_work(step, rows)
            for _ in range(step.features - 1):
                self._table_gradient(rows)
        with step.part("bottom_mlp", "backward", count):
            self._mlp_backward(rows, top=False)

    def _whole_batch(self, pieces: int) -> None:
        """What is done once however many pieces a batch has, and what only pieces need."""
        for part, sizes in self.model.narrowed_sizes.items() if self.narrow else ():
            with self.step.part(part, "forward"):
                # autocast keeps a weight's copy until the step is done
                for size in sizes:
                    self.step.cast(size, FLOAT_BYTES, self.element)
        for part, sizes in self.model.weight_sizes.items() if pieces > 1 else ():
            with self.step.part(part, "backward", pieces - 1):
                # weight gradients are added to those of the first piece
                for size in sizes:
                    self.step.pointwise("add_", size, 2, FLOAT_BYTES)

    def _mlp_forward(self, rows: int, top: bool) -> None:
        """(B, n) times (n, m) plus bias, and the activation, layer by layer."""
        step, element = self.step, self.element
        widths = step.mlps["top_mlp" if top else "bottom_mlp"]
        for layer, (n, m) in enumerate(itertools.pairwise(widths)):
            if self.narrow and layer == 0 and not top:
                # what reaches the top MLP is narrow already
                step.cast(rows * n, FLOAT_BYTES, element)
            step.product("addmm", "forward", (rows, m, n), layer=layer, bias=True)
            if not (top and layer == len(widths) - 2):
                step.pointwise("relu", rows * m, 1, element)
                continue
            # a probability needs more digits than a narrow format has
            if self.narrow:
                step.cast(rows * m, element, FLOAT_BYTES)
            step.pointwise("sigmoid", rows * m, 1, FLOAT_BYTES)

    def _mlp_backward(self, rows: int, top: bool) -> None:
        """Two products a layer, of the size of the forward one.

        The first layer of the bottom MLP has one: nobody asks for the gradient of the dense
        features.
        """
        step, element = self.step, self.element
        widths = step.mlps["top_mlp" if top else "bottom_mlp"]
        for layer in reversed(range(len(widths) - 1)):
            n, m = widths[layer], widths[layer + 1]
            if top and layer == len(widths) - 2:
                step.pointwise("sigmoid_backward", rows * m, 2, FLOAT_BYTES)
                if self.narrow:
                    step.cast(rows * m, FLOAT_BYTES, element)
            else:
                step.pointwise("threshold_backward", rows * m, 2, element)
            if layer > 0 or top:
                step.product("mm", "backward_input", (rows, n, m), layer=layer)
            step.weight_gradients(rows, m, n, layer, bias=True)

    def _interaction_forward(self, rows: int) -> None:
        """All features in one, then what the interaction makes of them."""
        step, element, dim, features = self.step, self.element, self.step.dim, self.step.features
        if self.narrow:
            for _ in range(features - 1):
                step.cast(rows * dim, FLOAT_BYTES, element)
        whole = rows * features * dim * element
        step.add("cat", whole, whole)
        step.interaction.forward_work(step, rows)

    def _table_gradient(self, rows: int) -> None:
        """The gradient of one table's vectors: a slice of the features', made contiguous."""
        values = rows * self.step.dim
        if self.narrow:
            self.step.cast(values, self.element, FLOAT_BYTES)
        if rows < self.step.training.batch_size:
            # a piece is added to the place that the whole batch's gradient has for it
            self.step.pointwise("add_", values, 2, FLOAT_BYTES)
        elif not self.narrow and rows > 1:
            # of a single sample the slice is in one piece already
            self.step.add("copy_", values * FLOAT_BYTES, values * FLOAT_BYTES)


class _FusedDense:
    """The MLPs and the interaction by ``training.dense_backend: fused``; the loss is torch's."""

    def __init__(self, step: _Step) -> None:
        self.step, self.model = step, step.model
        bf16 = step.training.precision == "bf16"
        self.element = 2 if bf16 else 2 * FUSED_PARTS[step.training.fp32_matmul]
        """Bytes of an entry of an operand."""

    def iteration(self) -> None:
        """The dense part of a batch, piece by piece."""
        for rows, count in micro_batches(self.step.parameters):
            self._forward(rows, count)
            self.step.loss_forward(rows, count)
            self.step.loss_backward(rows, count)
            self._backward(rows, count)
        # each weight is tiled once a step, for the forward and for the backward product
        for part in ("bottom_mlp", "top_mlp"):
            with self.step.part(part, "forward"):
                for layer, (n, m) in enumerate(itertools.pairwise(self.step.mlps[part])):
                    forms = 2 if layer > 0 or part == "top_mlp" else 1
                    size = n * m
                    self.step.add("fused_pack", size * FLOAT_BYTES, forms * size * self.element)

    def _forward(self, rows: int, count: int) -> None:
        step, model = self.step, self.model
        with step.part("bottom_mlp", "forward", count):
            inputs = rows * model.bottom_widths[0]
            step.add("fused_pack", inputs * FLOAT_BYTES, 2 * inputs * self.element)
            self._mlp_forward(rows, model.bottom_widths)
        with step.part("interaction", "forward", count):
            read = rows * step.features * step.dim * FLOAT_BYTES
            written = 2 * rows * step.interaction.width * self.element
            flops = rows * step.interaction.needed_flops
            step.add("fused_interaction", read, written, flops=flops)
        with step.part("top_mlp", "forward", count):
            self._mlp_forward(rows, model.top_widths)
            step.pointwise("sigmoid", rows, 1, FLOAT_BYTES)

    def _backward(self, rows: int, count: int) -> None:
        """Masks and bias gradients are in the products' kernels."""
        step, model = self.step, self.model
        with step.part("top_mlp", "backward", count):
            step.pointwise("sigmoid_backward", rows, 2, FLOAT_BYTES)
            self._mlp_backward(rows, model.top_widths, needs_input=True)
        with step.part("interaction", "backward", count):
            features = rows * step.features * step.dim
            read = (features + rows * step.interaction.width) * FLOAT_BYTES
            flops = 2 * rows * step.interaction.needed_flops
            step.add("fused_interaction_backward", read, features * FLOAT_BYTES, flops=flops)
        with step.part("bottom_mlp", "backward", count):
            self._mlp_backward(rows, model.bottom_widths, needs_input=False)

    def _mlp_forward(self, rows: int, widths: tuple[int, ...]) -> None:
        for layer, (n, m) in enumerate(itertools.pairwise(widths)):
            self._product("forward", (rows, m, n), layer, bias=True)

    def _mlp_backward(self, rows: int, widths: tuple[int, ...], needs_input: bool) -> None:
        step, element = self.step, self.element
        last = widths[-1] * rows
        step.add("fused_pack", last * FLOAT_BYTES, 2 * last * element)
        for layer in reversed(range(len(widths) - 1)):
            n, m = widths[layer], widths[layer + 1]
            if layer > 0 or needs_input:
                self._product("backward_input", (rows, n, m), layer)
            self._product("backward_weight", (m, n, rows), layer)

    def _product(
        self, product: str, shape: tuple[int, int, int], layer: int, bias: bool = False
    ) -> None:
        self.step.product(
            "fused_product", product, shape, element=self.element, layer=layer, bias=bias
        )
