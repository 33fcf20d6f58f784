"""Links by name, with their vendors' rates and what libraries make of them.

Rates are one direction of one rank. A collective does not reach a data sheet's rate:
NCCL's own tuning model counts on 235 of the 300 GB/s of an A100's NVLink (0.78), so 0.78 of
the sheet is the middle, and 0.5 to 0.95 the range. Latencies of a step are those of the same
model (rings; the low end is its low-latency protocol): NCCL, src/graph/tuning.cc, ``hwLat``
(github.com/NVIDIA/nccl). Where CPUs talk over a network the same latency of a network step
holds for want of a published one, with a range from 1 us (what vendors print for one message
of a few bytes) to 20 us (a stack that copies through the kernel).
"""

from __future__ import annotations

import difflib

import pandas as pd

from dlrm_core.analysis.links import Link, Range
from dlrm_core.errors import InputError

REACHED = Range(0.5, 0.78, 0.95)
"""Share of a data sheet's rate that a collective gets."""

_NCCL = "latency: NCCL src/graph/tuning.cc (hwLat)"
_NVLINK = Range(0.47, 3.4, 6.8)
_PCIE = Range(1.0, 5.7, 11.4)
_NET = Range(2.7, 9.6, 19.2)
_CPU_NET = Range(1.0, 9.6, 20.0)


def _named(name: str, alpha: Range, sheet_gb_per_s: float, source: str) -> Link:
    return Link(name, alpha, REACHED.times(sheet_gb_per_s), f"{source}; {_NCCL}")


LINKS = (
    _named("NVLink 2 (V100)", _NVLINK, 150, "NVIDIA V100 data sheet: 300 GB/s both directions"),
    _named("NVLink 3 (A100)", _NVLINK, 300, "NVIDIA A100 data sheet: 600 GB/s both directions"),
    _named("NVLink 4 (H100)", _NVLINK, 450, "NVIDIA H100 data sheet: 900 GB/s both directions"),
    _named("PCIe 3 x16", _PCIE, 15.75, "PCI-SIG: 8 GT/s, 16 lanes, 128b/130b"),
    _named("PCIe 4 x16", _PCIE, 31.5, "PCI-SIG: 16 GT/s, 16 lanes, 128b/130b"),
    _named("PCIe 5 x16", _PCIE, 63.0, "PCI-SIG: 32 GT/s, 16 lanes, 128b/130b"),
    _named("InfiniBand HDR", _NET, 25.0, "IBTA roadmap: 4x HDR, 200 Gb/s"),
    _named("InfiniBand NDR", _NET, 50.0, "IBTA roadmap: 4x NDR, 400 Gb/s"),
    _named("100 GbE", _CPU_NET, 12.5, "IEEE 802.3ba: 100 Gb/s"),
    _named("OPA", _CPU_NET, 12.5, "Intel Omni-Path Architecture 100 Series: 100 Gb/s a port"),
)
"""OPA is the study's network (Kalamkar et al. 2020, 64 sockets, one port a socket)."""


def link(name: str) -> Link:
    """The link of a name, upper or lower case.

    Raises:
        InputError: no such link is listed, with the closest that is.
    """
    for known in LINKS:
        if known.name.lower() == name.strip().lower():
            return known
    names = [known.name for known in LINKS]
    lowered = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.strip().lower(), lowered, n=1, cutoff=0.4)
    hint = f"did you mean {lowered[close[0]]}?" if close else f"known: {', '.join(names)}"
    raise InputError(f"no link is called {name!r}; {hint}")


def links_table(links: tuple[Link, ...] = LINKS) -> pd.DataFrame:
    """``name``, ``alpha_us``, ``gb_per_s`` and their ``_low`` and ``_high``, ``measured``,
    ``source``."""
    return pd.DataFrame(
        [
            {
                "name": known.name,
                "alpha_us": known.alpha_us.mid,
                "alpha_us_low": known.alpha_us.low,
                "alpha_us_high": known.alpha_us.high,
                "gb_per_s": known.gb_per_s.mid,
                "gb_per_s_low": known.gb_per_s.low,
                "gb_per_s_high": known.gb_per_s.high,
                "measured": known.measured,
                "source": known.source,
            }
            for known in links
        ]
    )
