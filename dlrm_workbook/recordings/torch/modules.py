"""Ranges around the modules of a model that is being recorded, so that the trace has their names.

A model that is no DLRM has no parts of ours, but its author named its modules. Hooks of torch
that run around every module's forward open a range where a group of modules begins. Groups are
as fine as a page has room for (:data:`~dlrm_workbook.ground.marks.MOST_GROUPS`), numbers of
layers left out.

The same hooks are a stopwatch, with the profiler and without: they note when a group of modules
begins and ends, when the backward pass comes to it and leaves it, and when optimizers begin. So the
page knows how long the stretches between (laps) take where no profiler slows them down.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dlrm_core.parts import span
from dlrm_workbook.ground.marks import GROUP_PREFIX, deepest_level

COMPILED = "torch.compile made code of the model, which hooks around its modules would make anew"

COST_TRIES, COST_CALLS = 5, 30
"""Tries, and calls in each, by which the cost of the hooks is measured."""

_WRAPPERS = re.compile(r"^(module|_orig_mod|_fsdp_wrapped_module|\d+)$")
"""Pieces of a path that name no part of a model: wrappers, and numbers of layers."""

Path = tuple[str, ...]


class ModuleRanges:
    """Hooks around each group of the modules that are alive, on the thread that makes this object.

    Attributes:
        missing: why there are no hooks; None where there are.
        ranges: whether a range is opened around each group.
        timed: whether moments are noted.
        calls: of modules since :meth:`take`.
    """

    def __init__(self) -> None:
        self.missing = COMPILED if has_compiled() else None
        self.ranges, self.timed, self.calls = False, False, 0
        self._thread = threading.get_ident()
        self.roots = _roots() if self.missing is None else []
        """Modules that are no part of others; kept, so that nothing else gets one's ``id``."""
        self._group = group_names(self.roots)
        self._open: list[tuple[str, span | None]] = []
        self._hooks: list[Any] = []
        self._moments: list[tuple[str, float]] = []

    def start(self) -> None:
        if not self._group or self.missing is not None or self._hooks:
            return
        self._hooks = [
            torch_module.register_module_forward_pre_hook(self._before),
            torch_module.register_module_forward_hook(self._after, always_call=True),
            # none after the step: such hooks may be running now, and torch iterates over them
            register_optimizer_step_pre_hook(lambda *_: self._note("optimizer begins")),
        ]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def take(self) -> list[tuple[str, float]]:
        """Return and forget what was noted since the last call, with ``perf_counter``."""
        taken, self._moments, self.calls = self._moments, [], 0
        return taken

    def cost_s(self) -> float:
        """Seconds that the hooks add to the call of a module that is a group, and its gradient.

        They are in place afterwards.
        """
        module, least = torch.nn.Identity(), []
        for group in ("measured", None):
            self.stop()
            if group is not None:
                self._group[id(module)] = group
                self.start()
            least.append(min(_call_s(module) for _ in range(COST_TRIES)))
        self._group.pop(id(module))
        self.take()
        self.start()
        return max(0.0, least[0] - least[1])

    def _note(self, what: str) -> None:
        if self.timed and threading.get_ident() == self._thread:
            self._moments.append((what, time.perf_counter()))

    def _note_gradients(self, what: str, values: Any) -> None:
        """Note when the backward pass comes to what made the tensors among some values."""
        if not self.timed:
            return
        for node in {value.grad_fn for value in _tensors(values)}:
            if node is not None:
                node.register_prehook(lambda _gradients: self._note(what))

    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self.calls += 1
        outer = self._open[-1][0] if self._open else ""
        group = self._group.get(id(module), outer)
        opened = None
        if group != outer:
            self._note_gradients(f"{group} backward ends", inputs)
            self._note(f"{group} begins")
            if self.ranges:
                opened = span(GROUP_PREFIX + group)
                opened.__enter__()
        self._open.append((group, opened))

    def _after(self, _module: torch.nn.Module, _inputs: Any, result: Any) -> None:
        if threading.get_ident() != self._thread or not self._open:
            return
        group, opened = self._open.pop()
        if opened is not None:
            opened.__exit__(None, None, None)
        if group != (self._open[-1][0] if self._open else ""):
            self._note(f"{group} ends")
            self._note_gradients(f"{group} backward begins", result)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Tensors among the arguments or the result of a module, two levels deep."""
    for value in values if isinstance(values, (tuple, list)) else [values]:
        for inner in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(inner, torch.Tensor):
                yield inner


def _call_s(module: torch.nn.Module) -> float:
    """Seconds of a call of a module with its gradient, mean of :data:`COST_CALLS`."""
    weight = torch.ones(1, requires_grad=True)
    began = time.perf_counter()
    for _ in range(COST_CALLS):
        torch.autograd.grad(module(weight * 1.0), weight)
    return (time.perf_counter() - began) / COST_CALLS


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters: dict[str, Any] = getattr(dynamo, "counters", {})
    return bool(counters.get("frames"))


def _roots() -> list[torch.nn.Module]:
    """All modules alive that are no part of another one."""
    # type() runs no code of the objects, isinstance may
    alive = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    inner = {id(child) for one in alive for child in one.children()}
    return [one for one in alive if id(one) not in inner]


def group_names(roots: Iterable[torch.nn.Module]) -> dict[int, str]:
    """The group of each module, by its ``id``.

    A module belongs to the group of the one that holds it, unless groups of its level are told
    apart: those are named by attributes, ``body.layers.self_attn`` for layer 0 and layer 1.
    A model itself is named by its class, which also precedes names that two classes share.
    """
    groups: dict[int, Path] = {}
    for root in roots:
        groups |= {number: path for number, path in _groups(root).items() if number not in groups}
    classes: dict[Path, set[str]] = {}
    for model, *path in groups.values():
        classes.setdefault(tuple(path), set()).add(model)
    return {
        number: ".".join(path[1:] if path[1:] and len(classes[path[1:]]) == 1 else path)
        for number, path in groups.items()
    }


def _groups(root: torch.nn.Module) -> dict[int, Path]:
    """The class of a model and the path of the group of each of its modules, by its ``id``."""
    paths: dict[int, Path] = {}
    weighty: set[Path] = set()
    for name, module in root.named_modules():
        pieces = (one for one in name.split(".") if one and not _WRAPPERS.match(one))
        path = paths[id(module)] = (type(root).__name__, *pieces)
        # a module without weights (an activation) is a group of its own near the top only
        if len(path) == 2 or next(module.parameters(), None) is not None:
            weighty.add(path)
    depth = deepest_level(weighty)
    groups = {}
    for number, path in paths.items():
        while len(path) > 1 and (len(path) > depth or path not in weighty):
            path = path[:-1]
        groups[number] = path
    return groups
