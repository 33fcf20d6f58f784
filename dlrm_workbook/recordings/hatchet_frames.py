"""Call trees as Hatchet ``GraphFrame``s that stand deep trees.

Hatchet walks trees recursively, and its ``filter`` sets Python's recursion limit
to 1000 on every call, while call trees of real programs are 250 to 1,300 deep.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pandas as pd

from dlrm_core.errors import MissingToolError

if TYPE_CHECKING:
    from hatchet import GraphFrame

FRAMES_PER_LEVEL = 8
"""Python frames that Hatchet's deepest walk (a query) takes for one level of a tree."""


def graph_frame(
    contexts: pd.DataFrame,
    columns: pd.DataFrame,
    default_metric: str,
    metadata: dict[str, Any],
) -> GraphFrame:
    """A GraphFrame with a row a context, built without recursion.

    Args:
        contexts: ``name``, ``type``, ``parent`` (row of the parent, −1 for a root; parents
            precede children) and further columns, which the data frame keeps. The frame
            of a row has its name and type, and its ``shapes`` where it has any.
        columns: the metrics; those that end with `` (inc)`` are inclusive.
        default_metric: column that ``tree()`` shows.
        metadata: of the GraphFrame.

    Raises:
        MissingToolError: Hatchet is not installed.
    """
    try:
        from hatchet import GraphFrame
        from hatchet.frame import Frame
        from hatchet.graph import Graph
        from hatchet.node import Node
    except ImportError:
        raise MissingToolError(
            "Hatchet is not installed: pip install 'llnl-hatchet>=2026.2.0' 'pandas<3'"
        ) from None

    class DeepGraphFrame(GraphFrame):
        """A GraphFrame whose ``filter`` keeps a recursion limit that fits the tree."""

        def filter(self, *args: Any, **options: Any) -> Any:
            """As ``GraphFrame.filter``; ``rec_limit`` defaults to one that fits."""
            options.setdefault("rec_limit", limit)
            found = super().filter(*args, **options)
            found.__class__ = DeepGraphFrame
            return found

    shapes = contexts["shapes"] if "shapes" in contexts else [""] * len(contexts)
    nodes: list[Any] = []
    depths: list[int] = []
    rows = zip(contexts["name"], contexts["type"], shapes, contexts["parent"], strict=True)
    for row, (name, kind, shape, above) in enumerate(rows):
        over = nodes[above] if above >= 0 else None
        depths.append(depths[above] + 1 if above >= 0 else 0)
        attributes = {"name": name, "type": kind} | ({"shapes": shape} if shape else {})
        node = Node(Frame(attributes), over, row, depths[-1])
        if over is not None:
            over.add_child(node)
        nodes.append(node)
    # never below the present one
    limit = max(sys.getrecursionlimit(), 1000 + FRAMES_PER_LEVEL * max(depths, default=0))
    sys.setrecursionlimit(limit)
    graph = Graph([node for node, depth in zip(nodes, depths, strict=True) if depth == 0])
    graph.enumerate_traverse()
    table = pd.concat([contexts.drop(columns="parent"), columns], axis=1)
    table.index = pd.Index(nodes, name="node", dtype=object)
    metrics = [str(name) for name in columns]
    return DeepGraphFrame(
        graph,
        table.sort_index(),
        [name for name in metrics if not name.endswith(" (inc)")],
        [name for name in metrics if name.endswith(" (inc)")],
        default_metric=default_metric,
        metadata=metadata,
    )
