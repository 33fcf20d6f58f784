"""Index statistics of batches: exact on known ones, and beside the run, not out of it."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.config import parameters_from_sections
from dlrm_core.data.batch import Batch
from dlrm_core.data.loader import make_generator
from dlrm_workbook.evidence.data_statistics import batch_statistics, run_statistics

CPU = torch.device("cpu")


def parameters(rows, **data):
    return parameters_from_sections(
        {
            "model": {
                "bottom_mlp": [4, 8],
                "top_mlp": [1],
                "embedding_dim": 8,
                "table_rows": list(rows),
            },
            "data": data,
            "training": {"batch_size": 64, "device": "cpu"},
        }
    )


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


@pytest.mark.parametrize("generator", ["facebook_loop", "facebook", "uniform", "zipf"])
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
