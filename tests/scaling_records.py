"""Made scaling records: ranks whose times follow given laws, in the tables of ``scaling.json``."""

from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.config import DataConfig, ModelConfig, Parameters, TrainingConfig
from dlrm_studies.scaling.model.communication import exchanges
from dlrm_studies.scaling.model.links import ALGORITHMS, steps_and_bytes
from dlrm_studies.scaling.model.sharding import Plan, make_plan

FIXED_MS = {"bottom_mlp": 0.5, "embedding": 1.0, "top_mlp": 1.0, "interaction": 0.3}
SAMPLE_MS = {"bottom_mlp": 0.004, "embedding": 0.02, "top_mlp": 0.03, "interaction": 0.002}


def parameters(batch: int = 512, rows: tuple[int, ...] = (4000,) * 8) -> Parameters:
    model = ModelConfig(
        bottom_mlp=(64, 128, 64),
        top_mlp=(256, 128, 1),
        embedding_dim=64,
        tables=None,
        table_rows=rows,
    )
    data = DataConfig(generator="uniform", indices_per_lookup=10, fixed_pooling=True)
    return Parameters(model=model, data=data, training=TrainingConfig(batch_size=batch))


def collective_ms(kind: str, ranks: int, payload: float, alpha_us: float, rate: float) -> float:
    steps, moved = steps_and_bytes(kind, ALGORITHMS[kind][0], ranks, payload)
    return 1e-3 * alpha_us * steps + 1e-6 * moved / rate


def part_ms(component: str, samples: float) -> float:
    return FIXED_MS[component] + samples * SAMPLE_MS[component]


def link_probe(
    alpha_us: float = 50.0, rate: float = 2.0, noise: float = 0.0, seed: int = 0
) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "collective": kind,
            "ranks": ranks,
            "bytes": size,
            "repetition": repetition,
            "time_ms": collective_ms(kind, ranks, size, alpha_us, rate)
            * float(np.exp(noise * rng.normal())),
        }
        for kind in ("allreduce", "alltoall", "allgather", "reduce_scatter")
        for ranks in (2, 4)
        for size in (4**n for n in range(5, 13))
        for repetition in range(5)
    ]


def compute_profile() -> list[dict[str, Any]]:
    return [
        {
            "concurrent": concurrent,
            "batch_size": batch,
            "component": component,
            "phase": phase,
            "time_ms": part_ms(component, batch) * (2 if concurrent == 4 else 1) / 2,
        }
        for concurrent in (1, 2, 4)
        for batch in (64, 128, 256, 512)
        for component in FIXED_MS
        for phase in ("forward", "backward")
    ]


def placement(plan: Plan) -> pd.DataFrame:
    """A row a shard: ``table``, ``kind``, ``rank``, ``rows``, ``columns``."""
    return pd.DataFrame(
        [
            {"table": table.table, "kind": table.kind, "rank": int(rank)}
            | {"rows": int(rows), "columns": table.columns}
            for table in plan.tables
            for rank, rows in zip(table.ranks, table.shard_rows, strict=True)
        ]
    )


def document(
    runs: list[tuple[int, int, str]],
    alpha_us: float = 50.0,
    rate: float = 2.0,
    slow_rank: float = 1.0,
    iterations: int = 6,
) -> dict[str, Any]:
    """A record of runs (ranks, batch, sharding) of which nothing is hidden.

    Args:
        slow_rank: times as long as the others that the last rank looks up its tables; its
            exchanges are as long as those of the others, who wait in them.
    """
    made: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("runs", "placement", "iterations", "parts", "collectives")
    }
    for run, (ranks, batch, sharding) in enumerate(runs):
        base = parameters(batch)
        plan = make_plan(base, ranks, sharding)
        made["runs"].append(
            {
                "run": run,
                "ranks": ranks,
                "batch_size": batch,
                "sharding": sharding,
                "scaling": "strong",
                "backend": "gloo",
            }
        )
        made["placement"] += [{"run": run, **row} for row in placement(plan).to_dict("records")]
        share, own = float(plan.work().max()), batch / ranks
        shared = 2 if ranks == 4 else 1
        samples = dict.fromkeys(FIXED_MS, own) | {"embedding": batch * share}
        busy = {
            (component, phase): part_ms(component, samples[component]) * shared / 2
            for component in FIXED_MS
            for phase in ("forward", "backward")
        }
        exchanged = [
            (
                each,
                collective_ms(each.collective, ranks, each.payload, alpha_us, rate)
                + (each.calls - 1) * collective_ms(each.collective, ranks, 64, alpha_us, rate),
            )
            for each in exchanges(base, plan, batch)
        ]
        waiting = sum(ms * (slow_rank - 1) for (part, _), ms in busy.items() if part == "embedding")
        exposed = sum(ms for _, ms in exchanged)
        whole = sum(busy.values()) + exposed + waiting
        for rank in range(ranks):
            slow = slow_rank if rank == ranks - 1 else 1.0
            for iteration in range(iterations):
                key = {"run": run, "rank": rank, "iteration": iteration}
                made["iterations"].append(key | {"time_ms": whole})
                for (component, phase), ms in busy.items():
                    times = slow if component == "embedding" else 1.0
                    part = {"component": component, "phase": phase, "time_ms": ms * times}
                    made["parts"].append(key | part)
                waited = 0.0 if slow > 1 else waiting
                part = {"component": "communication", "phase": "forward"}
                made["parts"].append(key | part | {"time_ms": exposed + waited})
                for number, (each, ms) in enumerate(exchanged):
                    took = ms + (waited if number == 1 else 0.0)
                    made["collectives"].append(
                        key
                        | {
                            "kind": each.collective,
                            "what": each.what,
                            "bytes": int(each.payload),
                            "time_ms": took,
                            "exposed_ms": took,
                        }
                    )
    probe, profile = link_probe(alpha_us, rate), compute_profile()
    return {**made, "link_probe": probe, "compute_profile": profile, "machine": {"cores": 2}}
