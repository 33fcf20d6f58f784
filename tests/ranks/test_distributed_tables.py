"""A rank's part of the tables, without the other ranks."""

import numpy as np
import pytest
import torch

from dlrm_core.model import facebook_tables
from dlrm_ranks import tables as distributed_tables
from dlrm_ranks.plan import Shard
from dlrm_ranks.tables import ShardedTables

ROWS, DIM = (37, 5), 8
SHARDS = (
    Shard(0, "row_wise", 0, 5, 20, 0, 8),
    Shard(1, "column_wise", 0, 0, 5, 4, 4),
    Shard(0, "table_wise", 0, 0, 37, 0, 8),
)


@pytest.mark.parametrize("portion", [1, 13, 16, 1000])
def test_shards_begin_with_their_part_of_one_process_weights(monkeypatch, portion):
    portions = list(facebook_tables(np.random.RandomState(3), ROWS, DIM))
    whole = [
        torch.cat([numbers for of, _, numbers in portions if of == table]).view(rows, DIM)
        for table, rows in enumerate(ROWS)
    ]

    def in_portions(random, table_rows, dim):
        for table, start, numbers in facebook_tables(random, table_rows, dim):
            for place in range(0, numbers.numel(), portion):
                yield table, start + place, numbers[place : place + portion]

    monkeypatch.setattr(distributed_tables, "facebook_tables", in_portions)
    tables = ShardedTables.__new__(ShardedTables)
    tables.table_rows, tables.dim = ROWS, DIM
    tables.local = [(shard, torch.zeros(shard.rows, shard.columns)) for shard in SHARDS]
    tables.fill_like_facebook(np.random.RandomState(3))
    for shard, memory in tables.local:
        rows = slice(shard.first_row, shard.first_row + shard.rows)
        columns = slice(shard.first_column, shard.first_column + shard.columns)
        assert torch.equal(memory, whole[shard.table][rows, columns])
