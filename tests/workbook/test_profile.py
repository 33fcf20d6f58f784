"""The Profile tables: checks, files, sums over the tree, Hatchet."""

import json
import sys

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_core.base.errors import InputError
from dlrm_workbook.recordings.profile import SCHEMA, Profile, depths, inclusive_from_exclusive

trees = st.lists(st.floats(0, 1), min_size=1, max_size=60).map(
    lambda draws: np.array([int(draw * row) - 1 for row, draw in enumerate(draws)])
)
"""Parents (n,): each row's is −1 or an earlier row."""


def make(parent: list[int], own: list[float], **tables: object) -> Profile:
    """A profile of one thread with ``cpu_time_ms`` on the tree ``parent``."""
    count = len(parent)
    total = inclusive_from_exclusive(np.array(parent), np.array(own))
    values = [
        {
            "profile": 0,
            "context": row,
            "metric": "cpu_time_ms",
            "scope": scope,
            "value": column[row],
        }
        for scope, column in (("exclusive", own), ("inclusive", total))
        for row in range(count)
    ]
    given: dict[str, object] = {
        "contexts": {
            "context": range(count),
            "parent": parent,
            "kind": "operator",
            "name": [f"f{row}" for row in range(count)],
            "shapes": "",
            "file": "",
            "line": 0,
            "module": "",
            "component": "other",
            "phase": "",
        },
        "metrics": [{"metric": "cpu_time_ms", "unit": "ms", "meaning": "time", "source": "test"}],
        "values": values,
        "threads": [{"profile": 0, "kind": "cpu_thread", "name": "main", "rank": 0, "thread": 1}],
        "meta": {"engine": "test", "device": "cpu", "not_measured": {"gpu_time_ms": "no GPU"}},
    }
    return Profile.build(**{**given, **tables})


@settings(deadline=None)
@given(trees)
def test_depths_and_inclusive_values_agree_with_a_plain_walk(parent: np.ndarray) -> None:
    own = np.arange(1.0, len(parent) + 1)
    depth, total = [], own.copy()
    for above in parent:
        depth.append(0 if above < 0 else depth[above] + 1)
    for row in range(len(parent) - 1, -1, -1):
        if parent[row] >= 0:
            total[parent[row]] += total[row]
    assert depths(parent).tolist() == depth
    np.testing.assert_allclose(inclusive_from_exclusive(parent, own), total)
    both = inclusive_from_exclusive(parent, np.column_stack([own, 2 * own]))
    np.testing.assert_allclose(both, np.column_stack([total, 2 * total]))
    assert np.isclose(total[parent < 0].sum(), own.sum())


def test_saved_and_loaded_profile_is_the_same(tmp_path) -> None:
    profile = make([-1, 0, 0, 1], [1, 2, 3, 4])
    folder = profile.save(tmp_path / "deep" / "profile")
    again = Profile.load(folder)
    for table in SCHEMA:
        pd.testing.assert_frame_equal(getattr(again, table), getattr(profile, table))
    assert again.meta == profile.meta
    assert [path.name for path in folder.parent.iterdir()] == ["profile"]


def test_no_profile_is_written_over_another_or_where_none_can_be(tmp_path) -> None:
    profile = make([-1], [1])
    profile.save(tmp_path / "p")
    with pytest.raises(InputError, match="exists already"):
        profile.save(tmp_path / "p")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write the profile"):
        profile.save(tmp_path / "file" / "p")


def test_nothing_is_left_when_saving_fails(tmp_path) -> None:
    profile = make([-1], [1])
    profile.meta["odd"] = object()
    with pytest.raises(TypeError, match="object"):
        profile.save(tmp_path / "p")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("table", list(SCHEMA))
def test_damaged_folders_are_refused_by_name(tmp_path, table: str) -> None:
    folder = make([-1, 0], [1, 2]).save(tmp_path / "p")
    file = folder / f"{table}.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=rf"{table}\.parquet.*cut short"):
        Profile.load(folder)
    file.unlink()
    with pytest.raises(InputError, match=rf"no {table}\.parquet"):
        Profile.load(folder)
    column = next(iter(SCHEMA[table]))
    frame = getattr(make([-1, 0], [1, 2]), table).drop(columns=column)
    frame.to_parquet(file)
    with pytest.raises(InputError, match=rf"{table}\.parquet lacks the column\(s\) {column}"):
        Profile.load(folder)


def test_unknown_format_version_and_broken_head_are_refused(tmp_path) -> None:
    with pytest.raises(InputError, match=r"no profile\.json"):
        Profile.load(tmp_path)
    folder = make([-1], [1]).save(tmp_path / "p")
    head = folder / "profile.json"
    head.write_text(json.dumps({"format_version": 99}))
    with pytest.raises(InputError, match="format version 99; this version reads 1"):
        Profile.load(folder)
    head.write_text("{")
    with pytest.raises(InputError, match=r"profile\.json cannot be read"):
        Profile.load(folder)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"threads": []}, "'profile' is not in 'threads'"),
        ({"metrics": []}, "'metric' is not in table 'metrics'"),
        ({"iterations": [{"iteration": 0, "start_ns": 5, "end_ns": 4}]}, "before 'start_ns'"),
        (
            {"trace": [{"profile": 0, "start_ns": 0, "end_ns": 1, "context": 7, "depth": 0}]},
            "'context' is not in 'contexts'",
        ),
        ({"threads": [{"profile": "x"}]}, "lacks the column"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tables: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make([-1, 0], [1, 2], **tables)


def test_children_before_parents_are_refused() -> None:
    profile = make([-1, 0], [1, 2])
    profile.contexts["parent"] = [1, -1]
    with pytest.raises(InputError, match="row 0: a parent must come before its children"):
        profile.validate()


def test_what_was_not_measured_is_nan_and_never_zero() -> None:
    profile = make([-1, 0], [1, 0])
    assert not profile.has("gpu_time_ms")
    assert profile.value_table("gpu_time_ms").isna().all()
    assert profile.value_table("cpu_time_ms").tolist() == [1, 0]
    assert profile.not_measured == {"gpu_time_ms": "no GPU"}


def test_hatchet_has_every_metric_and_answers_queries() -> None:
    hatchet_query = pytest.importorskip("hatchet.query")
    profile = make([-1, 0, 0, 1], [1, 2, 3, 4])
    frame = profile.to_hatchet()
    assert "cpu_time_ms" in frame.exc_metrics
    assert "cpu_time_ms (inc)" in frame.inc_metrics
    by_name = frame.dataframe.set_index("name")
    assert by_name["cpu_time_ms"].to_dict() == {"f0": 1, "f1": 2, "f2": 3, "f3": 4}
    assert by_name["cpu_time_ms (inc)"].to_dict() == {"f0": 10, "f1": 6, "f2": 3, "f3": 4}
    assert "10.000 f0" in frame.tree()
    query = hatchet_query.Query().match(".", lambda row: row["name"] == "f1").rel("*")
    found = frame.query_engine.apply(query, frame.graph, frame.dataframe)
    assert sorted(node.frame["name"] for node in found) == ["f1", "f3"]


def test_hatchet_takes_trees_deeper_than_the_recursion_limit() -> None:
    pytest.importorskip("hatchet")
    count = 1200
    before = sys.getrecursionlimit()
    try:
        frame = make(list(range(-1, count - 1)), [1.0] * count).to_hatchet()
        text = frame.tree()
        assert f"{count}.000 f0" in text
        assert f"f{count - 1}" in text
        assert len(list(frame.graph.traverse())) == count
        # Hatchet's own filter puts the recursion limit back to 1000
        kept = frame.filter(lambda row: row["cpu_time_ms"] > 0, num_procs=1)
        assert len(kept.dataframe) == count
    finally:
        sys.setrecursionlimit(before)


def test_values_of_other_tables_are_found_anew() -> None:
    """What a profile remembers of a table is forgotten with the table."""
    profile = make([-1, 0, 0, 1], [1, 2, 3, 4])
    before = profile.value_table("cpu_time_ms")
    assert before.sum() > 0 and profile.has("cpu_time_ms")
    profile.values = profile.values.assign(value=2 * profile.values["value"])
    assert np.array_equal(profile.value_table("cpu_time_ms"), 2 * before)
    profile.values = profile.values.astype({"metric": "object", "scope": "object"})
    assert np.array_equal(profile.value_table("cpu_time_ms"), 2 * before)
    profile.values = profile.values[~profile.rows("cpu_time_ms")]
    assert not profile.has("cpu_time_ms")
    assert profile.value_table("cpu_time_ms").isna().all()


def test_columns_are_numbered_by_distinct_names() -> None:
    profile = make([-1, 0, 0, 1], [1, 2, 3, 4])
    codes, names = profile.numbered("name")
    assert [names[code] for code in codes] == profile.contexts["name"].tolist()
    kinds = profile.contexts["kind"]
    assert np.array_equal(profile.of_kind(kinds[1]), kinds.eq(kinds[1]))
    profile.contexts = profile.contexts.assign(kind="thread")
    assert profile.of_kind("thread").all()
