"""Energy and power while a run trains: NVML for GPUs, RAPL for processors, or the reason.

Both count energy themselves, so reading them at the start and at the end is enough and
nothing disturbs the run. Two exceptions have a thread that sleeps nearly always: a GPU
without an energy counter is asked for its power ten times a second, and a RAPL counter
that would come round unnoticed is read in between, minutes apart.

Sources: NVML, ``nvmlDeviceGetTotalEnergyConsumption`` and ``nvmlDeviceGetPowerUsage``
(https://docs.nvidia.com/deploy/nvml-api/); Linux, Documentation/power/powercap/powercap.rst
and Documentation/ABI/testing/sysfs-class-powercap.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

POWERCAP = Path("/sys/class/powercap")

SAMPLE_S = 0.1
"""Between two samples of a GPU's power."""

MOST_WATTS = 1000.0
"""More than any processor package draws: how soon its counter could come round."""


class Counter:
    """A device that counts its energy, read from any thread.

    Attributes:
        device: what it measures, as ``gpu 0 (NVIDIA H100)`` or ``package-0``.
        method: how, for the record.
        period_s: how often :meth:`energy_j` must be called at least; None: no need to.
    """

    def __init__(
        self, device: str, method: str, used_j: Callable[[], float], period_s: float | None = None
    ) -> None:
        self.device, self.method, self.period_s = device, method, period_s
        self._used_j = used_j
        """Joules since its last call, or since it was made."""
        self._lock = threading.Lock()
        self._energy_j = 0.0

    def energy_j(self) -> float:
        """Joules since this object was made; raises OSError where it cannot be read."""
        with self._lock:
            self._energy_j += self._used_j()
            return self._energy_j


class PowerMeter:
    def __init__(self, counters: Sequence[Counter], not_measured: dict[str, str]) -> None:
        self._counters = list(counters)
        self._not_measured = dict(not_measured)
        self._begin: list[tuple[Counter, float]] = []
        self._started = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> PowerMeter:
        self._begin = []
        for counter in self._counters:
            try:
                self._begin.append((counter, counter.energy_j()))
            except OSError as error:
                self._not_measured[counter.device] = str(error)
        self._started = time.perf_counter()
        watched = {c: c.period_s for c, _ in self._begin if c.period_s is not None}
        if watched:
            self._stop.clear()
            self._thread = threading.Thread(
                target=self._watch, args=(watched,), name="dlrm-power", daemon=True
            )
            self._thread.start()
        return self

    def stop(self, samples: int) -> dict[str, Any]:
        """Read all counters again: what all measured devices used together.

        Args:
            samples: trained meanwhile.

        Returns:
            As result.json has them: ``power_w`` (mean), ``samples_per_joule`` (the same as
            samples a second and watt) and ``power``: ``energy_j``, ``seconds``, ``readings``
            (``device``, ``method``, ``energy_j``, ``power_w``) and ``not_measured`` (what was
            looked for and is not there, with the reason). None without any counter.
        """
        seconds = time.perf_counter() - self._started
        readings: list[dict[str, Any]] = []
        for counter, before in self._begin:
            try:
                used = counter.energy_j() - before
            except OSError as error:
                self._not_measured[counter.device] = str(error)
                continue
            facts = {"device": counter.device, "method": counter.method, "energy_j": used}
            readings.append(facts | {"power_w": used / seconds if seconds > 0 else 0.0})
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        energy = sum(reading["energy_j"] for reading in readings) if readings else None
        return {
            "power_w": sum(reading["power_w"] for reading in readings) if readings else None,
            "samples_per_joule": samples / energy if energy and samples else None,
            "power": {
                "energy_j": energy,
                "seconds": seconds,
                "readings": readings,
                "not_measured": dict(self._not_measured),
            },
        }

    def _watch(self, watched: dict[Counter, float]) -> None:
        while not self._stop.wait(min(watched.values())):
            for counter in watched:
                with contextlib.suppress(OSError):  # stop() will say
                    counter.energy_j()


def power_meter(device: torch.device) -> PowerMeter:
    return PowerMeter(*find_counters(device))


def find_counters(device: torch.device) -> tuple[list[Counter], dict[str, str]]:
    """What can be measured on this machine, and what cannot and why."""
    counters: list[Counter] = []
    missing: dict[str, str] = {}
    if device.type == "cuda":
        try:
            counters.append(gpu_counter(device))
        except OSError as error:
            missing["gpu"] = str(error)
    try:
        counters += rapl_counters()
    except OSError as error:
        missing["processor"] = str(error)
    return counters, missing


def counted(read: Callable[[], int], unit_j: float, size: int = 0) -> Callable[[], float]:
    """What a counter in units of so many joules grew by since the last call; one of a ``size``
    comes round."""
    last = read()

    def used_j() -> float:
        nonlocal last
        before, last = last, read()
        return ((last - before) % size if size else last - before) * unit_j

    return used_j


def rapl(zone: Path, device: str) -> Counter:
    """Energy of a processor package, or of the memory beside it; of all its processes. ``zone`` is
    a folder of powercap with ``energy_uj``; an OSError says that it cannot be read."""
    range_uj = int((zone / "max_energy_range_uj").read_text())
    used_j = counted(lambda: int((zone / "energy_uj").read_text()), 1e-6, range_uj + 1)
    # half the time in which the counter can come round
    return Counter(device, "RAPL energy counter", used_j, range_uj / 1e6 / MOST_WATTS / 2)


def rapl_counters() -> list[Counter]:
    """Packages and their memory (cores and graphics are parts of a package). Where there are none,
    or they cannot be read, the text of an OSError says why."""
    # AMD's counters have Intel's name as well; intel-rapl-mmio shows the same once more
    zones = sorted(POWERCAP.glob("intel-rapl:*"))
    if not zones:
        raise OSError(
            f"{POWERCAP} has no intel-rapl zone: the kernel has no RAPL driver for this "
            "processor, or a virtual machine hides it"
        )
    counters: list[Counter] = []
    denied: list[str] = []
    for zone in zones:
        try:
            name = (zone / "name").read_text().strip()
        except OSError:
            continue
        if not name.startswith(("package", "dram")):
            continue
        package = zone.name.split(":")[1]
        device = name if name.startswith("package") else f"{name} of package-{package}"
        try:
            counters.append(rapl(zone, device))
        except PermissionError:
            denied.append(str(zone / "energy_uj"))
        except (OSError, ValueError):
            continue
    if not counters:
        raise OSError(
            f"{denied[0]} is readable by root only (since Linux 5.10, against side channels): "
            f"sudo chmod a+r {POWERCAP}/intel-rapl:*/energy_uj"
            if denied
            else f"{POWERCAP}: no zone of a processor package can be read"
        )
    return counters


def sampled(read_mw: Callable[[], int]) -> Callable[[], float]:
    """Joules since the last call, from a power (mW) by the trapezoidal rule."""
    last = time.perf_counter(), read_mw() / 1e3

    def used_j() -> float:
        nonlocal last
        (before, last_watts), last = last, (time.perf_counter(), read_mw() / 1e3)
        return (last[0] - before) * (last[1] + last_watts) / 2

    return used_j


def gpu_counter(device: torch.device) -> Counter:
    """The best counter of the GPU that torch calls ``device``. Where it cannot be measured, the
    text of an OSError says why."""
    import torch

    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        raise OSError("pynvml is not installed: pip install nvidia-ml-py") from None
    try:
        nvml.nvmlInit()
        # by its identity: CUDA_VISIBLE_DEVICES numbers GPUs anew, NVML does not
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        name = nvml.nvmlDeviceGetName(handle)
        name = name.decode() if isinstance(name, bytes) else str(name)
    except nvml.NVMLError as error:
        raise OSError(f"NVML: {error}") from None
    label = f"gpu {device.index or 0} ({name})"

    def reading(function: Callable[[Any], int]) -> Callable[[], int]:
        def read() -> int:
            try:
                return int(function(handle))
            except nvml.NVMLError as error:
                raise OSError(f"NVML: {error}") from None

        return read

    try:  # Volta and later count themselves
        energy_j = counted(reading(nvml.nvmlDeviceGetTotalEnergyConsumption), 1e-3)
        return Counter(label, "NVML energy counter", energy_j)
    except OSError:
        power_j = sampled(reading(nvml.nvmlDeviceGetPowerUsage))
        return Counter(label, f"NVML power, sampled every {SAMPLE_S:g} s", power_j, SAMPLE_S)
