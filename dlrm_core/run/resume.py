"""Going on from a checkpoint: what must be as it was, what may change, and putting it back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dlrm_core.base.errors import InputError
from dlrm_core.base.settings import shown
from dlrm_core.config import (
    DataConfig,
    ModelConfig,
    Parameters,
    TrainingConfig,
    parameters_from_sections,
)
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
    holds_checkpoint,
    read_checkpoint,
)
from dlrm_core.step import Step


def weights_of(model: DLRM) -> dict[str, torch.Tensor]:
    """Every weight by its name, none of them copied."""
    return {name: weight.detach() for name, weight in model.named_parameters()}


def optimizer_state(step: Step) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """State of all updates.

    Returns:
        tensors by name, none of them copied; and for each weight that counts its updates,
        their number. A weight that was never updated may have neither.
    """
    tensors: dict[str, torch.Tensor] = {}
    counts: dict[str, float] = {}
    for name, weight, optimizer in _torch_weights(step):
        for key, value in optimizer.state.get(weight, {}).items():
            if key == "step":
                counts[name] = float(value)
            elif isinstance(value, torch.Tensor):
                tensors[f"{name}.{key}"] = _flat(value)
    tensors |= _backend_sums(step)
    return tensors, counts


_MOMENTS = ("exp_avg", "exp_avg_sq")
"""State that torch's Adams make of a weight at its first update."""


def make_room(step: Step, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The tensors of this step into which a checkpoint's state is to be copied, by name.

    State that an optimiser would make at its first update is made now, and its number of updates
    is that of the checkpoint: of torch's Adagrad too, which counts without using it, and whose
    checkpoint may come from a back end that does not count.

    Raises:
        InputError: the checkpoint has another number of updates of a weight, or none, for Adam.
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
            for key in _MOMENTS:
                moment = torch.zeros_like(weight, memory_format=torch.preserve_format)
                optimizer.state[weight][key] = moment
        elif "step" not in optimizer.state.get(weight, {}):
            continue
        optimizer.state[weight]["step"] = _count(optimizer, weight, updates)
    return optimizer_state(step)[0]


def _count(optimizer: torch.optim.Optimizer, weight: torch.Tensor, count: float) -> Any:
    """A number of updates in the form that the optimiser keeps it."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return int(count)
    fused = optimizer.param_groups[0].get("fused")
    return torch.tensor(count, dtype=torch.float32, device=weight.device if fused else "cpu")


def _torch_weights(
    step: Step,
) -> Iterator[tuple[str, torch.nn.Parameter, torch.optim.Optimizer]]:
    """Name and weight of everything that an optimiser of torch updates."""
    names = {weight: name for name, weight in step.model.named_parameters()}
    for optimizer in (*step.dense_optimizers, *_embedding_updates(step)):
        if not isinstance(optimizer, torch.optim.Optimizer):
            continue
        for group in optimizer.param_groups:
            for weight in group["params"]:
                yield names[weight], weight, optimizer


def _backend_sums(step: Step) -> dict[str, torch.Tensor]:
    """Adagrads' sums of a back end that keeps them itself."""
    names = {weight: name for name, weight in step.model.named_parameters()}
    sums: dict[str, torch.Tensor] = {}
    for update in _embedding_updates(step):
        states = getattr(update, "states", None)
        if states is None:
            continue
        tables = step.model.embeddings.weights
        for _, side, of_side in getattr(step.embedding_optimizer, "sides", ()):
            if of_side is update:
                tables = side.weights
        for weight, state in zip(tables, states, strict=True):
            if state.numel():
                sums[f"{names[weight]}.sum"] = _flat(state)
    return sums


def _embedding_updates(step: Step) -> list[Any]:
    """What updates the tables: one, or one a side where tables lie in two places."""
    update = step.embedding_optimizer
    return [of_side for _, _, of_side in getattr(update, "sides", ())] or [update]


def _flat(state: torch.Tensor) -> torch.Tensor:
    """(R, 1) as (R,): back ends differ in how they keep one number a row."""
    return state[:, 0] if state.dim() == 2 and state.shape[1] == 1 else state


_SHAPE = (
    "table_rows",
    "embedding_dim",
    "embedding_precision",
    "interaction",
    *(leaf for kind in INTERACTIONS.values() for leaf in kind.options),
    "bottom_widths",
    "top_widths",
)
"""What a model's weights mean: as it was, or the checkpoint is of another model."""

_SAME = {
    "model": ("loss", "loss_weights", "loss_threshold"),
    "training": ("batch_size", "seed", "optimizer"),
}
"""What a run that goes on must have in common with the one before, beside its data."""

_FREE_DATA = ("loader", "prefetch_batches")
_FREE_TRAINING = (
    "batches",
    "epochs",
    "max_steps",
    "log_every",
    "eval_every",
    "evals_per_epoch",
    "eval_batches",
    "auc_target",
    "checkpoint_every",
    "checkpoint_folder",
    "keep_checkpoints",
    "resume",
    "lowest_precision",
    "sharding",
    "replicated_bytes",
    "interleave_memory",
    "rank_timeout_s",
)
"""May differ without a word: they do not change what an iteration computes."""


def checkpoint_place(config: TrainingConfig, output: Path | None) -> Path | None:
    """Where a run's checkpoints go; None if it writes none.

    Raises:
        InputError: they are asked for, but there is no folder.
    """
    if config.checkpoint_folder:
        return Path(config.checkpoint_folder)
    if config.checkpoint_every is None:
        return None
    if output is None:
        raise InputError(
            f"training.checkpoint_every is {config.checkpoint_every}, but there is no folder for "
            "checkpoints: give training.checkpoint_folder (or dlrm train --output)"
        )
    return output / "checkpoint"


def checkpoint_to_resume(parameters: Parameters, place: Path | None) -> Checkpoint | None:
    """The checkpoint that ``training.resume`` means, held against the parameters.

    None: the run begins anew, since nothing is named or :func:`nothing_to_resume` is so.

    Raises:
        InputError: what is named is no checkpoint, it is corrupted, or a parameter differs
            that must not.
    """
    given = parameters.training.resume
    if not given or nothing_to_resume(parameters.training, place):
        return None
    checkpoint = read_checkpoint(find_checkpoint(given, place))
    require_same_model(parameters.model, checkpoint)
    require_same_run(parameters, checkpoint)
    return checkpoint


def nothing_to_resume(config: TrainingConfig, place: Path | None) -> list[str]:
    """That 'latest' finds no checkpoint yet, as a notice; [] if there is one or another is named.

    A script that always passes ``--resume latest`` must be able to start, and to start again
    where it was killed before its first checkpoint. A checkpoint named by its folder must exist.
    """
    if config.resume != "latest" or place is None or holds_checkpoint(place):
        return []
    return [f"no checkpoint in {place} yet: starting from the beginning"]


def require_same_model(model: ModelConfig, checkpoint: Checkpoint) -> None:
    """Refuse weights of another model.

    Raises:
        InputError: naming the parameter and both values.
    """
    was = parameters_from_sections(checkpoint.parameters).model
    for name in _SHAPE:
        before, now = getattr(was, name), getattr(model, name)
        if before == now:
            continue
        if name == "table_rows":
            if len(before) != len(now):
                name, before, now = "tables", len(before), len(now)
            else:
                t = next(
                    i for i, pair in enumerate(zip(before, now, strict=True)) if len({*pair}) > 1
                )
                name, before, now = f"table_rows[{t}]", before[t], now[t]
        _refuse(checkpoint, f"model.{name.replace('widths', 'mlp')}", before, now)


def require_same_run(parameters: Parameters, checkpoint: Checkpoint) -> None:
    """Refuse to go on with other data, another batch or another optimiser.

    Raises:
        InputError: naming the parameter and both values.
    """
    before, now = checkpoint.parameters, parameters.to_sections()
    for section, names in _SAME.items():
        for name in names:
            if before[section].get(name) != now[section][name]:
                _refuse(
                    checkpoint, f"{section}.{name}", before[section].get(name), now[section][name]
                )
    for field in dataclasses.fields(DataConfig):
        name = field.name
        was, wanted = before["data"].get(name, field.default), now["data"][name]
        # the replay is the loop's stream, bit for bit
        if name == "generator":
            was, wanted = was.removesuffix("_loop"), wanted.removesuffix("_loop")
        if name not in _FREE_DATA and was != wanted:
            _refuse(checkpoint, f"data.{name}", before["data"].get(name), now["data"][name])


def _refuse(checkpoint: Checkpoint, name: str, before: Any, now: Any) -> None:
    raise InputError(
        f"{checkpoint.folder} was written with {name} = {_shown(before)}, but this run has "
        f"{_shown(now)}; to go on they must be the same"
    )


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "-".join(map(str, value))
    return repr(value) if isinstance(value, str) else f"{value}"


def changed_settings(parameters: Parameters, checkpoint: Checkpoint) -> list[str]:
    """Settings of the training that change what the next iterations compute, as notices."""
    before, now = checkpoint.parameters["training"], parameters.to_sections()["training"]
    differ = [
        f"{name} {_shown(before[name])} → {_shown(now[name])}"
        for name in now
        if name in before and name not in (*_FREE_TRAINING, "device") and before[name] != now[name]
    ]
    if not differ:
        return []
    return [f"resumed from step {checkpoint.step} with other settings: {', '.join(differ)}"]


CHOSEN = (("embedding_backend",), DENSE_CHOICE)
"""Leaves of ``training`` that may be ``auto``; those of a group are chosen together."""


def with_choices_of(checkpoint: Checkpoint, parameters: Parameters) -> Parameters:
    """The parameters with what the checkpoint's run chose in place of ``auto``.

    Another choice would be as right, but would round otherwise. What the parameters fix
    otherwise than that run is theirs, and so is then what was chosen together with it.
    """
    before, now = checkpoint.parameters["training"], parameters.training
    usual = TrainingConfig()
    taken: dict[str, Any] = {}
    for leaves in CHOSEN:
        was = {leaf: before.get(leaf, getattr(usual, leaf)) for leaf in leaves}
        if "auto" not in was.values() and all(
            getattr(now, leaf) in ("auto", value) for leaf, value in was.items()
        ):
            taken |= was
    return parameters.with_training(**taken)


def restore_weights(checkpoint: Checkpoint, model: DLRM) -> None:
    """Fill a model's weights in place.

    Raises:
        InputError: the file is corrupted or of another model.
    """
    checkpoint.read_into(WEIGHTS, weights_of(model))


def restore_step(checkpoint: Checkpoint, step: Step) -> None:
    """Fill the optimisers' state in place, whichever back end has it.

    Raises:
        InputError: the file is corrupted or of another optimiser.
    """
    checkpoint.read_into(OPTIMIZER, make_room(step, checkpoint))
    for update in _embedding_updates(step):
        if hasattr(update, "updates"):
            # what the rounding of the next update depends on
            update.updates = checkpoint.step - checkpoint.state["skipped_steps"]
    step.dense.precision.skipped = int(checkpoint.state["skipped_steps"])


def restore_position(checkpoint: Checkpoint, generator: Generator) -> None:
    """Bring a generator to the batch after the last one that was trained on.

    Raises:
        InputError: the position is not one of this generator's.
    """
    position = checkpoint.state["position"]
    try:
        state = state_from_plain(position, generator.state())
        # a data set's stream is where its batches were taken to
        if state.get("batches", checkpoint.step) != checkpoint.step:
            raise InputError(f"{state['batches']} batches, but step is {checkpoint.step}")
        generator.restore(state)
    except (InputError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{checkpoint.folder / MANIFEST}: state.position does not fit this run's generator: "
            f"{error}"
        ) from None


def state_of(step: Step, generator: Generator) -> Mapping[str, Any]:
    """All state of a run that is no tensor, as plain numbers."""
    precision = step.dense.precision
    return {
        "position": plain_state(generator.state()),
        "counts": optimizer_state(step)[1],
        "loss_scale": precision.scale,
        "skipped_steps": precision.skipped,
    }
