"""Ranges around the modules of a model that is being recorded, so that the trace has their names.

A model that is no DLRM has no parts of ours, but its author named its modules. Hooks of torch
that run around every module's forward open a range where a group of modules begins. Groups are
as fine as a page has room for: at most :data:`~dlrm_core.parts.MOST_GROUPS` names, numbers of
layers left out.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from dlrm_core.parts import GROUP_PREFIX, deepest_level, span

COMPILED = "torch.compile made code of the model, which hooks around its modules would make anew"

_WRAPPERS = re.compile(r"^(module|_orig_mod|_fsdp_wrapped_module|\d+)$")
"""Pieces of a path that name no part of a model: wrappers, and numbers of layers."""

Path = tuple[str, ...]


class ModuleRanges:
    """Open a range around each group of modules, on the thread that makes this object.

    Args:
        models: modules that are no part of others; None: all that are alive.

    Attributes:
        missing: why no ranges are opened; None where they are.
    """

    def __init__(self, models: Iterable[torch.nn.Module] | None = None) -> None:
        self.missing = COMPILED if _has_compiled() else None
        self._thread = threading.get_ident()
        roots = _roots() if models is None and self.missing is None else list(models or [])
        self._roots = roots
        """Kept, so that no other object has the ``id`` of one of their modules."""
        self._group = group_names(roots)
        self._open: list[tuple[str, span | None]] = []
        self._hooks: list[Any] = []

    def start(self) -> None:
        """Open ranges from now on."""
        if not self._group or self.missing is not None:
            return
        self._hooks = [
            torch_module.register_module_forward_pre_hook(self._before),
            torch_module.register_module_forward_hook(self._after, always_call=True),
        ]

    def stop(self) -> None:
        """Open no more ranges."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: torch.nn.Module, _inputs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        outer = self._open[-1][0] if self._open else ""
        group = self._group.get(id(module), outer)
        opened = None
        if group != outer:
            opened = span(GROUP_PREFIX + group)
            opened.__enter__()
        self._open.append((group, opened))

    def _after(self, _module: torch.nn.Module, _inputs: Any, _result: Any) -> None:
        if threading.get_ident() == self._thread and self._open:
            _, opened = self._open.pop()
            if opened is not None:
                opened.__exit__(None, None, None)


def _has_compiled() -> bool:
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
