"""What a notebook of one's own begins with: any recording, its tables, Hatchet, lists to choose."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pytest
from recordings import SEVERAL, recording
from test_notebooks import run_cells

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_workbook.explore import attribute, figures, flat, load_profile, recordings, show
from dlrm_workbook.recordings.hatchet_frames import LEGIBLE, thicket
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.samples import SAMPLE, sample_profile
from dlrm_workbook.show.explore import flat_bars, selectors
from dlrm_workbook.show.tables import Text, TextTable

KINDS = {
    "a run of ours": str(SAMPLE),
    "an HPCToolkit database": "dlrm-h100-pc.d",
    "a trace of another program": "traces/bert-small-h100.json.gz",
    "several ranks": SEVERAL,
}


def finished(root: Path, name: str, started: str) -> Path:
    """A finished profile run of the sample's tables."""
    folder = root / "2026-01-01" / name
    sample_profile().save(folder / "profile")
    record = {"notebook": "profile", "status": "finished", "started": started, "preset": "quick"}
    (folder / "run.json").write_text(json.dumps(record | {"parameters": {"title": name}}))
    return folder


def test_five_lines_are_a_notebook() -> None:
    profile = load_profile(SAMPLE)
    parts = attribute(profile)
    assert parts["share"].sum() == pytest.approx(1)
    assert isinstance(show(parts), TextTable)
    assert isinstance(figures.attribution_bars(parts), go.Figure)
    tree = profile.to_hatchet().tree(render_header=False)
    # shown as it is where it is the value of a cell
    assert repr(tree) == str(tree) and "dlrm::iteration" in tree


def test_the_newest_run_is_opened_first_and_the_sample_where_there_is_none(tmp_path: Path) -> None:
    assert recordings(output_root=str(tmp_path))["run"].tolist() == ["sample"]
    assert "sample" in load_profile(output_root=tmp_path).meta["opened"]
    finished(tmp_path, "000000-profile-old", "2026-01-01T00:00:00+00:00")
    newest = finished(tmp_path, "000001-profile-new", "2026-01-01T00:00:01+00:00")
    runs = recordings(output_root=str(tmp_path))
    assert runs["run"].tolist() == ["000001-profile-new", "000000-profile-old", "sample"]
    assert runs["title"][0] == "000001-profile-new" and runs["profile_run"][0] == str(newest)
    # as dlrm run gives it: a folder of the same root
    assert recordings(str(newest)).equals(runs)
    for asked in ("", "latest"):
        assert str(newest) in load_profile(asked, output_root=tmp_path).meta["opened"]
    with pytest.raises(InputError, match="does not exist"):
        load_profile(tmp_path / "nothing")


def test_callees_come_by_their_time_in_hatchet() -> None:
    profile = sample_profile()
    frame = profile.to_hatchet()
    time = frame.default_metric
    lines = frame.tree(render_header=False, depth=3).splitlines()
    values = [float(line.split()[-2]) for line in lines if "dlrm::" in line and "─ " in line][1:]
    assert len(values) > 5 and values == sorted(values, reverse=True)
    # the frame itself is as Hatchet made it, so that its own methods go on working
    assert not frame.graph.node_ordering
    half = frame.filter(lambda node: node[time] >= 0.1 * frame.dataframe[time].max())
    assert 2 < len(half.dataframe) < len(frame.dataframe)
    assert half.tree(render_header=False).splitlines()[0].endswith("thread 1 (python) ")


def contrast(colour: int, page: float) -> float:
    """Of a colour of the terminal's 256 against a page of that luminance (WCAG 2)."""
    steps = (0, 95, 135, 175, 215, 255)
    place = colour - 16
    grey = 8 + 10 * (colour - 232)
    cube = [steps[place // 36], steps[place // 6 % 6], steps[place % 6]] if place < 216 else []
    linear = [
        v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4
        for v in (level / 255 for level in cube or [grey] * 3)
    ]
    own = sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return (max(own, page) + 0.05) / (min(own, page) + 0.05)


def test_trees_are_legible_on_light_and_dark_pages() -> None:
    for colour in (196, *LEGIBLE.values()):
        assert contrast(colour, 1.0) >= 3 and contrast(colour, 0.01) >= 3, colour


def test_a_mean_iteration_and_the_difference_of_two_runs() -> None:
    profile, other = sample_profile(), sample_profile()
    count = len(profile.iterations)
    # the system gives other numbers to the threads of another run
    thread = other.contexts["kind"] == "thread"
    other.contexts.loc[thread, "name"] = "thread 77 (python)"
    other.values = other.values.assign(value=2 * other.values["value"])
    frame = profile.to_hatchet(count)
    whole = profile.value_table("cpu_time_ms").sum()
    assert frame.dataframe["cpu_time_ms"].sum() == pytest.approx(whole / count)
    difference = other.to_hatchet(count) - frame
    assert len(difference.dataframe) == len(frame.dataframe)
    assert difference.dataframe["cpu_time_ms"].sum() == pytest.approx(whole / count)
    first = difference.tree(render_header=False).splitlines()[0]
    assert "thread 1 (python)" in first and "nan" not in first


def test_hatchet_says_nothing_of_its_own(capsys: pytest.CaptureFixture[str], recwarn: Any) -> None:
    frame = sample_profile().to_hatchet()
    grouped = frame.groupby_aggregate("component", {"cpu_time_ms": "sum"}).dataframe
    total = frame.dataframe.groupby("component")["cpu_time_ms"].sum()
    assert grouped.set_index("name")["cpu_time_ms"].to_dict() == pytest.approx(total.to_dict())
    frame.filter([{"component": "embedding"}, "*"])
    assert not capsys.readouterr().out and not recwarn.list


def test_thicket_has_a_row_a_call_and_run() -> None:
    profile = sample_profile()
    frames = {name: profile.to_hatchet(count) for name, count in (("a", 1), ("b", 2))}
    if importlib.util.find_spec("thicket") is None:
        with pytest.raises(MissingToolError, match="pip install llnl-thicket"):
            thicket(frames)
        return
    ensemble = thicket(frames)
    assert sorted(ensemble.metadata["run"]) == ["a", "b"]
    assert "training.batch_size" in ensemble.metadata
    assert len(ensemble.dataframe) == 2 * len(frames["a"].dataframe)


def test_a_part_as_bars() -> None:
    profile = sample_profile()
    within = profile.contexts["component"].eq("embedding").to_numpy()
    view = flat(profile, "cpu_time_ms", within=within)
    bars = flat_bars(view, "embedding")
    assert bars.layout.title.text == "cpu_time_ms within embedding"
    assert list(bars.data[0].x) == view["exclusive"].head(15).tolist()
    assert "(ms)" in bars.layout.xaxis.title.text


def test_lists_offer_what_a_run_has_and_redraw() -> None:
    drawn: list[tuple[int, str, str]] = []
    opened: list[str] = []
    small = sample_profile()
    small.values = small.values[small.values["metric"] == "cpu_time_ms"]
    profiles = {"first": sample_profile(), "second": small}

    def open_profile(place: str) -> Profile:
        opened.append(place)
        return profiles[place]

    box = selectors(
        {"one": "first", "two": "second"},
        open_profile,
        lambda profile, part, metric: drawn.append((len(profile.values), part, metric)),
    )
    run, part, metric = box.children[1].children
    assert "embedding" in part.options and set(metric.options) > {"cpu_time_ms", "calls"}
    assert drawn[-1] == (len(profiles["first"].values), "data", "cpu_time_ms")
    part.value = "top_mlp"
    assert drawn[-1] == (len(profiles["first"].values), "top_mlp", "cpu_time_ms")
    metric.value = "calls"
    assert drawn[-1][1:] == ("top_mlp", "calls")
    run.value = "second"
    # the part is kept; the metric is not there
    assert drawn[-1] == (len(small.values), "top_mlp", "cpu_time_ms")
    assert metric.options == ("cpu_time_ms",)
    run.value = "first"
    assert opened == ["first", "second"]


@pytest.mark.parametrize("kind", KINDS)
def test_explore_opens(kind: str, tmp_path: Path) -> None:
    place = KINDS[kind] if kind == "a run of ours" else str(recording(KINDS[kind]))
    shown = run_cells("explore", profile_run=place, output_root=str(tmp_path))
    frames = [value for value in shown if isinstance(value, pd.DataFrame)]
    assert len(frames) >= 10
    assert all(len(frame) for frame in frames)
    assert sum(isinstance(value, go.Figure) for value in shown) == 3
    (tree,) = (value for value in shown if isinstance(value, str))
    assert "└─" in tree
    said = [value.markdown for value in shown if isinstance(value, Text)]
    assert any(place in text for text in said)
    assert any("no second run was given" in text for text in said)


def test_explore_subtracts_another_run(tmp_path: Path) -> None:
    given = {"profile_run": str(SAMPLE), "other_run": str(SAMPLE), "part": "no part"}
    shown = run_cells("explore", output_root=str(tmp_path), **given)
    assert sum(isinstance(value, str) for value in shown) == 2
    assert not any("no second run" in v.markdown for v in shown if isinstance(v, Text))
    titles = [value.layout.title.text for value in shown if isinstance(value, go.Figure)]
    # that part is not there: the one with the most time takes its place
    assert "cpu_time_ms within top MLP" in titles
