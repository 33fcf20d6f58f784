"""A training small enough to be repeated, and all that it has learned."""

from pathlib import Path

import numpy as np
import torch

from dlrm_core.config import parameters_from_sections
from dlrm_core.run.checkpoint import Checkpoint, read_checkpoint
from dlrm_core.run.resume import optimizer_state, weights_of
from dlrm_core.train import Trainer

SMALL = {
    "model": {
        "bottom_mlp": "5-8-4",
        "top_mlp": "8-1",
        "embedding_dim": 4,
        "table_rows": [50, 3, 200],
        "loss": "bce",
    },
    "data": {"indices_per_lookup": 4, "round_targets": True},
    "training": {"batch_size": 16, "batches": 12, "log_every": 4, "threads": 1, "device": "cpu"},
}

THREE_TABLES = {"bottom_mlp": "16-32-8", "top_mlp": "32-16-1", "embedding_dim": 8}
THREE_TABLES |= {"table_rows": [1000, 50, 3]}


def sections_with(base, model=None, data=None, **training):
    """These sections of parameters with other leaves."""
    changes = {"model": model or {}, "data": data or {}, "training": training}
    return base | {name: base.get(name, {}) | leaves for name, leaves in changes.items()}


def parameters_with(base, model=None, data=None, **training):
    return parameters_from_sections(sections_with(base, model, data, **training))


def parameters(data=None, model=None, **training):
    return parameters_with(SMALL, model, data, **training)


def learned(trainer):
    """Everything that training has made, copied."""
    tensors, counts = optimizer_state(trainer.step)
    named = weights_of(trainer.model) | tensors
    return {name: tensor.clone() for name, tensor in named.items()}, counts


def trained(chosen, place=None, checkpoint=None):
    trainer = Trainer(chosen, checkpoint, place)
    try:
        result = trainer.train()
        return result, *learned(trainer)
    finally:
        trainer.close()


def same_bits(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.int32), other[name].view(torch.int32)) for name in one
    )


def whole_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint, every byte of which is what was written.

    Raises:
        InputError: naming the file and tensor that is corrupted.
    """
    checkpoint = read_checkpoint(folder)
    for tensors in checkpoint.tensors.values():
        for tensor in tensors.values():
            tensor.check()
    return checkpoint


def stored(folder: Path, group: str = "*") -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, or of a group of them, as numpy reads them."""
    return {
        file.stem: torch.from_numpy(np.load(file, allow_pickle=False))
        for file in sorted(folder.glob(f"{group}/*.npy"))
    }
