"""What the ``explore`` notebook shows: a flat view as bars, and lists to choose from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.parts import part_label
from dlrm_workbook.ground.units import digits
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.show.tables import function_name, table_bars
from dlrm_workbook.show.theme import colour_of, components_of

if TYPE_CHECKING:
    import ipywidgets

MOST_BARS = 15
"""Bars that a view is drawn with, the first rows."""


def flat_bars(view: pd.DataFrame, part: str) -> go.Figure:
    """The largest own values of one part's functions and operators over the whole recording, by
    :func:`~dlrm_workbook.analysis.views.flat`."""
    metric, unit = view.attrs["metric"], view.attrs["unit"]
    return table_bars(
        view[view["exclusive"] > 0].head(MOST_BARS),
        f"{metric} within {part_label(part, '')}",
        f"{metric}, without callees{f' ({unit})' if unit else ''}",
        "exclusive",
        lambda row: function_name(row.name),
        text=lambda value: f"{digits(value)} {unit}",
        marker={"color": colour_of(part)},
    )


def selectors(
    runs: Mapping[str, str],
    open_profile: Callable[[str], Profile],
    draw: Callable[[Profile, str, str], Any],
) -> ipywidgets.VBox:
    """Lists of runs, parts and metrics; below them what ``draw`` makes of the choice.

    Args:
        runs: label to place, the first of which is chosen at first.
        open_profile: opens a place; a run that was just shown is not opened again.
        draw: is given the profile, a component and a metric; its figure or table is shown.
    """
    import ipywidgets
    from IPython.display import display

    opened = functools.lru_cache(maxsize=2)(open_profile)
    run = ipywidgets.Dropdown(options=list(runs.items()), description="run")
    part = ipywidgets.Dropdown(description="part")
    metric = ipywidgets.Dropdown(description="metric")
    shown = ipywidgets.Output()

    def offer(_change: Any = None) -> None:
        """Offer the parts and metrics of the run, those chosen before first if it has them."""
        shown.clear_output(wait=True)
        with shown:
            profile = opened(run.value)
            held = set(profile.contexts["component"])
            _set(part, [name for name in components_of(held) if name in held])
            _set(metric, [name for name in profile.metrics["metric"] if profile.has(name)])
        redraw()

    def redraw(_change: Any = None) -> None:
        shown.clear_output(wait=True)
        with shown:
            display(draw(opened(run.value), part.value, metric.value))

    offer()
    run.observe(offer, "value")
    part.observe(redraw, "value")
    metric.observe(redraw, "value")
    # a page has no kernel: there this sentence is what is left of the lists
    hint = ipywidgets.Label("Choose a run, a part and a metric (in JupyterLab).")
    return ipywidgets.VBox([hint, ipywidgets.HBox([run, part, metric]), shown])


def _set(choice: ipywidgets.Dropdown, options: list[str]) -> None:
    """Offer other options; the one that is chosen stays so, if it is among them, else the first."""
    before = choice.value
    choice.options = options
    choice.value = before if before in options else options[0]
