"""The measured side of scaling: ranks of this node, strong and weak, as one record.

``scaling.json`` holds the tables that :mod:`dlrm_core.analysis.communication` defines (lists of
rows by their names), ``format``, ``version``, ``parameters`` (sections), ``machine``, ``launch``
(what one types for the same on one node, on several, under Slurm) and ``not_measured`` (name →
reason). Ranks of one launch stay together for all its runs; what a launch has measured is
kept in the folder, so an interrupted measurement goes on with the next launch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dlrm_core.capacity import available_memory
from dlrm_core.config import Parameters, load_parameters, parameters_from_sections
from dlrm_core.distributed.launch import launch_lines, python_command, run_ranks
from dlrm_core.distributed.packages import require_torchrec
from dlrm_core.distributed.plan import require_possible
from dlrm_core.distributed.timeline import ranks_trace
from dlrm_core.distributed.world import threads_of_rank
from dlrm_core.errors import InputError
from dlrm_core.files import read_json, write_json

FORMAT = "dlrm-scaling"
VERSION = 1
RECORD = "scaling.json"
TIMELINE = "ranks.trace.json"

TABLES = (
    *("runs", "placement", "iterations", "parts", "collectives", "spans"),
    *("link_probe", "compute_profile"),
)

SCALINGS = ("strong", "weak")

Row = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        rounds: how often all runs are measured, one after the other: what disturbs for a
            while disturbs some iterations of each.
        warmup: iterations that are not counted, of each round.
        iterations: that are, in a run and round.
        seconds: of these at most; there are fewer iterations then, at least 3.
        timeout_s: of a launch.
        probe: how often each exchange of the link probe is timed, before each round and after
            the last; 0: not.
        alone: measure the parts without other ranks.
    """

    rounds: int = 2
    warmup: int = 2
    iterations: int = 10
    seconds: float = 10.0
    timeout_s: float = 600.0
    probe: int = 9
    alone: bool = True


@dataclass(frozen=True)
class Case:
    """One configuration: parameters, and how its batch grows with the ranks.

    Attributes:
        change: leaves that differ from the record's parameters.
        like: name of a case whose times alone are this one's too: the same model and batch,
            divided otherwise.
    """

    name: str
    parameters: Parameters
    scalings: tuple[str, ...] = SCALINGS
    change: Mapping[str, Any] = field(default_factory=dict)
    like: str = ""

    def batch_size(self, ranks: int, scaling: str) -> int:
        """Samples of an iteration over all ranks."""
        size = self.parameters.training.batch_size
        return size * ranks if scaling == "weak" else size

    def sections(self, batch_size: int, threads: int) -> dict[str, Any]:
        """Its parameters at a global batch, with the threads of a rank."""
        sections = self.parameters.to_sections()
        sections["training"] |= {
            "batch_size": batch_size,
            "threads": threads,
            # for one process; on ranks TorchRec has the tables
            "embedding_backend": "torch",
            "checkpoint_every": None,
            "checkpoint_folder": "",
            "resume": "",
        }
        return sections


def measure_scaling(
    parameters: Parameters,
    ranks: Sequence[int] = (1, 2, 4),
    folder: Path | None = None,
    scalings: Sequence[str] = SCALINGS,
    effort: Effort | None = None,
    nodes: int = 2,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure a configuration on 1 and more ranks of this node.

    Args:
        parameters: ``training.batch_size`` is the global batch (strong scaling), and that of
            a rank in weak scaling.
        folder: gets ``scaling.json``, a timeline of all ranks of the last run
            (``ranks.trace.json``), and what each launch measured as soon as it is done; with
            the same request, launches that are there are not run again.
        nodes: of the multi-node lines that are printed.

    Returns:
        the record, see the module.

    Raises:
        InputError: the configuration does not run on so many ranks.
        MissingToolError: TorchRec is not installed.
        RanksFailed: a rank failed; none is left running.
    """
    case = Case(parameters.preset, parameters, tuple(scalings))
    record = measure_cases([case], ranks, folder, effort or Effort(), on_progress)
    record["parameters"] = parameters.to_sections()
    changes = changed_leaves(parameters)
    record["launch"] = launch_lines(parameters.source or "FILE", changes, max(ranks), nodes)
    if folder is not None:
        write_json(folder / RECORD, record)
        last = max((run["run"] for run in record["runs"]), default=0)
        write_json(folder / TIMELINE, ranks_trace(record, last))
    return record


def changed_leaves(parameters: Parameters) -> list[str]:
    """``section.leaf=value`` of everything that differs from the parameters' own file."""
    if not parameters.source or not Path(parameters.source).exists():
        return []
    before = load_parameters(parameters.source).to_sections()
    return [
        f"{section}.{leaf}={json.dumps(value)}"
        for section, leaves in parameters.to_sections().items()
        if section != "title"
        for leaf, value in leaves.items()
        if value != before[section][leaf]
    ]


def measure_cases(
    cases: Sequence[Case],
    ranks: Sequence[int],
    folder: Path | None,
    effort: Effort,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure several configurations, all of them in one launch for each number of ranks.

    Returns:
        the record without ``parameters``; rows of ``runs`` and ``compute_profile`` have a
        column ``case``.
    """
    require_torchrec()
    _require_cases(cases, ranks)
    record: dict[str, Any] = {"format": FORMAT, "version": VERSION, "machine": _machine()}
    record |= {name: [] for name in TABLES}
    threads = threads_of_rank(cases[0].parameters.training, max(ranks))
    number = 0
    for count in ranks:
        job: dict[str, Any] = dataclasses.asdict(effort)
        job |= {
            "runs": [],
            "alone": [],
            "probe": effort.probe if count > 1 else 0,
        }
        for case in cases:
            for scaling in case.scalings if count > 1 else ("",):
                size = case.batch_size(count, scaling)
                row = {
                    "run": number,
                    "case": case.name,
                    "ranks": count,
                    "batch_size": size,
                    "scaling": scaling,
                    "change": dict(case.change),
                    "nodes": 1,
                }
                job["runs"].append(row | {"sections": case.sections(size, threads)})
                number += 1
            if effort.alone and count == max(ranks) and not case.like:
                job["alone"] += [
                    {"case": case.name, "sections": case.sections(size, threads), "concurrent": k}
                    for size in _sizes_alone(case, ranks)
                    if (k := _concurrent(case, size, ranks))
                ]
        found = _launched(job, count, folder, effort.timeout_s, on_progress)
        _add(record, job, found, threads)
    for case in cases:
        alike = [row for row in record["compute_profile"] if row["case"] == case.like]
        record["compute_profile"] += [row | {"case": case.name} for row in alike]
    record["not_measured"] = _not_measured(record, ranks)
    if folder is not None:
        write_json(folder / RECORD, record)
    return record


def _require_cases(cases: Sequence[Case], ranks: Iterable[int]) -> None:
    for case in cases:
        for count in ranks:
            if count < 1:
                raise InputError(f"ranks is {count}, expected at least 1")
            for scaling in case.scalings:
                sections = case.sections(case.batch_size(count, scaling), 1)
                require_possible(parameters_from_sections(sections), count)


def _sizes_alone(case: Case, ranks: Sequence[int]) -> list[int]:
    """Batches of a process alone: each rank's share, and one more where that is a single one."""
    sizes = {
        case.batch_size(count, scaling) // count for count in ranks for scaling in case.scalings
    }
    if len(sizes) == 1:
        sizes |= {max(1, size // 2) for size in sizes}
    return sorted(sizes)


def _concurrent(case: Case, size: int, ranks: Sequence[int]) -> list[int]:
    """Numbers of processes to measure at a batch of each: those near what ranks do.

    All must fit in this machine's memory, with all tables in each.
    """
    model, available = case.parameters.model, available_memory(torch.device("cpu"))
    table_bytes = 4 * sum(model.table_rows) * model.embedding_dim
    if case.parameters.training.optimizer != "sgd":
        table_bytes *= 2
    most = max(case.batch_size(count, scaling) for count in ranks for scaling in case.scalings)
    return [
        count
        for count in sorted({1, *ranks})
        # beside the tables there are batches
        if (available is None or 1.3 * count * table_bytes < available)
        # two batches of each number: a line needs two points
        and (count * size <= 2 * most or size == min(_sizes_alone(case, ranks)))
    ]


def _launched(
    job: dict[str, Any],
    ranks: int,
    folder: Path | None,
    timeout_s: float,
    on_progress: Callable[[str], None],
) -> dict[str, Any]:
    """What a launch measures: kept from before, or measured now."""
    import tempfile

    digest = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()
    kept = folder / f"ranks-{ranks}.json" if folder is not None else None
    if kept is not None and kept.exists():
        before: dict[str, Any] = read_json(kept)
        if before.get("job") == digest:
            on_progress(f"{ranks} ranks: measured before")
            return before
    on_progress(f"{ranks} {'rank' if ranks == 1 else 'ranks'}: {len(job['runs'])} runs")
    with tempfile.TemporaryDirectory(prefix="dlrm-scaling-") as scratch:
        file, result = Path(scratch) / "job.json", Path(scratch) / "result.json"
        write_json(file, job)
        command = python_command("dlrm_core.distributed.worker", file, result)
        # ranks that wait must not burn the cores of those that compute
        done = run_ranks(command, ranks, timeout_s, {"OMP_WAIT_POLICY": "PASSIVE"})
        found: dict[str, Any] = read_json(result) | {"job": digest, "seconds": done.seconds}
    if kept is not None:
        write_json(kept, found)
    return found


def _add(record: dict[str, Any], job: dict[str, Any], found: dict[str, Any], threads: int) -> None:
    for name in ("placement", "iterations", "parts", "collectives", "spans"):
        record[name] += found[name]
    for name in ("link_probe", "compute_profile"):
        record[name] += found[name]
    kinds: dict[int, set[str]] = {}
    for row in found["placement"]:
        kinds.setdefault(row["run"], set()).add(row["kind"])
    losses = {row["run"]: row["losses"] for row in found["losses"]}
    for run in job["runs"]:
        about = {key: value for key, value in run.items() if key != "sections"}
        of_run = kinds.get(run["run"], set())
        record["runs"].append(
            about
            | {
                "sharding": of_run.pop() if len(of_run) == 1 else "mixed",
                "threads": threads,
                "backend": found["backend"],
                "host": found["host"],
                "last_loss": losses[run["run"]][-1],
            }
        )


def _not_measured(record: Mapping[str, Any], ranks: Sequence[int]) -> dict[str, str]:
    reasons = {
        "data": "batches are made beforehand and taken in turns: an iteration is the step alone",
        "nodes": "all ranks are on one node; several nodes are predicted, not measured",
    }
    if not record["link_probe"]:
        reasons["link_probe"] = "not asked for" if max(ranks) > 1 else "there is one rank"
    if not record["compute_profile"]:
        reasons["compute_profile"] = (
            "not asked for, or a process that has all tables does not fit in memory"
        )
    return reasons


def _machine() -> dict[str, Any]:
    from dlrm_core.doctor import machine_facts

    return machine_facts()


def read_record(path: Path) -> dict[str, Any]:
    """A record of :func:`measure_scaling`.

    Raises:
        InputError: the file is no such record, or of a newer version.
    """
    record = read_json(path)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise InputError(f"{path}: is no record of {FORMAT}")
    if not isinstance(record.get("version"), int) or record["version"] > VERSION:
        raise InputError(
            f"{path}: has version {record.get('version')}, this program reads up to {VERSION}"
        )
    missing = [name for name in TABLES if name not in record]
    if missing:
        raise InputError(f"{path}: lacks the tables {', '.join(missing)}")
    return record
