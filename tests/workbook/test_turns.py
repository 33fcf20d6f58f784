"""Turns: the order within rounds, when rounds end, and what is made of them."""

import pytest
import torch

from dlrm_workbook.ground.turns import (
    CacheFlush,
    back_and_forth,
    elapsed_ms,
    in_order,
    least_and_seconds,
    median_error,
    rotated,
    round_ratios,
    take_turns,
    threads_of,
)


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        (in_order, ["ABC", "ABC", "ABC", "ABC"]),
        (rotated, ["ABC", "BCA", "CAB", "ABC"]),
        (back_and_forth, ["ABC", "CBA", "ABC", "CBA"]),
    ],
)
def test_the_order_of_turns(order, wanted):
    rounds = list(take_turns("ABC", 4, order))
    assert [number for number, _ in rounds] == [0, 1, 2, 3]
    assert ["".join(names) for _, names in rounds] == wanted
    later = list(take_turns("ABC", 4, order, first=2))
    assert later == rounds[2:], "a measurement that goes on keeps its order"


def test_rounds_end_when_enough_is_known():
    assert [n for n, _ in take_turns("AB", 9, enough=lambda done: done == 3)] == [0, 1, 2]
    assert [n for n, _ in take_turns("AB", 9, enough=least_and_seconds(4, 0.0))] == [0, 1, 2, 3]
    assert len(list(take_turns("AB", 9, enough=least_and_seconds(4, 60.0)))) == 9
    assert not list(take_turns([], 0, rotated))


def test_ratios_are_of_rounds_that_both_ran_in():
    assert round_ratios({0: 8.0, 1: 9.0}, {0: 4.0, 1: 3.0, 2: 1.0}) == [2.0, 3.0]
    assert round_ratios({0: 8.0}, {1: 4.0}) == []


def test_the_error_of_a_median_shrinks_with_repetitions():
    values = [9.0, 10.0, 11.0, 10.0]
    assert median_error([10.0]) == 0.0 and median_error([0.0, 0.0]) == 0.0
    assert 0 < median_error(values * 16) < median_error(values) / 3


def test_a_turn_is_timed_and_leaves_torch_as_it_was():
    before, calls = torch.get_num_threads(), []
    with threads_of(1):
        assert torch.get_num_threads() == 1
        assert elapsed_ms(lambda: calls.append(1), count=5) >= 0 and len(calls) == 5
    assert torch.get_num_threads() == before
    flush = CacheFlush(1 << 16)
    flush()
    assert flush.taken_ns > 0 and float(flush.buffer.sum()) == 1 << 14
