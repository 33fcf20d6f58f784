"""The machine that a run is on: device, processor, memory, signals, versions.

Nothing heavy is imported before it is needed: pages ask what a machine is without torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dlrm_core.config import TrainingConfig
from dlrm_core.errors import InputError

if TYPE_CHECKING:
    import torch

REPOSITORY = Path(__file__).resolve().parents[1]

_STATUS = "/proc/self/status"


def resolve_device(config: TrainingConfig) -> torch.device:
    """The device that ``training.device`` means on this machine.

    Raises:
        InputError: CUDA is asked for and torch sees no GPU.
    """
    import torch

    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        built = torch.version.cuda or "none"
        raise InputError(
            f"training.device is 'cuda', but torch {torch.__version__} sees no GPU "
            f"(its CUDA: {built}); use training.device: cpu or auto"
        )
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def device_name(device: torch.device) -> str:
    """'cpu', or 'cuda (NVIDIA H100 80GB HBM3)'."""
    if device.type == "cuda":
        import torch

        return f"cuda ({torch.cuda.get_device_name(device)})"
    return "cpu"


def peak_memory(device: torch.device) -> int | None:
    """Bytes at the highest point so far; None where the system does not say."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    # not getrusage's ru_maxrss: that survives exec, so a child would start with its parent's peak
    peak_kib = _number_in(_STATUS, "VmHWM:")
    return None if peak_kib is None else peak_kib * 1024


def peak_memory_by_device(device: torch.device) -> dict[str, int]:
    """:func:`peak_memory` of the host, and of the GPU that a run uses; what is known."""
    import torch

    found = {"host": peak_memory(torch.device("cpu"))}
    if device.type == "cuda":
        found["gpu"] = peak_memory(device)
    return {name: size for name, size in found.items() if size is not None}


def memory_limit(device: torch.device, root: Path = Path("/")) -> int | None:
    """Bytes this process may use: of the GPU, or of the machine where nothing limits it.

    On the CPU the least of the machine's memory, the limits of our control group and
    of those above it (a container's, a batch job's), and the limit on address space.
    """
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[1]
    total_kib = _number_in(root / "proc/meminfo", "MemTotal:")
    found = [] if total_kib is None else [1024 * total_kib]
    for line in read_text(root / "proc/self/cgroup").splitlines():
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
            limit = read_text(group / name)
            found += [int(limit)] if limit.isdigit() else []  # "max" where there is none
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY:
        found.append(space)
    return min(found, default=None)


def available_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on the device now; None where nobody says."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return available_host_memory()


def available_host_memory() -> int | None:
    """Bytes that can be allocated in host memory now; None where nobody says.

    The least of the kernel's estimate, what is left of the control group's limit (in a
    container the former is the whole machine's) and of the process's own limits (ulimit).
    """
    free_kib = _number_in("/proc/meminfo", "MemAvailable:")
    found = [] if free_kib is None else [1024 * free_kib]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
            # "used" counts the page cache, which the kernel gives back on demand
            statistics = Path(used).with_name("memory.stat").read_text().splitlines()
            counted = dict(line.split()[:2] for line in statistics)
            found.append(left + int(counted.get("inactive_file", 0)))
        except (OSError, ValueError):
            continue
    for kind, name in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
        most = resource.getrlimit(kind)[0]
        used_kib = _number_in(_STATUS, name)
        if most != resource.RLIM_INFINITY and used_kib is not None:
            found.append(most - used_kib * 1024)
    return max(0, min(found)) if found else None


def _number_in(file: str | Path, name: str) -> int | None:
    """The number behind a name in a file of the kernel's, such as ``VmHWM:`` in KiB."""
    for line in read_text(file).splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return None


ISA_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "sve",
)
"""CPU features that matrix products and embedding sums profit from (x86, then Arm)."""


THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "KMP_AFFINITY",
    "GOMP_CPU_AFFINITY",
    "CUDA_VISIBLE_DEVICES",
)


def machine_facts() -> dict[str, Any]:
    """What a measurement depends on: processor, cores, memory, GPU, system, thread settings.

    Takes no longer than one call of nvidia-smi, and imports nothing heavy.
    """
    cpu, flags, gpus = cpu_info(), cpu_flags(), nvidia_gpus()
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "memory_limit_gib": memory_limit_gib(),
        "gpus": [gpu["name"] for gpu in gpus],
        "gpu_driver": gpus[0]["driver"] if gpus else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "threads": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
    }


def cpu_info() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo; empty where there is no such file."""
    first = read_text("/proc/cpuinfo").split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def cpu_flags() -> set[str]:
    """Features of the processor, as /proc/cpuinfo names them (x86 or Arm)."""
    cpu = cpu_info()
    return set((cpu.get("flags") or cpu.get("Features") or "").split())


def cpu_caches() -> dict[int, int]:
    """Bytes of the first core's caches by level, instructions' aside; empty where nobody says."""
    levels: dict[int, int] = {}
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, kind, size = (
                (folder / name).read_text().strip() for name in ("level", "type", "size")
            )
        except OSError:
            continue
        units = {"K": 10, "M": 20, "G": 30}
        if kind != "Instruction" and size[:-1].isdigit() and size[-1] in units:
            levels[int(level)] = int(size[:-1]) << units[size[-1]]
    return levels


def nvidia_gpus() -> list[dict[str, str]]:
    """``name`` and ``driver`` of each NVIDIA GPU, by nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = output_of([tool, "--query-gpu=name,driver_version", "--format=csv,noheader"])
    rows = [line.rsplit(",", 1) for line in query.splitlines() if line.count(",") >= 1]
    return [{"name": name.strip(), "driver": driver.strip()} for name, driver in rows]


def memory_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_limit_gib() -> float | None:
    """Limit of the control group we run in (a container's), or None."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = read_text(path)
        # version 1 writes "no limit" as a number near 2**63
        if text.isdigit() and int(text) < memory_bytes():
            return round(int(text) / 2**30, 1)
    return None


def read_text(path: str | Path) -> str:
    """The text of a small file, stripped; empty where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def output_of(command: Sequence[str]) -> str:
    """Standard output of a command; empty if it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


VERSIONS_OF = (
    "dlrm-workbook",
    "torch",
    "numpy",
    "pandas",
    "plotly",
    "papermill",
    "nbclient",
    "jupyterlab",
    "llnl-hatchet",
)


def versions() -> dict[str, str]:
    """Versions of Python, the packages that matter, and the commit of this repository."""
    found = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _git("rev-parse", "--short=12", "HEAD")
    if commit:
        changed = _git("status", "--porcelain", "--untracked-files=no")
        found["commit"] = commit + ("+changes" if changed else "")
    return found


def _git(*arguments: str) -> str:
    """Output of a git command in the repository; empty where there is no git or no repository."""
    if not (REPOSITORY / ".git").exists():
        return ""
    return output_of(["git", "-C", str(REPOSITORY), *arguments]).strip()


STARTER = "DLRM_STARTED_BY"
"""Environment variable: the process, by its number, with which a child is to end."""


def die_with_parent() -> None:
    """Have the kernel send SIGKILL when the parent ends (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def ending_with_us() -> Mapping[str, str]:
    """What to add to the environment of a child that is to end with this process."""
    return {STARTER: str(os.getpid())}


def end_with_starter() -> None:
    """End with the process that asked for it; without the variable nothing.

    SIGKILL leaves a parent no time to end its children, so the child asks the kernel. A parent
    that was killed before the child could ask is seen by its number: the child ends now. The
    variable is not handed on: a child of this one has another parent.
    """
    starter = os.environ.pop(STARTER, "")
    if not starter:
        return
    die_with_parent()
    if sys.platform == "linux" and str(os.getppid()) != starter:
        os.kill(os.getpid(), signal.SIGKILL)


class StopRequest:
    """Whether the run was asked to end."""

    requested = False


@contextlib.contextmanager
def stop_requests(enabled: bool, said: str, repeated_s: float = 0.0) -> Iterator[StopRequest]:
    """Note the first SIGINT or SIGTERM instead of interrupting; a second one interrupts.

    Args:
        said: on standard error at the first; '' for nothing.
        repeated_s: within this time another signal is the first once more.
    """
    stop = StopRequest()
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield stop
        return
    asked_at = 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        now = time.monotonic()
        if stop.requested:
            if now - asked_at >= repeated_s:
                raise KeyboardInterrupt
            return
        stop.requested, asked_at = True, now
        if said:
            # a progress bar's line is not ended
            begin = "\n" if os.isatty(2) else ""
            # not print: the signal may have come in the middle of one
            os.write(2, f"{begin}{said}\n".encode())

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def terminate_like_interrupt() -> Iterator[None]:
    """Let SIGTERM (schedulers, our own time limits) end a run as Ctrl-C does: results kept."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
