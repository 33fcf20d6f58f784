"""Hatchet GraphFrames that stand deep call trees.

Hatchet walks trees recursively, and its ``filter`` sets Python's recursion limit
to 1000 on every call, while call trees of real programs are 250 to 1,300 deep.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pandas as pd
from hatchet import GraphFrame
from hatchet.frame import Frame
from hatchet.graph import Graph
from hatchet.node import Node

FRAMES_PER_LEVEL = 8
"""Python frames that Hatchet's deepest walk (a query) takes for one level of a tree."""


def recursion_limit(depth: int) -> int:
    """A limit under which Hatchet can walk a tree so deep; never below the present one."""
    return max(sys.getrecursionlimit(), 1000 + FRAMES_PER_LEVEL * depth)


class DeepGraphFrame(GraphFrame):
    """A GraphFrame whose ``filter`` keeps a recursion limit that fits the tree."""

    depth: int = 0

    def filter(self, *args: Any, **options: Any) -> DeepGraphFrame:
        """As ``GraphFrame.filter``; ``rec_limit`` defaults to one that fits."""
        options.setdefault("rec_limit", recursion_limit(self.depth))
        found = super().filter(*args, **options)
        found.__class__ = DeepGraphFrame
        found.depth = self.depth
        result: DeepGraphFrame = found
        return result


def build(
    attributes: Sequence[dict[str, Any]],
    parent: Sequence[int],
    table: pd.DataFrame,
    exclusive: list[str],
    inclusive: list[str],
    default_metric: str,
    metadata: dict[str, Any],
) -> DeepGraphFrame:
    """A GraphFrame from a tree in rows, built without recursion.

    Args:
        attributes: of each row's frame, at least ``name``; (rows,).
        parent: row of the parent, −1 for a root; parents precede children; (rows,).
        table: the data frame's columns, a row a node.
        exclusive, inclusive: columns of ``table`` that are metrics.
        default_metric: column that ``tree()`` shows.
        metadata: of the GraphFrame.
    """
    nodes: list[Any] = []
    depth: list[int] = []
    for row, (labels, above) in enumerate(zip(attributes, parent, strict=True)):
        over = nodes[above] if above >= 0 else None
        depth.append(depth[above] + 1 if above >= 0 else 0)
        node = Node(Frame(labels), over, row, depth[-1])
        if over is not None:
            over.add_child(node)
        nodes.append(node)
    deepest = max(depth, default=0)
    sys.setrecursionlimit(recursion_limit(deepest))
    graph = Graph([node for node, above in zip(nodes, parent, strict=True) if above < 0])
    graph.enumerate_traverse()
    frame = table.copy()
    frame.index = pd.Index(nodes, name="node", dtype=object)
    made = DeepGraphFrame(
        graph,
        frame.sort_index(),
        exclusive,
        inclusive,
        default_metric=default_metric,
        metadata=metadata,
    )
    made.depth = deepest
    return made
