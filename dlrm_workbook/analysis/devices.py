"""Accelerators by name, with the figures of their vendors' data sheets."""

from __future__ import annotations

import csv
import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_core.base.errors import InputError

DATA_SHEET = "data sheet"
"""``source`` of ceilings that nobody measured."""

NO_NAME = "the recording names no GPU; `-p profiling.device_name=H100-SXM` (or another) names it"


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
    units: int
    """Multiprocessors (compute units of AMD's)."""
    achieved: dict[str, float]
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
        names = ("read_gb_per_s", "copy_gb_per_s", "triad_gb_per_s")
        rates = dict.fromkeys(names, self.memory_gb_per_s)
        link = {"kind": "pinned", "bytes": None, "gb_per_s": self.link_gb_per_s}
        return {
            "device": self.name,
            "source": DATA_SHEET,
            "peak_gflops": {name: 1e3 * value for name, value in self.tflops.items()},
            "stream": [{"bytes": int(1e9 * self.memory_gb)} | rates],
            "last_level_cache_bytes": int(1e6 * self.cache_mb),
            "copy": [link | {"direction": direction} for direction in ("h2d", "d2h")],
        }


DATA_SHEETS = Path(__file__).with_name("devices.csv")
"""A row a GPU: :class:`Device`'s figures (``tflops_`` and ``achieved_`` by precision, nothing where
it has no unit), the driver's names, the source, and what else is to be known of it."""


def _device(row: Mapping[str, str]) -> Device:
    given: dict[str, Any] = {name: row[name] for name in ("name", "pattern", "source")}
    given |= {"tflops": {}, "achieved": {}}
    for name, text in row.items():
        kind, _, precision = name.partition("_")
        if kind in ("tflops", "achieved") and text:
            given[kind][precision] = json.loads(text)
    figures = ("memory_gb_per_s", "memory_gb", "link_gb_per_s", "cache_mb", "units")
    return Device(**given, **{name: json.loads(row[name]) for name in figures})


with DATA_SHEETS.open(encoding="utf-8", newline="") as _file:
    DEVICES = tuple(map(_device, csv.DictReader(_file)))


def device(name: str) -> Device:
    """The GPU of a short name: ``H100-SXM``, ``a100-80gb``, ``H200``; upper or lower case. An
    InputError lists the GPUs if there is no such one."""
    for known in DEVICES:
        if known.name.lower() == name.strip().lower():
            return known
    names = [known.name for known in DEVICES]
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    raise InputError(f"device {name!r} is not listed; {hint}known: {', '.join(names)}")


def name_device(meta: dict[str, Any], name: str) -> None:
    """Write into a profile's ``meta`` which GPU a recording is of, where it says of none itself.
    The name is as a driver gives it, or short; from ``profiling.device_name``. An InputError says
    that no data sheet of it is listed, or that the recording names its own GPU."""
    try:
        given = device_of_driver(name) or device(name)
    except InputError as error:
        raise InputError(f"profiling.device_name: {error}") from None
    if own := meta.get("device_name"):
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
