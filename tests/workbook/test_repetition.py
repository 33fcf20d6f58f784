"""Iterations found from repeating launches, in planted sequences and in a real recording."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dlrm_workbook.recordings.repetition import find_iterations


def timed(
    symbols: list[int], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start_ns, end_ns, symbol) of launches one after the other, with gaps of any length."""
    steps = rng.integers(1, 1000, 2 * len(symbols)).cumsum()
    return steps[::2], steps[1::2], np.array(symbols)


@given(
    iterations=st.integers(8, 40),
    launches=st.integers(10, 40),
    noise=st.integers(0, 3),
    start_up=st.integers(0, 20),
    evaluation=st.integers(0, 8),
    ending=st.integers(0, 5),
    seed=st.integers(0, 10_000),
)
def test_planted_iterations_are_found(
    iterations: int,
    launches: int,
    noise: int,
    start_up: int,
    evaluation: int,
    ending: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    # half of the launches are of few kinds, as on a GPU; the first of a batch is its copy
    pattern = [0, *(int(s) for s in rng.integers(1, launches, launches - 1))]
    if len({s for s in pattern if pattern.count(s) == 1}) < 3:
        pattern += [launches, launches + 1, launches + 2]
    symbols = [1000 + int(s) for s in rng.integers(0, 5, start_up)]
    begins = []
    for number in range(iterations):
        if number == iterations // 2:
            for _ in range(evaluation):  # the forward pass alone
                symbols += [2000, *pattern[1 : len(pattern) // 2]]
        begins.append(len(symbols))
        work = list(pattern)
        for _ in range(int(rng.integers(0, noise + 1))):
            work.insert(int(rng.integers(1, len(work))), 3000)
        symbols += work
    last = len(symbols) - 1
    symbols += [4000] * ending
    start, end, symbol = timed(symbols, rng)
    shuffled = rng.permutation(len(symbol))
    found = find_iterations(start[shuffled], end[shuffled], symbol[shuffled])
    assert found is not None
    assert [begin for begin, _ in found] == start[begins].tolist()
    after = [until for _, until in found]
    # one lasts until the next begins, the last one to the end of its pattern
    if not evaluation:
        assert after[:-1] == start[begins[1:]].tolist()
    assert start[begins[-1]] < after[-1] <= end[last]
    assert all(a <= b for a, b in zip(after, [*start[begins[1:]], end[-1]], strict=True))


@given(seed=st.integers(0, 10_000), kinds=st.integers(20, 60), length=st.integers(0, 400))
def test_nothing_is_found_where_nothing_repeats(seed: int, kinds: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    assert find_iterations(*timed([int(s) for s in rng.integers(0, kinds, length)], rng)) is None


def test_what_happens_every_tenth_iteration_joins_none() -> None:
    symbols: list[int] = []
    for number in range(60):
        symbols += [*range(80), *([99] if number % 10 == 9 else [])]
    found = find_iterations(*timed(symbols, np.random.default_rng(0)))
    assert found is not None and len(found) == 60
    symbols = [50, 50]  # a batch copied ahead leaves the number of iterations
    for number in range(40):
        symbols += [*range(20), *([50] if number < 38 else []), *range(20, 40)]
    found = find_iterations(*timed(symbols, np.random.default_rng(0)))
    assert found is not None and len(found) == 40


def test_no_launch_and_one_kernel_again_and_again_are_no_iteration() -> None:
    none = np.array([], np.int64)
    assert find_iterations(none, none, none) is None
    assert find_iterations(*timed([7] * 500, np.random.default_rng(0))) is None
