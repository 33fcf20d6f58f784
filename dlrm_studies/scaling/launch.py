"""Starts a command as several ranks of this node, watches over them, and says how others would.

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
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_core.base.engines import engine
from dlrm_workbook.ground.processes import Command, started

GRACE_S = 5.0
"""For the other ranks to end by themselves once one has failed."""

POLL_S = 0.05

TOLD_S = 1.0
"""Seconds between two looks at the iteration that rank 0 is at."""


class RanksFailed(RuntimeError):
    """A rank failed, or the time was over; names the rank, how it ended, and what it said."""


def run_ranks(
    command: Command,
    ranks: int,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
    on_iteration: Callable[[int], None] = lambda done: None,
) -> None:
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
    engine("several ranks: plan").require_torchrec()
    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=5),
    )
    until = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlrm-ranks-")))
        # whatever happens, also to us: no rank stays behind
        processes = [
            stack.enter_context(
                started(
                    command,
                    stage=f"rank {rank}",
                    stdout=subprocess.DEVNULL,
                    stderr=stack.enter_context((logs / f"{rank}.err").open("wb")),
                    environment={
                        **os.environ,
                        **(variables or {}),
                        **environment(rank, ranks, store.port),
                    },
                    grace_s=0.0,
                )
            )
            for rank in range(ranks)
        ]
        failed = _wait(processes, until, lambda: _iteration(store, 0), on_iteration)
        if failed is not None:
            raise RanksFailed(_report(failed, processes, logs, store, timeout_s))


def _wait(
    processes: Sequence[subprocess.Popen[bytes]],
    until: float,
    iteration: Callable[[], int | None],
    on_iteration: Callable[[int], None],
) -> int | None:
    """Wait for all; the rank that failed first, -1 if the time was over, None if none did."""
    lost = engine("several ranks: watch").EXIT_LOST
    first: int | None = None
    grace_until = until
    last, look_at = None, time.monotonic() + TOLD_S
    while True:
        codes = [process.poll() for process in processes]
        if first is None:
            # who was ended by a signal is the cause; who gave up because of it has a status
            bad = [rank for rank, code in enumerate(codes) if code]
            killed = [rank for rank in bad if (codes[rank] or 0) < 0]
            if bad:
                first = (killed or bad)[0]
                grace_until = min(until, time.monotonic() + GRACE_S)
        elif codes[first] == lost:
            # it only tells of another one; that may have ended since
            others = [r for r, code in enumerate(codes) if code and code != lost]
            first = others[0] if others else first
        if all(code is not None for code in codes):
            return first
        now = time.monotonic()
        if now > grace_until:
            return -1 if first is None else first
        if now > look_at:
            look_at = now + TOLD_S
            told = iteration()
            if told is not None and told != last:
                last = told
                on_iteration(told)
        time.sleep(POLL_S)


def _iteration(store: Any, rank: int) -> int | None:
    """The last iteration that a rank told the store."""
    key = engine("several ranks: watch").KEY.format(rank=rank)
    told: dict[str, int] = json.loads(store.get(key)) if store.check([key]) else {}
    return told.get("iteration")


def _report(
    failed: int,
    processes: Sequence[subprocess.Popen[bytes]],
    logs: Path,
    store: Any,
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
    last = _iteration(store, failed)
    # ranks record theirs now and then, so the first may have passed
    where = f"after iteration {last:,}" if last else "before any of its iterations was recorded"
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


def launch_lines(file: str, parameters: Sequence[str], ranks: int, nodes: int) -> dict[str, str]:
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
            "#SBATCH --time=60",
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


def environment(rank: int, ranks: int, port: int) -> Mapping[str, str]:
    """The variables of a rank on this node, as torchrun would set them."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # the launcher keeps the store, so that it outlives every rank
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
