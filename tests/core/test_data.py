"""Batches: facebook's stream replayed bit for bit, power laws, prefetching."""

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_training import parameters as small

from dlrm_core.config import LAWS, mean_bag_size, parameters_from_sections
from dlrm_core.data.batch import Batch
from dlrm_core.data.loader import PrefetchError, batches, make_generator, prefetched
from dlrm_core.data.synthetic import FacebookLoop, SyntheticBatches
from dlrm_kernels.facebook_replay import FacebookReplay

CPU = torch.device("cpu")


def assert_same(one: Batch, other: Batch) -> None:
    assert one.table_starts == other.table_starts
    for name in ("dense", "indices", "offsets", "targets"):
        a, b = getattr(one, name), getattr(other, name)
        assert a.dtype == b.dtype
        assert torch.equal(a, b), name


def check_shape(batch: Batch, size: int, dense: int, rows: tuple[int, ...]) -> None:
    tables = len(rows)
    assert batch.dense.shape == (size, dense) and batch.dense.dtype == torch.float32
    assert batch.targets.shape == (size, 1)
    assert batch.offsets.shape == (tables, size) and batch.tables == tables
    assert batch.indices.dtype == batch.offsets.dtype == torch.int64
    assert batch.table_starts[0] == 0 and batch.table_starts[-1] == batch.indices.numel()
    for t, count in enumerate(rows):
        indices = batch.table_indices(t)
        assert indices.min() >= 0 and indices.max() < count
        assert batch.offsets[t, 0] == 0
        sizes = torch.diff(batch.offsets[t], append=torch.tensor([indices.numel()]))
        assert sizes.min() >= 1


@settings(max_examples=60, deadline=None)
@given(
    dense=st.integers(1, 5),
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    size=st.integers(1, 40),
    lookups=st.integers(1, 30),
    fixed=st.booleans(),
    rounded=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_replay_is_the_loop_bit_for_bit(dense, rows, size, lookups, fixed, rounded, seed):
    arguments = (dense, tuple(rows), size, lookups, fixed, rounded, seed)
    loop, replay = FacebookLoop(*arguments), FacebookReplay(*arguments)
    for _ in range(3):
        expected = loop.next_batch()
        check_shape(expected, size, dense, tuple(rows))
        assert_same(replay.next_batch(), expected)


def test_facebooks_bags_are_sorted_and_without_repetition():
    batch = FacebookReplay(2, (50,), 64, 40, False, False, 3).next_batch()
    bounds = [*batch.offsets[0].tolist(), batch.indices.numel()]
    for start, end in itertools.pairwise(bounds):
        bag = batch.indices[start:end]
        assert torch.equal(bag, torch.unique(bag))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.integers(1, 2000), min_size=1, max_size=4),
    size=st.integers(1, 64),
    lookups=st.integers(1, 20),
    fixed=st.booleans(),
    exponent=st.one_of(st.none(), st.just(1.0), st.floats(0.0, 4.0)),
)
def test_synthetic_batches_have_the_documented_shape(rows, size, lookups, fixed, exponent):
    make = SyntheticBatches(3, tuple(rows), size, lookups, fixed, True, 5, exponent, CPU)
    for _ in range(2):
        batch = make.next_batch()
        check_shape(batch, size, 3, tuple(rows))
        assert set(batch.targets.unique().tolist()) <= {0.0, 1.0}
        if fixed:
            assert batch.indices.numel() == len(rows) * size * lookups
        else:
            sizes = torch.diff(batch.offsets, dim=1)
            assert sizes.numel() == 0 or sizes.max() <= lookups


@pytest.mark.parametrize("exponent", [None, 0.5, 1.0, 1.05, 1.45])
def test_rows_follow_the_documented_law(exponent):
    rows, draws = 1000, 400_000
    make = SyntheticBatches(1, (rows,), draws, 1, True, False, 11, exponent, CPU)
    counts = np.bincount(make.next_batch().indices.numpy(), minlength=rows)
    edges = np.arange(1, rows + 2, dtype=float)
    if exponent is None:
        expected = np.full(rows, 1 / rows)
    elif exponent == 1.0:
        expected = np.diff(np.log(edges)) / np.log(rows + 1)
    else:
        expected = np.diff(edges ** (1 - exponent)) / ((rows + 1) ** (1 - exponent) - 1)
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is passed once in a thousand seeds; this one is fixed
    distance = np.abs(np.cumsum(counts) / draws - np.cumsum(expected)).max()
    assert distance < 1.95 / np.sqrt(draws)
    if exponent:
        assert counts.argmax() == 0


def test_every_row_of_a_large_table_can_be_drawn():
    # float32 draws would leave out most rows above 2^24
    rows = 2**31
    make = SyntheticBatches(1, (rows,), 200_000, 1, True, False, 1, None, CPU)
    indices = make.next_batch().indices
    assert (indices % 2).float().mean() == pytest.approx(0.5, abs=0.01)
    assert indices.max() > rows * 0.999


def test_a_seed_gives_one_stream_and_another_seed_another():
    def first(seed: int, generator: str) -> Batch:
        return make_generator(small({"generator": generator}, seed=seed), CPU).next_batch()

    for generator in ("facebook", "facebook_loop", "uniform", "zipf", "reuse"):
        assert_same(first(1, generator), first(1, generator))
        assert not torch.equal(first(1, generator).dense, first(2, generator).dense)


@pytest.mark.parametrize("generator", LAWS)
def test_each_table_has_bags_of_its_own_size(generator):
    sizes = [3, 1, 7]
    parameters = parameters_from_sections(
        {
            "model": {"bottom_mlp": "4-2", "embedding_dim": 2, "table_rows": [50, 9, 50]},
            "data": {"generator": generator, "multi_hot_sizes": sizes},
            "training": {"batch_size": 8},
        }
    )
    batch = make_generator(parameters, CPU).next_batch()
    assert [batch.table_indices(t).numel() for t in range(3)] == [8 * k for k in sizes]
    assert batch.offsets.tolist() == [[k * i for i in range(8)] for k in sizes]
    for t, rows in enumerate((50, 9, 50)):
        assert 0 <= int(batch.table_indices(t).min()) <= int(batch.table_indices(t).max()) < rows
        assert mean_bag_size(parameters, t) == sizes[t]
    # sizes alike are the plain stream
    one = {"generator": generator, "indices_per_lookup": 4, "fixed_pooling": True}
    same = {"generator": generator, "multi_hot_sizes": [4, 4, 4]}
    both = []
    for data in (one, same):
        sections = parameters.to_sections() | {"data": data}
        both.append(make_generator(parameters_from_sections(sections), CPU).next_batch())
    assert_same(*both)


def test_prefetched_batches_are_the_synchronous_ones_and_the_thread_ends():
    plain = batches(small(), CPU)
    ahead = batches(small({"loader": "prefetch", "prefetch_batches": 3}), CPU)
    for _ in range(10):
        assert_same(next(ahead), next(plain))
    assert any(thread.name.startswith("dlrm-prefetch") for thread in threading.enumerate())
    ahead.close()
    assert not any(thread.name.startswith("dlrm-prefetch") for thread in threading.enumerate())


def test_a_failure_in_the_background_reaches_the_loop():
    class Broken:
        def next_batch(self) -> Batch:
            raise MemoryError("no room")

    stream = prefetched(Broken().next_batch, ahead=1)
    with pytest.raises(PrefetchError, match="no room"):
        next(stream)
