"""MLPerf's log of a training: ``:::MLLOG`` lines with the keys of its training rules.

Each line is a JSON object with ``namespace``, ``time_ms`` (since 1970), ``event_type``, ``key``,
``value`` and ``metadata``. What only a submission has (organisation, division, platform, a cleared
cache) is left out, so these logs show when a run did what, and are no submission.

Source: mlcommons/logging, rules of training 2.0 and of DLRM.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from dlrm_core.base.files import JsonLines
from dlrm_core.interactions import CrossInteraction
from dlrm_core.train import TrainingLoop

PREFIX = ":::MLLOG "
START, STOP, POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"


class MLPerfLog:
    """Writes the log of one run as it happens.

    An epoch is a pass over the data or, of a stream without end, the whole run; ``epoch_num``
    counts passes from the run's beginning, 1.5 in the middle of the second. Lines begin with
    :data:`PREFIX`.
    """

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines
        self._batches, self._first, self._known = 1, 0, False
        self._waits: float | None = None
        """When the next epoch begins, if it is not logged yet."""
        self._write(START, "init_start")

    def begin(self, loop: TrainingLoop[Any]) -> None:
        parameters, training = loop.parameters, loop.parameters.training
        self._batches, self._first = loop.epoch.batches or loop.total, loop.first
        crosses = parameters.model.interaction == CrossInteraction.kind
        settings = {
            "submission_benchmark": "dlrm_dcnv2" if crosses else "dlrm",
            "seed": training.seed,
            "global_batch_size": training.batch_size,
            "opt_base_learning_rate": training.learning_rate,
            "opt_learning_rate_warmup_steps": training.lr_warmup_steps,
            "opt_learning_rate_decay_start_step": training.lr_decay_start,
            "opt_learning_rate_decay_steps": training.lr_decay_steps,
        }
        if loop.epoch.samples is not None:
            settings["train_samples"] = loop.epoch.samples
        for key, value in settings.items():
            self._write(POINT, key, value)

    def iteration(self, done: int) -> None:
        """Log what an iteration begins or ends; ``done`` by this process, 0 before the first."""
        passed, place = divmod(self._first + done, self._batches)
        if done == 0:
            self._write(STOP, "init_stop")
            self._write(START, "run_start")
            self._write(START, "epoch_start", epoch_num=passed + 1)
            return
        if self._waits is not None:
            number = passed + 1 if place else passed
            self._write(START, "epoch_start", at=self._waits, epoch_num=number)
            self._waits = None
        if place == 0:
            self._write(STOP, "epoch_stop", epoch_num=passed)
            self._waits = time.time()

    def line(self, line: Mapping[str, Any]) -> None:
        """Log an evaluation, from its line of metrics.jsonl."""
        if line.get("kind") != "evaluation":
            return
        now, epoch = time.time(), line["iteration"] / self._batches
        self._write(START, "eval_start", at=now - line["seconds"], epoch_num=epoch)
        self._write(STOP, "eval_stop", at=now, epoch_num=epoch)
        self._write(POINT, "eval_accuracy", line["auc"], epoch_num=epoch)
        if not self._known:
            self._write(POINT, "eval_samples", line["samples"])
            self._known = True
        if self._waits is not None:
            self._waits = time.time()

    def end(self, reached: bool) -> None:
        self._write(STOP, "run_stop", status="success" if reached else "aborted")

    def _write(
        self, kind: str, key: str, value: Any = None, at: float | None = None, **metadata: Any
    ) -> None:
        line = sys._getframe(1).f_lineno
        where = {"file": "dlrm_workbook/evidence/mllog.py", "lineno": line}
        self._lines.write(
            {
                "namespace": "",
                "time_ms": int(1e3 * (time.time() if at is None else at)),
                "event_type": kind,
                "key": key,
                "value": value,
                "metadata": where | metadata,
            }
        )
