"""What a training minimises: one class a kind (``model.loss``).

A kind says itself: its options, what it computes, and the operators of a step. Nothing but
:meth:`Loss.forward` needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from dlrm_core.base.errors import InputError
from dlrm_core.base.settings import Option, register, setting
from dlrm_core.operations import FLOAT_BYTES, INDEX_BYTES, Operations

if TYPE_CHECKING:
    from torch import Tensor

DOUBLE_BYTES = 8


class Loss:
    """A loss of predictions p (B, 1) against targets t (B, 1): the mean over samples, a scalar."""

    kind: ClassVar[str]  # its name, the value of model.loss
    about: ClassVar[str]  # what it is, in a few words of `dlrm parameters`
    operator: ClassVar[str]  # torch's, which computes it; a kind of several overrides the methods
    options: ClassVar[Mapping[str, Option]] = {}  # leaves of `model` that are its own

    def __init_subclass__(cls) -> None:
        """Register the kind; TypeError where it leaves something out."""
        register(cls, Loss, LOSSES, ("kind", "about", "operator"))

    @staticmethod
    def check(model: Any) -> None:
        """Check the options of ``model`` that are this kind's."""

    @classmethod
    def forward(cls, predictions: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """The loss of a batch; ``weights`` (2,) float64 are those of the targets 0 and 1."""
        from torch.nn import functional

        return getattr(functional, cls.operator)(predictions, targets)

    @classmethod
    def forward_work(cls, ops: Operations, rows: int) -> None:
        """Add the operators of forward for so many samples."""
        ops.add(cls.operator, 2 * rows * FLOAT_BYTES, FLOAT_BYTES, flops=3 * rows)

    @classmethod
    def backward_work(cls, ops: Operations, rows: int) -> None:
        """Add the operators of backward, and the gradient 1 that it starts from."""
        ops.add("full_like", 0, FLOAT_BYTES)
        read = 2 * rows * FLOAT_BYTES + FLOAT_BYTES
        ops.add(f"{cls.operator}_backward", read, rows * FLOAT_BYTES, flops=3 * rows)


LOSSES: dict[str, type[Loss]] = {}
"""The kinds by their names, in the order in which they are explained."""


class MeanSquaredError(Loss):
    """Mean of (p - t)^2, facebook's default."""

    kind = "mse"
    about = "mean squared error (facebook's default)"
    operator = "mse_loss"


class BinaryCrossEntropy(Loss):
    """Mean of -t log p - (1 - t) log(1 - p)."""

    kind = "bce"
    about = "binary cross entropy"
    operator = "binary_cross_entropy"


class WeightedBinaryCrossEntropy(Loss):
    """Binary cross entropy, each sample weighted by its target: facebook's ``wbce``."""

    kind = "wbce"
    about = "BCE weighted by loss_weights"
    operator = "binary_cross_entropy"
    options: ClassVar = {
        "loss_weights": Option(
            tuple[float, ...],
            setting((1.0, 1.0), "with wbce: weights of the targets 0 and 1", minimum=0.0),
        )
    }

    @staticmethod
    def check(model: Any) -> None:
        if len(model.loss_weights) != 2:
            raise InputError(
                f"model.loss_weights has {len(model.loss_weights)} numbers, expected 2 "
                "(for the targets 0 and 1)"
            )

    @classmethod
    def forward(cls, predictions: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """The mean of weights[int(t)] times the cross entropy, in double precision."""
        from torch.nn.functional import binary_cross_entropy

        chosen = weights[targets.long().view(-1)].view_as(targets)
        return (chosen * binary_cross_entropy(predictions, targets, reduction="none")).mean()

    @classmethod
    def forward_work(cls, ops: Operations, rows: int) -> None:
        """The weights of the two targets are float64, and so is what follows from them."""
        four, eight = rows * FLOAT_BYTES, rows * DOUBLE_BYTES
        ops.add("_to_copy", four, rows * INDEX_BYTES)
        ops.add("index", eight + rows * INDEX_BYTES, eight)  # a weight a sample
        ops.add("binary_cross_entropy", 2 * four, four, flops=3 * rows)
        ops.add("mul", eight + four, eight, flops=rows)
        ops.add("mean", eight, DOUBLE_BYTES, flops=rows)

    @classmethod
    def backward_work(cls, ops: Operations, rows: int) -> None:
        """The mean's gradient in float64, the cross entropy's in float32."""
        four, eight = rows * FLOAT_BYTES, rows * DOUBLE_BYTES
        ops.add("full_like", 0, DOUBLE_BYTES)
        ops.add("div", DOUBLE_BYTES, eight, flops=rows)
        ops.add("mul", 2 * eight, eight, flops=rows)
        ops.add("_to_copy", eight, four)
        ops.add("binary_cross_entropy_backward", 3 * four, four, flops=3 * rows)
