"""A Profile's call tree as a Hatchet ``GraphFrame`` (see :meth:`Profile.to_hatchet`)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pandas as pd

from dlrm_core.errors import MissingToolError
from dlrm_core.profiling.profile import Profile, depths

if TYPE_CHECKING:
    from hatchet import GraphFrame


def graph_frame(profile: Profile) -> GraphFrame:
    """Built in the order of the contexts, without recursion; a row a context.

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
    parent = profile.contexts["parent"].to_numpy()
    depth = depths(parent)
    nodes: list[Any] = []
    columns = zip(
        profile.contexts["name"],
        profile.contexts["kind"],
        profile.contexts["shapes"],
        parent.tolist(),
        depth.tolist(),
        strict=True,
    )
    for name, kind, shapes, above, level in columns:
        attributes = {"name": name, "type": kind}
        if shapes:
            attributes["shapes"] = shapes
        over = nodes[above] if above >= 0 else None
        node = Node(Frame(attributes), parent=over, hnid=len(nodes), depth=level)
        if over is not None:
            over.add_child(node)
        nodes.append(node)
    # Each level costs Hatchet a few Python frames (generator plus sort key).
    deepest = int(depth.max(initial=0))
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + 4 * deepest))
    graph = Graph([node for node, above in zip(nodes, parent, strict=True) if above < 0])
    graph.enumerate_traverse()
    frame = profile.wide()
    exclusive = [name for name in frame.columns if not name.endswith(" (inc)")]
    inclusive = [name for name in frame.columns if name.endswith(" (inc)")]
    labels = profile.contexts.drop(columns=["context", "parent"]).rename(columns={"kind": "type"})
    frame = pd.concat([labels, frame.reset_index(drop=True)], axis=1)
    frame.index = pd.Index(nodes, name="node", dtype=object)
    frame = frame.sort_index()
    default = "gpu_time_ms" if profile.has("gpu_time_ms") else "cpu_time_ms"
    default += " (inc)" if f"{default} (inc)" in inclusive else ""
    return GraphFrame(
        graph, frame, exclusive, inclusive, default_metric=default, metadata=dict(profile.meta)
    )
