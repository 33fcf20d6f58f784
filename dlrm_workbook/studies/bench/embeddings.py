"""``dlrm bench --embeddings``: back ends of the embeddings side by side, and the updates.

As in :mod:`dlrm_workbook.studies.bench.command`: every round runs each contestant in a fresh
process, in an
order that changes from round to round, and a ratio is the median of the rounds' own. That
all of them do the same work is checked in the same run: rows that were updated, and
pooled vectors, are compared with the reference's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm_core.errors import InputError
from dlrm_core.files import write_json
from dlrm_core.machine import machine_facts
from dlrm_workbook.studies.bench.embeddings_run import (
    DIM,
    FACEBOOK,
    FUSED,
    MEMORY,
    ROWS,
    TABLES,
    EmbeddingCase,
    groups_of,
)
from dlrm_workbook.studies.bench.runs import environment_of, require_peer, settings

KIND, SCHEMA = "dlrm bench --embeddings", 1

RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""Results may differ by so much of a value and so much beside. A hot row's value is the sum
of some 10^5 steps, each rounded at the size of the sum (2^-24), more or less in one
direction; one step that is lost changes an ordinary row by 5e-4."""

PHASES = ("forward", "backward", "update")
Times = Mapping[str, Mapping[str, Sequence[float]]]
Run = Callable[[str, Sequence[EmbeddingCase], int, int, "Path | None", Path], Times]


def bench_embeddings(arguments: argparse.Namespace) -> int:
    """``dlrm bench --embeddings``: print each case; with ``--json`` keep every round.

    Returns:
        0; 1 if a contestant failed or computed something else.
    """
    peer = Path(arguments.peer) if arguments.peer else None
    if peer is not None:
        require_peer(peer)
    file = Path(arguments.json) if arguments.json else None
    document = new_document(arguments.iterations, peer is not None)
    if file is not None and arguments.resume and file.exists():
        document = resumed(json.loads(file.read_text()), document, file)
    command = " ".join("DIR" if word == arguments.peer else word for word in arguments.argv)
    document["commands"] = list(dict.fromkeys([*document["commands"], command]))
    touched = []
    for threads in _counts(arguments.threads):
        document["settings"]["environment"][str(threads)] = settings(threads)
        for group in groups_of(arguments.embeddings).values():
            run_group(document, group, threads, arguments.rounds, arguments.iterations, peer, file)
            touched += [case for case in document["cases"] if _is_of(case, group, threads)]
    print("\n\n".join(describe(case) for case in touched), flush=True)
    return 0 if all(case["agree"] and not case["failures"] for case in touched) else 1


def run_group(
    document: dict[str, Any],
    group: Sequence[EmbeddingCase],
    threads: int,
    rounds: int,
    iterations: int,
    peer: Path | None,
    file: Path | None,
    run: Run | None = None,
) -> None:
    """Run the rounds that a group of cases lacks in the document, and judge it anew."""
    if rounds < 1 or iterations < 1:
        raise InputError(
            f"a benchmark needs rounds >= 1 and iterations >= 1, not {rounds} and {iterations}"
        )
    rows = [_row_of(document, case, threads) for case in group]
    for number in range(len(rows[0]["rounds"]), rounds):
        # whoever runs second inherits a busy machine: take turns at that too
        names = list(group[0].contestants)
        names = names[number % len(names) :] + names[: number % len(names)]
        measured: list[dict[str, Any]] = [{} for _ in group]
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                samples = Path(folder) / name
                samples.mkdir()
                try:
                    times = (run or run_process)(name, group, threads, iterations, peer, samples)
                except InputError as error:
                    for row in rows:
                        row["failures"][name] = str(error)
                    print(f"round {number + 1}, {name} FAILED: {error}", file=sys.stderr)
                    continue
                for row, case, into in zip(rows, group, measured, strict=True):
                    row["failures"].pop(name, None)
                    into[name] = _medians(times[case.name])
                    said = f"{case.name}, {threads} threads, round {number + 1}/{rounds}, {name}"
                    print(f"{said}: {into[name]['total_ms']:.1f} ms", file=sys.stderr, flush=True)
            for row, case, into in zip(rows, group, measured, strict=True):
                row["rounds"].append(into)
                row["differences"].append(differences(Path(folder), case.name, names))
                judge(row, case)
        if file is not None:
            write_json(file, document)


def run_process(
    name: str,
    group: Sequence[EmbeddingCase],
    threads: int,
    iterations: int,
    peer: Path | None,
    samples: Path,
) -> Times:
    """One contestant in a process of its own.

    Raises:
        InputError: it fails; with what it said last.
    """
    specification = samples / "spec.json"
    write_json(
        specification,
        {
            "contestant": name,
            "cases": [dataclasses.asdict(case) for case in group],
            "rows": ROWS,
            "threads": threads,
            "iterations": iterations,
            "peer": str(peer.absolute()) if peer else None,
            "samples": str(samples),
        },
    )
    output = samples / "times.json"
    done = subprocess.run(
        [sys.executable, "-m", "dlrm_workbook.studies.bench.embeddings_run", specification, output],
        env=environment_of(threads),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise InputError(last.removeprefix("dlrm_core.errors.MissingToolError: "))
    found: Times = json.loads(output.read_text())["times"]
    return found


def _medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    totals = [sum(phases) for phases in zip(*(times[phase] for phase in PHASES), strict=True)]
    figures = {f"{phase}_ms": statistics.median(times[phase]) for phase in PHASES}
    return figures | {"total_ms": statistics.median(totals)}


def differences(folder: Path, case: str, names: Sequence[str]) -> dict[str, float]:
    """Largest difference of each contestant's results from the reference's, as a share of
    what may differ: above 1 it did not compute the same."""
    kept = {}
    for name in names:
        file = folder / name / f"{case}.npz"
        if file.is_file():
            with np.load(file) as arrays:
                kept[name] = {key: arrays[key] for key in arrays.files}
    reference = next((name for name in (FACEBOOK, "race_free") if name in kept), None)
    if reference is None:
        return {}
    base = kept[reference]
    return {
        name: max(_share(base[key], mine[key]) for key in base)
        for name, mine in kept.items()
        if name != reference
    }


def _share(expected: np.ndarray, found: np.ndarray) -> float:
    if expected.shape != found.shape or not np.isfinite(found).all():
        return float("inf")
    allowed = ABSOLUTE + RELATIVE * np.abs(expected)
    return float((np.abs(found - expected) / allowed).max())


def judge(row: dict[str, Any], case: EmbeddingCase) -> None:
    """Medians, ratios, shares of the memory's pace, and whether all computed the same."""
    rounds = row["rounds"]
    names = [name for name in case.contestants if all(name in one for one in rounds)]
    row["contestants"] = {
        name: {
            figure: statistics.median(one[name][figure] for one in rounds)
            for figure in rounds[0][name]
        }
        for name in names
    }
    row["ratios"] = {
        name: {
            against: _ratio([one[against]["total_ms"] / one[name]["total_ms"] for one in rounds])
            for against in names
            if against != name and MEMORY not in (against, name)
        }
        for name in names
        if name != MEMORY
    }
    row["share_of_row_accesses"] = (
        {
            phase: _ratio([one[MEMORY][phase] / one[FUSED][phase] for one in rounds])
            for phase in ("forward_ms", "backward_ms", "total_ms")
        }
        if MEMORY in names and FUSED in names
        else None
    )
    found = [value for one in row["differences"] for value in one.values()]
    row["agree"] = bool(found) and max(found) <= 1.0
    row["targets"] = [
        {
            "against": against,
            "wanted": wanted,
            "reached": row["ratios"].get(FUSED, {}).get(against, {}).get("median"),
        }
        for against, wanted in case.targets
    ]


def _ratio(ratios: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def describe(row: Mapping[str, Any]) -> str:
    """A case as a table of text."""
    threads = row["threads"]
    lines = [f"{row['meaning']}, {threads} thread{'s' if threads > 1 else ''}"]
    lines.append(f"{'':<12}{'forward':>10}{'backward':>10}{'update':>10}{'all, ms':>10}")
    for name, figures in row["contestants"].items():
        cells = "".join(f"{figures[f'{phase}_ms']:>10.2f}" for phase in (*PHASES, "total"))
        lines.append(f"{name:<12}{cells}")
    best = FUSED if FUSED in row["contestants"] else "race_free"
    for against, ratio in row["ratios"].get(best, {}).items():
        wanted = next((t["wanted"] for t in row["targets"] if t["against"] == against), None)
        goal = f", wanted {wanted:.1f}x" if wanted else ""
        lines.append(
            f"{best} is {ratio['median']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f}) "
            f"as fast as {against}{goal}"
        )
    if share := row["share_of_row_accesses"]:
        lines.append(
            f"{share['total_ms']['median']:.0%} of the pace of bare accesses to the same rows "
            f"(forward {share['forward_ms']['median']:.0%}, "
            f"backward {share['backward_ms']['median']:.0%})"
        )
    lines.append("the same results" if row["agree"] else "NOT the same results")
    lines += [f"{name} did not run: {why}" for name, why in row["failures"].items()]
    return "\n".join(lines)


def new_document(iterations: int, with_peer: bool) -> dict[str, Any]:
    """A benchmark's document before its first case."""
    versions = {"torch": torch.__version__, "numpy": np.__version__}
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "commands": [],
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine_facts(),
        "versions": versions,
        "settings": {
            "tables": TABLES,
            "rows": ROWS,
            "dim": DIM,
            "iterations": iterations,
            "rowwise_adagrad_of_facebook": (
                "RWSAdagrad of the checkout" if with_peer else "our torch oracle, the same law"
            ),
            "environment": {},
        },
        "cases": [],
    }


def resumed(before: dict[str, Any], now: dict[str, Any], file: Path) -> dict[str, Any]:
    """The document in a file, to go on with.

    Raises:
        InputError: it is another benchmark's, or of other settings or another machine.
    """
    for name in ("kind", "schema", "machine", "versions"):
        if before.get(name) != now[name]:
            raise InputError(
                f"{file}: cannot be gone on with, its {name} is {before.get(name)!r}, "
                f"now it would be {now[name]!r}"
            )
    changed = {
        name: (before["settings"].get(name), value)
        for name, value in now["settings"].items()
        if name != "environment" and before["settings"].get(name) != value
    }
    if changed:
        name, (old, new) = next(iter(changed.items()))
        raise InputError(f"{file}: cannot be gone on with, its {name} is {old!r}, not {new!r}")
    return before


def _row_of(document: dict[str, Any], case: EmbeddingCase, threads: int) -> dict[str, Any]:
    for row in document["cases"]:
        if row["case"] == case.name and row["threads"] == threads:
            return row
    row = {
        "case": case.name,
        "meaning": case.meaning,
        "threads": threads,
        "optimizer": case.optimizer,
        "pooling": case.pooling,
        "batch": case.batch,
        "skew": case.skew,
        "rounds": [],
        "differences": [],
        "failures": {},
    }
    document["cases"].append(row)
    return row


def _is_of(row: Mapping[str, Any], group: Sequence[EmbeddingCase], threads: int) -> bool:
    return row["threads"] == threads and row["case"] in [case.name for case in group]


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in str(text).split(",")]
    except ValueError:
        raise InputError(f"--threads is '{text}', expected counts: 1,2") from None
    if min(counts) < 1:
        raise InputError(f"--threads is '{text}', expected counts from 1 on")
    return counts
