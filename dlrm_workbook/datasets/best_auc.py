"""The best AUC that a model can have on a planted teacher's labels: the teacher's own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dlrm_core.config import Parameters
from dlrm_core.data.files.draws import half_of_bits, stream_key, stream_words
from dlrm_core.data.files.sources import Source, open_source
from dlrm_core.data.files.teacher import Law, SampleMaker, TeacherConfig, Variant, sigmoid

BINS = 1 << 20
LARGEST_LOGIT = 16.0
"""Logits are counted in BINS equal bins of [-LARGEST_LOGIT, LARGEST_LOGIT]."""
ROUNDS, SAMPLES = 16, 1 << 17
"""Independent estimates of the best figures, and the samples of each."""
SAMPLES_AT_ONCE = 1 << 16
"""Samples scored at a time."""


class ScoreHistogram:
    """AUC and log loss of scores whose chances of a click are known, in flat memory.

    ``add(logits, clicks)`` takes labels, or chances of them: with chances the labels are
    integrated out, which leaves the randomness of the inputs alone.
    """

    def __init__(self) -> None:
        self.clicks = np.zeros(BINS)
        self.others = np.zeros(BINS)
        self.loss = 0.0
        self.count = 0

    def add(self, logits: np.ndarray, clicks: np.ndarray) -> None:
        places = ((logits + LARGEST_LOGIT) * (BINS / (2 * LARGEST_LOGIT))).astype(np.int64)
        places = np.clip(places, 0, BINS - 1)
        weights = clicks.astype(np.float64)
        # bincount over the bins that occur: a whole histogram a block would be slow
        bins, where = np.unique(places, return_inverse=True)
        self.clicks[bins] += np.bincount(where, weights, len(bins))
        self.others[bins] += np.bincount(where, 1.0 - weights, len(bins))
        # −log p of a click is softplus(−logit), of none softplus(logit)
        self.loss += float((np.logaddexp(0.0, logits) - weights * logits).sum())
        self.count += len(logits)

    def auc(self) -> tuple[float, float]:
        """The AUC and how far the bins' width may put it off (both ways); NaN of one class."""
        clicks, others = float(self.clicks.sum()), float(self.others.sum())
        if clicks <= 0.0 or others <= 0.0:
            return math.nan, math.nan
        below = np.cumsum(self.others) - self.others
        pairs = clicks * others
        tied = float((self.clicks * self.others).sum()) / pairs
        return float((self.clicks * below).sum()) / pairs + tied / 2, tied / 2

    def log_loss(self) -> float:
        """Mean of −log(chance given to what happened), nats."""
        return self.loss / self.count if self.count else math.nan

    def rate(self) -> float:
        """Share of clicks."""
        return float(self.clicks.sum()) / self.count if self.count else math.nan


def best_figures(law: Law) -> dict[str, Any]:
    """The best AUC and log loss that any model can have on the teacher's law.

    By Monte Carlo over inputs with the labels integrated out: ROUNDS independent
    estimates, their mean, and the standard error of that mean.
    """
    assert law.teacher is not None
    maker = SampleMaker(law, "best")
    aucs, losses, rates = [], [], []
    for number in range(ROUNDS):
        histogram = ScoreHistogram()
        key = stream_key(law.teacher.seed, "best", number)
        for start in range(0, SAMPLES, SAMPLES_AT_ONCE):
            logits = sampled_logits(maker, key, start, min(SAMPLES_AT_ONCE, SAMPLES - start))
            histogram.add(logits, sigmoid(logits))
        aucs.append(histogram.auc()[0])
        losses.append(histogram.log_loss())
        rates.append(histogram.rate())
    return {
        "bayes_auc": float(np.mean(aucs)),
        "bayes_auc_standard_error": float(np.std(aucs, ddof=1) / math.sqrt(ROUNDS)),
        "bayes_log_loss": float(np.mean(losses)),
        "bayes_log_loss_standard_error": float(np.std(losses, ddof=1) / math.sqrt(ROUNDS)),
        "click_rate": float(np.mean(rates)),
        "monte_carlo_samples": ROUNDS * SAMPLES,
    }


def sampled_logits(maker: SampleMaker, key: int, start: int, count: int) -> np.ndarray:
    """The teacher's logits of samples of the data's law, drawn from streams of their own."""
    assert maker.teacher is not None
    lut = half_of_bits()
    keys = [stream_key(key, "dense", j) for j in range(maker.dense_features)]
    bits = [stream_words(column, start, count) >> np.uint64(48) for column in keys]
    columns = [lut[of_column.astype(np.intp)] for of_column in bits]
    dense = np.stack(columns, axis=1) if columns else np.empty((count, 0), np.float16)
    rows = [
        law.draw(stream_words(stream_key(key, "rows", t), start, count))
        if t in maker.teacher.effects
        else np.zeros(count, np.int64)
        for t, law in enumerate(maker.laws)
    ]
    return maker.teacher.logits(dense, rows)


def score_test_set(law: Law, samples: int) -> ScoreHistogram:
    """The teacher's scores against the labels of the test set, all of them."""
    maker, histogram = SampleMaker(law, "test"), ScoreHistogram()
    for start in range(0, samples, SAMPLES_AT_ONCE):
        labels, _, _, logits = maker.block(start, min(SAMPLES_AT_ONCE, samples - start))
        assert logits is not None
        histogram.add(logits, labels)
    return histogram


def law_of(source: Source) -> Law | None:
    """The law of a data set that ``dlrm data generate`` made; None of any other."""
    metadata = source.metadata
    if metadata.get("made_by") != "dlrm data generate":
        return None
    try:
        rows = tuple(column.rows or 0 for column in source.tables)
        alpha = float(metadata["alpha"])
        variant = Variant(str(metadata["variant"]), len(source.dense_names), rows, alpha)
        teacher = metadata.get("teacher")
        if teacher is not None:
            teacher = TeacherConfig(**(teacher | {"shares": tuple(teacher["shares"])}))
        return Law(variant, int(metadata["seed"]), teacher)
    except (KeyError, TypeError, ValueError):
        return None


def teacher_auc(parameters: Parameters) -> float | None:
    """The best AUC that a model can have on the samples of an evaluation: their teacher's own; None
    where no teacher drew the labels, or all of them are of one kind. An InputError says that the
    data set cannot be read."""
    # torch, which programs that make data sets do without
    from dlrm_core.data.files.samples import TEACHER_SAMPLES, parameters_law

    data, training = parameters.data, parameters.training
    samples = training.eval_batches and training.eval_batches * training.batch_size
    if data.generator == "teacher":
        law: Law | None = parameters_law(parameters)
        count = samples or TEACHER_SAMPLES
    elif data.generator == "dataset":
        source = open_source(data.path, data.format, "test")
        if source.metadata.get("labels") != "teacher":
            return None
        if not samples or samples >= source.samples:
            return source.metadata.get("teacher_auc_on_test")
        law, count = law_of(source), samples
    else:
        return None
    auc = score_test_set(law, count).auc()[0] if law is not None else math.nan
    return auc if math.isfinite(auc) else None
