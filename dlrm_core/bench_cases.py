"""What ``dlrm bench`` compares: contestants, model shapes, and how figures grow."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_core.errors import InputError
from dlrm_core.touched import Change


@dataclass(frozen=True)
class Case:
    """A shape that every contestant runs.

    Attributes:
        change: set in the parameters of all contestants, beside what they differ in.
    """

    name: str
    meaning: str
    change: Change


_TABLES = {"model.tables": 26, "model.table_rows": [100_000]}

SHAPES = {
    case.name: case
    for case in (
        Case("8x1M-100", "the experiment: 8 tables of 1,000,000 rows, up to 100 indices", {}),
        Case("8x1M-10", "its tables, up to 10 indices", {"data.indices_per_lookup": 10}),
        Case(
            "26x100k-10",
            "26 tables of 100,000 rows, up to 10 indices",
            {**_TABLES, "data.indices_per_lookup": 10},
        ),
    )
}
"""Shapes of the comparison with facebookresearch/dlrm."""

GROWTH: dict[str, tuple[Change, ...]] = {
    "batch": tuple({"training.batch_size": size} for size in (512, 2048, 8192)),
    "tables": tuple({"model.tables": n, "model.table_rows": [250_000]} for n in (2, 8, 26)),
    "dim": tuple(
        {"model.embedding_dim": dim, "model.bottom_mlp": [512, 512, dim]} for dim in (16, 64, 128)
    ),
    "pooling": tuple({"data.indices_per_lookup": k} for k in (1, 10, 50)),
}
"""What grows, and its values. Rows are fewer than in the experiment so that all fits."""

GROWTH_BASE: Change = {"model.table_rows": [250_000], "data.indices_per_lookup": 10}


def growth_cases(name: str) -> list[Case]:
    """The cases in which one quantity grows and everything else stays.

    Raises:
        InputError: nothing of that name grows.
    """
    if name not in GROWTH:
        raise InputError(f"--growth is '{name}', expected one of {', '.join(GROWTH)}")
    cases = []
    for change in GROWTH[name]:
        value = next(iter(change.values()))
        cases.append(Case(f"{name}={value}", f"{name} {value}", {**GROWTH_BASE, **change}))
    return cases


def shape_cases(names: str) -> list[Case]:
    """Cases by their names, comma-separated; ``all`` for every one.

    Raises:
        InputError: a name is unknown.
    """
    if names == "all":
        return list(SHAPES.values())
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in SHAPES:
            raise InputError(f"--shape is '{name}', expected all or one of {', '.join(SHAPES)}")
    return [SHAPES[name] for name in chosen]
