"""``dlrm doctor``: what this machine has, and what each missing part costs.

Everything is looked up from /proc, /sys and the PATH; nothing is measured. Of the
packages only torch is imported, and only by :func:`examine`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlrm_core.base.engines import RANKS, find_engine
from dlrm_core.base.errors import MissingToolError
from dlrm_core.base.machine import cpu_flags, kernel_text, numa_nodes
from dlrm_core.base.text import counted
from dlrm_workbook.ground.machine import machine_facts, memory_limit, nvidia_gpus

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@dataclass(frozen=True)
class Equipment:
    """One thing that may be there.

    Attributes:
        name: what it is.
        present: whether it is there and usable.
        found: version, path or value; or how it is not as it should be.
        cost: what one loses without it, in one sentence; empty when it is present.
    """

    name: str
    present: bool
    found: str
    cost: str = ""

    def __post_init__(self) -> None:
        if self.present:
            object.__setattr__(self, "cost", "")


def doctor(arguments: Any) -> int:
    """Print the examination, as text or as one JSON object. Exit code 0: looking never fails."""
    machine, parts = machine_facts(), examine()
    if arguments.json:
        report = {"machine": machine, "parts": [asdict(part) for part in parts]}
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return 0
    for key, value in machine.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        if isinstance(value, dict):
            shown = ", ".join(f"{k}={v}" for k, v in value.items())
        print(f"{key:>22}  {shown if shown not in ('', None) else 'none'}")
    print()
    width = max(len(part.name) for part in parts)
    for part in parts:
        print(f"{'yes' if part.present else 'no ':3}  {part.name:{width}}  {part.found}")
        if part.cost:
            print(f"     {'':{width}}  {part.cost}")
    return 0


def examine() -> list[Equipment]:
    """Look for every part that something in the workbook needs."""
    *torch_and_gpu, power = _with_torch()
    return [
        Equipment("Python", True, f"{platform.python_version()} ({sys.executable})"),
        *torch_and_gpu,
        _fast_cpu(),
        *_hpctoolkit(),
        _perf_events(),
        _ptrace(),
        _gpu_counters(),
        power,
        _several_ranks(),
        _numa(),
        _notebook_tools(),
        _browser(),
        _memory(),
    ]


def find_browser() -> str | None:
    """Path of a Chromium or Chrome: DLRM_BROWSER if that is set, else the first on the PATH."""
    chosen = os.environ.get("DLRM_BROWSER")
    if chosen:
        return shutil.which(chosen)
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def _with_torch() -> list[Equipment]:
    """torch, and what is looked up through it: CUDA, the GPU, and energy counters at the end."""
    lost = "No model can be run."
    try:
        import torch
    except (ImportError, OSError) as error:
        return [Equipment(name, False, str(error), lost) for name in ("torch", "Energy counters")]
    threads = f"{torch.get_num_threads()} threads in an operator"
    parts = [Equipment("torch", True, f"{torch.__version__}, {threads}")]
    lost = "Runs use the CPU; GPU times, idleness and kernels are not measured."
    built = torch.version.cuda
    found = built or "this torch is built for CPU only"
    parts.append(Equipment("CUDA in torch", bool(built), found, lost))
    there = torch.cuda.is_available()
    if there:
        found = ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    else:
        seen = ", ".join(gpu["name"] for gpu in nvidia_gpus())
        found = f"{seen}, but torch cannot use it" if seen else "none found"
    parts.append(Equipment("GPU", there, found, lost))

    from dlrm_workbook.evidence.power import find_counters

    counters, missing = find_counters(torch.device("cuda" if there else "cpu"))
    lines = [f"{counter.device} ({counter.method})" for counter in counters]
    lines += [f"{name}: {why}" for name, why in missing.items()]
    lost = "Power and samples per joule of these are not measured."
    return [*parts, Equipment("Energy counters", not missing, "; ".join(lines), lost)]


def _fast_cpu() -> Equipment:
    flags = cpu_flags()
    found = ", ".join(flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in flags)
    cost = "bfloat16 on this CPU is emulated and slower than fp32."
    return Equipment(
        "bfloat16 in hardware (CPU)", bool(found), found or "no such instructions", cost
    )


def _hpctoolkit() -> list[Equipment]:
    """What the measurement itself would find and could measure; see :mod:`.hpctoolkit.tools`."""
    from dlrm_workbook.recordings.hpctoolkit.tools import find_tools, probe

    rows = {
        "HPCToolkit's GPU events": (
            "GPU times",
            "HPCToolkit measures CPU time only; GPU kernels are not measured.",
        ),
        "HPCToolkit's PC sampling": ("stall reasons", "Why GPU kernels wait is not measured."),
        "HPCToolkit's Python frames": (
            "Python frames",
            "Call paths of one pass (profiling.single_pass) have no lines of Python.",
        ),
        "HPCToolkit's hpcstruct": (
            "loops and inlined functions",
            "Call paths have functions only, no loops and no inlined functions.",
        ),
    }
    try:
        tools = find_tools()
    except MissingToolError as error:
        cost = (
            "Profiles come from torch.profiler: no native call paths, loops or GPU stall reasons."
        )
        absent = Equipment("HPCToolkit (hpcrun)", False, str(error), cost)
        return [absent, *(Equipment(row, False, "no HPCToolkit", rows[row][1]) for row in rows)]
    found = probe(tools)
    present = {
        "GPU times": found.gpu_event,
        "stall reasons": found.pc_event,
        "Python frames": tools.python and f"built for Python {tools.python}",
        "loops and inlined functions": str(tools.hpcstruct),
    }
    notices = "; ".join(("", *found.notices))
    parts = [Equipment("HPCToolkit (hpcrun)", True, f"{tools.hpcrun} {tools.version}{notices}")]
    for row, (what, cost) in rows.items():
        why = found.not_measured.get(what)
        offers = present[what] or "built for a Python that nothing tells"
        parts.append(Equipment(row, why is None, why or offers, cost))
    return parts


def _perf_events() -> Equipment:
    name, cost = "hardware counters", "Events such as cycles cannot be sampled"
    setting = kernel_text("/proc/sys/kernel/perf_event_paranoid")
    if not setting:
        cost += "; CPU time still can."
        return Equipment(name, False, "this kernel has no perf events", cost)
    cost += ", only CPU time; sysctl kernel.perf_event_paranoid=2 permits them."
    good = int(setting) <= 2 or os.geteuid() == 0
    return Equipment(name, good, f"perf_event_paranoid is {setting}", cost)


def _ptrace() -> Equipment:
    setting = kernel_text("/proc/sys/kernel/yama/ptrace_scope") or "0"
    good = int(setting) <= 1 or os.geteuid() == 0
    cost = "Debuggers and py-spy cannot look into a run that hangs."
    return Equipment("attaching to processes", good, f"ptrace_scope is {setting}", cost)


def _gpu_counters() -> Equipment:
    name = "GPU counters for users"
    text = kernel_text("/proc/driver/nvidia/params")
    if not text:
        cost = "PC sampling, and so GPU stall reasons, cannot be had."
        return Equipment(name, False, "there is no NVIDIA driver", cost)
    cost = (
        "PC sampling is refused: stall reasons need the driver option "
        "NVreg_RestrictProfilingToAdminUsers=0."
    )
    open_to_all = "RmProfilingAdminOnly: 0" in text
    found = "for all users" if open_to_all else "for administrators only"
    return Equipment(name, open_to_all or os.geteuid() == 0, found, cost)


def _several_ranks() -> Equipment:
    name, cost = "several ranks (TorchRec)", "torchrun, and measuring in dlrm run scaling, need it"
    plan = find_engine("several ranks: plan")
    if plan is None:
        return Equipment(name, False, f"missing: {RANKS}", f"{cost}.")
    missing = plan.missing_packages()
    found = f"missing: {', '.join(missing)}" if missing else "torchrec, fbgemm_gpu"
    return Equipment(name, not missing, found, f"{cost}: {plan.INSTALL}")


def _numa() -> Equipment:
    """Sockets, NUMA nodes and their CPUs, and how one process's tables are spread over them."""
    topology = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/physical_package_id")
    sockets = max(1, len({kernel_text(file) for file in topology}))
    nodes = numa_nodes()
    found = f"{counted(sockets, 'socket')}, {counted(max(1, len(nodes)), 'NUMA node')}"
    if len(nodes) > 1:
        each = "; ".join(f"node {node}: {len(cpus)} CPUs" for node, cpus in nodes.items())
        found += (
            f" ({each}); torchrun's ranks on CPUs are bound to them; the tables of one process lie "
            "on the node that fills them: numactl --interleave=all before the command spreads them"
        )
    return Equipment("NUMA", True, found)


def _notebook_tools() -> Equipment:
    wanted = ("papermill", "plotly", "nbclient", "jupyterlab", "pandas", "pyarrow", "hatchet")
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    found = f"missing: {', '.join(missing)}" if missing else ", ".join(wanted)
    cost = "dlrm run and the pages need them; dlrm train and dlrm record work without."
    return Equipment("notebook packages", not missing, found, cost)


def _browser() -> Equipment:
    path = find_browser()
    found = path or "none on the PATH, DLRM_BROWSER is not set"
    cost = "Pages are still made and open in any browser; browser tests are skipped."
    return Equipment("browser (Chromium)", path is not None, found, cost)


def _memory() -> Equipment:
    """Whether seed.yaml's model fits: 8 tables of a million rows of 64 floats, twice."""
    total = (memory_limit() or 0) / 2**30
    cost = "The tables of seed.yaml take 2 GiB and a profiled run about twice that."
    return Equipment("memory for seed.yaml", total >= 6, f"{total:.1f} GiB", cost)
