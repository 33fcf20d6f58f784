"""Intervals and scaling laws: known values, planted laws, and how often they are right."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis.ensemble import (
    fit_law,
    fitted_curves,
    law_table,
    numeric_axes,
    scaling,
    settings_table,
)
from dlrm_workbook.ground.intervals import (
    holm,
    median_interval,
    p_value,
    standard_error,
    t_cdf,
    t_interval,
    t_quantile,
    welch_degrees,
)

SIZES = 64 * 2.0 ** np.arange(7)


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [(0.975, 1, 12.7062), (0.975, 5, 2.5706), (0.975, 30, 2.0423), (0.995, 2, 9.9248)],
)
def test_students_quantiles_are_those_of_the_tables(probability, degrees, expected) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(expected, abs=1e-4)
    assert t_quantile(1 - probability, degrees) == pytest.approx(-expected, abs=1e-4)


@given(st.floats(0.5, 200), st.floats(-8, 8))
def test_students_distribution_is_symmetric_and_inverted_by_its_quantile(degrees, t) -> None:
    p = t_cdf(t, degrees)
    assert p + t_cdf(-t, degrees) == pytest.approx(1, abs=1e-9)
    if 1e-6 < p < 1 - 1e-6:
        assert t_quantile(p, degrees) == pytest.approx(t, abs=1e-4)


def test_interval_of_a_median_says_what_it_covers() -> None:
    six = median_interval([3, 1, 2, 6, 5, 4])
    assert (six.low, six.mid, six.high) == (1, 3.5, 6)
    assert six.confidence == pytest.approx(1 - 2 / 2**6)
    assert median_interval([1, 2, 3]).confidence == pytest.approx(0.75), "three cannot give 95 %"
    assert median_interval([7]).confidence == 0
    many = median_interval(list(range(100)))
    assert (many.low, many.high) == (39, 60), "Conover's table: ranks 40 and 61 of 100"
    with pytest.raises(ValueError, match="no values"):
        median_interval([])


def test_interval_of_a_median_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    found = [median_interval(rng.lognormal(0, 1, 8)) for _ in range(600)]
    share = np.mean([interval.contains(1.0) for interval in found])
    assert share >= found[0].confidence - 0.03 >= 0.92


def test_standard_error_holds_for_neighbours_that_are_alike() -> None:
    rng = np.random.default_rng(2)
    right = naive = 0
    for _ in range(300):
        noise = rng.normal(size=60)
        x = np.zeros(60)
        for i in range(1, 60):
            x[i] = 0.5 * x[i - 1] + noise[i]
        se, degrees = standard_error(x)
        right += t_interval(x.mean(), se, degrees).contains(0)
        naive += t_interval(x.mean(), x.std(ddof=1) / math.sqrt(60), 59).contains(0)
    assert right / 300 > 0.87
    assert naive < right, "as if iterations were independent, it would be too sure"


def test_too_few_values_have_no_error() -> None:
    se, degrees = standard_error([4.2])
    assert math.isnan(se) and degrees == 0
    assert math.isnan(t_interval(4.2, se, degrees).low)
    assert math.isnan(p_value(1.0, se, degrees))


def test_holm_and_welch() -> None:
    assert holm([0.01, 0.04, 0.03, math.nan])[:3] == pytest.approx([0.03, 0.06, 0.06])
    assert math.isnan(holm([math.nan])[0])
    assert welch_degrees(1, 5, 1, 5) == pytest.approx(10)
    assert welch_degrees(1, 5, 0, 5) == pytest.approx(5)
    assert welch_degrees(1, math.inf, 1, math.inf) == math.inf


# ---- laws -----------------------------------------------------------------------


@given(st.floats(0, 50), st.floats(0.001, 1), st.floats(0.3, 2))
def test_a_law_without_noise_is_met(a: float, b: float, c: float) -> None:
    times = a + b * SIZES**c
    law = fit_law(SIZES, times)
    assert np.allclose(law(SIZES), times, rtol=0.12)
    if law.kind in ("linear", "power"):
        assert law.exponent.low - 0.02 <= c <= law.exponent.high + 0.02


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [(5, 0.01, 1), (0, 0.01, 1), (20, 0.005, 1), (5, 0.001, 1.5), (0, 0.3, 0.6), (3, 500, -1)],
)
def test_planted_exponents_lie_in_their_interval(a: float, b: float, c: float) -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(30):
        law = fit_law(SIZES, (a + b * SIZES**c) * rng.lognormal(0, 0.02, len(SIZES)))
        hits += law.exponent.contains(c)
        wanted = "linear" if c == 1 else "power"
        assert law.kind == wanted or not law.exponent.contains(c)
    assert hits >= 26


def test_a_constant_does_not_depend() -> None:
    rng = np.random.default_rng(4)
    kinds = [fit_law(SIZES, 10 * rng.lognormal(0, 0.02, len(SIZES))).kind for _ in range(40)]
    assert kinds.count("constant") >= 38
    law = fit_law(SIZES, np.full(len(SIZES), 3.0))
    assert law.sentence("batch").startswith("does not depend on batch")


def test_laws_are_told_in_words() -> None:
    linear = fit_law(SIZES, 10 + 0.01 * SIZES)
    assert linear.sentence("batch").startswith("linear in batch (exponent 1.0")
    assert linear.break_even == pytest.approx(1000, rel=0.05)
    assert "constant overhead dominates below batch = 1,0" in linear.sentence("batch")
    bare = fit_law(SIZES, 0.01 * SIZES)
    assert bare.a == 0 and "overhead" not in bare.sentence("batch")
    assert "slower than linear" in fit_law(SIZES, SIZES**0.5).sentence("dim")
    assert "faster than linear" in fit_law(SIZES, SIZES**2.0).sentence("dim")
    assert fit_law(SIZES, 1e4 / SIZES).sentence("threads").startswith("falls as threads^-1.00")


def test_too_few_sizes_or_too_much_scatter_settle_nothing() -> None:
    two = fit_law([1, 2], [10, 19])
    assert two.kind == "unsettled" and two.slope == pytest.approx(math.log2(1.9))
    assert "leave the law open" in two.sentence()
    assert fit_law([1, 2, 4, 8], [4.4, 18.8, 10.5, 14.4]).kind == "unsettled"
    with pytest.raises(InputError, match="at least 2 sizes"):
        fit_law([1, 1], [2, 2])
    with pytest.raises(InputError, match="positive"):
        fit_law([1, 2], [0, 2])


# ---- ensembles ------------------------------------------------------------------


def grid() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Times and settings of a grid: batch x (dim with its bottom MLP)."""
    rows, sections = [], {}
    for dim in (16, 32):
        for batch in (128, 256, 512, 1024, 2048):
            run = f"{batch}/{dim}"
            sections[run] = {
                "model": {"embedding_dim": dim, "bottom_mlp": [64, dim], "table_rows": [100] * 4},
                "training": {"batch_size": batch, "device": "cpu"},
                "profiling": {"iterations": batch},
            }
            for component, time in (("step", 5 + 0.01 * batch * dim), ("data", 5.0)):
                rows.append((run, component, "", time, 0.01))
    columns = ["run", "component", "phase", "time_ms", "se_ms"]
    return pd.DataFrame(rows, columns=columns), settings_table(sections)


def test_only_what_varies_is_a_setting() -> None:
    _, settings = grid()
    assert set(settings.columns) == {
        "model.embedding_dim",
        "model.bottom_mlp",
        "training.batch_size",
    }
    assert numeric_axes(settings) == ["model.embedding_dim", "training.batch_size"]
    assert settings["model.bottom_mlp"].tolist()[0] == "64-16"


def test_each_combination_of_the_others_has_its_curve() -> None:
    times, settings = grid()
    curves = scaling(times, settings, "training.batch_size")
    assert [curve.component for curve in curves] == ["step", "step", "data", "data"]
    assert {curve.held for curve in curves} == {"dim 16", "dim 32"}
    whole = {curve.held: curve.law for curve in curves if curve.component == "step"}
    assert whole["dim 32"].b == pytest.approx(0.32, rel=0.02)
    assert whole["dim 16"].kind == "linear" and whole["dim 16"].a == pytest.approx(5, rel=0.1)
    assert all(curve.law.kind == "constant" for curve in curves if curve.component == "data")
    laws = law_table(fitted_curves(times, settings))
    assert set(laws["leaf"]) == {"model.embedding_dim", "training.batch_size"}
    assert laws["sentence"].str.contains("linear in batch").any()


def test_two_runs_have_no_law() -> None:
    times, settings = grid()
    two = settings.iloc[:2]
    assert law_table(fitted_curves(times[times["run"].isin(two.index)], two)).empty
