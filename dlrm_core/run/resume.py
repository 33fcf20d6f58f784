"""Going on from a checkpoint: what must be as it was, what may change, and putting it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dlrm_core.base.errors import InputError
from dlrm_core.base.settings import shown
from dlrm_core.config import DataConfig, ModelConfig, Parameters, TrainingConfig
from dlrm_core.data.loader import Generator, plain_state, state_from_plain
from dlrm_core.dense import DENSE_CHOICE
from dlrm_core.interactions import INTERACTIONS
from dlrm_core.model import DLRM
from dlrm_core.run.checkpoint import (
    MANIFEST,
    OPTIMIZER,
    WEIGHTS,
    Checkpoint,
    find_checkpoint,
    newest_checkpoint,
    read_checkpoint,
)
from dlrm_core.step import Step


def weights_of(model: DLRM) -> dict[str, torch.Tensor]:
    """Every weight by its name, none of them copied."""
    return {name: weight.detach() for name, weight in model.named_parameters()}


def optimizer_state(step: Step) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """State of all updates by name, none of it copied, and how often each weight was updated.

    A weight that was never updated, or whose updates nobody counts, may have neither.
    """
    tensors, counts, names = {}, {}, _names(step)
    for tables, update in _table_updates(step):
        # Adagrads' sums of a back end that keeps them itself
        for weight, state in zip(tables.weights, getattr(update, "states", ()), strict=False):
            if state.numel():
                tensors[f"{names[weight]}.sum"] = _flat(state)
    for name, weight, optimizer in _torch_weights(step):
        for key, value in optimizer.state.get(weight, {}).items():
            if key == "step":
                counts[name] = float(value)
            elif isinstance(value, torch.Tensor):
                tensors[f"{name}.{key}"] = _flat(value)
    return tensors, counts


def make_room(step: Step, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The tensors of this step into which a checkpoint's state is to be copied, by name.

    What Adam would make at its first update is made now. Its number of updates is that of the
    checkpoint, torch's Adagrad's too, which may come from a back end that does not count. Raises
    InputError if the checkpoint has another number of updates of a weight, or none, for Adam.
    """
    counts = checkpoint.state["counts"]
    updates = checkpoint.step - checkpoint.state["skipped_steps"]
    for name, weight, optimizer in _torch_weights(step):
        if isinstance(optimizer, torch.optim.Adam | torch.optim.SparseAdam):
            if not updates and name not in counts:
                continue
            if counts.get(name) != updates:
                raise InputError(
                    f"{checkpoint.folder / MANIFEST}: state.counts has {shown(counts.get(name))} "
                    f"updates of {name}, expected {updates}: {checkpoint.step} steps less "
                    f"{checkpoint.state['skipped_steps']} skipped"
                )
            for key in ("exp_avg", "exp_avg_sq"):
                moment = torch.zeros_like(weight, memory_format=torch.preserve_format)
                optimizer.state[weight][key] = moment
        elif "step" not in optimizer.state.get(weight, {}):
            continue
        device = weight.device if optimizer.param_groups[0].get("fused") else "cpu"
        count: Any = torch.tensor(updates, dtype=torch.float32, device=device)
        if isinstance(optimizer, torch.optim.SparseAdam):
            count = updates
        optimizer.state[weight]["step"] = count
    return optimizer_state(step)[0]


def _torch_weights(step: Step) -> Iterator[tuple[str, torch.nn.Parameter, torch.optim.Optimizer]]:
    """Name and weight of everything that an optimiser of torch updates."""
    names = _names(step)
    for optimizer in (*step.dense_optimizers, *(side for _, side in _table_updates(step))):
        if isinstance(optimizer, torch.optim.Optimizer):
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    yield names[weight], weight, optimizer


def _names(step: Step) -> dict[torch.nn.Parameter, str]:
    return {weight: name for name, weight in step.model.named_parameters()}


def _table_updates(step: Step) -> list[tuple[Any, Any]]:
    """Tables and what updates them: once, or once a side where tables lie in two places."""
    update = step.embedding_optimizer
    sides = [(tables, of_side) for _, tables, of_side in getattr(update, "sides", ())]
    return sides or [(step.model.embeddings, update)]


def _flat(state: torch.Tensor) -> torch.Tensor:
    """(R, 1) as (R,): back ends differ in how they keep one number a row."""
    return state[:, 0] if state.dim() == 2 and state.shape[1] == 1 else state


_SHAPE: tuple[str, ...] = ("table_rows", "embedding_dim", "embedding_precision", "interaction")
_SHAPE += tuple(leaf for kind in INTERACTIONS.values() for leaf in kind.options)
_SHAPE += ("bottom_widths", "top_widths")
"""What a model's weights mean: as it was, or the checkpoint is of another model."""

_LOSS = ("loss", "loss_weights", "loss_threshold")
_SAME_TRAINING = ("batch_size", "seed", "optimizer")
_FREE_DATA = ("loader", "prefetch_batches")
_SAME_DATA = tuple(f.name for f in dataclasses.fields(DataConfig) if f.name not in _FREE_DATA)
"""What a run that goes on must have in common with the one before, beside its model."""

_FREE_TRAINING: tuple[str, ...] = ("batches", "epochs", "max_steps", "log_every", "device")
_FREE_TRAINING += ("eval_every", "evals_per_epoch", "eval_batches", "auc_target")
_FREE_TRAINING += ("checkpoint_every", "checkpoint_folder", "keep_checkpoints", "resume")
_FREE_TRAINING += ("sharding", "replicated_bytes", "rank_timeout_s", "lowest_precision")
"""May differ without a word: they do not change what an iteration computes."""


def checkpoint_place(config: TrainingConfig, output: Path | None) -> Path | None:
    """Where a run's checkpoints go; None if it writes none.

    Raises InputError if they are asked for, but there is no folder.
    """
    if config.checkpoint_folder or config.checkpoint_every is None:
        return Path(config.checkpoint_folder) if config.checkpoint_folder else None
    if output is None:
        raise InputError(
            f"training.checkpoint_every is {config.checkpoint_every}, but there is no folder for "
            "checkpoints: give training.checkpoint_folder (or dlrm train --output)"
        )
    return output / "checkpoint"


def checkpoint_to_resume(parameters: Parameters, place: Path | None) -> Checkpoint | None:
    """The checkpoint that ``training.resume`` means, held against the parameters; None: none.

    Raises InputError if it is no checkpoint, corrupted, or a parameter differs that must not.
    """
    given = parameters.training.resume
    if not given or nothing_to_resume(parameters.training, place):
        return None
    checkpoint = read_checkpoint(find_checkpoint(given, place))
    require_same_model(parameters.model, checkpoint)
    _require_same_run(parameters, checkpoint)
    return checkpoint


def nothing_to_resume(config: TrainingConfig, place: Path | None) -> list[str]:
    """That 'latest' finds no checkpoint yet, as a notice; [] if there is one or another is named.

    A script that always passes ``--resume latest`` must be able to start.
    """
    if config.resume != "latest" or place is None or newest_checkpoint(place):
        return []
    return [f"no checkpoint in {place} yet: starting from the beginning"]


def require_same_model(model: ModelConfig, checkpoint: Checkpoint) -> None:
    """Refuse weights of another model in an InputError with the parameter and both values."""
    _require_same(checkpoint, "model", checkpoint.parameters.model, model, _SHAPE)


def _require_same_run(parameters: Parameters, checkpoint: Checkpoint) -> None:
    """Refuse to go on with other data, another batch or another optimiser, likewise."""
    was = checkpoint.parameters
    # the replay is the loop's stream, bit for bit
    data, data_now = (
        dataclasses.replace(of.data, generator=of.data.generator.removesuffix("_loop"))
        for of in (was, parameters)
    )
    _require_same(checkpoint, "model", was.model, parameters.model, _LOSS)
    _require_same(checkpoint, "training", was.training, parameters.training, _SAME_TRAINING)
    _require_same(checkpoint, "data", data, data_now, _SAME_DATA)


def _require_same(
    checkpoint: Checkpoint, section: str, was: Any, now: Any, names: tuple[str, ...]
) -> None:
    for name in names:
        before, after = getattr(was, name), getattr(now, name)
        if before == after:
            continue
        name = name.replace("widths", "mlp")
        if name == "table_rows" and len(before) != len(after):
            name, before, after = "tables", len(before), len(after)
        elif name == "table_rows":
            t = next(t for t, rows in enumerate(before) if rows != after[t])
            name, before, after = f"table_rows[{t}]", before[t], after[t]
        raise InputError(
            f"{checkpoint.folder} was written with {section}.{name} = {_shown(before)}, but this "
            f"run has {_shown(after)}; to go on they must be the same"
        )


def _shown(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else repr(value)


def changed_settings(parameters: Parameters, checkpoint: Checkpoint) -> list[str]:
    """Settings of the training that change what the next iterations compute, as notices."""
    was, now = checkpoint.parameters.training, parameters.training
    before, after = dataclasses.asdict(was), dataclasses.asdict(now)
    differ = ", ".join(
        f"{leaf} {_shown(before[leaf])} → {_shown(after[leaf])}"
        for leaf in before
        if before[leaf] != after[leaf] and leaf not in _FREE_TRAINING
    )
    said = f"resumed from step {checkpoint.step} with other settings: {differ}"
    return [said] if differ else []


CHOSEN = (("embedding_backend",), DENSE_CHOICE)
"""Leaves of ``training`` that may be ``auto``; those of a group are chosen together."""


def with_choices_of(checkpoint: Checkpoint, parameters: Parameters) -> Parameters:
    """The parameters with what the checkpoint's run chose in place of ``auto``: another choice
    would round otherwise. What the parameters fix otherwise than that run is theirs."""
    before, now = checkpoint.parameters.training, parameters.training
    taken: dict[str, Any] = {}
    for leaves in CHOSEN:
        was = {leaf: getattr(before, leaf) for leaf in leaves}
        if "auto" not in was.values() and all(
            getattr(now, leaf) in ("auto", value) for leaf, value in was.items()
        ):
            taken |= was
    return parameters.with_training(**taken)


def restore_weights(checkpoint: Checkpoint, model: DLRM) -> None:
    """Fill a model's weights in place, or refuse a file in an InputError."""
    checkpoint.read_into(WEIGHTS, weights_of(model))


def restore_step(checkpoint: Checkpoint, step: Step) -> None:
    """Fill the optimisers' state in place, whichever back end has it, or refuse it likewise."""
    checkpoint.read_into(OPTIMIZER, make_room(step, checkpoint))
    for _, update in _table_updates(step):
        if hasattr(update, "updates"):
            # what the rounding of the next update depends on
            update.updates = checkpoint.step - checkpoint.state["skipped_steps"]
    step.dense.precision.skipped = int(checkpoint.state["skipped_steps"])


def restore_position(checkpoint: Checkpoint, generator: Generator) -> None:
    """Bring a generator to the batch after the last one trained on, or refuse in an InputError."""
    path = checkpoint.folder / MANIFEST
    state = state_from_plain(path, checkpoint.state["position"], generator.state())
    # a data set's stream is where its batches were taken to
    if (batches := state.get("batches", checkpoint.step)) != checkpoint.step:
        raise InputError(
            f"{path}: state.position has {batches} batches, but step is {checkpoint.step}"
        )
    try:
        generator.restore(state)
    except (InputError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{path}: state.position does not fit this run's generator: {error}"
        ) from None


def state_of(step: Step, generator: Generator) -> Mapping[str, Any]:
    """All state of a run that is no tensor, as plain numbers."""
    return {
        "position": plain_state(generator.state()),
        "counts": optimizer_state(step)[1],
        "skipped_steps": step.dense.precision.skipped,
    }
