"""Rules that read the user's lines and what one iteration showed: a program with many faults."""

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import careless_program
import odd_program
import pytest
import torch
from finding_profiles import counters, made
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_core.config import parameters_from_sections
from dlrm_workbook.analysis.around import around
from dlrm_workbook.analysis.attribution import attribute
from dlrm_workbook.analysis.findings import findings, operators
from dlrm_workbook.analysis.findings.evidence import Evidence
from dlrm_workbook.analysis.findings.finding import Causes, Finding
from dlrm_workbook.analysis.findings.operators import dispatch_bound
from dlrm_workbook.analysis.findings.program import as_tried
from dlrm_workbook.analysis.lines import lines
from dlrm_workbook.analysis.reference import at_reference
from dlrm_workbook.analysis.tried import tried_sentence
from dlrm_workbook.recordings.measure import measure
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch import seen_operators
from dlrm_workbook.recordings.torch.seen_model import SeenModel
from dlrm_workbook.recordings.torch.trials.remedies import Anomaly, Facts
from dlrm_workbook.recordings.torch.trials.seen import Seen

PROGRAM = Path(careless_program.__file__)


def recorded(folder: Path, *words: str, iterations: int = 12, program: Path = PROGRAM) -> Profile:
    section = {
        **{"engine": "torch", "warmup": 2, "iterations": iterations, "probes": False, "trials": 0},
        **{"command": [sys.executable, str(program), "100000", *words]},
        "command_folder": str(folder),
    }
    parameters = parameters_from_sections({"title": "Careless", "profiling": section})
    return at_reference(measure(parameters, folder / "run"))


@pytest.fixture(scope="module")
def careless(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return recorded(tmp_path_factory.mktemp("careless"))


def line(text: str, program: Path = PROGRAM) -> int:
    """The first line of a program that holds a text."""
    rows = program.read_text(encoding="utf-8").splitlines()
    return next(number for number, row in enumerate(rows, 1) if text in row)


def by_id(profile: Profile, name: str) -> list[Finding]:
    return [one for one in findings(profile, attribute(profile)) if one.id == name]


def test_what_the_loop_does_around_the_model_is_named_once_each_by_its_line(careless) -> None:
    found = {each.title.split("`")[1]: each for each in by_id(careless, "around_model")}
    assert set(found) == {"log_rows", "evaluate"}
    rows = around(careless).set_index("function")
    assert "step, outside the model" in found["log_rows"].title
    # either line of its loop may have been caught more often
    here = {line("for score in scores.repeat"), line("rows.writerow(")}
    assert rows.loc["log_rows", "line"] in here
    assert rows.loc["log_rows", "caller"] == f"careless_program.py:{line('log_rows(rows, sc')}"
    assert rows.loc["evaluate", "line"] == line("            model(*batch)")
    assert rows.loc["evaluate", "in_iterations"] == pytest.approx(0.25, abs=0.1)
    assert "It runs in 3 of 12 iterations" in found["evaluate"].evidence
    # what has a line; other iterations may be slow on a busy machine
    assert not any("evaluate" in each.title for each in by_id(careless, "irregular_iterations"))
    assert rows["share"].sum() < 1


def test_rows_and_operands_that_change_nothing_are_counted(careless: Profile) -> None:
    (dense,) = by_id(careless, "dense_updates")
    assert "`Adam` writes all 60,000 rows of `users`" in dense.title
    assert "(`careless_program.py:" in dense.evidence and "27 MB per iteration" in dense.evidence
    seen = careless.meta["seen_model"]
    tables = {row["name"]: row for row in seen["tables"]}
    assert tables["users"]["gradient"] == "dense" and tables["tags"]["gradient"] == "sparse"
    assert tables["tags"]["hottest"] == 0.9 and tables["tags"]["hottest_row"] == 0
    zeros = {row["name"]: row["zeros"] for row in seen["products"]}
    assert zeros["codes"] == pytest.approx(1 - 1 / 4000, abs=1e-4) and zeros["head"] < 0.5
    assert [row["class"] for row in seen["optimizers"]] == ["Adam", "SparseAdam"]
    assert {row["line"] for row in seen["optimizers"]} == {line("optimizer.step()")}


def test_shares_follow_what_was_seen() -> None:
    """Made figures: 40 ms of lookups, 90 % for one row; 20 ms of products, half for zeros."""
    place = {"file": "/a/mine.py", "line": 7, "function": "forward"}
    table = {"name": "tags", "rows": 100, "dim": 8, "bytes": 4, "lookups": 1000, "unique": 90}
    product = {"name": "codes", "rows": 64, "inputs": 10, "outputs": 10, "zeros": 0.99, **place}
    product["calls"] = 1
    seen: dict[str, Any] = {
        "tables": [table | place | {"hottest": 0.9, "hottest_row": 0, "gradient": "sparse"}],
        "products": [product, product | {"name": "head", "zeros": 0.5}],
        "optimizers": [],
    }
    parts: dict[Any, float] = {("embedding", "forward", "aten::_embedding_bag"): 40.0}
    parts |= {("top_mlp", "forward", "aten::addmm"): 20.0, ("top_mlp", "forward", "aten::x"): 40.0}
    profile = made(parts, parameters=None, seen_model=seen, counters=counters())
    profile.meta["parameters"] = None
    (padding,), (zeros,) = by_id(profile, "padding_lookups"), by_id(profile, "empty_products")
    assert padding.share_of_step == pytest.approx(0.36)
    assert "90% of those of `tags` ask for row 0" in padding.title
    assert zeros.share_of_step == pytest.approx(0.2 * 0.5 * 0.99)
    # what is no number, or was not seen, is no finding and no error
    for damaged in (
        {"tables": [{"rows": "x"}]},
        {"tables": 3},
        {"products": [product | {"zeros": None}]},
    ):
        profile.meta["seen_model"] = damaged
        assert not by_id(profile, "padding_lookups") + by_id(profile, "empty_products")


def test_operators_that_a_setting_would_spare_are_told_by_their_names() -> None:
    seen = {"name": "convolution", "share": 0.075, "file": "/a/mine.py", "line": 7}
    seen_model = {"subnormal": [seen | {"function": "Net.forward"}]}
    parts: dict[Any, float] = {("top_mlp", "forward", "aten::_nnpack_spatial_convolution"): 30.0}
    parts |= {("top_mlp", "backward", "aten::convolution_backward"): 20.0}
    parts |= {("embedding", "forward", "aten::embedding_renorm_"): 25.0}
    parts |= {("top_mlp", "forward", "aten::x"): 25.0}
    profile = made(parts, parameters=None, seen_model=seen_model)
    profile.meta["parameters"] = None
    slow, renorm = by_id(profile, "avoidable_operators")
    assert slow.title.startswith("Computing convolutions without oneDNN takes 50%")
    assert "max_norm" in renorm.title and renorm.share_of_step == pytest.approx(0.25)
    (tiny,) = by_id(profile, "subnormal_numbers")
    assert "up to 50% of the CPU time: 7.5% of an operand of `aten::convolution`" in tiny.title
    assert "`Net.forward` (`mine.py:7`)" in tiny.title and "set_flush_denormal" in tiny.advice
    seen["share"] = 1e-4
    assert not by_id(made(parts, seen_model={"subnormal": [seen]}), "subnormal_numbers")


def test_subnormal_numbers_are_counted_where_they_are_multiplied() -> None:
    layer, wide = torch.nn.Linear(8, 8), torch.ones(10, 8)
    wide[:4] = 1e-40
    seen = SeenModel([layer])
    seen.start()
    layer(torch.zeros(10, 8))
    layer(wide)
    seen.stop()
    (row,) = seen.document()["subnormal"]
    assert row["name"] == "addmm" and row["share"] == pytest.approx(0.4)


def test_a_mode_for_debugging_that_was_left_on_is_tried_off_and_named(tmp_path: Path) -> None:
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        remedy = Anomaly.find(Seen(), Facts([], torch.device("cpu")))
        assert isinstance(remedy, Anomaly)
        remedy.on()
        assert not torch.is_anomaly_enabled()
        remedy.off()
        assert torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled()
    finally:
        torch.autograd.set_detect_anomaly(False)
    assert Anomaly.find(Seen(), Facts([], torch.device("cpu"))) == "it is off already"
    row = {"id": "anomaly", "remedy": remedy.name, "status": "paid", "code": remedy.code}
    row |= {"speedup": {"low": 1.9, "mid": 2.0, "high": 2.1}, "place": "mine.py"}
    profile = made({("top_mlp", "forward", "aten::addmm"): 20.0}, parameters=None)
    profile.meta |= {"parameters": None, "trials": {"rows": [row]}}
    (finding,) = by_id(profile, "left_on")
    assert finding.share_of_step == pytest.approx(0.5)
    assert "Anomaly detection of autograd is on" in finding.title and "50%" in finding.title
    row["status"] = "unclear"
    assert not by_id(profile, "left_on")


def test_what_was_tried_together_is_named_unless_it_is_all() -> None:
    def row(id: str, remedy: str, gain: float) -> dict[str, Any]:
        ends = dict.fromkeys(("low", "mid", "high"), gain)
        return {"id": id, "remedy": remedy, "status": "paid", "speedup": ends}

    profile = made({("top_mlp", "forward", "aten::addmm"): 20.0}, parameters=None)
    rows = [row("ahead", "batches ahead", 1.3), row("autocast", "bf16", 1.2)]
    rows.append(row("together", "together: batches ahead, bf16", 1.6))
    profile.meta["trials"] = {"rows": rows}
    assert tried_sentence(profile).endswith("; both: 1.6x faster (1.6x to 1.6x).")
    rows.insert(2, row("onednn", "oneDNN", 1.1))
    assert tried_sentence(profile).endswith("batches ahead, bf16: 1.6x faster (1.6x to 1.6x).")


def test_what_lines_of_the_model_compute_without_need_is_named_by_line(tmp_path: Path) -> None:
    program = Path(odd_program.__file__)
    profile = recorded(tmp_path, iterations=8, program=program)
    # what is found first leaves less of the step to the others
    found = {one.id: one for one in findings(profile, attribute(profile))}
    at = {
        "small_operators": ["small = [torch.relu"],
        "float64": ["torch.log_softmax", "scores = vectors @"],
        "without_gradients": ["module.spread = "],
        "backward_again": ["loss.backward(retain_graph"],
    }
    assert at.keys() <= found.keys()
    for name, texts in at.items():
        finding = found[name]
        places = [f"odd_program.py:{line(text, program)}" for text in texts]
        assert any(place in f"{finding.title} {finding.evidence}" for place in places)
        assert 0.03 < finding.share_of_step < 0.7
    assert "`Towers.forward`" in found["small_operators"].title
    assert "at `scale`" in found["backward_again"].title
    double = [row for row in profile.meta["seen_model"]["operators"] if row["own_double"]]
    assert {row["function"] for row in double} >= {"contrast"}


def test_what_is_chosen_by_what_learns_is_no_waste() -> None:
    """As the nearest points of a distance between clouds, found without gradients."""
    student = torch.nn.Linear(8, 8)
    seen, values = seen_operators.SeenOperators(student.named_parameters()), torch.rand(16, 8)
    seen.start()
    ours = student(values)
    with torch.no_grad():
        nearest = torch.cdist(ours, values).argmin(1)
    (ours - values.index_select(0, nearest)).square().mean().backward()
    seen.stop()
    rows = [row for row in seen.document()["operators"] if row["file"] == __file__]
    assert rows and not any(row["without_gradients"] for row in rows)


def test_a_teacher_is_no_waste_where_the_loss_takes_what_it_says() -> None:
    teacher, student = torch.nn.Linear(8, 8).requires_grad_(False), torch.nn.Linear(8, 8)
    parameters = [*teacher.named_parameters(), *student.named_parameters()]
    seen, values = seen_operators.SeenOperators(parameters), torch.rand(16, 8)
    seen.start()
    guide = teacher(values).relu()
    mask = values.gt(0.5).float()
    teacher(values).exp()
    ((student(values) - guide) * mask).square().mean().backward()
    seen.stop()
    rows = [row for row in seen.document()["operators"] if row["file"] == __file__]
    by_line = {row["line"] - min(each["line"] for each in rows): row for row in rows}
    without = {place: row["without_gradients"] for place, row in by_line.items()}
    own = {place: row["own_without_gradients"] for place, row in by_line.items()}
    # a mask has no weights, and could be kept; nobody takes what is computed after it
    assert without == own == {0: 0, 1: 256, 2: 256, 3: 0}


def test_loops_passes_of_parts_and_what_is_computed_again_are_named(tmp_path, monkeypatch) -> None:
    program = Path(odd_program.__file__)
    profile = recorded(tmp_path, "parts", iterations=2, program=program)
    (again,) = by_id(profile, "run_again")
    assert "`pass_parts`" in again.title and "`Towers.forward`" in again.evidence
    assert 0.02 < again.share_of_step < 0.7
    titles = " ".join(one.title for one in by_id(profile, "small_operators"))
    assert "Calling 768 small operators" in titles and "A loop of 512 turns" in titles
    profile.meta["seen_model"]["left_out"] = 5
    titles = " ".join(one.title for one in by_id(profile, "small_operators"))
    assert "Calling" not in titles.replace("Calling more than", "")
    monkeypatch.setattr(operators, "TINY_SHARE", 0.0)  # what this machine makes of it is no matter
    (bound,) = dispatch_bound(evidence := Evidence(profile, attribute(profile)), Causes(evidence))
    assert "in 4 backward passes per iteration, at `pass_parts`" in bound.title
    (passes,) = operators.many_passes(evidence, Causes(evidence))
    assert "in 4 parts" in passes.title and "at `pass_parts`" in passes.title
    ledger = Causes(evidence)
    ledger.told.append((0.3, bound.title))
    assert not list(operators.many_passes(evidence, ledger))  # which tells of it


def test_whole_tables_equal_operands_and_gradients_that_nobody_takes_are_named(tmp_path) -> None:
    program = Path(odd_program.__file__)
    profile = recorded(tmp_path, "tables", iterations=6, program=program)
    found = {one.id: one for one in findings(profile, attribute(profile))}
    again, whole, lost = (
        found[name] for name in ("computed_again", "whole_tables", "untrained_gradients")
    )
    assert f"odd_program.py:{line('opinions = [', program)}" in again.title
    assert f"odd_program.py:{line('found = nn.functional', program)}" in whole.title
    assert "gradients of tables dense that were to be sparse" in whole.evidence
    assert "dense_updates" not in found
    assert "`table`" in whole.title and "`frozen.0`, `frozen.2` and `unheard`" in lost.title
    assert "No optimizer has the weights of `frozen.0` and `frozen.2`" in lost.evidence
    assert "The gradients of `unheard` are 0 everywhere" in lost.evidence
    padded = found["padded_positions"]
    assert padded.title.endswith("% of the positions that `notes` looks up are its padding")
    assert 0.1 < again.share_of_step < 0.75 and 0.05 < whole.share_of_step < 0.75
    assert 0.02 < lost.share_of_step < 0.5 and 0.1 < padded.share_of_step < 0.75


def test_the_line_of_a_slow_worker_is_that_of_the_batch(tmp_path: Path) -> None:
    program = Path(odd_program.__file__)
    profile = recorded(tmp_path, "loader", "1", iterations=6, program=program)
    (slow,) = by_id(profile, "data_generation")
    assert "most of it in `collate`" in slow.title and slow.share_of_step > 0.05
    rows = lines(profile)
    (worker,) = {name for name in rows["thread"] if name.startswith("DataLoader worker")}
    assert worker == "DataLoader worker 0"
    assert set(rows.loc[rows["thread"].eq(worker), "role"]) == {"batch"}
    assert not list(tmp_path.rglob("*.workers*"))


def test_a_cause_whose_remedy_made_no_difference_is_none() -> None:
    found = Finding("page_faults", "", "other", 0.12, (), "", {}, {}, "")
    row = {"id": "allocator", "remedy": "it", "status": "no difference"}
    profile = made({("top_mlp", "forward", "aten::addmm"): 20.0}, parameters=None)
    profile.meta["trials"] = {"rows": [row]}
    assert as_tried([found], profile) == []
    gain = {"low": 1.1, "mid": 1.2, "high": 1.3}
    row |= {"status": "paid", "speedup": gain}
    assert as_tried([found], profile)[0].predicted_speedup == gain


def test_a_thread_that_keeps_pythons_lock_is_named_by_its_line(tmp_path: Path) -> None:
    (thread,) = by_id(recorded(tmp_path, "burn", iterations=4), "other_threads")
    assert "in `burn` (`careless_program.py:" in thread.title


def test_only_equal_operators_on_the_same_values_compute_again(monkeypatch) -> None:
    monkeypatch.setattr(seen_operators, "MOST_S", 60)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.table = torch.nn.Linear(8, 8), torch.nn.Embedding(9, 4)
            self.frozen, self.unheard = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)

    model, x = Model(), torch.ones(5, 8)
    trained = [model.layer.weight, model.layer.bias, model.table.weight]
    optimizer = torch.optim.SGD([*trained, model.unheard.weight, model.unheard.bias], 0.1)
    seen = SeenModel([model])
    seen.start()
    y = model.layer(x)
    y = model.layer(x.view(5, 8)).relu() + model.layer(x).relu()  # again, relu() too
    for _ in range(3):
        x = x * 2  # values of its own, in memory that was given back
        torch.nn.functional.dropout(x, 0.5)
    x.add_(1)
    z = model.layer(x) + model.frozen(x)
    z = z + 0.0 * model.unheard(x)
    whole = torch.nn.functional.normalize(model.table.weight)[torch.tensor([1, 2])]
    looked_up = model.table(torch.tensor([3]))
    (y.sum() + z.sum() + whole.sum() + looked_up.sum()).backward()
    optimizer.step()
    seen.stop()
    document = seen.document()
    assert document["untrained"] == ["frozen.weight", "frozen.bias"]
    assert document["zero"] == ["unheard.weight", "unheard.bias"]
    rows = {row["line"]: row for row in document["operators"] if row["file"] == __file__}
    first = min(rows)
    assert rows[first]["again"] == 0
    # of a first layer that ran before, and its relu: a second layer and relu; then the sum
    assert (rows[first + 1]["again"], rows[first + 1]["elements"]) == (3 * 40, 5 * 40)
    others = [row for number, row in rows.items() if number > first + 1]
    assert sum(row["again"] for row in others) == 0
    (table,) = [row for row in others if row["whole"]]
    assert 0 < table["whole"] <= table["moved"]
    (half,) = [row for row in others if row["untrained"]]
    assert half["untrained"] == 40 and half["weights"] == 80
    assert [row["zero"] / row["weights"] for row in others if row["zero"]] == [1]


def test_what_stands_for_padding_is_counted_by_line() -> None:
    table, layer = torch.nn.Embedding(9, 4, padding_idx=0), torch.nn.Linear(4, 3)
    seen = SeenModel([torch.nn.ModuleList([table, layer])])
    seen.start()
    found = table(torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0]]))
    layer(found.view(8, 4)).view(2, 4, 3).sum(dim=1).exp()
    found.mean(dim=1).exp()  # of as many numbers as there were positions, but of none
    seen.stop()
    document = seen.document()
    assert document["tables"][0]["padding"] == 5 / 8
    first, second, pooled = (row for row in document["operators"] if row["file"] == __file__)
    assert (first["own_padded"], first["own_elements"]) == (20, 8 + 32)
    assert (second["own_padded"], second["own_elements"]) == (15, 24 + 2 * 6)
    assert pooled["own_padded"] == 0


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=20), min_size=1, max_size=5))
def test_rows_of_a_table_are_counted_over_all_its_calls(calls: list[list[int]]) -> None:
    table = torch.nn.Embedding(10, 2, sparse=True)
    seen = SeenModel([torch.nn.ModuleList([table])])
    seen.start()
    for indices in calls:
        table(torch.tensor(indices))
    seen.stop()
    (row,) = seen.document()["tables"]
    rows = Counter(index for indices in calls for index in indices)
    assert (row["calls"], row["lookups"], row["unique"]) == (len(calls), rows.total(), len(rows))
    assert row["hottest"] == max(rows.values()) / rows.total() and row["sparse"]
    assert rows[row["hottest_row"]] == max(rows.values())


def test_dense_gradients_cost_what_they_move_and_are_told_of_the_line_that_makes_them() -> None:
    """Made figures: 20 ms of updates; 10 ms of making gradients of 1,000 numbers, and of adding up
    those of 300 that are looked up, each read, added to and written."""
    place = {"file": "/a/mine.py", "line": 7, "function": "step"}
    table = {"name": "tags", "rows": 100, "dim": 10, "bytes": 4, "calls": 1, "lookups": 30}
    table |= {"unique": 10, "optimizer": 0, "gradient": "dense", "sparse": False, **place}
    adam = {"class": "Adam", "elements": 2000, **place}
    seen = {"tables": [table], "optimizers": [adam]}
    parts: dict[Any, float] = {("embedding", "backward", "aten::embedding_dense_backward"): 10.0}
    parts |= {("optimizer", "update", "aten::x"): 20.0, ("top_mlp", "forward", "aten::y"): 70.0}

    def made_of(seen: dict[str, Any]) -> Profile:
        profile = made(parts, parameters=None, seen_model=seen, counters=counters())
        profile.meta["parameters"] = None
        return profile

    (dense,) = by_id(made_of(seen), "dense_updates")
    # 900 of 2,000 numbers written for nothing; 900 of the 1,900 moved to make the gradient
    assert dense.share_of_step == pytest.approx(0.2 * 900 / 2000 + 0.1 * 900 / 1900)
    table["sparse"] = True
    assert by_id(made_of(seen), "dense_updates")  # nothing tells what makes the gradient dense
    seen["whole_tables"] = [{"name": "tags", "rows": 100, "lookups": 30}]
    assert not by_id(made_of(seen), "dense_updates")


def test_memory_that_changes_behind_torch_and_tables_that_are_scored_are_not_blamed() -> None:
    layer, table = torch.nn.Linear(8, 8), torch.nn.Embedding(9, 4)
    optimizer = torch.optim.SGD([*layer.parameters(), *table.parameters()], 0.1)
    buffer = torch.ones(5, 8)
    seen = SeenModel([torch.nn.ModuleList([layer, table])])
    seen.start()
    for value in (1.0, 2.0):
        buffer.numpy()[:] = value  # the next part of a batch, without a new version
        layer(buffer)
    layer.weight.data.mul_(2)
    layer(buffer)
    items = torch.nn.functional.normalize(table.weight)
    found = torch.nn.functional.embedding(torch.tensor([1, 2]), items)
    (found @ items.T).sum().backward()
    gc.freeze()
    try:
        optimizer.step()
        seen.stop()
        document = seen.document()
    finally:
        gc.unfreeze()
    rows = [row for row in document["operators"] if row["file"] == __file__]
    assert rows and sum(row["again"] for row in rows) == 0
    assert document["whole_tables"] == [] == document["untrained"]


def test_what_fails_while_looking_leaves_the_program_as_it_is() -> None:
    class Odd(torch.nn.Embedding):
        def forward(self, value: Any) -> Any:
            return 1.0

    seen = SeenModel([])
    seen.start()
    try:
        assert Odd(2, 2)("no tensor") == 1.0
        assert torch.nn.Linear(2, 2)(torch.ones(3, 2)).shape == (3, 2)
        with pytest.raises(RuntimeError, match="shapes"):
            torch.ones(2, 3) @ torch.ones(2, 3)
    finally:
        seen.stop()
    document = seen.document()
    assert document["left_out"] == 1 and len(document["products"]) == 1
    assert document["module_calls"] == 2
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
