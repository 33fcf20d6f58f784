"""Figures of the scaling page: predicted and measured iterations over numbers of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.base.text import counted
from dlrm_core.parts import part_label
from dlrm_studies.scaling.model.communication import MIB, kind_label
from dlrm_studies.scaling.model.links import Link
from dlrm_studies.scaling.model.prediction import Event
from dlrm_workbook.analysis.attribution import IDLE
from dlrm_workbook.ground.units import digits, milliseconds, percent, signed_percent, thousands
from dlrm_workbook.show import theme

SHARDING_COLOURS = {
    "best": theme.INK,
    "table_wise": theme.COLOURS["bottom_mlp"],
    "row_wise": theme.COLOURS["optimizer"],
    "column_wise": theme.COLOURS["embedding"],
    "replicated": theme.COLOURS["data"],
    "mixed": theme.COLOURS["interaction"],
}


def iteration_bars(table: pd.DataFrame, title: str) -> go.Figure:
    """Predicted iterations: computing and exposed communication stacked, with the range.

    Args:
        table: what :func:`dlrm_studies.scaling.model.choice.scaling_table` gives.
    """
    predicted = table[table["mid_ms"].notna()]
    rows = theme.rows_of(predicted)
    result = theme.figure(title, 420, legend=True)
    places = list(range(len(rows)))
    hover = [
        f"{counted(row.ranks, 'rank')}, batch {row.batch_size:,}, {kind_label(row.sharding)}<br>"
        f"{milliseconds(row.mid_ms)} ({milliseconds(row.low_ms)} to {milliseconds(row.high_ms)})"
        f"<br>{percent(row.exposed_share)} exposed communication"
        f"<br>{thousands(row.samples_per_second)} samples/s"
        for row in rows
    ]
    for name, colour, column in (
        ("computing", theme.COMPUTE_COLOUR, "compute_ms"),
        ("exposed communication", theme.COLOURS["communication"], "exposed_ms"),
    ):
        theme.add_bars(result, places, predicted[column], name, colour, hover, flat=False)
    ends = theme.error_bars(predicted["low_ms"], predicted["mid_ms"], predicted["high_ms"])
    result.data[-1].update(error_y=ends)
    for place, row in zip(places, rows, strict=True):
        result.add_annotation(
            x=place,
            y=row.high_ms,
            text=digits(row.mid_ms),
            name="value",
            showarrow=False,
            yshift=12,
        )
    top = float(predicted["high_ms"].max()) if len(predicted) else 1.0
    result.update_layout(barmode="stack", margin={"b": 96})
    result.update_xaxes(
        title="ranks",
        tickmode="array",
        tickvals=places,
        ticktext=[f"{row.ranks:,}" for row in rows],
        showgrid=False,
    )
    result.update_yaxes(title="ms per iteration", range=[0, 1.14 * top])
    return result


def efficiency_lines(
    tables: Mapping[str, pd.DataFrame], measured: pd.DataFrame | None = None
) -> go.Figure:
    """Efficiency over ranks: a line a kind of scaling, points where it was measured.

    Args:
        tables: "strong", "weak" to :func:`scaling_table`'s result.
        measured: what :func:`dlrm_studies.scaling.model.record.measured_iterations` gives.
    """
    result = theme.figure("Efficiency: speed-up over ranks", 400, legend=True)
    colours = {"strong": theme.COLOURS["top_mlp"], "weak": theme.COLOURS["optimizer"]}
    counts: set[int] = set()
    for number, (name, table) in enumerate(tables.items()):
        rows = table[table["efficiency"].notna()]
        counts |= set(rows["ranks"].astype(int))
        theme.add_points(
            result,
            rows["ranks"],
            rows["efficiency"],
            f"{name} scaling, predicted",
            "%{customdata[0]}: %{y:.1%}<br>speed-up over one rank %{customdata[1]:,.1f}x, "
            "%{customdata[2]}, %{customdata[3]:,.3g} ms",
            cliponaxis=False,
            customdata=_named(rows)[["counted", "speedup", "sharding", "mid_ms"]],
            **theme.line_look(colours[name], number),
        )
    if measured is not None:
        rows = _named(measured[measured["efficiency"].notna() & (measured["ranks"] > 1)])
        counts |= set(rows["ranks"].astype(int))
        kinds = rows["scaling"] if "scaling" in rows else rows["ranks"].map(lambda _: "strong")
        for name in tables:
            of_kind = rows[kinds.eq(name)]
            if of_kind.empty:
                continue
            theme.add_points(
                result,
                of_kind["ranks"],
                of_kind["efficiency"],
                f"{name}, measured here",
                "%{x} ranks on this machine: %{y:.1%}<br>%{customdata[0]}, batch "
                "%{customdata[1]:,}",
                marker={"size": 11, "symbol": "x", "color": colours[name]},
                customdata=of_kind[["sharding", "batch_size"]],
            )
    result.update_layout(margin={"b": 96})
    result.update_xaxes(**ranks_axis(sorted(counts)))
    result.update_yaxes(title="efficiency", tickformat=".0%", range=[0, 1.08])
    return result


def sharding_lines(tables: Mapping[str, pd.DataFrame], best: pd.DataFrame) -> go.Figure:
    """Predicted iterations of each sharding over ranks, the best of all on top.

    Args:
        tables: sharding to :func:`scaling_table`'s result for it.
        best: the same with the best sharding at each number of ranks.
    """
    result = theme.figure("Iteration by sharding", 440, legend=True)
    times: list[float] = []
    for number, (name, table) in enumerate([*tables.items(), ("best", best)]):
        predicted = table[table["mid_ms"].notna()]
        if predicted.empty:
            continue
        times += predicted["mid_ms"].tolist()
        look = theme.line_look(SHARDING_COLOURS[name], number, 2.5)
        if name == "best":
            look["line"] |= {"width": 1.5, "dash": "dot"}
        theme.add_points(
            result,
            predicted["ranks"],
            predicted["mid_ms"],
            "best, tables of different kinds" if name == "best" else kind_label(name),
            "%{customdata[0]}: %{y:,.3g} ms, %{customdata[1]:,.3g} ms exposed<br>%{customdata[2]}",
            customdata=_named(predicted)[["counted", "exposed_ms", "sharding"]],
            **look,
        )
    result.update_layout(margin={"b": 110})
    counts = sorted({int(n) for table in [best, *tables.values()] for n in table["ranks"]})
    result.update_xaxes(**ranks_axis(counts))
    result.update_yaxes(title="ms per iteration", **theme.log_axis(theme.log_ticks(times)))
    return result


def ranks_axis(counts: Iterable[int]) -> dict[str, Any]:
    """Ranks on a logarithmic axis, each with its number; for ``update_xaxes``."""
    return {"title": "ranks", **theme.log_axis(list(counts), "{:,}".format)}


def _named(table: pd.DataFrame) -> pd.DataFrame:
    """The table with shardings as a reader calls them, and ranks in words."""
    counts = [counted(int(count), "rank") for count in table["ranks"]]
    return table.assign(sharding=table["sharding"].map(kind_label), counted=counts)


# Predictions held against what was measured here, and against published throughputs.


def predicted_measured_dots(table: pd.DataFrame) -> go.Figure:
    """Predicted iterations with their range over measured ones, one row per run.

    Args:
        table: what :func:`dlrm_studies.scaling.model.record.predicted_and_measured` gives.
    """
    predicted = table[table["predicted_ms"].notna()]
    labels = [
        f"{f'{row.case}: ' if 'case' in table else ''}{row.ranks} ranks, batch "
        f"{row.batch_size:,}, {kind_label(row.sharding)}"
        for row in theme.rows_of(predicted)
    ]
    furthest = max(predicted[["high_ms", "measured_ms"]].to_numpy(float).ravel(), default=1.0)
    return _dots(
        "Predicted and measured iterations",
        labels,
        predicted[["low_ms", "predicted_ms", "high_ms"]],
        ("measured", predicted["measured_ms"], predicted["error"]),
        milliseconds,
        {"title": "ms per iteration", "range": [0, 1.15 * furthest]},
    )


def mlperf_dots(table: pd.DataFrame) -> go.Figure:
    """MLPerf's throughputs and our predictions from data sheets.

    Args:
        table: what :func:`dlrm_studies.scaling.model.published.mlperf_scaling` gives.
    """
    labels = [f"{row.hardware}: {row.program}" for row in theme.rows_of(table)]
    ranges = table[["predicted_low", "predicted", "predicted_high"]]
    shown = [*table["published"], *ranges.to_numpy().ravel()]
    ends = [math.log10(0.85 * min(shown)), math.log10(1.45 * max(shown))]
    return _dots(
        "MLPerf's DLRM-DCNv2, predicted from data sheets",
        labels,
        ranges,
        ("published", table["published"], table["error"]),
        lambda speed: f"{speed:,.0f} samples/s",
        {"title": "samples per second", "range": ends}
        | theme.log_axis(theme.log_ticks(shown), thousands),
    )


def _dots(
    title: str,
    labels: Sequence[str],
    predicted: pd.DataFrame,
    held: tuple[str, pd.Series, pd.Series],
    text: Callable[[float], str],
    axis: Mapping[str, Any],
) -> go.Figure:
    """A row a prediction: its range, what it is held against, and how far off it is.

    Args:
        predicted: least, middle and most of each row, in this order.
        held: what the predictions are held against: its name, its values, their errors.
        text: a value as a reader wants it.
        axis: the values' own.
    """
    name, values, errors = held
    low, mid, high = (predicted[column] for column in predicted.columns)
    result = theme.figure(title, 150 + 30 * max(len(labels), 3), legend=True)
    places = list(range(len(labels)))
    foretold = [
        f"{label}<br>predicted {text(b)}, {text(a)} to {text(c)}"
        for label, a, b, c in zip(labels, low, mid, high, strict=True)
    ]
    hover = [f"{label}<br>{name} {text(v)}" for label, v in zip(labels, values, strict=True)]
    talk = theme.COLOURS["communication"]
    diamond = {"symbol": "diamond", "size": 9, "color": talk}
    ring = {"symbol": "circle-open", "size": 11, "color": theme.INK, "line": {"width": 2}}
    span = theme.error_bars(low, mid, high, talk)
    named = "predicted, with range"
    theme.add_points(result, mid, places, named, foretold, marker=diamond, error_x=span)
    theme.add_points(result, values, places, name, hover, marker=ring)
    ends = [max(pair) for pair in zip(high, values, strict=True)]
    theme.add_ends(
        result, ends, places, list(map(signed_percent, errors)), axis.get("type") == "log"
    )
    result.update_xaxes(**axis)
    theme.label_rows(result, [theme.lines_of(label, 52) for label in labels], above=0.8)
    result.update_layout(margin={"b": 96})
    return result


# Figures of what the scaling model rests on: bytes, links, stragglers.

EXCHANGE_COLOURS = {
    "indices": theme.COLOURS["data"],
    "pooled vectors": theme.COLOURS["embedding"],
    "pooled gradients": theme.COLOURS["interaction"],
    "dense gradients": theme.COLOURS["top_mlp"],
    "table gradients": theme.COLOURS["optimizer"],
}


def volume_bars(table: pd.DataFrame, ranks: int) -> go.Figure:
    """What leaves the rank with most, by sharding and by what it carries.

    Args:
        table: what :func:`dlrm_studies.scaling.model.communication.volumes_by_sharding` gives.
    """
    sums = table.groupby(["sharding", "what"], sort=False)["leaves_bytes"].sum().unstack()
    sums = sums.fillna(0.0).rename(index=kind_label) / MIB
    result = theme.stacked_bars(
        f"Bytes that leave a rank per iteration on {ranks} ranks",
        sums,
        {what: (what, colour) for what, colour in EXCHANGE_COLOURS.items()},
        "MiB",
        shares=True,
    )
    texts = [f"<b>{digits(total)} MiB</b>" for total in sums.sum(axis=1)]
    theme.add_ends(result, [1.0] * len(sums), range(len(sums)), texts)
    result.update_layout(margin={"b": 96, "r": 110})
    result.update_xaxes(title="share of the bytes")
    return result


def link_curves(check: pd.DataFrame, link: Link) -> go.Figure:
    """Measured collectives over their size, and what alpha and beta make of them.

    Args:
        check: what :func:`dlrm_studies.scaling.model.links.check` gives.
    """
    result = theme.figure(f"Collectives on {link.name}", 430, legend=True)
    distinct = check[["collective", "ranks"]].drop_duplicates()
    pairs = [(str(row.collective), int(row.ranks)) for row in theme.rows_of(distinct)]
    names = ("top_mlp", "embedding", "optimizer", "interaction", "data")
    palette = [theme.COLOURS[name] for name in names]
    kinds = list(dict.fromkeys(kind for kind, _ in pairs))
    for kind, ranks in pairs:
        points = check[(check["collective"] == kind) & (check["ranks"] == ranks)]
        colour = palette[kinds.index(kind) % len(palette)]
        dash = theme.DASHES[sorted({count for _, count in pairs}).index(ranks) % len(theme.DASHES)]
        fit = link.fits.get((kind, ranks))
        label = f"{kind_label(kind)}, {ranks} ranks"
        theme.add_points(
            result,
            points["bytes"],
            points["measured_ms"],
            label,
            f"{label}: %{{x:,}} B in %{{y:,.3g}} ms",
            mode="markers+lines" if fit is None else "markers",
            marker={
                "color": colour,
                "size": 7,
                "symbol": theme.SYMBOLS[ranks % len(theme.SYMBOLS)],
            },
        )
        if fit is not None:
            theme.add_points(
                result,
                points["bytes"],
                1e-3 * fit.fixed_us + 1e-6 * points["bytes"] / fit.gb_per_s,
                f"{label}, fitted",
                f"{label}, fitted: {fit.fixed_us:,.0f} µs + bytes / {fit.gb_per_s:.2f} GB/s",
                mode="lines",
                line={"color": colour, "width": 1.5, "dash": dash},
                showlegend=False,
            )
    result.update_layout(margin={"b": 130})
    result.update_xaxes(
        title="bytes",
        **theme.log_axis(
            theme.log_ticks(check["bytes"].tolist()), lambda size: thousands(size, "B")
        ),
    )
    result.update_yaxes(
        title="ms", **theme.log_axis(theme.log_ticks(check["measured_ms"].tolist()))
    )
    return result


def straggler_lines(table: pd.DataFrame, how: str) -> go.Figure:
    """Iterations with slow ranks, their mean and 95th percentile, over those of equal ranks.

    Args:
        table: what :func:`dlrm_studies.scaling.model.choice.straggler_table` gives.
        how: how ranks differ, for the title.
    """
    result = theme.figure(f"What slow ranks cost: {how}", 400, legend=True)
    for number, (column, name, colour) in enumerate(
        (
            ("mean_ms", "mean", theme.COLOURS["optimizer"]),
            ("p95_ms", "95th percentile", theme.COLOURS["interaction"]),
        )
    ):
        theme.add_points(
            result,
            table["ranks"],
            table[column] / table["even_ms"],
            name,
            "%{x:,} ranks: %{customdata[0]:,.3g} ms instead of %{customdata[1]:,.3g} ms",
            customdata=table[[column, "even_ms"]],
            **theme.line_look(colour, number),
        )
    result.update_layout(margin={"b": 96})
    result.update_xaxes(**ranks_axis(table["ranks"]))
    result.update_yaxes(title="time over that of equal ranks", rangemode="tozero")
    return result


# Figures of ranks beside each other: an iteration over time, its parts, who has more to do.


def lanes(events: pd.DataFrame | Sequence[Event], title: str) -> go.Figure:
    """One iteration over time: what computes, and what is on its way meanwhile.

    Args:
        events: what :func:`dlrm_studies.scaling.model.record.shown_iteration` gives, two lanes per
            rank; or those of a prediction, which are the slowest rank's.
    """
    table = pd.DataFrame(events)
    names = {"compute": "step", "communication": "exchanges"}
    labels = table["lane"]
    if "rank" in table:
        labels = "rank " + table["rank"].astype(str) + ", " + labels.map(names)
    rows = table.assign(label=labels).sort_values("start_ms", kind="stable")
    # step above exchanges, rank below rank
    keys = ["rank", "lane"] if "rank" in table else ["lane"]
    order = rows.sort_values(keys, ascending=[key == "rank" for key in keys])["label"].unique()
    result = theme.figure(title, 180 + 34 * max(len(order), 2), legend=True)
    shown: set[str] = set()
    for row in theme.rows_of(rows):
        name, phase = row.name, row.phase
        computes = row.lane == "compute"
        look = theme.markers([(name if computes else "communication", phase if computes else "")])
        part = part_label(name) if computes else "communication"
        what = part_label(name, phase) if computes else f"{name}, {phase}".removesuffix(", ")
        took = row.end_ms - row.start_ms
        theme.add_bars(
            result,
            [took],
            [row.label],
            part,
            look,
            f"{what}: {milliseconds(took)}<br>from {milliseconds(row.start_ms)}",
            base=[row.start_ms],
            legendgroup=part,
            legendrank=theme.step_order(name)[0] if computes else 900,
            showlegend=part not in shown,
        )
        shown.add(part)
    theme.add_phase_key(result, table.loc[table["lane"].eq("compute"), "phase"].tolist())
    result.update_layout(barmode="overlay", bargap=0.3, margin={"b": 110})
    result.update_xaxes(title="ms since the iteration's start")
    result.update_yaxes(
        categoryorder="array",
        categoryarray=order[::-1].tolist(),
        showgrid=False,
        ticklabelstandoff=5,
    )
    return result


def rank_bars(parts: pd.DataFrame, title: str) -> go.Figure:
    """All ranks of a run in one view: the parts of each rank's mean iteration, stacked.

    Args:
        parts: what :func:`dlrm_studies.scaling.model.record.parts_by_rank` gives.
    """
    wide = parts.pivot_table("time_ms", "rank", "component", aggfunc="sum", fill_value=0.0)
    names = theme.components_of(wide.columns, IDLE)
    looks = {name: (part_label(name), theme.colour_of(name)) for name in names}
    result = theme.stacked_bars(title, wide.rename(index="rank {}".format), looks, "ms")
    result.update_layout(margin={"b": 96})
    result.update_xaxes(title="ms per iteration")
    return result
