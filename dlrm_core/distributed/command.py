"""``dlrm train`` as one of several ranks: rank 0 writes and prints, the others take part."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from dlrm_core.checkpoints import Checkpoint
from dlrm_core.config import Parameters
from dlrm_core.distributed.collectives import Collectives
from dlrm_core.distributed.packages import require_torchrec
from dlrm_core.distributed.plan import FLOAT_BYTES, require_possible
from dlrm_core.distributed.refusal import leave, tell_launcher
from dlrm_core.distributed.trainer import DistributedTrainer
from dlrm_core.distributed.watch import Watch
from dlrm_core.distributed.world import gathered, joined
from dlrm_core.errors import InputError
from dlrm_core.files import plain, write_json
from dlrm_core.resuming import checkpoint_place, checkpoint_to_resume, nothing_to_resume
from dlrm_core.training_host import peak_memory
from dlrm_core.training_loop import metrics_lines, train_with_reports
from dlrm_core.training_results import TrainingResult


def train(
    parameters: Parameters, arguments: argparse.Namespace, exit_codes: Mapping[str, int]
) -> NoReturn:
    """Train as one rank, and end the process; prints what ``dlrm train`` prints, on rank 0.

    Args:
        exit_codes: of the process, by the run's status.

    Raises:
        InputError: as :func:`dlrm_core.training.train`, on every rank that finds it.
    """
    require_torchrec()
    require_possible(parameters, int(os.environ["WORLD_SIZE"]))
    if arguments.spans:
        raise InputError("--spans is for a run of one process; see docs/scaling.md")
    folder = Path(arguments.output) if arguments.output else None
    place = checkpoint_place(parameters.training, folder)
    checkpoint = checkpoint_to_resume(parameters, place)
    early = nothing_to_resume(parameters.training, place)
    collectives = Collectives()
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(joined(parameters.training))
        stack.enter_context(collectives.installed())
        watch = Watch(world, collectives, parameters.training.rank_timeout_s)
        stack.enter_context(watch)
        require_same_start(gathered(world, checkpoint.step if checkpoint else 0))
        trainer = DistributedTrainer(parameters, world, collectives, checkpoint, place, watch)
        stack.callback(trainer.close)
        _introduce(trainer, early)
        result, ranks = _run(trainer, folder if world.first else None, checkpoint, stack)
        for notice in result.notices if world.first else ():
            if notice not in early:
                print(notice, file=sys.stderr)
        if world.first:
            _say(plain(result.summary() | {"ranks": ranks}))
    if result.status != "finished":
        tell_launcher("; ".join(result.notices))
    leave(exit_codes[result.status])


def _run(
    trainer: DistributedTrainer,
    folder: Path | None,
    checkpoint: Checkpoint | None,
    stack: contextlib.ExitStack,
) -> tuple[TrainingResult, list[dict[str, Any]]]:
    lines = None
    if folder is not None:
        lines = stack.enter_context(metrics_lines(folder / "metrics.jsonl", checkpoint))
    first = trainer.world.first
    result = train_with_reports(
        trainer,
        lines,
        on_interval=lambda interval: _say(asdict(interval)) if first else None,
        on_iteration=lambda done: None,
        on_line=lambda line: _say(plain(line)) if first else None,
        progress=first and sys.stderr.isatty(),
    )
    ranks = gathered(trainer.world, about_rank(trainer, result))
    if folder is not None:
        write_json(folder / "result.json", asdict(result) | {"ranks": ranks})
    return result, ranks


def about_rank(trainer: DistributedTrainer, result: TrainingResult) -> dict[str, Any]:
    """What a rank says of itself in the last line."""
    world = trainer.world
    own = [shard for shard, _ in trainer.tables.local]
    return {
        "rank": world.rank,
        "host": world.host,
        "pid": os.getpid(),
        "device": str(world.device),
        "threads": world.threads,
        "ms_per_iteration": result.ms_per_iteration,
        "peak_memory_bytes": peak_memory(world.device),
        "table_bytes": sum(FLOAT_BYTES * shard.rows * shard.columns for shard in own),
        "shards": [
            {
                "table": shard.table,
                "kind": shard.kind,
                "first_row": shard.first_row,
                "rows": shard.rows,
                "first_column": shard.first_column,
                "columns": shard.columns,
            }
            for shard in own
        ],
    }


def require_same_start(steps: Sequence[int]) -> None:
    """Every rank goes on from the same checkpoint, or all begin anew.

    Args:
        steps: of each rank's checkpoint, in their order; 0: it found none.

    Raises:
        InputError: they see different folders, as hosts without a shared file system do.
    """
    if len(set(steps)) == 1:
        return
    other = next(rank for rank, step in enumerate(steps) if step != steps[0])
    raise InputError(
        f"training.resume: rank 0 finds {_start(steps[0])}, but rank {other} {_start(steps[other])}"
        "; the folder of checkpoints must be one that all hosts share"
    )


def _start(step: int) -> str:
    return f"the checkpoint of step {step:,}" if step else "no checkpoint"


def _introduce(trainer: DistributedTrainer, early: list[str]) -> None:
    """Who takes part, and what each holds: on standard error, whose lines are for people."""
    world, holdings = trainer.world, trainer.holdings()
    if not world.first:
        return
    training = trainer.parameters.training
    print(
        f"{world.size} ranks ({world.backend}), {world.local_size} on this node, "
        f"{world.threads} {'thread' if world.threads == 1 else 'threads'} each, "
        f"{training.batch_size // world.size:,} of {training.batch_size:,} samples an iteration "
        f"each, sharding {training.sharding}",
        file=sys.stderr,
    )
    for line in [*early, *holdings]:
        print(line, file=sys.stderr, flush=True)


def _say(line: Any) -> None:
    print(json.dumps(line), flush=True)


__all__ = ["about_rank", "require_same_start", "train"]
