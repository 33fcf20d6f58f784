"""Ranks for tests: one process imports torch and TorchRec, and forks into 1, 2, 4 ranks.

``python distributed_ranks.py JOBS RESULTS``: JOBS is a JSON list of stages, one after the
other, each ``{"ranks": R, "port": of the launcher's store, "jobs": [...]}``; rank 0 of each
writes ``RESULTS/STAGE.json``. A job is ``{"name", "sections", "place", "resume", "initial"}``:
train, with checkpoints in ``place``; with ``initial`` one of the untrained weights comes first.
A job with ``checkpoint`` predicts with its weights.
A stage that has ``measure``, a worker's job, adds to ``RESULTS/measured.json`` instead, and
copies that to ``RESULTS/STAGE.json``.
"""

import json
import os
import shutil
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

import torch
from slow_tiles import use_slow_tiles

from dlrm_core.config import parameters_from_sections
from dlrm_core.embeddings import EmbeddingTables
from dlrm_core.predict import Asked
from dlrm_core.run.checkpoint import read_checkpoint
from dlrm_core.run.evaluate import held_out_batches
from dlrm_kernels.embeddings.fused_cpu import FusedCpu
from dlrm_ranks.plan import load_torchrec
from dlrm_ranks.predictor import RankPredictor
from dlrm_ranks.tables import about_rank
from dlrm_ranks.trainer import DistributedTrainer
from dlrm_ranks.watch import Watch
from dlrm_ranks.world import gathered, joined, read_world
from dlrm_studies.scaling.collectives import TimedCollectives
from dlrm_studies.scaling.launch import environment
from dlrm_studies.scaling.worker import measure_job


def main():
    stages, results = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    load_torchrec()
    use_slow_tiles()
    load_kernels()
    for number, stage in enumerate(stages):
        children = []
        for rank in range(stage["ranks"]):
            child = os.fork()
            if child == 0:
                os.environ.update(environment(rank, stage["ranks"], stage["port"]))
                try:
                    as_rank(stage, results / f"{number}.json")
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                sys.stdout.flush()
                os._exit(0)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            sys.exit(f"stage {number}: ranks ended with {statuses}")


def load_kernels():
    """Load the fused back end's machine code once, not in each rank; no thread is started."""
    for optimizer in ("sgd", "adagrad", "rowwise_adagrad"):
        FusedCpu(EmbeddingTables([1], 4), optimizer, 0.1)


def as_rank(stage, output):
    collectives = TimedCollectives()
    with collectives.installed():
        if stage.get("measure"):
            measure(stage["measure"], output, collectives)
            return
        jobs, found = stage["jobs"], {}
        first = parameters_from_sections(jobs[0]["sections"])
        with (
            joined(first.training) as world,
            Watch(world, collectives, first.training.rank_timeout_s) as watch,
        ):
            for job in jobs:
                if "checkpoint" in job:
                    found[job["name"]] = predict(job, world, collectives)
                else:
                    found[job["name"]] = train(job, world, collectives, watch)
        if world.first:
            output.write_text(json.dumps(found))


def measure(job, output, collectives):
    result = output.parent / "measured.json"
    run = parameters_from_sections(job["stretches"][0]["runs"][0]["sections"])
    world = read_world(run.training)
    with Watch(world, collectives, run.training.rank_timeout_s) as watch:
        measure_job(job, result, world, collectives, watch)
    if world.first:
        shutil.copy(result, output)


def train(job, world, collectives, watch):
    parameters = parameters_from_sections(job["sections"])
    checkpoint = read_checkpoint(Path(job["resume"])) if job.get("resume") else None
    place = Path(job["place"]) if job.get("place") else None
    trainer = DistributedTrainer(parameters, world, collectives, checkpoint, place, watch)
    try:
        if job.get("initial"):
            trainer.save()
        collectives.records = []
        overflowed = []
        own = trainer.step._overflowed
        trainer.step._overflowed = lambda gradient: noted(own(gradient), overflowed)
        layers = trainer.step.dense.layers
        result = trainer.train()
        records = [
            {"kind": r.kind, "what": r.what, "bytes": r.bytes, "done": r.ended is not None}
            for r in collectives.records
        ]
        collectives.records = None
        return {
            "losses": result.losses,
            "evaluations": result.evaluations,
            "threads": torch.get_num_threads(),
            "dense_part": type(getattr(layers["top_mlp"], "__self__", None)).__name__,
            "overflowed": gathered(world, overflowed),
            "skipped": gathered(world, trainer.step.dense.precision.skipped),
            "holdings": trainer.holdings(),
            "collectives": gathered(world, records),
            "ranks": gathered(world, about_rank(world, trainer.tables)),
        }
    finally:
        trainer.close()


def predict(job, world, collectives):
    """An evaluation, and the scores of batches that the ranks cannot share evenly."""
    parameters = parameters_from_sections(job["sections"])
    asked = Asked(parameters, read_checkpoint(Path(job["checkpoint"])), [])
    predictor = RankPredictor(asked, world, collectives)
    batch = next(held_out_batches(parameters, torch.device("cpu"), 1))
    return {
        "evaluation": asdict(predictor.evaluate(lambda samples: None)),
        "scores": [predictor.predict(batch.part(0, n)).flatten().tolist() for n in (1, 3, 32)],
        "ranks": predictor.facts([])["ranks"],
    }


def noted(value, values):
    values.append(bool(value))
    return value


if __name__ == "__main__":
    main()
