"""What figures and tables share: rows, intervals, logarithmic scales, numbers as text."""

import math
from html import unescape
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.base.text import counted
from dlrm_workbook.ground.units import (
    NOTHING,
    faster,
    from_to,
    known_or,
    ratio,
    signed_milliseconds,
    signed_percent,
    speedup,
    thousands,
    yes_or_no,
)
from dlrm_workbook.show.tables import BESIDE, Cells, Column, TextTable, column, draw, show, signed
from dlrm_workbook.show.theme import (
    COLOURS,
    add_ends,
    error_bars,
    figure,
    in_groups,
    label_rows,
    log_axis,
    log_ticks,
    mark_one,
)


@given(st.lists(st.sampled_from("abc"), max_size=12))
def test_rows_of_a_group_follow_their_heading_without_a_gap(headings: list[str]) -> None:
    places, groups = in_groups(headings)
    runs = [h for i, h in enumerate(headings) if i == 0 or h != headings[i - 1]]
    assert [text for _, text in groups] == runs
    # all rows and headings together are 0, 1, 2, ...
    assert sorted([*places, *(place for place, _ in groups)]) == list(
        range(len(headings) + len(runs))
    )
    assert places == sorted(places)


def test_a_line_at_one_crosses_no_heading() -> None:
    drawn = figure("", 300)
    places, groups = in_groups(["a", "a", "b"])
    mark_one(drawn, 1.0, groups, places[-1])
    lines = [(shape.y0, shape.y1) for shape in drawn.layout.shapes]
    assert len(lines) == 2
    assert not any(low < place < high for low, high in lines for place, _ in groups)
    assert all(any(low < place < high for low, high in lines) for place in places)


def test_intervals_reach_from_end_to_end_and_unknown_ends_are_not_drawn() -> None:
    bars = error_bars([1.0, math.nan], [2.0, 3.0], [5.0, math.inf])
    assert (bars["arrayminus"], bars["array"]) == ([1.0, 0.0], [3.0, 0.0])


def test_rows_are_labelled_from_the_top_and_texts_lie_behind_ends() -> None:
    drawn = figure("", 300)
    label_rows(drawn, ["same", "same"])
    assert drawn.layout.yaxis.tickvals == (0, 1) and drawn.layout.yaxis.range == (1.6, -0.6)
    add_ends(drawn, [100.0, 1000.0], [0, 1], ["x", "y"], log=True)
    assert [note.x for note in drawn.layout.annotations] == pytest.approx([2.0, 3.0])
    assert {note.xanchor for note in drawn.layout.annotations} == {"left"}


@pytest.mark.parametrize(
    ("low", "high", "least"), [(0.09, 0.12, 2), (1, 3.5, 3), (0.5, 5000, 3), (7, 7, 1)]
)
def test_logarithmic_axes_have_a_few_round_marks(low: float, high: float, least: int) -> None:
    marks = log_ticks([low, high])
    assert least <= len(marks) <= 8
    assert all(0.7 * low <= mark <= 1.3 * high for mark in marks)
    assert log_axis(marks)["ticktext"] == [f"{mark:,g}" for mark in marks]


def test_signs_and_decimals() -> None:
    assert signed([1.5, -0.25, 0.0]) == ["+1.500", "−0.250", "0.000"]
    assert signed([100.0, -0.01]) == ["+100.0", "0.0"]


def test_numbers_as_readers_want_them() -> None:
    assert [thousands(n, "B") for n in (64, 1024, 3e6, 2.5e9)] == [
        "64 B",
        "1.02 kB",
        "3 MB",
        "2.5 GB",
    ]
    assert thousands(13_800_000.0) == "13.8 M" and thousands(5.0) == "5"
    assert (counted(1, "thread"), counted(1200, "rank")) == ("1 thread", "1,200 ranks")
    assert speedup(1.25, 1.2, 1.31) == "1.25x (1.20x to 1.31x)"
    assert speedup(2.14, 1.93, 2.38, figures=2) == "2.1x (1.9x to 2.4x)"
    assert [ratio(n) for n in (0.0123, 0.951, 12.34, 11_123)] == [
        "0.01x",
        "0.95x",
        "12.3x",
        "11,100x",
    ]
    assert speedup(1.25, math.nan, math.nan) == "1.25x"
    assert from_to(1.2, 1310.0) == "1.20 to 1,310" and from_to(1.0, math.nan) == NOTHING
    assert [yes_or_no(v) for v in (True, False, None)] == ["yes", "no", NOTHING]
    assert known_or(None, str) == known_or(math.nan, str) == NOTHING and known_or(2, str) == "2.0"
    assert (signed_percent(-0.004), signed_percent(0.031)) == ("−0.4%", "+3.1%")
    assert [signed_milliseconds(v) for v in (1.5, -3.0, 0.0)] == ["+1.50 ms", "−3.00 ms", "0 ms"]
    shares = (0.031, -0.004, 0.0004, -0.0004, 0.0)
    assert [signed_percent(v) for v in shares] == ["+3.1%", "−0.4%", "0.0%", "0.0%", "0.0%"]
    assert signed_percent(-0.104, decimals=0) == "−10%"
    assert faster(1.99, 1.95, 2.23) == "1.99x faster (1.95x to 2.23x)"
    assert faster(0.8, 0.75, 0.9, figures=2) == "1.2x slower (1.1x to 1.3x)"
    assert faster(2.0, math.nan, math.nan) == "2.00x faster"
    assert faster(0.997, 0.98, 1.01) == "1.00x as fast (0.98x to 1.01x)"
    assert faster(1.02, 0.97, 1.08) == "1.02x faster (0.97x to 1.08x)"


def test_ranges_are_numbers_and_no_number_is_broken_into_lines() -> None:
    ranges = Cells("range", ["8.51 to 15.1", NOTHING], words=False)
    gains = Cells("gain", ["0.95x (0.87x to 1.02x)", "1.00x"], words=False)
    html = TextTable([ranges, gains, Cells("what", ["a to b", "2 ranks"])])._repr_html_()
    assert '<td style="white-space: nowrap">8.51 to 15.1</td>' in html
    assert '<td style="white-space: nowrap">0.95x (0.87x to 1.02x)</td>' in html
    assert '<td style="text-align: left">a to b</td>' in html
    assert "<th>range</th>" in html


def test_tables_align_numbers_and_escape_words() -> None:
    table = TextTable(
        [Cells("name", ["<b>", "a"]), Cells("ms", ["1,234.5", "1 to 2"], words=False)]
    )
    html = table._repr_html_()
    assert "&lt;b&gt;" in html and "<b>" not in html
    assert "<td>1,234.5</td>" in html, "browsers break no line within a number"
    assert '<td style="white-space: nowrap">1 to 2</td>' in html
    assert '<td style="text-align: left">a</td>' in html
    assert TextTable([Cells("a", [])])._repr_html_().count("Nothing") == 1
    assert "1,234.5" in repr(table)


def test_a_frame_is_shown_by_the_names_of_its_columns() -> None:
    frame = pd.DataFrame(
        {
            "component": ["embedding", "data"],
            "phase": ["forward", ""],
            "time_ms": [1.5, 2000.25],
            "share": [0.1, 0.00001],
            "agrees": [True, False],
            "calls": [3.0, 4000.0],
            "table_bytes": [12, 1 << 30],
            "gap_us": [1.0, math.nan],
            "gflops": [math.nan, math.nan],
        }
    )
    shown = show(frame)
    assert isinstance(shown, TextTable)
    titles = ["part", "time (ms)", "share", "agrees", "calls", "table", "gap (µs)"]
    assert shown.columns == titles, "what was measured in no row is left out"
    first = ["embedding forward", "1.5", "10.0%", "yes", "3", "12 B", "1.000"]
    assert shown.rows == [first, ["data", "2,000.2", "<0.1%", "no", "4,000", "1.00 GiB", NOTHING]]
    assert f'<span style="color: {COLOURS["data"]}">■</span>&nbsp;data' in shown._repr_html_()
    chosen = show(frame, {"share": "of all", "time_ms": Column("took", "digits")})
    assert isinstance(chosen, TextTable)
    assert (chosen.columns, chosen.rows[0]) == (["of all", "took (ms)"], ["10.0%", "1.50"])


def test_a_table_keeps_what_its_texts_round_off() -> None:
    frame = pd.DataFrame(
        {
            "component": ["embedding", "data"],
            "phase": ["forward", ""],
            "name": ["at::native::" + "long_name_" * 9, "copy"],
            "low_ms": [1.25, 10.0],
            "high_ms": [2.123456789, math.nan],
            "bytes": [12345678, 3],
        }
    )
    html = show(frame)._repr_html_()
    assert '<th style="text-align: left" data-column="part">part</th>' in html
    assert 'data-column="low_ms,high_ms"' in html and 'data-value="1.25,2.123457"' in html
    assert 'data-value="10,"' in html, "what was not measured is empty"
    assert f'data-value="at::native::{"long_name_" * 9}"' in html
    assert 'data-value="12345678"' in html and 'data-value="copy"' not in html


def test_rows_beyond_the_first_are_kept_and_counted() -> None:
    def rows(count: int, **options: int) -> tuple[int, int, str]:
        html = show(pd.DataFrame({"time_ms": range(count)}), **options)._repr_html_()
        foot = html.partition("<tfoot>")[2]
        body = html.partition("<tbody>")[2].partition("</tbody>")[0]
        return body.count("<tr"), body.count("<tr hidden>"), foot

    assert rows(24) == (24, 0, ""), "a few more are shown as well"
    shown, hidden, foot = rows(300)
    assert (shown, hidden) == (200, 180)
    assert "300 rows, of which the first 200 are kept here" in foot
    assert rows(40, most=30)[1] == 10
    shown, hidden, foot = rows(300, most=250)
    assert (shown, hidden) == (200, 0)
    assert "300 rows, of which the first 200 are kept here<" in foot, "all that it holds is seen"


def test_rows_that_are_left_out_are_in_a_file(tmp_path: Path) -> None:
    frame = pd.DataFrame({"name": ["=1+1", *map(str, range(99))], "time_ms": np.arange(100) / 3})
    file = tmp_path / "tables" / "calls.csv"
    html = show(frame, ["time_ms"], whole=file)._repr_html_()
    assert html.count("<tr") == 1 + BESIDE + 1, "head, rows and foot"
    assert "The whole table is in tables/calls.csv of the run's folder" in unescape(html)
    there = pd.read_csv(file, float_precision="round_trip")
    assert list(there) == ["name", "time_ms"] and there["name"][0] == "'=1+1"
    assert there["time_ms"].tolist() == frame["time_ms"].tolist()
    short = show(frame[:BESIDE], whole=tmp_path / "none.csv")
    assert "whole table" not in short._repr_html_() and not (tmp_path / "none.csv").exists()


def test_a_frame_without_rows_says_why() -> None:
    empty = pd.DataFrame({"time_ms": []})
    empty.attrs["not_measured"] = "no clock"
    assert repr(show(empty)) == repr(draw(len, empty)) == "*Not measured: no clock.*"
    assert repr(draw(len, empty, "Nothing.")) == repr(draw(len, None, "Nothing.")) == "*Nothing.*"


def test_columns_share_their_decimals() -> None:
    assert column([1234.56, 7.0, 0.001]) == ["1,234.6", "7.0", "<0.1"]
    assert column([12.345, 0.0, float("nan")]) == ["12.35", "0.00", "–"]
    assert column([0.1234]) == ["0.123"]
    assert column([]) == []
