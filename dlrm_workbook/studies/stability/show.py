"""Runs with N seeds as a figure and as tables: how AUC scatters, power, memory, stability.

The histogram is the kind of NVIDIA's Figure 4 (DLRM for PyTorch, "Training stability
test"); the table has the columns by which DeepSpark lists a run: throughput, power, memory
and stability.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from dlrm_core.units import NOT_MEASURED, format_bytes, known_or
from dlrm_workbook.show.tables import Table, Text
from dlrm_workbook.show.theme import COLOURS, INK, figure
from dlrm_workbook.studies.stability.measure import Spread, Stability

SERIES = ("embedding", "bottom_mlp", "data", "interaction", "communication")
"""Components whose colours series take in turn: here they stand for no part."""

NAMES = {"auc": "AUC", "loss": "loss"}


def histogram(found: Mapping[str, Stability]) -> go.Figure:
    """How many seeds ended with which AUC (or loss), a colour a series, means as lines.

    Args:
        found: a label to its runs, such as ``fp32`` and ``bf16``; of one metric.

    Raises:
        ValueError: series of different metrics.
    """
    metrics = {stability.metric for stability in found.values()}
    if len(metrics) > 1:
        raise ValueError(f"one figure cannot show {' and '.join(sorted(metrics))}")
    name = NAMES[next(iter(metrics), "auc")]
    result = figure(f"{name} over seeds", 380, legend=len(found) > 1)
    edges = bins([value for stability in found.values() for value in stability.values])
    middles, width = (edges[:-1] + edges[1:]) / 2, edges[1] - edges[0]
    for number, (label, stability) in enumerate(found.items()):
        values = stability.values
        if not values:
            continue
        colour = COLOURS[SERIES[number % len(SERIES)]]
        counts = np.histogram(values, edges)[0]
        result.add_trace(
            go.Bar(
                x=middles,
                y=counts,
                width=width / len(found) * 0.92,
                offset=width * (number / len(found) - 0.5),
                name=f"{label} ({len(values)} seeds)",
                marker={"color": colour, "line": {"width": 0}},
                customdata=np.stack([edges[:-1], edges[1:]], axis=1),
                hovertemplate=f"{label}: %{{y}} seeds with {name} from %{{customdata[0]:.6f}} to "
                "%{customdata[1]:.6f}<extra></extra>",
            )
        )
        mean = statistics.fmean(values)
        result.add_vline(
            x=mean,
            line={"color": colour if len(found) > 1 else INK, "dash": "dash", "width": 1.5},
        )
        result.add_annotation(
            x=mean,
            y=1.0 + 0.07 * number,
            yref="paper",
            text=f"mean {mean:.5f}" if len(found) == 1 else f"{label} {mean:.5f}",
            showarrow=False,
            xanchor="left",
            yanchor="bottom",
            font={"color": INK, "size": 12},
        )
    result.update_layout(barmode="overlay", margin={"t": 60 + 24 * len(found)})
    result.update_xaxes(title=name, tickformat=".5f", nticks=7, separatethousands=False)
    highest = max((max(trace.y) for trace in result.data), default=1)
    every = max(1, math.ceil(highest / 5))  # whole seeds only
    result.update_yaxes(title="seeds", rangemode="tozero", tickformat="d", dtick=every)
    return result


def bins(values: Sequence[float]) -> np.ndarray:
    """Edges of equal bins: Sturges' number, at least 5, with room for all values.

    Of values that are all alike, bins of a millionth around them.
    """
    if not values:
        return np.linspace(0.0, 1.0, 6)
    low, high = min(values), max(values)
    count = max(5, math.ceil(math.log2(len(values)) + 1))
    # linspace's last edge may be a rounding below the most
    room = max((high - low) * 1e-6, abs(high) * 1e-6, 1e-12)
    return np.linspace(low - room, high + room, count + 1)


def stability_table(found: Mapping[str, Stability]) -> Table:
    """A row a series: throughput, power, memory of each device, and spread of AUC or loss."""
    devices = sorted(
        {
            name.removeprefix("peak_memory_bytes_")
            for stability in found.values()
            for name in stability.spreads
            if name.startswith("peak_memory_bytes_")
        },
        reverse=True,
    )
    columns = [
        "run",
        "seeds",
        "samples/s",
        "power (W)",
        "samples/J",
        *(f"peak memory, {device}" for device in devices),
        "metric",
        "mean",
        "standard deviation",
        "least",
        "most",
    ]
    rows = []
    for label, stability in found.items():
        spreads = stability.spreads
        quality = spreads.get(stability.metric)
        memory = [spreads.get(f"peak_memory_bytes_{device}") for device in devices]
        rows.append(
            [
                label,
                f"{len(stability.finished)} of {len(stability.runs)}",
                _mean(spreads.get("samples_per_second"), ",.0f"),
                _mean(spreads.get("power_w"), ",.1f"),
                _mean(spreads.get("samples_per_joule"), ",.1f"),
                *(format_bytes(m.most) if m is not None else NOT_MEASURED for m in memory),
                NAMES[stability.metric],
                _mean(quality, ".6f"),
                known_or(quality.sd if quality else None, "{:.6f}".format),
                known_or(quality.least if quality else None, "{:.6f}".format),
                known_or(quality.most if quality else None, "{:.6f}".format),
            ]
        )
    return Table(columns, rows)


def sentence(found: Mapping[str, Stability]) -> Text:
    """What was trained, and how far apart its seeds are."""
    said = []
    for label, stability in found.items():
        values = stability.values
        if len(values) > 1:
            said.append(
                f"{label}: the largest and the least {NAMES[stability.metric]} of "
                f"{len(values)} seeds differ by {max(values) - min(values):.5f}"
            )
    titles = " and ".join(dict.fromkeys(f"*{one.title}*" for one in found.values()))
    return Text(f"Trained: {titles}. " + "; ".join(said) + ("." if said else ""))


def runs_table(stability: Stability) -> Table:
    """A row a seed; of a run that failed, what it said."""
    rows = []
    for run in stability.runs:
        rows.append(
            [
                str(run.seed),
                run.status if not run.error else f"{run.status}: {run.error}",
                known_or(run.auc, "{:.6f}".format),
                known_or(run.loss, "{:.6f}".format),
                known_or(run.samples_per_second, "{:,.0f}".format),
                known_or(run.power_w, "{:,.1f}".format, NOT_MEASURED),
            ]
        )
    return Table(["seed", "status", "AUC", "loss", "samples/s", "power (W)"], rows)


def _mean(spread: Spread | None, kind: str) -> str:
    return NOT_MEASURED if spread is None else format(spread.mean, kind)
