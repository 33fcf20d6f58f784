"""Figures of what the scaling model rests on: bytes, links, stragglers."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.analysis.links import Link
from dlrm_core.figure_axes import add_ends, log_axis, log_ticks
from dlrm_core.figure_theme import COLOURS, DASHES, SYMBOLS, digits, figure, rows_of, thousands
from dlrm_core.scaling_figures import ranks_axis
from dlrm_core.scaling_model_presentation import kind_label

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
    labels = [kind_label(name) for name in names]
    for what, colour in EXCHANGE_COLOURS.items():
        if what not in sums.columns:
            continue
        result.add_trace(
            go.Bar(
                x=sums[what] / totals,
                y=labels,
                orientation="h",
                name=what,
                marker={"color": colour, "line": {"width": 0}},
                customdata=sums[what],
                hovertemplate=(
                    f"%{{y}}, {what}: %{{customdata:,.2f}} MiB, %{{x:.1%}}<extra></extra>"
                ),
            )
        )
    texts = [f"<b>{digits(total)} MiB</b>" for total in totals]
    add_ends(result, [1.0] * len(names), labels, texts)
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
        label = f"{kind_label(kind)}, {ranks} ranks"
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
    result.update_xaxes(
        title="bytes",
        **log_axis(log_ticks(check["bytes"].tolist()), lambda size: thousands(size, "B")),
    )
    result.update_yaxes(title="ms", **log_axis(log_ticks(check["measured_ms"].tolist())))
    return result


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
    result.update_xaxes(**ranks_axis(table["ranks"]))
    result.update_yaxes(title="times as long as even ranks", rangemode="tozero")
    return result
