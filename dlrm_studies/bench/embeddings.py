"""``dlrm bench --embeddings``: back ends of the embeddings side by side.

As in :mod:`dlrm_studies.bench.measure` every round runs each contestant in a fresh
process, in an order that changes from round to round, and a ratio is the median of the
rounds' own. That all of them do the same work is checked in the same run: rows that were
updated, and pooled vectors, are compared with the reference's.

``python -m dlrm_studies.bench.embeddings JOB RESULT`` is the process of one contestant.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

from dlrm_core.base.errors import InputError
from dlrm_core.base.text import counted
from dlrm_core.config import TrainingConfig
from dlrm_core.data.batch import Batch
from dlrm_core.data.synthetic import SyntheticBatches
from dlrm_core.embeddings import ROW_DTYPES, EmbeddingTables, attach, torch_optimizer
from dlrm_core.optimizers import OPTIMIZERS
from dlrm_kernels.embeddings.pages import tables_on_huge_pages
from dlrm_studies.bench.cases import chosen_names, thread_counts
from dlrm_studies.bench.measure import heading, ledger_of_cases
from dlrm_studies.bench.rows import cache_flush, row_access_ms
from dlrm_workbook.evidence.contestants import environment_of, require_peer, settings
from dlrm_workbook.ground.ledger import Ledger
from dlrm_workbook.ground.processes import do_job, run_job
from dlrm_workbook.ground.turns import CPU, elapsed_ms, rotated, take_turns
from dlrm_workbook.ground.units import faster

TABLES, ROWS, DIM = 8, 1_000_000, 64
"""Small of Kalamkar et al. 2020 (arXiv:2005.04680), with minibatch 2048 and 50 lookups a bag."""

FACEBOOK, TORCH, FBGEMM, FUSED, MEMORY = "facebook", "torch", "fbgemm", "fused", "memory"
BACK_ENDS = (FACEBOOK, TORCH, FBGEMM, FUSED, MEMORY)
FUSED_BF16, MEMORY_BF16 = "fused bf16", "memory bf16"
"""The same on rows stored in bf16 (``model.embedding_precision``)."""

PHASES = ("forward", "backward", "update")


@dataclass(frozen=True)
class EmbeddingCase:
    """Forward, backward and update of all tables under one law of indices.

    Attributes:
        pooling: lookups of every bag.
        skew: exponent of the power law of rows, row 0 hottest; None: uniform.
        reuse: rows are used again as often as in production tables, whatever ``skew`` says.
        contestants: back ends.
        targets: contestant to the speed-up over it that ``ours`` is to reach.
    """

    name: str
    optimizer: str
    pooling: int
    batch: int = 2048
    skew: float | None = None
    contestants: tuple[str, ...] = BACK_ENDS
    targets: tuple[tuple[str, float], ...] = ()
    reuse: bool = False

    @property
    def ours(self) -> str:
        """The contestant that the ratios are about, where it runs."""
        return FUSED_BF16 if FUSED_BF16 in self.contestants else FUSED

    @property
    def meaning(self) -> str:
        """One line for readers."""
        law = "uniform rows" if self.skew is None else f"rows by a power law ({self.skew})"
        if self.reuse:
            law = "rows used again as in production"
        lookups = f"{self.pooling} lookup{'s' if self.pooling > 1 else ''} a bag"
        return f"{self.optimizer}, batch {self.batch}, {lookups}, {law}"


def _listed() -> dict[str, tuple[EmbeddingCase, ...]]:
    text = Path(__file__).with_name("embeddings.yaml").read_text(encoding="utf-8")
    groups = {}
    for group, cases in yaml.safe_load(text).items():
        for case in cases:
            case["contestants"] = tuple(case.get("contestants", BACK_ENDS))
            case["targets"] = tuple(case.get("targets", {}).items())
        groups[group] = tuple(EmbeddingCase(**case) for case in cases)
    return groups


CASE_GROUPS = _listed()
"""Cases that share a process of each contestant."""


def groups_of(names: str) -> dict[str, tuple[EmbeddingCase, ...]]:
    """Groups by their names, comma-separated; ``all`` for every one.

    Raises:
        InputError: a name is unknown.
    """
    return {name: CASE_GROUPS[name] for name in chosen_names(names, CASE_GROUPS, "--embeddings")}


# One contestant, in a process of its own.

RATE = 0.1
EMBEDDING_WARMUP = 2
SAMPLED_ROWS, SAMPLED_BAGS = 300, 32
Phases = tuple[Callable[[], None], Callable[[], None], Callable[[], None]]


class Contestant:
    """Tables with the same initial weights for everyone, and who works on them."""

    def __init__(self, name: str, peer: str | None, rows: int) -> None:
        self.name, _, stored = name.partition(" ")
        self.peer = Path(peer) if peer else None
        self.rows = rows
        if self.name in (FACEBOOK, TORCH):
            dtype = ROW_DTYPES[stored or "fp32"]
            self.tables = EmbeddingTables([rows] * TABLES, DIM, dtype=dtype)
        else:
            self.tables = tables_on_huge_pages([rows] * TABLES, DIM, stored or "fp32")
        self.update: Any = None

    def reset(self, optimizer: str) -> None:
        """Initial weights, and an optimiser without state."""
        weights = self.tables.weights
        with torch.no_grad():
            random = torch.Generator().manual_seed(0)
            drawn = torch.empty(self.rows, DIM).uniform_(-1e-3, 1e-3, generator=random)
            for weight in weights:
                weight.copy_(drawn)
            del drawn
        self.update = None  # frees its state before the next is made
        self.tables.backend = None
        if self.name == FACEBOOK:
            self.update = self._facebook_optimizer(optimizer)
        elif self.name != MEMORY:
            config = TrainingConfig(
                optimizer=optimizer, learning_rate=RATE, embedding_backend=self.name
            )
            self.update = attach(self.tables, config)

    def _facebook_optimizer(self, optimizer: str) -> Any:
        """As dlrm_s_pytorch.py makes it: torch's defaults, RWSAdagrad from the checkout."""
        weights = self.tables.weights
        if not OPTIMIZERS[optimizer].per_row:
            name, options = OPTIMIZERS[optimizer].tables
            return getattr(torch.optim, name)(weights, lr=RATE, **(options | {"foreach": None}))
        if self.peer is None:
            return torch_optimizer(self.tables, optimizer, RATE)
        return _rws_adagrad(self.peer)(weights, lr=RATE)

    def phases(self, batch: Batch, gradients: list[torch.Tensor], pooled: list[Any]) -> Phases:
        """Forward, backward and update of a batch; the vectors go to ``pooled``."""
        modules = [table for table in self.tables.tables if isinstance(table, nn.EmbeddingBag)]
        inputs = [(batch.table_indices(t), batch.offsets[t]) for t in range(TABLES)]

        def lookup() -> list[torch.Tensor]:
            if self.name != FACEBOOK:
                return self.tables(batch)
            return [
                module(indices, offsets, per_sample_weights=None)
                for module, (indices, offsets) in zip(modules, inputs, strict=True)
            ]

        def forward() -> None:
            self.update.zero_grad()
            pooled[:] = lookup()

        def backward() -> None:
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward(pooled, gradients)

        return forward, backward, lambda: self.update.step()


def _rws_adagrad(peer: Path) -> Any:
    place = importlib.util.spec_from_file_location("rwsadagrad", peer / "optim" / "rwsadagrad.py")
    assert place is not None and place.loader is not None
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module.RWSAdagrad


def run_case(
    contestant: Contestant, case: dict[str, Any], iterations: int, samples: Path
) -> dict[str, list[float]]:
    """Milliseconds of forward, backward and update of each counted iteration.

    Where ours sorts lookups to update a row once, also of sorting alone (``sort``), which is a
    part of backward.
    """
    stream = batches_of(case, contestant.rows, iterations + EMBEDDING_WARMUP)
    contestant.reset(case["optimizer"])
    random = torch.Generator().manual_seed(1)
    # positive: sums without cancellation, so that results can be compared closely
    gradients = [
        (torch.rand(case["batch"], DIM, generator=random) + 0.5) * 1e-2 for _ in range(TABLES)
    ]
    flush = cache_flush(sum(weight.nbytes for weight in contestant.tables.weights))
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}
    pooled: list[torch.Tensor] = []
    for number, batch in enumerate(stream):
        if contestant.name == MEMORY:
            taken = [*row_access_ms(contestant.tables, batch, flush), 0.0]
        else:
            phases = contestant.phases(batch, gradients, pooled)
            flush()
            taken = [elapsed_ms(phase) for phase in phases]
        if number >= EMBEDDING_WARMUP:
            for phase, time_ms in zip(PHASES, taken, strict=True):
                times[phase].append(time_ms)
            if contestant.name == FUSED and contestant.update.sorts(batch):
                alone = functools.partial(contestant.update.sort_alone, batch)
                times.setdefault("sort", []).append(elapsed_ms(alone))
    if contestant.name != MEMORY:
        rows, vectors = _samples(contestant, stream[0], pooled)
        np.savez(samples / f"{case['name']}.npz", rows=rows, pooled=vectors)
    return times


def batches_of(case: dict[str, Any], rows: int, count: int) -> list[Batch]:
    """The batches of a case: the same for every contestant."""
    stream = SyntheticBatches(
        *(1, (rows,) * TABLES, case["batch"], case["pooling"], True, False, 7),
        zipf_exponent=case["skew"],
        reuse=case.get("reuse", False),
        device=CPU,
    )
    return [stream.next_batch() for _ in range(count)]


def _samples(
    contestant: Contestant, batch: Batch, pooled: list[torch.Tensor]
) -> tuple[np.ndarray, np.ndarray]:
    """Some rows that were updated, and some pooled vectors of the last iteration."""
    rows = [
        weight.detach()[batch.table_indices(t)[:SAMPLED_ROWS].unique()]
        for t, weight in enumerate(contestant.tables.weights)
    ]
    vectors = [vector.detach()[:SAMPLED_BAGS] for vector in pooled]
    return torch.cat(rows).float().numpy(), torch.cat(vectors).numpy()


KIND, SCHEMA = "dlrm bench --embeddings", 1

RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""Results may differ by so much of a value and so much beside. A hot row's value is the sum
of some 10^5 steps, each rounded at the size of the sum (2^-24), more or less in one
direction; one step that is lost changes an ordinary row by 5e-4."""

NARROW_RELATIVE, NARROW_ABSOLUTE = 2.0**-5, 2e-4
"""The same of rows in bf16, 2^-7 of a value in each of a few updates; a step that is lost still
changes a row by 5e-4."""

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
    ledger = open_embedding_ledger(
        file, arguments.iterations, peer is not None, command, arguments.resume
    )
    measured: list[dict[str, Any]] = []
    for threads in counts:
        ledger.document["settings"]["environment"][str(threads)] = settings(threads)
        for group in groups_of(arguments.embeddings).values():
            measured += run_group(ledger, group, threads, arguments.rounds, peer)
    print("\n\n".join(describe_embeddings(case) for case in measured), flush=True)
    return 0 if all(case["agree"] and not case["failures"] for case in measured) else 1


def open_embedding_ledger(
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

    return ledger_of_cases(file, document, work, resume)


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
                    print(
                        f"{case.name}, {threads} threads, round {number + 1}/{rounds}, {name}: "
                        f"{figures[name]['total_ms']:.1f} ms",
                        file=sys.stderr,
                        flush=True,
                    )
            for entry, case, figures in zip(entries, group, measured, strict=True):
                entry["rounds"].append(figures)
                entry["differences"].append(differences(Path(folder), case.name, names))
                judge(entry, case)
        for entry in entries:
            ledger.put(entry)
    return entries


def new_entry(case: EmbeddingCase, threads: int) -> dict[str, Any]:
    """The entry of a case before its first round."""
    laws = ("meaning", "optimizer", "pooling", "batch", "skew", "reuse")
    facts = {name: getattr(case, name) for name in laws}
    done: dict[str, Any] = {"rounds": [], "differences": [], "failures": {}}
    return {"case": case.name, "threads": threads, **facts, **done}


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
    job = {
        "contestant": name,
        "cases": [dataclasses.asdict(case) for case in group],
        "rows": ROWS,
        "threads": threads,
        "iterations": iterations,
        "peer": str(peer.absolute()) if peer else None,
        "samples": str(samples),
    }
    times: Times = run_job(__name__, job, stage=name, environment=environment_of(threads))
    return times


def _medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    totals = [sum(phases) for phases in zip(*(times[phase] for phase in PHASES), strict=True)]
    figures = {f"{phase}_ms": statistics.median(spent) for phase, spent in times.items()}
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
    if FACEBOOK not in kept:
        return {}
    base = kept[FACEBOOK]
    return {
        name: max(_share(base[key], mine[key], name == FUSED_BF16) for key in base)
        for name, mine in kept.items()
        if name != FACEBOOK
    }


def _share(expected: np.ndarray, computed: np.ndarray, narrow: bool = False) -> float:
    if expected.shape != computed.shape or not np.isfinite(computed).all():
        return float("inf")
    relative, absolute = (NARROW_RELATIVE, NARROW_ABSOLUTE) if narrow else (RELATIVE, ABSOLUTE)
    allowed = absolute + relative * np.abs(expected)
    return float((np.abs(computed - expected) / allowed).max())


def judge(row: dict[str, Any], case: EmbeddingCase) -> None:
    """Medians, ratios, shares of the memory's pace, and whether all computed the same."""
    rounds, ours = row["rounds"], case.ours
    memory = MEMORY_BF16 if ours == FUSED_BF16 else MEMORY
    names = [name for name in case.contestants if all(name in one for one in rounds)]
    programs = [name for name in names if not name.startswith(MEMORY)]

    def ratio(name: str, over: str, figure: str = "total_ms") -> dict[str, float]:
        ratios = [one[name][figure] / one[over][figure] for one in rounds]
        return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}

    row["contestants"] = {
        name: {
            figure: statistics.median(one[name][figure] for one in rounds)
            for figure in rounds[0][name]
        }
        for name in names
    }
    row["ratios"] = {
        name: {against: ratio(against, name) for against in programs if against != name}
        for name in programs
    }
    row["ours"] = ours
    row["share_of_row_accesses"] = None
    if {memory, ours} <= set(names):
        phases = ("forward_ms", "backward_ms", "total_ms")
        row["share_of_row_accesses"] = {phase: ratio(memory, ours, phase) for phase in phases}
    shares = [value for one in row["differences"] for value in one.values()]
    row["agree"] = bool(shares) and max(shares) <= 1.0
    reached = row["ratios"].get(ours, {})
    row["targets"] = [
        {"against": against, "wanted": wanted, "reached": reached.get(against, {}).get("median")}
        for against, wanted in case.targets
    ]


def describe_embeddings(row: Mapping[str, Any]) -> str:
    """A case as a table of text."""
    lines = [f"{row['meaning']}, {counted(row['threads'], 'thread')}"]
    lines.append(f"{'':<12}{'forward':>10}{'backward':>10}{'update':>10}{'all, ms':>10}")
    for name, figures in row["contestants"].items():
        cells = "".join(f"{figures[f'{phase}_ms']:>10.2f}" for phase in (*PHASES, "total"))
        lines.append(f"{name:<12}{cells}")
    best = row.get("ours", FUSED)  # records of earlier versions do not say it
    for name, figures in row["contestants"].items():
        if sort_ms := figures.get("sort_ms"):
            share = sort_ms / figures["total_ms"]
            lines.append(f"sorting alone, timed apart: {sort_ms:.2f} ms, {share:.0%} of {name}")
    for against, ratio in row["ratios"].get(best, {}).items():
        wanted = next((t["wanted"] for t in row["targets"] if t["against"] == against), None)
        goal = f", wanted {wanted:.1f}x" if wanted else ""
        ends = (ratio["low"], ratio["high"]) if len(row["rounds"]) > 1 else (math.nan, math.nan)
        gain = faster(ratio["median"], *ends)
        lines.append(f"{best} is {gain} {'as' if ' as fast' in gain else 'than'} {against}{goal}")
    if share := row["share_of_row_accesses"]:
        lines.append(
            f"{share['total_ms']['median']:.0%} of the pace of bare accesses to the same rows "
            f"(forward {share['forward_ms']['median']:.0%}, "
            f"backward {share['backward_ms']['median']:.0%})"
        )
    lines.append("the same results" if row["agree"] else "NOT the same results")
    lines += [f"{name} did not run: {why}" for name, why in row["failures"].items()]
    return "\n".join(lines)


def measure_back_end(job: dict[str, Any]) -> Times:
    """Run the cases that :func:`run_process` asks for."""
    torch.set_num_threads(job["threads"])
    contestant = Contestant(job["contestant"], job["peer"], job["rows"])
    samples = Path(job["samples"])
    return {
        case["name"]: run_case(contestant, case, job["iterations"], samples)
        for case in job["cases"]
    }


if __name__ == "__main__":
    do_job(measure_back_end)
