"""Rows used again as in production tables: the law against the histograms it was fitted to."""

import numpy as np
import pytest
import torch
from small_training import parameters

from dlrm_core.data.loader import make_generator
from dlrm_core.data.reuse import FULL_ROWS, WINDOW, ReuseLaw

# embedding_bag/2022/locality_stats.txt of facebookresearch/dlrm_datasets, first file: shares of
# the rows and of the lookups by how often a row comes up, (0, 1], (1, 2], (2, 4], ... 32768+
ROWS = "342 144 149 138 112 68 29 10 4 2 1 1 0 0 0 0 0"
LOOKUPS = "27 23 40 68 105 120 99 70 59 54 40 72 64 47 21 17 76"
UNIQUE = 110_259_238 / 1_405_163_864
BOUNDS = np.append(np.append(0, 2.0 ** np.arange(16)), np.inf) + 0.5


def drawn(rows: int, lookups: int) -> np.ndarray:
    """How often each row comes up that does."""
    draws = torch.rand(lookups, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    found = ReuseLaw(rows).rows(draws)
    assert found.min() >= 0 and found.max() < rows
    return found.unique(return_counts=True)[1].numpy()


@pytest.mark.parametrize("rows", [1_000_000, 40_000_000])
def test_a_window_has_the_published_histograms(rows):
    counts = drawn(rows, WINDOW)
    published = [np.array(text.split(), float) / 1000 for text in (ROWS, LOOKUPS)]
    assert np.histogram(counts, BOUNDS)[0] / counts.size == pytest.approx(published[0], abs=0.004)
    found = np.histogram(counts, BOUNDS, weights=counts)[0] / WINDOW
    assert found[:10] == pytest.approx(published[1][:10], abs=0.002)
    # of the few rows above 512, some lie near a bound and fall to either side
    assert np.add.reduceat(found, [10, 12, 14, 16]) == pytest.approx(
        np.add.reduceat(published[1], [10, 12, 14, 16]), abs=0.005
    )
    assert counts.mean() == pytest.approx(12.7, rel=0.01)
    assert (counts == 1).mean() == pytest.approx(0.342, rel=0.02)
    assert (counts == 1).sum() / WINDOW == pytest.approx(0.027, rel=0.03)
    assert counts.size / WINDOW == pytest.approx(UNIQUE, rel=0.01)


def test_a_smaller_table_is_a_smaller_copy():
    counts = drawn(FULL_ROWS // 10, WINDOW // 10)
    assert counts.mean() == pytest.approx(12.7, rel=0.03)
    assert (counts == 1).mean() == pytest.approx(0.342, abs=0.02)
    assert (counts == 1).sum() / counts.sum() == pytest.approx(0.027, abs=0.002)


@pytest.mark.parametrize("rows", [1, 2, 5, 40, 20_000, 500_000])
def test_expected_figures_are_those_of_draws(rows):
    law, counts = ReuseLaw(rows), drawn(rows, 50_000)
    assert law.unique(50_000) == pytest.approx(counts.size, rel=0.02, abs=1)
    assert law.hottest() == pytest.approx(counts.max() / 50_000, abs=0.005)


def test_draws_at_the_ends_stay_in_the_table():
    for rows in (1, 3, 1000, FULL_ROWS, 2**31):
        edges = torch.from_numpy(np.append(ReuseLaw(rows).shares.cumsum()[:-1], 1.0 - 2.0**-53))
        found = ReuseLaw(rows).rows(torch.cat([torch.zeros(1, dtype=torch.float64), edges]))
        assert found.min() == 0 and found.max() <= rows - 1
        assert rows == 1 or found[-1] >= 0.9 * rows - 1


def test_a_batch_of_the_generator_has_the_share_of_different_rows():
    """The source's batch, a quarter of it: 1,783,203 / 4 lookups in a table."""
    chosen = parameters(
        {"generator": "reuse", "indices_per_lookup": 14, "fixed_pooling": True},
        {"table_rows": [FULL_ROWS // 4, 7]},
        batch_size=WINDOW // 4 // 14,
        seed=3,
    )
    indices = make_generator(chosen, torch.device("cpu")).next_batch().table_indices(0)
    assert indices.unique().numel() / indices.numel() == pytest.approx(UNIQUE, rel=0.02)
