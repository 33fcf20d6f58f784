"""Faults to plant in the real workload, each a patch of one function or parameter.

Used by ``planted_faults.py``; the packages know nothing of it. A plant takes a
:class:`Setting` (random magnitudes), changes sections of parameters and patches modules of
the process that will measure.
"""

import contextlib
import gc
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

import dlrm_core.step as step_module
from dlrm_core import parts
from dlrm_core.data import loader
from dlrm_core.parts import iteration

MODEL_PARTS = (
    ("bottom_mlp", "forward"),
    ("interaction", "forward"),
    ("top_mlp", "forward"),
    ("loss", "forward"),
    ("top_mlp", "backward"),
    ("embedding", "forward"),
)


@dataclass
class Setting:
    """One trial: its random numbers, the parameters it may change, what it planted."""

    draw: random.Random
    sections: dict[str, Any]
    step_ms: float
    """About what a clean step of this shape takes."""
    planted: dict[str, Any] = field(default_factory=dict)
    cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def lose_ms(self, least: float = 0.25, most: float = 1.5) -> float:
        """Milliseconds to lose in an iteration: a random share of the clean step."""
        share = self.draw.uniform(least, most)
        self.planted["ms"] = round(share * self.step_ms, 2)
        return share * self.step_ms

    def place(self) -> tuple[str, str]:
        """A random part of the model."""
        chosen = self.draw.choice(MODEL_PARTS)
        self.planted["part"] = "_".join(chosen)
        return chosen


def insert(place: tuple[str, str], extra: Callable[[Any], Any]) -> None:
    """Do something more in the function of a part; ``extra`` gets and gives its result."""
    original = parts._runner

    def with_extra(work: Callable[[], Any]) -> Any:
        return extra(work())

    with_extra.__name__ = parts.function_name(*place)
    patched = parts.part(*place)(with_extra)

    def runner(component: str, phase: str) -> Any:
        return patched if (component, phase) == place else original(component, phase)

    parts._runner = runner  # type: ignore[assignment]


def wrap_generator(change: Callable[[Any], Any]) -> None:
    """Change every batch that is made."""
    original = loader.make_generator

    class Changed:
        def __init__(self, generator: Any) -> None:
            self.generator = generator

        def next_batch(self) -> Any:
            return change(self.generator.next_batch())

    for path, module in list(sys.modules.items()):
        if path.startswith("dlrm_") and getattr(module, "make_generator", None) is original:
            module.make_generator = lambda *args: Changed(original(*args))  # type: ignore


def spin(milliseconds: float) -> None:
    """Keep a core busy in Python."""
    end = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < end:
        pass


# ---- the faults -------------------------------------------------------------------


def clean(setting: Setting) -> None:
    """Nothing."""


def slow_generator(setting: Setting) -> None:
    lost = setting.lose_ms()
    computes = setting.draw.random() < 0.5
    setting.planted["computes"] = computes

    def slowly(batch: Any) -> Any:
        spin(lost) if computes else time.sleep(lost / 1e3)
        return batch

    wrap_generator(slowly)


def tiny_operations(setting: Setting) -> None:
    count = setting.draw.randint(800, 3000)
    setting.planted["operations"] = count
    small = torch.zeros(4)

    def many(result: Any) -> Any:
        x = small
        for _ in range(count):
            x = x + 1.0
        return result

    insert(setting.place(), many)


def equal_indices(setting: Setting) -> None:
    def equal(batch: Any) -> Any:
        return replace(batch, indices=torch.zeros_like(batch.indices))

    wrap_generator(equal)


def giant_table(setting: Setting) -> None:
    model = setting.sections["model"]
    dim = model["embedding_dim"]
    rows = setting.draw.randint(4, 8) * 1_000_000 * 32 // dim
    place = setting.draw.randrange(model["tables"])
    small = [model["table_rows"][0] // setting.draw.choice([4, 10])] * model["tables"]
    small[place] = rows
    model["table_rows"] = small
    setting.planted |= {"rows": rows, "table": place}


def full_precision(setting: Setting) -> None:
    setting.sections["training"]["precision"] = "fp32"
    library = setting.draw.choice(["default", "onednn"])
    setting.sections["training"]["fp32_matmul"] = library
    setting.planted["library"] = library


def straggler_thread(setting: Setting) -> None:
    """A thread that computes in Python, and so takes its lock; or in C without the lock."""
    python = setting.draw.random() < 0.5
    setting.planted["python"] = python
    stop = threading.Event()

    def compute() -> None:
        import hashlib

        block = bytes(8 << 20)
        while not stop.is_set():
            if python:
                sum(range(20_000))
            else:
                hashlib.sha256(block).digest()

    thread = threading.Thread(target=compute, name="straggler", daemon=True)
    thread.start()
    setting.cleanup.callback(stop.set)


def competing_process(setting: Setting) -> None:
    count = setting.draw.randint(1, 3)
    setting.planted["processes"] = count
    for _ in range(count):
        process = subprocess.Popen([sys.executable, "-c", "while True: sum(range(100000))"])
        setting.cleanup.callback(process.wait)
        setting.cleanup.callback(process.kill)


def leak(setting: Setting) -> None:
    """Keeps memory; the limit is simulated so that it is met soon."""
    import dlrm_workbook.ground.machine as limits

    size = int(setting.draw.uniform(0.3, 8.0) * 1e6)
    left = size * setting.draw.randint(200, 2000)
    setting.planted |= {"bytes": size, "left_bytes": left}
    kept: list[torch.Tensor] = []
    insert(setting.place(), lambda result: (kept.append(torch.ones(size // 4)), result)[1])
    resident = int(_status("VmRSS")) * 1024

    def limit(*args: Any) -> int:
        return resident + left + (4 << 30)

    original = limits.memory_limit
    for module in list(sys.modules.values()):
        if getattr(module, "memory_limit", None) is original:
            module.memory_limit = limit  # type: ignore[attr-defined]


def _status(name: str) -> str:
    with open("/proc/self/status") as file:  # noqa: PTH123
        return next(line.split()[1] for line in file if line.startswith(name))


def sleep_in_step(setting: Setting) -> None:
    lost = setting.lose_ms()
    insert(setting.place(), lambda result: (time.sleep(lost / 1e3), result)[1])


def file_sync(setting: Setting) -> None:
    size = setting.draw.choice([1 << 12, 1 << 16, 1 << 18])
    block = os.urandom(size)
    folder = setting.cleanup.enter_context(tempfile.TemporaryDirectory())
    number = os.open(f"{folder}/log", os.O_CREAT | os.O_WRONLY)
    setting.cleanup.callback(os.close, number)
    lost = setting.lose_ms(0.15, 0.6) / 1e3
    setting.planted["bytes"] = size

    def write(result: Any) -> Any:
        end = time.perf_counter() + lost
        while time.perf_counter() < end:
            os.pwrite(number, block, 0)
            os.fsync(number)
        return result

    insert(setting.place(), write)


def gc_storm(setting: Setting) -> None:
    objects = setting.draw.randint(5_000, 40_000)
    setting.planted["objects"] = objects
    heap = [[i] for i in range(200_000)]
    setting.cleanup.callback(heap.clear)

    def garbage(result: Any) -> Any:
        for _ in range(objects):
            cycle: list[Any] = []
            cycle.append(cycle)
        gc.collect()
        return result

    insert(setting.place(), garbage)


def page_churn(setting: Setting) -> None:
    size = int(setting.draw.uniform(10e6, 60e6)) // 4096 * 4096
    setting.planted["bytes"] = size

    def touch(result: Any) -> Any:
        with mmap.mmap(-1, size) as memory:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            np.ndarray((size // 4096,), np.uint8, memory, 0, (4096,))[:] = 1
        return result

    insert(setting.place(), touch)


def anomaly_mode(setting: Setting) -> None:
    torch.autograd.set_detect_anomaly(True)
    setting.cleanup.callback(torch.autograd.set_detect_anomaly, False)


def dense_gradients(setting: Setting) -> None:
    setting.sections["training"]["embedding_backend"] = "torch"
    rows = setting.draw.choice([50_000, 100_000])
    setting.sections["model"]["table_rows"] = [rows] * setting.sections["model"]["tables"]
    setting.planted["rows"] = rows
    original = torch.nn.EmbeddingBag.__init__

    def dense(self: Any, *args: Any, **more: Any) -> None:
        original(self, *args, **(more | {"sparse": False}))

    torch.nn.EmbeddingBag.__init__ = dense  # type: ignore[method-assign]


def conversions(setting: Setting) -> None:
    count = setting.draw.randint(4, 10)
    setting.planted["conversions"] = count

    def convert(x: torch.Tensor) -> torch.Tensor:
        kind = x.dtype
        for _ in range(count):
            x = x.double().to(kind)
        return x

    place = setting.draw.choice([("interaction", "forward"), ("bottom_mlp", "forward")])
    setting.planted["part"] = "_".join(place)
    wide = torch.zeros(int(setting.step_ms * 2.5e4), 4)

    def extra(result: Any) -> Any:
        convert(wide)
        # the bottom MLP's forward pass gives its vectors twice, tied by autograd: left as they are
        return result if isinstance(result, tuple) else convert(result)

    insert(place, extra)


def one_thread(setting: Setting) -> None:
    setting.sections["training"]["threads"] = 1


def many_threads(setting: Setting) -> None:
    setting.sections["training"]["threads"] = setting.draw.choice([6, 8, 16])
    setting.planted["threads"] = setting.sections["training"]["threads"]


def tiny_batch(setting: Setting) -> None:
    setting.sections["training"]["batch_size"] = setting.draw.choice([8, 16, 32])
    setting.planted["batch_size"] = setting.sections["training"]["batch_size"]


def log_every_iteration(setting: Setting) -> None:
    import dlrm_core.train as training

    figures = setting.draw.randint(4_000, 12_000)
    setting.planted["figures"] = figures
    original = training.Trainer.iterate

    @iteration
    def logged(self: Any) -> torch.Tensor:
        batch = step_module.data_forward(self.batches)
        loss = self.step(batch)
        values = self.model.top_mlp.linears[0].weight.flatten()[:figures].tolist()
        json.dumps({"loss": loss.item(), "weights": [f"{value:.6f}" for value in values]})
        return loss

    assert original is not logged
    training.Trainer.iterate = logged  # type: ignore[method-assign]


Plant = Callable[[Setting], None]

FAULTS: dict[str, tuple[Plant, tuple[str, ...]]] = {
    "clean": (clean, ()),
    "slow_generator": (slow_generator, ("data_generation",)),
    "tiny_operations": (tiny_operations, ("tiny_operators", "dispatch_bound")),
    "equal_indices": (equal_indices, ("skewed_indices",)),
    "giant_table": (giant_table, ("giant_table",)),
    "full_precision": (full_precision, ("dense_precision",)),
    "straggler_thread": (straggler_thread, ("other_threads",)),
    "competing_process": (competing_process, ("other_processes",)),
    "leak": (leak, ("leak",)),
    "sleep_in_step": (sleep_in_step, ("waiting",)),
    "file_sync": (file_sync, ("storage_in_loop",)),
    "gc_storm": (gc_storm, ("garbage_collection",)),
    "page_churn": (page_churn, ("page_faults",)),
    "anomaly_mode": (anomaly_mode, ("anomaly_checks",)),
    "dense_gradients": (dense_gradients, ("dense_gradients",)),
    "conversions": (conversions, ("conversions",)),
    "one_thread": (one_thread, ("too_few_threads", "thread_count")),
    "many_threads": (many_threads, ("too_many_threads",)),
    "tiny_batch": (tiny_batch, ("dispatch_bound", "small_batch")),
    "log_every_iteration": (log_every_iteration, ("around_model",)),
}
"""Fault to its plant and the ids of findings that name it."""


@contextlib.contextmanager
def planted(fault: str, setting: Setting) -> Iterator[None]:
    """The fault is there while the context is open."""
    with setting.cleanup:
        FAULTS[fault][0](setting)
        yield
