"""Probes: what a change touches, which half is run, what comes back."""

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.base.errors import InputError
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_workbook.analysis.whatif import COVER
from dlrm_workbook.evidence import probes, together
from dlrm_workbook.evidence.dependence import (
    affected_components,
    affected_phases,
    changed_parameters,
)
from dlrm_workbook.evidence.probes import (
    HALVES,
    StepLoop,
    default_changes,
    interleave,
    medians,
    part_times,
    probe_changes,
    ratio_errors,
    reduced,
)
from dlrm_workbook.evidence.together import WholeStep

TRIALS = 200
"""Changes that are probed to see how often a range covers the truth."""

TINY: dict[str, Any] = {
    "model": {
        "bottom_mlp": [8, 16, 4],
        "top_mlp": [8, 1],
        "embedding_dim": 4,
        "tables": 3,
        "table_rows": 50,
        "init": "torch",
    },
    "data": {"generator": "facebook", "indices_per_lookup": 5},
    "training": {"batch_size": 32, "device": "cpu", "threads": 1},
}


DCN = {"interaction": "dcn", "dcn_layers": 2, "dcn_rank": 3}


def tiny(**sections: dict[str, Any]) -> Parameters:
    tree = {name: {**section, **sections.get(name, {})} for name, section in TINY.items()}
    return parameters_from_sections(tree)


DENSE = {"bottom_mlp", "interaction", "top_mlp", "loss"}


@pytest.mark.parametrize(
    ("change", "touched"),
    [
        ({"training.batch_size": 64}, {*DENSE, "embedding", "data", "optimizer"}),
        ({"training.seed": 5, "training.batches": 3}, set()),
        ({"profiling.iterations": 3}, set()),
        ({"model.top_mlp": [16, 1]}, {"top_mlp", "optimizer"}),
        ({"model.bottom_mlp": [8, 32, 4]}, {"bottom_mlp", "optimizer"}),
        ({"model.interaction": "cat"}, {"interaction", "top_mlp", "optimizer"}),
        ({"model.loss": "bce"}, {"loss"}),
        ({"model.tables": 4}, {"interaction", "top_mlp", "embedding", "data", "optimizer"}),
        ({"model.table_rows": 60}, {"embedding", "data", "optimizer"}),
        ({"data.indices_per_lookup": 9}, {"embedding", "data", "optimizer"}),
        # the same batches, made otherwise: the model sees no difference
        ({"data.generator": "facebook_loop"}, {"data"}),
        ({"data.generator": "uniform"}, {"data", "embedding", "optimizer"}),
        ({"data.zipf_exponent": 1.5}, set()),
        ({"data.loader": "prefetch"}, {"data"}),
        ({"training.fused_optimizer": True}, {"bottom_mlp", "top_mlp", "optimizer"}),
        ({"training.fp32_matmul": "onednn"}, {*DENSE, "optimizer"}),
        ({"training.embedding_backend": "fused"}, {"embedding", "optimizer"}),
    ],
)
def test_what_a_change_touches(change: dict[str, Any], touched: set[str]) -> None:
    base = tiny()
    assert affected_components(base, changed_parameters(base, change)[0]) == touched


def test_cross_layers_are_the_interactions_alone() -> None:
    base = tiny(model=DCN)
    for change, touched in (
        ({"model.dcn_rank": 5}, {"interaction", "optimizer"}),
        ({"model.dcn_layers": 1}, {"interaction", "optimizer"}),
        ({"training.fused_optimizer": True}, {"bottom_mlp", "interaction", "top_mlp", "optimizer"}),
    ):
        assert affected_components(base, changed_parameters(base, change)[0]) == touched
    fused = changed_parameters(base, {"training.fused_optimizer": True})[0]
    assert affected_phases(base, fused, "interaction") == {"update"}
    dot, notices = changed_parameters(base, {"model.interaction": "dot"})
    assert (
        dot.model.interaction_kind.weights() == []
        and "are left out: only dcn has them" in notices[0]
    )
    assert changed_parameters(dot, {"model.interaction": "dcn"})[0].model.dcn_rank == 512
    with pytest.raises(InputError, match="only dcn has cross layers"):
        changed_parameters(dot, {"model.dcn_rank": 4})
    assert reduced(base, "sparse") == reduced(dot, "sparse")


def test_an_optimiser_touches_the_update_alone() -> None:
    base = tiny()
    fused = changed_parameters(base, {"training.fused_optimizer": True})[0]
    assert affected_phases(base, fused, "top_mlp") == {"update"}
    more = changed_parameters(base, {"training.optimizer": "adagrad", "training.batch_size": 8})[0]
    assert affected_phases(base, more, "top_mlp") is None
    adagrad = changed_parameters(base, {"training.optimizer": "adagrad"})[0]
    assert affected_phases(base, adagrad, "embedding") == {"update"}
    inside = tiny(training={"embedding_backend": "fused"})
    adagrad = changed_parameters(inside, {"training.optimizer": "adagrad"})[0]
    # the fused back end updates in the backward pass
    assert affected_phases(inside, adagrad, "embedding") is None


def test_the_dense_half_is_stood_for_between_lookup_and_update() -> None:
    loop = StepLoop(tiny(), "sparse")
    at, began = loop.flush.taken_ns, time.perf_counter()
    times = loop.run()
    took_ms = 1e3 * (time.perf_counter() - began)
    flushed_ms = (loop.flush.taken_ns - at) / 1e6
    # streaming over the buffer is nobody's time
    counted_ms = sum(times.values())
    assert flushed_ms > 0 and counted_ms + flushed_ms <= took_ms
    assert loop.step.dense.precision is not None


def test_dim_and_tables_take_along_what_must_change_with_them() -> None:
    changed, notices = changed_parameters(tiny(), {"model.embedding_dim": 8})
    assert changed.model.bottom_mlp == (8, 16, 8)
    assert "model.bottom_mlp ends in 8" in notices[0]
    assert changed_parameters(tiny(), {"model.tables": 5})[0].model.table_rows == (50,) * 5
    several = tiny(model={"tables": None, "table_rows": [10, 20]})
    with pytest.raises(InputError, match="2 different tables"):
        changed_parameters(several, {"model.tables": 3})
    grown = changed_parameters(several, {"model.table_rows": [1, 2, 3]})[0]
    assert grown.model.tables == 3


@pytest.mark.parametrize("change", [{}, {"batch_size": 3}, {"model.nothing": 3}, {"data": {}}])
def test_impossible_changes_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        changed_parameters(tiny(), change)


def test_a_half_knows_what_it_does_not_run() -> None:
    base = tiny()
    pooling = changed_parameters(base, {"data.indices_per_lookup": 9})[0]
    layers = changed_parameters(base, {"model.top_mlp": [16, 1]})[0]
    assert reduced(base, "dense") == reduced(pooling, "dense")
    assert reduced(base, "sparse") != reduced(pooling, "sparse")
    assert reduced(base, "sparse") == reduced(layers, "sparse")
    assert reduced(base, "dense") != reduced(layers, "dense")
    assert reduced(base, "dense").model.top_widths == base.model.top_widths


@pytest.mark.parametrize("half", HALVES)
def test_a_half_times_its_own_parts(half: str) -> None:
    loop = StepLoop(tiny(), half)
    times = loop.run()
    assert {component for component, _ in times} == {*HALVES[half], "optimizer", "other"}
    assert all(ms > 0 for (component, _), ms in times.items() if component in HALVES[half])
    component = "top_mlp" if half == "dense" else "embedding"
    assert {(component, phase) for phase in ("forward", "backward", "update")} <= set(times)


def addresses(loop: Any) -> list[int]:
    """Where the tables of a loop lie."""
    return [table.data_ptr() for table in loop.model.embeddings.weights]


def test_equal_tables_are_lent_and_others_made() -> None:
    base = StepLoop(tiny(), "sparse")
    same = StepLoop(tiny(training={"batch_size": 64}), "sparse", tables_from=base)
    wider = StepLoop(tiny(model={"table_rows": 51}), "sparse", tables_from=base)
    assert addresses(same) == addresses(base)
    assert not set(addresses(wider)) & set(addresses(base))


def test_ranges_of_a_part_add_up_and_the_rest_is_other() -> None:
    rows = [
        ("dlrm::top_mlp::forward", 0, 2_000_000),
        ("dlrm::top_mlp::forward", 3_000_000, 4_000_000),
        ("dlrm::embedding::forward", 5_000_000, 6_000_000),
        ("dlrm::optimizer::update", 6_000_000, 6_500_000),
        ("dlrm::iteration", 0, 9_000_000),
    ]
    times = part_times(rows, 9_000_000, HALVES["dense"])
    assert times == {("top_mlp", "forward"): 3.0, ("optimizer", "update"): 0.5, ("other", ""): 4.5}


class Counted:
    """A loop whose runs take made-up times."""

    def __init__(self, times: list[float]) -> None:
        self.parameters = tiny()
        self.times = times
        self.runs = 0

    def run(self) -> dict[tuple[str, str], float]:
        self.runs += 1
        return {("loss", "forward"): self.times[self.runs % len(self.times)]}


def test_loops_leave_the_turns_when_they_are_settled() -> None:
    base, soon, late = Counted([1.0]), Counted([2.0]), Counted([3.0])

    def settled(place: int, before: list[Any], after: list[Any]) -> bool:
        assert len(before) == len(after)
        return len(after) >= (6 if place == 2 else 0)

    runs = interleave([base, soon, late], 60.0, settled)
    assert [len(each) for each in runs] == [6, probes.MIN_ROUNDS, 6]
    assert medians(runs[2]) == {("loss", "forward"): 3.0}
    never = interleave([base, soon], 60.0, lambda *runs: False)
    assert [len(each) for each in never] == [probes.MAX_ROUNDS] * 2
    late_at_once = interleave([base, soon], 0.0, lambda *runs: False)
    assert [len(each) for each in late_at_once] == [probes.MIN_ROUNDS] * 2
    alone = interleave([base], 60.0, lambda place, before, after: before == after)
    assert [len(each) for each in alone] == [probes.MIN_ROUNDS]


def test_a_run_after_other_settings_is_not_counted() -> None:
    base, other, same = (Counted([1.0]) for _ in range(3))
    other.parameters = tiny(training={"fp32_matmul": "onednn"})
    interleave([base, other, same], 0.0, lambda *runs: True)
    # base same | other, other | same base, ...: whoever was last in a round goes on in the next
    assert probes.MIN_ROUNDS == 4
    assert (base.runs + same.runs, other.runs) == (2 * 4 + 3, 4 + 2)


class Random(Counted):
    """A loop whose two parts take times that scatter around what they truly take."""

    def __init__(self, parts: tuple[float, float], draw: Any) -> None:
        super().__init__([])
        self.parts, self.draw = parts, draw

    def run(self) -> dict[tuple[str, str], float]:
        forward, backward = (ms * self.draw() for ms in self.parts)
        return {("loss", "forward"): forward, ("loss", "backward"): backward}


SCATTER = {
    "log-normal": lambda random, sigma: float(np.exp(sigma * random.standard_normal())),
    "now and then disturbed": lambda random, sigma: float(
        np.exp(sigma * random.standard_normal())
        * (1 + (random.random() < 0.1) * random.exponential(0.3))
    ),
    "only ever slower": lambda random, sigma: 1 + sigma * float(random.exponential()),
}


@pytest.mark.parametrize("law", SCATTER)
@pytest.mark.parametrize("sigma", [0.02, 0.06, 0.15])
def test_ranges_cover_the_truth_as_often_as_they_say_though_probes_end_early(law, sigma) -> None:
    random = np.random.default_rng(int(1e3 * sigma))

    def draw() -> float:
        return SCATTER[law](random, sigma)

    timed = probes._Probes(tiny(), [])
    timed.step_ms = 300.0
    covered = rounds = 0
    for _ in range(TRIALS):
        before, after = interleave(
            [Random((80.0, 160.0), draw), Random((60.0, 40.0), draw)],
            60.0,
            lambda place, before, after: timed._settled("dense", "", before, after),
        )
        now, then, errors = medians(before), medians(after), ratio_errors(before, after)
        rounds += len(after)
        for phase, truth in (("forward", 60 / 80), ("backward", 40 / 160)):
            part = ("loss", phase)
            ratio, error = then[part] / now[part], errors[part]
            covered += ratio / (1 + COVER * error) <= truth <= ratio * (1 + COVER * error)
    # 90 % are promised; three standard errors of a share of so many
    assert covered / (2 * TRIALS) > 0.90 - 3 * math.sqrt(0.09 / (2 * TRIALS))
    if sigma == 0.02 and law == "log-normal":
        assert rounds / TRIALS < 8, "what is known is not timed on"
    if sigma == 0.15:
        assert rounds / TRIALS > 8, "what is not known is"


@given(st.lists(st.floats(0.1, 10.0), min_size=4, max_size=12), st.floats(0.1, 10.0))
def test_a_ratios_error_does_not_depend_on_the_unit(values: list[float], unit: float) -> None:
    runs = [{("loss", "forward"): value} for value in values]
    scaled = [{("loss", "forward"): value * unit} for value in values]
    assert ratio_errors(runs, scaled) == pytest.approx(ratio_errors(runs, runs))


def test_probes_come_back_for_the_touched_parts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "OVERLAP_SECONDS", 0.1)
    threads = torch.get_num_threads()
    changes: list[dict[str, Any]] = [
        {"model.top_mlp": [16, 1]},
        {"data.indices_per_lookup": 9},
        {"data.generator": "facebook_loop", "data.loader": "prefetch"},
        {"training.batch_size": 0},
        {"model.table_rows": 10**12},
    ]
    found = probe_changes(tiny(), changes, seconds=1.0)
    assert torch.get_num_threads() == threads
    assert found["threads"] == 1
    wanted = {*DENSE, "embedding", "data", "optimizer", "other"}
    assert set(found["base"]) == wanted
    layers, bags, loader, wrong, large = found["changes"]
    assert [probe["change"] for probe in found["changes"]] == changes
    assert set(layers["parts"]) == {"top_mlp", "optimizer", "other"}
    assert set(bags["parts"]) == {"embedding", "data", "optimizer", "other"}
    for probe in (layers, bags):
        for component, phases in probe["parts"].items():
            assert phases.keys() == probe["base"][component].keys()
            assert phases.keys() == probe["spread"][component].keys()
    assert set(loader["parts"]) == {"data"}
    assert set(loader["overlap"]["halves"]) == set(HALVES)
    assert loader["overlap"]["data_alone_ms"] > 0
    assert "batch_size is 0" in wrong["refused"] and not wrong["parts"]
    assert "available" in large["refused"] and not large["parts"]


def test_only_what_a_change_affects_keeps_it_in_the_turns() -> None:
    change = {"training.fused_optimizer": True}
    timed = probes._Probes(tiny(), [change])
    key = timed.candidates[0].keys["dense"]
    timed.step_ms = 200.0

    def runs(forward: list[float], update: list[float]) -> list[Any]:
        return [
            {("top_mlp", "forward"): ahead, ("top_mlp", "update"): after}
            for ahead, after in zip(forward, update, strict=True)
        ]

    calm, wild = [10.0, 10.1, 9.9, 10.0], [10.0, 30.0, 5.0, 20.0]
    assert timed._settled("dense", key, runs(wild, calm), runs(wild, calm))
    assert not timed._settled("dense", key, runs(calm, wild), runs(calm, wild))
    # of the unchanged loop all parts count
    assert not timed._settled("dense", probes.UNCHANGED, runs(wild, calm), runs(wild, calm))


def test_changes_are_timed_beside_one_base_and_what_is_equal_once(monkeypatch) -> None:
    monkeypatch.setattr(probes, "OVERLAP_SECONDS", 0.1)
    timed: list[list[str]] = []
    taken = probes.interleave

    def counted(loops: list[Any], *others: Any) -> Any:
        timed.append([type(loop).__name__ for loop in loops])
        return taken(loops, *others)

    monkeypatch.setattr(probes, "interleave", counted)
    faster = {"data.generator": "facebook_loop"}
    changes: list[dict[str, Any]] = [faster, {**faster, "data.loader": "prefetch"}]
    one, both = probe_changes(tiny(), changes, seconds=0.1)["changes"]
    # the halves alone, then the batches that both changes make beside those of the run
    assert timed == [["StepLoop"], ["StepLoop"], ["DataLoop"] * 2]
    assert one["parts"] == both["parts"] and one["spread"] == both["spread"]
    assert "overlap" in both and "overlap" not in one
    timed.clear()
    other = {**faster, "training.batch_size": 2 * tiny().training.batch_size}
    probe_changes(tiny(), [faster, other, {"training.fused_optimizer": True}], seconds=0.1)
    assert timed == [["StepLoop"] * 3, ["StepLoop"] * 2, ["DataLoop"] * 3]


def test_loops_that_do_not_fit_together_are_timed_after_one_another(monkeypatch) -> None:
    built: list[int] = []
    made = probes._Probes._changed_loop

    def one_at_a_time(self: Any, half: str, changed: Parameters) -> Any:
        rows = changed.model.table_rows[0]
        if rows == 99 or len(built) > len(timed):
            raise InputError(f"no room for {rows} rows")
        built.append(rows)
        return made(self, half, changed)

    timed: list[int] = []
    taken = probes.interleave

    def counted(loops: list[Any], *others: Any) -> Any:
        if len(loops) > 1:
            timed.append(len(loops))
        return taken(loops, *others)

    monkeypatch.setattr(probes._Probes, "_changed_loop", one_at_a_time)
    monkeypatch.setattr(probes, "interleave", counted)
    changes = [{"model.table_rows": rows} for rows in (60, 70, 99)]
    asked = [probes.changed_parameters(tiny(), each)[0] for each in changes]
    timing = probes._Probes(tiny(), changes)
    timing.begin()
    timing.compare("sparse", 0.1)
    assert built == [60, 70] and timed == [2, 2]
    assert set(timing._runs) == {("sparse", str(reduced(each, "sparse"))) for each in asked[:2]}
    assert list(timing._refused.values()) == ["no room for 99 rows"]


def test_lent_tables_are_trained_on() -> None:
    owner = StepLoop(tiny(), "sparse")
    lent = probes.Tables(owner.model, owner.huge_pages)
    timing = probes._Probes(tiny(), [], [lent])
    timing.begin()
    loop = timing._loops["sparse"]
    assert isinstance(loop, StepLoop)
    assert addresses(loop) == addresses(owner)
    narrow = tiny(model={"embedding_precision": "bf16"}, training={"embedding_backend": "fused"})
    other = probes.model_for(narrow.model, probes.Tables(owner.model, True), True)
    assert {table.dtype for table in other.embeddings.weights} == {torch.bfloat16}


def test_tables_that_a_change_needed_are_kept_for_whole_steps() -> None:
    owner = StepLoop(tiny(), "sparse")
    lenders: list[probes.Tables] = [probes.Tables(owner.model, owner.huge_pages)]
    fused = {"training.embedding_backend": "fused"}
    larger = {**fused, "model.table_rows": 60}
    changes: list[dict[str, Any]] = [fused, {**fused, "training.batch_size": 64}, larger]
    probe_changes(tiny(), changes, seconds=0.1, lenders=lenders)
    # those in large pages, once; tables of other shapes serve no one else
    assert [tables.huge_pages for tables in lenders] == [False, True]
    steps = [WholeStep(tiny(), lenders), WholeStep(changed_parameters(tiny(), fused)[0], lenders)]
    for step, tables in zip(steps, lenders, strict=True):
        assert addresses(step) == addresses(tables)


def test_a_turn_counts_every_iteration_but_what_a_loader_made_ahead(monkeypatch) -> None:
    monkeypatch.setattr(together, "TURN_MS", 0.001)
    ahead = tiny(data={"loader": "prefetch", "prefetch_batches": 2})
    for parameters, iterations in ((tiny(), 1), (ahead, 3)):
        step, run = WholeStep(parameters), 0
        whole = step.step

        def counted(batch: Any, whole: Any = whole) -> Any:
            nonlocal run
            run += 1
            return whole(batch)

        monkeypatch.setattr(step, "step", counted)
        assert step.turn() > 0
        assert run == iterations


def test_batches_beside_the_step_are_made_beside_it_from_begin_to_end(monkeypatch) -> None:
    loop = probes.DataLoop(tiny())
    made, opened, calls = loop.generator.next_batch, threading.Event(), 0

    def counted() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:  # what is waited for ends inside the context only
            opened.wait()
            time.sleep(0.02)
        return made()

    monkeypatch.setattr(loop.generator, "next_batch", counted)
    with loop.beside() as times:
        assert times == []
        opened.set()
        while not times:
            time.sleep(0.001)
    assert calls == len(times) + 1
    assert min(times) >= 20

    def broken() -> Any:
        raise ValueError("no batch")

    monkeypatch.setattr(loop.generator, "next_batch", broken)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    with loop.beside() as times:
        assert times == []


@pytest.mark.parametrize("ends", [True, False])
def test_only_batches_that_ended_beside_the_step_count_as_made_beside_it(monkeypatch, ends) -> None:
    monkeypatch.setattr(probes, "OVERLAP_SECONDS", 0.0)
    running: list[float] = []
    runs_of_a_turn = []

    class Loader:
        @contextlib.contextmanager
        def beside(self) -> Iterator[list[float]]:
            running.clear()
            self.times: list[float] = []
            loaders.append(self)
            yield self.times
            runs_of_a_turn.append(len(running))
            self.times.append(1.0)  # ends beside nothing, in a third of the time

    def run() -> Any:
        running.append(1.0)
        if ends and len(running) == 5 and loaders:
            loaders[-1].times.append(3.0)
        return {("top_mlp", "forward"): 1.0}

    loaders: list[Any] = []
    timed = probes._Probes(tiny(), [])
    timed.alone["data"] = [{("data", "forward"): 1.0}]
    monkeypatch.setattr(probes, "DataLoop", lambda parameters: Loader())
    monkeypatch.setattr(timed, "_base_loop", lambda half: SimpleNamespace(run=run))
    if ends:
        found = timed._overlap(tiny(data={"loader": "prefetch"}))
        assert found["data_beside_ms"] == dict.fromkeys(probes.HALVES, 3.0)
        assert set(runs_of_a_turn) == {5}
    else:
        with pytest.raises(InputError, match=r"no batch was finished beside 36 runs"):
            timed._overlap(tiny(data={"loader": "prefetch"}))


def test_the_default_changes_are_those_that_apply() -> None:
    plain = default_changes(tiny(data={"generator": "facebook_loop"}))
    leaves = {leaf for change in plain for leaf in change}
    assert {"data.generator", "data.loader", "training.batch_size"} <= leaves
    assert {"training.fused_optimizer": True} in plain
    tuned = tiny(
        data={"loader": "prefetch"},
        training={"fused_optimizer": True, "fp32_matmul": "onednn", "embedding_backend": "fused"},
    )
    rest = default_changes(tuned)
    assert {"training.batch_size": 64} in rest
    assert not {"data.generator", "data.loader", "training.fused_optimizer"} & {
        leaf for change in rest for leaf in change
    }
    kept = default_changes(tiny(training={"lowest_precision": "fp32"}))
    assert not any("training.precision" in change for change in kept)
    for change in plain:
        changed_parameters(tiny(data={"generator": "facebook_loop"}), change)
