"""Runs that a study makes of somebody's parameters, and the JSON records it keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import plain, write_json
from dlrm_core.base.settings import called, shown
from dlrm_core.config import Parameters
from dlrm_workbook.ground.ledger import read_document

Section = TypeVar("Section")


def run_of_study(parameters: Parameters, **training: Any) -> Parameters:
    """The parameters of one run of a study: from the beginning, without checkpoints or a sweep.

    Args:
        training: fields of ``training`` that the study sets, these included.
    """
    begins = {"resume": "", "checkpoint_every": None, "checkpoint_folder": ""}
    return replace(parameters.with_training(**begins | training), sweep={})


def section_from(kind: type[Section], given: Any, name: str) -> Section:
    """A dataclass of a study's settings as a mapping says; a field left out has its default.

    Raises InputError if it is no mapping, or names a field that ``kind`` does not have.
    """
    if not isinstance(given, Mapping):
        raise InputError(f"{name} is {shown(given)}, expected names with values")
    leaves = [field.name for field in fields(cast(Any, kind))]
    for leaf in given:
        if leaf not in leaves:
            raise InputError(f"{name}.{called(leaf)} is unknown, expected {' or '.join(leaves)}")
    return kind(**given)


@dataclass(frozen=True)
class Record:
    """One kind of record.

    Attributes:
        name: of its file in a benchmark's folder.
        what: it is, for the error of a file that is none.
        schema: that is written, and read.
    """

    name: str
    what: str
    schema: int = 1

    def write(self, file: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Write a record with its schema in front, and return it."""
        document = {"schema": self.schema, **fields}
        write_json(file, plain(document))
        return document

    def read(self, file: Path) -> dict[str, Any]:
        """The record in a file.

        Raises:
            InputError: there is none of this schema.
        """
        return read_document(file, self.what, schema=self.schema)

    def beside(self, results: str) -> dict[str, Any] | None:
        """The record beside a finished benchmark's file; None if there is none.

        Raises:
            InputError: the file there is none of this schema.
        """
        file = Path(results).expanduser().absolute().with_name(self.name)
        return self.read(file) if file.exists() else None
