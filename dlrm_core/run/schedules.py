"""The learning rate over a run: linear warm-up, a plateau, polynomial decay to an end.

Two laws are published for DLRM. For iteration s, counted from 1 as both do, with W warm-up
iterations, decay from iteration D over N iterations, power p and end value e, NVIDIA's
(LearningRateScheduler of DeepLearningExamples, which MLPerf and DeepSpark use) is::

    s < W           base (1 - (W - s) / W)
    otherwise       base
    D <= s < D + N  max(e, base ((D + N - s) / N) ** p)
    D + N <= s      e

The clamp matters: with an even power the formula rises again after D + N, as it does in
NVIDIA's code for TensorFlow 2.

facebook's (LRPolicyScheduler of dlrm_s_pytorch.py) repeats the last rate that it set wherever it
neither rises nor falls, so that a run with a decay never reaches the base rate::

    s < W           base (1 - (W - s) / W)
    W <= s < D      base (1 - 1 / W)                   base, if there is no decay (N = 0)
    D <= s < D + N  max(1e-7, base ((D + N - s) / N) ** 2)
    D + N <= s      max(1e-7, base / N ** 2)
"""

from __future__ import annotations

import math

from dlrm_core.base.errors import InputError
from dlrm_core.config import TrainingConfig
from dlrm_core.data.epochs import Epoch

LEAST_OF_FACEBOOK = 1e-7
"""Rate below which facebook's decay does not go."""


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Learning rate of iteration ``step``, counted from 1, by ``training.lr_*``."""
    base, warmup, steps = config.learning_rate, config.lr_warmup_steps, config.lr_decay_steps
    if step < warmup:
        return base * (1.0 - (warmup - step) / warmup)
    if steps == 0:
        return base
    facebook = config.lr_schedule == "facebook"
    if step < config.lr_decay_start:
        return base * (1.0 - 1.0 / warmup) if facebook else base
    left = config.lr_decay_start + steps - step
    if facebook:
        return max(LEAST_OF_FACEBOOK, base * (max(left, 1) / steps) ** 2)
    if left <= 0:
        return config.lr_end
    return max(config.lr_end, base * (left / steps) ** config.lr_decay_power)


def total_steps(config: TrainingConfig, source: str, epoch: Epoch) -> int:
    """Iterations at which a run ends: batches, or epochs of the source; at most ``max_steps``.

    Raises InputError if epochs are asked of a stream that has no end.
    """
    total = config.batches
    if config.epochs is not None:
        total = max(1, math.ceil(config.epochs * _batches(config, "epochs", source, epoch)))
    return min(total, config.max_steps or total)


def evaluation_period(config: TrainingConfig, source: str, epoch: Epoch) -> int | None:
    """Iterations between evaluations, by ``eval_every`` or ``evals_per_epoch``; None: neither.

    Raises InputError if evaluations per epoch are asked of a stream that has no end.
    """
    if config.evals_per_epoch is None:
        return config.eval_every
    return max(1, _batches(config, "evals_per_epoch", source, epoch) // config.evals_per_epoch)


def _batches(config: TrainingConfig, leaf: str, source: str, epoch: Epoch) -> int:
    if epoch.batches is None:
        raise InputError(
            f"training.{leaf} is {getattr(config, leaf):g}, but data.generator {source!r} makes "
            "batches without end: give data.samples, a data set, or training.batches and eval_every"
        )
    return epoch.batches
