"""Kernels as machine code: compiled once, kept on disk, run on torch's own threads.

The threads are those of the OpenMP runtime that torch is linked with, entered
through its ``GOMP_parallel`` (libgomp's ABI since GCC 4.9; Intel's and LLVM's runtimes
offer it too). A second pool, such as numba's own, would share the cores with torch's
threads, which go on spinning for a while after each operator. Where the symbol is
missing, Python threads run the kernel: it holds no interpreter lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dlrm_core.base.errors import MissingToolError


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


SOURCES = tuple(sorted(Path(__file__).parent.rglob("*.py")))
"""Files that the kernels and their constants are in."""


class Kernel:
    """A compiled kernel: ``kernel(job_address, threads)`` returns when all threads are done."""

    def __init__(self, function: Callable[[int], None], compiled: Any) -> None:
        self.name = function.__name__
        self._compiled = compiled  # owns the machine code
        self._address: int = compiled.address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_int64)(compiled.address)

    def __call__(self, job: int, threads: int) -> None:
        if threads == 1:
            self._call(job)
        elif (parallel := _torch_threads()) is not None:
            parallel(self._address, job, threads, 0)
        else:
            list(_python_threads(threads).map(self._call, [job] * threads))


@functools.cache
def compile_kernel(function: Callable[[int], None]) -> tuple[Kernel, str]:
    """Machine code for a kernel of this package, and a notice ('' if all is well).

    Raises:
        MissingToolError: numba is not installed.
    """
    require_numba()
    from numba import cfunc, types

    signature = types.void(types.int64)
    folder, notice = cache_folder("kernels", SOURCES)
    if folder is not None:
        try:
            with kernel_cache(folder):
                return Kernel(
                    function, cfunc(signature, cache=True, error_model="numpy")(function)
                ), ""
        except Exception as error:  # whatever a damaged cache file makes pickle raise
            notice = (
                f"compiled kernels kept in {folder} cannot be used ({type(error).__name__}: "
                f"{error}); they are compiled anew, which takes seconds: delete that folder"
            )
    return Kernel(function, cfunc(signature, error_model="numpy")(function)), notice


def why_no_numba() -> str:
    """Why kernels cannot be compiled here; empty if they can."""
    try:
        import numba  # noqa: F401
    except ImportError as error:
        return (
            "numba, which compiles the kernels of training.embedding_backend: fused and "
            f"training.dense_backend: fused for the CPU, is not installed ({error}): "
            "pip install numba"
        )
    return ""


def require_numba() -> None:
    """Raise MissingToolError where numba is missing."""
    if reason := why_no_numba():
        raise MissingToolError(reason)


def compiler_and_processor() -> str:
    """What machine code depends on beside its source: compiler versions, the CPU and its flags."""
    import llvmlite
    import numba
    from llvmlite import binding

    features = binding.get_host_cpu_features().flatten()
    return f"{numba.__version__} {llvmlite.__version__} {binding.get_host_cpu_name()} {features}"


@functools.cache
def cache_folder(name: str, sources: tuple[Path, ...]) -> tuple[Path | None, str]:
    """Where compiled kernels are kept, or None and why not.

    Args:
        name: begins the folder's name, which carries the compiler, the processor and the kernels'
            sources as well: numba looks at one file's date only, and kernels call functions of
            other files.
        sources: files that the kernels and their constants are in.
    """
    digest = hashlib.sha256(compiler_and_processor().encode())
    for source in sources:
        digest.update(source.read_bytes())
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(base) if base else Path.home() / ".cache"
        folder = folder.absolute() / "dlrm-workbook" / f"{name}-{digest.hexdigest()[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:
        return None, (
            f"no writable folder for compiled kernels ({error}): every run compiles them anew, "
            "which takes seconds; set XDG_CACHE_HOME to a writable folder"
        )
    return folder, ""


@functools.cache
def _torch_threads() -> Callable[[int, int, int, int], None] | None:
    """``GOMP_parallel(function, argument, threads, flags)`` of torch's OpenMP, or None."""
    import torch  # programs that make data sets do without it

    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # a symbol is looked for in the library and in what it is linked with
        parallel = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


@functools.cache
def _python_threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="embedding")
