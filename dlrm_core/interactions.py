"""How features meet between the bottom and the top MLP: one class a kind (``model.interaction``).

A kind says everything about itself: its options and their checks, its width, its weights and how
they start, what it computes, the operators and bytes of a step, what backward keeps, and which
engines know it. Parameters, the memory forecast, the roofline, probes, findings, checkpoints and
kernels ask it, so a new kind is a class here and its test. Nothing but :meth:`Interaction.forward`
needs torch.

Shapes: B samples, T tables, d embedding width, F = T + 1 features.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dlrm_core.base.settings import Option, clash, register, setting
from dlrm_core.operations import FLOAT_BYTES, Operations, Work

if TYPE_CHECKING:
    from torch import Tensor

    from dlrm_core.model import InteractionLayer


@dataclass(frozen=True)
class Weight:
    """A weight: its dotted name in the layer, its shape, and its initial values.

    ``start`` is 'normal', N(0, 2 / (m + n)) for a shape (m, n), 'zeros' or 'ones'. ``narrowed``:
    autocast makes a copy of it in the products' precision; of a norm's weights it makes none.
    """

    name: str
    shape: tuple[int, ...]
    start: str = "normal"
    narrowed: bool = True

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


class Interaction:
    """A kind of interaction with the shapes of one model; subclasses are the kinds.

    It takes x (B, d), the bottom MLP's output, and T pooled vectors (B, d), and gives the top
    MLP's input (B, ``width``), in x's precision.
    """

    kind: ClassVar[str]  # its name, the value of model.interaction
    about: ClassVar[str]  # what it is, in a few words of `dlrm parameters`
    options: ClassVar[Mapping[str, Option]] = {}  # leaves of `model` that are its own
    layers: ClassVar[str] = ""  # what its layers with weights are called; empty where it has none
    # those of dlrm_core.base.engines that know it, where they must: the others run any kind
    engines: ClassVar[frozenset[str]] = frozenset()
    computes: ClassVar[bool] = False  # whether most of its time is arithmetic, not moving data

    def __init_subclass__(cls) -> None:
        """Register the kind; TypeError where it leaves something out."""
        register(cls, Interaction, INTERACTIONS, ASKED)

    def __init__(self, features: int, dim: int, **options: Any) -> None:
        self.features, self.dim = features, dim
        for name, option in self.options.items():
            value = options.get(name, option.field.default)
            setattr(self, name, option.default if value is None else value)

    @classmethod
    def check(cls, model: Any) -> dict[str, Any]:
        """The options of ``model`` that are left out and have a default with this kind.

        Raises InputError if an option of another kind is given.
        """
        for other in INTERACTIONS.values():
            for name in other.left_out():
                if other is not cls and getattr(model, name) is not None:
                    why = f"only {other.kind} has {other.layers}; leave it out"
                    raise clash("model", model, name, "interaction", why)
        left = [name for name in cls.left_out() if getattr(model, name) is None]
        return {name: cls.options[name].default for name in left}

    @property
    def width(self) -> int:
        """Numbers a sample that go into the top MLP."""
        raise NotImplementedError

    def products(self, rows: int) -> list[Work]:
        """The matrix products of an iteration of so many samples, each shape once."""
        ops = Operations()
        self.forward_work(ops, rows)
        self.backward_work(ops, rows)
        unlike = {(w.layer, w.product, w.m, w.n, w.k): w for w in ops.work if w.product}
        return list(unlike.values())

    @property
    def needed_flops(self) -> int:
        """The fewest operations a sample that its forward can do with."""
        return 0

    @classmethod
    def left_out(cls) -> list[str]:
        """Its options that are refused beside another kind."""
        return [name for name, option in cls.options.items() if option.default is not None]

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from others of the same numbers of features: kind and options."""
        return (self.kind, *(getattr(self, name) for name in self.options))

    def described(self) -> str:
        """What it is in a model's facts: the kind and what its options make of it."""
        return self.kind

    def weights(self) -> list[Weight]:
        """Its weights, in the optimiser's order."""
        return []

    def indices(self) -> dict[str, np.ndarray]:
        """Constant index tensors of its layer, by their names."""
        return {}

    def forward(self, layer: InteractionLayer, x: Tensor, pooled: Sequence[Tensor]) -> Tensor:
        """The interaction of a batch, by the weights and index tensors of its layer."""
        raise NotImplementedError

    def forward_work(self, ops: Operations, rows: int) -> None:
        """Add the operators of forward for so many samples, after all features are in one."""
        raise NotImplementedError

    def backward_work(self, ops: Operations, rows: int) -> None:
        """Add the operators of backward, up to the gradient of all features in one.

        That of each table's vectors, a slice of it, is added by who asks.
        """
        raise NotImplementedError

    def memory(self, number: int, widens: bool) -> tuple[int, int, int]:
        """Numbers a sample: kept from forward for backward, its result apart; alive for a while
        in forward; and in backward, the gradients of its result and of the features included.

        An activation has ``number`` bytes; a CPU ``widens`` 2-byte numbers to gather from them.
        """
        raise NotImplementedError


INTERACTIONS: dict[str, type[Interaction]] = {}
"""The kinds by their names, in the order in which they are explained."""

ASKED = ("kind", "about", "width", "forward", "forward_work", "backward_work", "memory")
"""What every kind must say itself."""


def _count(meaning: str, default: int) -> Option:
    """An option that is a whole number, and what it is where the kind is chosen without it."""
    return Option(int | None, setting(None, f"{meaning} {default}", minimum=1), default)


def side_by_side(x: Tensor, pooled: Sequence[Tensor]) -> Tensor:
    """(B, d) and T times (B, d) to (B, F d), in x's precision."""
    import torch

    return torch.cat([x, *(vector.to(x.dtype) for vector in pooled)], dim=1)


class DotInteraction(Interaction):
    """Pairwise dot products of all features, beside the bottom MLP's output.

    Width d + F(F-1)/2, or d + F(F+1)/2 with each feature's product with itself. The products
    come in the order of facebookresearch/dlrm: row by row of the lower triangle.
    """

    kind = "dot"
    about = "pairwise dot products"
    options: ClassVar = {
        "interaction_itself": Option(
            bool, setting(False, "with dot: include each feature's product with itself")
        )
    }
    engines = frozenset({"fused dense part"})
    interaction_itself: bool

    @property
    def pairs(self) -> int:
        """How many products are kept."""
        return self.features * (self.features + (1 if self.interaction_itself else -1)) // 2

    @property
    def width(self) -> int:
        return self.dim + self.pairs

    @property
    def needed_flops(self) -> int:
        return 2 * self.pairs * self.dim

    def indices(self) -> dict[str, np.ndarray]:
        """Places of the products in (F F,), and of each of (F, F) among their gradients.

        Where no pair is: the column of zeros behind the gradients of all pairs; ``mirror`` has
        the upper triangle as well.
        """
        features = self.features
        rows, columns = np.tril_indices(features, 0 if self.interaction_itself else -1)
        lower = np.full((features, features), len(rows))
        lower[rows, columns] = np.arange(len(rows))
        mirror = lower.copy()
        mirror[columns, rows] = np.arange(len(rows))
        pairs = rows * features + columns
        return {"pairs": pairs, "lower": lower.ravel(), "mirror": mirror.ravel()}

    def forward(self, layer: InteractionLayer, x: Tensor, pooled: Sequence[Tensor]) -> Tensor:
        """Features (B, F, d), their products (B, pairs), and x beside them."""
        import torch

        features = side_by_side(x, pooled).view(x.shape[0], -1, x.shape[1])
        return torch.cat([x, layer.pair_products(features)], dim=1)

    def forward_work(self, ops: Operations, rows: int) -> None:
        features, dim = self.features, self.dim
        shape = (features, features, dim)
        ops.product("bmm", "forward", shape, batch=rows, symmetric=True)
        ops.gathered(rows, features * features, self.pairs)
        out = rows * self.width * ops.element
        ops.add("cat", out, out)

    def backward_work(self, ops: Operations, rows: int) -> None:
        """The gradients of the pairs at their place in (B, F, F), times the features."""
        features, dim, element = self.features, self.dim, ops.element
        picked = rows * self.pairs * element
        ops.add("constant_pad_nd", picked, picked + rows * element)
        ops.gathered(rows, self.pairs + 1, features * features)
        if ops.narrow and self.interaction_itself:
            ops.pointwise("mul_", rows * features, 1, element)
        shape = (features, dim, features)
        ops.product("bmm", "backward_input", shape, batch=rows)
        if not ops.narrow:
            ops.product("baddbmm_", "backward_input", shape, batch=rows, accumulate=True)
        # x goes to the interaction's output as it is, too
        vector = rows * dim * element
        ops.add("add", 2 * vector, vector, flops=rows * dim)

    def memory(self, number: int, widens: bool) -> tuple[int, int, int]:
        """Features are kept; all products and the chosen ones pass by."""
        features = self.features * self.dim
        square, pairs = self.features**2, self.pairs
        half = (square + pairs) * (FLOAT_BYTES // number) if widens else 0
        backward = self.width + (pairs + 1) + square + features + half
        return features, square + pairs + half, backward


class CatInteraction(Interaction):
    """Concatenation of all features: width F d."""

    kind = "cat"
    about = "concatenation"
    engines = frozenset({"fused dense part"})

    @property
    def width(self) -> int:
        return self.features * self.dim

    def forward(self, layer: InteractionLayer, x: Tensor, pooled: Sequence[Tensor]) -> Tensor:
        return side_by_side(x, pooled)

    def forward_work(self, ops: Operations, rows: int) -> None:
        """All features in one are its result."""

    def backward_work(self, ops: Operations, rows: int) -> None:
        """The gradient of x is made contiguous; of a single sample it is so already."""
        if rows > 1:
            vector = rows * self.dim * ops.element
            ops.add("copy_", vector, vector)

    def memory(self, number: int, widens: bool) -> tuple[int, int, int]:
        return 0, 0, 2 * self.width


class CrossInteraction(CatInteraction):
    """Cross layers of low rank r over all features side by side (DCNv2): width F d.

    x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l, with x_0 all features, V_l (r, F d),
    W_l (F d, r), and * by elements. Source: Wang et al. 2021, arXiv:2008.13535, section 3;
    TorchRec has it as LowRankCrossNet.
    """

    kind = "dcn"
    about = "concatenation and the low-rank cross layers of DCNv2, as in MLPerf's DLRM-DCNv2"
    options: ClassVar = {
        "dcn_layers": _count("with dcn: number of cross layers; left out, MLPerf's", 3),
        "dcn_rank": _count("with dcn: rank of a cross layer's matrix; left out, MLPerf's", 512),
    }
    layers = "cross layers"
    engines = frozenset()
    computes = True
    dcn_layers: int
    dcn_rank: int

    def described(self) -> str:
        return f"{self.kind}, {self.dcn_layers} cross layers of rank {self.dcn_rank}"

    def weights(self) -> list[Weight]:
        """V and W with its bias of each layer, in the order in which they are applied."""
        width, rank = self.width, self.dcn_rank
        return [
            weight
            for narrow in range(0, 2 * self.dcn_layers, 2)
            for weight in (
                Weight(f"products.{narrow}.weight", (rank, width)),
                Weight(f"products.{narrow + 1}.weight", (width, rank)),
                Weight(f"products.{narrow + 1}.bias", (width,), "zeros"),
            )
        ]

    def forward(self, layer: InteractionLayer, x: Tensor, pooled: Sequence[Tensor]) -> Tensor:
        from torch.nn.functional import linear

        first = crossed = side_by_side(x, pooled)
        weights = layer.weights
        for narrow, widen, bias in zip(weights[::3], weights[1::3], weights[2::3], strict=True):
            crossed = (first * linear(linear(crossed, narrow), widen, bias)).add_(crossed)
        return crossed

    def forward_work(self, ops: Operations, rows: int) -> None:
        width, rank = self.width, self.dcn_rank
        for layer in range(0, 2 * self.dcn_layers, 2):
            ops.product("mm", "forward", (rows, rank, width), layer=layer)
            ops.product("addmm", "forward", (rows, width, rank), layer=layer + 1, bias=True)
            ops.pointwise("mul", rows * width, 2, ops.element)
            ops.pointwise("add_", rows * width, 2, ops.element)

    def backward_work(self, ops: Operations, rows: int) -> None:
        """Two products for each forward one; the gradients of x_0 and of each x are added up."""
        width, rank = self.width, self.dcn_rank
        for layer in reversed(range(0, 2 * self.dcn_layers, 2)):
            for operator in ("mul", "mul", "add", "add"):
                ops.pointwise(operator, rows * width, 2, ops.element)
            for product, n, m in ((layer + 1, rank, width), (layer, width, rank)):
                ops.product("mm", "backward_input", (rows, n, m), layer=product)
                ops.weight_gradients(rows, m, n, product, bias=product > layer)
        super().backward_work(ops, rows)

    def memory(self, number: int, widens: bool) -> tuple[int, int, int]:
        inner = self.width * (2 * self.dcn_layers - 1) + self.dcn_rank * self.dcn_layers
        return self.width + inner, 0, 3 * self.width


class WukongInteraction(Interaction):
    """Wukong's layers, factorisation machines beside linear compressions: width (n_F + n_L) d.

    Each makes n_F + n_L vectors of n vectors X (n, d), the first one of the features:

        X' = LN(concat(FMB(X), LCB(X)) + R X)          R (n_F + n_L, n); where square, identity
        LCB(X) = L X                                   L (n_L, n)
        FMB(X) = reshape(MLP(LN(flatten(X (X^T Y)))))  Y (n, k); MLP n k - h - n_F d with ReLU

    X (X^T Y) is the optimised X X^T Y, n k d operations and not n n d. Source: Zhang et al. 2024,
    arXiv:2403.02545, section 3: its interaction stack, FMB, LCB, and optimised FM.
    """

    kind = "wukong"
    about = "stacked factorisation machines beside linear compressions, as in Meta's Wukong"
    options: ClassVar = {
        f"wukong_{name}": _count(f"with wukong: {meaning}; left out,", default)
        for name, meaning, default in (
            ("layers", "number of layers", 4),
            ("fmb", "vectors out of a layer's factorisation machine block", 32),
            ("lcb", "vectors out of a layer's linear compression block", 32),
            ("rank", "rank k of a layer's factorisation machine X X^T Y", 24),
            ("hidden", "width of the hidden layer behind a factorisation machine", 512),
        )
    }
    layers = "Wukong layers"
    computes = True
    wukong_layers: int
    wukong_fmb: int
    wukong_lcb: int
    wukong_rank: int
    wukong_hidden: int

    @property
    def counts(self) -> list[int]:
        """Vectors a sample that go into each layer, and that come out of the last."""
        return [self.features, *[self.wukong_fmb + self.wukong_lcb] * self.wukong_layers]

    @property
    def width(self) -> int:
        return self.counts[-1] * self.dim

    def described(self) -> str:
        blocks = f"{self.wukong_fmb} + {self.wukong_lcb} vectors, rank {self.wukong_rank}"
        return f"{self.kind}, {self.wukong_layers} layers of {blocks}, hidden {self.wukong_hidden}"

    def weights(self) -> list[Weight]:
        """The matrices of each layer, a bias behind those of the MLP, and those of the norms."""
        listed = []
        for layer, (n, m) in enumerate(itertools.pairwise(self.counts)):
            for name, out, inside, biased in self._matrices(n, m):
                listed.append(Weight(f"blocks.{layer}.{name}.weight", (out, inside)))
                if biased:
                    listed.append(Weight(f"blocks.{layer}.{name}.bias", (out,), "zeros"))
            for name, size in (("flat_norm", n * self.wukong_rank), ("norm", self.dim)):
                for leaf, start in ((f"{name}.weight", "ones"), (f"{name}.bias", "zeros")):
                    listed.append(Weight(f"blocks.{layer}.{leaf}", (size,), start, narrowed=False))
        return listed

    def forward(self, layer: InteractionLayer, x: Tensor, pooled: Sequence[Tensor]) -> Tensor:
        """Layer by layer; where autocast has norms in float32, their results are cast back."""
        import torch
        from torch.nn.functional import layer_norm, linear, relu

        size, dim, weights = len(x), self.dim, iter(layer.weights)
        vectors = side_by_side(x, pooled).view(size, self.features, dim)
        for n, m in itertools.pairwise(self.counts):
            of_layer = itertools.islice(weights, 10 + (n != m))
            factors, hidden, hidden_bias, machine, machine_bias, compression, *others = of_layer
            *project, flat_scale, flat_shift, scale, shift = others
            across = vectors.transpose(1, 2).contiguous()  # (B, d, n): products mix vectors
            flat = torch.bmm(vectors, linear(across, factors)).flatten(1)
            flat = layer_norm(flat, flat.shape[1:], flat_scale, flat_shift).to(x.dtype)
            flat = relu(linear(flat, hidden, hidden_bias), inplace=True)
            fmb = linear(flat, machine, machine_bias).view(size, -1, dim)
            lcb = linear(across, compression).transpose(1, 2)
            residual = vectors if n == m else linear(across, project[0]).transpose(1, 2)
            joined = torch.cat([fmb, lcb], dim=1).add_(residual)
            vectors = layer_norm(joined, (dim,), scale, shift).to(x.dtype)
        return vectors.flatten(1)

    def forward_work(self, ops: Operations, rows: int) -> None:
        rank, dim = self.wukong_rank, self.dim
        for layer, (n, m) in enumerate(itertools.pairwise(self.counts)):
            if dim > 1:
                ops.add("clone", rows * n * dim * ops.element, rows * n * dim * ops.element)
            for place, (_, out, inside, biased) in enumerate(self._matrices(n, m), 6 * layer):
                operator, count = ("addmm", rows) if biased else ("mm", rows * dim)
                ops.product(operator, "forward", (count, out, inside), layer=place, bias=biased)
            ops.product("bmm", "forward", (n, rank, dim), batch=rows, layer=6 * layer + 5)
            ops.norm(rows, n * rank)
            ops.pointwise("relu", rows * self.wukong_hidden, 1, ops.element)
            ops.add("cat", rows * m * dim * ops.element, rows * m * dim * ops.element)
            ops.pointwise("add_", rows * m * dim, 2, ops.element)
            ops.norm(rows * m, dim)

    def backward_work(self, ops: Operations, rows: int) -> None:
        """Two products for each forward one; X, in four places, has its gradients added up."""
        rank, dim = self.wukong_rank, self.dim
        for layer, (n, m) in reversed([*enumerate(itertools.pairwise(self.counts))]):
            ops.norm(rows * m, dim, backward=True)
            for place, (name, out, inside, biased) in enumerate(self._matrices(n, m), 6 * layer):
                count = rows if biased else rows * dim
                if name in ("compression", "residual") and rows > 1 and dim > 1:
                    ops.add("clone", count * out * ops.element, count * out * ops.element)
                ops.product("mm", "backward_input", (count, inside, out), layer=place)
                ops.weight_gradients(count, out, inside, place, bias=biased)
            ops.pointwise("threshold_backward", rows * self.wukong_hidden, 2, ops.element)
            ops.norm(rows, n * rank, backward=True)
            for shape in ((n, dim, rank), (dim, rank, n)):
                ops.product("bmm", "backward_input", shape, batch=rows, layer=6 * layer + 5)
            for _ in range(3):
                ops.pointwise("add", rows * n * dim, 2, ops.element)
        if rows > 1:
            ops.add("copy_", rows * dim * ops.element, rows * dim * ops.element)

    def memory(self, number: int, widens: bool) -> tuple[int, int, int]:
        """Inputs of products and norms; a GPU's autocast keeps those of norms in float32."""
        rank, dim, float32 = self.wukong_rank, self.dim, FLOAT_BYTES // number
        wide, m, kept = 1 if widens else float32, self.counts[-1], 0
        for n in self.counts[:-1]:
            kept += (2 * n + rank) * dim + (1 + wide) * n * rank + self.wukong_hidden
            kept += wide * m * dim + 2 * (1 + m) * float32  # each norm's mean and deviation
        return kept, 2 * m * dim, 2 * m * dim + 2 * max(self.counts) * (dim + rank)

    def _matrices(self, n: int, m: int) -> list[tuple[str, int, int, bool]]:
        """Those of a layer, n vectors to m: name, outputs, inputs, whether it has a bias."""
        hidden = self.wukong_hidden
        residual = [] if n == m else [("residual", m, n, False)]
        return [
            ("factors", self.wukong_rank, n, False),
            ("hidden", hidden, n * self.wukong_rank, True),
            ("machine", self.wukong_fmb * self.dim, hidden, True),
            ("compression", self.wukong_lcb, n, False),
            *residual,
        ]
