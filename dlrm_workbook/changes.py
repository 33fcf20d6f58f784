"""Changes of parameters as a person writes them: options, differences of files, steps.

A change is a flat mapping ``section.leaf`` to value. It is applied to validated parameters
and validated again, so a change that cannot work is refused before anything runs.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from dlrm_core.config import SECTIONS, Parameters, parameters_from_sections
from dlrm_core.errors import InputError
from dlrm_core.settings import read_yaml

# A change of parameters: the parameters it leads to, and the parts of a step it touches.

Change = Mapping[str, Any]
"""Dotted leaf to value."""

DENSE_ENGINE = (
    "batch_size",
    "threads",
    "fp32_matmul",
    "precision",
    "loss_scale",
    "micro_batch",
    "dense_backend",
    "compile",
    "tf32",
    "cuda_graphs",
)
"""Leaves of ``training`` that decide how the dense parts are computed."""

EMBEDDING_ENGINE = (
    "batch_size",
    "threads",
    "optimizer",
    "embedding_backend",
    "embedding_update",
    "cuda_graphs",
)

NEUTRAL = frozenset(
    {
        "model.init",
        "training.batches",
        "training.learning_rate",
        "training.seed",
        "training.log_every",
        "training.lowest_precision",
    }
)
"""Leaves that do not change the time of an iteration."""

COMPUTE = ("bottom_mlp", "embedding", "interaction", "top_mlp", "loss", "optimizer")

ACCOUNTED = (
    {f"training.{name}" for name in (*DENSE_ENGINE, *EMBEDDING_ENGINE)}
    | {"training.fused_optimizer", "training.device"}
    | {
        f"model.{name}"
        for name in (
            "mlp_sizes",
            "dense_features",
            "bottom_mlp",
            "top_mlp",
            "embedding_dim",
            "tables",
            "table_rows",
            "interaction",
            "interaction_itself",
            "loss",
            "loss_weights",
            "loss_threshold",
        )
    }
    | {
        f"data.{name}"
        for name in (
            "generator",
            "indices_per_lookup",
            "fixed_pooling",
            "zipf_exponent",
            "round_targets",
            "loader",
            "prefetch_batches",
            "place",
        )
    }
)
"""Leaves that :func:`signature` looks at; any other is taken to touch what its section could."""


def changed_parameters(parameters: Parameters, change: Change) -> tuple[Parameters, list[str]]:
    """The parameters after a change, and what had to change along with it.

    The bottom MLP ends in the embedding width, and a list of rows has an entry a table,
    so ``model.embedding_dim`` and ``model.tables`` take those along.

    Raises:
        InputError: a leaf is unknown, or the changed parameters cannot work.
    """
    if not change:
        raise InputError("the change is empty; expected leaves such as training.batch_size")
    sections = parameters.to_sections()
    notices: list[str] = []
    for name, value in change.items():
        section, dot, leaf = name.partition(".")
        if section not in SECTIONS or not dot:
            raise InputError(
                f"{name!r} is no parameter; expected SECTION.LEAF such as training.batch_size"
            )
        sections[section][leaf] = value
    model = sections["model"]
    if "model.embedding_dim" in change and "model.bottom_mlp" not in change:
        model["bottom_mlp"] = [*model["bottom_mlp"][:-1], change["model.embedding_dim"]]
        notices.append(
            f"model.bottom_mlp ends in {change['model.embedding_dim']} too, "
            "since the interaction needs it"
        )
    counts_input = model["mlp_sizes"] == "facebook"
    if "model.bottom_mlp" in change and "model.dense_features" not in change and counts_input:
        model["dense_features"] = None
    if "model.tables" in change and "model.table_rows" not in change:
        rows = set(model["table_rows"])
        if len(rows) > 1 and change["model.tables"] != len(model["table_rows"]):
            raise InputError(
                f"model.tables is {change['model.tables']!r}, but model.table_rows lists "
                f"{len(model['table_rows'])} different tables; change model.table_rows with it"
            )
        model["table_rows"] = [model["table_rows"][0]] if len(rows) == 1 else model["table_rows"]
    if "model.table_rows" in change and "model.tables" not in change:
        given = change["model.table_rows"]
        if isinstance(given, list | tuple) and len(given) > 1:
            model["tables"] = None
    changed = parameters_from_sections(sections)
    return dataclasses.replace(changed, source=parameters.source), notices


def changed_leaves(base: Parameters, changed: Parameters) -> list[str]:
    """Dotted names of the leaves that differ."""
    return [
        f"{section}.{field.name}"
        for section in SECTIONS
        for field in dataclasses.fields(getattr(base, section))
        if getattr(getattr(base, section), field.name)
        != getattr(getattr(changed, section), field.name)
    ]


def touched_components(base: Parameters, changed: Parameters) -> set[str]:
    """The components whose time may differ between two sets of parameters."""
    touched = {
        component
        for component in (*COMPUTE, "data")
        if signature(base, component) != signature(changed, component)
    }
    for leaf in changed_leaves(base, changed):
        section = leaf.partition(".")[0]
        if leaf in NEUTRAL or leaf in ACCOUNTED or section == "profiling":
            continue
        touched |= {"data", "embedding"} if section == "data" else set(COMPUTE)
    return touched


def touched_phases(base: Parameters, changed: Parameters, component: str) -> set[str] | None:
    """The phases of a touched component whose time may differ; None for all.

    Which optimiser updates the weights decides about ``update`` alone, unless the
    update is part of the backward pass.
    """
    fused = getattr(base.training, "embedding_backend", "torch") != "torch"
    if component not in ("bottom_mlp", "top_mlp", "embedding") or (
        component == "embedding" and fused
    ):
        return None
    names: dict[str, Any] = {"optimizer": base.training.optimizer}
    if component != "embedding":
        names["fused_optimizer"] = base.training.fused_optimizer
    alike = dataclasses.replace(
        changed,
        training=dataclasses.replace(changed.training, **names),
    )
    same = signature(base, component) == signature(alike, component)
    known = all(leaf in ACCOUNTED or leaf in NEUTRAL for leaf in changed_leaves(base, changed))
    return {"update"} if same and known else None


def signature(parameters: Parameters, component: str) -> tuple[Any, ...]:
    """Everything that the time of a component depends on, as a value that can be compared."""
    model, data, training = parameters.model, parameters.data, parameters.training
    dense = _leaves(training, DENSE_ENGINE)
    update = _leaves(training, ("fused_optimizer", "optimizer"))
    bags = (model.table_rows, data.indices_per_lookup, data.fixed_pooling)
    law = "facebook" if data.generator.startswith("facebook") else data.generator
    exponent = data.zipf_exponent if law in ("zipf", "teacher") else None
    # what decides how often a row comes up
    skew = data.path if law == "dataset" else exponent
    if component == "bottom_mlp":
        return (*dense, *update, model.bottom_widths)
    if component == "interaction":
        kind = (model.interaction, model.interaction == "dot" and model.interaction_itself)
        return (*dense, len(model.table_rows), model.embedding_dim, *kind)
    if component == "top_mlp":
        return (*dense, *update, model.top_widths, model.loss_threshold)
    if component == "loss":
        return (*dense, model.loss, model.loss_weights)
    if component == "embedding":
        return (*_leaves(training, EMBEDDING_ENGINE), *bags, model.embedding_dim, law, skew)
    if component == "optimizer":
        parts = ("bottom_mlp", "top_mlp", "embedding")
        return tuple(signature(parameters, part) for part in parts)
    if component == "data":
        # numpy's generators know no threads, torch's do
        threads = None if law == "facebook" else training.threads
        ahead = data.prefetch_batches if data.loader == "prefetch" else None
        made = (data.generator, exponent, data.round_targets, data.loader, ahead, data.place)
        files = (data.path, data.format, data.order, data.teacher_rows) if data.one_hot else ()
        return (training.batch_size, model.dense_features, *bags, threads, *made, *files)
    raise ValueError(f"no such component: {component}")


def _leaves(section: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(getattr(section, name, None) for name in names)


LEAVES = tuple(
    f"{section}.{leaf.name}" for section, kind in SECTIONS.items() for leaf in fields(kind)
)


def flat_change(change: Mapping[str, Any], where: str = "change") -> dict[str, Any]:
    """A change as ``{section.leaf: value}``; nested sections are flattened.

    Raises:
        InputError: a name is no parameter; the message names the nearest one.
    """
    flat: dict[str, Any] = {}
    for name, value in change.items():
        name = str(name).strip()
        if name in SECTIONS and isinstance(value, Mapping):
            flat |= {f"{name}.{leaf}": item for leaf, item in value.items()}
        else:
            flat[name] = value
    for name in flat:
        if name not in LEAVES:
            close = difflib.get_close_matches(name, LEAVES, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else "; expected SECTION.NAME"
            raise InputError(f"{where}: unknown parameter {name}{hint}")
    return flat


def read_change(options: Iterable[str]) -> dict[str, Any]:
    """The change of the command line's options, each ``change...=...``.

    ``change={training.precision: bf16}``, ``change=data.generator=facebook`` and
    ``change.training.batch_size=4096`` all work, and may be repeated.

    Raises:
        InputError: an option cannot be read.
    """
    change: dict[str, Any] = {}
    for option in options:
        name, _, text = option.partition("=")
        leaf = name.strip().partition(".")[2].strip()
        if not leaf and not text.strip().startswith("{") and "=" in text:
            leaf, _, text = (piece.strip() for piece in text.partition("="))
        try:
            value = read_yaml(text)
        except InputError as error:
            raise InputError(f"-p {option}: the value {error}") from None
        if leaf:
            change |= flat_change({leaf: value}, f"-p {option}")
        elif isinstance(value, Mapping):
            change |= flat_change(value, f"-p {option}")
        else:
            raise InputError(
                f"-p {option}: expected parameters with their new values, such as "
                "'change={training.batch_size: 4096}' or change.training.batch_size=4096"
            )
    return change


def apply_change(
    parameters: Parameters, change: Mapping[str, Any], where: str = "change"
) -> Parameters:
    """The parameters with the change made, validated; see :mod:`dlrm_workbook.changes`.

    Raises:
        InputError: naming ``where`` and the field that cannot have its value.
    """
    if not change:
        return parameters
    try:
        changed, _ = changed_parameters(parameters, flat_change(change, where))
    except InputError as error:
        raise InputError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from None
    return changed


def difference(before: Parameters, after: Parameters) -> dict[str, Any]:
    """The change that makes ``before`` into ``after``; titles and profiling do not count."""
    old, new = before.to_sections(), after.to_sections()
    return {
        f"{section}.{leaf}": new[section][leaf]
        for section in SECTIONS
        if section != "profiling"
        for leaf in new[section]
        if new[section][leaf] != old[section][leaf]
    }


def change_text(change: Mapping[str, Any]) -> str:
    """A change in one line: ``batch_size 4096, precision bf16``."""
    return ", ".join(f"{name} = {_short(value)}" for name, value in change.items())


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        if len(value) > 2 and all(item == value[0] for item in value):
            return f"{len(value)} × {value[0]:,}"
        return "-".join(map(str, value))
    return str(value)


def change_steps(parameters: Parameters, change: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The change as cumulative steps, a leaf a step, each of which can run.

    A leaf that needs another one changed with it (``embedding_dim`` and ``bottom_mlp``)
    is one step with that one.

    Raises:
        InputError: the whole change cannot work.
    """
    apply_change(parameters, change)
    steps: list[dict[str, Any]] = []
    done: dict[str, Any] = {}
    for name, value in change.items():
        done = done | {name: value}
        try:
            apply_change(parameters, done)
        except InputError:
            continue
        steps.append(done)
    return steps
