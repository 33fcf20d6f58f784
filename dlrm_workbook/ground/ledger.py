"""Going on after a stop: a JSON document that names its work and holds what is done.

A benchmark, a study or a data set may take hours, and may be killed at any moment. Its ledger
is one JSON file: what the work is (parameters, versions, whatever must be equal for results to
belong together) and an entry for each part that has ended. Every write replaces the whole file
and returns when the disk has it, so after ``kill -9`` or a power cut the file is whole and
lacks at most the part that was under way. The same request goes on from there; another request
is refused in one sentence, which names what differs and both values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import plain, read_json, write_json

ABSENT = object()
"""In place of a value where one of two documents has none."""
VALUE_LENGTH = 80
"""Characters of a value in a sentence."""


class Ledger:
    """The document of a piece of work, and its file.

    Example::

        ledger = Ledger(
            Path("result.json"),
            {"settings": {"iterations": 20}, "cases": []},
            work=lambda document: document["settings"],
            entries="cases",
            key=("case", "threads"),
            advice="give another --json",
        )
        for case in ("small", "large"):
            if ledger.find(case, 1) is None:
                ledger.put({"case": case, "threads": 1, "ms": measure(case)})

    A document without such a list (a state that is replaced as a whole) leaves ``entries`` out:
    change ``document`` and call :meth:`save`.

    Attributes:
        document: the file's content; of a resumed ledger what the file had, as JSON gives it.
        resumed: whether the file was there.
    """

    def __init__(
        self,
        path: Path | None,
        document: Mapping[str, Any],
        *,
        work: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        entries: str = "",
        key: tuple[str, ...] = (),
        advice: str,
        resume: bool = True,
    ) -> None:
        """Begin a document, or go on with the one in the file. The file is not written yet.

        Args:
            path: of the file; None keeps the document in memory only.
            document: a new one, used where there is no file.
            work: takes from a document all that must be equal for going on. It sees documents
                of earlier versions too, and may bring them into today's form.
            entries: name of the list in the document that has an entry for each part done.
            key: fields by which an entry is found.
            advice: how to go on otherwise; ends the sentence of a refusal.
            resume: False begins anew, and the first :meth:`save` replaces a file that is there.

        Raises:
            InputError: the file cannot be read, is no such document, or is of other work.
        """
        self.path, self._entries, self._key = path, entries, key
        self.resumed = resume and path is not None and path.exists()
        self.document = dict(document)
        if path is not None and self.resumed:
            before = read_json(path)
            try:
                begun = dict(work(before))
                for entry in before[entries] if entries else ():
                    self._key_of(entry)
            except (KeyError, TypeError, ValueError, AttributeError):
                raise InputError(
                    f"{path} is no document that can be gone on with; {advice}"
                ) from None
            require_same(str(path), begun, work(document), advice)
            self.document = before

    @property
    def entries(self) -> list[dict[str, Any]]:
        """All entries, in the order in which they were first put."""
        entries: list[dict[str, Any]] = self.document[self._entries]
        return entries

    def find(self, *key: Any) -> dict[str, Any] | None:
        """The entry with these values of the key's fields; None if there is none yet."""
        wanted = _as_json(key)
        return next((entry for entry in self.entries if self._key_of(entry) == wanted), None)

    def put(self, entry: Mapping[str, Any]) -> None:
        """Add an entry, or replace the one with its key, and write the file."""
        present = self.find(*self._key_of(entry))
        if present is None:
            self.entries.append(dict(entry))
        else:
            self.entries[self.entries.index(present)] = dict(entry)
        self.save()

    def save(self) -> None:
        """Write the file whole, and return when it is on the disk under its name."""
        if self.path is not None:
            write_json(self.path, self.document)

    def _key_of(self, entry: Mapping[str, Any]) -> list[Any]:
        return [entry[name] for name in self._key]


def read_document(path: Path, what: str, **expected: Any) -> dict[str, Any]:
    """A document that was written before, whose keys such as ``schema`` have ``expected`` values.
    An InputError says that the file is missing, no such document, or of another version."""
    document = read_json(path)
    if not isinstance(document, dict) or any(document.get(k) != v for k, v in expected.items()):
        wanted = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in expected.items())
        raise InputError(f"{path} is no {what} of this version ({wanted})")
    return document


def require_same(where: str, begun: Mapping[str, Any], now: Mapping[str, Any], advice: str) -> None:
    """Refuse to go on with other work than was begun; as JSON, a tuple equals a list, NaN null. The
    InputError begins with ``where``, the file or folder of the work, names the first leaf that
    differs (``section.leaf``) and both values, and ends with the advice."""
    difference = _first_difference(_as_json(begun), _as_json(now))
    if difference is None:
        return
    name, was, wanted = difference
    if was is ABSENT:
        text = f"was begun without {name}, but now it is {_short(wanted)}"
    elif wanted is ABSENT:
        text = f"was begun with {name} {_short(was)}, which is not given now"
    else:
        text = f"was begun with {name} {_short(was)}, but now it is {_short(wanted)}"
    raise InputError(f"{where} {text}; {advice}")


def _first_difference(begun: Any, now: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """(dotted name, value begun with, value now) of the first leaf that is not the same."""
    if not isinstance(begun, dict) or not isinstance(now, dict):
        return None if begun == now else (name, begun, now)
    for inner in dict.fromkeys([*now, *begun]):
        path = f"{name}.{inner}" if name else inner
        difference = _first_difference(begun.get(inner, ABSENT), now.get(inner, ABSENT), path)
        if difference is not None:
            return difference
    return None


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(plain(value)))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= VALUE_LENGTH else text[: VALUE_LENGTH - 3] + "..."
