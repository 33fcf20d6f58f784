"""Real HPCToolkit databases and what is stored of them, and a small one that is written."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hpctoolkit_tree import random_tree
from tests.hpctoolkit_writer import Measured, write_database

SHARED = Path(__file__).parents[2] / "shared" / "hpctoolkit-databases"
OURS = Path(__file__).parent / "data" / "hpctoolkit"
NAMES = [
    "small",
    "loops-cputime-t",
    "loops-cuda-nvidia-t",
    "loops-cuda-nvidiapc-t",
    "dlrm-cpu-native",
    "dlrm-cpu-python",
]


def folder_of(name: str) -> Path:
    """A real database, or a skip that says what is missing."""
    for place in (OURS / f"{name}.d", SHARED / f"{name}.d"):
        if place.is_dir():
            return place
    pytest.skip(f"needs the database {name}.d in {SHARED}, which is not there")


def expected_of(name: str) -> dict[str, Any]:
    for place in (OURS / f"{name}.json", SHARED / "expected" / f"{name}.json"):
        if place.is_file():
            result: dict[str, Any] = json.loads(place.read_text())
            return result
    pytest.skip(f"needs expected/{name}.json in {SHARED}, which is not there")


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Equal, but floats to 1e-9 relative."""
    if isinstance(expected, dict):
        assert set(found) == set(expected), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, value in enumerate(expected):
            assert_same(found[i], value, f"{where}/{i}")
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=1e-9), f"{where}: {found} {expected}"
    else:
        assert found == expected, where


def written(folder: Path, **more: Any) -> Path:
    """A small database with CPU and GPU metrics; ``more`` goes to ``write_database``."""
    rng = np.random.default_rng(3)
    tree = random_tree(rng, 40)
    names = ["CPUTIME (sec)", "GPUOP (sec)"]
    threads = [Measured({name: rng.random(40) for name in names}) for _ in range(2)]
    write_database(folder / "made.d", tree, threads, **more)
    return folder / "made.d"
