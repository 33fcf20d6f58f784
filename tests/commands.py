"""Several commands of ``dlrm`` in one process, since each alone would import for seconds."""

import json
import os
import subprocess
import sys
from collections import namedtuple

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

Done = namedtuple("Done", ["code", "out", "err"])


def run_commands(commands, folder, environment=os.environ, sizes=None):
    """What came of commands that ran in a folder; ``sizes``: the most bytes of a file for each."""
    given = json.dumps([*zip(commands, sizes or [None] * len(commands), strict=True)])
    words = [sys.executable, "-c", PROGRAM, given]
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Done(*each) for each in json.loads(done.stdout.splitlines()[-1])]
