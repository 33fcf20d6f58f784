"""Vectorised random batches: uniform or power-law indices, on the CPU or the GPU."""

from __future__ import annotations

import torch

from dlrm_core.data.batch import Batch


class SyntheticBatches:
    """facebook's bag law without sorting and deduplication, drawn by torch.

    Dense features and targets are U[0,1) (targets rounded on request); a bag
    holds exactly k indices, or max(1, round(r min(R, k))) with r ~ U[0,1).
    Rows are uniform over the table, or follow a bounded power law: the
    continuous density x^-a on [1, R + 1) cut to whole numbers, so that
    P(row i) = ((i+1)^(1-a) - (i+2)^(1-a)) / (1 - (R+1)^(1-a)), row 0 hottest.
    """

    def __init__(
        self,
        dense_features: int,
        table_rows: tuple[int, ...],
        batch_size: int,
        indices_per_lookup: int,
        fixed_pooling: bool,
        round_targets: bool,
        seed: int,
        zipf_exponent: float | None,
        device: torch.device,
    ) -> None:
        self.dense_features = dense_features
        self.table_rows = table_rows
        self.batch_size = batch_size
        self.indices_per_lookup = indices_per_lookup
        self.fixed_pooling = fixed_pooling
        self.round_targets = round_targets
        self.zipf_exponent = zipf_exponent
        self.device = device
        self.random = torch.Generator(device).manual_seed(seed)
        bounds = [min(rows, indices_per_lookup) for rows in table_rows]
        self._bounds = torch.tensor(bounds, dtype=torch.float32, device=device)[:, None]
        self._rows = torch.tensor(table_rows, device=device)

    def next_batch(self) -> Batch:
        """The next batch, shapes as in :class:`Batch`."""
        size, tables = self.batch_size, len(self.table_rows)
        dense = self._uniform(size, self.dense_features)
        if self.fixed_pooling:
            count = self.indices_per_lookup
            offsets = (torch.arange(size, device=self.device) * count).expand(tables, size)
            offsets = offsets.contiguous()
            totals = [size * count] * tables
        else:
            sizes = (self._uniform(tables, size) * self._bounds).round().clamp_(min=1).long()
            ends = sizes.cumsum(1)
            offsets = ends - sizes
            # the host must know how long the batch is: one small copy back
            totals = ends[:, -1].tolist()
        starts = [0]
        for total in totals:
            starts.append(starts[-1] + total)
        rows = self._rows.repeat_interleave(
            torch.tensor(totals, device=self.device), output_size=starts[-1]
        )
        targets = self._uniform(size, 1)
        if self.round_targets:
            targets.round_()
        return Batch(dense, self._draw_rows(rows), offsets, tuple(starts), targets)

    def _uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(*shape, generator=self.random, device=self.device, dtype=dtype)

    def _draw_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """One row below each of ``rows`` (N,) int64."""
        # float64: with float32 a table of more than 2^24 rows has rows that are never drawn
        draws = self._uniform(rows.numel(), dtype=torch.float64)
        if self.zipf_exponent is None:
            return (draws * rows).long()
        exponent = self.zipf_exponent
        if exponent == 1.0:
            places = (rows + 1.0).pow_(draws)
        else:
            shrink = 1.0 - exponent
            places = (1.0 - draws * (1.0 - (rows + 1.0).pow_(shrink))).pow_(1.0 / shrink)
        return torch.minimum(places.long() - 1, rows - 1).clamp_(min=0)
