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
from dataclasses import dataclass

from dlrm_core.config import TrainingConfig
from dlrm_core.errors import InputError


@dataclass(frozen=True)
class Schedule:
    """A learning rate for every iteration.

    Attributes:
        base: between warm-up and decay.
        warmup: W; 0: none.
        decay_start: D.
        decay_steps: N; 0: no decay.
        power: p.
        end: e, a learning rate, not a factor.
    """

    base: float
    warmup: int = 0
    decay_start: int = 0
    decay_steps: int = 0
    power: float = 2.0
    end: float = 0.0

    @property
    def constant(self) -> bool:
        """Every iteration has the same learning rate."""
        return self.warmup <= 1 and self.decay_steps == 0

    def rate(self, step: int) -> float:
        """Learning rate of iteration ``step``, counted from 1."""
        if step < self.warmup:
            return self.base * (1.0 - (self.warmup - step) / self.warmup)
        if self.decay_steps == 0 or step < self.decay_start:
            return self.base
        left = self.decay_start + self.decay_steps - step
        if left <= 0:
            return self.end
        return max(self.end, self.base * (left / self.decay_steps) ** self.power)

    def curve(self, steps: int, most: int = 400) -> dict[str, list[float]]:
        """``iteration`` and ``learning_rate`` at up to about ``most`` places of a run.

        The corners of the schedule are always among them.
        """
        corners = {1, self.warmup, self.decay_start, self.decay_start + self.decay_steps, steps}
        stride = max(1, -(-steps // most))
        places = sorted(
            step for step in corners | set(range(1, steps + 1, stride)) if 1 <= step <= steps
        )
        return {
            "iteration": [float(step) for step in places],
            "learning_rate": [self.rate(step) for step in places],
        }


def schedule_of(config: TrainingConfig) -> Schedule:
    """The schedule that ``training.learning_rate`` and ``training.lr_*`` describe."""
    return Schedule(
        base=config.learning_rate,
        warmup=config.lr_warmup_steps,
        decay_start=config.lr_decay_start,
        decay_steps=config.lr_decay_steps,
        power=config.lr_decay_power,
        end=config.lr_end,
    )


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
