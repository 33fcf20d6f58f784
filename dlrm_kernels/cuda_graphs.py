"""A whole training step as CUDA graphs: one launch a part and phase, whatever it computes.

``training.cuda_graphs``. Embeddings, dense part and updates are captured one after the
other, each part and phase as a graph of its own over one pool of memory, and replayed in
that order inside the part's range and a function of its name: profilers keep telling the
parts apart. That costs a launch for each of a step's twelve pieces instead of one for all.

What may differ from batch to batch lies on the device: lookups in buffers with room to
spare, how many of them are real (``Batch.extents``), learning rates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from dlrm_core.config import TrainingConfig
from dlrm_core.data.batch import Batch
from dlrm_core.embeddings import Backend
from dlrm_core.optimizers import EPSILON, OPTIMIZERS
from dlrm_core.parts import capturing, part, run_part
from dlrm_kernels.embeddings.fused_gpu import FusedGpu
from dlrm_kernels.embeddings.host_tables import SplitTables

ROOM = 16
"""A static buffer of lookups has 1/ROOM more room than the batch it was made for, where bag
sizes vary: at 16,384 bags their sum stays within one per cent."""


class CudaRecorder:
    """Captures on a stream of its own; all graphs share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Work in here runs on a stream that graphs can be captured from."""
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            yield
        outside.wait_stream(self._stream)

    @contextlib.contextmanager
    def capture(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Work in here is captured instead of run."""
        graph = torch.cuda.CUDAGraph()
        # a loader's thread may copy meanwhile: only this thread's calls are captured
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            yield graph


def why_not_graphs(config: TrainingConfig, device: torch.device, backend: Backend | None) -> str:
    """Why a step cannot be captured; empty if it can."""
    if device.type != "cuda":
        return "it has no effect on a CPU"
    if isinstance(backend, SplitTables):
        return "the CPU looks up tables on the host in every step (embeddings_on_gpu_bytes)"
    if not isinstance(backend, FusedGpu):
        return (
            f"with training.embedding_backend: {config.embedding_backend} the host waits for "
            "the GPU in every update; choose fused"
        )
    return ""


def step_graph(
    run: Callable[[Batch], torch.Tensor],
    config: TrainingConfig,
    device: torch.device,
    backend: Backend | None,
) -> tuple[StepGraph | None, str]:
    """A step that is replayed from captured graphs; or None, and why it cannot be captured."""
    reason = why_not_graphs(config, device, backend)
    if reason:
        return None, reason
    assert isinstance(backend, FusedGpu)
    return StepGraph(run, backend, CudaRecorder(device)), ""


class StepGraph:
    """Trains on batches by replaying what was captured of the first.

    The first batch is trained on as usual, from the buffers that stay; then the step is
    captured. A batch of another size, or with more lookups than there is room for, is
    trained on as usual again; more lookups are made room for.

    Args:
        run: a step on a batch, its loss.
        backend: of the embeddings; told of wrong indices before each replay.
    """

    def __init__(
        self, run: Callable[[Batch], torch.Tensor], backend: FusedGpu, recorder: CudaRecorder
    ) -> None:
        self._run = run
        self._backend = backend
        self._recorder = recorder
        self._static: Batch | None = None
        self._pieces: list[tuple[str, str, torch.cuda.CUDAGraph]] = []
        self._loss = torch.empty(0)

    def __call__(self, batch: Batch) -> torch.Tensor:
        static = self._static
        if static is None:
            return self._begin(batch)
        if batch.dense.shape != static.dense.shape or batch.offsets.shape != static.offsets.shape:
            return self._run(batch)
        if batch.indices.numel() > static.indices.numel():
            return self._begin(batch)
        self._backend.raise_if_seen()
        transfer_forward(static, batch, self._backend)
        for component, phase, graph in self._pieces:
            run_part(component, phase, graph.replay)
        # the next replay writes over it
        return self._loss.clone()

    def _begin(self, batch: Batch) -> torch.Tensor:
        """Train on the first batch as usual, then capture the step."""
        self._static = static = static_batch(batch)
        self._pieces = []
        transfer_forward(static, batch, self._backend)
        with self._recorder.apart():
            # compiles kernels, loads libraries, makes state: none of it can be captured
            loss = self._run(static).clone()
            with capturing(self._piece):
                self._loss = self._run(static)
        return loss

    @contextlib.contextmanager
    def _piece(self, component: str, phase: str) -> Iterator[None]:
        # dropping gradients launches nothing, nor does an update that was part of backward
        if component == "optimizer" or (component, phase) == ("embedding", "update"):
            yield
            return
        with self._recorder.capture() as graph:
            yield
        self._pieces.append((component, phase, graph))


def static_batch(batch: Batch) -> Batch:
    """Buffers for batches like this one, contents undefined."""
    lookups, size = batch.indices.numel(), batch.offsets.shape[1]
    each = [b - a for a, b in zip(batch.table_starts, batch.table_starts[1:], strict=False)]
    # bags of one size have nothing to vary, nor has a batch that was made with room
    fixed = batch.padded or (size > 0 and all(count % size == 0 for count in each))
    room = lookups if fixed else lookups + lookups // ROOM
    starts = (*batch.table_starts[:-1], room)
    return Batch(
        torch.empty_like(batch.dense),
        torch.zeros(room, dtype=torch.int64, device=batch.indices.device),
        torch.empty_like(batch.offsets),
        starts,
        torch.empty_like(batch.targets),
        torch.empty(2, batch.tables, dtype=torch.int64, device=batch.indices.device),
        padded=True,
    )


@part("transfer", "forward")
def transfer_forward(static: Batch, batch: Batch, backend: FusedGpu) -> None:
    """Copy a batch on the device into the buffers that graphs read."""
    assert static.extents is not None
    lookups = batch.indices.numel()
    torch._foreach_copy_([static.dense, static.targets], [batch.dense, batch.targets])
    torch._foreach_copy_(
        [static.indices[:lookups], static.offsets, static.extents],
        [batch.indices, batch.offsets, backend.extents(batch)],
    )


def captured_optimizer(
    config: TrainingConfig, weights: Iterable[torch.nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """The dense weights' optimiser for a captured step: it reads its rate on the device."""
    rate = torch.tensor(config.learning_rate, device=device)
    kind = OPTIMIZERS[config.optimizer]
    if "cuda" not in kind.fused_on:
        return DeviceAdagrad(weights, rate)
    made: torch.optim.Optimizer = getattr(torch.optim, kind.dense)(weights, lr=rate, fused=True)
    return made


class DeviceAdagrad(torch.optim.Optimizer):
    """Adagrad whose learning rate is read on the device: s += g^2, w -= rate g / (sqrt(s) + eps).

    torch's own bakes the rate into a captured graph. State and law are the same.

    Args:
        lr: a tensor of one number, on the parameters' device.
    """

    def __init__(self, parameters: Any, lr: torch.Tensor) -> None:
        super().__init__(parameters, {"lr": lr, "eps": EPSILON})
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["sum"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient, a few launches for all of them."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            gradients = [weight.grad for weight in weights]
            sums = [self.state[weight]["sum"] for weight in weights]
            torch._foreach_addcmul_(sums, gradients, gradients)
            roots = torch._foreach_sqrt(sums)
            torch._foreach_add_(roots, group["eps"])
            changes = torch._foreach_div(gradients, roots)
            torch._foreach_mul_(changes, group["lr"])
            torch._foreach_sub_(weights, changes)
