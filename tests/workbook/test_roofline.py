"""Parts against the ceilings of their machine."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_rows import bare_profile
from small_training import parameters_with

from dlrm_core.config import Parameters
from dlrm_core.parts import COMPONENTS, PHASES
from dlrm_workbook.analysis.attribution import attribute
from dlrm_workbook.analysis.devices import device
from dlrm_workbook.analysis.roofline import (
    ARITHMETIC,
    ROOFLINE_COLUMNS,
    ROWS,
    Limits,
    doubts,
    least_step,
    least_times,
    missing,
    operator_limits,
    roofline,
)
from dlrm_workbook.analysis.work import part_work
from dlrm_workbook.evidence.ceilings import model_products
from dlrm_workbook.ground.marks import PART_PREFIX
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.trace import read_trace
from dlrm_workbook.show.profile import ceilings_frame, roofline_text
from dlrm_workbook.show.roofline import PHASE_SYMBOLS, least_time_bars, roofline_chart
from dlrm_workbook.show.tables import TextTable, show
from dlrm_workbook.show.theme import LETTER, PLOT_WIDTH

MILLION = 1_000_000


SECTIONS = {
    "model": {
        **{"bottom_mlp": [64, 128, 32], "top_mlp": [256, 1], "embedding_dim": 32},
        **{"table_rows": [MILLION, MILLION]},
    },
    "data": {"generator": "uniform", "indices_per_lookup": 20, "fixed_pooling": True},
    "training": {"batch_size": 1024, "device": "cpu"},
}


def model(**training: Any) -> Parameters:
    return parameters_with(SECTIONS, **training)


def gemm_rows(parameters: Parameters, gflops: float, precision: str = "fp32") -> list[Any]:
    """Every product of the model at one rate, as the recorder writes them."""
    rows = []
    size, sizes = parameters.training.batch_size, parameters.model
    for part, widths in (("bottom_mlp", sizes.bottom_widths), ("top_mlp", sizes.top_widths)):
        for layer, (n, m) in enumerate(itertools.pairwise(widths)):
            shapes = {
                "forward": (size, m, n),
                "backward_input": (size, n, m),
                "backward_weight": (m, n, size),
            }
            rows += [(part, layer, phase, *shape, 1) for phase, shape in shapes.items()]
    count, dim = len(sizes.table_rows) + 1, sizes.embedding_dim
    rows.append(("interaction", 0, "forward", count, count, dim, size))
    rows.append(("interaction", 0, "backward_input", count, dim, count, size))
    names = ("part", "layer", "phase", "m", "n", "k", "batch")
    return [
        {
            **dict(zip(names, row, strict=True)),
            "precision": precision,
            "ms": 2e-6 * math.prod(row[3:]) / gflops,
            "gflops": gflops,
            "relative_error": 2e-7,
        }
        for row in rows
    ]


def streamed(size: int, read: float, copied: float) -> dict[str, float]:
    rates = {"read_gb_per_s": read, "copy_gb_per_s": copied, "triad_gb_per_s": copied}
    return {"bytes": size, **rates}


def machine(parameters: Parameters, **changes: Any) -> dict[str, Any]:
    return {
        "device": "cpu",
        "threads": 2,
        "seconds": 3.0,
        "gemm": gemm_rows(parameters, 100.0),
        "stream": [streamed(1 << 19, 100.0, 100.0), streamed(1 << 28, 20.0, 16.0)],
        "gather": [{"row_bytes": 128, "table_bytes": 128 * MILLION, "gb_per_s": 5.0}],
        "dispatch_us": 2.0,
        "last_level_cache_bytes": 32 << 20,
        **changes,
    }


def dcn(layers: int) -> Parameters:
    kind = {"interaction": "dcn", "dcn_layers": layers, "dcn_rank": 24}
    return parameters_with(SECTIONS, kind)


def profile_of(parameters: Parameters, **meta: Any) -> Profile:
    return bare_profile(**{"device": "cpu", "parameters": parameters.to_sections(), **meta})


def attribution(times: dict[tuple[str, str], float], where: str = "host") -> pd.DataFrame:
    rows = [(*key, where, ms, ms / sum(times.values())) for key, ms in times.items()]
    return pd.DataFrame(rows, columns=["component", "phase", "where", "time_ms", "share"])


def all_parts(parameters: Parameters, ms: float = 10.0) -> pd.DataFrame:
    work = part_work(parameters)
    keys = list(zip(work["component"], work["phase"], strict=True))
    return attribution({**dict.fromkeys(keys, ms), ("other", ""): 1.0})


def by_part(table: pd.DataFrame) -> pd.DataFrame:
    return table.set_index(["component", "phase"])


def limits_of_parts(parameters: Parameters) -> pd.DataFrame:
    """The roofline of a run in which each part took 10 ms."""
    profile = profile_of(parameters, ceilings=machine(parameters))
    return by_part(roofline(profile, all_parts(parameters)))


def test_a_part_of_products_is_bound_by_their_measured_times():
    parameters = model()
    table = limits_of_parts(parameters)
    top = table.loc[("top_mlp", "forward")]
    width = parameters.model.interaction_kind.width
    products = 2 * 1024 * (width * 256 + 256)
    assert top["limit"] == "arithmetic"
    # activations and their dispatch come on top of the products
    assert top["ceiling_ms"] == pytest.approx(products / 100e6, rel=0.35)
    assert top["ceiling_ms"] > products / 100e6
    assert top["share_of_ceiling"] == pytest.approx(top["ceiling_ms"] / 10.0)
    assert top["gflops"] == pytest.approx(top["flops"] / 10e6)
    assert top["intensity_flop_per_byte"] == pytest.approx(top["flops"] / top["bytes"])


def test_lookups_are_bound_by_random_rows():
    parameters = model()
    table = limits_of_parts(parameters)
    forward = table.loc[("embedding", "forward")]
    assert forward["limit"] == "random rows"
    assert forward["ceiling_ms"] == pytest.approx(2 * 1024 * 20 * 128 / 5e6)
    assert table.loc[("embedding", "backward"), "limit"] == "memory bandwidth"


def test_tiny_operators_are_bound_by_dispatch():
    parameters = model(batch_size=1)
    table = limits_of_parts(parameters)
    loss = table.loc[("loss", "forward")]
    assert (loss["limit"], loss["ceiling_ms"]) == ("dispatch", pytest.approx(2e-3))


def test_hot_rows_do_not_count_as_random():
    parameters = model()
    rows = {"rows": MILLION, "lookups_per_batch": 20480}
    skewed = [{"table": t, "unique_rows_per_batch": 100, **rows} for t in range(2)]
    cold, hot = (
        by_part(least_times(parameters, machine(parameters), statistics)).loc[
            ("embedding", "forward")
        ]
        for statistics in (None, {"tables": skewed})
    )
    assert hot["ceiling_ms"] < 0.2 * cold["ceiling_ms"]


def test_a_faster_library_of_the_same_precision_lowers_the_least_time():
    parameters = model()
    plain = machine(parameters)
    both = {**plain, "gemm": plain["gemm"] + gemm_rows(parameters, 400.0, "fp32_onednn")}
    rounding = {
        **plain,
        "gemm": plain["gemm"]
        + [{**row, "relative_error": 2e-3} for row in gemm_rows(parameters, 400.0, "fp32_onednn")],
    }
    key = ("top_mlp", "backward")
    times = [by_part(least_times(parameters, c)).loc[key, "ceiling_ms"] for c in (plain, both)]
    assert times[1] < 0.6 * times[0]
    assert by_part(least_times(parameters, rounding)).loc[key, "ceiling_ms"] == times[0]


def test_what_was_not_measured_is_said_and_never_zero():
    parameters = model()
    bare = profile_of(parameters)
    table = roofline(bare, all_parts(parameters))
    assert table["ceiling_ms"].isna().all() and table["share_of_ceiling"].isna().all()
    assert (table["flops"] > 0).any()
    assert "no ceilings" in str(missing(bare))
    reasoned = profile_of(parameters, not_measured={"ceilings": "profiling.probes is off"})
    assert missing(reasoned) == "profiling.probes is off"
    narrow = model(precision="bf16")
    table = limits_of_parts(narrow)
    assert math.isnan(table.loc[("top_mlp", "forward"), "ceiling_ms"])
    assert "precision" in table.loc[("top_mlp", "forward"), "ceiling"]
    assert table.loc[("embedding", "forward"), "ceiling_ms"] > 0
    step = least_step(table.reset_index())
    assert step["least_ms"] is None and ("top_mlp", "forward") in step["unknown"]
    assert "not known" in repr(roofline_text(table.reset_index()))


def test_without_a_model_there_is_no_roofline():
    empty = bare_profile()
    table = roofline(empty, all_parts(model()))
    assert table.empty and list(table.columns) == ROOFLINE_COLUMNS
    assert "does not say which model" in str(missing(empty))
    odd = bare_profile(parameters={"model": {"colour": 3}})
    assert roofline(odd, all_parts(model())).empty
    assert "not those of a model" in str(missing(odd))


def test_the_step_is_the_sum_of_its_parts_and_never_slower_than_measured():
    parameters = model()
    profile = profile_of(parameters, ceilings=machine(parameters))
    slow = roofline(profile, all_parts(parameters, 100.0))
    step = least_step(slow)
    assert step["time_ms"] == pytest.approx(slow["time_ms"].sum())
    assert step["least_ms"] == pytest.approx(slow["ceiling_ms"].sum())
    assert sum(step["limits"].values()) == pytest.approx(step["least_ms"])
    assert "at least" in repr(roofline_text(slow))
    fast = roofline(profile, all_parts(parameters, 1e-4))
    assert least_step(fast)["share"] <= 1.0
    assert slow.iloc[-1]["component"] == "other" and slow.iloc[-1]["ceiling_ms"] == 0


def test_doubts_name_a_busy_machine_and_impossible_shares():
    parameters = model()
    quiet = profile_of(parameters, ceilings=machine(parameters, run_queue_share=0.01))
    assert doubts(quiet, roofline(quiet, all_parts(parameters, 100.0))) == []
    busy = profile_of(parameters, ceilings=machine(parameters, run_queue_share=0.49))
    found = doubts(busy, roofline(busy, all_parts(parameters, 0.3)))
    assert "49%" in found[0] and "embedding forward" in found[1]


def test_a_gpu_is_bound_by_launches_or_by_its_kernels():
    parameters = model(device="cuda")
    gpu = device("A100-40GB").ceilings()
    least = by_part(least_times(parameters, gpu, device="cuda"))
    assert least.loc[("top_mlp", "forward"), "ceiling"].endswith("by data sheet, not measured")
    assert least.loc[("transfer", "forward"), "limit"] == "copies"
    batch = 1024 * (64 + 1) * 4 + 8 * (2 * 1024 * 20 + 2 * 1024)
    assert least.loc[("transfer", "forward"), "ceiling_ms"] == pytest.approx(batch / 32e6)
    launching = {**gpu, "dispatch_us": 2.0, "launch_us": 5.0, "kernel_us": 1.5}
    bound = by_part(least_times(parameters, launching, device="cuda"))
    top = bound.loc[("top_mlp", "backward")]
    operators = by_part(part_work(parameters)).loc[("top_mlp", "backward"), "operators"]
    assert (top["limit"], top["ceiling_ms"]) == ("launches", pytest.approx(5e-3 * operators))
    graphs = model(device="cuda", cuda_graphs=True)
    captured = by_part(least_times(graphs, launching, device="cuda"))
    assert captured.loc[("top_mlp", "backward"), "ceiling_ms"] < top["ceiling_ms"]


def test_prefetched_data_need_not_be_waited_for():
    parameters = parameters_with(SECTIONS, data={"loader": "prefetch"})
    data = by_part(least_times(parameters, machine(parameters))).loc[("data", "forward")]
    assert data["ceiling_ms"] == 0


def test_device_and_host_time_of_a_part_add_up():
    parameters = model(device="cuda")
    both = pd.concat(
        [
            attribution({("top_mlp", "forward"): 2.0}, "device"),
            attribution({("top_mlp", "forward"): 1.0}, "host"),
        ]
    )
    profile = profile_of(parameters, device="cuda")
    assert roofline(profile, both)["time_ms"].to_list() == [3.0]


sizes = st.floats(1e3, 1e9)


@given(read=sizes, written=sizes, more=st.floats(1.0, 10.0))
def test_more_bytes_never_take_less_time(read, written, more):
    limits = Limits(machine(model()))
    once, again = limits.memory_ms(read, written), limits.memory_ms(more * read, more * written)
    assert 0 < once <= again * (1 + 1e-9)


def test_streaming_a_copy_and_a_read_takes_what_was_measured():
    limits = Limits(machine(model()))
    large = float(3 << 28)
    assert limits.memory_ms(large, 0) == pytest.approx(large / 20e6)
    assert limits.memory_ms(large / 2, large / 2) == pytest.approx(large / 16e6)
    small = float(1 << 19)
    assert limits.memory_ms(small, 0) == pytest.approx(small / 100e6)
    between = limits.memory_ms(3 << 24, 0)
    assert (3 << 24) / 100e6 < between < (3 << 24) / 20e6


@pytest.fixture
def drawn() -> pd.DataFrame:
    parameters = model()
    table = all_parts(parameters)
    table["time_ms"] *= np.linspace(0.2, 3.0, len(table))
    return roofline(profile_of(parameters, ceilings=machine(parameters)), table)


def test_the_chart_shows_every_part_that_computes_where_it_is(drawn):
    chart = roofline_chart(drawn, machine(model()))
    shown = {trace.name: trace for trace in chart.data if trace.hovertext}
    computing = drawn[drawn["flops"] > 0]
    assert len(shown) == len(computing) > 8
    for row in computing.itertuples():
        trace = shown[f"{row.component.replace('_mlp', ' MLP')} {row.phase}"]
        assert trace.x[0] == row.intensity_flop_per_byte and trace.y[0] == row.gflops
        assert trace.marker.symbol == PHASE_SYMBOLS[row.phase]
    lines = [trace.name for trace in chart.data if trace.mode == "lines"]
    assert lines == [
        "cache, 100 GB/s",
        "memory, 20.0 GB/s",
        "random rows, 5.00 GB/s",
        "fp32, 100 GFLOP/s",
    ]
    # one name each: slopes in the legend, roofs along their line
    assert [t.name for t in chart.data if t.mode == "lines" and t.showlegend] == lines[:3]
    (note,) = chart.layout.annotations
    assert note.text == lines[-1]
    # on its line from end to end: plotly's axes are logarithms
    (roof,) = (trace for trace in chart.data if trace.name == note.text)
    left, right = chart.layout.xaxis.range
    length = LETTER * len(note.text) * (right - left) / PLOT_WIDTH
    assert math.log10(roof.x[0]) <= note.x - length and note.x <= math.log10(roof.x[1]) + 1e-9
    assert "embedding backward" in chart.layout.xaxis.title.text
    assert roofline_chart(drawn, None).data


def test_bars_and_tables_give_the_figures(drawn):
    bars = least_time_bars(drawn)
    measured, least = bars.data
    assert max(measured.x) == drawn["time_ms"].max()
    assert all(low <= time for low, time in zip(least.x, measured.x, strict=True))
    table = show(drawn.sort_values("time_ms", ascending=False))
    assert isinstance(table, TextTable) and len(table.rows) == len(drawn)
    assert [row[0] for row in table.rows] == list(bars.layout.yaxis.ticktext)
    ceilings = show(ceilings_frame(machine(model())))
    assert isinstance(ceilings, TextTable)
    assert ["random rows of 128 B in 122.07 MiB", "5.00 GB/s"] in ceilings.rows
    assert ceilings_frame(None).empty
    assert ceilings_frame(device("H200").ceilings()).attrs["source"] == "data sheet"
    assert set(drawn["component"]) <= set(COMPONENTS) and set(PHASE_SYMBOLS) == set(PHASES)


def test_cross_layers_are_on_the_roofline_and_further_ones_cost_as_much() -> None:
    two, four = dcn(2), dcn(4)
    rows = [vars(found) for found in model_products(two)]
    # the top MLP's products are faster than those of cross layers
    rates = {"interaction": 10.0, "top_mlp": 80.0, "bottom_mlp": 40.0}
    gemm = [
        row
        | {"gflops": (rate := rates[row["part"]]), "precision": "fp32", "relative_error": 2e-7}
        | {"ms": 2e-6 * row["m"] * row["n"] * row["k"] / rate}
        for row in rows
    ]
    limits = machine(two, gemm=gemm)

    def least(parameters: Parameters, phase: str) -> float:
        table = least_times(parameters, limits).set_index(["component", "phase"])
        return float(table.loc[("interaction", phase), "ceiling_ms"])

    products = 2 * 2 * 2 * 1024 * 96 * 24 / 10e6  # two layers, two products, at 10 GFLOP/s
    assert products < least(two, "forward") < 1.2 * products
    assert 2 * products < least(two, "backward") < 1.2 * 2 * products
    for phase in ("forward", "backward"):
        # but for the features side by side, which are there once
        assert least(four, phase) == pytest.approx(2 * least(two, phase), rel=0.05)


def traced(folder: Path, work: Callable[[], object]) -> Profile:
    """A recording of another program by torch.profiler, on the machine of :func:`machine`."""
    with torch.profiler.profile(record_shapes=True) as profiler:
        work()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    profile = read_trace(folder / "trace.json")
    profile.meta["ceilings"] = machine(model(), dispatch_us=0.001)
    return profile


@given(rows=st.integers(1000, 3000), width=st.sampled_from([8, 16, 32]), bags=st.integers(1, 90))
@settings(deadline=None, max_examples=5)
def test_work_of_another_program_is_that_of_its_recorded_shapes(
    tmp_path_factory: pytest.TempPathFactory, rows: int, width: int, bags: int
) -> None:
    table = torch.nn.EmbeddingBag(500, width, mode="sum", sparse=True)
    layer = torch.nn.Linear(width, 3)
    optimizer = torch.optim.SGD([*table.parameters(), *layer.parameters()], 0.1)
    indices, offsets = torch.randint(0, 500, (rows,)), torch.arange(bags)

    def step() -> None:
        layer(table(indices, offsets)).sum().backward()
        optimizer.step()

    profile = traced(tmp_path_factory.mktemp("seen"), step)
    timed = {"part": "", "layer": -1, "phase": "forward", "batch": 1, "precision": "fp32"}
    timed |= {"m": bags, "n": 3, "k": width, "ms": 0.25, "gflops": 1.0}
    profile.meta["ceilings"]["gemm"].append(timed)
    operators = operator_limits(profile).set_index("name")
    assert operators.loc["aten::addmm", "ceiling_ms"] == 0.25
    assert operators.loc["aten::addmm", "limit"] == ARITHMETIC
    assert operators.loc["aten::addmm", "flops"] == 2 * bags * width * 3 + bags * 3
    lookup = operators.loc["aten::_embedding_bag"]
    assert lookup["flops"] == rows * width
    assert lookup["bytes"] == 4 * rows * width + 8 * (rows + bags) + 4 * bags * width
    # 5 GB/s, as the machine reads random rows
    assert lookup["ceiling_ms"] == pytest.approx(4 * rows * width / 5e6)
    assert lookup["limit"] == ROWS
    update = operators.loc["aten::add"]
    assert update["flops"] == 2 * rows * width and update["limit"] == ROWS
    assert update["ceiling_ms"] == pytest.approx(4 * rows * width / 5e6)


def test_an_operator_without_a_formula_is_named_and_leaves_its_part_unmeasured(tmp_path) -> None:
    numbers = torch.rand(2000, 1000) * 0.5

    def step() -> None:
        with torch.profiler.record_function(f"{PART_PREFIX}top_mlp forward"):
            torch.erfinv(numbers)
        with torch.profiler.record_function(f"{PART_PREFIX}bottom_mlp forward"):
            torch.exp(numbers)

    profile = traced(tmp_path, step)
    operators = operator_limits(profile).set_index("name")
    assert np.isnan(operators.loc["aten::erfinv", "ceiling_ms"])
    assert operators.loc["aten::erfinv", "reason"] == "its work is not counted"
    found = roofline(profile, attribute(profile))
    table = by_part(found)
    assert np.isnan(table.loc[("top_mlp", "forward"), "ceiling_ms"])
    assert "aten::erfinv" in table.loc[("top_mlp", "forward"), "ceiling"]
    assert table.loc[("bottom_mlp", "forward"), "ceiling_ms"] > 0
    assert least_step(found)["unknown"] == [("top_mlp", "forward")]
    (sentence, *_) = doubts(profile, found)
    assert "`aten::erfinv`" in sentence
    small = found.assign(time_ms=found["time_ms"].where(found["ceiling_ms"].notna(), 1e-9))
    assert least_step(small)["least_ms"] > 0 and "`aten::erfinv`" not in repr(small)
