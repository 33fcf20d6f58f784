"""Speeds by named protocols, ours beside published ones: tables, their columns, and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from dlrm_core.base.text import counted, format_bytes
from dlrm_studies.columns import columns_of
from dlrm_studies.published import published_runs
from dlrm_workbook.ground.units import NOT_MEASURED, NOTHING, digits, known_or, thousands
from dlrm_workbook.show import theme
from dlrm_workbook.show.tables import Formatter, Text, each_row

COUNTED = {
    "steady": "ours: whole iterations, warm-up found in the times",
    "nvidia": "NVIDIA's: whole iterations, the first half left out",
    "facebook": "facebookresearch/dlrm's ms/it: without the making of data",
    "deepspark": "DeepSpark's FPS: without the loader's time",
}
"""Protocol to what it counts."""

GROUPS = {
    "ours": "Contestants of this run, whole iterations",
    "training nvidia": "Training, NVIDIA's protocol",
    "training deepspark": "Training, DeepSpark's FPS",
    "training facebook": "Training, ms/it without data",
    "inference nvidia": "Inference, NVIDIA's protocol, batch 2,048",
}
"""What can be compared, by the ``group`` of :func:`speeds`."""

PUBLISHED_BATCH = 2048
"""Of the published inference."""

# Tables of a record of ``dlrm protocols``, and how they are shown.


def training(document: Mapping[str, Any] | None) -> pd.DataFrame:
    """One training, counted in each protocol's way; without a record no rows.

    Returns:
        Columns as in ``dlrm help columns training``.
    """
    table = pd.DataFrame(document["measured"]["training"] if document else [])
    table["counts"] = [COUNTED[name] for name in table.get("protocol", [])]
    table.attrs["not_measured"] = (
        "`dlrm run benchmark -f FILE -p protocols=60`, or `dlrm protocols`, measures it"
    )
    return table


def latencies(document: Mapping[str, Any] | None) -> pd.DataFrame:
    """Latencies by batch size and protocol, ms; without a record no rows.

    Returns:
        Columns as in ``dlrm help columns latencies``.
    """
    table = pd.DataFrame(document["measured"]["inference"] if document else [])
    table.attrs["not_measured"] = (
        "`dlrm run benchmark -f FILE -p batch_sizes=[1,64,2048]` measures it"
    )
    return table


def power_and_memory(document: Mapping[str, Any] | None) -> pd.DataFrame:
    """Power, samples per joule, and memory of each device: ``quantity`` and ``value``, texts."""
    rows: list[tuple[str, str]] = []
    if document:
        measured = document["measured"]
        for reading in measured["power"]["readings"]:
            rows.append((f"power, {reading['device']}", f"{reading['power_w']:,.1f} W"))
        for device, why in measured["power"]["not_measured"].items():
            rows.append((f"power, {device}", f"{NOT_MEASURED}: {why}"))
        per_watt = measured["samples_per_joule"]
        shown = NOT_MEASURED if per_watt is None else f"{per_watt:,.1f}"
        rows.append(("samples/s per watt", shown))
        for device, size in measured["peak_memory_by_device"].items():
            rows.append((f"peak memory, {device}", format_bytes(size)))
        rows += [
            ("device", device_of(document)),
            ("precision", measured["precision"]),
            ("embeddings' back end", measured["embedding_backend"]),
            ("command", document["command"]),
        ]
    table = pd.DataFrame(rows, columns=["quantity", "value"])
    table.attrs["not_measured"] = "`dlrm run benchmark -f FILE -p protocols=60` measures it"
    return table


def device_of(document: Mapping[str, Any]) -> str:
    """The GPU, or the processor and how many of its threads."""
    measured = document["measured"]
    if measured["device"] != "cpu":
        return str(measured["device"])
    return f"{document['machine'].get('cpu') or 'CPU'}, {counted(measured['threads'], 'thread')}"


def speeds(
    document: Mapping[str, Any] | None,
    contestants: pd.DataFrame,
    stability: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """Our speeds and the published ones, group by group, ours first.

    Args:
        document: of ``dlrm protocols``, if it was measured.
        contestants: of a benchmark: ``on``, ``model``, ``samples_per_second``.
        stability: runs with several seeds, whose mean AUC is ours.

    Returns:
        Columns as in ``dlrm help columns speeds``; what is not known is NaN or empty.
    """
    common = {"ours": True, "source": "this run", "precision": ""}
    rows: list[dict[str, Any]] = [
        common | {"group": "ours", "on": on, "model": model, "samples_per_second": speed}
        for on, model, speed in contestants.itertuples(index=False)
    ]
    if document:
        rows += _measured_speeds(document, stability or {}, common)
    rows += [
        {
            "group": f"{run.mode} {run.protocol}",
            "ours": False,
            "source": f"{run.source.split()[0]} (other hardware)",
            "on": run.hardware,
            "model": run.model + _if_known(run.batch_samples, ", batch {:,.0f}"),
            "memory": _if_known(run.memory_gb, "{:g} GB per device"),
            **{name: getattr(run, name) for name in AS_PUBLISHED},
        }
        for run in theme.rows_of(published_runs())
    ]
    order = list(GROUPS)
    rows.sort(key=lambda r: (order.index(r["group"]), not r["ours"], -r["samples_per_second"]))
    columns = ["group", "ours", "source", "on", "model", "memory", *AS_PUBLISHED]
    table = pd.DataFrame(rows, columns=columns)
    table["memory"] = table["memory"].fillna("")
    return table.astype(dict.fromkeys(AS_PUBLISHED[1:], float))


AS_PUBLISHED = (
    *("precision", "samples_per_second", "latency_ms", "power_w", "auc", "minutes_to_train"),
    "times_cpu",
)
"""Columns of :func:`published_runs` that :func:`speeds` has too."""


def _if_known(value: float, text: str) -> str:
    return "" if math.isnan(value) else text.format(value)


def _measured_speeds(
    document: Mapping[str, Any], stability: Mapping[str, Any], common: Mapping[str, Any]
) -> list[dict[str, Any]]:
    measured, given = document["measured"], document["parameters"]
    seeded = _same_training(document, stability)
    sizes = measured["peak_memory_by_device"].items()
    common = {
        **common,
        "on": device_of(document),
        "precision": measured["precision"],
        "memory": ", ".join(f"{format_bytes(size)} ({device})" for device, size in sizes),
    }
    trained = {"power_w": measured["power_w"], "auc": _mean_auc(seeded)}
    counted_ways = [
        ("training", one, given["training"]["batch_size"], trained) for one in measured["training"]
    ] + [
        ("inference", one, one["batch_size"], {"latency_ms": one["mean"]})
        for one in measured["inference"]
        if one["batch_size"] == PUBLISHED_BATCH
    ]
    return [
        common
        | {
            "group": f"{mode} {one['protocol']}",
            "model": f"{document['title']}, batch {size:,}",
            "samples_per_second": one["samples_per_second"],
        }
        | figures
        for mode, one, size, figures in counted_ways
        if f"{mode} {one['protocol']}" in GROUPS
    ]


def _same_training(document: Mapping[str, Any], stability: Mapping[str, Any]) -> Any:
    """Seeds of the training that was timed (a ``Stability``); None if there are none.

    Another precision, model, or data is another training.
    """
    given, precision = document["parameters"], document["measured"]["precision"]
    for one in stability.values():
        same = all(one.parameters[section] == given[section] for section in ("model", "data"))
        if same and one.parameters["training"]["precision"] == precision:
            return one
    return None


def _mean_auc(seeded: Any) -> float | None:
    return seeded.spreads["auc"]["mean"] if seeded and "auc" in seeded.spreads else None


# DeepSpark's eight columns.

NO_SEEDS = f"{NOT_MEASURED}: -p 'stability={{seeds: 10}}' measures it"
ONE_PROCESS = (
    f"{NOT_MEASURED}: one process ran; dlrm run scaling measures several, and the next benchmark "
    "of the same training finds its record"
)
NOT_PUBLISHED = "not published"


def eight_columns(
    document: Mapping[str, Any] | None, stability: Mapping[str, Any] | None = None
) -> pd.DataFrame:
    """What DeepSpark reports of a run, for ours and for theirs: a row a run.

    Args:
        document: of ``dlrm protocols``, if it was measured.
        stability: series of seeds (``Stability``) by label; those of another precision
            or training than the timed one have rows of their own.

    Returns:
        Columns as in ``dlrm help columns eight_columns``.
    """
    rows: list[dict[str, Any]] = []
    series = dict(stability or {})
    if document:
        seeded = _same_training(document, series)
        series = {label: one for label, one in series.items() if one is not seeded}
        rows.append(_timed_run(document, seeded))
    rows += [_seeded_run(label, one) for label, one in series.items()]
    theirs = published_runs()
    for one in theme.rows_of(theirs[theirs["protocol"] == "deepspark"]):
        batch = _if_known(one.batch_samples, "batch {:,.0f}, ")
        figures = one._asdict() | {"memory_bytes": 1e9 * one.memory_gb}
        rows.append(
            _run_row(
                f"DeepSpark, {one.hardware}",
                one.criterion or NOT_PUBLISHED,
                one.configuration or f"{batch}precision not said",
                {name: (figures[name], NOT_PUBLISHED) for name in OF_A_RUN},
            )
        )
    return pd.DataFrame(rows).astype(dict.fromkeys(OF_A_RUN, float))


OF_A_RUN = ("samples_per_second", "auc", "power_w", "scalability", "memory_bytes", "stability")
"""Columns of :func:`eight_columns` that are figures."""

FigureOrReason = tuple[float | None, str]
"""A figure, and the reason that holds where there is none (None or NaN)."""


def _run_row(
    run: str, criterion: str, configuration: str, figures: Mapping[str, FigureOrReason]
) -> dict[str, Any]:
    unknown = {n: why for n, (figure, why) in figures.items() if figure is None or figure != figure}
    row = {"run": run, "criterion": criterion, "configuration": configuration}
    return row | {name: figure for name, (figure, _) in figures.items()} | {"missing": unknown}


def _timed_run(document: Mapping[str, Any], seeded: Any) -> dict[str, Any]:
    """The training of ``dlrm protocols``, with the AUC of its seeds."""
    measured, training = document["measured"], document["parameters"]["training"]
    speeds = {one["protocol"]: one["samples_per_second"] for one in measured["training"]}
    sizes, scalability = measured["peak_memory_by_device"], document.get("scalability")
    unread = (f"{name}: {reason}" for name, reason in measured["power"]["not_measured"].items())
    return _run_row(
        f"this run, {device_of(document)}",
        f"{len(measured['timings']['compute_ms'])} iterations timed",
        f"torch {document['versions'].get('torch', '')}, batch {training['batch_size']:,}, "
        f"1 process, {measured['precision']}"
        + (f" (scalability: {scalability['ranks']} ranks)" if scalability else ""),
        {
            "samples_per_second": (speeds["deepspark"], ""),
            "power_w": (measured["power_w"], _not_measured(*unread)),
            "memory_bytes": (
                sizes.get("gpu", sizes.get("host")),
                _not_measured("the system does not report it"),
            ),
        }
        | _of_seeds(seeded)
        | {"scalability": (scalability and scalability["efficiency"], ONE_PROCESS)},
    )


def _seeded_run(label: str, seeded: Any) -> dict[str, Any]:
    """A series of seeds whose training was not timed by the protocols."""
    training, spreads = seeded.parameters["training"], seeded.spreads
    # the device's of a run; the host's where no run used a GPU
    peaks = [run["peak_memory_by_device"] for run in seeded.finished]
    sizes = [peak.get("gpu", peak.get("host")) for peak in peaks if peak]
    rate = spreads.get("samples_per_second")
    with_data = f": {rate['mean']:,.0f} samples/s with data" if rate else ""
    iterations = sorted({run["iterations"] for run in seeded.finished})
    unread = {why for run in seeded.runs for why in run["not_measured"].values()}
    return _run_row(
        f"{counted(len(seeded.runs), 'seed')}, {label}",
        " or ".join(f"{count:,} iterations" for count in iterations) or "no run finished",
        f"batch {training['batch_size']:,}, 1 process, {training['precision']}",
        {
            "samples_per_second": (None, f"not counted without data{with_data}"),
            "power_w": (
                spreads.get("power_w", {}).get("mean"),
                "; ".join([NOT_MEASURED, *sorted(unread)]),
            ),
            "memory_bytes": (max(sizes, default=None), _not_measured("no run reported it")),
        }
        | _of_seeds(seeded),
    )


def _of_seeds(seeded: Any) -> dict[str, FigureOrReason]:
    """What only several runs tell; ``seeded`` is None where there are none."""
    finished = len(seeded.finished) / len(seeded.runs) if seeded and seeded.runs else None
    why = NO_SEEDS
    if seeded is not None:
        why = _not_measured("no AUC" if seeded.finished else "no seed finished")
    return {
        "auc": (_mean_auc(seeded), why),
        "scalability": (None, ONE_PROCESS),
        "stability": (finished, NO_SEEDS),
    }


def _not_measured(*reasons: str) -> str:
    return f"{NOT_MEASURED}: {'; '.join(reasons)}" if reasons else NOT_MEASURED


def _or_reason(name: str, text: Callable[[float], str]) -> Formatter:
    """The format of a figure of :func:`eight_columns` whose empty cells hold their reason."""
    return each_row(
        lambda value, missing: known_or(value, text, missing.get(name, NOTHING)), words=True
    )


def _watts(power: float, ours: bool, group: str) -> str:
    reason = NOT_MEASURED if ours and group != "ours" else NOTHING
    return known_or(power, "{:,.0f}".format, reason)


COLUMNS = columns_of(
    "protocols",
    {
        "performance": _or_reason("samples_per_second", digits),
        "accuracy": _or_reason("auc", "{:.4g}".format),
        "power": _or_reason("power_w", digits),
        "scalability": _or_reason("scalability", "{:.2f}".format),
        # in the decimal unit that DeepSpark's figure is read as
        "memory": _or_reason("memory_bytes", lambda size: digits(size / 1e9)),
        "stability": _or_reason("stability", "{:.2f}".format),
        "group": each_row(lambda name: GROUPS[name].removesuffix(", whole iterations"), True),
        "hardware": each_row(lambda on, precision: ", ".join(filter(None, (on, precision))), True),
        "watts": each_row(_watts),
        "auc_or_dash": each_row(lambda value: known_or(value, "{:.4g}".format)),
        "times_cpu": each_row(lambda value: known_or(value, "{:g}x".format)),
    },
)


def sources() -> Text:
    """Where the published figures are from, in full."""
    runs = published_runs()
    named = "; ".join(runs["source"].unique())
    aucs = runs.loc[runs["protocol"] == "nvidia", "auc"]
    study = runs.loc[runs["protocol"] == "facebook", "source"].iloc[0]
    return Text(
        f"Published by: {named}. A dash is what a source does not say. NVIDIA's throughputs are "
        f"means of 1,000 steps; its trainings on Criteo Terabyte end with AUC {aucs.min():g} to "
        f"{aucs.max():g} in the time to train; its comparison with CPUs is of the extra large "
        "model and names no precision. Power is of all devices together. DeepSpark does not say "
        f"how it counts stability. The two figures of {study.split(' (')[0]} could not be checked "
        "against the paper."
    )


# Figures.

QUANTILES = {"p99": 1.2, "p95": 1.6, "p90": 2.0, "p50": 3.0}
"""Percentile to the width of its line."""


def latency_lines(table: pd.DataFrame) -> go.Figure:
    """Percentiles of an inference step over its batch size; both axes are logarithmic.

    Args:
        table: what :func:`latencies` gives.
    """
    table = table[table["protocol"] == "nvidia"]
    result = theme.figure("Latency of a prediction, by batch size", 400, legend=True)
    sizes = table["batch_size"].tolist()
    for name, width in QUANTILES.items():
        hover = f"batch %{{x:,}}: {name} %{{y:.3f}} ms"
        look = theme.line_look(theme.COLOURS["bottom_mlp"], width=width)
        theme.add_points(result, sizes, table[name], name, hover, **look)
    theirs = published_runs().dropna(subset=["latency_ms"])
    theme.add_points(
        result,
        theirs["batch_samples"],
        theirs["latency_ms"],
        "published mean, other hardware",
        "%{customdata}, batch %{x:,}: mean %{y:.2f} ms",
        marker={"color": theme.COLOURS["other"], "symbol": "diamond", "size": 9},
        customdata=theirs["hardware"] + ", " + theirs["precision"],
    )
    marks = sorted({*sizes, PUBLISHED_BATCH})
    result.update_xaxes(title="batch size", **theme.log_axis(marks, "{:,}".format))
    result.update_yaxes(type="log", title="ms", dtick="D2", tickformat="~g")
    return result


def published_bars(table: pd.DataFrame) -> go.Figure:
    """Ours beside published speeds of other hardware, in groups counted the same way.

    Args:
        table: what :func:`speeds` gives.
    """
    places, headings = theme.in_groups(GROUPS[group] for group in table["group"])
    placed = table.assign(place=places)
    height = 190 + 30 * (len(table) + len(headings))
    result = theme.figure("Samples per second, beside other hardware's", height, legend=True)
    for ours, name, colour in (
        (True, "this run, this machine", theme.COLOURS["top_mlp"]),
        (False, "published: other hardware, mostly other models", theme.COLOURS["other"]),
    ):
        rows = placed[placed["ours"] == ours]
        theme.add_bars(
            result,
            rows["samples_per_second"],
            rows["place"],
            name,
            {"color": colour},
            "%{customdata}: %{x:,.0f} samples/s",
            width=0.72,
            text=list(map(thousands, rows["samples_per_second"])),
            textposition="outside",
            cliponaxis=False,
            customdata=rows["on"] + ": " + rows["model"],
        )
    values = table["samples_per_second"]
    first, last = math.floor(math.log10(values.min())), math.log10(values.max()) + 0.7
    marks = [10.0**power for power in range(first, math.ceil(last))]
    result.update_xaxes(
        title="samples per second", range=[first, last], **theme.log_axis(marks, thousands)
    )
    theme.label_rows(result, [_label(row) for row in theme.rows_of(table)], places)
    theme.add_headings(result, headings)
    return result


def _label(row: Any) -> str:
    if row.ours:
        return theme.lines_of(
            f"ours, {row.precision}" if row.precision else f"{row.on}, {row.model}", 40
        )
    precision = f", {row.precision}" if row.precision else ""
    return theme.lines_of(f"{row.on}, {row.model.split(', batch')[0]}{precision}", 40)
