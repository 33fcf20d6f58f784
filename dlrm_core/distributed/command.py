"""``dlrm train`` as one of several ranks: rank 0 writes and prints, the others take part."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from dlrm_core.config import Parameters
from dlrm_core.distributed.collectives import Collectives
from dlrm_core.distributed.packages import require_torchrec
from dlrm_core.distributed.plan import FLOAT_BYTES, require_possible
from dlrm_core.distributed.trainer import DistributedTrainer
from dlrm_core.distributed.watch import Watch
from dlrm_core.distributed.world import World, gathered, joined, leave
from dlrm_core.errors import InputError
from dlrm_core.files import plain, write_json
from dlrm_core.resuming import checkpoint_place, checkpoint_to_resume
from dlrm_core.training import json_line, metrics_lines
from dlrm_core.training_host import peak_memory, progress_bar
from dlrm_core.training_results import Interval, TrainingResult
from dlrm_core.training_run import Line

Say = Callable[[str], None]


def train(
    parameters: Parameters, arguments: argparse.Namespace, exit_codes: Mapping[str, int]
) -> NoReturn:
    """Train as one rank, and end the process; prints what ``dlrm train`` prints, on rank 0.

    Args:
        exit_codes: of the process, by the run's status.

    Raises:
        InputError: as :func:`dlrm_core.training.train`, on the rank that finds it; what every
            rank finds is said by rank 0 only.
    """
    first = os.environ.get("RANK") == "0"
    try:
        require_torchrec()
        require_possible(parameters, int(os.environ["WORLD_SIZE"]))
        if arguments.spans:
            raise InputError("--spans is for a run of one process; see docs/scaling.md")
        folder = Path(arguments.output) if arguments.output else None
        place = checkpoint_place(parameters.training, folder)
        checkpoint = checkpoint_to_resume(parameters, place)
    except InputError:
        if first:
            raise
        leave(exit_codes["refused"])
    collectives = Collectives()
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(joined(parameters.training))
        stack.enter_context(collectives.installed())
        watch = Watch(world, collectives, parameters.training.rank_timeout_s)
        stack.enter_context(watch)
        trainer = DistributedTrainer(parameters, world, collectives, checkpoint, place, watch)
        stack.callback(trainer.close)
        say: Say = _say if world.first else _nothing
        _introduce(trainer, say)
        result, ranks = _run(trainer, folder if world.first else None, checkpoint, say, stack)
        for notice in result.notices if world.first else ():
            print(notice, file=sys.stderr)
        say(json.dumps(plain(result.summary() | {"ranks": ranks})))
    leave(exit_codes[result.status])


def _run(
    trainer: DistributedTrainer,
    folder: Path | None,
    checkpoint: Any,
    say: Say,
    stack: contextlib.ExitStack,
) -> tuple[TrainingResult, list[dict[str, Any]]]:
    lines = None
    if folder is not None:
        lines = stack.enter_context(metrics_lines(folder / "metrics.jsonl", checkpoint))
    shown = trainer.world.first and sys.stderr.isatty()
    bar = stack.enter_context(progress_bar(trainer.total, trainer.done, enabled=shown))

    def report(interval: Interval) -> None:
        if lines is not None:
            lines.write(asdict(interval))
        speed = f"{interval.samples_per_second:,.0f} samples/s"
        bar.set_postfix_str(f"{speed}, loss {interval.loss:.6f}")
        say(json_line(interval))

    def write(line: Line) -> None:
        if lines is not None:
            lines.write(line)
        say(json.dumps(plain(line)))

    result = trainer.train(report, lambda done: bar.update(1 if done else 0), write)
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


def _introduce(trainer: DistributedTrainer, say: Say) -> None:
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
    for line in holdings:
        print(line, file=sys.stderr, flush=True)


def _say(text: str) -> None:
    print(text, flush=True)


def _nothing(text: str) -> None:
    """The other ranks say nothing."""


__all__ = ["World", "about_rank", "train"]
