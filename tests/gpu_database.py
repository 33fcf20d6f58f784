"""A small HPCToolkit database of a step on a GPU, made by hand.

One main thread and two streams, times in microseconds::

    main    |data_forward 0..40|bottom_mlp_forward 40..60|embedding_forward 60..80|wait 80..100|
    other   |                                 prefetch 30..90 (launches nothing)               |
    stream 7            [50 gemm 70]       [80 gather 90]
    stream 9                  [60 copy 75]

so from 50 to 90 (first to last GPU operation) the GPU is idle 75..80, while the main
thread is in ``embedding_forward``; over the whole trace it is idle 65 us.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dlrm_workbook.recordings.hpctoolkit.database import read_database
from dlrm_workbook.recordings.hpctoolkit.to_profile import profile_from_database
from dlrm_workbook.recordings.profile import Profile
from tests.hpctoolkit_tree import tree_of
from tests.hpctoolkit_writer import Measured, write_database

NODES: list[tuple[str, int, int]] = [
    # name, parent (−1 the main thread, −2 the other), line
    ("data_forward", -1, 0),  # 0
    ("bottom_mlp_forward", -1, 0),  # 1
    ("<gpu kernel>", 1, 0),  # 2
    ("void gemm<float, 4>(float*)", 2, 0),  # 3
    ("", 3, 10),  # 4
    ("", 3, 20),  # 5
    ("embedding_forward", -1, 0),  # 6
    ("<gpu copyin>", 6, 0),  # 7
    ("<gpu kernel>", 6, 0),  # 8
    ("gather(long*)", 8, 0),  # 9
    ("", 9, 30),  # 10
    ("prefetch", -2, 0),  # 11
    ("<gpu copyout>", 6, 0),  # 12
    ("wait", -1, 0),  # 13
]
VALUES: dict[str, dict[int, float]] = {
    "CPUTIME (sec)": {0: 40e-6, 1: 20e-6, 6: 20e-6, 13: 20e-6},
    "GPUOP (sec)": {3: 20e-6, 7: 10e-6, 9: 10e-6, 12: 5e-6},
    "GKER (sec)": {3: 20e-6, 9: 10e-6},
    "GKER:COUNT": {3: 4, 9: 1},
    "GKER:THR_REG_ACUMU": {3: 256, 9: 32},
    "GKER:BLKS_ACUMU": {3: 400, 9: 50},
    "GKER:BLK_THR_ACUMU": {3: 1024, 9: 128},
    "GKER:DYMEM_ACUMU (B)": {3: 4096},
    "GKER:FGP_ACT_ACUMU": {3: 64, 9: 64},
    "GKER:FGP_MAX_ACUMU": {3: 256, 9: 64},
    "GXCOPY (sec)": {7: 10e-6, 12: 5e-6},
    "GXCOPY:COUNT": {7: 2, 12: 1},
    "GXCOPY:H2D (B)": {7: 40_000},
    "GXCOPY:D2H (B)": {12: 10_000},
    "GINS": {4: 600, 5: 200, 10: 200},
    "GINS:STL_ANY": {4: 300, 5: 200, 10: 150},
    "GINS:STL_GMEM": {4: 200, 10: 150},
    "GINS:STL_IDEP": {4: 100, 5: 150},
    "GINS:STL_SYNC": {5: 50},
    "GSAMP:TOT": {4: 60, 5: 20, 10: 20},
    "GSAMP:EXP": {4: 100, 5: 50, 10: 50},
}
STALLS = ("GINS", "GSAMP")


def made(
    folder: Path,
    *,
    cpu_trace: bool = True,
    stalls: bool = True,
    spelled: Mapping[str, str] | None = None,
) -> Profile:
    """The profile of the database, written into ``folder`` (new).

    Args:
        cpu_trace: whether the CPU threads have a trace.
        stalls: whether PC sampling was on.
        spelled: metric to its name in another generation of HPCToolkit, where it differs.
    """
    tree = tree_of(NODES, lambda name: name.endswith("_forward"))
    spelled = spelled or {}
    used = {spelled.get(m, m): v for m, v in VALUES.items() if stalls or not m.startswith(STALLS)}
    values = {metric: np.zeros(len(NODES)) for metric in used}
    for metric, held in used.items():
        for node, value in held.items():
            values[metric][node] = value

    def trace(*samples: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """(microsecond, node; −1 for nothing) samples."""
        time = np.array([1000 * at for at, _ in samples], np.uint64) + np.uint64(10**18)
        context = [0 if node < 0 else node + tree.first for _, node in samples]
        return time, np.array(context, np.uint32)

    none = {metric: np.zeros(len(NODES)) for metric in used}
    gpu = (("NODE", 0, 99), ("GPUCONTEXT", 0, 1))
    main = trace((0, 0), (40, 1), (60, 6), (80, 13), (100, -1)) if cpu_trace else None
    threads = [
        Measured(values, (("NODE", 0, 99), ("THREAD", 0, 0)), main),
        Measured(
            none,
            (("NODE", 0, 99), ("THREAD", 1, 1)),
            trace((30, 11), (90, -1)) if cpu_trace else None,
        ),
        Measured(none, (*gpu, ("GPUSTREAM", 7, 7)), trace((50, 3), (70, -1), (80, 9), (90, -1))),
        Measured(none, (*gpu, ("GPUSTREAM", 9, 9)), trace((60, 7), (75, -1), (76, -1))),
    ]
    write_database(folder, tree, threads)
    return profile_from_database(read_database(folder))
