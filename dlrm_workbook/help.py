"""What is described where it is defined, as Markdown: ``dlrm help TOPIC``, :func:`describe`.

A topic is a document of sections. A word after it chooses the sections whose heading has the
word, and of the others the rows of tables whose first cell has it.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import yaml

from dlrm_core.base.errors import InputError
from dlrm_core.config import PRESETS
from dlrm_workbook import cli
from dlrm_workbook.analysis.changes import parameters_table
from dlrm_workbook.analysis.devices import DEVICES
from dlrm_workbook.analysis.findings import RULES
from dlrm_workbook.analysis.findings.finding import LEAST_SHARE, Rule
from dlrm_workbook.ground.vendors import SCRIPTS
from dlrm_workbook.show.tables import COLUMNS_FILE, Text
from dlrm_workbook.show.views import VIEWS


def describe(topic: str = "", word: str = "") -> Text:
    """What a topic says, as Markdown; without a topic the list of topics.

    Args:
        topic: a key of :data:`TOPICS`.
        word: choose what is called so: a table, a column, a parameter, a rule, a command.

    Raises:
        InputError: there is no such topic, or nothing in it is called so.
    """
    if not topic:
        rows = [f"| `{name}` | {about} |" for name, (about, _) in TOPICS.items()]
        return Text(_table("| `dlrm help` | prints |", rows))
    if topic not in TOPICS:
        raise InputError(f"no topic {topic!r}; expected one of {', '.join(TOPICS)}")
    document = TOPICS[topic][1]()
    if not word:
        return Text(document)
    sections = re.split(r"^(?=##? )", document, flags=re.MULTILINE)
    chosen = [text for section in sections if (text := _chosen(section, word.lower().strip("`")))]
    if not chosen:
        raise InputError(f"nothing of {topic} is called {word!r}; dlrm help {topic} prints all")
    return Text("\n\n".join(chosen))


def _chosen(section: str, word: str) -> str:
    """The section if its heading has the word, else its rows that begin with it, or nothing.

    A row is one of a table or of a list.
    """
    lines = section.rstrip().splitlines()
    heading = lines[0].lower() if lines else ""
    if word in heading and heading.startswith("## "):
        return "\n".join(lines)
    rows = [
        line
        for line in lines
        if (name := re.match(r"[|-] (`[^|=:]*)", line)) and word in name[1].lower()
    ]
    table = [line for line in lines if line.startswith("|")][:2]
    return "\n".join((lines[0], "", *table, *rows)) if rows else ""


def _table(head: str, rows: Sequence[str]) -> str:
    return "\n".join((head, "| --- " * (head.count("|") - 1) + "|", *rows))


def _commands() -> str:
    sections = []
    for row in cli.SUBCOMMANDS:
        parser = argparse.ArgumentParser(prog=f"dlrm {row.name}", description=row.help)
        row.add_arguments(parser)
        sections.append(f"## `dlrm {row.name}`\n\n```\n{parser.format_help()}```")
    return "\n\n".join(sections)


def _flags() -> str:
    rows = []
    for script in SCRIPTS:
        for flag in script.flags:
            effect = f"refused: {flag.refused}" if flag.refused else f"no effect: {flag.unused}"
            effect = f"`{flag.parameter}`" if flag.parameter else effect
            rows.append(f"| `{flag.name}` | {script.whose} | {effect} |")
    names = "; ".join(f"{script.whose}: {', '.join(script.names)}" for script in SCRIPTS)
    about = (
        "A flag that is refused may still be given with the script's default value. Scripts: "
        f"{names}.\n\n"
    )
    return about + _table("| flag | of | parameter, or what becomes of it |", rows)


def _gpus() -> str:
    rows = [
        f"| `{gpu.name}` | {', '.join(f'{name} {rate:g}' for name, rate in gpu.tflops.items())} "
        f"| {gpu.memory_gb:g} | {gpu.memory_gb_per_s:,} | {gpu.link_gb_per_s:g} | {gpu.source} |"
        for gpu in DEVICES
    ]
    about = (
        "Peaks of dense products (NVIDIA prints Hopper's with sparsity, twice these). A GPU has no "
        "unit for a precision that is absent. The link is one way.\n\n"
    )
    head = "| GPU | 10^12 operations/s | memory, GB | memory, GB/s | link, GB/s | source |"
    return about + _table(head, rows)


def _presets() -> str:
    sections = []
    for file in sorted(PRESETS.glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        comment = re.match(r"(?:#.*\n)*", text)
        about = re.sub(r"^# ?", "", comment[0] if comment else "", flags=re.MULTILINE)
        sections.append(f"## `{file.name}`\n\n{yaml.safe_load(text)['title']}.\n\n{about}".rstrip())
    return "\n\n".join(sections)


def _rule(rule: Rule) -> Iterator[str]:
    """What a rule looks at, its title, advice and thresholds, and kinds of findings that it has."""
    yield f"## `{rule.id}`\n"
    yield (inspect.getdoc(rule.measure) or "").replace("``", "`")
    yield f"\nTitle: {rule.title}.\n\nAdvice: {rule.advice}\n"
    for name, value in dict(_named_by(rule.measure)).items():
        if isinstance(value, int | float):
            meaning = _meanings(rule.measure.__module__).get(name, "")
            yield f"- `{name}` = {value:g}{': ' if meaning else ''}{meaning}"
        elif isinstance(value, dict | tuple):
            for kind in value.values() if isinstance(value, dict) else value:
                if hasattr(kind, "advice"):
                    yield f"- `{kind.id}`: {kind.title}. {kind.advice}"


def _named_by(
    function: Callable[..., Any], seen: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Constants of a module that a function of it names, and those that its helpers name."""
    own = vars(sys.modules[function.__module__])
    for name in function.__code__.co_names:
        value = own.get(name)
        if inspect.isfunction(value) and value.__module__ == function.__module__:
            if name not in seen:
                yield from _named_by(value, (*seen, name))
        elif name.isupper():
            yield name, value


@cache
def _meanings(module: str) -> dict[str, str]:
    """A module's constants with the strings below them."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {
        line.targets[0].id: " ".join(below.value.value.split())
        for line, below in pairwise(body)
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(below.value.value, str)
    }


TOPICS: dict[str, tuple[str, Callable[[], str]]] = {
    "columns": (
        "columns of every table: unit, meaning, formula",
        lambda: COLUMNS_FILE.read_text(encoding="utf-8"),
    ),
    "commands": ("every command with its options", _commands),
    "findings": (
        "rules that name a bottleneck, in the order in which they run: thresholds, advice",
        lambda: (
            f"A rule without a threshold for its share names {LEAST_SHARE:.0%} of the step and "
            "more.\n\n" + "\n\n".join("\n".join(_rule(rule)) for rule in RULES)
        ),
    ),
    "flags": ("flags of other DLRM programs, as --like reads them", _flags),
    "gpus": ("figures of data sheets that predictions and rooflines use", _gpus),
    "parameters": ("every parameter, its default and its meaning", parameters_table),
    "report": (
        "what `explain(...)` can be asked for: each name is a table, most have a figure",
        lambda: (
            "Columns: `dlrm help columns`. `report.absent(NAME)` says why one is empty.\n\n"
            + _table(
                "| `report.NAME` | shows | figure |",
                [
                    f"| `{name}` | {view.title} | {'yes' if view.is_drawn else ''} |"
                    for name, view in VIEWS.items()
                ],
            )
        ),
    ),
    "presets": ("the parameters files that come with the package", _presets),
}
"""Name of a topic to what it prints and the function that makes it."""


def command_help(arguments: argparse.Namespace) -> None:
    """``dlrm help [TOPIC [NAME]]``."""
    print(describe(arguments.topic, arguments.name))
