"""Several commands of ``dlrm`` in one process, since each alone would import for seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PROGRAM = """
import contextlib, io, json, resource, sys
from dlrm_workbook.cli import main
hard, done = resource.getrlimit(resource.RLIMIT_FSIZE)[1], []
for words, size in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
    done.append([code, out.getvalue(), err.getvalue()])
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print(json.dumps(done))
"""


class Done(NamedTuple):
    """What came of a command."""

    code: int
    out: str
    err: str


def run_commands(
    commands: Sequence[Sequence[str]],
    folder: Path,
    environment: Mapping[str, str] = os.environ,
    sizes: Sequence[int | None] = (),
) -> list[Done]:
    """Run them one after the other in a folder.

    Args:
        sizes: for each command the most bytes that a file may have; empty: any number.
    """
    given = json.dumps([*zip(commands, sizes or [None] * len(commands), strict=True)])
    words = [sys.executable, "-c", PROGRAM, given]
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Done(*each) for each in json.loads(done.stdout.splitlines()[-1])]
