"""What a machine allows: least times from ceilings measured on it, or from a data sheet.

Each method answers with a time that the work cannot go below, or None where the ceiling
was not measured. Times are lower bounds: where two measurements could apply, the faster
one does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dlrm_core.analysis.devices import DATA_SHEET

MAX_RELATIVE_ERROR = 1e-5
"""Of a library that may multiply fp32 matrices in another one's place."""

_ARRAYS = 3
"""Of STREAM: a, b and c."""


@dataclass(frozen=True)
class Limits:
    """Ceilings of one machine, as a recording carries them in ``meta["ceilings"]``."""

    ceilings: Mapping[str, Any]

    @property
    def measured(self) -> bool:
        """Whether they were measured; else they are a data sheet's."""
        return self.ceilings.get("source") != DATA_SHEET

    # ---- arithmetic -------------------------------------------------------------

    def gemm_ms(
        self,
        part: str,
        product: str,
        layer: int,
        shape: tuple[int, int, int, int],
        precisions: Iterable[str],
    ) -> tuple[float, bool] | None:
        """Least time of a matrix product, and whether it was timed at this very shape.

        Args:
            part, product, layer: which product of the model.
            shape: batch, m, n, k.
            precisions: names under which ceilings of this precision are recorded.

        A product of the same layer timed at another size counts by its rate; without
        one, the best rate of all.
        """
        batch, m, n, k = shape
        flops = 2.0 * batch * m * n * k
        wanted = set(precisions)
        rows = [row for row in self._list("gemm") if self._usable(row, wanted)]
        same = [
            row
            for row in rows
            if row.get("part") == part
            and row.get("phase") == product
            and row.get("layer") in (layer, None, -1)
        ]
        own = [row for row in same if _flops(row) == flops]
        if own:
            return min(float(row["ms"]) for row in own), True
        rates = [_flops(row) / float(row["ms"]) for row in same if _flops(row) > 0]
        if not rates:
            rates = [1e6 * float(row["gflops"]) for row in rows if _positive(row.get("gflops"))]
        peaks = self.ceilings.get("peak_gflops") or {}
        if not rates:
            rates = [1e6 * float(peaks[name]) for name in wanted if _positive(peaks.get(name))]
        return (flops / max(rates), False) if rates else None

    def peak_gflops(self, precisions: Iterable[str]) -> float | None:
        """The best rate of matrix products in this precision, 10^9 operations/s."""
        wanted = set(precisions)
        peaks = self.ceilings.get("peak_gflops") or {}
        rates = [
            float(row["gflops"])
            for row in self._list("gemm")
            if self._usable(row, wanted) and _positive(row.get("gflops"))
        ] + [float(peaks[name]) for name in wanted if _positive(peaks.get(name))]
        return max(rates, default=None)

    def _usable(self, row: Mapping[str, Any], wanted: set[str]) -> bool:
        if row.get("precision") not in wanted or not _positive(row.get("ms")):
            return False
        if not row["precision"].startswith("fp32_"):
            return True
        error = row.get("relative_error")
        return error is not None and error <= MAX_RELATIVE_ERROR

    # ---- memory -----------------------------------------------------------------

    def memory_ms(self, read: float, written: float) -> float | None:
        """Least time to stream so many bytes in and out.

        Reading costs a = 1 / read rate a byte, writing b = 2 / copy rate − a: a copy moves
        as many bytes in as out. Between two measured sizes (one in cache, one in memory)
        the time is interpolated in logarithms of the size.
        """
        # three arrays of ``bytes`` each took turns, so that is what the level held
        known = [
            (_ARRAYS * float(row["bytes"]), read * cost[0] + written * cost[1])
            for row in self._list("stream")
            if _positive(row.get("bytes")) and (cost := _costs(row)) is not None
        ]
        seconds = _between(read + written, known)
        return None if seconds is None else 1e3 * seconds

    def gather_ms(self, gathered: float, row_bytes: float, table_bytes: float) -> float | None:
        """Least time to read so many bytes in random rows of tables of ``table_bytes``.

        By the measurements with the nearest size of a row, interpolated as streaming is.
        """
        rows = [row for row in self._list("gather") if _positive(row.get("gb_per_s"))]
        if not rows:
            return None

        def apart(row: Mapping[str, Any]) -> float:
            return abs(math.log(float(row["row_bytes"]) / row_bytes))

        nearest = min(map(apart, rows))
        known = [
            (float(row["table_bytes"]), 1e-9 * gathered / float(row["gb_per_s"]))
            for row in rows
            if apart(row) == nearest
        ]
        seconds = _between(table_bytes, known)
        return None if seconds is None else 1e3 * seconds

    # ---- host and link ----------------------------------------------------------

    def overhead_ms(self, on_gpu: bool) -> float | None:
        """Least time of the host for one operator: a dispatch, and on a GPU a launch."""
        costs = [self.ceilings.get("dispatch_us")]
        if on_gpu:
            costs.append(self.ceilings.get("launch_us"))
        known = [float(cost) for cost in costs if cost is not None and _positive(cost)]
        return max(known) / 1e3 if known else None

    def kernel_ms(self) -> float | None:
        """Least time of any kernel on the GPU, from one queued kernel to the next."""
        cost = self.ceilings.get("kernel_us")
        return float(cost) / 1e3 if cost is not None and _positive(cost) else None

    def copy_ms(self, moved: float, direction: str = "h2d") -> float | None:
        """Least time to copy so many bytes between host and device, from whichever memory."""
        rates = [
            float(row["gb_per_s"])
            for row in self._list("copy")
            if row.get("direction") == direction and _positive(row.get("gb_per_s"))
        ]
        return moved / max(rates) / 1e6 if rates else None

    def _list(self, name: str) -> list[Mapping[str, Any]]:
        return list(self.ceilings.get(name) or [])


def _between(size: float, known: Iterable[tuple[float, float]]) -> float | None:
    """The time at ``size``, from (size, time) pairs: log-linear between, constant beyond."""
    points = sorted(known)
    if not points or size <= 0:
        return points[0][1] if points else None
    if size <= points[0][0] or len(points) == 1:
        return points[0][1]
    for (small, fast), (large, slow) in itertools.pairwise(points):
        if size <= large:
            if small == large or fast <= 0 or slow <= 0:
                return min(fast, slow)
            share = math.log(size / small) / math.log(large / small)
            return float(fast ** (1 - share) * slow**share)
    return points[-1][1]


def _positive(value: Any) -> bool:
    return value is not None and math.isfinite(float(value)) and float(value) > 0


def _flops(row: Mapping[str, Any]) -> float:
    """Operations of a recorded product; ``batch`` is there for batched ones only."""
    sizes = [row.get("batch") or 1, *(row.get(name) or 0 for name in "mnk")]
    return 2.0 * math.prod(float(size) for size in sizes)


def _costs(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """Seconds a byte read and a byte written by one measurement of streaming."""
    read, copy = row.get("read_gb_per_s"), row.get("copy_gb_per_s")
    if not _positive(read):
        return None
    a = 1e-9 / float(read)  # type: ignore[arg-type]
    if not _positive(copy):
        return a, a
    both = 2e-9 / float(copy)  # type: ignore[arg-type]
    # reading alone cannot take longer than reading and writing
    a = min(a, both)
    return a, both - a
