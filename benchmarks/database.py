"""How fast databases are read: against Hatchet, and at scale.

    python benchmarks/database.py --json benchmarks/results/database.json

*Against Hatchet*: everything of ``dlrm-cpu-native.d`` (tree, names, all values by
thread, self values, traces) with this reader, against the one metric that llnl-hatchet
reads. Each read is timed in a fresh process after imports,
A B A B ...; the figure is the median of the rounds' ratios.

*The same as Hatchet*: what both readers find in every real database is compared value by value:
identities of threads, the tree, names, and all metrics in all scopes. llnl-hatchet reads the
sums over threads below the main entry point; the result counts what it leaves out and quotes
what it says where it reads nothing.

*Against hpcanalysis* (``--hpcanalysis DIR``, a folder with the package, built): HPCToolkit's own
reader, tree and descriptions in Python, all values of all threads in C++, beside this one in turns,
on every real database and on those of many threads; what both find is compared.

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
import resource
import shutil
import statistics
import struct
import sys
import tempfile
import time
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
NATIVE = SHARED / "hpctoolkit-databases" / "dlrm-cpu-native.d"
SHIPPED = ROOT / "tests" / "data" / "hpctoolkit" / "dlrm-cpu-python.d"
"""Read instead where the first, which is not part of this repository, is absent."""
SIZES = (125_000, 250_000, 500_000, 1_000_000)
FUNCTIONS = [f"f{i}" for i in range(5000)]
METRICS, THREADS = 20, 8
THREAD_COUNTS = (100, 1_000, 10_000)
LEAVES, SAMPLES = 400, 1_000
"""Each of many threads has so many contexts with values of its own, and samples of its trace."""


SCOPES = {"execution": "i", "function": "e", "point": "p", "lex_aware": "c"}
"""Scope of a metric to Hatchet's letter for it."""
RECURSION = 100_000
"""The other readers call themselves once for each level of the tree."""
MOST_BYTES = 12 << 30
"""Memory that hpcanalysis may take; it makes a dictionary of every value."""


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
    import dlrm_workbook.recordings.hpctoolkit.database  # noqa: F401
    from dlrm_workbook.recordings.hpctoolkit.database import read_database
    from dlrm_workbook.recordings.hpctoolkit.views import database_facts

    start = time.perf_counter()
    database = read_database(path)
    known = database_facts(database)  # every value of every thread
    for metric in database.metrics:
        database.self_column(metric.name)
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


def compare_with_hatchet(path: str) -> dict[str, Any]:
    """Count what Hatchet finds in a database, and how much of it this reader finds otherwise.

    Where no metric is a processor time, Hatchet says ``KeyError: None``; a metric set by hand
    as its time makes it read on.
    """
    from hatchet.readers.hpctoolkit_reader_latest import HPCToolkitReaderLatest

    from dlrm_workbook.recordings.hpctoolkit.database import read_database

    sys.setrecursionlimit(RECURSION)
    database = read_database(path)
    says = {}
    for mode, options in {"by default": {}, "by thread": {"parallel_profiles_mode": True}}.items():
        try:
            HPCToolkitReaderLatest(path, **options).read()
        except Exception as error:  # whatever it says is the result
            says[mode] = f"{type(error).__name__}: {error}"
    names = {hatchet_name(metric.name): metric.name for metric in database.metrics}
    assert len(names) == len(database.metrics), "two metrics have one name in Hatchet"
    counts: Counter[str] = Counter()
    for scope, letter in SCOPES.items():
        reader = HPCToolkitReaderLatest(
            path, metric_names=list(names), metric_scopes=["i", letter], summary_metrics=["sum"]
        )
        if "time" not in names:
            reader._time_metric = f"{hatchet_name(next(iter(database.root())))} (inc)"
        frame = reader.read().dataframe
        rows = database.tree.rows(np.array([node._hatchet_nid for node in frame.index]))
        for name, ours in names.items():
            theirs = frame.get(f"{name} (inc)" if scope == "execution" else name)
            counts.update(compared_values(database.column(ours, scope)[rows], theirs))
    reader._read_profiles_metadata()
    return {
        "database": database.path.name,
        "hatchet_says": says,
        "contexts_here": len(database.tree) - 1,
        "contexts_in_hatchet": len(frame),
        "contexts_that_differ": contexts_that_differ(database, list(frame.index)),
        "metrics": len(names),
        **counts,
        "values_here": database.profiles[0].count,
        "values_here_by_thread": sum(database.profiles[t.profile].count for t in database.threads),
        **compared_identities(database, reader._profiles_metadata),
    }


def hatchet_name(metric: str) -> str:
    """Name a metric as Hatchet does: without its unit, and processor times are ``time``."""
    name = metric.lower().partition("(")[0].strip()
    return "time" if name in ("cputime", "realtime", "cycles") else name


def compared_values(ours: Any, theirs: Any) -> dict[str, int]:
    """How many values of one metric and scope either reader has, and how many are not equal."""
    found = np.zeros(len(ours)) if theirs is None else np.nan_to_num(theirs.to_numpy(float))
    return {
        "values_compared": int(((ours != 0) | (found != 0)).sum()),
        "values_that_differ": int((ours != found).sum()),
    }


def contexts_that_differ(database: Any, nodes: list[Any]) -> int:
    """How many contexts have another parent, kind or name in Hatchet, which cuts names short."""
    tree, meta, differ = database.tree, database.meta, 0
    rows = tree.rows(np.array([node._hatchet_nid for node in nodes]))
    for row, node in zip(rows.tolist(), nodes, strict=True):
        above = node.parents[0]._hatchet_nid if node.parents else 0
        name, kind = node.frame["name"], node.frame["type"]
        # a path of embedded sources begins with src here
        files = [meta.files[tree.file[row]] + f":{tree.line[row]}" if tree.file[row] >= 0 else ""]
        files += [files[0].removeprefix("src")]
        same = {
            "entry": True,
            "function": database.names[row].startswith(name.removeprefix("function: ")),
            "instruction": name == f"{meta.modules[tree.module[row]]}:{tree.offset[row]}",
        }.get(kind, name.removeprefix(f"{kind} ") in files)
        differ += tree.context[tree.parent[row]] != above or not same
    return int(differ)


def compared_identities(database: Any, theirs: Any) -> dict[str, int]:
    """How many threads either reader has, and how many are not the same."""
    ours = [
        {
            i.kind.lower(): i.physical if i.kind in ("NODE", "GPUSTREAM") else i.logical
            for i in database.profiles[thread.profile].identifiers
        }
        for thread in database.threads
    ]
    found = [
        {str(kind): int(number) for kind, number in row.items() if number == number}
        for row in theirs.to_dict("records")
    ]
    differ = sum(a != b for a, b in zip_longest(ours, found))
    return {"threads": len(ours), "threads_that_differ": differ}


def read_with_hpcanalysis(path: str) -> dict[str, Any]:
    """Read the tree, all descriptions and all values of all threads as hpcanalysis does.

    Its DataFrames, which it makes of these lists next, are not made.
    """
    from hpcanalysis import hpcanalysis_cpp
    from hpcanalysis.data_read import DataRead

    sys.setrecursionlimit(RECURSION)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    start = time.perf_counter()
    reader = DataRead(path)
    contexts = reader.read_cct()
    reader.read_metric_descriptions()
    profiles = [0, *(row["id"] for row in reader.read_profile_descriptions())]
    values = hpcanalysis_cpp.DataRead(path).read_profile_slices(
        profiles, [], [], os.cpu_count() or 1
    )
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "contexts": len(contexts[0]),
        "values": len(values),
        "threads": len(profiles) - 1,
        "peak_bytes": peak_bytes(),
    }


def compare_with_hpcanalysis(path: str) -> dict[str, Any]:
    """Count the contexts, metrics and values of both readers, and those that are not the same."""
    from hpcanalysis import hpcanalysis_cpp
    from hpcanalysis.data_read import DataRead

    from dlrm_workbook.recordings.hpctoolkit.database import read_database

    sys.setrecursionlimit(RECURSION)
    database, reader = read_database(path), DataRead(path)
    tree, (contexts, functions, *_) = database.tree, reader.read_cct()
    names = {function["id"]: function["name"] for function in functions}
    differ = 0
    for row in range(1, len(tree)):
        node = contexts.get(int(tree.context[row]), {})
        same = node.get("parent", 0) == tree.context[tree.parent[row]]
        if node.get("type") == "function" and "name" in node:
            # it cuts names at brackets, dots and the like
            same = same and database.names[row].startswith(names[node["name"]])
        differ += not (node and same)
    profiles = list(range(len(database.profiles)))
    theirs = hpcanalysis_cpp.DataRead(path).read_profile_slices(profiles, [], [], 1)
    columns = ("profile_id", "cct_id", "metric_id", "value")
    found = np.array([[row[column] for column in columns] for row in theirs]).reshape(-1, 4)
    ours = np.concatenate(
        [
            np.column_stack([np.full(profile.count, number), *profile.values()])
            for number, profile in enumerate(database.profiles)
        ]
    )
    alike = ours.shape == found.shape
    return {
        "database": database.path.name,
        "contexts": len(tree) - 1,
        "contexts_that_differ": int(differ),
        "threads": len(database.threads),
        "threads_there": len(reader.read_profile_descriptions()),
        "values": len(ours),
        "values_there": len(found),
        "values_that_differ": int((ours != found).any(axis=1).sum()) if alike else None,
    }


READERS = {
    "ours": read_everything,
    "hatchet": read_with_hatchet,
    "both": compare_with_hatchet,
    "hpcanalysis": read_with_hpcanalysis,
    "with hpcanalysis": compare_with_hpcanalysis,
}


def fresh(reader: str, path: Path) -> dict[str, Any]:
    """The result of a reader in a process of its own."""
    from dlrm_workbook.ground.processes import run_child  # not above: a reader's memory is measured

    done = run_child([sys.executable, __file__, "--run", reader, path], stage=reader, folder=ROOT)
    done.require_success(f"reading with {reader}")
    compares = reader in ("both", "with hpcanalysis")
    return done.last_object("database" if compares else "seconds") or {}


def against_hatchet(rounds: int) -> dict[str, Any]:
    """Interleaved reads of the real database."""
    database = NATIVE if NATIVE.is_dir() else SHIPPED
    return {"database": database.name, **in_turns("hatchet", database, rounds)}


def in_turns(other: str, database: Path, rounds: int) -> dict[str, Any]:
    """Times of another reader and of this one, each in a fresh process, A B B A ..."""
    from dlrm_workbook.ground.turns import take_turns

    times: dict[str, list[float]] = {"ours": [], other: []}
    for reader in times:  # files into the page cache, bytecode compiled
        fresh(reader, database)
    for _, readers in take_turns((other, "ours"), rounds):
        for reader in readers:
            times[reader].append(fresh(reader, database)["seconds"])
    ratios = [theirs / ours for theirs, ours in zip(times[other], times["ours"], strict=True)]
    return {
        "measured": time.strftime("%Y-%m-%d"),
        "rounds": rounds,
        "ours_ms_median": 1e3 * statistics.median(times["ours"]),
        f"{other}_ms_median": 1e3 * statistics.median(times[other]),
        "speedup_median": statistics.median(ratios),
        "speedup_least": min(ratios),
    }


def real_databases() -> list[Path]:
    """All that are at hand; the shipped one alone where the others are absent."""
    folders = sorted(SHARED.glob("hpctoolkit-databases/*.d")) or [SHIPPED]
    return [*folders, *sorted(SHARED.glob("recordings/*.d"))]


def against_hpcanalysis(rounds: int) -> list[dict[str, Any]]:
    """One row a real database."""
    rows = [
        fresh("with hpcanalysis", database) | in_turns("hpcanalysis", database, rounds)
        for database in real_databases()
    ]
    print(json.dumps(rows), flush=True)
    return rows


def same_as_hatchet() -> list[dict[str, Any]]:
    """One row a real database."""
    rows = [fresh("both", database) for database in real_databases()]
    print(json.dumps(rows), flush=True)
    return rows


def write_scaled(folder: Path, contexts: int) -> None:
    """A database in which every context has a value of every metric on every thread."""
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


def write_empty_cct(path: Path) -> None:
    """A ``cct.db`` without values: hpcanalysis opens one, and reads its values elsewhere."""
    section = 16 + 16
    head = b"HPCTOOLKITctxt" + bytes((4, 0)) + struct.pack("<QQ", 16, section)
    path.write_bytes(head + struct.pack("<QLB3x", section + 16, 0, 32))


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


def many_threads(contexts: int, scratch: Path, hpcanalysis: bool) -> list[dict[str, Any]]:
    """One row a number of threads; with hpcanalysis' time and memory, once, if asked for."""
    from dlrm_workbook.ground.processes import MeasurementError

    rows = []
    for count in THREAD_COUNTS:
        folder = scratch / f"threads-{count}.d"
        write_many_threads(folder, contexts, count)
        row = read_times(folder)
        if hpcanalysis:
            write_empty_cct(folder / "cct.db")
            try:
                done = fresh("hpcanalysis", folder)
                row["hpcanalysis_seconds"] = done["seconds"]
                row["hpcanalysis_peak_gb"] = done["peak_bytes"] / 1e9
            except MeasurementError as error:
                row["hpcanalysis_says"] = f"{error} (with at most {MOST_BYTES >> 30} GiB)"
            print(json.dumps(row), flush=True)
        rows.append(row)
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


def with_hpcanalysis_of(before: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """The results with what an earlier file says of hpcanalysis: it is not at hand everywhere."""
    size = {(row["contexts"], row["threads"]): row for row in before.get("many_threads", [])}
    for row in results["many_threads"]:
        old = size.get((row["contexts"], row["threads"]), {})
        theirs = {name: value for name, value in old.items() if name.startswith("hpcanalysis")}
        if theirs:
            row |= {"hpcanalysis_measured": old["measured"]} | theirs
    kept = {name: before[name] for name in ("against_hpcanalysis",) if name in before}
    return results | kept


def main() -> int:
    parser = argparse.ArgumentParser(description="How fast databases are read.")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/database.json")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="contexts")
    parser.add_argument("--only-threads", action="store_true", help="keep the other figures")
    parser.add_argument("--hpcanalysis", metavar="DIR", help="the folder of its package, built")
    parser.add_argument("--run", nargs=2, metavar=("READER", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(READERS[options.run[0]](options.run[1])))
        return 0
    if options.hpcanalysis:
        paths = [str(Path(options.hpcanalysis).resolve()), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    sys.path.insert(0, str(ROOT))  # for the writer of databases, which is the tests'
    with tempfile.TemporaryDirectory() as scratch:
        if options.only_threads:
            results: dict[str, Any] = json.loads(options.json.read_text())
        else:
            results = {"machine": machine(), "against_hatchet": against_hatchet(options.rounds)}
            print(json.dumps(results["against_hatchet"]), flush=True)
            results["same_as_hatchet"] = same_as_hatchet()
            sizes = tuple(size for size in SIZES if size <= options.largest)
            results["at_scale"] = at_scale(sizes, Path(scratch))
        if options.hpcanalysis:
            results["against_hpcanalysis"] = against_hpcanalysis(options.rounds)
        results["many_threads"] = many_threads(
            options.largest, Path(scratch), bool(options.hpcanalysis)
        )
    if not options.hpcanalysis and options.json.is_file():
        results = with_hpcanalysis_of(json.loads(options.json.read_text()), results)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
