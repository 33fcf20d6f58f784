"""The Deep Learning Recommendation Model (Naumov et al. 2019, arXiv:1906.00091).

Shapes: B samples, D dense features, T embedding tables, d embedding width,
F = T + 1 features that interact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from dlrm_core.config import ModelConfig
from dlrm_core.data.batch import Batch
from dlrm_core.embeddings import EmbeddingTables


class MLP(nn.Sequential):
    """Linear layers with ReLU, or with a sigmoid behind the last one.

    (B, widths[0]) float32 to (B, widths[-1]) float32.
    """

    def __init__(self, widths: Sequence[int], sigmoid_output: bool) -> None:
        layers: list[nn.Module] = []
        last = len(widths) - 2
        for i in range(last + 1):
            layers.append(nn.Linear(widths[i], widths[i + 1]))
            layers.append(nn.Sigmoid() if sigmoid_output and i == last else nn.ReLU())
        super().__init__(*layers)

    @property
    def linears(self) -> list[nn.Linear]:
        """The linear layers, input side first."""
        return [layer for layer in self if isinstance(layer, nn.Linear)]


class DotInteraction(nn.Module):
    """Pairwise dot products of all features, beside the bottom MLP's output.

    x (B, d) and T pooled vectors (B, d) give (B, d + F(F-1)/2), or
    (B, d + F(F+1)/2) with each feature's product with itself. The products come
    in the order of facebookresearch/dlrm: row by row of the lower triangle.
    """

    rows: torch.Tensor
    columns: torch.Tensor

    def __init__(self, features: int, itself: bool) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(features, features, offset=0 if itself else -1)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    def forward(self, x: torch.Tensor, pooled: Sequence[torch.Tensor]) -> torch.Tensor:
        size, dim = x.shape
        features = torch.cat([x, *pooled], dim=1).view(size, -1, dim)  # (B, F, d)
        products = torch.bmm(features, features.transpose(1, 2))  # (B, F, F)
        return torch.cat([x, products[:, self.rows, self.columns]], dim=1)


class CatInteraction(nn.Module):
    """Concatenation: x (B, d) and T pooled vectors (B, d) give (B, F d)."""

    def forward(self, x: torch.Tensor, pooled: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([x, *pooled], dim=1)


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

    def __init__(self, config: ModelConfig, huge_pages: bool = False) -> None:
        super().__init__()
        self.loss_threshold = config.loss_threshold
        self.embeddings = EmbeddingTables(config.table_rows, config.embedding_dim, huge_pages)
        self.bottom_mlp = MLP(config.bottom_widths, sigmoid_output=False)
        self.interaction: nn.Module
        if config.interaction == "dot":
            self.interaction = DotInteraction(len(config.table_rows) + 1, config.interaction_itself)
        else:
            self.interaction = CatInteraction()
        self.top_mlp = MLP(config.top_widths, sigmoid_output=True)

    def predict(self, z: torch.Tensor) -> torch.Tensor:
        """Interaction output (B, top_widths[0]) to click probability (B, 1)."""
        p = self.top_mlp(z)
        if 0.0 < self.loss_threshold < 1.0:
            p = p.clamp(self.loss_threshold, 1.0 - self.loss_threshold)
        return p

    def forward(self, batch: Batch) -> torch.Tensor:
        """Click probability (B, 1) float32."""
        x = self.bottom_mlp(batch.dense)  # (B, d)
        pooled = self.embeddings(batch)  # T x (B, d)
        z = self.interaction(x, pooled)  # (B, top_widths[0])
        return self.predict(z)


def build_model(
    config: ModelConfig, seed: int, device: torch.device, huge_pages: bool = False
) -> DLRM:
    """A DLRM with initial weights, on the device.

    W ~ N(0, 2/(m+n)), b ~ N(0, 1/m), E ~ U(+-sqrt(1/rows)), by facebook's own
    numpy stream (embeddings, bottom MLP, top MLP) or by torch on the device.
    ``huge_pages`` asks for 2 MiB pages behind the tables (see EmbeddingTables).
    """
    on_host = config.init == "facebook"
    with torch.device("cpu" if on_host else device):
        model = DLRM(config, huge_pages)
    if on_host:
        _fill_like_facebook(model, np.random.RandomState(seed))
        return model.to(device)
    _fill_with_torch(model, torch.Generator(device).manual_seed(seed))
    return model


_CHUNK = 1 << 22
"""Weights drawn at a time: a table drawn whole would need 8 bytes a weight beside its 4."""


@torch.no_grad()
def _fill_like_facebook(model: DLRM, random: np.random.RandomState) -> None:
    for table in model.embeddings.weights:
        bound = np.sqrt(1 / table.shape[0])
        flat = table.view(-1)
        for start in range(0, flat.numel(), _CHUNK):
            part = flat[start : start + _CHUNK]
            draws = random.uniform(-bound, bound, part.numel()).astype(np.float32)
            part.copy_(torch.from_numpy(draws))
    for mlp in (model.bottom_mlp, model.top_mlp):
        for linear in mlp.linears:
            m, n = linear.weight.shape
            weight = random.normal(0.0, np.sqrt(2 / (m + n)), (m, n)).astype(np.float32)
            bias = random.normal(0.0, np.sqrt(1 / m), m).astype(np.float32)
            linear.weight.copy_(torch.from_numpy(weight))
            linear.bias.copy_(torch.from_numpy(bias))


@torch.no_grad()
def _fill_with_torch(model: DLRM, random: torch.Generator) -> None:
    for table in model.embeddings.weights:
        bound = (1 / table.shape[0]) ** 0.5
        table.uniform_(-bound, bound, generator=random)
    for mlp in (model.bottom_mlp, model.top_mlp):
        for linear in mlp.linears:
            m, n = linear.weight.shape
            linear.weight.normal_(0.0, (2 / (m + n)) ** 0.5, generator=random)
            linear.bias.normal_(0.0, (1 / m) ** 0.5, generator=random)
