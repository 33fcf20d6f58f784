"""The Deep Learning Recommendation Model (Naumov et al. 2019, arXiv:1906.00091).

Shapes: B samples, D dense features, T embedding tables, d embedding width,
F = T + 1 features that interact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from dlrm_core.base.engines import optional_engine
from dlrm_core.config import ModelConfig
from dlrm_core.data.batch import Batch
from dlrm_core.embeddings import EmbeddingTables, touched_beside
from dlrm_core.rounding import ROW_DTYPES


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
        """The linear layers, input side first."""
        return [layer for layer in self if isinstance(layer, nn.Linear)]


class DotInteraction(nn.Module):
    """Pairwise dot products of all features, beside the bottom MLP's output.

    x (B, d) and T pooled vectors (B, d) give (B, d + F(F-1)/2), or
    (B, d + F(F+1)/2) with each feature's product with itself, all in x's precision.
    The products come in the order of facebookresearch/dlrm: row by row of the lower
    triangle.

    Attributes:
        kernel: takes the place of the operations below, given x, the pooled vectors and
            ``itself`` (``training.dense_backend: fused`` on a GPU); None: nothing does.
    """

    pairs: torch.Tensor
    lower: torch.Tensor
    mirror: torch.Tensor

    def __init__(self, features: int, itself: bool) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(features, features, offset=0 if itself else -1)
        count = len(rows)
        # where no pair is: the column of zeros behind the gradients of all pairs
        lower = torch.full((features, features), count)
        lower[rows, columns] = torch.arange(count)
        mirror = lower.clone()
        mirror[columns, rows] = torch.arange(count)
        self.itself = itself
        self.kernel: Callable[..., torch.Tensor] | None = None
        self.register_buffer("pairs", rows * features + columns, persistent=False)
        self.register_buffer("lower", lower.flatten(), persistent=False)
        self.register_buffer("mirror", mirror.flatten(), persistent=False)

    def forward(self, x: torch.Tensor, pooled: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.kernel is not None:
            return self.kernel(x, pooled, self.itself)
        size, dim = x.shape
        features = _side_by_side(x, pooled).view(size, -1, dim)  # (B, F, d)
        products = _PairProducts.apply(features, self)
        return torch.cat([x, products], dim=1)


class _PairProducts(torch.autograd.Function):
    """The chosen elements of F F^T for features F (B, F, d), as (B, number of pairs).

    With G the pairs' gradients at their place in (B, F, F), the gradient of F is
    G F + G^T F. Autograd would scatter to make G; here it is gathered by an index made
    beforehand. In fp32 the products and their order are autograd's own, so the result is
    that of plain indexing bit for bit. Where products are rounded anyway, G + G^T is
    gathered at once, and one product is enough.
    """

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, indices: DotInteraction) -> torch.Tensor:
        ctx.save_for_backward(features)
        ctx.indices = indices
        products = torch.bmm(features, features.transpose(1, 2))  # (B, F, F)
        return _gather(products.flatten(1), indices.pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (features,) = ctx.saved_tensors
        size, count, _ = features.shape
        exact = features.dtype in (torch.float32, torch.float64)
        index = ctx.indices.lower if exact else ctx.indices.mirror
        padded = nn.functional.pad(gradients[0], (0, 1))  # (B, pairs + 1)
        placed = _gather(padded, index).view(size, count, count)
        if exact:
            gradient = torch.bmm(placed, features)
            return gradient.baddbmm_(placed.transpose(1, 2), features), None
        if ctx.indices.itself:
            # G and G^T meet on the diagonal
            placed.diagonal(dim1=1, dim2=2).mul_(2.0)
        return torch.bmm(placed, features), None


def _gather(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Columns of values (B, n); on a CPU gathering 2-byte numbers takes longer than widening."""
    if values.device.type == "cpu" and values.element_size() == 2:
        return values.float().index_select(1, index).to(values.dtype)
    return values.index_select(1, index)


def _side_by_side(x: torch.Tensor, pooled: Sequence[torch.Tensor]) -> torch.Tensor:
    """(B, d) and T times (B, d) to (B, F d), in x's precision."""
    return torch.cat([x, *(vector.to(x.dtype) for vector in pooled)], dim=1)


class CatInteraction(nn.Module):
    """Concatenation: x (B, d) and T pooled vectors (B, d) give (B, F d) in x's precision."""

    def forward(self, x: torch.Tensor, pooled: Sequence[torch.Tensor]) -> torch.Tensor:
        return _side_by_side(x, pooled)


class CrossInteraction(nn.Module):
    """Cross layers of low rank r over all features side by side (DCNv2).

    x (B, d) and T pooled vectors (B, d) give (B, F d) in x's precision:
    x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l, with x_0 all features, V_l (r, F d),
    W_l (F d, r), and * by elements. Source: Wang et al. 2021, arXiv:2008.13535, section 3;
    TorchRec has it as LowRankCrossNet.

    Args:
        widths: between the products, F d, r, F d, ..., F d.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.products = nn.ModuleList(
            nn.Linear(n, m, bias=product % 2 == 1)
            for product, (n, m) in enumerate(itertools.pairwise(widths))
        )
        for widen in self.linears[1::2]:
            nn.init.zeros_(widen.bias)

    @property
    def linears(self) -> list[nn.Linear]:
        """V and W of each layer, in the order in which they are applied."""
        return [product for product in self.products if isinstance(product, nn.Linear)]

    def forward(self, x: torch.Tensor, pooled: Sequence[torch.Tensor]) -> torch.Tensor:
        first = crossed = _side_by_side(x, pooled)
        for narrow, widen in zip(self.linears[::2], self.linears[1::2], strict=True):
            crossed = (first * widen(narrow(crossed))).add_(crossed)
        return crossed


class ClickLoss(nn.Module):
    """Loss of predictions p (B, 1) against targets t (B, 1): a scalar.

    'mse' (facebook's default), 'bce', or 'wbce': BCE weighted by
    ``weights[int(t)]``; always the mean over samples.
    """

    weights: torch.Tensor

    def __init__(self, kind: str, weights: Sequence[float]) -> None:
        super().__init__()
        self.kind = kind
        # float64, as facebook's: its weighted loss is computed in double precision
        self.register_buffer(
            "weights", torch.tensor(weights, dtype=torch.float64), persistent=False
        )

    def forward(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.kind == "mse":
            return nn.functional.mse_loss(predictions, targets)
        if self.kind == "bce":
            return nn.functional.binary_cross_entropy(predictions, targets)
        weights = self.weights[targets.long().view(-1)].view_as(targets)
        losses = nn.functional.binary_cross_entropy(predictions, targets, reduction="none")
        return (weights * losses).mean()


class DLRM(nn.Module):
    """Bottom MLP and embeddings, their interaction, and the top MLP."""

    def __init__(
        self,
        config: ModelConfig,
        huge_pages: bool = False,
        make_tables: Callable[[], EmbeddingTables] | None = None,
    ) -> None:
        super().__init__()
        self.embeddings = (
            make_tables()
            if make_tables is not None
            else EmbeddingTables(
                config.table_rows,
                config.embedding_dim,
                huge_pages,
                dtype=ROW_DTYPES[config.embedding_precision],
            )
        )
        self.bottom_mlp = MLP(config.bottom_widths)
        self.interaction: nn.Module
        if config.interaction == "dot":
            self.interaction = DotInteraction(len(config.table_rows) + 1, config.interaction_itself)
        elif config.interaction == "dcn":
            self.interaction = CrossInteraction(config.cross_widths)
        else:
            self.interaction = CatInteraction()
        self.top_mlp = MLP(config.top_widths, Probability(config.loss_threshold))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Click probability (B, 1) float32."""
        x = self.bottom_mlp(batch.dense)  # (B, d)
        pooled = self.embeddings(batch)  # T x (B, d)
        z = self.interaction(x, pooled)  # (B, top_widths[0])
        return self.top_mlp(z)

    def dense_weights(self) -> list[nn.Parameter]:
        """Weights and biases of everything but the tables."""
        parts = (self.bottom_mlp, self.interaction, self.top_mlp)
        return [weight for part in parts for weight in part.parameters()]


def build_model(
    config: ModelConfig,
    seed: int | None,
    device: torch.device,
    huge_pages: bool = False,
    make_tables: Callable[[], EmbeddingTables] | None = None,
) -> DLRM:
    """A DLRM with initial weights, on the device; without a seed its memory is left as it is.

    W ~ N(0, 2/(m+n)), b ~ N(0, 1/m), E ~ U(+-sqrt(1/rows)), by facebook's own
    numpy stream (embeddings, bottom MLP, top MLP) or by torch on the device. Cross layers
    come after these, their W and V by the same law, their biases 0, as TorchRec has them.
    ``huge_pages`` asks for 2 MiB pages behind the tables (see EmbeddingTables);
    ``make_tables`` makes others in their place.
    """
    on_host = config.init == "facebook"
    with torch.device("cpu" if on_host and seed is not None else device):
        model = DLRM(config, huge_pages, make_tables)
    if seed is None:
        return model
    with touched_beside(model.embeddings.weights):
        if on_host:
            _fill_like_facebook(model, np.random.RandomState(seed))
        else:
            _fill_with_torch(model, torch.Generator(device).manual_seed(seed))
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
    fill_dense_like_facebook(model, random)


def facebook_tables(
    random: np.random.RandomState,
    table_rows: Sequence[int],
    dim: int,
    memory: Sequence[torch.Tensor] | None = None,
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Initial weights of tables, in portions.

    All tables come before the MLPs in facebook's stream.

    Args:
        memory: of the flattened tables, (R d,) float32 each, where they are drawn into; left out,
            each portion has memory of its own.

    Yields:
        number of the table, first place in the flattened table, and the numbers (n,) float32.
    """
    draw, chunk = _uniform_of(sum(table_rows) * dim)
    for table, rows in enumerate(table_rows):
        bound = float(np.sqrt(1 / rows))
        for start in range(0, rows * dim, chunk):
            count = min(chunk, rows * dim - start)
            out = torch.empty(count) if memory is None else memory[table][start : start + count]
            draw(random, bound, out.numpy())
            yield table, start, out


Draw = Callable[[np.random.RandomState, float, np.ndarray], None]


def _uniform_of(numbers: int) -> tuple[Draw, int]:
    """Choose what draws so many numbers soonest, and how many of them at a time."""
    if numbers >= _WORTH_AN_ENGINE:
        engine = optional_engine("facebook's random numbers")
        if engine is not None:
            return engine.uniform, _ENGINES_CHUNK
    return _uniform, _CACHED_CHUNK


def _uniform(random: np.random.RandomState, bound: float, out: np.ndarray) -> None:
    out[:] = random.uniform(-bound, bound, out.size)


@torch.no_grad()
def fill_dense_like_facebook(model: DLRM, random: np.random.RandomState) -> None:
    """Initial weights of the dense part, from a stream that stands behind the tables."""
    for linear, draws_bias in _linears(model):
        m, n = linear.weight.shape
        weight = random.normal(0.0, np.sqrt(2 / (m + n)), (m, n)).astype(np.float32)
        linear.weight.copy_(torch.from_numpy(weight))
        if draws_bias:
            bias = random.normal(0.0, np.sqrt(1 / m), m).astype(np.float32)
            linear.bias.copy_(torch.from_numpy(bias))


def _linears(model: DLRM) -> Iterator[tuple[nn.Linear, bool]]:
    """Linear layers in the order of their initial weights, and whether their biases are drawn."""
    for mlp in (model.bottom_mlp, model.top_mlp):
        for linear in mlp.linears:
            yield linear, True
    if isinstance(model.interaction, CrossInteraction):
        for linear in model.interaction.linears:
            yield linear, False


@torch.no_grad()
def _fill_with_torch(model: DLRM, random: torch.Generator) -> None:
    beside: torch.Generator | None = None
    for table in model.embeddings.weights:
        source = random
        if table.device.type != random.device.type:
            # a table that stays on the host: a generator draws on its own device only
            beside = beside or torch.Generator(table.device).manual_seed(random.initial_seed())
            source = beside
        fill_table_with_torch(table, source)
    fill_dense_with_torch(model, random)


def fill_table_with_torch(table: torch.Tensor, random: torch.Generator) -> None:
    """A table's initial weights (R, d); in 2 bytes they are those of fp32, rounded to nearest."""
    bound = (1 / table.shape[0]) ** 0.5
    if table.dtype.itemsize > 2:
        table.uniform_(-bound, bound, generator=random)
        return
    for rows in table.split(max(1, _CHUNK // table.shape[1])):
        drawn = torch.empty(rows.shape, device=table.device)
        rows.copy_(drawn.uniform_(-bound, bound, generator=random))


@torch.no_grad()
def fill_dense_with_torch(model: DLRM, random: torch.Generator) -> None:
    """Initial weights of the dense part, from a generator that stands behind the tables."""
    for linear, draws_bias in _linears(model):
        m, n = linear.weight.shape
        linear.weight.normal_(0.0, (2 / (m + n)) ** 0.5, generator=random)
        if draws_bias:
            linear.bias.normal_(0.0, (1 / m) ** 0.5, generator=random)
