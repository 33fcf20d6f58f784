"""AUC, log loss and accuracy against their definitions, in memory and on disk."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.base.errors import InputError
from dlrm_core.run.auc import AucCounter, QualityMeter

AWKWARD = [0.0, -0.0, 1.0, -1.0, 0.5, float("inf"), float("-inf"), 1e-45, -1e-45, 3e38]
SCORES = st.one_of(
    st.sampled_from(AWKWARD),
    st.floats(width=32, allow_nan=False),
    st.integers(0, 5).map(lambda tie: tie / 5),
)


def brute_force(scores, clicks):
    """Share of pairs (click, non-click) in the right order, ties a half."""
    scores, clicks = np.asarray(scores, np.float32), np.asarray(clicks, bool)
    above, below = scores[clicks][:, None], scores[~clicks][None, :]
    pairs = int(above.size * below.size)
    return ((above > below).sum() + 0.5 * (above == below).sum()) / pairs


def streamed(scores, clicks, memory_bytes, batch):
    counter = AucCounter(memory_bytes)
    try:
        for start in range(0, len(scores), batch):
            part = slice(start, start + batch)
            counter.add(np.array(scores[part], np.float32), np.array(clicks[part], bool))
        return counter.area(), len(counter._runs)
    finally:
        counter.close()


@given(
    st.lists(st.tuples(SCORES, st.booleans()), min_size=2, max_size=200),
    st.integers(1, 70),
    st.sampled_from([1, 2000, 1 << 28]),
)
def test_exact_for_any_scores_however_streamed(samples, batch, memory_bytes):
    scores, clicks = map(list, zip(*samples, strict=True))
    area, _ = streamed(scores, clicks, memory_bytes, batch)
    if all(clicks) or not any(clicks):
        assert area is None
    else:
        # one division of whole numbers: nothing but its rounding
        assert area == brute_force(scores, clicks)


@pytest.mark.parametrize("distinct", [1, 3, 10**6])
def test_counts_on_disk_give_the_same_bits(distinct):
    random = np.random.default_rng(distinct)
    scores = (random.integers(0, distinct, 8_000) / distinct).astype(np.float32)
    clicks = random.random(8_000) < 0.2 + 0.5 * scores
    in_memory, none = streamed(scores, clicks, 1 << 28, 4096)
    on_disk, runs = streamed(scores, clicks, 40_000, 333)
    assert none == 0 and (runs > 10) == (distinct > 100)
    assert in_memory == on_disk
    ranks = np.searchsorted(np.sort(scores[~clicks]), scores[clicks], side="left")
    upper = np.searchsorted(np.sort(scores[~clicks]), scores[clicks], side="right")
    assert in_memory == (ranks + upper).sum() / (2 * clicks.sum() * (~clicks).sum())


def test_memory_is_bounded_by_the_limit():
    counter = AucCounter(1 << 20)
    random = np.random.default_rng(0)
    for _ in range(40):
        counter.add(random.random(10_000, np.float32), random.random(10_000) < 0.5)
    held = counter._counts.nbytes + sum(keys.nbytes for keys in counter._keys)
    largest = max(block.nbytes for block in counter._blocks())
    assert counter._runs and held < 1 << 20 and largest < 1 << 20
    assert 0.49 < counter.area() < 0.51
    counter.close()


def test_counts_beyond_64_bits_do_not_overflow():
    counter = AucCounter()
    counter.add(np.array([0.1, 0.9], np.float32), np.array([False, True]))
    counter.area()
    counter._counts["negatives"] *= 4_000_000_000
    counter._counts["positives"] *= 4_000_000_000
    assert counter.area() == 1.0


def test_perfect_reversed_and_constant():
    clicks = [False, False, True]
    assert streamed([0.1, 0.2, 0.3], clicks, 1 << 20, 3)[0] == 1.0
    assert streamed([0.3, 0.2, 0.1], clicks, 1 << 20, 3)[0] == 0.0
    assert streamed([0.2, 0.2, 0.2], clicks, 1 << 20, 3)[0] == 0.5


def test_a_prediction_that_is_not_a_number_is_refused():
    with pytest.raises(InputError, match="prediction 1 of a batch is not a number"):
        AucCounter().add(np.array([0.5, np.nan], np.float32), np.array([True, False]))


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.integers(0, 4)), min_size=1, max_size=60))
def test_log_loss_and_accuracy_are_torchs(samples):
    predictions = np.array([p for p, _ in samples], np.float32)
    targets = np.array([t / 4 for _, t in samples], np.float32)
    with QualityMeter() as meter:
        meter.add(predictions[:7], targets[:7])
        if len(samples) > 7:
            meter.add(predictions[7:, None], targets[7:, None])
        quality = meter.quality()
    wide = torch.from_numpy(predictions).double(), torch.from_numpy(targets).double()
    expected = float(torch.nn.functional.binary_cross_entropy(*wide))
    assert quality["log_loss"] == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert quality["samples"] == len(samples)
    assert quality["accuracy"] == np.mean((predictions > 0.5) == (targets > 0.5))
    assert meter.graded == any(t in (1, 2, 3) for _, t in samples)


def test_no_samples_are_refused():
    with QualityMeter() as meter, pytest.raises(InputError, match="no samples"):
        meter.quality()
