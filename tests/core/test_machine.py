"""What a run asks of the machine."""

import os
import sys

import pytest
from commands import run_python

from dlrm_core.base.machine import ALLOCATOR_SETTINGS

CHURN = """
import ctypes, resource, sys
from dlrm_core.config import TrainingConfig
from dlrm_core.base.machine import keep_freed_memory
keep_freed_memory()  # as every training and prediction does
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
size = 8 << 20

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(size) for _ in range(12)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize(
    ("setting", "settled"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "65536"}, False)]
)
def test_a_step_gets_the_memory_that_the_one_before_freed(setting, settled) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ALLOCATOR_SETTINGS} | setting
    faults = run_python(CHURN, env=environment)
    pages = 12 * (8 << 20) // os.sysconf("SC_PAGESIZE")
    if settled:
        assert int(faults) < 0.1 * pages
    else:
        # what the user set stays: the heap is given back, and faults again
        assert int(faults) > 0.9 * pages
