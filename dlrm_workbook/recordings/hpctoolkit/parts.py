"""Parts of foreign programs in an HPCToolkit database, and iterations that nothing marks.

Names in the call paths say most (:mod:`dlrm_workbook.recordings.foreign`): Python frames,
autograd nodes, kernels, copies. What they leave open is decided in this order:

- bottom and top MLP in the forward pass, by the lines from which the function around both
  calls them: what stands before the interaction's line is the bottom MLP;
- an autograd node without a part, by its forward operator (``IndexBackward0`` by
  ``at::_ops::index_Tensor``), where only one part has it;
- the rest by order on the GPU's stream: in the backward pass a nameless operation (a sum of
  a bias gradient) belongs to what ran before it, what runs before the interaction is the
  top MLP, what runs after it the bottom MLP.

So operations of one call path may belong to several parts. Such a context is divided: each
part gets a copy of it, with a share of its values as large as the part's share of the
context's time on the stream; sums are kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from dlrm_core.parts import COMPONENTS
from dlrm_workbook.ground.arrays import Bools, Ints, Names
from dlrm_workbook.recordings.foreign import (
    ACCUMULATE,
    MLP,
    NO_STEP,
    START_UP,
    PartNames,
    forward_key,
    has_embeddings,
    is_iteration_function,
    mlp_by_order,
    node_key,
    resolve,
)
from dlrm_workbook.recordings.profile import coded_pairs, nearest

OTHER = ("other", "")
MODEL_OR_MLP = ("bottom_mlp", "embedding", "interaction", "top_mlp", MLP, "loss")
INTERACTION_NODES = ("index", "cat", "stack", "tril", "triu", "maskedselect", "gather")
"""What joins features and picks their products; no other part of a DLRM has such a node, so
these are the interaction's where no forward operator says otherwise."""
DETAIL = ("line", "loop", "instruction")
"""Kinds of contexts that are places in a function."""
_BUILDS = re.compile(
    r"^(create|build|construct)_(?!\w*(batch|data|input|loader))|^reset_parameters$|^_find_and_load$"
)
"""Python functions that make a model, or import: what they call is start-up, whatever it is for."""
_OPERATOR = re.compile(r"^at::_ops::(\w+)::(?:call|redispatch)\b")


@dataclass
class Labels:
    """What the names say of each context (contexts,).

    ``component`` is :data:`foreign.MLP` where it is not known whether bottom or top; an enclosing
    name could overrule that of those that are ``hinted``.
    """

    component: Names
    phase: Names
    hinted: Bools


def by_names(contexts: pd.DataFrame, parts: Mapping[str, str] | None = None) -> Labels:
    """Part and phase of every context by its names, callers' lines and forward operators.
    ``contexts`` are as in a profile; ``parts`` is the user's map of patterns to parts, refused by
    an InputError where it names a part that is unknown."""
    names = PartNames(parts)
    parent = contexts["parent"].to_numpy()
    keys = list(zip(contexts["kind"], contexts["name"], contexts["file"], strict=True))
    code, distinct = pd.factorize(pd.Series(keys, dtype=object))
    code = code.astype(np.int64)
    is_dlrm = has_embeddings((kind, name) for kind, name, _ in distinct)
    named = [(names.of if is_dlrm else names.of_any_program)(*key) for key in distinct]
    component, phase, hinted = resolve(parent, named, code)
    builds = np.array(
        [kind == "python" and bool(_BUILDS.match(name)) for kind, name, _ in distinct]
    )
    component[nearest(parent, builds[code]) >= 0] = NO_STEP
    phase[component == NO_STEP] = START_UP
    # a copy that a backward node makes is a part of that node's work
    backward = np.array([n is not None and n.phase == "backward" for n in named])[code]
    copied = hinted & (component == "transfer") & (nearest(parent, backward) >= 0)
    component[copied], phase[copied] = "other", "backward"
    # what Python calls outside backward and update is the forward pass
    says = np.array([n is not None and bool(n.component) for n in named])[code]
    called = nearest(parent, says & contexts["kind"].eq("python").to_numpy()) >= 0
    called &= np.isin(component, [*MODEL_OR_MLP, "data", "transfer"])
    phase[called & (phase == "")] = "forward"
    if is_dlrm:
        _by_lines(contexts, component, phase)
        _by_operators(contexts, backward, component, phase)
    return Labels(component, phase, hinted)


def iteration_functions(contexts: pd.DataFrame, values: pd.DataFrame) -> Bools:
    """Which contexts (n,) are the Python function around our own iteration.

    None is where most of the parts' CPU time lies outside of it: hpcrun loses the callers of a
    generator, and the one iteration that is left then is not the step.
    """
    number, functions = coded_pairs(contexts["name"], contexts["file"])
    is_iteration = np.array([is_iteration_function(*one) for one in functions], dtype=bool)[number]
    cpu_times = values[values["metric"].eq("cpu_time_ms") & values["scope"].eq("exclusive")]
    of_parts = cpu_times[contexts["component"].ne("other").to_numpy()[cpu_times["context"]]]
    inside = nearest(contexts["parent"].to_numpy(), is_iteration)[of_parts["context"]] >= 0
    time = of_parts["value"].to_numpy()
    return is_iteration & bool(time[inside].sum() >= time[~inside].sum())


def _by_lines(contexts: pd.DataFrame, component: Names, phase: Names) -> None:
    """Tell bottom from top MLP by the lines that call it and the interaction."""
    parent, line = contexts["parent"].to_numpy(), contexts["line"].to_numpy()
    is_line = contexts["kind"].eq("line").to_numpy()
    forward = phase == "forward"
    above = np.where(parent >= 0, component[parent], "")

    def begins(part: str) -> list[int]:
        """Where calls of a part begin: no context above them belongs to it."""
        return np.flatnonzero(forward & (component == part) & (above != part)).tolist()

    def path(row: int) -> list[int]:
        rows = []
        while row >= 0:
            rows.append(row)
            row = int(parent[row])
        return rows[::-1]

    middles = [path(row) for row in begins("interaction")]
    start = nearest(parent, forward & (component == MLP) & (above != MLP))
    for row in begins(MLP):
        mlp_path = path(row)
        for middle in middles:
            shared = sum(1 for a, b in zip(mlp_path, middle, strict=False) if a == b)
            if shared == min(len(mlp_path), len(middle)):
                continue
            mine, other = mlp_path[shared], middle[shared]
            if is_line[mine] and is_line[other] and line[mine] != line[other]:
                which_mlp = "bottom_mlp" if line[mine] < line[other] else "top_mlp"
                component[(component == MLP) & forward & (start == row)] = which_mlp
                break


def _by_operators(contexts: pd.DataFrame, backward: Bools, component: Names, phase: Names) -> None:
    """Give nodes that have no part that of their forward operator, where it has but one."""
    of_operator: dict[str, set[str]] = {}
    number, texts = pd.factorize(contexts["name"])
    function = contexts["kind"].eq("function").to_numpy()
    spelled = {
        i: [forward_key("_".join(words[: n + 1])) for n in range(len(words))]
        for i, text in enumerate(texts)
        if (match := _OPERATOR.match(text)) and (words := match[1].split("_"))
    }
    inside = function & (phase == "forward") & np.isin(component, MODEL_OR_MLP)
    for row in np.flatnonzero(inside & np.isin(number, list(spelled))).tolist():
        part = MLP if component[row].endswith("mlp") else component[row]
        for key in spelled[number[row]]:
            of_operator.setdefault(key, set()).add(part)
    names = contexts["name"].tolist()
    parent = contexts["parent"].to_numpy()
    node = nearest(parent, function & backward)
    unnamed = (component == "other") & (phase == "backward") & (node >= 0)
    for row in np.unique(node[unnamed]).tolist():
        found_key = node_key(names[row]) or ""
        candidates = of_operator.get(found_key, set())
        if found_key in INTERACTION_NODES:
            candidates = candidates or {"interaction"}
        if found_key != ACCUMULATE and len(candidates) == 1:
            component[unnamed & (node == row)] = next(iter(candidates))


def work_on_gpus(trace: pd.DataFrame, threads: pd.DataFrame) -> pd.DataFrame:
    """Rows of a trace that ran on a GPU, in the order of their begin."""
    streams = threads.loc[threads["kind"] == "gpu_stream", "profile"]
    return trace[trace["profile"].isin(streams)].sort_values("start_ns", kind="stable")


def parts_in_order(
    trace: pd.DataFrame, threads: pd.DataFrame, labels: Labels, iterations: pd.DataFrame | None
) -> pd.Series:
    """Part of each operation of the GPUs and of each sample of threads that run parts, by the index
    of ``trace``."""
    work = work_on_gpus(trace, threads)
    pieces = [pd.Series(by_order(work, labels, iterations), work.index, dtype=object)]
    speaks = labels.component != "other"
    host = trace[~trace["profile"].isin(work["profile"])]
    for _, rows in host.groupby("profile"):
        if speaks[rows["context"]].any():
            rows = rows.sort_values("start_ns", kind="stable")
            pieces.append(pd.Series(by_order(rows, labels, None), rows.index, dtype=object))
    return pd.concat(pieces)


def by_order(
    trace: pd.DataFrame, labels: Labels, iterations: pd.DataFrame | None
) -> list[tuple[str, str]]:
    """Part of each operation of a GPU, or of each sample of a thread, whose rows of the trace are
    in the order of their begin; ``iterations`` have ``start_ns``, in order, or are None where none
    are known."""
    context = trace["context"].to_numpy()
    component, phase = labels.component[context].copy(), labels.phase[context].copy()
    iteration = np.zeros(len(context), np.int64)
    if iterations is not None:
        start = trace["start_ns"].to_numpy()
        iteration = np.searchsorted(iterations["start_ns"].to_numpy(), start, side="right")
        # before the first iteration nothing is certain but what is named outright
        unsure = (iteration == 0) & (labels.hinted[context] | (component == "other"))
        component[unsure], phase[unsure] = NO_STEP, START_UP
    model = np.isin(component, MODEL_OR_MLP)
    for backward in (False, True):
        mine = np.flatnonzero((phase == "backward") if backward else model & (phase == "forward"))
        # A pass ends where an iteration does, or where the other pass or a copy comes between;
        # a single operation of the other pass is one that the recording has put there.
        if backward:
            other = (model & (phase == "forward")) | (component == "data") | (phase == "update")
        else:
            other = phase == "backward"
        parting = other & np.append(False, other[:-1])
        if not backward:
            parting |= component == "transfer"
        turn = iteration[mine] * (len(context) + 1) + np.cumsum(parting)[mine]
        resolved: dict[tuple[str, ...], list[str]] = {}
        for rows in np.split(mine, np.flatnonzero(np.diff(turn)) + 1):
            names = tuple(component[rows])
            if names not in resolved:
                resolved[names] = _backward(names) if backward else mlp_by_order(names, False)
            component[rows] = resolved[names]
    return [_part(*pair) for pair in zip(component.tolist(), phase.tolist(), strict=True)]


def _backward(components: Sequence[str]) -> list[str]:
    """Parts of the operations of one backward pass, or of several that nothing keeps apart.

    Nameless operations belong to what ran before them, the first ones to what follows. With
    the loss a new pass begins. What runs before the interaction is the top MLP, what runs
    after it the bottom MLP; what lies between two interactions may be either.
    """
    filled = list(components)
    last = next((name for name in components if name != "other"), "other")
    for place, name in enumerate(components):
        last = last if name == "other" else name
        filled[place] = last
    begins: list[int] = []
    for place, name in enumerate(filled):
        if name == "loss" and "interaction" in filled[begins[-1] if begins else 0 : place]:
            begins.append(place)
    for first, beyond in zip([0, *begins], [*begins, len(filled)], strict=True):
        low, high = _interaction(filled[first:beyond])
        for place in range(first, beyond):
            if filled[place] != MLP:
                continue
            before, after = place - first < low, place - first > high
            filled[place] = "top_mlp" if before else "bottom_mlp" if after else "other"
    return filled


def _interaction(components: Sequence[str]) -> tuple[int, int]:
    """First and last place of the interaction; where there is none, the whole sequence's.

    A few operations apart from nearly all others are ones that the recording has misplaced.
    """
    places = np.flatnonzero(np.array(components, dtype=object) == "interaction")
    if not len(places):
        return 0, len(components)
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    longest = max(runs, key=len)
    chosen = longest if len(longest) >= 0.8 * len(places) else places
    return int(chosen[0]), int(chosen[-1])


def _part(component: str, phase: str) -> tuple[str, str]:
    if component == NO_STEP:
        return "other", START_UP
    return (component, phase) if component in COMPONENTS and component != "other" else OTHER


Tables = tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]
"""Contexts, values and trace of a profile."""


def divide(
    tables: Tables, labels: Labels, parts: pd.Series, overlong: Mapping[int, int]
) -> tuple[Tables, int]:
    """The tables with a part for every context, those of several parts divided, and how many
    contexts were. ``parts`` are of rows of the trace, by their index there; ``overlong`` has the
    true end of rows of the trace that last too long.

    Copies of contexts stand at the end of their table, so the others keep their numbers. Times and
    bytes go to the copies as the time in the trace does, counts as the number of operations does.
    """
    contexts, values, trace = tables
    component, phase = labels.component.copy(), labels.phase.copy()
    unknown = ~np.isin(component, COMPONENTS) | (component == "other")
    phase[unknown] = np.where(component[unknown] == NO_STEP, START_UP, "")
    component[unknown] = "other"
    scope, rows = scopes(contexts), trace.loc[parts.index]
    end = rows["end_ns"].copy()
    end.update(pd.Series(overlong, dtype="int64"))
    part, names = pd.factorize(parts)
    placed = rows[["context"]].assign(
        within=scope[rows["context"]], part=part, time=end - rows["start_ns"]
    )
    shares = shares_of_parts(placed, ["within"])
    shares = shares.sort_values(["within", "time"], ascending=[True, False], kind="stable")
    further = shares["within"].duplicated()
    kept = shares[~further].set_index("within")["part"]
    inside = np.isin(scope, kept.index)
    if inside.any():
        component[inside], phase[inside] = zip(*names[kept[scope[inside]].to_numpy()], strict=True)
    contexts = contexts.assign(component=component, phase=phase)
    if not further.any():
        return (contexts, values, trace), 0
    copies = _copies(contexts, scope, shares[further])
    block = contexts.iloc[copies["old"]].assign(
        context=copies["new"].to_numpy(), parent=copies["above"].to_numpy()
    )
    block["component"], block["phase"] = zip(*names[copies["part"].to_numpy()], strict=True)
    keys = ["within", "part", "old"]
    moved = placed.rename(columns={"context": "old"}).join(copies.set_index(keys)["new"], on=keys)
    divided = (
        pd.concat([contexts, block], ignore_index=True),
        _divided_values(values, contexts["parent"].to_numpy(), copies),
        trace.assign(context=moved["new"].combine_first(trace["context"]).astype("int64")),
    )
    return divided, copies["within"].nunique()


def shares_of_parts(rows: pd.DataFrame, of: list[str]) -> pd.DataFrame:
    """The shares that parts have in what their operations belong to (columns ``of``), in ``time``
    and number (``count``). The rows have ``part`` and ``time`` of each operation, and these
    columns."""
    rows = rows.assign(count=1, time=rows["time"].clip(lower=0))
    shares = rows.groupby([*of, "part"], as_index=False, sort=False)[["time", "count"]].sum()
    whole = shares.groupby(of)[["time", "count"]].transform("sum")
    shares["count"] /= whole["count"]
    # what took no time by the trace is divided as it is counted
    shares["time"] = (shares["time"] / whole["time"]).where(whole["time"] > 0, shares["count"])
    return shares


def _copies(contexts: pd.DataFrame, scope: Ints, further: pd.DataFrame) -> pd.DataFrame:
    """The further contexts of scopes that are divided, by the ``further`` parts that get copies: a
    row a copy, with the columns of :func:`shares_of_parts`, ``old`` and ``new`` (the numbers of the
    context and of its copy) and ``above`` (the parent of the copy)."""
    members = pd.DataFrame({"within": scope, "old": np.arange(len(scope))})
    copies = further.merge(members, on="within")
    copies["new"] = len(contexts) + np.arange(len(copies))
    # below a copied context stands its copy, above it the same callers as before
    copies["above"] = contexts["parent"].to_numpy()[copies["old"]]
    keys = ["within", "part", "above"]
    inner = copies.join(copies.set_index(["within", "part", "old"])["new"], on=keys, rsuffix="_of")
    is_head = copies["old"] == copies["within"]
    copies.loc[~is_head, "above"] = inner["new_of"][~is_head].astype("int64")
    return copies


def scopes(contexts: pd.DataFrame) -> Ints:
    """The function, kernel or range that each context lies in (n,); itself for such and roots."""
    parent = contexts["parent"].to_numpy()
    return nearest(parent, ~contexts["kind"].isin(DETAIL).to_numpy() | (parent < 0))


def _divided_values(values: pd.DataFrame, parent: Ints, copies: pd.DataFrame) -> pd.DataFrame:
    """The values, of which the copies of contexts have their shares."""
    exclusive = values[values["scope"].eq("exclusive") & values["context"].isin(copies["old"])]
    moved = exclusive.rename_axis("row").reset_index()
    moved = moved.merge(copies, left_on="context", right_on="old")
    counted = moved["metric"].map(is_count).to_numpy(dtype=bool)
    moved["value"] *= np.where(counted, moved["count"], moved["time"])
    steps = [moved]  # inclusive values: everything also counts for what is above it
    while not steps[-1].empty:
        lower = steps[-1][steps[-1]["old"] != steps[-1]["within"]]
        above = copies["above"].to_numpy()[lower["new"] - copies["new"].iloc[0]]
        steps.append(lower.assign(new=above, old=parent[lower["old"]]))
    keys = ["profile", "metric", "old"]
    inclusive = pd.concat(steps).groupby(["new", *keys], as_index=False, observed=True)
    total = inclusive["value"].sum().assign(scope="inclusive")
    left = values["value"].copy()
    left[moved["row"].unique()] -= moved.groupby("row")["value"].sum()
    gone = total.groupby(keys, observed=True)["value"].sum()
    whole = values[values["scope"].eq("inclusive") & values["context"].isin(copies["old"])]
    less = whole.rename(columns={"context": "old"}).join(gone, on=keys, rsuffix="_gone")
    left[less.index] -= less["value_gone"].fillna(0.0)
    added = pd.concat([moved.assign(scope="exclusive"), total], ignore_index=True)
    added = added[added["value"] != 0].assign(context=added["new"])[list(values.columns)]
    added = added.astype({name: values[name].dtype for name in ("metric", "scope")})
    return pd.concat([values.assign(value=left), added], ignore_index=True)


def is_count(metric: str) -> bool:
    """Whether a metric counts operations, or adds up a property of each."""
    return metric in ("calls", "launches") or metric.endswith(("COUNT", "_ACUMU", "_ACUMU (B)"))
