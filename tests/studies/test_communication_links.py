"""Links: formulas of collectives, calibration through noise and outliers, several nodes."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scaling_records import collective_ms, link_probe

from dlrm_core.base.errors import InputError
from dlrm_studies.scaling.model.links import (
    ALGORITHMS,
    LINKS,
    Link,
    Network,
    Range,
    calibrate,
    check,
    link,
    links_table,
    robust_line,
    steps_and_bytes,
)

EACH = [(kind, name) for kind, names in ALGORITHMS.items() for name in names]


def ideal(alpha_us: float = 10.0, rate: float = 5.0) -> Link:
    return Link("ideal", Range(*[alpha_us] * 3), Range(*[rate] * 3), "made up")


def simulated_ring(ranks: int, payload: float) -> tuple[int, float]:
    """Steps and bytes by sending the pieces round: reduce-scatter, then all-gather."""
    piece, steps, sent = payload / ranks, 0, 0.0
    have = [{piece_no: {rank} for piece_no in range(ranks)} for rank in range(ranks)]
    for step in range(ranks - 1):
        moving = [(rank, (rank - step) % ranks) for rank in range(ranks)]
        before = [dict(each) for each in have]
        for rank, number in moving:
            have[(rank + 1) % ranks][number] = (
                have[(rank + 1) % ranks][number] | before[rank][number]
            )
        steps, sent = steps + 1, sent + piece
    done = [{n for n, who in have[rank].items() if len(who) == ranks} for rank in range(ranks)]
    assert all(len(numbers) >= 1 for numbers in done)
    while any(len(numbers) < ranks for numbers in done):
        before_done = [set(numbers) for numbers in done]
        for rank in range(ranks):
            done[(rank + 1) % ranks] |= before_done[rank]
        steps, sent = steps + 1, sent + piece
    return steps, sent


@given(st.integers(2, 17), st.floats(1.0, 1e9))
def test_a_ring_s_steps_and_bytes_are_those_of_sending_pieces_round(ranks, payload) -> None:
    steps, moved = steps_and_bytes("allreduce", "ring", ranks, payload)
    counted, sent = simulated_ring(ranks, payload)
    assert (steps, moved) == (counted, pytest.approx(sent))


@given(st.sampled_from(EACH), st.integers(2, 5000), st.floats(1.0, 1e10))
def test_no_algorithm_sends_less_than_it_must(which, ranks, payload) -> None:
    kind, name = which
    steps, moved = steps_and_bytes(kind, name, ranks, payload)
    away = payload * (ranks - 1) / ranks
    # every rank's result depends on all others: log2 p steps; a reduction sends all but its own
    assert steps >= math.log2(ranks) - 1e-9
    least = {"allreduce": 2 * away, "broadcast": payload}.get(kind, away)
    # Bruck's all-to-all forwards what is not its own, half of everything a step
    assert moved >= (min(least, payload / 2) if name == "bruck" else least) * (1 - 1e-9)
    assert steps_and_bytes(kind, name, 1, payload) == (0, 0)


@given(st.sampled_from(sorted(ALGORITHMS)), st.integers(2, 600), st.floats(1, 1e9), st.floats(1, 4))
def test_time_grows_with_bytes_and_latency_and_ranges_hold(kind, ranks, payload, more) -> None:
    one = ideal().time_ms(kind, ranks, payload)
    assert one.low == one.mid == one.high
    assert ideal().time_ms(kind, ranks, payload * more).mid >= one.mid
    assert ideal(alpha_us=10 * more).time_ms(kind, ranks, payload).mid >= one.mid
    assert ideal(rate=5 * more).time_ms(kind, ranks, payload).mid <= one.mid
    wide = Link("wide", Range(5, 10, 20), Range(2, 5, 6), "").time_ms(kind, ranks, payload)
    assert wide.low <= one.mid <= wide.high
    each = [steps_and_bytes(kind, name, ranks, payload) for name in ALGORITHMS[kind]]
    assert one == min(ideal().steps_ms(*counts) for counts in each)


def test_small_messages_take_the_tree_and_large_ones_the_ring() -> None:
    few, many = 64.0, 1e9
    tree = ideal().steps_ms(*steps_and_bytes("allreduce", "halving_doubling", 64, few))
    assert ideal().time_ms("allreduce", 64, few) == tree
    ring = steps_and_bytes("allreduce", "ring", 64, many)[1] / 5e6
    assert ideal().time_ms("allreduce", 64, many).mid == pytest.approx(ring, rel=0.02)
    with pytest.raises(InputError, match="collective is 'gossip'"):
        ideal().time_ms("gossip", 4, 1.0)


# ---- named ------------------------------------------------------------------------------


def test_every_named_link_has_a_source_and_ordered_ranges() -> None:
    table = links_table(LINKS)
    assert len(table) == len(LINKS) == table["name"].nunique()
    for known in LINKS:
        assert known.source and not known.measured
        assert known.alpha_us.low < known.alpha_us.mid < known.alpha_us.high
        assert known.gb_per_s.low < known.gb_per_s.mid < known.gb_per_s.high
    assert link("nvlink 3 (a100)").gb_per_s.mid == pytest.approx(0.78 * 300)
    with pytest.raises(InputError, match="did you mean OPA"):
        link("opas")


# ---- calibration ------------------------------------------------------------------------


@given(st.floats(1, 500), st.floats(0.1, 50), st.integers(0, 10))
def test_calibration_finds_the_link_that_made_the_times(alpha, rate, seed) -> None:
    found = calibrate(pd.DataFrame(link_probe(alpha, rate)))
    assert found.alpha_us.mid == pytest.approx(alpha, rel=0.02)
    assert found.gb_per_s.mid == pytest.approx(rate, rel=0.02)
    for kind, ranks, size in (("allreduce", 4, 3e5), ("alltoall", 2, 2e7), ("allgather", 8, 1e6)):
        expected = collective_ms(kind, ranks, size, alpha, rate)
        # between measured sizes it is interpolated in logarithms
        assert found.time_ms(kind, ranks, size).mid == pytest.approx(expected, rel=0.12)


def test_disturbed_measurements_change_little() -> None:
    clean = pd.DataFrame(link_probe(50, 2, noise=0.05))
    spoilt = clean.copy()
    hit = np.random.default_rng(1).random(len(spoilt)) < 0.15
    spoilt.loc[hit, "time_ms"] *= 30
    before, after = calibrate(clean), calibrate(spoilt)
    assert after.alpha_us.mid == pytest.approx(before.alpha_us.mid, rel=0.1)
    assert after.gb_per_s.mid == pytest.approx(before.gb_per_s.mid, rel=0.1)
    errors = check(clean, after)["error"].abs()
    assert errors.quantile(0.9) < 0.2
    # three of five repetitions of one size spoilt: no longer than the next size takes
    below = check(clean, after).query("bytes < bytes.max()")
    assert below["error"].max() < 4.5
    # a plain least-squares line is drawn away
    x, y = spoilt["bytes"].to_numpy(float), spoilt["time_ms"].to_numpy(float)
    assert robust_line(x, y)[1] < 0.5 * np.polyfit(x, y, 1)[0]


def test_ranges_hold_nine_measurements_of_ten() -> None:
    probe = pd.DataFrame(link_probe(50, 2, noise=0.2, seed=3))
    found = calibrate(probe)
    again = pd.DataFrame(link_probe(50, 2, noise=0.2, seed=4))
    ends = [
        found.time_ms(kind, ranks, size)
        for kind, ranks, size in again[["collective", "ranks", "bytes"]].itertuples(index=False)
    ]
    inside = [e.low <= t <= e.high for e, t in zip(ends, again["time_ms"], strict=True)]
    # 320 draws of probability 0.9, less what means of the faster three of five are off themselves
    assert 0.7 < np.mean(inside) < 0.99


def test_a_probe_that_says_too_little_is_refused() -> None:
    probe = pd.DataFrame(link_probe())
    with pytest.raises(InputError, match="1 sizes measured"):
        calibrate(probe[probe["bytes"] == probe["bytes"].iloc[0]])


# ---- nodes ------------------------------------------------------------------------------


def test_two_levels_meet_the_slow_link_only_where_nodes_end() -> None:
    inside, between = ideal(5, 200), ideal(10, 20)
    network = Network(inside, between, 8)
    assert network.time_ms("allreduce", 8, 1e8) == inside.time_ms("allreduce", 8, 1e8)
    assert network.limit(8) == network.limit(16) == "ideal"
    two = network.time_ms("allreduce", 16, 1e8)
    assert two.mid > inside.time_ms("allreduce", 16, 1e8).mid
    # an eighth of the bytes crosses, so it is far from what the slow link alone would take
    assert two.mid < between.time_ms("allreduce", 16, 1e8).mid
    exact = (
        inside.time_ms("reduce_scatter", 8, 1e8).mid
        + between.time_ms("allreduce", 2, 1e8 / 8).mid
        + inside.time_ms("allgather", 8, 1e8).mid
    )
    assert two.mid == pytest.approx(exact)
    every = network.time_ms("alltoall", 4096, 1e6)
    # 4088 messages of 10 us one by one are 40 ms; in two levels there is one a node
    assert every.mid < 20
    crossing = 1e8 * 8 / 16 / 20e6
    assert network.time_ms("alltoall", 16, 1e8).mid == pytest.approx(crossing, rel=0.05)
