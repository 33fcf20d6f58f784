"""How much memory the process may use before something ends it."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from dlrm_core.config import TrainingConfig
from dlrm_core.errors import InputError


def memory_limit(device: torch.device, root: Path = Path("/")) -> int | None:
    """Bytes this process may use: of the GPU, or of the machine where nothing limits it.

    On the CPU the least of the machine's memory, the limits of our control group and
    of those above it (a container's, a batch job's), and the limit on address space.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    found = []
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            found.append(1024 * int(line.split()[1]))
    for line in _text(root / "proc/self/cgroup").splitlines():
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
            limit = _text(group / name).strip()
            found += [int(limit)] if limit.isdigit() else []  # "max" where there is none
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY:
        found.append(space)
    return min(found, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# What a run needs of its surroundings: a device, signals, a progress bar, its own memory.


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


def resolve_device(config: TrainingConfig) -> torch.device:
    """The device that ``training.device`` means on this machine.

    Raises:
        InputError: CUDA is asked for and torch sees no GPU.
    """
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
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return "cpu"


def peak_memory(device: torch.device) -> int | None:
    """Bytes at the highest point so far; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # not getrusage's ru_maxrss: that survives exec, so a child would start with its parent's peak
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def peak_memory_by_device(device: torch.device) -> dict[str, int]:
    """:func:`peak_memory` of the host, and of the GPU that a run uses; what is known."""
    found = {"host": peak_memory(torch.device("cpu"))}
    if device.type == "cuda":
        found["gpu"] = peak_memory(device)
    return {name: size for name, size in found.items() if size is not None}


# GPUs by name, with the figures of NVIDIA's data sheets.

DATA_SHEET = "data sheet"
"""``source`` of ceilings that nobody measured."""


@dataclass(frozen=True)
class Device:
    """A GPU as its vendor describes it; rates are peaks."""

    name: str
    """Short: ``A100-80GB``. What :func:`device` takes."""
    tflops: dict[str, float]
    """Precision to 10^12 operations/s of dense products; absent what it has no unit for."""
    memory_gb_per_s: float
    memory_gb: float
    """10^9 bytes."""
    link_gb_per_s: float
    """Host to device, one direction."""
    peer_gb_per_s: float
    """NVLink, both directions together."""
    cache_mb: float
    """Last-level cache, 10^6 bytes."""
    pattern: str
    """Regular expression of the names that its driver gives it."""
    source: str
    """NVIDIA's page or data sheet."""

    def ceilings(self) -> dict[str, Any]:
        """Its figures in the form of a recording's ``meta["ceilings"]``.

        ``peak_gflops`` takes the place of products timed at the model's shapes; there are
        no rates of random rows and no launch costs, since no data sheet has them.
        """
        rate = self.memory_gb_per_s
        return {
            "device": self.name,
            "source": DATA_SHEET,
            "peak_gflops": {name: 1e3 * value for name, value in self.tflops.items()},
            "stream": [
                {
                    "bytes": int(1e9 * self.memory_gb),
                    "read_gb_per_s": rate,
                    "copy_gb_per_s": rate,
                    "triad_gb_per_s": rate,
                }
            ],
            "last_level_cache_bytes": int(1e6 * self.cache_mb),
            "copy": [
                {
                    "kind": "pinned",
                    "direction": direction,
                    "bytes": None,
                    "gb_per_s": self.link_gb_per_s,
                }
                for direction in ("h2d", "d2h")
            ],
        }


_H100_SHEET = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H100 = "https://www.nvidia.com/en-us/data-center/h100/"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_A100_40 = (
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/"
    "nvidia-ampere-architecture-whitepaper.pdf"
)
_V100 = (
    "https://images.nvidia.com/content/technologies/volta/pdf/"
    "volta-v100-datasheet-update-us-1165301-r5.pdf"
)

_HOPPER_SXM = {"fp32": 67.0, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5}
_HOPPER_PCIE = {"fp32": 51.0, "tf32": 378.0, "bf16": 756.5, "fp16": 756.5}
_AMPERE = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
# Volta multiplies neither TF32 nor bf16 in its tensor cores
_VOLTA_SXM = {"fp32": 15.7, "fp16": 125.0}
_VOLTA_PCIE = {"fp32": 14.0, "fp16": 112.0}

# PCIe: x16 of generation 3, 4, 5 moves 16, 32, 64 GB/s in one direction
DEVICES = (
    Device("H100-SXM", _HOPPER_SXM, 3350, 80, 64, 900, 50, r"H100 80GB HBM3|H100.*SXM", _H100),
    Device("H100-PCIe", _HOPPER_PCIE, 2000, 80, 64, 600, 50, r"H100.*PCIE", _H100_SHEET),
    Device("H200", _HOPPER_SXM, 4800, 141, 64, 900, 50, r"\bH200\b", _H200),
    Device("A100-40GB", _AMPERE, 1555, 40, 32, 600, 40, r"A100-(SXM4|PCIE)-40GB", _A100_40),
    Device("A100-80GB", _AMPERE, 2039, 80, 32, 600, 40, r"A100-SXM4-80GB", _A100),
    Device("A100-80GB-PCIe", _AMPERE, 1935, 80, 32, 600, 40, r"A100 80GB PCIE", _A100),
    Device("V100-16GB", _VOLTA_SXM, 900, 16, 16, 300, 6, r"V100-SXM2-16GB", _V100),
    Device("V100-32GB", _VOLTA_SXM, 900, 32, 16, 300, 6, r"V100-SXM[23]-32GB", _V100),
    Device("V100-PCIe", _VOLTA_PCIE, 900, 32, 16, 0, 6, r"V100-PCIE-(16|32)GB", _V100),
)


def device(name: str) -> Device:
    """The GPU of a short name: ``H100-SXM``, ``a100-80gb``, ``H200``; upper or lower case.

    Raises:
        InputError: no such GPU is listed, with those that are.
    """
    for known in DEVICES:
        if known.name.lower() == name.strip().lower():
            return known
    names = [known.name for known in DEVICES]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    raise InputError(f"device {name!r} is not listed; {hint}known: {', '.join(names)}")


def device_of_driver(name: str) -> Device | None:
    """The GPU whose driver calls it ``NVIDIA A100-SXM4-80GB``; None if it is not listed."""
    for known in DEVICES:
        if re.search(known.pattern, name, re.IGNORECASE):
            return known
    return None
