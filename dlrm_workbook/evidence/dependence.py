"""What the time of each part of a step depends on: the leaves of the parameters, part by part.

A change of parameters is a flat mapping ``section.leaf`` to value. It is applied to validated
parameters and validated again, so a change that cannot work is refused before anything runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_core.config import SECTIONS, Parameters, parameters_from_sections
from dlrm_core.interactions import INTERACTIONS
from dlrm_core.losses import LOSSES
from dlrm_workbook.ground.tables import rows_of

Change = Mapping[str, Any]
"""Dotted leaf to value."""

_LEAVES = {row["leaf"]: row["decides"] for row in rows_of(__file__, "leaves.csv")}


def _deciding(what: str) -> tuple[str, ...]:
    return tuple(leaf for leaf, decides in _LEAVES.items() if what in decides.split(", "))


DENSE_ENGINE = [leaf.removeprefix("training.") for leaf in _deciding("dense engine")]
"""Leaves of ``training`` that decide how the dense parts are computed."""

EMBEDDING_ENGINE = [leaf.removeprefix("training.") for leaf in _deciding("embedding engine")]
"""Leaves of ``training`` that decide how tables are looked up and updated."""

NEUTRAL = frozenset(_deciding("nothing"))
"""Leaves that do not change the time of an iteration."""

COMPUTE = ("bottom_mlp", "embedding", "interaction", "top_mlp", "loss", "optimizer")

_KINDS: tuple[Any, ...] = (*INTERACTIONS.values(), *LOSSES.values())

ACCOUNTED = {f"model.{leaf}" for kind in _KINDS for leaf in kind.options} | set(_LEAVES) - NEUTRAL
"""Leaves that :func:`signature` looks at; any other is taken to affect what its section could."""


def changed_parameters(parameters: Parameters, change: Change) -> tuple[Parameters, list[str]]:
    """The parameters after a change, and what had to change along with it. An InputError says that
    a leaf is unknown, or that the changed parameters cannot work.

    The bottom MLP ends in the embedding width, a list of rows has an entry a table, and kinds have
    options of their own, so ``model.embedding_dim``, ``model.tables`` and ``model.interaction``
    take those along.
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
    before = parameters.model.interaction_kind
    own = [f"model.{leaf}" for leaf in before.left_out()]
    if change.get("model.interaction", before.kind) != before.kind and own:
        model |= {name.removeprefix("model."): None for name in own if name not in change}
        notices.append(f"{' and '.join(own)} are left out: only {before.kind} has them")
    counts_input = model["mlp_sizes"] == "facebook"
    if "model.bottom_mlp" in change and "model.dense_features" not in change and counts_input:
        model["dense_features"] = None
    if "model.tables" in change and "model.table_rows" not in change:
        rows = model["table_rows"]
        if len(set(rows)) == 1:
            model["table_rows"] = rows[:1]
        elif change["model.tables"] != len(rows):
            raise InputError(
                f"model.tables is {change['model.tables']!r}, but model.table_rows lists "
                f"{len(rows)} different tables; change model.table_rows with it"
            )
    if "model.table_rows" in change and "model.tables" not in change:
        given = change["model.table_rows"]
        if isinstance(given, list | tuple) and len(given) > 1:
            model["tables"] = None
    changed = parameters_from_sections(sections)
    return dataclasses.replace(changed, source=parameters.source), notices


def changed_leaves(base: Parameters, changed: Parameters) -> list[str]:
    return [
        f"{section}.{field.name}"
        for section in SECTIONS
        for field in dataclasses.fields(getattr(base, section))
        if getattr(getattr(base, section), field.name)
        != getattr(getattr(changed, section), field.name)
    ]


def affected_components(base: Parameters, changed: Parameters) -> set[str]:
    """The components whose time may differ between two sets of parameters."""
    affected = {
        component
        for component in (*COMPUTE, "data")
        if signature(base, component) != signature(changed, component)
    }
    for leaf in changed_leaves(base, changed):
        section = leaf.partition(".")[0]
        if leaf in NEUTRAL or leaf in ACCOUNTED or section == "profiling":
            continue
        affected |= {"data", "embedding"} if section == "data" else set(COMPUTE)
    return affected


def affected_phases(base: Parameters, changed: Parameters, component: str) -> set[str] | None:
    """The phases of an affected component whose time may differ; None for all.

    Which optimiser updates the weights decides about ``update`` alone, unless the
    update is part of the backward pass.
    """
    fused = base.training.embedding_backend != "torch"
    if component not in ("bottom_mlp", "interaction", "top_mlp", "embedding") or (
        component == "embedding" and fused
    ):
        return None
    leaves = ("optimizer",) if component == "embedding" else ("optimizer", "fused_optimizer")
    same: dict[str, Any] = {leaf: getattr(base.training, leaf) for leaf in leaves}
    without = changed.with_training(**same)
    update_only = signature(base, component) == signature(without, component)
    known = all(leaf in ACCOUNTED or leaf in NEUTRAL for leaf in changed_leaves(base, changed))
    return {"update"} if update_only and known else None


def signature(parameters: Parameters, component: str) -> tuple[Any, ...]:
    """Everything that the time of a component depends on, as a value that can be compared."""
    model, data, training = parameters.model, parameters.data, parameters.training
    dense = _leaves(training, DENSE_ENGINE)
    update = _leaves(training, ("fused_optimizer", "optimizer"))
    bags = (model.table_rows, data.indices_per_lookup, data.fixed_pooling, data.multi_hot_sizes)
    law = "facebook" if data.generator.startswith("facebook") else data.generator
    exponent = data.zipf_exponent if law in ("zipf", "teacher") else None
    # what decides how often a row comes up
    skew = data.path if law == "dataset" else exponent
    if component == "bottom_mlp":
        return (*dense, *update, model.bottom_widths)
    if component == "interaction":
        kind = model.interaction_kind
        own = update if kind.weights() else ()
        return (*dense, kind.features, kind.dim, *kind.key, *own)
    if component == "top_mlp":
        return (*dense, *update, model.top_widths, model.loss_threshold)
    if component == "loss":
        return (*dense, model.loss, *_leaves(model, tuple(LOSSES[model.loss].options)))
    if component == "embedding":
        return (*_leaves(training, EMBEDDING_ENGINE), *bags, model.embedding_dim, law, skew)
    if component == "optimizer":
        parts = ("bottom_mlp", "interaction", "top_mlp", "embedding")
        return tuple(signature(parameters, part) for part in parts)
    if component == "data":
        # numpy's generators know no threads, torch's do
        threads = None if law == "facebook" else training.threads
        ahead = data.prefetch_batches if data.loader == "prefetch" else None
        made = (data.generator, exponent, data.round_targets, data.loader, ahead, data.place)
        files = (data.path, data.format, data.order, data.teacher_rows) if data.one_hot else ()
        return (training.batch_size, model.dense_features, *bags, threads, *made, *files)
    raise ValueError(f"no such component: {component}")


def _leaves(section: Any, names: Iterable[str]) -> tuple[Any, ...]:
    return tuple(getattr(section, name) for name in names)
