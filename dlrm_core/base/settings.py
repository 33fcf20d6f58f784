"""Typed, documented fields for configuration dataclasses, checked in one place."""

from __future__ import annotations

import dataclasses
import math
import reprlib
import types
import typing
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from dlrm_core.base.errors import InputError


def setting(
    default: Any,
    meaning: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field with its meaning, unless :func:`with_meanings` has it, and its range."""
    metadata = {"meaning": meaning, "minimum": minimum, "maximum": maximum, "choices": choices}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Option:
    """A leaf of a section that belongs to one kind of something.

    Attributes:
        type: of its value, as a dataclass annotates it.
        field: its meaning and range, and its default (:func:`setting`).
        default: what stands for None when the kind is chosen; None where the field's own default
            is a value. An option that may be None is refused beside another kind.
    """

    type: Any
    field: Any
    default: Any = None


def register(kind: Any, base: type, kinds: dict[str, Any], asked: tuple[str, ...]) -> None:
    """Add a class to the kinds of something by its ``kind``.

    Raises TypeError if its name is taken, or it leaves out what others will ask for.
    """
    missing = [name for name in asked if getattr(kind, name, None) is getattr(base, name, None)]
    if missing or kind.kind in kinds:
        reason = f"does not say {', '.join(missing)}" if missing else f"{kind.kind!r} is taken"
        raise TypeError(f"{kind.__name__}: {reason}")
    kinds[kind.kind] = kind


def with_meanings(meanings: Mapping[str, str]) -> typing.Callable[[type], type]:
    """Decorate a section, before it becomes a dataclass: what those leaves mean that do not say."""

    def decorate(section: type) -> type:
        fields = {leaf: vars(section)[leaf] for leaf in section.__annotations__}
        silent = {leaf for leaf, field in fields.items() if not field.metadata["meaning"]}
        if silent != meanings.keys():
            raise TypeError(f"{section.__name__}: no meaning for {silent ^ meanings.keys()}")
        for leaf, meaning in meanings.items():
            described = fields[leaf].metadata | {"meaning": meaning}
            fields[leaf].metadata = types.MappingProxyType(described)
        return section

    return decorate


def with_options(leaf: str, kinds: Mapping[str, Any]) -> typing.Callable[[type], type]:
    """Decorate a section, before it becomes a dataclass: ``leaf`` chooses among kinds.

    The options of all kinds become leaves behind it.
    """

    def decorate(section: type) -> type:
        options = {name: o for kind in kinds.values() for name, o in kind.options.items()}
        annotations = {}
        for name, annotation in section.__annotations__.items():
            annotations[name] = annotation
            if name == leaf:
                annotations |= {option: o.type for option, o in options.items()}
        section.__annotations__ = annotations
        for name, option in options.items():
            setattr(section, name, option.field)
        return section

    return decorate


def explained(kinds: Mapping[str, Any]) -> str:
    """The kinds and what each is, for the meaning of the leaf that chooses among them."""
    return "; ".join(f"'{name}': {kind.about}" for name, kind in kinds.items())


LARGEST_INT = 2**63 - 1
"""The largest whole number that tensors, files and JSON readers hold alike."""

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 80, 80
MOST_SHOWN = 200
"""Characters of a value in a message."""


def shown(value: Any) -> str:
    """A value for a message: its repr, cut where it is long or nested."""
    if isinstance(value, int) and not -(10**40) < value < 10**40:
        # Python refuses to write whole numbers of thousands of digits
        return f"a whole number of about {int(value.bit_length() * math.log10(2)) + 1:,} digits"
    try:
        text = _SHORT.repr(value)
    except ValueError:
        return f"a {type(value).__name__} with a number of thousands of digits"
    # a list of long texts is long though each is cut
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 40]}...{text[-37:]}"


def called(name: Any) -> str:
    """A name for a message: as it is written, if it is one and short."""
    return name if isinstance(name, str) and len(name) <= _SHORT.maxstring else shown(name)


def option_text(option: str) -> str:
    """``-p NAME=VALUE`` for a message, as it was typed if it is short."""
    # a path that is cut short says nothing
    return f"-p {option if len(option) <= MOST_SHOWN else f'{option[: MOST_SHOWN - 3]}...'}"


def require_count(file: Any, where: str, value: Any, most: int = LARGEST_INT) -> int:
    """A whole number that a file says, which must be from 0 to ``most``."""
    if type(value) is not int or not 0 <= value <= most:
        expected = f"a whole number from 0 to {most}" if most != LARGEST_INT else "a whole number"
        raise InputError(f"{file}: {where} is {shown(value)}, expected {expected}")
    return value


def require_form(file: Any, value: Any, form: Any, where: str = "") -> None:
    """Refuse what a file says if it is not of the form that is written.

    Args:
        form: a mapping: exactly these names, each with a value of its form; with ``...`` others
            too, or any names, all of that form. A list of one form: any number of such values.
            A tuple: one of these texts. A number: a whole number from 0 to this. A type: a value
            of it, if a float a finite one.
        where: the value's place in the file, names with dots between; '': all of it.
    """
    place = where or "the file"
    inside = f"{where}." if where else ""
    if isinstance(form, Mapping):
        if not isinstance(value, dict):
            raise InputError(f"{file}: {place} is {shown(value)}, expected names with values")
        names = [name for name in form if name is not ...]
        expected = ", ".join(names)
        for name in names:
            if name not in value:
                raise InputError(f"{file}: {place} has no {name}, expected {expected}")
        for name, item in value.items():
            if name not in form and ... not in form:
                raise InputError(f"{file}: {place} has {called(name)}, expected {expected} only")
            require_form(file, item, form.get(name, form.get(...)), f"{inside}{called(name)}")
    elif isinstance(form, list):
        if not isinstance(value, list):
            raise InputError(f"{file}: {place} is {shown(value)}, expected a list")
        for i, item in enumerate(value):
            require_form(file, item, form[0], f"{where}[{i}]")
    elif isinstance(form, tuple):
        if value not in form:
            raise InputError(
                f"{file}: {place} is {shown(value)}, expected one of {', '.join(form)}"
            )
    elif isinstance(form, int):
        require_count(file, place, value, form)
    elif not isinstance(value, form) or (form is float and not math.isfinite(value)):
        raise InputError(f"{file}: {place} is {shown(value)}, expected {describe_type(form)}")


def coerce_section(section: Any, name: str) -> None:
    """Check every field of a frozen dataclass against its annotation and metadata.

    Values that YAML spells in more than one way are brought to one form: lists
    and ``"512-512-64"`` become tuples, integers become floats where a float is
    expected, and so do strings such as ``1e-3``, which YAML 1.1 reads as text.
    """
    hints = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        leaf, given = field.name, getattr(section, field.name)
        value = coerced(given, hints[leaf], f"{name}.{leaf}", field.metadata)
        object.__setattr__(section, leaf, value)


def refuse_clashes(
    name: str, section: Any, clashes: Mapping[str, bool], reasons: Mapping[str, str]
) -> None:
    """Refuse the first two leaves of the section ``name`` that cannot both be as they are.

    ``clashes`` has of each two, with a space between them, whether that is so; ``reasons`` why.
    """
    for pair, clashes_here in clashes.items():
        if clashes_here:
            one, other = pair.split()
            raise clash(name, section, one, other, reasons[pair])


def clash(name: str, section: Any, one: str, other: str, why: str) -> InputError:
    """What to raise where leaves ``one`` and ``other`` of a section cannot both be as they are."""
    values = []
    for leaf in (one, other):
        value = getattr(section, leaf)
        text = f"{value:g}" if isinstance(value, float) else shown(value)
        values.append(f"{name}.{leaf} is {text.lower() if isinstance(value, bool) else text}")
    return InputError(f"{', but '.join(values)}: {why}")


def describe_type(annotation: Any) -> str:
    """A type as a person says it: 'a whole number', 'a list of whole numbers'..."""
    if isinstance(annotation, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return f"{describe_type(inner[0])} or nothing"
    if typing.get_origin(annotation) is tuple:
        return f"a list of {describe_type(typing.get_args(annotation)[0]).split(' ', 1)[1]}s"
    if typing.get_origin(annotation) is Mapping:
        return "a mapping of text to text"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "some text"}
    return names[annotation]


def coerced(value: Any, annotation: Any, where: str, metadata: Any) -> Any:
    """A value in the one form of a leaf of this type; see :func:`coerce_section`."""
    if isinstance(annotation, types.UnionType):
        if value is None:
            return None
        (annotation,) = (a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is tuple:
        item = typing.get_args(annotation)[0]
        if item is str and not isinstance(value, list | tuple):
            raise _unexpected(where, value, tuple[str, ...])
        if isinstance(value, str):
            value = [_number(word) for word in value.replace(",", "-").split("-")]
        elif not isinstance(value, list | tuple):
            value = [value]
        if not value:
            raise InputError(f"{where} is empty, expected {describe_type(annotation)}")
        place = f"{where}[{{}}]" if len(value) > 1 else where
        return tuple(coerced(v, item, place.format(i), metadata) for i, v in enumerate(value))
    if typing.get_origin(annotation) is Mapping:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise _unexpected(where, value, annotation)
        item = typing.get_args(annotation)[1]
        return {
            coerced(k, str, where, metadata): coerced(v, item, f"{where}: {shown(k)}", metadata)
            for k, v in value.items()
        }
    if annotation is float:
        value = _number(value) if isinstance(value, str) else value
        if type(value) is int:  # bool is an int in Python
            value = float(value) if abs(value) <= LARGEST_INT else math.inf
    # "batch_size: true" must not mean 1
    if type(value) is not annotation:
        raise _unexpected(where, value, annotation)
    if annotation is int and abs(value) > LARGEST_INT:
        raise InputError(f"{where} is {shown(value)}, expected at most {LARGEST_INT:,}")
    if annotation is str:
        check_text(value, where)
    if annotation is float and not math.isfinite(value):
        raise InputError(f"{where} is {value}, expected a finite number")
    choices, minimum, maximum = metadata["choices"], metadata["minimum"], metadata["maximum"]
    if choices is not None and value not in choices:
        raise InputError(f"{where} is {shown(value)}, expected one of {', '.join(choices)}")
    if minimum is not None and value < minimum:
        raise InputError(f"{where} is {value}, expected at least {minimum}")
    if maximum is not None and value > maximum:
        raise InputError(f"{where} is {value}, expected at most {maximum}")
    return value


def _unexpected(where: str, value: Any, annotation: Any) -> InputError:
    return InputError(f"{where} is {shown(value)}, expected {describe_type(annotation)}")


MOST_CHARACTERS = 4096
"""Longest text in a parameters file; Linux has no longer paths."""


def check_text(text: str, where: str) -> None:
    """Refuse a text that no file name, page or terminal takes as it is."""
    if len(text) > MOST_CHARACTERS:
        raise InputError(
            f"{where} has {len(text):,} characters, expected at most {MOST_CHARACTERS:,}"
        )
    odd = next((c for c in text if (c < " " and c not in "\t\n") or "\ud800" <= c <= "\udfff"), "")
    if odd:
        raise InputError(f"{where} is {shown(text)}, expected no character {odd!r}")


def _number(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


# YAML as people give it to us: plain data, and every complaint in one sentence.

# what safe_load raises: YAML's own errors; ValueError of a date or a number that is none,
# OverflowError of one that is too large
_REFUSALS = (yaml.YAMLError, ValueError, OverflowError)

MOST_DEPTH = 50
"""Brackets in brackets; libyaml's recursion ends the process at some thousands."""
MOST_REASON = 300
"""Characters of YAML's own words in a message."""
MOST_VALUES = 100_000
"""Keys and values of a document, and keys of a mapping after merging."""

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):
    """The safe loader, but a key given twice is refused."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """As yaml's, after a look at the keys that are written in this mapping itself.

        Before merging (``<<``), because a merged mapping may be overridden.
        """
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # yaml's own complaint follows
            line = key_node.start_mark.line + 1
            if key in seen:
                where = f"line {line}" if seen[key] == line else f"lines {seen[key]} and {line}"
                raise InputError(f"{called(key)} is given twice, in {where}")
            seen[key] = line
        super().flatten_mapping(node)
        # merges of merges multiply
        if len(node.value) > MOST_VALUES:
            raise InputError(f"a mapping merges more than {MOST_VALUES:,} keys")


def _check_size(text: str) -> None:
    """Refuse a document before anything is made of it."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=_SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MOST_DEPTH:
            raise InputError(f"it is nested more than {MOST_DEPTH} levels deep")
        if number > MOST_VALUES:
            raise InputError(f"it holds more than {MOST_VALUES:,} values")


def read_yaml(text: str) -> Any:
    """The data of one YAML document; None of an empty one.

    Raises InputError if it is not YAML, holds more than data, or gives a key twice. The sentence
    follows a colon behind the name of the file or the option.
    """
    try:
        _check_size(text)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a safe loader's subclass)
    except InputError:
        raise
    except _REFUSALS as error:
        why = " ".join(str(error).split()).replace('in "<unicode string>", ', "in ")
        why = why if len(why) <= MOST_REASON else why[:MOST_REASON] + "..."
        raise InputError(f"this is not valid YAML: {why}") from None
