"""``dlrm bench --embeddings``: back ends of the embeddings side by side, and the updates.

As in :mod:`dlrm_workbook.studies.bench.measure` every round runs each contestant in a fresh
process, in an order that changes from round to round, and a ratio is the median of the
rounds' own. That all of them do the same work is checked in the same run: rows that were
updated, and pooled vectors, are compared with the reference's.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_core.errors import InputError
from dlrm_core.files import read_json, write_json
from dlrm_core.ledger import Ledger
from dlrm_core.units import counted
from dlrm_workbook.evidence.contestants import environment_of, require_peer, settings
from dlrm_workbook.processes import python_module, run_child
from dlrm_workbook.studies.bench import embeddings_run
from dlrm_workbook.studies.bench.cases import thread_counts
from dlrm_workbook.studies.bench.embeddings_run import (
    DIM,
    FACEBOOK,
    FUSED,
    MEMORY,
    PHASES,
    ROWS,
    TABLES,
    EmbeddingCase,
    groups_of,
)
from dlrm_workbook.studies.bench.measure import ADVICE, heading
from dlrm_workbook.turns import rotated, take_turns

KIND, SCHEMA = "dlrm bench --embeddings", 1

RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""Results may differ by so much of a value and so much beside. A hot row's value is the sum
of some 10^5 steps, each rounded at the size of the sum (2^-24), more or less in one
direction; one step that is lost changes an ordinary row by 5e-4."""

Times = Mapping[str, Mapping[str, Sequence[float]]]
Run = Callable[[str, Sequence[EmbeddingCase], int, int, "Path | None", Path], Times]


def bench_embeddings(arguments: argparse.Namespace, command: str) -> int:
    """``dlrm bench --embeddings``: print each case; with ``--json`` keep every round.

    Args:
        command: as the document keeps it.

    Returns:
        0; 1 if a contestant failed or computed something else.
    """
    peer = Path(arguments.peer) if arguments.peer else None
    if peer is not None:
        require_peer(peer)
    file = Path(arguments.json) if arguments.json else None
    counts = thread_counts(arguments.threads)
    if min(counts) < 1:
        raise InputError(f"--threads is '{arguments.threads}', expected counts from 1 on")
    ledger = open_ledger(file, arguments.iterations, peer is not None, command, arguments.resume)
    measured: list[dict[str, Any]] = []
    for threads in counts:
        ledger.document["settings"]["environment"][str(threads)] = settings(threads)
        for group in groups_of(arguments.embeddings).values():
            measured += run_group(ledger, group, threads, arguments.rounds, peer)
    print("\n\n".join(describe(case) for case in measured), flush=True)
    return 0 if all(case["agree"] and not case["failures"] for case in measured) else 1


def open_ledger(
    file: Path | None, iterations: int, with_peer: bool, command: str = "", resume: bool = False
) -> Ledger:
    """A new document, or the one in the file to go on with.

    Raises:
        InputError: that is another benchmark's, or of other settings or another machine.
    """
    document = heading(KIND, SCHEMA, command) | {
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

    def work(begun: Mapping[str, Any]) -> Mapping[str, Any]:
        """What must be equal for rounds to be compared."""
        settings = {n: value for n, value in begun["settings"].items() if n != "environment"}
        return {n: begun[n] for n in ("kind", "schema", "machine", "versions")} | settings

    ledger = Ledger(
        file,
        document,
        work=work,
        entries="cases",
        key=("case", "threads"),
        advice=ADVICE,
        resume=resume,
    )
    begun = ledger.document
    begun["commands"] = list(dict.fromkeys([*begun["commands"], *document["commands"]]))
    return ledger


def run_group(
    ledger: Ledger,
    group: Sequence[EmbeddingCase],
    threads: int,
    rounds: int,
    peer: Path | None = None,
    run: Run | None = None,
) -> list[dict[str, Any]]:
    """Run the rounds that a group of cases lacks in the ledger, and judge it anew.

    Returns:
        the entries of the group's cases.
    """
    iterations = ledger.document["settings"]["iterations"]
    if rounds < 1 or iterations < 1:
        raise InputError(
            f"a benchmark needs rounds >= 1 and iterations >= 1, not {rounds} and {iterations}"
        )
    entries = [ledger.find(case.name, threads) or new_entry(case, threads) for case in group]
    done = len(entries[0]["rounds"])
    for number, names in take_turns(group[0].contestants, rounds, rotated, first=done):
        measured: list[dict[str, Any]] = [{} for _ in group]
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                samples = Path(folder) / name
                samples.mkdir()
                try:
                    times = (run or run_process)(name, group, threads, iterations, peer, samples)
                except InputError as error:
                    for entry in entries:
                        entry["failures"][name] = str(error)
                    print(f"round {number + 1}, {name} FAILED: {error}", file=sys.stderr)
                    continue
                for entry, case, figures in zip(entries, group, measured, strict=True):
                    entry["failures"].pop(name, None)
                    figures[name] = _medians(times[case.name])
                    said = f"{case.name}, {threads} threads, round {number + 1}/{rounds}, {name}"
                    total = figures[name]["total_ms"]
                    print(f"{said}: {total:.1f} ms", file=sys.stderr, flush=True)
            for entry, case, figures in zip(entries, group, measured, strict=True):
                entry["rounds"].append(figures)
                entry["differences"].append(differences(Path(folder), case.name, names))
                judge(entry, case)
        for entry in entries:
            ledger.put(entry)
    return entries


def new_entry(case: EmbeddingCase, threads: int) -> dict[str, Any]:
    """The entry of a case before its first round."""
    return {
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
    done = run_child(
        python_module(embeddings_run.__name__, specification, output),
        stage=name,
        environment=environment_of(threads),
    )
    if done.exit_code != 0:
        raise InputError(done.last_words())
    found: Times = read_json(output)["times"]
    return found


def _medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    totals = [sum(phases) for phases in zip(*(times[phase] for phase in PHASES), strict=True)]
    figures = {f"{phase}_ms": statistics.median(times[phase]) for phase in PHASES}
    return figures | {"total_ms": statistics.median(totals)}


def differences(folder: Path, case: str, names: Sequence[str]) -> dict[str, float]:
    """Largest difference of each contestant's results from the reference's.

    Returns:
        contestant to a share of what may differ: above 1 it did not compute the same.
    """
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
    lines = [f"{row['meaning']}, {counted(row['threads'], 'thread')}"]
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
