"""Bytes, shardings and memory of ranks against counting by hand, and the study's table."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_records import placement

from dlrm_core.base.errors import InputError
from dlrm_core.config import DataConfig, ModelConfig, Parameters, TrainingConfig, load_parameters
from dlrm_core.model import DLRM
from dlrm_studies.scaling.model.choice import rank_memory
from dlrm_studies.scaling.model.communication import (
    STUDY,
    allreduce_bytes,
    alltoall_bytes,
    dense_parameters,
    full_size,
    study_of,
    study_table,
    volumes,
    volumes_by_sharding,
)
from dlrm_studies.scaling.model.sharding import (
    KINDS,
    SHARDINGS,
    lookup_cost,
    make_plan,
    maximum_ranks,
)

PRESETS = Path(__file__).parents[2] / "parameters"


def small(
    rows: tuple[int, ...] = (50, 20, 20, 7), dim: int = 16, lookups: int = 3, batch: int = 32
) -> Parameters:
    model = ModelConfig(
        bottom_mlp=(4, 8, dim), top_mlp=(8, 1), embedding_dim=dim, tables=None, table_rows=rows
    )
    data = DataConfig(generator="uniform", indices_per_lookup=lookups, fixed_pooling=True)
    return Parameters(model=model, data=data, training=TrainingConfig(batch_size=batch))


# ---- the study --------------------------------------------------------------------------


def test_the_study_s_columns_come_out_of_the_formulas() -> None:
    table = study_table().set_index("name")
    assert (table["ranks"] == table["quoted_ranks"]).all()
    assert table["allreduce_error"].abs().max() < 0.005
    assert table.loc[["Large", "MLPerf"], "alltoall_error"].abs().max() < 0.005
    # 4 * 8 tables * 8192 samples * 64 wide is 2^24 bytes; the study prints 15.8
    assert table.loc["Small", "alltoall_mib"] == 16.0
    assert table["allreduce_mib"].round(2).tolist() == [9.53, 1046.81, 9.04]


@pytest.mark.parametrize("study", STUDY, ids=lambda study: study.preset)
def test_presets_have_the_study_s_layers_and_find_their_full_size(study) -> None:
    preset = load_parameters(PRESETS / f"{study.preset}.yaml")
    assert study_of(preset) is study
    whole = full_size(preset)
    assert whole.model.table_rows == study.table_rows
    tables = {name: getattr(preset.model, name) for name in ("tables", "table_rows")}
    assert replace(whole.model, **tables) == preset.model
    assert whole.data.indices_per_lookup == preset.data.indices_per_lookup == study.lookups
    # scaled to fit: tables and weights of the dense part together
    weights = sum(preset.model.table_rows) * preset.model.embedding_dim + dense_parameters(preset)
    assert 4 * weights < 4 << 30
    assert full_size(load_parameters(PRESETS / "quick.yaml")).title.startswith("Quick")
    # the study's MLPs around cross layers are another model
    dcn = load_parameters(PRESETS / "mlperf_dcn.yaml")
    assert dcn.model.top_mlp == STUDY[2].parameters.model.top_mlp and full_size(dcn) is dcn


def test_dense_gradients_are_as_large_as_the_model_s_own() -> None:
    parameters = small()
    model = DLRM(parameters.model)
    own = sum(p.numel() for name, p in model.named_parameters() if "embedding" not in name)
    assert dense_parameters(parameters) == own
    assert allreduce_bytes(parameters) == 4 * own


# ---- plans ------------------------------------------------------------------------------

ROWS = st.lists(st.integers(1, 3000), min_size=1, max_size=12).map(tuple)


@st.composite
def plans(draw):
    dim = draw(st.sampled_from([16, 32, 48, 64]))
    parameters = small(draw(ROWS), dim, draw(st.integers(1, 20)))
    ranks = draw(st.integers(1, 17))
    kinds = draw(
        st.one_of(
            st.sampled_from(SHARDINGS),
            st.tuples(*[st.sampled_from(KINDS) for _ in parameters.model.table_rows]),
        )
    )
    return parameters, make_plan(parameters, ranks, kinds, idle=True)


@given(plans())
def test_every_weight_has_exactly_one_owner_or_as_many_as_ranks(drawn) -> None:
    parameters, plan = drawn
    placed = placement(plan)
    dim = parameters.model.embedding_dim
    for table, shards in placed.groupby("table"):
        rows = parameters.model.table_rows[int(table)]
        held = (shards["rows"] * shards["columns"]).sum()
        copies = plan.ranks if (shards["kind"] == "replicated").all() else 1
        assert held == rows * dim * copies
        assert shards["rank"].between(0, plan.ranks - 1).all()
        if shards["kind"].iloc[0] == "column_wise":
            assert shards["rank"].nunique() == min(len(shards), plan.ranks)
    by_rank = placed.assign(size=4 * placed["rows"] * placed["columns"]).groupby("rank")["size"]
    expected = by_rank.sum().reindex(range(plan.ranks), fill_value=0)
    assert plan.table_bytes().tolist() == expected.tolist()


@given(plans())
def test_whole_tables_are_packed_within_graham_s_bound(drawn) -> None:
    _, plan = drawn
    kinds = {table.kind for table in plan.tables}
    work = plan.work()
    if not kinds & {"row_wise", "column_wise"}:
        assert np.isclose(work.sum(), 1)
    assert work.sum() >= 1 - 1e-9
    if kinds == {"table_wise"}:
        costs = np.array([lookup_cost(count, plan.dim) for count in plan.lookups])
        each, ranks = costs / costs.sum(), plan.ranks
        # any greedy order; and the longest first against the best of all placements (Graham 1969)
        assert work.max() <= 1 / ranks + each.max() * (1 - 1 / ranks) + 1e-9
        if len(each) <= 6 and ranks <= 3:
            assert work.max() <= _best(each, ranks) * (4 / 3 - 1 / (3 * ranks)) + 1e-9


def _best(each: np.ndarray, ranks: int) -> float:
    """The least makespan, by trying everything."""
    return min(
        max(sum(c for c, r in zip(each, where, strict=True) if r == rank) for rank in range(ranks))
        for where in itertools.product(range(ranks), repeat=len(each))
    )


def test_more_ranks_than_tables_are_refused_with_both_numbers() -> None:
    parameters = small()
    assert maximum_ranks(parameters, "table_wise") == 4
    assert maximum_ranks(parameters, "column_wise") == 4
    assert maximum_ranks(parameters, "row_wise") == 50
    with pytest.raises(InputError, match=r"ranks is 5, but table_wise sharding reaches 4"):
        make_plan(parameters, 5, "table_wise")
    assert make_plan(parameters, 5, "table_wise", idle=True).idle_ranks == 1
    assert maximum_ranks(small(dim=64), "column_wise") == 16
    with pytest.raises(InputError, match=r"lists 2 kinds, the model has 4"):
        make_plan(parameters, 4, ["table_wise", "row_wise"])
    with pytest.raises(InputError, match=r"expected one of table_wise"):
        make_plan(parameters, 4, "diagonal")
    with pytest.raises(InputError, match=r"ranks is 0"):
        make_plan(parameters, 0)


# ---- volumes ----------------------------------------------------------------------------


@settings(max_examples=60)
@given(plans(), st.integers(1, 6))
def test_volumes_are_what_shards_send_one_by_one(drawn, per_rank: int) -> None:
    """Every vector, index and partial sum counted sample by sample."""
    parameters, plan = drawn
    batch = per_rank * plan.ranks
    found = volumes(parameters, plan, batch)
    if plan.ranks == 1:
        assert found.empty
        return
    totals = found.set_index(["collective", "what"])["total_bytes"].to_dict()
    payload = found.set_index(["collective", "what"])["bytes"].to_dict()
    dim, lookups = plan.dim, parameters.data.indices_per_lookup
    pooled = indices = partial = copies = 0
    sends = [0] * plan.ranks
    for table in plan.tables:
        for rank in table.ranks:
            if table.kind in ("table_wise", "column_wise"):
                pooled += 4 * batch * table.columns
                sends[rank] += 4 * batch * table.columns
                indices += 8 * batch * (lookups + 1)
        if table.kind == "row_wise":
            partial += 4 * batch * dim
            indices += 8 * batch * (lookups + plan.ranks)
        if table.kind == "replicated":
            copies += 4 * table.rows * dim
    assert totals.get(("alltoall", "pooled vectors"), 0) == pooled
    assert totals.get(("alltoall", "pooled gradients"), 0) == pooled
    assert totals.get(("alltoall", "indices"), 0) == pytest.approx(indices)
    assert payload.get(("reduce_scatter", "pooled vectors"), 0) == partial
    assert payload.get(("allgather", "pooled gradients"), 0) == partial
    assert payload.get(("allreduce", "table gradients"), 0) == copies
    assert payload["allreduce", "dense gradients"] == allreduce_bytes(parameters)
    most = max(max(sends), pooled / plan.ranks)
    assert payload.get(("alltoall", "pooled vectors"), 0) == pytest.approx(most)
    away = (plan.ranks - 1) / plan.ranks
    ring = found["collective"].eq("allreduce") + 1
    assert np.allclose(found["leaves_bytes"], found["bytes"] * away * ring)


def test_table_wise_exchanges_the_study_s_volume() -> None:
    parameters = small()
    found = volumes(parameters, make_plan(parameters, 4), 32).set_index("what")
    assert found.loc["pooled vectors", "total_bytes"] == alltoall_bytes(parameters, 32)
    with pytest.raises(InputError, match=r"batch_size is 3, but there are 4 ranks"):
        volumes(parameters, make_plan(parameters, 4), 3)
    names = volumes_by_sharding(parameters, 8, 32, SHARDINGS)["sharding"].unique()
    assert set(names) == {"row_wise", "replicated", "mixed"}


# ---- memory -----------------------------------------------------------------------------


@given(plans(), st.sampled_from(["sgd", "adagrad", "rowwise_adagrad", "adam"]))
def test_memory_of_ranks_adds_up_to_the_model(drawn, optimizer: str) -> None:
    parameters, plan = drawn
    training = replace(parameters.training, optimizer=optimizer)
    parameters = replace(parameters, training=training)
    table = rank_memory(parameters, plan, 4 * plan.ranks)
    parts = table.drop(columns=["rank", "total_bytes"])
    assert (parts >= 0).all(axis=None)
    assert (parts.sum(axis=1) == table["total_bytes"]).all()
    weights = 4 * sum(parameters.model.table_rows) * plan.dim
    if plan.name == "replicated":
        assert (table["table_bytes"] == weights).all()
    elif not plan.of_kind("replicated"):
        assert table["table_bytes"].sum() == weights
        assert (table["dense_bytes"] == allreduce_bytes(parameters)).all()
    kept = {"sgd": 0, "adagrad": 1, "adam": 2}
    if optimizer in kept:
        expected = kept[optimizer] * (table["table_bytes"] + table["dense_bytes"])
        assert (table["state_bytes"] == expected).all()
    else:
        assert (table["state_bytes"] >= table["dense_bytes"]).all()
