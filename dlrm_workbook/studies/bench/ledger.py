"""The JSON document of a benchmark: every run is in it as soon as it ends.

A benchmark that was killed goes on with the same file, and further cases are added to one
that is finished, if both were measured with the same settings on the same machine.
docs/benchmark.md describes the document.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm_core.config import parameters_from_sections
from dlrm_core.errors import InputError
from dlrm_core.files import plain, read_json, write_json
from dlrm_core.machine import machine_facts
from dlrm_workbook.studies.bench.cases import Case

SCHEMA = 2
"""Of the document."""


@dataclass
class Ledger:
    """The document of a benchmark and its file, written whole after every run."""

    document: dict[str, Any]
    file: Path | None
    _places: dict[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def open(
        cls, file: Path | None, settings: dict[str, Any], command: str, resume: bool
    ) -> Ledger:
        """A new document, or the one in the file to go on with.

        Raises:
            InputError: that is of other settings, another machine or other versions.
        """
        document: dict[str, Any] = {
            "kind": "dlrm bench",
            "schema": SCHEMA,
            "commands": [command] if command else [],
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine_facts(),
            "versions": {"torch": torch.__version__, "numpy": np.__version__},
            "settings": settings,
            "cases": [],
            "shares": [],
            "not_measured": _not_measured(),
        }
        if resume and file is not None and file.exists():
            before = read_json(file)
            _require_same(before, document, file)
            merged = {**before["settings"]["contestants"], **document["settings"]["contestants"]}
            document["settings"]["contestants"] = merged
            document["settings"]["environment"] |= before["settings"]["environment"]
            document["commands"] = list(dict.fromkeys([*before["commands"], *document["commands"]]))
            document |= {name: before[name] for name in ("cases", "shares")}
        ledger = cls(document, file)
        for place, found in enumerate(document["cases"]):
            ledger._places[found["case"], found["threads"]] = place
        return ledger

    def case(self, case: Case, threads: int) -> dict[str, Any]:
        """What the document says of a case; empty where it has none yet."""
        place = self._places.get((case.name, threads))
        found: dict[str, Any] = {} if place is None else self.document["cases"][place]
        return found

    def resumable(self, case: Case, threads: int, facts: dict[str, Any]) -> dict[str, Any]:
        """What the document says of a case that is to be measured (on).

        Raises:
            InputError: its runs are of another shape, another number of iterations, or of
                other options.
        """
        before = self.case(case, threads)
        now = json.loads(json.dumps(plain(facts)))
        for name in ("change", "tuned_change", "iterations", "ablated"):
            if before and before.get(name) != now.get(name):
                raise InputError(
                    f"{self.file}: {case.name} cannot be resumed: its {name} was "
                    f"{before.get(name)}, now {now.get(name)}; leave --resume out or give "
                    "another --json"
                )
        return before

    def put(self, case: Case, threads: int, found: dict[str, Any]) -> None:
        """Set what the document says of a case, and write the file."""
        key = case.name, threads
        if key not in self._places:
            self._places[key] = len(self.document["cases"])
            self.document["cases"].append(found)
        else:
            self.document["cases"][self._places[key]] = found
        self.save()

    def save(self) -> None:
        """Write the file, whole."""
        if self.file is not None:
            write_json(self.file, self.document)


def _require_same(before: Any, now: Mapping[str, Any], file: Path) -> None:
    """Refuse to add runs to a benchmark that they cannot be compared with."""
    if not isinstance(before, dict) or before.get("schema") != SCHEMA:
        raise InputError(f"{file}: is no benchmark of this version; leave --resume out")
    pairs: dict[str, tuple[Any, Any]] = {
        name: (before["settings"].get(name), now["settings"][name])
        for name in ("iterations", "warmup", "cores")
    }
    was, wanted = before["settings"].get("reference"), now["settings"]["reference"]
    pairs["reference"] = (_whole(was), _whole(wanted))
    for name, change in now["settings"]["contestants"].items():
        earlier = before["settings"]["contestants"].get(name, change)
        pairs[f"contestant {name}"] = (earlier, change)
    pairs["processor"] = (before["machine"].get("cpu"), now["machine"].get("cpu"))
    pairs["versions"] = (before.get("versions"), now["versions"])
    for name, (was, wanted) in pairs.items():
        if was != wanted:
            shown = "other ones" if name == "reference" else f"{was}, now {wanted}"
            raise InputError(
                f"{file}: cannot be resumed: {name} was {shown}; leave --resume out or give "
                "another --json"
            )


def _whole(sections: Any) -> Any:
    """Parameters as an earlier version wrote them, with the defaults of those it did not have."""
    try:
        return json.loads(json.dumps(plain(parameters_from_sections(sections).to_sections())))
    except (InputError, AttributeError, TypeError):
        return sections


def _not_measured() -> dict[str, str]:
    if torch.cuda.is_available():
        return {}
    return {"gpu": "torch sees no GPU on this machine; make gpu-check measures on one"}
