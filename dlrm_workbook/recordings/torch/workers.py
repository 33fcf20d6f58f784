"""What the worker processes of a DataLoader run while the process that trains is sampled.

A worker looks for a folder that its parent makes while it samples its own stacks, samples its own
meanwhile, and leaves them there. Needs Python alone until then.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

POLL_S = 0.02
"""How often a worker looks whether it is to sample."""

WAIT_S = 2.0
"""How long the workers' samples are waited for."""

NAME = "DataLoader worker"
"""How the names of their threads begin."""

_ASKED, _OVER = ".workers", ".workers.over"
"""Endings of the folder's name while workers are to sample, and afterwards."""


def sample_workers(module: ModuleType, folder: Path) -> None:
    """Have every worker that torch's ``worker`` module starts sample its stacks when asked;
    ``folder`` holds the recordings, one for each process that trains."""
    loop: Callable[..., None] = module._worker_loop

    @functools.wraps(loop)  # a spawned worker finds it by that name
    def sampled(*args: Any, **options: Any) -> None:
        asked = folder / f"{os.getppid()}{_ASKED}"
        target = functools.partial(_sample_when_asked, asked, threading.get_ident(), module)
        threading.Thread(target=target, name="dlrm worker sampler", daemon=True).start()
        loop(*args, **options)

    module._worker_loop = sampled  # type: ignore[attr-defined]


def _sample_when_asked(asked: Path, main: int, module: ModuleType) -> None:
    while not asked.is_dir():
        time.sleep(POLL_S)
    from dlrm_workbook.recordings.torch.sampling import StackSampler, sources

    with contextlib.suppress(OSError):
        (asked / f"{os.getpid()}.begun").touch()
        sampler = StackSampler(threading.get_ident(), others=True)
        sampler.start()
        while asked.is_dir():
            time.sleep(POLL_S)
        sampler.stop()
        document = sampler.document()
        document["others"] = [row for row in document["others"] if row[1] == main]
        information = getattr(module, "_worker_info", None)
        document["name"] = f"{NAME} {getattr(information, 'id', os.getpid())}"
        document["sources"] = sources(sampler.codes())
        over = asked.with_suffix(_OVER)
        written = over / f"{os.getpid()}.part"
        written.write_text(json.dumps(document), encoding="utf-8")
        written.rename(over / f"{os.getpid()}.json")


class WorkerSamples:
    """Asks the workers of this process for samples, from :meth:`start` to :meth:`stop`;
    ``recording`` is the folder that this process's recording is written to."""

    def __init__(self, recording: Path) -> None:
        self._asked = recording.with_suffix(_ASKED)
        self._over = recording.with_suffix(_OVER)

    def start(self) -> None:
        """Have the workers that there are sample from now on."""
        from dlrm_workbook.evidence.counters import children

        if list(children()):
            with contextlib.suppress(OSError):
                self._asked.mkdir(parents=True)

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._asked.rename(self._over)

    def added_to(self, document: dict[str, Any]) -> dict[str, Any]:
        """The samples of this process, as ``StackSampler.document`` gives them, with the workers'
        as those of other threads, and with the ``sources`` of these."""
        document = {**document, "sources": []}
        until = time.monotonic() + WAIT_S
        while len(list(self._over.glob("*.json"))) < len(list(self._over.glob("*.begun"))):
            if time.monotonic() > until:
                break
            time.sleep(POLL_S)
        for number, file in enumerate(sorted(self._over.glob("*.json")), 1):
            worker = json.loads(file.read_text(encoding="utf-8"))
            frames, stacks = len(document["frames"]), len(document["stacks"])
            document["frames"] = [*document["frames"], *worker["frames"]]
            added = [[frames + frame for frame in stack] for stack in worker["stacks"]]
            document["stacks"] = [*document["stacks"], *added]
            rows = [(now, -number, stacks + stack, ns) for now, _, stack, ns in worker["others"]]
            document["others"] = [*document["others"], *rows]
            document["threads"] = {**document["threads"], -number: worker["name"]}
            document["sources"] += worker["sources"]
        for file in self._over.glob("*"):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._over.rmdir()
        return document
