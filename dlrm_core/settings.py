"""Typed, documented fields for configuration dataclasses, checked in one place."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from dlrm_core.errors import InputError


def setting(
    default: Any,
    meaning: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field with its meaning and the values it may take."""
    metadata = {"meaning": meaning, "minimum": minimum, "maximum": maximum, "choices": choices}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def coerce_section(section: Any, name: str) -> None:
    """Check every field of a frozen dataclass against its annotation and metadata.

    Values that YAML spells in more than one way are brought to one form: lists
    and ``"512-512-64"`` become tuples, integers become floats where a float is
    expected, and so do strings such as ``1e-3``, which YAML 1.1 reads as text.

    Raises:
        InputError: naming ``section.field``, the value and what was expected.
    """
    hints = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        where = f"{name}.{field.name}"
        value = _coerce(getattr(section, field.name), hints[field.name], where)
        _check_range(value, field.metadata, where)
        object.__setattr__(section, field.name, value)


def clash(name: str, section: Any, one: str, other: str, why: str) -> InputError:
    """What to raise where two leaves of a section cannot both be as they are.

    Args:
        name: of the section.
        one, other: the leaves.
        why: they cannot, and what can be done.
    """
    values = []
    for leaf in (one, other):
        value = getattr(section, leaf)
        shown = f"{value:g}" if isinstance(value, float) else repr(value)
        values.append(f"{name}.{leaf} is {shown.lower() if isinstance(value, bool) else shown}")
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
    return {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "some text",
    }[annotation]


def _coerce(value: Any, annotation: Any, where: str) -> Any:
    if isinstance(annotation, types.UnionType):
        if value is None:
            return None
        (annotation,) = (a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is tuple:
        item = typing.get_args(annotation)[0]
        if isinstance(value, str):
            value = [_number(word) for word in value.replace(",", "-").split("-")]
        elif not isinstance(value, list | tuple):
            value = [value]
        if not value:
            raise InputError(f"{where} is empty, expected {describe_type(annotation)}")
        return tuple(_coerce(v, item, f"{where}[{i}]") for i, v in enumerate(value))
    if typing.get_origin(annotation) is Mapping:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise InputError(f"{where} is {value!r}, expected {describe_type(annotation)}")
        item = typing.get_args(annotation)[1]
        return {_coerce(k, str, where): _coerce(v, item, f"{where}: {k}") for k, v in value.items()}
    if annotation is float and isinstance(value, str):
        value = _number(value)
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    # bool is an int in Python; "batch_size: true" must not mean 1
    if type(value) is not annotation:
        raise InputError(f"{where} is {value!r}, expected {describe_type(annotation)}")
    if annotation is float and not math.isfinite(value):
        raise InputError(f"{where} is {value}, expected a finite number")
    return value


def _number(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _check_range(value: Any, metadata: Any, where: str) -> None:
    if value is None or isinstance(value, dict):
        return
    if isinstance(value, tuple):
        for i, item in enumerate(value):
            _check_range(item, metadata, f"{where}[{i}]" if len(value) > 1 else where)
        return
    choices, minimum, maximum = metadata["choices"], metadata["minimum"], metadata["maximum"]
    if choices is not None and value not in choices:
        raise InputError(f"{where} is {value!r}, expected one of {', '.join(choices)}")
    if minimum is not None and value < minimum:
        raise InputError(f"{where} is {value}, expected at least {minimum}")
    if maximum is not None and value > maximum:
        raise InputError(f"{where} is {value}, expected at most {maximum}")


# YAML as people give it to us: plain data, and every complaint in one sentence.

# what safe_load raises: YAML's own errors; ValueError of a date or a number that is none;
# RecursionError of thousands of nested brackets
_REFUSALS = (yaml.YAMLError, ValueError, RecursionError)


class _Loader(yaml.SafeLoader):
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
                raise InputError(f"{key} is given twice, in {where}")
            seen[key] = line
        super().flatten_mapping(node)


def read_yaml(text: str) -> Any:
    """The data of one YAML document; None of an empty one.

    Raises:
        InputError: it is not YAML, holds more than data, or gives a key twice. The
            sentence continues one that names the file or the option.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a safe loader's subclass)
    except InputError:
        raise
    except _REFUSALS as error:
        why = (
            "it is nested too deeply"
            if isinstance(error, RecursionError)
            else " ".join(str(error).split())
        )
        raise InputError(f"is not valid YAML: {why}") from None
