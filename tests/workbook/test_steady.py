"""Warm-up and stragglers that were planted are found; ordinary scatter is left alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis.steady import LEAST_TO_JUDGE, steady_state

NOISES = {
    "normal": lambda random, n: random.normal(size=n),
    "lognormal": lambda random, n: np.expm1(0.1 * random.normal(size=n)) / 0.1,
    "gamma": lambda random, n: random.gamma(2, size=n),
    "laplace": lambda random, n: random.laplace(size=n),
}


def scattered(random: np.random.Generator, noise: str, count: int, sigma: float) -> np.ndarray:
    return 40.0 * (1 + sigma * NOISES[noise](random, count))


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(20, 150),
    warm=st.floats(0, 0.4),
    sigma=st.sampled_from([0.002, 0.01, 0.04]),
    factor=st.floats(10, 60),
)
def test_a_planted_warm_up_never_stays_in(seed, count, warm, sigma, factor) -> None:
    random = np.random.default_rng(seed)
    times = scattered(random, "normal", count, sigma)
    length = int(warm * count)
    times[:length] *= 1.1 + factor * sigma
    found = steady_state(times)
    # A slow steady iteration or two may be taken for warm-up, never the reverse.
    assert length <= found.first <= length + max(2, 0.25 * count)
    assert found.usual_ms == pytest.approx(40, rel=4 * sigma)


def test_planted_warm_up_and_stragglers_are_found_together() -> None:
    """Of 300 runs at random noise: both exactly in 97 %, and never far off."""
    random = np.random.default_rng(2)
    exact = 0
    for _ in range(300):
        count, sigma = int(random.integers(30, 150)), random.choice([0.005, 0.02, 0.05])
        noise = random.choice(["normal", "lognormal"])
        times = scattered(random, noise, count, sigma)
        length = int(random.integers(0, count // 3))
        times[:length] *= 1.1 + random.uniform(8, 40) * sigma
        slow = random.choice(np.arange(length + 2, count), random.integers(0, 4), replace=False)
        times[slow] *= 1.15 + random.uniform(18, 60) * sigma
        found = steady_state(times)
        right = set(np.flatnonzero(found.outliers)) == set(slow.tolist())
        exact += found.first == length and right
        assert found.usual_ms == pytest.approx(40, rel=0.1)
    assert exact >= 0.97 * 300


def test_short_iterations_are_found_and_do_not_hide_in_the_scatter() -> None:
    """A recording's end cuts an iteration short: of 300 runs, exactly those planted in 97 %."""
    random = np.random.default_rng(9)
    exact = 0
    for _ in range(300):
        count, sigma = int(random.integers(30, 150)), random.choice([0.005, 0.02, 0.05])
        times = scattered(random, random.choice(["normal", "lognormal"]), count, sigma)
        short = random.choice(np.arange(2, count), random.integers(0, 3), replace=False)
        times[short] *= random.uniform(0.02, 0.25)
        found = steady_state(times)
        right = set(np.flatnonzero(found.short)) == set(short.tolist())
        exact += right and not found.stragglers.any()
        assert found.straggler_share == 0 or found.stragglers.any()
    assert exact >= 0.97 * 300


@pytest.mark.parametrize(
    ("times", "slow"),
    [
        ([77, 78, 900, 77, 79, 76], [2]),
        ([77, 78, 200, 77, 79, 76], []),  # may be chance
        ([900, 78, 77, 77, 79, 76], []),  # a beginning
    ],
)
def test_a_single_iteration_of_few_is_a_straggler_only_if_it_is_far_longer(times, slow) -> None:
    assert np.flatnonzero(steady_state(times).stragglers).tolist() == slow


def test_outliers_in_both_directions_are_named_apart() -> None:
    times = np.full(40, 700.0) + np.linspace(0, 4, 40)[np.random.default_rng(6).permutation(40)]
    times[20], times[39] = 840.0, 88.0
    found = steady_state(times)
    assert np.flatnonzero(found.stragglers).tolist() == [20]
    assert np.flatnonzero(found.short).tolist() == [39]
    assert found.steady.sum() == 38
    # the short one gives nothing back for the straggler
    usual = np.median(np.delete(times, [20, 39]))
    assert found.straggler_share == pytest.approx((840 - usual) / times.sum(), rel=0.01)
    assert "Stragglers: 1 of 40 (20) took over" in found.in_words()
    assert "Short iterations: 1 of 40 (39) took less than" in found.in_words()


def test_a_decaying_warm_up_does_not_reach_the_usual_time() -> None:
    random = np.random.default_rng(3)
    for _ in range(100):
        count, sigma = int(random.integers(40, 150)), random.choice([0.005, 0.02])
        decay = np.exp(-np.arange(count) / random.uniform(1, count / 12))
        times = scattered(random, "normal", count, sigma) * (1 + random.uniform(0.5, 4) * decay)
        found = steady_state(times)
        assert found.first > 0
        assert found.times_ms[found.steady].mean() == pytest.approx(40, rel=0.02)


@pytest.mark.parametrize("count", [10, 20, 60])
@pytest.mark.parametrize("noise", sorted(NOISES))
def test_clean_runs_raise_no_alarm(noise: str, count: int) -> None:
    random = np.random.default_rng([count, *map(ord, noise)])
    runs, warm, slow, changed = 200, 0, 0, 0
    for _ in range(runs):
        found = steady_state(
            np.abs(scattered(random, noise, count, random.choice([0.005, 0.02, 0.1])))
        )
        warm += found.first > 0
        slow += bool(found.outliers.any())
        changed += found.drift is not None or found.levels_ms is not None
        changed += found.shift is not None
    assert max(warm, slow) <= 0.05 * runs
    assert changed <= 0.05 * runs


def test_drift_shift_and_two_levels_are_told_apart() -> None:
    random = np.random.default_rng(4)
    noise = scattered(random, "normal", 100, 0.01)
    drifting = steady_state(noise * np.linspace(1, 1.03, 100))
    assert drifting.drift == pytest.approx(0.03, abs=0.01)
    assert "drifts by +" in drifting.in_words()

    shifted = noise.copy()
    shifted[70:] *= 1.2
    later = steady_state(shifted)
    assert (later.first, later.shift, later.drift) == (0, 70, None)
    assert "From iteration 70 on" in later.in_words() and not later.outliers.any()

    twofold = noise * random.choice([1, 1.2], 100)
    both = steady_state(twofold)
    assert both.levels_ms == pytest.approx((40, 48), rel=0.02)
    assert both.shift is None and "two times" in both.in_words()


def test_a_fast_beginning_is_not_steady_either() -> None:
    random = np.random.default_rng(5)
    times = scattered(random, "normal", 60, 0.01)
    times[:20] *= 0.9
    found = steady_state(times)
    assert found.first == 20
    assert "−10%" in found.in_words()


def test_the_summary_says_what_was_left_out_and_what_it_costs() -> None:
    times = np.full(20, 10.0) + np.linspace(0, 0.1, 20)[np.random.default_rng(6).permutation(20)]
    times[0], times[12] = 100.0, 30.0
    found = steady_state(times)
    assert found.first == 1 and np.flatnonzero(found.outliers).tolist() == [12]
    assert found.straggler_share == pytest.approx(20 / 210, rel=0.01)
    assert found.steady.sum() == 18
    assert "iteration 0 is left out (100 ms against 10.1 ms" in found.in_words()
    assert found.mean_ms == pytest.approx(times[found.steady].mean())
    assert "The mean of 18 steady iterations is 10.1 ms" in found.in_words()
    assert "1 of 19 (12)" in found.in_words() and "cost 9.5% of the time" in found.in_words()


def test_equal_times_and_few_iterations() -> None:
    equal = steady_state([5.0] * 30)
    assert equal.first == 0 and equal.steady.all() and equal.levels_ms is None
    assert "spread of 0.0%" in equal.in_words()
    loads = steady_state([772.8, 223.2, 244.2, 223.0, 223.5])
    assert loads.first == 1 and loads.usual_ms == pytest.approx(223.35)
    assert "iteration 0 is left out (773 ms against 228 ms" in loads.in_words()
    few = steady_state([100.0, 1.0, 1.0])
    assert few.steady.all() and "too few" in few.in_words()
    assert np.isinf(few.threshold_ms)
    assert steady_state([1.0] * (LEAST_TO_JUDGE - 1) + [9.0]).outliers[-1]


@pytest.mark.parametrize("times", [[], [1.0, np.nan], [1.0, -1.0], [np.inf]])
def test_impossible_times_are_refused(times) -> None:
    with pytest.raises(InputError, match="finite"):
        steady_state(times)


def test_thresholds_hold_for_all_iterations_together() -> None:
    random = np.random.default_rng(7)
    above = 0
    for _ in range(500):
        values = random.laplace(size=50)
        # as steady_state sees it: stragglers of heavy-tailed scatter in 1 of 40 runs
        above += bool(steady_state(100 + values).outliers.any())
    assert 1 <= above <= 25


def test_slow_iterations_do_not_hide_behind_those_that_recover() -> None:
    tail = [210, 157, 130, 111, 100, 91, 80, 70, 62]
    state = steady_state([*tail, 616, *tail, 600, *tail, 633])
    assert np.flatnonzero(state.stragglers).tolist() == [9, 19, 29]


def test_correlated_neighbours_are_no_warm_up() -> None:
    random = np.random.default_rng(8)
    alarms = 0
    for _ in range(200):
        steps = random.normal(size=60)
        for row in range(1, 60):
            steps[row] += 0.4 * steps[row - 1]
        alarms += steady_state(40 * (1 + 0.02 * steps)).first > 0
    assert alarms <= 0.05 * 200


def test_a_slow_step_in_every_third_is_no_tail() -> None:
    """However few or many: slow ones are left out of what stands for the run."""
    for count in (5, 6, 7, 12, 40):
        times = np.array(
            [30.0 if place % 3 == 1 else 10.0 + 0.1 * (place % 2) for place in range(count)]
        )
        state = steady_state(times)
        assert (state.outliers == (times == 30.0)).all(), count
        assert state.first == 0 and state.usual_ms < 10.2
        assert "too few to detect" not in state.in_words()
    # one speed, a warm-up, a change to another level, and no two groups
    for times in (
        [10, 11, 10, 12],
        [30, 10, 10, 10],
        [10, 30, 10, 10],
        [10, 10, 10, 30, 30],
        [10, 13, 17, 22, 29, 37],
    ):
        assert not steady_state(times).outliers.any(), times
