"""What a change does to parts that nobody probed: ratios of least times.

A part's least time follows from its work and the machine's ceilings
(:mod:`dlrm_core.analysis.roofline`). If a part keeps its share of the ceiling, its time
scales as its least time does: that carries the measured efficiency over to other shapes,
and from one GPU to another. It cannot see what work and ceilings do not hold (a faster
generator, another library, more threads), so such changes are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.analysis.attribution import iteration_count, main_thread, step_contexts
from dlrm_core.analysis.devices import Device, device, device_of_driver
from dlrm_core.analysis.roofline import least_times
from dlrm_core.analysis.work import part_work
from dlrm_core.config import Parameters
from dlrm_core.errors import InputError
from dlrm_core.profiling.profile import Profile
from dlrm_core.touched import changed_leaves, signature

KEYS = ["component", "phase"]

KNOWN_BY_WORK = frozenset(
    {
        "training.batch_size",
        "training.precision",
        "training.optimizer",
        "data.indices_per_lookup",
        "data.fixed_pooling",
        "model.mlp_sizes",
        "model.dense_features",
        "model.bottom_mlp",
        "model.top_mlp",
        "model.embedding_dim",
        "model.tables",
        "model.table_rows",
        "model.interaction",
        "model.interaction_itself",
    }
)
"""Leaves whose effect is in the operations and bytes of the parts."""

WAITS = ("Synchronize", "cudaStreamWaitEvent", "cudaEventQuery", "_local_scalar_dense")
"""In the names of calls in which the host waits for the GPU."""


def unknown_by_work(base: Parameters, changed: Parameters) -> list[str]:
    """Changed leaves of which work and ceilings say nothing."""
    return [leaf for leaf in changed_leaves(base, changed) if leaf not in KNOWN_BY_WORK]


def work_ratios(profile: Profile, base: Parameters, changed: Parameters) -> pd.DataFrame:
    """``component``, ``phase``, ``ratio``: least time after over before, same machine.

    Where a ceiling is missing, the ratio of the operands' bytes.
    """
    statistics = profile.meta.get("data_statistics")
    if signature(base, "embedding") != signature(changed, "embedding"):
        # measured bags are of the unchanged run: both sides by the law
        statistics = None
    ceilings = profile.meta.get("ceilings") or {}
    where = profile.device
    tables = []
    for parameters in (base, changed):
        work = part_work(parameters, statistics, where)
        least = least_times(parameters, ceilings, statistics, where)
        tables.append(work.merge(least, on=KEYS, how="left"))
    both = tables[0].merge(tables[1], on=KEYS, suffixes=("_now", "_then"))
    least_ratio = both["ceiling_ms_then"] / both["ceiling_ms_now"].where(both["ceiling_ms_now"] > 0)
    now = both["read_bytes_now"] + both["written_bytes_now"]
    then = both["read_bytes_then"] + both["written_bytes_then"]
    ratio = least_ratio.fillna(then / now.where(now > 0)).fillna(1.0)
    return both[KEYS].assign(ratio=ratio)


def device_ratios(profile: Profile, base: Parameters, name: str) -> tuple[pd.DataFrame, str]:
    """``component``, ``phase``, ``ratio`` of device time on another GPU; which GPU was measured.

    Both sides by data sheets: a measured ceiling against a printed peak would compare
    how they were found.

    Raises:
        InputError: the profile is not of a listed GPU, or the other one is not listed or
            too small.
    """
    other = device(name)
    if profile.device != "cuda":
        raise InputError(
            f"device={other.name} cannot be predicted from a profile of the CPU: how near the "
            "model comes to a GPU's ceilings is known only from a GPU; profile it on any GPU"
        )
    measured = measured_gpu(profile)
    least = []
    for gpu in (measured, other):
        precision = getattr(base.training, "precision", "fp32")
        if precision not in gpu.tflops:
            raise InputError(
                f"training.precision is {precision!r}, which {gpu.name} has no units for"
            )
        least.append(least_times(base, gpu.ceilings(), profile.meta.get("data_statistics"), "cuda"))
    both = least[0].merge(least[1], on=KEYS, suffixes=("_now", "_then"))
    ratio = both["ceiling_ms_then"] / both["ceiling_ms_now"].where(both["ceiling_ms_now"] > 0)
    by_memory = measured.memory_gb_per_s / other.memory_gb_per_s
    return both[KEYS].assign(ratio=ratio.fillna(by_memory)), measured.name


def measured_gpu(profile: Profile) -> Device:
    """The listed GPU that a profile was measured on.

    Raises:
        InputError: its name is not known.
    """
    names = [str(profile.meta.get("device_name") or "")]
    names += map(str, (profile.meta.get("machine") or {}).get("gpus") or [])
    for name in names:
        if (found := device_of_driver(name)) is not None:
            return found
    raise InputError(
        f"the measured GPU ({', '.join(filter(None, names)) or 'unnamed'}) is not listed"
    )


def host_ms(profile: Profile) -> float:
    """Host time of an iteration that is not waiting for the GPU, ms: no GPU makes it shorter."""
    if not profile.has("cpu_time_ms"):
        return 0.0
    own = profile.value_table("cpu_time_ms", profiles=[main_thread(profile)]).to_numpy()
    names = profile.contexts["name"].to_numpy(dtype=str)
    waits = np.zeros(len(names), dtype=bool)
    for word in WAITS:
        waits |= np.char.find(names, word) >= 0
    inside = step_contexts(profile, other_threads=False)
    return float(own[inside & ~waits].sum()) / iteration_count(profile)


def merged(parts: pd.DataFrame, ratios: pd.DataFrame) -> np.ndarray:
    """The ratio of every row of ``parts``; NaN where there is none."""
    table = parts[KEYS].merge(ratios, on=KEYS, how="left")
    return table["ratio"].to_numpy(dtype=float)


def plain_change(change: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """A change without ``device``, and the GPU that it names, if any."""
    rest = {name: value for name, value in change.items() if name != "device"}
    named = change.get("device")
    if named is not None and not isinstance(named, str):
        raise InputError(f"device is {named!r}, expected the name of a GPU such as H100-SXM")
    return rest, named
