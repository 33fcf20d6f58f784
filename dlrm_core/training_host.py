"""What a run needs of its surroundings: a device, signals, a progress bar, its own memory."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from dlrm_core.config import TrainingConfig
from dlrm_core.errors import InputError


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
