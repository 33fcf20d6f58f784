"""What one iteration shows of a model's tables, products and optimizers, and no trace does.

Hooks of torch look at one iteration that is not measured: which rows of each table a batch asks
for, what its operators compute, and whether optimizers get dense gradients of tables. They look
for :data:`MOST_S` in all. Whatever fails in them leaves the program as it is.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dlrm_workbook.recordings.torch.places import line_of, user_frame
from dlrm_workbook.recordings.torch.seen_operators import SeenOperators, captures

MOST_S = 0.2
"""Seconds of the thread after which nothing more is looked at; those of other work do not count."""

MOST_LOOKUPS = 1_000_000
"""Indices that are counted."""

MOST_ROWS = 200
"""Tables that are kept."""

_COUNTED = ("unique", "hottest", "hottest_row")

_OPTIONS = (bool, int, float, str, type(None))


class SeenModel:
    """Looks at what the modules and optimizers of this thread do, from :meth:`start` to
    :meth:`stop`; ``roots`` are modules that are no part of others, whose attributes name the
    tables."""

    def __init__(self, roots: Iterable[torch.nn.Module]) -> None:
        self._names = {
            id(module): name or type(root).__name__
            for root in roots
            for name, module in root.named_modules()
        }
        self._thread, self._spent_s, self._left_out = threading.get_ident(), 0.0, 0
        self._tables: dict[int, dict[str, Any]] = {}
        """By the ``id`` of the weight."""
        self._asked: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Different rows that a table was asked for so far, and how often, by the same."""
        self._optimizers: dict[int, dict[str, Any]] = {}
        self._calls = 0
        self._hooks: list[Any] = []
        self._parameters = [pair for root in roots for pair in root.named_parameters()]
        self._zero: set[int] = set()
        """The ``id`` of parameters whose gradient was 0 everywhere when their optimizer stepped."""
        modules = [module for root in roots for module in root.modules()]
        tables = [
            (self._names[id(module)], module.weight)
            for module in modules
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        ]
        self._operators = SeenOperators(self._parameters, tables)

    def start(self) -> None:
        self._hooks = [
            torch_module.register_module_forward_pre_hook(self._before),
            register_optimizer_step_pre_hook(self._steps),
        ]
        self._operators.start()

    def stop(self) -> None:
        self._operators.stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def document(self) -> dict[str, Any]:
        """Everything seen, as JSON holds it.

        ``tables`` have ``name``, ``rows``, ``dim``, ``bytes`` (of an element), ``calls``, and of
        all of them ``lookups``, how many different rows they ask for (``unique``) and the share
        (0 to 1) ``hottest`` of ``hottest_row``, None where that was not counted; ``padding``, the
        share of its own padding among those of the last call, where it has some; ``bag``,
        ``sparse`` (what its gradient is to be), ``gradient`` ("dense", "sparse" or None) and
        ``optimizer`` (row of ``optimizers``).
        ``untrained`` are the parameters that get gradients and have no optimizer, ``zero`` those
        whose gradients are 0 everywhere.
        ``optimizers`` have ``class``, ``options``, ``tensors``, ``elements``. Each has the
        ``file``, ``line`` and ``function`` of the program's that calls it. What operators show is
        that of :class:`~dlrm_workbook.recordings.torch.seen_operators.SeenOperators`.
        """
        untrained: list[str] = []
        with contextlib.suppress(Exception):  # of anybody's optimizers
            untrained = self._untrained() if self._optimizers else []
        zero = [name for name, one in self._parameters if id(one) in self._zero]
        computed = self._operators.document(untrained, zero)
        return {
            **computed,
            **{"untrained": untrained, "zero": zero},
            "tables": list(self._tables.values()),
            "optimizers": list(self._optimizers.values()),
            "module_calls": self._calls,
            "seconds": self._spent_s + computed["seconds"],
            "left_out": self._left_out + computed["left_out"],
        }

    def _untrained(self) -> list[str]:
        """Names of the parameters that get gradients and are in no optimizer of the program."""
        if gc.get_freeze_count():
            return []  # optimizers among what was frozen are not found
        every = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
        owned = {id(p) for one in every for group in one.param_groups for p in group["params"]}
        return [
            name for name, one in self._parameters if one.grad is not None and id(one) not in owned
        ]

    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._calls += 1
        if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) or not inputs:
            return
        if len(self._tables) >= MOST_ROWS or self._spent_s > MOST_S or captures():
            self._left_out += 1
            self._tables.get(id(module.weight), {}).update(dict.fromkeys(_COUNTED))
            return
        began = time.thread_time()
        try:
            with torch.no_grad(), self._operators.blind():
                self._look_up(module, inputs[0])
        except Exception:  # what is trained is worth more than what is seen of it
            self._left_out += 1
        self._spent_s += time.thread_time() - began

    def _look_up(self, module: Any, indices: torch.Tensor) -> None:
        flat, (rows, dim) = indices.detach().reshape(-1), module.weight.shape
        seen = self._tables.get(id(module.weight))
        if seen is None:
            seen = self._tables[id(module.weight)] = {
                **dict.fromkeys((*_COUNTED, "gradient", "optimizer")),
                "name": self._names.get(id(module), type(module).__name__),
                **{"rows": rows, "dim": dim, "bytes": module.weight.element_size()},
                **{"calls": 0, "lookups": 0, "sparse": bool(module.sparse)},
                **{"bag": isinstance(module, torch.nn.EmbeddingBag), **_line()},
            }
        if module.padding_idx is not None and indices.ndim > 1:
            seen["padding"] = float((indices == module.padding_idx).float().mean())
            self._operators.padded[tuple(indices.shape)] = seen["padding"]
        first = not seen["calls"]
        seen |= {"calls": seen["calls"] + 1, "lookups": seen["lookups"] + flat.numel()}
        seen |= dict.fromkeys(_COUNTED)
        before = self._asked.pop(id(module.weight), None)
        if (before is None and not first) or not 0 < seen["lookups"] <= MOST_LOOKUPS:
            return  # some calls were not counted
        values, counts = torch.unique(flat, return_counts=True)
        if before is not None:
            values, place = torch.unique(torch.cat([before[0], values]), return_inverse=True)
            counts = torch.cat([before[1], counts])
            counts = counts.new_zeros(len(values)).scatter_add_(0, place, counts)
        self._asked[id(module.weight)] = values, counts
        most = int(counts.argmax())
        seen |= {"unique": len(values), "hottest": float(counts[most]) / seen["lookups"]}
        seen["hottest_row"] = int(values[most])

    def _steps(self, optimizer: Any, *_: Any) -> None:
        if threading.get_ident() != self._thread or id(optimizer) in self._optimizers:
            return
        try:
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            for parameter in (one for one in parameters if one.grad is not None):
                if (table := self._tables.get(id(parameter))) is not None:
                    table["optimizer"] = len(self._optimizers)
                    table["gradient"] = "sparse" if parameter.grad.is_sparse else "dense"
                if not parameter.grad.is_sparse and not parameter.grad.any():
                    self._zero.add(id(parameter))
            self._optimizers[id(optimizer)] = {
                "class": type(optimizer).__name__,
                "options": {
                    name: value
                    for name, value in optimizer.param_groups[0].items()
                    if isinstance(value, _OPTIONS)
                },
                "tensors": len(parameters),
                "elements": sum(parameter.numel() for parameter in parameters),
                **_line(),
            }
        except Exception:
            self._left_out += 1


def _line() -> dict[str, Any]:
    """``file``, ``line`` and ``function`` of the innermost frame of the program itself."""
    frame = user_frame()
    if frame is None:
        return {"file": "", "line": 0, "function": ""}
    return line_of(frame.f_code, frame.f_lineno)
