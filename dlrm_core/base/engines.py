"""How the core finds a faster engine: by its name, when a parameter asks for it.

The core computes everything with torch and numpy. What is faster lies in the package
``dlrm_kernels``, what trains on several ranks in ``dlrm_ranks``; both import the core and are
never imported by it: a name in :data:`ENGINES` leads to its module, loaded at the first use.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from typing import Any

from dlrm_core.base.errors import MissingToolError

PACKAGE, RANKS = "dlrm_kernels", "dlrm_ranks"

ENGINES = {
    "fused embeddings": ("embeddings.fused_cpu", "training.embedding_backend: fused"),
    "fused embeddings on a GPU": ("embeddings.fused_gpu", "training.embedding_backend: fused"),
    "FBGEMM": ("embeddings.fbgemm", "training.embedding_backend: fbgemm"),
    "choice of back end": ("embeddings.choose", "training.embedding_backend: auto"),
    "tables in two places": ("embeddings.host_tables", "training.embeddings_on_gpu_bytes"),
    "fused dense part": ("dense", "training.dense_backend: fused"),
    "fused dense part on a GPU": ("interaction_gpu", "training.dense_backend: fused"),
    "choice of dense part": (
        "dense_choice",
        "training.dense_backend: auto and training.fp32_matmul: auto",
    ),
    "fp32 products": ("products", "training.fp32_matmul and training.tf32"),
    "rows of 2 bytes": ("embeddings.narrow_rows", "model.embedding_precision: bf16 and fp16"),
    "pages of tables": ("embeddings.pages", "training.embedding_backend"),
    "memory forecast": ("memory", "dlrm capacity"),
    "staging of batches": ("staging", "data.loader: prefetch on a GPU"),
    "facebook's random numbers": (
        "facebook_random",
        "model.init: facebook and data.generator: facebook",
    ),
    "facebook's random batches": ("facebook_replay", "data.generator: facebook"),
    "matrix tiles": ("tiles.machine", "training.fp32_matmul: bf16x2 and bf16x3"),
    "CUDA graphs": ("cuda_graphs", "training.cuda_graphs: true"),
    "data kernels": ("data_sets", "dlrm data, data.generator: teacher"),
}
_OF_RANKS = ("trainer", "predictor", "watch", "plan", "step", "tables", "world", "collectives")
_ASKED = "training on several ranks (torchrun)"
ENGINES |= {f"several ranks: {name}": (name, _ASKED) for name in _OF_RANKS}
"""Name of an engine to its module in its package, and what in the parameters asks for it."""


def package_of(name: str) -> str:
    """The package that an engine lies in."""
    return RANKS if name.startswith("several ranks") else PACKAGE


def find_engine(name: str) -> Any:
    """The module of an engine; None where its package is not installed."""
    package = package_of(name)
    try:
        importlib.import_module(package)
    except ModuleNotFoundError:
        return None
    return importlib.import_module(f"{package}.{ENGINES[name][0]}")


def optional_engine(name: str) -> Any:
    """The module of an engine; None where its package, or what that compiles with, is missing."""
    try:
        return find_engine(name)
    except ImportError:
        return None


def engine(name: str) -> Any:
    """The module of an engine.

    Raises MissingToolError if its package is not installed; naming the parameter that needs it.
    """
    module = find_engine(name)
    if module is None:
        raise MissingToolError(
            f"{ENGINES[name][1]} needs the package {package_of(name)} (the engine {name!r}), which "
            "is not installed beside dlrm_core; leave the parameter out, or install the whole "
            "project"
        )
    return module


def choose(
    name: str, parameters: Any, plain: Mapping[str, str], *about: Any
) -> tuple[Any, list[str]]:
    """The parameters with a choice in place of each ``auto``, and the notices that say why.

    The engine ``name`` chooses, told the parameters and ``about``; where it is not installed, the
    leaves of ``training`` get what ``plain`` has for them.
    """
    asked = {leaf: plain[leaf] for leaf in plain if getattr(parameters.training, leaf) == "auto"}
    if not asked:
        return parameters, []
    if (chooser := find_engine(name)) is not None:
        return chooser.resolve(parameters, *about)
    said = "; ".join(f"training.{leaf} auto: {value}" for leaf, value in asked.items())
    notice = f"{said}; {package_of(name)}, which chooses, is not there"
    return parameters.with_training(**asked), [notice]


def function_at(place: str, needed_by: str) -> Any:
    """The function at ``module:function``, of whatever package, which a command needs.

    Raises MissingToolError if the package is not installed.
    """
    package = place.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise MissingToolError(
            f"{needed_by} needs the package {package}, which is not installed beside dlrm_core; "
            "install the whole project"
        )
    return pkgutil.resolve_name(place)
