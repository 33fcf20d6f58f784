"""Programs in processes of their own; several commands of ``dlrm`` share one, for each imports
for seconds."""

import json
import os
import subprocess
import sys
import time
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


def run_python(code, *arguments, **settings):
    """What a program of these lines prints; the test fails with its errors if the program does."""
    words = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, **{"timeout": 280} | settings)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def wait_until(true, seconds=150.0, running=()):
    """What ``true`` gives once it gives something; until then those processes must be running."""
    until = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < until, "nothing happened in time"
        assert all(process.poll() is None for process in running), "a process has ended"
        time.sleep(0.05)
    return found


def run_commands(commands, folder, environment=os.environ, sizes=None):
    """What came of commands that ran in a folder; ``sizes``: the most bytes of a file for each."""
    given = json.dumps([*zip(commands, sizes or [None] * len(commands), strict=True)])
    printed = run_python(PROGRAM, given, env=environment, cwd=folder, timeout=None)
    return [Done(*each) for each in json.loads(printed.splitlines()[-1])]
