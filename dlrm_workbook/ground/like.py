"""``--like``: the command line of another DLRM program as parameters.

Each :class:`Script` says of every flag which parameter it becomes, or why it is refused, or why
it changes nothing here; ``dlrm help flags`` prints them. A flag that is left out has the script's
default, not ours. Nothing of the command is run.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NoReturn

from dlrm_core.base.errors import InputError
from dlrm_core.base.settings import shown
from dlrm_core.config import GivenSections, parameters_from_sections
from dlrm_workbook.ground.tables import rows_of


def switch(text: str) -> bool:
    """What absl reads of ``--flag=TEXT`` (an ArgumentTypeError refuses other texts); without text
    such a flag means true, ``--noflag`` false."""
    if text.lower() not in ("true", "t", "1", "false", "f", "0"):
        raise argparse.ArgumentTypeError(f"{shown(text)}, expected true or false")
    return text.lower() in ("true", "t", "1")


def separated(mark: str, kind: Callable[[str], Any], expected: str) -> Callable[[str], list[Any]]:
    """A reader of lists with ``mark`` between their values."""

    def read(text: str) -> list[Any]:
        try:
            return [kind(word) for word in text.split(mark)]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shown(text)}, expected {expected}") from None

    return read


@dataclass(frozen=True)
class Flag:
    """One flag of a script.

    ``read`` makes a value of the word after the flag; None: the flag takes no word and means
    true. Exactly one holds: the value becomes ``parameter``; a value other than the default is
    refused, for the reason ``refused``; or the flag has no effect, for the reason ``unused``.
    """

    name: str
    read: Callable[[str], Any] | None
    default: Any
    parameter: str = ""
    refused: str = ""
    unused: str = ""

    @property
    def key(self) -> str:
        """The name that argparse gives the flag's value."""
        return self.name.removeprefix("--").replace("-", "_")


READERS: dict[str, Callable[[str], Any] | None] = {
    "": None,
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "switch": switch,
    "int-": separated("-", int, "whole numbers such as 4-3-2"),
    "float-": separated("-", float, "numbers such as 1.0-2.5"),
    "int,": separated(",", int, "whole numbers such as 512,256,128"),
}
"""What a flag's word is read as, by its name in the file; nothing: the flag takes none."""


def flags_of(whose: str) -> tuple[Flag, ...]:
    """All flags of a script, in the order of its own help."""
    return tuple(_flag(row) for row in rows_of(__file__, "flags.csv") if row["script"] == whose)


def _flag(row: Mapping[str, str]) -> Flag:
    read, text = READERS[row["reads"]], row["default"]
    default: Any = None
    if read is None or read in (bool, switch):
        # bool("false") is true, as a script reads it; the file means false
        default = text == "true"
    elif text != "(none)":
        default = read(text)
    return Flag(row["flag"], read, default, **{row["becomes"]: row["parameter_or_why"]})


@dataclass(frozen=True)
class Script:
    """A program whose commands are translated.

    Attributes:
        whose: its publisher.
        names: of its file.
        sections: makes a parameters file's sections of the values of all flags, by
            :attr:`Flag.key`, and of those that the command has.
        launched: whether programs that start several processes may stand before it.
    """

    whose: str
    names: tuple[str, ...]
    flags: tuple[Flag, ...]
    sections: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
    launched: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = message if len(message) <= 300 else message[:300] + "..."
        raise InputError(f"--like: {message}")


def translated(command: str, scripts: Sequence[Script]) -> tuple[GivenSections, list[str]]:
    """The parameters that a command stands for.

    Args:
        command: as typed into a shell, ``[python] [FOLDER/]SCRIPT --flag ...``; quotes and
            abbreviated flags are read as a shell and the script read them.
        scripts: those that are known.

    Returns:
        The parameters, which are valid (but for a data set that is not there yet); and a
        sentence for each flag that was given and has no effect here, or another one than its
        spelling suggests.

    Raises:
        InputError: it is no such command, a flag is unknown or refused, or the values do not
            fit together. The message names the flag.
    """
    script, name, words, notes = _script_of(command, scripts)
    given = _given(script, name, words)
    for flag in script.flags:
        value = given.get(flag.key, flag.default)
        if flag.refused and value != flag.default:
            spelt = flag.name if flag.read is None else f"{flag.name}={value}"
            raise InputError(f"--like: {spelt} is not supported: {flag.refused}")
    notes += [
        f"{flag.name} has no effect: {flag.unused}"
        for flag in script.flags
        if flag.unused and flag.key in given
    ]
    notes += [
        f"{flag.name} is true whatever word follows: the script reads it so"
        for flag in script.flags
        if flag.parameter and flag.read is bool and given.get(flag.key)
    ]
    values = {flag.key: flag.default for flag in script.flags} | given
    sections = GivenSections(f"like-{PurePath(name).stem}", script.sections(values, given))
    flag_of = {flag.parameter: flag.name for flag in script.flags if flag.parameter}
    try:
        parameters_from_sections(_checkable(sections.tree))
    except InputError as error:
        message = re.sub(r"\w+\.\w+", lambda found: flag_of.get(found[0], found[0]), str(error))
        raise InputError(f"--like: {message}") from None
    return sections, notes


def _given(script: Script, name: str, words: list[str]) -> dict[str, Any]:
    parser = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for flag in script.flags:
        if flag.read is None:
            parser.add_argument(flag.name, dest=flag.key, action="store_true")
        elif flag.read is switch:
            parser.add_argument(flag.name, dest=flag.key, type=switch, nargs="?", const=True)
            parser.add_argument(f"--no{flag.name[2:]}", dest=flag.key, action="store_false")
        else:
            parser.add_argument(flag.name, dest=flag.key, type=flag.read)
    parsed, unknown = parser.parse_known_args(words)
    if unknown:
        raise InputError(f"--like: {name} takes no {shown(unknown[0])}")
    return vars(parsed)


def _checkable(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The sections, with one small table where only a data set that is not there says them."""
    model, path = tree["model"], tree["data"].get("path")
    if model.get("table_rows") is not None or Path(path or "").exists():
        return tree
    return {**tree, "model": {"dense_features": 1, **model, "tables": 1, "table_rows": [1]}}


def _script_of(command: str, scripts: Sequence[Script]) -> tuple[Script, str, list[str], list[str]]:
    """The script of a command, its name, the words after it, and notes on the others."""
    try:
        # a command that was broken over lines keeps its backslashes between single quotes
        words = shlex.split(command.replace("\\\n", " "))
    except ValueError as error:
        raise InputError(f"--like: {shown(command)} is no command: {error}") from None
    by_name = {name: script for script in scripts for name in script.names}
    place = next((i for i, word in enumerate(words) if PurePath(word).name in by_name), None)
    if place is None:
        known = ", ".join(by_name)
        raise InputError(f"--like: {shown(command)} names no script that is known: {known}")
    name = PurePath(words[place]).name
    before, after = words[:place], words[place + 1 :]
    notes = []
    if before and re.fullmatch(r"-[uB]+", before[-1]):
        before.pop()
    if before and re.fullmatch(r"python[\d.]*", PurePath(before[-1]).name):
        before.pop()
    if before and not by_name[name].launched:
        raise InputError(
            f"--like: before {name} stands {shown(shlex.join(before))}, expected python or "
            "nothing: how processes are started and placed is not translated"
        )
    if before:
        notes.append(
            f"{shown(' '.join(before))} is not translated: several ranks are started by torchrun "
            "(docs/scaling.md)"
        )
    end = next((i for i, word in enumerate(after) if re.match(r"\d?[|>&]", word)), len(after))
    if after[end:]:
        notes.append(f"{shown(' '.join(after[end:]))} is the shell's and has no effect")
    return by_name[name], name, after[:end], notes


def choice_of(flag: str, value: str, choices: dict[str, str]) -> str:
    """What a value of a flag is called here; an InputError says that it is none of the choices."""
    if value not in choices:
        raise InputError(f"--like: {flag} is {shown(value)}, expected one of {', '.join(choices)}")
    return choices[value]


def mapped(flags: Sequence[Flag], values: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """The sections with each flag's value at its parameter."""
    for flag in flags:
        if flag.parameter:
            section, _, leaf = flag.parameter.partition(".")
            tree[section][leaf] = values[flag.key]
    return tree
