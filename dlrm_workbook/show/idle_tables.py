"""Tables of idle time, launches, overlap, stragglers and two engines, for a reader."""

from __future__ import annotations

import pandas as pd

from dlrm_core.parts import part_label
from dlrm_core.units import known_or, percent
from dlrm_workbook.analysis.steady import SteadyState
from dlrm_workbook.show.gpu_tables import absent
from dlrm_workbook.show.tables import Table, Text, column


def steady_text(state: SteadyState | None) -> Text:
    """Which iterations count, and which do not and why."""
    if state is None:
        return Text("*The profile does not say when its iterations ran.*")
    return Text(state.summary)


def differed_table(table: pd.DataFrame, most: int = 3) -> Table | Text:
    """Iterations that were left out, each with the parts that grew most.

    Args:
        table: what :func:`dlrm_workbook.analysis.attribution.what_differed` gives.
        most: parts shown of each iteration.
    """
    grown = table[table["grew_ms"] > 0] if len(table) else table
    if grown.empty:
        return Text("No iteration had to be left out.")
    grown = grown.groupby("iteration", sort=False).head(most)
    cells = {
        "iteration": grown["iteration"].astype(int).astype(str).tolist(),
        "why left out": grown["why"].tolist(),
        "took, ms": column(grown["time_ms"]),
        "usually, ms": column(grown["usual_ms"]),
        "part": _parts(grown),
        "part took, ms": column(grown["part_ms"]),
        "part usually, ms": column(grown["usual_part_ms"]),
        "share of the growth": list(map(percent, grown["share"])),
    }
    return Table.of(cells)


def idle_table(summary: pd.DataFrame) -> Table | Text:
    """Causes of idle time, from :func:`dlrm_workbook.analysis.idleness.idle_by_cause`."""
    if summary.empty:
        return absent(summary)
    cells = {
        "cause": summary["cause"].tolist(),
        "meaning": summary["meaning"].tolist(),
        "ms an iteration": column(summary["idle_ms"]),
        "of idle time": list(map(percent, summary["share_of_idle"])),
        "of the iteration": list(map(percent, summary["share_of_iteration"])),
        "after a synchronising call, ms": column(summary["after_sync_ms"]),
    }
    return Table.of(cells)


def launches_table(table: pd.DataFrame) -> Table | Text:
    """Launches by part, from :func:`dlrm_workbook.analysis.launches.launches_by_part`."""
    if table.empty:
        return absent(table)
    cells = {
        "part": _parts(table),
        f"launches {table.attrs.get('per', 'an iteration')}": column(table["launches"]),
        "median kernel, us": column(table["kernel_us"]),
        "kernels, ms": column(table["kernel_ms"]),
        "median launch, us": column(table["launch_us"]),
        "shorter than a launch": list(map(percent, table["short_share"])),
    }
    return Table.of(cells)


def launch_text(summary: pd.DataFrame) -> Text:
    """Whether launching sets the pace, from ``launch_summary``."""
    if summary.empty:
        return absent(summary)
    row = summary.iloc[0]
    timed = row["launch_us"] == row["launch_us"]
    if row["launch_bound"]:
        verdict = "**Launch-bound**: the host cannot launch as fast as the GPU finishes."
    else:
        verdict = "Not launch-bound." if timed else "Whether launching is the limit is not known."
    kernels = (
        f"{row['launches']:,.0f} kernels {summary.attrs.get('per', 'an iteration')}, "
        f"{row['launches_per_s']:,.0f} a second; the median kernel runs {row['kernel_us']:.1f} us, "
    )
    cost = (
        f"a launch costs {row['launch_us']:.1f} us, {percent(row['short_share'])} of the kernels "
        "are shorter than that."
        if timed
        else "what a launch costs was not measured."
    )
    queue = (
        f" {row['queue_depth']:.1f} are queued on average; the queue is empty "
        f"{percent(row['empty_share'])} of the time."
        if row["queue_depth"] == row["queue_depth"]
        else " The trace does not say what was queued."
    )
    return Text(f"{verdict} {kernels}{cost}{queue}")


def operators_table(table: pd.DataFrame) -> Table | Text:
    """Operators by part, from :func:`dlrm_workbook.analysis.launches.operator_load`."""
    if table.empty:
        return absent(table)
    cells = {
        "part": _parts(table),
        "operators an iteration": column(table["operators"]),
        "median operator, us": column(table["operator_us"]),
        "operators, ms": column(table["part_ms"]),
        "dispatch, ms": column(table["dispatch_ms"]),
        "dispatch share": [known_or(value, percent) for value in table["dispatch_share"]],
    }
    return Table.of(cells)


def outside_table(table: pd.DataFrame) -> Table | Text:
    """Time outside of operators, from ``idleness.outside_operators``."""
    if table.empty:
        return absent(table)
    cells = {
        "part": _parts(table),
        "part, ms": column(table["part_ms"]),
        "in operators, ms": column(table["operators_ms"]),
        "Python and the like, ms": column(table["outside_ms"]),
        "share outside": [known_or(value, percent) for value in table["outside_share"]],
    }
    return Table.of(cells)


def overlap_table(table: pd.DataFrame) -> Table | Text:
    """Hidden and exposed time, from :func:`dlrm_workbook.analysis.idleness.overlaps`."""
    if table.empty:
        return absent(table)
    cells = {
        "what": table["what"].tolist(),
        "where": table["where"].tolist(),
        "in all, ms": column(table["total_ms"]),
        "hidden, ms": column(table["hidden_ms"]),
        "exposed, ms": column(table["exposed_ms"]),
        "of the iteration": list(map(percent, table["of_iteration"])),
    }
    return Table.of(cells)


def engines_table(table: pd.DataFrame) -> Table:
    """Two engines side by side, from ``engines.engines_side_by_side``."""
    names = [name.removesuffix("_cost_ms") for name in table.columns if name.endswith("_cost_ms")]
    cells = {"part": _parts(table)}
    for name in names:
        cells[f"{name}, ms"] = column(table[f"{name}_ms"])
        if f"{name}_sampled_ms" in table:
            pairs = zip(
                column(table[f"{name}_sampled_ms"]),
                column(table[f"{name}_sampling_error_ms"]),
                strict=True,
            )
            cells[f"{name} sampled, ms"] = [f"{value} ± {error}" for value, error in pairs]
    cells["difference, ms"] = [f"{value:+.3f}" for value in table["difference_ms"]]
    cells["may differ by, ms"] = column(table["error_ms"])
    cells["agree"] = ["yes" if agrees else "no" for agrees in table["agrees"]]
    return Table.of(cells)


def _parts(table: pd.DataFrame) -> list[str]:
    return [
        part_label(component, phase)
        for component, phase in zip(table["component"], table["phase"], strict=True)
    ]
