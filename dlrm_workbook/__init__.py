"""Everything about a run: measure, read recordings, explain, predict, compare, draw, publish.

One name is for programs that are not ours: :class:`record`, by which a training loop records
itself (docs/your-own-model.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrm_workbook.recordings.torch.session import record

__all__ = ["record"]


def __getattr__(name: str) -> Any:
    # not imported before it is asked for: most of the workbook starts without torch
    if name == "record":
        from dlrm_workbook.recordings.torch.session import record

        return record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
