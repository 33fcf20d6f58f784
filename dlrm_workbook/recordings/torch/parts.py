"""Which part of a step each span of a torch trace belongs to.

Our own step names its parts by ranges, and those alone decide. Other programs are told by
the names that they have (:mod:`dlrm_workbook.recordings.foreign`), each backward node by the
operator whose gradient it computes, and what is left of a DLRM by its order: what stands
before the interaction is bottom MLP, what stands after it top MLP. Everything is columns over
the spans, of which a trace may have millions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from dlrm_core.parts import parse_span
from dlrm_workbook.ground.arrays import Bools, Ints, Names
from dlrm_workbook.ground.marks import deepest_level
from dlrm_workbook.recordings.foreign import (
    ACCUMULATE,
    ENGINE_PREFIX,
    MLP,
    MODULE_PREFIX,
    NO_STEP,
    PartNames,
    forward_key,
    has_embeddings,
    match_backward,
    node_key,
    outermost_marked,
    resolve,
)
from dlrm_workbook.recordings.nesting import innermost, nest
from dlrm_workbook.recordings.profile import coded, coded_pairs, matching, nearest

MLPS_INFERRED = (
    "Where names do not distinguish the two MLPs, their order does: the bottom MLP runs before the "
    "interaction, the top MLP after it."
)
COMPILED_INFERRED = (
    "Compiled functions do not name their operators: the first after the lookups that takes "
    "samples by features by dimension is taken as the interaction, the others as MLPs."
)

MOST_ALIKE = 16
"""Operators that are candidates for one backward node; a broken trace has more of them."""

MODEL = ("bottom_mlp", "embedding", "interaction", "top_mlp", "loss")
"""Parts that a forward pass goes through, and that have a backward pass."""

_INSTANCE = re.compile(r"_\d+$")
"""What torch adds to the class of a module: the number of the instance."""

_HOLDERS = {
    *("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule"),
    *("Sequential", "FSDPModule", "CheckpointWrapper"),
}
"""Classes that only pass on what they hold, and so name no part of a model."""

NO_RECOMMENDER = ("other", MLP, "embedding")
"""Parts that names may give a module of a program that is no DLRM."""

BETWEEN = {
    ("bottom_mlp", "interaction"): "interaction",
    ("embedding", "interaction"): "interaction",
    ("interaction", "top_mlp"): "interaction",
    ("top_mlp", "loss"): "top_mlp",
}
"""Of operators that nothing names: the part between these two. The interaction joins what
bottom MLP and embeddings gave, and its own result to the top MLP's input."""

_COMPILED = re.compile(r"^(CompiledFunction|Torch-Compiled Region)")
"""Operators of torch.compile: one for many that it joined, of which the trace says nothing."""

_STACKED = re.compile(r"\[\d+, \d+, \d+\]")
"""Input shapes with a tensor of samples by features by dimension, as an interaction takes."""


def has_own_parts(host: pd.DataFrame) -> bool:
    """Whether the program names its parts as :mod:`dlrm_core.parts` does."""
    return any(map(parse_span, host.loc[host["kind"].eq("annotation"), "name"].unique()))


def own_parts(host: pd.DataFrame) -> tuple[Names, Names]:
    """Component and phase (n,) of every span, by the ranges of our own step; ``host`` has nested
    spans, callers before callees, with name, kind, parent, profile, start, end.

    A span of an autograd thread works for the main thread, which waits: it has the part that the
    main thread is in when its outermost span starts. (A prefetching thread does not.)
    """
    parent, profile = host["parent"].to_numpy(), host["profile"].to_numpy()
    code, names = coded(host["name"])
    part = [parse_span(name) for name in names]
    says = np.array([p is not None for p in part], dtype=bool)
    is_part = host["kind"].eq("annotation").to_numpy() & says[code]
    source = nearest(parent, is_part)
    helps = matching(host["name"], lambda name: name.startswith(ENGINE_PREFIX))
    asked = np.flatnonzero((profile != 0) & (parent < 0) & helps)
    ranges = np.flatnonzero(is_part & (profile == 0))
    if len(asked) and len(ranges):
        start, end = (host[name].to_numpy() for name in ("start", "end"))
        began, ended, over, _ = nest(start[ranges], end[ranges], np.zeros(len(ranges), dtype=bool))
        inside = innermost(began, ended, over, start[asked])
        given = np.full(len(host), -1)
        given[asked] = np.where(inside >= 0, ranges[inside], -1)
        root = nearest(parent, parent < 0)
        source = np.where(source >= 0, source, given[root])
    label = np.append(code, len(names))[source]  # row −1 is the one appended
    named = [one or ("other", "") for one in [*part, None]]
    component, phase = (np.array(texts, dtype=object) for texts in zip(*named, strict=True))
    return component[label], phase[label]


def foreign_parts(
    host: pd.DataFrame, iterations: Sequence[tuple[int, int]], names: PartNames, flows: pd.DataFrame
) -> tuple[Names, Names, list[str]]:
    """Component and phase (n,) of every span of a program that is not ours.

    Args:
        host: nested spans, callers before callees, with name, kind, parent, profile, start,
            end, and sequence and forward_thread of operators.
        iterations: (start, end) ns of each, where they are known.
        flows: from operators to backward nodes, see ``chrome_trace.Events``.

    Returns:
        Component and phase of every span, and a sentence about each part that no name tells.
    """
    spans = _Spans(host, iterations, names, flows)
    component, phase, hinted, forward = spans.component, spans.phase, spans.hinted, spans.forward
    inferred = []
    if spans.recommends and _name_compiled(spans):
        inferred.append(COMPILED_INFERRED)
    if len(spans.left_open):
        ranges = host.loc[spans.left_open]
        inferred.append(
            f"{' and '.join(f'`{name}`' for name in ranges['name'].unique()[:3])} "
            f"({(ranges['end'] - ranges['start']).sum() / 1e6:,.0f} ms) holds other ranges of the "
            "program: an exchange that stays open until somebody waits for it. What runs meanwhile "
            "is counted as what it is, not as communication."
        )
    mlp = component == MLP
    _place_mlps(spans)
    within = spans.modules != ""
    passed = np.sort(spans.start[forward & (np.isin(component, MODEL) | within)])
    drawn = hinted & (component == "data")
    drawn &= _follows(passed, spans.pass_begins(), spans.start)
    component[drawn], phase[drawn] = "other", ""
    if spans.recommends:
        _fill_between(spans)
    # what is no part of a DLRM is a part by its module; so are tables of tokens
    if within.any():
        vague = ["other", MLP] if spans.recommends else NO_RECOMMENDER
        by_module = np.isin(component, vague) & (within | (component == "embedding"))
        component[by_module] = np.where(within, spans.modules, "other")[by_module]
        hinted[by_module] = True
    _backward(spans)
    component[_seeds(spans)] = "loss"
    phase = np.where((phase == "") & (spans.node >= 0), "backward", phase)
    silent = (phase == "") & (component != "other")
    phase[silent] = "forward"
    component[component == MLP] = "other"
    if np.isin(component[mlp], ["bottom_mlp", "top_mlp"]).any():
        inferred.append(MLPS_INFERRED)
    return component, phase, inferred


class _Spans:
    """The columns that several steps of the attribution read and change.

    Attributes:
        component, phase, hinted: of each span (n,), as :func:`foreign.resolve` says it, which
            the steps change.
        named: what each distinct pair of kind and name says; ``code`` (n,) is its number.
        key: of each pair, what an autograd node is the backward of; None of other names.
        node: row (n,) of the outermost autograd node around each span, −1 outside of all.
        modules: the part (n,) that the innermost range of modules stands for, "" outside of all.
        saying: as ``code``, with the number after the last for sampled Python frames within a
            range that names its part: ranges are exact, and a sampled frame may be a caller of
            the range that was first seen inside it.
        recommends: whether the program looks rows of embedding tables up, as a DLRM does.
    """

    def __init__(
        self,
        host: pd.DataFrame,
        iterations: Sequence[tuple[int, int]],
        names: PartNames,
        flows: pd.DataFrame,
    ) -> None:
        self.flows = flows
        self.begins = np.sort(np.array([start for start, _ in iterations], dtype=np.int64))
        self.line = host["line"].to_numpy(dtype=object)
        self.code, self.texts = coded_pairs(host["kind"], host["name"])
        self.recommends = has_embeddings(self.texts)
        self.named = [
            names.of(kind, text) if self.recommends else names.of_any_program(kind, text)
            for kind, text in self.texts
        ]
        sampled = host["kind"].eq("python").to_numpy() & host["python_id"].lt(0).to_numpy()
        self.saying = np.where(sampled & self._in_named_range(host), len(self.named), self.code)
        self.left_open = self._open_exchanges(host)
        self.saying[self.left_open] = len(self.named)
        self.compiled = self.pairs(bool(_COMPILED.match(text)) for _, text in self.texts)
        self.stacked = matching(host["shapes"], lambda text: bool(_STACKED.search(text)))
        self.key = [node_key(text) if kind == "operator" else None for kind, text in self.texts]
        self.start, self.end = host["start"].to_numpy(), host["end"].to_numpy()
        self.parent, self.profile = host["parent"].to_numpy(), host["profile"].to_numpy()
        self.operator = host["kind"].eq("operator").to_numpy()
        unknown = pd.Series(-1, index=host.index)
        self.sequence = host.get("sequence", unknown).to_numpy()
        self.thread = host.get("forward_thread", unknown).to_numpy()
        self.node = outermost_marked(self.parent, self.pairs(key is not None for key in self.key))
        self.forward = self.node < 0
        self.modules = self._modules(names)
        self.component, self.phase, self.hinted = resolve(
            self.cut_at_nodes(), [*self.named, None], self.saying
        )
        self.component[self.component == NO_STEP] = "other"

    def _open_exchanges(self, host: pd.DataFrame) -> Ints:
        """Rows of exchanges' ranges that hold other ranges of the program: they are left open until
        somebody waits for them, and what runs inside is no exchange."""
        ranges = host["kind"].eq("annotation").to_numpy()
        exchange = ranges & self.pairs(
            named is not None and named.component == "communication" for named in self.named
        )
        around = nearest(host["parent"].to_numpy(), exchange)
        return np.unique(around[ranges & ~exchange & (around >= 0)])

    def _modules(self, names: PartNames) -> Names:
        """The part (n,) of the module that each span belongs to, "" outside of all.

        Ranges that our recorder opened around groups of modules have names of their own. Else,
        in a program that is no recommender, the classes of modules that torch names are told
        apart as deep as a page has room for: ``BertEncoder.BertLayer`` for all layers.
        """
        module = np.array([names.module(text) for _, text in self.texts], dtype=object)
        named = module[self.code]
        if not (module != "").any() and not self.recommends:
            named = self._classes()
        around = nearest(self.cut_at_nodes(), named != "")
        return np.append(named, "")[around]

    def _classes(self) -> Names:
        """Path of classes (n,) to each call of a module, cut to groups; "" of other spans."""
        classes = [
            _INSTANCE.sub("", text.removeprefix(MODULE_PREFIX))
            if kind == "python" and text.startswith(MODULE_PREFIX)
            else ""
            for kind, text in self.texts
        ]
        called = self.pairs(bool(text) for text in classes)
        above = np.append(nearest(self.parent, called), -1)[self.parent]
        path: dict[int, tuple[str, ...]] = {-1: ()}
        for row in np.flatnonzero(called).tolist():
            called_class, outer = classes[self.code[row]], path[int(above[row])]
            path[row] = outer if called_class in _HOLDERS else (*outer, called_class)
        paths = {class_path for class_path in path.values() if class_path}
        models = {class_path[0] for class_path in paths}
        depth = {model: deepest_level(p for p in paths if p[0] == model) for model in models}
        groups = {class_path: class_path[: depth[class_path[0]]] for class_path in paths}
        shared = Counter(group[1:] or group for group in set(groups.values()))
        named = np.full(len(self.code), "", dtype=object)
        for row, class_path in path.items():
            if class_path:
                group = groups[class_path]
                alone = len(group) > 1 and shared[group[1:]] == 1
                named[row] = ".".join(group[1:] if alone else group)
        return named

    def _in_named_range(self, host: pd.DataFrame) -> Bools:
        """Whether each span (n,) lies within an annotation that names a part."""
        names = self.pairs(named is not None and bool(named.component) for named in self.named)
        ranges = names & host["kind"].eq("annotation").to_numpy()
        return nearest(host["parent"].to_numpy(), ranges) >= 0

    def pairs(self, marked: Iterable[bool]) -> Bools:
        """Which spans (n,) have one of the marked pairs of kind and name."""
        return np.array(list(marked), dtype=bool)[self.code]

    def cut_at_nodes(self) -> Ints:
        """Parents (n,) of a forest in which nothing above an autograd node is above it.

        What surrounds a node is whoever called ``backward``, which tells nothing of its part.
        """
        return np.where(self.node == np.arange(len(self.node)), -1, self.parent)

    def nodes(self) -> Ints:
        """Rows of the outermost autograd nodes, in order."""
        return np.flatnonzero(self.node == np.arange(len(self.node)))

    def pass_begins(self) -> Ints:
        """When what came before is over (n,) ns: an iteration begins, or a backward node."""
        return np.sort(np.concatenate([self.begins, self.start[self.nodes()]]))

    def keys(self, rows: Ints, of: Sequence[str | None]) -> list[str]:
        """The text of ``of``, by pair of kind and name, for each row."""
        return [of[code] or "" for code in self.code[rows]]


def _name_compiled(spans: _Spans) -> bool:
    """Say which compiled operators are the interaction; the others are an MLP.

    Only those in which no operator has a name of its own are asked. The interaction is the
    first of a pass, after the lookups, that takes samples by features by dimension, if more
    of the model follows it (else it holds the top MLP too, and is not told). Returns whether
    there were any.
    """
    component, forward = spans.component, spans.forward
    block = outermost_marked(spans.parent, forward & spans.compiled)
    inside = block >= 0
    named = np.unique(block[inside & (component != "other")])
    opaque = inside & ~np.isin(block, named)
    blocks = np.unique(block[opaque])
    lookups = np.flatnonzero(forward & (component == "embedding"))
    if not len(blocks) or not len(lookups):
        return False
    begins = spans.pass_begins()
    of_pass = np.searchsorted(begins, spans.start, side="right")
    component[opaque] = MLP
    layers = np.flatnonzero(forward & (component == MLP))
    for number in np.unique(of_pass[blocks]):
        looked_up = spans.start[lookups[of_pass[lookups] == number]]
        these = blocks[of_pass[blocks] == number]
        if not len(looked_up) or (component[of_pass == number] == "interaction").any():
            continue
        asked = these[(spans.start[these] > looked_up[0]) & spans.stacked[these]]
        last = spans.start[layers[of_pass[layers] == number]].max()
        if len(asked):
            alone = last < spans.end[asked[0]]
            component[opaque & (block == asked[0])] = "other" if alone else "interaction"
    return True


def _seeds(spans: _Spans) -> Bools:
    """Operators (n,) inside a backward range before its first node: they begin with the loss."""
    component, forward = spans.component, spans.forward
    starts = np.sort(spans.start[spans.nodes()])
    passed = np.sort(spans.start[forward & np.isin(component, MODEL)])
    asked = forward & (component == "other") & (spans.phase == "backward")
    asked &= outermost_marked(spans.parent, asked & spans.operator) >= 0
    return asked & _follows(passed, starts, spans.start)


def _place_mlps(spans: _Spans) -> None:
    """Make each forward MLP bottom or top: which stands after the interaction?

    An MLP before the first interaction of its pass is the bottom one. A pass begins with an
    iteration, or after a backward node; where no iteration is known, also with a lookup, a
    loss or an update.
    """
    component, forward = spans.component, spans.forward
    here = forward & (component == MLP)
    if not here.any():
        return
    begins = spans.pass_begins()
    if not len(spans.begins):
        others = forward & np.isin(component, ["embedding", "loss", "optimizer", "data"])
        begins = np.sort(np.concatenate([begins, spans.start[others]]))
    meets = forward & (component == "interaction") & (spans.phase != "backward")
    if meets.any():
        after = _follows(np.sort(spans.start[meets]), begins, spans.start[here])
        component[here] = np.where(after, "top_mlp", "bottom_mlp")


def _follows(events: Ints, begins: Ints, at: Ints) -> Bools:
    """Whether one of ``events`` lies between each moment (n,) and the last of ``begins``.

    Both are sorted. An event at the moment itself counts.
    """
    last, begun = (
        np.append(times, np.iinfo(np.int64).min)[np.searchsorted(times, at, side="right") - 1]
        for times in (events, begins)
    )
    return np.asarray((last >= begun) & (last > np.iinfo(np.int64).min))


def _fill_between(spans: _Spans) -> None:
    """Give operators that nothing names to the part between whose operators they run.

    Between two operators of one part they are that part's; see :data:`BETWEEN` for others.
    Both must be of the same forward pass, on the same thread.
    """
    component = spans.component
    passing = spans.forward & np.isin(spans.phase, ["", "forward"])
    with_part = np.flatnonzero(passing & np.isin(component, MODEL))
    unknown = passing & (component == "other")
    outer = outermost_marked(spans.parent, unknown & spans.operator)
    asked = np.flatnonzero(unknown & (outer >= 0))
    if not len(with_part) or not len(asked):
        return
    begins = spans.pass_begins()
    at = spans.start[outer[asked]]
    for profile in np.unique(spans.profile[asked]):
        rows = with_part[spans.profile[with_part] == profile]
        rows = rows[np.argsort(spans.start[rows], kind="stable")]
        chosen = spans.profile[asked] == profile
        if not len(rows):
            continue
        when = spans.start[rows]
        place = np.searchsorted(when, at[chosen], side="left")
        inner = (place > 0) & (place < len(rows))
        before, after = rows[np.maximum(place - 1, 0)], rows[np.minimum(place, len(rows) - 1)]
        of_pass = [np.searchsorted(begins, spans.start[one], "right") for one in (before, after)]
        inner &= of_pass[0] == of_pass[1]
        first, last = component[before], component[after]
        guess = np.where(inner & (first == last), first, "other")
        for (one, other), part in BETWEEN.items():
            guess[inner & (first == one) & (last == other)] = part
        component[asked[chosen]] = guess
        spans.hinted[asked[chosen]] = guess != "other"


def _backward(spans: _Spans) -> None:
    """Give each backward node, and what it calls, the part of its forward operator.

    A node without one (``AccumulateGrad`` adds a gradient to a parameter's) belongs to the
    node before it.
    """
    component, hinted, nodes = spans.component, spans.hinted, spans.nodes()
    if not len(nodes):
        return
    twin = _forward_twins(spans, nodes)
    of_twin = np.where(twin >= 0, component[np.maximum(twin, 0)], "other")
    node_part = component[nodes]
    named = ~hinted[nodes] & (node_part != "other")
    part = np.where(named | np.isin(of_twin, ["other", MLP]), node_part, of_twin)
    accumulates = spans.pairs(key == ACCUMULATE for key in spans.key)[nodes]
    follows = (part == "other") & (accumulates | (twin < 0))
    order = np.lexsort((spans.start[nodes], spans.profile[nodes]))
    places = np.arange(len(order))
    source = np.maximum.accumulate(np.where(follows[order], -1, places))
    profile = spans.profile[nodes[order]]
    source = np.where((source >= 0) & (profile == profile[source]), source, places)
    part[order] = part[order][source]
    within = np.flatnonzero((spans.node >= 0) & (hinted | (component == "other")))
    of_node = part[np.searchsorted(nodes, spans.node[within])]
    # what a node of unknown part calls may hint at one: a compiled function holds all of them
    component[within] = np.where(of_node == "other", component[within], of_node)
    undecided = (spans.node >= 0) & (component == MLP)
    meets = np.sort(spans.start[(spans.node >= 0) & (component == "interaction")])
    if undecided.any() and len(meets):
        begins = np.sort(spans.start[spans.operator & (spans.node < 0)])
        after = _follows(meets, begins, spans.start[undecided])
        component[undecided] = np.where(after, "bottom_mlp", "top_mlp")


def _forward_twins(spans: _Spans, nodes: Ints) -> Ints:
    """Row of the forward operator whose gradient each node computes, −1 where none is known.

    By the sequence number that both have: it counts the nodes that a thread makes, and a node
    names the thread. Several operators have the number of a node (``aten::linear`` and the
    ``aten::t`` in it): the one that the node is called after is taken, else the innermost.
    In traces without such numbers, by the flows from operators to nodes; without those, by
    the order of operators and nodes alone.
    """
    keys = [forward_key(text) for _, text in spans.texts]
    forward = np.flatnonzero(spans.operator & (spans.node < 0))
    numbered = forward[spans.sequence[forward] >= 0]
    if not len(numbered) or not (spans.sequence[nodes] >= 0).any():
        if len(spans.flows):
            return _twins_by_flow(spans, nodes, forward, keys)
        return _twins_by_order(spans, nodes, forward, keys)
    of_node = pd.DataFrame({"node": np.arange(len(nodes)), "key": spans.keys(nodes, spans.key)})
    of_node = of_node.assign(thread=spans.thread[nodes], sequence=spans.sequence[nodes])
    candidates = pd.DataFrame({"row": numbered, "forward_key": spans.keys(numbered, keys)})
    candidates["profile"] = spans.profile[numbered]
    candidates["sequence"] = spans.sequence[numbered]
    candidates = candidates.groupby(["profile", "sequence"]).tail(MOST_ALIKE)
    pairs = of_node[of_node["sequence"] >= 0].merge(candidates, on="sequence")
    pairs = pairs[spans.start[pairs["row"]] <= spans.start[nodes[pairs["node"]]]]
    pairs["alike"] = pairs["key"] == pairs["forward_key"]
    # a node's number is of one forward thread; which one, the names tell
    votes = pairs.groupby(["thread", "profile"])["alike"].sum().reset_index()
    votes = votes.sort_values(["alike"]).drop_duplicates("thread", keep="last")
    pairs = pairs.merge(votes[["thread", "profile"]], on=["thread", "profile"])
    return _best_twins(pairs, len(nodes))


def _best_twins(pairs: pd.DataFrame, count: int) -> Ints:
    """Of the candidates of each node, one that it is called after, else the innermost."""
    pairs = pairs.sort_values(["node", "alike", "row"]).drop_duplicates("node", keep="last")
    twin = np.full(count, -1)
    twin[pairs["node"]] = pairs["row"]
    return twin


def _twins_by_flow(spans: _Spans, nodes: Ints, forward: Ints, keys: Sequence[str]) -> Ints:
    """As :func:`_forward_twins`: a flow leads from an operator to a node."""
    candidates = pd.DataFrame({"row": forward, "forward_key": spans.keys(forward, keys)})
    candidates["forward"] = spans.start[forward]
    candidates["forward_line"] = spans.line[forward]
    candidates = candidates.groupby(["forward", "forward_line"]).tail(MOST_ALIKE)
    inside = np.flatnonzero(spans.node >= 0)
    of_node = pd.DataFrame({"node": np.searchsorted(nodes, spans.node[inside])})
    of_node["backward"], of_node["backward_line"] = spans.start[inside], spans.line[inside]
    of_node = of_node.drop_duplicates()
    of_node["key"] = np.array(spans.keys(nodes, spans.key), dtype=object)[of_node["node"]]
    ends = spans.flows.drop_duplicates(["backward", "backward_line"])
    pairs = ends.merge(of_node, on=["backward", "backward_line"])
    pairs = pairs.merge(candidates, on=["forward", "forward_line"])
    pairs["alike"] = pairs["key"] == pairs["forward_key"]
    return _best_twins(pairs, len(nodes))


def _twins_by_order(spans: _Spans, nodes: Ints, forward: Ints, keys: Sequence[str]) -> Ints:
    """As :func:`_forward_twins`: of each key the last operator belongs to the first node."""
    node_keys = spans.keys(nodes, spans.key)
    wanted = set(node_keys) - {ACCUMULATE}
    forward = forward[spans.pairs(key in wanted for key in keys)[forward]]
    twin = np.full(len(nodes), -1)
    of_forward = np.searchsorted(spans.begins, spans.start[forward], side="right")
    of_nodes = np.searchsorted(spans.begins, spans.start[nodes], side="right")
    for number in np.unique(of_nodes):
        these, those = np.flatnonzero(of_nodes == number), forward[of_forward == number]
        these = these[np.argsort(spans.start[nodes[these]], kind="stable")]
        those = those[np.argsort(spans.start[those], kind="stable")]
        place = match_backward(spans.keys(those, keys), [node_keys[node] for node in these])
        twin[these] = np.where(place >= 0, np.append(those, -1)[place], -1)
    return twin
