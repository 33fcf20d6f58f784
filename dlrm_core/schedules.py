"""The learning rate over a run: linear warm-up, a plateau, polynomial decay to an end.

As NVIDIA and MLPerf publish it for DLRM (LearningRateScheduler of NVIDIA's
DeepLearningExamples, LRPolicyScheduler of facebookresearch/dlrm). For iteration s, counted
from 1 as both do, with W warm-up iterations, decay from iteration D over N iterations,
power p and end value e::

    s < W           base (1 - (W - s) / W)
    otherwise       base
    D <= s < D + N  max(e, base ((D + N - s) / N) ** p)
    D + N <= s      e

The clamp matters: with an even power the formula rises again after D + N, as it does in
NVIDIA's code for TensorFlow 2.
"""

from __future__ import annotations

import math

from dlrm_core.config import TrainingConfig
from dlrm_core.errors import InputError


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Learning rate of iteration ``step``, counted from 1, by ``training.lr_*``."""
    base, warmup, steps = config.learning_rate, config.lr_warmup_steps, config.lr_decay_steps
    if step < warmup:
        return base * (1.0 - (warmup - step) / warmup)
    if steps == 0 or step < config.lr_decay_start:
        return base
    left = config.lr_decay_start + steps - step
    if left <= 0:
        return config.lr_end
    return max(config.lr_end, base * (left / steps) ** config.lr_decay_power)


def total_steps(config: TrainingConfig, source: str, generator: object) -> int:
    """Iterations at which a run ends: batches or epochs, at most ``max_steps``.

    Raises:
        InputError: epochs of a stream that has no end.
    """
    total = config.batches
    if config.epochs is not None:
        of_epoch = getattr(generator, "batches_per_epoch", None)
        if of_epoch is None:
            raise InputError(
                f"training.epochs is {config.epochs:g}, but data.generator {source!r} makes "
                "batches without end: give training.batches, or a data set"
            )
        total = max(1, math.ceil(config.epochs * of_epoch))
    return min(total, config.max_steps or total)
