"""Ranks are kept on their NUMA nodes where a host has several."""

import os
import subprocess
import sys

import pytest

from dlrm_core.base.machine import numa_nodes
from dlrm_ranks.world import nodes_of_rank

needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU only")

BOUND = """
import os, threading, torch
from dlrm_ranks import world as ranks

ready, over = threading.Event(), threading.Event()
before = threading.Thread(target=lambda: (ready.set(), over.wait()))
before.start()
ready.wait()
first, second = sorted(os.sched_getaffinity(0))[:2]
ranks.numa_nodes = lambda: {0: {first}, 2: {second}}
place = ranks.World(1, 4, 1, 2, "here", torch.device("cpu"), "gloo", 1)
bound = ranks.bound(place)
assert bound.bound_to == "NUMA node 2", bound
assert os.sched_getaffinity(0) == os.sched_getaffinity(before.native_id) == {second}
over.set()
ranks.numa_nodes = lambda: {0: {first, second}}
assert ranks.bound(place) == place
"""


def test_each_rank_has_its_nodes():
    for nodes, ranks, expected in (
        ([0], 4, [[]] * 4),
        ([0, 1], 1, [[]]),
        ([0, 1], 2, [[0], [1]]),
        ([0, 3], 4, [[0], [0], [3], [3]]),
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([0, 1], 3, [[]] * 3),
    ):
        assert [nodes_of_rank(nodes, rank, ranks) for rank in range(ranks)] == expected


def test_nodes_are_those_with_cpus_that_may_be_used(tmp_path):
    cpus = sorted(os.sched_getaffinity(0))
    lists = {"node0": str(cpus[0]), "node1": "4000-4003,4008", "node2": "", "node10": ""}
    lists["node10"] = f"{cpus[0]}-{cpus[-1]}"
    for name, text in lists.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(text + "\n")
    assert numa_nodes(tmp_path) == {0: {cpus[0]}, 10: set(cpus)}
    assert numa_nodes(tmp_path / "nowhere") == {}


@needs_two
def test_a_rank_and_its_threads_are_bound():
    subprocess.run([sys.executable, "-c", BOUND], check=True, timeout=120)
