"""What a rank says when it ends early: once for all ranks, and into the launcher's own report.

torchrun ends the other ranks as soon as one has failed, and closes with a report of its own.
So a sentence must be out before its rank ends, and belongs into that report too.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from dlrm_core.errors import InputError
from dlrm_core.files import write_json

_STORE_S = 5.0
"""For the launcher's store to answer."""

_PARTING_S = 1.0
"""For the rank that says it: the launcher ends it when this one is gone."""


@contextlib.contextmanager
def said_once(refused: int, interrupted: int) -> Iterator[None]:
    """End this rank if the block refuses; the first rank that comes to a refusal says it.

    Interrupted, rank 0 says so: by Ctrl-C all are, or by the launcher after another's end.

    Args:
        refused: exit status of a rank that ends so.
        interrupted: the same.
    """
    try:
        yield
    except InputError as error:
        tell_launcher(str(error))
        if first_to_say(str(error)):
            print(f"dlrm train: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(_PARTING_S)
        leave(refused)
    except KeyboardInterrupt:
        if os.environ.get("RANK") == "0":
            print("dlrm train: interrupted", file=sys.stderr, flush=True)
        leave(interrupted)


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
    import torch.distributed as dist

    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=datetime.timedelta(seconds=_STORE_S),
        )
        digest = hashlib.sha256(sentence.encode()).hexdigest()[:16]
        return bool(store.add(f"dlrm/said/{digest}", 1) == 1)
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
