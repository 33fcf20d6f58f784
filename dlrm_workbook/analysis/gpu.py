"""What ran on the GPU: kernels, copies, and why kernels waited.

Every table is made from whichever metrics the profile has. What was not measured is NaN
in a column, or an empty table with the reason in ``attrs["not_measured"]``, never 0.

Stalls come from PC sampling: at each sample HPCToolkit adds the sampling period to the
instruction that a warp is at, and to the reason why that warp did not go on. So the unit
is warp-cycles, and shares of them are what to read (HPCToolkit user's manual, "PC
sampling"; NVIDIA's CUPTI documentation, ``CUpti_ActivityPCSamplingStallReason``).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from dlrm_core.errors import InputError
from dlrm_workbook.analysis.context_tree import missing_reason, unmeasured
from dlrm_workbook.recordings.hpctoolkit.database import read_database
from dlrm_workbook.recordings.hpctoolkit.metrics import (
    COPY_KINDS,
    MEMORY_KINDS,
    STALLS,
)
from dlrm_workbook.recordings.hpctoolkit.to_profile import profile_from_database
from dlrm_workbook.recordings.profile import Profile, nearest

KERNEL_KEYS = ["kernel", "module", "component", "phase"]
KERNELS = [
    *KERNEL_KEYS,
    *("launches", "time_ms", "mean_us", "share", "registers", "blocks", "threads_per_block"),
    *("shared_memory_bytes", "occupancy_percent"),
]
COPIES = ["direction", "count", "bytes", "time_ms", "gb_per_s"]
STALL_KEYS = {"kernel": ["kernel"], "line": ["kernel", "file", "line", "place"]}
STALL_VALUES = ["reason", "warp_cycles", "share_of_stalls", "share_of_samples"]

NO_SAMPLES = "no PC sample was taken; HPCToolkit takes them with hpcrun -e gpu=nvidia,pc"

ISSUED = "NONE"
"""The "reason" of samples that found a warp issuing: no stall."""

STALL_ADVICE = {
    "NONE": "nothing: this is the GPU at work",
    "IFET": "smaller or less unrolled code, fewer branches; larger kernels where each is short",
    "IDEP": "more independent work: more warps (occupancy), unrolling, several results a thread",
    "GMEM": "fewer bytes (bf16, fusion), coalesced and reused reads, more loads in flight",
    "TMEM": "fewer or wider texture and local-memory accesses; look for register spills",
    "SYNC": "fewer barriers, smaller blocks, even work among the warps of a block",
    "CMEM": "constants that all threads of a warp read alike; larger kernels: first reads miss",
    "PIPE": "the arithmetic is the limit: tensor cores, lower precision, fewer operations",
    "MTHR": "wider and fewer accesses: vector loads, coalescing; look for register spills",
    "NSEL": "nothing: other warps were ready, there is more parallelism than needed",
    "OTHR": "look at the instructions: branches, barriers of the hardware, and the like",
    "SLP": "fewer sleeps: spinning on locks or flags",
    "MEM": "fewer bytes (bf16, fusion), coalesced and reused reads",
    "LMEM": "fewer registers a thread, so that none spill; smaller local arrays",
    "HID": "nothing: other warps issued meanwhile",
    "INV": "none: the hardware gave no valid reason",
}
"""Stall reason to what usually shortens it; what it means is in ``metrics.STALLS``."""

COPY_NAMES = {"HtoD": "H2D", "DtoH": "D2H", "DtoD": "D2D", "HtoH": "H2H", "PtoP": "P2P"}
"""Directions in the names of torch's traces to those of HPCToolkit."""

_COPY_FAMILIES = (("GXCOPY", ""), ("GICOPY", "implicit, "), ("GMSET", "memory set, "))


def kernel_table(profile: Profile) -> pd.DataFrame:
    """Kernels by name and by the part that launched them, longest first.

    Returns:
        ``kernel``, ``module``, ``component``, ``phase``, ``launches``, ``time_ms`` (over
        the run), ``mean_us`` (a launch), ``share`` (of all kernel time), ``registers`` (a
        thread), ``blocks`` (a launch), ``threads_per_block``, ``shared_memory_bytes`` (a
        block, static and dynamic), ``occupancy_percent`` (theoretical: resident warps
        over those that a multiprocessor can hold). Properties are means over launches.
    """
    values = _at_kernels(profile)
    time, scale = ("GKER (sec)", 1e3) if profile.has("GKER (sec)") else ("gpu_time_ms", 1.0)
    count = "GKER:COUNT" if profile.has("GKER:COUNT") else "launches"
    if values.empty or not (profile.has(time) or profile.has(count)):
        reason = missing_reason(profile, ["GPU times", "gpu_time_ms"], "no GPU kernel was measured")
        return unmeasured(KERNELS, reason)

    def column(name: str) -> pd.Series:
        return values[name] if name in values else pd.Series(np.nan, values.index)

    launches = column(count)
    table = values[KERNEL_KEYS].assign(launches=launches, time_ms=column(time) * scale)
    each = launches.where(launches > 0)
    table["mean_us"] = 1e3 * table["time_ms"] / each
    table["share"] = table["time_ms"] / table["time_ms"].sum()
    table["registers"] = column("GKER:THR_REG_ACUMU") / each
    table["blocks"] = column("GKER:BLKS_ACUMU") / each
    table["threads_per_block"] = column("GKER:BLK_THR_ACUMU") / each
    memory = [n for n in ("GKER:STMEM_ACUMU (B)", "GKER:DYMEM_ACUMU (B)") if n in values]
    if memory:
        table["shared_memory_bytes"] = values[memory].sum(axis=1) / each
    else:
        table["shared_memory_bytes"] = np.nan
    most = column("GKER:FGP_MAX_ACUMU")
    table["occupancy_percent"] = 100 * column("GKER:FGP_ACT_ACUMU") / most.where(most > 0)
    # HPCToolkit leaves twins of kernels in the tree that hold nothing.
    table = table[table["time_ms"].gt(0) | table["launches"].gt(0)]
    return table.sort_values("time_ms", ascending=False, ignore_index=True)[KERNELS]


def copy_table(profile: Profile) -> pd.DataFrame:
    """GPU copies and memory sets by direction, longest first.

    Returns:
        ``direction``, ``count``, ``bytes``, ``time_ms`` (over the run), ``gb_per_s``
        (10^9 bytes of copies over their time).
    """
    by_direction = profile.has("GXCOPY (sec)") or not profile.has("copy_bytes")
    rows = _hpctoolkit_copies(profile) if by_direction else _torch_copies(profile)
    if rows.empty:
        reason = missing_reason(
            profile, ["copy_bytes", "GPU times", "GXCOPY (sec)"], "no GPU copy was measured"
        )
        return unmeasured(COPIES, reason)
    table = rows.groupby("direction", as_index=False)[["count", "bytes", "time_ms"]].sum(
        min_count=1
    )
    table["gb_per_s"] = table["bytes"] / table["time_ms"].where(table["time_ms"] > 0) / 1e6
    return table.sort_values("time_ms", ascending=False, ignore_index=True)[COPIES]


def stall_table(profile: Profile, by: str = "kernel") -> pd.DataFrame:
    """Why the warps of each kernel, or at each source line, did not go on.

    Args:
        by: ``kernel`` or ``line``. A line is where the instruction is, inlined functions
            included; ``place`` names it (``loops.cu:16``), or the function where no line
            is known.

    Returns:
        ``kernel`` (and ``file``, ``line``, ``place``), ``reason`` (a key of
        ``metrics.STALLS``; ``NONE`` is no stall), ``warp_cycles``, ``share_of_stalls``
        (of the stalls of all kernels; NaN for ``NONE``), ``share_of_samples`` (of all
        warp-cycles sampled, sums to 1 at most). The kernel or line with most samples
        first, and in it the largest reason.

    Raises:
        InputError: ``by`` is unknown.
    """
    if by not in STALL_KEYS:
        raise InputError(f"stalls are by {' or '.join(STALL_KEYS)}, not by '{by}'")
    columns = [*STALL_KEYS[by], *STALL_VALUES]
    stalls = [f"GINS:STL_{reason}" for reason in STALLS]
    rows = profile.values_of({"GINS", "GINS:STL_ANY", *stalls}.__contains__, "exclusive")
    if rows.empty or not rows["metric"].isin(stalls).any():
        reason = missing_reason(profile, ["stall reasons", "gpu_stall_reasons", "GINS"], NO_SAMPLES)
        return unmeasured(columns, reason)
    where = _sampled_places(profile).iloc[rows["context"]].reset_index(drop=True)
    where = where.assign(metric=rows["metric"].to_numpy(), value=rows["value"].to_numpy())
    keys = STALL_KEYS[by]
    wide = where.pivot_table("value", keys, "metric", aggfunc="sum", fill_value=0.0)
    found = [name for name in stalls if name in wide]
    counted = [name for name in found if name not in ("GINS:STL_NONE", "GINS:STL_HID")]
    any_stall = wide["GINS:STL_ANY"] if "GINS:STL_ANY" in wide else wide[counted].sum(axis=1)
    if "GINS" not in wide:
        wide["GINS"] = any_stall + wide.get("GINS:STL_NONE", 0.0)
    if "GINS:STL_NONE" not in wide:
        # Warps that were not stalled issued; this release does not count them apart.
        wide["GINS:STL_NONE"] = wide["GINS"] - any_stall
        found.append("GINS:STL_NONE")
    samples = wide["GINS"].sum()
    table = wide[found].melt(ignore_index=False, var_name="reason", value_name="warp_cycles")
    table = table.reset_index()
    table["reason"] = table["reason"].str.removeprefix("GINS:STL_")
    table = table[table["warp_cycles"] > 0]
    stalled = ~table["reason"].isin([ISSUED, "HID"])
    share = table["warp_cycles"] / any_stall.sum() if any_stall.sum() else np.nan
    table["share_of_stalls"] = share.where(stalled) if isinstance(share, pd.Series) else np.nan
    table["share_of_samples"] = table["warp_cycles"] / samples if samples else np.nan
    order = table.groupby(keys)["warp_cycles"].transform("sum")
    table = table.assign(order=order).sort_values(
        ["order", *keys, "warp_cycles"], ascending=[False, *[True] * len(keys), False]
    )
    return table[columns].reset_index(drop=True)


def stall_reasons(stalls: pd.DataFrame) -> pd.DataFrame:
    """The reasons in a stall table, what each means and what usually helps.

    Returns:
        ``reason``, ``meaning``, ``advice``, ``warp_cycles``, ``share_of_stalls``,
        ``share_of_samples``; most warp-cycles first.
    """
    columns = ["reason", "meaning", "advice", "warp_cycles", "share_of_stalls", "share_of_samples"]
    if stalls.empty:
        return unmeasured(columns, str(stalls.attrs.get("not_measured", "no stall was sampled")))
    names = ["warp_cycles", "share_of_stalls", "share_of_samples"]
    table = stalls.groupby("reason", as_index=False)[names].sum(min_count=1)
    table["meaning"] = table["reason"].map(STALLS)
    table["advice"] = table["reason"].map(STALL_ADVICE)
    return table.sort_values("warp_cycles", ascending=False, ignore_index=True)[columns]


def sampled_profile(profile: Profile) -> Profile:
    """The profile with the PC samples: this one, or that of its pass for stalls.

    PC sampling destroys timing, so the driver measures stalls in a pass of their own
    and ``meta["passes"]`` says where its database is. If it is gone, this profile.
    """
    for made in profile.meta.get("passes", []):
        folder = Path(str(made.get("database") or ""))
        if made.get("name") == "stalls" and (folder / "meta.db").is_file():
            return profile_from_database(read_database(folder))
    return profile


def _at_kernels(profile: Profile) -> pd.DataFrame:
    """Metrics of each kernel, a column each, callees and lines of the kernel included."""
    contexts = profile.contexts
    is_kernel = profile.of_kind("kernel")
    rows = profile.values.iloc[np.flatnonzero(is_kernel[profile.values["context"].to_numpy()])]
    rows = rows[rows["scope"] == "inclusive"]
    table = contexts.rename(columns={"name": "kernel"})[KERNEL_KEYS].iloc[rows["context"]]
    table = table.assign(metric=rows["metric"].to_numpy(), value=rows["value"].to_numpy())
    # 0 where a metric has a value at other kernels: then it was measured
    wide = table.pivot_table("value", KERNEL_KEYS, "metric", aggfunc="sum", fill_value=0.0)
    return wide.rename_axis(columns=None).reset_index()


def _sampled_places(profile: Profile) -> pd.DataFrame:
    """``kernel``, ``file``, ``line``, ``place`` of every context."""
    contexts = profile.contexts
    parent = contexts["parent"].to_numpy()
    kind = contexts["kind"]
    kernel = nearest(parent, kind.eq("kernel").to_numpy())
    # A loop's own samples are at its head; an instruction's at the line around it.
    at = nearest(parent, kind.isin(["line", "loop", "function", "kernel"]).to_numpy())
    at = np.where(at < 0, np.arange(len(at)), at)
    names = contexts["name"].to_numpy()
    found = contexts.iloc[at]
    is_place = found["kind"].isin(["line", "loop"]).to_numpy() & found["file"].ne("").to_numpy()
    file = np.where(is_place, found["file"].to_numpy(), "")
    line = np.where(is_place, found["line"].to_numpy(), 0)
    base = pd.Series(file).str.rpartition("/")[2]
    place = np.where(is_place, base + ":" + pd.Series(line).astype(str), names[at])
    return pd.DataFrame(
        {
            "kernel": np.where(kernel >= 0, names[kernel], "(outside every kernel)"),
            "file": file,
            "line": line,
            "place": place,
        }
    )


def _torch_copies(profile: Profile) -> pd.DataFrame:
    """``direction``, ``count``, ``bytes``, ``time_ms`` of each copying context."""
    contexts = profile.contexts
    chosen = contexts["kind"].eq("copy").to_numpy()
    name = contexts["name"][chosen]
    found = name.str.extract(r"Memcpy (\w+)")[0].map(COPY_NAMES).map(COPY_KINDS)
    direction = found.where(~name.str.startswith("Memset"), "memory set").fillna(name)
    return pd.DataFrame(
        {
            "direction": direction,
            "count": profile.value_table("calls")[chosen],
            "bytes": profile.value_table("copy_bytes")[chosen],
            "time_ms": profile.value_table("gpu_time_ms")[chosen],
        }
    )


def _hpctoolkit_copies(profile: Profile) -> pd.DataFrame:
    """``direction``, ``count``, ``bytes``, ``time_ms`` of each copying context.

    HPCToolkit counts bytes by direction, times and counts over all; a context of the call
    tree copies one way, so it has the direction that its bytes have.
    """
    frames = []
    for family, prefix in _COPY_FAMILIES:
        names = {metric for metric in profile.metrics["metric"] if metric.startswith(family)}
        part = profile.values_of(names.__contains__, "exclusive")
        part = part[part["value"].ne(0)]
        if part.empty:
            continue
        wide = part.pivot_table("value", "context", "metric", aggfunc="sum", fill_value=0.0)
        kinds = [name for name in wide if str(name).endswith(" (B)")]
        labels = {name: str(name).removeprefix(f"{family}:").removesuffix(" (B)") for name in kinds}
        meaning = MEMORY_KINDS if family == "GMSET" else COPY_KINDS
        direction = pd.Series("", wide.index)
        for name in kinds:
            text = meaning.get(labels[name], labels[name])
            also = direction.where(direction.eq(""), direction + " and ")
            direction = direction.where(wide[name].eq(0), also + text)
        seconds = wide.get(f"{family} (sec)")
        frames.append(
            pd.DataFrame(
                {
                    "direction": prefix + direction.where(direction.ne(""), "of unknown kind"),
                    "count": wide.get(f"{family}:COUNT", np.nan),
                    "bytes": wide[kinds].sum(axis=1) if kinds else np.nan,
                    "time_ms": np.nan if seconds is None else 1e3 * seconds,
                }
            )
        )
    columns = ["direction", "count", "bytes", "time_ms"]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)
