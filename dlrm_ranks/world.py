"""The ranks of a run: who they are, how they meet, and small things that they tell each other."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlrm_core.base.errors import InputError
from dlrm_core.base.machine import die_with_parent, numa_nodes, resolve_device
from dlrm_core.config import TrainingConfig

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class World:
    """One rank's place among all.

    Attributes:
        local_rank: among the ranks of its node.
        local_size: ranks on its node.
        device: what it computes on; with several GPUs the one of its local rank.
        backend: 'gloo' between CPUs, 'nccl' between GPUs.
        threads: CPU threads of one operator.
        bound_to: such as 'NUMA node 0', where the rank may run; '': anywhere.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    device: torch.device
    backend: str
    threads: int
    bound_to: str = ""

    @property
    def first(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0


def threads_of_rank(config: TrainingConfig, local_size: int) -> int:
    """``training.threads``, or a fair share of the CPUs that the node's ranks may use."""
    return config.threads or max(1, len(os.sched_getaffinity(0)) // local_size)


def read_world(config: TrainingConfig) -> World:
    """This rank's place, from the variables that torchrun sets.

    Raises:
        InputError: a variable is missing or no number, or there is no such GPU.
    """
    values = {}
    for name in _VARIABLES:
        text = os.environ.get(name, "")
        if not text.isdigit():
            raise InputError(
                f"the environment's {name} is {text!r}, expected a whole number: start with "
                "torchrun --nproc-per-node RANKS -m dlrm_core train ..."
            )
        values[name] = int(text)
    device = resolve_device(config)
    local_rank = values["LOCAL_RANK"]
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise InputError(
                f"this node has {torch.cuda.device_count()} GPUs, but torchrun started "
                f"{values['LOCAL_WORLD_SIZE']} ranks on it: one rank a GPU is expected"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    return World(
        rank=values["RANK"],
        size=values["WORLD_SIZE"],
        local_rank=local_rank,
        local_size=values["LOCAL_WORLD_SIZE"],
        host=socket.gethostname(),
        device=device,
        backend="nccl" if device.type == "cuda" else "gloo",
        threads=threads_of_rank(config, values["LOCAL_WORLD_SIZE"]),
    )


def nodes_of_rank(nodes: Sequence[int], local_rank: int, local_size: int) -> list[int]:
    """The NUMA nodes of one of a host's ranks: equal shares, or nodes shared by equally many.

    Empty where there is one node only, or ranks and nodes do not divide evenly.
    """
    count = len(nodes)
    if count < 2 or local_size < 2 or (local_size % count and count % local_size):
        return []
    first = local_rank * count // local_size
    return list(nodes[first : first + max(1, count // local_size)])


def bound(world: World) -> World:
    """Keep a rank of a CPU on its NUMA nodes, if its host has several.

    Memory follows: the kernel takes pages from the node of the CPU that first writes to them.
    """
    nodes = numa_nodes() if world.device.type == "cpu" else {}
    of_rank = nodes_of_rank(list(nodes), world.local_rank, world.local_size)
    if not of_rank:
        return world
    cpus = set().union(*(nodes[node] for node in of_rank))
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), cpus)
    named = ", ".join(map(str, of_rank))
    return replace(world, bound_to=f"NUMA {'node' if len(of_rank) == 1 else 'nodes'} {named}")


@contextlib.contextmanager
def joined(config: TrainingConfig) -> Iterator[World]:
    """Meet the other ranks; they part when the block ends without an error.

    A rank does not outlive its launcher: the system ends it when that is gone.

    Raises:
        InputError: see :func:`read_world`.
    """
    world = bound(read_world(config))
    die_with_parent()
    torch.set_num_threads(world.threads)
    # who is missing is found sooner, and named, by the watch
    timeout = datetime.timedelta(seconds=2 * config.rank_timeout_s + 30)
    dist.init_process_group(
        world.backend, timeout=timeout, device_id=world.device if world.backend == "nccl" else None
    )
    yield world
    dist.destroy_process_group()


def launcher_store(timeout_s: float = 300.0) -> dist.TCPStore:
    """A connection of one's own to the store that the launcher keeps."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def gathered(world: World, value: Any) -> list[Any]:
    """What every rank has to say, on every rank, in their order; as JSON carries it.

    torch's own way of exchanging objects is pickle, which executes what it reads.
    """
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=world.device) for _ in range(world.size)]
    dist.all_gather(sizes, torch.tensor([text.numel()], device=world.device))
    room = max(int(size) for size in sizes)
    padded = torch.zeros(room, dtype=torch.uint8, device=world.device)
    padded[: text.numel()] = text
    parts = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(parts, padded)
    return [
        json.loads(part[: int(size)].cpu().numpy().tobytes())
        for part, size in zip(parts, sizes, strict=True)
    ]
