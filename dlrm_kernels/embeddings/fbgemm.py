"""The ``fbgemm`` back end: FBGEMM's table-batched embeddings, all tables in one call.

FBGEMM keeps all tables in one piece of memory and updates rows inside backward, like our
``fused``. Our parameters stay the weights: where they already lie one behind the other
(:class:`~dlrm_core.embeddings.EmbeddingTables` with huge pages) FBGEMM works on that
memory, else they are moved into FBGEMM's and alias it.

Shapes: B samples, T tables of R rows, d embedding width, N lookups of a batch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import itertools
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.data.batch import Batch
from dlrm_core.embeddings import FBGEMM_LANES, FBGEMM_ROWWISE_ELEMENTS, EmbeddingTables
from dlrm_core.optimizers import EPSILON, OPTIMIZERS
from dlrm_kernels.embeddings.checks import (
    BAD_INDEX,
    BAD_OFFSET,
    InBackward,
    check_batch,
    describe_fault,
)
from dlrm_kernels.embeddings.pages import empty_table

DISTRIBUTIONS = ("fbgemm-gpu-cpu", "fbgemm-gpu")
"""The packages that provide ``fbgemm_gpu``: for the CPU, and for CUDA (which has both)."""


class Fbgemm(InBackward):
    """Tables by ``SplitTableBatchedEmbeddingBagsCodegen``.

    Its exact optimisers sum a row's gradients before they update it once, as the
    Adagrads' law asks, with SGD too. Tables are float32, all on one device.
    """

    name = "fbgemm"

    def __init__(self, tables: EmbeddingTables, optimizer: str, learning_rate: float) -> None:
        weights = tables.weights
        _check_tables(weights)
        self.notices: list[str] = []
        self._optimizer = OPTIMIZERS[optimizer]
        if self._optimizer.per_row:
            _check_rowwise(weights)
        self._dim = weights[0].shape[1]
        self._rows = [weight.shape[0] for weight in weights]
        self._api = load_fbgemm(weights[0].device)
        self._module = self._build(weights, learning_rate)
        self._learning_rate = learning_rate
        self.note_tables(tables)
        self.states = self._states()

    @property
    def learning_rate(self) -> float:
        """Step size of the updates to come."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._module.set_learning_rate(rate)
        self._learning_rate = rate

    def forward(self, tables: EmbeddingTables, batch: Batch) -> list[torch.Tensor]:
        self.note_tables(tables)
        if batch.indices.device.type == "cpu":
            check_batch(batch, len(self._rows))
        offsets = _offsets_of_all(batch)
        try:
            with quiet_logging():
                pooled = self._module(batch.indices, offsets)
        except RuntimeError as error:
            if batch.indices.device.type == "cpu" and (fault := find_fault(batch, self._rows)):
                raise InputError(fault) from error
            raise
        return list(pooled.split(self._dim, dim=1))

    def _build(self, weights: list[torch.nn.Parameter], learning_rate: float) -> Any:
        api, device = self._api, weights[0].device
        place, given = (api.Location.DEVICE, api.Compute.CUDA), {}
        if device.type == "cpu":
            place = api.Location.HOST, api.Compute.CPU
            # older releases always take memory of their own
            if "preallocated_host_buffers" in inspect.signature(api.Module).parameters:
                given["preallocated_host_buffers"] = self._memory(weights)
        with quiet_logging():
            return api.Module(
                [(rows, self._dim, *place) for rows in self._rows],
                optimizer=getattr(api.Optimizers, self._optimizer.fbgemm),
                learning_rate=learning_rate,
                eps=EPSILON,
                # a wrong index is refused, never replaced by row 0
                bounds_check_mode=api.BoundsCheck.FATAL,
                device=device,
                **given,
            )

    def _memory(self, weights: list[torch.nn.Parameter]) -> dict[str, torch.Tensor]:
        """Where FBGEMM is to keep weights and state: the tables' own place if that is one piece."""
        total = sum(self._rows)
        memory = one_piece(weights)
        if memory is None:
            memory = empty_table(total, self._dim).view(-1)
        width = self._optimizer.row_state(self._dim)
        if width == 0:
            return {"weights": memory}
        state = empty_table(total, width).zero_().view(-1)
        return {"weights": memory, "momentum1": state}

    def _note(self, weights: list[torch.nn.Parameter]) -> None:
        """Make the parameters alias FBGEMM's memory."""
        _check_tables(weights)
        for weight, place in zip(weights, self._module.split_embedding_weights(), strict=True):
            if place.data_ptr() != weight.data_ptr():
                place.copy_(weight.data)
                weight.data = place.view(weight.shape)

    def _states(self) -> list[torch.Tensor]:
        if not self._optimizer.row_state(self._dim):
            return [torch.empty(0, 0) for _ in self._rows]
        found = self._module.split_optimizer_states()
        return [state[0].view(rows, -1) for state, rows in zip(found, self._rows, strict=True)]


def _check_tables(weights: list[torch.nn.Parameter]) -> None:
    for t, weight in enumerate(weights):
        if weight.dtype != torch.float32 or weight.device.type not in ("cpu", "cuda"):
            raise InputError(
                f"embedding table {t} is {weight.dtype} on {weight.device}; "
                "the fbgemm back end works on torch.float32 on cpu or cuda"
            )
    if weights[0].shape[1] % FBGEMM_LANES:
        raise InputError(
            "training.embedding_backend is 'fbgemm', but model.embedding_dim is "
            f"{weights[0].shape[1]}: FBGEMM works on multiples of {FBGEMM_LANES} only"
        )


def _check_rowwise(weights: list[torch.nn.Parameter]) -> None:
    for t, weight in enumerate(weights):
        if weight.device.type == "cpu" and weight.numel() > FBGEMM_ROWWISE_ELEMENTS:
            raise InputError(
                f"training.embedding_backend is 'fbgemm', but embedding table {t} has "
                f"{weight.numel():,} floats, and FBGEMM's row-wise Adagrad on the CPU updates "
                f"wrong rows beyond {FBGEMM_ROWWISE_ELEMENTS:,}: choose fused or torch"
            )


def one_piece(weights: list[torch.nn.Parameter]) -> torch.Tensor | None:
    """All weights as one flat tensor, if they lie one behind the other; else None."""
    first = weights[0].data
    behind = first.data_ptr()
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or not weight.is_contiguous() or weight.data_ptr() != behind:
            return None
        behind += weight.nbytes
    return first.as_strided((sum(weight.numel() for weight in weights),), (1,))


def _offsets_of_all(batch: Batch) -> torch.Tensor:
    """Where each bag begins among all lookups, and where the last ends: (T B + 1,) int64."""
    tables, bags = batch.offsets.shape
    offsets = torch.empty(tables * bags + 1, dtype=torch.int64, device=batch.offsets.device)
    starts = torch.tensor(batch.table_starts, device=offsets.device)
    torch.add(batch.offsets, starts[:-1, None], out=offsets[:-1].view(tables, bags))
    offsets[-1:].copy_(starts[-1:])
    return offsets


def find_fault(batch: Batch, rows: list[int]) -> str | None:
    """What is wrong with a batch that was refused: an index or an offset; None if neither."""
    limits = np.array(rows)
    for t, (begin, end) in enumerate(itertools.pairwise(batch.table_starts)):
        wrong = (batch.indices[begin:end] < 0) | (batch.indices[begin:end] >= rows[t])
        if wrong.any():
            place = begin + int(wrong.nonzero()[0])
            return describe_fault(BAD_INDEX, place, batch, limits)
        offsets = torch.cat((batch.offsets[t], torch.tensor([end - begin])))
        falls = (offsets.diff() < 0) | (offsets[:-1] < 0)
        falls[:1] |= offsets[:1] != 0
        if falls.any():
            place = t * batch.offsets.shape[1] + int(falls.nonzero()[0])
            return describe_fault(BAD_OFFSET, place, batch, limits)
    return None


def load_fbgemm(device: torch.device) -> SimpleNamespace:
    """FBGEMM's training module and the enumerations it takes.

    Raises:
        MissingToolError: it is not installed, or not for this torch or device.
    """
    wanted = f"pip install {_package(device)}"
    found = {name: version for name in DISTRIBUTIONS if (version := _version(name))}
    if not found:
        raise MissingToolError(
            f"training.embedding_backend is 'fbgemm', but FBGEMM is not installed: {wanted}"
        )
    if device.type == "cuda" and "fbgemm-gpu" not in found:
        raise MissingToolError(
            "training.embedding_backend is 'fbgemm' and the tables are on a GPU, but the FBGEMM "
            f"installed is fbgemm-gpu-cpu {found['fbgemm-gpu-cpu']}: {wanted}"
        )
    name, version = next(iter(found.items()))
    needs = f"training.embedding_backend is 'fbgemm', but {name} {version}"
    release = _release()
    # with another torch its libraries can crash the process while they load
    if release is not None and version.split(".")[:2] != release.split(".")[:2]:
        raise MissingToolError(f"{needs} does not belong to torch {torch.__version__}: {wanted}")
    try:
        with quiet_logging():
            from fbgemm_gpu import split_table_batched_embeddings_ops_common as common
            from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingToolError(f"{needs} cannot be loaded ({error}): {wanted}") from None
    return SimpleNamespace(
        Module=training.SplitTableBatchedEmbeddingBagsCodegen,
        Location=common.EmbeddingLocation,
        Compute=training.ComputeDevice,
        BoundsCheck=common.BoundsCheckMode,
        Optimizers=EmbOptimType,
    )


@contextlib.contextmanager
def quiet_logging() -> Iterator[None]:
    """Keep FBGEMM from configuring the root logger.

    It calls ``logging.info`` while it loads and works, which gives a root logger without
    handlers one that writes to standard error for the rest of the process.
    """
    root = logging.getLogger()
    if root.handlers:
        yield
        return
    silent = logging.NullHandler()
    root.addHandler(silent)
    try:
        yield
    finally:
        root.removeHandler(silent)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release() -> str | None:
    """The FBGEMM release built for this torch: 1.x.0 for 2.(x+5), from 2.5 on.

    Source: https://docs.pytorch.org/FBGEMM/general/Releases.html
    """
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return f"1.{minor - 5}.0" if major == 2 and minor >= 5 else None


def _package(device: torch.device) -> str:
    name = "fbgemm-gpu" if device.type == "cuda" else "fbgemm-gpu-cpu"
    release = _release()
    return f"{name}=={release}" if release else name
