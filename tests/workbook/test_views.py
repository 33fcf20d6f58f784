"""Top-down, bottom-up and flat views: sums, recursion, and agreement with plain loops."""

import time
from collections import defaultdict
from pathlib import Path

import gpu_trace
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_rows import BOTH, profile_of_rows
from recordings import database_profile

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis.attribution import step_contexts
from dlrm_workbook.analysis.context_tree import outermost_contexts, reason_of, scopes_of
from dlrm_workbook.analysis.views import bottom_up, flat, top_down
from dlrm_workbook.recordings.hpctoolkit.database import read_database
from dlrm_workbook.recordings.hpctoolkit.to_profile import profile_from_database
from dlrm_workbook.recordings.profile import Profile, inclusive_from_exclusive, nearest
from tests.hpctoolkit_tree import random_tree
from tests.hpctoolkit_writer import Measured, write_database

NAMES = ("dlrm-cpu-native", "dlrm-cpu-python", "loops-cputime-t", "loops-cuda-nvidiapc-t", "small")


def chief(profile: Profile) -> str:
    return "cpu_time_ms" if profile.has("cpu_time_ms") else str(profile.metrics["metric"].iloc[0])


def made(parent: list[int], names: list[str], own: list[float], kinds: str = "") -> Profile:
    """A profile with one thread; ``kinds`` one letter a context: f, l(ine) or t(hread)."""
    kind = {"f": "function", "l": "line", "t": "thread"}
    count = len(parent)
    inclusive = inclusive_from_exclusive(np.array(parent), np.array(own))
    contexts = {
        "parent": parent,
        "kind": [kind[k] for k in kinds or "f" * count],
        "name": names,
        "file": [f"{name}.py" for name in names],
        "line": range(count),
        "module": "m",
    }
    values = [
        (0, row, "cpu_time_ms", scope, column[row])
        for scope, column in zip(BOTH, (own, inclusive), strict=True)
        for row in range(count)
    ]
    return profile_of_rows(contexts, values)


# thread -> f -> line -> g -> f -> g, and thread -> g
RECURSIVE = made(
    [-1, 0, 1, 2, 3, 4, 0],
    ["thread", "f", "f.py:7", "g", "f", "g", "g"],
    [0, 1, 2, 4, 8, 16, 32],
    "tflfffff"[:7],
)


def test_a_recursive_function_is_counted_once() -> None:
    table = flat(RECURSIVE).set_index("name")
    assert table.loc["f", ["exclusive", "inclusive"]].tolist() == [11, 31]
    assert table.loc["g", ["exclusive", "inclusive"]].tolist() == [52, 60]
    assert table["exclusive"].sum() == 63


def test_bottom_up_splits_a_function_by_its_callers() -> None:
    table = bottom_up(RECURSIVE, smallest_share=0)
    rows = [(r.depth, r.name, r.exclusive, r.inclusive) for r in table.itertuples(index=False)]
    assert rows == [
        (0, "g", 52, 60),
        (1, "thread", 32, 32),
        (1, "f", 20, 28),
        (2, "g", 16, 0),
        (3, "f", 16, 0),
        (4, "thread", 16, 0),
        (2, "thread", 4, 28),
        (0, "f", 11, 31),
        (1, "g", 8, 0),
        (2, "f", 8, 0),
        (3, "thread", 8, 0),
        (1, "thread", 3, 31),
    ]
    below = table[table["parent"] >= 0].groupby("parent")[["exclusive", "inclusive"]].sum()
    above = table.set_index("id").loc[below.index, ["exclusive", "inclusive"]]
    pd.testing.assert_frame_equal(below, above, check_names=False)


def test_top_down_marks_the_hot_path_and_joins_what_is_small() -> None:
    table = top_down(RECURSIVE, smallest_share=0.3)
    rows = [
        (r.depth, r.name, r.inclusive, r.exclusive, r.small, r.hot)
        for r in table.itertuples(index=False)
    ]
    assert rows == [
        (0, "thread", 63, 0, 0, True),
        (1, "g", 32, 32, 0, True),
        (1, "f", 31, 3, 0, False),
        (2, "g", 28, 4, 0, False),
        (3, "f", 24, 8, 16, False),
    ]
    assert (table["exclusive"] + table["small"]).sum() == table.attrs["total"] == 63


def test_a_view_can_be_of_some_contexts_only() -> None:
    within = np.array([False, True, True, True, False, False, False])
    assert flat(RECURSIVE, within=within)["exclusive"].tolist() == [4, 3]
    assert top_down(RECURSIVE, within=within)["inclusive"].tolist() == [7, 7, 4]
    assert bottom_up(RECURSIVE, within=within)["exclusive"].tolist() == [4, 4, 4, 3, 3]


def test_what_was_not_measured_is_empty_and_says_why() -> None:
    for table in (
        top_down(RECURSIVE, "gpu_time_ms"),
        bottom_up(RECURSIVE, "gpu_time_ms"),
        flat(RECURSIVE, "gpu_time_ms"),
    ):
        assert table.empty
        assert "gpu_time_ms" in reason_of(table)
    assert top_down(RECURSIVE, also=["gpu_time_ms"])["gpu_time_ms (inc)"].isna().all()
    with pytest.raises(InputError, match="by 'colour'"):
        flat(RECURSIVE, by="colour")


@st.composite
def trees(draw: st.DrawFn) -> Profile:
    count = draw(st.integers(1, 30))
    parent = [-1] + [draw(st.integers(-1 if i > 20 else 0, i - 1)) for i in range(1, count)]
    names = [draw(st.sampled_from("abc")) for _ in range(count)]
    own = [float(draw(st.integers(0, 9))) for _ in range(count)]
    kinds = "".join(draw(st.sampled_from("fffl")) for _ in range(count))
    return made(parent, names, own, kinds)


@given(trees())
def test_views_equal_plain_loops(profile: Profile) -> None:
    parent = profile.contexts["parent"].tolist()
    line = profile.contexts["kind"].eq("line").tolist()
    own = profile.value_table("cpu_time_ms").tolist()
    inclusive = profile.value_table("cpu_time_ms", "inclusive").tolist()

    def path(row: int) -> list[int]:
        return [row] if parent[row] < 0 else [row, *path(parent[row])]

    def scope(row: int) -> int:
        return next((r for r in path(row) if not line[r]), row)

    scopes = scopes_of(profile.contexts)
    assert scopes.tolist() == [scope(row) for row in range(len(parent))]
    name = [profile.contexts["name"][r] for r in scopes]
    key = np.array([ord(n) - 97 for n in name])
    once = [all(name[r] != name[row] for r in path(row)[1:]) for row in range(len(parent))]
    assert outermost_contexts(np.array(parent), key).tolist() == once
    marked = np.array(line)
    expected = [next((r for r in path(row) if line[r]), -1) for row in range(len(parent))]
    assert nearest(np.array(parent), marked).tolist() == expected

    exclusive, whole = defaultdict(float), defaultdict(float)
    for row, function in enumerate(name):
        exclusive[function] += own[row]
        whole[function] += inclusive[row] if once[row] else 0
    table = flat(profile).set_index("name")
    for function, row in table.iterrows():
        assert (row["exclusive"], row["inclusive"]) == (exclusive[function], whole[function])
    total = sum(own)
    assert table["exclusive"].sum() == total
    bottom = bottom_up(profile, count=99, callers=99, smallest_share=0)
    assert bottom.loc[bottom["depth"] == 0, "exclusive"].sum() == total
    for share in (0, 0.2):
        down = top_down(profile, smallest_share=share)
        assert (down["exclusive"] + down["small"]).sum() == total


@pytest.mark.parametrize("name", NAMES)
def test_totals_of_real_databases_equal_the_root(name: str) -> None:
    profile = database_profile(name)
    for metric in {chief(profile), *profile.metrics["metric"].head(4)}:
        total = profile.value_table(metric, "inclusive")[0]
        for by in ("function", "file", "module", "line"):
            table = flat(profile, metric, by)
            assert table["exclusive"].sum() == pytest.approx(total, rel=1e-9)
            assert (table["inclusive"] >= table["exclusive"] - 1e-9 * total).all()
            assert table["inclusive"].max() <= total * (1 + 1e-9)
        bottom = bottom_up(profile, metric, count=10**6)
        assert bottom.loc[bottom["depth"] == 0, "exclusive"].sum() == pytest.approx(total)
        functions = flat(profile, metric).query("exclusive > 0")
        roots = bottom[bottom["depth"] == 0]
        kinds = roots["kind"].isin(["root", "thread"]).to_numpy()
        np.testing.assert_allclose(
            np.sort(roots["inclusive"][~kinds]),
            np.sort(functions["inclusive"][~functions["kind"].isin(["root", "thread"])]),
        )
        down = top_down(profile, metric)
        assert (down["exclusive"] + down["small"]).sum() == pytest.approx(total)
        assert down["hot"].iloc[0]


def test_a_kernel_hangs_below_the_cpu_frames_that_launched_it() -> None:
    table = top_down(database_profile("loops-cuda-nvidiapc-t"), "gpu_time_ms", also=["GINS"])
    assert table["name"].tolist()[-2:][0] == "kernmain()"
    assert table["name"].tolist()[2:4] == ["main", "kernmain"]
    assert table["hot"].iloc[:9].all()
    assert table["GINS (inc)"].iloc[0] == 2_691_465_216


def test_views_of_a_torch_trace(tmp_path: Path) -> None:
    profile = gpu_trace.read(tmp_path, gpu_trace.events())
    down = top_down(profile, within=step_contexts(profile), also=["gpu_time_ms"])
    assert down.attrs["total"] == pytest.approx(0.1)
    gemm = down[down["name"] == "gemm"].iloc[0]
    assert (gemm["inclusive"], gemm["component"]) == (0, "bottom_mlp")
    assert gemm["gpu_time_ms (inc)"] == pytest.approx(0.02)
    launches = flat(profile, "calls").set_index("name")
    assert launches.loc["cudaLaunchKernel", "exclusive"] == 2
    assert launches["inclusive"].isna().all()
    assert "not the sum" in reason_of(top_down(profile, "calls"))


def test_a_large_deep_tree_takes_seconds(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    deep = random_tree(rng, 3000, "deep")
    points = np.where(deep.hidden, 0.0, rng.random(3000))
    write_database(tmp_path / "deep.d", deep, [Measured({"CPUTIME (sec)": points})])
    profile = profile_from_database(read_database(tmp_path / "deep.d"))
    assert flat(profile)["exclusive"].sum() == pytest.approx(1e3 * points.sum())

    count = 300_000
    parent = (rng.random(count) * np.arange(count)).astype(int)
    parent[0] = -1
    names = np.array([f"f{i}" for i in range(5000)], dtype=object)[rng.integers(0, 5000, count)]
    large = made([-1], ["f"], [1.0])
    columns = {"context": np.arange(count), "parent": parent, "name": names, "file": names}
    large.contexts = pd.DataFrame(
        columns | {"kind": "function", "line": 1, "module": "", "component": "", "phase": ""}
    )
    own = rng.random(count)
    both = {"exclusive": own, "inclusive": inclusive_from_exclusive(parent, own)}.items()
    large.values = pd.concat(
        pd.DataFrame(
            {"profile": 0, "context": columns["context"], "metric": "cpu_time_ms",
             "scope": scope, "value": value}
        )
        for scope, value in both
    )  # fmt: skip
    began = time.process_time()  # not the wall clock: others may hold the machine
    top_down(large)
    bottom_up(large)
    assert flat(large)["exclusive"].sum() == pytest.approx(own.sum())
    assert time.process_time() - began < 20  # 1.5 s
