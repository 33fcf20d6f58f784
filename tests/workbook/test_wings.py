"""The two wings, found by name: no studies in the workbook, and no ranks by their name."""

import ast
import json
import os
import sys
from pathlib import Path

import pytest
from commands import run_commands

from dlrm_core.base import engines
from dlrm_core.base.errors import MissingToolError
from dlrm_workbook.ground import studies
from dlrm_workbook.samples import __file__ as samples

ROOT = Path(__file__).parents[2]
SAMPLE = str(Path(samples).parent / "seed-cpu")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs commands where neither studies nor ranks can be imported."""
    hidden = tmp_path_factory.mktemp("hidden")
    names = ("dlrm_studies", "dlrm_ranks")
    lines = ["import sys", *(f"sys.modules[{name!r}] = None" for name in names)]
    (hidden / "sitecustomize.py").write_text("\n".join(lines))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(hidden), str(ROOT)])}

    return lambda *commands: run_commands(commands, hidden, environment)


def test_what_needs_a_study_says_so_in_one_sentence(alone):
    asked = [[name, "-f", "seed", "--json", "x.json"] for name in studies.COMMANDS]
    asked += [["run", name, "-f", "seed"] for name in ("scaling", "benchmark")]
    *refused, (code, listed, _) = alone(*asked, ["--help"])
    for words, (refusal, _, told) in zip(asked, refused, strict=True):
        (sentence,) = told.strip().splitlines()
        assert refusal == 2 and "needs the package dlrm_studies" in sentence, words
    assert code == 0 and all(name in listed for name in studies.COMMANDS)


def test_everything_else_works_without_studies(alone, tmp_path):
    options = ["-p", f"profile_run={SAMPLE}", "--output-root", str(tmp_path)]
    done = alone(
        ["doctor", "--json"],
        ["capacity", "-f", "seed", "--json"],
        ["inspect", SAMPLE, "--json"],
        *(["run", name, *options] for name in ("bottlenecks", "explore")),
    )
    (_, doctor, told), *others = done
    assert "dlrm_ranks" in doctor and "Traceback" not in told
    assert [code for code, _, _ in others] == [0] * 4, others
    assert all(json.loads(out) for _, out, _ in others[:2])
    page = Path(others[-1][1].splitlines()[-1], "explore.html").read_text()
    assert "needs the package dlrm_studies" in page


def test_studies_register_what_the_workbook_names():
    assert {row.name for row in studies.study("commands").SUBCOMMANDS} == set(studies.COMMANDS)
    for name in studies.STUDIES:
        assert studies.study(name).__name__.startswith(studies.PACKAGE)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dlrm_studies", None)
    with pytest.raises(MissingToolError, match="dlrm run scaling needs the package dlrm_studies"):
        studies.require_study("scaling")
    studies.require_study("train")
    monkeypatch.setitem(sys.modules, "dlrm_ranks", None)
    with pytest.raises(MissingToolError, match=r"training on several ranks .* dlrm_ranks"):
        engines.engine("several ranks: plan")


def imported(text):
    """Modules that a text imports when it runs; what only a type checker reads is left out."""
    waiting = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


@pytest.mark.parametrize(
    ("wing", "rooms"),
    [
        ("dlrm_ranks", ("dlrm_core", "dlrm_kernels", "dlrm_workbook", "dlrm_studies")),
        ("dlrm_studies", ("dlrm_core", "dlrm_kernels", "dlrm_workbook", "dlrm_ranks")),
    ],
)
def test_nobody_imports_a_wing_by_its_name(wing, rooms):
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for room in rooms
        for path in sorted((ROOT / room).rglob("*.py"))
        if wing in (text := path.read_text(encoding="utf-8"))  # few do: parsing all is slow
        for name in imported(text)
        if name.split(".")[0] == wing
    ]
    assert not found
