"""What Python ran when, for another profiler that sees none of it.

hpcrun samples the functions of libraries. The stack of the thread that trains is sampled here in
the same run, and hooks note when groups of modules begin and end, forward and backward; all
moments are on the clock of hpcrun's timeline, nanoseconds since the epoch. So each of its samples
is placed under the Python line and the module that ran then
(:mod:`dlrm_workbook.recordings.hpctoolkit.spans`), without a hook at every Python call.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from dlrm_core.base.files import write_json
from dlrm_workbook.recordings.torch.lines import FILE
from dlrm_workbook.recordings.torch.modules import ModuleRanges
from dlrm_workbook.recordings.torch.sampling import StackSampler, sources


class Beside:
    """Samples the calling thread from now on, until :meth:`write`."""

    def __init__(self) -> None:
        self._modules = ModuleRanges()
        self._modules.timed = True
        self._modules.start()
        self._sampler = StackSampler(threading.get_ident())
        self._sampler.start()

    def write(self, folder: Path, ends: list[int]) -> None:
        """Stop, and write what was sampled into a folder that is made for it; ``ends`` are of the
        iterations, nanoseconds since the epoch; each begins at the one before."""
        self._sampler.stop()
        self._modules.stop()
        epoch = min(time.time_ns() - time.perf_counter_ns() for _ in range(5))
        sampled: dict[str, Any] = self._sampler.document()
        sampled["samples"] = [(at + epoch, stack) for at, stack in sampled["samples"]]
        sampled["marks"] = ends
        sampled["modules"] = [(what, round(at * 1e9) + epoch) for what, at in self._modules.take()]
        sampled["sources"] = sources(self._sampler.codes())
        sampled["counted"] = {"missing": "nothing is counted while hpcrun measures"}
        write_json(folder / FILE, sampled)
