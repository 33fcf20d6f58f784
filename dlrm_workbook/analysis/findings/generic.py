"""Rules of last resort: time that nobody else explained, wherever it is.

Each part has been timed alone, in the same process, before the run. A part that takes much
longer in the run than alone is held back by something, whether or not a rule knows what.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from dlrm_workbook.analysis.attribution import (
    PART,
    UNRECORDED,
    host_time,
    iteration_count,
    main_thread,
    parts_at,
    step_contexts,
    unattributed,
)
from dlrm_workbook.analysis.findings.evidence import (
    MOST_LISTED,
    Evidence,
    Part,
    by_kernel,
    heaviest,
    listed_times,
)
from dlrm_workbook.analysis.findings.finding import (
    LEAST_FIRST,
    Causes,
    Measured,
    bounded,
    capitalised,
    largest,
    rule,
    share_of_first_calls,
)
from dlrm_workbook.analysis.findings.gpu_idle import ALLOCATING
from dlrm_workbook.analysis.findings.gpu_taken import SYNC
from dlrm_workbook.analysis.findings.where import (
    PLACE_LEVELS,
    RECORD_MORE,
    in_place,
    levels,
    line_name,
    loops_of,
    merged,
    part_name,
    shown,
    time_by_name,
)
from dlrm_workbook.analysis.lines import lines
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.foreign import COMMUNICATION, node_key
from dlrm_workbook.recordings.nsight import WAITING_CALLS
from dlrm_workbook.recordings.profile import nearest
from dlrm_workbook.recordings.torch.lines import MAIN

DOMINANT_PART_SHARE = 0.4
"""Least share of CPU time in one part and phase of a foreign program; less is ordinary for the
largest."""


SLOWER_THAN_ALONE = 1.5
"""Times its probe. Parts take up to 1.5 times theirs in clean runs, since in the run others
have emptied the caches (measured: tests/campaigns/planted_faults.py)."""

WORTH_SHARE = 0.08
"""Of the step, lost to the excess."""


@rule(
    "slower_than_alone",
    title="{name} takes {ratio:.1f}x as much time in the run as alone",
    evidence=(
        "In the run and alone: {times}.",
        "In {worst} the time is in {heaviest}.",
        "{meanwhile}",
    ),
    advice="Compare what {worst} calls in the run with what it needs: a hook, a debugging mode, "
    "extra work, tensors that left the cache.",
    limit="memory bandwidth",
)
def slower_than_alone(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Parts take much longer in the run than alone, and nothing explains it."""
    left, parts = ledger.left_ms, evidence.parts
    if left.empty:
        return None
    alone = parts["alone_ms"].reindex(left.index)
    ratio = (alone + left) / alone.where(alone > 0)
    slow = left[(ratio >= SLOWER_THAN_ALONE) & (left >= 0.01 * evidence.total_ms)]
    slow = slow[[_is_significant(evidence, part) for part in slow.index]]
    slow = slow.sort_values(ascending=False)
    lost = float(slow.sum())
    if lost < WORTH_SHARE * evidence.total_ms:
        return None
    places = [(str(component), str(phase)) for component, phase in slow.index]
    for part, time in zip(places, slow, strict=True):
        ledger.explain(float(time), part)
    worst = part_name(*places[0])
    figures: Measured = {
        "share": lost / evidence.total_ms,
        "component": places[0][0],
        "concerns": sorted({component for component, _ in places}),
        "name": worst.capitalize().replace("mlp", "MLP"),
        "worst": worst,
        "ratio": float(ratio[places[0]]),
        "times": ", ".join(
            f"{part_name(*part)} {milliseconds(float(parts['time_ms'][part]))}, alone "
            f"{milliseconds(float(alone[part]))}"
            for part in places[:5]
        ),
        "heaviest": heaviest(evidence.of_part(*places[0])),
    }
    if len(slow) >= 4 and slow.iloc[0] < 0.6 * lost:
        figures |= {
            "title": "Every part is slower in the run than alone",
            "component": "other",
            "advice": "Something in the run slows the machine or every part: a hook, a debugging "
            "mode, clocks, memory placement, contention for caches or memory.",
            "limit": "scheduling",
        }
    return figures


OPENMP = re.compile(r"lib(?:gomp|iomp5|omp)\b")

SPINNING_SHARE = 0.2
"""Least share of the CPU time of all threads."""


@rule(
    "spinning_threads",
    title="OpenMP's threads wait for {of_all:.0%} of the CPU time of all threads",
    evidence=(
        "{waits:ms} of {all:ms} of CPU time, sampled on {count} threads, pass inside {library}, "
        "which is where threads spin until the others are done or new work comes.",
        "Of the thread that steps it is {share:.0%}; what the others' spinning costs it (cores, "
        "clocks, memory bandwidth) was not measured: a sampled recording of one run does not tell.",
    ),
    advice="Fewer threads (OMP_NUM_THREADS), or let them sleep while they wait "
    "(OMP_WAIT_POLICY=PASSIVE).",
    limit="scheduling",
)
def spinning_threads(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Threads of OpenMP burn CPU time without work, in a sampled recording of all threads."""
    profile = evidence.profile
    rows = profile.values[profile.rows("cpu_time_ms", "exclusive")]
    if evidence.meta.get("engine") != "hpctoolkit" or rows.empty:
        return None
    waits = profile.which("name", lambda name: bool(OPENMP.search(name)))
    waits |= profile.which("module", lambda name: bool(OPENMP.search(name)))
    here = rows[waits[rows["context"].to_numpy()]]
    total = float(rows["value"].sum())
    if float(here["value"].sum()) < SPINNING_SHARE * total:
        return None
    names = profile.contexts[["module", "name"]].iloc[here["context"]].agg(" ".join, axis=1)
    library = OPENMP.search(str(names.iloc[0]))
    stepping = main_thread(profile)
    own = float(rows.loc[rows["profile"].eq(stepping), "value"].sum())
    waited = float(here.loc[here["profile"].eq(stepping), "value"].sum())
    share = waited / own if own > 0 else 0.0
    return {
        "share": share,
        "least": 0.0,
        "of_all": float(here["value"].sum()) / total,
        "waits": float(here["value"].sum()),
        "all": total,
        "count": rows["profile"].nunique(),
        "library": library[0] if library else "OpenMP's library",
        "speedup": bounded(share),
    }


PLACE_SHARE = 0.25
"""Least share of the step with a GPU in one range, operator or function for it to be named."""

EVERYWHERE = 0.9
"""Share of the step from which on a range, operator or function is the step, and no place in it."""

COMPUTES_MS = 0.1
"""Of an operator's own time in each call, far beyond the microseconds that calling it takes."""

FUNCTION_SHARE = 0.04
"""Least share of CPU time for a function to be listed among those that no finding names."""

TOLD = 0.5
"""A finding that takes more than this part of that share and names the place tells it already."""

SAME_PLACE = 0.8
"""Least part of a name's time for an inner name that has it to be named instead."""


@rule(
    "largest_place",
    title="{unknown}{name} {takes} {of_calls}{share:.0%} of the step",
    evidence=(
        "In {what} the GPU works {busy:ms} and is idle {idle:ms} of {total_ms:ms} per "
        "iteration{place}.",
        "{itself} takes {time:ms} of {total_ms:ms} per iteration, without what builds the model.",
        "Its kernels: {kernels}.",
        "Most of it: {heaviest}.",
        "The time by name: {names}.",
        "It is called {calls:count} times per iteration, for {each:ms} each: computing takes the "
        "time, not calling it.",
        "By the Python function that calls these: {callers}.",
        "Of the sampled time that no finding above names, these take most: {listed}.",
        "No rule found why: how short it could be, and what would help, was not measured.",
    ),
    advice="Look first at what is named here: what calls it, with which types, shapes and "
    "threads, and whether each iteration needs it.",
    limit="",
)
def largest_place(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Where no rule knows why: the range, operator, function or part of another program in which
    most time passes. Of our own programs, probes and ceilings tell more."""
    if evidence.is_ours:
        return None
    if evidence.has_timeline:
        measured = _place_on_gpu(evidence, ledger)
    elif _is_sampled(evidence):
        measured = None
        if not evidence.on_gpu:
            measured = _sampled_place(evidence, ledger) or _sampled_functions(evidence, ledger)
    else:
        measured = _without_parts(evidence, ledger)
    nothing = ["what", "itself", "kernels", "heaviest", "names", "callers", "listed"]
    nothing += ["calls", "each"]
    usual = {"takes": "takes", "of_calls": "", "busy": 0, "least": 0.0, **dict.fromkeys(nothing)}
    # of a program that was measured here every rule was asked
    asked = bool(evidence.meta.get("passes"))
    usual["unknown"] = "No known bottleneck found: " if asked else ""
    return measured and usual | measured


def _place_on_gpu(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The GPU's work in one range, operator or function and the GPU's idle time there together,
    whatever the kernels and the causes are; exchanges between ranks are left out."""
    profile, pieces = evidence.profile, evidence.pieces
    exchanges = np.append(evidence.named(COMMUNICATION), False)[pieces["context"]]
    rows = pieces[~(exchanges & pieces["where"].eq("device"))]
    places = time_by_name(profile, rows["context"], rows["ms"])
    del places["call"]  # of idle time, which another finding tells
    most = max((float(times.iloc[0]) for times in places.values() if len(times)), default=0.0)
    if not PLACE_SHARE <= most / evidence.total_ms <= EVERYWHERE:
        return None
    # of nested names with nearly the same time the innermost
    level = [
        key for key, times in places.items() if len(times) and times.iloc[0] > SAME_PLACE * most
    ][-1]
    name = str(places[level].index[0])
    least = TOLD * most / evidence.total_ms
    if any(share > least and shown(name) in text for share, text in ledger.told):
        return None
    inside = in_place(profile, level, name)
    own = rows[inside[rows["context"]] & rows["context"].ge(0)]
    busy = own[own["where"].eq("device")]
    by_context = busy.groupby("context")["ms"].sum()
    parts = parts_at(profile, own["context"].to_numpy())
    part = largest(own["ms"].groupby([parts[each].to_numpy() for each in PART]).sum())
    time = float(own["ms"].sum())
    return {
        "share": time / evidence.total_ms,
        "component": part[0],
        "name": shown(name),
        "what": f"the {PLACE_LEVELS[level].removesuffix(' within it')} {shown(name)}",
        "busy": float(busy["ms"].sum()),
        "idle": time - float(busy["ms"].sum()),
        "place": f", most in {part_name(*part)}" if part[0] != "other" else "",
        "kernels": listed_times(by_kernel(profile, by_context.index, by_context)) or None,
        "pieces": (own["context"], own["ms"]),
        "speedup": bounded(time / evidence.total_ms, 0.5),
    }


WAITS = "Look at what it waits for: that, and not this call, takes the time."

MEANINGS = (
    (SYNC, "Waiting for the GPU", WAITS),
    (re.compile(r"aten::(item|_local_scalar_dense)$"), "Waiting for the device", WAITS),
    (COMMUNICATION, "Exchanging with other ranks", WAITS),
    (re.compile(r"rpc_(a?sync|remote)|to_here"), "Waiting for another process", WAITS),
    (
        ALLOCATING,
        "Taking or giving back memory of the GPU",
        "Keep memory and use it again; where few calls take most of it, record later iterations, "
        "and see what recurs.",
    ),
)
"""Calls that compute nothing, by their names: what passes in them, and what to do."""


def _without_parts(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The largest name of a recording most of whose time is in no part, where no rule found
    anything; of a recording without lines the part that takes more."""
    table = unattributed(evidence.profile)
    family = _largest_family(evidence)
    if ledger.told:
        most = max(share for share, _ in ledger.told)
        return family if family and family["share"] > most else None
    by_line = lines(evidence.profile)
    by_line = by_line[by_line["thread"].eq(MAIN) & by_line["file"].ne("")]
    most = table["share"].max() if evidence.low_coverage else PLACE_SHARE
    part = _largest_part(evidence, most) if by_line.empty or not evidence.low_coverage else None
    if part is not None or not evidence.low_coverage or table.empty:
        return part
    meant = [
        next(
            (what for pattern, what, _ in MEANINGS if kind == "runtime" and pattern.search(name)),
            name,
        )
        for name, kind in zip(table["name"], table["kind"], strict=True)
    ]
    together = table["share"].groupby([meant, table["kind"]]).transform("sum")  # of one meaning
    table = table.assign(what=meant, together=together)
    table = table.sort_values("together", ascending=False, kind="stable", ignore_index=True)
    waits = table["name"].str.fullmatch(WAITING_CALLS) & table["kind"].eq("function")
    first, share = str(table["name"].iloc[0]), float(table["together"].iloc[0])
    alike = table[table["together"].eq(share) & table["share"].gt(0.1 * share)][:2]
    others = [] if alike["share"].sum() > 0.95 * share else ["others"]
    name = " and ".join([*map(shown, alike["name"]), *others])
    called = evidence.called[evidence.called["name"].eq(first)]
    calls = float(called["calls"].sum())
    each = float(called["cpu_self_ms"].sum()) / calls if calls else 0.0
    chosen = np.flatnonzero(evidence.profile.contexts["name"].eq(first))
    told: Measured = {"called": chosen}
    is_it = np.append(evidence.profile.which("name", set(alike["name"]).__contains__), False)
    if len(own := evidence.pieces[is_it[evidence.pieces["context"]]]):
        told["pieces"] = own["context"], own["ms"]
    if each > COMPUTES_MS and share_of_first_calls(evidence, chosen)[0] < LEAST_FIRST:
        told |= {"calls": calls, "each": each}
    unrecorded = float(table.loc[table["name"].eq(UNRECORDED), "share"].sum())
    if unrecorded > 0.01 and name != UNRECORDED:  # the share that torch's own table has
        told["of_calls"] = f"{share / (1 - unrecorded):.0%} of the time in recorded calls and "
    meanings = [(what, advice) for pattern, what, advice in MEANINGS if pattern.search(first)]
    if waits.iloc[0]:
        name = f"Waiting in {name}"
    elif meanings and (each > COMPUTES_MS or table["kind"].iloc[0] == "runtime"):
        name = f"{meanings[0][0]} in {name}"
        told |= {"calls": None, "advice": meanings[0][1]}
    elif table["kind"].iloc[0] in ("annotation", "python") or first in loops_of(evidence.profile):
        name = f"The code of {name} itself, outside what it calls,"
        told |= {"calls": None}
    elif name == UNRECORDED:
        name, told["advice"] = capitalised(name), RECORD_MORE
    names = table["name"].where(~waits, table["name"] + " (waits)").head(MOST_LISTED)
    listed = listed_times((table["share"] * evidence.total_ms).head(MOST_LISTED).set_axis(names))
    if family and by_line.empty and family["share"] > MORE_TOGETHER * share:
        return family
    if len(by_line):
        row = by_line.iloc[0]
        waited = meanings if share > 0.5 * row["share_of_step"] else []
        share, name, listed, told = float(row["share_of_step"]), line_name(row), "", {}
        for what, advice in waited:
            name, told = f"{what} at {name}", {"advice": advice}
    return {"share": share, "name": name, "names": listed or None, "speedup": {}} | told


FAMILIES = (
    ("Convolutions", re.compile(r"(?i)conv")),
    ("Recurrent layers", re.compile(r"(?i)lstm|gru\b|rnn")),
    ("Matrix products", re.compile(r"(?i)linear|matmul|einsum|(?:\b|_|add|b)mm(?:\b|_|backward)")),
)
"""What operators, and their backward, compute by other names as well."""

MORE_TOGETHER, PLACE_LEAST = 1.2, 0.1
"""Times the largest name's time that a family takes to be told instead, and the least part
of it that each of two names has."""


def _largest_family(evidence: Evidence) -> Measured | None:
    """The operators of one kind, by whatever names, that take most of a recording of a CPU: what
    computes below those of that name, not what they make ready or add up."""
    if evidence.on_gpu or evidence.meta.get("passes") or evidence.pieces.empty:
        return None
    rows, profile = evidence.pieces, evidence.profile
    outer, inner = (levels(profile)[level] for level in ("outer", "inner"))
    alike = {what: evidence.named(pattern) for what, pattern in FAMILIES}
    computes = np.any(list(alike.values()), axis=0)[inner] & (inner >= 0)
    of_kind = {}
    for what, of_name in alike.items():
        chosen = rows[np.append(of_name[outer] & computes, False)[rows["context"]]]
        of_kind[what] = time_by_name(profile, chosen["context"], chosen["ms"])["inner"]
    what, most = max(of_kind.items(), key=lambda each: each[1].sum())
    if (most > PLACE_LEAST * most.sum()).sum() < 2:
        return None
    share = float(most.sum()) / evidence.total_ms
    names = listed_times(merged(most)[:MOST_LISTED])
    return {"share": share, "name": what, "takes": "take", "names": names, "speedup": {}}


TOGETHER = (
    "Give the optimizer foreach=True, or fused=True where its class has it: a few calls then "
    "update all parameters, which it updates one by one."
)


def _largest_part(evidence: Evidence, least: float) -> Measured | None:
    """The named part that takes most of a recording of another machine, if more than so much."""
    parts = evidence.attribution[evidence.attribution["component"].ne("other")]
    shares = parts.groupby(PART)["share"].sum()
    if evidence.meta.get("passes") or shares.empty or not shares.max() > least:
        return None
    part = largest(shares)
    called = evidence.of_part(*part)
    one_by_one = part[1] == "update" and not called["name"].str.contains("_fused_|_foreach_").any()
    return {
        "share": float(shares.max()),
        **({"advice": TOGETHER} if one_by_one else {}),
        "component": part[0],
        "name": capitalised(part_name(*part)),
        "heaviest": heaviest(called[called["kind"].eq("operator")]),
        "speedup": {},
    }


def _sampled_place(evidence: Evidence, ledger: Causes) -> Measured | None:
    """One part, or one function in no part, that takes much of the CPU's time."""
    table = _at_work(evidence)
    groups = ["component", "phase", "function"]
    times = table.groupby(groups)["time_ms"].sum()
    if times.empty:
        return None
    row = int(np.argmax(times.to_numpy()))
    component, phase, function = map(str, times.index[row])
    time = float(times.max())
    if time - ledger.anywhere_ms < DOMINANT_PART_SHARE * evidence.total_ms:
        return None
    if ledger.is_explained((component, phase)):
        return None
    name = function if component == "other" else capitalised(part_name(component, phase))
    own = table[table.groupby(groups).ngroup().eq(row).to_numpy()]
    itself = heaviest(own, column="time_ms")
    callers = heaviest(_callers(evidence, own), column="time_ms")
    return {
        "share": time / evidence.total_ms,
        "component": component,
        "concerns": (component,) if component != "other" else (),
        "name": name,
        "itself": f"{name} (samples in no named part)" if component == "other" else "It",
        "time": time,
        "heaviest": itself,
        "callers": callers if callers != itself else None,
        "speedup": {},
    }


def _sampled_functions(evidence: Evidence, ledger: Causes) -> Measured | None:
    """Python functions, or nodes of autograd, that take much of a sampled program, each by what it
    and all that it calls in no other such function take."""
    contexts = evidence.profile.contexts
    table = _at_work(evidence)
    marked = evidence.profile.of_kind("python")
    marked |= evidence.profile.which("name", lambda name: node_key(name) is not None)
    above = nearest(contexts["parent"].to_numpy(), marked)[table.index]
    table = table.assign(name=contexts["name"].to_numpy()[above])[above >= 0]
    parts = zip(table["component"], table["phase"], strict=True)
    table = table[[not ledger.is_explained(part) for part in parts]]
    times = table.groupby(["name", *PART])["time_ms"].sum().sort_values(ascending=False)
    times = times[times >= FUNCTION_SHARE * evidence.total_ms]
    named_above = " ".join(text for _, text in ledger.told).lower()
    names = [str(name) for name in times.index.get_level_values("name")]
    times = times[[_short_node(name).lower() not in named_above for name in names]]
    if times.empty:
        return None
    rows = times.reset_index(name="ms")
    labels = [
        f"{_short_node(name)}{f' in {part_name(part, phase)}' if part != 'other' else ''}"
        for name, part, phase in rows[["name", *PART]].itertuples(index=False)
    ]
    return {
        "id": "largest_functions",
        "share": float(times.sum()) / evidence.total_ms,
        "component": str(times.index[0][1]),
        "name": ", ".join(labels[:2]) + (", ..." if len(labels) > 2 else ""),
        "takes": "takes" if len(labels) == 1 else "take",
        "listed": listed_times(pd.Series(rows["ms"].to_numpy(), labels)),
        "speedup": {},
    }


def _callers(evidence: Evidence, own: pd.DataFrame) -> pd.DataFrame:
    """The rows of :func:`_at_work` under the name of the innermost Python function at or above
    each; rows without one are left out."""
    contexts = evidence.profile.contexts
    above = nearest(contexts["parent"].to_numpy(), evidence.profile.of_kind("python"))[own.index]
    return own.assign(name=contexts["name"].to_numpy()[above])[above >= 0]


def _at_work(evidence: Evidence) -> pd.DataFrame:
    """Sampled functions of the step's threads, without those that build the model:
    ``name``, ``component``, ``phase``, ``function`` and ``time_ms`` of its own.

    Time in no part has the autograd node above it as its ``function``, or else the Python
    function; without either it is left out. Elsewhere ``function`` is "".
    """
    profile = evidence.profile
    contexts = profile.contexts
    parent = contexts["parent"].to_numpy()
    python = np.asarray(profile.of_kind("python"))
    is_node = np.asarray(profile.which("name", lambda name: node_key(name) is not None))
    building = nearest(parent, python & contexts["name"].eq("__init__").to_numpy()) >= 0
    # where a library has no lines, its functions are named
    called = nearest(parent, contexts["kind"].isin(["function", "python"]).to_numpy())
    unnamed = contexts["name"].str.startswith("[").to_numpy() & (called >= 0)
    table = contexts[["name", "component", "phase"]].assign(
        name=contexts["name"].iloc[np.where(unnamed, called, np.arange(len(contexts)))].to_numpy(),
        time_ms=np.asarray(host_time(profile)) / iteration_count(profile),
        function="",
    )
    above = nearest(parent, is_node | python)
    rows = np.unique(above[above >= 0])
    labels = {
        row: f"The backward of {node_key(name)}" if of_node else name
        for row, name, of_node in zip(rows, contexts["name"].iloc[rows], is_node[rows], strict=True)
    }
    placed = contexts["component"].ne("other").to_numpy()
    table.loc[~placed, "function"] = pd.Series(above[~placed], table.index[~placed]).map(labels)
    table = table[step_contexts(profile, other_threads=False) & ~building]
    return table[table["time_ms"].gt(0)].dropna(subset=["function"])


def _short_node(name: str) -> str:
    """The name of a function, or of the backward that a node of autograd is."""
    key = node_key(name)
    return f"the backward of {key}" if key else shown(name)


def _is_sampled(evidence: Evidence) -> bool:
    """Whether the recording holds samples of another program, and parts of it."""
    if evidence.is_ours or evidence.meta.get("engine") != "hpctoolkit":
        return False
    return not evidence.attribution["component"].eq("other").all()


def _is_significant(evidence: Evidence, part: Part) -> bool:
    """Whether the part was slow in nearly all iterations, not in a few."""
    if part not in evidence.steps:
        return True
    alone = evidence.parts["alone_ms"][part]
    times = evidence.steps[part].to_numpy()
    return bool(np.mean(times > 1.2 * alone) >= 0.75)
