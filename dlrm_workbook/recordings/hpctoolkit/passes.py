"""Which measurements are made, and the exact commands that make them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dlrm_core.base.errors import InputError
from dlrm_workbook.ground.processes import ALLOCATOR
from dlrm_workbook.recordings.hpctoolkit.tools import CPU_EVENT, Capabilities

MAKE_SAFE = re.compile(r"[A-Za-z0-9_./+@%,=-]+")
"""Paths that hpcstruct can take: it writes them into a Makefile and a shell command."""


@dataclass(frozen=True)
class Pass:
    """One profiled run.

    Attributes:
        name: ``times`` (when and how long) or ``stalls`` (why kernels wait).
        events: one ``-e`` each.
        trace: record a timeline (``-t``).
        python: put Python functions into call paths (``-a python``).
    """

    name: str
    events: tuple[str, ...]
    trace: bool
    python: bool


def plan_passes(
    capabilities: Capabilities,
    device: str,
    *,
    python: bool = True,
    pc_sampling: bool = True,
    single: bool = False,
) -> list[Pass]:
    """The passes that a workload on ``device`` is measured with.

    PC sampling serialises kernels (a program 4.9 % idle became 78 % idle), so
    times and stall reasons never come from one run unless somebody asks for that. Python frames
    cost a hook at every Python call, and samples that fall into the hook are lost
    (parameters/quick.yaml: up to 12 times as long, its data loop gone from the profile): times
    with them would call a GPU idle that waits for the hook. So parts come from the
    workload's own spans, and those of GPU work, which runs long after its launch, from the
    order of launches (:mod:`dlrm_workbook.recordings.alignment`); those of other programs, and
    their lines, from stacks that they sample themselves
    (:mod:`dlrm_workbook.recordings.hpctoolkit.stacks`). The pass for stall reasons,
    whose times nobody uses, has the frames: they name the part of a kernel that waits.

    Args:
        device: ``cpu`` or ``cuda``.
        python: Python frames are wanted (given where the tools offer them).
        pc_sampling: stall reasons are wanted (on a GPU that offers them).
        single: everything in one run, Python frames too.
    """
    if device not in ("cpu", "cuda"):
        raise InputError(f"device is {device!r}, expected 'cpu' or 'cuda'")
    python = python and capabilities.python_frames
    gpu_event = capabilities.gpu_event if device == "cuda" else None
    pc_event = capabilities.pc_event if gpu_event is not None and pc_sampling else None
    timed = gpu_event if not single else pc_event or gpu_event
    events = (CPU_EVENT,) if timed is None else (CPU_EVENT, timed)
    passes = [Pass("times", events, trace=True, python=python and single)]
    if pc_event is not None and not single:
        passes.append(Pass("stalls", (pc_event,), trace=False, python=python))
    return passes


def workload_environment(base: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Environment of every run, profiled or not, and notices about what it lost. An InputError says
    that this process is itself measured by hpcrun."""
    if "HPCRUN_EVENT_LIST" in base:
        raise InputError(
            "this process runs under hpcrun already (HPCRUN_EVENT_LIST is set); "
            "start the measurement from a process that is not measured"
        )
    environment = dict(base)
    notices = []
    for name in ("PYTHONMALLOC", "PYTHONDEVMODE"):
        # hpcrun -a python aborts under Python's debugging allocator
        if environment.pop(name, ""):
            notices.append(f"{name} was removed from the environment of the measured runs")
    # hpcrun obeys such variables of a shell beside its own options
    if removed := sorted(name for name in environment if name.startswith("HPCRUN_")):
        notices.append(
            f"{', '.join(removed)} {'was' if len(removed) == 1 else 'were'} removed from the "
            "environment of the measured runs: they change what hpcrun measures"
        )
    kept = {name: value for name, value in environment.items() if name not in removed}
    return kept | ALLOCATOR, notices


def make_safe(path: Path) -> bool:
    """Whether hpcstruct can work in this folder.

    It pastes the path unquoted into a Makefile and into ``system()``: a space
    breaks it, and a ``$(...)`` in a folder's name would run.
    """
    return MAKE_SAFE.fullmatch(str(path)) is not None
