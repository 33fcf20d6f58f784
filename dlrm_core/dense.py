"""The dense part of a step: the model's pieces behind the embeddings, and the loss.

The graph is cut where one piece hands over to the next (:class:`Cuts`, and see
:mod:`dlrm_core.step`).
The options of ``training`` that make it faster act here: ``precision``,
``micro_batch``, ``compile``; with ``dense_backend: fused`` the package ``dlrm_kernels`` has
layers that take the place of the model's. What each brings: docs/training.md.

Shapes: B samples, D dense features, T tables, d embedding width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlrm_core.base.engines import choose, engine, find_engine
from dlrm_core.config import Parameters, TrainingConfig
from dlrm_core.model import DLRM, Piece
from dlrm_core.parts import run_part
from dlrm_core.precision import DensePrecision

Layers = dict[str, Callable[..., Tensor]]
"""What takes the place of the model's own layers, compiled or fused kernels, by part."""

DENSE_CHOICE = {"dense_backend": "torch", "fp32_matmul": "default"}
"""Leaves of ``training`` chosen together where one of them is ``auto``, and what torch has."""

Values = dict[str, Any]
"""What the pieces take and give, by the names of :attr:`~dlrm_core.model.DLRM.pieces`: a tensor
(B, ...), or a list of them."""


def resolve_dense(parameters: Parameters, device: torch.device) -> tuple[Parameters, list[str]]:
    """The parameters with a back end and products in place of ``auto``, and the notice why."""
    return choose("choice of dense part", parameters, DENSE_CHOICE, device)


def set_fp32_products(parameters: Parameters, device: torch.device) -> list[str]:
    """Set how this process multiplies fp32 numbers; what was fallen back to or has no effect."""
    training, name = parameters.training, "fp32 products"
    as_torch_does = training.fp32_matmul == "default" and not training.tf32
    products = find_engine(name) if as_torch_does else engine(name)
    return products.set_fp32_products(training, parameters.model, device) if products else []


class Cuts:
    """Forward piece by piece, each from leaves of its own, and backward the other way.

    A piece gives the next one the values of its result as the start of a new graph; handing over
    is its time too. Its backward starts from the gradients that have arrived there.
    """

    def __init__(self) -> None:
        self._cut: dict[str, tuple[Any, Any]] = {}

    def forward(self, piece: Piece, values: Values) -> None:
        """Run a piece on what it takes of ``values``, and add the leaves of what it gives."""

        def work() -> tuple[Any, Any]:
            result = piece.of(values)
            return result, leaf_of(result)

        result, leaf = run_part(piece.component, "forward", work)
        self._cut[piece.gives] = result, leaf
        values[piece.gives] = leaf

    def backward(self, piece: Piece, beside: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Run a piece's backward, from tensors ``beside`` it and their gradients as well."""
        results, leaves = map(_listed, self._cut.pop(piece.gives))
        tensors = [*(tensor for tensor, _ in beside), *results]
        gradients = [*(gradient for _, gradient in beside), *(leaf.grad for leaf in leaves)]
        run_part(piece.component, "backward", lambda: torch.autograd.backward(tensors, gradients))


class PieceHooks:
    """What somebody does before and after pieces of the dense part; by itself nothing.

    Several ranks exchange gradients and pooled vectors so.
    """

    def before(self, piece: Piece, values: Values) -> None:
        """Called before a piece's forward, which may still change what it takes."""

    def beside(self, piece: Piece) -> Sequence[tuple[Tensor, Tensor]]:
        """Called before a piece's backward: where that is to start as well."""
        return ()

    def after(self, piece: Piece) -> None:
        """Called after a piece's backward."""


class DensePart:
    """Forward and backward of everything but the embeddings.

    Args:
        model: whose pieces are run; their weights get gradients.
        loss: predictions (B, 1), targets (B, 1) to a scalar.
        config: the options above.

    Attributes:
        pieces: those of the model that take no lookups, with fused or compiled layers in place.
        notices: options that have no effect here, and why.
    """

    def __init__(self, model: DLRM, loss: nn.Module, config: TrainingConfig) -> None:
        device = model.device
        self.precision = DensePrecision(config, device)
        self.notices = list(self.precision.notices)
        self.loss = loss
        self.micro_batch = config.micro_batch
        self.weights = model.dense_weights()
        layers: Layers = {}
        if config.dense_backend == "fused":
            gpu = " on a GPU" if device.type == "cuda" else ""
            kernels = engine(f"fused dense part{gpu}")
            layers, notices = kernels.fuse(model, config, device)
            self.notices += notices
        pieces = model.dense_pieces
        if config.compile:
            layers = self._compiled(pieces, device)
        self.pieces = [
            piece._replace(run=layers.get(piece.component, piece.run)) for piece in pieces
        ]

    @property
    def layers(self) -> Layers:
        return {piece.component: piece.run for piece in self.pieces}

    def __call__(
        self, dense: Tensor, pooled: Sequence[Tensor], targets: Tensor, share: float = 1.0
    ) -> Tensor:
        """Forward and backward of a batch.

        Args:
            dense: (B, D).
            pooled: T leaves (B, d) float32; get their gradients.
            targets: (B, 1).
            share: what the loss counts of one that others add to: 1/R on each of R ranks.

        Returns:
            The mean loss, detached. Gradients are those of the loss times ``share`` and
            ``precision.scale``, added to what the weights' ``grad`` holds.
        """
        size = dense.shape[0]
        rows = min(self.micro_batch or size, size)
        with self.precision.autocast():
            if rows == size:
                return self.rows({"dense": dense, "pooled": pooled}, targets, share)
            gradients = [torch.zeros_like(vector) for vector in pooled]
            losses = []
            for start in range(0, size, rows):
                chunk = slice(start, min(start + rows, size))
                leaves = [leaf_of(vector[chunk]) for vector in pooled]
                for leaf, gradient in zip(leaves, gradients, strict=True):
                    # backward adds to it in place: no copying together afterwards
                    leaf.grad = gradient[chunk]
                part = (chunk.stop - start) / size
                values = {"dense": dense[chunk], "pooled": leaves}
                losses.append(part * self.rows(values, targets[chunk], part * share))
        for vector, gradient in zip(pooled, gradients, strict=True):
            vector.grad = gradient
        return torch.stack(losses).sum()

    def rows(
        self, values: Values, targets: Tensor, share: float, around: PieceHooks | None = None
    ) -> Tensor:
        """Forward and backward of some rows, whose loss counts ``share`` of the batch's.

        ``values`` are what the first pieces take; ``around`` is called before and after pieces.
        """
        around, cuts = around or PieceHooks(), Cuts()
        for piece in self.pieces:
            around.before(piece, values)
            cuts.forward(piece, values)
        # CPU threads of autograd's own would take the work out of the parts' functions
        with self.precision.full(), torch.autograd.set_multithreading_enabled(False):
            predictions = values[self.pieces[-1].gives]
            loss = run_part("loss", "forward", lambda: self.loss(predictions, targets))
            scale = self.precision.scale * share
            run_part("loss", "backward", lambda: loss.backward(torch.full_like(loss, scale)))
            for piece in reversed(self.pieces):
                cuts.backward(piece, around.beside(piece))
                around.after(piece)
        return loss.detach()

    def _compiled(self, pieces: Sequence[Piece], device: torch.device) -> Layers:
        """Each layer compiled on its own, so that its time stays its own."""
        if reason := why_not_compile(device):
            said = "training.compile: torch.compile does not work here, the parts run as they are"
            self.notices.append(f"{said}: {reason}")
            return {}
        # dynamic shapes would be slower, and a batch has at most two (the last micro-batch may be
        # smaller)
        return {piece.component: torch.compile(piece.run, dynamic=False) for piece in pieces}


def predict_rows(
    pieces: Sequence[Piece], values: Values, around: PieceHooks | None = None
) -> Tensor:
    """Click probability (B, 1) float32, piece by piece as in training, outside of any graph."""
    around = around or PieceHooks()
    for piece in pieces:
        around.before(piece, values)
        work = functools.partial(piece.of, values)
        values[piece.gives] = run_part(piece.component, "forward", work)
    return values[pieces[-1].gives]


def leaf_of(value: Any) -> Any:
    """The same values, of a tensor or a list of them, as the start of a new graph."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_()
    return [leaf_of(tensor) for tensor in value]


def _listed(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def why_not_compile(device: torch.device) -> str:
    """Why torch.compile fails on this machine (often: no C++ compiler); empty if it works."""
    try:
        torch.compile(nn.ReLU(), dynamic=False)(torch.ones(8, device=device))
    except Exception as error:  # whatever a compiler, or its absence, may raise
        return " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
    return ""
