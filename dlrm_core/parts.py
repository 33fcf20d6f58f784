"""The parts of a DLRM training step, and the names under which profilers see them.

Everything that measures or explains speaks of these: a component (which part of
the model or of the loop) and a phase (what is being done with it). The workload
runs each pair inside one Python function called ``component_phase`` (what
HPCToolkit's ``-a python`` shows) and one profiler range called
``dlrm::component::phase`` (what torch.profiler shows), so that both engines
attribute time by the same names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

COMPONENTS = (
    "data",
    "transfer",
    "bottom_mlp",
    "embedding",
    "interaction",
    "top_mlp",
    "loss",
    "optimizer",
    "communication",
    "other",
)
"""In the order in which a step meets them; figures and tables keep this order."""

PHASES = ("forward", "backward", "update")

SPAN_PREFIX = "dlrm::"
ITERATION_SPAN = "dlrm::iteration"
"""Range around one whole iteration, data included. Its children are the parts."""

P = ParamSpec("P")
R = TypeVar("R")


def span_name(component: str, phase: str) -> str:
    """Name of the profiler range of a part: ``dlrm::component::phase``."""
    return f"{SPAN_PREFIX}{component}::{phase}"


def function_name(component: str, phase: str) -> str:
    """Name of the Python function of a part: ``component_phase``."""
    return f"{component}_{phase}"


def parse_span(name: str) -> tuple[str, str] | None:
    """(component, phase) of a range or function name, or None if it names no part."""
    if name.startswith(SPAN_PREFIX):
        component, _, phase = name[len(SPAN_PREFIX) :].partition("::")
    else:
        component, _, phase = name.rpartition("_")
    if component in COMPONENTS and phase in PHASES:
        return component, phase
    return None


def part(component: str, phase: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the function that does ``phase`` of ``component``.

    Raises:
        ValueError: the function is not called ``component_phase``; HPCToolkit
            would then attribute its time to nothing.
    """
    if component not in COMPONENTS or phase not in PHASES:
        raise ValueError(f"no such part: {component} {phase}")
    span = span_name(component, phase)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if function.__name__ != function_name(component, phase):
            raise ValueError(
                f"{function.__name__} must be called {function_name(component, phase)}"
            )

        @functools.wraps(function)
        def in_span(*args: P.args, **kwargs: P.kwargs) -> R:
            with torch.profiler.record_function(span):
                return function(*args, **kwargs)

        return in_span

    return decorate
