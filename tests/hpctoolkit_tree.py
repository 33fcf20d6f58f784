"""Calling contexts for written HPCToolkit databases: a tree given, or a random one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

FUNCTION, LOOP, LINE, INSTRUCTION = range(4)


@dataclass
class Tree:
    """Calling contexts below the entry points; every column has shape (nodes,).

    Attributes:
        parent: index of the parent, always smaller; −1 − e for entry point e.
        kind: 0 function, 1 loop, 2 line, 3 instruction.
        call: whether its parent calls it (else the parent encloses it).
        function: index into ``functions`` for kind 0.
        line: source line for kinds 1 and 2, offset for kind 3.
        hidden: leaves that hold values and are left out of ``meta.db``.
    """

    parent: np.ndarray
    kind: np.ndarray
    call: np.ndarray
    function: np.ndarray
    line: np.ndarray
    hidden: np.ndarray
    functions: list[str]
    files: list[str] = field(default_factory=lambda: ["src/main.c", "dlrm_core/step.py"])
    modules: list[str] = field(default_factory=lambda: ["/bin/program", "<logical python>"])
    entries: list[str] = field(default_factory=lambda: ["main thread"])
    python: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def first(self) -> int:
        """Context id of node 0; ids below are the root (0) and the entry points."""
        return 1 + len(self.entries)

    def all_parents(self) -> np.ndarray:
        """Parent of every context by id, entries and root (−1) included."""
        below = np.where(self.parent < 0, -self.parent, self.parent + self.first)
        return np.concatenate([[-1], np.zeros(len(self.entries), np.int64), below])

    def and_above(self, nodes: np.ndarray) -> np.ndarray:
        """These nodes and all those that they lie in, increasing."""
        chosen = above = nodes
        while len(above):
            above = np.unique(self.parent[above])
            above = above[above >= 0]
            chosen = np.append(chosen, above)
        return np.unique(chosen)

    def depths(self) -> np.ndarray:
        """Depth of every context by id; the root's is 0."""
        depth = [0] * (len(self) + self.first)
        for context, parent in enumerate(self.all_parents().tolist()):
            if parent >= 0:
                depth[context] = depth[parent] + 1
        return np.array(depth)


def random_tree(
    rng: np.random.Generator,
    nodes: int,
    shape: str = "random",
    entries: int = 1,
    hidden: float = 0.2,
    functions: Sequence[str] = ("main", "kernel<float, std::pair<int, 2>>(int*)", "größe"),
) -> Tree:
    """A tree of ``nodes`` contexts: ``random``, ``deep`` (one chain) or ``wide`` (one parent)."""
    index = np.arange(nodes)
    if shape == "deep":
        parent = index - 1
    elif shape == "wide":
        parent = np.zeros(nodes, np.int64)
        parent[:1] = -1
    else:
        parent = (rng.random(nodes) * index).astype(np.int64)
        roots = min(nodes, entries)
        parent[:roots] = -1 - np.arange(roots)
    kind = rng.integers(0, 4, nodes)
    leaf = np.ones(nodes, np.bool_)
    leaf[parent[parent >= 0]] = False
    is_hidden = leaf & (parent >= 0) & (rng.random(nodes) < hidden)
    kind[is_hidden] = INSTRUCTION
    return Tree(
        parent=parent,
        kind=kind,
        call=kind == FUNCTION,
        function=rng.integers(0, len(functions), nodes),
        line=rng.integers(1, 5000, nodes),
        hidden=is_hidden,
        functions=list(functions),
        entries=["main thread", "application thread", "unknown entry"][:entries],
    )


def tree_of(
    rows: Sequence[tuple[str, int, int]], python: Callable[[str], bool], threads: int = 2
) -> Tree:
    """A tree of functions and, where a row has no name, lines.

    Args:
        rows: name, parent (−1 the main thread, −2 the other) and line of each node.
        python: whether a function of that name is Python's.
    """
    names = list(dict.fromkeys(name for name, _, _ in rows if name))
    return Tree(
        parent=np.array([parent for _, parent, _ in rows]),
        kind=np.array([FUNCTION if name else LINE for name, _, _ in rows]),
        call=np.array([bool(name) for name, _, _ in rows]),
        function=np.array([names.index(name) if name else 0 for name, _, _ in rows]),
        line=np.array([line for _, _, line in rows]),
        hidden=np.zeros(len(rows), bool),
        functions=names,
        entries=["main thread", "application thread"][:threads],
        python=frozenset(i for i, name in enumerate(names) if python(name)),
    )
