"""Records a program from inside, without the program being edited.

:func:`install` runs at Python's start (``startup/sitecustomize.py``) in the program and in every
Python process that it starts. It waits for ``torch.optim`` to be imported and then for
optimizers to step. A step of the optimizer that steps last in an iteration ends the iteration:
that is all a :class:`~dlrm_workbook.recordings.torch.session.Session` needs. When what was asked
for is recorded, and remedies are tried (:mod:`dlrm_workbook.recordings.torch.trials`), the program
is ended, by ``SystemExit`` at that place of its loop.

Each process that trains leaves ``PID.json`` in the folder that it was given, and the recording
in ``PID/``. Where another profiler measures the program, it only notes when iterations end, and
prints that as one line of JSON. Nothing but the standard library is imported before the first
step.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import inspect
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dlrm_workbook.recordings.torch.places import note_places
from dlrm_workbook.recordings.torch.workers import sample_workers

if TYPE_CHECKING:
    from dlrm_workbook.recordings.torch.beside import Beside
    from dlrm_workbook.recordings.torch.session import Session
    from dlrm_workbook.recordings.torch.trials import Trials

VARIABLE = "DLRM_WORKBOOK_RECORD"
"""Environment variable that holds, as JSON, what is to be recorded."""

STARTUP = Path(__file__).resolve().parent / "startup"
"""The folder for ``PYTHONPATH``."""


def install() -> None:
    """Begin to wait for optimizers, where the environment says what is to be recorded."""
    if given := os.environ.get(VARIABLE):
        asked = json.loads(given)
        folder, workers = Path(asked["folder"]), asked["options"].get("num_workers")
        hooks: dict[str, Callable[[ModuleType], None]] = {
            "torch.optim.optimizer": lambda module: _watch(asked, module),
            "torch.utils.data._utils.worker": lambda module: sample_workers(module, folder),
        }
        if workers:
            hooks["torch.utils.data.dataloader"] = lambda module: _give_workers(workers, module)
        for name, hook in hooks.items():
            sys.meta_path.insert(0, _AfterImport(name, hook))
        if asked.get("alive"):
            bind = functools.partial(end_with_holder, asked["alive"], asked["holder"])
            bind()
            os.register_at_fork(after_in_child=bind)


def end_with_holder(pipe: str, holder: int) -> None:
    """Have the kernel end this process and its group when the pipe's last writer is gone (Linux).

    It takes no thread, and holds for a shell that started this process. Every Python process that
    is forked or started asks anew, since a rank of torchrun is in a group of its own. ``holder`` is
    the number of the process that measures, which keeps the named pipe open for writing.
    """
    if sys.platform != "linux":
        return
    import fcntl
    import signal

    try:
        for owner in (-os.getpgrp(), os.getpid()):  # which may leave its group later
            reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.fcntl(reader, fcntl.F_SETOWN, owner)
            fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(reader, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    except (OSError, AttributeError):
        return  # the program is measured all the same
    try:
        os.kill(holder, 0)
    except ProcessLookupError:  # it was killed before the kernel was asked
        os.killpg(0, signal.SIGKILL)
    except OSError:
        pass


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it calls a function with a module that has just been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _watch(asked: dict[str, Any], module: ModuleType) -> None:
    watch = _Watch(asked)
    module.register_optimizer_step_pre_hook(watch.before)
    module.register_optimizer_step_post_hook(watch.after)
    os.register_at_fork(after_in_child=watch.forked)
    if asked.get("trials"):
        note_places(module.Optimizer)


def _give_workers(workers: int, module: ModuleType) -> None:
    """Give every DataLoader that has no workers some."""
    make: Any = module.DataLoader.__init__
    signature = inspect.signature(make)

    def made(*args: Any, **options: Any) -> None:
        given = signature.bind(*args, **options)
        if not given.arguments.get("num_workers"):
            given.arguments["num_workers"] = workers
        make(*given.args, **given.kwargs)

    module.DataLoader.__init__ = made


class _Watch:
    """Knows where iterations end in this process, and what becomes of them."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.abandoned: list[Session] = []
        """Sessions of the process that we were forked from; it goes on with them."""
        self.reset()

    def reset(self) -> None:
        self.depth = 0
        """Optimizers whose step is running: some call another's."""
        self.order: list[int] = []
        """The optimizers of an iteration, in the order in which they step."""
        self.ends: int | None = None
        """The last of them; None as long as that is not known."""
        self.steps = 0
        self.session: Session | None = None
        self.trials: Trials | None = None
        self.moments: list[int] = []
        """When iterations ended, ns since the epoch, where only that is asked for."""
        self.beside: Beside | None = None
        self.state: dict[str, Any] = {"state": "training"}
        self.over = False

    def forked(self) -> None:
        if self.session is not None:
            self.abandoned.append(self.session)
        self.reset()

    def before(self, optimizer: Any, *_: Any) -> None:
        self.depth += 1

    def after(self, optimizer: Any, *_: Any) -> None:
        self.depth = max(0, self.depth - 1)
        if self.depth:
            return
        if self.ends is None:
            if id(optimizer) not in self.order:
                self.order.append(id(optimizer))
                if len(self.order) == 1:
                    self.first_step()
                return
            self.ends = self.order[-1]
        if id(optimizer) == self.ends:
            self.iteration_ended()

    def first_step(self) -> None:
        """Leave word that this process trains, and see to it that its end is noticed.

        multiprocessing runs its finalizers at the end of its own children too, where atexit's
        functions are not called.
        """
        import multiprocessing.util

        multiprocessing.util.Finalize(None, self.program_ends, exitpriority=100)
        self.tell()

    def iteration_ended(self) -> None:
        self.steps += 1
        if self.trials is not None and self.trials.step():
            return
        if self.over:
            self.end_program()
        elif self.asked.get("times_only"):
            self.moments.append(time.time_ns())
            if len(self.moments) == 1 and "HPCRUN_EVENT_LIST" in os.environ:
                from dlrm_workbook.recordings.torch.beside import Beside

                with contextlib.suppress(Exception):  # the times are worth more
                    self.beside = Beside()
            if len(self.moments) > self.asked["lengths"]["profiled"]:
                self.print_times()
                self.end_program()
        elif self.session is None:
            self.begin()
        else:
            self.session.step()
            if self.session.finished:
                self.close()
                self.try_remedies()

    def try_remedies(self) -> None:
        """Go on with the program where remedies are to be tried; else end it."""
        if self.state["state"] == "recorded" and self.asked.get("trials"):
            from dlrm_workbook.recordings.torch.trials import Trials

            self.trials = Trials(
                self.place, self.asked["trials"], only=self.asked.get("try"), tell=self.doing
            )
            if self.trials.step():
                return
        self.end_program()

    @property
    def place(self) -> Path:
        """The folder of this process's recording."""
        return Path(self.asked["folder"]) / str(os.getpid())

    def begin(self) -> None:
        from dlrm_core.base.errors import InputError
        from dlrm_workbook.recordings.torch.session import Detail, Lengths, begin

        try:
            lengths, detail = Lengths(**self.asked["lengths"]), Detail(**self.asked["detail"])
            self.session = begin(self.place, lengths, detail, self.doing)
            self.session.information["command"] = self.asked["command"]
        except InputError as error:
            self.refuse(error)
            self.end_program()

    def doing(self, what: str) -> None:
        """Leave word of what is done now."""
        self.state["doing"] = what
        self.tell()

    def close(self) -> None:
        from dlrm_core.base.errors import InputError

        assert self.session is not None
        self.over = True
        try:
            self.session.__exit__(None, None, None)
        except InputError as error:
            self.refuse(error)
        else:
            self.state = {"state": "recorded"}
            self.tell()

    def refuse(self, error: Exception) -> None:
        self.over = True
        self.state = {"state": "refused", "reason": str(error)}
        self.tell()

    def end_program(self) -> None:
        """End the program, gently at first: its own handlers and ``finally`` blocks run."""
        print("dlrm: what was asked for is recorded; the program is ended here", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        if self.state.get("ended"):
            os._exit(0)  # it caught SystemExit and trained on
        self.state["ended"] = True
        raise SystemExit(0)

    def print_times(self) -> None:
        """Print when each iteration began and ended, and the median of their lengths."""
        from dlrm_core.parts import ITERATION_SPAN

        self.over = True
        spans = [(ITERATION_SPAN, begin, end) for begin, end in itertools.pairwise(self.moments)]
        usual = statistics.median((end - begin) / 1e6 for _, begin, end in spans)
        if self.beside is not None:
            with contextlib.suppress(Exception):
                warmup = self.asked["lengths"]["warmup"]
                self.beside.write(self.place, self.moments[warmup:])
        result = {"ms_per_iteration": usual, "spans": spans, "process": os.getpid()}
        print(json.dumps(result), flush=True)
        self.state = {"state": "timed"}
        self.tell()

    def program_ends(self) -> None:
        """Keep what there is of a program that ends before everything was recorded."""
        if self.trials is not None:
            self.trials.close("the program ended")
        elif self.over:
            return
        elif self.session is not None:
            self.close()
        elif len(self.moments) > 1:
            self.print_times()
        else:
            self.state = {"state": "ended"}
            self.tell()

    def tell(self) -> None:
        """Write how things stand, for the process that started all this."""
        from dlrm_core.base.files import write_json
        from dlrm_workbook.recordings.torch.session import rank_of_process

        rank, world = rank_of_process()
        facts = {"pid": os.getpid(), "argv": sys.orig_argv, "rank": rank, "world": world}
        facts |= {"steps": self.steps} | self.state
        write_json(Path(self.asked["folder"]) / f"{os.getpid()}.json", facts)
