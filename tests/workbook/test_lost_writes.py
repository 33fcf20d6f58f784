"""Writes that were announced are on the disk: what was not synced is lost, and nothing is missed.

The campaign (tests/campaigns/lost_writes.py) in small, and that it notices what is not synced.
"""

import random
import shutil

import lost_writes
import pytest

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

FAST = [name for name, kind in lost_writes.KINDS.items() if not kind.slow]
UNSYNCED = """
import os, stat
real = os.fsync
def fsync(handle):
    if stat.S_ISDIR(os.fstat(handle).st_mode) != (LEFT_OUT == "folders"):
        real(handle)
os.fsync = fsync
"""


@pytest.mark.parametrize("name", FAST)
def test_nothing_announced_is_lost(name: str) -> None:
    found = lost_writes.try_kind(name, 25, random.Random(5))
    assert found["faults"] == [] and found["crashes"] == 4 * 25


@pytest.mark.parametrize("left_out", ["files", "folders"])
def test_a_writer_that_does_not_sync_is_caught(left_out, monkeypatch) -> None:
    patch = UNSYNCED.replace("LEFT_OUT", repr(left_out))
    kind = lost_writes.Kind(
        lost_writes.python(patch + lost_writes.LEDGER), lost_writes.check_ledger
    )
    monkeypatch.setitem(lost_writes.KINDS, "unsynced", kind)
    assert lost_writes.try_kind("unsynced", 25, random.Random(5))["faults"]
