"""How the workbook finds a study: by its name, when a command or a notebook asks for it.

The package ``dlrm_studies`` imports the workbook and is never imported by it: a name in
:data:`STUDIES` leads to its module, loaded at the first use. Without the package everything
else works, and what needs it says so in one sentence.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from typing import Any

from dlrm_core.base.cli import Subcommand
from dlrm_core.base.errors import MissingToolError

PACKAGE = "dlrm_studies"

STUDIES = {
    "commands": ("commands", "a command of a study"),
    "benchmark": ("bench.analyse", "dlrm run benchmark"),
    "scaling": ("scaling.model.record", "dlrm run scaling"),
    "other GPUs": ("other_gpu", "a prediction for other GPUs"),
}
"""Name of a study (a notebook's, where it has one) to its module in the package, and what asks
for it."""

COMMANDS = ("protocols", "bench", "gpu-check", "stability")
"""Subcommands that studies bring."""


def installed() -> bool:
    """Whether the package of the studies is there; it is not imported."""
    return importlib.util.find_spec(PACKAGE) is not None


def require_study(name: str) -> None:
    """Refuse what needs a study where the package is not installed (the MissingToolError names what
    asked for it); other names are let through."""
    if name in STUDIES and not installed():
        raise _missing(STUDIES[name][1])


def study(name: str) -> Any:
    """The module of a study. Where its package is not installed, a MissingToolError names what
    asked for it."""
    require_study(name)
    return importlib.import_module(f"{PACKAGE}.{STUDIES[name][0]}")


def subcommands() -> tuple[Subcommand, ...]:
    """The subcommands that studies bring, or rows that refuse them where there are no studies."""
    if installed():
        rows: tuple[Subcommand, ...] = study("commands").SUBCOMMANDS
        return rows
    handler = f"{__name__}:refuse_command"
    help_text = f"needs the package {PACKAGE}, which is not installed"
    return tuple(Subcommand(name, help_text, _any_words, handler) for name in COMMANDS)


def refuse_command(arguments: argparse.Namespace) -> int:
    """Say which package a subcommand needs: a MissingToolError, always."""
    raise _missing("this command")


def _any_words(parser: argparse.ArgumentParser) -> None:
    """Accept whatever is given, options too: no word begins like one."""
    parser.prefix_chars = ""
    parser.add_argument("words", nargs="*")


def _missing(what: str) -> MissingToolError:
    return MissingToolError(
        f"{what} needs the package {PACKAGE}, which is not installed beside dlrm_workbook; "
        "install the whole project"
    )
