"""Batches from a data set on disk, or from a planted teacher without one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from dlrm_core.base.errors import InputError
from dlrm_core.config import Parameters
from dlrm_core.data.batch import WHOLE, Batch, Share
from dlrm_core.data.epochs import Epoch
from dlrm_core.data.files.draws import stream_key
from dlrm_core.data.files.sources import Source, open_source
from dlrm_core.data.files.teacher import Law, SampleMaker, TeacherConfig, Variant

TEACHER_SAMPLES = 131_072
"""Samples of an evaluation on a teacher, whose stream has no end."""


class SampleBatches:
    """An endless stream of batches of neighbouring samples.

    Its whole state is how many batches were taken. An epoch takes each full batch once, in
    the order of the files or, shuffled, in an order that follows from the seed and the epoch's
    number; a short batch comes last.

    Args:
        read: makes a batch of the samples ``start`` to ``stop``.
        epoch: at least one batch.
        order_seed: of the order in which an epoch takes the batches; None: that of the files.
        share: of every batch that is read.
    """

    def __init__(
        self,
        read: Callable[[int, int], Batch],
        epoch: Epoch,
        order_seed: int | None = None,
        share: Share = WHOLE,
    ) -> None:
        self.epoch = epoch
        self.taken = 0
        self._read = read
        self._order_seed = order_seed
        self._share = share

    def next_batch(self) -> Batch:
        """The next batch of the stream."""
        passed, place = self.epoch.place(self.taken)
        full = self.epoch.full_batches
        if self._order_seed is not None and full is not None and place < full:
            place = int(_permutation(full, self._order_seed, passed)[place])
        start = place * self.epoch.batch_size
        first, end = self._share.samples(self.epoch.size(self.taken))
        batch = self._read(start + first, start + end)
        self.taken += 1
        return batch

    def state(self) -> dict[str, int]:
        """The place in the stream, as a checkpoint keeps it."""
        return {"batches": self.taken}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from a state: the next batches are those that followed it."""
        self.taken = int(state["batches"])


@functools.lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    random = np.random.Generator(np.random.PCG64(stream_key(seed, "epoch", epoch)))
    return random.permutation(count)


def read_batch(source: Source, table_rows: Sequence[int], start: int, stop: int) -> Batch:
    """Samples of a source as a batch, every value checked.

    Raises:
        InputError: naming file, sample, feature, value and what was expected.
    """
    targets = source.read_labels(start, stop)
    dense = source.read_dense(start, stop)
    indices = torch.empty(len(source.tables), stop - start, dtype=torch.int64).numpy()
    source.read_rows(start, stop, table_rows, indices)
    return one_hot_batch(dense, indices, targets)


def draw_batch(maker: SampleMaker, start: int, stop: int) -> Batch:
    """Samples of a planted teacher as a batch.

    They are those that ``dlrm data generate --labels teacher`` writes with the same seed,
    tables and exponent.
    """
    labels, dense, rows, _ = maker.block(start, stop - start)
    indices = np.empty((len(rows), stop - start), np.int64)
    for table, values in enumerate(rows):
        indices[table] = values
    return one_hot_batch(
        dense.astype(np.float32), indices, labels.astype(np.float32).reshape(-1, 1)
    )


def one_hot_batch(dense: np.ndarray, indices: np.ndarray, targets: np.ndarray) -> Batch:
    """A batch from (B, D) float32, (T, B) int64 and (B, 1) float32."""
    tables, size = indices.shape
    return Batch(
        torch.from_numpy(dense),
        torch.from_numpy(indices).view(-1),
        _offsets(tables, size),
        tuple(size * table for table in range(tables + 1)),
        torch.from_numpy(targets),
    )


@functools.lru_cache(maxsize=8)
def _offsets(tables: int, size: int) -> torch.Tensor:
    """The begins of bags of one row each, (T, B) int64, made once and shared by all batches."""
    return torch.arange(size).expand(tables, size).contiguous()


def check_shape(source: Source, table_rows: Sequence[int], dense_features: int) -> None:
    """Hold a model's shape against a data set.

    Raises:
        InputError: naming file, field and both numbers.
    """
    if len(table_rows) != len(source.tables):
        raise InputError(
            f"model.tables is {len(table_rows)}, but {source.path} has {len(source.tables)} "
            "categorical features"
        )
    if dense_features != len(source.dense_names):
        raise InputError(
            f"model.dense_features is {dense_features}, but {source.path} has "
            f"{len(source.dense_names)} numerical features"
        )
    for table, (rows, column) in enumerate(zip(table_rows, source.tables, strict=True)):
        if column.rows is not None and rows < column.rows:
            raise InputError(
                f"model.table_rows[{table}] is {rows}, but feature {column.name} of "
                f"{source.path} has cardinality {column.rows}"
            )


def parameters_law(parameters: Parameters) -> Law:
    """The law that ``data.generator: teacher`` draws from."""
    model, data = parameters.model, parameters.data
    assert model.dense_features is not None
    variant = Variant("parameters", model.dense_features, model.table_rows, data.zipf_exponent)
    teacher = TeacherConfig(
        seed=data.teacher_seed, strength=data.teacher_strength, rows=data.teacher_rows
    )
    return Law(variant, parameters.training.seed, teacher)


def make_batches(parameters: Parameters, share: Share = WHOLE) -> SampleBatches:
    """The training stream that ``data.generator`` 'dataset' or 'teacher' names.

    Args:
        share: of every batch that is read.

    Raises:
        InputError: the data set cannot be read or has no batch, or the model does not fit it.
    """
    data, training = parameters.data, parameters.training
    read, samples = _open_split(parameters, "train")
    epoch = Epoch(data.samples if samples is None else samples, training.batch_size, data.drop_last)
    if epoch.batches == 0:
        more = " (data.drop_last: false trains on a short one)" if samples else ""
        raise InputError(
            f"{data.path}: the train split has {samples} samples, but training.batch_size is "
            f"{training.batch_size}: not one full batch{more}"
        )
    order_seed = training.seed if data.order == "shuffled" else None
    return SampleBatches(read, epoch, order_seed, share)


def evaluation_batches(
    parameters: Parameters, samples: int | None = None, share: Share = WHOLE
) -> Iterator[Batch]:
    """The test split once, in order, its last batch as small as what is left.

    Args:
        samples: at most so many; None: all of a data set, 131072 of a teacher, who has no end.
        share: of the ranks each reads every R-th batch, as many as the others: the last may
            have no samples.

    Raises:
        InputError: the data set cannot be read, or the model does not fit it.
    """
    size = parameters.training.batch_size
    read, there = _open_split(parameters, "test")
    total = samples or there or TEACHER_SAMPLES
    if there is not None:
        total = min(total, there)
    for first in range(0, total, size * share.ranks):
        start = min(first + share.rank * size, total)
        yield read(start, min(start + size, total))


def _open_split(
    parameters: Parameters, split: str
) -> tuple[Callable[[int, int], Batch], int | None]:
    """What makes a batch of the samples ``start`` to ``stop``, and how many samples there are.

    The number is None of a planted teacher's samples, which have no end.
    """
    model, data = parameters.model, parameters.data
    if data.generator == "teacher":
        return functools.partial(draw_batch, SampleMaker(parameters_law(parameters), split)), None
    source = open_source(data.path, data.format, split)
    assert model.dense_features is not None
    check_shape(source, model.table_rows, model.dense_features)
    return functools.partial(read_batch, source, model.table_rows), source.samples
