"""The core without the other two packages, on a machine with torch, numpy and pyyaml alone."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = '''
import importlib.metadata, os, re, runpy, sys


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
sys.argv = ["dlrm", *sys.argv[1:]]
runpy.run_module("dlrm_core", run_name="__main__")
'''


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    shutil.copytree(
        ROOT / "dlrm_core", folder / "dlrm_core", ignore=shutil.ignore_patterns("__pycache__")
    )
    return folder


def run(core, *arguments):
    file = ROOT / "parameters" / "quick.yaml"
    return subprocess.run(
        # isolated: neither PYTHONPATH nor the folder of an installed project is seen
        [sys.executable, "-I", "-c", PROGRAM, *arguments[:1], "-f", str(file), *arguments[1:]],
        cwd=core,
        capture_output=True,
        text=True,
        timeout=250,
    )


def test_the_core_trains_alone(core):
    options = ("-p", "training.embedding_backend=torch", "-p", "training.dense_backend=torch")
    done = run(core, "train", "-p", "training.batches=3", *options)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["status"] == "finished" and last["iterations"] == 3
    assert last["samples_per_second"] > 0 and last["ms_per_iteration"] > 0 and last["loss"] > 0
    assert last["power_w"] is None and last["power"]["not_measured"]


def test_an_engine_that_is_not_there_is_one_sentence(core):
    done = run(core, "train", "-p", "training.embedding_backend=fused")
    assert done.returncode == 2
    sentence = done.stderr.strip().splitlines()[-1]
    assert "training.embedding_backend: fused" in sentence and "dlrm_kernels" in sentence
    assert "Traceback" not in done.stderr


def test_what_the_workbook_has_is_one_sentence(core):
    done = run(core, "infer")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    sentence = "dlrm infer needs the package dlrm_workbook, which is not installed"
    assert sentence in done.stderr.strip().splitlines()[-1]


def test_the_core_evaluates_alone(core):
    done = run(core, "evaluate", "-p", "training.embedding_backend=torch")
    assert done.returncode == 0, done.stderr
    assert 0.0 <= json.loads(done.stdout.splitlines()[-1])["auc"] <= 1.0


def test_the_loop_loads_few_modules_of_the_core():
    """What a newcomer has to read of it: the path, and what stands below."""
    code = (
        "import sys, dlrm_core.train\n"
        "print(*(name for name in sys.modules if name.split('.')[0] == 'dlrm_core'))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert len(done.stdout.split()) <= 20, done.stdout
