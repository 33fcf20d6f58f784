"""Checkpoints: everything a run needs to go on as if it had never stopped.

A checkpoint is a folder ``step-00001000`` with ``checkpoint.json`` (format, version, step,
parameters, position in the data, what optimisers count, type, shape and checksum of every
tensor, its own checksum) and a file ``weights/NAME.npy`` or ``optimizer/NAME.npy`` for each
tensor. It is filled under a hidden name, brought to disk and then renamed, so a folder of
that name is whole whenever the process was killed. Older ones are removed only after that.
Nothing in a checkpoint is executed when it is read.
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
from typing import Any

import torch

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import locked, read_json, whole_folder, write_text
from dlrm_core.base.settings import LARGEST_INT, called, require_count, require_form, shown
from dlrm_core.config import SECTIONS, Parameters, parameters_from_sections
from dlrm_core.run.tensor_files import RECORD, StoredTensor, dtype_name, write_tensor

FORMAT = "dlrm-checkpoint"
VERSION = 2
"""Of the folder's layout; others are refused. 1 held tensors in the layout of safetensors."""

MANIFEST = "checkpoint.json"
WEIGHTS, OPTIMIZER = "weights", "optimizer"
"""The groups of tensors, each with a folder of its own."""

_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found and whose manifest is whole; its tensors are still on disk.

    It was written after ``step`` iterations of a run with these parameters. ``state`` is all that
    is no tensor: ``position`` in the data, ``counts`` of updates, ``skipped_steps``; ``tensors``
    has those of each group by name.
    """

    folder: Path
    step: int
    parameters: Parameters
    state: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, StoredTensor]]

    def read_into(self, group: str, targets: Mapping[str, torch.Tensor]) -> None:
        """Copy all tensors of a group into others of the same names, shapes and types.

        Raises InputError if a name, a shape or a type differs (both are named), a file is
        corrupted, or a value is none that training can make.
        """
        self.require_same_tensors(group, targets)
        for name, target in targets.items():
            self.tensors[group][name].check(target)

    def require_same_tensors(self, group: str, targets: Mapping[str, Any]) -> None:
        """Refuse a group with other tensors than this run's ``targets``."""
        place, saved = self.folder / group, self.tensors[group]
        for name in sorted(saved.keys() - targets.keys()):
            raise InputError(f"{place} contains {name}, which this run does not have")
        for name, target in targets.items():
            if name not in saved:
                raise InputError(f"{place} does not contain {name}, which this run has")
            was, now = (
                f"{' x '.join(map(str, tensor.shape)) or 'one number'}, {dtype_name(tensor.dtype)}"
                for tensor in (saved[name], target)
            )
            if was != now:
                raise InputError(f"{place}: {name} is {was}, but this run's is {now}")


class CheckpointFolder:
    """The checkpoints of one run, of which the newest ``keep`` stay; close it in the end.

    A run goes on from ``resumed_step``, 0 where it begins anew. Raises InputError if the folder
    cannot be written, is in use, or holds later checkpoints, which the run's own would be mixed up
    with.
    """

    def __init__(self, folder: Path, keep: int, resumed_step: int = 0) -> None:
        self.folder, self._keep = folder, keep
        name, self._lock = f"training.checkpoint_folder: {folder}", contextlib.ExitStack()
        self._lock.enter_context(locked(folder / ".lock", f"{name}: another run is writing there"))
        later = [step for step in steps_in(folder) if step > resumed_step]
        if later:
            self.close()
            begins = f"from step {resumed_step}" if resumed_step else "from the beginning"
            raise InputError(
                f"{name} holds a checkpoint of step {later[-1]}, but this run starts {begins}: go "
                "on from it with training.resume: latest (dlrm train --resume latest), or choose "
                "another folder"
            )
        # what a run that was killed had not finished
        for leftover in folder.glob(".step-*"):
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

        Raises InputError if it cannot be written; the ones before it stay.
        """
        target = self.folder / f"step-{step:08d}"
        if target.exists():
            return target
        with whole_folder(target, "checkpoint") as part:
            records: dict[str, dict[str, Any]] = {WEIGHTS: {}, OPTIMIZER: {}}
            for group, tensors in ((WEIGHTS, weights), (OPTIMIZER, optimizer)):
                (part / group).mkdir()
                for name, tensor in tensors.items():
                    records[group][name] = write_tensor(part / group / f"{name}.npy", tensor)
            manifest = {
                "format": FORMAT,
                "version": VERSION,
                "step": step,
                "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "versions": {"torch": torch.__version__, "python": platform.python_version()},
                "parameters": dict(parameters),
                "state": dict(state),
                "tensors": records,
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
    matches = (_NAME.fullmatch(entry.name) for entry in folder.glob("step-*"))
    return sorted(int(match[1]) for match in matches if match)


def newest_checkpoint(folder: Path) -> Path | None:
    """The folder itself if it is a checkpoint, else the newest in it; None without one."""
    if (folder / MANIFEST).exists():
        return folder
    steps = steps_in(folder)
    return folder / f"step-{steps[-1]:08d}" if steps else None


def find_checkpoint(given: str, folder: Path | None = None) -> Path:
    """The folder that ``training.resume`` or ``--checkpoint`` means.

    ``given`` is a checkpoint, a folder of checkpoints, or 'latest', which looks in ``folder``.
    Raises InputError if there is no checkpoint.
    """
    if given == "latest" and folder is None:
        raise InputError(
            "training.resume is 'latest', but there is no training.checkpoint_folder to look for "
            "it in: name the folder, or the checkpoint itself"
        )
    place = folder if given == "latest" and folder is not None else Path(given)
    if (newest := newest_checkpoint(place)) is None:
        raise InputError(f"{place} holds no checkpoint (no {MANIFEST}, no step-NNNNNNNN)")
    return newest


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read what a checkpoint says of itself, and see that its files are all there.

    Raises InputError if it is no checkpoint, of another version, corrupted or cut short.
    """
    path = folder / MANIFEST
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"{path} is no checkpoint of {FORMAT}")
    if (version := manifest.get("version")) != VERSION:
        raise InputError(
            f"{path} was written in version {shown(version)} of the format, this program reads "
            f"version {VERSION} only"
        )
    digest = manifest.pop("sha256", "")
    if digest != (found := _digest(manifest)):
        raise InputError(
            f"{path} has checksum {found[:16]}…, but {called(digest)[:16]}… was written: the file "
            "is corrupted"
        )
    return _checked(folder, manifest)


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
    "state": {"position": _ANYTHING, "counts": _ANYTHING, "skipped_steps": LARGEST_INT},
    "tensors": {WEIGHTS: {...: RECORD}, OPTIMIZER: {...: RECORD}},
}
"""The form of a manifest without its checksum."""


def _checked(folder: Path, manifest: Mapping[str, Any]) -> Checkpoint:
    """A manifest whose values are of the types, and in the ranges, that are written.

    The checksum finds what was damaged; this finds what somebody wrote, or another program.
    """
    path = folder / MANIFEST
    require_form(path, manifest, _FORM)
    step, state, records = manifest["step"], manifest["state"], manifest["tensors"]
    named = _NAME.fullmatch(folder.name)
    if named and int(named[1]) != step:
        raise InputError(f"{path}: step is {step}, but the folder is named {folder.name}")
    parameters = parameters_from_sections(manifest["parameters"], f"{path}: parameters")
    skipped = require_count(path, "state.skipped_steps", state["skipped_steps"], step)
    for name in (*records[WEIGHTS], *records[OPTIMIZER]):
        if not re.fullmatch(r"\w[\w.]{0,199}", name, re.ASCII):
            raise InputError(f"{path}: tensors: {called(name)} is no name of a weight or its state")
    for name, count in state["counts"].items():
        where = f"state.counts: {called(name)}"
        if name not in records[WEIGHTS]:
            raise InputError(f"{path}: {where} is no weight of the checkpoint")
        # torch's optimisers count in floats
        whole = int(count) if type(count) is float and count.is_integer() else count
        require_count(path, where, whole, step - skipped)
    tensors = {
        group: {
            name: StoredTensor(folder / group / f"{name}.npy", record)
            for name, record in records[group].items()
        }
        for group in (WEIGHTS, OPTIMIZER)
    }
    return Checkpoint(folder, step, parameters, state, tensors)


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
