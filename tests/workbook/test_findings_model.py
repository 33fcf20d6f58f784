"""Rules on the model's parts: operators, tables, settings that were probed and found faster."""

from typing import Any

import pandas as pd
import pytest
from finding_profiles import found, listed, made, ordered

from dlrm_core.config import parameters_from_sections
from dlrm_workbook.analysis.attribution import attribute
from dlrm_workbook.analysis.findings import findings, limit
from dlrm_workbook.analysis.findings.evidence import Evidence
from dlrm_workbook.analysis.findings.operators import extra_table
from dlrm_workbook.analysis.work import operator_work
from dlrm_workbook.recordings.profile import Profile

SECTIONS: dict[str, Any] = {
    "model": {
        "bottom_mlp": [16, 32, 8],
        "top_mlp": [64, 1],
        "embedding_dim": 8,
        "tables": 4,
        "table_rows": 1000,
    },
    "data": {"generator": "uniform", "indices_per_lookup": 4},
    "training": {"batch_size": 128, "device": "cpu", "threads": 1},
}
FUSED = {"embedding_backend": "fused"}

Operators = dict[tuple[str, str, str], float | tuple[float, float]]


def sections(**training: Any) -> dict[str, Any]:
    whole = parameters_from_sections(SECTIONS | {"training": SECTIONS["training"] | training})
    return whole.to_sections()


def needed(ms: float = 1.0, **training: Any) -> Operators:
    """The operators that the model's shapes ask for, ``ms`` each kind, but for the data's."""
    work = operator_work(parameters_from_sections(sections(**training)), None, "cpu")
    work = work[work["component"] != "data"]
    parts: Operators = {}
    for row in work.to_dict("records"):
        key = (row["component"], row["phase"], f"aten::{row['operator']}")
        before = parts.get(key, (ms, 0.0))
        assert isinstance(before, tuple)
        parts[key] = (ms, before[1] + row["count"])
    return parts


def step(
    extra: Operators | None = None, training: dict[str, Any] | None = None, **meta: Any
) -> Profile:
    training = FUSED | (training or {})
    return made({**needed(**training), **(extra or {})}, sections(**training), **meta)


# ---- operators --------------------------------------------------------------------


def test_what_the_shapes_ask_for_is_no_finding() -> None:
    assert listed(step()) == []


@pytest.mark.parametrize(
    ("extra", "id_", "component"),
    [
        (
            {
                ("top_mlp", "backward", "aten::isnan"): (8.0, 9.0),
                ("bottom_mlp", "backward", "aten::isnan"): (6.0, 9.0),
                ("bottom_mlp", "backward", "aten::any"): (2.0, 9.0),
            },
            "anomaly_checks",
            "bottom_mlp",
        ),
        (
            {("embedding", "backward", "aten::_embedding_bag_dense_backward"): (30.0, 4.0)},
            "dense_gradients",
            "embedding",
        ),
        (
            {
                ("interaction", "forward", "aten::_to_copy"): (1.0, 40.0),
                ("interaction", "forward", "aten::copy_"): (12.0, 40.0),
            },
            "conversions",
            "interaction",
        ),
        ({("loss", "forward", "aten::nonzero"): (9.0, 3.0)}, "readbacks", "loss"),
        ({("top_mlp", "forward", "aten::sin"): (9.0, 3.0)}, "foreign_operators", "top_mlp"),
        ({("top_mlp", "forward", "aten::mul"): (8.0, 2000.0)}, "tiny_operators", "top_mlp"),
    ],
    ids=["anomaly", "dense", "conversions", "readbacks", "foreign", "tiny"],
)
def test_operators_that_do_not_belong_are_told_by_what_they_do(extra, id_, component) -> None:
    first = listed(step(extra))[0]
    assert (first.id, first.component) == (id_, component)
    assert ordered(first.predicted_speedup)
    assert next(iter(extra))[2] in first.evidence


def test_few_foreign_operators_are_none() -> None:
    assert listed(step({("top_mlp", "forward", "aten::sin"): (0.5, 3.0)})) == []


def test_extra_operators_count_only_what_is_beyond_need() -> None:
    parts = needed(**FUSED)
    assert isinstance(parts[("top_mlp", "forward", "aten::addmm")], tuple)
    profile = made(
        parts | {("top_mlp", "forward", "aten::addmm"): (10.0, 100.0)}, sections(**FUSED)
    )
    table = extra_table(Evidence(profile, attribute(profile)))
    row = table[table["name"] == "aten::addmm"].iloc[0]
    # two layers, a quarter more, and four calls of slack are let pass
    assert row["calls"] == pytest.approx(100 - (1.25 * 2 + 4))
    assert row["time_ms"] == pytest.approx(10.0 * row["calls"] / 100)


def test_a_step_of_tiny_operators_is_bound_by_dispatch() -> None:
    ceilings = {"dispatch_us": 1.5}
    tiny = {key: (0.004 * value[1], value[1]) for key, value in needed(**FUSED).items()}  # type: ignore[index]
    tiny[("top_mlp", "forward", "")] = 0.2
    profile = made(tiny, sections(**FUSED), ceilings=ceilings)
    first = listed(profile)[0]
    assert (first.id, first.limit) == ("dispatch_bound", "dispatch")
    assert "training.batch_size" in first.advice
    assert "dispatch_bound" not in found(step(ceilings=ceilings))


# ---- tables -----------------------------------------------------------------------


def statistics(hottest: float, rows: int = 1000, lookups: float = 512.0) -> dict[str, Any]:
    table = {"rows": rows, "lookups_per_batch": lookups, "mean_bag": 4.0, "hottest_share": hottest}
    unique = {"unique_rows_per_batch": 1.0 if hottest == 1 else 400.0}
    return {"batches": 3, "tables": [{"table": t, **table, **unique} for t in range(4)]}


def test_equal_indices_are_found_and_the_law_of_the_data_is_not() -> None:
    first = listed(step(data_statistics=statistics(1.0)))[0]
    assert (first.id, first.component) == ("skewed_indices", "embedding")
    assert "100% of its 512 lookups" in first.evidence
    assert listed(step(data_statistics=statistics(0.006))) == []
    profile = step(data_statistics=statistics(0.12))
    assert "skewed_indices" in found(profile)
    # by its own law a Zipf stream's hottest row is that hot
    profile.meta["parameters"]["data"]["generator"] = "zipf"
    assert "skewed_indices" not in found(profile)


@pytest.mark.parametrize(
    ("rows", "fires"),
    [
        ([1000, 1000, 9_000_000, 1000], True),
        ([1_000_000] * 4, False),
        ([10, 10, 2000, 10], False),  # giant beside the others, yet it fits in any cache
    ],
)
def test_one_giant_table(rows: list[int], fires: bool) -> None:
    profile = step(ceilings={"last_level_cache_bytes": 32 << 20})
    profile.meta["parameters"]["model"]["table_rows"] = rows
    assert ("giant_table" in found(profile)) == fires


def test_one_table_with_most_lookups() -> None:
    uneven = statistics(0.006)
    uneven["tables"][1]["lookups_per_batch"] = 50_000.0
    giant = found(step(data_statistics=uneven))["giant_table"]
    assert "Table 1" in giant.title and giant.limit == "load imbalance"


def test_a_sparse_update_without_a_probe_is_only_bounded() -> None:
    slow = {("embedding", "update", "aten::add_"): (30.0, 4.0)}
    first = found(step(slow, {"embedding_backend": "torch"}))["embedding_update"]
    assert first.change == {"training.embedding_backend": "fused"}
    assert first.predicted_speedup["low"] == 1 and "aten::add_ 30.0 ms" in first.evidence
    assert "embedding_update" not in found(step(slow))


# ---- settings ---------------------------------------------------------------------


def probed(change: dict[str, Any], before: float, after: float, **more: Any) -> dict[str, Any]:
    base = {"top_mlp": {"forward": before, "backward": before}}
    parts = {"top_mlp": {"forward": after, "backward": after}}
    probe = {"change": change, "base": base, "parts": parts, "spread": {}, **more}
    return {"base": {}, "changes": [probe]}


HEAVY: Operators = {("top_mlp", "forward", "aten::addmm"): (40.0, 2.0)}


@pytest.mark.parametrize(
    ("change", "more", "id_"),
    [
        ({"training.precision": "bf16"}, {}, "dense_precision"),
        ({"training.precision": "fp16"}, {}, None),
        ({"training.fp32_matmul": "onednn"}, {"error": 1e-6}, "dense_gemm"),
        ({"training.fp32_matmul": "onednn"}, {"error": 2e-3}, None),
        ({"training.fp32_matmul": "onednn"}, {}, None),
        ({"training.micro_batch": 64}, {}, "cache_overflow"),
        ({"training.dense_backend": "fused"}, {}, "dense_kernels"),
        (
            {"training.dense_backend": "fused", "training.fp32_matmul": "bf16x2"},
            {},
            "dense_kernels",
        ),
        ({"training.dense_backend": "fused", "training.precision": "fp16"}, {}, None),
        ({"training.micro_batch": 64, "training.precision": "bf16"}, {}, None),
        ({"training.learning_rate": 0.1}, {}, None),
        ({"training.precision": "bf16"}, {"refused": "no"}, None),
    ],
)
def test_a_faster_setting_that_was_probed(change, more, id_) -> None:
    gemm = [{"precision": "fp32_onednn", "relative_error": more.get("error")}]
    probes = probed(change, 10.0, 4.0, **more)
    profile = step(HEAVY, part_probes=probes, ceilings={"gemm": gemm})
    assert [finding.id for finding in listed(profile)] == ([id_] if id_ else [])
    if id_:
        first = listed(profile)[0]
        assert first.change == change
        assert first.predicted_speedup["mid"] > 1.2 and ordered(first.predicted_speedup)
        assert "10.0 ms with" in first.evidence and "4.00 ms with" in first.evidence


@pytest.mark.parametrize(
    ("training", "ms"), [({}, 9.9), ({"lowest_precision": "fp32"}, 4.0)], ids=["slow", "too narrow"]
)
def test_no_faster_setting_and_none_below_what_accuracy_allows(training: Any, ms: float) -> None:
    probes = probed({"training.precision": "bf16"}, 10.0, ms)
    assert listed(step(HEAVY, training, part_probes=probes)) == []


# ---- ceilings ---------------------------------------------------------------------


def with_roofline(monkeypatch: pytest.MonkeyPatch, **row: Any) -> None:
    whole = {"component": "top_mlp", "phase": "forward", "time_ms": 40.0, "ceiling_ms": 33.2}
    whole |= {"share_of_ceiling": 0.83, "limit": "arithmetic", "gb_per_s": 1.0, "gflops": 1.0}
    table = pd.DataFrame([whole | row])
    monkeypatch.setattr(
        "dlrm_workbook.analysis.findings.evidence.roofline", lambda profile, attribution: table
    )


def test_code_of_a_part_outside_its_operators() -> None:
    first = listed(step({("top_mlp", "forward", ""): 12.0}))[0]
    assert (first.id, first.component) == ("python_in_part", "top_mlp")
    assert listed(step({("top_mlp", "forward", ""): 0.3})) == []


# ---- the limit --------------------------------------------------------------------


def test_the_limit_that_is_met_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_roofline(monkeypatch)
    profile = step(HEAVY, {"precision": "bf16"}, ceilings={"gemm": []})
    attribution = attribute(profile)
    assert findings(profile, attribution) == []
    said = limit(profile, attribution)
    assert said.endswith("at 83.0% of what bf16 matrix products reach here: arithmetic.")
