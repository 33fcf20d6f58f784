"""Accelerators by name, with the figures of their vendors' data sheets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dlrm_core.base.errors import InputError

DATA_SHEET = "data sheet"
NO_NAME = "the recording names no GPU; `-p profiling.device_name=H100-SXM` (or another) names it"
"""``source`` of ceilings that nobody measured."""


@dataclass(frozen=True)
class Device:
    """A GPU as its vendor describes it; rates are peaks."""

    name: str
    """Short: ``A100-80GB``. What :func:`device` takes."""
    tflops: dict[str, float]
    """Precision to 10^12 operations/s of dense products; absent what it has no unit for."""
    memory_gb_per_s: float
    memory_gb: float
    """10^9 bytes."""
    link_gb_per_s: float
    """Host to device, one direction."""
    cache_mb: float
    """Last-level cache, 10^6 bytes."""
    pattern: str
    """Regular expression of the names that its driver gives it."""
    source: str
    """The vendor's page or data sheet."""
    units: int = 0
    """Multiprocessors (compute units of AMD's)."""
    achieved: dict[str, float] = field(default_factory=dict)
    """Precision to the best 10^12 operations/s that the vendor itself measured of products."""

    @property
    def vendor(self) -> str:
        """``AMD`` or ``NVIDIA``."""
        return "AMD" if "amd.com" in self.source else "NVIDIA"

    @property
    def units_text(self) -> str:
        """``304 compute units``, ``132 multiprocessors``."""
        return f"{self.units} {'compute units' if self.vendor == 'AMD' else 'multiprocessors'}"

    def ceilings(self) -> dict[str, Any]:
        """Its figures in the form of a recording's ``meta["ceilings"]``.

        ``peak_gflops`` takes the place of products timed at the model's shapes; there are
        no rates of random rows and no launch costs, since no data sheet has them.
        """
        rate = self.memory_gb_per_s
        return {
            "device": self.name,
            "source": DATA_SHEET,
            "peak_gflops": {name: 1e3 * value for name, value in self.tflops.items()},
            "stream": [
                {
                    "bytes": int(1e9 * self.memory_gb),
                    "read_gb_per_s": rate,
                    "copy_gb_per_s": rate,
                    "triad_gb_per_s": rate,
                }
            ],
            "last_level_cache_bytes": int(1e6 * self.cache_mb),
            "copy": [
                {
                    "kind": "pinned",
                    "direction": direction,
                    "bytes": None,
                    "gb_per_s": self.link_gb_per_s,
                }
                for direction in ("h2d", "d2h")
            ],
        }


_H100_SHEET = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H100 = "https://www.nvidia.com/en-us/data-center/h100/"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_A100_40 = (
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/"
    "nvidia-ampere-architecture-whitepaper.pdf"
)
_V100 = (
    "https://images.nvidia.com/content/technologies/volta/pdf/"
    "volta-v100-datasheet-update-us-1165301-r5.pdf"
)

_V100S = "https://www.nvidia.com/en-us/data-center/v100/"
_CENTER = "https://www.nvidia.com/en-us/data-center/"
_P100 = "https://images.nvidia.com/content/tesla/pdf/nvidia-tesla-p100-datasheet.pdf"
_T4 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/"
    "t4-tensor-core-datasheet-951643.pdf"
)
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_GA102 = (
    "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
)
_HGX = "https://www.nvidia.com/en-us/data-center/hgx/"

_AMD = "https://www.amd.com/en/products/accelerators/instinct/"
_TURING = (
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/"
    "turing-architecture/NVIDIA-Turing-Architecture-Whitepaper.pdf"
)


def _half(fp32: float, tf32: float, half: float, fp8: float = 0.0) -> dict[str, float]:
    """Rates of a GPU that multiplies bf16 and fp16 alike; 0 of what it has no unit for."""
    rates = {"fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half, "fp8": fp8}
    return {name: rate for name, rate in rates.items() if rate}


_HOPPER_SXM = _half(67.0, 494.5, 989.5, 1979.0)
_HOPPER_PCIE = _half(51.0, 378.0, 756.5, 1513.0)
_AMPERE = _half(19.5, 156.0, 312.0)
# Volta multiplies neither TF32 nor bf16 in its tensor cores
_VOLTA_SXM = {"fp32": 15.7, "fp16": 125.0}
_VOLTA_PCIE = {"fp32": 14.0, "fp16": 112.0}
_VOLTA_S = {"fp32": 16.4, "fp16": 130.0}
# the higher of the rates of vector and matrix units; a driver names each die of an MI250X
_CDNA1 = {"fp32": 46.1, "bf16": 92.3, "fp16": 184.6}
_CDNA2 = _half(47.9, 0, 191.5)
_CDNA3 = _half(163.4, 653.7, 1307.4, 2614.9)
# rocm.blogs.amd.com/software-tools-optimization/measuring-max-achievable-flops-part2
_MI300_BEST = {"bf16": 708.0, "fp16": 654.0}

# PCIe: x16 of generation 3, 4, 5 moves 16, 32, 64 GB/s in one direction
_ROWS: tuple[tuple[Any, ...], ...] = (
    ("H100-SXM", _HOPPER_SXM, 3350, 80, 64, 50, r"H100 80GB HBM3|H100.*SXM", _H100, 132),
    ("H100-PCIe", _HOPPER_PCIE, 2000, 80, 64, 50, r"H100.*PCIE", _H100_SHEET, 114),
    ("H100-NVL", _half(60.0, 417.5, 835.5, 1671), 3900, 94, 64, 50, r"H100 NVL", _H100, 132),
    # for the Chinese market: an H100 with slower links between GPUs
    ("H800", _HOPPER_SXM, 3350, 80, 64, 50, r"\bH800\b(?!.*PCIE)", _H100, 132),
    ("H200", _HOPPER_SXM, 4800, 141, 64, 50, r"\bH200\b", _H200, 132),
    ("B200", _half(75.0, 1100.0, 2250.0, 4500.0), 7700, 180, 64, 126, r"\bB200\b", _HGX, 148),
    ("A100-40GB", _AMPERE, 1555, 40, 32, 40, r"A100-((SXM4|PCIE)-40GB|PG509)", _A100_40, 108),
    ("A100-80GB", _AMPERE, 2039, 80, 32, 40, r"A100-SXM4-80GB", _A100, 108),
    ("A100-80GB-PCIe", _AMPERE, 1935, 80, 32, 40, r"A100 80GB PCIE", _A100, 108),
    ("V100-16GB", _VOLTA_SXM, 900, 16, 16, 6, r"V100-SXM2-16GB", _V100, 80),
    ("V100-32GB", _VOLTA_SXM, 900, 32, 16, 6, r"V100-(SXM[23]|DGXS)-32GB", _V100, 80),
    ("V100-PCIe", _VOLTA_PCIE, 900, 32, 16, 6, r"V100-PCIE-(16|32)GB", _V100, 80),
    ("V100S-PCIe", _VOLTA_S, 1134, 32, 16, 6, r"V100S-PCIE-32GB", _V100S, 80),
    ("A10", _half(31.2, 62.5, 125), 600, 24, 32, 6, r"\bA10$", _CENTER + "products/a10-gpu/", 72),
    ("A30", _half(10.3, 82, 165), 933, 24, 32, 24, r"\bA30$", _CENTER + "products/a30-gpu/", 56),
    ("A40", _half(37.4, 74.8, 149.7), 696, 48, 32, 6, r"\bA40$", _CENTER + "a40/", 84),
    ("L4", _half(30.3, 60, 121, 242), 300, 24, 32, 48, r"\bL4$", _CENTER + "l4/", 58),
    ("L40S", _half(91.6, 183, 362, 733), 864, 48, 32, 96, r"\bL40S\b", _CENTER + "l40s/", 142),
    ("T4", {"fp32": 8.1, "fp16": 65.0}, 320, 16, 16, 4, r"\bT4$", _T4, 40),
    ("P100-SXM", {"fp32": 10.6}, 732, 16, 16, 4, r"P100-SXM2", _P100, 56),
    ("RTX-2080-Ti", {"fp32": 13.4, "fp16": 53.8}, 616, 11, 16, 5.5, r"RTX 2080 Ti$", _TURING, 68),
    ("RTX-3080", _half(29.8, 29.8, 59.5), 760, 10, 32, 5, r"RTX 3080$", _GA102, 68),
    ("RTX-3090", _half(35.6, 35.6, 71), 936, 24, 32, 6, r"RTX 3090$", _GA102, 82),
    ("RTX-4090", _half(82.6, 82.6, 165.2, 330.3), 1008, 24, 32, 72, r"RTX 4090$", _ADA, 128),
    ("MI100", _CDNA1, 1228.8, 32, 32, 8, r"\bMI100\b", _AMD + "mi100.html", 120),
    ("MI210", _half(45.3, 0, 181), 1638.4, 64, 32, 8, r"\bMI210\b", _AMD + "mi200/mi210.html", 104),
    ("MI250X", _CDNA2, 1638.4, 64, 32, 8, r"MI250X", _AMD + "mi200/mi250x.html", 110),
    (
        *("MI300X", _CDNA3, 5300, 192, 64, 256, r"\bMI300X\b", _AMD + "mi300/mi300x.html", 304),
        _MI300_BEST,
    ),
    ("MI325X", _CDNA3, 6000, 256, 64, 256, r"\bMI325X\b", _AMD + "mi300/mi325x.html", 304),
    (
        *("MI355X", _half(157.3, 0, 2516.6, 5033.2), 8000, 288, 64, 256),
        *(r"\bMI355X\b", _AMD + "mi350/mi355x.html", 256),
    ),
)
DEVICES = tuple(Device(*row) for row in _ROWS)
"""A driver's ``A100-PG509-200`` (a board of Meta's, with 40 GB) and ``V100-DGXS-32GB`` (NVIDIA's
DGX Station) have no sheet of their own: they are the GPUs of those listed. What AMD measured of its
MI300X (708 of 1,307 TFLOPS in bf16) is in its blog: power keeps it from the sheet's rate."""


def device(name: str) -> Device:
    """The GPU of a short name: ``H100-SXM``, ``a100-80gb``, ``H200``; upper or lower case.

    Raises:
        InputError: no such GPU is listed, with those that are.
    """
    for known in DEVICES:
        if known.name.lower() == name.strip().lower():
            return known
    names = [known.name for known in DEVICES]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    raise InputError(f"device {name!r} is not listed; {hint}known: {', '.join(names)}")


def name_device(meta: dict[str, Any], name: str) -> None:
    """Write into a profile's ``meta`` which GPU a recording is of, where it says of none itself.

    Args:
        name: as a driver gives it, or short; from ``profiling.device_name``.

    Raises:
        InputError: no data sheet of it is listed, or the recording names its own GPU.
    """
    try:
        given = device_of_driver(name) or device(name)
    except InputError as error:
        raise InputError(f"profiling.device_name: {error}") from None
    own = meta.get("device_name")
    if own:
        raise InputError(
            f"profiling.device_name is {name!r}, but the recording names its own device, {own!r}"
        )
    meta["device_name"] = given.name
    said = (
        f"The recording names no GPU. {given.name} was named by whoever opened it "
        "(profiling.device_name); limits and predictions from data sheets rest on that."
    )
    meta["cautions"] = [*(meta.get("cautions") or []), said]


def device_of_driver(name: str) -> Device | None:
    """The GPU whose driver calls it ``NVIDIA A100-SXM4-80GB``; None if it is not listed.

    Its short name is one of its names: so it is called where a user named it.
    """
    for known in DEVICES:
        if name == known.name or re.search(known.pattern, name, re.IGNORECASE):
            return known
    return None


def device_of(meta: Mapping[str, Any]) -> Device | None:
    """The GPU of a recording by its profile's ``meta``; None if it names none that is listed."""
    names = [str(meta.get("device_name") or "")]
    names += map(str, (meta.get("machine") or {}).get("gpus") or [])
    return next(filter(None, map(device_of_driver, names)), None)
