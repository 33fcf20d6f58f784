"""Parameters: four validated sections that say everything about a run.

A parameters file (YAML) has the sections ``model``, ``data``, ``training``,
``profiling`` and a ``title``. Each section is a frozen dataclass (in ``config_model``
and ``config_training``); a value that cannot work is refused when the dataclass is
built, before anything runs.

Sources: the model's shape and its names follow Naumov et al. 2019
(arXiv:1906.00091); defaults are those of the experiment, the shape of
facebookresearch/dlrm ``bench/dlrm_s_benchmark.sh``.
"""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dlrm_core.config_model import DataConfig, ModelConfig
from dlrm_core.config_training import ProfilingConfig, TrainingConfig
from dlrm_core.errors import InputError
from dlrm_core.yaml_text import read_yaml

__all__ = [
    "SECTIONS",
    "DataConfig",
    "ModelConfig",
    "Parameters",
    "ProfilingConfig",
    "TrainingConfig",
    "load_parameters",
    "parameters_from_sections",
]
SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "profiling": ProfilingConfig,
}


@dataclass(frozen=True)
class Parameters:
    """A whole run: the four sections, a title, and the file they came from."""

    title: str = "DLRM"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    source: str = ""
    sweep: Mapping[str, Any] = field(default_factory=dict)
    """Leaves and the values that ``dlrm run`` gives them in turn, see dlrm_core/sweep.py."""

    def to_sections(self) -> dict[str, Any]:
        """Plain dicts, lists and scalars: what YAML, JSON and papermill carry."""
        sections: dict[str, Any] = {"title": self.title}
        for name in SECTIONS:
            section = getattr(self, name)
            sections[name] = {
                f.name: list(value)
                if isinstance(value := getattr(section, f.name), tuple)
                else value
                for f in fields(section)
            }
        return sections

    @property
    def preset(self) -> str:
        """Short name for folders: the file's stem, or 'parameters'."""
        return Path(self.source).stem if self.source else "parameters"


def load_parameters(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Parameters:
    """Read and validate a parameters file.

    Args:
        path: a YAML file.
        overrides: ``section.leaf=value`` each; the value is read as YAML.

    Raises:
        InputError: naming file, field, value and what was expected.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such parameters file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read as text: {error}") from None
    if not text:
        raise InputError(f"{path}: is empty, 0 bytes; a file of defaults only holds {{}}")
    try:
        tree = read_yaml(text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise InputError(
            f"{path}: is {reprlib.repr(tree)}, expected the sections title, {', '.join(SECTIONS)}"
        )
    for override in overrides:
        _override(tree, override)
    data = tree.get("data")
    if isinstance(data, dict) and isinstance(data.get("path"), str) and data["path"]:
        # notebooks run in folders of their own
        tree["data"] = data | {"path": str(Path(data["path"]).expanduser().absolute())}
    return parameters_from_sections(tree, source=str(path))


def parameters_from_sections(tree: Mapping[str, Any], source: str = "") -> Parameters:
    """Validate sections given as dicts, as papermill injects them.

    Raises:
        InputError: naming file, field, value and what was expected.
    """
    try:
        for name in tree:
            if name not in SECTIONS and name not in ("title", "sweep"):
                raise InputError(_unknown(str(name), ["title", *SECTIONS, "sweep"], "section"))
        title = tree.get("title", "DLRM")
        if not isinstance(title, str):
            raise InputError(f"title is {title!r}, expected text")
        tree = _with_dataset_shape(tree)
        built: dict[str, Any] = {}
        for name, kind in SECTIONS.items():
            section = tree.get(name) or {}
            if not isinstance(section, Mapping):
                raise InputError(f"{name} is {section!r}, expected a section of parameters")
            known = [f.name for f in fields(kind)]
            for leaf in section:
                if leaf not in known:
                    raise InputError(
                        _unknown(f"{name}.{leaf}", [f"{name}.{k}" for k in known], "parameter")
                    )
            section = dict(section)
            # a list of rows without a count: the list decides
            if (
                name == "model"
                and "tables" not in section
                and isinstance(section.get("table_rows"), list | tuple)
            ):
                section["tables"] = None
            built[name] = kind(**section)
        sweep = tree.get("sweep") or {}
        if not isinstance(sweep, Mapping):
            raise InputError(f"sweep is {sweep!r}, expected parameters, each with a list of values")
        return Parameters(title=title, source=source, sweep=dict(sweep), **built)
    except InputError as error:
        raise InputError(f"{source}: {error}" if source else str(error)) from None


def _with_dataset_shape(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The sections with the model's table rows and dense features taken from the data set.

    Only what the file leaves out, and only of a data set that says it.
    """
    data, model = tree.get("data"), tree.get("model") or {}
    if not isinstance(data, Mapping) or not isinstance(model, Mapping):
        return tree
    said = data.get("format", "split_binary") == "split_binary"
    if data.get("generator") != "dataset" or not isinstance(data.get("path"), str) or not said:
        return tree
    if "table_rows" in model or not data["path"]:
        return tree
    from dlrm_core.datasets.feature_spec import read_spec

    spec = read_spec(Path(data["path"]))
    shape = {"table_rows": list(spec.table_rows), "tables": len(spec.table_rows)}
    return {**tree, "model": {"dense_features": spec.dense_features, **model, **shape}}


def _override(tree: dict[str, Any], override: str) -> None:
    """Apply one ``section.leaf=value`` to a tree of sections."""
    name, equals, text = override.partition("=")
    section, dot, leaf = name.strip().partition(".")
    if not equals or (not dot and section not in ("title", "sweep")):
        raise InputError(
            f"-p {override}: expected NAME=VALUE with a NAME such as training.batch_size"
        )
    if section == "title":
        tree["title"] = text
        return
    if section not in SECTIONS and section != "sweep":
        raise InputError("-p " + _unknown(f"{name.strip()}", list(SECTIONS), "section"))
    try:
        value = read_yaml(text)
    except InputError as error:
        raise InputError(f"-p {override}: the value {error}") from None
    if section == "sweep":
        # the leaves are those of other sections; dlrm_core/sweep.py checks them
        tree["sweep"] = {**(tree.get("sweep") or {}), leaf: value} if dot else value
        return
    known = [f"{section}.{f.name}" for f in fields(SECTIONS[section])]
    if f"{section}.{leaf}" not in known:
        raise InputError("-p " + _unknown(f"{section}.{leaf}", known, "parameter"))
    values = tree.get(section)
    if values is None:
        values = tree[section] = {}
    if isinstance(values, dict):
        values[leaf] = value


def _unknown(name: str, known: Sequence[str], what: str) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
    return f"unknown {what} {name}; {hint}"
