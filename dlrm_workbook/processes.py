"""Processes that must not outlive the one that started them, even where that is killed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from dlrm_core.errors import InputError

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


# Runs one stage of a measurement: a program in its own process group, watched.

POLL_S = 0.25
"""Seconds between two looks at a running stage."""

GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL. hpcrun writes what it has on SIGTERM."""

LINGER_S = 2.0
"""Seconds that children may outlive a program that ended by itself."""

LINE_LIMIT = 1 << 20
"""Bytes of one line of a program's output that are looked at in one piece."""

# hpcstruct: " begin parallel analysis of CPU binary NAME (size = ...)"
_BINARY = re.compile(rb"^\s*begin .* binary (\S+)")

ProgressCallback = Callable[["Progress"], None]


class MeasurementError(InputError):
    """A measurement could not be made; the message says which stage and why."""


@dataclass(frozen=True)
class Progress:
    """Where a measurement stands.

    Attributes:
        stage: what is running, such as ``times: hpcrun``.
        elapsed_s: seconds since the stage began.
        iteration: the last iteration that the workload reported, or None.
        detail: what a long stage is busy with, such as the binary that hpcstruct reads.
    """

    stage: str
    elapsed_s: float
    iteration: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class Completed:
    """A stage that has ended.

    Attributes:
        command: the argument list that ran.
        exit_code: as a shell reports it, 128 + N after signal N.
        seconds: wall-clock time.
        timed_out: it was ended because its time was up.
        result: the workload's last JSON object that has ``ms_per_iteration``.
        iteration: the last iteration that the workload reported.
        stdout: log file of its standard output.
        stderr: log file of its standard error.
    """

    command: tuple[str, ...]
    exit_code: int
    seconds: float
    timed_out: bool
    result: dict[str, Any] | None
    iteration: int | None
    stdout: Path
    stderr: Path

    def stderr_text(self, limit: int = 1 << 20) -> str:
        """The end of its standard error, ``limit`` bytes of it."""
        return _tail(self.stderr, limit)

    def output_text(self, limit: int = 1 << 20) -> str:
        """Standard output and standard error, the last ``limit`` bytes of each."""
        return _tail(self.stdout, limit) + self.stderr_text(limit)

    def last_words(self) -> str:
        """The line of its standard error (or output) that says what went wrong, best guess.

        HPCToolkit names the fault in a line with FATAL and then refers to its manual.
        """
        for path in (self.stderr, self.stdout):
            text = "".join(c if c.isprintable() else "\n" for c in _tail(path, 8192))
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            if lines:
                fatal = [line for line in lines if "FATAL" in line or "fatal error" in line]
                return (fatal or lines)[-1][:300]
        return "it wrote nothing"


def run_stage(
    command: Sequence[str | os.PathLike[str]],
    *,
    stage: str,
    logs: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    progress: ProgressCallback | None = None,
) -> Completed:
    """Run a program to its end, with live progress, and keep what it printed.

    Args:
        command: argument list; no shell is involved.
        stage: name for progress and messages; names the log files too.
        logs: folder for ``STAGE.out`` and ``STAGE.err``.
        environment: the program's whole environment.
        timeout_s: seconds after which its process group is ended.
        progress: called a few times a second and at each reported iteration.

    Raises:
        MeasurementError: the program cannot be started.
    """
    arguments = tuple(os.fspath(word) for word in command)
    logs.mkdir(parents=True, exist_ok=True)
    stem = stage.replace(": ", "-").replace(" ", "-")
    stdout, stderr = fresh_path(logs / f"{stem}.out"), fresh_path(logs / f"{stem}.err")
    watch = _Watch(stage, progress)
    timed_out = False
    with _sigterm_as_exit(), stdout.open("wb") as out, stderr.open("wb") as err:
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=err,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            raise MeasurementError(
                f"{stage}: {arguments[0]} cannot be started: {error.strerror}"
            ) from None
        # a thread reads, so that a silent program cannot hold up the clock
        reader = threading.Thread(target=watch.read, args=(process.stdout, out), daemon=True)
        try:
            reader.start()
            while process.poll() is None:
                watch.look()
                if watch.elapsed_s > timeout_s:
                    timed_out = True
                    break
        finally:
            # after a normal end this catches children that still hold the output
            with _no_second_interrupt(process):
                end_group(process)
            reader.join(timeout=2.0)
            watch.drain()
    code = process.returncode
    return Completed(
        command=arguments,
        exit_code=code if code >= 0 else 128 - code,
        seconds=watch.elapsed_s,
        timed_out=timed_out,
        result=watch.result,
        iteration=watch.iteration,
        stdout=stdout,
        stderr=stderr,
    )


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads its own group, and every process of that group.

    SIGTERM first, SIGKILL after ``GRACE_S`` seconds. Returns when the leader is
    reaped and no member is left running.
    """
    # children of a program that ended by itself may still be writing their profiles
    if process.poll() is not None and _group_ends(process, LINGER_S):
        return
    _signal_group(process.pid, signal.SIGTERM)
    if not _group_ends(process, GRACE_S):
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()


def fresh_path(path: Path) -> Path:
    """``path``, absolute, or ``NAME-2``, ``NAME-3`` ... if that exists already.

    hpcrun adds to a directory that exists and hpcprof writes beside one, both
    without a word: only a path that does not exist yet is safe.
    """
    path = path.absolute()
    number = 2
    candidate = path
    while candidate.exists() or candidate.is_symlink():
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
        number += 1
    return candidate


class _Watch:
    """What is known of a running stage: time, lines, iterations, result."""

    def __init__(self, stage: str, progress: ProgressCallback | None) -> None:
        self.stage = stage
        self.iteration: int | None = None
        self.result: dict[str, Any] | None = None
        self.detail = ""
        self._progress = progress
        self._started = time.monotonic()
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def read(self, stream: Any, log: Any) -> None:
        """Copy the program's output to its log; keep the lines that may be news."""
        with contextlib.suppress(ValueError, OSError):  # the log closes after a forced end
            while line := stream.readline(LINE_LIMIT):
                log.write(line)
                log.flush()
                if line.lstrip().startswith((b"{", b"begin ")):
                    self._lines.put(line)

    def look(self) -> None:
        """Wait a moment for news, then tell the caller."""
        with contextlib.suppress(queue.Empty):
            self._note(self._lines.get(timeout=POLL_S))
            self.drain()
        if self._progress is not None:
            self._progress(Progress(self.stage, self.elapsed_s, self.iteration, self.detail))

    def drain(self) -> None:
        """Take in the lines read so far."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._note(self._lines.get_nowait())

    def _note(self, line: bytes) -> None:
        if match := _BINARY.search(line):
            self.detail = match.group(1).decode("utf-8", "replace")
            return
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return  # a program may print anything
        if not isinstance(record, dict):
            return
        if isinstance(iteration := record.get("iteration"), int):
            self.iteration = iteration
        if isinstance(record.get("ms_per_iteration"), int | float):
            self.result = record


def _tail(path: Path, limit: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _group_ends(process: subprocess.Popen[bytes], within_s: float) -> bool:
    """Wait until the leader is reaped and no member lives; False when time is up."""
    deadline = time.monotonic() + within_s
    while process.poll() is None or _members(process.pid):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _members(group: int) -> list[int]:
    """Living processes of a group. Zombies do not count: they only await their parent."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "pid (name) state ppid pgrp ..."; the name may hold spaces and brackets
            fields = stat.read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[2]) == group and fields[0] not in (b"Z", b"X"):
            members.append(int(stat.parent.name))
    return members


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the measured processes end with us.

    Python's default is to die at once, which would leave the group running.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _no_second_interrupt(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A second Ctrl-C while ending a group kills it at once instead of leaving it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        raise


# The C library's allocator in a measuring process, brought to the state of a long plain run.

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""malloc.h"""

LARGEST_DYNAMIC = 32 << 20
"""Bytes up to which glibc raises its own threshold on 64-bit systems (malloc(3))."""

USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def settle_allocator() -> bool:
    """Fix glibc's thresholds where a long plain run would have them, for this process.

    Returns:
        Whether that was done: not with another C library, nor against settings that
        the environment makes.
    """
    if sys.platform != "linux" or any(name in os.environ for name in USER_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    kept = mallopt(M_MMAP_THRESHOLD, LARGEST_DYNAMIC)
    return bool(kept and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
