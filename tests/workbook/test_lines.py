"""Lines of the user's code: their time, roles and counts, in a program that knows them."""

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import lines_program
import numpy as np
import pandas as pd
import pytest
import torch
from finding_profiles import counters, listed, made
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from recordings import recording

from dlrm_core.base.errors import InputError
from dlrm_core.config import parameters_from_sections
from dlrm_workbook.analysis.lines import LineTable, functions, growth, hottest, lines, statements
from dlrm_workbook.analysis.step_source import Source
from dlrm_workbook.recordings.foreign import PartNames
from dlrm_workbook.recordings.measure import measure
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.lines import _Paths, mark_of, read_lines
from dlrm_workbook.recordings.torch.sampling import SOON, SWITCH_S, StackSampler
from dlrm_workbook.recordings.torch.seen_operators import _within_function
from dlrm_workbook.samples import sample_profile
from tests.databases import folder_of

PROGRAM = Path(lines_program.__file__)
SOURCE = PROGRAM.read_text().splitlines()
ITERATIONS = 10


def line_of(text: str) -> int:
    """Number of the only line of the program that holds a text."""
    (number,) = [number for number, line in enumerate(SOURCE, 1) if text in line]
    return number


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lines")


@pytest.fixture(scope="module")
def profile(folder: Path) -> Profile:
    command = [sys.executable, str(PROGRAM), str(folder / "stopwatch.json")]
    section = {
        "engine": "torch",
        "warmup": 2,
        "iterations": ITERATIONS,
        "probes": False,
        "trials": 0,
    }
    section |= {"command": command, "command_folder": str(folder)}
    return measure(parameters_from_sections({"profiling": section}), folder / "run")


@pytest.fixture(scope="module")
def main(profile: Profile) -> pd.DataFrame:
    table = lines(profile)
    return table[table["thread"].eq("main")].set_index("line")


def test_all_moments_of_the_step_belong_to_a_line(profile: Profile, main: pd.DataFrame) -> None:
    assert main["share_of_step"].sum() == pytest.approx(1.0)
    assert statements(profile).query("thread == 'main'")["share_of_step"].sum() == pytest.approx(1)
    assert (main["inclusive_share"] <= 1.0 + 1e-9).all()
    assert main.loc[line_of("loss.backward()"), "source"] == "loss.backward()"
    sampled = profile.meta["passes"][-1]
    assert sampled["name"] == "Python stack sampled" and sampled["iterations"] == ITERATIONS


def test_a_line_takes_what_its_clock_says(profile, main, folder) -> None:
    """The program notes when it logs, by the clock of the samples."""
    document = json.loads((folder / "run/recording/lines.json").read_text())
    begin, end = document["iterations"][0][0] / 1e9, document["iterations"][-1][1] / 1e9
    logged = json.loads((folder / "stopwatch.json").read_text())
    true_ms = 1e3 * sum(max(0, min(b, end) - max(a, begin)) for a, b in logged) / ITERATIONS
    share = main.loc[line_of("log(step, loss.item())"), "inclusive_share"]
    found_ms = share * np.mean(profile.meta["lines"]["iteration_ms"])
    # on a busy machine few samples are taken, and a line's time is as uncertain as their number
    samples = share * len(document["samples"])
    assert found_ms == pytest.approx(true_ms, rel=0.05 + 3 / np.sqrt(samples))


def test_backward_is_in_the_lines_that_built_it(main: pd.DataFrame) -> None:
    wide = main.loc[line_of("x = self.wide(x)")]
    forward_ms = wide["time_ms"] - wide["backward_ms"]
    assert 0.7 < wide["backward_ms"] / forward_ms < 3.5  # two products beside one
    assert wide["role"] == "model" and wide["operators"].startswith("aten::linear")
    backward = main.loc[line_of("loss.backward()")]
    assert backward["time_ms"] < 0.2 * backward["inclusive_ms"]
    assert backward["inclusive_ms"] == pytest.approx(main["backward_ms"].sum(), rel=0.3)


def test_each_line_has_its_role(profile: Profile, main: pd.DataFrame) -> None:
    table = statements(profile).query("thread == 'main'").set_index("line")
    roles = {
        "in enumerate(DataLoader": "batch",
        "weight = weights_of(target)": "batch",
        "loss.backward()": "model",
        "optimizer.step()": "optimizer",
        "log(step, loss.item())": "around",
        "spin(0.004)": "around",
        "evaluate(model, rows)": "around",
    }
    assert {text: table["role"].get(line_of(text), role) for text, role in roles.items()} == roles
    assert table.loc[line_of("evaluate(model, rows)"), "role"] == "around"
    both = table.loc[line_of("loss = nn.functional")].set_index("role")["time_ms"]
    assert sorted(both.index) == ["batch", "model"] and both["batch"] > 0
    by_function = functions(profile).set_index("function")["role"]
    assert by_function["Rows.__getitem__"] == "batch"
    assert by_function["evaluate"] == by_function["log"] == "around"
    assert by_function["Model.forward"] == "model"


def test_what_makes_the_batch_is_data_whatever_its_name_says(profile: Profile) -> None:
    """A function ``lookup`` in a program of tables was the embeddings' forward pass."""
    code = profile.contexts[profile.contexts["name"].str.endswith(": lookup")]
    assert set(code["component"]) == {"data"}
    frame = PartNames(makers=[("a.py", "Titles.lookup")]).of("python", "a.py(3): Titles.lookup")
    assert frame is not None and frame.component == "data"
    other = PartNames().of("python", "a.py(3): Titles.lookup")
    assert other is not None and other.component == "embedding"


def test_an_evaluation_is_in_some_iterations(main: pd.DataFrame) -> None:
    evaluated = main.loc[line_of("evaluate(model, rows)"), "in_iterations"]
    assert 0 < evaluated < 0.5  # in each fourth; beside others, other lines weigh as much
    assert main.loc[line_of("log(step, loss.item())"), "in_iterations"] > 0.7


def test_a_line_grows_and_another_is_in_every_fourth_iteration() -> None:
    """Of samples written by hand, in which backward is divided too."""
    count = 12
    frames = [("a.py", 1, "f", line) for line in (2, 3, 4, 5)]
    paths = [[(0, " module")], [(1, " backward")], [(2, "")], [(3, "")]]
    rows = []
    for i in range(count):
        rows += [(i, 0, 2, 1.0 + 0.5 * i, 5), (i, 0, 3, 8.0 * (i % 4 == 0), 4 * (i % 4 == 0))]
        rows += [(i, 0, 1, 12.0, 9), (i, 0, 0, 27.0 - 0.5 * i, 9)]
    times = pd.DataFrame(rows, columns=["iteration", "thread", "path", "ms", "samples"])
    meta = {"frames": frames, "paths": paths, "threads": ["main"], "times": times.to_dict("list")}
    meta |= {
        "iteration_ms": [40.0 + 8 * (i % 4 == 0) for i in range(count)],
        "counted": {"missing": ""},
        "sources": [],
    }
    meta |= {"backward": {"path": [0, -1], "ns": [30, 10]}}
    known = sample_profile()
    known.meta = {"lines": meta}
    table = lines(known).set_index("line")
    assert table["share_of_step"].sum() == pytest.approx(1)
    assert table.loc[2, "backward_ms"] == pytest.approx(9.0)  # three quarters; the rest stays
    assert table.loc[3, "time_ms"] == pytest.approx(3.0)
    assert table["growth_ms"].to_dict() == pytest.approx({2: -0.5, 3: 0, 4: 0.5, 5: 0}, abs=1e-9)
    assert table["in_iterations"].to_dict() == pytest.approx({2: 1, 3: 1, 4: 1, 5: 0.25}, abs=0.02)


def sampled(
    frames: list[tuple[str, int, str, int]], paths: list[Any], rows: list[Any], **more: Any
) -> dict[str, Any]:
    """What a recording knows of lines: ``rows`` are (path, thread, ms), ten times the same."""
    table = pd.DataFrame(rows, columns=["path", "thread", "ms"]).assign(samples=9)
    times = pd.concat([table.assign(iteration=i) for i in range(10)]).to_dict("list")
    step_ms = float(table.loc[table["thread"].eq(0), "ms"].sum())
    meta = {"frames": frames, "paths": paths, "times": times, "iteration_ms": [step_ms] * 10}
    return meta | {"threads": ["main"], "counted": {"missing": ""}, "sources": []} | more


def test_a_function_of_the_loss_outside_of_modules_is_told_with_its_backward_pass() -> None:
    """A penalty took half of the step, and the headline was the batch with a sixth of it."""
    frames = [("a.py", 1, "step", 2), ("a.py", 9, "penalty", 10), ("a.py", 20, "Net.forward", 21)]
    frames += [("a.py", 1, "step", 3)]
    paths = [[(0, ""), (1, "")], [(0, " module"), (2, "")], [(3, " backward")]]
    roles = {("a.py", 10): "model", ("a.py", 21): "model", ("a.py", 3): "model"}
    rows = [(0, 0, 30.0), (1, 0, 20.0), (2, 0, 50.0)]
    known = sampled(frames, paths, rows, roles=roles, backward={"path": [0, 1], "ns": [30, 20]})
    told = LineTable(known).outside_modules().to_dict("records")
    penalty = {"file": "a.py", "function": "penalty", "line": 10, "weights": False}
    own = {"file": "a.py", "function": "Net.forward", "line": 21, "in_module": True}
    own |= {"weights": False}
    assert told == [penalty | {"in_module": False, "time_ms": 60.0}, own | {"time_ms": 40.0}]
    profile = made({("other", "", "aten::mm"): 100.0}, lines=known, passes=[{}])
    del profile.meta["parameters"]  # a program that is not ours
    first = listed(profile)[0]
    assert first.id == "outside_modules" and "`penalty` (`a.py:10`) takes 60%" in first.title
    known["paths"][0] = [(0, " module"), (1, " module")]  # a layer, which takes what it takes
    known["paths"][1] = [(0, " module"), (2, "")]
    assert LineTable(known).outside_modules().to_dict("records") == [own | {"time_ms": 40.0}]
    profile.meta["lines"] = known
    first = listed(profile)[0]
    assert first.id == "largest_place" and first.title.startswith("No known bottleneck found")
    assert (
        "`Net.forward` (`a.py:21`) takes 40% of the CPU time, in modules of the program's own"
        in first.title
    )
    known["paths"][1] = [(0, " module"), (2, " weights")]
    profile.meta["lines"] = known | {"iteration_ms": known["iteration_ms"]}
    first = listed(profile)[0]
    assert first.id == "computed_weights" and "at `Net.forward` (`a.py:21`)" in first.title
    known["paths"] = [
        [(0, ""), (1, "")],
        [(0, ""), (2, "")],
        known["paths"][2],
    ]  # no module is known: anything may be one
    assert LineTable(known).outside_modules().empty


def test_workers_that_take_the_steps_cores_are_named_by_their_line() -> None:
    frames = [("a.py", 1, "step", 2), ("a.py", 9, "encode", 10)]
    known = sampled(frames, [[(0, "")], [(1, "")]], [(0, 0, 100.0), (1, 1, 60.0)])
    known |= {"threads": ["main", "DataLoader worker 0"]}
    queued = counters(run_queue_ms=25.0, involuntary_switches=40.0, thread_cpu_ms=75.0)
    profile = made({("other", "", "aten::mm"): 100.0}, lines=known, counters=queued)
    first = listed(profile)[0]
    assert first.id == "waiting_for_cores" and first.title.endswith("`encode` (`a.py:10`)")
    assert "Threads or processes that make batches ahead compute 60.0 ms" in first.evidence
    assert first.change == {} and first.share_of_step < 0.3
    # an operator on all cores waits for its slowest thread
    profile.meta |= {"threads": 2, "machine": {"usable_cores": 2}}
    first = listed(profile)[0]
    assert first.share_of_step == pytest.approx(0.6) and "take its cores, 60%" in first.title
    change = {"change": {"data.generator": "facebook"}, "parts": {"data": {"forward": 1.0}}}
    change |= {"base": {"data": {"forward": 60.0}, "top_mlp": {"forward": 50.0}}, "spread": {}}
    for name, alone, beside in (("overlap_base", 60.0, 100.0), ("overlap", 1.0, 60.0)):
        change[name] = {"data_alone_ms": alone, "data_beside_ms": {"dense": alone}}
        change[name] |= {"halves": {"dense": {"alone_ms": 50.0, "beside_ms": beside}}}
    more = {"part_probes": {"base": change["base"], "changes": [change]}, "lines": known}
    more |= {"parameters": {"data": {"generator": "facebook_loop", "loader": "prefetch"}}}
    first = listed(made({("top_mlp", "forward", "y"): 100.0}, counters=queued, **more))[0]
    assert first.id == "waiting_for_cores" and first.change == {"data.generator": "facebook"}
    assert 1.2 < first.predicted_speedup["mid"] <= 2.0


def test_tensors_that_workers_send_one_by_one_are_told() -> None:
    frames = [("a.py", 1, "step", 2), ("a.py", 9, "fit", 10)]
    known = sampled(frames, [[(0, " received")], [(1, "")]], [(0, 0, 40.0), (1, 0, 60.0)])
    parts = {("data", "forward", "next"): 40.0, ("other", "", "aten::mm"): 60.0}
    profile = made(parts, lines=known, passes=[{}])
    del profile.meta["parameters"]
    first = listed(profile)[0]
    assert first.id == "data_generation"
    assert "In 40.0 ms of it tensors that workers send are put together" in first.evidence
    assert first.advice.startswith("Put samples together in the workers")
    profile.meta["lines"]["paths"][0] = [(0, " started")]  # a DataLoader starts them again
    assert listed(replace(profile, _known={}))[0].advice.startswith("Start workers once")


@pytest.mark.parametrize(
    ("function", "mark"),
    [
        ("torch/optim/adam.py:Adam.step", "optimizer"),
        ("torch/optim/swa_utils.py:AveragedModel.update_parameters", ""),
        ("torch/nn/utils/parametrizations.py:_SpectralNorm._power_method", "weights"),
        ("torch/nn/utils/clip_grad.py:clip_grad_norm_", ""),
        ("torch/multiprocessing/reductions.py:rebuild_storage_fd", "received"),
        ("torch/utils/data/dataloader.py:_BaseDataLoaderIter.__next__", "loader"),
        ("torch/utils/data/dataloader.py:_MultiProcessingDataLoaderIter.__init__", "started"),
        ("torch/autograd/graph.py:_engine_run_backward", "backward"),
        ("torch/autograd/graph.py:saved_tensors_hooks.__exit__", ""),
        ("torch/utils/checkpoint.py:_checkpoint_hook.__init__.<locals>.unpack_hook", "again"),
        ("torch/utils/checkpoint.py:CheckpointFunction.backward", "again"),
        ("torch/utils/checkpoint.py:checkpoint", "checkpoint"),
    ],
)
def test_libraries_tell_what_a_line_does(function: str, mark: str) -> None:
    assert mark_of(f"/site-packages/{function}") == mark


def test_a_function_with_a_backward_pass_of_its_own_learns() -> None:
    """Its forward pass runs without gradients by itself: a tenth of programs were told so."""
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append((lambda: _within_function())())
            return 2 * x

    weight = torch.nn.Parameter(torch.ones(1))
    Double.apply(weight)
    with torch.no_grad():
        Double.apply(weight)
    Double.apply(torch.ones(1))
    assert seen == [True, False, False]


def test_calls_are_counted_exactly(profile: Profile, main: pd.DataFrame) -> None:
    expected = {"x = self.wide(x)": 1, "spin(0.00005)": 64, "loss.backward()": 1, "zero_grad": 1}
    calls = {at: count for _, at, count in profile.meta["lines"]["counted"]["calls"]}
    assert {text: calls[line_of(text)] for text in expected} == expected
    spun = calls[line_of("end = time.perf_counter() + seconds")]
    assert spun in (64 + 3, 64 + 4)  # with an evaluation or without
    assert main.loc[line_of("loss.backward()"), "calls"] == 1


def test_another_thread_has_rows_of_its_own(profile: Profile) -> None:
    table = lines(profile).query("thread == 'helper'").set_index("line")
    inside = table["inclusive_share"]
    assert inside.sum() > 0 and table["calls"].isna().all()
    assert inside.get(line_of("time.sleep(0.05)"), 0.0) < 0.5  # asleep for five sixths of the time


def test_the_hottest_function_is_listed_with_its_time(profile: Profile) -> None:
    table = hottest(profile)
    assert table["share"].max() > 0 and table["source"].str.len().max() > 0
    assert (table["line"].diff().dropna() == 1).all()


def test_damaged_lines_are_refused(tmp_path: Path) -> None:
    damaged = sample_profile()
    damaged.meta = {"lines": {"iteration_ms": [1.0], "frames": [1], "paths": [[[7, ""]]]}}
    with pytest.raises(InputError, match=r"meta\.lines"):
        lines(damaged)
    (tmp_path / "lines.json").write_text('{"iterations": [[0, 1]], "samples": [[5]]}')
    with pytest.raises(InputError, match="no record of Python stacks"):
        read_lines(tmp_path)


def test_python_frames_of_other_recordings_tell_lines() -> None:
    """Of torch.profiler's ``with_stack`` on a GPU, and of HPCToolkit's ``-a python``."""
    for path in (recording("traces/bert-small-h100.json.gz"), folder_of("dlrm-cpu-python")):
        other = open_recording(path).profile
        table = lines(other)
        assert table.loc[table["thread"].eq("main"), "share_of_step"].sum() == pytest.approx(1)
        assert not table["file"].str.contains("torch/|threading").any()
        assert table["calls"].isna().all() and table["source"].eq("").all()
    by_place = table.assign(file=table["file"].str.rpartition("/")[2]).set_index(["file", "line"])
    # facebook's program: the making of its batches, not that of its tables
    assert "create_emb" not in set(by_place["function"])
    assert by_place.loc[("dlrm_data_pytorch.py", 942), "role"] == "batch"
    assert by_place.loc[("dlrm_s_pytorch.py", 1620), "role"] == "optimizer"


# ---- pure functions ----------------------------------------------------------------------


@given(arrays(float, (3, 12), elements=st.floats(0, 100)), st.floats(-5, 5))
def test_a_straight_line_grows_by_its_slope(rows: np.ndarray, slope: float) -> None:
    straight = np.arange(12) * slope
    assert growth(straight[None])[0] == pytest.approx(slope, abs=1e-9)
    least_squares = np.polyfit(np.arange(12), rows.T, 1)[0]
    found = growth(rows)
    assert ((found == 0) | np.isclose(found, least_squares, atol=1e-9)).all()
    assert (growth(rows[:, :7]) == 0).all()


STEP = """\
    def run(self, model, optimizer, loader):
        rows = []
        for batch in loader:
            rows.append(batch.draw())
            x = torch.tensor(rows).to(self.device)
            seen = len(x)
            out = model(x, self.mask)
            weight = focus(out.detach())
            loss = (criterion(out, batch.y) * weight).mean()
            total += loss.item()
            scaler.scale(loss).backward()
            optimizer.step()
            if seen > 3:
                score = model(x)
"""


def test_what_the_loss_depends_on_is_read_from_the_source() -> None:
    step = Source(STEP, 10).step(20, None, {16, 18, 23})
    assert step.batch == {11, 12, 13, 14}
    assert step.model == {16, 17, 18, 20}
    assert step.parameters == {"loader", "self.device", "self.mask"}


def test_a_backward_pass_may_stand_behind_another_statement() -> None:
    text = "def run():\n    b = make()\n    l = net(b)\n    o.zero_grad(); l.backward(); o.step()\n"
    step = Source(text, 1).step(4, None, {3})
    assert (step.batch, step.model) == ({2}, {3, 4})


def test_what_runs_again_is_told_apart_from_the_backward_pass_that_it_is_for() -> None:
    torch = "/site-packages/torch/"
    again = [
        *(("a.py", 1, "main", 9), (f"{torch}_tensor.py", 1, "Tensor.backward", 2)),
        *((f"{torch}utils/checkpoint.py", 1, "CheckpointFunction.backward", 2),),
        (f"{torch}nn/modules/module.py", 1, "Module._call_impl", 2),
    ]
    frames = [*again, (f"{torch}autograd/__init__.py", 1, "backward", 2)]
    table = _Paths()
    numbers = [table.of_stack(frames[:4]), table.of_stack(frames)]
    assert [list(table.paths)[number] for number in numbers] == [
        ((0, " again"),),
        ((0, " backward"),),
    ]


def test_arguments_are_followed_to_the_caller() -> None:
    inner = Source("def step(self, model, batch):\n    model(batch).backward()\n", 1)
    outer = Source("def run():\n    b = make()\n    l = me.step(net, batch=b)\n    log(l)\n", 1)
    passed = outer.passed(3, "step", inner, {"batch"})
    assert passed == {"b"}
    assert outer.step(3, passed, {3}).batch == {2}


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        source = Source(text, 5)
    except (SyntaxError, ValueError, RecursionError):
        return
    step = source.step(5, None, set())
    assert not step.batch & step.model


def test_pythons_lock_stays_near_until_the_sampler_ends() -> None:
    usual, sampler = sys.getswitchinterval(), StackSampler(threading.get_ident())
    SOON(sampler.start)()  # as a phase of a session begins, and ends
    between = sys.getswitchinterval()
    SOON(sampler.stop)()
    assert between == pytest.approx(SWITCH_S) and usual == sys.getswitchinterval() > SWITCH_S
