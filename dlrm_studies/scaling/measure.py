"""The measured side of scaling: ranks of this node, strong and weak, as one record.

``measure_scaling`` starts the ranks (:mod:`.worker`) and writes ``scaling.json``, whose tables
``model/record.csv`` defines. Without TorchRec ``timed_alone``
times the parts of one process, so that predictions have something to start from.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from dlrm_core.base.engines import engine
from dlrm_core.base.errors import InputError
from dlrm_core.base.files import plain, read_json, write_json, write_text
from dlrm_core.base.machine import available_memory
from dlrm_core.base.text import counted
from dlrm_core.config import Parameters, load_parameters, parameters_from_sections
from dlrm_core.optimizers import OPTIMIZERS
from dlrm_studies.runs import run_of_study
from dlrm_studies.scaling.launch import launch_lines, run_ranks
from dlrm_studies.scaling.model.record import FORMAT, VERSION, measured_iterations, record_of
from dlrm_workbook.analysis.changes import difference
from dlrm_workbook.evidence.training import iteration_part_times
from dlrm_workbook.ground.machine import machine_facts
from dlrm_workbook.ground.processes import only_process, python_module, run_child

RECORD = "scaling.json"
PARAMETERS = "parameters.yaml"
ROUNDS_FILE = Path("rounds/ranks.json")

RANKS_TABLES = (
    *("placement", "iterations", "parts", "collectives", "spans"),
    *("link_probe", "compute_profile"),
)

NODES = 2
"""Of the lines that are printed for several nodes."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        rounds: how often everything is measured, one thing after the other: what disturbs for
            a while disturbs some iterations of each.
        warmup: iterations that are not counted, of each round.
        iterations: that are, in a run and round.
        seconds: of these at most; there are fewer iterations then, at least 3.
        timeout_s: of the launch.
        probe: how often each exchange of the link probe is timed in a round; 0: not.
    """

    rounds: int = 4
    warmup: int = 1
    iterations: int = 5
    seconds: float = 5.0
    timeout_s: float = 900.0
    probe: int = 4


def measure_scaling(
    parameters: Parameters,
    ranks: Sequence[int] = (1, 2, 4),
    folder: Path | None = None,
    effort: Effort | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
    launch: Callable[..., None] | None = None,
) -> dict[str, Any]:
    """Measure a configuration on 1 and more ranks of this node.

    Args:
        parameters: ``training.batch_size`` is the global batch (strong scaling), and that of
            a rank in weak scaling.
        folder: gets ``scaling.json``, and every round as soon as it is done (``rounds/``);
            with the same request, rounds that are there are not run again. Parameters that are
            of no file are written there for the lines of ``launch`` (``parameters.yaml``).
        launch: starts a command as so many ranks and waits for all; None: :func:`run_ranks`, on
            this host.

    Returns:
        the record, see the module.

    Raises:
        InputError: the configuration does not run on so many ranks.
        MissingToolError: TorchRec is not installed.
        RanksFailed: a rank failed; none is left running.
    """
    plan = engine("several ranks: plan")
    plan.require_torchrec()
    effort = effort or Effort()
    if min(ranks) < 1:
        raise InputError(f"ranks is {min(ranks)}, expected at least 1")
    threads = engine("several ranks: world").threads_of_rank(parameters.training, max(ranks))
    stretches = [_stretch(parameters, count, ranks, effort, threads) for count in ranks]
    runs = [run for stretch in stretches for run in stretch["runs"]]
    for number, run in enumerate(runs):
        run["run"] = number
        plan.require_possible(parameters_from_sections(run["sections"]), run["ranks"])
    job = dataclasses.asdict(effort) | {"stretches": stretches}
    tables = _launched(job, max(ranks), folder, on_progress, launch or run_ranks)
    record: dict[str, Any] = {"format": FORMAT, "version": VERSION, "machine": machine_facts()}
    record |= {"runs": _runs(runs, tables, threads)}
    record |= {name: tables[name] for name in RANKS_TABLES}
    record["notices"] = sorted({row["notice"] for row in tables["notices"]})
    record["not_measured"] = _not_measured(record, ranks)
    record["parameters"] = parameters.to_sections()
    # what other studies read of it
    record["measured"] = measured_iterations(record_of(record)).to_dict("records")
    record["launch"] = _launch(parameters, folder, max(ranks))
    if folder is not None:
        write_json(folder / RECORD, plain(record))
    return record


def _launch(parameters: Parameters, folder: Path | None, ranks: int) -> dict[str, str]:
    """Lines that train with these parameters; they are put into a file if they are of none."""
    file = parameters.source
    if not file and folder is not None:
        file = str(folder / PARAMETERS)
        text = yaml.safe_dump(plain(parameters.to_sections()), sort_keys=False)
        write_text(folder / PARAMETERS, text)
    return launch_lines(file or "FILE", _changed(parameters), ranks, NODES)


def _changed(parameters: Parameters) -> list[str]:
    """``section.leaf=value`` of everything that differs from the parameters' own file."""
    if not parameters.source or not Path(parameters.source).exists():
        return []
    changed = difference(load_parameters(parameters.source), parameters)
    return [f"{name}={json.dumps(value)}" for name, value in changed.items()]


def _stretch(
    parameters: Parameters, count: int, ranks: Sequence[int], effort: Effort, threads: int
) -> dict[str, Any]:
    """What one number of ranks is to do in a round."""

    def sections(batch: int) -> dict[str, Any]:
        return run_of_study(parameters, batch_size=batch, threads=threads).to_sections()

    runs = [
        {"ranks": count, "batch_size": batch, "scaling": scaling, "nodes": 1}
        | {"sections": sections(batch)}
        for scaling, batch in _batches(parameters, count).items()
    ]
    sizes = _sizes_alone(parameters, count, ranks)
    alone = {"sections": sections(max(sizes)), "sizes": sizes} if sizes else None
    probe = effort.probe if count > 1 else 0
    return {"ranks": count, "alone": alone, "probe": probe, "runs": runs}


def _batches(parameters: Parameters, ranks: int) -> dict[str, int]:
    """Kind of scaling to the samples of an iteration over all ranks."""
    size = parameters.training.batch_size
    return {"strong": size, "weak": size * ranks} if ranks > 1 else {"": size}


def _sizes_alone(parameters: Parameters, count: int, ranks: Sequence[int]) -> list[int]:
    """Batches of each of so many processes alone: two or more, a line needs two points.

    Each rank's share of the batches that are run, those that the node's ranks never have at
    once left out; none where the tables of all processes do not fit in memory.
    """
    model, available = parameters.model, available_memory(torch.device("cpu"))
    table_bytes = 4 * sum(model.table_rows) * model.embedding_dim
    if OPTIMIZERS[parameters.training.optimizer].row_state(model.embedding_dim):
        table_bytes *= 2
    # beside the tables there are batches
    if available is not None and 1.3 * count * table_bytes > available:
        return []
    batches = [(r, batch) for r in ranks for batch in _batches(parameters, r).values()]
    sizes = {max(1, batch // r) for r, batch in batches}
    if len(sizes) == 1:
        sizes |= {max(1, size // 2) for size in sizes}
    least, most = min(sizes), max(batch for _, batch in batches)
    if count == 1:
        # predictions for many ranks rest on what few samples cost
        sizes |= {max(1, least // 8), max(1, least // 64)}
    return sorted(size for size in sizes if count * size <= 2 * most or size == least)


def _launched(
    job: dict[str, Any],
    ranks: int,
    folder: Path | None,
    on_progress: Callable[[str], None],
    launch: Callable[..., None],
) -> dict[str, Any]:
    """What the launch measures: rounds kept from before, and the others now."""
    digest = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="dlrm-scaling-"))
        file, result = Path(scratch) / "job.json", (folder or Path(scratch)) / ROUNDS_FILE
        stack.enter_context(only_process(result.parent))
        kept: dict[str, Any] = read_json(result) if result.exists() else {}
        before = kept["rounds"] if kept.get("digest") == digest else 0
        if before:
            on_progress(f"{before} of {job['rounds']} rounds: measured before")
        elif kept:
            on_progress(f"{result} is of another request or version: measured again")
        if before < job["rounds"]:
            write_json(file, job | {"digest": digest, "first_round": before})
            turns = [
                f"round {turn + 1} of {job['rounds']}, {counted(stretch['ranks'], 'rank')}"
                for turn in range(before, job["rounds"])
                for stretch in job["stretches"]
            ]
            launch(
                python_module("dlrm_studies.scaling.worker", file, result),
                ranks,
                job["timeout_s"],
                # ranks that wait must not burn the cores of those that compute
                {"OMP_WAIT_POLICY": "PASSIVE"},
                lambda number: on_progress(turns[number - 1]) if number else None,
            )
            kept = read_json(result)
    return kept


def _runs(
    asked: Sequence[dict[str, Any]], tables: dict[str, Any], threads: int
) -> list[dict[str, Any]]:
    """Rows of ``runs``."""
    kinds: dict[int, set[str]] = {}
    for row in tables["placement"]:
        kinds.setdefault(row["run"], set()).add(row["kind"])
    losses = {row["run"]: row["loss"] for row in tables["losses"]}
    rows = []
    for run in asked:
        of_run = kinds.get(run["run"], set())
        about = {key: value for key, value in run.items() if key != "sections"}
        about |= {
            "sharding": of_run.pop() if len(of_run) == 1 else "mixed",
            "threads": threads,
            "backend": tables["backend"],
            "host": tables["host"],
            "last_loss": losses[run["run"]],
        }
        rows.append(about)
    return rows


def _not_measured(record: Mapping[str, Any], ranks: Sequence[int]) -> dict[str, str]:
    reasons = {
        "data": "batches are made beforehand and taken in turns: an iteration is the step alone",
        "nodes": "all ranks are on one node; several nodes are predicted, not measured",
    }
    if not record["link_probe"]:
        reasons["link_probe"] = "not asked for" if max(ranks) > 1 else "there is one rank"
    if not record["compute_profile"]:
        reasons["compute_profile"] = "a process that has all tables does not fit in memory"
    return reasons


# One process alone: this machine's times of each part, for predictions without TorchRec.

PROFILE_ITERATIONS = 6
"""Of each batch size where this machine's parts are timed without TorchRec."""

ALONE_WARMUP = 2


def timed_alone(
    parameters: Parameters, folder: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Parts of one ``dlrm train`` at several batch sizes, a process each.

    Args:
        folder: gets the parameters of each process.
        say: gets a line for each batch size that is done.

    Returns:
        Rows of a record's ``compute_profile``.

    Raises:
        InputError: a process failed.
    """
    most = parameters.training.batch_size
    rows: list[dict[str, Any]] = []
    # predictions for many ranks rest on what few samples cost
    for size in sorted({max(1, most // 64), max(1, most // 4), most}):
        rows += parts_of(parameters, size, folder)
        say(f"batch {size:,} alone")
    return rows


def parts_of(parameters: Parameters, batch_size: int, folder: Path) -> list[dict[str, Any]]:
    """Rows of ``compute_profile`` from one process of ``dlrm train`` with its spans."""
    never = ("epochs", "max_steps", "eval_every", "evals_per_epoch", "auc_target")
    count = ALONE_WARMUP + PROFILE_ITERATIONS
    alone = run_of_study(
        parameters,
        **{"batch_size": batch_size, "batches": count, "log_every": count},
        **dict.fromkeys(never),
    )
    file = folder / f"alone-{batch_size}.yaml"
    file.write_text(yaml.safe_dump(plain(alone.to_sections())), encoding="utf-8")
    done = run_child(
        python_module("dlrm_workbook", "train", "-f", file, "--spans"),
        stage=f"batch {batch_size:,} alone",
        timeout_s=parameters.profiling.timeout_s,
    )
    done.require_success(f"one process with a batch of {batch_size}")
    times = iteration_part_times((done.last_object("spans") or {})["spans"], ALONE_WARMUP)
    return [
        {"concurrent": 1, "batch_size": batch_size, "iteration": iteration}
        | {"component": component, "phase": phase, "time_ms": time_ms}
        for (component, phase), part_times_ms in times.items()
        if component != "other"
        for iteration, time_ms in enumerate(part_times_ms)
    ]
