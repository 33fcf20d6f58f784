"""Streams of batches that are left and taken up again, whatever was made ahead."""

import copy
import json
import math

import pytest
import small_training
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.base.errors import InputError
from dlrm_core.config import parameters_from_sections
from dlrm_core.data.batch import Share
from dlrm_core.data.loader import (
    Followed,
    Generator,
    batches,
    make_generator,
    plain_state,
    state_from_plain,
)

CPU = torch.device("cpu")
GENERATORS = ["facebook_loop", "facebook", "uniform", "zipf", "reuse"]


def parameters(generator, fixed=False, loader="synchronous", rows=(40, 3, 500), size=7):
    data = {"generator": generator, "fixed_pooling": fixed}
    data |= {"loader": loader, "prefetch_batches": 3, "indices_per_lookup": 5}
    return small_training.parameters(data, {"table_rows": list(rows)}, batch_size=size)


def same(one, other):
    return (
        torch.equal(one.dense, other.dense)
        and torch.equal(one.indices, other.indices)
        and torch.equal(one.offsets, other.offsets)
        and torch.equal(one.targets, other.targets)
        and one.table_starts == other.table_starts
    )


@pytest.mark.parametrize("ranks", (2, 3))
@pytest.mark.parametrize("generator", [*GENERATORS, "teacher"])
@pytest.mark.parametrize("fixed", (False, True))
def test_ranks_have_their_parts_of_one_process_s_batches(generator, fixed, ranks):
    given = parameters(generator, fixed, size=12)
    whole = make_generator(given, CPU)
    own = [make_generator(given, CPU, Share(rank, ranks)) for rank in range(ranks)]
    for _ in range(3):
        batch = whole.next_batch()
        for rank, generator_of_rank in enumerate(own):
            first, behind = Share(rank, ranks).samples(batch.size)
            assert behind - first == 12 // ranks
            part = generator_of_rank.next_batch()
            assert same(part, batch.part(first, behind))
    # bag by bag, without the function that cuts
    begins = [*batch.offsets[2].tolist(), batch.table_indices(2).numel()]
    bags = [part.table_indices(2)[o:] for o in part.offsets[2, -1:].tolist()]
    assert bags[0].tolist() == batch.table_indices(2)[begins[-2] :].tolist()
    assert batch.part(5, 5).size == 0 and batch.part(5, 5).indices.numel() == 0
    # a run that is resumed by another number of ranks goes on from any rank's state
    resumed = make_generator(given, CPU, Share(1, 4))
    resumed.restore(through_json(own[0].state()))
    assert same(resumed.next_batch(), whole.next_batch().part(3, 6))


def through_json(state):
    return state_from_plain("file", json.loads(json.dumps(plain_state(state))), state)


@given(
    generator=st.sampled_from(GENERATORS),
    fixed=st.booleans(),
    asked=st.lists(st.booleans(), min_size=1, max_size=8),
    size=st.integers(1, 9),
)
def test_a_restored_stream_goes_on_bit_for_bit(generator, fixed, asked, size):
    """``asked``: after which batches the state is asked for; the last always."""
    chosen = parameters(generator, fixed, size=size)
    stream = make_generator(chosen, CPU)
    assert isinstance(stream, Generator)
    for ask in asked:
        stream.next_batch()
        if ask:
            stream.state()
    state = through_json(stream.state())
    again = make_generator(chosen, CPU)
    again.next_batch()
    again.restore(state)
    for _ in range(3):
        assert same(stream.next_batch(), again.next_batch())
    later = through_json(again.state())
    third = make_generator(chosen, CPU)
    third.restore(later)
    assert same(stream.next_batch(), third.next_batch())


@given(
    generator=st.sampled_from([*GENERATORS, "teacher"]),
    samples=st.integers(1, 30),
    taken=st.integers(0, 12),
)
def test_a_stream_of_epochs_begins_again_and_goes_on_from_any_state(generator, samples, taken):
    sections = parameters(generator, size=4).to_sections()
    sections["data"] |= {"samples": samples, "drop_last": False}
    chosen = parameters_from_sections(sections)
    stream = make_generator(chosen, CPU)
    batches = -(-samples // 4)
    first = [stream.next_batch() for _ in range(batches)]
    assert [batch.size for batch in first] == [stream.epoch.size(i) for i in range(batches)]
    assert sum(batch.size for batch in first) == samples == stream.epoch.samples_before(batches)
    for batch in first:
        assert same(stream.next_batch(), batch)
    left = make_generator(chosen, CPU)
    for _ in range(taken):
        left.next_batch()
    again = make_generator(chosen, CPU)
    again.restore(through_json(left.state()))
    for number in range(taken, taken + 3):
        assert same(again.next_batch(), first[number % batches])


def test_loop_and_replay_take_each_others_states():
    loop, replay = (make_generator(parameters(name), CPU) for name in GENERATORS[:2])
    for _ in range(3):
        loop.next_batch()
    replay.restore(through_json(loop.state()))
    replay.next_batch()
    loop.restore(through_json(replay.state()))
    assert same(loop.next_batch(), replay.next_batch())


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("loader", ["synchronous", "prefetch"])
def test_batches_made_ahead_are_not_lost(generator, loader):
    chosen = parameters(generator, loader=loader)
    followed = Followed(make_generator(chosen, CPU))
    stream = batches(chosen, CPU, followed)
    states = []
    for _ in range(6):
        next(stream)
        followed.used()
        states.append(through_json(followed.state()))
    stream.close()
    plain = make_generator(chosen, CPU)
    for state in states:
        plain.next_batch()
        resumed = make_generator(chosen, CPU)
        resumed.restore(state)
        expected = make_generator(chosen, CPU)
        expected.restore(plain.state())
        assert same(resumed.next_batch(), expected.next_batch())


def test_what_following_costs_does_not_grow():
    """States do not pile up, nor does what has to be drawn again to come back."""
    generator = make_generator(parameters("facebook", size=50), CPU)
    followed = Followed(generator)
    for _ in range(60):
        followed.next_batch()
        followed.used()
    assert len(followed._states) == 1 and len(generator._marks) <= 3
    draws_of_a_batch = generator._total / 60
    assert followed.state()["skip"] <= 2 * draws_of_a_batch


@pytest.mark.parametrize("generator", ["facebook", "uniform", "teacher"])
def test_a_state_with_an_impossible_value_anywhere_is_refused(generator):
    """Every leaf in turn, with values of other types, other sizes and out of range."""
    stream = make_generator(parameters(generator), CPU)
    stream.next_batch()
    state = stream.state()
    plain = json.loads(json.dumps(plain_state(state)))
    refused = 0
    for path in leaves(plain):
        for value in (None, True, "0", -1, 2**70, 1.5, math.nan, [], {}, [[]]):
            if isinstance(at(plain, path), float) and value == 1.5:
                continue
            edited = copy.deepcopy(plain)
            at(edited, path[:-1])[path[-1]] = value
            with pytest.raises(InputError, match=r"expected"):
                state_from_plain("file", edited, state)
            refused += 1
        edited = copy.deepcopy(plain)
        del at(edited, path[:-1])[path[-1]]
        with pytest.raises(InputError, match=r"expected"):
            state_from_plain("file", edited, state)
    assert refused >= 10


def leaves(state, path=()):
    """Paths to every value; of a list of numbers only to its first and last."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, (*path, key))
    elif isinstance(state, list):
        yield from ((*path, 0), (*path, len(state) - 1))
    else:
        yield path


def at(state, path):
    for key in path:
        state = state[key]
    return state


def test_a_state_that_skips_for_hours_is_refused_at_once():
    stream = make_generator(parameters("facebook"), CPU)
    with pytest.raises(InputError, match=r"skip is 1000000000000000, expected at most \d+"):
        stream.restore(stream.state() | {"skip": 10**15})
