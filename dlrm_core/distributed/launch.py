"""Starts ranks on this node, watches over them, and says how others would start them.

The launcher keeps the store in which the ranks meet, so a rank that dies takes nothing with
it, and it is the ranks' parent, so it knows how each of them ended.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_core.distributed.packages import require_torchrec
from dlrm_core.distributed.watch import EXIT_LOST, KEY
from dlrm_core.distributed.world import environment

GRACE_S = 5.0
"""For the other ranks to end by themselves once one has failed."""

_POLL_S = 0.05


class RanksFailed(RuntimeError):
    """A rank failed, or the time was over; names the rank, how it ended, and what it said."""


@dataclass(frozen=True)
class Outcome:
    """What rank 0 printed, and how long all took."""

    output: str
    errors: str
    seconds: float


def run_ranks(
    command: Sequence[str | Path],
    ranks: int,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
    on_iteration: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Run a command as several ranks of this node and wait for all.

    Args:
        command: program and arguments, the same for all; the environment tells them apart.
        timeout_s: after which all are ended.
        variables: of the environment, beside those of a rank.
        on_iteration: gets what the watch of rank 0 counts, when it has changed.

    Raises:
        RanksFailed: a rank failed or the time was over; none is left running.
        MissingToolError: TorchRec is not installed.
    """
    require_torchrec()
    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=5),
    )
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="dlrm-ranks-") as folder,
        contextlib.ExitStack() as stack,
    ):
        logs = Path(folder)
        processes: list[subprocess.Popen[bytes]] = []
        # whatever happens, also to us: no rank stays behind
        stack.callback(_end_all, processes)
        for rank in range(ranks):
            processes.append(
                subprocess.Popen(
                    [str(word) for word in command],
                    env={**os.environ, **(variables or {}), **environment(rank, ranks, store.port)},
                    stdin=subprocess.DEVNULL,
                    stdout=stack.enter_context((logs / f"{rank}.out").open("wb")),
                    stderr=stack.enter_context((logs / f"{rank}.err").open("wb")),
                )
            )
        look = _Changes(lambda: _iterations(store, 1)[0], on_iteration)
        failed = _wait(processes, started + timeout_s, look)
        if failed is not None:
            lasts = _iterations(store, ranks)
            raise RanksFailed(_report(failed, processes, logs, lasts, timeout_s))
        return Outcome(
            (logs / "0.out").read_text(errors="replace"),
            (logs / "0.err").read_text(errors="replace"),
            time.monotonic() - started,
        )


class _Changes:
    """Tells when something that is asked once a second has changed."""

    def __init__(self, ask: Callable[[], int | None], tell: Callable[[int], None]) -> None:
        self._ask, self._tell = ask, tell
        self._last: int | None = None
        self._at = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._at < 1.0:
            return
        self._at, now = time.monotonic(), self._ask()
        if now is not None and now != self._last:
            self._last = now
            self._tell(now)


def _wait(
    processes: list[subprocess.Popen[bytes]], until: float, look: Callable[[], None]
) -> int | None:
    """Wait for all; the rank that failed first, -1 if the time was over, None if none did."""
    first: int | None = None
    grace_until = until
    while True:
        codes = [process.poll() for process in processes]
        if first is None:
            # who was ended by a signal is the cause; who gave up because of it has a status
            bad = [rank for rank, code in enumerate(codes) if code]
            killed = [rank for rank in bad if (codes[rank] or 0) < 0]
            if bad:
                first = (killed or bad)[0]
                grace_until = min(until, time.monotonic() + GRACE_S)
        elif codes[first] == EXIT_LOST:
            # it only tells of another one; that may have ended since
            others = [r for r, code in enumerate(codes) if code and code != EXIT_LOST]
            first = others[0] if others else first
        if all(code is not None for code in codes):
            return first
        if time.monotonic() > grace_until:
            return -1 if first is None else first
        look()
        time.sleep(_POLL_S)


def _end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()


def _iterations(store: Any, ranks: int) -> list[int | None]:
    """The last iteration that each rank told the store."""
    found: list[int | None] = []
    for rank in range(ranks):
        key = KEY.format(rank=rank)
        told = json.loads(store.get(key)) if store.check([key]) else {}
        found.append(told.get("iteration"))
    return found


def _report(
    failed: int,
    processes: list[subprocess.Popen[bytes]],
    logs: Path,
    iterations: list[int | None],
    timeout_s: float,
) -> str:
    said = []
    for rank in range(len(processes)):
        lines = (logs / f"{rank}.err").read_text(errors="replace").strip().splitlines()
        if lines and (rank == failed or lines[-1].startswith("dlrm")):
            said.append(f"rank {rank} said: {lines[-1]}")
    behind = "; ".join(said) or "none said anything"
    if failed < 0:
        return f"the ranks were not done after {timeout_s:g} s and were ended; {behind}"
    code = processes[failed].poll()
    last = iterations[failed]
    where = "before its first iteration" if not last else f"after iteration {last:,}"
    return (
        f"rank {failed} of {len(processes)} (host {socket.gethostname()}, process "
        f"{processes[failed].pid}) {how_it_ended(code)} {where}; {behind}"
    )


def how_it_ended(code: int | None) -> str:
    """An exit status in words: 'was ended by SIGKILL', 'exited with 1'."""
    if code is None:
        return "did not end and was killed"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"
    return f"exited with {code}"


def python_command(module: str, *arguments: str | Path) -> list[str | Path]:
    """This Python, running a module."""
    return [sys.executable, "-m", module, *arguments]


def launch_lines(
    file: str, parameters: Sequence[str], ranks: int, nodes: int, minutes: int = 60
) -> dict[str, str]:
    """What one types to train with the same parameters on one node, on several, under Slurm.

    Args:
        file: the parameters file.
        parameters: ``section.leaf=value`` each.
        ranks: on a node.

    Returns:
        ``one_node``, ``each_node`` (run on every node, FIRST_NODE is the first one's name)
        and ``slurm`` (a batch script).
    """
    given = " ".join(f"-p {shlex.quote(value)}" for value in parameters)
    what = f"-m dlrm_core train -f {shlex.quote(file)} {given}".strip()
    meet = f"--nnodes {nodes} --nproc-per-node {ranks} --rdzv-backend c10d"
    slurm = "\n".join(
        [
            "#!/bin/bash",
            "#SBATCH --job-name=dlrm",
            f"#SBATCH --nodes={nodes}",
            "#SBATCH --ntasks-per-node=1",
            "#SBATCH --exclusive",
            f"#SBATCH --time={minutes}",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f'srun torchrun {meet} --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:29500" \\',
            f"  {what}",
        ]
    )
    return {
        "one_node": f"torchrun --standalone --nproc-per-node {ranks} {what}",
        "each_node": f"torchrun {meet} --rdzv-id dlrm --rdzv-endpoint FIRST_NODE:29500 {what}",
        "slurm": slurm,
    }
