"""Whether findings name planted faults, and stay silent on clean runs.

    python tests/campaigns/planted_faults.py --first 100 --trials 80 \\
        --json benchmarks/results/planted_faults.json

Each trial is a fresh process: a clean configuration of a random shape, one fault of random
magnitude planted in the real workload (``plants.py``), measured as ``dlrm record`` does, and
judged: is the planted fault the first finding? Trials and profiles are kept as they finish,
so that an interrupted run goes on where it was and ``--judge`` judges them by changed rules;
what is drawn for trial N depends on N alone, and rules were tuned on trials below 100. A trial
beside which other processes used the machine is measured again.
"""

import argparse
import dataclasses
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

SHAPES: dict[str, dict[str, Any]] = {
    # about the experiment's proportions, an eighth of its size
    "small": {
        "bottom_mlp": [256, 512, 64],
        "top_mlp": [512, 512, 1],
        "embedding_dim": 64,
        "tables": 8,
        "table_rows": 100_000,
        "batch_size": 2048,
        "indices_per_lookup": 10,
        "step_ms": 25.0,
    },
    # many narrow tables, one-hot, as click logs have them
    "one_hot": {
        "bottom_mlp": [64, 256, 32],
        "top_mlp": [512, 256, 1],
        "embedding_dim": 32,
        "tables": 16,
        "table_rows": 50_000,
        "batch_size": 4096,
        "indices_per_lookup": 1,
        "step_ms": 25.0,
    },
    # wide MLPs over few tables
    "dense": {
        "bottom_mlp": [512, 1024, 64],
        "top_mlp": [1024, 1024, 1],
        "embedding_dim": 64,
        "tables": 4,
        "table_rows": 200_000,
        "batch_size": 1024,
        "indices_per_lookup": 10,
        "step_ms": 25.0,
    },
}
ITERATIONS = 12
TRIAL_SECONDS = 100
DISTURBED_CORES = 0.1
"""Cores that processes beside the trial may use; a trial beside more is measured again."""

PROBE_SECONDS = 4.0
"""Of part probes; a report's own default is longer."""


def sections_of(shape: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Parameters of a clean run: every fast option that this version has."""
    from dlrm_core.config import TrainingConfig

    known = {field.name for field in dataclasses.fields(TrainingConfig)}
    fast = {
        "precision": "bf16",
        "fp32_matmul": "onednn",
        "embedding_backend": "fused",
        "fused_optimizer": True,
    }
    batch = round(shape["batch_size"] * draw.choice([0.75, 1.0, 1.25]))
    return {
        "title": "planted faults",
        "model": {
            "bottom_mlp": list(shape["bottom_mlp"]),
            "top_mlp": list(shape["top_mlp"]),
            "embedding_dim": shape["embedding_dim"],
            "tables": shape["tables"],
            "table_rows": [round(shape["table_rows"] * draw.uniform(0.7, 1.5))] * shape["tables"],
            "init": "torch",
        },
        "data": {
            "generator": "uniform",
            "indices_per_lookup": shape["indices_per_lookup"],
            "loader": "synchronous",
        },
        "training": {
            "batch_size": batch,
            "seed": draw.randrange(2**31),
            "device": "cpu",
            **{name: value for name, value in fast.items() if name in known},
        },
        "profiling": {"engine": "torch", "warmup": 3, "iterations": ITERATIONS},
    }


def trial(number: int, fault: str, profiles: Path, shape: str | None = None) -> dict[str, Any]:
    """Plant and measure, in a process of its own; the profile is kept to be judged."""
    import plants

    import dlrm_workbook.evidence.probes as part_probes
    from dlrm_core.config import parameters_from_sections
    from dlrm_workbook.recordings.torch.recorder import record_workload
    from dlrm_workbook.recordings.torch.trace import read_recording

    part_probes.PROBE_SECONDS = PROBE_SECONDS
    probed = part_probes.default_changes
    # other batch sizes and overlapped loading take most of the time; no fault is about them
    part_probes.default_changes = lambda parameters: [
        change
        for change in probed(parameters)
        if not set(change) & {"training.batch_size", "data.loader"}
    ]
    draw = random.Random(f"{number} {fault}")
    name = shape or draw.choice(sorted(SHAPES))
    sections = sections_of(SHAPES[name], draw)
    setting = plants.Setting(draw, sections, SHAPES[name]["step_ms"])
    started = time.perf_counter()
    folder = profiles / f"{number}-{fault}"
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        with plants.planted(fault, setting):
            parameters = parameters_from_sections(sections)
            recording = record_workload(parameters, Path(temporary) / "recording")
        read_recording(recording).save(folder)
    return {
        "trial": number,
        "fault": fault,
        "shape": name,
        "batch_size": sections["training"]["batch_size"],
        "planted": setting.planted,
        "seconds": round(time.perf_counter() - started, 1),
    }


def judged(row: dict[str, Any], profiles: Path) -> dict[str, Any]:
    """The trial with what the findings say of its profile."""
    from plants import FAULTS

    from dlrm_workbook.analysis.attribution import attribute
    from dlrm_workbook.analysis.findings import findings, limit
    from dlrm_workbook.analysis.findings.evidence import Evidence
    from dlrm_workbook.recordings.profile import Profile

    profile = Profile.load(profiles / f"{row['trial']}-{row['fault']}")
    attribution = attribute(profile)
    found = findings(profile, attribution)
    ids = [finding.id for finding in found]
    expected = FAULTS[row["fault"]][1]
    evidence = Evidence(profile, attribution)
    others = evidence.machine_share("other_processes_cpu_ms")
    confined = os.sched_getaffinity(0) != set(range(os.cpu_count() or 1))
    if confined:  # others may use the other cores; what counts is waiting for ours
        own = ("straggler_thread", "many_threads")
        others = 0.0 if row["fault"] in own else evidence.share_of_wall("run_queue_ms")
    return row | {
        "findings": ids,
        "speedups": [round(f.predicted_speedup.get("mid", 1.0), 3) for f in found],
        "first_title": found[0].title if found else "",
        "limit": limit(profile, attribution),
        "step_ms": round(evidence.step_ms, 2),
        "other_processes_cores": round(others, 3),
        # not the trial's doing: it is measured again, whatever was found
        "disturbed": row["fault"] != "competing_process"
        and bool(_probes_disturbed(evidence) or others > DISTURBED_CORES),
        "rank": next((place for place, i in enumerate(ids, 1) if i in expected), None),
        "good": (ids[0] in expected if ids else False) if expected else not ids,
    }


def _probes_disturbed(evidence: Any) -> bool:
    """Whether most parts took longer alone than in the run: others used the machine then."""
    model = evidence.parts.dropna(subset=["alone_ms"])
    model = model[model["time_ms"] > 0.02 * evidence.step_ms]
    return bool((model["alone_ms"] > 1.5 * model["time_ms"]).mean() > 0.5)


def schedule(first: int, count: int) -> list[tuple[int, str]]:
    """Which fault trial N plants: half of all are clean, the others go round the faults."""
    from plants import FAULTS

    faults = [name for name in FAULTS if name != "clean"]
    random.Random(0).shuffle(faults)
    return [
        (number, "clean" if number % 2 else faults[number // 2 % len(faults)])
        for number in range(first, first + count)
    ]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a fault: trials, named first, named second, missed."""
    table = []
    for fault in sorted({row["fault"] for row in rows}):
        own = [row for row in rows if row["fault"] == fault]
        line: dict[str, Any] = {"fault": fault, "trials": len(own)}
        if fault == "clean":
            line |= {"silent": sum(row["good"] for row in own)}
            line["false_alarms"] = len(own) - line["silent"]
        else:
            line |= {
                "first": sum(row["rank"] == 1 for row in own),
                "second": sum(row["rank"] == 2 for row in own),
                "missed": sum(row["rank"] is None for row in own),
            }
        table.append(line)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=80, help="in all; half of them clean")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--faults-only", action="store_true", help="leave the clean trials out")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no trial after these")
    parser.add_argument(
        "--folder", default="outputs/planted_faults", help="results and profiles so far"
    )
    parser.add_argument("--json", default="", help="write the summary here")
    parser.add_argument("--judge", action="store_true", help="judge kept profiles, measure none")
    parser.add_argument("--one", default="", help="measure one trial: NUMBER:FAULT[:SHAPE]")
    options = parser.parse_args()
    folder = Path(options.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if options.one:
        number, fault, *shape = options.one.split(":")
        print(json.dumps(trial(int(number), fault, folder, *shape)))
        return
    lines = folder / "trials.jsonl"
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    if options.judge:
        rows = [judged(row, folder) for row in rows]
        for row in rows:
            tell(row)
    else:
        measure(options, folder, lines, rows)
    kept = latest(rows)
    for line in summary(kept):
        print(line)
    if options.json:
        repeated = sum(row["disturbed"] for row in rows)
        write_summary(Path(options.json), kept, repeated, options.first, options.trials)


def measure(
    options: argparse.Namespace, folder: Path, lines: Path, rows: list[dict[str, Any]]
) -> None:
    """Run the trials that are not there yet, each in a fresh process."""
    started = time.perf_counter()
    done = {(row["trial"], row["fault"]) for row in rows if not row["disturbed"]}
    for number, fault in schedule(options.first, options.trials):
        if (number, fault) in done or time.perf_counter() - started > options.seconds:
            continue
        if fault == "clean" and options.faults_only:
            continue
        if fault == "one_thread" and len(os.sched_getaffinity(0)) == 1:
            continue  # one core is no fault of the run's
        command = [sys.executable, __file__, "--one", f"{number}:{fault}"]
        command += ["--folder", str(folder)]
        try:
            made = subprocess.run(
                command, capture_output=True, text=True, cwd=ROOT, timeout=TRIAL_SECONDS
            )
        except subprocess.TimeoutExpired:
            print(f"trial {number} ({fault}) was ended after {TRIAL_SECONDS} s", file=sys.stderr)
            continue
        if made.returncode:
            print(f"trial {number} ({fault}) failed:\n{made.stderr[-2000:]}", file=sys.stderr)
            continue
        row = judged(json.loads(made.stdout.splitlines()[-1]), folder)
        rows.append(row)
        with lines.open("a") as file:
            file.write(json.dumps(row) + "\n")
        tell(row)


def tell(row: dict[str, Any]) -> None:
    mark = "ok  " if row["good"] else "MISS"
    print(
        f"{'again' if row['disturbed'] else mark:5s} {row['trial']:3d} {row['fault']:20s} "
        f"{row['shape']:8s} {row['step_ms']:7.1f} ms {row['seconds']:5.1f} s {row['planted']} "
        f"{list(zip(row['findings'], row['speedups'], strict=True))}",
        flush=True,
    )


def latest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last undisturbed measurement of each trial."""
    found = {(row["trial"], row["fault"]): row for row in rows if not row["disturbed"]}
    return [found[key] for key in sorted(found)]


def write_summary(
    path: Path, rows: list[dict[str, Any]], repeated: int, first: int, count: int
) -> None:
    """The table with the machine and the versions it was made on."""
    import torch

    from dlrm_core.base.files import write_json
    from dlrm_workbook.ground.machine import machine_facts

    faulty = [row for row in rows if row["fault"] != "clean"]
    clean = [row for row in rows if row["fault"] == "clean"]
    write_json(
        path,
        {
            "command": f"python tests/campaigns/planted_faults.py --first {first} --trials {count} "
            f"--json benchmarks/results/{path.name}",
            "cores": len(os.sched_getaffinity(0)),
            "machine": machine_facts(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "faulty_trials": len(faulty),
            "named_first": sum(row["good"] for row in faulty),
            "repeated_because_others_used_the_machine": repeated,
            "clean_trials": len(clean),
            "false_alarms": sum(not row["good"] for row in clean),
            "table": summary(rows),
            "trials": rows,
        },
    )


if __name__ == "__main__":
    main()
