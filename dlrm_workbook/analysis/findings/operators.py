"""The interaction of features: little arithmetic, many small moves of data."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from dlrm_core.errors import InputError
from dlrm_core.parts import part_label
from dlrm_core.units import milliseconds
from dlrm_workbook.analysis.findings.evidence import Evidence
from dlrm_workbook.analysis.findings.finding import (
    Finding,
    Ledger,
    bounded,
    is_worthwhile,
    largest,
    predicted,
    removed,
)
from dlrm_workbook.analysis.work import operator_work

SHARE = 0.2
"""Of the step; the interaction has about 1 % of a DLRM's arithmetic."""

REACHED = 0.15
"""Of its ceiling. Ours reaches 0.25 to 0.6 in clean runs (tests/campaigns/planted_faults.py): cat,
product, selection and conversions each pass over the features once, the ceiling counts what
they must."""


def interaction_overhead(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """The interaction takes long for the little that it computes."""
    share = evidence.share("interaction")
    table = evidence.roofline
    table = table[table["component"] == "interaction"]
    time, least = float(table["time_ms"].sum()), float(table["ceiling_ms"].sum())
    if share < SHARE or time <= 0 or not 0 < least < REACHED * time:
        return
    if ledger.explained_ms > 0.5 * time:
        return  # what was named already may well have been here
    if any(ledger.is_explained(("interaction", phase)) for phase in ("forward", "backward")):
        return
    operators = evidence.called[evidence.called["component"] == "interaction"]
    heavy = operators.groupby("name")["cpu_self_ms"].sum().nlargest(4)
    listed = ", ".join(f"{name} {milliseconds(ms)}" for name, ms in heavy.items() if ms > 0)
    compiled = predicted(evidence, {"training.compile": True})
    change = {"training.compile": True} if is_worthwhile(compiled) else {}
    excess = (time - least) / evidence.total_ms
    yield Finding(
        id="interaction_overhead",
        title=f"The interaction holds {share:.0%} of the step, most of it moving data",
        component="interaction",
        share_of_step=share,
        evidence=(
            f"It takes {milliseconds(time)}; by the ceilings measured here {milliseconds(least)} "
            f"would do ({least / time:.0%})." + (f" Most of it: {listed}." if listed else "")
        ),
        advice=(
            "Concatenate, multiply and pick the products in fewer passes: compile the dense part, "
            "use micro-batches that stay in cache, or fewer or narrower features."
        ),
        change=change,
        predicted_speedup=compiled if change and compiled else bounded(excess),
        limit="memory bandwidth",
    )


RULES = (interaction_overhead,)


# Operators that the model's shapes do not ask for: which, and how much they take.

MANY = 100
"""Extra calls an iteration from which smallness, not any one operator, is the matter."""


TINY = 6.0
"""An operator below this many times the cost of calling one is mostly that cost."""


DISPATCH_MS = 2e-3
"""Of one operator, where it was not measured: 1 to 3 us on servers of the last years."""


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


USUAL = {
    # beside the operators that do the work: what torch's own implementations call
    "forward": ("copy_", "sub", "sub_", "_to_copy", "mean", "sum", "div_", "clamp", "clamp_"),
    "backward": (
        *("copy_", "sum", "add", "add_", "cumsum", "index_add_", "index_select", "sub_", "clone"),
        *(
            "_to_copy",
            "mul",
            "div",
            "neg",
            "embedding_sparse_backward",
            "_sparse_coo_tensor_unsafe",
        ),
        *("_sparse_coo_tensor_with_dims_and_tensors", "_embedding_bag_sparse_backward"),
        *("constant_pad_nd", "_index_put_impl_", "native_batch_norm_backward"),
    ),
    "update": ("add_", "add", "mul_", "_to_copy", "addcdiv_", "addcmul_", "sqrt", "pow", "copy_"),
    "": (),
}


PER_WORK = {"embedding": 80, "data": 1000}
"""Calls (views and all) that a part may make for an operator that does work; others 25."""


@dataclass(frozen=True)
class Kind:
    """What a group of operators that do not belong is."""

    id: str
    names: re.Pattern[str]
    title: str
    advice: str
    limit: str
    change: tuple[tuple[str, Any], ...] = ()
    """The parameter that ends it, if one does."""
    unmistakable: bool = False
    """Named so even if each call is tiny: nothing else calls these operators."""


KINDS = (
    Kind(
        "anomaly_checks",
        re.compile(r"aten::(isnan|isinf|isfinite|any|all|nan_to_num|is_nonzero|logical_\w+)$"),
        "Gradients or activations are checked for NaN in every step",
        "Switch autograd's anomaly mode (torch.autograd.set_detect_anomaly) and checks of values "
        "off once the model trains: each check reads a whole tensor and waits for the answer.",
        "memory bandwidth",
        unmistakable=True,
    ),
    Kind(
        "dense_gradients",
        re.compile(r"aten::(_embedding_bag_dense_backward|embedding_dense_backward)$"),
        "Embedding gradients are dense: whole tables are written and updated in every step",
        "Use sparse gradients (nn.EmbeddingBag(sparse=True)) or the fused backend "
        "(training.embedding_backend: fused): only the looked-up rows change.",
        "memory bandwidth",
        (("training.embedding_backend", "fused"),),
    ),
    Kind(
        "conversions",
        re.compile(r"aten::(_to_copy|to|type_as|float|double|half|bfloat16)$"),
        "Tensors are converted between precisions or copied",
        "Keep one precision through the part: find what converts (a float64 constant, .double(), "
        ".float(), a missing autocast), or what copies (.clone(), .contiguous()).",
        "memory bandwidth",
    ),
    Kind(
        "readbacks",
        re.compile(r"aten::(item|_local_scalar_dense|nonzero|unique\w*|_unique2|masked_select)$"),
        "Results are read back in every step",
        "Read values back rarely (every training.log_every iterations) and outside the parts.",
        "synchronisation",
        unmistakable=True,
    ),
)


HELPERS = re.compile(
    r"aten::(copy_|clone|item|_local_scalar_dense|abs|ne|eq|mul|bitwise_\w+|add_?|fill_|zero_)$"
)
"""What the operators of a kind call or are followed by."""


def extra_table(evidence: Evidence) -> pd.DataFrame:
    """Operators called beyond what the model's shapes ask for.

    Returns:
        ``name``, ``component``, ``phase``, ``calls``, ``time_ms`` (self, with the Python
        between many of them; undilated), a mean iteration. Empty without parameters or calls.
    """
    columns = ["name", "component", "phase", "calls", "time_ms"]
    called = evidence.called
    nothing = pd.DataFrame({name: [] for name in columns})
    if evidence.parameters is None or called.empty or not called["calls"].gt(0).any():
        return nothing
    try:
        work = operator_work(
            evidence.parameters, evidence.meta.get("data_statistics"), evidence.device
        )
    except (InputError, KeyError):
        return nothing
    called = called[~called["component"].isin(["data", "transfer", "communication"])]
    keys = ["component", "phase", "name"]
    table = called.groupby(keys, as_index=False)[["calls", "cpu_self_ms"]].sum()
    tables = len(evidence.parameters.model.table_rows)
    converts = evidence.parameters.training.precision != "fp32"
    needed = _needed(work, tables if converts else 0)
    allowed = table.apply(partial(_allowed, needed=needed), axis=1)
    extra_calls = (table["calls"] - allowed).clip(lower=0.0)
    table["time_ms"] = table["cpu_self_ms"] * extra_calls / table["calls"].clip(lower=1e-9)
    table["calls"] = extra_calls
    table = table[table["calls"] > 0.5]
    scale = evidence.parts["time_ms"] / evidence.parts["traced_ms"].where(
        evidence.parts["traced_ms"] > 0
    )
    rows = []
    for (component, phase), group in table.groupby(["component", "phase"]):
        group = group.copy()
        group["time_ms"] *= scale.get((component, phase), 1.0)
        calls = float(group["calls"].sum())
        if calls >= MANY:
            python = float(evidence.parts["python_ms"].fillna(0.0).get((component, phase), 0.0))
            group["time_ms"] += python * group["calls"] / calls
        rows.append(group)
    if not rows:
        return nothing
    return pd.concat(rows, ignore_index=True)[columns]


def _needed(work: pd.DataFrame, converted: int) -> dict[tuple[str, str], dict[str, float]]:
    """(component, phase) to operator name (without ``aten::``) to calls an iteration.

    Args:
        converted: pooled vectors that autocast converts in the interaction.
    """
    needed: dict[tuple[str, str], dict[str, float]] = {}
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


def _allowed(row: pd.Series, needed: dict[tuple[str, str], dict[str, float]]) -> float:
    """Calls of an operator that a part may make."""
    part = (str(row["component"]), str(row["phase"]))
    names = needed.get(part, {"": 0.0})
    total = max(names[""], 1.0)
    name = str(row["name"])
    short = name.removeprefix("aten::")
    if NODE.match(name) or FREE.fullmatch(name) or not name.startswith("aten::"):
        return PER_WORK.get(part[0], 25) * total + 40
    if short in names:
        return 1.25 * names[short] + SLACK
    if short in USUAL.get(part[1], ()):
        return total + SLACK
    return 4.0 if part[0] == "other" else 1.0


def are_tiny(evidence: Evidence, group: pd.DataFrame) -> bool:
    """Whether it is the number of operators that costs, not what any of them does."""
    calls = float(group["calls"].sum())
    cost = evidence.dispatch_ms or DISPATCH_MS
    return calls >= MANY and float(group["time_ms"].sum()) < 4.0 * TINY * cost * calls


def names_lead(group: pd.DataFrame, kind: Kind) -> bool:
    """Whether the kind's own operators are what the group is about."""
    own = group["name"].str.match(kind.names)
    helpers = group["name"].str.match(HELPERS)
    time = float(group.loc[own | helpers, "time_ms"].sum())
    return time >= 0.5 * float(group["time_ms"].sum())


# Operators that the model does not need, and operators too small for what calling one costs.

EXTRA_SHARE = 0.04
"""Of the step, held by operators that do not belong: half of what a finding is worth."""


TINY_SHARE = 0.35
"""Of the step in operators so small, and in Python between them: bound by dispatch."""

LARGER_PAYS = 1.25
"""Samples a second gained by twice the batch from which the batch is too small: two fifths of
the step or more are then the same for any batch."""


def extra_operators(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """Operators are called that the model's shapes do not ask for."""
    extra = extra_table(evidence)
    if extra.empty or evidence.total_ms <= 0:
        return
    left = extra
    for kind in KINDS:
        own = extra["name"].str.match(kind.names)
        if not own.any():
            continue
        # what came with them: a conversion's copy_, a check's item, in the same parts
        parts = extra.loc[own, ["component", "phase"]].drop_duplicates()
        group = left.merge(parts, on=["component", "phase"])
        share = float(group["time_ms"].sum()) / evidence.total_ms
        is_it = kind.unmistakable or not are_tiny(evidence, group)
        if share >= EXTRA_SHARE and is_it and names_lead(group, kind):
            told = (kind.id, kind.title, kind.advice, kind.limit)
            yield _extra(evidence, ledger, group, *told, change=dict(kind.change))
            left = left[
                ~left.set_index(["component", "phase"]).index.isin(pd.MultiIndex.from_frame(parts))
            ]
    for (component, phase), group in left.groupby(["component", "phase"]):
        share = float(group["time_ms"].sum()) / evidence.total_ms
        if share < EXTRA_SHARE:
            continue
        calls = float(group["calls"].sum())
        where = part_label(str(component), str(phase))
        many = are_tiny(evidence, group)
        yield _extra(
            evidence,
            ledger,
            group,
            "tiny_operators" if many else "foreign_operators",
            f"{calls:,.0f} operators in {where} that the model does not need"
            if many
            else f"{where[:1].upper() + where[1:]} calls operators that the model does not need",
            "Merge them into a few operators on whole tensors, or take them out of the step: each "
            "costs its dispatch however little it computes."
            if many
            else "Take them out of the step, or merge them into its own operators.",
            "dispatch" if many else "memory bandwidth",
        )


def dispatch_bound(evidence: Evidence, ledger: Ledger) -> Iterable[Finding]:
    """The whole step is made of operators too small for what calling one costs."""
    dispatch = evidence.dispatch_ms
    if evidence.on_gpu or dispatch is None or evidence.total_ms <= 0:
        return
    table = evidence.called
    table = table[(table["calls"] > 0) & ~table["component"].isin(["data", "other"])]
    tiny = table[table["cpu_self_ms"] / table["calls"] < TINY * dispatch]
    parts = evidence.parts
    model = ~parts.index.get_level_values("component").isin(["data", "other"])
    # what a part's own code takes beyond calling its operators is no cost of calling them
    between = parts["python_ms"].clip(upper=20.0 * dispatch * (5.0 + parts["calls"]))
    python = float(between[model].sum())
    undilated = evidence.step_ms / evidence.total_ms
    small = (float(tiny["cpu_self_ms"].sum()) + python) * undilated
    share = min(small / evidence.step_ms - ledger.explained_ms / evidence.total_ms, 1.0)
    size = int(evidence.parameter("training.batch_size", 0) or 0)
    larger = predicted(evidence, {"training.batch_size": 2 * size}) if size else None
    if share < TINY_SHARE:
        if larger and larger["mid"] >= LARGER_PAYS and larger["low"] > 1.0:
            yield _small_batch(evidence, size, larger)
        return
    compiled = predicted(evidence, {"training.compile": True})
    use_compile = is_worthwhile(compiled)
    gain = compiled if use_compile else larger
    change: dict[str, Any] = {"training.compile": True} if use_compile else {}
    bound = {"low": 1.0, "mid": 1.0 / (1.0 - 0.5 * share), "high": 1.0 / max(1.0 - share, 0.02)}
    calls = float(table["calls"].sum())
    worst = between[model].fillna(0.0) + tiny.groupby(["component", "phase"])[
        "cpu_self_ms"
    ].sum().reindex(parts.index[model]).fillna(0.0)
    component, _ = largest(worst)
    yield Finding(
        id="dispatch_bound",
        title=f"Calling operators, not computing, takes {share:.0%} of the step",
        component=component,
        share_of_step=share,
        evidence=(
            f"{calls:,.0f} operators an iteration; {float(tiny['calls'].sum()):,.0f} of them take "
            f"less than {TINY * 1e3 * dispatch:.1f} us, {TINY:.0f} times what calling an empty one "
            f"costs here. With Python between them they hold {milliseconds(small)} of "
            f"{milliseconds(evidence.step_ms)}. A batch has {size:,} samples."
        ),
        advice=(
            "Give each operator more to do: a larger batch (training.batch_size; check the "
            "learning rate), or fewer operators (training.compile, training.embedding_backend: "
            "fused, training.fused_optimizer)."
        ),
        change=change,
        predicted_speedup=gain if gain and gain["mid"] > 1.0 else bound,
        limit="dispatch",
    )


def _small_batch(evidence: Evidence, size: int, larger: dict[str, float]) -> Finding:
    parts = evidence.parts["time_ms"].drop(index=("other", ""), errors="ignore")
    component, phase = largest(parts)
    share = 2.0 * (1.0 - 1.0 / larger["mid"])
    return Finding(
        id="small_batch",
        title=f"A batch of {size:,} is too small for this machine",
        component=component,
        share_of_step=min(share, 1.0),
        evidence=(
            f"Twice the batch is predicted to take {2.0 / larger['mid']:.2f} times as long, not "
            f"2: about {min(share, 1.0):.0%} of the step does not grow with the batch (weights "
            f"read and updated, operators called). Most time is in {part_label(component, phase)}, "
            f"{milliseconds(float(parts.max()))} of {milliseconds(evidence.total_ms)}."
        ),
        advice=(
            "Raise training.batch_size, and check the learning rate with it; the speed-up is of "
            "the time a sample takes."
        ),
        predicted_speedup=larger,
        limit="memory bandwidth",
    )


def _extra(
    evidence: Evidence,
    ledger: Ledger,
    group: pd.DataFrame,
    id_: str,
    title: str,
    advice: str,
    limit: str,
    change: dict[str, Any] | None = None,
) -> Finding:
    by_part = group.groupby(["component", "phase"])["time_ms"].sum()
    places = [(str(component), str(phase)) for component, phase in by_part.index]
    total = float(group["time_ms"].sum())
    # operators beyond need also evict what the others had in cache: the whole excess is theirs
    excess = evidence.excess_ms.reindex(by_part.index).fillna(0.0)
    lost = max(total, min(float(excess.sum()), 2.0 * total))
    for place, time in zip(places, by_part, strict=True):
        ledger.explain(max(float(time), min(float(excess[place]), 2.0 * float(time))), place)
    share = min(lost / evidence.total_ms, 0.98)
    component = str(by_part.groupby("component").sum().idxmax())
    speedup = removed(share)
    better = predicted(evidence, change) if change else None
    if better is not None and better["mid"] > speedup["mid"]:
        speedup = better
    names = group.groupby("name")[["calls", "time_ms"]].sum().nlargest(4, "time_ms")
    listed = ", ".join(
        f"{row['calls']:,.0f} of {name} ({milliseconds(row['time_ms'])})"
        for name, row in names.iterrows()
    )
    parts = ", ".join(
        part_label(*part) for part in sorted(places, key=lambda place: -by_part[place])[:3]
    )
    return Finding(
        id=id_,
        title=title,
        component=component,
        share_of_step=share,
        evidence=(
            f"Beyond what the model's shapes ask for, {parts} call an iteration: {listed}; "
            f"{milliseconds(total)} of {milliseconds(evidence.total_ms)} in all."
        ),
        advice=advice,
        change=change or {},
        predicted_speedup=speedup,
        limit=limit,
    )


RULES_RULES = (extra_operators, dispatch_bound)
