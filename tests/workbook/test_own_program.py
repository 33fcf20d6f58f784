"""Programs that are not ours: measured without being edited, and recorded by two lines."""

import gzip
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_program
import pandas as pd
import pytest
import torch
from commands import run_python, wait_until
from fake_hpctoolkit import FakeHPCToolkit

from dlrm_core.base.errors import InputError
from dlrm_core.config import Parameters, load_parameters, parameters_from_sections
from dlrm_workbook import record
from dlrm_workbook.analysis.attribution import attribute, coverage
from dlrm_workbook.analysis.findings import findings
from dlrm_workbook.analysis.lines import lines
from dlrm_workbook.analysis.reference import at_reference
from dlrm_workbook.analysis.roofline import doubts, least_step, missing, operator_limits, roofline
from dlrm_workbook.analysis.verdict import timed_table
from dlrm_workbook.cli import with_command
from dlrm_workbook.ground.machine import REPOSITORY
from dlrm_workbook.recordings.hpctoolkit.database import read_database
from dlrm_workbook.recordings.measure import measure
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch import recorder, session
from dlrm_workbook.recordings.torch.modules import group_names
from dlrm_workbook.recordings.torch.recorder import record_workload
from dlrm_workbook.runner.run import Plan, as_typed

PROGRAM = Path(foreign_program.__file__)

TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port"]
TWO_RANKS += ["0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(PROGRAM)]


def parameters(folder: Path, *words: str, **profiling: Any) -> Parameters:
    """Those of a command; 2 iterations warm up and 4 are measured unless ``profiling`` differs."""
    section = {"engine": "torch", "warmup": 2, "iterations": 4, "command": list(words)}
    section |= {"command_folder": str(folder), "probes": False, "trials": 0} | profiling
    return parameters_from_sections({"title": "Mine", "profiling": section})


def program(folder: Path, *arguments: str, **profiling: Any) -> Parameters:
    return parameters(folder, sys.executable, str(PROGRAM), *arguments, **profiling)


def test_an_iteration_passes_between_two_recordings() -> None:
    """Else torch writes into freed memory when the range of the optimizer's step is closed."""
    phases = session.Lengths(4, unprofiled=4, sampled=4).phases(session.Detail(), ours=False)
    recorded = [phase.profiler is not None for phase in phases if phase.iterations]
    assert sum(recorded) == 3
    assert not any(one and other for one, other in itertools.pairwise(recorded))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, Path]:
    """(the profile, its run folder) of the small program, which would train for long.

    It moves to another folder, and is measured where a user, who is in ``folder``, asked for it.
    """
    folder = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        profile = measure(program(folder, "100000", "moves", probes=True), Path("run"))
    return profile, folder / "run"


def test_a_command_is_measured_by_the_steps_of_its_optimizer(measured) -> None:
    profile, folder = measured
    assert len(profile.iterations) == 4
    times = profile.iterations["end_ns"] - profile.iterations["start_ns"]
    # each is one training step: a forward and a backward pass, and an update of four tensors
    calls = profile.contexts.assign(calls=profile.value_table("calls", "exclusive"))
    assert calls.loc[calls["name"].eq("aten::embedding_bag"), "calls"].sum() == 4
    assert times.min() > 0
    made = profile.meta["passes"][0]
    assert made["iterations"] == 4 and made["dilation"] > 0
    assert profile.meta["title"] == "Mine"
    assert any("not edited" in notice for notice in profile.meta["notices"])
    assert profile.meta["counters"]["profiled"].count(False) == 4
    assert "parameters" not in profile.meta
    assert f"started in {folder.parent}" in (folder / "logs/command.out").read_text()
    # its end was not reached: it was ended when everything was there
    assert "trained" not in (folder / "logs/command.out").read_text()


def test_most_of_its_step_is_in_named_parts_and_its_data_line_is_named(measured) -> None:
    profile, _ = measured
    attribution = attribute(profile)
    share = attribution.groupby("component")["share"].sum()
    assert share["data"] > 0.1  # little where torch's threads wait for a core
    assert {"embedding", "optimizer"} <= set(share.index)
    contexts = profile.contexts.assign(ms=profile.value_table("cpu_time_ms", "exclusive"))
    lines = contexts[contexts["file"].eq(str(PROGRAM)) & contexts["component"].eq("data")]
    source = PROGRAM.read_text().splitlines()
    loop = next(i for i, text in enumerate(source, 1) if "for _ in range(4000)" in text)
    # in the loop over samples, not beside it
    assert lines.loc[lines["line"].between(loop, loop + 2), "ms"].sum() > 0.3 * lines["ms"].sum()


def test_the_lines_that_make_a_batch_are_named_in_the_finding(measured) -> None:
    profile, _ = measured
    table = lines(profile)
    data = table[table["role"].eq("batch")].iloc[0]
    assert data["function"] == "make_batch" and data["file"] == str(PROGRAM)
    found = findings(profile, attribute(profile))
    said = next(finding for finding in found if finding.id == "data_generation")
    assert f"foreign_program.py:{data['line']}" in said.evidence
    assert not said.change and "parameter" not in said.advice


OWN = {
    "model": {"bottom_mlp": [8, 16, 8], "top_mlp": [16, 1], "embedding_dim": 8, "tables": 2}
    | {"table_rows": 100},
    "data": {"indices_per_lookup": 5},
    "training": {"batch_size": 32, "device": "cpu"},
    "profiling": {"engine": "torch", "warmup": 1, "iterations": 3, "probes": False},
}


def test_whole_steps_are_timed_by_the_process_that_recorded_the_run(tmp_path: Path) -> None:
    changes = [{"training.fused_optimizer": True}, {"training.batch_size": 0}]
    seen: list[int] = []

    def advise(profile: Profile) -> list[dict[str, Any]]:
        seen.append(len(profile.iterations))
        return changes

    profile = measure(parameters_from_sections(OWN), tmp_path / "run", advise=advise)
    assert seen == [3]
    assert profile.meta["data_statistics"]["batches"] == 3
    fused, impossible = profile.meta["together"]["stages"]
    rounds = len(profile.meta["together"]["base_ms"])
    assert fused["change"] == changes[0] and len(fused["ms"]) == rounds > 0
    assert "batch_size is 0" in impossible["refused"]
    saved = Profile.load(tmp_path / "run" / "profile")
    assert saved.meta["together"] == profile.meta["together"]
    assert timed_table(profile)["rounds"].tolist() == [rounds, rounds]


def test_a_refused_advice_is_a_reason_and_a_failing_one_an_error(tmp_path: Path) -> None:
    def refuse(profile: Profile) -> list[dict[str, Any]]:
        raise InputError("nothing to change here")

    profile = measure(parameters_from_sections(OWN), tmp_path / "refused", advise=refuse)
    assert profile.not_measured["together"] == "nothing to change here"
    assert timed_table(profile).empty

    def fail(profile: Profile) -> list[dict[str, Any]]:
        raise ZeroDivisionError("a rule's fault")

    with pytest.raises(ZeroDivisionError, match="a rule's fault"):
        measure(parameters_from_sections(OWN), tmp_path / "failed", advise=fail)


def test_our_own_runs_name_their_lines(tmp_path: Path) -> None:
    model = {"bottom_mlp": [8, 16, 8], "top_mlp": [512, 512, 1], "embedding_dim": 8, "tables": 2}
    sections = {
        "model": model | {"table_rows": 100},
        "data": {"generator": "facebook_loop", "indices_per_lookup": 5},
        "training": {"batch_size": 2000, "device": "cpu"},
        "profiling": {"engine": "torch", "warmup": 1, "iterations": 3, "probes": False},
    }
    folder = record_workload(parameters_from_sections(sections), tmp_path / "recording")
    profile = open_recording(folder).profile
    sampled = profile.meta["passes"][-1]
    assert sampled["name"] == "Python stack sampled" and sampled["iterations"] == 3
    table = lines(profile)
    batch = table[table["role"].eq("batch")].iloc[0]
    assert batch["share_of_step"] > 0.05 and batch["file"].endswith("/synthetic.py")
    assert table.loc[table["thread"].eq("main"), "share_of_step"].sum() == pytest.approx(1.0)
    assert table.groupby("role")["share_of_step"].sum()["model"] > 0.05


def test_its_page_has_the_limits_of_this_machine_at_the_shapes_that_were_seen(measured) -> None:
    profile, _ = measured
    ceilings = profile.meta["ceilings"]
    shapes = {(row["m"], row["n"], row["k"]) for row in ceilings["gemm"]}
    assert {(4000, 64, 32), (4000, 1, 64), (64, 32, 4000), (4000, 32, 64)} <= shapes
    assert {row["row_bytes"] for row in ceilings["gather"]} == {4 * 32}
    table = roofline(profile, attribute(profile))
    assert missing(profile) is None and table["ceiling_ms"].max() > 0
    operators = operator_limits(profile).set_index("name")
    # 2 m n k and m n to add the bias, of both layers
    flops = 2 * 4000 * (32 * 64 + 64) + 4000 * (64 + 1)
    assert operators.loc["aten::addmm", "flops"].sum() == flops
    # by name, since any other operator takes long where the program is interrupted in it
    work = ["aten::addmm", "aten::mm", "aten::clamp_min", "aten::threshold_backward", "aten::sum"]
    work += ["aten::_embedding_bag", "aten::_embedding_bag_dense_backward"]
    limits = operators.loc[work, "ceiling_ms"]
    assert limits.notna().all() and limits.groupby(level=0).max().gt(0).all()
    # a part is unknown where an operator of unknown work was interrupted, so that it took long
    unknown = table["ceiling_ms"].isna()
    reasons = operator_limits(profile)[["component", "phase", "reason"]].drop_duplicates()
    told = table[unknown].merge(reasons[reasons["reason"].ne("")], on=["component", "phase"])
    assert set(told["component"]) == set(table.loc[unknown, "component"])
    step = least_step(table[~unknown])
    assert 0 < step["least_ms"] < step["time_ms"]
    (sentence, *_) = doubts(profile, table)
    assert "The recorded shapes tell the work" in sentence and "counts as 0" in sentence
    # what makes the batch is Python's, and asks nothing of the machine that is known
    data = table[table["component"] == "data"]
    assert data["ceiling_ms"].sum() < 0.05 * data["time_ms"].sum()


def test_a_run_folder_opens_as_what_was_measured(measured: tuple[Profile, Path]) -> None:
    profile, folder = measured
    again = open_recording(folder).profile
    pd.testing.assert_frame_equal(again.values, profile.values)
    raw = open_recording(folder / "recording").profile
    assert coverage(attribute(raw)) == pytest.approx(coverage(attribute(profile)))


@pytest.mark.parametrize(
    ("arguments", "profiling", "said"),
    [
        (("1",), {}, "stepped its optimizer once only"),
        (("9", "plain"), {"iterations": 10}, "ended after 7 of 39 iterations .* train at least 10"),
        (("5", "fail"), {}, "failed with exit code 3: ran out of luck"),
        (("5", "still"), {}, "without a step of any torch optimizer"),
        (("1000000", "fork"), {"iterations": 100_000}, "background|still training"),
        (("100000", "two"), {}, "2 processes that are not ranks"),
        (("100000", "tiny"), {"iterations": 60}, r"takes 0\.\d+ ms.* too short to be measured"),
        (("5", "killed"), {}, r"SIGSEGV \(exit code 139\): Segmentation fault at .*program.py:89"),
        (("5", "left"), {}, r"process \d+ was still training: it left by os._exit"),
        (("5", "asks"), {}, "failed with exit code 1: EOFError"),
    ],
    ids=[
        *("one step", "too few", "fails", "never steps", "forks", "two trainings"),
        *("too short", "by a signal", "without a word", "reads standard input"),
    ],
)
def test_what_cannot_be_measured_is_told_in_a_sentence(
    arguments: tuple[str, ...], profiling: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said) as caught:
        measure(program(tmp_path, *arguments, **profiling), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert "started in" in (tmp_path / "run/logs/command.out").read_text()
    assert not (tmp_path / "run/profile").exists()


def test_a_program_that_changes_its_folder_is_measured_where_it_was_asked_to_be(measured) -> None:
    profile, folder = measured
    assert {file.name for file in folder.iterdir()} == {"logs", "profile", "recording"}
    assert profile.contexts["file"].eq(str(PROGRAM)).any()


def test_a_program_that_cannot_be_hooked_is_ended_when_its_time_is_up(tmp_path: Path) -> None:
    words = (sys.executable, "-I", str(PROGRAM), "100000", "plain")
    with pytest.raises(InputError, match=r"not stepped any torch optimizer .*python -I"):
        measure(parameters(tmp_path, *words, timeout_s=3), tmp_path / "run")


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no-such-program cannot be started"):
        measure(parameters(tmp_path, "no-such-program"), tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "profiling", "told"),
    [
        (["no-such-program"], {}, "profiling.command: 'no-such-program' cannot be started"),
        (["./python"], {}, r"profiling.command: './python' cannot be started"),
        ([sys.executable], {"command_folder": "gone"}, "command_folder is 'gone': there is no"),
    ],
)
def test_a_command_that_is_not_there_is_refused_before_anything_runs(
    tmp_path: Path, words: list[str], profiling: dict[str, Any], told: str
) -> None:
    asked = parameters_from_sections({"profiling": {"command": words} | profiling})
    with pytest.raises(InputError, match=told):
        Plan.of(["profile"], {}).check(asked)
    Plan.of(["profile"], {}).check(parameters(tmp_path, Path(sys.executable).name))


def test_a_recording_that_is_there_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "evidence", pytest.fail)
    with pytest.raises(InputError, match="exists already"):
        record_workload(load_parameters(REPOSITORY / "parameters" / "quick.yaml"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_command_that_ends_early_but_was_recorded_says_so(tmp_path: Path) -> None:
    profile = measure(program(tmp_path, "9", "fail"), tmp_path / "run")
    assert len(profile.iterations) == 1
    assert any("exit code 3" in notice for notice in profile.meta["notices"])


def test_of_ranks_the_error_of_the_one_that_failed_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="failed with exit code 1: ValueError: no shard of rank 1"):
        measure(parameters(tmp_path, *TWO_RANKS, "2", "rank1"), tmp_path / "run")


def test_ranks_leave_a_recording_each(tmp_path: Path) -> None:
    measure(parameters(tmp_path, *TWO_RANKS, "100000", "plain"), tmp_path / "run")
    recording = open_recording(tmp_path / "run")
    assert sorted(recording.ranks) == [0, 1]
    assert all(len(profile.iterations) == 4 for profile in recording.ranks.values())
    assert {one.meta["machine"]["ranks"] for one in recording.ranks.values()} == {2}


def test_what_follows_two_dashes_is_the_command(tmp_path: Path) -> None:
    given = ["run", "profile", "-f", "a.yaml", "--", "python", "train.py", "--name=a b", "--", "x"]
    words = with_command(given)
    file = tmp_path / "a.yaml"
    file.write_text("{}")
    section = load_parameters(file, [words[-1]]).profiling
    assert section.command == ("python", "train.py", "--name=a b", "--", "x")
    assert section.command_folder == str(Path.cwd())
    assert as_typed(words, section.command) == given and as_typed(given, ()) == given
    assert with_command(["train", "--", "x"]) == ["train", "--", "x"]


@pytest.mark.parametrize("value", ["python train.py", [], ["python", 1]])
def test_commands_that_are_no_list_of_words_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"profiling\.command"):
        parameters_from_sections({"profiling": {"command": value}})


def test_hpctoolkit_measures_a_command_beside_its_own_marks(tmp_path, monkeypatch) -> None:
    recorded = REPOSITORY / "tests/data/hpctoolkit/dlrm-cpu-python.d"
    fake = FakeHPCToolkit(tmp_path / "hpctoolkit", recorded=str(recorded))
    monkeypatch.setenv("PATH", f"{fake.bin}{os.pathsep}{os.environ['PATH']}")
    how = {"engine": "hpctoolkit", "iterations": 3, "hpctoolkit_home": str(fake.home)}
    given = program(tmp_path, "1000000", "plain", **how)
    profile = measure(given, tmp_path / "run")
    # the passes of our own workload, around the program: alone, times
    assert [made["name"] for made in profile.meta["passes"]] == ["unprofiled", "times"]
    assert [call["trace"] for call in fake.calls("hpcrun")] == [True]
    unprofiled, times = profile.meta["passes"]
    assert times["dilation"] == times["ms_per_iteration"] / unprofiled["ms_per_iteration"]
    assert 0 < unprofiled["ms_per_iteration"] < 10_000
    assert profile.meta["title"] == "Mine" and "parameters" not in profile.meta
    assert any("note when its iterations end" in said for said in profile.meta["notices"])
    # the database is another program's: the clock alone tells the parts and lines of this one
    parts = attribute(profile)
    assert coverage(parts) > 0.9 and len(profile.iterations) == 3
    assert {("data", "forward"), ("embedding", "backward"), ("optimizer", "update")} <= set(
        zip(parts["component"], parts["phase"], strict=True)
    )
    assert lines(profile)["function"].iloc[0] == "make_batch"
    assert "Python frames" not in profile.not_measured
    # what its database holds of start-up and of other times stays as it was
    whole = read_database(recorded).root()["CPUTIME (sec)"] * 1e3
    for each in (profile, at_reference(profile)):
        assert each.value_table("cpu_time_ms").sum() == pytest.approx(whole)
    printed = (tmp_path / "run/hpctoolkit/logs/unprofiled.out").read_text().splitlines()[-1]
    spans = json.loads(printed)["spans"]
    assert len(spans) == 5 and "trained" not in printed
    assert open_recording(tmp_path / "run").profile.meta["engine"] == "hpctoolkit"


KEPT_OPEN = """
import os, sys, time
if not os.fork():
    os.setsid()  # in no group of ours, as the ranks of torchrun
with open(f"{os.getpid()}.pid", "w"):
    time.sleep(600)
"""


def test_sigkill_of_what_measures_ends_the_program_and_its_children(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KEPT_OPEN)
    command = ["sh", "-c", f"{sys.executable} train.py; touch survived"]
    code = (
        "from pathlib import Path\n"
        "from dlrm_workbook.ground.profiling import ProfilingConfig\n"
        "from dlrm_workbook.recordings.command import record_command\n"
        f"record_command({command!r}, ProfilingConfig(), Path('run'))\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, 60)
    running = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert all(map(_is_alive, running))
    starter.kill()
    starter.wait()
    wait_until(lambda: not any(map(_is_alive, running)), 60)
    assert not (tmp_path / "survived").exists()


def _is_alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- two lines in one's own code ---------------------------------------------------------


def loop(folder: Path, steps: int, **options: Any) -> int:
    """A loop with a table; how many iterations it did."""
    table, weight = torch.nn.EmbeddingBag(50, 8, mode="sum"), torch.ones(8, 8)
    indices = torch.arange(50).repeat(12000).view(-1, 100)  # long enough on any machine
    done = 0
    with record(folder, **{"ceilings": False} | options) as step:
        for _ in range(steps):
            with record.part("embedding"):
                pooled = table(indices)
            with record.part("top_mlp"):
                scores = (pooled @ weight).tanh()
            scores.sum().backward()
            done += 1
            step()
    return done


def test_a_loop_records_itself_and_goes_on(tmp_path: Path) -> None:
    assert loop(tmp_path / "mine", 50, iterations=3, warmup=1) == 50
    profile = open_recording(tmp_path / "mine").profile
    assert len(profile.iterations) == 3
    parts = parts_of(profile)
    assert {("embedding", "forward"), ("embedding", "backward")} <= parts
    assert {("top_mlp", "forward"), ("top_mlp", "backward")} <= parts
    # details of other iterations are those of a recording that holds all
    whole, apart = tmp_path / "whole", tmp_path / "apart"
    for folder in (whole, apart):
        folder.mkdir()
        for name in ("recording.json", "key_averages.json"):
            shutil.copy(tmp_path / "mine" / name, folder)
        shutil.copy(tmp_path / "mine" / "trace_details.json.gz", folder / "trace.json.gz")
    shutil.copy(whole / "trace.json.gz", apart / "trace_details.json.gz")
    trace = json.loads(gzip.decompress((whole / "trace.json.gz").read_bytes()))
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e["name"] != "[memory]"]
    for event in trace["traceEvents"]:
        for name in [name for name in event.get("args", {}) if "Input" in name or "Conc" in name]:
            del event["args"][name]
    (apart / "trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    expected, joined = (open_recording(folder).profile for folder in (whole, apart))
    assert {"allocated_bytes", "flops", "operand_bytes"} <= set(expected.metrics["metric"])
    pd.testing.assert_frame_equal(joined.contexts, expected.contexts)
    pd.testing.assert_frame_equal(joined.values, expected.values)
    assert joined.meta["memory"] == expected.meta["memory"]


@pytest.mark.parametrize("limit", ["MOST_EVENTS", "MOST_DETAILED"])
def test_a_huge_recording_is_cut_and_says_so(limit, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(session, limit, 10)
    loop(tmp_path / "mine", 30, iterations=3, warmup=1)
    profile = open_recording(tmp_path / "mine").profile
    detailed = limit == "MOST_EVENTS"
    assert len(profile.iterations) == (1 if detailed else 3)
    assert ("1 of 3 iterations is recorded" in capsys.readouterr().err) == detailed
    assert any("1 of 3" in said for said in profile.meta.get("notices", [])) == detailed
    for name in ("shapes", "allocated_bytes", "flops"):
        assert "operators and ranges" in profile.not_measured[name]


class Tower(torch.nn.Module):
    """A small transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(50, 32)
        layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.body = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.tokens(tokens)))


def train_step(model: Callable[..., Any], optimizer: torch.optim.SGD, sequences: int) -> None:
    """One step of a :class:`Tower` that predicts the next token."""
    tokens = torch.randint(0, 50, (sequences, 33))
    scores = model(tokens[:, :-1]).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(scores, tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def parts_of(profile: Profile) -> set[tuple[str, str]]:
    """Components with their phases."""
    return set(attribute(profile)[["component", "phase"]].itertuples(index=False, name=None))


def test_parts_of_a_model_that_is_no_dlrm_are_its_own_modules(tmp_path: Path) -> None:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    hooks = torch.nn.modules.module._global_forward_hooks
    with record(tmp_path / "mine", iterations=4, warmup=1, ceilings=False) as step:
        for _ in range(12):
            # so long that a core taken away by others falls on every part alike
            train_step(model, optimizer, 256)
            step()
    assert not hooks
    recording = open_recording(tmp_path / "mine").profile
    _laps_are_whole(recording)
    parts = parts_of(recording)
    layers = [f"body.layers.{name}" for name in ("self_attn", "linear1", "linear2", "norm1")]
    for name in ("tokens", *layers, "head"):
        assert {(name, "forward"), (name, "backward")} <= parts
    assert {("data", "forward"), ("loss", "forward"), ("optimizer", "update")} <= parts
    assert not {"embedding", "bottom_mlp", "top_mlp", "interaction"} & {name for name, _ in parts}
    # loose: a core that others take away falls between the parts
    assert coverage(attribute(recording)) > 0.7


def _laps_are_whole(recording: Profile) -> None:
    """Each iteration of the recording is divided alike, or the recording says why none is."""
    if "laps" in recording.not_measured:  # so small a model on a fast machine
        assert "one factor scales them all" in recording.not_measured["laps"]
        assert "laps_ms" not in recording.meta
        return
    laps = recording.meta["laps_ms"]
    between = laps["between"]
    assert between.count("body.layers.linear1 begins") == 2
    assert between.count("body.layers.linear1 backward begins") == 2
    assert between.index("head ends") < between.index("head backward begins")
    assert between[-1] == "optimizer begins"
    for timed, kind in (("iteration_ms", "profiled"), ("unprofiled_iteration_ms", "unprofiled")):
        sums = [sum(ms) for ms in laps[kind]]
        assert sums == pytest.approx(recording.meta[timed], rel=1e-3)
        assert all(len(ms) == len(between) + 1 and min(ms) >= 0 for ms in laps[kind])


def test_what_the_profiler_frees_leaves_the_programs_page_faults_alone() -> None:
    script = (
        "import ctypes, sys\n"
        "import numpy as np\n"
        "from dlrm_workbook.ground import heap\n"
        "from dlrm_workbook.recordings.torch.trials.remedies import Allocator\n"
        "heap.keep() if sys.argv[1:] else None\n"
        "pieces = [np.ones(100 << 10, np.int8) for _ in range(500)]\n"
        "freed = range(pieces[0].ctypes.data, pieces[-1].ctypes.data)\n"
        "above, pieces = np.ones(100 << 10, np.int8), None\n"
        "in_hole = lambda: int(np.ones(20 << 20, np.int8).ctypes.data in freed)\n"
        "print(in_hole())\n"
        "used = heap.heap_bytes()\n"
        "heap.restore()\n"
        "print(in_hole(), (heap.heap_bytes() - used) >> 20)\n"
        "threshold = Allocator._threshold(ctypes.CDLL(None)) >> 20\n"
        "heap.release()\n"
        "print(in_hole(), threshold)\n"
    )
    kept, grown = ([int(n) for n in run_python(script, *words).split()] for words in (["keep"], []))
    assert kept == [1, 0, 0, 1, 0]
    assert grown[:4] == [1, 1, 0, 1] and grown[4] > 16


@pytest.mark.parametrize(("later", "left"), [(3, [50.0, 50.0]), (9_900, [50.0, 50.0, 40.0, 40.0])])
def test_iterations_that_a_recording_spares_page_faults_are_left_out(later, left, tmp_path) -> None:
    recording = session.Session(tmp_path / "mine", session.Lengths(2, unprofiled=4), ours=False)
    recording._phases["before"].times_ms += [50.0, 50.0]
    recording._phases["after"].times_ms += [40.0, 40.0]
    columns: dict[str, list[Any]] = {"profiled": [False, False, True, True, False, False]}
    columns |= {"minor_faults": [10_000, 10_000, 1, 1, later, later], "wall_ms": [1, 2, 3, 4, 5, 6]}
    recording._leave_out_spared(columns)
    assert recording._plain_ms == left
    assert columns["wall_ms"] == [1, 2, 3, 4, 5, 6][: 4 if later == 3 else 6]
    assert ("2 iterations after" in str(recording.information)) == (later == 3)


def test_laps_are_left_out_where_noting_them_costs_too_much(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(session, "MAX_COUNTING_SHARE", 0.0)  # whatever they cost on this machine
    monkeypatch.setattr(session, "SHORTEST", 0)  # however short its iterations are here
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(10)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with record(tmp_path / "mine", iterations=3, warmup=1, ceilings=False) as step:
        for _ in range(12):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            step()
    recording = open_recording(tmp_path / "mine").profile
    assert "11 calls of modules" in recording.not_measured["laps"]  # the layers and the model
    assert "laps_ms" not in recording.meta


def test_parts_of_a_trace_with_stacks_are_the_classes_of_its_modules(tmp_path: Path) -> None:
    """As a trace of anybody's has them, recorded by torch.profiler with ``with_stack``."""
    model, other = torch.nn.DataParallel(Tower()), torch.nn.Sequential(torch.nn.Linear(50, 50))
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.01)
    with torch.profiler.profile(with_stack=True, record_shapes=True) as profiler:
        for _ in range(4):
            train_step(lambda tokens: other(model(tokens)), optimizer, 32)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    profile = open_recording(tmp_path / "trace.json").profile
    parts = parts_of(profile)
    layer = "TransformerEncoder.TransformerEncoderLayer"
    # both models have a Linear on top, so their own classes tell those apart
    names = ["Embedding", f"{layer}.MultiheadAttention", "Tower.Linear", "Linear"]
    for name in names:
        assert {(name, "forward"), (name, "backward")} <= parts, (name, parts)
    assert not {"embedding", "bottom_mlp", "top_mlp", "interaction"} & {name for name, _ in parts}
    assert coverage(attribute(profile)) > 0.6  # loose, as above


def test_modules_are_grouped_as_finely_as_a_page_has_room_for() -> None:
    named = {type(m).__name__: name for m, name in _names(Tower())}
    assert named["MultiheadAttention"] == "body.layers.self_attn"
    assert named["Tower"] == "Tower" and named["Embedding"] == "tokens"
    assert named["Dropout"] == "body.layers"  # without weights of its own
    many = torch.nn.Module()
    for number in range(20):
        many.add_module(f"tower{number}", torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert {name for _, name in _names(many)} == {"Module", *(f"tower{i}" for i in range(20))}
    wrapped = torch.nn.Module()
    wrapped.add_module("module", Tower())
    assert {name for _, name in _names(wrapped)} >= {"body.layers.self_attn", "head"}
    other = torch.nn.Module()
    other.add_module("head", torch.nn.Linear(2, 2))
    models = Tower(), other, many
    assert {"Tower.head", "Module.head", "tower3"} <= set(group_names(models).values())


def _names(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    groups = group_names([model])
    return [(module, groups[id(module)]) for module in model.modules()]


def test_modules_of_a_dlrm_are_its_parts(tmp_path: Path) -> None:
    class Recommender(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bot_mlp = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Tanh())
            self.emb = torch.nn.EmbeddingBag(50, 200, mode="sum")
            self.gate = torch.nn.Linear(200, 200)

        def forward(self, dense: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            return self.gate(self.bot_mlp(dense) * self.emb(indices).cos())

    model, indices = Recommender(), torch.arange(50).repeat(3000).view(-1, 100)
    with record(tmp_path / "mine", iterations=3, warmup=1) as step:
        for _ in range(10):
            scores = model(torch.ones(1500, 200), indices)
            torch.nn.functional.mse_loss(scores, torch.zeros(1500, 200)).backward()
            step()
    parts = parts_of(open_recording(tmp_path / "mine").profile)
    for name in ("bottom_mlp", "embedding", "gate"):
        assert {(name, "forward"), (name, "backward")} <= parts


def test_a_loop_that_is_too_short_is_warned_of_and_keeps_its_results(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="ended after 2 of 17 iterations"):
        assert loop(tmp_path / "mine", 3, iterations=3, warmup=1) == 3
    assert not list(tmp_path.iterdir())
    with pytest.warns(UserWarning, match=r"step\(\) was never called"), record(tmp_path / "none"):
        pass


def test_a_loop_too_short_to_be_measured_goes_on(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(session, "SHORTEST", 1e9)
    with pytest.warns(UserWarning, match=r"an iteration takes .* too short to be measured"):
        assert loop(tmp_path / "mine", 50, iterations=3, warmup=1) == 50
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_loop_is_its_own(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), record(tmp_path / "mine") as step:
        step()
        step()
        1 / 0  # noqa: B018
    assert not list(tmp_path.iterdir())


def test_what_record_refuses(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists already"):
        record(tmp_path)
    with pytest.raises(InputError, match="iterations >= 1"):
        record(tmp_path / "x", iterations=0)
    with pytest.raises(InputError, match="towers"), record.part("towers"):
        pass


def test_record_needs_torch_and_numpy_only() -> None:
    code = (
        "import sys\n"
        "for name in ('yaml', 'pandas', 'numba', 'plotly', 'psutil', 'pyarrow', 'papermill'):\n"
        "    sys.modules[name] = None\n"
        "from dlrm_workbook import record\n"
        "print(record.part)\n"
    )
    run_python(code, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
