"""AUC, log loss and accuracy against their definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.base.errors import InputError
from dlrm_core.run.auc import QualityMeter, area_under_curve

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


@given(st.lists(st.tuples(SCORES, st.booleans()), min_size=2, max_size=200))
def test_exact_for_any_scores(samples):
    scores = np.array([score for score, _ in samples], np.float32)
    clicks = np.array([click for _, click in samples])
    area = area_under_curve(scores[clicks], scores[~clicks])
    if all(clicks) or not any(clicks):
        assert area is None
    else:
        # one division of whole numbers: nothing but its rounding
        assert area == brute_force(scores, clicks)


def test_the_bits_do_not_depend_on_batches_or_portions(monkeypatch):
    random = np.random.default_rng(3)
    scores = (random.integers(0, 3000, 8_000) / 3000).astype(np.float32)
    targets = (random.random(8_000) < 0.2 + 0.5 * scores).astype(np.float32)
    found = []
    for batch, portion in ((8_000, 1 << 20), (333, 100)):
        monkeypatch.setattr("dlrm_core.run.auc._PORTION", portion)
        meter = QualityMeter()
        for start in range(0, scores.size, batch):
            meter.add(scores[start : start + batch], targets[start : start + batch])
        found.append(meter.quality()["auc"])
    assert found[0] == found[1] == brute_force(scores, targets > 0.5)


def test_a_prediction_that_is_not_a_number_is_refused():
    with pytest.raises(InputError, match="prediction 1 of a batch is not a number"):
        QualityMeter().add(np.array([0.5, np.nan], np.float32), np.array([1.0, 0.0]))


@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.integers(0, 4)), min_size=1, max_size=60))
def test_log_loss_and_accuracy_are_torchs(samples):
    predictions = np.array([p for p, _ in samples], np.float32)
    targets = np.array([t / 4 for _, t in samples], np.float32)
    meter = QualityMeter()
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
    with pytest.raises(InputError, match="no samples"):
        QualityMeter().quality()
