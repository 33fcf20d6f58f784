"""Execution of a notebook's cells: a papermill engine that can be stopped cleanly.

papermill injects parameters and saves the notebook after every cell. Its own
engine leaves a cell that times out, a kernel that dies and Ctrl-C as exceptions
with the notebook half marked. Here one mechanism serves all three: the kernel is
interrupted, so the cell ends with a traceback that shows where it was (or ends in
its own way, keeping its results), and killed if it does not answer in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.channels import AsyncZMQSocketChannel
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat import NotebookNode
from nbformat.v4 import new_output
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines
from papermill.iorw import LocalHandler, papermill_io

from dlrm_core.base.files import write_text
from dlrm_workbook.ground.machine import REPOSITORY
from dlrm_workbook.runner.progress import ProgressLine

ENGINE = "dlrm"
GRACE_SECONDS = 20.0
"""How long a cell that took too long may take to end before its kernel is killed."""

USER_GRACE_SECONDS = 2.0
"""The same where the user waits for it, or a scheduler that kills soon."""

SAVING_SHARE = 0.05
LEAST_SAVING_SECONDS = 0.5
"""At most this share of a run writes the notebook, and never two writes closer than this."""


class _Channel(AsyncZMQSocketChannel):
    """Looks twice a second whether a message came that nobody was woken for.

    nbclient answers a widget while it waits for the cell's reply. That send takes the wake-up
    of a reply which came just then, and the run waited without end: 4 of 56 runs of a notebook
    with a choice by mouse, four at a time on two cores.
    """

    async def get_msg(self, timeout: float | None = None) -> dict[str, Any]:
        while timeout is None:
            with contextlib.suppress(queue.Empty):
                return await super().get_msg(0.5)
        return await super().get_msg(timeout)


class _KernelClient(AsyncKernelClient):
    shell_channel_class = _Channel


class ThisInterpreter(AsyncKernelManager):
    """Starts kernels with the interpreter that runs us.

    The kernel spec called python3 may be another one's: a spec in the user's home
    directory wins over the one of the virtual environment.

    On Linux a kernel is spoken to over sockets with names of its own. Over TCP the manager picks
    free ports and closes them again before the kernel opens them: of 50 runs started together,
    4 lost a port to another run in between, and one of these waited without end.
    """

    client_factory = _KernelClient

    def _transport_default(self) -> str:
        return "ipc" if sys.platform == "linux" else "tcp"

    def _ip_default(self) -> str:
        # a name that begins with @ is no file: nothing is left over, no path is too long
        return f"@dlrm-{uuid.uuid4().hex}" if self.transport == "ipc" else super()._ip_default()

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(
            argv=[
                sys.executable,
                *("-m", "ipykernel_launcher", "-f", "{connection_file}"),
                # it would warn on every start that loopback traffic, though signed, is plain
                "--log-level=ERROR",
            ],
            display_name="Python 3",
            language="python",
        )


class Watch:
    """Ends a cell that must not go on: too slow, or the user wants to stop.

    Attributes:
        signum: the signal that asked for the end of the run, or None.
        timed_out: whether a cell ran longer than ``cell_timeout``.
        failed: index of the cell that failed, in the executed notebook, or None.
    """

    def __init__(self, cell_timeout: float | None = None) -> None:
        self.cell_timeout = cell_timeout
        self.signum: int | None = None
        self.timed_out = False
        self.failed: int | None = None
        self._client: _Client | None = None
        self._ready = False
        self._in_cell = False
        self._listens = False
        self._timers: list[threading.Timer] = []

    @property
    def stopping(self) -> bool:
        return self.signum is not None or self.timed_out or self.failed is not None

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """While the block runs, Ctrl-C, SIGTERM and SIGHUP end the run in an orderly way."""
        before: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # what is ignored stays ignored: nohup sets SIGHUP so
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    before[signum] = signal.signal(signum, self._on_signal)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    @contextlib.contextmanager
    def client(self, client: _Client) -> Iterator[None]:
        """While the block runs, signals are for this client's kernel."""
        self._client = client
        try:
            yield
        finally:
            self._client = None

    @contextlib.contextmanager
    def cell(self) -> Iterator[None]:
        """While the block runs, a cell is executing and its clock ticks."""
        self._in_cell = True
        if self.cell_timeout:
            self._after(self.cell_timeout, self._expired)
        try:
            yield
        finally:
            self._in_cell = self._listens = False
            for timer in self._timers:
                timer.cancel()
            self._timers.clear()

    def _on_signal(self, signum: int, _frame: Any) -> None:
        again = self.signum is not None
        self.signum = self.signum or signum
        if self._client is None:
            raise KeyboardInterrupt
        self._client.shutdown_kernel = "immediate"
        if again or not self._ready:
            self._signal_kernel(signal.SIGKILL)
        elif self._in_cell:
            self._stop_cell(USER_GRACE_SECONDS)

    def _expired(self) -> None:
        self.timed_out = True
        self._stop_cell(GRACE_SECONDS)

    def ready(self) -> None:
        """Note that the kernel has started: one that has not is not waited for."""
        self._ready = True

    def executing(self) -> None:
        """Note that the kernel executes the cell; it takes no notice of an interrupt before."""
        self._listens = True
        if self.stopping:
            self._signal_kernel(signal.SIGINT)

    def _stop_cell(self, grace_s: float) -> None:
        if self._listens:
            self._signal_kernel(signal.SIGINT)
        self._after(grace_s, lambda: self._signal_kernel(signal.SIGKILL))

    def _after(self, seconds: float, action: Any) -> None:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _signal_kernel(self, signum: int) -> None:
        # the kernel leads a process group of its own (so a terminal's Ctrl-C does not
        # reach it); measured runs that a cell started are in that group too
        provisioner = getattr(getattr(self._client, "km", None), "provisioner", None)
        group = getattr(provisioner, "pgid", None)
        if group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signum)


class _Client(PapermillNotebookClient):
    """papermill's client with our kernel, our watch and our line of progress."""

    kernel_manager_class = ThisInterpreter

    def __init__(
        self, nb_man: Any, *, watch: Watch, progress: ProgressLine, saves: Saves, **settings: Any
    ) -> None:
        super().__init__(nb_man, **settings)
        self.watch, self.progress, self.saves = watch, progress, saves

    def execute(self, **settings: Any) -> NotebookNode:
        """Run the cells until the last, or until one fails or the watch says stop."""
        self.reset_execution_trackers()
        with (
            self.progress.ticking(),
            self.watch.client(self),
            self.setup_kernel(env=kernel_environment() | self.progress.environment, **settings),
        ):
            try:
                self.papermill_execute_cells()
                # every cell has ended, and wrote what it writes: a kernel that has loaded torch
                # takes more than a second to end by itself
                self.shutdown_kernel = "immediate"
            finally:
                # the last state of progress bars belongs to a partial notebook too
                self.set_widgets_metadata()
        return self.nb

    def papermill_execute_cells(self) -> None:
        self.watch.ready()
        for index, cell in enumerate(self.nb.cells):
            if self.watch.stopping:
                break
            # a paragraph is under the heading before it
            if cell.cell_type == "markdown" and (found := heading(cell.source)):
                self.progress.section(found)
            self._run_cell(index, cell)

    def _run_cell(self, index: int, cell: NotebookNode) -> None:
        self.nb_man.cell_start(cell, index)
        try:
            with self.watch.cell():
                if not self.watch.stopping:  # a signal may have come since the last look
                    self.execute_cell(cell, index)
        except (CellExecutionError, DeadKernelError) as error:
            self.watch.failed = index
            if isinstance(error, DeadKernelError):
                died = new_output("error", ename="KernelDied", evalue=DIED, traceback=[DIED])
                cell.outputs.append(died)
            self.nb_man.cell_exception(cell, cell_index=index, exception=error)
        finally:
            self.nb_man.cell_complete(cell, cell_index=index)

    def process_message(self, msg: Any, cell: NotebookNode, cell_index: int) -> Any:
        """Handle a message of the kernel, and write what is still to be written."""
        if msg["msg_type"] == "execute_input":
            self.watch.executing()
        self.saves.catch_up(asyncio.get_running_loop())
        return super().process_message(msg, cell, cell_index)


DIED = "The kernel died: it was killed, ran out of memory, or crashed in native code."


class Saves:
    """Writes the notebook as cells begin and end, but not all the time.

    papermill writes it whole, twice a cell: in a page of ninety quick cells that took
    longer than the cells. Here at most ``SAVING_SHARE`` of the time goes into writing, so
    what a killed run can lack is what its cells did in the last second or so.
    """

    def __init__(self, whole: Callable[[], None]) -> None:
        self.whole = whole
        self._due = 0.0
        self._owed = False
        self._waiting = False

    def __call__(self, **_unused: Any) -> None:
        """Write, unless that was done a moment ago; then :meth:`catch_up` does it."""
        begun = time.monotonic()
        self._owed = begun < self._due
        if self._owed:
            return
        self.whole()
        took = time.monotonic() - begun
        self._due = begun + max(took / SAVING_SHARE, LEAST_SAVING_SECONDS)

    def catch_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """See to it that a write that was put off is made while a long cell runs."""
        if self._owed and not self._waiting:
            self._waiting = True
            loop.call_later(max(self._due - time.monotonic(), 0.0), self._catch_up)

    def _catch_up(self) -> None:
        self._waiting = False
        if self._owed:
            self()


class StoppableEngine(Engine):
    @classmethod
    def execute_managed_notebook(
        cls, nb_man: Any, kernel_name: str, *, watch: Watch, progress: ProgressLine, **_unused: Any
    ) -> NotebookNode:
        """Execute ``nb_man.nb``; what went wrong is left in ``watch``."""
        nb_man.save = save = Saves(nb_man.save)
        client = _Client(
            nb_man,
            watch=watch,
            progress=progress,
            saves=save,
            kernel_name=kernel_name,
            startup_timeout=120,
            timeout=None,
        )
        try:
            return client.execute()
        finally:
            # papermill's last save, and any of ours that is still due, is a whole one
            nb_man.save = save.whole


class WholeFiles(LocalHandler):
    """papermill's files, of which each is written whole: a kill or a full disk leaves the last.

    A notebook's lines are not indented, which would be a fifth of a large recording's notebook.
    """

    def write(self, buf: str, path: str) -> None:
        """Replace a file.

        Raises:
            InputError: it cannot be written.
        """
        # no string in JSON goes over the end of a line
        write_text(Path(path), re.sub(r"^ +", "", buf, flags=re.MULTILINE))


papermill_engines.register(ENGINE, StoppableEngine)
papermill_io.register(os.sep, WholeFiles())  # of all absolute paths


def kernel_environment() -> dict[str, str]:
    """Environment of a kernel: ours, with this package importable and small figures.

    ``plotly_mimetype`` stores a figure as data. Other renderers put 4.8 MB of
    plotly.js into every notebook, or a reference to a CDN.
    """
    path = os.environ.get("PYTHONPATH")
    return os.environ | {
        "PYTHONPATH": str(REPOSITORY) + (os.pathsep + path if path else ""),
        "PLOTLY_RENDERER": "plotly_mimetype",
    }


def heading(markdown: str) -> str:
    """First heading of a markdown cell; empty where it has none."""
    lines = (line.strip() for line in markdown.splitlines())
    return next((line.lstrip("#").strip() for line in lines if line.startswith("#")), "")
