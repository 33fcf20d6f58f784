"""GPUs by name, with the figures of NVIDIA's data sheets."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

from dlrm_core.errors import InputError

DATA_SHEET = "data sheet"
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
    """NVIDIA's page or data sheet."""

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

_HOPPER_SXM = {"fp32": 67.0, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5}
_HOPPER_PCIE = {"fp32": 51.0, "tf32": 378.0, "bf16": 756.5, "fp16": 756.5}
_AMPERE = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
# Volta multiplies neither TF32 nor bf16 in its tensor cores
_VOLTA_SXM = {"fp32": 15.7, "fp16": 125.0}
_VOLTA_PCIE = {"fp32": 14.0, "fp16": 112.0}

# PCIe: x16 of generation 3, 4, 5 moves 16, 32, 64 GB/s in one direction
DEVICES = (
    Device("H100-SXM", _HOPPER_SXM, 3350, 80, 64, 50, r"H100 80GB HBM3|H100.*SXM", _H100),
    Device("H100-PCIe", _HOPPER_PCIE, 2000, 80, 64, 50, r"H100.*PCIE", _H100_SHEET),
    Device("H200", _HOPPER_SXM, 4800, 141, 64, 50, r"\bH200\b", _H200),
    Device("A100-40GB", _AMPERE, 1555, 40, 32, 40, r"A100-(SXM4|PCIE)-40GB", _A100_40),
    Device("A100-80GB", _AMPERE, 2039, 80, 32, 40, r"A100-SXM4-80GB", _A100),
    Device("A100-80GB-PCIe", _AMPERE, 1935, 80, 32, 40, r"A100 80GB PCIE", _A100),
    Device("V100-16GB", _VOLTA_SXM, 900, 16, 16, 6, r"V100-SXM2-16GB", _V100),
    Device("V100-32GB", _VOLTA_SXM, 900, 32, 16, 6, r"V100-SXM[23]-32GB", _V100),
    Device("V100-PCIe", _VOLTA_PCIE, 900, 32, 16, 6, r"V100-PCIE-(16|32)GB", _V100),
)


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


def device_of_driver(name: str) -> Device | None:
    """The GPU whose driver calls it ``NVIDIA A100-SXM4-80GB``; None if it is not listed."""
    for known in DEVICES:
        if re.search(known.pattern, name, re.IGNORECASE):
            return known
    return None
