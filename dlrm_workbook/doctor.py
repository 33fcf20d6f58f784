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

from dlrm_core.machine import (
    cpu_flags,
    machine_facts,
    memory_bytes,
    memory_limit_gib,
    nvidia_gpus,
    output_of,
    read_text,
)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@dataclass(frozen=True)
class Part:
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


def examine() -> list[Part]:
    """Look for every part that something in the workbook needs."""
    hpcrun = find_hpcrun()
    return [
        _python(),
        _torch(),
        *_cuda(),
        _fast_cpu(),
        _hpcrun(hpcrun),
        _hpcrun_events(hpcrun),
        _perf_events(),
        _ptrace(),
        _gpu_counters(),
        _power(),
        _several_ranks(),
        _notebook_tools(),
        _browser(),
        _memory(),
    ]


def find_hpcrun() -> str | None:
    """Path of hpcrun: below HPCTOOLKIT_HOME if that is set, else on the PATH."""
    home = os.environ.get("HPCTOOLKIT_HOME")
    if home and os.access(Path(home) / "bin" / "hpcrun", os.X_OK):
        return str(Path(home) / "bin" / "hpcrun")
    return shutil.which("hpcrun")


def find_browser() -> str | None:
    """Path of a Chromium or Chrome: DLRM_BROWSER if that is set, else the first on the PATH."""
    chosen = os.environ.get("DLRM_BROWSER")
    if chosen:
        return shutil.which(chosen)
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def _python() -> Part:
    good = sys.version_info >= (3, 11)
    return Part(
        "Python",
        good,
        f"{platform.python_version()} ({sys.executable})",
        "" if good else "Nothing runs: Python 3.11 or newer is needed.",
    )


def _torch() -> Part:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Part("torch", False, str(error), "No model can be run.")
    threads = f"{torch.get_num_threads()} threads in an operator"
    return Part("torch", True, f"{torch.__version__}, {threads}")


def _cuda() -> list[Part]:
    try:
        import torch
    except (ImportError, OSError):
        return []
    lost = "Runs use the CPU; GPU times, idleness and kernels are not measured."
    built = torch.version.cuda
    if not built:
        cuda = Part("CUDA in torch", False, "this torch is built for CPU only", lost)
    else:
        cuda = Part("CUDA in torch", True, built)
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return [cuda, Part("GPU", True, ", ".join(names))]
    seen = ", ".join(gpu["name"] for gpu in nvidia_gpus())
    found = f"{seen}, but torch cannot use it" if seen else "none found"
    return [cuda, Part("GPU", False, found, lost)]


def _fast_cpu() -> Part:
    flags = cpu_flags()
    fast = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in flags]
    return Part(
        "bfloat16 in hardware (CPU)",
        bool(fast),
        ", ".join(fast) or "no such instructions",
        "" if fast else "bfloat16 on this CPU is emulated and slower than fp32.",
    )


def _hpcrun(path: str | None) -> Part:
    if path is None:
        return Part(
            "HPCToolkit (hpcrun)",
            False,
            "not on the PATH, HPCTOOLKIT_HOME is not set",
            "Profiles come from torch.profiler: no native call paths, loops or GPU stall "
            "reasons (install: spack install hpctoolkit +cuda +python).",
        )
    lines = output_of([path, "--version"]).splitlines()
    return Part("HPCToolkit (hpcrun)", True, f"{path} {lines[0] if lines else ''}".strip())


def _hpcrun_events(path: str | None) -> Part:
    name = "HPCToolkit's GPU events"
    lost = "HPCToolkit measures CPU time only; GPU kernels and stall reasons are not measured."
    if path is None:
        return Part(name, False, "there is no hpcrun", lost)
    listed = output_of([path, "-L"])
    events = [word for word in ("gpu=nvidia,pc", "gpu=nvidia", "gpu=cuda") if word in listed]
    if not events:
        return Part(name, False, "hpcrun -L lists none", lost)
    return Part(name, True, ", ".join(events))


def _perf_events() -> Part:
    setting = read_text("/proc/sys/kernel/perf_event_paranoid")
    if not setting:
        return Part(
            "hardware counters",
            False,
            "this kernel has no perf events",
            "Events such as cycles cannot be sampled; CPU time still can.",
        )
    good = int(setting) <= 2 or os.geteuid() == 0
    return Part(
        "hardware counters",
        good,
        f"perf_event_paranoid is {setting}",
        ""
        if good
        else "Events such as cycles cannot be sampled, only CPU time; "
        "sysctl kernel.perf_event_paranoid=2 permits them.",
    )


def _ptrace() -> Part:
    setting = read_text("/proc/sys/kernel/yama/ptrace_scope") or "0"
    good = int(setting) <= 1 or os.geteuid() == 0
    return Part(
        "attaching to processes",
        good,
        f"ptrace_scope is {setting}",
        "" if good else "Debuggers and py-spy cannot look into a run that hangs.",
    )


def _gpu_counters() -> Part:
    name = "GPU counters for users"
    text = read_text("/proc/driver/nvidia/params")
    if not text:
        return Part(
            name,
            False,
            "there is no NVIDIA driver",
            "PC sampling, and so GPU stall reasons, cannot be had.",
        )
    open_to_all = "RmProfilingAdminOnly: 0" in text
    good = open_to_all or os.geteuid() == 0
    return Part(
        name,
        good,
        "for all users" if open_to_all else "for administrators only",
        ""
        if good
        else "PC sampling is refused: stall reasons need the driver option "
        "NVreg_RestrictProfilingToAdminUsers=0.",
    )


def _power() -> Part:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Part("Energy counters", False, str(error), "No model can be run.")
    from dlrm_workbook.evidence.power import find_counters

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    counters, missing = find_counters(device)
    found = [f"{counter.device} ({counter.method})" for counter in counters]
    return Part(
        "Energy counters",
        not missing,
        "; ".join(found + [f"{name}: {why}" for name, why in missing.items()]),
        "" if not missing else "Power and samples per joule of these are not measured.",
    )


def _notebook_tools() -> Part:
    wanted = ("papermill", "plotly", "nbclient", "jupyterlab", "pandas", "pyarrow", "hatchet")
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    return Part(
        "notebook packages",
        not missing,
        f"missing: {', '.join(missing)}" if missing else ", ".join(wanted),
        "dlrm run and the pages need them; dlrm train and dlrm record work without."
        if missing
        else "",
    )


def _several_ranks() -> Part:
    from dlrm_core.distributed.plan import INSTALL, missing_packages

    missing = missing_packages()
    return Part(
        "several ranks (TorchRec)",
        not missing,
        f"missing: {', '.join(missing)}" if missing else "torchrec, fbgemm_gpu",
        f"torchrun, and measuring in dlrm run scaling, need it: {INSTALL}" if missing else "",
    )


def _browser() -> Part:
    path = find_browser()
    return Part(
        "browser (Chromium)",
        path is not None,
        path or "none on the PATH, DLRM_BROWSER is not set",
        "" if path else "Pages are still made and open in any browser; browser tests are skipped.",
    )


def _memory() -> Part:
    """Whether the experiment's own model fits: 8 tables of a million rows of 64 floats, twice."""
    total = min(memory_bytes() / 2**30, memory_limit_gib() or float("inf"))
    good = total >= 6
    return Part(
        "memory for the experiment",
        good,
        f"{total:.1f} GiB",
        "" if good else "The experiment's tables take 2 GiB and a profiled run about twice that.",
    )
