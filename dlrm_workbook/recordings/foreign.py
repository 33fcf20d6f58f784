"""Parts of programs that are not ours, by the names that their recordings hold.

Our own step names its parts (:mod:`dlrm_core.parts`). Other programs have the names that
their authors, their framework and their libraries gave: user annotations (TorchRec's
``## forward:over_arch ##``), modules (``nn.Module: EmbeddingBagCollection_0``), Python
functions (``apply_emb`` and ``interact_features`` of facebookresearch/dlrm), operators,
autograd nodes (``AddmmBackward0``), kernels (FBGEMM, NCCL), and what a user says in a map of
patterns. This module reads names only, by the table ``names.csv``. Whoever has a tree of calls
resolves it with :func:`resolve`; what is left (a matrix product belongs to the bottom or the top
MLP, a backward node to the part of its forward operator) follows from order:
:func:`mlp_by_order` and :func:`match_backward`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_core.base.errors import InputError
from dlrm_core.parts import ITERATION_FUNCTION, parse_span
from dlrm_workbook.ground.arrays import Bools, Ints, Names
from dlrm_workbook.ground.marks import GROUP_PREFIX, PART_PREFIX, parse_part
from dlrm_workbook.ground.tables import rows_of
from dlrm_workbook.recordings.profile import Profile, nearest

MLP = "mlp"
"""Of a name that says MLP, but not whether bottom or top; :func:`mlp_by_order` says which."""

NO_STEP = "outside"
"""What no step does, although a step may be the first to need it: libraries are loaded, the
GPU is set up."""

START_UP = "start-up"
"""Phase of contexts that belong to no step; their component is ``other``."""


@dataclass(frozen=True)
class Named:
    """What a name says about the calls below it.

    Attributes:
        component: one of ``parts.COMPONENTS`` or :data:`MLP`; "" where the name says a phase only.
        phase: one of ``parts.PHASES``, or "" where the name says none.
        hint: the name only hints at the part (an operator such as ``aten::bmm``): whatever
            encloses it and names a part knows better.
    """

    component: str
    phase: str = ""
    hint: bool = False


Rules = tuple[tuple[re.Pattern[str], Named], ...]
"""Patterns of names and what they say, of which the first that matches counts."""

_ROWS = rows_of(__file__, "names.csv")


def _rules(kind: str) -> Rules:
    return tuple(
        (re.compile(row["pattern"]), Named(row["component"], row["phase"], bool(row["hint"])))
        for row in _ROWS
        if row["kind"] == kind
    )


def _first(rules: Rules, text: str) -> Named | None:
    return next((says for pattern, says in rules if pattern.search(text)), None)


_SPOKEN = _rules("word")
"""Words of annotations, modules and Python functions that people wrote."""

_PHASES = _rules("phase")

_FRAMES = {name.pattern: says for name, says in _rules("whole name")}
"""Python functions of facebookresearch/dlrm, NVIDIA's DLRM and torch."""

_FRAME_FILES = _rules("file")
"""Files of Python functions whose names are too common to tell anything."""

_DISTRIBUTED = _rules("file:function")
"""Files of torch, and which of their functions exchange data, prepare that or wait for others."""

_OPERATORS = _rules("operator")
"""What only hints (``aten::bmm`` in a DLRM) holds where nothing around it knows."""

_NODES = _rules("node")
"""Autograd nodes (their key, see :func:`node_key`) whose own name hints at a part."""

COMMUNICATION = re.compile("|".join(one.pattern for one, _ in _rules("exchange")), re.IGNORECASE)
"""In the names of kernels that exchange data between ranks, by the library that has them. Such
kernels run on few multiprocessors on purpose, and most of their time is waiting for other ranks."""


def exchange_kernels(profile: Profile) -> Bools:
    """Which contexts (n,) are such kernels."""
    named = profile.which("name", lambda name: bool(COMMUNICATION.search(name)))
    return named & profile.of_kind("kernel")


_KERNELS = ((COMMUNICATION, Named("communication")), *_rules("kernel"))
"""Kernels whose name says their part, wherever they were launched from."""

_FUNCTIONS = _rules("function")
"""C++ functions, of which there are many that say nothing."""

_MODULES = _rules("module")
"""Classes of modules."""

_BETWEEN_HOST_AND_DEVICE = _rules("copy")
"""A copy between host and device is a transfer, where nothing around it says more."""

_NODE = re.compile(
    r"(?:^|::|[ <])(?:PyNode|CppNode)?<?(?:[\w]+::)*(?P<name>\w+?)(?:Backward\d*)\b|"
    r"torch::autograd::CppNode<(?:[\w()]+ ?[\w()]*::)*(?P<custom>\w+)>"
)
MODULE_PREFIX = "nn.Module: "
"""Begin of the name that torch gives a module's call among the Python functions."""
ENGINE_PREFIX = "autograd::engine::"
"""Of what autograd's own threads run."""
_ENGINE = "autograd::engine::evaluate_function: "
ACCUMULATE = "AccumulateGrad"
"""The node that adds a gradient to a parameter's: it belongs to the node before it."""

LONGEST_MODULE = 60
"""Characters of a part that is named by a module; the rest of a longer path is left out."""

_UNUSUAL = re.compile(r"[^\w.]")

_FRAME = re.compile(r"(.+?)\(\d+\): (.+)")
"""File and name of a Python function, as torch.profiler writes them."""


class PartNames:
    """What names say, the user's map first.

    Args:
        parts: pattern to part: ``{"*my_tower*": "bottom_mlp", "Pool": "embedding backward"}``.
            A pattern without ``*``, ``?`` or ``[`` may stand anywhere in a name; upper and
            lower case are alike. The part is a component, and a phase where wanted.
        makers: file and name of each Python function that was seen to make what the model is
            given: whatever its name says, it makes the batch.

    Raises:
        InputError: a part is unknown.
    """

    def __init__(
        self, parts: Mapping[str, str] | None = None, makers: Iterable[tuple[str, str]] = ()
    ) -> None:
        self._user = [(_pattern(name), _part(name, part)) for name, part in (parts or {}).items()]
        self._makers = set(makers)
        self.of = functools.cache(self._of)

    def _by_user(self, name: str) -> Named | None:
        """What the user's map says of a name."""
        return next((named for matches, named in self._user if matches(name)), None)

    def _of(self, kind: str, name: str, file: str = "") -> Named | None:
        """What a context says by its kind (of ``profile.CONTEXT_KINDS``), its name and its file."""
        if named := self._by_user(name):
            return named
        frame = _FRAME.fullmatch(name) if kind == "python" and self._makers else None
        if frame is not None and frame.groups() in self._makers:
            return Named("data", "forward")
        rule = _BY_KIND.get(kind)
        return rule(name, file) if rule else None

    def of_any_program(self, kind: str, name: str, file: str = "") -> Named | None:
        """What a name says in a program without embedding tables.

        There a product or a "prediction head" is no MLP of a DLRM, and a module of embeddings is
        one of its modules, unless a user says so.
        """
        named = self.of(kind, name, file)
        module = name.startswith(GROUP_PREFIX)
        if named is None or (kind == "annotation" and not module) or self._by_user(name):
            return named
        foreign = named.component in (MLP, "bottom_mlp", "interaction", "top_mlp")
        if foreign or (module and named.component == "embedding"):
            return Named("", named.phase) if named.phase else None
        return named

    @staticmethod
    def module(name: str) -> str:
        """The part that a range around modules stands for by itself; "" of other names."""
        if not name.startswith(GROUP_PREFIX):
            return ""
        return _UNUSUAL.sub("_", name.removeprefix(GROUP_PREFIX))[:LONGEST_MODULE]


_EARLIER_ITERATION = re.compile(r"(^|/)dlrm_core/training(_loop)?\.py$")
"""Files that held our own iteration while it was called ``iterate``. Recordings name them, so this
stays as it is; it is complete, since newer recordings have ``ITERATION_FUNCTION``."""


def is_iteration_function(name: str, file: str) -> bool:
    """Whether a profiler's Python function, with or without the names of the scopes around it, is
    the one around an iteration of our own step. The ``file`` of its source counts only in
    recordings from before ``dlrm_iteration``: other programs have functions called ``iterate`` too.
    """
    name = name.rpartition(".")[2]
    if name == "iterate":
        return bool(_EARLIER_ITERATION.search(file))
    return name == ITERATION_FUNCTION


def _pattern(text: str) -> Callable[[str], re.Match[str] | None]:
    whole = text if any(mark in text for mark in "*?[") else f"*{text}*"
    return re.compile(fnmatch.translate(whole), re.IGNORECASE).match


def _part(pattern: str, part: str) -> Named:
    try:
        return Named(*parse_part(part))
    except ValueError as error:
        raise InputError(f"profiling.parts: {pattern} is {part!r}, {error}") from None


def _annotation(name: str, file: str) -> Named | None:
    if ours := parse_span(name):
        return Named(*ours)
    if name.startswith(GROUP_PREFIX):
        pieces = name.removeprefix(GROUP_PREFIX).split(".")
        return next(filter(None, map(_module, reversed(pieces))), None)
    if name.startswith(PART_PREFIX):
        with contextlib.suppress(ValueError):
            return Named(*parse_part(name.removeprefix(PART_PREFIX)))
    words = name.strip("# ")
    named, spoken = _node_or(_OPERATORS, words), _first(_PHASES, words)
    phase = spoken.phase if spoken else ""
    if named is None or named.hint:
        named = _first(_SPOKEN, words) or named
    if named is None or named.component == "other":
        return Named("", phase) if phase else None
    return Named(named.component, named.phase or phase)


def _node_or(rules: Rules, name: str) -> Named | None:
    """What an autograd node says, or of other names the rules."""
    node = node_key(name)
    if node is None:
        return _first(rules, name)
    return _first(_NODES, node) or Named("", "backward")


def _python(name: str, file: str) -> Named | None:
    """A Python function; ``name`` may be as torch writes it, ``file.py(12): function``."""
    function = name.split(": ", 1)[-1].rpartition(".")[2]
    if name.startswith(MODULE_PREFIX):
        return _module(re.sub(r"_\d+$", "", name.removeprefix(MODULE_PREFIX)))
    if ours := parse_span(function):
        return Named(*ours)
    if function in _FRAMES:
        return _FRAMES[function]
    place = file or name.partition("(")[0]
    if exchange := _first(_DISTRIBUTED, f"{place}:{function}"):
        return exchange if exchange.component else None
    named = _first(_FRAME_FILES, place)
    whose = name.split(": ", 1)[-1].split(".")
    if named is None and function == "forward" and len(whose) > 1:
        return _module(whose[-2])
    if named or re.search(r"(^|/)(site-packages|torch|python3\.\d+)/", place):
        return named
    return _first(_SPOKEN, function)


def _module(words: str) -> Named | None:
    """A class of modules, by its name."""
    return _first(_MODULES, words) or _first(_SPOKEN, words)


_BY_KIND: dict[str, Callable[[str, str], Named | None]] = {
    "annotation": _annotation,
    "operator": lambda name, file: _node_or(_OPERATORS, name),
    "python": _python,
    "kernel": lambda name, file: _first(_KERNELS, name),
    "copy": lambda name, file: _first(_BETWEEN_HOST_AND_DEVICE, name),
    "function": lambda name, file: _node_or(_FUNCTIONS, name),
}

_LOOKUPS = re.compile(
    r"embedding_?bag|split_embedding|int_nbit_split|split_?lookup|"
    r"interact_features|interaction_?arch|dot_?interact",
    re.IGNORECASE,
)


def has_embeddings(names: Iterable[tuple[str, str]]) -> bool:
    """Whether a program (kind and name of what it has) looks up bags of rows in embedding tables,
    or interacts features.

    Only then does ``aten::bmm`` hint at the interaction and ``aten::addmm`` at its MLPs.
    """
    return any(_LOOKUPS.search(name) for _, name in names)


def node_key(name: str) -> str | None:
    """What an autograd node is the backward of, or None if the name is of no node.

    ``autograd::engine::evaluate_function: AddmmBackward0`` and
    ``torch::autograd::generated::AddmmBackward0::apply(...)`` are ``addmm``;
    ``AccumulateGrad`` is itself.
    """
    text = name.removeprefix(_ENGINE)
    if ACCUMULATE in text[:80]:
        return ACCUMULATE
    if text is name and "autograd" not in name and not re.match(r"\w+Backward\d*$", name):
        return None
    match = _NODE.search(text)
    if match is None:
        # a function of the user's own: named as a class is
        return forward_key(text) if text is not name else None
    return forward_key(match["name"] or match["custom"])


def forward_key(name: str) -> str:
    """Of an operator, to be compared with :func:`node_key`: ``aten::_embedding_bag`` is
    ``embeddingbag``."""
    return name.rpartition("::")[2].replace("_", "").lower()


def match_backward(forward: Sequence[str], backward: Sequence[str]) -> Ints:
    """Place (m,) of the forward operator that each backward node belongs to, by order alone, −1
    where there is none; both are keys of one iteration, in the order of their begin.

    Autograd runs nodes in the reverse order of their operators. So of each key, the last operator
    belongs to the first node; operators without gradients are left over at the front.
    """
    places: dict[str, list[int]] = {}
    for place, key in enumerate(forward):
        places.setdefault(key, []).append(place)
    return np.array([places[k].pop() if places.get(k) else -1 for k in backward], dtype=np.int64)


def mlp_by_order(components: Sequence[str], backward: bool) -> list[str]:
    """Bottom and top MLP told apart by their place around the interaction, in the ``components`` of
    one iteration's calls of one phase, in the order of their begin; ``other`` where no interaction
    is met. Those of ``backward`` run from the loss back; else from the input on."""
    before, after = ("top_mlp", "bottom_mlp") if backward else ("bottom_mlp", "top_mlp")
    if "interaction" not in components:
        before = after = "other"
    told, part = [], before
    for name in components:
        part = after if name == "interaction" else part
        told.append(part if name == MLP else name)
    return told


def resolve(parent: Ints, named: Sequence[Named | None], code: Ints) -> tuple[Names, Names, Bools]:
    """Part and phase of every row of a tree, from the names on the way to its root.

    The innermost name that names a component decides. Where none does, the outermost hint
    decides: the operator that was called knows better than those that it is made of. The
    phase is that of the innermost name that has one.

    Args:
        parent: (n,) row of the parent, −1 for a root; in any order.
        named: what each distinct name says.
        code: (n,) which of ``named`` a row has.

    Returns:
        Components (n,) (``other`` where nothing is known; maybe :data:`MLP`), phases (n,)
        ("" where unknown), and which rows (n,) have their component from a hint.
    """
    told = [one or Named("") for one in named]
    component = np.array([one.component for one in told] + ["other"], dtype=object)
    phase = np.array([one.phase for one in told] + [""], dtype=object)
    hints = np.array([one.hint for one in told], dtype=bool)[code]
    has = (component != "")[code]
    strong = nearest(parent, has & ~hints)
    hint = outermost_marked(parent, has & hints)
    decided = np.where(strong >= 0, strong, hint)
    spoken = nearest(parent, (phase != "")[code])
    code = np.append(code, len(named))  # of row −1, outside of every name, the last
    return component[code[decided]], phase[code[spoken]], (strong < 0) & (hint >= 0)


def outermost_marked(parent: Ints, marked: Bools) -> Ints:
    """Row (n,) of the marked row nearest to the root at or above each, −1 where there is none."""
    inner = np.append(nearest(parent, marked), -1)
    return nearest(parent, marked & (inner[parent] < 0))
