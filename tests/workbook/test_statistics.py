"""Index statistics of batches: exact on known ones, and beside the run, not out of it."""

from collections import Counter, OrderedDict

import numpy as np
import pytest
import small_training
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.data.batch import Batch
from dlrm_core.data.loader import make_generator
from dlrm_workbook.analysis.reuse import cache_hit_shares as cache_table
from dlrm_workbook.analysis.reuse import row_reuse
from dlrm_workbook.evidence.cache import hit_curve
from dlrm_workbook.evidence.data_statistics import batch_statistics, run_statistics
from dlrm_workbook.samples import sample_profile
from dlrm_workbook.show.roofline import cache_curve

CPU = torch.device("cpu")


def parameters(rows, **data):
    return small_training.parameters(data, {"table_rows": list(rows)}, batch_size=64)


def batch(tables: list[list[list[int]]]) -> Batch:
    """A batch whose bags are given: tables x samples x indices."""
    flat = [[row for bag in bags for row in bag] for bags in tables]
    starts = [0]
    for indices in flat:
        starts.append(starts[-1] + len(indices))
    offsets = []
    for bags in tables:
        sizes = torch.tensor([len(bag) for bag in bags])
        offsets.append(sizes.cumsum(0) - sizes)
    size = len(tables[0])
    return Batch(
        torch.zeros(size, 4),
        torch.tensor([row for indices in flat for row in indices], dtype=torch.int64),
        torch.stack(offsets),
        tuple(starts),
        torch.zeros(size, 1),
    )


def test_figures_of_a_known_batch():
    found = batch_statistics(
        [batch([[[0, 1], [1]], [[5], [5]]]), batch([[[1, 2, 3], [0]], [[4], [6]]])],
        parameters([10, 20]),
    )
    assert found["batches"] == 2
    first, second = found["tables"]
    assert first == {
        "table": 0,
        "rows": 10,
        "lookups_per_batch": 3.5,
        "mean_bag": 1.75,
        "unique_rows_per_batch": 3.0,
        "hottest_share": pytest.approx((2 / 3 + 1 / 4) / 2),
        "lookups": 7,
        "rows_used": 4,
        "rows_used_once": 2,
    }
    assert second["hottest_share"] == pytest.approx((1 + 1 / 2) / 2)
    assert second["unique_rows_per_batch"] == 1.5


@given(st.lists(st.lists(st.integers(0, 30), max_size=6), min_size=1, max_size=8))
def test_agrees_with_counting(bags):
    (table,) = batch_statistics([batch([bags])], parameters([31]))["tables"]
    rows = Counter(row for bag in bags for row in bag)
    lookups = sum(rows.values())
    assert table["lookups_per_batch"] == lookups
    assert table["mean_bag"] == pytest.approx(lookups / len(bags))
    assert table["unique_rows_per_batch"] == len(rows)
    assert table["hottest_share"] == pytest.approx(max(rows.values(), default=0) / max(lookups, 1))


@pytest.mark.parametrize("generator", ["facebook_loop", "facebook", "uniform", "zipf", "reuse"])
def test_are_of_the_run_s_own_batches(generator):
    run = parameters([5000, 40], generator=generator, indices_per_lookup=20)
    stream = make_generator(run, CPU)
    own = [stream.next_batch() for _ in range(3)]
    assert run_statistics(run) == batch_statistics(own, run)


def test_a_skewed_law_shows():
    even = run_statistics(parameters([5000], generator="uniform"))["tables"][0]
    skewed = run_statistics(parameters([5000], generator="zipf", zipf_exponent=1.5))["tables"][0]
    assert skewed["hottest_share"] > 10 * even["hottest_share"]
    assert skewed["unique_rows_per_batch"] < even["unique_rows_per_batch"]


def test_the_run_s_random_numbers_are_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    run_statistics(parameters([100], generator="uniform"))
    assert torch.equal(torch.rand(4), expected)


def lookups(law: str, rows: int, batches: int = 3) -> list[list[np.ndarray]]:
    """Rows looked up, by batch and table: two tables, the first twice as often."""
    random = np.random.default_rng(4)

    def draw(count: int) -> np.ndarray:
        even = random.integers(0, rows, count)
        return even if law == "uniform" else random.zipf(1.2, count) % rows

    return [[draw(4 * rows), draw(2 * rows)] for _ in range(batches)]


def lru_hit_share(batches: list[list[np.ndarray]], size: int) -> float:
    """Hits of the last batch, by keeping such a cache."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = 0
    for number, tables in enumerate(batches):
        for key in ((table, row) for table, rows in enumerate(tables) for row in rows.tolist()):
            hits += number == len(batches) - 1 and key in cache
            cache[key] = None
            cache.move_to_end(key)
            if len(cache) > size:
                cache.popitem(last=False)
    return hits / sum(rows.size for rows in batches[-1])


@pytest.mark.parametrize("law", ["uniform", "skewed"])
def test_hit_rates_are_those_of_a_cache(law):
    batches = lookups(law, 700)
    found = hit_curve(batches)
    used = {(table, row) for batch in batches[:-1] for table in (0, 1) for row in batch[table]}
    assert [row["rows"] for row in found] == [2**k for k in range(6, 20) if 2**k <= len(used)]
    for row in found:
        assert row["hit_share"] == pytest.approx(lru_hit_share(batches, row["rows"]), abs=1e-12)
        assert row["error"] == 0.0


@pytest.mark.parametrize("law", ["uniform", "skewed"])
def test_hit_rates_of_followed_rows_lie_within_their_error(law):
    batches = lookups(law, 8000)
    exact = hit_curve(batches)
    for followed in (60_000, 100_000):
        near = hit_curve(batches, followed)
        for row, true in zip(near[1:], exact[1:], strict=False):
            assert row["rows"] == true["rows"] and 0 < row["error"] < 0.05
            assert abs(row["hit_share"] - true["hit_share"]) < 4 * row["error"] + 0.005


def test_a_row_that_takes_nearly_all_lookups_leaves_room_for_others():
    random = np.random.default_rng(2)
    batches = [
        [np.where(random.random(90_000) < 0.98, 7, random.integers(0, 50_000, 90_000))]
        for _ in range(3)
    ]
    near, exact = hit_curve(batches, 20_000), hit_curve(batches)
    for row, true in zip(near, exact, strict=False):
        assert row["hit_share"] == pytest.approx(true["hit_share"], abs=4 * row["error"] + 0.001)


def test_without_lookups_or_a_batch_before_there_is_no_rate():
    none = np.zeros(0, np.int64)
    assert (
        hit_curve([]) == hit_curve([[none], [none]]) == hit_curve(lookups("uniform", 99, 1)) == []
    )


def test_tables_of_a_profile():
    profile = sample_profile()
    profile.meta.pop("data_statistics", None)
    for table in (row_reuse(profile), cache_table(profile)):
        assert table.empty and "`dlrm run profile -f FILE`" in table.attrs["not_measured"]
    run = parameters([5000, 40], generator="reuse", indices_per_lookup=20)
    profile.meta["data_statistics"] = run_statistics(run)
    profile.meta["parameters"] = run.to_sections()
    first, second = row_reuse(profile).itertuples()
    counted = profile.meta["data_statistics"]["tables"][0]
    assert first.lookups_per_row == counted["lookups"] / counted["rows_used"] > 1
    assert second.used_once_share < first.used_once_share < 1
    assert 0 < first.used_once_lookups_share < first.unique_share < 1
    hits = cache_table(profile)
    assert hits["cache_bytes"].tolist() == [4 * 4 * rows for rows in hits["rows"]]
    assert (hits["low"] <= hits["hit_share"]).all() and (hits["hit_share"] <= hits["high"]).all()
    assert hits["hit_share"].is_monotonic_increasing
    (line,) = cache_curve(hits).data
    assert list(line.y) == hits["hit_share"].tolist()
    marked = [len(cache_curve(hits, size).layout.shapes) for size in (4096, 1 << 40)]
    assert marked == [1, 0]
