"""Operators: those that the model does not need, and those too small for what calling one costs.

Which operators a step needs, and how many, follows from the model's shapes
(:mod:`dlrm_workbook.analysis.work`); what a trace calls beyond that is named by what it does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis.attribution import PART, UNRECORDED, unattributed
from dlrm_workbook.analysis.findings.evidence import Evidence, Part
from dlrm_workbook.analysis.findings.finding import (
    Causes,
    Measured,
    bounded,
    capitalised,
    is_worthwhile,
    largest,
    predicted,
    removed,
    rule,
)
from dlrm_workbook.analysis.findings.where import (
    called_most,
    line_name,
    loops_of,
    main_function,
    part_name,
    shown,
)
from dlrm_workbook.analysis.lines import line_table, lines
from dlrm_workbook.analysis.work import operator_work
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.profile import nearest
from dlrm_workbook.recordings.torch.lines import MAIN

MANY = 100
"""Extra calls per iteration from which smallness, not any one operator, is the matter."""

TINY = 6.0
"""An operator below this many times the cost of calling one is mostly that cost."""


@dataclass(frozen=True)
class ExtraKind:
    """What a group of operators that do not belong is."""

    names: str
    """Pattern of the operators that tell it."""
    id: str
    title: str
    advice: str
    limit: str
    change: dict[str, Any] = field(default_factory=dict)
    """The parameter that ends it, if one does."""
    unmistakable: bool = False
    """Named so even if each call is tiny: nothing else calls these operators."""


def extra_table(evidence: Evidence) -> pd.DataFrame:
    """Operators called beyond what the model's shapes ask for.

    Returns:
        ``name``, ``component``, ``phase``, ``calls``, ``time_ms`` (self, with the Python
        between many of them; undilated), of a mean iteration. Empty without parameters or calls.
    """
    columns = ["name", *PART, "calls", "time_ms"]
    nothing = pd.DataFrame({name: [] for name in columns}).astype({"name": str})
    called = evidence.called
    if evidence.parameters is None or called.empty or not called["calls"].gt(0).any():
        return nothing
    try:
        statistics = evidence.meta.get("data_statistics")
        work = operator_work(evidence.parameters, statistics, evidence.device)
    except (InputError, KeyError):
        return nothing
    tables = len(evidence.parameters.model.table_rows)
    converts = evidence.parameters.training.precision != "fp32"
    needed = _needed_calls(work, tables if converts else 0)
    called = called[~called["component"].isin(["data", "transfer", "communication"])]
    table = called.groupby([*PART, "name"], as_index=False)[["calls", "cpu_self_ms"]].sum()
    parts = list(zip(table["component"], table["phase"], strict=True))
    allowed = [
        _allowed_calls(part, name, needed) for part, name in zip(parts, table["name"], strict=True)
    ]
    extra = (table["calls"] - allowed).clip(lower=0.0)
    undilated = evidence.parts["time_ms"] / evidence.parts["traced_ms"].replace(0.0, float("nan"))
    table["time_ms"] = table["cpu_self_ms"] * extra / table["calls"].clip(lower=1e-9)
    table["time_ms"] *= undilated.reindex(parts).fillna(1.0).to_numpy()
    table["calls"] = extra
    table = table[table["calls"] > 0.5]
    # the Python between many calls is part of what they cost
    every = table.groupby(PART)["calls"].transform("sum")
    own = pd.MultiIndex.from_frame(table[PART])
    python = evidence.parts["python_ms"].reindex(own).fillna(0.0).to_numpy()
    table["time_ms"] += (python * table["calls"] / every).where(every >= MANY, 0.0)
    return table[columns].reset_index(drop=True)


ALIASES = {
    "relu": ("clamp_min", "clamp_min_", "relu", "threshold"),
    "index_put": ("_index_put_impl_", "index_put_", "index_put"),
    "addmm": ("addmm", "linear", "mkldnn_linear", "mm"),
    "mm": ("mm", "addmm", "matmul"),
    "add_": ("add_", "add", "_fused_sgd_", "_foreach_add_"),
    "add": ("add", "add_"),
    "cat": ("cat", "stack", "copy_"),
    "sum": ("sum",),
    "copy_": ("copy_", "clone"),
    "mse_loss": ("mse_loss", "mean", "sum", "div_", "sub", "pow"),
}
"""Operator of the work tables to what torch calls for it."""


def _needed_calls(work: pd.DataFrame, converted: int) -> dict[Part, dict[str, float]]:
    """(component, phase) to operator name (without ``aten::``) to calls per iteration.

    The name "" has the calls of all operators that do work.

    Args:
        converted: pooled vectors that autocast converts in the interaction.
    """
    needed: dict[Part, dict[str, float]] = {}
    for row in work[["component", "phase", "operator", "count"]].itertuples(index=False):
        names = needed.setdefault((str(row[0]), str(row[1])), {"": 0.0})
        operator, count = str(row[2]), float(row[3])
        names[""] += count
        for name in ALIASES.get(operator, (operator,)):
            names[name] = names.get(name, 0.0) + count
    for (component, _), names in needed.items():
        if component == "interaction" and converted:
            names["_to_copy"] = max(names.get("_to_copy", 0.0), converted + 2.0)
        # a conversion copies; so does a bias that is spread over the rows of its product
        spread = names.get("addmm", 0.0) + names.get("_to_copy", 0.0)
        names["copy_"] = names.get("copy_", 0.0) + spread
    return needed


FREE = re.compile(
    r"aten::(as_strided|t|transpose|view|_unsafe_view|reshape|expand|select|slice|narrow|permute|"
    r"squeeze|unsqueeze|detach_?|resolve_(conj|neg)|lift_fresh|alias|flatten|unflatten|unbind|split|"
    r"split_with_sizes|chunk|contiguous|empty|empty_like|empty_strided|new_empty|"
    r"new_empty_strided|resize_|resize_as_|result_type|to|set_|is_coalesced|_nnz|_?indices|"
    r"_?values|sparse_dim|dense_dim|broadcast_tensors|record_stream|is_pinned|pin_memory|"
    r"_coalesced_|expand_as|view_as|numpy_T|mT|T|movedim|swapaxes|linear|matmul|relu_?|"
    r"embedding_bag|_embedding_bag_forward_only|zeros|ones|zeros_like|ones_like|new_zeros|"
    r"new_ones|full|full_like|zero_|fill_)"
)
"""Views, allocations and wrappers: they compute nothing themselves, or next to nothing."""

NODE = re.compile(r"autograd::|torch::autograd|\w+Backward\d*$|detach_?$|Optimizer\.")

SLACK = 4.0
"""Calls beyond need that versions of torch make here and there."""

USUAL = {
    "forward": ("copy_", "sub", "sub_", "_to_copy", "mean", "sum", "div_", "clamp", "clamp_"),
    "backward": (
        *("copy_", "sum", "add", "add_", "cumsum", "index_add_", "index_select", "sub_", "clone"),
        *("_to_copy", "mul", "div", "neg", "embedding_sparse_backward"),
        *("_sparse_coo_tensor_unsafe", "_sparse_coo_tensor_with_dims_and_tensors"),
        *("_embedding_bag_sparse_backward", "constant_pad_nd", "_index_put_impl_"),
        "native_batch_norm_backward",
    ),
    "update": ("add_", "add", "mul_", "_to_copy", "addcdiv_", "addcmul_", "sqrt", "pow", "copy_"),
}
"""Phase to what torch's own implementations call beside the operators that do the work."""

PER_WORK = {"embedding": 80, "data": 1000}
"""Calls (views and all) that a part may make for an operator that does work; others 25."""


def _allowed_calls(part: Part, name: str, needed: dict[Part, dict[str, float]]) -> float:
    """Calls of an operator that a part may make."""
    names = needed.get(part, {"": 0.0})
    total = max(names[""], 1.0)
    short = name.removeprefix("aten::")
    if NODE.match(name) or FREE.fullmatch(name) or not name.startswith("aten::"):
        return PER_WORK.get(part[0], 25) * total + 40
    if short in names:
        return 1.25 * names[short] + SLACK
    if short in USUAL.get(part[1], ()):
        return total + SLACK
    return 4.0 if part[0] == "other" else 1.0


EXTRA_SHARE = 0.04
"""Of the step, taken by operators that do not belong: half of what a finding is worth."""

EXTRA_KINDS = (
    ExtraKind(
        r"aten::(isnan|isinf|isfinite|any|all|nan_to_num|is_nonzero|logical_\w+)$",
        "anomaly_checks",
        "Gradients or activations are checked for NaN in every step",
        "Switch autograd's anomaly mode (torch.autograd.set_detect_anomaly) and checks of "
        "values off once the model trains: each check reads a whole tensor and waits for the "
        "answer.",
        "memory bandwidth",
        unmistakable=True,
    ),
    ExtraKind(
        r"aten::(_embedding_bag_dense_backward|embedding_dense_backward)$",
        "dense_gradients",
        "Embedding gradients are dense: whole tables are written and updated in every step",
        "Use sparse gradients (nn.EmbeddingBag(sparse=True)) or the fused backend "
        "(training.embedding_backend: fused): only the looked-up rows change.",
        "memory bandwidth",
        {"training.embedding_backend": "fused"},
    ),
    ExtraKind(
        r"aten::(_to_copy|to|type_as|float|double|half|bfloat16)$",
        "conversions",
        "Tensors are converted between precisions or copied",
        "Keep one precision through the part: find what converts (a float64 constant, "
        ".double(), .float(), a missing autocast), or what copies (.clone(), .contiguous()).",
        "memory bandwidth",
    ),
    ExtraKind(
        r"aten::(item|_local_scalar_dense|nonzero|unique\w*|_unique2|masked_select)$",
        "readbacks",
        "Results are read back in every step",
        "Read values back rarely (every training.log_every iterations) and outside the parts.",
        "synchronisation",
        unmistakable=True,
    ),
)


@rule(
    "extra_operators",
    title="The model does not need all operators that it calls",
    evidence=(
        "Calls per iteration beyond what the model's shapes ask for, in {places}: {listed}; "
        "{time:ms} of {total_ms:ms} in all.",
    ),
    advice="Take them out of the step, or merge them into its own operators.",
    limit="memory bandwidth",
)
def extra_operators(evidence: Evidence, ledger: Causes) -> Iterator[Measured]:
    """Operators are called that the model's shapes do not ask for."""
    extra = extra_table(evidence)
    for kind in EXTRA_KINDS:
        own = extra["name"].str.match(kind.names)
        if not own.any():
            continue
        if kind.id == "readbacks" and "synchronisation" in ledger.idle_causes:
            extra = extra[~own]  # told as the waits that they are
            continue
        # what came with them: a conversion's copy_, a check's item, in the same parts
        together = extra.merge(extra.loc[own, PART].drop_duplicates(), on=PART)
        if (
            together["time_ms"].sum() >= EXTRA_SHARE * evidence.total_ms
            and (kind.unmistakable or not _are_tiny(evidence, together))
            and _is_led_by(together, kind.names)
        ):
            yield _extra(evidence, ledger, together, kind)
            named = pd.MultiIndex.from_frame(together[PART])
            extra = extra[~pd.MultiIndex.from_frame(extra[PART]).isin(named)]
    for (component, phase), group in extra.groupby(PART):
        if group["time_ms"].sum() >= EXTRA_SHARE * evidence.total_ms:
            place = part_name(str(component), str(phase))
            yield _extra(evidence, ledger, group, _unnamed_kind(evidence, group, place))


def _unnamed_kind(evidence: Evidence, group: pd.DataFrame, place: str) -> ExtraKind:
    """Operators of one part that no kind names: many tiny ones, or a few that take long."""
    if _are_tiny(evidence, group):
        title = f"{group['calls'].sum():,.0f} operators in {place} that the model does not need"
        advice = "Merge them into a few operators on whole tensors, or take them out of the step: "
        advice += "each costs its dispatch however little it computes."
        return ExtraKind(".*", "tiny_operators", title, advice, "dispatch")
    title = f"{capitalised(place)} calls operators that the model does not need"
    advice = "Take them out of the step, or merge them into its own operators."
    return ExtraKind(".*", "foreign_operators", title, advice, "memory bandwidth")


DISPATCH_MS = 2e-3
"""Of one operator, where it was not measured: 1 to 3 µs on servers of the last years."""


def _are_tiny(evidence: Evidence, group: pd.DataFrame) -> bool:
    """Whether it is the number of operators that costs, not what any of them does."""
    calls = float(group["calls"].sum())
    cost = evidence.dispatch_ms or DISPATCH_MS
    return calls >= MANY and float(group["time_ms"].sum()) < 4.0 * TINY * cost * calls


HELPERS = re.compile(
    r"aten::(copy_|clone|item|_local_scalar_dense|abs|ne|eq|mul|bitwise_\w+|add_?|fill_|zero_)$"
)
"""What the operators of a kind call or are followed by."""


def _is_led_by(group: pd.DataFrame, names: str) -> bool:
    """Whether these operators, with what they call, take most of the group's time."""
    led = group["name"].str.match(names) | group["name"].str.match(HELPERS)
    return bool(group.loc[led, "time_ms"].sum() >= 0.5 * group["time_ms"].sum())


def _extra(evidence: Evidence, ledger: Causes, group: pd.DataFrame, kind: ExtraKind) -> Measured:
    """Figures of some of the operators that do not belong (rows of :func:`extra_table`)."""
    by_part = group.groupby(PART)["time_ms"].sum().sort_values(ascending=False)
    total = float(group["time_ms"].sum())
    # operators beyond need also evict what the others had in cache: the whole excess is theirs
    excess = evidence.excess_ms.reindex(by_part.index).fillna(0.0)
    share = min(max(total, min(float(excess.sum()), 2.0 * total)) / evidence.total_ms, 0.98)
    parts = [(str(component), str(phase)) for component, phase in by_part.index]
    for part, time in zip(parts, by_part, strict=True):
        ledger.explain(max(time, min(float(excess[part]), 2.0 * time)), part)
    better = predicted(evidence, kind.change) if kind.change else None
    waste = removed(share)
    names = group.groupby("name")[["calls", "time_ms"]].sum().nlargest(4, "time_ms")
    return {
        **{name: vars(kind)[name] for name in ("id", "title", "advice", "limit", "change")},
        "share": share,
        "least": 0.0,
        "component": by_part.groupby(level="component").sum().idxmax(),
        "time": total,
        "places": ", ".join(part_name(*part) for part in parts[:3]),
        "listed": ", ".join(
            f"{row['calls']:,.0f} of {name} ({milliseconds(row['time_ms'])})"
            for name, row in names.iterrows()
        ),
        "speedup": better if better and better["mid"] > waste["mid"] else waste,
    }


TINY_SHARE = 0.35
"""Of the step in operators so small, and in Python between them: bound by dispatch."""

MANY_PASSES = 4
"""Backward passes of one iteration from which on they are named."""

LARGER_PAYS = 1.25
"""Samples per second gained by twice the batch from which the batch is too small: two fifths of
the step or more are then the same for any batch."""


AVOIDABLE = (
    (
        re.compile(r"aten::(_nnpack_spatial_convolution|_?(slow|thnn)_conv\w*)$"),
        re.compile(r"aten::convolution_backward$"),
        "Computing convolutions without oneDNN",
        "Leave oneDNN on (torch.backends.mkldnn.enabled), and give it dense tensors of float32 or "
        "bfloat16: what torch falls back to is several times slower.",
    ),
    (
        re.compile(r"aten::embedding_renorm_$"),
        None,
        "Renorming the rows that are looked up, at each lookup (max_norm of an embedding),",
        "Do without max_norm: a penalty on the rows of the batch (weight decay), or renorming the "
        "whole table once in many steps, keeps them small too.",
    ),
)
"""Operators that tell by their names that they could be done without, with those of their backward
pass: what they do, and what to do instead."""


@rule(
    "many_passes",
    title="A batch goes through the model in {calls:,.0f} parts, which takes {share:.0%} of each "
    "step: gradients are accumulated over as many backward passes, at {name}",
    evidence=("What fewer and larger parts would take was not measured.",),
    advice="{parts}",
    limit="dispatch",
    gpu=False,
)
def many_passes(evidence: Evidence, ledger: Causes) -> Measured | None:
    """A loop runs the model and its backward pass many times in each step."""
    row, table = _many_passes(evidence), lines(evidence.profile)
    if (
        row is None
        or evidence.is_ours
        or any("backward passes per iteration" in text for _, text in ledger.told)
    ):
        return None
    model = table[table["role"].eq("model") & table["thread"].eq(MAIN)]
    share = float(model["share_of_step"].sum())
    often = model.loc[model["calls"].ge(row["calls"]), "share_of_step"].sum()
    if often < 0.5 * share:  # several losses of one forward pass
        return None
    return {
        "share": share,
        "least": 0.5,
        "explains": None,
        "calls": row["calls"],
        "name": line_name(row),
        "parts": LARGER_PARTS,
        "speedup": bounded(share),
    }


@rule(
    "avoidable_operators",
    title="{what} takes {share:.0%} of each step",
    evidence=("{names} take {time:ms} of {total_ms:ms}, with what they call.",),
    advice="{instead}",
    limit="arithmetic",
    gpu=False,
)
def avoidable_operators(evidence: Evidence, ledger: Causes) -> Iterator[Measured]:
    """Operators run on a CPU that another setting of the program would spare it."""
    names = evidence.profile.contexts["name"]
    for pattern, backward, what, instead in AVOIDABLE:
        chosen = names.str.fullmatch(pattern)
        if not chosen.any():
            continue
        if backward is not None:
            chosen |= names.str.fullmatch(backward)
        taken = _inclusive_ms(evidence, chosen.to_numpy())
        yield {
            "share": taken / evidence.total_ms,
            "explains": None,
            "what": what,
            "names": ", ".join(names[chosen].unique()),
            "time": taken,
            "instead": instead,
        }


def _inclusive_ms(evidence: Evidence, chosen: np.ndarray) -> float:
    """Milliseconds of a mean step in chosen contexts (n,) and all operators that they call: of
    those that others call too, by the number of calls."""
    contexts, keys = evidence.profile.contexts, ["name", *PART]
    runs = evidence.profile.trace["context"].value_counts()
    calls = contexts[keys].assign(runs=runs.reindex(contexts.index, fill_value=1))
    below = nearest(contexts["parent"].to_numpy(), chosen) >= 0
    of_these = calls[below].groupby(keys)["runs"].sum() / calls.groupby(keys)["runs"].sum()
    times = evidence.called.groupby(keys)["cpu_self_ms"].sum()
    by_part = (times * of_these.reindex(times.index)).groupby(PART).sum()
    # a profiler adds its own cost to each call
    most = evidence.attribution.groupby(PART)["time_ms"].sum().reindex(by_part.index)
    return float(np.fmin(by_part, most).sum())


LARGER_PARTS = (
    "If each pass has a part of the batch (gradient accumulation), make parts as large as memory "
    "allows: a pass over few samples calls as many operators as one of all."
)


def _many_passes(evidence: Evidence) -> dict[str, Any] | None:
    """The line that runs the backward pass, if it does so many times in an iteration."""
    table = line_table(evidence.profile)
    callers = table.backward_callers() if table is not None else pd.DataFrame()
    if callers.empty:
        return None
    row: dict[Any, Any] = callers.loc[callers["time_ms"].idxmax()].to_dict()
    return row if row["calls"] >= MANY_PASSES else None


@rule(
    "dispatch_bound",
    title="Calling operators, not computing, takes {share:.0%} of the step{at}",
    evidence=(
        "{calls:,.0f} operators per iteration; {tiny:,.0f} of them take less than {tiny_us:.1f} "
        "µs, {times:.0f} times what calling an empty one costs{here}.",
        "With Python between them they take {small:ms} of {step_ms:ms}.",
        "The lines of that part that take most: {lines}.",
        "A batch has {size:,} samples.",
    ),
    advice="Give each operator more to do: one on a stacked tensor instead of many in a loop, an "
    "optimizer with foreach=True or fused=True, a larger batch (training.batch_size; check the "
    "learning rate), or fewer operators (training.compile, training.embedding_backend: fused, "
    "training.fused_optimizer).",
    limit="dispatch",
)
def dispatch_bound(evidence: Evidence, ledger: Causes) -> Measured | None:
    """The whole step is made of operators too small for what calling one costs."""
    if evidence.device_ms:  # else of a GPU whose kernels were not recorded
        return None
    dispatch = evidence.dispatch_ms or (None if evidence.is_ours else DISPATCH_MS)
    if dispatch is None:
        return None
    table = evidence.called
    beside = ["data", "other"] if evidence.is_ours else ["data"]
    contexts = evidence.profile.contexts
    # what a recurrent layer calls is no loop of the program's
    loops = contexts.loc[contexts["name"].isin(loops_of(evidence.profile)), "component"]
    beside += loops[loops.ne("other")].unique().tolist()
    table = table[(table["calls"] > 0) & ~table["component"].isin(beside)]
    tiny = table[table["cpu_self_ms"] / table["calls"] < TINY * dispatch]
    parts = evidence.parts
    # what a part's own code takes beyond calling its operators is no cost of calling them
    between = parts["python_ms"].clip(upper=20.0 * dispatch * (5.0 + parts["calls"]))
    between = between.drop([*beside, "other"], level="component", errors="ignore").fillna(0.0)
    undilated = evidence.step_ms / evidence.total_ms
    small = (float(tiny["cpu_self_ms"].sum()) + float(between.sum())) * undilated
    if not evidence.meta.get("passes"):
        small += _around_calls(evidence, float(table["calls"].sum()), loops_of(evidence.profile))
    share = min(small / evidence.step_ms - ledger.explained_ms / evidence.total_ms, 1.0)
    size = int(evidence.parameter("training.batch_size", 0) or 0)
    larger = predicted(evidence, {"training.batch_size": 2 * size}) if size else None
    if share < TINY_SHARE:
        if larger and larger["mid"] >= LARGER_PAYS and larger["low"] > 1.0:
            return _small_batch(evidence, size, larger)
        return None
    compiled = predicted(evidence, {"training.compile": True})
    gain = compiled if is_worthwhile(compiled) else larger
    bound = {"low": 1.0, "mid": 1.0 / (1.0 - 0.5 * share), "high": 1.0 / max(1.0 - share, 0.02)}
    by_part = tiny.groupby(PART)["cpu_self_ms"].sum()
    by_part = between.add(by_part, fill_value=0.0)
    part = largest(by_part) if len(by_part) else ("other", "")
    main = main_function(evidence.lines_of(part[0]))
    at = f", most in {part_name(*part)}{main and f', at {main}'}"
    if part[0] == "other" and not main:
        name, count = called_most(evidence.profile)
        count /= evidence.iterations
        often = count > OFTEN * float(table["calls"].sum())
        at = f", {count:,.0f} of the calls those of {shown(name)}" if often else ""
    more: Measured = {}
    if (row := _many_passes(evidence)) is not None:
        at = f", in {row['calls']:,.0f} backward passes per iteration, at {line_name(row)}"
        more["advice"] = LARGER_PARTS
    return {
        "share": share,
        "component": part[0],
        "calls": float(table["calls"].sum()),
        "tiny": float(tiny["calls"].sum()),
        "tiny_us": TINY * 1e3 * dispatch,
        "times": TINY,
        "here": " here" if evidence.dispatch_ms else ", taken as 2 µs",
        **({"at": ""} if evidence.is_ours else {"at": at, **more}),
        "lines": evidence.said_lines(part[0]),
        "small": small,
        "size": size or None,
        "change": {"training.compile": True} if is_worthwhile(compiled) else {},
        "speedup": gain if gain and gain["mid"] > 1.0 else bound,
    }


OFTEN = 0.04
"""Least share of all calls for the operator called most to be named."""

BETWEEN_MS = 0.01
"""Time from one operator to the next that counts as that of calling them at most, with a launch
between them."""


def _around_calls(evidence: Evidence, calls: float, loops: set[str]) -> float:
    """Time of a recording that launches take, and that passes between operators, ms."""
    table = unattributed(evidence.profile)
    around = table["kind"].eq("annotation") | table["name"].isin({UNRECORDED, *loops})
    around |= table["kind"].eq("runtime") & table["name"].str.contains("Launch")
    return min(float(table["share"][around].sum()) * evidence.total_ms, BETWEEN_MS * calls)


def _small_batch(evidence: Evidence, size: int, larger: dict[str, float]) -> Measured:
    """Most of the step does not grow with the batch."""
    parts = evidence.parts["time_ms"].drop(index=("other", ""), errors="ignore")
    part = largest(parts)
    fixed = min(2.0 * (1.0 - 1.0 / larger["mid"]), 1.0)
    return {
        "id": "small_batch",
        "title": "A batch of {size:,} is too small for this machine",
        "share": fixed,
        "component": part[0],
        "size": size,
        "evidence": (
            f"Twice the batch is predicted to take {2.0 / larger['mid']:.2f}x the time, not "
            f"2x: about {fixed:.0%} of the step does not grow with the batch (weights read and "
            f"updated, operators called). Most time is in {part_name(*part)}, "
            f"{milliseconds(float(parts.max()))} of {milliseconds(evidence.total_ms)}.",
        ),
        "advice": "Raise training.batch_size, and check the learning rate with it; the speed-up is "
        "of the time a sample takes.",
        "speedup": larger,
        "limit": "memory bandwidth",
    }
