"""The house stays small: each room has a number, and does not outgrow it."""

import json
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[1]

PATH = ("parts", "config", "data/batch", "data/synthetic", "embeddings", "model", "dense")
PATH += ("step", "train")
"""What a newcomer reads of ``dlrm_core``: modules, or packages of that name."""

KINDS = ("interactions", "losses", "optimizers", "operations")
"""Where kinds describe themselves: who adds one reads the file that it goes into."""

MADE = ("docs/results.md",)
"""Documents that ``benchmarks/page.py`` writes from measured files; a test compares them."""


class Room(NamedTuple):
    """What is counted, and how much of it there may be.

    Attributes:
        name: The room, as a sentence names it.
        unit: What ``size`` is the number of.
        size: How much there is.
        limit: How much there may be today.
        design: What ``limit`` is lowered to, step by step.
    """

    name: str
    unit: str
    size: int
    limit: int
    design: int


def files() -> list[str]:
    """All files of the project: those that git lists, or all that are there where no git is."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    names = done.stdout.splitlines()
    if "tests/test_rooms.py" not in names:  # no repository, or that of something around it
        names = [str(path.relative_to(REPOSITORY)) for path in REPOSITORY.rglob("*")]
    return [name for name in names if (REPOSITORY / name).is_file()]


def lines(names: Iterable[str]) -> int:
    return sum((REPOSITORY / name).read_bytes().count(b"\n") for name in names)


def cells(notebook: str) -> int:
    return len(json.loads((REPOSITORY / notebook).read_text(encoding="utf-8"))["cells"])


def starts(modules: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"dlrm_core/{module}{end}" for module in modules for end in (".py", "/"))


@cache
def rooms() -> dict[str, Room]:
    return {room.name: room for room in counted(files())}


def counted(names: list[str]) -> Iterator[Room]:
    python = [name for name in names if name.endswith(".py")]

    def room(folder: str, limit: int, design: int) -> Room:
        within = [name for name in python if name.startswith(f"{folder}/")]
        return Room(folder, "lines", lines(within), limit, design)

    core = [name for name in python if name.startswith("dlrm_core/")]
    model = [name for name in core if not name.startswith("dlrm_core/data/files/")]
    yield Room("dlrm_core without data/files", "lines", lines(model), 7_190, 6_000)
    path = [name for name in core if name.startswith(starts(PATH))]
    yield Room("the path through dlrm_core", "lines", lines(path), 3_200, 3_200)
    yield Room("the path through dlrm_core, in files,", "files", len(path), 10, 10)
    kinds = [name for name in core if name.startswith(starts(KINDS))]
    yield Room("kinds that describe themselves", "lines", lines(kinds), 1_180, 1_180)
    yield room("dlrm_core/data/files", 1_250, 1_250)
    yield room("dlrm_kernels", 8_140, 7_800)
    yield room("dlrm_ranks", 2_320, 2_300)
    yield room("dlrm_workbook", 59_082, 50_000)
    yield room("dlrm_studies", 11_080, 10_600)
    yield room("tests", 48_044, 46_000)

    notebooks = {name: cells(name) for name in names if name.startswith("notebooks/")}
    largest = notebooks.pop("notebooks/bottlenecks.ipynb")
    yield Room("notebooks/bottlenecks.ipynb", "cells", largest, 45, 45)
    name = max(notebooks, key=lambda name: notebooks[name])
    yield Room("the largest other notebook", f"cells ({name})", notebooks[name], 45, 45)

    documents = [name for name in names if name.startswith("docs/") and name.endswith(".md")]
    written = ["README.md", *(name for name in documents if name not in MADE)]
    size_kb = -(-sum((REPOSITORY / name).stat().st_size for name in written) // 1000)
    yield Room("documentation written by hand (README.md and docs)", "KB", size_kb, 100, 100)


@pytest.mark.parametrize("name", rooms())
def test_a_room_does_not_outgrow_its_number(name: str) -> None:
    room = rooms()[name]
    assert room.size <= room.limit, (
        f"{room.name} has {room.size:,} {room.unit} and may have {room.limit:,}: take lines away "
        "elsewhere, or raise the number here with the reason in the commit"
    )
    assert room.design <= room.limit, f"{room.name}: DESIGN.md allows {room.design:,}"
