"""Figures of a profile recorded here: the marks, units, order and colours they must have."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from gpu_trace import events, write

from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.parts import COMPONENTS, PHASES
from dlrm_core.run.reports import TrainingResult
from dlrm_core.train import train
from dlrm_studies.bench.show import CONTESTANTS
from dlrm_studies.scaling.show import EXCHANGE_COLOURS, SHARDING_COLOURS
from dlrm_workbook.analysis import attribution, operators
from dlrm_workbook.analysis import training as runs
from dlrm_workbook.ground.units import digits, percent
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.recorder import record_workload
from dlrm_workbook.recordings.torch.trace import read_recording, read_trace
from dlrm_workbook.runner.templating import TEMPLATES
from dlrm_workbook.show import bottlenecks as figures
from dlrm_workbook.show import static, theme
from dlrm_workbook.show import train as training_figures
from dlrm_workbook.show.idle import CAUSE_COLOURS, STATE_COLOURS
from dlrm_workbook.show.tables import TextTable, show
from dlrm_workbook.show.theme import COLOURS, PATTERNS, SPAN_GAP, short_name, text_on

ITERATIONS = 4


@pytest.fixture(scope="module")
def parameters() -> Parameters:
    return parameters_from_sections(
        {
            "model": {
                "bottom_mlp": [8, 16, 8],
                "top_mlp": [16, 1],
                "embedding_dim": 8,
                "table_rows": [50, 50, 70],
            },
            "data": {"generator": "facebook_loop", "indices_per_lookup": 4},
            "training": {"batch_size": 16, "batches": 12, "device": "cpu", "log_every": 5},
            "profiling": {
                "engine": "torch",
                "warmup": 1,
                "iterations": ITERATIONS,
                "probes": False,
            },
        }
    )


@pytest.fixture(scope="module")
def profile(parameters: Parameters, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    folder = tmp_path_factory.mktemp("recording") / "run"
    return read_recording(record_workload(parameters, folder))


@pytest.fixture(scope="module")
def gpu_profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return read_trace(write(tmp_path_factory.mktemp("gpu") / "trace.json", events()))


@pytest.fixture(scope="module")
def trained(
    parameters: Parameters, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainingResult, pd.DataFrame]:
    folder = tmp_path_factory.mktemp("training")
    result = train(parameters, folder)
    return result, runs.intervals(folder)


def all_figures(profile: Profile) -> dict[str, go.Figure]:
    return {
        "attribution": figures.attribution_bars(attribution.attribute(profile)),
        "icicle": figures.call_tree_icicle(operators.call_tree(profile)),
        "operators": figures.operator_bars(operators.top_operators(profile)),
        "timeline": figures.iteration_timeline(operators.timeline(profile)),
        "iterations": figures.iteration_times(attribution.per_iteration(profile)),
    }


def expected_colours(table: pd.DataFrame) -> list[str]:
    return [COLOURS[component] for component in table["component"]]


@pytest.mark.parametrize("source", ["profile", "gpu_profile"])
def test_figures_fit_both_themes_and_say_their_units(source, request) -> None:
    for name, drawn in all_figures(request.getfixturevalue(source)).items():
        layout = drawn.layout
        assert layout.title.text, name
        assert layout.template.layout.paper_bgcolor == "rgba(0,0,0,0)"
        assert layout.font.color is None and layout.paper_bgcolor is None, "the page decides"
        assert layout.width is None, "the window decides"
        if name == "icicle":
            assert "ms" in layout.title.text
        else:
            titles = f"{layout.xaxis.title.text} {layout.yaxis.title.text}"
            assert "ms" in titles.split(), name
        # JSON is what a notebook stores and a browser gets
        assert len(json.loads(drawn.to_json())["data"]) == len(drawn.data)


def test_attribution_has_the_largest_part_on_top(profile: Profile) -> None:
    table = attribution.attribute(profile).query("time_ms > 0")
    table = table.sort_values("time_ms", ascending=False)
    (bars,) = figures.attribution_bars(table).data
    assert list(bars.x) == pytest.approx(table["time_ms"].tolist())
    state = attribution.iteration_state(profile)
    assert state is not None
    assert sum(bars.x) == pytest.approx(state.times_ms[state.steady].mean())
    assert list(bars.marker.color) == expected_colours(table)
    assert list(bars.marker.pattern.shape) == [PATTERNS.get(p, "") for p in table["phase"]]
    drawn = figures.attribution_bars(table)
    assert drawn.layout.yaxis.ticktext[0].startswith(
        table["component"].iloc[0].replace("_mlp", " MLP")
    )
    low, high = drawn.layout.yaxis.range
    assert low > high, "the first row is on top"
    assert drawn.layout.xaxis.range[1] > 1.2 * max(bars.x), "labels need room"
    assert all("ms" in text and "%" in text for text in bars.text)


def test_gpu_attribution_tells_what_the_gpu_waited_for(gpu_profile: Profile) -> None:
    table = attribution.attribute(gpu_profile)
    times = table.groupby("where")["time_ms"].sum()
    drawn = figures.attribution_bars(table)
    assert sum(drawn.data[0].x) == pytest.approx(times["device"])
    assert "GPU time" in drawn.layout.title.text and "idle in another" in drawn.layout.title.text
    assert drawn.data[0].marker.line.width == 0
    waiting = figures.idle_part_bars(table[table["where"] == "host"])
    assert sum(waiting.data[0].x) == pytest.approx(times["host"])
    look = waiting.data[0].marker
    assert all(fill.startswith("rgba(") for fill in look.color) and min(look.line.width) > 1
    assert set(look.line.color) <= set(COLOURS.values()), "pale bars keep an outline that is seen"


def test_a_recording_without_iterations_says_so(profile: Profile) -> None:
    assert attribution.time_unit(profile) == "ms in a mean iteration"
    program = replace(
        profile, iterations=profile.iterations[:0], meta={"engine": "hpctoolkit"}, _known={}
    )
    unit = attribution.time_unit(program)
    assert unit == "ms in the whole recording"
    drawn = figures.call_tree_icicle(operators.call_tree(program), unit)
    assert drawn.layout.title.text.endswith(unit)


def test_icicle_names_the_box_above_several_threads(profile: Profile) -> None:
    tree = operators.call_tree(profile)
    other = tree.assign(
        id="other-" + tree["id"],
        parent=tree["parent"].where(tree["parent"] == "", "other-" + tree["parent"]),
    )
    both = pd.concat([tree, other], ignore_index=True)
    (icicle,) = figures.call_tree_icicle(both).data
    assert icicle.labels[0] == "all threads" and list(icicle.parents).count("") == 1
    roots = both.loc[both["parent"] == "", "value_ms"].sum()
    assert icicle.values[0] == pytest.approx(roots, rel=1e-6)
    assert list(icicle.ids[1:]) == both["id"].tolist()


def test_icicle_draws_every_row_and_names_it_whole(profile: Profile) -> None:
    tree = operators.call_tree(profile)
    (icicle,) = figures.call_tree_icicle(tree).data
    assert list(icicle.ids) == tree["id"].tolist()
    assert list(icicle.marker.colors) == expected_colours(tree)
    assert icicle.branchvalues == "total"
    value = dict(zip(icicle.ids, icicle.values, strict=True))
    inside: dict[str, float] = {}
    for row, parent in zip(icicle.ids, icicle.parents, strict=True):
        inside[parent] = inside.get(parent, 0.0) + value[row]
    # plotly.js leaves out, without a word, a parent smaller than its children
    assert all(value[parent] >= total for parent, total in inside.items() if parent)
    assert max(map(len, icicle.labels)) <= 34
    full = [
        (entry[0] or label).replace("<br>", "").replace("&lt;", "<")
        for entry, label in zip(icicle.customdata, icicle.labels, strict=True)
    ]
    assert all(shown.startswith(name[:80]) for shown, name in zip(full, tree["label"], strict=True))


def test_icicle_of_rounded_values_is_still_drawn() -> None:
    tree = pd.DataFrame(
        {
            "id": ["0", "1", "2"],
            "parent": ["", "0", "0"],
            "label": ["dlrm::iteration", "a", "b"],
            "shapes": ["", "", ""],
            "component": ["other", "data", "loss"],
            "phase": ["", "forward", "forward"],
            "value_ms": [1.0, 0.5, 0.5 + 1e-12],
            "self_ms": [0.0, 0.5, 0.5],
            "through": [[], [], []],
        }
    )
    (icicle,) = figures.call_tree_icicle(tree).data
    assert icicle.values[0] >= icicle.values[1] + icicle.values[2]


def test_operators_are_ranked_and_keep_their_shapes(profile: Profile, gpu_profile: Profile) -> None:
    table = operators.top_operators(profile)
    drawn = figures.operator_bars(table, count=10)
    (bars,) = drawn.data
    assert len(bars.x) == 10 == len(drawn.layout.yaxis.ticktext)
    assert list(bars.x) == sorted(bars.x, reverse=True)
    assert list(bars.marker.color) == expected_colours(table.head(10))
    # which operators take the most of a model this small differs from run to run
    (every,) = figures.operator_bars(table, count=len(table)).data
    shown = " ".join(every.hovertext)
    assert "aten::" in shown and "input shapes: " in shown
    assert "CPU" in drawn.layout.xaxis.title.text
    drawn = figures.operator_bars(operators.top_operators(gpu_profile))
    (bars,) = drawn.data
    assert "GPU" in drawn.layout.xaxis.title.text
    assert min(bars.x) > 0, "what took no GPU time is not drawn"


def test_timeline_puts_spans_where_they_were(profile: Profile) -> None:
    spans = operators.timeline(profile, 2)
    drawn = figures.iteration_timeline(spans)
    bars = [bar for bar in drawn.data if bar.x[0] is not None]
    key = [bar.name for bar in drawn.data if bar.x[0] is None]
    assert key == [phase for phase in PHASES if phase in set(spans["phase"])]
    assert sum(len(bar.x) for bar in bars) == len(spans)
    assert drawn.layout.barmode == "overlay"
    assert {bar.width for bar in bars} == {1 - SPAN_GAP}, "plotly chooses by each trace's lanes"
    assert list(drawn.layout.yaxis.ticktext) == ["iteration 0", "iteration 1"]
    begun = sorted(itertools.chain.from_iterable(bar.base for bar in bars))
    assert begun == pytest.approx(sorted(spans["start_ms"]))
    named = [bar.name for bar in bars if bar.showlegend is not False]
    assert len(named) == len(set(named)) == spans["component"].nunique()


def test_timeline_of_a_gpu_has_a_lane_a_stream(gpu_profile: Profile) -> None:
    drawn = figures.iteration_timeline(operators.timeline(gpu_profile))
    rows = list(drawn.layout.yaxis.ticktext)
    assert rows[0] == "iteration 0, main thread"
    assert len(rows) == 3


def test_iteration_times_stack_parts_in_the_order_of_a_step(profile: Profile) -> None:
    drawn = figures.iteration_times(attribution.per_iteration(profile))
    names = [bar.name.replace(" MLP", "_mlp") for bar in drawn.data]
    assert names == [name for name in COMPONENTS if name in names]
    assert [bar.marker.color for bar in drawn.data] == [COLOURS[name] for name in names]
    stacked = np.zeros(ITERATIONS)
    for bar in drawn.data:
        stacked[list(bar.x)] += bar.y
    assert stacked == pytest.approx(attribution.iteration_times_ms(profile))


def test_memory_figures(profile: Profile) -> None:
    table = operators.memory(profile)
    (bars,) = figures.memory_by_part(table).data
    assert list(bars.x) == sorted(table["allocated_mb"], reverse=True)
    drawn = figures.memory_line(operators.memory_curve(profile))
    assert len(drawn.data[0].x) > 10
    assert "MB" in drawn.layout.yaxis.title.text and "ms" in drawn.layout.xaxis.title.text


def test_remedies_are_drawn_with_their_ranges(tmp_path: Path) -> None:
    """A recording of somebody's names them, so that they are text and no tags."""
    gains = {"speedup_low": [1.1, np.nan], "speedup_mid": [1.3, np.nan], "speedup_high": [1.5, 0]}
    names = {"remedy": ["<b>a thread</b>", "another"], "status": ["paid", "failed"]}
    table = pd.DataFrame(gains | names)
    drawn = figures.tried_ranges(table)
    (points,) = drawn.data
    assert list(points.x) == [1.3]
    assert points.error_x.array == pytest.approx([0.2]) == points.error_x.arrayminus
    assert drawn.layout.yaxis.ticktext == ("&lt;b>a thread&lt;/b>",)
    assert "could be timed" in figures.tried_ranges(table[1:]).markdown
    assert "1.30x" in drawn.save(tmp_path / "tried.svg").read_text()


def test_training_figures(trained: tuple[TrainingResult, pd.DataFrame]) -> None:
    result, intervals = trained
    loss = training_figures.loss_curve(runs.losses(result), intervals)
    assert list(loss.data[0].x) == list(range(1, 13))
    assert list(loss.data[1].x) == [5, 10, 12]
    assert loss.data[1].y[0] == pytest.approx(np.mean(result.losses[:5]))
    speed = training_figures.training_speed(intervals)
    compute, data, rate = speed.data
    assert compute.name == "compute" and data.marker.color == COLOURS["data"]
    assert speed.layout.yaxis.title.text == "ms per iteration"
    assert speed.layout.yaxis2.title.text == "samples per second"
    assert list(rate.y) == intervals["samples_per_second"].tolist()


def test_memory_forecast_joins_tables_of_one_size(parameters: Parameters) -> None:
    forecast = runs.memory_forecast(parameters)
    (bars,) = training_figures.memory_bars(forecast).data
    assert list(bars.x) == sorted(bars.x, reverse=True)
    names = forecast["name"].tolist()
    assert "embedding tables, 2 of 50 × 8" in names
    assert "embedding table, 1 of 70 × 8" in names
    from dlrm_kernels.memory import forecast_memory

    assert forecast["bytes"].sum() == sum(item.bytes for item in forecast_memory(parameters))


def test_forecast_of_many_tables_stays_readable() -> None:
    many = parameters_from_sections({"model": {"table_rows": [10 * n for n in range(1, 41)]}})
    forecast = runs.memory_forecast(many)
    assert len(forecast) < 20
    from dlrm_kernels.memory import forecast_memory

    assert forecast["bytes"].sum() == sum(item.bytes for item in forecast_memory(many))


# Linear-light RGB as readers without one kind of cone see it (Machado et al. 2009, severity 1).
VISION = {
    "full": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    value = np.array([int(colour[start : start + 2], 16) for start in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    ratio = TO_XYZ @ np.clip(light, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_no_two_parts_of_a_page_have_one_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """``embedding`` and a module of a program were both green."""
    monkeypatch.setattr(theme, "_given", {})
    parts = theme.components_of(["shopper_net", "embedding", "other", "title_net", "idle"], "idle")
    assert parts == ["embedding", "other", "shopper_net", "title_net"]
    assert len({theme.colour_of(part) for part in parts}) == 4


@pytest.mark.parametrize("vision", VISION)
def test_colours_stay_apart_for_every_reader(vision: str) -> None:
    assert tuple(COLOURS) == COMPONENTS and tuple(PATTERNS) == PHASES
    seen = {name: lab(np.asarray(VISION[vision]) @ linear(c)) for name, c in COLOURS.items()}
    for one, other in itertools.combinations(COLOURS, 2):
        distance = np.linalg.norm(seen[one] - seen[other])
        assert distance >= 19.5, f"{one} and {other} look alike"


def contrast(one: str, other: str) -> float:
    """Contrast of two colours by WCAG 2, from 1 to 21."""
    darker, lighter = sorted(float(TO_XYZ[1] @ linear(colour)) for colour in (one, other))
    return (lighter + 0.05) / (darker + 0.05)


MARKS = {
    **COLOURS,
    **{f"idle: {name}": colour for name, colour in CAUSE_COLOURS.items()},
    **{f"thread: {name}": colour for name, colour in STATE_COLOURS.items()},
    **{f"bytes: {name}": colour for name, colour in EXCHANGE_COLOURS.items()},
    **{f"sharding: {name}": colour for name, colour in SHARDING_COLOURS.items()},
    **{f"contestant: {name}": colour for name, colour in CONTESTANTS.items()},
    "compute": theme.COMPUTE_COLOUR,
    "ink": theme.INK,
    "slower": theme.SLOWER,
    "same": theme.SAME,
    "faster": theme.FASTER,
    "predicted": theme.PREDICTED_COLOUR,
}
PAGE = (TEMPLATES / "page.css").read_text()
LIGHT, DARK = (
    dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", part)) for part in PAGE.split("@media")[:2]
)
NOTEBOOK = ("#ffffff", "#111111")
"""Backgrounds of JupyterLab's themes."""


@pytest.mark.parametrize("mark", MARKS)
def test_marks_can_be_seen_on_light_and_on_dark(mark: str) -> None:
    for background in (LIGHT["page"], DARK["page"], *NOTEBOOK):
        assert contrast(MARKS[mark], background) >= 3, background
    assert contrast(MARKS[mark], text_on(MARKS[mark])) >= 4.5


def test_shares_can_be_read_in_the_bars_that_they_are_of() -> None:
    looks = {name: (name, colour) for name, colour in COLOURS.items()}
    table = pd.DataFrame([dict.fromkeys(COLOURS, 1.0)])
    drawn = theme.stacked_bars("t", table, looks, "ms", shares=True)
    assert len(drawn.data) == len(COLOURS)
    for bar in drawn.data:
        assert contrast(bar.textfont.color, bar.marker.color) >= 4.5, bar.name


def test_text_can_be_read_on_light_and_on_dark() -> None:
    for colours in (LIGHT, DARK):
        assert contrast(colours["text"], colours["page"]) >= 4.5
        assert contrast(colours["soft"], colours["page"]) >= 4.5
    assert contrast(static.TEXT, static.PAPER) >= 4.5
    # one grey for both of JupyterLab's themes: more than 4.35 with both is impossible
    assert min(contrast(theme.INK, background) for background in NOTEBOOK) >= 4.2


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("dlrm::top_mlp::backward", "top MLP backward"),
        ("dlrm::iteration", "iteration"),
        ("aten::addmm", "addmm"),
        ("autograd::engine::evaluate_function: AddmmBackward0", "AddmmBackward0"),
        ("void at::native::elementwise_kernel<4, at::f<float>>(int, float)", "elementwise_kernel"),
        ("Optimizer.step#SGD.step", "Optimizer.step#SGD.step"),
        ("<gpu kernel>", "<gpu kernel>"),
        ("/home/me/my work/train.py(7): step", "step (train.py:7)"),
        ("x" * 50, "x" * 33 + "…"),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert short_name(name, 34) == short


def test_numbers_have_three_digits_that_count() -> None:
    shown = [digits(x) for x in (0, 1234.5, 513.3, 99.96, 48.0, 0.21, 0.0123, 2e-6)]
    assert shown == ["0", "1,234", "513", "100", "48.0", "0.210", "0.0123", "2.0e-06"]
    assert [percent(x) for x in (0, 0.0001, 0.25, 1)] == ["0.0%", "<0.1%", "25.0%", "100.0%"]
    assert percent(float("nan")) == "–"


def test_a_saved_profile_draws_the_same(profile: Profile, tmp_path: Path) -> None:
    again = Profile.load(profile.save(tmp_path / "p"))
    for (name, one), other in zip(
        all_figures(profile).items(), all_figures(again).values(), strict=True
    ):
        assert one.to_json() == other.to_json(), name


def test_the_table_of_intervals_says_which_figures_add_up() -> None:
    row = {"iteration": 5, "loss": 0.25, "samples_per_second": 15_040.0}
    row |= {"ms_per_iteration": 24.5, "data_ms_per_iteration": 20.0}
    row |= {"compute_ms_per_iteration": 14.0}
    shown = show(pd.DataFrame([row]), [name for name in row if "ms" in name])
    # the median leaves out the first, slow iteration that the means of its two shares hold
    assert isinstance(shown, TextTable) and shown.rows[0] == ["24.50", "20.00", "14.00"]
    assert [*shown.columns] == ["ms per iteration, median", "mean data (ms)", "mean compute (ms)"]
