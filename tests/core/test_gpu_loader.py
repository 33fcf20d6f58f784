"""Batches on their way to a GPU: streams that run whenever they like must not spoil one.

The streams here are lists of work done as late, or as early, as chance has it; what they
keep to is the order within a stream and the events that it waits for.
"""

import math
import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_embeddings import make_batch

from dlrm_core.data.batch import Batch, extents_of
from dlrm_core.data.loader import PrefetchError
from dlrm_core.data.synthetic import SyntheticBatches, room_for
from dlrm_kernels.staging import Slot, Staging, staged

CPU = torch.device("cpu")


class Streams:
    """Two streams of deferred work; an event is the work that it has to wait for."""

    def __init__(self, seed, eager=False):
        self.random = random.Random(seed)
        self.eager = eager
        self.queues = {True: [], False: []}  # copying, computing
        self.lock = threading.RLock()
        self.buffers = 0

    def host_buffer(self, size):
        self.buffers += 1
        return torch.empty(size, dtype=torch.uint8).random_()

    device_buffer = host_buffer

    def give(self, copying, work, after=None):
        with self.lock:
            done = threading.Event()
            self.queues[copying].append((work, after, done))
            while self.eager and self.advance():
                pass
            return done

    def copy(self, into, source):
        self.give(True, lambda: into.copy_(source))

    def mark(self, copying):
        return self.give(copying, lambda: None)

    def wait(self, event, copying):
        self.give(copying, lambda: None, after=event)

    def join(self, event):
        while not event.is_set():
            assert self.advance(), "the host waits for work that nobody can do"

    def advance(self):
        """Do the first work of a stream that may go on; False if none can."""
        with self.lock:
            for copying in self.random.sample([True, False], 2):
                queue = self.queues[copying]
                if queue and (queue[0][1] is None or queue[0][1].is_set()):
                    work, _, done = queue.pop(0)
                    work()
                    done.set()
                    return True
            return False

    def finish(self):
        while self.advance():
            pass
        assert not any(self.queues.values())


def batch_of(seed, largest=4):
    made = make_batch([40, 3], 5, largest, seed)
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(5, 7, generator=generator)
    return Batch(**(vars(made) | {"dense": dense, "targets": dense[:, :1].clone()}))


def content(batch):
    return [t.clone() for t in (batch.dense, batch.indices, batch.offsets, batch.targets)]


def check_later(streams, batch, expected, seen):
    """The step's work: it reads the batch when the computing stream gets to it."""

    def read():
        assert all(map(torch.equal, content(batch), expected))
        assert torch.equal(batch.extents, extents_of(batch.table_starts))
        seen.append(1)

    streams.give(False, read)


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(3, 14))
def test_no_order_of_the_streams_spoils_a_batch(seed, slots, count):
    streams, chance = Streams(seed), random.Random(seed)
    staging, free = Staging(streams), [Slot() for _ in range(slots)]
    waiting, seen, loaded = [], [], 0
    while len(seen) < count:
        steps = [streams.advance]
        if free and loaded < count:
            steps.append(None)
        if waiting:
            steps.append(waiting)
        step = chance.choice(steps)
        if step is None:
            batch = batch_of(loaded, largest=chance.choice([0, 2, 9]))
            waiting.append((staging.load(batch, free.pop()), content(batch)))
            batch.indices.fill_(-1)  # the generator's own memory is free again
            loaded += 1
        elif step is waiting:
            (moved, slot), expected = waiting.pop(0)
            staging.wait(slot)
            check_later(streams, moved, expected, seen)
            staging.release(slot)
            free.append(slot)
        else:
            step()
    streams.finish()


@pytest.mark.parametrize("missing", ["wait", "release", "join"])
def test_the_streams_here_do_notice_a_wait_that_is_missing(missing, monkeypatch):
    """The test above would fail without any of the three waits."""
    spoilt = 0
    for seed in range(30):
        streams, seen = Streams(seed), []
        staging, slot = Staging(streams), Slot()
        if missing == "join":
            streams.join = lambda event: None
        else:
            setattr(staging, missing, lambda slot: None)
        try:
            for number in range(4):
                batch = batch_of(number)
                moved, _ = staging.load(batch, slot)
                staging.wait(slot)
                check_later(streams, moved, content(batch), seen)
                staging.release(slot)
            streams.finish()
        except (AssertionError, RuntimeError):
            spoilt += 1
    assert spoilt > 0


class Counting:
    def __init__(self, error_at=None):
        self.made, self.error_at = 0, error_at

    def next_batch(self):
        if self.made == self.error_at:
            raise ValueError("the file has ended")
        self.made += 1
        return batch_of(self.made - 1)


def test_a_thread_stages_batches_in_order_and_uses_its_buffers_again():
    streams = Streams(1, eager=True)
    stream = staged(Counting().next_batch, 2, CPU, streams)
    for number in range(20):
        batch = next(stream)
        assert all(map(torch.equal, content(batch), content(batch_of(number))))
    stream.close()
    # four slots (two kept ready, one used, one loaded), two buffers each, some grown once
    assert streams.buffers <= 4 * 2 * 3
    assert not any(t.name.startswith("dlrm-prefetch") for t in threading.enumerate())


def test_what_goes_wrong_in_the_thread_is_told():
    stream = staged(Counting(error_at=3).next_batch, 2, CPU, Streams(1, eager=True))
    with pytest.raises(PrefetchError, match="the file has ended"):
        for _ in range(10):
            next(stream)


def test_buffers_that_suffice_are_not_replaced():
    streams = Streams(0, eager=True)
    staging, slot = Staging(streams), Slot()
    for seed in (1, 1, 2):
        staging.load(batch_of(seed, largest=0), slot)
        staging.release(slot)
    assert streams.buffers == 2
    staging.load(batch_of(1, largest=2000), slot)
    assert streams.buffers == 4


@pytest.mark.parametrize("exponent", [None, 1.05])
def test_padded_batches_follow_the_same_law_and_say_it_on_the_device(exponent):
    shape = (3, (50, 4, 1), 64, 6, False, False, 9, exponent, torch.device("cpu"))
    batch = SyntheticBatches(*shape, padded=True).next_batch()
    rooms = [room_for(64, bound) for bound in (6, 4, 1)]
    assert rooms[0] < 64 * 6 and rooms[2] == 64
    assert batch.padded and batch.table_starts == (0, rooms[0], sum(rooms[:2]), sum(rooms))
    assert batch.extents[0].tolist() == list(batch.table_starts[:-1])
    # the same draws as without padding: same bags
    compact = SyntheticBatches(*shape).next_batch()
    assert torch.equal(batch.offsets, compact.offsets)
    assert batch.extents[1].tolist() == torch.tensor(compact.table_starts).diff().tolist()
    for table, rows in enumerate((50, 4, 1)):
        indices = batch.table_indices(table)
        assert len(indices) == compact.table_starts[table + 1] - compact.table_starts[table]
        assert int(indices.min()) >= 0 and int(indices.max()) < rows
    fixed = SyntheticBatches(3, (50,), 4, 2, True, False, 9, None, torch.device("cpu"), padded=True)
    assert not fixed.next_batch().padded


def test_bags_beyond_a_tables_room_are_cut_short():
    shape = (3, (50,), 64, 6, False, False, 9, None, torch.device("cpu"))
    make = SyntheticBatches(*shape, padded=True)
    make._rooms, make._limits = [100], torch.tensor([100])
    batch = make.next_batch()
    assert batch.extents.tolist() == [[0], [100]] and batch.indices.numel() == 100
    assert int(batch.offsets.max()) == 100 and bool((batch.offsets.diff() >= 0).all())


def test_room_suffices_for_many_batches():
    make = SyntheticBatches(1, (1000,), 256, 40, False, False, 3, None, torch.device("cpu"))
    most = max(make.next_batch().table_starts[-1] for _ in range(100))
    assert most < room_for(256, 40) < 256 * 40


@pytest.mark.parametrize("exponent", [None, 0.7, 1.0, 1.45])
def test_all_tables_drawn_at_once_follow_each_tables_law(exponent):
    """What a GPU does where all tables have as many lookups, on the CPU's stream."""
    rows, count = (5, 1, 3000), 40_000
    make = SyntheticBatches(1, rows, count, 1, True, False, 2, exponent, torch.device("cpu"))
    found = make._draw_all(count).view(3, count)
    for table, size in enumerate(rows):
        drawn = torch.bincount(found[table], minlength=size).double().cumsum(0) / count
        edges = torch.arange(1, size + 1, dtype=torch.float64)
        if exponent is None:
            law = edges / size
        elif exponent == 1.0:
            law = torch.log(edges + 1) / math.log(size + 1)
        else:
            shrink = 1 - exponent
            law = (1 - (edges + 1) ** shrink) / (1 - (size + 1.0) ** shrink)
        assert len(drawn) == size  # none outside
        assert float((drawn - law).abs().max()) < 0.01
