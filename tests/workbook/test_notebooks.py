"""Our notebooks: how they are written, by plain papermill, and chained by ``dlrm run all``."""

import ast
import json
import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import plotly.graph_objects as go
import pytest

from dlrm_core.base.errors import InputError
from dlrm_core.config import load_parameters, parameters_from_sections
from dlrm_workbook.analysis.attribution import attribute, coverage
from dlrm_workbook.analysis.findings import findings, limit
from dlrm_workbook.analysis.findings.finding import Finding
from dlrm_workbook.analysis.reference import at_reference, reference
from dlrm_workbook.analysis.sentences import in_markdown
from dlrm_workbook.ground.machine import REPOSITORY
from dlrm_workbook.ground.processes import Progress
from dlrm_workbook.ground.runs import NOTEBOOKS, latest_run
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.runner import notebook as notebook_run
from dlrm_workbook.runner.parameters import assigned_values, declared_parameters
from dlrm_workbook.samples import SAMPLE, sample_profile
from dlrm_workbook.show import profile as about
from dlrm_workbook.show.tables import FORMATS, Shown, Text, TextTable, show
from tests.conftest import Chain

NAMES = ("train", "profile", "bottlenecks")
OURS = [path.stem for path in NOTEBOOKS.glob("*.ipynb")]
WRITTEN = (*NAMES, "compare", "sweep", "benchmark", "scaling")
QUICK = REPOSITORY / "parameters" / "quick.yaml"
SECTIONS = ("title", "model", "data", "training", "profiling")
OWN = {
    "train": {"output_folder", "output_root"},
    "profile": {"output_folder", "output_root"},
    "bottlenecks": {"profile_run", "output_folder", "output_root"},
    "compare": {
        *("change", "against", "steps", "rounds", "iterations", "profile_run", "runs"),
        *("output_folder", "output_root"),
    },
    "sweep": {"sweep_folder", "output_folder", "output_root"},
    "benchmark": {
        *("results", "peer", "torchrec", "precisions", "shapes", "growth"),
        *("ablation", "rounds", "iterations", "threads", "cores"),
        *("protocols", "batch_sizes", "stability", "time_to_train"),
        *("output_folder", "output_root"),
    },
    "scaling": {
        *("record", "ranks", "inside", "between", "ranks_per_node", "gpu", "memory_gb"),
        *("jitter", "hiccups", "output_folder", "output_root"),
    },
}
OTHER_TYPES = {
    **dict.fromkeys(("rounds", "iterations", "cores", "protocols"), "int"),
    **dict.fromkeys(("steps", "torchrec", "ablation"), "bool"),
    **dict.fromkeys(("runs", "precisions", "shapes", "growth", "threads", "batch_sizes"), "list"),
    **dict.fromkeys(("change", "stability", "time_to_train"), "dict"),
    **{"ranks": "list", "ranks_per_node": "int"},
    **dict.fromkeys(("memory_gb", "jitter", "hiccups"), "float"),
}
FIGURE = "application/vnd.plotly.v1+json"


def notebook(name: str) -> Any:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


# ---- as written -----------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
def test_notebook_is_stored_without_outputs_and_thin(name: str) -> None:
    nb = notebook(name)
    nbformat.validate(nb)
    assert nb.metadata.kernelspec.name == "python3"
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < 42_000
    for cell in nb.cells:
        if cell.cell_type != "code":
            continue
        assert not cell.outputs and cell.execution_count is None, "outputs do not go into git"
        assert len(cell.source.splitlines()) <= 25, cell.source.splitlines()[0]
        assert not any(line.startswith(("def ", "class ")) for line in cell.source.splitlines())
    assert nb.cells[0].source.startswith("# ")
    tagged = [cell for cell in nb.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1 and "output_folder" in assigned_values(tagged[0].source)


@pytest.mark.parametrize("name", (*WRITTEN, "explore"))
def test_every_figure_is_introduced(name: str) -> None:
    """Prose before each figure, so that a reader knows what to look for."""
    section = ""
    for cell in notebook(name).cells:
        if cell.cell_type == "markdown":
            section = cell.source
        elif {"headline", "quality"} & {*cell.metadata.get("tags", [])}:
            continue
        elif "figures." in cell.source or "report.figure" in cell.source:
            assert len(section.split()) > 20, section


@pytest.mark.parametrize("name", WRITTEN)
def test_parameters_are_typed_commented_and_the_quick_ones(name: str) -> None:
    declared = declared_parameters(NOTEBOOKS / f"{name}.ipynb")
    # a page about a profile has the parameters that the profile was recorded with
    given = ("profiling",) if name == "bottlenecks" else SECTIONS
    assert set(declared) == {*given, *OWN[name]}
    for key, declaration in declared.items():
        wanted = "dict" if key in SECTIONS[1:] else OTHER_TYPES.get(key, "str")
        assert declaration["inferred_type_name"] == wanted, key
        assert key == "title" or declaration["help"], f"{key} has no comment"
    (cell,) = (c for c in notebook(name).cells if "parameters" in c.metadata.get("tags", []))
    values = assigned_values(cell.source)
    sections = {key: values[key] for key in given}
    if name == "bottlenecks":
        assert sections == {"profiling": {}}
        return
    assert parameters_from_sections(sections).to_sections() == load_parameters(QUICK).to_sections()


# ---- run ------------------------------------------------------------------------


def papermill(name: str, out: Path, *arguments: str) -> Any:
    """Plain papermill, as a user without ``dlrm run`` types it, with a smaller quick run."""
    parameters = out / "parameters.yaml"
    small = QUICK.read_text().replace("batches: 60", "batches: 10")
    # probes take most of a profile's time; the chain of `dlrm run all` has them
    small = small.replace("  warmup: 3\n", "  warmup: 1\n  probes: false\n")
    parameters.write_text(small.replace("  iterations: 20\n", "  iterations: 5\n"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "papermill", "--no-progress-bar"),
            *(str(NOTEBOOKS / f"{name}.ipynb"), str(out / f"{name}.ipynb")),
            *("-f", str(parameters), "-p", "output_root", str(out / "outputs"), *arguments),
        ],
        cwd=out,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return nbformat.read(out / f"{name}.ipynb", as_version=4)


def outputs(nb: Any, kind: str) -> list[Any]:
    found = [o.get("data", {}).get(kind) for c in nb.cells for o in c.get("outputs", [])]
    return [output for output in found if output is not None]


@pytest.mark.notebook
def test_plain_papermill_runs_one_after_the_other(tmp_path: Path) -> None:
    trained = papermill("train", tmp_path)
    assert len(outputs(trained, FIGURE)) == 3
    folder = latest_run(tmp_path / "outputs", "train")
    assert folder is not None
    assert (folder / "metrics.jsonl").read_text().count("\n") == 2
    # the kernel leaves in the folder what it has shown, though it does not know of papermill's file
    kept = nbformat.read(folder / "train.ipynb", as_version=4)
    assert [len(cell.get("outputs", [])) for cell in kept.cells] == [
        len(cell.get("outputs", [])) for cell in trained.cells
    ]
    assert len(outputs(kept, FIGURE)) == 3 and (folder / "train.html").is_file()
    assert "samples/s" in (folder / "verdict.md").read_text()

    # before anything was profiled; in this process, the last one is papermill's
    root, own = str(tmp_path / "outputs"), str(tmp_path / "a")
    shown = run_cells("bottlenecks", output_root=root, output_folder=own)
    text = " ".join(value.markdown for value in shown if isinstance(value, Text))
    assert "recorded sample, not a run of this machine" in text

    papermill("profile", tmp_path)
    measured = latest_run(tmp_path / "outputs", "profile")
    assert measured is not None and (measured / "profile" / "profile.json").is_file()

    explained = papermill("bottlenecks", tmp_path, "-p", "output_folder", str(tmp_path / "b"))
    text = " ".join(outputs(explained, "text/markdown"))
    assert str(measured) in text and "sample" not in text
    # what falls between the parts where others take the core away is nobody's fault
    assert json.loads((tmp_path / "b" / "bottlenecks.json").read_text())["coverage"] > 0.7


@pytest.mark.notebook
def test_run_all_leaves_three_finished_runs(quick_chain: Chain) -> None:
    last, root = quick_chain
    assert last == latest_run(root, "bottlenecks")
    runs = {path.parent: json.loads(path.read_text()) for path in root.glob("*/*/run.json")}
    assert sorted(run["notebook"] for run in runs.values()) == sorted(NAMES)
    for folder, run in runs.items():
        assert run["status"] == "finished"
        datetime.fromisoformat(run["started"])
        assert (folder / f"{run['notebook']}.ipynb").stat().st_size < 700_000
        assert (folder / f"{run['notebook']}.html").is_file()


@pytest.mark.notebook
def test_run_all_writes_the_documented_json(quick_chain: Chain) -> None:
    last, root = quick_chain
    document = json.loads((last / "bottlenecks.json").read_text())
    keys = {"findings", "attribution", "coverage", "profiler", "passes", "not_measured"}
    assert keys <= set(document)
    for file in ("bottlenecks.json", "verdict.md"):
        assert "-f FILE" not in (last / file).read_text(), "the options that were typed"
    # of 6 ms of compute 0.2 ms lie between the parts, and what others take the core away for;
    # the seed run has 99.9 %, see the sample
    assert 0.9 < document["coverage"] <= 1
    named = {row["component"] for row in document["attribution"] if row["time_ms"] > 0}
    assert {"data", "bottom_mlp", "embedding", "interaction", "top_mlp", "loss"} <= named
    assert document["profiler"] in ("torch", "hpctoolkit")
    assert all("dilation" in made for made in document["passes"])
    for row in document["attribution"]:
        assert {"component", "phase", "time_ms", "share"} <= set(row)
    assert sum(row["share"] for row in document["attribution"]) == pytest.approx(1)
    wanted = {"id", "title", "component", "share_of_step", "evidence", "advice", "change"}
    for finding in document["findings"]:
        assert wanted <= set(finding)
        assert set(finding["predicted_speedup"]) == {"low", "mid", "high"}
    ranks = [
        (finding["severity"] != "fails", -finding["predicted_speedup"]["mid"])
        for finding in document["findings"]
    ]
    assert ranks == sorted(ranks)
    assert document["findings"], "quick.yaml makes its data in a Python loop: that is found"
    # explained is the profile of this very chain
    explained = json.loads((last / "run.json").read_text())["parameters"]["profile_run"]
    assert Path(explained) == latest_run(root, "profile")


@pytest.mark.notebook
def test_every_figure_has_its_table(quick_chain: Chain) -> None:
    _, root = quick_chain
    for name, figures in (("train", 3), ("profile", 1), ("bottlenecks", 9)):
        folder = latest_run(root, name)
        assert folder is not None
        nb = nbformat.read(folder / f"{name}.ipynb", as_version=4)
        assert len(outputs(nb, FIGURE)) >= figures
        assert len([t for t in outputs(nb, "text/html") if "<table" in t]) >= figures


# ---- the library behind them ----------------------------------------------------


def test_sample_says_what_it_is_and_is_small() -> None:
    profile = sample_profile()
    profile.validate()
    said = profile.meta["sample"]
    assert "recorded on 20" in said and "cores" in said and "seed.yaml" in said
    assert sum(file.stat().st_size for file in SAMPLE.iterdir()) < 400_000
    assert coverage(attribute(profile)) > 0.99
    assert len(profile.iterations) >= 3
    text = (SAMPLE / "profile.json").read_text()
    assert not any(word in text for word in ("hostname", "/home/", "/work/", "/tmp/", "/root/"))


def test_find_profile_falls_back_to_the_sample(tmp_path: Path) -> None:
    source = notebook_run.find_profile("", tmp_path)
    assert source.folder is None and "sample" in source.sentence
    given = notebook_run.find_profile(str(SAMPLE), tmp_path)
    assert given.folder == SAMPLE and str(SAMPLE) in given.sentence
    # the page says first what was trained
    assert given.sentence.startswith(f"**{given.profile.meta['parameters']['title']}**\n\n")
    with pytest.raises(InputError, match="holds no profile"):
        notebook_run.find_profile(str(tmp_path), tmp_path)


def test_a_notebook_run_by_hand_claims_a_folder_and_closes_it(tmp_path: Path) -> None:
    run = notebook_run.start("profile", {"title": "t"}, "", str(tmp_path))
    assert latest_run(tmp_path, "profile") is None, "it is still going on"
    assert str(run.folder) in run.finish()
    assert latest_run(tmp_path, "profile") == run.folder
    # a wrong parameter is refused before anything is made
    with pytest.raises(InputError, match=r"did you mean model\.bottom_mlp"):
        notebook_run.start("train", {"model": {"bottom_mpl": [3, 2]}}, "", str(tmp_path / "root"))
    assert not (tmp_path / "root").exists()


def test_a_folder_that_is_given_is_left_to_who_gave_it(tmp_path: Path) -> None:
    folder = tmp_path / "2026-01-01" / "000000-profile-quick"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"status": "running"}')
    run = notebook_run.start("profile", {}, str(folder))
    assert run.output_root == tmp_path
    run.finish()
    assert (folder / "run.json").read_text() == '{"status": "running"}'
    # run again when that run is over: it is not written over
    (folder / "run.json").write_text('{"status": "finished"}')
    again = notebook_run.start("profile", {}, str(folder))
    assert again.folder != folder and again.output_root == tmp_path
    again.finish()
    assert latest_run(tmp_path, "profile") == again.folder
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"output_folder .*file cannot be made"):
        notebook_run.start("profile", {}, str(tmp_path / "file"))


def test_stage_bars_show_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    parameters = parameters_from_sections({"profiling": {"warmup": 1, "iterations": 4}})
    with notebook_run.stage_bars(parameters) as bars:
        bars(Progress("torch.profiler", 0.1))
        bars(Progress("timing alternatives", 1.0, 3, 24, "backend=fused"))
        bars(Progress("torch.profiler", 2.0, iteration=8, of=9))
        bars(Progress("times: hpcrun", 0.5, iteration=4))
        bars(Progress("times: hpcprof", 0.5, detail="libtorch_cpu.so"))
    said = capsys.readouterr().err
    assert "3/24" in said and "backend=fused" in said
    assert "9/9" in said and "5/5" in said and "hpcprof" in said and "libtorch_cpu.so" in said
    # binaries and databases have no iterations to count
    assert "?" not in said.split("hpcprof", 1)[1]


def test_shapes_are_short() -> None:
    recorded = ["[[2048, 64], [64, 64], [64, 64], [], [*]]", "[[[3, 4], [3, 4]], []]", ""]
    short, are_words = FORMATS["shapes"](pd.Series(recorded))
    assert short == ["2048×64, 2 of 64×64, *", "2 of 3×4", "–"] and are_words


def test_findings_say_what_to_change_and_not_what_the_headline_says() -> None:
    profile = sample_profile()
    attribution = attribute(profile)
    assert about.findings_text([]).markdown == ""
    found = findings(profile, attribution)
    assert found, "the experiment has bottlenecks"
    text = about.findings_text(found).markdown
    assert in_markdown(limit(profile, attribution)) not in text
    for number, finding in enumerate(found, 1):
        assert f"### {number}. {in_markdown(finding.title)}" in text
        for figure in re.findall(r"[\d.,]+ ms\b", finding.evidence):
            assert figure in text, "in a sentence or in a table"
        for name, value in finding.change.items():
            assert f"-p {name}={value}" in text


def test_a_finding_names_the_command_that_checks_it() -> None:
    changed = Finding("x", "X", "data", 0.5, "measured", "a", change={"data.loader": "prefetch"})
    given, place = ["-f", "my file.yaml"], Path("runs/a b")
    said = about.findings_text([changed], given=given, recording=place).markdown
    command = "dlrm run compare -f 'my file.yaml' -p change.data.loader=prefetch"
    assert f"**To check.** `{command}`" in said and "To compare" not in said
    bare = Finding("x", "X", "data", 0.5, "measured", "a")
    said = about.findings_text([bare], given=given, recording=place).markdown
    assert "`dlrm run compare -p 'runs=[runs/a b, OTHER]'`" in said and "To check" not in said
    assert "dlrm run" not in about.findings_text([changed, bare]).markdown
    # one without a remedy is shown too
    bare = Finding("x", "X holds it", "loss", 0.5, "measured", "nothing yet")
    assert "To change" not in about.findings_text([bare]).markdown
    table = show(pd.DataFrame([vars(bare)]), ["title", "component", "change", "predicted_speedup"])
    assert isinstance(table, TextTable) and table.rows == [["X holds it", "loss"]]


def test_what_was_not_measured_has_its_reason() -> None:
    profile = sample_profile()
    assert "the run used no GPU" in repr(show(about.unmeasured_frame(profile)))
    profile.meta["not_measured"] = {}
    everything = Text("Everything was measured.")
    assert show(about.unmeasured_frame(profile), instead=everything) is everything
    profile.meta["passes"] = [{"name": "p", "ms_per_iteration": None, "dilation": None}]
    passes = show(about.passes(profile))
    assert isinstance(passes, TextTable) and passes.rows == [["p", "not measured", "not measured"]]


def test_a_page_states_one_dilation() -> None:
    profile = sample_profile()
    step = reference(profile)
    assert step is not None and step.unprofiled
    of_all = {made["name"]: made["dilation"] for made in profile.meta["passes"]}
    for given in (profile, at_reference(profile)):
        recorded = about.passes(given).set_index("pass").loc["torch.profiler"]
        assert recorded["dilation"] == pytest.approx(step.recorded_ms / step.ms)
        assert recorded["iteration_ms"] == pytest.approx(step.recorded_ms)
        assert recorded["dilation"] != pytest.approx(of_all["torch.profiler"])
        every = about.passes(given)
        stated = (every["iteration_ms"] / step.ms).tolist()
        assert every["dilation"].tolist() == pytest.approx(stated)


def test_bottlenecks_of_a_profile_without_trace_and_memory(tmp_path: Path) -> None:
    """As a sampling profiler leaves it: no timeline, no iterations, CPU time only."""
    whole = sample_profile()
    profile = Profile.build(
        contexts=whole.contexts.assign(shapes=""),
        metrics=whole.metrics[whole.metrics["metric"] == "cpu_time_ms"],
        values=whole.values[whole.values["metric"] == "cpu_time_ms"],
        threads=whole.threads,
        meta={
            "engine": "hpctoolkit",
            "passes": [{"name": "times", "iterations": 3, "dilation": 1.1}],
            "not_measured": {
                "iterations": "no iterations marked",
                "allocated_bytes": "not by hpcrun",
            },
        },
    )
    profile.save(tmp_path / "profile")
    shown = run_cells("bottlenecks", profile_run=str(tmp_path), output_folder=str(tmp_path / "o"))
    figures = [value for value in shown if isinstance(value, go.Figure)]
    drawn = {figure.layout.title.text for figure in figures}
    assert "Time of a step by part and phase" in drawn and "Operators by their own time" in drawn
    absent = {"Timeline of iterations", "Time of each iteration", "Memory over the recording"}
    assert not absent & drawn
    texts = [value.markdown for value in shown if isinstance(value, Text)]
    assert texts.count("*Not measured: no iterations marked.*") == 2
    assert texts.count("*Not measured: not by hpcrun.*") == 1, "no sentence twice in a cell"
    tables = [value._repr_html_() for value in shown if isinstance(value, TextTable)]
    assert len(tables) > 8
    for text in [*tables, *(figure.to_json() for figure in figures)]:
        assert "nan" not in text.lower()
    document = json.loads((tmp_path / "o" / "bottlenecks.json").read_text())
    assert document["profiler"] == "hpctoolkit" and document["coverage"] > 0.99


def run_cells(name: str, **parameters: str) -> list[Any]:
    """What the cells of a notebook show, run in this process."""
    names: dict[str, Any] = {}
    shown = []
    for cell in notebook(name).cells:
        if cell.cell_type != "code":
            continue
        tree = ast.parse(cell.source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), names)
        if "parameters" in cell.metadata.get("tags", []):
            names |= parameters
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), names)
            shown += value.outputs if isinstance(value, Shown) else [value]
    return shown
