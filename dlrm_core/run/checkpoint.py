"""Checkpoints: everything a run needs to go on as if it had never stopped.

A checkpoint is a folder ``step-00001000`` with ``checkpoint.json`` (format, version, step,
parameters, position in the data, what optimisers count, checksums of everything, its own
included), ``weights.safetensors`` and, where the optimiser has state,
``optimizer.safetensors``. It is filled under a hidden name, brought to disk and then
renamed, so a folder of that name is whole whenever the process was killed. Older ones are
removed only after that. Nothing in a checkpoint is executed when it is read.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import lock_or_refuse, make_folder, read_json, whole_folder, write_text
from dlrm_core.base.settings import LARGEST_INT, called, require_count, require_form, shown
from dlrm_core.config import SECTIONS, parameters_from_sections
from dlrm_core.interactions import INTERACTIONS
from dlrm_core.run.tensor_files import (
    RECORD,
    dtype_name,
    read_tensors,
    stored_tensors,
    write_tensors,
)

FORMAT = "dlrm-checkpoint"
VERSION = 1
"""Of the folder's layout; older versions stay readable, newer ones are refused."""

MANIFEST = "checkpoint.json"
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
SQUARES = (".sum", ".exp_avg_sq")
"""Ends of the names of optimisers' sums of squares, which are never negative."""

_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found and whose manifest is whole; its tensors are still on disk.

    Attributes:
        step: iterations done.
        parameters: sections of the run that wrote it.
        state: all that is no tensor: ``position`` in the data, ``counts`` of updates,
            ``loss_scale``, ``skipped_steps``.
        files: what each tensor file must be, by its name.
    """

    folder: Path
    step: int
    parameters: Mapping[str, Any]
    state: Mapping[str, Any]
    files: Mapping[str, Any]

    def shapes(self, file: str) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor in one of the files; empty if there is no such file."""
        tensors = self.files.get(file, {}).get("tensors", {})
        return {name: tuple(about["shape"]) for name, about in tensors.items()}

    def read_into(self, file: str, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy all tensors of a file into others of the same names, shapes and types.

        Raises:
            InputError: a name, a shape or a type differs (both are named), the file is
                corrupted, or a value is none that training can make.
        """
        self.require_same_tensors(file, targets)
        if file in self.files:
            read_tensors(self.folder / file, self.files[file], targets, SQUARES)

    def require_same_tensors(self, file: str, targets: Mapping[str, Any]) -> None:
        """Refuse a file with other tensors than this run's.

        Args:
            targets: by name, anything with ``shape`` and ``dtype``.

        Raises:
            InputError: naming the tensor and both shapes or types.
        """
        saved = self.shapes(file)
        for name in sorted(saved.keys() - targets.keys()):
            raise InputError(f"{self.folder / file} contains {name}, which this run does not have")
        for name, target in targets.items():
            if name not in saved:
                raise InputError(
                    f"{self.folder / file} does not contain {name}, which this run has"
                )
            if saved[name] != tuple(target.shape):
                raise InputError(
                    f"{self.folder / file}: {name} is {_by(saved[name])}, but this run's is "
                    f"{_by(tuple(target.shape))} ({_parameter_of(name)})"
                )
            written = self.files[file]["tensors"][name]["dtype"]
            if written != dtype_name(target.dtype):
                raise InputError(
                    f"{self.folder / file}: {name} is of type {written}, but this run's is "
                    f"{dtype_name(target.dtype)}"
                )


class CheckpointFolder:
    """The checkpoints of one run; close it in the end.

    Args:
        folder: made if need be; no other process may write to it at the same time.
        keep: how many checkpoints stay.
        resumed_step: of the checkpoint that the run goes on from; 0: it begins anew.

    Raises:
        InputError: the folder cannot be written, is in use, or holds later checkpoints,
            which the run's own would be mixed up with.
    """

    def __init__(self, folder: Path, keep: int, resumed_step: int = 0) -> None:
        self.folder = folder
        self._keep = keep
        try:
            make_folder(folder)
            self._lock: IO[str] = (folder / ".lock").open("a")
        except OSError as error:
            raise InputError(
                f"training.checkpoint_folder: {folder} cannot be written: {error.strerror}"
            ) from None
        try:
            self._claim(resumed_step)
        except BaseException:
            self._lock.close()
            raise

    def _claim(self, resumed_step: int) -> None:
        lock_or_refuse(
            self._lock.fileno(),
            f"training.checkpoint_folder: another run is writing checkpoints to {self.folder}",
        )
        later = [step for step in steps_in(self.folder) if step > resumed_step]
        if later:
            begins = f"from step {resumed_step}" if resumed_step else "from the beginning"
            raise InputError(
                f"training.checkpoint_folder: {self.folder} holds a checkpoint of step "
                f"{later[-1]}, but this run starts {begins}: go on from it with "
                "training.resume: latest (dlrm train --resume latest), or choose another folder"
            )
        # what a run that was killed had not finished
        for leftover in self.folder.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def save(
        self,
        step: int,
        parameters: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        optimizer: Mapping[str, torch.Tensor],
        state: Mapping[str, Any],
    ) -> Path:
        """Write a checkpoint; it is on disk, and found by others, when this returns.

        Raises:
            InputError: it cannot be written; the ones before it stay.
        """
        target = self.folder / f"step-{step:08d}"
        if target.exists():
            return target
        with whole_folder(target, "checkpoint") as part:
            files = {WEIGHTS: write_tensors(part / WEIGHTS, weights)}
            if optimizer:
                files[OPTIMIZER] = write_tensors(part / OPTIMIZER, optimizer)
            manifest = {
                "format": FORMAT,
                "version": VERSION,
                "step": step,
                "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "versions": {"torch": torch.__version__, "python": platform.python_version()},
                "parameters": dict(parameters),
                "state": dict(state),
                "files": files,
            }
            manifest["sha256"] = _digest(manifest)
            write_text(part / MANIFEST, json.dumps(manifest))
        self._drop_old()
        return target

    def close(self) -> None:
        """Let other processes write to the folder."""
        self._lock.close()

    def _drop_old(self) -> None:
        for step in steps_in(self.folder)[: -self._keep]:
            old = self.folder / f"step-{step:08d}"
            hidden = self.folder / f".{old.name}-old"
            # hidden first: one that is being removed must not look whole
            with contextlib.suppress(OSError):
                old.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def steps_in(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, oldest first; empty if there is no such folder."""
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def holds_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, or has one in it."""
    return (folder / MANIFEST).exists() or bool(steps_in(folder))


def find_checkpoint(given: str, folder: Path | None = None) -> Path:
    """The folder that ``training.resume`` or ``--checkpoint`` means.

    Args:
        given: a checkpoint, a folder of checkpoints, or 'latest'.
        folder: where 'latest' looks.

    Raises:
        InputError: there is no checkpoint.
    """
    if given == "latest":
        if folder is None:
            raise InputError(
                "training.resume is 'latest', but there is no training.checkpoint_folder to look "
                "for it in: name the folder, or the checkpoint itself"
            )
        place = folder
    else:
        place = Path(given)
    if (place / MANIFEST).exists():
        return place
    steps = steps_in(place)
    if not steps:
        raise InputError(f"{place} holds no checkpoint (no {MANIFEST}, no step-NNNNNNNN)")
    return place / f"step-{steps[-1]:08d}"


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read what a checkpoint says of itself, and see that its files are all there.

    Raises:
        InputError: it is no checkpoint, of a newer version, corrupted or cut short.
    """
    path = folder / MANIFEST
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"{path} is no checkpoint of {FORMAT}")
    version = manifest.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise InputError(
            f"{path} has version {shown(version)}, this program reads versions up to {VERSION}"
        )
    digest = manifest.pop("sha256", "")
    if digest != (found := _digest(manifest)):
        raise InputError(
            f"{path} has checksum {found[:16]}…, but {called(digest)[:16]}… was written: the file "
            "is corrupted"
        )
    checkpoint = _checked(folder, manifest)
    for name, record in checkpoint.files.items():
        stored_tensors(folder / name, record)
    return checkpoint


_ANYTHING: Mapping[Any, Any] = {...: object}

_FORM: Mapping[Any, Any] = {
    "format": str,
    "version": int,
    "step": LARGEST_INT,
    "written": str,
    "versions": _ANYTHING,
    # without its rows a model would be that of the data set as it is now
    "parameters": dict.fromkeys(SECTIONS, _ANYTHING)
    | {"title": object, "model": {"table_rows": object, ...: object}},
    "state": {
        "position": _ANYTHING,
        "counts": _ANYTHING,
        "loss_scale": object,
        "skipped_steps": LARGEST_INT,
    },
    "files": {...: RECORD},
}
"""The form of a manifest without its checksum."""


def _checked(folder: Path, manifest: Mapping[str, Any]) -> Checkpoint:
    """A manifest whose values are of the types, and in the ranges, that are written.

    The checksum finds what was damaged; this finds what somebody wrote, or another program.

    Raises:
        InputError: naming the file, the field, its value and what was expected.
    """
    path = folder / MANIFEST
    require_form(path, manifest, _FORM)
    step, state, files = manifest["step"], manifest["state"], manifest["files"]
    named = _NAME.fullmatch(folder.name)
    if named and int(named[1]) != step:
        raise InputError(f"{path}: step is {step}, but the folder is named {folder.name}")
    training = parameters_from_sections(manifest["parameters"], f"{path}: parameters").training
    skipped = require_count(path, "state.skipped_steps", state["skipped_steps"], step)
    scale = training.loss_scale if training.precision == "fp16" else 1.0
    if isinstance(state["loss_scale"], bool) or state["loss_scale"] != scale:
        raise InputError(
            f"{path}: state.loss_scale is {shown(state['loss_scale'])}, but its parameters say "
            f"{scale:g}"
        )
    if WEIGHTS not in files or files.keys() - {WEIGHTS, OPTIMIZER}:
        raise InputError(
            f"{path}: files are {shown(list(files))}, expected {WEIGHTS} and, where the optimizer "
            f"has state, {OPTIMIZER}"
        )
    for name, count in state["counts"].items():
        where = f"state.counts: {called(name)}"
        if name not in files[WEIGHTS]["tensors"]:
            raise InputError(f"{path}: {where} is no weight of {WEIGHTS}")
        # torch's optimisers count in floats
        whole = int(count) if type(count) is float and count.is_integer() else count
        require_count(path, where, whole, step - skipped)
    return Checkpoint(folder, step, manifest["parameters"], state, files)


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape) or "one number"


def _parameter_of(name: str) -> str:
    """Which parameter decides the shape of a tensor."""
    table = re.match(r"embeddings\.tables\.(\d+)\.", name)
    if table:
        return f"model.table_rows[{table[1]}], model.embedding_dim"
    if name.startswith("interaction"):
        kinds = INTERACTIONS.values()
        options = [leaf for kind in kinds if kind.layers for leaf in kind.options]
        return ", ".join(f"model.{leaf}" for leaf in options)
    return "model.bottom_mlp" if name.startswith("bottom_mlp") else "model.top_mlp"
