"""How fast data sets are generated, converted and read, and what memory that takes.

Generation and the disk's own rate are measured in turns: the same number of bytes, written in
one go to one file (O_DIRECT) and synced, right before. Every figure is of a fresh process.

    python benchmarks/datasets.py --work /tmp/datasets --only generation
    python benchmarks/datasets.py --work /tmp/datasets          # everything

Results are added to ``--json`` part by part, and rounds of generation to those that are
there, so the work can be done in pieces.
"""

from __future__ import annotations

import argparse
import functools
import mmap
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from criteo_text import write_text

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import read_json, write_json
from dlrm_core.data.epochs import Epoch
from dlrm_core.data.files.samples import SampleBatches, read_batch
from dlrm_core.data.files.sources import open_source
from dlrm_workbook.ground.machine import machine_facts, versions

Record = dict[str, Any]
T15 = "--variant criteo_t15_synthetic"
SAMPLE_BYTES = 89
SHARE, MB_PER_CORE, TEXT_MB_PER_CORE = 0.8, 200.0, 100.0
"""Goals: of the disk's rate or MB/s a core, whichever is lower; of text a core."""
CHUNK_BYTES = 4 << 20
MEASURED = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""
"""A small process around the measured one: a child begins with the peak of who forked it."""


def disk_rate(folder: Path, size: int) -> float:
    """MB/s of writing ``size`` bytes to one file, past the page cache, until the disk has them."""
    path, written = folder / "disk.bin", 0
    size -= size % mmap.PAGESIZE
    with mmap.mmap(-1, CHUNK_BYTES) as chunk:  # O_DIRECT wants whole, aligned pages
        chunk.write(np.random.default_rng(0).integers(0, 256, CHUNK_BYTES, np.uint8).tobytes())
        view = memoryview(chunk)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        started = time.perf_counter()
        while written < size:
            written += os.write(file, view[: size - written])
        os.fdatasync(file)
        seconds = time.perf_counter() - started
        os.close(file)
        view.release()
    path.unlink()
    return size / 1e6 / seconds


def dlrm(command: str) -> tuple[str, int]:
    """Run a ``dlrm`` command; what it printed, and its peak resident memory in bytes.

    Raises:
        InputError: it failed.
    """
    arguments = [sys.executable, "-c", MEASURED, sys.executable, "-m", "dlrm_workbook"]
    done = subprocess.run(
        [*arguments, *shlex.split(command)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise InputError(f"dlrm {command}: exit code {done.returncode}")
    said, _, kib = done.stdout.rstrip().rpartition("\n")
    return said, int(kib) * 1024


def rate(said: str) -> float:
    """The MB/s that ``dlrm data`` printed."""
    found = re.search(r"\(([\d.]+) MB/s\)", said)
    if found is None:
        raise InputError(f"no rate in {said!r}")
    return float(found[1])


def generation(work: Path, given: argparse.Namespace, before: Record) -> Record:
    """Disk, one thread, all threads, in turns; rounds of the same size are added to."""
    samples, target = given.samples, work / "generated"
    size = SAMPLE_BYTES * (samples + samples // 8)
    threads = sorted({1, len(os.sched_getaffinity(0))})
    command = f"data generate {T15} --samples {samples}/{samples // 8} --output {target}"
    rounds = list(before.get("rounds", [])) if before.get("bytes") == size else []
    for _ in range(given.rounds):
        found: dict[str, Any] = {}
        for count in threads:
            # the disk before each: its rate changes by the second where it is shared
            disk = disk_rate(work, size)
            made = rate(dlrm(f"{command} --threads {count}")[0])
            shutil.rmtree(target)
            goal = min(SHARE * disk, MB_PER_CORE * count)
            found[str(count)] = {"disk": disk, "generated": made, "of_goal": made / goal}
        rounds.append(found)
        print(found, flush=True)
    return {
        "command": f"dlrm {command} --threads N",
        "bytes": size,
        "rounds": rounds,
        "mb_per_s": {str(n): _medians(rounds, str(n)) for n in threads},
    }


def _medians(rounds: list[dict[str, Any]], threads: str) -> dict[str, float]:
    names = ("disk", "generated", "of_goal")
    return {name: statistics.median(found[threads][name] for found in rounds) for name in names}


def preprocessing(work: Path, given: argparse.Namespace, before: Record) -> Record:
    """Criteo's text to a data set, on one core."""
    text, target = work / "text.txt", work / "converted"
    rows = write_text(text, given.text_mb * 10**6)
    command = f"data preprocess --layout kaggle --frequency-threshold 3 --input {text}"
    command += f" --output {target} --threads 1"
    rates: list[float] = []
    for _ in range(given.rounds):
        rates.append(rate(dlrm(command)[0]))
        shutil.rmtree(target)
        print(f"preprocessing {rates[-1]:.0f} MB/s", flush=True)
    size = text.stat().st_size
    text.unlink()
    return {
        "command": f"dlrm {command}",
        "text_bytes": size,
        "rows": rows,
        "rounds": rates,
        "mb_per_s": statistics.median(rates),
        "goal": TEXT_MB_PER_CORE,
    }


def memory(work: Path, given: argparse.Namespace, before: Record) -> Record:
    """Peak resident memory of both at one size and at ten times that."""
    found: dict[str, Any] = {"generate": {}, "preprocess": {}}
    for factor in (1, 10):
        samples, target = factor * given.samples // 40, work / "generated"
        command = f"data generate {T15} --samples {samples}/{samples // 8} --output {target}"
        found["generate"][f"{factor}x"] = dlrm(command)[1]
        shutil.rmtree(target)
        text, target = work / "text.txt", work / "converted"
        write_text(text, factor * given.text_mb * 10**6 // 10)
        command = "data preprocess --layout kaggle --frequency-threshold 3 --memory-mb 16"
        found["preprocess"][f"{factor}x"] = dlrm(f"{command} --input {text} --output {target}")[1]
        shutil.rmtree(target)
        text.unlink()
        print(found, flush=True)
    return found | {
        "unit": "bytes",
        "samples_1x": given.samples // 40,
        "text_mb_1x": given.text_mb / 10,
        "preprocess_memory_mb": 16,
    }


def reading(work: Path, given: argparse.Namespace, before: Record) -> Record:
    """Shuffled batches of a data set in the page cache, every value checked."""
    target, found = work / "generated", {}
    dlrm(f"data generate {T15} --samples 2e6/1e4 --output {target}")
    source = open_source(target, "split_binary", "train")
    rows = tuple(column.rows or 0 for column in source.tables)
    for size in (65_536, 2_048):
        stream = SampleBatches(
            functools.partial(read_batch, source, rows), Epoch(source.samples, size), order_seed=0
        )
        times = []
        for _ in range(3 * (source.samples // size)):
            started = time.perf_counter()
            stream.next_batch()
            times.append(time.perf_counter() - started)
        median = statistics.median(times)
        found[str(size)] = {"ms_a_batch": 1e3 * median, "samples_per_second": size / median}
    shutil.rmtree(target)
    return found


PARTS: dict[str, Callable[[Path, argparse.Namespace, Record], Record]] = {
    "generation": generation,
    "preprocessing": preprocessing,
    "memory": memory,
    "reading": reading,
}


def main() -> None:
    """Measure, and add to the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1 << 25, help="default: as NVIDIA's")
    parser.add_argument("--text-mb", type=int, default=780)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/datasets.json"))
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    record: Record = read_json(given.json) if given.json.exists() else {}
    for name in given.only.split(","):
        if name not in PARTS:
            raise InputError(f"--only {name}: expected one of {', '.join(PARTS)}")
        part = PARTS[name](given.work.absolute(), given, record.get(name, {}))
        part["measured_by"] = " ".join(["python", *sys.argv])
        record |= {name: part, "machine": machine_facts(), "versions": versions()}
        write_json(given.json, record)
        print(name, {key: value for key, value in part.items() if key != "rounds"}, flush=True)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(str(error))
