"""Changes of parameters as a person writes them: options, differences of files, steps.

What a change does to the parameters, and to which parts of a step, is in
:mod:`dlrm_workbook.evidence.dependence`.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

import yaml

from dlrm_core.base.errors import InputError
from dlrm_core.base.settings import (
    LARGEST_INT,
    called,
    describe_type,
    option_text,
    read_yaml,
    shown,
)
from dlrm_core.config import SECTIONS, Parameters, require_effect, unknown_name
from dlrm_workbook.evidence.dependence import Change, changed_parameters

LEAVES = [f"{section}.{leaf.name}" for section, kind in SECTIONS.items() for leaf in fields(kind)]
"""Every parameter by its dotted name."""


def flat_change(change: Mapping[str, Any], where: str = "change") -> dict[str, Any]:
    """A change as ``{section.leaf: value}``; nested sections are flattened. An InputError names
    what is no parameter, and the nearest one."""
    flat: dict[str, Any] = {}
    for name, value in change.items():
        name = name.strip() if isinstance(name, str) else called(name)
        if name in SECTIONS and isinstance(value, Mapping):
            flat |= {f"{name}.{leaf}": item for leaf, item in value.items()}
        else:
            flat[name] = value
    for name in flat:
        if name not in LEAVES:
            raise InputError(f"{where}: {unknown_name(name, LEAVES)}")
    return flat


def read_change(options: Iterable[str]) -> dict[str, Any]:
    """The change of the command line's options, each ``change...=...``.

    ``change={training.precision: bf16}``, ``change=data.generator=facebook`` and
    ``change.training.batch_size=4096`` all work, and may be repeated. An InputError says which
    option cannot be read.
    """
    change: dict[str, Any] = {}
    for option in options:
        name, _, text = option.partition("=")
        where = option_text(option)
        leaf = name.strip().partition(".")[2].strip()
        if not leaf and not text.strip().startswith("{") and "=" in text:
            leaf, _, text = (piece.strip() for piece in text.partition("="))
        try:
            value = read_yaml(text)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        if leaf:
            change |= flat_change({leaf: value}, where)
        elif isinstance(value, Mapping):
            change |= flat_change(value, where)
        else:
            raise InputError(
                f"{where}: expected parameters with their new values, such as "
                "'change={training.batch_size: 4096}' or change.training.batch_size=4096"
            )
    return change


def apply_change(parameters: Parameters, change: Change, where: str = "change") -> Parameters:
    """The parameters with the change made, validated. An InputError names ``where`` and the field
    that cannot have its value."""
    if not change:
        return parameters
    try:
        flat = flat_change(change, where)
        changed, _ = changed_parameters(parameters, flat)
        for name, value in flat.items():
            require_effect(changed, name, value, where)
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


def change_text(change: Change) -> str:
    """A change in one line: ``training.batch_size = 4096, training.precision = bf16``."""
    return ", ".join(f"{name} = {_short(value)}" for name, value in change.items())


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple) and all(type(item) in (int, float) for item in value):
        if len(value) > 2 and all(item == value[0] for item in value):
            return (
                f"{len(value)} × {shown(value[0]) if value[0] > LARGEST_INT else f'{value[0]:,}'}"
            )
        return "-".join(map(shown, value))
    return called(value)


def change_steps(parameters: Parameters, change: Change) -> list[dict[str, Any]]:
    """The change as cumulative steps, a leaf a step, each of which can run.

    A leaf that needs another one changed with it (``embedding_dim`` and ``bottom_mlp``) is one step
    with that one. An InputError says why the whole change cannot work.
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


def parameters_table() -> str:
    """A Markdown table a section, from the fields' own metadata."""
    lines = []
    for section, kind in SECTIONS.items():
        hints = typing.get_type_hints(kind)
        lines += [f"## `{section}`", "", "| name | type | default | meaning |"]
        lines.append("| --- | --- | --- | --- |")
        for field in fields(kind):
            lines.append(
                f"| `{field.name}` | {describe_type(hints[field.name])} "
                f"| {_as_yaml(field.default)} | {field.metadata['meaning']} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip()


def parameters(arguments: argparse.Namespace) -> int:
    """``dlrm parameters``: every parameter as Markdown, or with ``--like`` a parameters file."""
    if arguments.like is None:
        print(parameters_table())
    else:
        tree = dict(arguments.file.tree)
        print(yaml.safe_dump(tree, sort_keys=False, default_flow_style=None), end="")
    return 0


def _as_yaml(default: object) -> str:
    """A default as one writes it in a parameters file; nothing for nothing."""
    if default is None or default == "" or default is MISSING:
        return ""
    if isinstance(default, tuple):
        return f"`[{', '.join(map(str, default))}]`"
    return f"`{str(default).lower()}`" if isinstance(default, bool) else f"`{default}`"
