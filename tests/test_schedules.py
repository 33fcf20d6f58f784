"""The learning rate's schedule: the published formula, its clamp, and that updates obey it."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.config import parameters_from_sections
from dlrm_core.errors import InputError
from dlrm_core.schedules import Schedule, schedule_of

DEEPSPARK = Schedule(base=0.1, warmup=2750, decay_start=49315, decay_steps=27772, power=2.0)


def test_published_figures():
    """DeepSpark's command: lr 0.1, W 2750, D 49315, N 27772, end 0."""
    assert DEEPSPARK.rate(1) == pytest.approx(0.1 / 2750)
    assert DEEPSPARK.rate(1375) == pytest.approx(0.05)
    assert DEEPSPARK.rate(2750) == DEEPSPARK.rate(30_000) == DEEPSPARK.rate(49_315) == 0.1
    assert DEEPSPARK.rate(49_315 + 27_772 // 2) == pytest.approx(0.025)
    assert DEEPSPARK.rate(49_315 + 27_772) == 0.0
    # without the clamp the square would rise again: 0.1 at this step
    assert DEEPSPARK.rate(49_315 + 2 * 27_772) == 0.0


@given(
    base=st.floats(1e-6, 100.0),
    warmup=st.integers(0, 50),
    plateau=st.integers(0, 50),
    decay=st.integers(1, 50),
    power=st.sampled_from([0.5, 1.0, 2.0, 3.0]),
    end=st.floats(0.0, 1.0),
)
def test_shape_of_any_schedule(base, warmup, plateau, decay, power, end):
    end = end * base
    schedule = Schedule(base, warmup, warmup + plateau, decay, power, end)
    rates = [schedule.rate(step) for step in range(1, warmup + plateau + decay + 30)]
    rising, falling = rates[: max(warmup, 1)], rates[max(warmup - 1, 0) :]
    assert all(a <= b for a, b in itertools.pairwise(rising))
    assert all(a >= b for a, b in itertools.pairwise(falling))
    assert max(rates) <= base and min(falling) >= end
    assert rates[-30:] == [end] * 30
    for step in range(1, warmup):
        assert rates[step - 1] == pytest.approx(base * step / warmup, rel=1e-9, abs=1e-12 * base)


def test_no_schedule_is_constant():
    config = parameters_from_sections({}).training
    assert schedule_of(config).constant
    assert {schedule_of(config).rate(step) for step in range(1, 10_000)} == {config.learning_rate}
    assert not DEEPSPARK.constant


def test_curve_has_the_corners():
    curve = DEEPSPARK.curve(100_000, most=50)
    assert len(curve["iteration"]) < 60
    assert {1, 2750, 49_315, 77_087, 100_000} <= set(curve["iteration"])
    for step, rate in zip(curve["iteration"], curve["learning_rate"], strict=True):
        assert rate == DEEPSPARK.rate(int(step)) and math.isfinite(rate)
    assert Schedule(1.0).curve(3) == {
        "iteration": [1.0, 2.0, 3.0],
        "learning_rate": [1.0, 1.0, 1.0],
    }


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"lr_decay_start": 5}, ["lr_decay_start is 5", "lr_decay_steps"]),
        (
            {"lr_warmup_steps": 9, "lr_decay_start": 5, "lr_decay_steps": 3},
            ["lr_decay_start is 5", "lr_warmup_steps is 9"],
        ),
        (
            {"lr_decay_steps": 3, "lr_end": 2.0, "learning_rate": 1.0},
            ["lr_end is 2", "learning_rate is 1"],
        ),
        (
            {"optimizer": "adam", "embedding_backend": "fused"},
            ["optimizer is 'adam'", "embedding_backend is 'fused'"],
        ),
    ],
)
def test_what_cannot_work_is_refused(training, words):
    with pytest.raises(InputError) as error:
        parameters_from_sections({"training": training})
    for word in words:
        assert word in str(error.value)
