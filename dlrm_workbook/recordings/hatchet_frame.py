"""A Profile's call tree as a Hatchet ``GraphFrame`` (see :meth:`Profile.to_hatchet`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from dlrm_core.errors import MissingToolError
from dlrm_workbook.recordings.profile import Profile

if TYPE_CHECKING:
    from hatchet import GraphFrame


def graph_frame(profile: Profile) -> GraphFrame:
    """Built in the order of the contexts, without recursion; a row a context.

    Raises:
        MissingToolError: Hatchet is not installed.
    """
    try:
        from dlrm_workbook.recordings import deep_frames
    except ImportError:
        raise MissingToolError(
            "Hatchet is not installed: pip install 'llnl-hatchet>=2026.2.0' 'pandas<3'"
        ) from None
    contexts = profile.contexts
    attributes = [
        {"name": name, "type": kind} | ({"shapes": shapes} if shapes else {})
        for name, kind, shapes in zip(
            contexts["name"], contexts["kind"], contexts["shapes"], strict=True
        )
    ]
    values = profile.wide().reset_index(drop=True)
    inclusive = [name for name in values.columns if name.endswith(" (inc)")]
    labels = contexts.drop(columns=["context", "parent"]).rename(columns={"kind": "type"})
    default = "gpu_time_ms" if profile.has("gpu_time_ms") else "cpu_time_ms"
    return deep_frames.build(
        attributes,
        contexts["parent"].tolist(),
        pd.concat([labels, values], axis=1),
        [name for name in values.columns if name not in inclusive],
        inclusive,
        default + (" (inc)" if f"{default} (inc)" in inclusive else ""),
        dict(profile.meta),
    )
