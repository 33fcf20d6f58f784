"""Which rank holds what of which table: TorchRec's planner, held to what the run can have.

TorchRec and FBGEMM, which only runs on several ranks need, are loaded here alone.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.base.machine import available_memory
from dlrm_core.base.settings import clash
from dlrm_core.base.text import format_bytes
from dlrm_core.config import Parameters, mean_bag_size
from dlrm_core.embeddings import FBGEMM_LANES, FBGEMM_ROWWISE_ELEMENTS
from dlrm_core.operations import FLOAT_BYTES
from dlrm_core.optimizers import EPSILON, OPTIMIZERS
from dlrm_ranks.world import World, gathered

INSTALL = (
    "pip install 'dlrm-workbook[distributed]' (from a checkout: '.[distributed]') and then "
    "pip install --no-deps torchrec==1.8.0 (its package declares FBGEMM's CUDA build)"
)


_PLANNER = "torchrec.distributed.planner"
_FBGEMM = "fbgemm_gpu.split_table_batched_embeddings_ops"

_NAMES = {
    "torchrec": "EmbeddingBagCollection EmbeddingBagConfig KeyedJaggedTensor",
    "torchrec.distributed.comm_ops": "set_gradient_division",
    "torchrec.distributed.embeddingbag": "EmbeddingBagCollectionSharder",
    _PLANNER: "EmbeddingShardingPlanner ParameterConstraints Topology",
    f"{_PLANNER}.storage_reservations": "FixedPercentageStorageReservation",
    f"{_PLANNER}.types": "PlannerError",
    "torchrec.distributed.types": "ShardingEnv",
    "fbgemm_gpu.split_embedding_configs": "EmbOptimType",
    f"{_FBGEMM}_common": "BoundsCheckMode",
    f"{_FBGEMM}_training": (
        "DenseTableBatchedEmbeddingBagsCodegen SplitTableBatchedEmbeddingBagsCodegen"
    ),
}
"""Module to the names of it that are used here."""

_THEIR_NAMES = {name: name for name in ("table_wise", "row_wise", "column_wise")}
_THEIR_NAMES["replicated"] = "data_parallel"
OUR_NAMES = {theirs: ours for ours, theirs in _THEIR_NAMES.items()}


def require_torchrec() -> None:
    """See that what divides the tables is installed, without importing it.

    Raises:
        MissingToolError: with the commands that install it.
    """
    missing = missing_packages()
    if missing:
        raise MissingToolError(
            f"training on several ranks needs {missing[0]}, which is not installed: {INSTALL}"
        )


def missing_packages() -> list[str]:
    """Packages that TorchRec needs and this machine lacks."""
    wanted = ("torchrec", "fbgemm_gpu", "tensordict", "torchmetrics", "pyre_extensions")
    return [name for name in wanted if importlib.util.find_spec(name) is None]


@functools.cache
def load_torchrec() -> Any:
    """The names of TorchRec and FBGEMM that are used here, in one namespace.

    Importing them takes 3 s and fills the log with notes to TorchRec's own developers. It is
    done once, though every step asks for a name.

    Raises:
        MissingToolError: one of them is not installed, or not for this torch.
    """
    require_torchrec()
    for name in ("torchrec", "fbgemm_gpu"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # a note about tracing at the first lookup, from a library called by a library
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    for text in ("ShardedTensor", "StorageReservation", "broadcast_buffers"):
        warnings.filterwarnings("ignore", message=f".*{text}.*", category=FutureWarning)
    # FBGEMM's dense lookup has no autograd kernel of its own name; its gradient is tested here
    warnings.filterwarnings("ignore", message=".*autograd kernel was not registered.*")
    logging.getLogger().addFilter(_no_sharding_spec)
    api = SimpleNamespace()
    try:
        for module, names in _NAMES.items():
            loaded = importlib.import_module(module)
            for name in names.split():
                setattr(api, name, getattr(loaded, name))
    except (ImportError, AttributeError, OSError) as error:
        raise MissingToolError(
            f"TorchRec cannot be loaded ({' '.join(str(error).split())}): {INSTALL}"
        ) from error
    # the loss is divided by the number of ranks before backward, so gradients must not be
    api.set_gradient_division(False)
    return api


def _no_sharding_spec(record: logging.LogRecord) -> bool:
    """Not what TorchRec says on the root logger of every replicated table: it needs no spec."""
    return not str(record.msg).startswith("Sharding spec not found")


@dataclass(frozen=True)
class Shard:
    """Part of a table that one rank holds: ``rows`` x ``columns`` from a first row and column."""

    table: int
    kind: str
    """'table_wise', 'row_wise', 'column_wise' or 'replicated'."""
    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int


def require_possible(parameters: Parameters, ranks: int) -> None:
    """Refuse what does not exist on several ranks, before anything is started.

    Raises:
        InputError: naming the parameter, its value, and what is possible.
    """
    training = parameters.training
    if training.batch_size % ranks:
        raise InputError(
            f"training.batch_size is {training.batch_size}, but there are {ranks} ranks: the "
            f"global batch is cut into equal slices, so choose a multiple of {ranks}"
        )
    if not OPTIMIZERS[training.optimizer].fbgemm:
        able = [name for name, kind in OPTIMIZERS.items() if kind.fbgemm]
        raise InputError(
            f"training.optimizer is {training.optimizer!r}, but FBGEMM, which updates the tables "
            f"on several ranks, has it on no CPU: choose {', '.join(able[:-1])} or {able[-1]}"
        )
    if parameters.model.embedding_precision != "fp32":
        raise InputError(
            f"model.embedding_precision is {parameters.model.embedding_precision!r}, but on "
            "several ranks it can be 'fp32' only: FBGEMM, which holds the tables there, does not "
            "round by random numbers that a resumed run repeats"
        )
    if training.embeddings_on_gpu_bytes is not None:
        raise InputError(
            f"training.embeddings_on_gpu_bytes is {training.embeddings_on_gpu_bytes}, but on "
            "several ranks it can be nothing only: TorchRec keeps rows in host memory beside a GPU "
            "by FBGEMM's unified memory, which needs a CUDA GPU and was not tried here; `dlrm "
            "capacity` forecasts what each rank and its host would keep"
        )
    require_shape(parameters)


def require_shape(parameters: Parameters) -> None:
    """Refuse tables that cannot be divided as asked.

    Raises:
        InputError: as :func:`require_possible`.
    """
    model, training = parameters.model, parameters.training
    if model.embedding_dim % FBGEMM_LANES:
        raise InputError(
            f"model.embedding_dim is {model.embedding_dim}, but FBGEMM, which TorchRec uses, "
            f"works on multiples of {FBGEMM_LANES} only"
        )
    if training.sharding == "column_wise" and OPTIMIZERS[training.optimizer].per_row:
        why = "its one sum a row needs the whole row's gradient on one rank; choose another of both"
        raise clash("training", training, "sharding", "optimizer", why)
    if training.sharding == "column_wise" and model.embedding_dim < 2 * FBGEMM_LANES:
        raise InputError(
            f"training.sharding is 'column_wise', but model.embedding_dim is "
            f"{model.embedding_dim}: a slice has at least {FBGEMM_LANES} columns"
        )


def with_whole_batches(parameters: Parameters) -> tuple[Parameters, list[str]]:
    """The parameters of ranks, which have equal slices of every batch, and a notice of the change.

    Raises:
        InputError: no whole batch is left of generated data.
    """
    if parameters.data.drop_last:
        return parameters, []
    notice = (
        "data.drop_last: false has no effect on several ranks: they share whole batches equally"
    )
    return replace(parameters, data=replace(parameters.data, drop_last=True)), [notice]


def kinds_of(parameters: Parameters) -> list[tuple[str, ...]]:
    """The kinds that the planner may choose from, for each table."""
    model, training = parameters.model, parameters.training
    free: tuple[str, ...] = (training.sharding,)
    if training.sharding == "auto":
        free = ("table_wise", "row_wise", "replicated")
        cut = model.embedding_dim >= 2 * FBGEMM_LANES
        if cut and not OPTIMIZERS[training.optimizer].per_row:
            free = (*free, "column_wise")
    small = training.replicated_bytes
    return [
        ("replicated",) if FLOAT_BYTES * rows * model.embedding_dim <= small else free
        for rows in model.table_rows
    ]


def column_parts(dim: int, ranks: int) -> int:
    """Slices of a column-wise table: the most, up to one a rank, that are equal and whole lanes."""
    return max(n for n in range(1, ranks + 1) if dim % (n * FBGEMM_LANES) == 0)


def make_collection(parameters: Parameters) -> Any:
    """TorchRec's collection of all tables, without memory; table t's feature is ``ft``."""
    api, model = load_torchrec(), parameters.model
    return api.EmbeddingBagCollection(
        tables=[
            api.EmbeddingBagConfig(
                name=f"t{t}",
                embedding_dim=model.embedding_dim,
                num_embeddings=rows,
                feature_names=[f"f{t}"],
            )
            for t, rows in enumerate(model.table_rows)
        ],
        device=torch.device("meta"),
    )


def make_sharder(parameters: Parameters) -> Any:
    """TorchRec's sharder with our optimiser inside its kernels."""
    api, training = load_torchrec(), parameters.training

    class Sharder(api.EmbeddingBagCollectionSharder):  # type: ignore[name-defined]
        """Row-wise on CPUs too: gloo has had the collectives that it needs since torch 2.6."""

        def sharding_types(self, compute_device_type: str) -> list[str]:
            return list(_THEIR_NAMES.values())

        def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
            return ["dense" if sharding_type == "data_parallel" else "fused"]

    return Sharder(
        fused_params={
            "optimizer": getattr(api.EmbOptimType, OPTIMIZERS[training.optimizer].fbgemm),
            "learning_rate": training.learning_rate,
            "eps": EPSILON,
            # a wrong index is refused, never replaced by row 0
            "bounds_check_mode": api.BoundsCheckMode.FATAL,
        }
    )


def make_plan(parameters: Parameters, world: World, collection: Any, sharder: Any) -> Any:
    """TorchRec's plan of the tables; every rank comes to the same one.

    Raises:
        InputError: the tables do not fit in the ranks' memory.
    """
    api, model = load_torchrec(), parameters.model
    memory = available_memory(world.device)
    # every rank must count with the same memory to come to the same plan
    share = memory // world.local_size if memory is not None else 1 << 62
    bytes_a_rank = min(gathered(world, share))
    on_gpu = world.device.type == "cuda"
    topology = api.Topology(
        world_size=world.size,
        local_world_size=world.local_size,
        compute_device=world.device.type,
        **{"hbm_cap" if on_gpu else "ddr_cap": bytes_a_rank},
    )
    parts = column_parts(model.embedding_dim, world.size)
    constraints = {
        f"t{t}": api.ParameterConstraints(
            sharding_types=[_THEIR_NAMES[kind] for kind in kinds],
            pooling_factors=[mean_bag_size(parameters, t)],
            min_partition=model.embedding_dim // parts,
        )
        for t, kinds in enumerate(kinds_of(parameters))
    }
    planner = api.EmbeddingShardingPlanner(
        topology=topology,
        batch_size=max(1, parameters.training.batch_size // world.size),
        constraints=constraints,
        storage_reservation=api.FixedPercentageStorageReservation(percentage=0.0),
    )
    try:
        plan = planner.plan(collection, [sharder])
    except api.PlannerError as error:
        size = FLOAT_BYTES * sum(model.table_rows) * model.embedding_dim
        raise InputError(
            f"TorchRec's planner finds no place for {format_bytes(size)} of tables on "
            f"{world.size} ranks of {format_bytes(bytes_a_rank)} each "
            f"(training.sharding {parameters.training.sharding}): "
            f"{str(error).strip().splitlines()[0]}"
        ) from None
    of_tables = plan.get_plan_for_module("")
    if OPTIMIZERS[parameters.training.optimizer].per_row:
        for shard in shards_of(of_tables, model.table_rows, model.embedding_dim, world):
            if shard.rows * shard.columns > FBGEMM_ROWWISE_ELEMENTS:
                raise InputError(
                    f"model.table_rows[{shard.table}] has {shard.rows:,} rows x {shard.columns} "
                    f"on rank {shard.rank}, but FBGEMM's row-wise Adagrad is right up to "
                    f"{FBGEMM_ROWWISE_ELEMENTS:,} numbers only: choose training.sharding: row_wise"
                )
    return of_tables


def shards_of(plan: Any, table_rows: Iterable[int], dim: int, world: World) -> list[Shard]:
    """Every rank's shards, by table."""
    shards = []
    for t, rows in enumerate(table_rows):
        of_table = plan[f"t{t}"]
        kind = OUR_NAMES[of_table.sharding_type]
        if kind == "replicated":
            shards += [Shard(t, kind, rank, 0, rows, 0, dim) for rank in range(world.size)]
            continue
        for piece in of_table.sharding_spec.shards:
            (first_row, first_column), (height, width) = piece.shard_offsets, piece.shard_sizes
            rank = int(piece.placement.rank())
            shards.append(Shard(t, kind, rank, first_row, height, first_column, width))
    return shards


def describe(shards: list[Shard], processes: Sequence[str]) -> list[str]:
    """A line a rank, whose process is named: what it holds."""
    lines = []
    for rank, process in enumerate(processes):
        of_rank = [shard for shard in shards if shard.rank == rank]
        size = sum(FLOAT_BYTES * shard.rows * shard.columns for shard in of_rank)
        tables = "; ".join(_named(of_rank)) or "no table"
        lines.append(f"rank {rank} ({process}) holds {format_bytes(size)}: {tables}")
    return lines


def _named(shards: list[Shard]) -> Iterator[str]:
    """Tables of which the same part is held, together: 'tables 0-7, 9: rows 0-49,999'."""
    alike: dict[str, list[int]] = {}
    for shard in shards:
        alike.setdefault(_part(shard), []).append(shard.table)
    for held, tables in alike.items():
        # consecutive numbers have the same distance from their places
        runs = [
            [t for _, t in run]
            for _, run in itertools.groupby(enumerate(tables), lambda pair: pair[1] - pair[0])
        ]
        numbers = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
        yield f"{'table' if len(tables) == 1 else 'tables'} {numbers}{held}"


def _part(shard: Shard) -> str:
    if shard.kind == "row_wise":
        return f": rows {shard.first_row:,}-{shard.first_row + shard.rows - 1:,}"
    if shard.kind == "column_wise":
        return f": columns {shard.first_column}-{shard.first_column + shard.columns - 1}"
    return " (replicated)" if shard.kind == "replicated" else ""
