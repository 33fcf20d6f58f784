"""What ``dlrm bench`` compares: contestants, model shapes, growth, and one option at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from dlrm_core.base.errors import InputError
from dlrm_core.base.machine import resolve_device
from dlrm_core.config import PRESETS, Parameters, TrainingConfig, load_parameters
from dlrm_kernels.dense import why_not_fused
from dlrm_workbook.analysis.changes import difference
from dlrm_workbook.evidence.dependence import (
    DENSE_ENGINE,
    EMBEDDING_ENGINE,
    NEUTRAL,
    Change,
    changed_leaves,
    changed_parameters,
)

PLAIN, FP32, BF16X2, TF32, TORCHREC = "plain", "fp32", "fp32 by bf16x2", "tf32", "torchrec"
"""Names of contestants beside :data:`~dlrm_workbook.evidence.contestants.PEER`; those of the tuned
parameters are called by their products, ``bf16`` and ``fp16`` too."""


@dataclass(frozen=True)
class Case:
    """A shape that every contestant runs.

    Attributes:
        change: set in the parameters of all contestants, beside what they differ in.
        tuned_change: set in the tuned ones alone: an option that this shape calls for.
        iterations: counted iterations of a run at most; None is as many as asked for.
        kind: ``shape``, ``growth`` or ``ablation``.
        points: in a growth, the quantities that this case is a point of, and its values.
    """

    name: str
    meaning: str
    change: Change
    tuned_change: Change = field(default_factory=dict)
    iterations: int | None = None
    kind: str = "shape"
    points: Mapping[str, float] = field(default_factory=dict)


AS_GIVEN = Case("given", "as given", {})

_LISTED = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text(encoding="utf-8"))

SHAPES = {name: Case(name, **listed["case"]) for name, listed in _LISTED.items()}
"""Shapes of the comparison with facebookresearch/dlrm."""

GOALS: dict[str, dict[str, dict[str, float]]] = {n: one["goals"] for n, one in _LISTED.items()}
"""Times as fast as facebookresearch/dlrm that we set out to be, on a CPU with one thread."""

GROWTH_BASE: Change = {"model.table_rows": [250_000], "data.indices_per_lookup": 10}
"""Rows are fewer than in the experiment so that 26 tables fit and are made fast."""

BASE_POINT = {"batch": 2048, "tables": 8, "dim": 64, "pooling": 10}
"""Where all growths meet; measured once."""

GROWTH: dict[str, tuple[int, ...]] = {
    "batch": (128, 512, 2048, 8192),
    "tables": (2, 8, 26),
    "dim": (16, 64, 256),
    "pooling": (1, 10, 100),
}
"""What grows, and its values."""


def growth_cases(names: str, asked: str = "--growth") -> list[Case]:
    """The cases in which one quantity grows and everything else stays.

    Args:
        names: comma-separated; the point that they share is one case.
        asked: as :func:`chosen_names` has it.

    Raises:
        InputError: nothing of a name grows.
    """
    chosen = chosen_names(names, GROWTH, asked)
    shared = {name: float(BASE_POINT[name]) for name in chosen}
    meaning = ", ".join(f"{name} {value:,}" for name, value in BASE_POINT.items())
    grown = [("base", meaning, "batch", BASE_POINT["batch"], shared)] if chosen else []
    grown += [
        (f"{name}={value}", f"{name} {value:,}", name, value, {name: float(value)})
        for name in chosen
        for value in GROWTH[name]
        if value != BASE_POINT[name]
    ]
    return [
        Case(case, meaning, _grown(name, value), kind="growth", points=points)
        for case, meaning, name, value, points in grown
    ]


def _grown(name: str, value: int) -> Change:
    leaf: Change = {
        "batch": {"training.batch_size": value},
        "tables": {"model.tables": value},
        "dim": {"model.embedding_dim": value},
        "pooling": {"data.indices_per_lookup": value},
    }[name]
    return {**GROWTH_BASE, **leaf}


def shape_cases(names: str, asked: str = "--shape") -> list[Case]:
    """Cases by their names, which are given as :func:`chosen_names` takes them."""
    return [SHAPES[name] for name in chosen_names(names, SHAPES, asked)]


def chosen_names(text: str, known: Iterable[str], asked: str) -> list[str]:
    """Names that are separated by commas, each once; ``all`` for every one that is known.

    Args:
        asked: what they were given to, for the error.

    Raises:
        InputError: a name is unknown.
    """
    names = list(known)
    if text == "all":
        return names
    chosen = _names(text)
    for name in chosen:
        if name not in names:
            raise InputError(f"{asked} is '{name}', expected all or some of {', '.join(names)}")
    return chosen


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def speed_leaves() -> dict[str, Any]:
    """Leaf to its plain value, of every parameter that is about speed and nothing else."""
    kept = ("batch_size", "threads", "optimizer", "loss_scale")
    names = [*DENSE_ENGINE, *EMBEDDING_ENGINE, "fused_optimizer"]
    defaults = {f.name: f.default for f in dataclasses.fields(TrainingConfig)}
    leaves = {
        f"training.{name}": defaults[name]
        for name in dict.fromkeys(names)
        if name in defaults and name not in kept
    }
    return leaves | {
        "training.embedding_backend": "torch",
        "data.loader": "synchronous",
        "data.place": "cpu",
    }


def plain_of(parameters: Parameters) -> Parameters:
    """The same training without any option for speed: what the others are measured against."""
    change = speed_leaves()
    if parameters.data.generator == "facebook":
        change["data.generator"] = "facebook_loop"
    return changed_parameters(parameters, change)[0]


def tuned_of(parameters: Parameters) -> Parameters:
    """These parameters if they have an option for speed, else with those of tuned.yaml."""
    if plain_of(parameters) != parameters:
        return parameters
    preset = load_parameters(PRESETS / "tuned.yaml")
    change = difference(plain_of(preset), preset)
    if parameters.data.generator != "facebook_loop":
        # another law of the data would be another training
        change.pop("data.generator", None)
    return changed_parameters(parameters, change)[0]


def of_case(name: str, parameters: Parameters, case: Case) -> Parameters:
    """A contestant's parameters in a case."""
    change = {**case.change, **(case.tuned_change if name != PLAIN else {})}
    return changed_parameters(parameters, change)[0] if change else parameters


TOGETHER = ("training.dense_backend", "training.fp32_matmul")
"""The fused dense part has products of fp32 numbers made of bf16 ones, and only it has them."""


def ablated(
    plain: Parameters, tuned: Parameters, name: str
) -> list[tuple[dict[str, Any], Parameters]]:
    """Tuned with each option switched off, and plain with the options added one by one.

    A rung of the ladder that cannot work without a later one is left out.

    Args:
        name: of the tuned contestant, the ladder's last rung.

    Returns:
        Of each contestant what a reader of the JSON must know, and its parameters: ``name``,
        ``kind`` (``without``: tuned but for one leaf; ``ladder``: plain with all leaves up to and
        including this one), ``leaf`` (which was switched off, or added last), ``value`` (when it
        is on), ``also`` (leaves that only work together with it, and are off, or added, too).
    """
    steps = steps_of(plain, tuned)
    on, off = difference(plain, tuned), difference(tuned, plain)
    variants = []
    for step in steps:
        # alone if that works, else with the one that depends on it
        for other in ((), *(other for other in steps if other != step)):
            leaf, *also = step + other
            without = _changed(tuned, {name: off[name] for name in (leaf, *also)})
            if without is not None:
                facts = {"name": f"without {leaf.partition('.')[2]}", "kind": "without"}
                variants.append((facts | {"leaf": leaf, "value": on[leaf], "also": also}, without))
                break
    so_far: dict[str, Any] = {}
    for step in steps:
        leaf, *also = step
        so_far |= {name: on[name] for name in step}
        last = step == steps[-1]
        rung = tuned if last else _changed(plain, so_far)
        if rung is not None:
            facts = {"name": name if last else f"plain to {leaf.partition('.')[2]}"}
            facts |= {"kind": "ladder", "leaf": leaf}
            variants.append((facts | {"value": on[leaf], "also": also}, rung))
    return variants


def steps_of(plain: Parameters, tuned: Parameters) -> list[tuple[str, ...]]:
    """The leaves that differ and decide about time; one that needs another comes with it.

    Raises:
        InputError: nothing is tuned.
    """
    leaves = [leaf for leaf in changed_leaves(plain, tuned) if leaf not in NEUTRAL]
    if not leaves:
        raise InputError("--ablation: the tuned parameters differ from the plain ones in nothing")
    if tuned.training.fp32_matmul.startswith("bf16") and {*TOGETHER} <= {*leaves}:
        leaves.remove(TOGETHER[1])
        return [TOGETHER if leaf == TOGETHER[0] else (leaf,) for leaf in leaves]
    return [(leaf,) for leaf in leaves]


def _changed(parameters: Parameters, change: Change) -> Parameters | None:
    try:
        return changed_parameters(parameters, change)[0]
    except InputError:
        return None


def case_facts(case: Case, parameters: Parameters) -> dict[str, Any]:
    """What a reader of the JSON must know of a case."""
    facts = dataclasses.asdict(case)
    del facts["iterations"]
    return {"case": facts.pop("name"), **facts, "batch_size": parameters.training.batch_size}


def tuned_contestants(tuned: Parameters, precisions: Sequence[str]) -> dict[str, Parameters]:
    """The tuned parameters and their variants, called by how they multiply matrices.

    Where the tuned ones make fp32 products of two bf16 numbers, the same with true fp32's
    results stand beside them.

    Raises:
        InputError: a precision is unknown, or this machine has none of it.
    """
    training = tuned.training
    changes: dict[str, Change] = {}
    if training.precision != "fp32":
        changes[training.precision] = {}
    elif training.fp32_matmul == "bf16x2" and not why_no_bf16x2(tuned):
        changes = {FP32: {"training.fp32_matmul": "bf16x3"}, BF16X2: {}}
    else:
        changes[TF32 if training.tf32 else FP32] = {}
    for name in precisions:
        if name == TF32 and not torch.cuda.is_available():
            raise InputError("--precision is 'tf32', but only GPUs have it and torch sees none")
        change: Change = {"training.tf32": True} if name == TF32 else {"training.precision": name}
        changes.setdefault(name, change)
    return {
        name: changed_parameters(tuned, change)[0] if change else tuned
        for name, change in changes.items()
    }


def why_no_bf16x2(tuned: Parameters) -> str:
    """Why the tuned parameters' products of two bf16 numbers cannot be made here.

    Empty if they can, or are not asked for.
    """
    if tuned.training.fp32_matmul != "bf16x2":
        return ""
    device = resolve_device(tuned.training)
    return why_not_fused(tuned.training, device, tuned.model.interaction_kind)


def precisions_of(text: str | Sequence[str]) -> list[str]:
    """Names of ``--precision``, without fp32, which the tuned contestant has anyway."""
    names = _names(text) if isinstance(text, str) else text
    return [name for name in names if name != "fp32"]


def thread_counts(text: str) -> list[int]:
    """The counts of ``--threads``.

    Raises:
        InputError: they are no counts.
    """
    try:
        return [int(count) for count in str(text).split(",")]
    except ValueError:
        raise InputError(f"--threads is '{text}', expected counts: 1,2") from None
