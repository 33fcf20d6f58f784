"""The one way to run a child process.

Every measurement runs in a fresh process: a program or a module of ours, in a process group of
its own, watched while it runs, within a time limit, its output kept. It ends with whoever
started it: at an exception, at Ctrl-C and SIGTERM, and (modules of ours) even at SIGKILL.

    done = run_child(python_module("dlrm_workbook", "train", "-f", file), stage="training")
    done.require_success("training")
    result = done.last_object("ms_per_iteration")

:func:`started` is the part below it, for who watches several children or talks to one.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn, Protocol

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import locked, plain, read_json, write_json
from dlrm_core.base.machine import STARTER, end_with_starter

POLL_S = 0.25
"""Seconds between two looks at a running child."""

GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL. hpcrun writes what it has on SIGTERM."""

INTERRUPTED_GRACE_S = 1.5
"""The same after Ctrl-C: somebody waits, and nobody will read what is written."""

LINGER_S = 2.0
"""Seconds that children may outlive a program that ended by itself."""

LINE_LIMIT = 1 << 20
"""Bytes of one line of output that are searched for progress."""

KEPT_OUTPUT = 64 << 20
"""Bytes of a child's output that are kept in memory, counted from its end."""
KEPT_BEGIN = KEPT_END = 16 << 20
"""Bytes that are kept of both ends of a longer log."""

_RAISED = re.compile(
    r"(\[rank\d+\]: ?)?([A-Za-z_.]*(Error|Exception|Interrupt)|Fatal Python error): \S"
)
"""The last line of a traceback that says something."""

Command = Sequence[str | os.PathLike[str]]


class MeasurementError(InputError):
    """A measurement could not be made; the message says which stage and why."""


@dataclass(frozen=True)
class Progress:
    """Where a child stands.

    Attributes:
        stage: what is running, such as ``times: hpcrun``, or what the child calls it.
        elapsed_s: seconds since the child began.
        iteration: the last iteration that the workload reported, or how many the child says
            are done of what this stage counts, or None.
        of: how many there will be, if the child says so.
        detail: what a long stage is busy with, such as the binary that hpcstruct reads.
    """

    stage: str
    elapsed_s: float
    iteration: int | None = None
    of: int | None = None
    detail: str = ""


ProgressCallback = Callable[[Progress], None]

LineReader = Callable[[bytes], str | None]
"""Gets a line of a child's output; returns what the child is busy with, if the line says so."""


class Say(Protocol):
    """Told what a long piece of work does, and how many of how many it has done."""

    def __call__(self, stage: str, done: int, of: int, detail: str = "") -> object: ...


def say_nothing(stage: str, done: int, of: int, detail: str = "") -> None:
    """Nobody watches."""


def print_stage(stage: str, done: int, of: int, detail: str = "") -> None:
    """Tell whoever watches this process, in a line of JSON, what it does and how far it is."""
    print(json.dumps({"stage": stage, "done": done, "of": of, "detail": detail}), flush=True)


@dataclass(frozen=True)
class Completed:
    """A child that has ended.

    Attributes:
        exit_code: as a shell reports it, 128 + N after signal N.
        seconds: wall-clock time.
        iteration: the last iteration that the workload reported.
        stdout, stderr: what it wrote, as text (the last 64 MiB).
        log: the file of its standard error; None where no logs were asked for.
    """

    command: tuple[str, ...]
    exit_code: int
    seconds: float
    timed_out: bool
    iteration: int | None
    stdout: str
    stderr: str
    log: Path | None

    def last_object(self, key: str = "") -> dict[str, Any] | None:
        """The last line of standard output that is a JSON object and has ``key``, or None."""
        for line in reversed(self.stdout.split("\n")):
            record = _json_object(line)
            if record is not None and (not key or key in record):
                return record
        return None

    def failure(self) -> str:
        """How it ended: ``failed with exit code 3``, or ``was ended by SIGSEGV``."""
        number = self.exit_code - 128
        if number in set(signal.Signals):
            return f"was ended by {signal.Signals(number).name} (exit code {self.exit_code})"
        return f"failed with exit code {self.exit_code}"

    def last_words(self) -> str:
        """The line of its standard error (or output) that says what went wrong, best guess.

        HPCToolkit names the fault in a line with FATAL and then refers to its manual; Python
        names an exception, and of a crash the place; torchrun prints pages after the error of the
        rank that failed. Progress is no fault. The class of our own errors is left out: their text
        is a sentence.
        """
        if crash := _CRASHED.search(self.stderr[-65_536:]):
            return "{} at {}:{}".format(*crash.groups())
        for text in (self.stderr, self.stdout):
            printable = "".join(c if c.isprintable() else "\n" for c in text[-8192:])
            lines = [line.strip() for line in printable.splitlines()]
            lines = [line for line in lines if any(c.isalnum() for c in line)]
            lines = [line for line in lines if not _PROGRESS.search(line)]
            fatal = [line for line in lines if "FATAL" in line or "fatal error" in line]
            raised = [line for line in lines if _RAISED.match(line)]
            if lines:
                return re.sub(r"^dlrm_\w+(\.\w+)+: ", "", (fatal or raised or lines)[-1])[:300]
        return "it wrote nothing"

    def see_log(self) -> str:
        """``; see FILE``, to end a sentence about a failure; nothing without a log."""
        return f"; see {self.log}" if self.log else ""

    def require_success(self, what: str) -> None:
        """Raise unless the child, ``what`` in the sentence (``the recorded run``), did its work: an
        InputError if it refuses its parameters (exit code 2), in its own words, a MeasurementError
        if its time was up, or it failed otherwise."""
        if self.timed_out:
            raise MeasurementError(
                f"{what} was still going after {self.seconds:.0f} s "
                "(profiling.timeout_s); measure fewer iterations or raise it"
            )
        if self.exit_code == 2:
            # the child's own sentence, without the name of its command
            refusal = re.split(r"(?:^|\n)dlrm [a-z-]+: ", self.stderr)[-1].strip()
            raise InputError(f"{what}: {refusal or self.last_words()}")
        if self.exit_code != 0:
            raise MeasurementError(f"{what} {self.failure()}: {self.last_words()}{self.see_log()}")


_CRASHED = re.compile(r'Python error: (.+)[^\0]*?\nCurrent thread.*\n +File "(.+)", line (\d+)')
"""What Python's faulthandler writes of the thread that a signal ends."""

_PROGRESS = re.compile(r"\d+%\||\d+(\.\d+)?(it|s)/(s|it)\b|^\{.*\}$|^USDT:")
"""Bars as tqdm draws them, lines of JSON, and what torch says when it profiles."""


def python_module(module: str, *arguments: str | os.PathLike[str]) -> list[str]:
    """The command that runs a module in a fresh interpreter of this installation."""
    return [sys.executable, "-m", module, *(os.fspath(word) for word in arguments)]


def run_job(
    module: str, job: Mapping[str, Any], *, stage: str, environment: Mapping[str, str] | None = None
) -> Any:
    """What a module of ours, whose main program is :func:`do_job`, makes of a job (JSON values). An
    InputError has what it said if it refuses the job, or fails."""
    with tempfile.TemporaryDirectory(prefix="dlrm-job-") as folder:
        given, result = Path(folder) / "job.json", Path(folder) / "result.json"
        write_json(given, job)
        done = run_child(python_module(module, given, result), stage=stage, environment=environment)
        done.require_success(stage)
        return read_json(result)


def do_job(work: Callable[[dict[str, Any]], Any]) -> NoReturn:
    """Do the job in the file that the command line names, and write the result to the other."""
    end_with_starter()
    given, result = map(Path, sys.argv[1:])
    try:
        write_json(result, plain(work(read_json(given))))
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    sys.exit()


def run_child(
    command: Command,
    *,
    stage: str,
    logs: Path | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | str | None = None,
    timeout_s: float | None = None,
    progress: ProgressCallback | None = None,
    on_line: LineReader | None = None,
) -> Completed:
    """Run a program to its end, with live progress, and keep what it printed.

    Args:
        stage: name for progress and messages; names the log files too.
        logs: folder for ``STAGE.out`` and ``STAGE.err``; None keeps no files.
        environment: the program's whole environment; None: this process's.
        timeout_s: seconds after which its process group is ended; None: no limit.
        on_line: gets each line of its standard output as it comes, in a thread of its own.

    Raises:
        MeasurementError: the program cannot be started, or its output cannot be kept.
    """
    timed_out = False
    with contextlib.ExitStack() as stack:
        keep = logs is not None
        if logs is None:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlrm-child-")))
        logs.mkdir(parents=True, exist_ok=True)
        stem = re.sub("[^A-Za-z0-9_.-]+", "-", stage)
        stdout, stderr = fresh_path(logs / f"{stem}.out"), fresh_path(logs / f"{stem}.err")
        # appended to, so that what is cut out of them leaves no hole
        out, err = (stack.enter_context(p.open("ab", buffering=0)) for p in (stdout, stderr))
        left_out = dict.fromkeys((stdout, stderr), 0)
        watch = _Watch(stage, on_line)
        with started(
            command,
            stage=stage,
            stdout=subprocess.PIPE,
            stderr=err,
            environment=environment,
            folder=folder,
        ) as process:
            watch.follow(process.stdout, out)
            while process.poll() is None:
                watch.wait(POLL_S)
                with contextlib.suppress(OSError):  # whoever writes to it says what is wrong
                    for file in left_out:
                        left_out[file] = _shortened(file, left_out[file])
                if progress is not None:
                    progress(watch.progress())
                if watch.log_error is not None:
                    break  # it would go on, and nobody could read what it says
                if timeout_s is not None and watch.progress().elapsed_s > timeout_s:
                    timed_out = True
                    break
        watch.join()
        if watch.log_error is not None:
            raise MeasurementError(
                f"{stage} was ended: its output cannot be kept in {stdout}: "
                f"{watch.log_error.strerror}"
            )
        code = process.returncode
        return Completed(
            command=tuple(os.fspath(word) for word in command),
            exit_code=code if code >= 0 else 128 - code,
            seconds=watch.progress().elapsed_s,
            timed_out=timed_out,
            iteration=watch.iteration,
            stdout=_tail(stdout),
            stderr=_tail(stderr),
            log=stderr if keep else None,
        )


@contextlib.contextmanager
def started(
    command: Command,
    *,
    stage: str,
    stdout: int | IO[Any],
    stderr: int | IO[Any],
    environment: Mapping[str, str] | None = None,
    folder: Path | str | None = None,
    grace_s: float | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in a process group of its own for as long as the block lasts.

    A fresh interpreter is asked to end with this process, whatever becomes of it
    (:func:`dlrm_core.base.machine.end_with_starter`). Other programs are not: between them and a
    module of ours may lie a process that is not its starter, such as hpcrun's script.

    Args:
        stdout, stderr: as subprocess takes them.
        grace_s: seconds between SIGTERM and SIGKILL where the block ends first; fewer after
            Ctrl-C.

    Raises:
        MeasurementError: the program cannot be started.
    """
    arguments = [os.fspath(word) for word in command]
    given = dict(os.environ if environment is None else environment)
    given.pop(STARTER, None)
    if arguments[0] == sys.executable:
        given[STARTER] = str(os.getpid())
    with sigterm_as_exit():
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=given,
                cwd=folder,
                start_new_session=True,
            )
        except OSError as error:
            raise MeasurementError(
                f"{stage}: {arguments[0]} cannot be started: {error.strerror}"
            ) from None
        grace_s = GRACE_S if grace_s is None else grace_s
        try:
            yield process
        except (KeyboardInterrupt, SystemExit):
            grace_s = min(grace_s, INTERRUPTED_GRACE_S)
            raise
        finally:
            try:
                # after a normal end this catches children that still hold the output
                end_group(process, grace_s)
            except (KeyboardInterrupt, SystemExit):
                # a second Ctrl-C ends the group at once instead of leaving it
                _signal_group(process.pid, signal.SIGKILL)
                process.wait()
                raise


def end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a process that leads its own group, and every process of that group.

    SIGTERM first, SIGKILL after ``grace_s`` seconds. Returns when the leader is
    reaped and no member is left running.
    """
    # children of a program that ended by itself may still be writing their profiles
    if process.poll() is not None and _group_ends(process, LINGER_S):
        return
    _signal_group(process.pid, signal.SIGTERM)
    if not _group_ends(process, grace_s):
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        _group_ends(process, LINGER_S)


def fresh_path(path: Path) -> Path:
    """``path``, absolute, or ``NAME-2``, ``NAME-3`` ... if that exists already.

    hpcrun adds to a directory that exists and hpcprof writes beside one, both without a word.
    """
    path = candidate = path.absolute()
    number = 1
    while candidate.exists() or candidate.is_symlink():
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate


class _Watch:
    """What is known of a running child; a thread reads its output, so that a silent program
    cannot hold up the clock."""

    def __init__(self, stage: str, on_line: LineReader | None = None) -> None:
        self.iteration: int | None = None
        self.log_error: OSError | None = None
        """Why the child's output could not be kept."""
        self._stage, self._on_line = stage, on_line
        self._latest = Progress(stage, 0.0)
        """As the child told it last, without the time."""
        self._begun = time.monotonic()
        self._news = threading.Event()
        self._reader: threading.Thread | None = None

    def follow(self, stream: IO[bytes] | None, log: IO[bytes]) -> None:
        """Begin to copy the child's output to its log, which has no buffer."""
        self._reader = threading.Thread(target=self._read, args=(stream, log), daemon=True)
        self._reader.start()

    def progress(self) -> Progress:
        return replace(self._latest, elapsed_s=time.monotonic() - self._begun)

    def wait(self, seconds: float) -> None:
        """Wait for news, or for the end of the output, at most ``seconds``."""
        if self._reader is None or not self._reader.is_alive():
            time.sleep(min(seconds, 0.05))  # the output has ended, the process is about to
        elif self._news.wait(seconds):
            self._news.clear()

    def join(self) -> None:
        if self._reader is not None:
            self._reader.join(timeout=2.0)

    def _read(self, stream: IO[bytes], log: IO[bytes]) -> None:
        try:
            with contextlib.suppress(ValueError, OSError), stream:  # closed by a forced end
                while line := stream.readline(LINE_LIMIT):
                    try:
                        log.write(line)
                    except OSError as error:
                        self.log_error = error
                        break
                    self.note(line)
        finally:
            self._news.set()

    def note(self, line: bytes) -> None:
        """Take in a line; a program may print anything."""
        if self._on_line is not None and (detail := self._on_line(line)):
            self._latest = replace(self._latest, detail=detail)
            self._news.set()
        elif b'"iteration"' in line or b'"stage"' in line:
            said = _json_object(line) or {}
            of = said.get("of") if isinstance(said.get("of"), int) else None
            if isinstance(said.get("iteration"), int):
                self.iteration = said["iteration"]
                self._latest = Progress(self._stage, 0.0, self.iteration, of)
            elif isinstance(said.get("stage"), str) and isinstance(said.get("done"), int):
                detail = str(said.get("detail", ""))
                self._latest = Progress(said["stage"], 0.0, said["done"], of, detail)
            else:
                return
            self._news.set()


def _json_object(line: str | bytes) -> dict[str, Any] | None:
    if line.lstrip()[:1] not in ("{", b"{"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _shortened(log: Path, left_out: int) -> int:
    """Keep no more than :data:`KEPT_OUTPUT` of a log that is being written: its begin and its end.
    Returns bytes that were left out in all, which a line between the two says; before:
    ``left_out``."""
    size = log.stat().st_size
    if size <= KEPT_OUTPUT:
        return left_out
    with log.open("r+b") as file:
        file.seek(size - KEPT_END)
        end = file.read(KEPT_END)
        left_out += size - KEPT_BEGIN - KEPT_END
        file.seek(KEPT_BEGIN)
        file.write(f"\n[dlrm: {left_out:,} bytes of output are left out here]\n".encode() + end)
        file.truncate()
    return left_out


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - KEPT_OUTPUT))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _group_ends(process: subprocess.Popen[bytes], within_s: float) -> bool:
    """Wait until the leader is reaped and no member lives; False when time is up."""
    deadline = time.monotonic() + within_s
    while process.poll() is None or _has_members(process.pid):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _has_members(group: int) -> bool:
    """Whether a process of a group lives. Zombies do not count: they only await their parent."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # "pid (name) state ppid pgrp ..."; the name may hold spaces and brackets
            state, _, process_group = stat.read_bytes().rpartition(b")")[2].split()[:3]
            if int(process_group) == group and state not in (b"Z", b"X"):
                return True
    return False


@contextlib.contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the measured processes end with us.

    Python's default is to die at once, which would leave the group running.
    """
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "1073741824"}
"""Environment of programs whose times are compared: glibc keeps freed memory (bytes). Its
adaptive thresholds settle elsewhere under hpcrun, and with them an unprofiled run looked 20 %
slower than a profiled one; fixed on both sides, the comparison is of like with like."""


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pause Python's cycle collector, which searches all objects again and again while many are
    made: parsing 50,000 events of a trace took 10x the time with it, torch's averages of 45,000
    recorded events 2.8x."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def only_process(folder: Path) -> contextlib.AbstractContextManager[None]:
    """No other process is in such a block for this folder; an InputError says that one is."""
    return locked(folder / ".lock", f"{folder} is being run by another process")
