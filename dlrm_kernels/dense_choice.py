"""``training.dense_backend: auto`` and ``training.fp32_matmul: auto``: what is fastest now.

How fast bf16 products are depends on who else uses the core's matrix unit, so the processor's
features do not tell. Each candidate does the forward and backward pass of the run's own dense
part on a few samples, in turns, in a model of the same shape with weights of its own: the run's
weights and random streams are not touched. The choice is kept as long as the process lives, and
in checkpoints, but in no file of the machine, which may give something else tomorrow.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping

import torch

from dlrm_core.base.text import counted
from dlrm_core.config import ModelConfig, Parameters, TrainingConfig
from dlrm_core.dense import DENSE_CHOICE, DensePart
from dlrm_core.embeddings import EmbeddingTables
from dlrm_core.interactions import Interaction
from dlrm_core.model import DLRM, ClickLoss, fill_dense
from dlrm_kernels.choices import Choice, choice_of, time_in_turns
from dlrm_kernels.dense import why_not_fused
from dlrm_kernels.products import allow_onednn, set_fp32_matmul

Pair = tuple[str, str]
"""Values of ``training.dense_backend`` and ``training.fp32_matmul``, chosen together."""

LIBRARIES = ("default", "onednn")

PRODUCTS = (*LIBRARIES, "bf16x2")
"""``fp32_matmul: auto`` becomes one of these, the nearest to plain fp32's results first. bf16x3
makes six products of what bf16x2 makes three, so it is never the fastest."""

TIMED_SAMPLES = 256
"""Samples of a timing, at most. What a step does once for any number of samples (weights cut into
tiles) counts more here than in a batch, so a close race goes to the libraries."""

BUDGET_S = 0.3
"""Seconds of timings after one warm-up of each candidate; each is timed once at least."""


def resolve(parameters: Parameters, device: torch.device) -> tuple[Parameters, list[str]]:
    """The parameters with what is fastest in place of ``auto``, and the notice that says why."""
    training = parameters.training
    asked = dataclasses.replace(
        TrainingConfig(dense_backend=training.dense_backend, fp32_matmul=training.fp32_matmul),
        precision=training.precision,
        compile=training.compile,
        batch_size=min(TIMED_SAMPLES, training.batch_size, training.micro_batch or TIMED_SAMPLES),
    )
    choice = choose(parameters.model, asked, device, torch.get_num_threads())
    leaves = dict(zip(DENSE_CHOICE, choice.chosen, strict=True))
    return parameters.with_training(**leaves), [choice.notice]


def possible(parameters: Parameters) -> list[Parameters]:
    """The parameters with each candidate for a CPU in place of ``auto``."""
    kind = parameters.model.interaction_kind
    pairs, _ = candidates(parameters.training, kind, torch.device("cpu"))
    chosen = (dict(zip(DENSE_CHOICE, pair, strict=True)) for pair in pairs)
    return [parameters.with_training(**leaves) for leaves in chosen]


@functools.cache
def choose(
    model: ModelConfig, training: TrainingConfig, device: torch.device, threads: int
) -> Choice[Pair]:
    """Choose for a model, once for a process.

    Args:
        training: the leaves that the choice depends on; ``batch_size`` samples are timed.
        threads: of torch, which the times depend on.
    """
    open_leaves = [leaf for leaf in DENSE_CHOICE if getattr(training, leaf) == "auto"]
    asked = ", ".join(f"training.{leaf} auto" for leaf in open_leaves)
    pairs, reason = candidates(training, model.interaction_kind, device)
    if len(pairs) == 1:
        return Choice(pairs[0], {}, {}, f"{asked}: {label(pairs[0])}; {reason}")
    refused: dict[Pair, str] = {}
    work: dict[Pair, Callable[[], object]] = {}
    for pair in pairs:
        notices = set_fp32_matmul(pair[1], model, device) if pair[1] in LIBRARIES else []
        if notices:
            refused[pair] = notices[0].partition(": ")[2]
        else:
            work[pair] = dense_pass(model, training, pair)
    times_ms = time_passes(work)
    timed = (
        f"forward and backward of the dense part, {counted(training.batch_size, 'sample')}, "
        f"{counted(torch.get_num_threads(), 'thread')}"
    )
    return choice_of(asked, times_ms, refused, timed, label)


def candidates(
    training: TrainingConfig, interaction: Interaction, device: torch.device
) -> tuple[list[Pair], str]:
    """The pairs that can run here with what is not ``auto``; why there is only one, if so."""
    backend, product = training.dense_backend, training.fp32_matmul
    only = ("torch" if backend == "auto" else backend, product.replace("auto", "default"))
    if device.type != "cpu":
        return [only], "candidates are timed on CPUs only"
    backends = ("torch", "fused") if backend == "auto" else (backend,)
    fp32 = training.precision == "fp32"
    products = PRODUCTS if product == "auto" and fp32 else (only[1],)
    pairs, reasons = [], []
    for pair in itertools.product(backends, products):
        library = pair[1] in LIBRARIES
        if pair[0] == "torch" and library:
            pairs.append(pair)
        elif pair[0] == "fused" and not (fp32 and library):
            why = why_not_with(training, pair, interaction, device)
            if why:
                reasons.append(f"fused is left out: {why}")
            else:
                pairs.append(pair)
    if not pairs:  # 'fused' is asked for and has no effect here: torch multiplies
        pairs = [(only[0], product) for product in products if product in LIBRARIES]
    return pairs, "; ".join(dict.fromkeys(reasons)) or "nothing else goes with the other settings"


def why_not_with(
    training: TrainingConfig, pair: Pair, interaction: Interaction, device: torch.device
) -> str:
    """Why the fused dense part cannot be a candidate; empty if it can."""
    if training.compile:
        return "it replaces what training.compile compiles"
    config = dataclasses.replace(training, dense_backend=pair[0], fp32_matmul=pair[1])
    return why_not_fused(config, device, interaction)


def dense_pass(model: ModelConfig, training: TrainingConfig, pair: Pair) -> Callable[[], object]:
    """Forward and backward of the dense part of a model of this shape, on random samples."""
    random = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):  # layers draw weights when they are made
        stand_in = DLRM(model, make_tables=lambda: EmbeddingTables([], model.embedding_dim))
    fill_dense(stand_in, random)
    backend, product = pair
    config = dataclasses.replace(
        training, dense_backend=backend, fp32_matmul=product, compile=False
    )
    part = DensePart(stand_in, ClickLoss.of(model), config)
    rows = training.batch_size
    dense = torch.rand(rows, model.bottom_widths[0], generator=random)
    pooled = [
        torch.randn(rows, model.embedding_dim, generator=random).requires_grad_()
        for _ in model.table_rows
    ]
    targets = torch.randint(2, (rows, 1), generator=random).float()

    def run() -> object:
        allow_onednn(product == "onednn")
        for leaf in (*pooled, *part.weights):
            leaf.grad = None
        return part(dense, pooled, targets)

    return run


def time_passes(
    work: Mapping[Pair, Callable[[], object]],
    clock: Callable[[], float] = time.perf_counter,
    budget_s: float = BUDGET_S,
) -> dict[Pair, float]:
    """Median milliseconds of each candidate, timed in turns.

    Each is run once before, which is not counted: it compiles, or loads what was compiled.
    """

    def time_ms(run: Callable[[], object], turn: int = 0) -> float:
        started = clock()
        run()
        return 1e3 * (clock() - started)

    for run in work.values():
        run()
    ends = clock() + budget_s
    timings = {pair: functools.partial(time_ms, run) for pair, run in work.items()}
    return time_in_turns(timings, {pair: [timings[pair](0)] for pair in work}, ends, clock)


def label(pair: Pair) -> str:
    backend, product = pair
    return f"{backend} with fp32_matmul {product}"
