"""Batches from a data set on disk, or from a planted teacher without one."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from dlrm_core.config import Parameters
from dlrm_core.data.batch import Batch
from dlrm_core.data.files.draws import stream_key
from dlrm_core.data.files.sources import Source, open_source
from dlrm_core.data.files.teacher import Law, SampleMaker, TeacherConfig, Variant
from dlrm_core.errors import InputError

TEACHER_SAMPLES = 131_072
"""Samples of an evaluation on a teacher, whose stream has no end."""


class _Stream:
    """A stream of batches whose whole state is how many were taken."""

    taken = 0

    def state(self) -> dict[str, int]:
        """Where the stream is, for a checkpoint."""
        return {"batches": self.taken}

    def restore(self, state: dict[str, int]) -> None:
        """Go on from a state: the next batches are those that followed it."""
        self.taken = int(state["batches"])


class DatasetBatches(_Stream):
    """An endless stream of batches of one split: one row of each table a sample.

    A batch is ``batch_size`` neighbours in the files; an epoch takes each once, in the
    order of the files or, shuffled, in an order that follows from the seed and the epoch's
    number. What is left over at the end of the files when all batches are full is left
    out.

    Raises:
        InputError: the model does not fit the data, or the split has no full batch.
    """

    def __init__(
        self,
        source: Source,
        table_rows: Sequence[int],
        dense_features: int,
        batch_size: int,
        shuffled: bool = False,
        seed: int = 0,
    ) -> None:
        check_shape(source, table_rows, dense_features)
        self.source = source
        self.table_rows = tuple(table_rows)
        self.batch_size = batch_size
        self.shuffled = shuffled
        self.seed = seed
        self.batches_per_epoch = source.samples // batch_size
        if not self.batches_per_epoch:
            raise InputError(
                f"{source.label.file}: has {source.samples} samples, but training.batch_size is "
                f"{batch_size}: the {source.split} split has not one full batch"
            )

    def next_batch(self) -> Batch:
        """The next batch of the stream."""
        epoch, place = divmod(self.taken, self.batches_per_epoch)
        if self.shuffled:
            place = int(_permutation(self.batches_per_epoch, self.seed, epoch)[place])
        start = place * self.batch_size
        batch = read_batch(self.source, self.table_rows, start, start + self.batch_size)
        self.taken += 1
        return batch


@functools.lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    random = np.random.Generator(np.random.PCG64(stream_key(seed, "epoch", epoch)))
    return random.permutation(count)


class TeacherBatches(_Stream):
    """Batches of a planted teacher's law, made as they are asked for.

    The samples of the split ``train`` (endless) and ``test`` that ``dlrm data generate
    --labels teacher`` would write with the same seed, tables and exponent.
    """

    def __init__(self, law: Law, split: str, batch_size: int) -> None:
        self.law = law
        self.split = split
        self.batch_size = batch_size
        self._maker = SampleMaker(law, split)

    def next_batch(self) -> Batch:
        """The next batch of the stream."""
        batch = self.read(self.taken * self.batch_size, self.batch_size)
        self.taken += 1
        return batch

    def read(self, start: int, count: int) -> Batch:
        """Samples ``start`` to ``start + count`` of the split."""
        labels, dense, rows, _ = self._maker.block(start, count)
        indices = np.empty((len(rows), count), np.int64)
        for table, values in enumerate(rows):
            indices[table] = values
        return one_hot_batch(
            dense.astype(np.float32), indices, labels.astype(np.float32).reshape(-1, 1)
        )


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
    """Where bags of one row each begin: (T, B) int64, made once and shared by all batches."""
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


def make_batches(parameters: Parameters, split: str = "train") -> DatasetBatches | TeacherBatches:
    """The stream that ``data.generator`` 'dataset' or 'teacher' names.

    Raises:
        InputError: the data set cannot be read, or the model does not fit it.
    """
    model, data = parameters.model, parameters.data
    assert model.dense_features is not None
    size = parameters.training.batch_size
    if data.generator == "teacher":
        return TeacherBatches(parameters_law(parameters), split, size)
    source = open_source(data.path, data.format, split)
    return DatasetBatches(
        source,
        model.table_rows,
        model.dense_features,
        size,
        data.order == "shuffled",
        parameters.training.seed,
    )


def evaluation_batches(
    parameters: Parameters,
    samples: int | None = None,
    split: str = "test",
    batch_size: int | None = None,
) -> Iterator[Batch]:
    """A split once, in order, its last batch as small as what is left.

    Args:
        samples: at most so many; None: all of a data set, 131072 of a teacher, who has no end.
        batch_size: None: ``training.batch_size``.

    Raises:
        InputError: the data set cannot be read, or the model does not fit it.
    """
    model, data = parameters.model, parameters.data
    assert model.dense_features is not None
    size = batch_size or parameters.training.batch_size
    if data.generator == "teacher":
        teacher = TeacherBatches(parameters_law(parameters), split, size)
        total = TEACHER_SAMPLES if samples is None else samples
        for start in range(0, total, size):
            yield teacher.read(start, min(size, total - start))
        return
    source = open_source(data.path, data.format, split)
    check_shape(source, model.table_rows, model.dense_features)
    total = source.samples if samples is None else min(samples, source.samples)
    for start in range(0, total, size):
        yield read_batch(source, model.table_rows, start, min(start + size, total))
