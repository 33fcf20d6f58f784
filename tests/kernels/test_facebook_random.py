"""Initial weights and batches in machine code have the bits of numpy's own stream."""

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_core import model as core_model
from dlrm_core.base import engines
from dlrm_core.data.synthetic import FacebookLoop
from dlrm_core.model import facebook_tables
from dlrm_kernels import facebook_random, facebook_replay
from dlrm_kernels.facebook_replay import FacebookReplay

COUNTS = st.lists(st.integers(1, 1500), min_size=1, max_size=4)


def _same(mine, numpys, counts, bound):
    for count in counts:
        drawn = np.empty(count, np.float32)
        facebook_random.uniform(mine, bound, drawn)
        expected = numpys.uniform(-bound, bound, count).astype(np.float32)
        assert drawn.tobytes() == expected.tobytes()
    # the stream goes on where numpy's would, with the normal number that numpy keeps back
    assert mine.normal(size=3).tobytes() == numpys.normal(size=3).tobytes()
    assert mine.randint(1 << 31) == numpys.randint(1 << 31)


@given(st.integers(0, 2**32 - 1), COUNTS, st.floats(1e-30, 1e30))
@settings(max_examples=60, deadline=None)
def test_numbers_have_numpys_bits_for_any_seed_portions_and_bound(seed, counts, bound):
    _same(np.random.RandomState(seed), np.random.RandomState(seed), counts, bound)


@given(st.integers(0, 2**32 - 1), st.integers(0, 700), st.booleans(), COUNTS)
@settings(max_examples=60, deadline=None)
def test_numbers_have_numpys_bits_from_any_place(seed, words, normal, counts):
    pair = np.random.RandomState(seed), np.random.RandomState(seed)
    for random in pair:
        random.randint(0, 2**32, size=words, dtype=np.uint32)  # a word each
        if normal:
            random.normal()  # and one more is kept back
    _same(*pair, counts, 0.5)


def test_large_tables_take_the_engine_and_get_the_same_weights(monkeypatch):
    def weights():
        random = np.random.RandomState(5)
        return [
            (table, start, numbers.clone())
            for table, start, numbers in facebook_tables(random, (3000, 7), 32)
        ], random.normal()

    expected, next_expected = weights()
    calls = []
    real = facebook_random.uniform
    monkeypatch.setattr(facebook_random, "uniform", lambda *a: calls.append(a) or real(*a))
    monkeypatch.setattr(core_model, "_WORTH_AN_ENGINE", 3007 * 32)
    monkeypatch.setattr(core_model, "_ENGINES_CHUNK", core_model._CACHED_CHUNK)
    drawn, next_drawn = weights()
    assert len(calls) == len(drawn) == 3  # 96,000 numbers in two portions, then 224
    assert next_drawn == next_expected
    for mine, numpys in zip(drawn, expected, strict=True):
        assert mine[:2] == numpys[:2]
        assert torch.equal(mine[2], numpys[2])


@pytest.mark.parametrize("missing", ["engine", "compiler"])
def test_without_the_engine_numpy_draws(monkeypatch, missing):
    def find(name):
        if missing == "compiler":
            raise ModuleNotFoundError("numba")

    monkeypatch.setattr(core_model, "_WORTH_AN_ENGINE", 1)
    monkeypatch.setattr(engines, "find_engine", find)
    ((_, _, numbers),) = facebook_tables(np.random.RandomState(5), (9,), 4)
    expected = np.random.RandomState(5).uniform(-1 / 3, 1 / 3, 36).astype(np.float32)
    assert numbers.numpy().tobytes() == expected.tobytes()


@pytest.fixture
def large_batches(monkeypatch):
    """Every batch is worth machine code."""
    monkeypatch.setattr(facebook_replay, "_WORTH_AN_ENGINE", 0)


def _same_batch(one, other):
    for name in ("dense", "indices", "offsets", "targets"):
        mine, expected = getattr(one, name), getattr(other, name)
        assert mine.dtype == expected.dtype and torch.equal(mine, expected), name
    assert one.table_starts == other.table_starts


@given(
    dense=st.integers(1, 5),
    rows=st.lists(st.integers(1, 300) | st.integers(1, 2**31 - 1), min_size=1, max_size=4),
    size=st.integers(1, 40),
    lookups=st.integers(1, 130),
    fixed=st.booleans(),
    rounded=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_batches_are_those_of_facebooks_loop(
    large_batches, dense, rows, size, lookups, fixed, rounded, seed
):
    arguments = (dense, tuple(rows), size, lookups, fixed, rounded, seed)
    loop, replay = FacebookLoop(*arguments), FacebookReplay(*arguments)
    assert replay._code is facebook_random
    for _ in range(3):
        _same_batch(replay.next_batch(), loop.next_batch())
        # a stream that goes on from what a checkpoint holds
        state = json.loads(json.dumps(replay.state(), default=np.ndarray.tolist))
        state["random"]["state"]["key"] = np.array(state["random"]["state"]["key"], np.uint32)
        replay = FacebookReplay(*arguments)
        replay.restore(state)


@pytest.mark.parametrize(
    ("batch", "lookups", "rows", "in_machine_code"),
    [
        (2048, 100, 1_000_000, True),
        (2048, 100, 2**31 + 1, False),  # rows of 4 bytes are compared
        (2048, 1001, 1_000_000, False),  # each row of a bag is compared with all others
        (16, 100, 1_000_000, False),  # loading the code would take longer
    ],
)
def test_machine_code_is_for_batches_it_is_worth(batch, lookups, rows, in_machine_code):
    source = FacebookReplay(512, (rows,) * 8, batch, lookups, False, False, 1)
    assert (source._code is not None) is in_machine_code


def test_without_the_compiler_numpy_makes_batches(monkeypatch, large_batches):
    def find(name):
        raise ModuleNotFoundError("numba")

    monkeypatch.setattr(engines, "find_engine", find)
    source = FacebookReplay(3, (50,), 8, 9, False, False, 1)
    assert source._code is None
    _same_batch(source.next_batch(), FacebookLoop(3, (50,), 8, 9, False, False, 1).next_batch())
