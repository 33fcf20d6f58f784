"""Predictions on test data: AUC, log loss, accuracy and the loss, and how fast they are made."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dlrm_core.config import Parameters
from dlrm_core.data.batch import WHOLE, Batch, Share
from dlrm_core.data.loader import make_generator
from dlrm_core.dense import predict_rows
from dlrm_core.model import DLRM, inputs_of
from dlrm_core.precision import DensePrecision
from dlrm_core.run.auc import QualityMeter
from dlrm_core.step import data_forward, transfer_forward

STREAM_BATCHES = 20
"""Batches of an evaluation on a stream without end, unless ``training.eval_batches`` is given."""

KEPT_BYTES = 256 << 20
"""Generated test data is kept between evaluations if it is no larger than this."""

_SEED_STEP = 1 << 31
"""Added to the seed for test data: no batch of the training is among it."""


@dataclass(frozen=True)
class Evaluation:
    """Quality of a model's predictions on test data, and how fast they were made."""

    iteration: int
    """Iterations of training behind the model."""
    samples: int
    auc: float | None
    """None where all targets are of one kind."""
    loss: float
    """``model.loss``, the mean over samples."""
    log_loss: float
    """Mean binary cross entropy, natural logarithm, each clamped at 100 as torch does."""
    accuracy: float
    """Share of samples on whose side of 0.5 the prediction is."""
    click_share: float
    """Share of targets above 0.5."""
    seconds: float
    """Data included."""
    data_seconds: float
    samples_per_second: float
    ms_per_iteration: float
    """Median of a batch's transfer, forward pass and copy of its predictions to the host; on
    several ranks of a batch on each."""
    graded_targets: bool
    """Some targets are neither 0 nor 1; AUC and accuracy then ask which are above 0.5."""

    def notices(self) -> list[str]:
        """What a reader must know about the figures."""
        notices = []
        if self.graded_targets:
            notices.append(
                "targets are numbers between 0 and 1 (data.round_targets is false): AUC and "
                "accuracy are about which of them are above 0.5"
            )
        if self.auc is None:
            kind = "clicks" if self.click_share else "non-clicks"
            notices.append(f"there is no AUC: all {self.samples:,} test targets are {kind}")
        return notices


class HeldOut:
    """The batches of every evaluation, made on ``device``, the same ones each time.

    ``divide``, if given, is what becomes of each, as of a training batch; a rank predicts its
    ``share`` of them.
    """

    def __init__(
        self,
        parameters: Parameters,
        device: torch.device,
        divide: Callable[[Batch], Batch] | None = None,
        share: Share = WHOLE,
    ) -> None:
        self._divide = divide
        count = parameters.training.eval_batches
        self._batches = functools.partial(held_out_batches, parameters, device, count, share)
        self._kept: list[Batch] = []

    def __iter__(self) -> Iterator[Batch]:
        if self._kept:
            yield from self._kept
            return
        kept, size = [], 0
        for batch in self._batches():
            if self._divide is not None:
                batch = self._divide(batch)
            yield batch
            size += sum(t.nbytes for t in (batch.dense, batch.indices, batch.offsets))
            if size <= KEPT_BYTES:
                kept.append(batch)
            else:
                kept.clear()
        self._kept = kept


def held_out_batches(
    parameters: Parameters, device: torch.device, count: int | None, share: Share = WHOLE
) -> Iterator[Batch]:
    """Test data from its beginning: a test split, or the run's law with a seed of its own.

    Args:
        count: batches at most; None: all of a data set, 131,072 samples of a teacher,
            :data:`STREAM_BATCHES` of other streams, which have no end.
        share: of the ranks each has every R-th batch, as many as the others: the last may have
            no samples. A stream must be drawn whole for that; of a data set each reads its own.
    """
    training = parameters.training
    if parameters.data.one_hot:
        from dlrm_core.data.files.samples import evaluation_batches

        yield from evaluation_batches(parameters, count and count * training.batch_size, share)
        return
    seed = (training.seed + _SEED_STEP) % (1 << 32)
    endless = dataclasses.replace(parameters.data, samples=None)
    other = dataclasses.replace(parameters, data=endless).with_training(seed=seed)
    generator = make_generator(other, device)
    total = count or STREAM_BATCHES
    for first in range(0, total, share.ranks):
        of_ranks = [generator.next_batch() for _ in range(min(share.ranks, total - first))]
        yield of_ranks[share.rank] if share.rank < len(of_ranks) else of_ranks[0].part(0, 0)


def predict(model: DLRM, batch: Batch, precision: DensePrecision) -> torch.Tensor:
    """Click probability (B, 1) float32, part by part as in training, outside of any graph."""
    values = inputs_of(batch)
    with torch.no_grad():
        predict_rows(model.lookups, values)
        with precision.autocast():
            return predict_rows(model.dense_pieces, values)


def evaluate(
    make_predictions: Callable[[Batch], torch.Tensor],
    loss: nn.Module,
    batches: Iterable[Batch],
    device: torch.device,
    iteration: int = 0,
    on_batch: Callable[[int], None] = lambda samples: None,
    agree: Callable[[float], float] = lambda seconds: seconds,
    together: Callable[
        [torch.Tensor, torch.Tensor], Sequence[tuple[torch.Tensor, torch.Tensor]]
    ] = lambda predictions, targets: [(predictions, targets)],
) -> Evaluation:
    """Predict all batches; see :class:`Evaluation`.

    Args:
        make_predictions: click probability (B, 1) of a batch on ``device``.
        batches: on the host or already on the device.
        on_batch: called with the samples of each batch.
        agree: makes of this process's seconds those of all that predict together.
        together: makes of this process's predictions and targets (B, 1) of a batch those of
            all processes, batch by batch in their order.

    Raises InputError if there are no samples, or a prediction that is not a number.
    """
    stream = iter(batches)
    times_s: list[float] = []
    data_s = weighted = 0.0
    started = time.perf_counter()
    meter = QualityMeter()
    while True:
        begun = time.perf_counter()
        try:
            batch = data_forward(stream)
        except StopIteration:
            break
        batch_ready = time.perf_counter()
        data_s += batch_ready - begun
        if batch.dense.device != device:
            batch = transfer_forward(batch, device)
        predicted = make_predictions(batch)
        scored = []
        for predictions, targets in together(predicted, batch.targets.to(predicted.device)):
            weighted += float(loss(predictions, targets)) * len(targets)
            scored.append((predictions.cpu().numpy(), targets.cpu().numpy()))
        times_s.append(time.perf_counter() - batch_ready)
        for scores, clicks in scored:
            meter.add(scores, clicks)
            on_batch(len(scores))
    quality = meter.quality()
    seconds = agree(time.perf_counter() - started)
    return Evaluation(
        iteration=iteration,
        **quality,
        loss=weighted / quality["samples"],
        seconds=seconds,
        data_seconds=data_s,
        samples_per_second=quality["samples"] / seconds,
        ms_per_iteration=1e3 * statistics.median(times_s),
        graded_targets=meter.graded,
    )
