"""Everything about a run: measure, read recordings, explain, predict, compare, draw, publish.

Three names are for everybody: :func:`explain`, which answers for any run or recording,
:func:`describe`, which says what columns, parameters and findings mean, and :class:`record`, by
which a training loop that is not ours records itself (docs/your-own-model.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrm_workbook.help import describe
    from dlrm_workbook.recordings.torch.session import record
    from dlrm_workbook.report import explain

__all__ = ["describe", "explain", "record"]

_HOMES = {
    "describe": "dlrm_workbook.help",
    "explain": "dlrm_workbook.report",
    "record": "dlrm_workbook.recordings.torch.session",
}


def __getattr__(name: str) -> Any:
    # not imported before it is asked for: most of the workbook starts without torch
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
