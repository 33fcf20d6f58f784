"""Damages checkpoints, and edits them by hand so that every checksum is right again.

An edited checkpoint is refused in a sentence, or the run that goes on from it ends with the
very bits of the run that goes on from the whole one: an edit that changes what is computed,
and is taken, is a failure. Values that a run could have written, such as another finite
weight under a right checksum, cannot be told from it and are not among the edits.
"""

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dlrm_core.run.checkpoint import MANIFEST, OPTIMIZER, _digest, read_checkpoint
from dlrm_core.run.resume import checkpoint_to_resume
from dlrm_core.run.tensor_files import write_tensor
from tests.small_training import parameters, same_bits, trained

STEP = 7
FOLDER = f"step-{STEP:08d}"

RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adagrad": ({}, {"optimizer": "adagrad"}),
    "adam": ({"generator": "uniform"}, {"optimizer": "adam"}),
    "rowwise": (
        {"generator": "zipf"},
        {"optimizer": "rowwise_adagrad", "embedding_backend": "fused"},
    ),
    "sgd": ({"loader": "prefetch"}, {}),
    "teacher": ({"generator": "teacher"}, {"optimizer": "adagrad", "embedding_backend": "fused"}),
    "fp16": ({}, {"precision": "fp16", "loss_scale": 2.0**24, "optimizer": "adagrad"}),
}
"""Data and training sections of the runs whose checkpoints are edited: every kind of stream
and of optimiser state, and a count of skipped steps."""

ODD: list[Any] = [
    *(None, True, -1, -(2**63), 2**63, 2**70, 10**400, 1.5, -0.5, float("nan"), float("inf")),
    *("", "12", "x" * 5000, "../../../etc/passwd", "\ud800", [], {}, [[]], [None], {"a": 1}),
]
"""Values that no field of a checkpoint has."""


class Checkpoints:
    """Whole checkpoints of all kinds, and what their runs come to; ``scratch`` holds them."""

    def __init__(self, scratch: Path) -> None:
        self.places: dict[str, Path] = {}
        self.ends: dict[str, tuple[Any, ...]] = {}
        for kind, (data, training) in RUNS.items():
            place = scratch / kind
            trained(parameters(data, **training, max_steps=STEP), place)
            self.places[kind] = place / FOLDER
            self.ends[kind] = self._end(kind, place / FOLDER)

    def make(self, rng: random.Random, folder: Path) -> Path:
        """A copy of one of them with one edit; the name of its kind is that of its folder."""
        kind = rng.choice(list(RUNS))
        place = folder / kind / FOLDER
        shutil.copytree(self.places[kind], place)
        edits = (self._damage, self._edit_manifest, self._edit_manifest, self._edit_tensors)
        rng.choice(edits)(rng, place)
        return place

    def read(self, place: Path) -> None:
        """Go on from an edited checkpoint as ``dlrm train --resume`` does.

        Raises:
            AssertionError: it was taken, and the run ended otherwise.
        """
        kind = place.parent.name
        losses, tensors, counts = self._end(kind, place)
        whole = self.ends[kind]
        same = losses == whole[0] and counts == whole[2] and same_bits(tensors, whole[1])
        assert same, f"{kind}: taken, and the run went on otherwise"

    def _end(self, kind: str, place: Path) -> tuple[Any, ...]:
        data, training = RUNS[kind]
        chosen = parameters(data, **training, resume=str(place))
        result, tensors, counts = trained(chosen, None, checkpoint_to_resume(chosen, None))
        return result.losses, tensors, counts

    def _damage(self, rng: random.Random, place: Path) -> None:
        """Bytes or whole files changed; no checksum is mended."""
        file = rng.choice(sorted(file for file in place.rglob("*") if file.is_file()))
        data = bytearray(file.read_bytes())
        at = rng.randrange(len(data))
        how = rng.randrange(8)
        if how == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del data[at:]
        elif how == 2:
            data[at:at] = rng.randbytes(rng.randint(1, 9))
        elif how == 3:
            data[at : at + 64] = bytes(len(data[at : at + 64]) + 1)
        file.unlink()
        if how < 4:
            file.write_bytes(data)
        elif how == 5:
            os.mkfifo(file)
        elif how == 6:
            file.mkdir()
        elif how == 7:
            # of a run whose files are others: two kinds may hold the same weights
            name = file.relative_to(place)
            there = {p: p / name for p in self.places.values() if (p / name).exists()}
            others = [p for p in there.values() if p.read_bytes() != bytes(data)]
            file.symlink_to(rng.choice(others) if others else Path("/dev/zero"))

    def _edit_manifest(self, rng: random.Random, place: Path) -> None:
        """One value of the manifest replaced, removed or added, with a right checksum."""
        manifest = json.loads((place / MANIFEST).read_text())
        *path, last = rng.choice(list(inner_places(manifest)))
        inside = at(manifest, path)
        how = rng.random()
        if how < 0.75:
            inside[last] = rng.choice(ODD)
        elif how < 0.9 or isinstance(inside, list):
            del inside[last]
        else:
            inside["more"] = rng.choice(ODD)
        seal(place, manifest)

    def _edit_tensors(self, rng: random.Random, place: Path) -> None:
        """Tensors with another value, type, shape or name, with right checksums everywhere."""
        groups = read_checkpoint(place).tensors
        group = rng.choice([group for group in groups if groups[group]])
        tensors = {
            name: stored.read(range(*stored.shape[:1])) for name, stored in groups[group].items()
        }
        name = rng.choice(list(tensors))
        tensor = tensors[name]
        how = rng.randrange(8)
        if how == 0:
            odd = rng.choice([float("nan"), float("inf"), -float("inf")])
            tensor.view(-1)[rng.randrange(tensor.numel())] = odd
        elif how == 1:
            kinds = (
                torch.float64,
                torch.float16,
                torch.bfloat16,
                torch.int64,
                torch.int32,
                torch.uint8,
            )
            tensors[name] = tensor.to(rng.choice(kinds))
        elif how == 2:
            shapes = [
                tensor[:-1],
                tensor[:, None],
                tensor.reshape(-1, 1, 1),
                torch.cat([tensor] * 2),
            ]
            tensors[name] = rng.choice([*shapes, tensor.new_zeros(()), tensor.new_zeros((0,))])
        elif how == 3:
            del tensors[name]
        elif how == 4:
            tensors[rng.choice(["more", name + ".sum", "../" + name, ""])] = tensor
        elif how == 5:
            tensors = {n + "x" * (n == name): t for n, t in tensors.items()}
        elif how == 6:
            squares = [n for n in tensors if n.endswith((".sum", ".exp_avg_sq"))]
            wrong = tensors[rng.choice(squares)] if squares else tensor
            wrong.view(-1)[rng.randrange(wrong.numel())] = -1.0 if squares else float("nan")
        else:
            # the state of another optimiser, whole in itself
            tensors |= {f"{name}.exp_avg": tensor, f"{name}.exp_avg_sq": tensor * tensor}
            group = OPTIMIZER
        shutil.rmtree(place / group)
        (place / group).mkdir()
        manifest = json.loads((place / MANIFEST).read_text())
        manifest["tensors"][group] = {}
        for name, tensor in tensors.items():
            # a name that is no file's is recorded without one
            at_place = place / group / f"{name.replace('/', '')}.npy"
            manifest["tensors"][group][name] = write_tensor(at_place, tensor)
        seal(place, manifest)


def seal(place: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with the checksum that belongs to it."""
    manifest.pop("sha256", None)
    manifest["sha256"] = _digest(manifest)
    (place / MANIFEST).write_text(json.dumps(manifest))


def inner_places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all values inside, of long lists of numbers only to some."""
    keys: Any = value if isinstance(value, dict) else range(len(value))
    if isinstance(value, list) and len(value) > 8:
        keys = (0, len(value) // 2, len(value) - 1)
    for key in keys:
        yield (*path, key)
        if isinstance(value[key], dict | list):
            yield from inner_places(value[key], (*path, key))


def at(value: Any, path: list[Any]) -> Any:
    """What lies at a path."""
    for key in path:
        value = value[key]
    return value
