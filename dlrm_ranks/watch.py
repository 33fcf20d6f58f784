"""Finds dead, stopped and stuck ranks by their signs of life, and ends the run.

Every rank's watch thread tells the launcher's store once in a while which iteration it is in,
how many collectives it has begun and whether it waits in one, and reads what the others tell.
A rank is lost

* when its process is gone (seen at once from the same host), or it said that it failed;
* when it has told nothing for ``limit_s``: gone with its host, or stopped;
* when others have waited for ``limit_s`` and it has not waited itself: stuck.

The survivors then end too: the first of them says in one sentence which rank it was. A lost
rank of the same host that is still there (stopped, stuck) is killed: nothing stays behind.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import write_json
from dlrm_core.config import TrainingConfig
from dlrm_ranks.collectives import Collectives
from dlrm_ranks.world import World, joined, launcher_store

_STORE_S = 5.0
"""Seconds that the launcher's store has to answer."""

_REFUSAL_S = 1.0
"""Seconds that a rank which says why the run is refused has for it: the launcher ends that
rank when another one is gone."""

EXIT_LOST = 3
"""Exit status of a rank that ended because another one was lost."""

KEY = "dlrm/watch/{rank}"
"""Key of a rank's sign of life in the launcher's store."""

_PARTING_S = 0.5
"""Seconds between the first survivor's sentence and the end of the others."""


@contextlib.contextmanager
def said_once(refused: int, interrupted: int, command: str = "dlrm train") -> Iterator[None]:
    """End this rank if the block refuses; the first rank that comes to a refusal says it.

    Interrupted, rank 0 says so: by Ctrl-C all are, or by the launcher after another's end.

    Args:
        refused: exit status of a rank that ends so.
        interrupted: the same.
        command: what the rank is part of.
    """
    try:
        yield
    except InputError as error:
        tell_launcher(str(error))
        if first_to_say(str(error)):
            print(f"{command}: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(_REFUSAL_S)
        leave(refused)
    except KeyboardInterrupt:
        if os.environ.get("RANK") == "0":
            print(f"{command}: interrupted", file=sys.stderr, flush=True)
        leave(interrupted)


@contextlib.contextmanager
def watched_ranks(
    config: TrainingConfig, command: str
) -> Iterator[tuple[World, Collectives, Watch]]:
    """Meet the other ranks, and watch over them until the block ends.

    Raises:
        InputError: as :func:`dlrm_ranks.world.joined`.
    """
    collectives = Collectives()
    with (
        joined(config) as world,
        collectives.installed(),
        Watch(world, collectives, config.rank_timeout_s, command) as watch,
    ):
        yield world, collectives, watch


def leave(status: int) -> NoReturn:
    """End this rank's process, all written, without taking the interpreter apart.

    Threads of gloo and of the store may still be in C++ on their way back to Python; one that
    gets there after the interpreter is gone aborts the process (seen once in 60 ranks).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def first_to_say(sentence: str) -> bool:
    """Whether no other rank has asked this for the same sentence; True where none can be asked."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True  # the store would be rank 0's, and is not there yet
    digest = hashlib.sha256(sentence.encode()).hexdigest()[:16]
    try:
        return bool(launcher_store(_STORE_S).add(f"dlrm/said/{digest}", 1) == 1)
    except RuntimeError:
        return True


def tell_launcher(sentence: str) -> None:
    """Put a sentence where torchrun's report of a failed rank shows a traceback.

    The format is that of ``torch.distributed.elastic.multiprocessing.errors.ErrorHandler``;
    other launchers name no file for it, and nothing happens.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError, InputError):
        write_json(Path(path), {"message": {"message": sentence, "extraInfo": extra}})


@dataclass
class Sign:
    """What a rank told last, and when that changed (this rank's clock)."""

    told: dict[str, Any] = field(default_factory=dict)
    new_at: float = 0.0
    progress: int = -1
    progress_at: float = 0.0


@dataclass(frozen=True)
class Lost:
    """A rank that is no longer with us, what it told last, and how it was lost.

    Attributes:
        speaks: whether it has said itself what is wrong, and is about to end.
    """

    rank: int
    told: dict[str, Any]
    how: str
    speaks: bool = False

    def sentence(self) -> str:
        """All of it, for a person."""
        host, pid, iteration = (self.told[name] for name in ("host", "pid", "iteration"))
        return (
            f"rank {self.rank} (host {host}{f', process {pid}' * (pid > 0)}) {self.how}; its last "
            f"iteration was {iteration:,}: the run ends, checkpoints already written stay"
        )


def judge(
    signs: dict[int, Sign],
    now: float,
    limit_s: float,
    process_state: Callable[[dict[str, Any]], str],
    patience_s: float = math.inf,
) -> Lost | None:
    """Which rank is lost, if one is.

    Args:
        signs: of all ranks, one's own among them.
        process_state: of a rank's process as far as one can see from here: '' (it is
            elsewhere), 'gone', or the kernel's letter, 'T' for stopped.
        patience_s: after which silence a rank is lost once an exchange of this one has failed.
    """
    for rank, sign in signs.items():
        told = sign.told
        if told.get("state") == "done":
            continue
        if told.get("state") in ("failed", "refused"):
            return Lost(rank, told, f"failed: {told['message']}", told["state"] == "refused")
        seen = process_state(told)
        if seen == "gone":
            return Lost(rank, told, "is gone: it was killed or crashed")
        silent = now - sign.new_at
        if silent > min(limit_s, patience_s):
            stopped = " and is stopped (SIGSTOP)" if seen == "T" else ""
            limit = f"training.rank_timeout_s: {limit_s:g}"
            why = limit if silent > limit_s else "an exchange failed meanwhile"
            return Lost(
                rank, told, f"has given no sign of life for {silent:.0f} s{stopped} ({why})"
            )
    active = {r: s for r, s in signs.items() if s.told.get("state") == "running"}
    waiting = [s for s in active.values() if s.told["waiting"]]
    if not waiting or any(now - s.progress_at <= limit_s for s in active.values()):
        return None
    # all are without progress: it is who is not waiting, or who is behind
    slow = {r: s for r, s in active.items() if not s.told["waiting"]} or active
    rank = min(slow, key=lambda r: (slow[r].progress, r))
    kept = now - max(s.progress_at for s in active.values())
    return Lost(
        rank,
        slow[rank].told,
        f"has kept the others waiting for {kept:.0f} s (training.rank_timeout_s: {limit_s:g})",
    )


def process_state(pid: int, started: str) -> str:
    """'gone', or the kernel's letter for a process of this host that began at a time of its own."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"
    fields = text.rpartition(")")[2].split()
    return "gone" if fields[0] in "ZX" or fields[19] != started else fields[0]


def own_start() -> str:
    """When this process began, as the kernel counts: a number that no later process has."""
    return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]


class Watch:
    """This rank's signs of life, and its eye on the others'.

    Args:
        limit_s: ``training.rank_timeout_s``.
        command: what the rank is part of.

    Attributes:
        iteration: iterations done; the training loop counts them here.
    """

    def __init__(
        self, world: World, collectives: Collectives, limit_s: float, command: str = "dlrm train"
    ) -> None:
        self.iteration = 0
        self._command = command
        self._world = world
        self._collectives = collectives
        self._limit_s = limit_s
        self._period_s = min(1.0, limit_s / 10)
        self._state, self._message = "running", ""
        self._begun = own_start()
        self._signs = {rank: Sign() for rank in range(world.size)}
        self._unanswered, self._patience_s = 0, math.inf
        self._over = threading.Event()
        # a client of its own: the process group's may be busy with a collective
        self._store = launcher_store()
        self._thread = threading.Thread(target=self._run, name="dlrm-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._tell()
        everyone = [KEY.format(rank=rank) for rank in self._signs]
        self._store.wait(everyone, datetime.timedelta(seconds=2 * self._limit_s + 30))
        self._thread.start()
        threading.Thread(target=self._guard, name="dlrm-guard", daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._state = "done"
        elif isinstance(error, KeyboardInterrupt):
            self._state, self._message = "failed", "it was interrupted"
        else:
            # if another rank is the cause, this does not return
            self._explained(error)
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            refused = isinstance(error, InputError)
            self._state, self._message = "refused" if refused else "failed", first_line
        self._over.set()
        self._thread.join(timeout=2.0)
        with contextlib.suppress(RuntimeError):
            self._tell()

    def _explained(self, error: BaseException) -> None:
        """Leave the watch time to find out whether an exchange failed because of another rank."""
        if isinstance(error, RuntimeError):  # gloo's and NCCL's, and torch's wrappers of them
            if threading.current_thread() is threading.main_thread():
                # torchrun wants us to end because of the other: that takes a moment
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
            self._patience_s = min(self._limit_s, 4 * self._period_s)  # a host may be gone
            self._thread.join(timeout=min(self._limit_s, 7.0))

    def _run(self) -> None:
        while not self._over.wait(self._period_s):
            try:
                self._tell()
                lost = self._look()
            except RuntimeError:
                continue  # the guard counts these
            if lost is not None and not self._over.is_set():
                self._end(lost)

    def _guard(self) -> None:
        """End this rank when the store answers no more: a cut link leaves a call without an end.
        Its own wakings are counted, of which a process that stood still has none."""
        while not self._over.wait(self._period_s):
            self._unanswered += 1
            if self._unanswered * self._period_s > self._limit_s:
                told = {"host": os.environ["MASTER_ADDR"], "pid": 0, "iteration": self.iteration}
                since = f"the launcher's store has not answered for {self._limit_s:g} s"
                self._end(Lost(0, told, f"cannot be asked: {since}"))

    def _tell(self) -> None:
        collectives = self._collectives
        self._store.set(
            KEY.format(rank=self._world.rank),
            json.dumps(
                {
                    "host": self._world.host,
                    "pid": os.getpid(),
                    "begun": self._begun,
                    "iteration": self.iteration,
                    "progress": collectives.calls,
                    "waiting": collectives.waiting,
                    "state": self._state,
                    "message": self._message,
                    "at": time.monotonic(),
                }
            ),
        )

    def _look(self) -> Lost | None:
        texts = self._store.multi_get([KEY.format(rank=rank) for rank in self._signs])
        now, self._unanswered = time.monotonic(), 0
        for sign, text in zip(self._signs.values(), texts, strict=True):
            told = json.loads(text)
            if told != sign.told:
                sign.new_at = now
            if told["progress"] != sign.progress:
                sign.progress, sign.progress_at = told["progress"], now
            sign.told = told
        return judge(self._signs, now, self._limit_s, self._seen_from_here, self._patience_s)

    def _seen_from_here(self, told: dict[str, Any]) -> str:
        if told["host"] != self._world.host:
            return ""
        return process_state(told["pid"], told["begun"])

    def _end(self, lost: Lost) -> None:
        """Say who is lost, end it if it is here and hangs, and end this rank."""
        tell_launcher(lost.sentence())
        survivors = [rank for rank in self._signs if rank != lost.rank]
        pid, here = lost.told["pid"], lost.told["host"] == self._world.host
        if lost.speaks:
            time.sleep(_PARTING_S)
        elif self._world.rank == min(survivors, default=0) or not (pid or self._world.local_rank):
            print(f"{self._command}: {lost.sentence()}", file=sys.stderr, flush=True)
            if here and pid and self._seen_from_here(self._signs[lost.rank].told) != "gone":
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        else:
            # if it is this one, the others are to find it as it is
            time.sleep(_PARTING_S if lost.rank != self._world.rank else 2 * self._period_s + 1.0)
        sys.stdout.flush()
        os._exit(EXIT_LOST)
