"""One call of the training loop: what is reported, evaluated and kept between iterations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from dlrm_core.evaluation import Evaluation
from dlrm_core.power import power_meter
from dlrm_core.training_host import device_name, peak_memory, peak_memory_by_device
from dlrm_core.training_results import Interval, Measurements, TrainingResult, due, next_event

if TYPE_CHECKING:
    from dlrm_core.training_loop import TrainingLoop

Line = Mapping[str, Any]
"""A line of metrics.jsonl that is no interval: ``kind`` 'evaluation' or 'checkpoint'."""


class Run:
    """One call of :meth:`TrainingLoop.train`: what happens between iterations, and its outcome."""

    def __init__(
        self,
        trainer: TrainingLoop[Any],
        on_interval: Callable[[Interval], None],
        on_line: Callable[[Line], None],
    ) -> None:
        self.trainer = trainer
        self.config = trainer.parameters.training
        self.on_interval = on_interval
        self.on_line = on_line
        self.first = trainer.done
        self.measured = Measurements(trainer.device)
        self.status = "finished"
        self.last = math.nan
        self.evaluations: list[Evaluation] = []
        self.notices: list[str] = []
        self.checkpoint_s = 0.0
        self.power = power_meter(trainer.device).start()
        if trainer.done >= trainer.total:
            self.notices.append(
                f"nothing is left to do: the checkpoint is of iteration {trainer.done:,}, and the "
                f"run ends at {trainer.total:,} (training.batches, epochs, max_steps)"
            )

    def next_event(self) -> int:
        """The next iteration after which something is to be done."""
        config, writes = self.config, self.trainer.writes_checkpoints
        periods = (config.log_every, config.eval_every, config.checkpoint_every if writes else None)
        return next_event(self.trainer.done, self.trainer.total, periods)

    def after_iteration(self, stop: bool) -> bool:
        """Report, evaluate, write a checkpoint as is due; whether the run ends here."""
        done, total, config = self.trainer.done, self.trainer.total, self.config
        self.measured.settle()
        check = getattr(self.trainer.model.embeddings.backend, "check", None)
        if check is not None:
            check()  # a GPU tells late that it was asked for a row that is not there
        if stop or due(done, total, config.log_every):
            self.report()
        bad = self.measured.bad_iteration()
        if bad is not None or not self._weights_are_finite():
            self.report()
            self._diverge(bad)
            return True
        reached = False
        if not stop and self._evaluates() and due(done, total, config.eval_every):
            reached = self._evaluate()
        if reached:
            self.report()
        if self.trainer.writes_checkpoints and (
            stop or reached or due(done, total, config.checkpoint_every)
        ):
            self._save()
        if stop:
            self.status = "interrupted"
        self.measured.go_on()
        return stop or reached

    def interrupt(self) -> None:
        """The run ends here, in the middle of an iteration."""
        self.status = "interrupted"
        self.measured.settle()
        self.report()

    def report(self) -> None:
        """Close the interval."""
        interval = self.measured.interval(
            self.config.batch_size, self.first, self.trainer.learning_rate
        )
        if interval is not None:
            self.last = interval.loss
            self.on_interval(interval)

    def result(self) -> TrainingResult:
        """What the run amounted to."""
        measured, trainer, target = self.measured, self.trainer, self.config.auc_target
        known = [found.auc for found in self.evaluations if found.auc is not None]
        count = len(measured.done_ms)
        notices = trainer.notices + self.notices
        if self.evaluations:
            notices += self.evaluations[-1].notices()
        if self.status == "interrupted":
            notices.append(self._where_it_ended(self.first + count))
        return TrainingResult(
            status=self.status,
            iterations=count,
            first_iteration=self.first,
            loss=self.last,
            **measured.overall(self.config.batch_size),
            elapsed_s=time.perf_counter() - measured.started,
            evaluation_s=sum(found.seconds for found in self.evaluations),
            checkpoint_s=self.checkpoint_s,
            auc=self.evaluations[-1].auc if self.evaluations else None,
            best_auc=max(known, default=None),
            reached_target=None if target is None else max(known, default=-1.0) >= target,
            checkpoint=str(trainer.checkpoint) if trainer.checkpoint else None,
            peak_memory_bytes=peak_memory(trainer.device),
            peak_memory_by_device=peak_memory_by_device(trainer.device),
            **self.power.stop().figures(count * self.config.batch_size),
            device=device_name(trainer.device),
            threads=torch.get_num_threads(),
            embedding_backend=trainer.embedding_backend,
            notices=notices + trainer.step.dense.precision.skipped_notice(self.first + count),
            iteration_ms=measured.done_ms,
            data_ms=[1e3 * seconds for seconds in measured.data_s],
            losses=measured.done_losses,
            evaluations=[found.line() for found in self.evaluations],
        )

    def _evaluates(self) -> bool:
        return self.config.eval_every is not None or self.config.auc_target is not None

    def _evaluate(self) -> bool:
        """Evaluate; whether the target is reached."""
        found = self.trainer.evaluate()
        self.evaluations.append(found)
        self.on_line(found.line())
        target = self.config.auc_target
        return target is not None and found.auc is not None and found.auc >= target

    def _save(self) -> None:
        started = time.perf_counter()
        folder = self.trainer.save()
        seconds = time.perf_counter() - started
        self.checkpoint_s += seconds
        if folder is None:  # another rank wrote it
            return
        self.on_line(
            {
                "kind": "checkpoint",
                "iteration": self.trainer.done,
                "folder": str(folder),
                "seconds": seconds,
                "bytes": sum(file.stat().st_size for file in folder.iterdir()),
            }
        )

    def _where_it_ended(self, iteration: int) -> str:
        kept = self.trainer.checkpoint
        begin = f"interrupted after iteration {iteration:,} of {self.trainer.total:,}"
        if kept is None:
            return f"{begin}; there is no checkpoint (training.checkpoint_every)"
        return f"{begin}; --resume {kept} goes on from iteration {int(kept.name[5:]):,}"

    def _weights_are_finite(self) -> bool:
        """Of the dense part: an update that overflows there shows before the next loss does."""
        if not (self.trainer.writes_checkpoints or self._evaluates()):
            return True
        totals = [weight.detach().sum() for weight in self.trainer.step.dense.weights]
        return bool(torch.stack(totals).isfinite().all())

    def _diverge(self, place: int | None) -> None:
        """End the run with a sentence that says where and what remains."""
        self.status = "diverged"
        if place is None:
            what = f"the weights are not finite after iteration {self.trainer.done}"
        else:
            loss = self.measured.done_losses[place]
            what = f"the loss is {loss} at iteration {self.first + place + 1}"
        kept = self.trainer.checkpoint
        remains = f"the checkpoint {kept} is from before" if kept else "there is no checkpoint"
        self.notices.append(
            f"training diverged: {what} (training.learning_rate "
            f"{self.config.learning_rate:g}, training.precision {self.config.precision}); "
            f"choose a smaller learning rate; {remains}"
        )
