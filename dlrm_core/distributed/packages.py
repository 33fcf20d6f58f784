"""TorchRec and FBGEMM, which only runs on several ranks need, and what is said without them."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from types import SimpleNamespace
from typing import Any

from dlrm_core.errors import MissingToolError

INSTALL = (
    "pip install 'dlrm-workbook[distributed]' (from a checkout: '.[distributed]') and then "
    "pip install --no-deps torchrec==1.8.0 (its package declares FBGEMM's CUDA build)"
)


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
    """Of those that TorchRec needs."""
    wanted = ("torchrec", "fbgemm_gpu", "tensordict", "torchmetrics", "pyre_extensions")
    return [name for name in wanted if importlib.util.find_spec(name) is None]


def load_torchrec() -> Any:
    """The names of TorchRec and FBGEMM that are used here, in one namespace.

    Importing them takes 3 s and fills the log with notes to TorchRec's own developers.

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
    found = SimpleNamespace()
    try:
        for module, names in _NAMES.items():
            loaded = importlib.import_module(module)
            for name in names:
                setattr(found, name, getattr(loaded, name))
    except (ImportError, AttributeError, OSError) as error:
        raise MissingToolError(
            f"TorchRec cannot be loaded ({' '.join(str(error).split())}): {INSTALL}"
        ) from error
    # gradients are those of a loss already divided by the number of ranks
    found.set_gradient_division(False)
    return found


def _no_sharding_spec(record: logging.LogRecord) -> bool:
    """Not what TorchRec says on the root logger of every replicated table: it needs no spec."""
    return not str(record.msg).startswith("Sharding spec not found")


_NAMES = {
    "torchrec": ("EmbeddingBagCollection", "EmbeddingBagConfig", "KeyedJaggedTensor"),
    "torchrec.distributed.comm_ops": ("set_gradient_division",),
    "torchrec.distributed.embeddingbag": ("EmbeddingBagCollectionSharder",),
    "torchrec.distributed.planner": (
        "EmbeddingShardingPlanner",
        "ParameterConstraints",
        "Topology",
    ),
    "torchrec.distributed.planner.storage_reservations": ("FixedPercentageStorageReservation",),
    "torchrec.distributed.planner.types": ("PlannerError",),
    "torchrec.distributed.types": ("ShardingEnv",),
    "fbgemm_gpu.split_embedding_configs": ("EmbOptimType",),
    "fbgemm_gpu.split_table_batched_embeddings_ops_common": ("BoundsCheckMode",),
    "fbgemm_gpu.split_table_batched_embeddings_ops_training": (
        "DenseTableBatchedEmbeddingBagsCodegen",
        "SplitTableBatchedEmbeddingBagsCodegen",
    ),
}
