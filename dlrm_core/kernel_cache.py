"""Where numba keeps what it compiles; imported by programs that do without torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def kernel_cache(folder: Path) -> Iterator[None]:
    """Let numba keep what is compiled meanwhile in a folder."""
    from numba.core import config as settings

    config: Any = settings  # its fields are made at run time
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before
