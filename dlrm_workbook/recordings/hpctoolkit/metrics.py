"""What HPCToolkit's metrics are called, measure and mean, across its generations.

Databases name one quantity differently over the years (``GINS``, ``GINST``,
``GCYCLES``; ``(sec)`` or ``(s)``; ``GKER:BLK`` or ``GKER:BLKS``).
``canonical_name`` maps each to one name, that of the 2025-05 release. Derived
quantities (occupancy, stall shares, ...) are computed from those.

Sources: ``src/hpcrun/gpu/gpu-metrics.h`` and the GPU chapter of the user's
manual, of HPCToolkit 2025-05 and of later development versions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

NOT_COLLECTED = ("GMEM (sec)", "GSYNC (sec)", "GICOPY (sec)")
"""Metrics that databases list and that HPCToolkit 2025-05 never fills for CUDA."""

UNIT_ALIASES = {"s": "sec", "sec": "sec", "b": "B", "B": "B", "bytes": "B", "cyc": "cyc"}
UNITS = {
    "sec": "s",
    "B": "bytes",
    "cyc": "GPU cycles",
    "L2T": "L2 transactions",
    "T": "transactions",
    "GB": "GB/s",
}

STALLS = {
    "NONE": "no stall: an instruction was issued",
    "IFET": "waiting for the next instruction to be fetched",
    "IDEP": "waiting for an operand of an earlier instruction",
    "GMEM": "waiting for global memory",
    "TMEM": "texture memory request queue full",
    "SYNC": "waiting at a barrier or for a memory fence",
    "CMEM": "waiting for constant or immediate memory",
    "PIPE": "waiting for a busy arithmetic pipeline",
    "MTHR": "global memory request queue full",
    "NSEL": "ready, but another warp was issued",
    "OTHR": "another reason",
    "SLP": "sleeping",
    "MEM": "waiting for memory of any kind",
    "HID": "stalled while another warp was issued: latency hidden",
    "INV": "no valid reason reported",
}
EXPOSED = "GCYCLES counts only stalls during which no warp was issued; GINS counts all stalls"

COPY_KINDS = {
    "H2D": "host to device",
    "D2H": "device to host",
    "D2D": "device to device",
    "H2H": "host to host",
    "P2P": "peer to peer",
    "H2A": "host to array",
    "A2H": "array to host",
    "A2A": "array to array",
    "A2D": "array to device",
    "D2A": "device to array",
    "UNK": "of unknown kind",
}
MEMORY_KINDS = {
    "UNK": "memory of unknown kind",
    "PAG": "pageable memory",
    "PIN": "pinned memory",
    "DEV": "device memory",
    "ARY": "array memory",
    "MAN": "managed memory",
    "DST": "static device memory",
    "MST": "static managed memory",
}
SYNC_KINDS = {
    "UNK": "of unknown kind",
    "EVT": "on events",
    "STRE": "of streams with events",
    "STR": "on streams",
    "CTX": "on contexts",
}
KERNEL_PROPERTIES = {
    "BLKS": "thread blocks",
    "BLK_THR": "threads of a block",
    "THR_REG": "registers of a thread",
    "STMEM": "static shared memory of a block",
    "DYMEM": "dynamic shared memory of a block",
    "LMEM": "local memory",
    "BLK_SM": "shared memory of a block",
    "FGP_ACT": "warps that can be resident on a multiprocessor",
    "FGP_MAX": "warps that a multiprocessor can hold",
}

_FIXED = {
    "CPUTIME (sec)": "sampled time on a CPU",
    "REALTIME (sec)": "sampled wall-clock time of a thread",
    "GPUOP (sec)": "time of all GPU operations",
    "GKER (sec)": "time of GPU kernels",
    "GMEM (sec)": "time of GPU memory allocation and release",
    "GMSET (sec)": "time of GPU memory sets",
    "GXCOPY (sec)": "time of explicit GPU copies",
    "GICOPY (sec)": "time of implicit GPU copies",
    "GSYNC (sec)": "time of GPU synchronisation",
    "GKER:COUNT": "kernel launches",
    "GMEM:COUNT": "GPU memory allocations and releases",
    "GMSET:COUNT": "GPU memory sets",
    "GXCOPY:COUNT": "explicit GPU copies",
    "GICOPY:COUNT": "implicit GPU copies",
    "GSYNC:COUNT": "GPU synchronisations",
    "GINS": "warp-cycles seen by PC sampling: samples times period, stalls included",
    "GINS:STL_ANY": "warp-cycles stalled, for any reason",
    "GINS:LAT": "latency of instructions",
    "GINS:LAT_COV": "latency of instructions that other warps cover",
    "GINS:LAT_UCV": "latency of instructions that nothing covers",
    "GINS:BLK_EXEC_CNT": "executions of basic blocks",
    "GINS:BLK_LAT": "latency of basic blocks",
    "GSAMP:TOT": "PC samples taken",
    "GSAMP:EXP": "PC samples expected of a fully busy GPU",
    "GSAMP:DRP": "PC samples dropped",
    "GSAMP:PER (cyc)": "period between PC samples; only means something on a leaf",
    "GSAMP:UTIL": "GPU utilisation seen by PC sampling",
    "GKER:OCC_THR": "theoretical occupancy of kernels",
    "perf::task-clock": "time on a CPU, by Linux perf events",
    "perf::cpu-clock": "time on a CPU, by Linux perf events",
}


def canonical_name(name: str) -> str:
    """The 2025-05 name of a metric that another generation calls ``name``.

    >>> canonical_name("GCYCLES:STL:GMEM")
    'GINS:STL_GMEM'
    >>> canonical_name("GXCOPY:H2D (b)")
    'GXCOPY:H2D (B)'
    """
    match = re.fullmatch(r"(.+?) \((\w+)\)", name)
    base, unit = (match[1], match[2]) if match else (name, "")
    if not base.startswith(("G", "CPU", "REAL")):
        return name
    family, colon, rest = base.partition(":")
    if family in ("GINST", "GCYCLES", "GINS"):
        family = "GINS"
        stall = re.fullmatch(r"STL(?:[:_](\w+))?", rest)
        if stall:
            rest = f"STL_{stall[1] or 'ANY'}"
        elif rest == "ISU":
            rest = "STL_NONE"
    elif family == "GKER":
        rest = re.sub(r"^BLK(_ACUMU|)$", r"BLKS\1", rest)
    return family + colon + rest + (f" ({UNIT_ALIASES.get(unit, unit)})" if unit else "")


def unit_of(name: str) -> str:
    """Unit of a metric's values; "" for counts."""
    name = canonical_name(name)
    match = re.search(r" \((\w+)\)$", name)
    if match:
        return UNITS.get(match[1], match[1])
    if name in ("GSAMP:UTIL", "GKER:OCC_THR"):
        return "%"
    if name == "GINS" or name.startswith("GINS:STL_"):
        return "warp-cycles"
    if name in ("perf::task-clock", "perf::cpu-clock"):
        return "ns"
    return ""


def meaning_of(name: str) -> str:
    """What a metric measures, in a few words; its own name where it is not known."""
    canonical = canonical_name(name)
    if canonical in _FIXED:
        return _FIXED[canonical] + (f" ({EXPOSED})" if name == "GCYCLES:STL" else "")
    base = re.sub(r" \(\w+\)$", "", canonical)
    family, _, part = base.partition(":")
    if family == "GINS" and part.startswith("STL_"):
        return f"warp-cycles by stall: {STALLS.get(part[4:], part[4:])}"
    if family == "GXCOPY":
        return f"explicit GPU copies {COPY_KINDS.get(part, part)}"
    if family == "GICOPY":
        return f"implicit GPU copies {COPY_KINDS.get(part, part)}"
    if family == "GMEM":
        return f"GPU allocation and release: {MEMORY_KINDS.get(part, part)}"
    if family == "GMSET":
        return f"GPU memory sets: {MEMORY_KINDS.get(part, part)}"
    if family == "GSYNC":
        return f"GPU synchronisation {SYNC_KINDS.get(part, part)}"
    if family == "GKER":
        whole = part.removesuffix("_ACUMU")
        text = KERNEL_PROPERTIES.get(whole, whole)
        return f"{text}, summed over launches" if part != whole else f"{text}, mean over launches"
    if canonical.startswith("perf::") or re.fullmatch(r"[A-Z0-9_]+", canonical):
        return f"hardware or kernel event {canonical}"
    return canonical


def reason_without_value(name: str, measured: Mapping[str, float]) -> str:
    """Why a metric that the database lists has no value anywhere.

    Args:
        name: of the metric, in any generation's spelling.
        measured: canonical metrics that have a value.
    """
    name = canonical_name(name)
    if name in NOT_COLLECTED:
        return "HPCToolkit lists it but does not collect it for CUDA"
    if name.startswith(("GINS", "GSAMP")) and not {"GINS", "GSAMP:TOT"} & set(measured):
        return (
            "no PC sample was taken; PC sampling needs permission, and CUDA 12 or an "
            "HPCToolkit that supports CUDA 13"
        )
    return "no value anywhere: it did not occur, or this measurement does not provide it"


def additive(name: str) -> bool:
    """Whether values of disjoint parts add up (a sampling period does not)."""
    return canonical_name(name) not in ("GSAMP:PER (cyc)", "GSAMP:UTIL", "GKER:OCC_THR")


@dataclass(frozen=True)
class Derivation:
    """A quantity computed from metrics.

    Attributes:
        name: with its unit, as column and key.
        unit, meaning: of the result.
        inputs: canonical metrics without a value of which it is not measured.
        counted: canonical metrics that must be listed; without a value they are 0.
        formula: in words, for the tables.
        compute: from canonical metric to value, with all ``inputs`` present.
    """

    name: str
    unit: str
    meaning: str
    inputs: tuple[str, ...]
    formula: str
    compute: Callable[[Mapping[str, float]], float | None]
    counted: tuple[str, ...] = ()

    @property
    def of_kernels(self) -> bool:
        """Whether a kernel can have it (copies are no part of one)."""
        return not self.inputs[0].startswith("GXCOPY")


def _ratio(scale: float, above: str, below: str) -> Callable[[Mapping[str, float]], float | None]:
    return lambda v: scale * v.get(above, 0.0) / v[below] if v.get(below) else None


def _utilisation(v: Mapping[str, float]) -> float | None:
    share = 100 * v.get("GSAMP:TOT", 0.0) / v["GSAMP:EXP"]
    return max(0.0, min(100.0, share))


def _derivation(
    name: str, unit: str, meaning: str, scale: float, above: str, below: str, text: str = ""
) -> Derivation:
    factor = "" if scale == 1 else f"{scale:g} * "
    return Derivation(
        name,
        unit,
        meaning,
        (below,),
        text or f"{factor}{above} / {below}",
        _ratio(scale, above, below),
        (above,),
    )


COPY_BYTES = tuple(f"GXCOPY:{kind} (B)" for kind in COPY_KINDS)

DERIVATIONS: tuple[Derivation, ...] = (
    Derivation(
        "launches", "", "kernel launches", ("GKER:COUNT",), "GKER:COUNT", lambda v: v["GKER:COUNT"]
    ),
    _derivation("mean_kernel_us", "us", "mean time of a launch", 1e6, "GKER (sec)", "GKER:COUNT"),
    _derivation(
        "occupancy_percent",
        "%",
        "theoretical occupancy: resident warps over those a multiprocessor can hold",
        100,
        "GKER:FGP_ACT_ACUMU",
        "GKER:FGP_MAX_ACUMU",
    ),
    _derivation(
        "mean_registers", "", "registers of a thread", 1, "GKER:THR_REG_ACUMU", "GKER:COUNT"
    ),
    _derivation("mean_blocks", "", "thread blocks of a launch", 1, "GKER:BLKS_ACUMU", "GKER:COUNT"),
    _derivation(
        "mean_threads_per_block", "", "threads of a block", 1, "GKER:BLK_THR_ACUMU", "GKER:COUNT"
    ),
    Derivation(
        "utilization_percent",
        "%",
        "PC samples taken of those that a fully busy GPU would give",
        ("GSAMP:EXP",),
        "min(100, 100 * GSAMP:TOT / GSAMP:EXP)",
        lambda v: _utilisation(v) if v.get("GSAMP:EXP") else None,
        ("GSAMP:TOT",),
    ),
    _derivation(
        "stalled_percent",
        "%",
        "sampled warp-cycles that were stalled",
        100,
        "GINS:STL_ANY",
        "GINS",
    ),
    *(
        _derivation(
            f"stall_{reason.lower()}_percent",
            "%",
            f"share of the stalls: {STALLS[reason]}",
            100,
            f"GINS:STL_{reason}",
            "GINS:STL_ANY",
        )
        for reason in STALLS
        if reason not in ("NONE", "HID")
    ),
    Derivation(
        "copy_gb_per_s",
        "GB/s",
        "bytes of explicit copies over their time",
        ("GXCOPY (sec)",),
        "sum of GXCOPY:* (B) / GXCOPY (sec) / 1e9",
        lambda v: (
            sum(v.get(name, 0.0) for name in COPY_BYTES) / v["GXCOPY (sec)"] / 1e9
            if v.get("GXCOPY (sec)")
            else None
        ),
    ),
)


def derive(
    values: Mapping[str, float], listed: Collection[str] | None = None
) -> dict[str, float | str]:
    """Every derived quantity that these values allow.

    Args:
        values: canonical metric to its value in one context; only metrics that
            have a value there.
        listed: canonical metrics that the database knows; those of ``values`` if None.

    Returns:
        Name to number, or to a sentence why it was not measured.
    """
    results: dict[str, float | str] = {}
    listed = values if listed is None else listed
    for derivation in DERIVATIONS:
        unknown = [name for name in derivation.counted if name not in listed]
        if unknown:
            results[derivation.name] = f"not measured: there is no metric {', '.join(unknown)}"
            continue
        missing = [name for name in derivation.inputs if name not in values]
        if missing:
            results[derivation.name] = f"not measured: no values of {', '.join(missing)}"
            continue
        result = derivation.compute(values)
        results[derivation.name] = (
            f"not measured: {derivation.inputs[0]} is 0" if result is None else float(result)
        )
    return results
