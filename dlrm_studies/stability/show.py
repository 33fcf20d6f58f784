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
import pandas as pd
import plotly.graph_objects as go

from dlrm_studies.columns import columns_of
from dlrm_studies.stability.measure import NAMES, Stability
from dlrm_workbook.analysis.sentences import in_markdown
from dlrm_workbook.ground.units import known_or
from dlrm_workbook.show.tables import Column, Text, each_row
from dlrm_workbook.show.theme import COLOURS, INK, add_bars, figure, rows_of

UNMEASURED = (
    "Not measured: `dlrm run benchmark -f FILE -p 'stability={seeds: 10}'` trains with ten seeds."
)

SERIES = ("embedding", "bottom_mlp", "data", "interaction", "communication")
"""Components whose colours series take in turn: here they stand for no part."""


def histogram(series: Mapping[str, Stability]) -> go.Figure:
    """How many seeds ended with which AUC (or loss), a colour a series, means as lines.

    Args:
        series: a label to its runs, such as ``fp32`` and ``bf16``; of one metric.

    Raises:
        ValueError: series of different metrics.
    """
    metrics = {stability.metric for stability in series.values()}
    if len(metrics) > 1:
        raise ValueError(f"one figure cannot show {' and '.join(sorted(metrics))}")
    name = NAMES[next(iter(metrics), "auc")]
    result = figure(f"{name} over seeds", 380, legend=len(series) > 1)
    edges = bins([value for stability in series.values() for value in stability.values])
    middles, width = (edges[:-1] + edges[1:]) / 2, edges[1] - edges[0]
    for number, (label, stability) in enumerate(series.items()):
        values = stability.values
        if not values:
            continue
        colour = COLOURS[SERIES[number % len(SERIES)]]
        counts = np.histogram(values, edges)[0]
        add_bars(
            result,
            middles,
            counts.tolist(),
            f"{label} ({len(values)} seeds)",
            colour,
            f"{label}: %{{y}} seeds with {name} from %{{customdata[0]:.6f}} to "
            "%{customdata[1]:.6f}",
            flat=False,
            width=width / len(series) * 0.92,
            offset=width * (number / len(series) - 0.5),
            customdata=np.stack([edges[:-1], edges[1:]], axis=1),
        )
        mean = statistics.fmean(values)
        line_colour = colour if len(series) > 1 else INK
        result.add_vline(x=mean, line={"color": line_colour, "dash": "dash", "width": 1.5})
        result.add_annotation(
            x=mean,
            y=1.0 + 0.07 * number,
            yref="paper",
            text=f"mean {mean:.5f}" if len(series) == 1 else f"{label} {mean:.5f}",
            showarrow=False,
            xanchor="left",
            yanchor="bottom",
            font={"color": INK, "size": 12},
        )
    result.update_layout(barmode="overlay", margin={"t": 60 + 24 * len(series)})
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


def stability_columns(table: pd.DataFrame) -> dict[str, str | Column]:
    """Columns of :func:`stability_table`: memory as many as there are devices."""
    memory = [name for name in table.columns if name.startswith("peak_memory_")]
    return {
        "run": Column("run", "text"),
        "seeds": "seeds",
        "samples_per_second": Column("samples/s", "count"),
        "power_w": Column("power (W)", "measured"),
        "samples_per_joule": Column("samples/J", "measured"),
        **{name: Column(f"peak memory, {name.split('_')[2]}", "bytes") for name in memory},
        "metric": "metric",
        "mean": Column("mean", "quality"),
        "sd": Column("standard deviation", "quality"),
        "least": Column("least", "quality"),
        "most": Column("most", "quality"),
    }


COLUMNS = columns_of(
    "stability", {"difference": each_row(lambda value: known_or(value, "{:+.6f}".format))}
)
SIGNIFICANT = 0.05


def significance_sentence(table: pd.DataFrame) -> Text:
    """Say whether precisions train to different AUCs.

    Args:
        table: what :func:`.measure.precision_table` gives, at least a row.
    """
    sentences = []
    for row in rows_of(table):
        pair = f"{in_markdown(str(row.run))} and {in_markdown(str(row.reference))}"
        if math.isnan(row.p_value):
            sentences.append(f"{pair}: two seeds in both are needed for a test.")
        elif row.p_value < SIGNIFICANT:
            sentences.append(
                f"{pair}: {row.metric} differs by {row.difference:+.6f} (p = {row.p_value:.3g})."
            )
        else:
            most = max(abs(row.difference_low), abs(row.difference_high))
            sentences.append(
                f"{pair}: no difference in {row.metric} was shown (p = {row.p_value:.2g}); "
                f"more than {most:.2g} is unlikely."
            )
    return Text(" ".join(sentences))


def sentence(series: Mapping[str, Stability]) -> Text:
    """What was trained, and how far apart its seeds are."""
    spreads = []
    for label, stability in series.items():
        values = stability.values
        if len(values) > 1:
            spreads.append(
                f"{label}: the largest and the least {NAMES[stability.metric]} of "
                f"{len(values)} seeds differ by {max(values) - min(values):.5f}"
            )
    titles = " and ".join(dict.fromkeys(f"*{in_markdown(one.title)}*" for one in series.values()))
    return Text(f"Trained: {titles}. " + "; ".join(spreads) + ("." if spreads else ""))
