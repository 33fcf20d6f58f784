"""What several test files share."""

from itertools import pairwise
from pathlib import Path


def assert_same_files(one: Path, other: Path, but: str = "\0") -> None:
    """Two folders hold the same files with the same bytes, but for lines that name ``but``."""
    names = sorted(str(f.relative_to(one)) for f in one.rglob("*") if f.is_file())
    assert names == sorted(str(f.relative_to(other)) for f in other.rglob("*") if f.is_file())
    for name in names:
        if name.endswith(".yaml"):
            assert _lines(one / name, but) == _lines(other / name, but)
        else:
            assert (one / name).read_bytes() == (other / name).read_bytes(), name


def differing_files(one: Path, other: Path, leave: tuple[str, ...] = ()) -> list[str]:
    """Files that only one of two folders has, or that differ; ``leave``: names left out."""
    contents = [
        {
            str(file.relative_to(folder)): file.read_bytes()
            for file in folder.rglob("*")
            if file.is_file() and file.name not in leave
        }
        for folder in (one, other)
    ]
    names = sorted(contents[0].keys() | contents[1].keys())
    return [name for name in names if contents[0].get(name) != contents[1].get(name)]


def _lines(file: Path, but: str) -> list[str]:
    """Its lines, without those that name ``but`` and the one after each."""
    lines = ["", *file.read_text().splitlines()]
    return [line for before, line in pairwise(lines) if but not in before and but not in line]
