"""Loops that run some parts of a training step alone, in the state the step has them in.

A half of the step is the real :class:`~dlrm_core.step.TrainingStep` on reduced
parameters: the *dense* half has tables of one row, so that only MLPs, interaction and
loss cost anything; the *sparse* half has MLPs of one layer, so that only the embeddings
do. Both allocate and free as the step does, and time their parts by the same ranges
(:func:`dlrm_core.parts.log_spans`). What the other half would have pushed out of the
caches is pushed out by streaming over a buffer where that half would have run.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dlrm_core.capacity import mean_bag_size
from dlrm_core.config import ModelConfig, Parameters
from dlrm_core.data.loader import make_generator
from dlrm_core.embeddings.choose import resolve
from dlrm_core.model import DLRM, ClickLoss
from dlrm_core.parts import log_spans, parse_span
from dlrm_core.precision import set_fp32_matmul, set_tf32
from dlrm_core.step import TrainingStep

Times = dict[str, dict[str, float]]
"""Component to phase to milliseconds."""

HALVES = {
    "dense": ("bottom_mlp", "interaction", "top_mlp", "loss"),
    "sparse": ("embedding",),
}
"""Half of the step to the components that it runs as they are."""

SHARED = ("optimizer", "other")
"""Dropping gradients and freeing activations: some of it in either half."""

SCRUB_BYTES = (16 << 20, 192 << 20)
"""Least and most streamed over between two runs of a half."""


def reduced(parameters: Parameters, half: str) -> Parameters:
    """Parameters under which a step costs no more than one of its halves.

    Equal reduced parameters mean an equal half.
    """
    model, data, training = parameters.model, parameters.data, parameters.training
    tables = len(model.table_rows)
    calm: dict[str, Any] = {"seed": 0, "learning_rate": 1e-4}
    if half == "dense":
        calm |= _present(training, embedding_backend="torch", embedding_update="race_free")
        model = dataclasses.replace(model, table_rows=(1,) * tables)
        data = dataclasses.replace(
            data,
            generator="uniform",
            indices_per_lookup=1,
            fixed_pooling=True,
            loader="synchronous",
            place="cpu",
        )
    else:
        calm |= _present(
            training,
            precision="fp32",
            micro_batch=None,
            compile=False,
            cuda_graphs=False,
            fp32_matmul="default",
            dense_backend="torch",
            fused_optimizer=False,
        )
        model = dataclasses.replace(
            model,
            mlp_sizes="facebook",
            dense_features=1,
            bottom_mlp=(1, model.embedding_dim),
            top_mlp=(1,),
            interaction="cat",
            loss="mse",
        )
        law = "facebook" if data.generator == "facebook_loop" else data.generator
        data = dataclasses.replace(data, generator=law, loader="synchronous", place="cpu")
    training = dataclasses.replace(training, **calm)
    return dataclasses.replace(parameters, model=model, data=data, training=training)


def _present(section: Any, **values: Any) -> dict[str, Any]:
    """Of the values, those whose leaf this version has."""
    known = {field.name for field in dataclasses.fields(section)}
    return {name: value for name, value in values.items() if name in known}


def half_bytes(parameters: Parameters, half: str) -> int:
    """Bytes that one iteration of a half moves through the caches, about.

    Sparse: lookups x d, read, written as gradients, and read and written by the
    update. Dense: activations and their gradients, and the weights three times.
    """
    model, size = parameters.model, parameters.training.batch_size
    if half == "sparse":
        lookups = sum(size * mean_bag_size(parameters, rows) for rows in model.table_rows)
        return int(lookups * model.embedding_dim * 4 * 4)
    widths = (model.bottom_widths, model.top_widths)
    weights = sum(n * m + m for pairs in map(itertools.pairwise, widths) for n, m in pairs)
    features = len(model.table_rows) + 1
    values = sum(map(sum, widths)) + features * (features + model.embedding_dim)
    return 4 * (2 * size * values + 3 * weights)


class Scrubber:
    """Streams over a buffer, so that what was in the caches no longer is."""

    def __init__(self, size_bytes: int) -> None:
        least, most = SCRUB_BYTES
        self.buffer = torch.zeros(min(max(size_bytes, least), most) // 4)
        self.taken_ns = 0
        """Time it took so far."""

    def __call__(self) -> None:
        started = time.time_ns()
        self.buffer.add_(1.0)
        self.taken_ns += time.time_ns() - started


class _ScrubbedDense:
    """The dense part of a step behind a scrub that stands for what it moved at full size."""

    def __init__(self, dense: Any, scrub: Scrubber) -> None:
        self._dense, self._scrub = dense, scrub

    def __call__(self, *arguments: Any) -> Any:
        self._scrub()
        return self._dense(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dense, name)


class StepLoop:
    """One half of the step, ready to run again and again.

    Args:
        parameters: of the whole run.
        half: ``dense`` or ``sparse``.
        tables_from: a loop whose tables are used instead of new ones where the
            shapes are equal; tables can be gigabytes.
    """

    def __init__(
        self, parameters: Parameters, half: str, tables_from: StepLoop | None = None
    ) -> None:
        self.half = half
        self.parameters = reduced(parameters, half)
        self.notices = apply_settings(self.parameters)
        self.generator = make_generator(self.parameters, torch.device("cpu"))
        self.huge_pages = self.parameters.training.embedding_backend != "torch"
        can_lend = tables_from is not None and tables_from.huge_pages == self.huge_pages
        lent = tables_from.model if tables_from is not None and can_lend else None
        self.model: DLRM = _model(self.parameters.model, lent, self.huge_pages)
        self.parameters, chosen = resolve(
            self.parameters, torch.device("cpu"), self.model.embeddings
        )
        self.notices += chosen
        loss = ClickLoss(self.parameters.model.loss, self.parameters.model.loss_weights)
        self.step = TrainingStep(self.model, loss, self.parameters.training)
        self.notices += self.step.dense.notices
        other = "sparse" if half == "dense" else "dense"
        self.scrub = Scrubber(half_bytes(parameters, other))
        if half == "sparse":
            # the dense half runs between the lookups and their gradients
            self.step.dense = _ScrubbedDense(self.step.dense, self.scrub)  # type: ignore[assignment]

    def run(self) -> Times:
        """One iteration; the times of its parts, and of what is outside them (``other``)."""
        if self.half == "dense":
            self.scrub()
        # a new one, as in a run: the rows of one seen before would be in the cache
        batch = self.generator.next_batch()
        before = self.scrub.taken_ns
        with log_spans() as rows:
            started = time.time_ns()
            self.step(batch)
            whole = time.time_ns() - started
        return part_times(rows, whole - (self.scrub.taken_ns - before), HALVES[self.half])


class DataLoop:
    """The generator of a run, alone."""

    def __init__(self, parameters: Parameters) -> None:
        self.notices = apply_settings(parameters)
        data = dataclasses.replace(parameters.data, loader="synchronous", place="cpu")
        alone = dataclasses.replace(parameters, data=data)
        self.parameters = parameters
        self.generator = make_generator(alone, torch.device("cpu"))
        self.scrub = Scrubber(SCRUB_BYTES[1])

    def run(self) -> Times:
        """Make one batch."""
        self.scrub()
        started = time.perf_counter()
        self.generator.next_batch()
        return {"data": {"forward": 1e3 * (time.perf_counter() - started)}}

    @contextmanager
    def beside(self) -> Iterator[list[float]]:
        """Make batches in another thread for as long as the context is open.

        Yields:
            The milliseconds of each batch made meanwhile, growing.
        """
        made: list[float] = []
        stop = threading.Event()

        def produce() -> None:
            while not stop.is_set():
                started = time.perf_counter()
                self.generator.next_batch()
                made.append(1e3 * (time.perf_counter() - started))

        thread = threading.Thread(target=produce, name="dlrm-probe", daemon=True)
        thread.start()
        try:
            yield made
        finally:
            stop.set()
            thread.join()


def waited_ns() -> int:
    """Nanoseconds that this thread was ready to run and had no core; 0 where nobody says."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def part_times(rows: list[tuple[str, int, int]], whole_ns: int, kept: tuple[str, ...]) -> Times:
    """Logged ranges as times of the kept components, of ``optimizer`` and ``other``."""
    times: Times = {}
    inside = 0
    for name, start, end in rows:
        part = parse_span(name)
        if part is None:
            continue
        inside += end - start
        component, phase = part
        if component in kept or component == "optimizer":
            phases = times.setdefault(component, {})
            phases[phase] = phases.get(phase, 0.0) + (end - start) / 1e6
    times["other"] = {"": max(0.0, (whole_ns - inside) / 1e6)}
    return times


def apply_settings(parameters: Parameters) -> list[str]:
    """Set what is global in torch, as :class:`~dlrm_core.training.Trainer` does; its notices."""
    training = parameters.training
    if training.threads is not None and training.threads != torch.get_num_threads():
        torch.set_num_threads(training.threads)
    device = torch.device("cpu")
    return set_fp32_matmul(training.fp32_matmul, parameters.model, device) + set_tf32(
        training.tf32, device
    )


def _model(config: ModelConfig, tables_from: DLRM | None, huge_pages: bool) -> DLRM:
    """A model with any weights: drawing them would take longer than the probe."""
    model = DLRM(config, huge_pages)
    given = list(tables_from.embeddings.weights) if tables_from is not None else []
    own = list(model.embeddings.weights)
    with torch.no_grad():
        for i, table in enumerate(own):
            if i < len(given) and given[i].shape == table.shape:
                table.data = given[i].data
            else:
                # written, not lazily zero: untouched pages are all one page
                table.fill_(1.0 / math.sqrt(table.shape[0]) / 2)
    return model
