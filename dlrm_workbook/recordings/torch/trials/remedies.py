"""Remedies that can be switched on and off in a running program: one class each.

A class says where it may help (:meth:`Remedy.find`), how it is switched on and off between two
iterations (:meth:`Remedy.switched`), and states the lines to write into the program. A new one
goes into :data:`REMEDIES`.
Needs torch and the standard library only.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import ctypes.util
import gc
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch

from dlrm_core.base import machine
from dlrm_core.base.text import counted
from dlrm_workbook.ground.machine import ranks_here, usable_cores
from dlrm_workbook.recordings.torch.modules import has_compiled
from dlrm_workbook.recordings.torch.trials.seen import Call, Seen, Stepped, mapped

PRODUCTS: tuple[str, ...] = ("addmm", "mm", "bmm", "baddbmm", "_addmm_activation", "mkldnn_linear")
CONVOLUTIONS: tuple[str, ...] = ("mkldnn_convolution", "cudnn_convolution", "_slow_conv2d_forward")
CONVOLUTIONS += ("convolution_backward", "thnn_conv2d")
ATTENTION = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")

LEAST_SHARE = 0.03
"""What takes a smaller share of the step is not worth a trial."""

COPIED_BYTES = 64 << 20
"""Parameters that are copied to compare an optimizer's updates."""

TINY_US = 10.0
"""Operators that take less on average gain nothing from a second thread."""


_NO_OPERATOR = "No operator is changed, so outputs and loss stay as they are."


class Spoilt(Exception):
    """A remedy gives numbers that are not finite where there were finite ones."""


@dataclass(frozen=True)
class Facts:
    """What the recording says: operators' times, device, cores.

    Attributes:
        averages: rows of ``key_averages.json``.
        collecting: share of the step that garbage collection takes.
    """

    averages: list[dict[str, Any]]
    device: torch.device
    collecting: float = 0.0

    @property
    def cores(self) -> int:
        """Cores that the process may use; of several ranks on a machine, its part of them."""
        return max(1, usable_cores() // ranks_here())

    def share(self, *names: str, inclusive: bool = False) -> float:
        """The share of the step's time in operators of these names; ``inclusive``: in ranges that
        begin with them, with what they call."""
        on_gpu = self.device.type == "cuda" and not inclusive
        own = "self_device_ns" if on_gpu else "self_cpu_ns"
        rows = self.averages
        if inclusive:
            spent = sum(row["cpu_ns"] for row in rows if row["name"].startswith(names))
        else:
            spent = sum(row[own] for row in rows if row["name"].removeprefix("aten::") in names)
        return float(spent / (sum(row[own] for row in rows) or 1))

    def operator_us(self) -> float:
        """The mean time of an operator, without what it calls."""
        rows = [row for row in self.averages if row["name"].startswith("aten::")]
        calls = sum(row["count"] for row in rows) or 1
        return float(sum(row["self_cpu_ns"] for row in rows)) / calls / 1e3


def difference(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    """The largest difference of two lists of tensors, relative to the largest value. Spoilt is
    raised where ``after`` has values that are not finite and ``before`` has none."""
    largest = 0.0
    for old, new in zip(before, after, strict=True):
        if not old.numel():
            continue
        old, new = old.double(), new.double()
        scale = float(old.abs().max())
        if not bool(torch.isfinite(new).all()) and bool(torch.isfinite(old).all()):
            raise Spoilt("it gives numbers that are not finite (NaN or infinity)")
        if scale > 0:
            largest = max(largest, float((new - old).abs().max()) / scale)
    return largest


class Remedy:
    """One change that can be switched on and off.

    Attributes:
        id: as in ``-p try=[...]``.
        family: of two remedies of one family only the better one is kept.
        layer: the order in which several are switched on.
        settle: iterations after the first switch that are not timed.
        gain: the share of the step that it may save, for the order in which they are tried.
        name, code, place, note: in words; the lines to write; where; what it does to the numbers.
        failed: what it raised while it was on, after which the program's own way was taken.
        compile_s: what compiling took.
    """

    id: ClassVar[str]
    family: ClassVar[str] = ""
    layer: ClassVar[int] = 0
    settle: ClassVar[int] = 1
    ranks: ClassVar[bool] = True
    """Whether it can be tried where several ranks train together."""
    computes: ClassVar[bool] = True
    """Whether it changes what operators compute."""
    device: ClassVar[str] = ""
    """The only type of device on which it may help; '' for any."""
    new_process: ClassVar[bool] = False
    """Whether it is tried in whole runs (:mod:`dlrm_workbook.recordings.whole_runs`)."""
    environment: ClassVar[dict[str, str]] = {}
    options: ClassVar[dict[str, Any]] = {}
    """Of a new process: variables, and what the start-up file changes in the program."""

    def __init__(
        self, name: str, gain: float, code: str, place: str = "", note: str = "", **kept: Any
    ) -> None:
        self.name, self.gain, self.code, self.place, self.note = name, gain, code, place, note
        self.failed: BaseException | None = None
        self.compile_s: float | None = None
        vars(self).update(kept)

    @classmethod
    def refusal(cls, seen: Seen, facts: Facts) -> str:
        """Why it cannot be switched in such a program; '' where it can."""
        if cls.device in ("", facts.device.type):
            return ""
        return "the model runs on a GPU" if cls.device == "cpu" else "the model runs on a CPU"

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        """The remedy for what was seen, or a sentence why it is not worth a trial.

        It is asked where there is no :meth:`refusal`.
        """
        raise NotImplementedError

    def switched(self) -> Iterator[None]:
        """Switch it on, yield, and switch it off: everything is as it was."""
        raise NotImplementedError

    def on(self) -> None:
        self._switched = self.switched()
        next(self._switched)

    def off(self) -> None:
        next(self._switched, None)

    def end(self) -> None:
        """Forget what was kept for switching it on again."""

    def error(self) -> BaseException | None:
        return self.failed

    def numbers(self, seen: Seen, limit_s: float) -> dict[str, Any]:
        """What it does to the model's numbers on one batch: ``outputs`` and ``loss`` are the
        largest relative differences, None where unknown; ``note``. It may take ``limit_s`` seconds
        where it compiles. Spoilt is raised as by :func:`difference`."""
        if not self.computes:
            return {"outputs": None, "loss": None, "note": self.note or _NO_OPERATOR}
        if not seen.models:
            return {"outputs": None, "loss": None, "note": f"{self.note} {seen.why_no_models}"}
        # the backward pass of one rank would wait for those of others
        gradients = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        try:
            outputs, loss = seen.run(gradients)
        except RuntimeError:  # gradients that need a whole backward pass (checkpoints)
            gradients = False
            outputs, loss = seen.run()
        self.on()
        try:
            changed, changed_loss = seen.run(gradients)
        finally:
            self.off()
        if (error := self.error()) is not None:
            raise error
        note, loss_change = self.note, None
        if loss is None or changed_loss is None:
            note += " The loss is not computed from a model's output by a function of torch alone."
        else:
            loss_change = difference([loss], [changed_loss])
        change = difference(outputs, changed)
        return {"outputs": change, "loss": loss_change, "note": note.strip()}


# ---- of the process --------------------------------------------------------------------


class Threads(Remedy):
    """torch's threads: all cores, or one where operators are tiny."""

    id = "threads"
    device = "cpu"
    wanted: int
    now: int

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        now, cores = torch.get_num_threads(), facts.cores
        if now == cores == 1:
            return "one core can be used, and one thread is"
        mean_us = facts.operator_us()
        if now == cores and mean_us > TINY_US:
            return f"torch uses all {cores} cores, and its operators are not tiny"
        wanted = 1 if now == cores else cores
        # one thread of two cores: half of the work may go, where operators are long
        gain = 0.1 if wanted == 1 else abs(1 - now / cores) * min(1.0, mean_us / 50)
        name, code = (
            f"{counted(wanted, 'thread')} instead of {now}",
            f"torch.set_num_threads({wanted})",
        )
        note = "Sums are added up in another order."
        return cls(name, gain, code, _script(), note, wanted=wanted, now=now)

    def switched(self) -> Iterator[None]:
        torch.set_num_threads(self.wanted)
        yield
        torch.set_num_threads(self.now)


class Allocator(Remedy):
    """glibc's thresholds, so that freed memory is kept.

    What glibc had is found by allocating; it adapts no further afterwards.
    """

    id = "allocator"
    computes = False
    device = "cpu"
    before: int
    """Bytes from which memory was mapped."""
    _MMAPPED = 2  # a flag in the size of glibc's chunks

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        libc = ctypes.CDLL(None)
        if sys.platform != "linux" or not hasattr(libc, "gnu_get_libc_version"):
            return "the C library is not glibc"
        if os.environ.get("LD_PRELOAD"):
            return "another library is preloaded, which may be the allocator"
        if any(name in os.environ for name in machine.ALLOCATOR_SETTINGS):
            return "the environment sets the allocator"
        if not any(row.get("self_cpu_memory_bytes", 0) > 0 for row in facts.averages):
            return "no memory was recorded, or none is allocated"
        most, command = machine._LARGEST_THRESHOLD, [Path(sys.executable).name, *sys.orig_argv[1:]]
        code = f"MALLOC_MMAP_THRESHOLD_={most} MALLOC_TRIM_THRESHOLD_=2147483647 "
        name, note = "freed memory kept by the C library (malloc's thresholds)", _NO_OPERATOR
        code, before = code + " ".join(command), cls._threshold(libc)
        return cls(name, 0.08, code, "the command line", note, before=before)

    @classmethod
    def _threshold(cls, libc: Any) -> int:
        """The size from which glibc maps memory now, to within 1 %."""
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.malloc_trim(0)  # else the heap's free end would serve
        low, high = 128 << 10, machine._LARGEST_THRESHOLD
        while high > low * 1.01:
            size = int((low * high) ** 0.5)
            chunk = libc.malloc(size)
            before, length = (ctypes.c_size_t * 2).from_address(chunk - 16)
            if length & cls._MMAPPED:
                # free would raise the threshold
                libc.munmap(chunk - 16 - before, (length & ~7) + before)
                high = size
            else:
                libc.free(chunk)
                low = size
        return high

    def switched(self) -> Iterator[None]:
        mallopt, most = ctypes.CDLL(None).mallopt, machine._LARGEST_THRESHOLD
        mallopt(machine._M_MMAP_THRESHOLD, most)
        mallopt(machine._M_TRIM_THRESHOLD, 2**31 - 1)
        yield
        mallopt(machine._M_MMAP_THRESHOLD, self.before)
        mallopt(machine._M_TRIM_THRESHOLD, 2 * self.before)


class Collection(Remedy):
    """Python's garbage collection off, and what is there frozen."""

    id = "garbage_collection"
    computes = False

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        if not gc.isenabled():
            return "it is off already"
        if facts.collecting < 0.01:
            return f"collecting garbage takes {facts.collecting:.1%} of the step"
        gain = min(facts.collecting, 0.05)  # one collection of all may lie in what was looked at
        code = "import gc\ngc.freeze()\ngc.disable()  # call gc.collect() now and then yourself"
        return cls("Python's garbage collection off", gain, code, _script())

    def switched(self) -> Iterator[None]:
        frozen = gc.get_freeze_count()
        gc.freeze()
        gc.disable()
        yield
        gc.enable()
        if not frozen:
            gc.unfreeze()


class Anomaly(Remedy):
    """Autograd's anomaly detection off: it keeps a stack for each node and checks for NaN."""

    id = "anomaly"
    computes = False

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        if not torch.is_anomaly_enabled():
            return "it is off already"
        code = "torch.autograd.set_detect_anomaly(False)  # it is for finding NaN, not for training"
        return cls("autograd's anomaly detection off", 0.5, code, _script())

    def switched(self) -> Iterator[None]:
        checks = torch.is_anomaly_check_nan_enabled()
        torch.autograd.set_detect_anomaly(False)
        yield
        torch.autograd.set_detect_anomaly(True, check_nan=checks)


class Setting(Remedy):
    """An attribute of torch that is set to another value."""

    path: ClassVar[str]
    wanted: ClassVar[Any]
    title: ClassVar[str]
    effect: ClassVar[str] = ""
    """What it does to the numbers."""
    saves: ClassVar[float]
    """The share that it may save of the time of its operators."""
    operators: ClassVar[tuple[str, ...]] = ()
    what: ClassVar[str] = ""
    """The operators that it concerns, and what they are called; none for the whole step."""

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        owner, name = cls._owner()
        share = facts.share(*cls.operators) if cls.operators else 1.0
        if not hasattr(owner, name):
            return f"this torch has no torch.{cls.path}"
        if getattr(owner, name) == cls.wanted:
            return "it is set already"
        if share < LEAST_SHARE:
            return f"{cls.what} take {share:.0%} of the step"
        code = f"torch.{cls.path} = {cls.wanted!r}"
        return cls(cls.title, cls.saves * share, code, _script(), cls.effect)

    def switched(self) -> Iterator[None]:
        owner, name = self._owner()
        before = getattr(owner, name)
        setattr(owner, name, self.wanted)
        yield
        setattr(owner, name, before)

    @classmethod
    def _owner(cls) -> tuple[Any, str]:
        *path, name = cls.path.split(".")
        owner: Any = torch
        for each in path:
            owner = getattr(owner, each, None)
        return owner, name


class OneDnn(Setting):
    """fp32 products by oneDNN (processors without bf16 tiles still compute in fp32)."""

    id = "onednn"
    family = "precision"
    device = "cpu"
    path = "backends.mkldnn.matmul.fp32_precision"
    wanted = "bf16"
    title, saves = "fp32 matrix products by oneDNN", 0.2
    effect = "Inputs of fp32 products may be rounded to bf16 inside."
    operators, what = PRODUCTS, "matrix products"


class TensorFloat(Setting):
    id = "tf32"
    family = "precision"
    device = "cuda"
    path = "backends.cuda.matmul.allow_tf32"
    wanted = True
    title, saves = "fp32 products in TF32", 0.2
    effect = "Inputs of fp32 products are rounded to 10 bits of mantissa."

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        if torch.cuda.get_device_capability(facts.device)[0] < 8:
            return "this GPU has no TF32"
        return super().find(seen, facts)


class CudnnBenchmark(Setting):
    """cudnn tries its algorithms for each shape of a convolution."""

    id = "cudnn_benchmark"
    device = "cuda"
    path = "backends.cudnn.benchmark"
    wanted = True
    settle = 3
    title, saves = "cudnn's benchmark", 0.1
    operators, what = (*CONVOLUTIONS, "conv2d"), "convolutions"


# ---- of the model's forward --------------------------------------------------------------


class Forward(Remedy):
    """Another ``forward`` on each outermost module; where it raises, its own one runs."""

    settle = 2

    def __init__(
        self, calls: list[Call], name: str, gain: float, code: str, note: str = "", **kept: Any
    ) -> None:
        super().__init__(name, gain, code, calls[0].place, note, **kept)
        self.calls = calls

    def changed(self, module: torch.nn.Module) -> Callable[..., Any]:
        """What takes the place of a module's ``forward`` as it is now."""
        raise NotImplementedError

    def switched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for call in self.calls:
                forward = self._guarded(call.module.forward, self.changed(call.module))
                stack.enter_context(mock.patch.object(call.module, "forward", forward))
            yield

    def _guarded(self, own: Callable[..., Any], changed: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.failed is None:
                try:
                    return changed(*args, **kwargs)
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:
                    self.failed = error
            return own(*args, **kwargs)

        return forward

    @classmethod
    def refusal(cls, seen: Seen, facts: Facts) -> str:
        if not seen.models:
            return super().refusal(seen, facts) or seen.why_no_models
        if any(isinstance(call.module, torch.jit.ScriptModule) for call in seen.models):
            return "the model was made by torch.jit"
        return super().refusal(seen, facts)


class Autocast(Forward):
    """bf16 autocast around the outermost modules; their results are fp32 again."""

    id = "autocast"
    family = "precision"
    layer = 1

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        share = facts.share(*PRODUCTS, *CONVOLUTIONS, *ATTENTION)
        calls = [call for call in seen.models if not call.autocast]
        if not calls:
            return "the model runs under autocast already"
        if any(one.dtype != torch.float32 for one in seen.parameters):
            return "the weights are not all fp32"
        if share < LEAST_SHARE:
            return f"matrix products take {share:.0%} of the step"
        device = facts.device.type
        if device == "cuda" and torch.cuda.get_device_capability(facts.device)[0] < 8:
            return "this GPU has no bf16 units"
        lines = [f'with torch.autocast("{device}", dtype=torch.bfloat16):']
        lines += [f"    output = {call.name}(...)  # {call.place}" for call in calls]
        lines += ["output = output.float()"]
        note = "Products round their inputs to bf16 (8 bits of mantissa)."
        name, code = "bf16 autocast around the model", "\n".join(lines)
        return cls(calls, name, 0.5 * share, code, note, on_device=device)

    on_device: str

    def changed(self, module: torch.nn.Module) -> Callable[..., Any]:
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(self.on_device, dtype=torch.bfloat16):
                result = own(*args, **kwargs)
            return mapped(result, lambda one: one.float() if one.dtype == torch.bfloat16 else one)

        return forward


class Compile(Forward):
    """torch.compile of the outermost modules, if that ends in time."""

    id = "compile"
    settle = 4
    ranks = False

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        products = facts.share(*PRODUCTS, *CONVOLUTIONS, *ATTENTION)
        updates = facts.share("Optimizer.step", inclusive=True)
        loading = facts.share("enumerate(DataLoader)", inclusive=True)
        left = max(0.0, 1 - products - updates - loading)
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if facts.device.type == "cpu" and not compiler:
            return "there is no C++ compiler here"
        if left < 0.2:
            return f"products, the optimizer and loading leave {left:.0%} of the step to it"
        names = list(dict.fromkeys(call.name for call in seen.models))
        code = "\n".join(f"{name} = torch.compile({name})  # before the loop" for name in names)
        note = "Operators are fused, so roundings differ."
        return cls(seen.models, "torch.compile of the model", 0.3 * left, code, note)

    @classmethod
    def refusal(cls, seen: Seen, facts: Facts) -> str:
        if has_compiled():
            return "the program compiles its model already"
        return super().refusal(seen, facts)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._compiled: dict[int, Callable[..., Any]] = {}
        self._limit_s = 0.0

    def changed(self, module: torch.nn.Module) -> Callable[..., Any]:
        if id(module) not in self._compiled:
            self._compiled[id(module)] = torch.compile(module.forward)
        compiled = self._compiled[id(module)]

        def forward(*args: Any, **kwargs: Any) -> Any:
            with limited(self._limit_s):
                return compiled(*args, **kwargs)

        return forward

    def numbers(self, seen: Seen, limit_s: float) -> dict[str, Any]:
        self._limit_s = limit_s
        began = time.perf_counter()
        try:
            return super().numbers(seen, limit_s)
        finally:
            self.compile_s = time.perf_counter() - began
            counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
            breaks = sum(counters.get("graph_break", {}).values())
            self.note += f" {breaks} graph breaks." if breaks else ""

    def end(self) -> None:
        self._compiled.clear()
        torch._dynamo.reset()


class TooLong(BaseException):
    """Something did not end in the time that it was given."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise in the block, in this thread, when it takes longer; Python code is interrupted."""
    thread, raise_in = ctypes.c_ulong(threading.get_ident()), _raise_in
    timer = threading.Timer(seconds, raise_in, (thread, ctypes.py_object(TooLong)))
    timer.daemon = True
    timer.start()
    try:
        yield
    except TooLong:
        raise TooLong(f"it had not ended after {seconds:.0f} s") from None
    finally:
        timer.cancel()
        timer.join()
        raise_in(thread, None)  # one that came too late


_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc


class ChannelsLast(Forward):
    """Convolutions with channels innermost in memory."""

    id = "channels_last"
    ranks = False

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        share = facts.share(*CONVOLUTIONS)
        if share < LEAST_SHARE:
            return f"convolutions take {share:.0%} of the step"
        if not any(one.dim() == 4 for one in seen.parameters):
            return "no weight has four dimensions"
        name = seen.models[0].name
        code = f"{name} = {name}.to(memory_format=torch.channels_last)  # before the loop\n"
        code += "images = images.to(memory_format=torch.channels_last)"
        optimizers = [one.optimizer for one in seen.optimizers]
        return cls(seen.models, "channels last in memory", 0.2 * share, code, optimizers=optimizers)

    optimizers: list[torch.optim.Optimizer]

    def changed(self, module: torch.nn.Module) -> Callable[..., Any]:
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return own(*mapped(args, _channels_last), **mapped(kwargs, _channels_last))

        return forward

    def switched(self) -> Iterator[None]:
        self._convert(torch.channels_last)
        yield from super().switched()
        self._convert(torch.contiguous_format)

    def _convert(self, layout: torch.memory_format) -> None:
        weights = [one for call in self.calls for one in call.module.parameters() if one.dim() == 4]
        for weight in weights:
            weight.data = weight.data.contiguous(memory_format=layout)
            weight.grad = None
            for optimizer in self.optimizers:
                state = optimizer.state.get(weight, {})
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim() == 4:
                        state[key] = value.contiguous(memory_format=layout)


def _channels_last(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value


class CudaGraphs(Forward):
    """Forward and backward of the model as CUDA graphs, for batches of one shape."""

    id = "cuda_graphs"
    device = "cuda"
    ranks = False

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        if len(seen.models) != 1 or seen.models[0].kwargs:
            return "the program calls several modules, or one with named arguments"
        if not all(isinstance(one, torch.Tensor) for one in seen.models[0].args):
            return "the model's inputs are not all tensors"
        name = seen.models[0].name
        code = f"{name} = torch.cuda.make_graphed_callables({name}, (...))  # before the loop"
        return cls(seen.models, "CUDA graphs of the model", 0.2, code)

    def changed(self, module: torch.nn.Module) -> Callable[..., Any]:
        call = self.calls[0]
        shapes = [one.shape for one in call.args]
        graphed = torch.cuda.make_graphed_callables(copy.copy(module), call.args)

        def forward(*args: Any) -> Any:
            if [one.shape for one in args] != shapes:
                raise ValueError("batches differ in shape")
            return graphed(*args)

        return forward


# ---- of optimizers -----------------------------------------------------------------------


class OptimizerFlags(Remedy):
    """Flags of ``param_groups`` that choose how an optimizer computes its update."""

    flags: ClassVar[dict[str, Any]]
    saves: ClassVar[float]
    """The share that it may save of the optimizer's time."""
    family = "optimizer"

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        wanted, share = cls.id, facts.share("Optimizer.step", inclusive=True)
        if not seen.optimizers:
            return "no optimizer of torch stepped"
        chosen = [one for one in seen.optimizers if not _refused(one.optimizer, wanted)]
        if wanted == "foreach" and any(not _refused(one.optimizer, "fused") for one in chosen):
            return "the fused update is tried instead"
        if not chosen:
            return _refused(seen.optimizers[0].optimizer, wanted)
        if share < LEAST_SHARE:
            return f"the optimizer takes {share:.0%} of the step"
        kinds = [type(one.optimizer).__name__ for one in chosen]
        code = "\n".join(
            f"{one.name} = torch.optim.{kind}(..., {wanted}=True)  # {one.place}"
            for one, kind in zip(chosen, kinds, strict=True)
        )
        name, gain = f"{wanted} {' and '.join(dict.fromkeys(kinds))}", share * cls.saves
        note = "The update is the same up to rounding."
        return cls(name, gain, code, chosen[0].place, note, chosen=chosen)

    chosen: list[Stepped]

    def switched(self) -> Iterator[None]:
        changed = [
            (group, {name: group[name] for name in self.flags if name in group})
            for one in self.chosen
            for group in one.optimizer.param_groups
        ]
        for group, before in changed:
            group.update({name: self.flags[name] for name in before})
        self._move_steps()
        yield
        for group, before in changed:
            group.update(before)
        self._move_steps()

    def _move_steps(self) -> None:
        """On a GPU the fused update counts steps there; the others do on the host."""
        for one in self.chosen:
            groups = one.optimizer.param_groups
            on_gpu = any(group.get("fused") or group.get("capturable") for group in groups)
            for weight, state in one.optimizer.state.items():
                step = state.get("step")
                if weight.device.type == "cuda" and isinstance(step, torch.Tensor):
                    state["step"] = step.to(weight.device if on_gpu else "cpu")

    def numbers(self, seen: Seen, limit_s: float) -> dict[str, Any]:
        """Updates from the same gradients on copies, without and with the flags."""
        most = 0.0
        for one in self.chosen:
            updates = [_update(one.optimizer, flags) for flags in ({}, self.flags)]
            most = max(most, difference(*updates))
        note = f"{self.note} Largest relative difference of an update: {most:.1e}."
        return {"outputs": 0.0, "loss": 0.0, "update": most, "note": note}


def _refused(optimizer: torch.optim.Optimizer, flag: str) -> str:
    """Why an optimizer has no such flag to switch; '' where it has."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return f"{kind.__name__} is an optimizer of the program's own"
    groups = optimizer.param_groups
    if not all(flag in group for group in groups):
        return f"torch's {kind.__name__} has no option {flag!r}"
    if any(group[flag] or group.get("fused") for group in groups):
        return f"{kind.__name__} is {'fused' if groups[0].get('fused') else flag} already"
    weights = [one for group in groups for one in group["params"] if one.grad is not None]
    if any(one.grad.is_sparse for one in weights):
        return f"{kind.__name__} gets sparse gradients"
    if any(not one.is_floating_point() for one in weights):
        return "weights are not all real numbers"
    if not weights:
        return f"{kind.__name__} keeps no gradients at the end of an iteration"
    return ""


def _update(optimizer: torch.optim.Optimizer, flags: dict[str, Any]) -> list[torch.Tensor]:
    """What a step of a copy of an optimizer adds to copies of its smaller parameters."""
    left, groups, state, pairs = COPIED_BYTES, [], {}, []
    for group in optimizer.param_groups:
        copies = []
        for weight in group["params"]:
            size = weight.numel() * weight.element_size()
            if weight.grad is None or size > left:
                continue
            left -= size
            twin = torch.nn.Parameter(weight.detach().clone())
            twin.grad = weight.grad.detach().clone()
            copies.append(twin)
            state[twin] = copy.deepcopy(optimizer.state.get(weight, {}))
            pairs.append((twin, weight.detach()))
        if copies:
            groups.append({**group, "params": copies})
    if not pairs:
        return []
    kind: Any = type(optimizer)
    stepping = kind([group | {n: v for n, v in flags.items() if n in group} for group in groups])
    for twin, kept in state.items():
        fused = flags.get("fused") and twin.device.type == "cuda"
        if fused and isinstance(kept.get("step"), torch.Tensor):
            kept["step"] = kept["step"].to(twin.device)
        stepping.state[twin].update(kept)
    stepping.step()
    return [twin.detach() - weight for twin, weight in pairs]


class Fused(OptimizerFlags):
    """The optimizer's update in one kernel per parameter, or over all of them."""

    id, saves = "fused", 0.6
    flags: ClassVar = {"fused": True, "foreach": False}


class Foreach(OptimizerFlags):
    """The optimizer's update operator by operator over all parameters at once."""

    id, saves = "foreach", 0.3
    flags: ClassVar = {"fused": None, "foreach": True}


class SparseGradients(Remedy):
    """Sparse gradients for tables, and an optimizer that updates the rows of a batch alone.

    A twin of the program's optimizer shares its state, takes its tables over and steps after it.
    """

    id = "sparse"
    ranks = False
    twins: ClassVar = {"SGD": "SGD", "Adagrad": "Adagrad", "Adam": "SparseAdam"}

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        tables = [one for one in seen.tables if not one.table.sparse]
        if not tables:
            return "no nn.Embedding or nn.EmbeddingBag has dense gradients"
        if seen.gradients_read:
            return "the program reads gradients itself (clipping), which may not know sparse ones"
        chosen: list[Chosen] = []
        why = ""
        for looked in tables:
            weight, table = looked.table.weight, looked.table
            if table.scale_grad_by_freq or getattr(table, "mode", "") == "max":
                why = "torch has no sparse gradients for such a bag"
            elif 4 * looked.rows > weight.shape[0]:
                why = "a batch touches more than a quarter of a table's rows"
            elif len(_users(seen, weight)) != 1:
                why = "several modules use one table"
            else:
                for one, group in _groups_of(seen, weight):
                    why = _no_twin(one.optimizer, group)
                    if not why:
                        chosen.append((table, one, group))
        if not chosen:
            return why or "no optimizer updates the tables"
        kinds = sorted({cls.twins[type(one.optimizer).__name__] for _, one, _ in chosen})
        large = sum(table.weight.numel() for table, _, _ in chosen)
        every = sum(one.numel() for one in seen.parameters) or large
        share = facts.share("Optimizer.step", inclusive=True) * large / max(every, large)
        if share < LEAST_SHARE:
            return f"updating the tables takes about {share:.0%} of the step"
        note = "Outputs before the first update are the same; updates are the same up to rounding."
        if "SparseAdam" in kinds:
            note = (
                "SparseAdam is another method than Adam: moments decay in the rows of a batch "
                "alone, and other rows are left as they are."
            )
        many = "a table" if len(chosen) == 1 else f"{len(chosen)} tables"
        name = f"sparse gradients for {many}, updated by {' and '.join(kinds)}"
        code, place = cls._code(seen, chosen), chosen[0][1].place
        return cls(name, 0.8 * share, code, place, note, chosen=chosen)

    chosen: list[Chosen]

    @classmethod
    def _code(cls, seen: Seen, chosen: list[Chosen]) -> str:
        numbers = {id(table) for table, _, _ in chosen}
        names = [
            f"{call.name}.{name}" if name else call.name
            for call in seen.models
            for name, module in call.module.named_modules()
            if id(module) in numbers
        ]
        _, one, group = chosen[0]
        kind, other = cls.twins[type(one.optimizer).__name__], one.name
        listed = re.sub(r"\.(\d+)", r"[\1]", ", ".join(names))
        return (
            f"tables = [{listed}]\nfor table in tables:\n    table.sparse = True\n"
            f"table_optimizer = torch.optim.{kind}(\n"
            f"    [table.weight for table in tables], lr={group['lr']:g}\n)\n"
            f"# leave these weights out of {other}; beside its own calls:\n"
            "table_optimizer.zero_grad()\ntable_optimizer.step()"
        )

    def switched(self) -> Iterator[None]:
        changed: list[tuple[dict[str, Any], list[Any]]] = []
        twins: dict[torch.optim.Optimizer, torch.optim.Optimizer] = {}
        for table, one, group in self.chosen:
            weight, optimizer = table.weight, one.optimizer
            changed.append((group, group["params"]))
            group["params"] = [each for each in group["params"] if each is not weight]
            table.sparse, weight.grad = True, None
            kind: Any = getattr(torch.optim, self.twins[type(optimizer).__name__])
            known = {"lr", "betas", "eps", "lr_decay"} & group.keys()
            options = {name: group[name] for name in known} | {"params": [weight]}
            if optimizer in twins:
                twins[optimizer].add_param_group(options)
            else:
                twins[optimizer] = kind([options])
            twin, state = twins[optimizer], optimizer.state.get(weight, {})
            kept = {name: state[name] for name in ("exp_avg", "exp_avg_sq", "sum") if name in state}
            step = state.get("step")
            if kept and step is not None:
                kept["step"] = int(step) if isinstance(twin, torch.optim.SparseAdam) else step
            if kept:
                twin.state[weight].update(kept)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            try:
                twins[optimizer].step()
            except Exception as error:
                self.failed = error
            for table, _one, _group in self.chosen:
                table.weight.grad = None

        hooks = [optimizer.register_step_post_hook(after) for optimizer in twins]
        yield
        for hook in hooks:
            hook.remove()
        for group, params in reversed(changed):
            group["params"] = params
        for table, _one, _group in self.chosen:
            table.sparse, table.weight.grad = False, None

    def numbers(self, seen: Seen, limit_s: float) -> dict[str, Any]:
        return {"outputs": 0.0, "loss": 0.0, "note": self.note}


Chosen = tuple[Any, Stepped, dict[str, Any]]
"""A table, the optimizer that updates it, and its group there."""


def _groups_of(seen: Seen, weight: torch.Tensor) -> Iterator[tuple[Stepped, dict[str, Any]]]:
    for one in seen.optimizers:
        for group in one.optimizer.param_groups:
            if any(each is weight for each in group["params"]):
                yield one, group


def _users(seen: Seen, weight: torch.Tensor) -> list[torch.nn.Module]:
    return [
        module
        for module in {id(m): m for c in seen.models for m in c.module.modules()}.values()
        if any(one is weight for one in module._parameters.values())
    ]


def _no_twin(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str:
    """Why an optimizer has no sparse twin; '' where it has."""
    kind = type(optimizer)
    if kind.__module__ != f"torch.optim.{kind.__name__.lower()}":
        return f"{kind.__name__} is an optimizer of the program's own"
    if kind.__name__ not in SparseGradients.twins:
        return f"{kind.__name__} has no sparse twin in torch"
    odd = [n for n in ("weight_decay", "momentum", "amsgrad", "maximize") if group.get(n)]
    return f"{kind.__name__} is used with {odd[0]}, which sparse updates do not know" if odd else ""


# ---- of the loader -----------------------------------------------------------------------


class Ahead(Remedy):
    """A thread that makes the next batch while the model trains on this one."""

    id = "ahead"
    computes = False

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        share = facts.share("enumerate(DataLoader)", inclusive=True)
        if not seen.loader:
            workers = "its DataLoader has workers already"
            return workers if seen.workers else "no DataLoader was asked for a batch"
        if share < LEAST_SHARE:
            return f"making batches takes {share:.0%} of the step"
        name, code = (
            "batches made one ahead by a thread",
            AHEAD_CODE.format(loader=seen.loader_name),
        )
        note = (
            "The order of batches is the same; random numbers drawn by several threads at once "
            "come in another order."
        )
        return cls(name, 0.6 * share, code, seen.loader, note)

    _running, _coming = False, 0
    _thread: ThreadPoolExecutor | None = None

    def switched(self) -> Iterator[None]:
        self._running = True
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "batches ahead")
        if not self._coming:
            self._install(self._thread)
        yield
        self._running = False
        if not self._coming:  # else what is being made is handed out first
            self._restore()

    def _install(self, thread: ThreadPoolExecutor) -> None:
        kind = _loader()
        own = kind._next_data

        def restore() -> None:
            kind._next_data = own

        def next_data(iterator: Any) -> Any:
            coming = iterator.__dict__.pop("_dlrm_coming", None)
            self._coming -= coming is not None
            batch = own(iterator) if coming is None else coming.result()
            if self._running:
                self._coming += 1
                iterator._dlrm_coming = thread.submit(own, iterator)
            elif not self._coming:
                restore()
            return batch

        kind._next_data, self._restore = next_data, restore

    def end(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False)


AHEAD_CODE = """\
import concurrent.futures

def ahead(loader):
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        batches = iter(loader)
        coming = thread.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = thread.submit(next, batches, None)
            yield batch

for batch in ahead({loader}):"""


class Workers(Remedy):
    """A worker process that makes batches, which shares no lock of Python's with the training."""

    id = "workers"
    computes = False
    ranks, new_process = False, True
    options: ClassVar = {"num_workers": 1}

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        found = Ahead.find(seen, facts)
        if isinstance(found, str):
            return found
        code = f"{seen.loader_name} = DataLoader(..., num_workers=1)"
        note = "Random numbers drawn while batches are made come from another generator."
        return cls("one worker process that makes batches", 0.0, code, seen.loader, note)


class OtherAllocator(Remedy):
    """Another allocator of memory, where one is installed."""

    id = "other_allocator"
    computes = False
    device = "cpu"
    ranks, new_process = False, True
    environment: dict[str, str]  # type: ignore[misc]

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        found = Allocator.find(seen, facts)
        if isinstance(found, str):
            return found
        for name in ("jemalloc", "tcmalloc_minimal", "tcmalloc", "mimalloc"):
            if library := ctypes.util.find_library(name):
                code = f"LD_PRELOAD={library} {_command()}"
                title, environment = f"{name} instead of glibc's allocator", {"LD_PRELOAD": library}
                return cls(title, 0.0, code, "the command", environment=environment)
        return "neither jemalloc, tcmalloc nor mimalloc is installed"


class Binding(Remedy):
    """OpenMP's threads each on a core of its own."""

    id = "binding"
    computes = False
    device = "cpu"
    ranks, new_process = False, True
    environment: ClassVar = {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        if torch.get_num_threads() < FEWEST_BOUND:
            return f"operators run on fewer than {FEWEST_BOUND} threads"
        if any(name.startswith(("OMP_PROC", "OMP_PLACES", "KMP_AFF")) for name in os.environ):
            return "the environment places the threads"
        code = " ".join(f"{name}={value}" for name, value in cls.environment.items())
        return cls("each OpenMP thread on a core", 0.0, f"{code} {_command()}", "the command")


def _script() -> str:
    return Path(sys.argv[0]).name


def _command() -> str:
    return f"{Path(sys.executable).name} {_script()} ..."


FEWEST_BOUND = 4
"""Threads from which on it may matter on which cores they run."""


class Pinned(Remedy):
    """Batches in pinned memory, whose copies to the GPU the host does not wait for."""

    id = "pinned"
    computes = False
    device = "cuda"

    @classmethod
    def find(cls, seen: Seen, facts: Facts) -> Remedy | str:
        if not seen.loader:
            return "no DataLoader without workers was asked for a batch"
        code = f"{seen.loader_name} = DataLoader(..., pin_memory=True)\n"
        code += "batch = batch.to(device, non_blocking=True)"
        return cls("pinned memory and copies that do not block", 0.1, code, seen.loader)

    def switched(self) -> Iterator[None]:
        own = _loader()._next_data

        def next_data(iterator: Any) -> Any:
            return mapped(own(iterator), torch.Tensor.pin_memory)

        def changed(move: Callable[..., Any]) -> Callable[..., Any]:
            def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                if tensor.device.type == "cpu" and tensor.is_pinned():
                    kwargs["non_blocking"] = True
                return move(tensor, *args, **kwargs)

            return moved

        with (
            mock.patch.object(_loader(), "_next_data", next_data),
            mock.patch.object(torch.Tensor, "to", changed(torch.Tensor.to)),
            mock.patch.object(torch.Tensor, "cuda", changed(torch.Tensor.cuda)),
        ):
            yield


def _loader() -> Any:
    """What torch's DataLoaders without workers make batches with."""
    from torch.utils.data import dataloader

    return dataloader._SingleProcessDataLoaderIter


REMEDIES: tuple[type[Remedy], ...] = (
    *(Anomaly, Threads, Autocast, SparseGradients, Fused, Foreach, OneDnn, TensorFloat, Ahead),
    *(Workers, Allocator, OtherAllocator, Binding, Collection, ChannelsLast, CudnnBenchmark),
    *(Pinned, CudaGraphs, Compile),
)
"""All that are known."""
