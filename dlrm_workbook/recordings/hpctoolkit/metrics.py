"""What HPCToolkit's metrics are called, measure and mean, across its generations.

Databases name one quantity differently over the years (``GINS``, ``GINST``,
``GCYCLES``; ``(sec)`` or ``(s)``; ``GKER:BLK`` or ``GKER:BLKS``).
``canonical_name`` maps each to one name, that of the 2025-05 release. Derived
quantities (occupancy, stall shares, ...) are computed from those. What a metric means stands in
``metrics.csv``.

Sources: ``src/hpcrun/gpu/gpu-metrics.h`` and the GPU chapter of the user's
manual, of HPCToolkit 2025-05 and of later development versions.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from dlrm_workbook.ground.tables import rows_of

NOT_COLLECTED = ("GMEM (sec)", "GSYNC (sec)", "GICOPY (sec)")
"""Metrics that HPCToolkit 2025-05 lists and never fills on NVIDIA GPUs."""

_ROWS = rows_of(__file__, "metrics.csv")


def _table(kind: str) -> dict[str, str]:
    """Names of a kind to what they mean, or are called in 2025-05."""
    return {row["name"]: row["meaning"] for row in _ROWS if row["kind"] == kind}


UNITS, UNIT_ALIASES = _table("unit"), _table("spelling of a unit")
STALLS, INTEL_STALLS = _table("stall"), _table("stall of an Intel GPU")
"""Reasons of NVIDIA's GPUs to wait, and the stalls of Intel's that mean the same."""
EXPOSED = "GCYCLES counts only stalls during which no warp was issued; GINS counts all stalls"
COPY_KINDS, MEMORY_KINDS = _table("copy"), _table("memory")
SYNC_KINDS = _table("synchronisation")
KERNEL_PROPERTIES = _table("kernel property")
KERNEL_ALIASES = _table("spelling of a kernel property")
"""Kernel properties in other generations to their 2025-05 names. Scalar registers exist on AMD's
GPUs beside the vector registers, which are what limits how many threads are resident."""
_METRICS = _table("metric")

_FAMILIES = {
    "GXCOPY": ("explicit GPU copies", COPY_KINDS),
    "GICOPY": ("implicit GPU copies", COPY_KINDS),
    "GMEM": ("GPU allocation and release:", MEMORY_KINDS),
    "GMSET": ("GPU memory sets:", MEMORY_KINDS),
    "GSYNC": ("GPU synchronisation", SYNC_KINDS),
}
"""Family of a metric to what it counts and the meaning of what follows its colon."""


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
        if stall := re.fullmatch(r"STL(?:[:_](\w+))?", rest):
            reason = stall[1] or "ANY"
            rest = f"STL_{INTEL_STALLS.get(reason, reason)}"
        elif rest == "ISU":
            rest = "STL_NONE"
    elif family == "GKER":
        plain = rest.removesuffix("_ACUMU")
        rest = KERNEL_ALIASES.get(plain, plain) + rest[len(plain) :]
    if family == "GINS" and unit == "cyc":
        unit = ""
    return family + colon + rest + (f" ({UNIT_ALIASES.get(unit, unit)})" if unit else "")


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """The 2025-05 name of each metric of one database.

    Newer databases count cycles in ``GCYCLES``; there ``GINS`` is the number of instructions,
    which 2025-05 does not have.
    """
    names = list(names)
    in_cycles = any(name.startswith("GCYCLES") for name in names)
    return {
        name: "GINS:EXEC" if in_cycles and name in ("GINS", "GINST") else canonical_name(name)
        for name in names
    }


def unit_of(name: str) -> str:
    """Unit of a metric's values; "" for counts."""
    name = canonical_name(name)
    if match := re.search(r" \((\w+)\)$", name):
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
    if canonical in _METRICS:
        return _METRICS[canonical] + (f" ({EXPOSED})" if name == "GCYCLES:STL" else "")
    base = re.sub(r" \(\w+\)$", "", canonical)
    family, _, part = base.partition(":")
    if family == "GINS" and part.startswith("STL_"):
        return f"warp-cycles by stall: {STALLS.get(part[4:], part[4:])}"
    if family in _FAMILIES:
        what, kinds = _FAMILIES[family]
        return f"{what} {kinds.get(part, part)}"
    if family == "GKER":
        whole = part.removesuffix("_ACUMU")
        text = KERNEL_PROPERTIES.get(whole, whole)
        return f"{text}, summed over launches" if part != whole else f"{text}, mean over launches"
    if canonical.startswith("perf::") or re.fullmatch(r"[A-Z0-9_]+", canonical):
        return f"hardware or kernel event {canonical}"
    return canonical


def reason_without_value(name: str, measured: Mapping[str, float]) -> str:
    """Why a metric, in any generation's spelling, has no value anywhere though the database lists
    it; ``measured`` are the canonical metrics that have one."""
    name = canonical_name(name)
    if name in NOT_COLLECTED:
        return "HPCToolkit lists it but does not collect it (on NVIDIA GPUs it never does)"
    if name.startswith(("GINS", "GSAMP")) and not {"GINS", "GSAMP:TOT"} & set(measured):
        return (
            "no PC sample was taken; PC sampling needs permission, and on NVIDIA GPUs CUDA 12 or "
            "an HPCToolkit that supports CUDA 13"
        )
    return "no value anywhere: it did not occur, or this measurement does not provide it"


def additive(name: str) -> bool:
    """Whether values of disjoint parts add up (a sampling period does not)."""
    return canonical_name(name) not in ("GSAMP:PER (cyc)", "GSAMP:UTIL", "GKER:OCC_THR")


@dataclass(frozen=True)
class Derivation:
    """A quantity computed from metrics: ``scale * sum of above / below``.

    Attributes:
        name: with its unit, as column and key.
        unit, meaning: of the result.
        above: canonical metrics. A single one must be listed by the database; without a
            value it is 0.
        below: canonical metric without a value of which the quantity is not measured; ""
            where nothing is divided by.
        most: the quantity lies between 0 and this, where that is known.
    """

    name: str
    unit: str
    meaning: str
    scale: float
    above: tuple[str, ...]
    below: str
    most: float | None = None

    def compute(self, values: Mapping[str, float], listed: Collection[str]) -> float | str:
        """The number, or a sentence why it was not measured; arguments as for ``derive``."""
        above, below = self.above, self.below
        if below and len(above) == 1 and above[0] not in listed:
            return f"not measured: there is no metric {above[0]}"
        needed = below or above[0]
        if needed not in values:
            return f"not measured: no values of {needed}"
        if below and not values[below]:
            return f"not measured: {below} is 0"
        total = self.scale * sum(values.get(name, 0.0) for name in above)
        number = total / values[below] if below else total
        return float(number if self.most is None else max(0.0, min(self.most, number)))


def _derivations() -> Iterator[Derivation]:
    for row in rows_of(__file__, "derived.csv"):
        scale, most = float(row["scale"]), float(row["most"]) if row["most"] else None
        above = tuple(row["above"].split(", "))
        below, unit = row["below"], row["unit"]
        yield Derivation(row["name"], unit, row["meaning"], scale, above, below, most)
        if row["name"] != "stalled_percent":
            continue
        for reason, meaning in STALLS.items():
            if reason not in ("NONE", "HID"):
                name, what = f"stall_{reason.lower()}_percent", f"share of the stalls: {meaning}"
                yield Derivation(name, "%", what, 100, (f"GINS:STL_{reason}",), "GINS:STL_ANY")


DERIVATIONS = tuple(_derivations())
"""Quantities of ``derived.csv``; those of each reason to stall stand behind those of all."""


def derive(values: Mapping[str, float], listed: Collection[str]) -> dict[str, float | str]:
    """Every derived quantity that these values allow: name to number, or to a sentence why it was
    not measured. ``values`` has the canonical metrics that have one in a context; ``listed`` are
    those that the database knows."""
    return {derivation.name: derivation.compute(values, listed) for derivation in DERIVATIONS}
