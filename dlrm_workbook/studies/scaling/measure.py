"""Starts ranks on this node, watches over them, and says how others would start them.

The launcher keeps the store in which the ranks meet, so a rank that dies takes nothing with
it, and it is the ranks' parent, so it knows how each of them ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from dlrm_core.config import Parameters, load_parameters, parameters_from_sections
from dlrm_core.distributed.plan import require_possible, require_torchrec
from dlrm_core.distributed.watch import EXIT_LOST, KEY
from dlrm_core.distributed.world import environment, threads_of_rank
from dlrm_core.errors import InputError
from dlrm_core.files import only_process, plain, read_json, write_json, write_text
from dlrm_core.machine import available_memory

GRACE_S = 5.0
"""For the other ranks to end by themselves once one has failed."""

_POLL_S = 0.05


class RanksFailed(RuntimeError):
    """A rank failed, or the time was over; names the rank, how it ended, and what it said."""


@dataclass(frozen=True)
class Outcome:
    """What rank 0 printed, and how long all took."""

    output: str
    errors: str
    seconds: float


def run_ranks(
    command: Sequence[str | Path],
    ranks: int,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
    on_iteration: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Run a command as several ranks of this node and wait for all.

    Args:
        command: program and arguments, the same for all; the environment tells them apart.
        timeout_s: after which all are ended.
        variables: of the environment, beside those of a rank.
        on_iteration: gets what the watch of rank 0 counts, when it has changed.

    Raises:
        RanksFailed: a rank failed or the time was over; none is left running.
        MissingToolError: TorchRec is not installed.
    """
    require_torchrec()
    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=5),
    )
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="dlrm-ranks-") as folder,
        contextlib.ExitStack() as stack,
    ):
        logs = Path(folder)
        processes: list[subprocess.Popen[bytes]] = []
        # whatever happens, also to us: no rank stays behind
        stack.callback(_end_all, processes)
        for rank in range(ranks):
            processes.append(
                subprocess.Popen(
                    [str(word) for word in command],
                    env={**os.environ, **(variables or {}), **environment(rank, ranks, store.port)},
                    stdin=subprocess.DEVNULL,
                    stdout=stack.enter_context((logs / f"{rank}.out").open("wb")),
                    stderr=stack.enter_context((logs / f"{rank}.err").open("wb")),
                )
            )
        look = _Changes(lambda: _iterations(store, 1)[0], on_iteration)
        failed = _wait(processes, started + timeout_s, look)
        if failed is not None:
            lasts = _iterations(store, ranks)
            raise RanksFailed(_report(failed, processes, logs, lasts, timeout_s))
        return Outcome(
            (logs / "0.out").read_text(errors="replace"),
            (logs / "0.err").read_text(errors="replace"),
            time.monotonic() - started,
        )


class _Changes:
    """Tells when something that is asked once a second has changed."""

    def __init__(self, ask: Callable[[], int | None], tell: Callable[[int], None]) -> None:
        self._ask, self._tell = ask, tell
        self._last: int | None = None
        self._at = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._at < 1.0:
            return
        self._at, now = time.monotonic(), self._ask()
        if now is not None and now != self._last:
            self._last = now
            self._tell(now)


def _wait(
    processes: list[subprocess.Popen[bytes]], until: float, look: Callable[[], None]
) -> int | None:
    """Wait for all; the rank that failed first, -1 if the time was over, None if none did."""
    first: int | None = None
    grace_until = until
    while True:
        codes = [process.poll() for process in processes]
        if first is None:
            # who was ended by a signal is the cause; who gave up because of it has a status
            bad = [rank for rank, code in enumerate(codes) if code]
            killed = [rank for rank in bad if (codes[rank] or 0) < 0]
            if bad:
                first = (killed or bad)[0]
                grace_until = min(until, time.monotonic() + GRACE_S)
        elif codes[first] == EXIT_LOST:
            # it only tells of another one; that may have ended since
            others = [r for r, code in enumerate(codes) if code and code != EXIT_LOST]
            first = others[0] if others else first
        if all(code is not None for code in codes):
            return first
        if time.monotonic() > grace_until:
            return -1 if first is None else first
        look()
        time.sleep(_POLL_S)


def _end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()


def _iterations(store: Any, ranks: int) -> list[int | None]:
    """The last iteration that each rank told the store."""
    found: list[int | None] = []
    for rank in range(ranks):
        key = KEY.format(rank=rank)
        told = json.loads(store.get(key)) if store.check([key]) else {}
        found.append(told.get("iteration"))
    return found


def _report(
    failed: int,
    processes: list[subprocess.Popen[bytes]],
    logs: Path,
    iterations: list[int | None],
    timeout_s: float,
) -> str:
    said = []
    for rank in range(len(processes)):
        lines = (logs / f"{rank}.err").read_text(errors="replace").strip().splitlines()
        if lines and (rank == failed or lines[-1].startswith("dlrm")):
            said.append(f"rank {rank} said: {lines[-1]}")
    behind = "; ".join(said) or "none said anything"
    if failed < 0:
        return f"the ranks were not done after {timeout_s:g} s and were ended; {behind}"
    code = processes[failed].poll()
    last = iterations[failed]
    where = "before its first iteration" if not last else f"after iteration {last:,}"
    return (
        f"rank {failed} of {len(processes)} (host {socket.gethostname()}, process "
        f"{processes[failed].pid}) {how_it_ended(code)} {where}; {behind}"
    )


def how_it_ended(code: int | None) -> str:
    """An exit status in words: 'was ended by SIGKILL', 'exited with 1'."""
    if code is None:
        return "did not end and was killed"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"
    return f"exited with {code}"


def python_command(module: str, *arguments: str | Path) -> list[str | Path]:
    """This Python, running a module."""
    return [sys.executable, "-m", module, *arguments]


def launch_lines(
    file: str, parameters: Sequence[str], ranks: int, nodes: int, minutes: int = 60
) -> dict[str, str]:
    """What one types to train with the same parameters on one node, on several, under Slurm.

    Args:
        file: the parameters file.
        parameters: ``section.leaf=value`` each.
        ranks: on a node.

    Returns:
        ``one_node``, ``each_node`` (run on every node, FIRST_NODE is the first one's name)
        and ``slurm`` (a batch script).
    """
    given = " ".join(f"-p {shlex.quote(value)}" for value in parameters)
    what = f"-m dlrm_core train -f {shlex.quote(file)} {given}".strip()
    meet = f"--nnodes {nodes} --nproc-per-node {ranks} --rdzv-backend c10d"
    slurm = "\n".join(
        [
            "#!/bin/bash",
            "#SBATCH --job-name=dlrm",
            f"#SBATCH --nodes={nodes}",
            "#SBATCH --ntasks-per-node=1",
            "#SBATCH --exclusive",
            f"#SBATCH --time={minutes}",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f'srun torchrun {meet} --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:29500" \\',
            f"  {what}",
        ]
    )
    return {
        "one_node": f"torchrun --standalone --nproc-per-node {ranks} {what}",
        "each_node": f"torchrun {meet} --rdzv-id dlrm --rdzv-endpoint FIRST_NODE:29500 {what}",
        "slurm": slurm,
    }


# All ranks in one view: a Chrome trace (chrome://tracing, ui.perfetto.dev) of a measured run.

STEP, EXCHANGES = 0, 1
"""Rows of a rank: its step's thread, and what it exchanges meanwhile."""


def ranks_trace(record: Mapping[str, Any], run: int) -> dict[str, Any]:
    """The last iterations of a run, rank below rank, on the node's one clock.

    Args:
        record: see :mod:`dlrm_workbook.studies.scaling.measure`; its ``spans`` say when an
            iteration
            began on each rank.

    Returns:
        a trace with a process a rank; times in microseconds since the first one's start.
    """
    spans = [row for row in record["spans"] if row["run"] == run]
    begins = {
        (row["rank"], row["iteration"]): row["node_start_s"] - 1e-3 * row["start_ms"]
        for row in spans
    }
    first = min(begins.values(), default=0.0)
    events: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, _ in begins}):
        names = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": names})
        for lane, name in ((STEP, "step"), (EXCHANGES, "exchanges")):
            about = {"pid": rank, "tid": lane, "args": {"name": name}}
            events.append({"ph": "M", "name": "thread_name", **about})
    for row in spans:
        zero = begins[row["rank"], row["iteration"]]
        name = f"{row['component']} {row['phase']}"
        events.append(_event(row, STEP, name, zero - first, row["start_ms"], row["end_ms"]))
    for row in record["collectives"]:
        begun = begins.get((row["rank"], row["iteration"])) if row["run"] == run else None
        if begun is None:
            continue
        end_ms = row["start_ms"] + row["time_ms"]
        event = _event(
            row, EXCHANGES, f"{row['kind']}: {row['what']}", begun - first, row["start_ms"], end_ms
        )
        events.append(event | {"args": {"bytes": row["bytes"], "exposed_ms": row["exposed_ms"]}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(
    row: Mapping[str, Any], lane: int, name: str, zero_s: float, start_ms: float, end_ms: float
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": row["rank"],
        "tid": lane,
        "ts": 1e6 * zero_s + 1e3 * start_ms,
        "dur": 1e3 * (end_ms - start_ms),
        "args": {"iteration": row["iteration"]},
    }


# The measured side of scaling: ranks of this node, strong and weak, as one record.

FORMAT = "dlrm-scaling"
VERSION = 1
RECORD = "scaling.json"
TIMELINE = "ranks.trace.json"
PARAMETERS = "parameters.yaml"
MEASURED = Path("rounds/ranks.json")

FROM_RANKS = (
    *("placement", "iterations", "parts", "collectives", "spans"),
    *("link_probe", "compute_profile"),
)

TABLES = ("runs", *FROM_RANKS)

SCALINGS = ("strong", "weak")

Row = dict[str, Any]


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
        alone: measure the parts without other ranks.
    """

    rounds: int = 4
    warmup: int = 1
    iterations: int = 5
    seconds: float = 5.0
    timeout_s: float = 900.0
    probe: int = 4
    alone: bool = True


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
            (``ranks.trace.json``), and every round as soon as it is done (``rounds/``);
            with the same request, rounds that are there are not run again. Parameters that are
            of no file are written there for the lines of ``launch`` (``parameters.yaml``).
        nodes: of the multi-node lines that are printed.

    Returns:
        the record, see the module.

    Raises:
        InputError: the configuration does not run on so many ranks.
        MissingToolError: TorchRec is not installed.
        RanksFailed: a rank failed; none is left running.
    """
    require_torchrec()
    effort = effort or Effort()
    if min(ranks) < 1:
        raise InputError(f"ranks is {min(ranks)}, expected at least 1")
    threads = threads_of_rank(parameters.training, max(ranks))
    stretches = [_stretch(parameters, count, ranks, scalings, effort, threads) for count in ranks]
    runs = [run for stretch in stretches for run in stretch["runs"]]
    for number, run in enumerate(runs):
        run["run"] = number
        require_possible(parameters_from_sections(run["sections"]), run["ranks"])
    job = dataclasses.asdict(effort) | {"stretches": stretches}
    found = _launched(job, max(ranks), folder, on_progress)
    record: dict[str, Any] = {"format": FORMAT, "version": VERSION, "machine": _machine()}
    record |= {"runs": _runs(runs, found, threads)}
    record |= {name: found[name] for name in FROM_RANKS}
    record["not_measured"] = _not_measured(record, ranks)
    record["parameters"] = parameters.to_sections()
    record["launch"] = _launch(parameters, folder, max(ranks), nodes)
    if folder is not None:
        write_json(folder / RECORD, record)
        write_json(folder / TIMELINE, ranks_trace(record, len(runs) - 1))
    return record


def _launch(parameters: Parameters, folder: Path | None, ranks: int, nodes: int) -> dict[str, str]:
    """Lines that train with these parameters; they are put into a file if they are of none."""
    file = parameters.source
    if not file and folder is not None:
        file = str(folder / PARAMETERS)
        text = yaml.safe_dump(plain(parameters.to_sections()), sort_keys=False)
        write_text(folder / PARAMETERS, text)
    return launch_lines(file or "FILE", changed_leaves(parameters), ranks, nodes)


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


def _stretch(
    parameters: Parameters,
    count: int,
    ranks: Sequence[int],
    scalings: Sequence[str],
    effort: Effort,
    threads: int,
) -> dict[str, Any]:
    """What one number of ranks is to do in a round."""
    runs: list[dict[str, Any]] = []
    for scaling in scalings if count > 1 else ("",):
        size = _batch_size(parameters, count, scaling)
        run = {"ranks": count, "batch_size": size, "scaling": scaling, "nodes": 1}
        runs.append(run | {"sections": _sections(parameters, size, threads)})
    alone, sizes = None, _sizes_alone(parameters, count, ranks, scalings)
    if effort.alone and sizes:
        alone = {"sections": _sections(parameters, max(sizes), threads), "sizes": sizes}
    return {
        "ranks": count,
        "alone": alone,
        "probe": effort.probe if count > 1 else 0,
        "runs": runs,
    }


def _batch_size(parameters: Parameters, ranks: int, scaling: str) -> int:
    """Samples of an iteration over all ranks."""
    size = parameters.training.batch_size
    return size * ranks if scaling == "weak" else size


def _sections(parameters: Parameters, batch_size: int, threads: int) -> dict[str, Any]:
    """The parameters at a global batch, with the threads of a rank."""
    sections = parameters.to_sections()
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


def _sizes_alone(
    parameters: Parameters, count: int, ranks: Sequence[int], scalings: Sequence[str]
) -> list[int]:
    """Batches of each of so many processes alone: two or more, a line needs two points.

    Each rank's share of the batches that are run, those that the node's ranks never have at
    once left out; none where the tables of all processes do not fit in memory.
    """
    model, available = parameters.model, available_memory(torch.device("cpu"))
    table_bytes = 4 * sum(model.table_rows) * model.embedding_dim
    if parameters.training.optimizer != "sgd":
        table_bytes *= 2
    # beside the tables there are batches
    if available is not None and 1.3 * count * table_bytes > available:
        return []
    batches = [(r, _batch_size(parameters, r, each)) for r in ranks for each in scalings]
    sizes = {max(1, batch // r) for r, batch in batches}
    if len(sizes) == 1:
        sizes |= {max(1, size // 2) for size in sizes}
    least, most = min(sizes), max(batch for _, batch in batches)
    if count == 1:
        # predictions for many ranks rest on what few samples cost
        sizes |= {max(1, least // 8), max(1, least // 64)}
    return sorted(size for size in sizes if count * size <= 2 * most or size == least)


def _launched(
    job: dict[str, Any], ranks: int, folder: Path | None, on_progress: Callable[[str], None]
) -> dict[str, Any]:
    """What the launch measures: rounds kept from before, and the others now."""
    digest = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="dlrm-scaling-"))
        file, result = Path(scratch) / "job.json", (folder or Path(scratch)) / MEASURED
        stack.enter_context(only_process(result.parent))
        kept: dict[str, Any] = read_json(result) if result.exists() else {}
        before = kept["rounds"] if kept.get("digest") == digest else 0
        if before:
            on_progress(f"{before} of {job['rounds']} rounds: measured before")
        if before < job["rounds"]:
            write_json(file, job | {"digest": digest, "first_round": before})
            turns = [
                f"round {turn + 1} of {job['rounds']}, {_ranks(stretch['ranks'])}"
                for turn in range(before, job["rounds"])
                for stretch in job["stretches"]
            ]
            run_ranks(
                python_command("dlrm_workbook.studies.scaling.worker", file, result),
                ranks,
                job["timeout_s"],
                # ranks that wait must not burn the cores of those that compute
                {"OMP_WAIT_POLICY": "PASSIVE"},
                lambda number: on_progress(turns[number - 1]) if number else None,
            )
            kept = read_json(result)
    return kept


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _runs(
    asked: Sequence[dict[str, Any]], found: dict[str, Any], threads: int
) -> list[dict[str, Any]]:
    """Rows of ``runs``."""
    kinds: dict[int, set[str]] = {}
    for row in found["placement"]:
        kinds.setdefault(row["run"], set()).add(row["kind"])
    losses = {row["run"]: row["loss"] for row in found["losses"]}
    rows = []
    for run in asked:
        of_run = kinds.get(run["run"], set())
        about = {key: value for key, value in run.items() if key != "sections"}
        about |= {
            "sharding": of_run.pop() if len(of_run) == 1 else "mixed",
            "threads": threads,
            "backend": found["backend"],
            "host": found["host"],
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
        reasons["compute_profile"] = (
            "not asked for, or a process that has all tables does not fit in memory"
        )
    return reasons


def _machine() -> dict[str, Any]:
    from dlrm_core.machine import machine_facts

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
