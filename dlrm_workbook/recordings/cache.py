"""Tables of large recordings, kept in the user's cache folder: a second opening reads only them.

An entry is named by a hash of everything that it follows from: the files and when the file system
says that they changed, what their names are said to mean, and the sources of the readers, so that
no version of the program trusts what another one wrote. It appears when whole and is left out when
it cannot be read; the entries used longest ago make room for new ones. Nothing here is needed:
where the folder cannot be written, recordings are read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import dlrm_core
from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json
from dlrm_workbook.recordings.profile import Profile

LEAST_BYTES = 4 << 20
"""Bytes of the smallest recording that is looked for; smaller ones are read as fast."""

LEAST_SPANS = 400_000
"""Spans and GPU operations of the smallest recording that is kept."""

MOST_BYTES = 2 << 30
"""Bytes of all entries together."""

SETTLED_S = 2.0
"""A file that changed so lately may change again without another time of its change."""


def folder() -> Path:
    """Where the entries are."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dlrm-workbook" / "recordings"


def key_of(path: Path, files: Sequence[Path], parts: Mapping[str, str] | None) -> str | None:
    """The name of the entry of a recording, of which ``files`` are read.

    None where it is too small, has changed just now, or cannot be read.
    """
    try:
        folder()
        told = [file.stat() for file in files]
        changed = max((one.st_ctime for one in told), default=0.0)
        if sum(one.st_size for one in told) < LEAST_BYTES or time.time() - changed < SETTLED_S:
            return None
        readers = Path(__file__).parent
        sources = [*readers.rglob("*.py"), *readers.rglob("*.csv")]
        sources += (readers.parent / "ground").glob("*.py")
        sources.append(Path(dlrm_core.__file__).parent / "parts.py")
        given = [
            [str(path.absolute()), *map(str, files), np.__version__, pd.__version__],
            sorted((parts or {}).items()),
            [(t.st_dev, t.st_ino, t.st_size, t.st_mtime_ns, t.st_ctime_ns) for t in told],
        ]
        digest = hashlib.blake2b(json.dumps(given).encode(), digest_size=20)
        for file in sorted(sources):
            digest.update(f"{file.name}:{file.stat().st_size}:".encode())
            digest.update(file.read_bytes())
    except (OSError, RuntimeError):  # no home folder
        return None
    return digest.hexdigest()


def load(key: str) -> tuple[dict[str, Any], dict[str, Profile]] | None:
    """What was kept: facts, and profiles by their names; None where nothing is."""
    entry = folder() / key
    try:
        if entry.stat().st_uid != os.getuid():
            return None
        head = read_json(entry / "facts.json")
        names = [str(name) for name in head["profiles"]]
        profiles = {name: Profile.load(entry / name) for name in names}
        os.utime(entry)
    except FileNotFoundError:
        return None
    except (OSError, InputError, KeyError, TypeError):
        shutil.rmtree(entry, ignore_errors=True)  # damaged: a new one takes its place
        return None
    return head["facts"], profiles


def keep(key: str, facts: Mapping[str, Any], profiles: Mapping[str, Profile]) -> None:
    """Keep facts and profiles of a large recording, if there is room for them."""
    if sum(len(profile.trace) for profile in profiles.values()) < LEAST_SPANS:
        return
    part = None
    try:
        place = folder()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=place, prefix=".new-"))
        for name, profile in profiles.items():
            profile.write(part / name)
        head = {"profiles": list(profiles), "facts": facts}
        (part / "facts.json").write_text(json.dumps(head))
        _make_room(place, _bytes(part))
        part.rename(place / key)
    except (OSError, RuntimeError, ValueError, TypeError, InputError):
        pass  # a full disk, another process that was faster: the recording is read again
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


def _bytes(entry: Path) -> int:
    return sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())


def _make_room(place: Path, size: int) -> None:
    """Remove the entries used longest ago, and what was never finished. Raises ValueError: the new
    entry alone is too large, or the disk would be nearly full."""
    free = shutil.disk_usage(place).free
    if size > MOST_BYTES or free < MOST_BYTES // 2:
        raise ValueError(f"no room for {size:,} bytes")
    entries = sorted(place.iterdir(), key=lambda entry: -entry.stat().st_mtime)
    for entry in entries:
        if not entry.name.startswith(".new-"):
            size += _bytes(entry)
            if size > MOST_BYTES:
                with contextlib.suppress(OSError):
                    shutil.rmtree(entry)
