"""What ranks exchange in a hybrid-parallel DLRM: bytes of each collective, per sharding.

MLPs are data parallel (their gradients are all-reduced), embedding tables model parallel
(pooled vectors and their gradients change hands), after Naumov et al. 2019
(arXiv:1906.00091), section 4, and Kalamkar et al. 2020 (arXiv:2005.04680), section II.

``bytes`` is the payload on one rank: the buffer of an all-reduce or a broadcast; the whole
send buffer of an all-to-all, what stays at home included; the input of a reduce-scatter; the
output of an all-gather. What leaves a rank is (ranks − 1) / ranks of the last three.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_core.config import PRESETS, Parameters, load_parameters
from dlrm_studies.scaling.model.sharding import Plan, make_plan, maximum_ranks

FLOAT_BYTES = 4
"""Gradients and pooled vectors travel in fp32, whatever the products' precision."""

INDEX_BYTES = 8
"""Indices and bag lengths are int64."""

MIB = 1 << 20

VOLUME_COLUMNS = ["collective", "what", "phase", "bytes", "leaves_bytes", "total_bytes"]


def kind_label(name: str) -> str:
    """A collective or a sharding as a reader calls it: ``all-reduce``, ``table-wise``."""
    names = {"allreduce": "all-reduce", "alltoall": "all-to-all", "allgather": "all-gather"}
    return names.get(name, name.replace("_", "-"))


def dense_parameters(parameters: Parameters) -> int:
    """Weights and biases of MLPs, sum of f_in f_out + f_out over their layers, and cross layers."""
    return sum(parameters.model.dense_weights.values())


def allreduce_bytes(parameters: Parameters) -> int:
    """Bytes of the dense part's gradients: the study's allreduce column (its equation 1)."""
    return FLOAT_BYTES * dense_parameters(parameters)


def alltoall_bytes(parameters: Parameters, batch_size: int) -> int:
    """Bytes of all pooled vectors of a global batch: the study's all-to-all column.

    4 S N E of equation 2 (S tables, N samples, E width), once forward and once backward.
    """
    model = parameters.model
    return FLOAT_BYTES * len(model.table_rows) * batch_size * model.embedding_dim


@dataclass(frozen=True)
class Exchange:
    """One collective of an iteration."""

    collective: str
    what: str
    phase: str
    payload: float
    """Bytes on the rank with most (see the module's docstring)."""
    total: float
    """Bytes of all ranks' payloads; of an all-reduce and of what is alike on all, one's."""
    calls: int = 1
    """Collectives that carry it: of indices TorchRec sends sizes, lengths and values, of dense
    gradients there is a bucket an MLP, and one of cross layers."""


def volumes(parameters: Parameters, plan: Plan, batch_size: int) -> pd.DataFrame:
    """What one iteration exchanges, collective by collective.

    With B samples, R ranks, width d, a mean bag of k_t indices (T_w tables table-wise, T_c
    column-wise in c slices, T_r row-wise, T_0 replicated of n_t rows):

    * all-reduce, dense gradients: 4 sum(f_in f_out + f_out);
    * all-reduce, table gradients: 4 d sum over T_0 of n_t (dense, as data parallelism has it);
    * all-to-all, indices: 8 B sum(k_t + 1) over T_w, c times that over T_c; over T_r
      8 B (k_t + R), since an index has one owner but every owner gets bags;
    * all-to-all, pooled vectors and their gradients: 4 B d (T_w + T_c) each way;
    * reduce-scatter, partial sums: input 4 B d T_r on each rank; all-gather of their
      gradients: output as large.

    Args:
        batch_size: samples over all ranks.

    Returns:
        Columns as :func:`volumes_by_sharding`, less ``sharding``; empty with one rank.

    Raises:
        InputError: fewer samples than ranks.
    """
    away = (plan.ranks - 1) / plan.ranks
    rows = [
        (
            exchange.collective,
            exchange.what,
            exchange.phase,
            exchange.payload,
            exchange.payload * away * (2 if exchange.collective == "allreduce" else 1),
            exchange.total,
        )
        for exchange in exchanges(parameters, plan, batch_size)
    ]
    return pd.DataFrame(rows, columns=VOLUME_COLUMNS)


def exchanges(parameters: Parameters, plan: Plan, batch: int) -> list[Exchange]:
    """The rows of :func:`volumes`, without what is empty.

    Raises:
        InputError: fewer samples than ranks.
    """
    if batch < plan.ranks:
        raise InputError(
            f"batch_size is {batch}, but there are {plan.ranks} ranks: expected at least a sample "
            "for each"
        )
    if plan.ranks == 1:
        return []
    ranks, dim = plan.ranks, plan.dim
    dense, buckets = float(allreduce_bytes(parameters)), len(parameters.model.dense_weights)
    copies = float(FLOAT_BYTES * dim * sum(table.rows for table in plan.of_kind("replicated")))
    indices = INDEX_BYTES * batch * _index_numbers(plan)
    columns = plan.columns_sent()
    pooled = FLOAT_BYTES * batch * float(columns.sum())
    # a rank sends what it holds for all samples, and receives every table for its own
    most = FLOAT_BYTES * batch * max(float(columns.max()), float(columns.sum()) / ranks)
    partial = float(FLOAT_BYTES * batch * dim * len(plan.of_kind("row_wise")))
    every = [
        Exchange("alltoall", "indices", "forward", indices / ranks, indices, 3),
        Exchange("alltoall", "pooled vectors", "forward", most, pooled),
        Exchange("reduce_scatter", "pooled vectors", "forward", partial, partial * ranks),
        Exchange("alltoall", "pooled gradients", "backward", most, pooled),
        Exchange("allgather", "pooled gradients", "backward", partial, partial * ranks),
        Exchange("allreduce", "dense gradients", "backward", dense, dense, buckets),
        Exchange("allreduce", "table gradients", "backward", copies, copies),
    ]
    return [exchange for exchange in every if exchange.payload > 0]


def _index_numbers(plan: Plan) -> float:
    """Indices and lengths that change hands for one sample."""
    numbers = 0.0
    for table in plan.of_kind("table_wise", "column_wise", "row_wise"):
        count = plan.lookups[table.table]
        numbers += count + table.shards if table.kind == "row_wise" else table.shards * (count + 1)
    return numbers


def volumes_by_sharding(
    parameters: Parameters, ranks: int, batch_size: int, shardings: Sequence[str]
) -> pd.DataFrame:
    """:func:`volumes` of several shardings: with a column ``sharding`` in front.

    A sharding that does not reach so many ranks is left out.
    """
    tables = []
    for sharding in shardings:
        try:
            plan = make_plan(parameters, ranks, sharding)
        except InputError:
            continue
        table = volumes(parameters, plan, batch_size)
        table.insert(0, "sharding", sharding)
        tables.append(table)
    columns = ["sharding", *VOLUME_COLUMNS]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)


# The configurations of Kalamkar et al. 2020 (arXiv:2005.04680, tables I and II) at full size,
# and the table that they quote.

MLPERF_ROWS = (
    *(39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10),
    *(2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36),
)
"""MLPerf's tables: Criteo Terabyte with indices modulo 40,000,000 (``--max-ind-range`` of
facebookresearch/dlrm's bench/run_and_time.sh)."""


@dataclass(frozen=True)
class Study:
    """One configuration at full size, and what the study quotes of it.

    Attributes:
        preset: file of parameters with its MLPs and width, and tables scaled to fit.
        weak_batch: samples of each rank in weak scaling.
    """

    name: str
    preset: str
    table_rows: tuple[int, ...]
    lookups: int
    strong_batch: int
    weak_batch: int
    quoted_ranks: int
    quoted_allreduce_mib: float
    quoted_alltoall_mib: float

    @functools.cached_property
    def parameters(self) -> Parameters:
        """The preset with all tables, lookups as the study has them and the strong batch."""
        preset = load_parameters(str(PRESETS / f"{self.preset}.yaml"))
        return replace(
            preset.with_training(batch_size=self.strong_batch),
            model=replace(preset.model, tables=None, table_rows=self.table_rows),
        )


STUDY = (
    Study("Small", "kalamkar_small", (1_000_000,) * 8, 50, 8192, 1024, 8, 9.5, 15.8),
    Study("Large", "kalamkar_large", (6_000_000,) * 64, 100, 16384, 512, 64, 1047, 1024),
    Study("MLPerf", "mlperf", MLPERF_ROWS, 1, 16384, 2048, 26, 9.0, 208),
)


def full_size(parameters: Parameters) -> Parameters:
    """The study's own size of a configuration that was scaled down; else as it is.

    Recognised by MLPs and width, which the scaled presets keep.
    """
    study = study_of(parameters)
    if study is None:
        return parameters
    data = replace(
        parameters.data,
        indices_per_lookup=study.lookups,
        fixed_pooling=True,
        multi_hot_sizes=None,
    )
    model = study.parameters.model
    return replace(parameters, model=model, data=data, title=f"{study.name}, full size")


def study_of(parameters: Parameters) -> Study | None:
    """The study's configuration with the same MLPs and width; none has cross layers."""
    model = parameters.model
    for study in STUDY:
        full = study.parameters.model
        same = (model.bottom_widths, model.top_mlp) == (full.bottom_widths, full.top_mlp)
        if same and model.embedding_dim == full.embedding_dim and not model.interaction_kind.layers:
            return study
    return None


def study_table() -> pd.DataFrame:
    """What scaling costs, from formulas, beside what the study quotes.

    Returns:
        Columns as in ``dlrm help columns study_table``.
    """
    rows = []
    for study in STUDY:
        parameters = study.parameters
        computed = {
            "allreduce_mib": allreduce_bytes(parameters) / MIB,
            "alltoall_mib": alltoall_bytes(parameters, study.strong_batch) / MIB,
        }
        row: dict[str, Any] = {
            "name": study.name,
            "ranks": maximum_ranks(parameters, "table_wise"),
            "quoted_ranks": study.quoted_ranks,
        }
        for name, size in computed.items():
            quoted = getattr(study, f"quoted_{name}")
            row |= {name: size, f"quoted_{name}": quoted}
            row[name.replace("mib", "error")] = size / quoted - 1
        rows.append(row)
    return pd.DataFrame(rows)
