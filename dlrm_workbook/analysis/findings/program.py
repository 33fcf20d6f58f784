"""The program's own lines: what its loop does beside the model, and what its tables are asked for.

These rules read the table of the user's lines (:mod:`dlrm_workbook.analysis.lines`) and what one
iteration showed of the model (``seen_model`` of a recording). They hold for any program.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from dlrm_core.base.text import counted
from dlrm_workbook.analysis.around import around
from dlrm_workbook.analysis.findings.evidence import Evidence, heaviest
from dlrm_workbook.analysis.findings.finding import Causes, Finding, Measured, bounded, rule
from dlrm_workbook.analysis.findings.where import code_line, line_name, loops_of
from dlrm_workbook.analysis.lines import line_table, lines
from dlrm_workbook.analysis.tried import tried
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.lines import MAIN

AROUND_SHARE = 0.04
"""Least share of all iterations' time for one line of the loop beside the model."""

EACH = 0.75
"""Share of the iterations from which on a line is said to run in each."""

LATER = 1000
"""Iterations after which a time that grows is foretold."""

OUTSIDE, OWN_CODE = 0.4, 0.15
"""Least share of the step for a function of the loss outside of modules (some losses take 30 %),
and for one that is the largest that computes in no layer to be named."""

TOLD = 0.3
"""A finding with more than this part of that share, in which it is named, tells of it already."""

MOST_AROUND = 3
"""Lines of the loop that have a finding each."""


@rule(
    "around_model",
    title="{name} takes {share:.0%} of {of}, outside the model{grows}",
    evidence=(
        "{each}",
        "It is called at {caller}.",
        "{later}",
        "By the samples of {iterations} iterations without a profiler.",
    ),
    advice="Do it less often, for whole batches at once, or beside the step (another thread or "
    "process), and read no value of a tensor for it one by one.",
    limit="dispatch",
)
def around_model(evidence: Evidence, ledger: Causes) -> Iterator[Measured]:
    """What the loop does beside the model, its optimizer and its batch takes much of the time, or
    ever more of it."""
    table = around(evidence.profile)
    if evidence.has_timeline:  # a GPU's time has rules of its own
        return
    grown = table["time_ms"] + LATER * table["growth_ms"]
    large = table["share"].ge(AROUND_SHARE) | (
        table["growth_ms"].gt(0) & grown.gt(evidence.step_ms)
    )
    for row in table[large].head(MOST_AROUND).to_dict("records"):
        share, time, presence = row["share"], row["time_ms"], row["in_iterations"]
        name, count, growth = line_name(row), row["iterations"], row["growth_ms"]
        figures = {"share": share, "least": 0.0, "name": name, "iterations": count}
        if presence < EACH:
            # the page's step is the usual iteration, of which this is no part
            time = evidence.step_ms * share / max(1.0 - share, 0.01)
            ledger.some_share += share
            figures["of"] = "all iterations' time"
            figures["each"] = (
                f"It runs in {max(round(presence * count), 1)} of {count} iterations and takes "
                f"{milliseconds(time / presence)} there."
            )
        else:
            step = milliseconds(evidence.step_ms)
            figures |= {"explains": ("other", ""), "of": "each step"}
            figures["each"] = f"It takes {milliseconds(time)} of each iteration of {step}."
        then = time + LATER * growth
        rest = max(evidence.step_ms - time, 0.0)
        yield figures | {
            "grows": ", and more from one iteration to the next" if growth > 0 else "",
            "caller": None if f"`{row['caller']}`" in name else f"`{row['caller']}`",
            "later": f"Its time grows by {milliseconds(growth)} per iteration: at that rate it "
            f"takes {milliseconds(then)} after {LATER:,} more, which is then "
            f"{then / (then + rest):.0%} of an iteration."
            if growth > 0
            else None,
        }


OTHER_SHARE = 0.03
"""Of the step outside every part, beyond what our own loop takes there."""

OWN_LOOP_MS, OWN_TABLE_MS = 1.0, 0.05
"""Of our own loop between the parts, and of it for each table, under a profiler; 0.7 and
0.02 were measured. The part's probe is used where there is one."""


@rule(
    "around_model",
    title="{share:.0%} of the step is outside the model: the loop's own code",
    evidence=(
        "{time:ms} of {total_ms:ms} per iteration lie in no part; no line of it was sampled.",
        "Most of it: {heaviest}.",
    ),
    advice="Look at what the loop does between the parts: logging, metrics, progress, "
    "checkpoints, callbacks. Do it every training.log_every iterations.",
    limit="dispatch",
)
def outside_parts(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Time of our own iteration that is in no part of the model, where no line is known."""
    # of another program, or where no steps are known, it is what no name told, not the loop
    if evidence.basis != "the step" or not evidence.is_ours or ledger.is_explained(("other", "")):
        return None
    if len(around(evidence.profile)) and not evidence.has_timeline:
        return None
    parts = evidence.parts["time_ms"]
    time = float(parts[parts.index.get_level_values("component") == "other"].sum())
    tables = int(evidence.parameter("model.tables", 0) or 0)
    alone = evidence.alone("other", "")
    own = 1.5 * alone if alone is not None else OWN_LOOP_MS + OWN_TABLE_MS * tables
    operators = evidence.of_part("other")
    return {
        # where nothing else is known it is the step
        "share": 0.0 if evidence.share("other") > 0.98 else (time - own) / evidence.step_ms,
        "least": OTHER_SHARE,
        "explains": ("other", ""),
        "time": evidence.time("other"),
        "heaviest": heaviest(operators[operators["kind"] != "thread"]),
    }


# ---- what the recorded batch showed of the model -----------------------------------------------

TOUCHED = 0.5
"""Most of a table's rows that a batch touches for a dense update of it to be a waste."""

ELEMENT_MOVES = {"SGD": 3, "Adagrad": 5, "RMSprop": 5, "Adam": 7, "AdamW": 7}
"""Optimizer to how many times it reads or writes a number for each element that it updates: the
weight, its gradient and its state."""


PLACE = ("file", "line")


def _seen(
    evidence: Evidence, name: str, numbers: tuple[str, ...], texts: Sequence[str] = PLACE
) -> pd.DataFrame:
    """Rows of ``seen_model`` that have these numbers and texts; empty where nothing was seen."""
    seen = evidence.meta.get("seen_model") or {}
    rows = seen.get(name) if isinstance(seen, dict) else None
    rows = [row for row in rows or [] if isinstance(row, dict)] if isinstance(rows, list) else []
    table = pd.DataFrame([row for row in rows if {*numbers, *texts} <= row.keys()])
    if table.empty:
        return pd.DataFrame({column: [] for column in (*numbers, *texts, "name")})
    table[list(numbers)] = table[list(numbers)].apply(pd.to_numeric, errors="coerce")
    return table.dropna(subset=list(numbers))


def _names(texts: pd.Series) -> str:
    """The names of tables or modules, three at most, as a title lists them."""
    names = [f"`{name}`" for name in texts.astype(str).unique()]
    if len(names) > MOST_AROUND:
        return f"{', '.join(names[: MOST_AROUND - 1])} and {len(names) - MOST_AROUND + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


@rule(
    "dense_updates",
    title="Updating rows that no batch asks for takes {share:.0%} of each step: {optimizer} writes "
    "all {rows:,} rows of {names}, a batch looks up {touched:.1%} of them",
    evidence=(
        "The gradients of {names} are dense, so that the optimizer ({at}) reads and writes whole "
        "tables: {megabytes:,.0f} MB per iteration.",
        "One batch looked up {unique:,} different rows.",
        "For rows that nobody asks for optimizers take {update:ms} of {total_ms:ms} per iteration, "
        "and making their gradients {backward:ms}.",
    ),
    advice="Make sparse gradients, nn.Embedding(..., sparse=True) or nn.EmbeddingBag(..., "
    "sparse=True), and update these tables with an optimizer that takes them "
    "(torch.optim.SparseAdam, SGD or Adagrad), the other weights with the one they have. Adam then "
    "moves only rows of the batch: rows that were not looked up keep their momentum.",
    limit="memory bandwidth",
)
def dense_updates(evidence: Evidence, ledger: Causes) -> Measured | None:
    """An optimizer updates whole embedding tables of which a batch asks for few rows."""
    tables = _dense_tables(evidence)
    tables = tables[~tables["by_a_line"].astype(bool)]
    if tables.empty:
        return None
    rows, unique = int(tables["rows"].sum()), int(tables["unique"].sum())
    update, backward = (float(tables[column].sum()) for column in ("update_ms", "backward_ms"))
    lost = update + backward
    if lost < LINE_SHARE * evidence.total_ms:
        return None
    ledger.explain(update, ("optimizer", "update"))
    ledger.explain(backward, ("embedding", "backward"))
    optimizers = _seen(evidence, "optimizers", ("elements",))
    worst = optimizers.loc[tables.groupby("optimizer")["elements"].sum().idxmax()]
    moves = ELEMENT_MOVES.get(str(worst["class"]))
    moved = float((tables["elements"] * tables["bytes"]).sum()) * (moves or math.nan)
    return {
        "share": lost / evidence.total_ms,
        "component": "optimizer",
        "optimizer": f"`{worst['class']}`",
        "rows": rows,
        "unique": unique,
        "touched": unique / rows,
        "names": _names(tables["name"]),
        "at": line_name(worst),
        "megabytes": moved / 1e6 if moves else None,
        "update": update,
        "backward": backward,
    }


def _dense_tables(evidence: Evidence) -> pd.DataFrame:
    """Tables with dense gradients of which a batch looks up few rows, and what the others cost.

    ``update_ms`` goes by their part of what optimizers write. ``backward_ms`` is of the time in
    which dense gradients are made: zeros for each number of a table, of which those looked up are
    read, added to what is there and written. ``by_a_line`` says that a table was to get sparse
    ones, and that a line computes with all of its rows.
    """
    tables = _seen(evidence, "tables", ("rows", "dim", "bytes", "unique", "lookups", "optimizer"))
    optimizers = _seen(evidence, "optimizers", ("elements",))
    if tables.empty or optimizers.empty or "gradient" not in tables:
        return tables[:0].assign(by_a_line=False, update_ms=0.0)
    whole = _seen(evidence, "whole_tables", ("rows",), ["name"])
    by_a_line = tables["name"].isin(whole["name"]) & tables.get("sparse", pd.Series()).eq(True)
    tables = tables.assign(elements=tables["rows"] * tables["dim"], by_a_line=by_a_line)
    dense = tables["gradient"].eq("dense") & tables["optimizer"].isin(optimizers.index)
    of_sparse = float(tables.loc[tables["gradient"].eq("sparse"), "elements"].sum())
    few = tables[dense & tables["unique"].lt(TOUCHED * tables["rows"])]
    written = max(float(optimizers["elements"].sum()) - of_sparse, float(few["elements"].sum()))
    rows_of_update = evidence.attribution["phase"].eq("update")
    update_ms = float(evidence.attribution.loc[rows_of_update, "time_ms"].sum())
    called = evidence.called[evidence.called["name"].str.contains(DENSE_BACKWARD)]
    backward_ms = float(called["cpu_ms" if "cpu_ms" in called else "cpu_self_ms"].sum())
    moved = (tables["elements"] + 3 * tables["lookups"] * tables["dim"])[dense].sum()
    idle = few["elements"] * (1 - few["unique"] / few["rows"])
    return few.assign(
        update_ms=update_ms * idle / max(written, 1), backward_ms=backward_ms * idle / max(moved, 1)
    )


DENSE_BACKWARD = re.compile(r"embedding(?:_bag)?_dense_backward$")

LOOKING_UP = re.compile(r"embedding|_coalesce|coalesce$|index_add|index_select")
"""Operators whose time goes with the number of lookups."""

PADDED = 0.3
"""Share of a table's lookups by one row from which on they are padding, or might as well be."""


@rule(
    "padding_lookups",
    title="Lookups of one row take {share:.0%} of each step: {hottest:.0%} of those of {name} ask "
    "for row {row}, such as that of padding",
    evidence=(
        "A batch looks up {lookups:,} rows of {name} at {at}, {wasted:,} of them row {row}.",
        "Operators that look rows up, or add their gradients up, take {time:ms} of {total_ms:ms}; "
        "{share:.0%} of the step is for that row.",
    ),
    advice="Where the row is padding, leave it out: give nn.EmbeddingBag the indices that are "
    "there and offsets, instead of bags of one length, or cut each batch to its longest bag. Where "
    "it is a default value, look up nothing for it and add it once.",
    limit="random rows",
    component="embedding",
    concerns=("embedding",),
)
def padding_lookups(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Much of a table's lookups ask for one row, such as that of padding."""
    tables = _seen(evidence, "tables", ("rows", "dim", "lookups", "hottest", "hottest_row"))
    if tables.empty:
        return None
    weight = tables["lookups"] * tables["dim"]
    tables = tables.assign(wasted=weight * tables["hottest"] / weight.sum())
    tables = tables[tables["hottest"].ge(PADDED) & tables["rows"].gt(1 / PADDED)]
    called = evidence.called[evidence.called["name"].str.contains(LOOKING_UP)]
    time = float(called["gpu_ms" if evidence.on_gpu else "cpu_self_ms"].sum())
    if tables.empty:
        return None
    worst = tables.loc[tables["wasted"].idxmax()]
    return {
        "share": time * float(tables["wasted"].sum()) / evidence.total_ms,
        "explains": ("embedding", "forward"),
        "name": f"`{worst['name']}`",
        "hottest": float(worst["hottest"]),
        "row": int(worst["hottest_row"]),
        "lookups": int(worst["lookups"]),
        "wasted": round(worst["lookups"] * worst["hottest"]),
        "at": line_name(worst),
        "time": time,
    }


EMPTY = 0.9
"""Share of zeros in an operand from which on a product is nearly all of zeros; of a ReLU they are
half."""


@rule(
    "empty_products",
    title="Products with zeros take {share:.0%} of each step: {zeros:.1%} of the operand of {name} "
    "are zeros",
    evidence=(
        "At {at} it gets {rows:,} rows of {inputs:,} numbers each.",
        "By their sizes such products take {share:.0%} of the step.",
    ),
    advice="Of a one-hot or nearly empty operand a product reads what a lookup would: give the "
    "indices to nn.EmbeddingBag(mode='sum'), whose rows are the columns of this weight.",
    limit="arithmetic",
)
def empty_products(evidence: Evidence, ledger: Causes) -> Measured | None:
    """A layer multiplies an operand that is nearly all zeros, such as a one-hot one."""
    products = _seen(evidence, "products", ("rows", "inputs", "outputs", "zeros", "calls"))
    called = evidence.called[evidence.called["name"].str.fullmatch(r"aten::(addmm|mm|bmm|linear)")]
    if products.empty or called.empty:
        return None
    work = products["rows"] * products["inputs"] * products["outputs"] * products["calls"]
    products = products.assign(lost=work * products["zeros"] / work.sum())
    products = products[products["zeros"].ge(EMPTY)]
    time = float(called["gpu_ms" if evidence.on_gpu else "cpu_self_ms"].sum())
    if products.empty:
        return None
    worst = products.loc[products["lost"].idxmax()]
    return {
        "share": time * float(products["lost"].sum()) / evidence.total_ms,
        "name": f"`{worst['name']}`",
        "zeros": math.floor(1000 * worst["zeros"]) / 1000,  # what is not empty is not called so
        "rows": int(worst["rows"]),
        "inputs": int(worst["inputs"]),
        "at": line_name(worst),
    }


SUBNORMAL = 0.001
"""Least share of subnormal numbers in an operand: each takes a processor a hundred cycles or more
(Intel, "64 and IA-32 Architectures Optimization Reference Manual", Denormals)."""

MAKES = {"convolution": re.compile(r"aten::(\w+_convolution|convolution_backward)$")}
"""Operator to those of a trace that compute it; others are called as they are."""


@rule(
    "subnormal_numbers",
    title="Arithmetic on subnormal numbers takes up to {share:.0%} of each step: {part:.1%} of an "
    "operand of `aten::{operator}` at {name}",
    evidence=("Operators of that kind take {time:ms} of {total_ms:ms}, backward pass included.",),
    advice="Call torch.set_flush_denormal(True) before anything else, so that its threads have it "
    "from the beginning; or keep such numbers out: what decays to nearly nothing (exp of large "
    "negative numbers, products of small ones) may be clamped, or set to zero.",
    limit="arithmetic",
    gpu=False,
)
def subnormal_numbers(evidence: Evidence, ledger: Causes) -> Measured | None:
    """A product or convolution has operands below the smallest normal number, which processors
    compute with many times slower."""
    seen = _seen(evidence, "subnormal", ("share",), (*PLACE, "name"))
    seen = seen[seen["share"].ge(SUBNORMAL)]
    if seen.empty:
        return None
    worst = seen.loc[seen["share"].idxmax()]
    operator = str(worst["name"])
    pattern = MAKES.get(operator, re.compile(rf"aten::{re.escape(operator)}$"))
    called = evidence.called[evidence.called["name"].str.fullmatch(pattern)]
    time = float(called["cpu_self_ms"].sum())
    return {
        "share": time / evidence.total_ms,
        "explains": None,
        "part": float(worst["share"]),
        "operator": operator,
        "name": line_name(worst),
        "time": time,
        "speedup": bounded(time / evidence.total_ms),
    }


# ---- what one iteration computed, by line -------------------------------------------------------

LINE_SHARE = 0.1
"""Least share of the step for what a line computes to be the matter."""

SMALL_CALLS, SMALL = 100, 0.8
"""Calls of small operators by a line in one iteration, and their share of all its calls, for
calling them to be what the line takes."""

TURN_MS = 1.0
"""A loop of as many turns is worth doing at once if each takes fewer milliseconds than this."""

NEVER_TRAINED = 0.15
"""Least share of the step for arithmetic without gradients to be the matter: a small encoder that
is not trained is a choice."""


def computed(evidence: Evidence) -> pd.DataFrame:
    """The lines of the thread that trains with what they computed in one iteration; none of a run
    on a GPU, whose time goes by kernels."""
    counts = ("calls", "small", "elements", "double", "without_gradients")
    own = ("own_calls", "own_small", "own_elements", "own_double")
    every = [*counts, *own, "again", "own_again", "own_moved", "own_whole"]
    every += ["weights", "untrained", "zero", "own_padded"]
    seen = _seen(evidence, "operators", (*counts, *own))
    table = lines(evidence.profile).rename(columns={"calls": "runs"})
    table = table[table["thread"].eq(MAIN)]
    if seen.empty or evidence.on_gpu or evidence.is_ours:
        return table[:0].reindex(columns=[*table, *every])
    # a comprehension has a frame of its own, at the line of the one around it
    seen = seen.groupby([*PLACE], sort=False).sum(numeric_only=True).reset_index()
    seen = seen.reindex(columns=[*PLACE, *every], fill_value=0)
    table = table.merge(seen, on=[*PLACE], how="left")
    return table.fillna({name: 0 for name in ("runs", *every)})


def _lost(share: pd.Series, worst: pd.DataFrame) -> Measured | None:
    """Figures of what lines lose in the step, each a share (0 to 1) of it, and of one line at which
    to look: its place, and what is written there.

    Args:
        worst: that line's row; no row is nothing to lose.
    """
    if worst.empty:
        return None
    row = worst.iloc[0]
    source = str(row["source"])[:80]
    return {"share": share.sum(), "explains": None, "name": line_name(row), "source": source}


@rule(
    "small_operators",
    title="{what} takes {share:.0%} of each step, at {name}",
    evidence=(
        "They compute {numbers} and take {each:ms} each, backward pass included: "
        "about what calling an operator costs, however little it computes.",
        "{loop}",
    ),
    advice="{remedy}",
    limit="dispatch",
    gpu=False,
)
def small_operators(evidence: Evidence, ledger: Causes) -> Iterator[Measured]:
    """Lines of one function call many operators that each compute next to nothing, or none."""
    table = computed(evidence)
    table = table[table["role"].isin(["model", "optimizer"])]
    cut_short = bool((evidence.meta.get("seen_model") or {}).get("left_out"))
    loops = loops_of(evidence.profile)
    table = table.loc[[loops.isdisjoint(str(names).split(", ")) for names in table["operators"]]]
    # views are no operators that compute, but their backward passes are
    tiny = table["own_small"].ge(SMALL * table["own_calls"])
    small = tiny & table[["own_small", "runs"]].max(axis=1).ge(SMALL_CALLS)
    small |= table["runs"].ge(SMALL_CALLS) & table["time_ms"].lt(TURN_MS * table["runs"])
    # those of a loop before the others
    table = table.assign(first=small)[small | tiny].sort_values("first", ascending=False)
    for _, rows in table.groupby(["file", "function"], sort=False):
        first, calls = rows.iloc[0], float(rows["own_calls"].sum())
        if not first["first"]:
            continue
        runs, time = float(first["runs"]), float(rows["time_ms"].sum())
        elements = float(rows["own_elements"].sum())
        loop = calls < SMALL_CALLS or float(rows["own_small"].sum()) < SMALL * calls
        loop |= cut_short and runs >= SMALL_CALLS  # not all of its calls were seen
        updates = first["role"] == "optimizer"
        yield {
            "share": float(rows["share_of_step"].sum()),
            "least": LINE_SHARE,
            "explains": None,
            "component": "optimizer" if updates else "other",
            "what": f"A loop of {runs:,.0f} turns"
            if loop
            else f"Calling {'more than ' * cut_short}{calls:,.0f} small operators",
            "name": line_name(first),
            "numbers": None if loop else counted(round(elements / calls), "number"),
            "each": None if loop or cut_short else time / calls,
            "loop": f"`{str(first['source'])[:80]}` runs {runs:,.0f} times in each step and takes "
            f"{milliseconds(float(first['time_ms']) / runs)} each time, backward pass included."
            if runs >= SMALL_CALLS
            else None,
            "remedy": "Give the optimizer foreach=True, or fused=True where its class has it: one "
            "operator updates all tensors."
            if updates
            else "Do it for all at once: stack what the loop goes over and call one operator "
            "(torch.bmm or einsum for layers of one shape, torch.cat and one layer, a "
            "vectorised loss) instead of one for each.",
        }


@rule(
    "float64",
    title="Arithmetic in float64 takes {taken:.0%} of the step, about twice what float32 would, "
    "most at {name}",
    evidence=("{part:.0%} of the bytes that this line computes are float64: `{source}`.",),
    advice="Find what makes float64 (a NumPy array or a Python constant made into a tensor, "
    ".double(), a default type) and make it float32, before it meets other operands: a processor "
    "computes float64 at half of the rate of float32, and it takes twice the bytes.",
    limit="arithmetic",
    gpu=False,
)
def float64_lines(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Lines of the model compute in float64."""
    table = computed(evidence)
    double = table["own_double"]  # each has twice the bytes of another
    part = 2 * double / (table["own_elements"] + double).clip(lower=1)
    taken = (part * table["share_of_step"]).where(table["role"].eq("model"), 0.0)
    worst = table.assign(part=part).loc[taken.nlargest(1).index]
    lost = _lost(0.5 * taken, worst)
    return lost and {**lost, "taken": taken.sum(), "part": worst["part"].sum()}


@rule(
    "without_gradients",
    title="Computing without gradients takes {share:.0%} of each step: {name}",
    evidence=(
        "`{source}` takes {time:ms} of {step_ms:ms}, and nothing that it computes gets a gradient.",
    ),
    advice="If the same samples come again, as in each epoch, compute it once for all of them and "
    "keep the results: weights that are not trained give the same ones. If they do not, a half "
    "precision under torch.inference_mode(), or another thread that is one batch ahead, is enough.",
    limit="arithmetic",
    gpu=False,
)
def without_gradients(evidence: Evidence, ledger: Causes) -> Measured | None:
    """A line of the model, such as a teacher's, computes what is never trained."""
    table = computed(evidence)
    learns = table["without_gradients"].lt(table["elements"])
    never = ~learns & table["elements"].gt(0) & table["role"].eq("model")
    table = table[never] if learns.any() else table[:0]
    # the lines of one function, or one line with all that it calls
    of_function = table.groupby(["file", "function"])["time_ms"].transform("sum")
    table = table.assign(taken=of_function.clip(lower=table["inclusive_ms"]))
    worst = table.sort_values(["taken", "inclusive_ms"], ascending=False).head(1)
    lost = _lost(worst["taken"] / evidence.step_ms, worst)
    return lost and {**lost, "least": NEVER_TRAINED, "time": worst["inclusive_ms"].sum()}


@rule(
    "computed_again",
    title="Computing what the same step has computed before takes {share:.0%} of it: {name}",
    evidence=(
        "{part:.0%} of the numbers that `{source}` computes are those of equal operators on the "
        "same operands, earlier in the iteration.",
    ),
    advice="Compute it once and keep the result: before the loop, or in a variable that all who "
    "need it read.",
    limit="arithmetic",
    gpu=False,
)
def computed_again(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Lines compute from the same operands what was computed before."""
    table = computed(evidence)
    share = table["own_again"] / table["own_elements"].clip(lower=1) * table["share_of_step"]
    # where it begins: the outermost line of which most is repeated
    table = table.assign(part=table["again"] / table["elements"].clip(lower=1))
    most = table[table["again"].ge(0.5 * table["again"].max())]
    most = most[most["part"].ge(0.98 * most["part"].max())]
    worst = most.sort_values("inclusive_ms").tail(1)
    lost = _lost(share, worst)
    return lost and {**lost, "least": LINE_SHARE, "part": worst["part"].sum()}


@rule(
    "outside_modules",
    title="{name} takes {share:.0%} of each step, outside every module",
    evidence=(
        "With what it calls and its backward pass it takes {time:ms} of {total_ms:ms}.",
        "No rule found why: how short it could be was not measured.",
    ),
    advice="Look at what it computes, and with which sizes: compute it with fewer or smaller "
    "operands or by a cheaper formula; what is of the loss, such as a penalty, or a metric may be "
    "computed in one step of several.",
    limit="arithmetic",
    gpu=False,
)
def outside_modules(evidence: Evidence, ledger: Causes) -> Measured | None:
    """A function of the model or the loss computes in no layer, and no finding tells of it. One
    that takes less, or that a module holds, is named only where no cause is as large."""
    table = line_table(evidence.profile)
    if table is None or evidence.is_ours or evidence.has_timeline:
        return None
    functions = table.outside_modules()
    if evidence.meta.get("engine") == "hpctoolkit":  # of all time, not of a step
        functions = functions[~functions["in_module"].astype(bool)]
    for row in functions.head(1).to_dict("records"):
        share, name = row["time_ms"] / table.step_ms, f"`{row['function']}`"
        if any(told > TOLD * share and name in text for told, text in ledger.told):
            continue
        figures: Measured = {"share": share, "explains": None, "name": line_name(row)}
        figures |= {"least": OUTSIDE, "time": share * evidence.total_ms, "speedup": bounded(share)}
        if row["weights"]:
            figures |= _COMPUTED_WEIGHTS
        elif share < OUTSIDE or row["in_module"]:
            if any(told >= share for told, _ in ledger.told):
                continue
            figures |= {"id": "largest_place", "least": OWN_CODE}
            asked = "No known bottleneck found: " * bool(evidence.meta.get("passes"))
            where = ", in modules of the program's own" * bool(row["in_module"])
            figures["title"] = f"{asked}{{name}} takes {{share:.0%}} of the step{where}"
        return figures
    return None


_COMPUTED_WEIGHTS: Measured = {
    "id": "computed_weights",
    "title": "Computing weights anew at each use takes {share:.0%} of each step, at {name}: a "
    "parametrisation, such as spectral or weight normalisation",
    "advice": "Compute them once an iteration (torch.nn.utils.parametrize.cached() around all "
    "uses), with fewer power iterations, or for fewer layers.",
    "least": LINE_SHARE,
}
"""Sentences that replace those of :func:`outside_modules` for what torch.nn.utils computes."""


@rule(
    "whole_tables",
    title="Computing with all rows of {names} takes {share:.0%} of each step, at {name}: a batch "
    "looks up {touched:.1%} of them at most",
    evidence=(
        "`{source}` takes {time:ms} of {step_ms:ms}, backward pass included.",
        "It makes the gradients of tables dense that were to be sparse: the optimizer writes all "
        "of their rows, {update:ms} more.",
    ),
    advice="Do it with the rows that the batch looks up: normalise, penalise or transform what "
    "the lookup returns, or what one iteration in many finds for all rows.",
    limit="memory bandwidth",
    component="embedding",
    gpu=False,
)
def whole_tables(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Lines compute with whole embedding tables, of which a batch asks for few rows."""
    tables = _seen(evidence, "whole_tables", ("rows", "lookups"), ["name"])
    tables = tables[tables["lookups"].between(1, TOUCHED * tables["rows"])]
    if tables.empty:
        return None
    table = computed(evidence)
    share = table["own_whole"] / table["own_moved"].clip(lower=1) * table["share_of_step"]
    worst = table.loc[share.nlargest(1).index]
    touched = float(tables["lookups"].sum() / tables["rows"].sum())
    more = {"names": _names(tables["name"]), "touched": touched, "time": worst["time_ms"].sum()}
    lost, dense = _lost(share, worst), _dense_tables(evidence)
    dense = dense[dense["by_a_line"] & dense["name"].isin(tables["name"])]
    update = float(dense["update_ms"].sum())
    more |= {"update": update or None}
    return lost and {**lost, **more, "share": lost["share"] + update / evidence.total_ms}


PADDING = 0.2
"""Least share of padding among the positions of a batch for it to be the matter."""


@rule(
    "padded_positions",
    title="Padding takes {share:.0%} of each step: {padding:.0%} of the positions that {names} "
    "looks up are its padding",
    evidence=("Operators compute with all positions of a batch, most of it at {name}.",),
    advice="Pad each batch to its own longest row and no further, put rows of about the same "
    "length together (a sampler by length), or compute without padding (torch.nested, "
    "pack_padded_sequence).",
    limit="arithmetic",
    gpu=False,
)
def padded_positions(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Much of what a model of sequences computes stands for padding."""
    tables = _seen(evidence, "tables", ("padding",))
    tables = tables[tables["padding"].ge(PADDING)]
    if tables.empty:
        return None
    table, padding = computed(evidence), float(tables["padding"].max())
    share = table["own_padded"] / table["own_elements"].clip(lower=1) * table["share_of_step"]
    lost = _lost(share, table.loc[share.nlargest(1).index])
    return lost and {
        **lost,
        "least": LINE_SHARE,
        "names": _names(tables["name"]),
        "padding": padding,
    }


@rule(
    "untrained_gradients",
    title="What trains nothing takes {share:.0%} of each step: the weights of {names}, at {name}",
    evidence=(
        "`{source}` takes {time:ms} of {step_ms:ms}, {backward:ms} of it in the backward pass.",
        "No optimizer has the weights of {untrained}, whose gradients are made.",
        "The gradients of {zero} are 0 everywhere: the loss does not ask for what they compute.",
    ),
    advice="Say that they are not trained: weight.requires_grad_(False) for each, or "
    "torch.no_grad() around what computes with them where no gradient passes through. What has no "
    "part in the loss, such as a term of weight 0, need not be computed.",
    limit="arithmetic",
    gpu=False,
)
def untrained_gradients(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The backward pass makes gradients of weights that no optimizer has, or that are all 0."""
    seen = evidence.meta.get("seen_model") or {}
    weights = {name: seen.get(name) or [] for name in ("untrained", "zero")}
    if not any(weights.values()):
        return None
    table = computed(evidence)
    lost_ms = table["untrained"] * table["backward_ms"] + table["zero"] * table["time_ms"]
    lost_ms /= table["weights"].clip(lower=1)
    worst = table.loc[lost_ms.nlargest(1).index]
    weights["names"] = [*weights["untrained"], *weights["zero"]]
    modules = {
        name: _names(pd.Series([str(weight).rpartition(".")[0] for weight in some])) or None
        for name, some in weights.items()
    }
    lost = _lost(lost_ms / evidence.step_ms, worst)
    times = {"time": worst["time_ms"].sum(), "backward": worst["backward_ms"].sum()}
    return lost and {**lost, **modules, **times}


@rule(
    "backward_again",
    title="The backward pass runs twice over the same forward pass, which takes {share:.0%} of "
    "each step: at {places}",
    evidence=(
        "{again:.0%} of its time goes into nodes that had run in the same iteration; {callers}.",
    ),
    advice="Run it once: add the losses up before, keep what the first pass computed (.grad, or "
    "what torch.autograd.grad returned), and take norms of gradients from .grad after the one "
    "backward().",
    limit="arithmetic",
)
def backward_twice(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Nodes of the backward pass run more than once in an iteration."""
    table = line_table(evidence.profile)
    if table is None or not (ran := table.known.get("again") or {}).get("ns"):
        return None
    again, callers = float(ran["ns"] / ran["of_ns"]), table.backward_callers()
    rows = callers.sort_values("time_ms", ascending=False).head(2).sort_index().to_dict("records")
    if not rows:
        return None
    told = [f"{line_name(row)} takes {milliseconds(row['time_ms'])}" for row in rows]
    return {
        "share": again * float(callers["time_ms"].sum()) / evidence.total_ms,
        "explains": None,
        "places": " and at ".join(map(line_name, rows)),
        "again": again,
        "callers": " and ".join(told),
    }


@rule(
    "run_again",
    title="Forward passes that run again within the backward pass take {share:.0%} of each step: "
    "{name}",
    evidence=(
        "Below the backward pass run {functions}, {time:ms} of {step_ms:ms}: what the forward "
        "pass computed was thrown away and is computed again, as torch.utils.checkpoint does.",
    ),
    advice="Where memory suffices, keep activations: call the module itself instead of "
    "torch.utils.checkpoint, or recompute fewer of them.",
    limit="arithmetic",
)
def forward_again(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Functions of the forward pass run again below the backward pass (activation checkpoints)."""
    table = line_table(evidence.profile)
    again = table.forward_again() if table is not None else pd.DataFrame()
    if table is None or again.empty:
        return None
    worst = again.iloc[0]
    share = float(again["time_ms"].sum()) / table.step_ms
    return {
        "share": share,
        "explains": None,
        "name": code_line(str(worst["caller"]), str(worst["file"]), int(worst["line"])),
        "functions": ", ".join(f"`{name}`" for name in again["function"][:MOST_AROUND]),
        "time": share * evidence.step_ms,
    }


# ---- what was tried on the program --------------------------------------------------------------

SLIPS = {"anomaly": "Anomaly detection of autograd is on"}
"""Remedy to what it undoes, where that serves no training: a slip, not a choice."""


@rule(
    "left_on",
    title="{what}, which takes {share:.0%} of each step",
    evidence=(
        "Without it this program ran {mid:.2f}x as fast ({low:.2f}x to {high:.2f}x), tried "
        "in turns.",
    ),
    advice="{code}",
    limit="dispatch",
)
def left_on(evidence: Evidence, ledger: Causes) -> Measured | None:
    """A setting that is no part of a training was left on, and the program runs faster without."""
    table = tried(evidence.profile)
    table = table[table["id"].isin(list(SLIPS)) & table["status"].eq("paid")]
    if table.empty:
        return None
    row = table.iloc[0]
    gain = _tried_gain(row)
    return {
        "share": 1 - 1 / gain["mid"],
        "least": 0.0,
        "explains": None,
        "what": SLIPS[str(row["id"])],
        "code": f"In {row['place']}: {row['code']}",
        "speedup": gain,
        **gain,
    }


def _tried_gain(row: Any) -> dict[str, float]:
    return {end: float(row[f"speedup_{end}"]) for end in ("low", "mid", "high")}


TRIED = {
    "page_faults": "allocator",
    "too_few_threads": "threads",
    "too_many_threads": "threads",
    "garbage_collection": "garbage_collection",
    "dense_updates": "sparse",
}
"""Finding to the remedy that takes its cause away."""

DOUBTED = 0.2
"""Share of the step up to which a cause is none if its remedy makes no difference."""


def as_tried(found: Sequence[Finding], profile: Profile) -> list[Finding]:
    """The findings, with the gain that their remedy had on this very program; without those small
    ones whose remedy was tried and made no difference."""
    rows = tried(profile).set_index("id")
    kept = []
    for finding in found:
        remedy = TRIED.get(finding.id)
        row = rows.loc[remedy] if remedy in rows.index else None
        if row is not None and row["status"] == "paid":
            finding = replace(finding, predicted_speedup=_tried_gain(row))
        none = row is not None and row["status"] in ("no difference", "slower")
        if not none or finding.share_of_step > DOUBTED:
            kept.append(finding)
    return kept
