"""Mutated, truncated and spliced databases: what ``tests.campaigns.attacks databases`` reads.

Every case is read whole (facts, description, tables, Profile, Hatchet). It passes if it reads, or
raises ``DatabaseError``.
"""

import json
from pathlib import Path

import numpy as np

from dlrm_core.base.errors import InputError
from dlrm_workbook.recordings.hpctoolkit.database import read_database
from dlrm_workbook.recordings.hpctoolkit.format import DatabaseError
from dlrm_workbook.recordings.hpctoolkit.to_profile import profile_from_database
from dlrm_workbook.recordings.hpctoolkit.views import database_facts, database_summary
from tests.hpctoolkit_tree import random_tree
from tests.hpctoolkit_writer import Measured, write_database

SHARED = Path(__file__).parents[2] / "shared" / "hpctoolkit-databases"
FILES = ("meta.db", "profile.db", "cct.db", "trace.db")
WEIGHTS = (0.5, 0.3, 0.08, 0.12)
VALUES = (0, 1, 7, 8, 0x7FFF, 0xFFFF, 0xFFFFFFFF, 1 << 31, 1 << 40, 1 << 62, (1 << 64) - 1)


def sources(folder: Path) -> list[dict[str, bytes]]:
    """Whole databases as file contents: synthetic ones, and real ones where they are."""
    rng = np.random.default_rng(1)
    for i, (nodes, shape, names, entries) in enumerate(
        [
            (30, "random", ["CPUTIME (sec)"], 2),
            (60, "random", ["GPUOP (sec)", "GKER (sec)", "GKER:COUNT", "GINS", "GINS:STL_ANY"], 1),
            (300, "deep", ["CPUTIME (sec)"], 1),
            (200, "wide", ["REALTIME (sec)"], 1),
        ]
    ):
        functions = ["main", "<gpu kernel>", "gemm<int>", "top_mlp_forward"]
        tree = random_tree(rng, nodes, shape, entries, functions=functions)
        tree.python = frozenset([3])
        threads = [
            Measured(
                {name: rng.random(nodes) * (rng.random(nodes) < 0.3) for name in names},
                (("NODE", 0, 1), ("RANK", r, r), ("THREAD", 0, 0)),
                (np.arange(20) * 1000, rng.integers(0, nodes, 20)),
            )
            for r in range(3)
        ]
        stream = (("NODE", 0, 1), ("GPUCONTEXT", 1, 1), ("GPUSTREAM", 7, 7))
        threads.append(Measured({}, stream, (np.arange(9), np.arange(9))))
        write_database(folder / f"made-{i}", tree, threads, metrics=names)
    places = sorted(folder.iterdir())
    if SHARED.is_dir():
        places += sorted(SHARED.glob("*.d"))
    return [
        {name: (place / name).read_bytes() for name in FILES if (place / name).exists()}
        for place in places
    ]


def mutate(rng: np.random.Generator, whole: list[dict[str, bytes]]) -> dict[str, bytes]:
    """One damaged database: one to four mutations of one of ``whole``."""
    # Small databases first: damage in them hits structure, and they are quick.
    sizes = np.array([sum(map(len, one.values())) for one in whole], np.float64)
    chance = 1 / np.sqrt(sizes)
    made = dict(whole[int(rng.choice(len(whole), p=chance / chance.sum()))])
    for _ in range(min(int(rng.geometric(0.7)), 4)):
        weights = np.array([w for f, w in zip(FILES, WEIGHTS, strict=True) if f in made])
        if not len(weights):
            break
        present = [name for name in FILES if name in made]
        name = present[int(rng.choice(len(present), p=weights / weights.sum()))]
        other = whole[int(rng.integers(len(whole)))].get(name, b"")
        result = _mutate_file(rng, made[name], other)
        if result is None:
            del made[name]
        else:
            made[name] = result
    return made


def _mutate_file(rng: np.random.Generator, data: bytes, other: bytes) -> bytes | None:
    how = int(rng.integers(0, 10))
    if not data:
        return data
    at = int(rng.integers(len(data)))
    if rng.random() < 0.4:  # headers and section heads matter most
        at = int(rng.integers(min(len(data), 256)))
    changed = bytearray(data)
    length = int(rng.integers(1, 64))
    if how <= 2:  # a word becomes a telling or a random one
        at &= ~7
        value = int(rng.choice(np.array(VALUES, np.uint64)))
        if rng.random() < 0.5:
            value = int(rng.integers(0, 2 * len(data)))
        width = int(rng.choice([1, 2, 4, 8]))
        changed[at : at + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    elif how == 3:
        for _ in range(length):
            changed[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    elif how == 4:
        changed[at : at + length] = rng.bytes(length)
    elif how == 5:
        return data[:at]
    elif how == 6:  # splice: the head of one file, the tail of another
        cut = int(rng.integers(len(other) + 1))
        return data[:at] + other[cut:]
    elif how == 7:  # words swapped: pointers that lead elsewhere in the same file
        one, two = at & ~7, int(rng.integers(len(data))) & ~7
        changed[one : one + 8], changed[two : two + 8] = data[two : two + 8], data[one : one + 8]
    elif how == 8:
        return other if rng.random() < 0.7 else None
    else:
        cut = int(rng.integers(len(data)))
        length = int(rng.integers(1, 1 + min(4096, len(data))))
        changed[at:at] = data[cut : cut + length]
    return bytes(changed)


def exercise(folder: Path) -> None:
    """Read everything there is in a database, or say in a DatabaseError why it cannot be read."""
    try:
        database = read_database(folder)
        json.dumps(database_facts(database))
        database_summary(database)
        profile = profile_from_database(database)
        if len(database.tree) < 400:
            profile.to_hatchet()
    except InputError as error:
        assert isinstance(error, DatabaseError), error
        raise
