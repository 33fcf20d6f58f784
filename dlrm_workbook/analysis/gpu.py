"""What ran on the GPU: kernels, copies, and why kernels waited.

Every table is made from whichever metrics the profile has. What was not measured is NaN
in a column, or an empty table with the reason in ``attrs["not_measured"]``, never 0.

Stalls come from PC sampling: at each sample HPCToolkit adds the sampling period to the
instruction that a warp is at, and to the reason why that warp did not go on. So the unit
is warp-cycles, and shares of them are what to read (HPCToolkit user's manual, "PC
sampling"; NVIDIA's CUPTI documentation, ``CUpti_ActivityPCSamplingStallReason``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis.attribution import iteration_count, iteration_state
from dlrm_workbook.analysis.context_tree import reason_of, unmeasured
from dlrm_workbook.analysis.devices import DATA_SHEET
from dlrm_workbook.analysis.gpu_limits import kernel_work, yes_no_unknown
from dlrm_workbook.analysis.kernel_names import kernel_name, short_names
from dlrm_workbook.ground.tables import rows_of
from dlrm_workbook.recordings.hpctoolkit.database import read_database
from dlrm_workbook.recordings.hpctoolkit.metrics import COPY_KINDS, MEMORY_KINDS, STALLS, SYNC_KINDS
from dlrm_workbook.recordings.hpctoolkit.to_profile import profile_from_database
from dlrm_workbook.recordings.nesting import start_and_end, stretch_at
from dlrm_workbook.recordings.profile import Profile, nearest

KERNEL_KEYS = ["kernel", "module", "component", "phase"]
KERNELS = [
    *KERNEL_KEYS,
    *("short_name", "launches", "time_ms", "mean_us", "share_of_device"),
    *("launches_per_iteration", "per_iteration_ms", "share_of_step"),
    *("registers", "blocks", "threads_per_block", "shared_memory_bytes", "occupancy_percent"),
    *("waves", "precision", "tensor_cores", "tflops_per_s", "gb_per_s", "share_of_ceiling"),
]
COPY_COLUMNS = ["direction", "memory", "count", "bytes", "time_ms", "gb_per_s", "share_of_link"]
STALL_KEYS = {"kernel": ["kernel"], "line": ["kernel", "file", "line", "place"]}
STALL_VALUES = ["reason", "warp_cycles", "share_of_stalls", "share_of_samples"]

NO_SAMPLES = "no PC sample was taken; HPCToolkit takes them with `hpcrun -e gpu=nvidia,pc`"

SERIALISED_KERNELS = "kernels serialised by PC sampling"

ISSUED = "NONE"
"""The "reason" of samples that found a warp issuing: no stall."""

REASONS = {row["reason"]: row for row in rows_of(__file__, "stalls.csv")}
"""Stall reason to its row: ``advice``, what usually shortens it; ``words``, a legend's few; and
``colour``, that of a part: those stay apart for readers with any colour vision. What a reason
means is in ``metrics.STALLS``."""

COPY_NAMES = {"HtoD": "H2D", "DtoH": "D2H", "DtoD": "D2D", "HtoH": "H2H", "PtoP": "P2P"}
COPY_NAMES |= {"HostToDevice": "H2D", "DeviceToHost": "D2H", "DeviceToDevice": "D2D"}
"""Directions in the names of torch's traces to those of HPCToolkit."""

_COPY_FAMILIES = (
    ("GXCOPY", "", COPY_KINDS),
    ("GICOPY", "implicit, ", COPY_KINDS),
    ("GMSET", "memory set, ", MEMORY_KINDS),
    ("GSYNC", "synchronisation, ", SYNC_KINDS),
    ("GMEM", "allocation and release, ", MEMORY_KINDS),
)


def kernel_table(profile: Profile) -> pd.DataFrame:
    """Kernels by name and by the part that launched them, longest first.

    No two kernels have the same ``short_name``. A kernel belongs to the iteration in which it
    starts; figures of a mean steady iteration are NaN where none is known. ``occupancy_percent`` is
    HPCToolkit's theoretical one (resident warps over those that a multiprocessor can hold) or
    torch's estimate, which a small grid lowers too. Rates are known where the launching operator's
    shapes tell its work. ``attrs["caution"]`` says so where PC sampling made kernels run one at a
    time.
    """
    values = _at_kernels(profile)
    time, scale = ("GKER (sec)", 1e3) if profile.has("GKER (sec)") else ("gpu_time_ms", 1.0)
    count = "GKER:COUNT" if profile.has("GKER:COUNT") else "launches"
    if values.empty or not (profile.has(time) or profile.has(count)):
        reason = "no GPU kernel was measured"
        return unmeasured(KERNELS, reason, profile, "GPU times", "gpu_time_ms")

    def column(name: str) -> pd.Series:
        return values[name] if name in values else pd.Series(np.nan, values.index)

    launches = column(count)
    table = values[KERNEL_KEYS].assign(launches=launches, time_ms=column(time) * scale)
    launched = launches.where(launches > 0)
    table["mean_us"] = 1e3 * table["time_ms"] / launched
    # where nothing else of the GPU was measured, all is kernels
    device_ms = max(profile.value_table("gpu_time_ms").sum(), table["time_ms"].sum())
    table["share_of_device"] = table["time_ms"] / (device_ms or math.nan)
    table["registers"] = column("GKER:THR_REG_ACUMU") / launched
    table["blocks"] = column("GKER:BLKS_ACUMU") / launched
    table["threads_per_block"] = column("GKER:BLK_THR_ACUMU") / launched
    memory = [n for n in ("GKER:STMEM_ACUMU (B)", "GKER:DYMEM_ACUMU (B)") if n in values]
    table["shared_memory_bytes"] = values[memory].sum(axis=1, min_count=1) / launched
    most = column("GKER:FGP_MAX_ACUMU")
    table["occupancy_percent"] = 100 * column("GKER:FGP_ACT_ACUMU") / most.where(most > 0)
    device = (profile.meta.get("devices") or [{}])[0]
    table["waves"] = [waves(row, device) for row in table.to_dict("records")]
    table = table.merge(_per_iteration(profile), on=KERNEL_KEYS, how="left")
    table["launches_per_iteration"] *= table["launches"]
    table["per_iteration_ms"] *= table["time_ms"]
    table["share_of_step"] *= table["per_iteration_ms"]
    table = table.merge(_rates(profile), on=KERNEL_KEYS, how="left")
    # HPCToolkit leaves twins of kernels in the tree that hold nothing.
    table = table[table["time_ms"].gt(0) | table["launches"].gt(0)]
    table = table.sort_values("time_ms", ascending=False, ignore_index=True)
    kernel_names = [kernel_name(name) for name in table["kernel"]]
    table["short_name"] = table["kernel"].map(short_names(table["kernel"]))
    table["precision"] = [name.precision for name in kernel_names]
    table["tensor_cores"] = [
        yes_no_unknown(name.tensor_cores) if name.is_product else "" for name in kernel_names
    ]
    table = table[KERNELS]
    if profile.meta.get("serialised"):
        table.attrs["caution"] = SERIALISED_KERNELS
    return table


BLOCKS_PER_SM = {
    **dict.fromkeys(("6.0", "6.1", "7.0", "7.2", "8.0", "9.0", "10.0"), 32),
    **dict.fromkeys(("7.5", "8.6", "8.7"), 16),
    "8.9": 24,
}
"""Compute capability to the blocks that a multiprocessor holds at most (NVIDIA, CUDA C++
Programming Guide, "Technical specifications per compute capability")."""

WARP = 32


def waves(kernel: Mapping[Any, Any], device: Mapping[str, Any]) -> float:
    """Blocks of a launch over the blocks that all multiprocessors hold at once.

    A kernel has ``blocks``, ``threads_per_block``, ``registers`` (a thread) and
    ``shared_memory_bytes`` (a block), a row of ``meta["devices"]`` ``sms``, ``compute``,
    ``threads_per_sm``, ``registers_per_sm`` and ``shared_memory_per_sm``.

    A block gets registers in pieces of 256 a warp, warps in fours, and shared memory in pieces
    of 128 bytes and 1024 bytes for the system (256 and none before compute capability 8;
    NVIDIA, CUDA occupancy calculator). NaN where anything is unknown.
    """
    names = ("sms", "threads_per_sm", "registers_per_sm", "shared_memory_per_sm")
    sms, threads_per_sm, registers_per_sm, shared = (_number(device.get(name)) for name in names)
    names = ("blocks", "threads_per_block", "registers", "shared_memory_bytes")
    blocks, threads, registers, memory = (_number(kernel.get(name)) for name in names)
    most = BLOCKS_PER_SM.get(str(device.get("compute")))
    facts = (sms, threads_per_sm, registers_per_sm, shared, blocks, threads, registers, memory)
    if most is None or math.isnan(sum(facts)) or min(sms, threads) <= 0:
        return math.nan
    warps = math.ceil(threads / WARP)
    fits = [most, threads_per_sm // (WARP * warps)]
    if registers > 0:
        of_a_warp = math.ceil(registers * WARP / 256) * 256
        fits.append(registers_per_sm // of_a_warp // 4 * 4 // warps)
    piece, system = (128, 1024) if float(str(device["compute"])) >= 8 else (256, 0)
    if memory + system > 0:
        fits.append(shared // (math.ceil((memory + system) / piece) * piece))
    resident = min(fits)
    return blocks / (sms * resident) if resident >= 1 else math.nan


def _number(value: Any) -> float:
    """A number that is not negative; NaN where there is none."""
    return float(value) if isinstance(value, int | float) and value >= 0 else math.nan


def _per_iteration(profile: Profile) -> pd.DataFrame:
    """What an iteration has of each kernel's launches and time, by its keys.

    ``launches_per_iteration`` and ``per_iteration_ms`` are shares of the recording's launches
    and time, ``share_of_step`` the share of the step that a millisecond is: the recording's
    trace tells which kernels start within the steady iterations, its metrics how long they take.
    """
    contexts = profile.contexts.rename(columns={"name": "kernel"})[KERNEL_KEYS]
    is_kernel, state = profile.of_kind("kernel"), iteration_state(profile)
    if state is None:
        count = iteration_count(profile)  # of a sampled pass, counted beside it
        part = 1.0 / count if count > 1 else np.nan
        return (
            contexts[is_kernel]
            .drop_duplicates()
            .assign(launches_per_iteration=part, per_iteration_ms=part, share_of_step=np.nan)
        )
    spans = profile.trace[is_kernel[profile.trace["context"].to_numpy()]]
    iterations = profile.iterations.assign(steady=state.steady).sort_values("start_ns")
    which = stretch_at(*start_and_end(iterations), spans["start_ns"].to_numpy())
    inside = (which >= 0) & iterations["steady"].to_numpy()[which]
    length = (spans["end_ns"] - spans["start_ns"]).to_numpy()
    table = contexts.iloc[spans["context"].to_numpy()].reset_index(drop=True)
    table = table.assign(count=1, inside=inside, length=length, length_inside=length * inside)
    table = table.groupby(KERNEL_KEYS, as_index=False).sum()
    number = max(int(state.steady.sum()), 1)
    share = table["length_inside"] / table["length"].where(table["length"] > 0)
    return table[KERNEL_KEYS].assign(
        launches_per_iteration=table["inside"] / table["count"] / number,
        per_iteration_ms=share.fillna(0.0) / number,
        share_of_step=1.0 / float(state.times_ms[state.steady].mean()),
    )


def _rates(profile: Profile) -> pd.DataFrame:
    """``tflops_per_s``, ``gb_per_s`` and ``share_of_ceiling`` by kernel, where work is known."""
    places = np.flatnonzero(profile.of_kind("kernel"))
    work = kernel_work(profile, places)
    contexts = profile.contexts.rename(columns={"name": "kernel"})
    work[KERNEL_KEYS] = contexts[KERNEL_KEYS].iloc[places].to_numpy()
    table = work.groupby(KERNEL_KEYS, as_index=False).sum(min_count=1)
    return table[KERNEL_KEYS].assign(
        tflops_per_s=table["flops"] / table["work_ms"] / 1e9,
        gb_per_s=table["bytes"] / table["bytes_ms"] / 1e6,
        share_of_ceiling=table["least_ms"] / table["least_of_ms"],
    )


def copy_table(profile: Profile) -> pd.DataFrame:
    """GPU copies and memory sets by direction and by the host's memory, longest first.

    Of HPCToolkit also synchronisation and allocation, where it recorded them. Bytes that were not
    recorded are NaN, and so is ``share_of_link`` where pinned copies were not measured on this
    machine: a GPU's name tells neither the generation of its PCIe slot nor whether NVLink goes to
    the host.
    """
    rows = _hpctoolkit_copies(profile)
    if rows.empty and profile.has("copy_bytes"):
        rows = _torch_copies(profile)
    if rows.empty:
        names = ("copy_bytes", "GPU times", "GXCOPY (sec)")
        return unmeasured(COPY_COLUMNS, "no GPU copy was measured", profile, *names)
    keys = ["direction", "memory"]
    rows["bytes"] = rows["bytes"].where(rows["bytes"] > 0)
    table = rows.groupby(keys, as_index=False)[["count", "bytes", "time_ms"]].sum(min_count=1)
    table["gb_per_s"] = table["bytes"] / table["time_ms"].where(table["time_ms"] > 0) / 1e6
    table["share_of_link"] = table["gb_per_s"] / table["direction"].map(_link_rates(profile))
    return table.sort_values("time_ms", ascending=False, ignore_index=True)[COPY_COLUMNS]


def _link_rates(profile: Profile) -> dict[str, float]:
    """Direction of a copy to the best rate of pinned copies measured on the machine, GB/s."""
    rates: dict[str, float] = {}
    ceilings = profile.meta.get("ceilings") or {}
    if ceilings.get("source") == DATA_SHEET:
        return rates
    for row in ceilings.get("copy") or []:
        direction = COPY_KINDS.get(str(row.get("direction", "")).upper())
        if row.get("kind") == "pinned" and direction:
            rates[direction] = max(rates.get(direction, 0.0), float(row["gb_per_s"]))
    return rates


def stall_table(profile: Profile, by: str = "kernel") -> pd.DataFrame:
    """Why the warps of each kernel, or at each source line, did not go on.

    The kernel or line with most samples comes first, and in it the largest reason (a key of
    ``metrics.STALLS``; ``NONE`` is no stall).

    Args:
        by: ``kernel`` or ``line``. A line is where the instruction is, inlined functions
            included; ``place`` names it (``loops.cu:16``), or the function where no line
            is known.

    Raises:
        InputError: ``by`` is unknown.
    """
    if by not in STALL_KEYS:
        raise InputError(f"stalls are by {' or '.join(STALL_KEYS)}, not by '{by}'")
    keys = STALL_KEYS[by]
    columns = [*keys, *STALL_VALUES]
    stalls = [f"GINS:STL_{reason}" for reason in STALLS]
    rows = profile.values_of({"GINS", "GINS:STL_ANY", *stalls}.__contains__, "exclusive")
    if rows.empty or not rows["metric"].isin(stalls).any():
        names = ("stall reasons", "gpu_stall_reasons", "GINS")
        return unmeasured(columns, NO_SAMPLES, profile, *names)
    where = _sampled_places(profile).iloc[rows["context"]].reset_index(drop=True)
    where = where.assign(metric=rows["metric"].to_numpy(), value=rows["value"].to_numpy())
    wide = where.pivot_table("value", keys, "metric", aggfunc="sum", fill_value=0.0)
    measured = [name for name in stalls if name in wide]
    counted = [name for name in measured if name not in ("GINS:STL_NONE", "GINS:STL_HID")]
    any_stall = wide["GINS:STL_ANY"] if "GINS:STL_ANY" in wide else wide[counted].sum(axis=1)
    if "GINS" not in wide:
        wide["GINS"] = any_stall + wide.get("GINS:STL_NONE", 0.0)
    if "GINS:STL_NONE" not in wide:
        # Warps that were not stalled issued; this release does not count them apart.
        wide["GINS:STL_NONE"] = wide["GINS"] - any_stall
        measured.append("GINS:STL_NONE")
    samples = wide["GINS"].sum()
    table = wide[measured].melt(ignore_index=False, var_name="reason", value_name="warp_cycles")
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
    """The reasons in a stall table, what each means and what usually helps, most cycles first."""
    names = ["warp_cycles", "share_of_stalls", "share_of_samples"]
    columns = ["reason", "meaning", "advice", *names]
    if stalls.empty:
        return unmeasured(columns, reason_of(stalls) or "no stall was sampled")
    table = stalls.groupby("reason", as_index=False)[names].sum(min_count=1)
    table["meaning"] = table["reason"].map(STALLS)
    table["advice"] = table["reason"].map({name: row["advice"] for name, row in REASONS.items()})
    return table.sort_values("warp_cycles", ascending=False, ignore_index=True)[columns]


def sampled_profile(profile: Profile) -> Profile:
    """The profile with the PC samples: this one, or that of its pass for stalls.

    PC sampling destroys timing, so the driver measures stalls in a pass of their own
    and ``meta["passes"]`` says where its database is. If it is gone, this profile.
    """
    for measured in profile.meta.get("passes", []):
        folder = Path(str(measured.get("database") or ""))
        if measured.get("name") == "stalls" and (folder / "meta.db").is_file():
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
    places = contexts.iloc[at]
    is_place = places["kind"].isin(["line", "loop"]).to_numpy() & places["file"].ne("").to_numpy()
    file = np.where(is_place, places["file"].to_numpy(), "")
    line = np.where(is_place, places["line"].to_numpy(), 0)
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
    """``direction``, ``memory``, ``count``, ``bytes``, ``time_ms`` of each copying context."""
    contexts = profile.contexts
    chosen = profile.of_kind("copy")
    name = contexts["name"][chosen]
    kind = name.str.extract(r"(?:Memcpy|Copy) ?(\w+)")[0].map(COPY_NAMES).map(COPY_KINDS)
    memory = name.str.extract(r"(?i)(pageable|pinned)")[0].str.lower().fillna("")
    direction = kind.where(~name.str.startswith("Memset"), "memory set").fillna(name)
    return pd.DataFrame(
        {
            "direction": direction,
            "memory": memory,
            "count": profile.value_table("calls")[chosen],
            "bytes": profile.value_table("copy_bytes")[chosen],
            "time_ms": profile.value_table("gpu_time_ms")[chosen],
        }
    )


def _hpctoolkit_copies(profile: Profile) -> pd.DataFrame:
    """``direction``, ``memory``, ``count``, ``bytes``, ``time_ms`` of each copying context.

    HPCToolkit counts bytes by direction, times and counts over all; a context of the call
    tree copies one way, so it has the direction that its bytes have.
    """
    frames = []
    for family, prefix, meaning in _COPY_FAMILIES:
        names = {metric for metric in profile.metrics["metric"] if metric.startswith(family)}
        part = profile.values_of(names.__contains__, "exclusive")
        part = part[part["value"].ne(0)]
        if part.empty:
            continue
        wide = part.pivot_table("value", "context", "metric", aggfunc="sum", fill_value=0.0)
        kinds = [n for n in wide if str(n).startswith(f"{family}:") and n != f"{family}:COUNT"]
        labels = {name: str(name).removeprefix(f"{family}:").partition(" ")[0] for name in kinds}
        sized = [name for name in kinds if str(name).endswith(" (B)")]
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
                    "memory": "",
                    "count": wide.get(f"{family}:COUNT", np.nan),
                    "bytes": wide[sized].sum(axis=1) if sized else np.nan,
                    "time_ms": np.nan if seconds is None else 1e3 * seconds,
                }
            )
        )
    columns = ["direction", "memory", "count", "bytes", "time_ms"]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)
