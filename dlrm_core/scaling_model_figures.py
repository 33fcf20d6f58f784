"""Figures of what the scaling model rests on: bytes, links, stragglers, published figures."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.analysis.links import Link
from dlrm_core.compare_figures import SYMBOLS, lines_of
from dlrm_core.figure_theme import COLOURS, INK, digits, figure, rows_of
from dlrm_core.scaling_figures import TALK
from dlrm_core.sweep_figures import DASHES, log_ticks

MIB = 1 << 20

EXCHANGE_COLOURS = {
    "indices": COLOURS["data"],
    "pooled vectors": COLOURS["embedding"],
    "pooled gradients": COLOURS["interaction"],
    "dense gradients": COLOURS["top_mlp"],
    "table gradients": COLOURS["optimizer"],
}


def volume_bars(table: pd.DataFrame, ranks: int) -> go.Figure:
    """What leaves the rank with most, by sharding and by what it carries.

    Args:
        table: what :func:`dlrm_core.analysis.communication.volumes_by_sharding` gives.
    """
    names = list(dict.fromkeys(table["sharding"]))
    result = figure(
        f"Bytes that leave a rank in an iteration on {ranks} ranks",
        170 + 38 * max(len(names), 3),
        legend=True,
    )
    sums = table.groupby(["sharding", "what"])["leaves_bytes"].sum().unstack().fillna(0.0)
    sums = sums.reindex(names) / MIB
    totals = sums.sum(axis=1)
    for what, colour in EXCHANGE_COLOURS.items():
        if what not in sums.columns:
            continue
        result.add_trace(
            go.Bar(
                x=sums[what] / totals,
                y=[name.replace("_", "-") for name in names],
                orientation="h",
                name=what,
                marker={"color": colour, "line": {"width": 0}},
                customdata=sums[what],
                hovertemplate=(
                    f"%{{y}}, {what}: %{{customdata:,.2f}} MiB, %{{x:.1%}}<extra></extra>"
                ),
            )
        )
    for name, total in totals.items():
        result.add_annotation(
            x=1,
            y=str(name).replace("_", "-"),
            text=f"<b>{digits(float(total))} MiB</b>",
            showarrow=False,
            xanchor="left",
            xshift=6,
        )
    result.update_layout(barmode="stack", bargap=0.25, margin={"b": 96, "r": 110})
    result.update_xaxes(title="share of the bytes", tickformat=".0%", range=[0, 1])
    result.update_yaxes(autorange="reversed", showgrid=False, ticklabelstandoff=5)
    return result


def link_curves(check: pd.DataFrame, link: Link) -> go.Figure:
    """Measured collectives over their size, and what alpha and beta make of them.

    Args:
        check: what :func:`dlrm_core.analysis.link_calibration.check` gives.
    """
    result = figure(f"Collectives on {link.name}", 430, legend=True)
    distinct = check[["collective", "ranks"]].drop_duplicates()
    pairs = [(str(row.collective), int(row.ranks)) for row in rows_of(distinct)]
    names = ("top_mlp", "embedding", "optimizer", "interaction", "data")
    palette = [COLOURS[name] for name in names]
    kinds = list(dict.fromkeys(kind for kind, _ in pairs))
    for kind, ranks in pairs:
        own = check[(check["collective"] == kind) & (check["ranks"] == ranks)]
        colour = palette[kinds.index(kind) % len(palette)]
        dash = DASHES[sorted({count for _, count in pairs}).index(ranks) % len(DASHES)]
        fit = link.fits.get((kind, ranks))
        label = f"{kind.replace('_', '-')}, {ranks} ranks"
        result.add_trace(
            go.Scatter(
                x=own["bytes"],
                y=own["measured_ms"],
                name=label,
                mode="markers+lines" if fit is None else "markers",
                marker={"color": colour, "size": 7, "symbol": SYMBOLS[ranks % len(SYMBOLS)]},
                hovertemplate=f"{label}: %{{x:,}} B in %{{y:,.3g}} ms<extra></extra>",
            )
        )
        if fit is not None:
            said = f"{fit.fixed_us:,.0f} µs + bytes / {fit.gb_per_s:.2f} GB/s"
            result.add_trace(
                go.Scatter(
                    x=own["bytes"],
                    y=1e-3 * fit.fixed_us + 1e-6 * own["bytes"] / fit.gb_per_s,
                    mode="lines",
                    line={"color": colour, "width": 1.5, "dash": dash},
                    showlegend=False,
                    hovertemplate=f"{label}: {said}<extra></extra>",
                )
            )
    result.update_layout(margin={"b": 130})
    times = check["measured_ms"].tolist()
    for axis, values, unit in (("x", check["bytes"].tolist(), "bytes"), ("y", times, "ms")):
        marks = log_ticks(values) if values else [1.0]
        update = result.update_xaxes if axis == "x" else result.update_yaxes
        text = [_size(mark) if axis == "x" else f"{mark:,g}" for mark in marks]
        update(title=unit, type="log", tickmode="array", tickvals=marks, ticktext=text)
    return result


def _size(count: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:g} {unit}"
    return f"{count:g} B"


def straggler_lines(table: pd.DataFrame, said: str) -> go.Figure:
    """Iterations with slow ranks, their mean and one in twenty, over even ranks.

    Args:
        table: what :func:`dlrm_core.analysis.stragglers.straggler_table` gives.
        said: how ranks differ, for the title.
    """
    result = figure(f"What slow ranks cost: {said}", 400, legend=True)
    for number, (column, name, colour) in enumerate(
        (
            ("mean_ms", "mean", COLOURS["optimizer"]),
            ("p95_ms", "one in twenty is longer", COLOURS["interaction"]),
        )
    ):
        result.add_trace(
            go.Scatter(
                x=table["ranks"],
                y=table[column] / table["even_ms"],
                name=name,
                mode="lines+markers",
                line={"color": colour, "width": 2, "dash": DASHES[number]},
                marker={"size": 7, "symbol": SYMBOLS[number]},
                customdata=table[[column, "even_ms"]],
                hovertemplate=(
                    "%{x:,} ranks: %{customdata[0]:,.3g} ms instead of %{customdata[1]:,.3g} ms"
                    "<extra></extra>"
                ),
            )
        )
    result.update_layout(margin={"b": 96})
    result.update_xaxes(
        title="ranks",
        type="log",
        tickmode="array",
        tickvals=table["ranks"],
        ticktext=[f"{count:,}" for count in table["ranks"]],
    )
    result.update_yaxes(title="times as long as even ranks", rangemode="tozero")
    return result


def published_dots(table: pd.DataFrame) -> go.Figure:
    """Published throughputs and our predictions of them; other people's machines.

    Args:
        table: what :func:`dlrm_core.analysis.published_scaling.published_scaling` gives.
    """
    known = table[table["published"].notna()]
    rows = rows_of(known)
    labels = [
        f"{row.hardware}, {row.devices} devices, {row.precision}, {_short(row.source)}, "
        f"from {row.basis}"
        for row in rows
    ]
    result = figure("Published throughput, predicted", 150 + 30 * max(len(rows), 3), legend=True)
    places = list(range(len(rows)))
    result.add_trace(
        go.Scatter(
            x=known["predicted"],
            y=places,
            name="predicted, with range",
            mode="markers",
            marker={"symbol": "diamond", "size": 9, "color": TALK},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": known["predicted_high"] - known["predicted"],
                "arrayminus": known["predicted"] - known["predicted_low"],
                "thickness": 1.5,
                "color": TALK,
            },
            hovertext=[
                f"{label}<br>{row.predicted:,.0f} samples/s predicted"
                for label, row in zip(labels, rows, strict=True)
            ],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    )
    result.add_trace(
        go.Scatter(
            x=known["published"],
            y=places,
            name="published",
            mode="markers",
            marker={"symbol": "circle-open", "size": 11, "color": INK, "line": {"width": 2}},
            hovertext=[
                f"{label}<br>{row.published:,.0f} samples/s published ({row.error:+.0%})"
                for label, row in zip(labels, rows, strict=True)
            ],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    )
    marks = log_ticks([*known["published"], *known["predicted_low"], *known["predicted_high"]])
    result.update_layout(margin={"b": 96})
    result.update_xaxes(
        title="samples a second",
        type="log",
        tickmode="array",
        tickvals=marks,
        ticktext=[f"{mark / 1e6:g} M" for mark in marks],
    )
    result.update_yaxes(
        tickmode="array",
        tickvals=places,
        ticktext=[lines_of(label, 52) for label in labels],
        range=[len(places) - 0.4, -0.8],
        ticklabelstandoff=5,
        showgrid=False,
        zeroline=False,
    )
    return result


def _short(source: str) -> str:
    names = ("TensorFlow2", "PyTorch", "DeepSparkHub", "Kalamkar")
    return next((name for name in names if name in source), source)
