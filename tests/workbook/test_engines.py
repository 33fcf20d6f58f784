"""Two recordings of one run agree exactly as far as their errors allow."""

from pathlib import Path

import numpy as np
import pytest
from profile_rows import profile_of_rows

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.config import parameters_from_sections
from dlrm_core.parts import ITERATION_SPAN, span_name
from dlrm_workbook.analysis.compare import engines_side_by_side
from dlrm_workbook.ground.processes import MeasurementError
from dlrm_workbook.ground.profiling import ProfilingConfig
from dlrm_workbook.recordings import measure
from dlrm_workbook.recordings.hpctoolkit.tools import Tools
from dlrm_workbook.recordings.measure import TORCH_FOLDER, choose_engine, second_profile
from dlrm_workbook.recordings.profile import Profile

PARTS = [("data", "forward"), ("top_mlp", "forward"), ("top_mlp", "backward")]
NS = 1e6


def recording(
    engine: str,
    parts_ms: tuple[float, ...] = (10.0, 4.0, 6.0),
    *,
    operators: tuple[int, ...] = (0, 1, 1),
    cost_ms: float = 0.0,
    count: int = 40,
    seed: int = 0,
    plain_ms: float | None = None,
) -> Profile:
    """A recording whose profiler adds ``cost_ms`` an iteration, shared out by operators."""
    random = np.random.default_rng(seed)
    share = np.array(operators) / max(sum(operators), 1)
    spans, iterations, now = [], [], 0
    for number in range(count):
        begin = now
        for part, (length, extra) in enumerate(zip(parts_ms, share * cost_ms, strict=True)):
            own = round((length * (1 + 0.01 * random.normal()) + extra) * NS)
            spans.append((0, now, now + own, 1 + part, 1))
            each = own // (operators[part] + 1)
            for operator in range(operators[part]):
                start = now + operator * each
                spans.append((0, start, start + each, 1 + len(PARTS) + part, 2))
            now += own
        spans.append((0, begin, now, 0, 0))
        iterations.append((number, begin, now))
    names = [ITERATION_SPAN, *(span_name(*part) for part in PARTS), "op", "op", "op"]
    plain = sum(parts_ms) if plain_ms is None else plain_ms
    meta = {"engine": engine, "unprofiled_iteration_ms": [plain] * 5}
    meta["iteration_ms"] = [sum(parts_ms) + cost_ms] * 5
    return profile_of_rows(
        {
            "parent": [-1, 0, 0, 0, 1, 2, 3],
            "kind": ["annotation"] * 4 + ["operator"] * 3,
            "name": names,
            "component": ["other", *[c for c, _ in PARTS] * 2],
            "phase": ["", *[p for _, p in PARTS] * 2],
        },
        trace=spans,
        iterations=iterations,
        **meta,
    )


def test_equal_runs_agree_in_every_part_and_in_sum() -> None:
    table = engines_side_by_side(recording("hpctoolkit", seed=1), recording("torch", seed=2))
    assert table["component"].tolist() == ["iteration", "data", "top_mlp", "top_mlp"]
    assert table["agrees"].all()
    for name in ("hpctoolkit_ms", "torch_ms"):
        assert table[name].iloc[1:].sum() == pytest.approx(table[name].iloc[0])
    assert table["torch_ms"].tolist() == pytest.approx([20, 10, 4, 6], rel=0.01)
    assert "All 3 parts agree" in table.attrs["sentence"]


def test_the_sentence_about_two_profilers_writes_long_times_out() -> None:
    both = [recording(name, (1500.0, 800.0, 900.0), seed=3) for name in ("hpctoolkit", "torch")]
    assert "e+0" not in engines_side_by_side(*both).attrs["sentence"]


def test_a_part_that_differs_is_named() -> None:
    slower = recording("torch", (10.0, 4.3, 6.0), seed=2, plain_ms=20.0)
    slower.meta["iteration_ms"] = [20.0] * 5
    table = engines_side_by_side(recording("hpctoolkit", seed=1), slower)
    apart = table[~table["agrees"]]
    assert ("top_mlp", "forward") in set(zip(apart["component"], apart["phase"], strict=True))
    assert table.set_index(["component", "phase"]).loc[("data", "forward"), "agrees"]
    assert "top MLP forward" in table.attrs["sentence"] and " not." in table.attrs["sentence"]
    row = table[table["phase"] == "forward"].iloc[-1]
    assert row["difference_ms"] == pytest.approx(0.3, rel=0.1)


def test_what_the_profiler_costs_is_taken_from_the_parts_with_the_operators() -> None:
    torch = recording("torch", operators=(0, 2, 18), cost_ms=2.0, seed=2)
    table = engines_side_by_side(recording("hpctoolkit", seed=1), torch)
    table = table.set_index(["component", "phase"])
    cost = table["torch_cost_ms"]
    assert cost["iteration", ""] == pytest.approx(2.0)
    assert cost["top_mlp", "backward"] > 6 * cost["top_mlp", "forward"] > 0
    assert cost["data", "forward"] < 0.1
    assert table["agrees"].all()
    # unprofiled and equal times leave nothing to subtract, so the same part now stands out
    torch.meta["unprofiled_iteration_ms"] = torch.meta["iteration_ms"]
    raw = engines_side_by_side(recording("hpctoolkit", seed=1, plain_ms=22.0), torch)
    assert (raw["torch_cost_ms"] == 0).all()
    assert not raw.set_index(["component", "phase"]).loc[("top_mlp", "backward"), "agrees"]


def test_runs_that_differ_without_profiler_may_differ_as_much_with_it() -> None:
    slow = recording("torch", (11.0, 4.4, 6.6), seed=2, plain_ms=22.0)
    table = engines_side_by_side(recording("hpctoolkit", seed=1), slow)
    assert table["agrees"].all()
    assert table["difference_ms"].iloc[0] == pytest.approx(2.0, rel=0.05)
    far = recording("torch", (30.0, 12.0, 18.0), seed=2, plain_ms=60.0)
    assert "too much" in engines_side_by_side(recording("torch", seed=1), far).attrs["sentence"]


def test_only_two_recordings_with_iterations_can_be_compared() -> None:
    one = recording("torch")
    assert "one profiler" in engines_side_by_side(one, None).attrs["not_measured"]
    bare = recording("hpctoolkit")
    bare.iterations = bare.iterations.iloc[:0]
    with pytest.raises(InputError, match="'hpctoolkit' has no iterations"):
        engines_side_by_side(one, bare)
    twice = engines_side_by_side(one, recording("torch", seed=5))
    assert {"torch_ms", "torch_2_ms"} <= set(twice.columns)


def test_both_engines_need_hpctoolkit_and_say_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("HPCTOOLKIT_HOME", raising=False)
    with pytest.raises(MissingToolError, match="hpcrun"):
        choose_engine(ProfilingConfig(engine="both"))
    assert second_profile(tmp_path) is None
    recording("torch").save(tmp_path / TORCH_FOLDER)
    found = second_profile(tmp_path)
    assert found is not None and found.meta["engine"] == "torch"


def test_auto_takes_the_engine_that_works_and_explains_more(tmp_path, monkeypatch) -> None:
    """A program is torch's; an HPCToolkit that fails leaves its sentence and torch's profile."""
    given = parameters_from_sections({"profiling": {"hpctoolkit_home": "/any"}})
    found = Tools(Path("hpcrun"), Path("hpcprof"), None, "2024.01.99", frozenset(), True)
    monkeypatch.setattr(measure, "find_tools", lambda home: found)
    assert choose_engine(ProfilingConfig(command=("python", "x.py")))[0] == "torch"
    assert choose_engine(given.profiling)[0] == "hpctoolkit"

    def fails(session, advise):
        raise MeasurementError("hpcprof aborts")

    monkeypatch.setattr(measure._Session, "with_hpctoolkit", fails)
    monkeypatch.setattr(measure._Session, "with_torch", lambda *_, advise: recording("torch"))
    profile = measure.measure(given, tmp_path)
    assert profile.meta["engine"] == "torch"
    assert "HPCToolkit failed (hpcprof aborts)" in profile.meta["engine_choice"]
    assert any("hpcprof aborts" in notice for notice in profile.meta["notices"])
    asked = parameters_from_sections({"profiling": {"engine": "hpctoolkit"}})
    with pytest.raises(MeasurementError):
        measure.measure(asked, tmp_path)
