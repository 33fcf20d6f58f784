"""Stochastic rounding of embedding rows: unbiased, within one number, and the same every time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_core.embeddings import ROW_DTYPES
from dlrm_kernels.rounding import philox, round_rows, words

NARROW = (torch.bfloat16, torch.float16)


def uniform_words(shape, seed=0):
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**32, shape, generator=random)


def neighbours(values, dtype):
    """The numbers of a format below and above float32 values (equal where it holds them)."""
    nearest = values.to(dtype)
    step = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float16}[dtype]
    up = torch.nextafter(nearest, torch.full_like(nearest, torch.inf, dtype=step))
    down = torch.nextafter(nearest, torch.full_like(nearest, -torch.inf, dtype=step))
    low = torch.where(nearest.double() > values.double(), down, nearest)
    high = torch.where(nearest.double() < values.double(), up, nearest)
    return low, high


def test_philox_gives_its_authors_known_answers():
    # Random123's kat_vectors: philox4x32, 7 rounds, counter and key of zeros
    zero = [torch.zeros((), dtype=torch.int64)] * 4
    assert [int(word) for word in philox(0, zero)] == [
        0x5F6FB709,
        0x0D893F64,
        0x4F121F81,
        0x4F730A48,
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-65504, 65504, width=32), min_size=1, max_size=30),
    st.sampled_from(NARROW),
    st.integers(0, 99),
)
def test_a_value_becomes_one_of_its_two_neighbours(values, dtype, seed):
    given_values = torch.tensor(values, dtype=torch.float32)
    low, high = neighbours(given_values, dtype)
    for drawn in (
        torch.zeros(len(values), dtype=torch.int64),
        torch.full((len(values),), 2**32 - 1),
        uniform_words((len(values),), seed),
    ):
        rounded = round_rows(given_values, drawn, dtype)
        # towards zero without a draw, so 0 and -0 count as one number
        assert ((rounded == low) | (rounded == high)).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_what_the_format_holds_stays_and_what_is_no_number_is_seen(dtype):
    kept = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = kept[torch.isfinite(kept)]
    drawn = uniform_words(finite.shape)
    rounded = round_rows(finite.float(), drawn, dtype)
    assert torch.equal(rounded.view(torch.int16), finite.view(torch.int16))
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan])
    rounded = round_rows(odd, uniform_words((3,)), dtype)
    assert rounded[0] == torch.inf and rounded[1] == -torch.inf and rounded[2].isnan()
    # every bit of a not-a-number set: adding to it must not give a zero
    every = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert round_rows(every, torch.tensor([2**32 - 1]), dtype).isnan().all()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 3e-5, 1e-7])
def test_rounding_is_unbiased(name, scale):
    """The mean error over many draws is within four of its standard errors, for each value."""
    dtype, draws = ROW_DTYPES[name], 1 << 14
    random = torch.Generator().manual_seed(7)
    values = (torch.rand(64, generator=random) - 0.5) * scale
    members = torch.arange(draws)
    drawn = words(5, 3, 2, members >> 8, members & 255, 64)
    rounded = round_rows(values.expand(draws, 64), drawn, dtype).double()
    error = rounded - values.double()
    low, high = neighbours(values, dtype)
    spread = (high.double() - low.double()) / 2  # of a draw, at most
    assert (error.mean(dim=0).abs() <= 4 * spread / draws**0.5).all()
    # and they are not all the same: to nearest, each column would have one value
    between = low != high
    assert (rounded[:, between].std(dim=0) > 0).float().mean() > 0.9


def test_words_follow_from_their_arguments_alone():
    groups, members = torch.tensor([0, 9, 0]), torch.tensor([0, 4, 1])
    drawn = words(1, 2, 3, groups, members, 70)
    assert torch.equal(drawn, words(1, 2, 3, groups, members, 70))
    # of a narrower row the first words, of one row alone the same
    assert torch.equal(drawn[:, :20], words(1, 2, 3, groups, members, 20))
    assert torch.equal(drawn[1:2], words(1, 2, 3, groups[1:2], members[1:2], 70))
    for other in (
        words(2, 2, 3, groups, members, 70),
        words(1, 3, 3, groups, members, 70),
        words(1, 2, 4, groups, members, 70),
        words(1, 2, 3, groups + 1, members, 70),
    ):
        assert (drawn == other).float().mean() < 0.01
    assert len(torch.unique(drawn)) == drawn.numel()


def test_words_of_different_updates_are_not_correlated():
    members = torch.arange(256)
    series = np.stack(
        [
            words(1, update, 0, torch.zeros_like(members), members, 64)[17, :].numpy()
            for update in range(512)
        ]
    ).astype(float)
    found = np.corrcoef(series.T) - np.eye(64)
    assert np.abs(found).max() < 6 / 512**0.5
