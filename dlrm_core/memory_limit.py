"""How much memory the process may use before something ends it."""

from __future__ import annotations

import resource
from pathlib import Path

import torch


def memory_limit(device: torch.device, root: Path = Path("/")) -> int | None:
    """Bytes this process may use: of the GPU, or of the machine where nothing limits it.

    On the CPU the least of the machine's memory, the limits of our control group and
    of those above it (a container's, a batch job's), and the limit on address space.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    found = []
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            found.append(1024 * int(line.split()[1]))
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        place, name = root / "sys/fs/cgroup", "memory.max"
        if controllers:  # version 1 has a tree for each controller
            place, name = place / "memory", "memory.limit_in_bytes"
        within = place / path.lstrip("/")
        for group in (within, *within.parents):
            if not group.is_relative_to(place):
                break
            limit = _text(group / name).strip()
            found += [int(limit)] if limit.isdigit() else []  # "max" where there is none
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY:
        found.append(space)
    return min(found, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
