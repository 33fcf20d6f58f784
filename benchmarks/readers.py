"""Times of three readers on one chrome trace, in turns: ours, HolisticTraceAnalysis, TraceLens.

    python benchmarks/readers.py TRACE --peers PYTHON [--megabytes N] [--rounds 5] [--json FILE]

``PYTHON`` is that of an environment with the peers, which are no part of this project; TraceLens
may lie on PYTHONPATH. The trace is repeated, in torch's own format, until its text is so long. Each
reader runs in a process of its own, from its start to its figures of the GPU's busy time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from dlrm_core.base.files import write_json
from dlrm_workbook.ground.machine import machine_facts, versions

HTA = """import sys
from hta.trace_analysis import TraceAnalysis
trace = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
print(trace.get_temporal_breakdown(visualize=False).to_string())
"""
TRACELENS = """import sys
from TraceLens import TreePerfAnalyzer
print(TreePerfAnalyzer.from_file(sys.argv[1]).get_df_gpu_timeline().to_string())
"""
NUMBERS = ("correlation", "External id", "external id", "Sequence number", "Python id")
NUMBERS += ("Python parent id", "Ev Idx")
"""Arguments that are counted through a trace."""


def repeated(trace: Path, file: Path, megabytes: float) -> int:
    """Write the trace one time after the other until its text is so long; the events written."""
    text = trace.read_bytes()
    document = json.loads(gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text)
    events = document.pop("traceEvents")
    spans = [event for event in events if event.get("ph") == "X"]
    first = min(event["ts"] for event in spans)
    length = max(event["ts"] + event.get("dur", 0) for event in spans) - first + 1000
    counted = [event.get("args", {}).get(name, 0) for event in events for name in NUMBERS]
    counted += [event.get("id", 0) for event in events]
    numbers = 1 + max(value for value in counted if isinstance(value, int))
    written = size = 0
    with file.open("w", encoding="utf-8") as out:
        out.write(json.dumps(document)[:-1] + ', "traceEvents": [\n')
        for turn in range(10**6):
            for event in events:
                if (event.get("ph") == "M" and turn) or size > 1e6 * megabytes:
                    continue
                text_of = _shifted(event, turn * length, turn * numbers)
                size += out.write(",\n" * bool(written) + text_of)
                written += 1
            if size > 1e6 * megabytes:
                break
        out.write("\n]}\n")
    return written


def _shifted(event: dict[str, Any], time_us: float, number: int) -> str:
    event = dict(event)
    if "ts" in event:
        event["ts"] = round(event["ts"] + time_us, 3)
    if isinstance(event.get("id"), int):
        event["id"] += number
    if isinstance(event.get("args"), dict):
        event["args"] = {
            name: value + number if name in NUMBERS and isinstance(value, int) else value
            for name, value in event["args"].items()
        }
    return json.dumps(event)


def measured(command: list[str]) -> dict[str, float]:
    """Seconds that a command takes, and the peak memory of the process (not of its children)."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"{' '.join(command[:3])} failed")
    return {"seconds": time.perf_counter() - began, "gib": usage.ru_maxrss / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--peers", required=True, help="Python that has the peers")
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        events = repeated(options.trace, trace, options.megabytes)
        readers = {
            "dlrm inspect": [sys.executable, "-m", "dlrm_workbook", "inspect", str(trace)],
            "HolisticTraceAnalysis": [options.peers, "-c", HTA, str(trace)],
            "TraceLens": [options.peers, "-c", TRACELENS, str(trace)],
        }
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in readers}
        for _ in range(options.rounds):
            for name, command in readers.items():
                rounds[name].append(measured(command))
                print(name, rounds[name][-1], flush=True)
    ours_s = [one["seconds"] for one in rounds["dlrm inspect"]]
    rows = []
    for name, runs in rounds.items():
        ratios = [one["seconds"] / ours for one, ours in zip(runs, ours_s, strict=True)]
        rows.append(
            {
                "reader": name,
                "seconds": statistics.median(one["seconds"] for one in runs),
                "times_ours": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "gib": max(one["gib"] for one in runs),
            }
        )
        print(rows[-1])
    if options.json:
        command = f"python benchmarks/readers.py {options.trace.name} --peers PYTHON"
        facts = {"command": command, "date": f"{date.today()}", "machine": machine_facts()}
        facts |= {"versions": versions(), "trace": options.trace.name}
        facts |= {"megabytes": options.megabytes, "events": events, "rounds": options.rounds}
        write_json(Path(options.json), {**facts, "readers": rows})


if __name__ == "__main__":
    main()
