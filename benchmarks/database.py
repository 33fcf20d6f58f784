"""How fast databases are read: against Hatchet, and at scale.

    python benchmarks/database.py --json benchmarks/results/database.json

*Against Hatchet*: everything of ``dlrm-cpu-native.d`` (tree, names, all values by
thread, self values, traces) with this reader, against the one metric that llnl-hatchet
reads. Each read is timed in a fresh process after imports,
A B A B ...; the figure is the median of the rounds' ratios.

*At scale*: written databases of up to a million contexts x 20 metrics x 8 threads,
every context with a value of every metric on every thread. One fresh process each.

*Many threads*: written databases of a million contexts and up to 10,000 threads, each with
values in some of the contexts and a trace. The memory should be that of the contexts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NATIVE = ROOT.parent / "shared" / "hpctoolkit-databases" / "dlrm-cpu-native.d"
SHIPPED = ROOT / "tests" / "data" / "hpctoolkit" / "dlrm-cpu-python.d"
"""Read instead where the first, which is not part of this repository, is absent."""
SIZES = (125_000, 250_000, 500_000, 1_000_000)
FUNCTIONS = [f"f{i}" for i in range(5000)]
METRICS, THREADS = 20, 8
THREAD_COUNTS = (100, 1_000, 10_000)
LEAVES, SAMPLES = 400, 1_000
"""Each of many threads has so many contexts with values of its own, and samples of its trace."""


def peak_bytes() -> int:
    """Most memory that this process has held, mapped files included.

    Not ``ru_maxrss``: that survives ``exec``, so a child starts with its parent's peak.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def read_everything(path: str) -> dict[str, Any]:
    """Read all of a database with this project's reader; seconds and what was read."""
    import numpy as np  # noqa: F401 (imports are not part of the figure)

    import dlrm_workbook.recordings.hpctoolkit.database  # noqa: F401
    from dlrm_workbook.recordings.hpctoolkit.database import read_database
    from dlrm_workbook.recordings.hpctoolkit.views import facts

    start = time.perf_counter()
    database = read_database(path)
    known = facts(database)  # every value of every thread
    database.self_of_sparse(*database.inclusive_values(0))
    if known["summary_values"] < 1_000_000:
        assert len(database.names) == len(database.tree)
        for profile in database.profiles:
            profile.values()
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "contexts": len(database.tree),
        "values": known["summary_values"] + sum(t["values"] for t in known["threads"]),
        "metrics": len(database.metrics),
        "threads": len(database.threads),
        "peak_bytes": peak_bytes(),
    }


def read_with_hatchet(path: str) -> dict[str, Any]:
    """Read a database as llnl-hatchet does by default: one metric, the main thread."""
    import hatchet

    start = time.perf_counter()
    frame = hatchet.GraphFrame.from_hpctoolkit_latest(path)
    return {"seconds": time.perf_counter() - start, "contexts": len(frame.dataframe)}


READERS = {"ours": read_everything, "hatchet": read_with_hatchet}


def fresh(reader: str, path: Path) -> dict[str, Any]:
    """The result of a reader in a process of its own."""
    from dlrm_workbook.processes import run_child  # not above: a reader's memory is measured

    done = run_child([sys.executable, __file__, "--run", reader, path], stage=reader, folder=ROOT)
    done.require_success(f"reading with {reader}")
    return done.last_object("seconds") or {}


def against_hatchet(rounds: int) -> dict[str, Any]:
    """Interleaved reads of the real database."""
    from dlrm_workbook.turns import take_turns

    database = NATIVE if NATIVE.is_dir() else SHIPPED
    times: dict[str, list[float]] = {"ours": [], "hatchet": []}
    for reader in READERS:  # files into the page cache, bytecode compiled
        fresh(reader, database)
    for _, readers in take_turns(("hatchet", "ours"), rounds):
        for reader in readers:
            times[reader].append(fresh(reader, database)["seconds"])
    ratios = [h / o for h, o in zip(times["hatchet"], times["ours"], strict=True)]
    return {
        "measured": time.strftime("%Y-%m-%d"),
        "rounds": rounds,
        "database": database.name,
        "ours_ms_median": 1e3 * statistics.median(times["ours"]),
        "hatchet_ms_median": 1e3 * statistics.median(times["hatchet"]),
        "speedup_median": statistics.median(ratios),
        "speedup_least": min(ratios),
    }


def write_scaled(folder: Path, contexts: int) -> None:
    """A database in which every context has a value of every metric on every thread."""
    import numpy as np

    from tests.hpctoolkit_tree import random_tree
    from tests.hpctoolkit_writer import Measured, write_database

    rng = np.random.default_rng(0)
    tree = random_tree(rng, contexts - 2, hidden=0.0, functions=FUNCTIONS)
    names = [f"METRIC_{i}" for i in range(METRICS)]

    def points() -> dict[str, Any]:
        return {name: rng.random(len(tree)) + 0.5 for name in names}

    threads = [
        Measured(points, (("NODE", 0, 1), ("THREAD", i, i)), (np.arange(1000), np.arange(1000)))
        for i in range(THREADS)
    ]
    write_database(
        folder, tree, threads, metrics=names, scopes=("execution",), cct=False, keep=False
    )


def write_many_threads(folder: Path, contexts: int, count: int) -> None:
    """A database of so many threads, each with values in ``LEAVES`` contexts and above them."""
    import numpy as np

    from tests.hpctoolkit_tree import random_tree
    from tests.hpctoolkit_writer import Measured, write_database

    rng = np.random.default_rng(0)
    tree = random_tree(rng, contexts - 2, hidden=0.0, functions=FUNCTIONS)

    def thread(number: int) -> Measured:
        nodes = tree.and_above(rng.integers(0, len(tree), LEAVES))
        times, context = np.arange(SAMPLES), rng.choice(nodes, SAMPLES) + tree.first
        return Measured(
            lambda: {"CPUTIME (sec)": np.full(len(nodes), 0.005)},
            (("NODE", 0, 1), ("RANK", number // 100, number // 100), ("THREAD", number % 100, 0)),
            (times, context),
            nodes,
        )

    threads = [thread(number) for number in range(count)]
    names, scopes = ["CPUTIME (sec)"], ("point", "execution")
    write_database(folder, tree, threads, metrics=names, scopes=scopes, cct=False, keep=False)


def read_times(folder: Path) -> dict[str, Any]:
    """One row: the time and memory that three fresh processes need to read a database."""
    runs = [fresh("ours", folder) for _ in range(3)]
    row = {
        "measured": time.strftime("%Y-%m-%d"),
        "contexts": runs[0]["contexts"],
        "threads": runs[0]["threads"],
        "metrics": runs[0]["metrics"],
        "values": runs[0]["values"],
        "seconds_median": statistics.median(run["seconds"] for run in runs),
        "peak_gb": max(run["peak_bytes"] for run in runs) / 1e9,
        "file_gb": (folder / "profile.db").stat().st_size / 1e9,
    }
    print(json.dumps(row), flush=True)
    return row


def at_scale(sizes: tuple[int, ...], scratch: Path) -> list[dict[str, Any]]:
    """One row a number of contexts."""
    rows = []
    for contexts in sizes:
        folder = scratch / f"contexts-{contexts}.d"
        write_scaled(folder, contexts)
        rows.append(read_times(folder))
        shutil.rmtree(folder)
    return rows


def many_threads(contexts: int, scratch: Path) -> list[dict[str, Any]]:
    """One row a number of threads."""
    rows = []
    for count in THREAD_COUNTS:
        folder = scratch / f"threads-{count}.d"
        write_many_threads(folder, contexts, count)
        rows.append(read_times(folder))
        shutil.rmtree(folder)
    return rows


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("numpy", "pandas", "pyyaml", "llnl-hatchet")
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="How fast databases are read.")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/database.json")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="contexts")
    parser.add_argument("--only-threads", action="store_true", help="keep the other figures")
    parser.add_argument("--run", nargs=2, metavar=("READER", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(READERS[options.run[0]](options.run[1])))
        return 0
    sys.path.insert(0, str(ROOT))  # for the writer of databases, which is the tests'
    with tempfile.TemporaryDirectory() as scratch:
        if options.only_threads:
            results: dict[str, Any] = json.loads(options.json.read_text())
        else:
            results = {"machine": machine(), "against_hatchet": against_hatchet(options.rounds)}
            print(json.dumps(results["against_hatchet"]), flush=True)
            sizes = tuple(size for size in SIZES if size <= options.largest)
            results["at_scale"] = at_scale(sizes, Path(scratch))
        results["many_threads"] = many_threads(options.largest, Path(scratch))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
