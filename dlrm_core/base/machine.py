"""The machine that a run is on: device, processor, memory, signals.

Nothing heavy is imported before it is needed: pages ask what a machine is without torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dlrm_core.base.errors import InputError

if TYPE_CHECKING:
    import torch

    from dlrm_core.config import TrainingConfig

_STATUS = "/proc/self/status"

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_LARGEST_THRESHOLD = 32 << 20  # bytes; glibc refuses more, and adapts no further (malloc(3))
ALLOCATOR_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which a user sets glibc's allocator; they are left as they are."""


def resolve_device(config: TrainingConfig) -> torch.device:
    """The device that ``training.device`` means on this machine.

    Raises InputError if CUDA is asked for and torch sees no GPU.
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


def numa_nodes(system: Path = Path("/sys/devices/system/node")) -> dict[int, set[int]]:
    """CPUs that this process may use, by NUMA node; empty where the kernel names no nodes."""
    allowed = os.sched_getaffinity(0)
    nodes = {
        int(folder.name[4:]): _numbers(kernel_text(folder / "cpulist")) & allowed
        for folder in system.glob("node[0-9]*")
    }
    return {node: cpus for node, cpus in sorted(nodes.items()) if cpus}


def keep_freed_memory() -> bool:
    """Have glibc keep the memory that a step frees, for the next step; whether that was done.

    By default it gives the end of its heap back as soon as more than twice its threshold is free
    there: a step with a batch of 2,048 then asks for up to 70 MB of pages again, and the system
    clears each, which takes up to a tenth of a step (docs/results.md). It is not done
    with another C library, nor against settings of the environment (:data:`ALLOCATOR_SETTINGS`).
    """
    if sys.platform != "linux" or any(name in os.environ for name in ALLOCATOR_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


def _numbers(ranges: str) -> set[int]:
    """The whole numbers of a list such as '0-3,8'."""
    spans = (part.split("-") for part in ranges.split(",") if part)
    return {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}


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
    peak_kib = number_in(_STATUS, "VmHWM:")
    return None if peak_kib is None else peak_kib * 1024


def peak_memory_by_device(device: torch.device) -> dict[str, int]:
    """:func:`peak_memory` of the host, and of the GPU that a run uses; what is known."""
    import torch

    peaks = {"host": peak_memory(torch.device("cpu"))}
    if device.type == "cuda":
        peaks["gpu"] = peak_memory(device)
    return {name: size for name, size in peaks.items() if size is not None}


def available_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on the device now; None where nobody says."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return available_host_memory()


def available_host_memory() -> int | None:
    """:func:`available_memory` of the host.

    The least of the kernel's estimate, what is left of the control group's limit (in a
    container the former is the whole machine's) and of the process's own limits (ulimit).
    """
    free_kib = number_in("/proc/meminfo", "MemAvailable:")
    bounds = [] if free_kib is None else [1024 * free_kib]
    for group, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            left = int(Path(group, limit).read_text()) - int(Path(group, used).read_text())
            # "used" counts the page cache, which the kernel gives back on demand
            statistics = Path(group, "memory.stat").read_text().splitlines()
            counted = dict(line.split()[:2] for line in statistics)
            bounds.append(left + int(counted.get("inactive_file", 0)))
        except (OSError, ValueError):
            continue
    for kind, name in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
        most = resource.getrlimit(kind)[0]
        used_kib = number_in(_STATUS, name)
        if most != resource.RLIM_INFINITY and used_kib is not None:
            bounds.append(most - used_kib * 1024)
    return max(0, min(bounds)) if bounds else None


def number_in(file: str | Path, name: str) -> int | None:
    """The number behind a name in a file of the kernel's, such as ``VmHWM:`` in KiB."""
    for line in kernel_text(file).splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return None


def cpu_info() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo; empty where there is no such file."""
    first = kernel_text("/proc/cpuinfo").split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def cpu_flags() -> set[str]:
    """Features of the processor, as /proc/cpuinfo names them (x86 or Arm)."""
    cpu = cpu_info()
    return set((cpu.get("flags") or cpu.get("Features") or "").split())


def kernel_text(path: str | Path) -> str:
    """The text of a small file, stripped; empty where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


STARTER = "DLRM_STARTED_BY"
"""Environment variable: the process, by its number, with which a child is to end."""


def die_with_parent() -> None:
    """Have the kernel send SIGKILL when the parent ends (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


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

    ``said`` goes to standard error at the first. Within ``repeated_s`` seconds another signal is
    the first once more.
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

    with _handling(note, signal.SIGINT, signal.SIGTERM):
        yield stop


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], None], *signals: int) -> Iterator[None]:
    """Call ``handler`` at these signals meanwhile."""
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def terminate_like_interrupt() -> contextlib.AbstractContextManager[None]:
    """Let SIGTERM (schedulers, our own time limits) end a run as Ctrl-C does: results kept."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    return _handling(interrupt, signal.SIGTERM)
