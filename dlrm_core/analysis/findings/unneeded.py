"""Operators that the model's shapes do not ask for: which, and how much they take."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from dlrm_core.analysis.findings.evidence import Evidence
from dlrm_core.analysis.work import operator_work
from dlrm_core.errors import InputError

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
