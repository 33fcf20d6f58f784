"""The Deep Learning Recommendation Model (Naumov et al. 2019, arXiv:1906.00091).

Shapes: B samples, D dense features, T embedding tables, d embedding width,
F = T + 1 features that interact.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from dlrm_core.base.engines import optional_engine
from dlrm_core.config import ModelConfig
from dlrm_core.data.batch import Batch
from dlrm_core.embeddings import ROW_DTYPES, EmbeddingTables
from dlrm_core.interactions import Interaction
from dlrm_core.losses import LOSSES


class Probability(nn.Module):
    """Sigmoid, clamped to [threshold, 1 - threshold] when 0 < threshold < 1.

    Computed and returned in float32 whatever the products' precision: bf16 has no
    number between 0.996 and 1.
    """

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = torch.sigmoid(x.float())
        if 0.0 < self.threshold < 1.0:
            p = p.clamp(self.threshold, 1.0 - self.threshold)
        return p


class MLP(nn.Sequential):
    """Linear layers with ReLU, the last one with an output of its own if given.

    (B, widths[0]) to (B, widths[-1]), in the precision of the products.
    """

    def __init__(self, widths: Sequence[int], output: nn.Module | None = None) -> None:
        layers: list[nn.Module] = []
        for n, m in itertools.pairwise(widths):
            # in place: the linear layer's own output is not needed again
            layers += [nn.Linear(n, m), nn.ReLU(inplace=True)]
        if output is not None:
            layers[-1] = output
        super().__init__(*layers)

    @property
    def linears(self) -> list[nn.Linear]:
        return [layer for layer in self if isinstance(layer, nn.Linear)]


class InteractionLayer(nn.Module):
    """The weights and index tensors of an interaction, and what runs it.

    A ``kernel`` takes the place of its operations, given x and the pooled vectors, with
    ``training.dense_backend: fused`` on a GPU.
    """

    pairs: torch.Tensor
    lower: torch.Tensor
    mirror: torch.Tensor

    def __init__(self, kind: Interaction) -> None:
        super().__init__()
        self.kind = kind
        self.kernel: Callable[..., torch.Tensor] | None = None
        for weight in kind.weights():
            *path, name = weight.name.split(".")
            place: nn.Module = self
            for step in path:
                if step not in dict(place.named_children()):
                    place.add_module(step, nn.Module())
                place = place.get_submodule(step)
            start = torch.ones if weight.start == "ones" else torch.zeros
            place.register_parameter(name, nn.Parameter(start(weight.shape)))
        for name, places in kind.indices().items():
            buffer = torch.as_tensor(places, device=torch.get_default_device())
            self.register_buffer(name, buffer, persistent=False)

    @property
    def weights(self) -> list[nn.Parameter]:
        """Its weights, in the order in which the kind lists them."""
        return list(self.parameters())

    def pair_products(self, features: torch.Tensor) -> torch.Tensor:
        """Chosen products of features (B, F, d) with each other, as (B, pairs)."""
        return _PairProducts.apply(features, self)

    def forward(self, x: torch.Tensor, pooled: Sequence[torch.Tensor]) -> torch.Tensor:
        """The top MLP's input (B, width) from x (B, d) and T pooled vectors (B, d)."""
        if self.kernel is not None:
            return self.kernel(x, pooled)
        return self.kind.forward(self, x, pooled)


class _PairProducts(torch.autograd.Function):
    """The chosen elements of F F^T for features F (B, F, d), as (B, number of pairs).

    With G the pairs' gradients at their place in (B, F, F), the gradient of F is
    G F + G^T F. Autograd would scatter to make G; here it is gathered by an index made
    beforehand. In fp32 the products and their order are autograd's own, so the result is
    that of plain indexing bit for bit. Where products are rounded anyway, G + G^T is
    gathered at once, and one product is enough.
    """

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, layer: InteractionLayer) -> torch.Tensor:
        ctx.save_for_backward(features)
        ctx.layer = layer
        products = torch.bmm(features, features.transpose(1, 2))  # (B, F, F)
        return _gather(products.flatten(1), layer.pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (features,) = ctx.saved_tensors
        size, count, _ = features.shape
        exact = features.dtype in (torch.float32, torch.float64)
        index = ctx.layer.lower if exact else ctx.layer.mirror
        padded = nn.functional.pad(gradients[0], (0, 1))  # (B, pairs + 1)
        placed = _gather(padded, index).view(size, count, count)
        if exact:
            gradient = torch.bmm(placed, features)
            return gradient.baddbmm_(placed.transpose(1, 2), features), None
        if ctx.layer.kind.interaction_itself:
            # G and G^T meet on the diagonal
            placed.diagonal(dim1=1, dim2=2).mul_(2.0)
        return torch.bmm(placed, features), None


def _gather(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Columns of values (B, n); on a CPU gathering 2-byte numbers takes longer than widening."""
    if values.device.type == "cpu" and values.element_size() == 2:
        return values.float().index_select(1, index).to(values.dtype)
    return values.index_select(1, index)


class ClickLoss(nn.Module):
    """Loss of predictions p (B, 1) against targets t (B, 1): a scalar, the mean over samples.

    ``weights`` are those of the targets 0 and 1, for the kinds that use them.
    """

    weights: torch.Tensor

    def __init__(self, kind: str, weights: Sequence[float]) -> None:
        super().__init__()
        self.kind = LOSSES[kind]
        # float64, as facebook's: its weighted loss is computed in double precision
        of_targets = torch.tensor(weights, dtype=torch.float64)
        self.register_buffer("weights", of_targets, persistent=False)

    @classmethod
    def of(cls, model: Any) -> ClickLoss:
        return cls(model.loss, model.loss_weights)

    def forward(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.kind.forward(predictions, targets, self.weights)


class Piece(NamedTuple):
    """One piece of the model: its part, what computes it, what that takes and what it gives.

    ``component`` is one of :data:`~dlrm_core.parts.COMPONENTS`, and the attribute of
    :class:`DLRM` that has the piece's weights.
    """

    component: str
    run: Callable[..., Any]
    takes: tuple[str, ...]
    gives: str

    def of(self, values: Mapping[str, Any]) -> Any:
        """What it makes of what it takes of ``values``, by their names."""
        return self.run(*(values[name] for name in self.takes))


def inputs_of(batch: Batch) -> dict[str, Any]:
    """What the first pieces take."""
    return {"batch": batch, "dense": batch.dense}


class DLRM(nn.Module):
    """Bottom MLP and embeddings, their interaction, and the top MLP.

    :attr:`pieces` is the order of the model: training steps, evaluation, ranks and CUDA graphs
    run those, whatever they are.
    """

    def __init__(
        self, config: ModelConfig, make_tables: Callable[[], EmbeddingTables] | None = None
    ) -> None:
        super().__init__()
        if make_tables is None:
            dtype = ROW_DTYPES[config.embedding_precision]
            make_tables = functools.partial(
                EmbeddingTables, config.table_rows, config.embedding_dim, dtype=dtype
            )
        self.embeddings = make_tables()
        self.bottom_mlp = MLP(config.bottom_widths)
        self.interaction = InteractionLayer(config.interaction_kind)
        self.top_mlp = MLP(config.top_widths, Probability(config.loss_threshold))

    @property
    def pieces(self) -> list[Piece]:
        """The pieces in their order; the last gives the click probability (B, 1) float32.

        dense (B, D); pooled T x (B, d); x (B, d); z (B, top_widths[0]).
        """
        return [
            Piece("embedding", self.embeddings, ("batch",), "pooled"),
            Piece("bottom_mlp", self.bottom_mlp, ("dense",), "x"),
            Piece("interaction", self.interaction, ("x", "pooled"), "z"),
            Piece("top_mlp", self.top_mlp, ("z",), "probability"),
        ]

    @property
    def lookups(self) -> list[Piece]:
        """The pieces that take a batch's lookups: whole batches, never rows of them."""
        return [piece for piece in self.pieces if "batch" in piece.takes]

    @property
    def dense_pieces(self) -> list[Piece]:
        """The pieces behind the lookups, which take rows of a batch as well."""
        return [piece for piece in self.pieces if "batch" not in piece.takes]

    def forward(self, batch: Batch) -> torch.Tensor:
        values = inputs_of(batch)
        for piece in self.pieces:
            values[piece.gives] = piece.of(values)
        return values[self.pieces[-1].gives]

    @property
    def device(self) -> torch.device:
        """Device of the dense part; tables may lie elsewhere."""
        return self.top_mlp.linears[0].weight.device

    def dense_weights(self) -> list[nn.Parameter]:
        """Weights and biases of everything but the tables."""
        parts = (self.bottom_mlp, self.interaction, self.top_mlp)
        return [weight for part in parts for weight in part.parameters()]


def build_model(
    config: ModelConfig,
    seed: int | None,
    device: torch.device,
    make_tables: Callable[[], EmbeddingTables] | None = None,
    beside: Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]] | None = None,
) -> DLRM:
    """A DLRM with initial weights, on the device; without a seed its memory is left as it is.

    W ~ N(0, 2/(m+n)), b ~ N(0, 1/m), E ~ U(+-sqrt(1/rows)), by facebook's own
    numpy stream (embeddings, bottom MLP, top MLP) or by torch on the device. An interaction's
    weights come after these, matrices by the same law. ``make_tables`` makes other tables than
    torch's own; ``beside`` is open while the tables' weights are filled.
    """
    on_host = config.init == "facebook"
    with torch.device("cpu" if on_host and seed is not None else device):
        model = DLRM(config, make_tables)
    if seed is None:
        return model
    with beside(model.embeddings.weights) if beside is not None else contextlib.nullcontext():
        random: np.random.RandomState | torch.Generator
        if on_host:
            random = np.random.RandomState(seed)
            _fill_like_facebook(model, random)
        else:
            random = torch.Generator(device).manual_seed(seed)
            _fill_with_torch(model, random)
        fill_dense(model, random)
    return model.to(device) if on_host else model


_CHUNK = 1 << 22
"""Weights drawn at a time: a table drawn whole would need 8 bytes a weight beside its 4."""

_CACHED_CHUNK = 1 << 16
"""The same where numpy draws facebook's stream: 512 KiB of float64 stay in the second-level cache.
A table of 1,000,000 x 64 took 0.28 s of CPU time so, and 0.40 to 0.81 s with 2^22."""

_ENGINES_CHUNK = 1 << 20
"""The same where the engine draws it, which needs no memory beside: setting the generator's state
takes 56 microseconds a time (AMD EPYC)."""

_WORTH_AN_ENGINE = 1 << 28
"""From this many numbers on the engine saves more than loading its compiler takes."""


@torch.no_grad()
def _fill_like_facebook(model: DLRM, random: np.random.RandomState) -> None:
    tables = model.embeddings.weights
    rows, dim = [len(table) for table in tables], tables[0].shape[1]
    in_place = all(table.dtype == torch.float32 and table.is_cpu for table in tables)
    flat = [table.view(-1) for table in tables]
    for table, start, values in facebook_tables(random, rows, dim, flat if in_place else None):
        if not in_place:
            flat[table][start : start + values.numel()].copy_(values)


def facebook_tables(
    random: np.random.RandomState,
    table_rows: Sequence[int],
    dim: int,
    memory: Sequence[torch.Tensor] | None = None,
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Initial weights of tables, in portions; all tables come before the MLPs in facebook's stream.

    They are drawn into ``memory``, the flattened tables (R d,) float32, or each portion has its
    own. Yields the table's number, the first place in the flattened table, and the numbers (n,)
    float32.
    """
    engine, chunk = None, _CACHED_CHUNK
    if sum(table_rows) * dim >= _WORTH_AN_ENGINE:
        engine = optional_engine("facebook's random numbers")
        chunk = _CACHED_CHUNK if engine is None else _ENGINES_CHUNK
    for table, rows in enumerate(table_rows):
        bound = float(np.sqrt(1 / rows))
        for start in range(0, rows * dim, chunk):
            count = min(chunk, rows * dim - start)
            out = torch.empty(count) if memory is None else memory[table][start : start + count]
            if engine is not None:
                engine.uniform(random, bound, out.numpy())
            else:
                out.numpy()[:] = random.uniform(-bound, bound, count)
            yield table, start, out


@torch.no_grad()
def fill_dense(model: DLRM, random: np.random.RandomState | torch.Generator) -> None:
    """Initial weights of the dense part, from a stream that stands behind the tables."""
    for weight, variance in _drawn(model):
        if isinstance(random, torch.Generator):
            weight.normal_(0.0, variance**0.5, generator=random)
        else:
            values = random.normal(0.0, np.sqrt(variance), tuple(weight.shape))
            weight.copy_(torch.from_numpy(values.astype(np.float32)))


def _drawn(model: DLRM) -> Iterator[tuple[torch.Tensor, float]]:
    """Dense weights in the order in which they are drawn, and their variances."""
    for mlp in (model.bottom_mlp, model.top_mlp):
        for linear in mlp.linears:
            yield linear.weight, 2 / sum(linear.weight.shape)
            yield linear.bias, 1 / len(linear.bias)
    layer = model.interaction
    for weight, own in zip(layer.weights, layer.kind.weights(), strict=True):
        if own.start == "normal":
            yield weight, 2 / sum(own.shape)


@torch.no_grad()
def _fill_with_torch(model: DLRM, random: torch.Generator) -> None:
    beside: torch.Generator | None = None
    for table in model.embeddings.weights:
        source = random
        if table.device.type != random.device.type:
            # a table that stays on the host: a generator draws on its own device only
            beside = beside or torch.Generator(table.device).manual_seed(random.initial_seed())
            source = beside
        bound = (1 / table.shape[0]) ** 0.5
        if table.dtype.itemsize > 2:
            table.uniform_(-bound, bound, generator=source)
            continue
        # in 2 bytes weights are those of fp32, rounded to nearest
        for rows in table.split(max(1, _CHUNK // table.shape[1])):
            drawn = torch.empty(rows.shape, device=table.device)
            rows.copy_(drawn.uniform_(-bound, bound, generator=source))
