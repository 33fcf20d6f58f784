"""Functions compiled by numba, kept on disk between runs; numpy does without them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrm_core.kernel_cache import kernel_cache


@functools.cache
def compile_function(
    function: Callable[..., Any], signatures: tuple[str, ...], source: Path
) -> Callable[..., Any] | None:
    """Machine code of a module-level function that frees Python's lock; None without numba.

    Args:
        signatures: numba's, one a combination of argument types.
        source: the file that the function is in; what is kept belongs to its present text.
    """
    try:
        from numba import njit
    except ImportError:
        return None
    make = functools.partial(njit, list(signatures), nogil=True, error_model="numpy")
    folder = _folder(source)
    if folder is not None:
        # whatever a damaged file makes pickle raise: compile anew
        with contextlib.suppress(Exception), kernel_cache(folder):
            return make(cache=True)(function)
    return make()(function)


@functools.cache
def _folder(source: Path) -> Path | None:
    """Where machine code is kept, or None where nothing can be."""
    import numba

    digest = hashlib.sha256(numba.__version__.encode() + source.read_bytes())
    # constants that the functions use are compiled in
    digest.update(source.with_name("draws.py").read_bytes())
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(base) if base else Path.home() / ".cache"
        folder = folder.absolute() / "dlrm-workbook" / f"datasets-{digest.hexdigest()[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError):
        return None
    return folder
