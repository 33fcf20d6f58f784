"""Writes ``docs/results.md`` from ``benchmarks/results/*.json``: python benchmarks/page.py.

Every figure on that page comes from a file. What the files do not hold, above all what else
ran on the machine, are the sentences below the headings.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dlrm_studies.bench import analyse
from dlrm_workbook.evidence.contestants import FIGURES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"

Document = Mapping[str, Any]


def read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return document


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table; numbers have three digits or more, an absent one is an empty cell."""
    titles = head.split(", ")
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(cell, row))} |" for row in rows)])


def picked(rows: Iterable[Document], columns: Mapping[str, str | Callable[[Any], object]]) -> str:
    """A table of documents: a column's title to a key, or to what makes its cell."""
    made = (
        [row.get(get) if isinstance(get, str) else get(row) for get in columns.values()]
        for row in rows
    )
    return table(", ".join(columns), made)


def cell(value: object) -> str:
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, float):
        return "" if value != value else three(value)
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def three(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def interval(mid: float, low: float, high: float) -> str:
    """The middle, and the ends where there was more than one round."""
    ends = f" ({three(low)} to {three(high)})" if low < high else ""
    return "" if mid != mid else f"{three(mid)}{ends}"


def measured(name: str, part: str = "") -> str:
    """Where a section's figures come from: file, date, processor, command."""
    document = read(name)
    one = document[part] if part else document
    commands = one.get("command") or one.get("commands") or document.get("command") or ""
    command = commands if isinstance(commands, str) else commands[0]
    machine = one.get("machine") or document.get("machine") or {}
    processor = machine.get("cpu") or machine.get("processor") or ""
    words = [f"`{name}.json`", one.get("date"), processor, f"`{command}`" if command else ""]
    more = (
        f" and {len(commands) - 1} more" if not isinstance(commands, str) and commands[1:] else ""
    )
    return ", ".join(filter(None, words)) + f"{more}."


def steps(name: str) -> str:
    """Speed-ups over facebookresearch/dlrm, and the share of the bare work."""
    document = analyse.read_benchmark(RESULTS / f"{name}.json")
    keys = ["case", "threads", "contestant"]
    ratios = analyse.ratios(document).set_index(["figure", *keys])
    bare = analyse.reached(document).set_index(keys)["share"]
    rows = []
    for key, step in ratios.loc["step_ms"].iterrows():
        whole = ratios.loc[("end_to_end_ms", *key)]
        ends = ["mid", "low", "high"]
        share = f"{bare[key]:.0%}" if key in bare.index else ""
        rows.append([*key, step["rounds"], interval(*step[ends]), step["goal"], share])
        rows[-1].append(interval(*whole[ends]))
    head = "shape, threads, contestant, rounds, step, goal, bare work of the step, end to end"
    return table(head, rows)


def shares(name: str) -> str:
    """Parts beside bare products and rows, timed in turns in one process."""
    columns = {"shape": "case", "contestant": "contestant", "threads": "threads", "part": "what"}
    columns |= {"part (ms)": "ms", "limit (ms)": "ceiling_ms"}
    share = {"share": lambda row: f"{row['share']:.0%}" if "share" in row else ""}
    return picked(read(name)["shares"], columns | share)


def growth() -> str:
    rows = []
    for case in analyse.judged(read("step"), "growth"):
        of = {name: case["ratios"][name] for name in ("fp32", "bf16")}
        speeds = [one[figure]["mid"] for figure in FIGURES for one in of.values()]
        rows += [[quantity, int(value), *speeds] for quantity, value in case["points"].items()]
    head = "along, value, step fp32, step bf16, end to end fp32, end to end bf16"
    return table(head, sorted(rows, key=lambda row: (row[0], row[1])))


def options(name: str) -> str:
    document = analyse.read_benchmark(RESULTS / f"{name}.json")
    rungs = analyse.ladder(document)
    rungs = rungs[rungs["figure"].eq("end_to_end_ms")]
    rows = zip(rungs["leaf"].replace("", "plain"), rungs["value"], rungs["time_ms"], strict=True)
    return table("option added to those above, value, ms per iteration", rows)


def embeddings(name: str) -> str:
    """A row for each case: ms of every contestant, and the speed-up of ours over each."""
    cases = read(name)["cases"]
    contestants = list(dict.fromkeys(one for case in cases for one in case["contestants"]))
    beaten = [one for one in contestants if one not in (*OURS, "memory", "memory bf16")]
    rows = []
    for case in cases:
        times = [case["contestants"].get(one, {}).get("total_ms") for one in contestants]
        ours = next(one for one in OURS if one in case["contestants"])
        goals = {one["against"]: f", goal {one['wanted']:g}" for one in case.get("targets") or []}
        gains = {one: case["ratios"][ours].get(one) for one in beaten}
        shown = [
            gain and interval(gain["median"], gain["low"], gain["high"]) + goals.get(one, "")
            for one, gain in gains.items()
        ]
        rows.append([case["case"], case["threads"], *times, *shown])
    faster = [f"faster than {one}" for one in beaten]
    return table(", ".join(["case", "threads", *contestants, *faster]), rows)


OURS = ("fused bf16", "fused", "race_free")


def what_if() -> str:
    document = read("whatif")
    names = {
        "first": "changes that the model was made with",
        "second": "changes chosen afterwards",
        "together": "whole steps under changes put together",
    }
    summary = picked(
        [{"set": names[key]} | one for key, one in document["summary"].items()],
        {
            "set": "set",
            "predictions": "cases",
            "error (geometric mean)": lambda one: f"{one['geomean_error']:.1%}",
            "worst": lambda one: f"{one['worst_error']:.1%}",
            "inside the range": lambda one: f"{one['covered']:.0%}",
        },
    )
    cases = picked(
        document["cases"],
        {
            "set": "set",
            "shape": lambda row: row["shape"].partition(":")[0],
            "change": "change",
            "before": "baseline_ms",
            "predicted": "predicted_ms",
            "range": lambda row: f"{row['low_ms']:.1f} to {row['high_ms']:.1f}",
            "measured": "measured_ms",
            "error": lambda row: f"{row['error']:+.1%}",
        },
    )
    return f"{summary}\n\n{cases}"


def planted() -> str:
    rows: list[list[object]] = []
    for name in ("planted_faults", "planted_faults_again", "planted_faults_500"):
        one = read(name)
        first = f"{one['named_first']} of {one['faulty_trials']}"
        rows.append([f"`{name}`", first, f"{one['false_alarms']} of {one['clean_trials']}"])
    return table("file, planted fault first, false alarms in clean runs", rows)


def gpu_faults() -> str:
    def of(tally: Document, start: str, key: str, total: str = "trials") -> str:
        chosen = [one for name, one in tally.items() if name.startswith(start) and key in one]
        counts = f"{sum(one[key] for one in chosen)} of {sum(one[total] for one in chosen)}"
        return counts if chosen else ""

    rows = []
    for file in sorted(RESULTS.glob("gpu_faults*.json")):
        tally = read(file.stem)["tally"]
        small = of(tally, "small", "first")
        named = of(tally, "small", "named")
        alarms = of(tally, "clean", "false_alarms")
        accepted = of(tally, "controls", "first_accepted", "recordings")
        rows.append([f"`{file.stem}`", of(tally, "large", "first"), small, named, alarms, accepted])
    return table(
        "file, large fault first, small fault first, small and listed, false alarms, "
        "unedited recordings with a right first finding",
        rows,
    )


def diagnosed() -> str:
    document = read("diagnose")
    counts = ", ".join(f"{count} {word}" for word, count in document["tally"].items())
    rows = [
        [f"`{one['recording']}`", one["judgement"], one["answer"]] for one in document["trials"]
    ]
    other = "\n\n".join(map(judged, read("foreign")))
    return f"{counts}.\n\n{table('recording; headline; answer'.replace(';', ','), rows)}\n\n{other}"


def judged(collected: dict[str, Any]) -> str:
    """How often the verdict on recordings that were collected afterwards was right."""
    first, again = (
        ", ".join(f"{count} {word}" for word, count in collected[turn].items())
        for turn in ("first", "again")
    )
    wrong = "; ".join(f"{name}: {why}" for name, why in collected["wrong_at_first"].items())
    by = collected.get("by", "somebody who had not read the rules")
    return (
        f"{collected['recordings']} more ({collected['origins']}), {collected['date']}, by {by}, "
        "with answers written from raw events first; a cause "
        f"with a false figure counted as partly right: **{first}**. Wrong: {wrong}. What was found "
        f"was mended by general rules; judged again by their authors: {again}."
    )


def programs() -> str:
    """How often each set's faults came first and its other programs had none, how near the shares
    said are to the stopwatch's, and which faults did not come first."""
    truth, sets = read("programs_truth"), pd.read_json(RESULTS / "programs.json")
    sets["true"] = [truth.get(name, {}).get("share", math.nan) for name in sets["program"]]
    rows, missed = [], []
    for name, programs in sets.groupby("half", sort=False):
        has_fault = programs["cause"].astype(bool)
        timed = programs[has_fault & programs["right"] & programs["true"].notna()]
        near = (timed["share_said"] / timed["true"]).between(1 / NEAR, NEAR).sum()
        first, none = _right("programs.json", str(name)), _right("programs.json", str(name), False)
        rows.append([f"`{name}`", first, none, f"{near} of {len(timed)}" if len(timed) else ""])
        unseen = programs[has_fault & ~programs["right"]]
        missed += [f"- `{name}`, `{one.program}`: {one.cause}" for one in unseen.itertuples()]
    head = "set, faults put first, no fault and none said, shares within 20 % of the stopwatch"
    return "\n".join([table(head, rows), "", "Not put first:", "", *missed])


NEAR = 1.2

FIRST_RUNS = ("veiled", "shaded", "hooded", "cloaked", "mantled", "curtained")
"""Sets of programs of which the results are those of their first runs."""


def _right(file: str, half: str, with_fault: bool = True) -> str:
    rows = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    rows = [one for one in rows if one["half"] == half and bool(one["cause"]) == with_fault]
    return f"{sum(one['right'] for one in rows)} of {len(rows)}"


def tried() -> str:
    """Remedies tried on a running program, beside the same change in its source."""
    rows = []
    for one in read("trials")["cases"]:
        ends = [interval(*(each[end] for end in ("mid", "low", "high"))) for each in one["trials"]]
        changed = one["stopwatch"]
        rows.append([f"`{one['program']}`", one["remedy"], ", ".join(ends)])
        rows[-1].append(interval(*(changed[end] for end in ("mid", "low", "high"))))
    return table("program, remedy, tried, in the source", rows)


def scaling() -> str:
    rows = []
    for name, case in read("scaling")["cases"].items():
        for run in case["runs"]:
            rows.append([name, *(run[key] for key in SCALING)])
    return table(", ".join(["configuration", *SCALING]), rows)


def hosts() -> str:
    document = read("hosts")
    links = picked(
        document["links"],
        {
            "Gbit/s asked": "gbit_per_s",
            "delay asked (ms)": "delay_ms",
            "round trip (ms)": "round_trip_ms",
            "TCP stream (Gbit/s)": "stream_gbit_per_s",
            "scaling": "scaling",
            "measured (ms)": "measured_ms",
            "low": "low_ms",
            "predicted": "predicted_ms",
            "high": "high_ms",
            "error": lambda row: f"{row['error']:+.0%}" if "error" in row else row["not_measured"],
        },
    )
    lost = picked(
        document["lost"],
        {
            "lost": "lost",
            "ranks ended after (s)": "ranks_ended_after_s",
            "launchers left after a minute": "torchrun_left",
            "the first host's rank said": lambda row: row["said"][0],
            "resumed at iteration": "resumed_at",
            "then": "status",
        },
    )
    return f"{links}\n\n{lost}"


def ratios_of_parts(of: Mapping[str, list[float]]) -> str:
    rows = ([part, statistics.median(all_), min(all_), max(all_)] for part, all_ in of.items())
    return table("part, median, least, most", rows)


def flat(document: Document, prefix: str = "") -> Iterable[tuple[str, object]]:
    """Every single figure of a document under its dotted name; lists of runs are left out."""
    for name, value in document.items():
        if isinstance(value, Mapping) and name not in (
            "machine",
            "versions",
            "model",
            "parameters",
        ):
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value
        elif name in ("faults", "left_over"):
            yield f"{prefix}{name}", len(value)


def figures(document: Document) -> str:
    return table("figure, value", flat(document))


def series(rows: Iterable[Document]) -> str:
    return picked(
        [one | {"all": [*dict(one["auc"]).values()]} for one in rows],
        {
            "series": "series",
            "seeds": lambda one: len(one["all"]),
            "AUC (mean)": lambda one: f"{one['mean']:.5f}",
            "standard deviation": lambda one: f"{one['standard_deviation']:.5f}",
            "least": lambda one: f"{min(one['all']):.5f}",
            "most": lambda one: f"{max(one['all']):.5f}",
        },
    )


def databases() -> str:
    document = read("database")
    sizes = {"contexts": "contexts", "threads": "threads", "values": "values"}
    sizes |= {"s": "seconds_median", "peak (GB)": "peak_gb"}
    sizes |= {"hpcanalysis (s)": "hpcanalysis_seconds", "its peak (GB)": "hpcanalysis_peak_gb"}
    peers = {"database": "database", "contexts": "contexts", "values": "values"}
    peers |= {"values that differ": "values_that_differ", "ours": "ours_ms_median"}
    peers |= {"hpcanalysis": "hpcanalysis_ms_median", "ours is faster by": "speedup_median"}
    tables = [
        picked([*document["at_scale"], *document["many_threads"]], sizes),
        picked(document["against_hpcanalysis"], peers | {"least": "speedup_least"}),
        figures({"hatchet": document["against_hatchet"]}),
    ]
    return "\n\n".join(tables)


SCALING = ("ranks", "batch_size", "sharding", "measured_ms", "low_ms", "predicted_ms", "high_ms")


def sections() -> Iterable[tuple[str, str, str]]:
    """Heading, sentences and tables of every section."""
    yield (
        "Steps against facebookresearch/dlrm",
        f"{measured('step')} All contestants run in turns, each in a fresh process; a ratio is the "
        "median of the rounds' own ratios, with an interval of order statistics. *Bare work* is "
        "the share of our step that the bare matrix products and row accesses of the same rounds "
        "take. A ratio depends on the processor (where a plain library is near the limit it is "
        "small); the share does not. Nothing else was measured beside it. Something outside "
        "disturbed one run of facebook's in `8x1M-100` (665 ms instead of 441 to 465), which is "
        "the upper end of that row's intervals. At batch 16,384 the dense part is computed 4,096 "
        "rows at a time, whose activations probably fit the caches better than those of the bare "
        "products.",
        steps("step"),
    )
    yield (
        "Parts against the limits of the machine",
        "From `step.json`: the dense part beside its matrix products, the embeddings beside bare "
        "accesses to the rows of their batch, in turns in one process.",
        shares("step"),
    )
    yield (
        "How the speed-up of a step and of an iteration grows with size",
        "From `step.json`: over facebookresearch/dlrm, from batch 2,048, 8 tables of 250,000 "
        "rows, 64 wide, up to 10 indices.",
        growth(),
    )
    yield "What each option brings", "From `step.json`.", options("step")
    yield (
        "A processor with matrix tiles",
        f"{measured('step_xeon_amx')} An earlier version, which did not time the bare work "
        "and held embeddings against random rows gathered by torch's embedding_bag.",
        f"{steps('step_xeon_amx')}\n\n{shares('step_xeon_amx')}",
    )
    yield (
        "fp16 where the processor has no instruction for it",
        f"{measured('fp16')} torch computes the products of gradients and weights in a plain loop.",
        steps("fp16"),
    )
    yield "Kalamkar et al.'s Small", measured("kalamkar_small"), options("kalamkar_small")
    yield (
        "Embeddings: forward, backward and update",
        f"{measured('embeddings')} A case is the optimiser and the lookups per bag of a batch of "
        "2,048 (8 tables of 1,000,000 rows, 64 wide); `skewed`: rows by a power law (1.45); "
        "`reuse`: rows used again as in production; `bf16`: ours stores rows in 2 bytes. *memory* "
        "only reads and writes the same rows. The last-level cache is flushed before each "
        "iteration.",
        embeddings("embeddings"),
    )
    xeon = "embeddings_xeon_amx"
    yield "Embeddings on the Xeon", measured(xeon), embeddings(xeon)
    yield "Generators of batches", measured("generators"), figures(read("generators"))
    yield "Allocator settings", measured("allocator"), figures(read("allocator")["cases"])
    yield (
        "Predicted against measured",
        f"{measured('whatif')} *Predicted* comes from a fresh process that records a profile of "
        "the baseline and probes the change; *measured* is the baseline times the median ratio of "
        "fresh processes in turns.",
        what_if(),
    )
    yield (
        "Scaling, predicted against measured",
        f"{measured('scaling')} A prediction uses the link and processes measured alone, nothing "
        "from the runs. The last configuration ran beside other work, at the highest priority.",
        f"{scaling()}\n\n{figures(read('scaling')['one_process'])}",
    )
    yield (
        "Two hosts",
        f"{measured('hosts')} Two network namespaces of one machine, a rank in each, joined by a "
        "veth pair (`tc tbf`) or, where a delay was asked for and the kernel had no netem, by a "
        "relay in user space. Each prediction uses the link and processes measured alone in the "
        "same launch. Other programs kept both cores busy meanwhile, so a link of 25 Gbit/s was "
        "never full; times of two rows cannot be compared, a prediction with its own row can.",
        hosts(),
    )
    yield (
        "Faults planted in trainings on a CPU",
        f"{measured('planted_faults')} Trials that other programs disturbed are left out. The "
        "files are in the order of their runs; after the second a rule was changed because of its "
        "alarm. In the third one fault had no finding; a trial ended after 100 s is not counted.",
        planted(),
    )
    yield (
        "Faults planted in recordings of GPUs",
        "The sets' letters say in which order they were run. B, C, D, F, G and H are by authors "
        "who had not read the rules; the file of a set is its first run, before a rule was changed "
        "because of it, so it shows what the rules do with unforeseen faults. The other files "
        "repeat faults that the rules were changed for; of set A (`gpu_faults`) the first run was "
        "not kept: 68 of 83 large ones first, 16 of 20 small ones, 1 false alarm in 30.",
        gpu_faults(),
    )
    yield (
        "Other people's recordings whose cause is known",
        "`make diagnose` holds the headline of each against what its owners state or its raw "
        "events show (`benchmarks/labelled.yaml`). Rules were mended with these answers in sight.",
        diagnosed(),
    )
    yield (
        "Other people's programs, with one fault each or none",
        "`programs.json`, `programs_truth.json`, `python benchmarks/programs.py --judge`, without "
        "trials. *Right*: the fault's line, or the code to write, comes first; of a program "
        "without a fault, no bottleneck is said. The rules were made with `opened` in sight, and "
        "then changed for what the first runs of the others had missed. Rows of `veiled`, "
        "`shaded`, `hooded`, `cloaked`, `mantled` and `curtained` are first runs, of programs the "
        "rules had not seen (of `cloaked` the second, with the same rules: beside the first one "
        "other work ran; of `mantled` three with half and six with all of a mend of the sampler "
        "that two of the first eleven had asked for, four of them for the second time; of "
        "`curtained`, `organza` is the third, since other work ran beside two): "
        + ", ".join(_right("programs.json", half) for half in FIRST_RUNS)
        + " faults, "
        + ", ".join(_right("programs.json", half, with_fault=False) for half in FIRST_RUNS)
        + " without one; rules were mended since. Faults right in the other first runs: `sealed` "
        "10 of 20, `fresh` 10 of 14, "
        f"`unseen` {_right('programs_unseen_first.json', 'unseen')} "
        "(`programs_unseen_first.json`, beside other work).",
        programs(),
    )
    trials = read("trials")
    yield (
        "Remedies tried on running programs, beside the same change in the source",
        f"{measured('trials')} Within 5 %: {trials['within_5_percent']}; ranges that hold the "
        f"other's: {trials['ranges_that_hold']}. In the source: three processes of the program and "
        "three of its changed copy in turns, since processes of one program differ by 5 %.",
        tried(),
    )
    own = read("own_program")
    yield (
        "Parts of another program against a stopwatch in it",
        f"{measured('own_program', 'stopwatch')} The page's time over the stopwatch's, three runs "
        "on a machine that was busy, then the same if one factor scaled the whole iteration.",
        "\n\n".join(map(ratios_of_parts, own["stopwatch"]["over_the_stopwatch"].values())),
    )
    yield (
        "facebook's script against its twin here",
        f"{measured('own_program', 'twin')} `seed.yaml` has the same data and weights. The twin's "
        "own runs differ from each other by half in the data and by 1.8x in the update.",
        ratios_of_parts(own["twin"]["ratios"]["script_over_twin"]),
    )
    teacher, narrow = read("teacher"), read("embedding_precision")["series"]
    yield (
        "Learning from a teacher whose best AUC is known",
        f"{measured('teacher')} No model can rank the test set better than the teacher, "
        f"{teacher['teacher_auc_on_test']:.5f}.",
        series([{"series": name} | one for name, one in teacher["series"].items()]),
    )
    yield (
        "Rows stored in 2 bytes a number",
        f"{measured('embedding_precision')} The same seed has the same samples and initial "
        "weights. Row-wise Adagrad in bf16 loses 0.00025 (p = 0.03; 0.11 after Holm's correction "
        "over the four comparisons); no other difference is visible.",
        series([{"series": f"{one['optimizer']}, {one['precision']}"} | one for one in narrow]),
    )
    traces = read("readers")
    yield (
        "Reading a chrome trace, beside two other tools",
        f"{measured('readers')} `{traces['trace']}` repeated to {traces['megabytes']:,.0f} MB, "
        f"{traces['events']:,} events; median of {traces['rounds']} rounds in turns, from a "
        "process's start to its figures of the GPU's busy time (ours: all that `inspect` says).",
        picked(
            traces["readers"],
            {
                "reader": "reader",
                "seconds": "seconds",
                "times ours": lambda row: interval(row["times_ours"], row["least"], row["most"]),
                "peak memory of the process (GiB)": "gib",
            },
        ),
    )
    yield "Data sets", measured("datasets", "generation"), figures(read("datasets"))
    yield "HPCToolkit databases", measured("database"), databases()
    yield "Evaluations and checkpoints in the loop", measured("hooks"), figures(read("hooks"))
    yield "Kills", measured("kills"), figures(read("kills"))
    yield "Long runs, many runs, disturbed ranks", measured("soak", "long"), figures(read("soak"))


def page() -> str:
    """The whole document."""
    head = (
        "# Results\n\n`python benchmarks/page.py` writes this page from the files in "
        "`benchmarks/results`; nothing on it is edited. No figure was measured on a GPU of our "
        "own. Times without a unit are in ms, speed-ups are times as fast.\n"
    )
    texts = (f"## {title}\n{about}\n\n{body}\n" for title, about, body in sections())
    return "\n".join((head, *texts))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
