"""Runs that a study makes of somebody's parameters, and the JSON records it keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlrm_core.base.files import plain, write_json
from dlrm_core.config import Parameters
from dlrm_workbook.ground.ledger import read_document


def run_of_study(parameters: Parameters, **training: Any) -> Parameters:
    """The parameters of one run of a study: from the beginning, without checkpoints or a sweep.

    Args:
        training: fields of ``training`` that the study sets, these included.
    """
    begins = {"resume": "", "checkpoint_every": None, "checkpoint_folder": ""}
    return replace(parameters.with_training(**begins | training), sweep={})


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
