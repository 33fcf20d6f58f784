"""YAML as people give it to us: plain data, and every complaint in one sentence.

``yaml.safe_load`` keeps the last of two equal keys without a word, and gives up with
errors of Python's own on dates that are none and on nesting without end.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

from dlrm_core.errors import InputError

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
