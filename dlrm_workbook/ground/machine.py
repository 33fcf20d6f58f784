"""What a measurement depends on, for its record: processor, memory, GPU, system, versions.

Nothing heavy is imported: pages ask what a machine is without torch.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrm_core.base.machine import cpu_flags, cpu_info, kernel_text, number_in

REPOSITORY = Path(__file__).resolve().parents[2]
"""The folder that the packages lie in: of a checkout, or of an installation."""

RESULTS = (Path(__file__).parents[1] / "results").resolve()
"""Published measurements that pages show; in a checkout ``benchmarks/results/``."""

ISA_FLAGS = (
    *("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni"),
    *("amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16", "sve"),
)
"""CPU features that matrix products and embedding sums profit from (x86, then Arm)."""

THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY"),
    *("GOMP_CPU_AFFINITY", "CUDA_VISIBLE_DEVICES"),
)

VERSIONS_OF = (
    *("dlrm-workbook", "torch", "numpy", "pandas", "plotly", "papermill", "nbclient"),
    *("jupyterlab", "llnl-hatchet"),
)


def machine_facts() -> dict[str, Any]:
    """What a measurement depends on: processor, cores, memory, GPU, system, thread settings.

    ``memory_limit_gib`` is None where the process may use all of the machine's memory.
    Takes no longer than one call of nvidia-smi, and imports nothing heavy.
    """
    cpu, flags, gpus = cpu_info(), cpu_flags(), nvidia_gpus()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit() or memory
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_gib": round(memory / 2**30, 1),
        "memory_limit_gib": round(limit / 2**30, 1) if limit < memory else None,
        "gpus": [gpu["name"] for gpu in gpus],
        "gpu_driver": gpus[0]["driver"] if gpus else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "threads": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
    }


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def ranks_here() -> int:
    """Ranks that a launcher such as torchrun started on this machine; 1 without one."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(given)) if given.isdecimal() else 1


def nvidia_gpus() -> list[dict[str, str]]:
    """``name`` and ``driver`` of each NVIDIA GPU, by nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = output_of([tool, "--query-gpu=name,driver_version", "--format=csv,noheader"])
    rows = [line.rsplit(",", 1) for line in query.splitlines() if line.count(",") >= 1]
    return [{"name": name.strip(), "driver": driver.strip()} for name, driver in rows]


def output_of(command: Sequence[str]) -> str:
    """Standard output of a command; empty if it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that this process may use; None where nobody says.

    The least of the machine's memory, the limits of our control group and of those above it
    (a container's, a batch job's), and the limit on address space.
    """
    total_kib = number_in(root / "proc/meminfo", "MemTotal:")
    found = [] if total_kib is None else [1024 * total_kib]
    for line in kernel_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        place, name = root / "sys/fs/cgroup", "memory.max"
        if controllers:  # version 1 has a tree for each controller
            place, name = place / "memory", "memory.limit_in_bytes"
        within = place / path.lstrip("/")
        for group in (within, *within.parents):
            if not group.is_relative_to(place):
                break
            limit = kernel_text(group / name)
            found += [int(limit)] if limit.isdigit() else []  # "max" where there is none
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY:
        found.append(space)
    return min(found, default=None)


def versions() -> dict[str, str]:
    """Versions of Python, the packages that matter, and the commit of this repository."""
    numbers = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        try:
            numbers[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _git("rev-parse", "--short=12", "HEAD")
    if commit:
        changed = _git("status", "--porcelain", "--untracked-files=no")
        numbers["commit"] = commit + ("+changes" if changed else "")
    return numbers


def _git(*arguments: str) -> str:
    """Output of a git command in the repository; empty where there is no git or no repository."""
    if not (REPOSITORY / ".git").exists():
        return ""
    # a look at the status would lock the index, and leave the lock there if we are killed
    return output_of(["git", "--no-optional-locks", "-C", str(REPOSITORY), *arguments]).strip()
