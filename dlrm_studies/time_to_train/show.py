"""Time to train as a table, a curve and a sentence."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_studies.columns import columns_of
from dlrm_workbook.analysis.sentences import in_markdown
from dlrm_workbook.ground.units import duration
from dlrm_workbook.show import theme
from dlrm_workbook.show.tables import Text

NO_TARGET = (
    "Not measured: `dlrm run benchmark -f FILE -p 'time_to_train={auc: 0.8025}'` trains until the "
    "test AUC reaches it."
)

COLUMNS = columns_of("time_to_train", {})


def auc_curve(evaluations: pd.DataFrame) -> go.Figure:
    """Test AUC over the time since training began, and the target as a line.

    Args:
        evaluations: what :func:`.measure.auc_by_time` gives, at least a row.
    """
    target = evaluations["target_auc"].iloc[0]
    result = theme.figure("AUC over the time of training", 340)
    theme.add_points(
        result,
        evaluations["time_s"],
        evaluations["auc"],
        "test AUC",
        "after %{x:.1f} s (iteration %{customdata:,}): AUC %{y:.5f}",
        customdata=evaluations["iteration"],
        **theme.line_look(theme.COLOURS["embedding"]),
    )
    result.add_hline(y=target, line={"color": theme.INK, "dash": "dash", "width": 1.5})
    result.add_annotation(
        x=0.0,
        xref="paper",
        y=target,
        text=f"target {target:g}",
        showarrow=False,
        xanchor="left",
        yanchor="bottom",
        font={"color": theme.INK, "size": 12},
    )
    result.update_xaxes(title="s", rangemode="tozero")
    result.update_yaxes(title="AUC", tickformat=".4f", separatethousands=False)
    return result


def target_sentence(record: dict[str, Any] | None) -> Text | None:
    """Say whether the target was reached, and name what could not be measured."""
    if record is None:
        return None
    result, target = record["result"], record["target"]
    took = f"after {duration(result['elapsed_s'])} and {result['samples']:,} samples"
    text = f"AUC {target:g} was reached {took}."
    if not result["reached_target"]:
        best = result["best_auc"]
        what = "no evaluation had an AUC" if best is None else f"the best AUC was {best:.5f}"
        text = f"AUC {target:g} was not reached: {what} when training ended {took}."
    if result["power"]["energy_j"] is None:
        missing = result["power"]["not_measured"].items()
        why = "; ".join(f"{name}: {reason}" for name, reason in missing)
        text += f" Energy was not measured ({in_markdown(why)})."
    if record["price_per_hour"] is None:
        text += " Its cost is not known: `time_to_train` takes the machine's `price_per_hour`."
    return Text(text)
