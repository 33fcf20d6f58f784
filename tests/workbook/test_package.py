"""The installation: ranges, lock and conda environment in step; rooms that stay apart."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import metadata, version
from pathlib import Path

import pytest
import yaml
from commands import run_commands, run_python
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = ("dlrm_core", "dlrm_kernels", "dlrm_ranks", "dlrm_workbook", "dlrm_studies")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = {
    canonicalize_name(requirement.name): requirement
    for line in (ROOT / "requirements.lock").read_text().splitlines()
    if line and not line.startswith("#")
    for requirement in [Requirement(line)]
}
RANGES = [
    Requirement(text) for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]
]


@pytest.mark.parametrize("wanted", RANGES, ids=lambda requirement: requirement.name)
def test_the_lock_satisfies_every_range(wanted):
    locked = LOCK[canonicalize_name(wanted.name)]
    (pin,) = locked.specifier
    assert pin.operator == "=="
    assert wanted.specifier.contains(pin.version)


def test_the_lock_is_exact_and_portable():
    for requirement in LOCK.values():
        (pin,) = requirement.specifier
        assert pin.operator == "==" and "+" not in pin.version, requirement
    assert str(LOCK["torch"]) == "torch==2.13.0"
    assert str(LOCK["llnl-hatchet"]) == "llnl-hatchet==2026.2.0"
    assert "hatchet" not in LOCK


def test_what_is_installed_is_the_lock():
    for name, requirement in LOCK.items():
        (pin,) = requirement.specifier
        assert version(name).partition("+")[0] == pin.version


def test_the_lock_installs_on_every_python_that_the_readme_names():
    """Debian 12 has Python 3.11.2; soupsieve 4.1.1, which needs 3.11.5, ended make setup."""
    oldest = str(PROJECT["requires-python"]).removeprefix(">=") + ".0"
    for name in LOCK:
        wanted = metadata(name)["Requires-Python"]
        if wanted:
            refused = [
                python
                for python in (oldest, "3.12.0", "3.13.0")
                if python not in SpecifierSet(wanted)
            ]
            assert not refused, (name, wanted, refused)


def test_torchrec_is_installed_as_its_message_says():
    """It is in no range and no lock: its package declares FBGEMM's CUDA build."""
    from dlrm_ranks.plan import INSTALL

    command = "pip install --no-deps torchrec==1.8.0"
    assert command in INSTALL
    assert "--no-deps torchrec==1.8.0" in (ROOT / "Makefile").read_text()
    assert command in (ROOT / "environment.yml").read_text()
    extra = [Requirement(text) for text in PROJECT["optional-dependencies"]["distributed"]]
    for wanted in extra:
        assert wanted.specifier == LOCK[canonicalize_name(wanted.name)].specifier, wanted


def test_conda_users_get_what_running_needs():
    """The ranges of pyproject.toml under conda's names; no tools for tests, no FBGEMM."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip,) = (d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert pip[-1] == "-e ."
    texts = [d for d in environment["dependencies"] if isinstance(d, str)] + pip[:-1]
    given = {canonicalize_name(r.name): r.specifier for r in map(Requirement, texts)}
    assert given.pop("python") == SpecifierSet(">=3.11,<3.14")
    assert PROJECT["requires-python"] == ">=3.11"
    assert given.pop("pip") == SpecifierSet()
    wanted = {
        {"torch": "pytorch"}.get(each.name, canonicalize_name(each.name)): each.specifier
        for each in map(Requirement, PROJECT["dependencies"])
    }
    assert given == wanted


def test_every_make_target_of_the_readme_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"setup", "report", "test", "lab", "bench", "gpu-check", "soak", "clean"} <= targets
    used = set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert used <= targets


def test_readme_names_only_files_that_exist():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"parameters/[a-z0-9_]+\.yaml", text):
        assert (ROOT / name).exists() or name == "parameters/mine.yaml", name


def test_setting_up_twice_does_nothing():
    if not (ROOT / ".venv" / ".set-up").exists():
        pytest.skip("not set up by make (another environment runs these tests)")
    done = subprocess.run(
        ["make", "--dry-run", "setup"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "pip" not in done.stdout


def test_a_page_explains_a_profile_and_a_run_is_profiled_without_torch():
    """Seconds of every page: of torch the analyses need only names, of nbformat nothing; what is
    profiled runs in a process of its own."""
    code = """
import os, sys
os.environ["PLOTLY_RENDERER"] = "plotly_mimetype"
import dlrm_workbook.runner.notebook
from dlrm_workbook.recordings.measure import choose_engine, measure, second_profile
from dlrm_workbook.show import bottlenecks, gpu, idle, roofline as roofline_figures
from dlrm_workbook.analysis import findings, idleness, launches, roofline, verdict, whatif
from dlrm_workbook.show.theme import figure
figure("title", 100)._ipython_display_()
print([name for name in ("torch", "nbformat", "jsonschema") if name in sys.modules])
"""
    assert run_python(code).splitlines()[-1] == "[]"


def test_the_command_line_leaves_the_modules_as_they_are():
    from dlrm_workbook import cli

    with cli._without_grammars():
        pass
    assert sys.modules.get("rfc3987_syntax", sys) is not None


def test_what_runs_a_module_stands_last_in_it():
    """What is defined below it does not exist yet when the module runs as a program."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            body = ast.parse(path.read_text(encoding="utf-8")).body
            runs = [
                at
                for at, statement in enumerate(body)
                if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
            ]
            assert all(at == len(body) - 1 for at in runs), path


def in_checkout(folder):
    return {path.name for path in (ROOT / folder).iterdir() if path.suffix in (".yaml", ".ipynb")}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with a wheel's content, as `pip install --target` leaves it, elsewhere."""
    top = tmp_path_factory.mktemp("Ort für Räder")
    source = top / "source"
    source.mkdir()
    names = [*PACKAGES, "notebooks", "parameters", "benchmarks"]
    for name in names:  # a build writes beside its sources
        leave = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=leave)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    choices = ["--no-deps", "--no-build-isolation", "--no-compile", "--target", str(top / "site")]
    subprocess.run([*pip, *choices, str(source)], check=True, cwd=top)
    shutil.rmtree(source)
    return top


def test_a_wheel_holds_notebooks_and_parameters_once(installed):
    site = installed / "site"
    assert {p.name for p in (site / "dlrm_core" / "parameters").iterdir()} == in_checkout(
        "parameters"
    )
    for folder, count in (("notebooks", ".ipynb"), ("results", ".json"), ("samples", "")):
        assert [p for p in (site / "dlrm_workbook" / folder).iterdir() if p.name.endswith(count)]
    found = {p.name for p in (site / "dlrm_workbook" / "notebooks").iterdir()}
    assert found == in_checkout("notebooks")
    assert {p.name for p in site.iterdir() if p.name.startswith("dlrm")} == {
        *PACKAGES,
        f"dlrm_workbook-{PROJECT['version']}.dist-info",
    }
    data = {path.name for path in (site / "dlrm_studies").rglob("*.[cy]*") if path.stat().st_size}
    assert data >= {"columns.csv", "links.csv", "options.csv", "record.csv", "shapes.yaml"}
    assert not [path for path in site.rglob("*") if path.is_symlink()]


def test_what_is_installed_works_without_the_checkout(installed):
    place = installed / "ein Platz"
    place.mkdir()

    environment = os.environ | {"PYTHONPATH": str(installed / "site"), "LANG": "C", "LC_ALL": "C"}
    tiny = ["-p", "training.batches=3", "-p", "training.batch_size=16"]
    helped, columns, listed, missing, trained, made, again = run_commands(
        [
            *(["--help"], ["help", "columns", "kernel_table"], ["parameters"]),
            *(["train", "-f", "none"], ["train", "-f", "quick", *tiny]),
            *(["new", "mein Heft"], ["new", "mein Heft"]),
        ],
        place,
        environment,
    )
    assert "copy the notebooks" in helped.out and "`short_name`" in columns.out
    assert "| `batch_size`" in listed.out
    assert missing.code == 2 and "known: deepspark" in missing.err
    assert json.loads(trained.out.splitlines()[-1])["samples_per_second"] > 0, trained.err
    folder = place / "mein Heft"
    assert made.code == 0
    assert {p.name for p in folder.iterdir()} == {"notebooks", "parameters"}
    for name in ("notebooks", "parameters"):
        assert {p.name for p in (folder / name).iterdir()} == in_checkout(name)
    assert again.code == 2 and "is not empty" in again.err and "Traceback" not in again.err
    where = (
        "from dlrm_workbook.ground.runs import *; print(NOTEBOOKS, DEFAULT_OUTPUT_ROOT, sep='|')"
    )
    for cwd, notebooks, outputs in (
        (place, installed / "site" / "dlrm_workbook" / "notebooks", place / "outputs"),
        (folder, folder / "notebooks", folder / "outputs"),
        (folder / "notebooks", folder / "notebooks", folder / "outputs"),
    ):
        said = subprocess.check_output(
            [sys.executable, "-c", where], cwd=cwd, env=environment, text=True
        )
        assert said.strip() == f"{notebooks}|{outputs}"
