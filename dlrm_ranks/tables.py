"""Embedding tables divided among the ranks, with TorchRec's kernels and exchanges.

A lookup is cut where the work changes hands: indices to the ranks that hold their rows
(``send_indices``), the local sums (``look_up``), and those back to the ranks that have the
samples (``send_pooled``, ``receive_pooled``). Backward passes through the same places.

Shapes: B samples of the global batch, b of a rank, T tables of R rows, d embedding width.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dlrm_core.base.engines import engine
from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.base.machine import peak_memory
from dlrm_core.config import Parameters, TrainingConfig
from dlrm_core.data.batch import Batch
from dlrm_core.embeddings import EmbeddingTables
from dlrm_core.model import facebook_tables
from dlrm_core.operations import FLOAT_BYTES
from dlrm_core.optimizers import EPSILON, OPTIMIZERS
from dlrm_ranks import plan
from dlrm_ranks.collectives import Collectives
from dlrm_ranks.plan import Shard, load_torchrec
from dlrm_ranks.world import World


class ShardedTables:
    """This rank's part of all tables.

    Attributes:
        shards: of all ranks.
        local: this rank's shards and their memory (rows, columns).
        sums: Adagrads' sums of this rank's shards: (rows, columns), row-wise (rows,); empty
            with SGD.
        replicated: tables that every rank has: their weights (R, d).
        table_rows, dim: R of each table, d.
        backend: 'torchrec', or 'torchrec, fused' where our kernels do its lookups and updates.
        notices: why they do not, where they were asked for.
        optimizer: ``training.optimizer``.
    """

    def __init__(self, parameters: Parameters, world: World, collectives: Collectives) -> None:
        api = load_torchrec()
        model, training = parameters.model, parameters.training
        self.dim = model.embedding_dim
        self.table_rows = model.table_rows
        self.optimizer = training.optimizer
        self.kind = OPTIMIZERS[training.optimizer]
        self._collectives = collectives
        collection, sharder = plan.make_collection(parameters), plan.make_sharder(parameters)
        planned = plan.make_plan(parameters, world, collection, sharder)
        self.shards = plan.shards_of(planned, model.table_rows, self.dim, world)
        ranks = api.ShardingEnv.from_process_group(dist.group.WORLD)
        self.module = sharder.shard(collection, planned, ranks, world.device)
        # its kernels are no registered modules: nobody else's list of modules has them
        kernels = [kernel for lookup in self.module._lookups for kernel in lookup.modules()]
        self._share_gradients(kernels)
        self._fused, self._dense = (
            [kernel for kernel in kernels if isinstance(kernel, kind)]
            for kind in (
                api.SplitTableBatchedEmbeddingBagsCodegen,
                api.DenseTableBatchedEmbeddingBagsCodegen,
            )
        )
        self._own: list[Any] = []
        self.backend = "torchrec"
        self.notices: list[str] = []
        if training.embedding_backend in ("fused", "auto") and world.device.type == "cpu":
            self._use_fused_kernels(training)
        self.local, self.replicated = self._weights(world.rank)
        self.sums = self._optimizer_sums(world.rank)
        self.learning_rate = training.learning_rate
        self._places: list[int] = []

    def send_indices(self, lookups: Any) -> tuple[Any, Any]:
        """Every index to the rank that holds its row; the exchange's context, and what came."""
        context = self.module.create_context()
        with self._collectives.about("indices"):
            return context, self.module.input_dist(context, lookups).wait().wait()

    def look_up(self, context: Any, received: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Local sums for all B samples, and the leaves that the exchange starts from."""
        sums = self.module.compute(context, received)
        return sums, [vector.detach().requires_grad_() for vector in sums]

    def send_pooled(self, context: Any, leaves: list[torch.Tensor]) -> Any:
        """Begin to send sums to the ranks that have the samples."""
        with self._collectives.about("pooled vectors"):
            return self.module.output_dist(context, leaves)

    def receive_pooled(self, sent: Any) -> torch.Tensor:
        """This rank's samples' vectors (b, T d), in an order of TorchRec's (:meth:`by_table`)."""
        keyed = sent.wait()
        if not self._places:
            names = keyed.keys()
            self._places = [names.index(f"f{t}") for t in range(len(self.table_rows))]
        values: torch.Tensor = keyed.values()
        return values

    def by_table(self, values: torch.Tensor) -> list[torch.Tensor]:
        """T vectors (b, d) of :meth:`receive_pooled`'s result, in the order of the tables."""
        columns = values.split(self.dim, dim=1)
        return [columns[place] for place in self._places]

    def update_replicated(self) -> None:
        """Update the tables that every rank has; the others are updated inside backward."""
        for name, weight in self.module.named_parameters():
            table = _table_of(name)
            if table not in self.replicated or weight.grad is None:
                continue
            with torch.no_grad():
                self._apply(table, self.replicated[table], weight.grad.detach())
        for kernel in self._dense:
            for weight in kernel.parameters():
                weight.grad = None

    def _apply(self, table: int, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        # rows that were not looked up have gradients of 0 and stay as they are
        if not self.kind.row_state(self.dim):
            weight.add_(gradient, alpha=-self._learning_rate)
            return
        total = self._own_sums[table]
        if self.kind.per_row:
            total.add_(gradient.square().mean(dim=1))
            scale = (self._learning_rate / (total.sqrt() + EPSILON))[:, None]
            weight.sub_(gradient * scale)
            return
        total.addcmul_(gradient, gradient)
        weight.addcdiv_(gradient, total.sqrt().add_(EPSILON), value=-self._learning_rate)

    @property
    def learning_rate(self) -> float:
        """Step size of the updates to come."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._learning_rate = rate
        for kernel in self._fused:
            kernel.set_learning_rate(rate)
        for own in self._own:
            own.learning_rate = rate

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing is kept between steps."""

    @torch.no_grad()
    def fill_like_facebook(self, random: np.random.RandomState) -> None:
        """Draw the weights of one process, bit for bit, and keep those of this rank's shards."""
        first, rest = 0, torch.empty(0)
        for table, start, numbers in facebook_tables(random, self.table_rows, self.dim):
            if start == 0:
                first, rest = 0, torch.empty(0)
            # portions may end within a row
            numbers = torch.cat([rest, numbers])
            whole = numbers.numel() // self.dim
            self._keep(table, first, numbers[: whole * self.dim].view(-1, self.dim))
            first, rest = first + whole, numbers[whole * self.dim :]

    @torch.no_grad()
    def fill_with_torch(self, random: torch.Generator) -> None:
        """As :meth:`fill_like_facebook` by torch's law; needs memory for one whole table beside."""
        for table, rows in enumerate(self.table_rows):
            bound = (1 / rows) ** 0.5
            drawn = torch.empty(rows, self.dim, device=random.device)
            self._keep(table, 0, drawn.uniform_(-bound, bound, generator=random))

    def _keep(self, table: int, first: int, values: torch.Tensor) -> None:
        """Copy what is ours of a table's rows (n, d) from the ``first`` on."""
        for shard, memory in self.local:
            begin = max(first, shard.first_row)
            end = min(first + len(values), shard.first_row + shard.rows)
            if shard.table == table and begin < end:
                columns = slice(shard.first_column, shard.first_column + shard.columns)
                memory[begin - shard.first_row : end - shard.first_row] = values[
                    begin - first : end - first, columns
                ]

    def _use_fused_kernels(self, training: TrainingConfig) -> None:
        """Let the fused back end look up and update what FBGEMM's kernels hold, where it lies."""
        try:
            kernels = engine("fused embeddings")
            for kernel in self._fused:
                memory = kernel.split_embedding_weights()
                if len({weight.shape[1] for weight in memory}) > 1:
                    raise MissingToolError("it has no tables of several widths")
                tables = EmbeddingTables([], memory[0].shape[1], memory=memory)
                fused = kernels.FusedCpu(tables, self.optimizer, training.learning_rate)
                if self.kind.row_state(self.dim):
                    # FBGEMM's, which checkpoints read and write; a shard may have no rows
                    width = fused.states[0].shape[1]
                    sums = [states[0] for states in kernel.split_optimizer_states()]
                    fused.states = [state.view(len(state), width) for state in sums]
                kernel.forward = functools.partial(_fused_lookup, fused, tables)
                self._own.append(fused)
        except MissingToolError as error:
            self.notices.append(
                f"training.embedding_backend: {training.embedding_backend} cannot be had, FBGEMM "
                f"does its work: {error}"
            )
        else:
            self.backend = "torchrec, fused"

    def _share_gradients(self, kernels: list[torch.nn.Module]) -> None:
        """Sum the gradients of replicated tables where they are noted (DDP's own are not)."""

        def summed(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            buffer = bucket.buffer()
            with self._collectives.about("table gradients"):
                work = dist.all_reduce(buffer, async_op=True)
                work.wait()
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done

        # DDP looks at the types themselves, not at their names
        returns = torch.futures.Future[torch.Tensor]
        summed.__annotations__ = {"bucket": dist.GradBucket, "return": returns}
        for kernel in kernels:
            if isinstance(kernel, DistributedDataParallel):
                kernel.register_comm_hook(None, summed)

    def _weights(
        self, rank: int
    ) -> tuple[list[tuple[Shard, torch.Tensor]], dict[int, torch.Tensor]]:
        """This rank's shards with their memory, and the weights of the replicated tables."""
        local, replicated = [], {}
        for name, value in self.module.state_dict().items():
            table = _table_of(name)
            if hasattr(value, "local_shards"):
                for piece in value.local_shards():
                    shard = self._shard(rank, table, *piece.metadata.shard_offsets)
                    local.append((shard, piece.tensor.detach()))
            else:
                replicated[table] = value.detach()
                local.append((self._shard(rank, table), replicated[table]))
        return local, replicated

    def _shard(self, rank: int, table: int, row: int = 0, column: int = 0) -> Shard:
        """A rank's shard of a table that begins at a row and column."""
        wanted = (rank, table, row, column)
        return next(
            s for s in self.shards if (s.rank, s.table, s.first_row, s.first_column) == wanted
        )

    def _optimizer_sums(self, rank: int) -> list[tuple[Shard, torch.Tensor]]:
        self._own_sums: dict[int, torch.Tensor] = {}
        if not self.kind.row_state(self.dim):
            return []
        sums: list[tuple[Shard, torch.Tensor]] = []
        state: Mapping[str, Any] = self.module.fused_optimizer.state_dict()["state"]
        for name, tensors in state.items():
            for value in tensors.values():
                for piece in value.local_shards():
                    shard = self._shard(rank, _table_of(name), *piece.metadata.shard_offsets)
                    sums.append((shard, piece.tensor.detach()))
        for table, weight in self.replicated.items():
            size = weight.shape[:1] if self.kind.per_row else weight.shape
            self._own_sums[table] = torch.zeros(size, device=weight.device)
            sums.append((self._shard(rank, table), self._own_sums[table]))
        return sums


def _fused_lookup(
    own: Any, tables: EmbeddingTables, indices: torch.Tensor, offsets: torch.Tensor, **rest: Any
) -> torch.Tensor:
    """Sums (B, T d) of T tables' bags, as FBGEMM's kernels take and give them.

    Args:
        indices: (N,), those of a table one behind the other.
        offsets: (T B + 1,), where each bag begins.
        rest: ``per_sample_weights`` of None, which all callers give.
    """
    count = len(tables.weights)
    begins = offsets[:-1].view(count, -1)
    starts = [*begins[:, 0].tolist(), indices.numel()]
    nothing = torch.empty(begins.shape[1], 0)
    batch = Batch(nothing, indices, begins - begins[:, :1], tuple(starts), nothing)
    return torch.cat(own.forward(tables, batch), dim=1)


def _table_of(name: str) -> int:
    """Table t of a name such as ``embedding_bags.t3.weight``."""
    return int(name.split("embedding_bags.t")[1].split(".")[0])


@dataclass(frozen=True)
class LocalBatch:
    """A rank's b samples, as TorchRec takes them.

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


def local_batch(
    batch: Batch, world: World, table_rows: tuple[int, ...], room: int = 0
) -> LocalBatch:
    """A rank's own samples as TorchRec takes them.

    Args:
        room: bags of every rank, the last of them empty; 0: as many as samples.

    Raises:
        InputError: an index outside its table.
    """
    ends = torch.tensor([[batch.table_indices(t).numel()] for t in range(batch.tables)])
    lengths = torch.cat([batch.offsets[:, 1:], ends], dim=1)[:, : batch.size] - batch.offsets
    if room > batch.size:
        lengths = torch.nn.functional.pad(lengths, (0, room - batch.size))
    for t, rows in enumerate(table_rows):
        asked = batch.table_indices(t)
        if asked.numel() and (int(asked.min()) < 0 or int(asked.max()) >= rows):
            wrong = int(((asked < 0) | (asked >= rows)).nonzero()[0])
            raise InputError(
                f"embedding table {t} has {rows:,} rows, but lookup {wrong} of rank "
                f"{world.rank}'s samples asks for row {int(asked[wrong])}, expected 0 to {rows - 1}"
            )
    lookups = load_torchrec().KeyedJaggedTensor(
        keys=[f"f{t}" for t in range(len(table_rows))],
        values=batch.indices,
        lengths=lengths.flatten(),
    )
    return LocalBatch(
        batch.dense.to(world.device), lookups.to(world.device), batch.targets.to(world.device)
    )


def about_rank(world: World, tables: ShardedTables) -> dict[str, Any]:
    """A rank's entry in a command's last line and in ``result.json``."""
    shards = [shard for shard, _ in tables.local]
    return {
        "rank": world.rank,
        "host": world.host,
        "pid": os.getpid(),
        "device": str(world.device),
        "threads": world.threads,
        "peak_memory_bytes": peak_memory(world.device),
        "table_bytes": sum(FLOAT_BYTES * shard.rows * shard.columns for shard in shards),
        "shards": [
            {name: value for name, value in asdict(shard).items() if name != "rank"}
            for shard in shards
        ],
    }
