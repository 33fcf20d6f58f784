"""What one iteration of a program did: models, losses, optimizers and loaders, with their places.

Remedies (:mod:`~dlrm_workbook.recordings.torch.trials.remedies`) need the objects themselves, the
line of the program at which each was made or is called, and one batch on which they compare the
model's numbers. Needs torch and the standard library only.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from dlrm_workbook.recordings.torch.modules import has_compiled
from dlrm_workbook.recordings.torch.places import MADE, name_at, place_of, user_frame

_LOSSES = ("cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits")


@dataclass
class Call:
    """The last call of a model in the iteration, with its inputs kept."""

    module: torch.nn.Module
    args: Any
    kwargs: Any
    output: Any
    place: str
    name: str
    autocast: bool


@dataclass
class Loss:
    """A call of a loss function: which of its arguments is a model's output, and how."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    model: int
    through: Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Stepped:
    optimizer: torch.optim.Optimizer
    place: str
    name: str


@dataclass
class Looked:
    """A table, and how many of its rows the iteration looked up."""

    table: Any
    rows: int


@dataclass
class Seen:
    """What an iteration did.

    Attributes:
        models: outermost modules that were called with gradients, each once.
        why_no_models: a sentence where hooks could not see them.
        loader: where a DataLoader without workers was asked for a batch; '' for nowhere.
        gradients_read: whether the program hands gradients to functions of torch itself.
    """

    models: list[Call] = field(default_factory=list)
    why_no_models: str = "no torch.nn.Module was called with gradients"
    optimizers: list[Stepped] = field(default_factory=list)
    tables: list[Looked] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    loader: str = ""
    loader_name: str = "loader"
    workers: bool = False
    gradients_read: bool = False

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The models' parameters, each once."""
        every = (one for call in self.models for one in call.module.parameters())
        return list({id(one): one for one in every}.values())

    def run(self, gradients: bool = False) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The models' outputs for the batch that was kept, and the loss if it can be computed.

        Random numbers and buffers are as before, then and afterwards. ``gradients``: also compute
        these, for what may go wrong there; none is kept.
        """
        buffers = [(one, one.clone()) for call in self.models for one in call.module.buffers()]
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        outputs: list[list[torch.Tensor]] = []
        loss = None
        try:
            with torch.random.fork_rng(devices), torch.set_grad_enabled(gradients):
                for call in self.models:
                    result = call.module(*_copied(call.args), **_copied(call.kwargs))
                    outputs.append(list(tensors(result)))
                made = [one for each in outputs for one in each if one.requires_grad]
                if made and gradients:
                    total = torch.stack([one.float().mean() for one in made]).sum()
                    needed = [one for one in self.parameters if one.requires_grad]
                    torch.autograd.grad(total, needed, allow_unused=True)
                for found in self.losses[-1:]:
                    args = list(_copied(found.args))
                    args[0] = found.through(outputs[found.model][0]).reshape(args[0].shape)
                    loss = found.function(*args, **found.kwargs)
        finally:
            with torch.no_grad():
                for one, before in buffers:
                    one.copy_(before)
        flat = [one.detach() for each in outputs for one in each if one.is_floating_point()]
        return flat, None if loss is None else loss.detach()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict) and type(value) is dict:
        return {name: mapped(one, change) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mapped(one, change) for one in value)
    return value


def _copied(value: Any) -> Any:
    return mapped(value, lambda one: one.detach().clone())


class Looking:
    """Hooks that see what an iteration does, from :meth:`__enter__` to :meth:`__exit__`."""

    def __init__(self) -> None:
        self.seen = Seen()
        self._depth, self._stepping = 0, False
        self._thread = threading.get_ident()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Seen:
        def hook(handle: Any) -> None:
            self._stack.callback(handle.remove)

        hook(register_optimizer_step_pre_hook(self._stepped))
        self._watch_loader()
        if has_compiled():
            why = "torch.compile has compiled code here, which hooks would make it compile again"
            self.seen.why_no_models = why
            return self.seen
        after = torch_module.register_module_forward_hook
        hook(torch_module.register_module_forward_pre_hook(self._before))
        hook(after(self._after, with_kwargs=True, always_call=True))
        self._stack.enter_context(_Functions(self))
        return self.seen

    def __exit__(self, *failure: object) -> None:
        self._stack.close()

    def _watch_loader(self) -> None:
        """Note which line asks a DataLoader for batches."""
        module: Any = sys.modules.get("torch.utils.data.dataloader")
        for name in ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"):
            kind = getattr(module, name, None)
            if kind is None:
                continue
            before, workers = kind._next_data, name.startswith("_Multi")

            def next_data(it: Any, before: Any = before, workers: bool = workers) -> Any:
                frame = user_frame()
                self.seen.workers |= workers
                if not workers and frame is not None:
                    self.seen.loader = place_of(frame)
                    self.seen.loader_name = _loader_name(frame)
                return before(it)

            kind._next_data = next_data
            self._stack.callback(setattr, kind, "_next_data", before)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(one.optimizer is optimizer for one in self.seen.optimizers):
            return
        frame = user_frame()
        place = MADE.get(optimizer) or place_of(frame)
        self.seen.optimizers.append(
            Stepped(optimizer, place, name_at(frame, optimizer, "optimizer"))
        )

    def _before(self, module: torch.nn.Module, _inputs: Any) -> None:
        if threading.get_ident() == self._thread:
            self._depth += 1

    def _after(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._depth -= 1
        if output is None or not torch.is_grad_enabled():
            return
        seen = self.seen
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            indices = next(tensors([args, kwargs]), None)
            if indices is not None:
                touched = int(indices.unique().numel())
                seen.tables = [one for one in seen.tables if one.table is not module]
                seen.tables.append(Looked(module, touched))
        if self._depth or next(module.parameters(), None) is None:
            return
        frame = user_frame()
        first = next(tensors(output), None)
        device = "cpu" if first is None else first.device.type
        copies, outputs = (_copied(args), _copied(kwargs)), [o.detach() for o in tensors(output)]
        place, name = place_of(frame), name_at(frame, module, "model")
        call = Call(module, *copies, outputs, place, name, torch.is_autocast_enabled(device))
        seen.models = [one for one in seen.models if one.module is not module] + [call]

    def called(self, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
        name, seen = getattr(function, "__name__", ""), self.seen
        if name.endswith("_loss") or name in _LOSSES:
            self._note_loss(function, args, kwargs)
        elif "norm" in name or name in ("stack", "cat", "clip_grad", "_foreach_mul_"):
            gradients = {id(one.grad) for call in seen.models for one in call.module.parameters()}
            gradients.discard(id(None))
            if any(id(one) in gradients for one in tensors(args)):
                seen.gradients_read = True

    def _note_loss(self, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
        value = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if value is None or not value.requires_grad:
            return
        for number, call in enumerate(self.seen.models):
            output = next(iter(call.output), None)
            if output is None or output.numel() != value.numel():
                continue
            for through in (_identity, torch.sigmoid):
                if torch.equal(through(output).reshape(value.shape), value.detach()):
                    kept = Loss(function, _copied(args), _copied(kwargs), number, through)
                    self.seen.losses.append(kept)
                    return


def _identity(value: torch.Tensor) -> torch.Tensor:
    return value


def _loader_name(frame: FrameType) -> str:
    """The name of the only DataLoader that the code at a frame knows; ``loader`` otherwise."""
    from torch.utils.data import DataLoader

    names = [
        name
        for held in (frame.f_locals, frame.f_globals)
        for name, value in list(held.items())
        if isinstance(value, DataLoader)
    ]
    return names[0] if len(set(names)) == 1 else "loader"


class _Functions(TorchFunctionMode):
    """Sees the calls of functions of torch, of whichever name the program has for them."""

    def __init__(self, looking: Looking) -> None:
        super().__init__()
        self._looking = looking

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with contextlib.suppress(Exception):  # what we note must not disturb the program
            self._looking.called(func, args, kwargs or {})
        return result
