"""Synthetic samples, each a function of its place, with labels by a coin or a planted teacher.

The law is that of NVIDIA's generator (DeepLearningExamples, DLRM_and_DCNv2,
synthetic_dataset): dense features U[0,1) as float16, one row of each table by a power
law with row 0 hottest, labels by a fair coin. With a planted model the best possible AUC
is known. The teacher's logit is ``bias + strength · (a·N + b·A + c·I)``, each part of unit
variance under the data's own law:

* N: a signed sum over the dense features, x_j ~ U[0,1) centred and scaled;
* A: a sum over tables of an effect e_t(row), U[-1,1] drawn for the ``rows`` hottest rows
  of each table and 0 for all others, centred and scaled by the power law;
* I: a sum over pairs of tables of v_s(row_s) · v_t(row_t), effects of the same kind.

A label is Bernoulli(sigmoid(logit)), so no model can rank better than the logit does.
Effects are for hot rows alone since rows seen once teach nobody anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_core.data.files.draws import (
    PowerLaw,
    exp2,
    fill_words,
    half_of_bits,
    stream_key,
    stream_words,
    uniform,
)
from dlrm_core.data.files.spec import index_dtype

LOG2_E = 1.0 / math.log(2.0)


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


@dataclass(frozen=True)
class Variant:
    """Tables and dense features of a data set whose rows follow one power law.

    Attributes:
        name: as on the command line.
        dense_features: numerical columns.
        table_rows: cardinality of each categorical column.
        alpha: exponent of P(row i) ~ (i+1)^-alpha, row 0 hottest.
    """

    name: str
    dense_features: int
    table_rows: tuple[int, ...]
    alpha: float = 1.45


@dataclass(frozen=True)
class Law:
    """What every value of a synthetic data set follows from.

    Attributes:
        variant: tables, dense features, power law.
        seed: of the data.
        teacher: the planted model; None: labels by a fair coin.
    """

    variant: Variant
    seed: int
    teacher: TeacherConfig | None = None


class Teacher:
    """The planted model for tables of given sizes."""

    def __init__(
        self, config: TeacherConfig, dense_features: int, laws: Sequence[PowerLaw]
    ) -> None:
        self.config = config
        # tables of one row have no effect at all
        live = [t for t, law in enumerate(laws) if law.rows > 1]
        sizes = sorted(live, key=lambda t: (-laws[t].rows, t))[: 2 * config.pairs]
        self.pairs = list(zip(sizes[::2], sizes[1::2], strict=False))
        dense, single, pair = config.shares
        weights = [
            dense if dense_features else 0.0,
            single if live else 0.0,
            pair if self.pairs else 0.0,
        ]
        total = sum(weights) or 1.0
        parts = [math.sqrt(weight / total) * config.strength for weight in weights]
        bits = stream_words(stream_key(config.seed, "dense"), 0, dense_features)
        signs = uniform(bits) * 2.0 - 1.0
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
        values = uniform(stream_words(stream_key(self.config.seed, *name), 0, hot)) * 2.0 - 1.0
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


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(−x)), the same bits everywhere; |x| above 40 is taken as 40."""
    power = exp2(np.minimum(np.abs(logits), 40.0) * LOG2_E)
    return np.where(logits >= 0.0, power, 1.0) / (1.0 + power)


class SampleMaker:
    """Makes any samples of a split; one object for any number of threads."""

    def __init__(self, law: Law, split: str) -> None:
        variant = law.variant
        self.dense_features = variant.dense_features
        self.dtypes = [index_dtype(rows) for rows in variant.table_rows]
        self.laws = [PowerLaw.of(rows, variant.alpha) for rows in variant.table_rows]
        self._keys = {
            name: stream_key(law.seed, split, name)
            for name in ("dense", "label", *(f"table {t}" for t in range(len(self.laws))))
        }
        self.teacher = None
        if law.teacher is not None:
            self.teacher = Teacher(law.teacher, self.dense_features, self.laws)

    def rows(self, table: int, start: int, count: int) -> np.ndarray:
        """Row numbers of a table (count,) in its column's type."""
        out = np.empty(count, self.dtypes[table])
        self.laws[table].fill(self._keys[f"table {table}"], start, out)
        return out

    def dense(self, start: int, count: int) -> np.ndarray:
        """Dense features (count, D) float16, U[0,1)."""
        first, end = start * self.dense_features, (start + count) * self.dense_features
        bits = np.empty((end + 3) // 4 - first // 4, np.uint64)
        fill_words(self._keys["dense"], first // 4, bits)
        # four values a word, the lowest 16 bits first
        quarters = bits.astype("<u8", copy=False).view("<u2")[first % 4 :][: end - first]
        return np.take(half_of_bits(), quarters).reshape(count, self.dense_features)

    def labels(self, start: int, count: int, logits: np.ndarray | None) -> np.ndarray:
        """Clicks (count,) bool: by the teacher's logits, or by a fair coin."""
        if self.teacher is not None and logits is not None:
            return self.teacher.click(logits, stream_words(self._keys["label"], start, count))
        first, end = start // 64, (start + count + 63) // 64
        bits = stream_words(self._keys["label"], first, end - first)
        flips = np.unpackbits(bits.astype("<u8", copy=False).view(np.uint8), bitorder="little")
        return flips[start % 64 :][:count].view(bool)

    def block(
        self, start: int, count: int
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], np.ndarray | None]:
        """Labels, dense features, the rows of each table, and the teacher's logits (float64)."""
        dense = self.dense(start, count)
        rows = [self.rows(table, start, count) for table in range(len(self.dtypes))]
        logits = None if self.teacher is None else self.teacher.logits(dense, rows)
        return self.labels(start, count, logits), dense, rows, logits
