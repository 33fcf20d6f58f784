"""Operations and bytes from first principles, against the operators that torch really runs."""

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

import dlrm_core.parts
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.data.batch import Batch
from dlrm_core.data.loader import batches
from dlrm_core.model import ClickLoss, build_model
from dlrm_core.parts import parse_span
from dlrm_core.step import TrainingStep
from dlrm_workbook.analysis.work import (
    expected_unique,
    lookups,
    mean_lookups,
    micro_batches,
    operator_work,
    part_work,
)

CPU = torch.device("cpu")

VIEWS = re.compile(
    "t|transpose|view|slice|select|detach|narrow|reshape|as_strided|expand|unsqueeze|squeeze|"
    "permute|lift_fresh|empty|new_empty_strided|empty_strided|alias|_unsafe_view|diagonal|clone|"
    "_?indices|_?values|_coalesced_|is_coalesced|_sparse_coo_tensor_with_dims_and_tensors|"
    "_local_scalar_dense"
)
"""Operators that compute nothing. ``clone`` is only of sparse gradients, and only because a
dispatch mode holds a second reference; without one, autograd takes them over."""


def small(**changes: Any) -> Parameters:
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "bottom_mlp": [7, 9, 4],
            "top_mlp": [11, 1],
            "embedding_dim": 4,
            "table_rows": [50, 31],
        },
        "data": {"generator": "uniform", "indices_per_lookup": 5},
        "training": {"batch_size": 6, "device": "cpu"},
    }
    for name, value in changes.items():
        section, leaf = name.split("__")
        sections[section][leaf] = value
    return parameters_from_sections(sections)


class Counting(TorchDispatchMode):
    """Every operator with the bytes of its operands, by the part that is running."""

    def __init__(self) -> None:
        super().__init__()
        self.part: tuple[str, str] | None = None
        self.rows: list[dict[str, Any]] = []
        self.outside: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if self.part is None and not VIEWS.fullmatch(name):
            self.outside.append(name)
        if self.part is not None and func.namespace == "aten" and not VIEWS.fullmatch(name):
            inputs = [x for x in tree_flatten((args, kwargs or {}))[0] if _is_tensor(x)]
            outputs = [x for x in tree_flatten(result)[0] if _is_tensor(x)]
            if all(tensor.dim() == 0 for tensor in inputs) and self.part[1] == "update":
                return result  # Adagrad counts its steps
            read, written = touched(name, inputs, outputs)
            component, phase = self.part
            self.rows.append(
                {"component": component, "phase": phase, "operator": name.rstrip("_")}
                | {"read": read, "written": written}
            )
        return result

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        before, self.part = self.part, parse_span(name)
        try:
            yield
        finally:
            self.part = before


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def touched(name: str, inputs: list[Any], outputs: list[Any]) -> tuple[int, int]:
    """Bytes read and written: all of the operands, but for operators that touch parts."""
    read, written = _bytes(inputs), _bytes(outputs)
    if name == "full_like":  # only the shape of the input is asked for
        return 0, written
    if name == "_coalesce":
        before, after = inputs[0], outputs[0]
        return (
            _bytes([before._values(), before._indices()]),
            _bytes([after._values(), after._indices()]),
        )
    if name == "sparse_mask":  # of a dense tensor the rows that the mask has
        values = _bytes([outputs[0]._values()])
        return values + _bytes([inputs[1]._indices()]), values
    if name == "index_add_":  # reads and writes as many rows as are added
        values = _bytes(inputs[-1:])
        return _bytes(inputs[1:]) + values, values
    if name == "_fused_adagrad_":  # weights, gradients and sums; weights and sums written
        whole = _bytes([tensor for tensor in inputs if tensor.dim()])
        return whole, whole * 2 // 3
    if name == "_fused_adam_":  # weights, gradients and two means; all but gradients written
        whole = _bytes([tensor for tensor in inputs if tensor.dim()])
        return whole, whole * 3 // 4
    if name == "copy_":  # what was there is not read
        return _bytes(inputs[1:]), written
    if name == "index":  # as many elements of the source as come out
        return written + _bytes(inputs[1:]), written
    if name == "index_select":
        return min(written, _bytes(inputs[:1])) + _bytes(inputs[1:]), written
    if name == "_embedding_bag":  # a row an index; only the first output is used for sums
        weight, indices, offsets = inputs[:3]
        rows = indices.numel() * weight.shape[1] * weight.element_size()
        return rows + _bytes([indices, offsets]), _bytes(outputs[:1])
    if name == "_embedding_bag_backward":  # the indices of the result are those that came in
        return _bytes(inputs[:3]), _bytes([outputs[0]._values()])
    if name == "add_" and inputs[-1].is_sparse:  # the rows of the table that have a gradient
        values = _bytes([inputs[1]._values()])
        return values + _bytes([inputs[1]._indices()]) + values, values
    return read, written


def _bytes(tensors: list[Any]) -> int:
    """Bytes of the tensors, each once; an expanded one holds fewer than its shape says."""
    sizes: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        if tensor.is_sparse:
            tensor = tensor._values()
        stored = math.prod(
            size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride
        )
        sizes[tensor.data_ptr(), stored] = stored * tensor.element_size()
    return sum(sizes.values())


def run_step(parameters: Parameters, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """One training step counted; its operators and the batch."""
    model = build_model(parameters.model, 1, CPU)
    loss = ClickLoss.of(parameters.model)
    step = TrainingStep(model, loss, parameters.training)
    stream = batches(parameters, CPU)
    step(next(stream))
    batch = next(stream)
    mode = Counting()
    with monkeypatch.context() as patched:
        patched.setattr(dlrm_core.parts, "span", mode.span)
        with mode:
            step(batch)
    # every operator runs inside a part, but for the sum of the pieces' losses
    assert parameters.training.micro_batch or mode.outside == []
    return pd.DataFrame(mode.rows), batch


def statistics_of(batch: Batch, parameters: Parameters) -> dict[str, Any]:
    """What a recording says of its batches, of this one batch."""
    tables = []
    for table, rows in enumerate(parameters.model.table_rows):
        indices = batch.table_indices(table)
        tables.append(
            {
                "table": table,
                "rows": rows,
                "lookups_per_batch": indices.numel(),
                "unique_rows_per_batch": indices.unique().numel(),
            }
        )
    return {"batches": 1, "tables": tables}


def expected(parameters: Parameters, batch: Batch) -> pd.DataFrame:
    work = operator_work(parameters, statistics_of(batch, parameters))
    work = work.loc[work.index.repeat(work["count"])]
    return work[~work["component"].isin(["data", "transfer"])]


DCN = {"model__interaction": "dcn", "model__dcn_layers": 2, "model__dcn_rank": 3}

CASES: list[dict[str, Any]] = [
    {},
    {"model__loss": "bce"},
    {"model__loss": "wbce", "model__loss_weights": [1.0, 2.0]},
    {"model__interaction": "cat"},
    {"model__interaction_itself": True, "model__loss_threshold": 0.1},
    {"data__indices_per_lookup": 1, "training__batch_size": 1},
    {"training__precision": "bf16"},
    {"training__precision": "bf16", "model__interaction_itself": True},
    {"training__precision": "bf16", "model__interaction": "cat", "model__loss_threshold": 0.1},
    {"training__micro_batch": 3},
    {"training__optimizer": "adagrad"},
    {"training__optimizer": "rowwise_adagrad"},
    {"training__optimizer": "adagrad", "training__fused_optimizer": True},
    {"training__optimizer": "adam"},
    {"training__optimizer": "adam", "training__fused_optimizer": True},
    {"training__micro_batch": 4, "training__precision": "bf16"},
    DCN,
    {"data__multi_hot_sizes": [3, 1]},
    DCN | {"training__batch_size": 1, "model__dcn_layers": 1},
    DCN | {"training__precision": "bf16", "training__optimizer": "adagrad"},
    DCN | {"training__micro_batch": 4, "model__table_rows": [9]},
    {"model__bottom_mlp": [3, 4], "model__top_mlp": [5, 6, 7, 1], "model__table_rows": [9]},
]


def by_part(table: pd.DataFrame, columns: list[str]) -> dict[tuple[str, str], list[Any]]:
    rows = table.sort_values(columns)
    groups = rows.groupby(["component", "phase"])
    return {key: list(map(tuple, group[columns].to_numpy().tolist())) for key, group in groups}


@pytest.mark.parametrize("changes", CASES, ids=lambda changes: str(changes)[:60])
def test_operators_and_bytes_are_those_of_a_real_step(changes, monkeypatch):
    parameters = small(**changes)
    counted, batch = run_step(parameters, monkeypatch)
    work = expected(parameters, batch)
    work = work.rename(columns={"read_bytes": "read", "written_bytes": "written"})
    work["operator"] = work["operator"].str.rstrip("_")
    assert len(counted) > 10
    columns = ["operator", "read", "written"]
    assert by_part(work, columns) == by_part(counted, columns)


widths = st.integers(1, 12)


@settings(max_examples=25, deadline=None)
@given(
    hidden=st.lists(widths, max_size=2),
    top=st.lists(widths, max_size=2),
    dense=widths,
    dim=widths,
    rows=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    size=st.integers(1, 9),
    pooling=st.integers(1, 6),
    itself=st.booleans(),
    cross=st.one_of(st.none(), st.tuples(st.integers(1, 3), widths)),
)
def test_any_shape_has_the_work_of_a_real_step(
    hidden, top, dense, dim, rows, size, pooling, itself, cross
):
    parameters = small(
        model__bottom_mlp=[dense, *hidden, dim],
        model__top_mlp=[*top, 1],
        model__embedding_dim=dim,
        model__table_rows=rows,
        model__interaction_itself=itself,
        model__interaction="dcn" if cross else "dot",
        model__dcn_layers=cross and cross[0],
        model__dcn_rank=cross and cross[1],
        data__indices_per_lookup=pooling,
        training__batch_size=size,
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted, batch = run_step(parameters, monkeypatch)
    work = expected(parameters, batch)
    seen = counted.groupby(["component", "phase"])[["read", "written"]].sum()
    summed = part_work(parameters, statistics_of(batch, parameters))
    summed = summed.set_index(["component", "phase"]).loc[seen.index]
    assert summed["read_bytes"].to_list() == seen["read"].to_list()
    assert summed["written_bytes"].to_list() == seen["written"].to_list()
    assert summed["operators"].sum() == len(counted) == len(work)


@pytest.mark.parametrize("changes", CASES, ids=lambda changes: str(changes)[:60])
def test_products_have_the_operations_that_torch_counts(changes):
    parameters = small(**changes)
    model = build_model(parameters.model, 1, CPU)
    loss = ClickLoss.of(parameters.model)
    step = TrainingStep(model, loss, parameters.training)
    stream = batches(parameters, CPU)
    with FlopCounterMode(display=False) as counter:
        step(next(stream))
    counted = counter.get_flop_counts()["Global"]
    work = operator_work(parameters)
    # torch does not know the operation that adds in place; it is a product like the others
    chosen = (work["product"] != "") & (work["operator"] != "baddbmm_")
    products = (work["flops"] * work["count"])[chosen].groupby(work["operator"]).sum()
    assert {name: products[name] for name in products.index} == {
        str(operator).rpartition(".")[2]: flops for operator, flops in counted.items()
    }


def test_seed_has_the_operations_of_its_layers():
    parameters = parameters_from_sections(
        {
            "model": {
                "bottom_mlp": [512, 512, 64],
                "top_mlp": [1024, 1024, 1024, 1],
                "embedding_dim": 64,
                "tables": 8,
            },
            "training": {"batch_size": 2048, "device": "cpu"},
        }
    )
    work = operator_work(parameters)
    products = work[work["product"] != ""]
    bottom = 2 * 2048 * (512 * 512 + 512 * 64)
    top = 2 * 2048 * (100 * 1024 + 2 * 1024 * 1024 + 1024)
    flops = products.groupby(["component", "phase"])["flops"].sum()
    assert flops["bottom_mlp", "forward"] == bottom
    # twice the forward pass, less the gradient of the dense features
    assert flops["bottom_mlp", "backward"] == 2 * bottom - 2 * 2048 * 512 * 512
    assert flops["top_mlp", "forward"] == top
    assert flops["top_mlp", "backward"] == 2 * top
    assert flops["interaction", "forward"] == 2 * 2048 * 9 * 9 * 64
    assert flops["interaction", "backward"] == 2 * flops["interaction", "forward"]


def test_a_lookup_reads_a_row_an_index_and_writes_a_share_of_a_vector():
    parameters = small(data__fixed_pooling=True)
    work = part_work(parameters).set_index(["component", "phase"])
    forward = work.loc[("embedding", "forward")]
    lookups_a_batch = 2 * 6 * 5
    assert forward["gather_bytes"] == lookups_a_batch * 4 * 4
    assert forward["read_bytes"] == lookups_a_batch * (4 * 4 + 8) + 2 * 6 * 8
    assert forward["written_bytes"] == 2 * 6 * 4 * 4
    assert work.loc[("embedding", "backward"), "written_bytes"] == lookups_a_batch * 4 * 4


def test_data_is_written_once_and_copied_to_a_gpu_only():
    parameters = small(data__fixed_pooling=True)
    batch = next(batches(parameters, CPU))
    tensors = (batch.dense, batch.indices, batch.offsets, batch.targets)
    real = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    on_cpu = part_work(parameters).set_index("component")
    assert on_cpu.loc["data", "written_bytes"] == real
    assert "transfer" not in on_cpu.index
    on_gpu = part_work(parameters, device="cuda").set_index("component")
    assert on_gpu.loc["transfer", "read_bytes"] == real
    made_there = small(data__place="device")
    assert "transfer" not in part_work(made_there, device="cuda")["component"].to_list()


def test_measured_bags_count_instead_of_the_law():
    parameters = small()
    measured = {"table": 1, "rows": 31, "lookups_per_batch": 9, "unique_rows_per_batch": 4}
    first, second = lookups(parameters, {"tables": [measured]})
    assert first == lookups(parameters)[0]
    assert (second.count, second.unique) == (9.0, 4.0)
    # statistics of another model's table are not this one's
    assert lookups(parameters, {"tables": [{**measured, "rows": 30}]}) == lookups(parameters)


@pytest.mark.parametrize("generator", ["facebook", "uniform", "zipf"])
@pytest.mark.parametrize(("rows", "pooling"), [(1, 4), (2, 7), (12, 20), (1000, 9)])
@pytest.mark.parametrize("fixed", [False, True])
def test_bags_and_different_rows_are_those_of_the_generator(generator, rows, pooling, fixed):
    parameters = small(
        model__table_rows=[rows],
        data__generator=generator,
        data__indices_per_lookup=pooling,
        data__fixed_pooling=fixed,
        training__batch_size=64,
    )
    stream = batches(parameters, CPU)
    drawn = [next(stream).indices for _ in range(60)]
    count = sum(indices.numel() for indices in drawn) / len(drawn)
    unique = sum(indices.unique().numel() for indices in drawn) / len(drawn)
    # 3840 bags: the mean of their sizes is known to about 1 %
    assert 64 * mean_lookups(parameters, rows) == pytest.approx(count, rel=0.04)
    assert expected_unique(parameters, rows, count) == pytest.approx(unique, rel=0.06)


@given(size=st.integers(1, 5000), piece=st.integers(1, 5000))
def test_pieces_of_a_batch_add_up(size, piece):
    parameters = small(training__batch_size=size, training__micro_batch=piece)
    pieces = micro_batches(parameters)
    assert sum(rows * count for rows, count in pieces) == size
    assert all(0 < rows <= piece for rows, _ in pieces)


@pytest.mark.parametrize("backend", ["torch", "fused"])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_rows_of_two_bytes_are_gathered_as_such(backend, optimizer):
    found = {}
    for precision in ("fp32", "bf16"):
        sections = {
            "model": {"embedding_precision": precision, "table_rows": [5000], "tables": 2},
            "data": {"indices_per_lookup": 7, "fixed_pooling": True},
            "training": {
                "batch_size": 32,
                "embedding_backend": backend,
                "optimizer": optimizer,
                "device": "cpu",
            },
        }
        table = operator_work(parameters_from_sections(sections))
        found[precision] = table[table["component"] == "embedding"]
    rows = 2 * 32 * 7 * 64
    looked_up = {
        name: table[table["phase"] == "forward"]["gather_bytes"].sum()
        for name, table in found.items()
    }
    assert looked_up["bf16"] <= 2 * rows < looked_up["fp32"] <= 4 * rows
    assert looked_up["bf16"] == looked_up["fp32"] / 2
    # a row is written once, its accumulator in fp32 beside it
    if backend == "fused":
        one = found["bf16"][found["bf16"]["phase"] == "backward"].iloc[0]
        other = found["fp32"][found["fp32"]["phase"] == "backward"].iloc[0]
        state = 4 if optimizer == "rowwise_adagrad" else 0
        ratio = (2 * 64 + state) / (4 * 64 + state)
        assert one["written_bytes"] == pytest.approx(ratio * other["written_bytes"])


def test_the_fused_back_end_writes_nothing_of_the_size_of_the_lookups():
    plain, fused = small(), small(training__embedding_backend="fused")
    torch_work, work = (part_work(p).set_index(["component", "phase"]) for p in (plain, fused))
    # the update happens in backward, in one call for all tables
    assert ("embedding", "update") not in work.index
    assert work.loc[("embedding", "backward"), "operators"] == 1
    unique = sum(table.unique for table in lookups(fused))
    assert work.loc[("embedding", "backward"), "written_bytes"] == pytest.approx(unique * 4 * 4)
    both = torch_work.loc["embedding"]["written_bytes"][["backward", "update"]].sum()
    assert work.loc[("embedding", "backward"), "written_bytes"] < both / 2
    stateful = small(training__embedding_backend="fused", training__optimizer="adagrad")
    twice = part_work(stateful).set_index(["component", "phase"])
    assert twice.loc[("embedding", "backward"), "written_bytes"] == pytest.approx(
        2 * unique * 4 * 4
    )
