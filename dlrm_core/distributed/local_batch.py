"""A rank's slice of a global batch, in the layout that TorchRec takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dlrm_core.data.batch import Batch
from dlrm_core.distributed.packages import load_torchrec
from dlrm_core.distributed.world import World
from dlrm_core.embeddings.checks import BAD_INDEX, describe_fault
from dlrm_core.errors import InputError


@dataclass(frozen=True)
class LocalBatch:
    """b = B / ranks samples.

    Attributes:
        dense: (b, D) float32.
        lookups: KeyedJaggedTensor, feature ``ft`` for table t.
        targets: (b, 1) float32.
    """

    dense: torch.Tensor
    lookups: Any
    targets: torch.Tensor

    @property
    def size(self) -> int:
        """Number of samples b."""
        return self.dense.shape[0]


def local_batch(batch: Batch, world: World, table_rows: tuple[int, ...]) -> LocalBatch:
    """The samples rank·b to (rank + 1)·b of a batch whose size is a multiple of the ranks.

    Raises:
        InputError: an index outside its table.
    """
    size = batch.size // world.size
    first, behind = world.rank * size, (world.rank + 1) * size
    values, lengths = [], []
    for t, rows in enumerate(table_rows):
        indices, starts = batch.table_indices(t), batch.offsets[t]
        ends = torch.cat([starts[1:], starts.new_tensor([indices.numel()])])
        begin = int(starts[first])
        own = indices[begin : int(ends[behind - 1])]
        if own.numel() and (int(own.min()) < 0 or int(own.max()) >= rows):
            _refuse(batch, t, begin, own, table_rows)
        values.append(own)
        lengths.append(ends[first:behind] - starts[first:behind])
    lookups = load_torchrec().KeyedJaggedTensor(
        keys=[f"f{t}" for t in range(len(table_rows))],
        values=torch.cat(values),
        lengths=torch.cat(lengths),
    )
    place = slice(first, behind)
    return LocalBatch(
        batch.dense[place].to(world.device),
        lookups.to(world.device),
        batch.targets[place].to(world.device),
    )


def _refuse(
    batch: Batch, table: int, begin: int, own: torch.Tensor, table_rows: tuple[int, ...]
) -> None:
    import numpy as np

    wrong = ((own < 0) | (own >= table_rows[table])).nonzero()[0]
    place = batch.table_starts[table] + begin + int(wrong)
    raise InputError(describe_fault(BAD_INDEX, place, batch, np.array(table_rows)))
