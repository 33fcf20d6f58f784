"""Processes that must not outlive the one that started them, even where that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

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
