"""Running notebooks: folders, run.json, parameters, failures, interruptions."""

import asyncio
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import time
from argparse import Namespace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import nbformat
import pytest
from commands import run_python, wait_until
from jupyter_client.channels import AsyncZMQSocketChannel
from sample_notebooks import PARAMETERS, write_notebook

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import write_json
from dlrm_workbook import cli
from dlrm_workbook.analysis.ensemble import SWEEP
from dlrm_workbook.analysis.sentences import in_markdown
from dlrm_workbook.ground.machine import REPOSITORY
from dlrm_workbook.ground.runs import RunError, claim_run_folder, latest_run, named_run
from dlrm_workbook.runner import engine as notebook_engine
from dlrm_workbook.runner import run as workbook
from dlrm_workbook.runner.command import closing_words
from dlrm_workbook.runner.engine import Watch
from dlrm_workbook.runner.parameters import typed_options
from dlrm_workbook.runner.run import (
    CHAIN,
    Plan,
    closed_by_signals,
    measured_file,
    recording_name,
    run_notebooks,
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a parameters file ``p.yaml``; notebooks go to ``nb``, runs to ``out``."""
    (tmp_path / "p.yaml").write_text("title: A test\ntraining:\n  batches: 5\n")
    (tmp_path / "nb").mkdir()
    return tmp_path


def run(place: Path, cells: list[str], *overrides: str, **settings):
    write_notebook(place / "nb" / "n.ipynb", cells)
    return run_notebooks(
        ["n"], place / "p.yaml", overrides, place / "out", notebooks=place / "nb", **settings
    )


def saved(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


OF_THE_KERNEL = (
    "import atexit, os\nfrom ipykernel.kernelapp import IPKernelApp\nfrom pathlib import Path\n"
    "place, app = Path(output_folder).parents[2], IPKernelApp.instance()\n"
    "(place / 'ends').write_text(f'{app.transport} {app.ip}')\n"
    "atexit.register((place / 'late').touch)\n"
    "(place / 'pid').write_text(str(os.getpid()))",
    "print('the last words')",
)
"""Cells that note how a kernel is spoken to, who it is, and whether it ends by itself."""


@pytest.mark.notebook
def test_finished_run_explains_itself(place: Path) -> None:
    cells = [
        "# Title",
        "import sys\nassert (count, rate, word) == (7, 2.0, '5'), (count, rate, word)\n"
        "assert training['batch_size'] == 64 and training['batches'] == 5",
        f"assert sys.executable == {sys.executable!r}, sys.executable",
        "from pathlib import Path\nPath(output_folder, 'made.txt').write_text('x')",
        *OF_THE_KERNEL,
    ]
    folder = run(place, cells, "training.batch_size=64", "count=7", "rate=2", "word=5")
    assert_ended_at_once(place)
    record = saved(folder.path)
    assert record == folder.record
    assert record["status"] == "finished"
    assert record["artifacts"] == ["made.txt", "n.html", "n.ipynb", "run.json", "verdict.md"]
    assert record["parameters"]["training"]["batch_size"] == 64
    assert record["parameters"]["count"] == 7
    assert record["versions"]["torch"] and record["machine"]["cores"] >= 1
    assert 0 < record["seconds"] < 300  # in milliseconds it would be thousands
    started = datetime.fromisoformat(record["started"])
    assert folder.path.parent.parent == place / "out"
    assert folder.path.parent.name == f"{started:%Y-%m-%d}"
    assert folder.path.name == f"{started:%H%M%S}-n-p"
    assert latest_run(place / "out", "n") == folder.path
    assert not list(folder.path.glob(".*")), "no temporary file is left"

    assert "the last words" in folder.ipynb.read_text()
    first = (place / "ends").read_text().split()
    run(place, ["# T", *OF_THE_KERNEL])
    second = (place / "ends").read_text().split()
    if sys.platform == "linux":  # names of sockets without files: no other run can take them
        assert first[0] == second[0] == "ipc"
        assert first[1].startswith("@dlrm-") and second[1].startswith("@dlrm-")
        assert first[1] != second[1]


def assert_ended_at_once(place: Path) -> None:
    """A kernel whose cells have ended is not waited for."""
    with pytest.raises(ProcessLookupError):
        os.kill(int((place / "pid").read_text()), 0)
    assert not (place / "late").exists()


@pytest.mark.notebook
def test_failing_cell_is_named_and_the_partial_notebook_kept(place: Path) -> None:
    cells = ["# T", "kept = 1\nprint('kept')", "\nx = 1\nraise ValueError('one\\nthe last')", "1"]
    with pytest.raises(RunError) as failure:
        run(place, cells)
    folder = failure.value.folder
    assert failure.value.code == 1
    assert "n.ipynb: ValueError: the last (at: x = 1)" in str(failure.value)
    record = saved(folder.path)
    assert record["status"] == "failed"
    assert record["failing_cell"] == {
        "index": 4,
        "of": 5,
        "first_line": "x = 1",
        "error": "ValueError: the last",
    }
    assert "kept" in folder.ipynb.read_text()
    assert "This page is not complete" in folder.html.read_text()
    assert latest_run(place / "out", "n") is None


@pytest.mark.notebook
@pytest.mark.parametrize(
    ("source", "said", "code"),
    [
        (
            "from dlrm_core.base.errors import InputError\nraise InputError('too big: 9 of 8')",
            "too big: 9 of 8",
            2,
        ),
        ("import os\nos.kill(os.getpid(), 9)", r"The kernel died.*\(at: import os", 1),
    ],
    ids=["bad input", "a kernel that dies"],
)
def test_what_ended_a_run_is_told(place: Path, source: str, said: str, code: int) -> None:
    with pytest.raises(RunError, match=said) as failure:
        run(place, ["# T", source])
    assert failure.value.code == code
    assert saved(failure.value.folder.path)["status"] == "failed"
    assert failure.value.folder.html.exists()


@pytest.mark.notebook
@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(600)",
        "import time\nwhile True:\n    try:\n        time.sleep(600)\n"
        "    except KeyboardInterrupt:\n        pass",
    ],
    ids=["gives way", "does not give way"],
)
def test_cell_that_takes_too_long_is_ended(place, source, monkeypatch) -> None:
    monkeypatch.setattr("dlrm_workbook.runner.engine.GRACE_SECONDS", 0.5)
    with pytest.raises(RunError, match="took longer than 3 s") as failure:
        run(place, ["# T", source, "print('later')"], cell_timeout=3.0)
    assert saved(failure.value.folder.path)["status"] == "failed"
    assert failure.value.folder.record["failing_cell"]["index"] == 3
    later = nbformat.read(failure.value.folder.ipynb, as_version=4).cells[-1]
    assert later.execution_count is None


@pytest.mark.notebook
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interruption_keeps_results_and_ends_the_kernel(place: Path, signum: int) -> None:
    pid = place / "pid"
    write_notebook(
        place / "nb" / "n.ipynb",
        [
            "# T",
            "print('kept')",
            "import os, time\nfrom pathlib import Path\n"
            f"Path({str(pid)!r}).write_text(str(os.getpid()))\n"
            "time.sleep(600)",
            "print('later')",
        ],
    )
    program = (
        "import sys, pathlib\nfrom dlrm_workbook import cli\n"
        "from dlrm_workbook.runner import run as workbook\n"
        f"workbook.NOTEBOOKS = pathlib.Path({str(place / 'nb')!r})\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    command = ["run", "n", "-f", str(place / "p.yaml"), "--output-root", str(place / "out")]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    wait_until(lambda: pid.exists() and pid.read_text(), 150, [process])
    process.send_signal(signum)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signum
    assert "Traceback" not in err
    folder = Path(out.splitlines()[-1])
    record = saved(folder)
    assert record["status"] == "interrupted"
    assert record["command"].startswith("dlrm run n -f ")
    assert "kept" in (folder / "n.ipynb").read_text()
    last = nbformat.read(folder / "n.ipynb", as_version=4).cells[-1]
    assert last.metadata.papermill.status == "pending"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_signal_between_the_check_and_the_cell_is_not_lost() -> None:
    """The kernel takes no notice of an interrupt before it executes, so that one comes later."""
    sent: list[int] = []
    watch = Watch()
    watch._signal_kernel = sent.append  # type: ignore[assignment, method-assign]
    watch._client = Namespace()  # type: ignore[assignment]
    watch._on_signal(signal.SIGINT, None)
    assert sent == [signal.SIGKILL], "a kernel that is starting is not waited for"
    sent.clear()
    watch.signum = None
    watch.ready()
    watch._on_signal(signal.SIGINT, None)
    assert watch.stopping and not sent, "no cell is to be begun"
    watch.signum = None
    with watch.cell():
        watch._on_signal(signal.SIGINT, None)
        assert not sent
        watch.executing()
        assert sent == [signal.SIGINT]
    sent.clear()
    watch.signum = None
    with watch.cell():
        watch.executing()
        assert not sent
        watch._on_signal(signal.SIGINT, None)
        assert sent == [signal.SIGINT]


@pytest.mark.notebook
def test_a_long_cell_does_not_keep_what_came_before_from_the_disk(place: Path) -> None:
    """The notebook is not written at each of many quick cells, yet soon while one takes long."""
    seen = place / "seen.ipynb"
    # as long as it takes: a slow write puts off the next one
    look = (
        "import time, shutil, glob\n"
        "until = time.monotonic() + 120\n"
        "while time.monotonic() < until:\n"
        f"    shutil.copy(glob.glob({str(place / 'out')!r} + '/*/*/n.ipynb')[0], {str(seen)!r})\n"
        f"    if '\"6\"' in open({str(seen)!r}).read():\n"
        "        break\n"
        "    time.sleep(0.1)"
    )
    folder = run(place, ["# T", "1 + 1", "2 + 2", "3 + 3", look])
    on_disk = nbformat.read(seen, as_version=4)
    outputs = [o["data"]["text/plain"] for cell in on_disk.cells for o in cell.get("outputs", [])]
    assert outputs == ["2", "4", "6"]
    assert nbformat.read(folder.ipynb, as_version=4).cells[-1].metadata.papermill.status == (
        "completed"
    )


@pytest.mark.parametrize("takes, between", [(0.005, 0.5), (0.25, 5.0)])
def test_writing_takes_a_small_share_of_the_time(takes, between, monkeypatch) -> None:
    now, writes = [1.0], []
    monkeypatch.setattr(notebook_engine, "time", Namespace(monotonic=lambda: now[0]))

    def write() -> None:
        writes.append(now[0])
        now[0] += takes

    save = notebook_engine.Saves(write)
    for _ in range(2000):
        save()
        now[0] += 0.01
    # the first at once; never two in LEAST_SAVING_SECONDS, nor more than SAVING_SHARE
    assert writes[0] == 1.0 and len(writes) > 3
    apart = [b - a for a, b in itertools.pairwise(writes)]
    assert apart == pytest.approx([between] * len(apart), abs=0.011)


def test_a_reply_that_nobody_was_woken_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[float | None] = []

    async def asleep(self: Any, timeout: float | None = None) -> dict[str, Any]:
        looked.append(timeout)
        assert timeout is not None, "its socket wakes nobody"
        if len(looked) < 3:
            raise queue.Empty
        return {"content": "a reply"}

    monkeypatch.setattr(AsyncZMQSocketChannel, "get_msg", asleep)
    channel = notebook_engine.ThisInterpreter().client_factory.shell_channel_class
    assert asyncio.run(channel.get_msg(channel.__new__(channel))) and looked == [0.5, 0.5, 0.5]


def test_all_chains_runs_and_stops_at_the_first_failure(place: Path) -> None:
    own = PARAMETERS + 'profile_run: str = ""\n'
    write_notebook(place / "nb" / "train.ipynb", ["# T", "1"])
    write_notebook(place / "nb" / "profile.ipynb", ["# P", "1"])
    write_notebook(
        place / "nb" / "bottlenecks.ipynb",
        ["# B", "from pathlib import Path\nassert Path(profile_run, 'run.json').exists()"],
        own,
    )
    folder = run_notebooks(CHAIN, place / "p.yaml", [], place / "out", notebooks=place / "nb")
    assert folder.notebook == "bottlenecks"
    assert folder.record["parameters"]["profile_run"] == str(latest_run(place / "out", "profile"))

    write_notebook(place / "nb" / "profile.ipynb", ["# P", "1/0"])
    with pytest.raises(RunError, match=r"profile.ipynb: ZeroDivisionError"):
        run_notebooks(CHAIN, place / "p.yaml", [], place / "two", notebooks=place / "nb")
    names = sorted(path.name.split("-")[1] for path in (place / "two").glob("*/*"))
    assert names == ["profile", "train"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["training.batch_sise=4"], "training.batch_size"),
        (["training.batch_size=-4"], "training.batch_size is -4"),
        (["model=3"], "model is a section"),
        (["output_folder=/tmp"], "output_folder is set by dlrm run"),
        (["cuont=3"], "cuont=3: unknown parameter.*count, rate, word"),
        (["count=three"], "count=three: expected int"),
        (["count=true"], "count=true: expected int"),
        (["count"], "expected NAME=VALUE"),
    ],
)
def test_bad_parameters_are_refused_before_anything_runs(place, overrides, said) -> None:
    with pytest.raises(InputError, match=said):
        run(place, ["1"], *overrides)
    assert not (place / "out").exists()


def test_unknown_notebook_missing_tag_and_bad_root_are_refused(place: Path) -> None:
    write_notebook(place / "nb" / "bare.ipynb", ["1"], parameters=None)
    (place / "nb" / "broken.ipynb").write_text("{")
    (place / "file").write_text("")
    file = place / "p.yaml"
    for name, said in (
        ("nothere", "no notebook 'nothere'.*bare"),
        ("bare", "no cell tagged 'parameters'"),
        ("broken", "is not a notebook"),
    ):
        with pytest.raises(InputError, match=said):
            run_notebooks([name], file, output_root=place / "out", notebooks=place / "nb")
    write_notebook(place / "nb" / "n.ipynb", ["1"])
    with pytest.raises(InputError, match=r"no run folder can be made.*Not a directory"):
        run_notebooks(["n"], file, output_root=place / "file", notebooks=place / "nb")
    with pytest.raises(InputError, match="no such file"):
        run_notebooks(["n"], place / "q.yaml", output_root=place / "out", notebooks=place / "nb")
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("names", "own", "name"),
    [
        (("bottlenecks",), {"profile_run": "/data/worker0.pt.trace.json.gz"}, "worker0"),
        (("bottlenecks",), {"profile_run": "runs/dlrm-h100-pc.d/"}, "dlrm-h100-pc"),
        (("bottlenecks",), {"profile_run": "a b:c.tar.gz"}, "a_b_c"),
        (("benchmark",), {"results": "benchmarks/results/step.json"}, "step"),
        (("sweep",), {"sweep_folder": "outputs/2026-11-23/1-sweep-small"}, "1-sweep-small"),
    ],
)
def test_a_recording_names_the_run_that_explains_it(names, own, name) -> None:
    assert recording_name(names, own) == name
    for others, given in ((("bottlenecks",), {}), (CHAIN, {"profile_run": "x"})):
        with pytest.raises(InputError, match="needs a parameters file"):
            recording_name(others, given)


def test_what_was_measured_is_named_by_its_file_its_run_or_latest(tmp_path: Path) -> None:
    def run(second: int, notebook: str = "scaling") -> Path:
        now = datetime(2026, 11, 20, 17, 45, second)
        folder = claim_run_folder(tmp_path, notebook, "x", parameters={}, command="x", now=now)
        folder.close("finished")
        return folder.path

    def found(place: str | Path) -> str:
        return measured_file(str(place), "scaling", "scaling.json", tmp_path)

    with pytest.raises(InputError, match=r"no finished run of scaling in .* has a scaling\.json"):
        found("latest")
    old, new = run(1), run(2)
    for folder in (old, new):
        (folder / "scaling.json").write_text("{}")
    run(3)  # shows what another measured
    (run(4, "profile") / "scaling.json").write_text("{}")
    assert found("latest") == str(new / "scaling.json")
    assert found(old) == found(old / "scaling.json") == str(old / "scaling.json")
    assert found(tmp_path) == str(tmp_path), "refused by whoever reads it"


def test_runs_of_one_second_do_not_collide(tmp_path: Path) -> None:
    now = datetime(2026, 11, 20, 17, 45, 1)
    paths = [
        claim_run_folder(tmp_path, "train", "a b/c", parameters={}, command="x", now=now).path
        for _ in range(3)
    ]
    assert [p.name for p in paths] == [
        "174501-train-a_b_c",
        "174501-train-a_b_c-2",
        "174501-train-a_b_c-3",
    ]


def test_latest_stands_for_a_run_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan.of(["bottlenecks"], {"profile_run": "latest"})
    with pytest.raises(InputError, match="latest: there is no finished run of profile in"):
        plan.locate(place)
    run = claim_run_folder(place, "profile", "p", parameters={}, command="")
    assert named_run("latest", "profile", place, finished=False) == run.path
    run.close("finished")
    plan.locate(place)
    assert plan.own["bottlenecks"]["profile_run"] == str(run.path)
    compare = Plan.of(["compare"], {"runs": f"[latest, {run.path}]"})
    compare.locate(place)
    assert compare.own["compare"]["runs"] == [str(run.path), str(run.path)]
    with pytest.raises(InputError, match=r"-p profile_run=\S*gone: there is no such file"):
        Plan.of(["bottlenecks"], {"profile_run": str(place / "gone")}).locate(place)


def test_an_empty_place_is_refused_and_not_taken_for_the_newest_run(place: Path) -> None:
    for notebook, given in (
        ("bottlenecks", {"profile_run": ""}),
        ("experiment", {"profile_run": ""}),
        ("compare", {"runs": "['', latest]"}),
        ("scaling", {"record": ""}),
    ):
        (key,) = given
        with pytest.raises(InputError, match=rf"-p {key}= is empty.* expected a file or folder"):
            Plan.of([notebook], given).locate(place)
    plan = Plan.of(["experiment"], {"host_run": ""})
    plan.locate(place)
    assert plan.own["experiment"]["host_run"] == "", "the experiment without its second recording"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_notebooks_is_noted_in_their_runs(tmp_path, number) -> None:
    over, on = (claim_run_folder(tmp_path, n, "p", parameters={}, command="") for n in "ab")
    over.close("finished")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises((KeyboardInterrupt, SystemExit)), closed_by_signals([over, on]):
        os.kill(os.getpid(), number)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) == before
    assert saved(over.path)["status"] == "finished"
    assert saved(on.path)["status"] == "interrupted"
    assert saved(on.path)["error"] == f"b.ipynb: interrupted by {number.name}"


def test_latest_run_takes_only_whole_finished_runs(tmp_path: Path) -> None:
    start = datetime(2026, 11, 20, 10, 0, 0)
    statuses = ["finished", "finished", "failed", "interrupted", "running"]
    folders = []
    for hour, status in enumerate(statuses):
        folder = claim_run_folder(
            tmp_path, "train", "q", parameters={}, command="x", now=start + timedelta(hours=hour)
        )
        assert saved(folder.path)["status"] == "running"
        if status != "running":
            folder.close(status)
        folders.append(folder.path)
    half = tmp_path / "2026-11-20" / "235959-train-q"
    half.mkdir()
    (half / "run.json").write_text('{"status": "finished", "noteb')
    write_json(tmp_path / "2026-11-20" / "run.json", {"status": "finished"})
    assert latest_run(tmp_path, "train") == folders[1]
    assert latest_run(tmp_path, "profile") is None
    assert latest_run(tmp_path / "absent", "train") is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train -f quick -p training.batches=0", "training.batches is 0"),
        ("compare -p data.loader=prefetch", "is spelt -p change.data.loader=prefetch"),
        ("compare -f quick -p change.data.batch_size=2", "did you mean training.batch_size"),
        ("train -f quick -p data.batch_size=2", "did you mean training.batch_size"),
        ("train -f quick -p batch_size=2", "did you mean training.batch_size"),
        ("benchmark -p results=a.json -p protocols=3", "protocols would do nothing"),
        ("train -f teacher -p training.batches=3", "training.epochs is 1.0 and comes first"),
        ("train -f mlperf_dcn -p data.fixed_pooling=false", "other values of data make it True"),
        ("profile -f quick -p data.loader=" + "a" * 9000, "expected at most"),
        ("profile -f quick -p " + "a" * 9000, "expected NAME=VALUE"),
        ("profile -f quick -p model.tables=[" + "1" * 9000, "not valid YAML"),
        ("bottlenecks -p profile_run=" + "a" * 9000, "no such file or folder"),
        ("benchmark -f quick -p rounds=" + "a" * 9000, "expected int"),
    ],
)
def test_options_that_do_nothing_and_odd_ones_are_refused_in_a_short_sentence(
    words: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["run", *words.split(), "--output-root", str(tmp_path)]) == 2
    out, message = capsys.readouterr()
    assert said in message and len(message) <= 500 and not any(tmp_path.iterdir())
    assert out == "" and message.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["run", "train", "-f", "quick", "--resume", ""], "resume"),
        (["run", "train", "-f", "quick", "--output-root", ""], "output-root"),
        (["train", "-f", "quick", "--resume="], "resume"),
        (["evaluate", "-f", "quick", "--checkpoint", ""], "checkpoint"),
        (["inspect", ""], "path"),
        (["new", ""], "folder"),
        (["bench", "--json", ""], "json"),
    ],
)
def test_an_empty_place_is_neither_this_folder_nor_left_out(words, name, capsys) -> None:
    assert cli.main(words) == 2
    assert f"dlrm {words[0]}: {name} is empty, as of a shell's variable" in capsys.readouterr().err


@pytest.mark.notebook
def test_last_line_of_standard_output_is_the_run_folder(place, capfd, monkeypatch) -> None:
    monkeypatch.setattr(workbook, "NOTEBOOKS", place / "nb")
    monkeypatch.chdir(place)
    write_notebook(place / "nb" / "n.ipynb", ["# T", "print('not on our output')"])
    assert cli.main(["run", "n", "-f", "p.yaml", "--output-root", "out"]) == 0
    out, err = capfd.readouterr()
    assert out == f"{latest_run(place / 'out', 'n')}\n"
    assert err.startswith("[n] T"), "progress is on standard error"
    assert "Page: file://" in err
    write_notebook(place / "nb" / "n.ipynb", ["# T", "1/0"])
    assert cli.main(["run", "n", "-f", "p.yaml", "--output-root", "out"]) == 1
    out, err = capfd.readouterr()
    assert Path(out.strip()).is_dir()
    assert "ZeroDivisionError" in err and "Traceback" not in err


def test_the_answer_comes_before_its_doubts(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", {"notebook": "bottlenecks", "parameters": {}})
    doubt = "How sure (more on the page): this is a recorded sample"
    for level, second in (("amber", doubt), ("green", "Page: ")):
        quality = {"level": level, "sentence": "this is a recorded sample"}
        said = {"headline": "**Data takes 27 %**", "quality": quality, "findings": []}
        write_json(tmp_path / "bottlenecks.json", said)
        lines = [line for line in closing_words(tmp_path, 500).split("\n") if line]
        assert lines[0] == "Data takes 27 %" and lines[1].startswith(second)
    # a terminal shows names as they are
    name = in_markdown("Iter.__next__ <b> *x*")
    said = {"headline": f"**Most in {name}.** Start with `-p a=1`."}
    write_json(tmp_path / "bottlenecks.json", said)
    assert "Most in Iter.__next__ <b> *x*. Start with -p a=1." in closing_words(tmp_path, 80)


def test_last_sentences_fit_the_terminal_and_commands_stay_whole(tmp_path: Path) -> None:
    change = {"data.generator": "facebook", "training.fused_optimizer": True}
    recorded = tmp_path / "profile"
    write_json(recorded / "run.json", {"command": "dlrm run all -f a-long-name-of-a-file.yaml"})
    run = {"notebook": "bottlenecks", "parameters": {"profile_run": str(recorded)}}
    write_json(tmp_path / "run.json", run)
    said = {
        "headline": "**Data generation takes 54% of each step.** " * 3,
        "quality": {"level": "red", "sentence": "other processes kept the machine busy; " * 4},
        "findings": [{"change": change}],
    }
    write_json(tmp_path / "bottlenecks.json", said)
    *prose, page, command = closing_words(tmp_path, 60).split("\n")
    assert len(prose) > 6 and max(map(len, prose)) < 60
    assert page.startswith("Page: file://") and page.endswith("bottlenecks.html")
    assert command.startswith("Next: dlrm run compare") and len(command) > 60
    words = " ".join(closing_words(tmp_path, 60).split())
    assert words == " ".join(closing_words(tmp_path, 1000).split())


def test_the_next_command_is_for_the_parameters_that_were_explained(tmp_path: Path) -> None:
    finding = {"change": {"data.generator": "facebook"}}
    write_json(tmp_path / "bottlenecks.json", {"headline": "Data", "findings": [finding]})
    run = {"notebook": "bottlenecks", "command": "dlrm run bottlenecks -f seed"}
    recorded = tmp_path / "profile"
    write_json(recorded / "run.json", {"command": "dlrm run all -f mine.yaml"})
    change = "-p change.data.generator=facebook"
    for explained, given in (
        (recorded, "-f mine.yaml "),
        ("", None),  # the sample
        (tmp_path / "trace.json.gz", None),  # of another program
    ):
        parameters = {"parameters": {"profile_run": str(explained)}}
        write_json(tmp_path / "run.json", run | parameters)
        last = closing_words(tmp_path, 80).split("\n")[-1]
        expected = f"Next: dlrm run compare {given}{change}" if given else "Page: "
        assert last.startswith(expected), last


def test_the_end_of_a_command_does_not_search_what_was_imported() -> None:
    program = (
        "import atexit, gc\n"
        "from dlrm_workbook.cli import main\n"
        "atexit.register(lambda: print('frozen' if gc.get_freeze_count() else 'searched'))\n"
        "main(['parameters'])"
    )
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert said.splitlines()[-1] == "frozen"


def test_headless_subcommands_need_no_notebook_tools() -> None:
    heavy = ["papermill", "plotly", "nbformat", "nbconvert", "pandas", "IPython", "torch"]
    program = (
        "import sys\nfrom dlrm_core.base.cli import parser_of\n"
        "from dlrm_workbook.cli import SUBCOMMANDS\n"
        "parser_of(SUBCOMMANDS, '', ['train', 'evaluate', 'infer', 'record'])\n"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    assert run_python(program, cwd=REPOSITORY).strip() == "[]"


def test_doctor_reports_parts_and_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["cores"] >= 1
    parts = {part["name"]: part for part in report["parts"]}
    assert parts["torch"]["present"]
    for part in report["parts"]:
        assert bool(part["cost"]) != part["present"], part
    assert cli.main(["doctor"]) == 0
    assert "torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("dlrm run all -f seed --output-root out", ["-f", "seed"]),
        (
            "dlrm run all -p training.batch_size=64 -p rounds=3 --file 'my own.yaml'",
            ["-f", "my own.yaml", "-p", "training.batch_size=64"],
        ),
        (
            "dlrm run profile --like 'dlrm_s_pytorch.py --mini-batch-size=8'",
            ["--like", "dlrm_s_pytorch.py --mini-batch-size=8"],
        ),
        ("dlrm run all -p profiling.command='[python, a.py]'", []),
        ("dlrm run all -f", []),
        ("dlrm run all -f 'half", []),
        (["no", "text"], []),
    ],
)
def test_the_next_command_has_the_options_of_the_run(tmp_path, command, options) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert typed_options(run) == []
    write_json(run / "run.json", {"command": command})
    assert typed_options(run) == options
    (tmp_path / SWEEP).write_text("{}")
    assert typed_options(run) == [], "the file of a sweep is not that of its point"


@pytest.mark.parametrize("content", ["", "not json", "[]", '{"a": 1}', '{"schema": -1}'])
@pytest.mark.parametrize(("notebook", "name"), [("scaling", "record"), ("benchmark", "results")])
def test_a_file_of_another_kind_is_refused_before_anything_runs(
    tmp_path: Path, notebook: str, name: str, content: str
) -> None:
    file = tmp_path / "file.json"
    file.write_text(content)
    with pytest.raises(InputError, match=r"file\.json (is no|cannot be read)"):
        run_notebooks(
            [notebook],
            REPOSITORY / "parameters" / "quick.yaml",
            [f"{name}={file}"],
            tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()
