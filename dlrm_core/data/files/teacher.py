"""Labels from a planted model: what the best possible AUC is, is known.

The teacher's logit is ``bias + strength · (a·N + b·A + c·I)``, each part of unit
variance under the data's own law:

* N: a signed sum over the dense features, x_j ~ U[0,1) centred and scaled;
* A: a sum over tables of an effect e_t(row), U[-1,1] drawn for the ``rows`` hottest rows
  of each table and 0 for all others, centred and scaled by the power law;
* I: a sum over pairs of tables of v_s(row_s) · v_t(row_t), effects of the same kind.

A label is Bernoulli(sigmoid(logit)), so no model can rank better than the logit does.
Effects are for hot rows alone since rows seen once teach nobody anything.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrm_core.data.files.draws import (
    PowerLaw,
    exp2,
    half_of_bits,
    stream_key,
    uniform,
    words,
)

LOG2_E = 1.0 / math.log(2.0)
BINS = 1 << 20
LIMIT = 16.0
"""Logits are counted in BINS equal bins of [-LIMIT, LIMIT]."""


@dataclass(frozen=True)
class TeacherConfig:
    """The teacher's law.

    Attributes:
        seed: of the effects, not of the data.
        strength: standard deviation of the logit.
        bias: mean of the logit.
        rows: hot rows of each table that have an effect.
        pairs: pairs of tables that interact.
        shares: shares of the logit's variance: dense, tables, interactions.
    """

    seed: int = 1
    strength: float = 1.38
    bias: float = -1.5
    rows: int = 64
    pairs: int = 4
    shares: tuple[float, float, float] = (0.3, 0.55, 0.15)


class Teacher:
    """The planted model for tables of given sizes."""

    def __init__(
        self, config: TeacherConfig, dense_features: int, table_rows: Sequence[int], alpha: float
    ) -> None:
        self.config = config
        self.dense_features = dense_features
        laws = [PowerLaw.of(rows, alpha) for rows in table_rows]
        self.laws = laws
        # tables of one row have no effect at all
        live = [t for t, rows in enumerate(table_rows) if rows > 1]
        sizes = sorted(live, key=lambda t: (-table_rows[t], t))[: 2 * config.pairs]
        self.pairs = list(zip(sizes[::2], sizes[1::2], strict=False))
        dense, single, pair = config.shares
        weights = [
            dense if dense_features else 0.0,
            single if live else 0.0,
            pair if self.pairs else 0.0,
        ]
        total = sum(weights) or 1.0
        parts = [math.sqrt(weight / total) * config.strength for weight in weights]
        signs = uniform(words(stream_key(config.seed, "dense"), 0, dense_features)) * 2.0 - 1.0
        norm = math.sqrt(float((signs * signs).sum()) / 12.0) if dense_features else 1.0
        self.dense_weights = signs * (parts[0] / norm)
        self.effects = {
            t: self._effect(("effect", t), laws[t], parts[1] / math.sqrt(len(live))) for t in live
        }
        self.factors = {
            t: self._effect(
                ("factor", t), laws[t], math.sqrt(parts[2] / math.sqrt(len(self.pairs)))
            )
            for pair_of in self.pairs
            for t in pair_of
        }

    def _effect(self, name: tuple[str, int], law: PowerLaw, scale: float) -> np.ndarray:
        """Effect of each hot row and, last, of all others: mean 0, standard deviation scale."""
        hot = min(self.config.rows, law.rows)
        values = uniform(words(stream_key(self.config.seed, *name), 0, hot)) * 2.0 - 1.0
        chances = law.chances(hot)
        values = np.append(values, 0.0)
        chances = np.append(chances, max(0.0, 1.0 - float(chances.sum())))
        values -= float((chances * values).sum())
        deviation = math.sqrt(float((chances * values * values).sum()))
        # rounded, so that the last bit of a sum or a power cannot differ between machines
        return (values * (scale / deviation)).astype(np.float32).astype(np.float64)

    def logits(self, dense: np.ndarray, rows: Sequence[np.ndarray]) -> np.ndarray:
        """The teacher's scores of B samples: float64, the same bits everywhere.

        Args:
            dense: (B, D) float16.
            rows: T arrays of B row numbers.
        """
        total = np.full(len(dense), self.config.bias)
        for j, weight in enumerate(self.dense_weights.astype(np.float32).astype(np.float64)):
            total += (dense[:, j].astype(np.float64) - 0.5) * weight
        hot = {t: np.minimum(rows[t], len(e) - 1) for t, e in self.effects.items()}
        for t, effect in self.effects.items():
            total += effect[hot[t]]
        for s, t in self.pairs:
            total += self.factors[s][hot[s]] * self.factors[t][hot[t]]
        return total

    def click(self, logits: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """Labels of samples from their logits and 64 random bits each: bool."""
        return uniform(bits) < sigmoid(logits)

    def sample(self, key: int, start: int, count: int) -> np.ndarray:
        """Logits of samples of the data's law, drawn from streams of their own."""
        lut = half_of_bits()
        columns = [
            lut[(words(stream_key(key, "dense", j), start, count) >> np.uint64(48)).astype(np.intp)]
            for j in range(self.dense_features)
        ]
        dense = np.stack(columns, axis=1) if columns else np.empty((count, 0), np.float16)
        rows = [
            law.draw(words(stream_key(key, "rows", t), start, count))
            if t in self.effects
            else np.zeros(count, np.int64)
            for t, law in enumerate(self.laws)
        ]
        return self.logits(dense, rows)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(−x)), the same bits everywhere; |x| above 40 is taken as 40."""
    power = exp2(np.minimum(np.abs(logits), 40.0) * LOG2_E)
    return np.where(logits >= 0.0, power, 1.0) / (1.0 + power)


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
        """Count scores with their labels (bool), or chances of a click (float)."""
        places = ((logits + LIMIT) * (BINS / (2 * LIMIT))).astype(np.int64)
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


@functools.lru_cache(maxsize=8)
def best_figures(
    config: TeacherConfig,
    dense_features: int,
    table_rows: tuple[int, ...],
    alpha: float,
    rounds: int = 16,
    samples: int = 1 << 17,
) -> dict[str, Any]:
    """The best AUC and log loss that any model can have on the teacher's law.

    By Monte Carlo over inputs with the labels integrated out: ``rounds`` independent
    estimates, their mean, and the standard error of that mean.
    """
    teacher = Teacher(config, dense_features, table_rows, alpha)
    aucs, losses, rates = [], [], []
    for number in range(rounds):
        histogram = ScoreHistogram()
        for start in range(0, samples, 1 << 16):
            logits = teacher.sample(
                stream_key(config.seed, "best", number), start, min(1 << 16, samples - start)
            )
            histogram.add(logits, sigmoid(logits))
        aucs.append(histogram.auc()[0])
        losses.append(histogram.log_loss())
        rates.append(histogram.rate())
    return {
        "bayes_auc": float(np.mean(aucs)),
        "bayes_auc_standard_error": float(np.std(aucs, ddof=1) / math.sqrt(rounds)),
        "bayes_log_loss": float(np.mean(losses)),
        "bayes_log_loss_standard_error": float(np.std(losses, ddof=1) / math.sqrt(rounds)),
        "click_rate": float(np.mean(rates)),
        "monte_carlo_samples": rounds * samples,
    }
