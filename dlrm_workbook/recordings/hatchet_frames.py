"""Call trees as Hatchet ``GraphFrame``s that stand deep trees and print the largest first.

Hatchet walks trees recursively, and its ``filter`` sets Python's recursion limit
to 1000 on every call, while call trees of real programs are 250 to 1,300 deep.
Its ``tree()`` lists callees by name, so that what takes the time can be anywhere.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from dlrm_core.base.errors import MissingToolError

if TYPE_CHECKING:
    from hatchet import GraphFrame
    from thicket import Thicket


class TreeText(str):
    """The text of a tree, which is shown as it is where it is the value of a cell."""

    def __repr__(self) -> str:
        return str(self)


LEGIBLE = {208: 166, 220: 136, 46: 64, 34: 65, 22: 243}
"""Hatchet's terminal colours that a light or a dark page swallows, to darker or greyer ones."""

FRAMES_PER_LEVEL = 8
"""Python frames that Hatchet's deepest walk (a query) takes for one level of a tree."""


def graph_frame(
    contexts: pd.DataFrame, columns: pd.DataFrame, default_metric: str, metadata: dict[str, Any]
) -> GraphFrame:
    """A GraphFrame with a row a context, built without recursion.

    Args:
        contexts: ``name``, ``type``, ``parent`` (row of the parent, −1 for a root; parents
            precede children) and further columns, which the data frame keeps. The frame
            of a row has its name and type, and its ``shapes`` where it has any.
        columns: the metrics; those that end with `` (inc)`` are inclusive.
        default_metric: column that ``tree()`` shows.

    Raises:
        MissingToolError: Hatchet is not installed.
    """
    try:
        # where there is a notebook, Hatchet prints that a magic of its own is missing
        with contextlib.redirect_stdout(io.StringIO()):
            from hatchet import GraphFrame
        from hatchet.frame import Frame
        from hatchet.graph import Graph
        from hatchet.node import Node
    except ImportError:
        raise MissingToolError(
            "Hatchet is not installed: pip install 'llnl-hatchet>=2026.2.0' 'pandas<3'"
        ) from None

    class DeepGraphFrame(GraphFrame):
        """A GraphFrame whose methods keep a recursion limit that fits the tree.

        What its methods return is one too.
        """

        def filter(self, *args: Any, **options: Any) -> Any:
            """As ``GraphFrame.filter``, in this process unless ``num_procs`` says otherwise.

            Hatchet's own default forks as many processes as there are cores, out of a
            notebook's kernel that has threads.
            """
            options = {"rec_limit": limit, "num_procs": 1} | options
            return self._like_this(super().filter(*args, **options))

        def groupby_aggregate(self, *args: Any, **options: Any) -> Any:
            """As ``GraphFrame.groupby_aggregate``, without what pandas says of its insides."""
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return super().groupby_aggregate(*args, **options)

        def sub(self, other: Any) -> Any:
            """As ``GraphFrame.sub``, which ``-`` calls."""
            return self._like_this(super().sub(other))

        def tree(self, metric_column: Any = None, **options: Any) -> TreeText:
            """As ``GraphFrame.tree``, callees with the largest (absolute) value first."""
            shown = metric_column or self.default_metric
            first = shown if isinstance(shown, str) else shown[0]
            text = _largest_first(self, first).tree(shown, **options)
            for colour, legible in LEGIBLE.items():
                text = text.replace(f"[38;5;{colour}m", f"[38;5;{legible}m")
            return TreeText(text)

        def _like_this(self, frame: Any) -> Any:
            frame.__class__ = DeepGraphFrame
            return frame

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


def _largest_first(frame: GraphFrame, metric: str) -> GraphFrame:
    """A copy of the frame whose nodes are numbered, and so printed, with the largest first."""
    from hatchet import GraphFrame

    copies: dict[Any, Any] = {}
    graph = frame.graph.copy(copies)
    nodes = [copies[node] for node in frame.dataframe.index]
    values = frame.dataframe[metric].abs().fillna(-1.0)
    value = dict(zip(map(id, nodes), values, strict=True))

    def largest_last(children: list[Any]) -> list[Any]:
        return sorted(children, key=lambda node: value[id(node)])

    ordered: list[Any] = []
    left = largest_last(graph.roots)
    while left:
        ordered.append(left.pop())
        left += largest_last(ordered[-1].children)
    for number, node in enumerate(ordered):
        node._hatchet_nid = number
    graph.node_ordering = True
    table = frame.dataframe.copy()
    table.index = pd.Index(nodes, name="node", dtype=object)
    columns = (frame.exc_metrics, frame.inc_metrics, frame.default_metric, frame.metadata)
    return GraphFrame(graph, table, *columns)


def thicket(frames: Mapping[str, GraphFrame]) -> Thicket:
    """Call trees of many runs as one Thicket, for its statistics over runs: ``frames`` has label to
    call tree, as :meth:`Profile.to_hatchet` makes it. A MissingToolError says that Thicket is not
    installed.

    Its data frame has a row a node and run. Its ``metadata`` has, of each run, ``run`` (the label)
    and the parameters that were set (``training.batch_size``, ...).
    """
    try:
        from thicket import Thicket
    except ImportError:
        raise MissingToolError("Thicket is not installed: pip install llnl-thicket") from None
    several = []
    for label, frame in frames.items():
        one = frame.copy()
        sections = frame.metadata.get("parameters") or {}
        one.metadata = {"run": label} | {
            f"{section}.{leaf}": value
            for section, leaves in sections.items()
            if isinstance(leaves, Mapping)
            for leaf, value in leaves.items()
            if isinstance(value, str | int | float)
        }
        several.append(Thicket.thicketize_graphframe(one, label))
    return Thicket.concat_thickets(several, disable_tqdm=True)
