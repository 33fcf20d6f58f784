"""The core without the other two packages, on a machine with torch, numpy and pyyaml alone."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run_python

ROOT = Path(__file__).parents[2]

PROGRAM = '''
import contextlib, importlib.metadata, io, json, os, re, runpy, sys


def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()


# torch, numpy, pyyaml, and what is installed with them
needed, waiting = set(), ["torch", "numpy", "pyyaml"]
while waiting:
    name = plain(waiting.pop())
    try:
        required = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        continue
    if name not in needed:
        needed.add(name)
        lines = [line for line in required if "extra ==" not in line]
        waiting += [re.match(r"[A-Za-z0-9._-]+", line)[0] for line in lines]
of_package = importlib.metadata.packages_distributions()
allowed = {top for top, names in of_package.items() if needed & {plain(n) for n in names}}


class Only:
    """Finds nothing but the core, the standard library and what is allowed."""

    finders = list(sys.meta_path)

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top != "dlrm_core" and top in of_package and top not in allowed:
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders)
        return next((spec for spec in found if spec is not None), None)


sys.meta_path[:] = [Only()]
for name in ("pandas", "numba", "tqdm", "plotly", "psutil", "safetensors", "dlrm_kernels"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} can be imported")
sys.path.insert(0, os.getcwd())
done = []
for words in json.loads(sys.argv[1]):
    sys.argv, out, err = ["dlrm", *words], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module("dlrm_core", run_name="__main__")
        except SystemExit as end:
            done.append([end.code, out.getvalue(), err.getvalue()])
print(json.dumps(done))
'''


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Exit code, output and last line of errors of each command, one after the other."""
    folder = tmp_path_factory.mktemp("alone")
    leave = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "dlrm_core", folder / "dlrm_core", ignore=leave)
    file = str(ROOT / "parameters" / "quick.yaml")
    plain = ["-p", "training.embedding_backend=torch"]
    commands = {
        "train": [*plain, "-p", "training.dense_backend=torch", "-p", "training.batches=3"],
        "train fused": ["-p", "training.embedding_backend=fused"],
        "infer": [],
        "evaluate": plain,
    }
    words = [[name.split()[0], "-f", file, *more] for name, more in commands.items()]
    # isolated: neither PYTHONPATH nor the folder of an installed project is seen
    command = [sys.executable, "-I", "-c", PROGRAM, json.dumps(words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return dict(zip(commands, json.loads(done.stdout), strict=True))


def test_the_core_trains_and_evaluates_alone(alone):
    code, out, said = alone["train"]
    assert code == 0, said
    last = json.loads(out.splitlines()[-1])
    assert last["status"] == "finished" and last["iterations"] == 3
    assert last["samples_per_second"] > 0 and last["ms_per_iteration"] > 0 and last["loss"] > 0
    assert last["power_w"] is None and last["power"]["not_measured"]
    code, out, said = alone["evaluate"]
    assert code == 0, said
    assert 0.0 <= json.loads(out.splitlines()[-1])["auc"] <= 1.0


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("train fused", "training.embedding_backend: fused.*dlrm_kernels"),
        ("infer", "dlrm infer needs the package dlrm_workbook, which is not installed"),
    ],
)
def test_what_is_not_there_is_one_sentence(alone, command, sentence):
    code, _, said = alone[command]
    assert code == 2 and "Traceback" not in said
    assert re.search(sentence, said.strip().splitlines()[-1])


def test_the_loop_loads_few_modules_of_the_core():
    """What a newcomer has to read of it: the path, and what stands below."""
    code = (
        "import sys, dlrm_core.train\n"
        "print(*(name for name in sys.modules if name.split('.')[0] == 'dlrm_core'))"
    )
    printed = run_python(code)
    assert len(printed.split()) <= 20, printed
