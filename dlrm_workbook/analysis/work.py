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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.parts import COMPONENTS, PHASES

# Rows of work: one operator, what it computes and what it moves.

FLOAT_BYTES = 4
INDEX_BYTES = 8
"""torch's indices are int64."""


@dataclass(frozen=True)
class Work:
    """One operator of an iteration. All amounts are of one execution.

    ``read_bytes`` and ``written_bytes`` are the operator's operands, each tensor once;
    ``gather_bytes`` of those read lie in rows scattered over a table.
    """

    component: str
    phase: str
    operator: str
    """As torch names it, without ``aten::``."""
    count: int
    """Executions in an iteration."""
    flops: float
    read_bytes: float
    written_bytes: float
    gather_bytes: float = 0.0
    layer: int = -1
    """Of matrix products: the layer of its MLP, input side first."""
    product: str = ""
    """Of matrix products: ``forward``, ``backward_input`` or ``backward_weight``."""
    batch: int = 0
    m: int = 0
    n: int = 0
    k: int = 0
    """Of matrix products: ``batch`` times (m, k) by (k, n)."""
    table: int = -1
    """Of lookups: which table."""
    merged: bool = False
    """Not a call of its own: one call does this for all tables."""
    on_link: bool = False
    """Moves over the link between host and device, not through memory alone."""


COLUMNS = list(Work.__dataclass_fields__)


class Ledger:
    """Collects rows of work, for one part and phase at a time."""

    def __init__(self) -> None:
        self.rows: list[Work] = []
        self._part = ("other", "")
        self._count = 1

    @contextmanager
    def part(self, component: str, phase: str, count: int = 1) -> Iterator[None]:
        """What is added inside belongs to this part and runs ``count`` times."""
        before = self._part, self._count
        self._part, self._count = (component, phase), count
        try:
            yield
        finally:
            self._part, self._count = before

    def add(
        self,
        operator: str,
        read: float,
        written: float,
        *,
        flops: float = 0.0,
        gather: float = 0.0,
        table: int = -1,
        merged: bool = False,
        on_link: bool = False,
    ) -> None:
        """An operator that reads and writes so many bytes."""
        self.rows.append(
            Work(
                *self._part,
                operator,
                self._count,
                float(flops),
                float(read),
                float(written),
                float(gather),
                table=table,
                merged=merged,
                on_link=on_link,
            )
        )

    def cast(self, elements: float, before: int, after: int) -> None:
        """A copy in another precision: bytes of an element before and after."""
        self.add("_to_copy", elements * before, elements * after)

    def product(
        self,
        operator: str,
        product: str,
        m: int,
        n: int,
        k: int,
        element: int,
        *,
        batch: int = 1,
        layer: int = -1,
        bias: bool = False,
        symmetric: bool = False,
        accumulate: bool = False,
    ) -> None:
        """A matrix product, ``batch`` times (m, k) by (k, n): 2 m n k operations each.

        Args:
            element: bytes of an element.
            bias: a vector (n,) is added.
            symmetric: the second operand is the first one transposed, read once.
            accumulate: the result is added to what is there.
        """
        operands = m * k if symmetric else m * k + k * n
        if accumulate:
            operands += m * n
        self.rows.append(
            Work(
                *self._part,
                operator,
                self._count,
                # as torch counts: adding the bias is free
                2.0 * batch * m * n * k,
                element * (batch * operands + (n if bias else 0)),
                element * batch * m * n,
                layer=layer,
                product=product,
                batch=batch,
                m=m,
                n=n,
                k=k,
            )
        )

    def table(self) -> pd.DataFrame:
        """All rows, a column an attribute of :class:`Work`."""
        return pd.DataFrame([asdict(row) for row in self.rows], columns=COLUMNS)


# Lookups, gradients and updates of embedding tables: bytes by back end and optimiser.


@dataclass(frozen=True)
class Lookups:
    """What one batch asks of one table, on average."""

    table: int
    rows: int
    count: float
    """Indices a batch."""
    unique: float
    """Different rows a batch."""

    @property
    def scattered(self) -> float:
        """Lookups whose row lies anywhere in the table.

        All of them by a uniform law. By a skewed one, rows repeat more often than they
        would by chance; those repeats find their row in the cache.
        """
        by_chance = _unique_of_uniform(self.rows, self.count)
        return self.count * min(1.0, self.unique / by_chance) if by_chance > 0 else 0.0


def lookups(parameters: Parameters, statistics: Mapping[str, Any] | None = None) -> list[Lookups]:
    """Indices and different rows a batch, table by table.

    Args:
        statistics: ``meta["data_statistics"]``; where it lists a table, its measured
            ``lookups_per_batch`` and ``unique_rows_per_batch`` count, else the law of the
            generator.
    """
    measured = {int(row["table"]): row for row in (statistics or {}).get("tables") or []}
    result = []
    for table, rows in enumerate(parameters.model.table_rows):
        known = measured.get(table) or {}
        if known.get("rows") not in (None, rows):
            known = {}
        count = known.get("lookups_per_batch")
        if count is None:
            count = parameters.training.batch_size * mean_lookups(parameters, rows)
        unique = known.get("unique_rows_per_batch")
        if unique is None:
            unique = expected_unique(parameters, rows, count)
        result.append(Lookups(table, rows, float(count), float(unique)))
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
    (R+1)^(1−a)).
    """
    if parameters.data.generator not in ("zipf", "teacher"):
        return _unique_of_uniform(rows, count)
    chances = _zipf_chances(rows, parameters.data.zipf_exponent)
    return float(-np.expm1(count * np.log1p(-np.minimum(chances, 1 - 1e-12))).sum())


def _unique_of_uniform(rows: int, count: float) -> float:
    return float(-rows * np.expm1(count * np.log1p(-1.0 / rows))) if rows > 1 else min(1.0, count)


def _zipf_chances(rows: int, exponent: float) -> np.ndarray:
    edges = np.arange(1.0, rows + 2)
    law = np.log(edges) if exponent == 1.0 else edges ** (1.0 - exponent)
    return np.diff(law) / (law[-1] - law[0])


def embedding_rows(ledger: Ledger, parameters: Parameters, looked_up: Sequence[Lookups]) -> None:
    """Forward, backward and update of all tables, by the back end that runs them."""
    fused = parameters.training.embedding_backend != "torch"
    naive = fused and parameters.training.embedding_update == "naive"
    optimizer = parameters.training.optimizer
    size, dim = parameters.training.batch_size, parameters.model.embedding_dim
    with ledger.part("embedding", "forward"):
        for table in looked_up:
            _forward(ledger, table, size, dim, fused)
    if fused and not naive:
        # the tables change while backward runs; nothing is left for the update
        with ledger.part("embedding", "backward"):
            for table in looked_up:
                _fused_update(ledger, table, size, dim, optimizer)
        return
    with ledger.part("embedding", "backward"):
        for table in looked_up:
            _sparse_gradient(ledger, table, size, dim)
    with ledger.part("embedding", "update"):
        for table in looked_up:
            _sparse_update(ledger, table, dim, optimizer)


def _forward(ledger: Ledger, table: Lookups, size: int, dim: int, fused: bool) -> None:
    """A row a lookup, an index each, an offset a bag; one pooled vector a bag."""
    rows = table.count * dim * FLOAT_BYTES
    ledger.add(
        "fused_lookup" if fused else "_embedding_bag",
        rows + (table.count + size) * INDEX_BYTES,
        size * dim * FLOAT_BYTES,
        flops=table.count * dim,
        gather=table.scattered * dim * FLOAT_BYTES,
        table=table.table,
        merged=fused and table.table > 0,
    )


def _sparse_gradient(ledger: Ledger, table: Lookups, size: int, dim: int) -> None:
    """torch copies a bag's gradient once for every row that was looked up."""
    vector = dim * FLOAT_BYTES
    ledger.add(
        "_embedding_bag_backward",
        size * vector + (table.count + size) * INDEX_BYTES,
        table.count * vector,
        table=table.table,
    )


def _sparse_update(ledger: Ledger, table: Lookups, dim: int, optimizer: str) -> None:
    """Adds the sparse gradient row by row; Adagrad first merges rows that occur twice."""
    if optimizer == "sgd":
        _add_sparse(ledger, "add_", table, table.count, table.scattered, dim)
        return
    vector = dim * FLOAT_BYTES
    merged, values = table.unique * vector, table.unique * dim
    ledger.add(
        "_coalesce",
        table.count * (vector + INDEX_BYTES),
        table.unique * (vector + INDEX_BYTES),
        flops=table.count * dim,
        table=table.table,
    )
    ledger.add("pow", merged, merged, flops=values)
    if optimizer == "rowwise_adagrad":
        _rowwise_adagrad(ledger, table, dim)
        return
    # s += g²; w −= η g / (√s + ε), on the rows that have a gradient
    _add_sparse(ledger, "add_", table, table.unique, table.unique, dim)
    ledger.add(
        "sparse_mask",
        merged + table.unique * INDEX_BYTES,
        merged,
        gather=merged,
        table=table.table,
    )
    ledger.add("sqrt_", merged, merged, flops=values)
    ledger.add("add_", merged, merged, flops=values)
    ledger.add("div", 2 * merged, merged, flops=values)
    _add_sparse(ledger, "add_", table, table.unique, table.unique, dim)


def _rowwise_adagrad(ledger: Ledger, table: Lookups, dim: int) -> None:
    """s += mean(g²), one number a row; w −= η g / (√s + ε)."""
    rows, values = table.unique, table.unique * dim
    merged, scalars = values * FLOAT_BYTES, rows * FLOAT_BYTES
    ledger.add("mean", merged, scalars, flops=values)
    _add_sparse(ledger, "index_add_", table, rows, rows, 1)
    ledger.add("index", scalars + rows * INDEX_BYTES, scalars, gather=scalars, table=table.table)
    for operator in ("sqrt", "add", "reciprocal", "mul"):
        ledger.add(operator, scalars, scalars, flops=rows)
    ledger.add("mul", merged + scalars, merged, flops=values)
    _add_sparse(ledger, "index_add_", table, rows, rows, dim)


def _add_sparse(
    ledger: Ledger, operator: str, table: Lookups, rows: float, scattered: float, dim: int
) -> None:
    """Reads an index, a gradient and a row of the table, and writes the row."""
    values = rows * dim * FLOAT_BYTES
    ledger.add(
        operator,
        2 * values + rows * INDEX_BYTES,
        values,
        flops=2 * rows * dim,
        gather=scattered * dim * FLOAT_BYTES,
        table=table.table,
    )


def _fused_update(ledger: Ledger, table: Lookups, size: int, dim: int, optimizer: str) -> None:
    """Each row that was looked up is read and written once, with its optimiser's state.

    The pooled gradients are read from where the interaction left them; nothing of the
    size of the lookups is written.
    """
    vector = dim * FLOAT_BYTES
    state = {"sgd": 0, "adagrad": vector, "rowwise_adagrad": FLOAT_BYTES}[optimizer]
    rows = table.unique * (vector + state)
    ledger.add(
        "fused_update",
        size * vector + (table.count + size) * INDEX_BYTES + rows,
        rows,
        flops=2 * table.count * dim,
        gather=rows,
        table=table.table,
        merged=table.table > 0,
    )


# Operations and bytes of the fused dense part (``training.dense_backend: fused``).

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


# Operations and bytes of the interaction: rows of
# :func:`dlrm_workbook.analysis.work.operator_work`.


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
