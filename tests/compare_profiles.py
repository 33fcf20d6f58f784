"""Profiles and runs made for the tests of comparisons: times that are known."""

from pathlib import Path
from typing import Any

import numpy as np
from profile_rows import profile_of_rows

from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.trials.compare.measure import TimedRun

TINY: dict[str, Any] = {
    "model": {
        "bottom_mlp": [8, 16, 8],
        "top_mlp": [16, 1],
        "embedding_dim": 8,
        "tables": 2,
        "table_rows": 50,
    },
    "data": {"generator": "uniform", "indices_per_lookup": 3},
    "training": {"batch_size": 16, "batches": 4, "device": "cpu", "threads": 1},
    "profiling": {"engine": "torch", "warmup": 1, "iterations": 4, "probes": False},
}
PARTS = (("data", "forward"), ("top_mlp", "forward"), ("top_mlp", "backward"))


def tiny() -> Parameters:
    return parameters_from_sections(TINY)


def make_profile(times: dict[tuple[str, str], np.ndarray], meta: Any = None) -> Profile:
    """A traced profile: iterations one after the other, parts in each, an operator in a part."""
    count = len(next(iter(times.values())))
    contexts = [
        (0, -1, "thread", "main", "other", ""),
        (1, 0, "annotation", "dlrm::iteration", "other", ""),
    ]
    trace, own = [], {}
    for component, phase in times:
        part = len(contexts)
        contexts.append((part, 1, "annotation", f"dlrm::{component}::{phase}", component, phase))
        contexts.append(
            (part + 1, part, "operator", f"aten::{component}_{phase}", component, phase)
        )
    now, iterations = 0, []
    for number in range(count):
        start = now
        for place, each in enumerate(times.values()):
            part = 2 + 2 * place
            end = now + round(each[number] * 1e6)
            trace += [(0, now, end, part, 1), (0, now, end, part + 1, 2)]
            own[part + 1] = own.get(part + 1, 0.0) + (end - now) / 1e6
            now = end
        trace.append((0, start, now, 1, 0))
        iterations.append((number, start, now))
    above = {row[0]: row[1] for row in contexts}
    total = {row[0]: 0.0 for row in contexts}
    for context, value in own.items():
        at = context
        while at >= 0:
            total[at] += value
            at = above[at]
    values = [(0, c, "cpu_time_ms", "exclusive", v) for c, v in own.items()]
    values += [(0, c, "cpu_time_ms", "inclusive", v) for c, v in total.items()]
    _, parents, kinds, names, components, phases = zip(*contexts, strict=True)
    given = {
        "engine": "torch",
        "device": "cpu",
        "parameters": tiny().to_sections(),
        "versions": {"torch": "2"},
        "machine": {"cpu": "a"},
    }
    return profile_of_rows(
        {"parent": parents, "kind": kinds, "name": names, "component": components, "phase": phases},
        values,
        trace,
        iterations,
        **given | (meta or {}),
    )


def noisy(
    seed: int, scale: dict[tuple[str, str], float] | None = None, meta: Any = None
) -> Profile:
    rng = np.random.default_rng(seed)
    means = {PARTS[0]: 4.0, PARTS[1]: 2.0, PARTS[2]: 3.0}
    return make_profile(
        {p: m * (scale or {}).get(p, 1.0) * rng.lognormal(0, 0.03, 20) for p, m in means.items()},
        meta,
    )


def made_runs(rounds: int, ratio: float) -> list[TimedRun]:
    """Rounds of a drifting machine in which only the data part is ``ratio`` times as long."""
    rng = np.random.default_rng(0)
    runs = []
    for number in range(rounds):
        mood = 1.0 + 0.5 * number
        for place, (name, factor) in enumerate((("baseline", 1.0), ("change", ratio))):
            parts = {
                ("data", "forward"): list(mood * factor * 4 * rng.lognormal(0, 0.02, 10)),
                ("top_mlp", "forward"): list(mood * 6 * rng.lognormal(0, 0.02, 10)),
            }
            whole = [sum(each) for each in zip(*parts.values(), strict=True)]
            runs.append(TimedRun(name, number, place, whole, parts, [0.5, 0.25], 100))
    return runs


# ---- the notebook's object ------------------------------------------------------


def saved(folder: Path, profile: Profile) -> str:
    profile.save(folder / "profile")
    return str(folder)
