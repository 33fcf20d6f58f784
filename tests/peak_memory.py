"""Peak resident memory of training runs, each in a process forked after the imports.

Reads a list of parameter sections (JSON) from standard input, prints a list of what each run
took beyond the process before it. Nothing computes before the forks: OpenMP's threads
would not survive them. A run whose kernels may have to be compiled, which takes memory
too, runs once before.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import dlrm_kernels.embeddings.fused_cpu
from dlrm_core import train as training
from dlrm_core.config import parameters_from_sections


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def taken_bytes(sections: dict[str, Any]) -> int:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        before = status_bytes("VmRSS:")
        result = training.Trainer(parameters_from_sections(sections)).train()
        peak = status_bytes("VmHWM:")
        assert abs(result.peak_memory_bytes - peak) < 0.01 * peak, "what the command tells"
        os.write(writer, str(peak - before).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        taken = int(file.read())
    os.waitpid(child, 0)
    return taken


if __name__ == "__main__":
    torch.optim.SGD([torch.zeros(1)], 0.1)  # loads what optimisers need
    assert dlrm_kernels.embeddings.fused_cpu
    runs = json.load(sys.stdin)
    for sections in runs:
        if sections["training"].get("embedding_backend") == "fused":
            taken_bytes(sections)
    print(json.dumps([taken_bytes(sections) for sections in runs]))
