"""How far from the GPU's limits operators and kernels run.

Operations and bytes are those that the shapes of an operator's inputs tell
(:mod:`dlrm_workbook.recordings.torch.shape_work`), over the time of the kernels below it. The
limits are the data sheet's of the GPU that the recording names
(:mod:`dlrm_workbook.analysis.devices`), never those measured on another machine: the rate of
products by the precision of the operands and by whether the kernel uses tensor cores (its name
says so, :mod:`dlrm_workbook.analysis.kernel_names`), and the bandwidth of its memory. A call
takes at least the longer of its operations at that rate and its bytes at that bandwidth (the
roofline model: Williams, Waterman, Patterson, CACM 52(4), 2009).

What cannot be known is NaN.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pandas as pd

from dlrm_workbook.analysis.attribution import PART
from dlrm_workbook.analysis.context_tree import missing_reason, unmeasured
from dlrm_workbook.analysis.devices import NO_NAME, Device, device_of
from dlrm_workbook.analysis.kernel_names import kernel_name, short_names
from dlrm_workbook.analysis.reasons import gpus_by_names, operator_text, rate_text, why
from dlrm_workbook.analysis.roofline import ARITHMETIC, MEMORY, operations_by_precision
from dlrm_workbook.ground.arrays import Bools, Floats, Ints
from dlrm_workbook.ground.units import digits
from dlrm_workbook.recordings.foreign import COMMUNICATION
from dlrm_workbook.recordings.profile import Profile, nearest
from dlrm_workbook.recordings.torch.shape_work import NOTE, NOTES, OPERAND_BYTES, bytes_are

CACHE_BANDWIDTH = "cache"
"""The limit of what asks for its bytes faster than memory gives them."""

OPERATOR_KEYS = ["name", "shapes", *PART, "precision"]
RATE_COLUMNS = [
    *OPERATOR_KEYS,
    *("calls", "gpu_ms", "mean_us", "call_gflop", "call_bytes", "bytes_are"),
    *("intensity_flop_per_byte", "tflops_per_s", "gb_per_s", "tensor_cores"),
    *("peak_tflops_per_s", "limit", "least_us", "share_of_ceiling", "kernels", "reason"),
]

NO_SHAPES = "no shapes of the inputs of operators: torch.profiler records them with record_shapes"
_TRANSFORMED = re.compile("winograd|fft", re.I)
"""Kernels of convolutions that multiply fewer numbers than the definition, and transform more."""

_IGNORED = ("fill", "copy", "memset", "memcpy", "split-k", "cublaslt split-k")
"""Short names of kernels that prepare or finish an operator's work begin with these."""


def peak_tflops(gpu: Device | None, precision: str, tensor_cores: bool | None) -> float:
    """10^12 operations/s that a GPU's sheet promises; NaN where it does not or nobody knows.
    ``precision`` is of the operands: ``fp32``, ``tf32``, ``bf16``, ``fp16``. If it is not known
    whether they use tensor cores (None), no product of this precision is faster than this."""
    if gpu is None:
        return math.nan
    if tensor_cores is False and precision != "fp32":
        return math.nan  # sheets give no other rate without tensor cores
    if tensor_cores is not False and precision == "fp32" and gpu.vendor != "AMD":
        return math.nan  # NVIDIA's cut its operands to TF32
    return gpu.tflops.get(precision, math.nan)


def yes_no_unknown(tensor_cores: bool | None) -> str:
    """``yes``, ``no`` or ``unknown``."""
    return "unknown" if tensor_cores is None else "yes" if tensor_cores else "no"


def operator_rates(profile: Profile) -> pd.DataFrame:
    """Operators whose work their shapes tell, and how near the GPU's limits they run.

    A row for each operator, shapes and part, the most time first. ``precision`` is that of tensor
    cores where those cut the operands to TF32; it and ``tensor_cores`` are "" where no operations
    are counted. ``peak_tflops_per_s`` is NaN also of convolutions by Winograd or FFT, which
    multiply less than their definition; ``limit`` is ``cache`` where bytes come faster than memory
    gives them. Where a recording names no GPU, the ``reason``
    (:mod:`dlrm_workbook.analysis.reasons`) is for one of the architecture of its kernels.

    ``attrs["device"]`` and ``attrs["source"]`` name the data sheet, ``attrs["device_reason"]`` says
    why there is none. Empty with a reason where shapes were not recorded.
    """
    work = _Work(profile)
    if not work.known.any() or not profile.has("gpu_time_ms"):
        return unmeasured(RATE_COLUMNS, _why_no_work(profile))
    table = _rates(work)
    if table.empty:
        return unmeasured(RATE_COLUMNS, "no kernel below an operator of known work was recorded")
    table = table[RATE_COLUMNS].sort_values("gpu_ms", ascending=False, ignore_index=True)
    name, gpu = profile.meta.get("device_name"), device_of(profile.meta)
    if gpu is None:
        reason = f"no data sheet of {name} is listed" if name else NO_NAME
        table.attrs["device_reason"] = reason
    else:
        sheet = {"device": gpu.name, "source": gpu.source, "bandwidth": gpu.memory_gb_per_s}
        table.attrs |= sheet
    return table


def _rates(work: _Work) -> pd.DataFrame:
    """As :func:`operator_rates`, in no order, with ``rate`` in words; see :attr:`_Work.rate`."""
    profile = work.profile
    rows = np.flatnonzero(work.known & (work.gpu_ms > 0))
    if not len(rows):  # of graphs and copies alone
        return pd.DataFrame(columns=[*RATE_COLUMNS, "rate"])
    table = profile.contexts[["name", "shapes", *PART]].iloc[rows].reset_index(drop=True)
    for name in ("precision", "calls", "gpu_ms", "flops", "bytes", "tensor_cores"):
        table[name] = getattr(work, name)[rows]
    table["kernels"] = work.kernel_texts()[rows]
    table["transformed"] = np.isin(rows, list(work.transformed))
    table["blocks"], table["notes"] = work.blocks(rows), work.notes()[rows]
    keys = [*OPERATOR_KEYS, "tensor_cores", "kernels", "transformed", "blocks", "notes"]
    sums = ["calls", "gpu_ms", "flops", "bytes"]
    # a sum in which one is unknown is unknown
    table[sums] = table[sums].astype(float)
    alike = table.groupby(keys, as_index=False, sort=False, dropna=False)
    work.rate = dict(zip(rows.tolist(), alike.ngroup(), strict=True))
    table = alike[sums].agg(lambda values: values.sum(skipna=False))  # type: ignore[misc]
    gpu, gpus = device_of(profile.meta), gpus_of(profile)
    table["mean_us"] = 1e3 * table["gpu_ms"] / table["calls"]
    table["call_gflop"] = table["flops"] / table["calls"] / 1e9
    table["call_bytes"] = table["bytes"] / table["calls"]
    table["bytes_are"] = table["name"].map(bytes_are)
    table["intensity_flop_per_byte"] = table["flops"] / table["bytes"]
    table["tflops_per_s"] = table["flops"] / table["gpu_ms"] / 1e9
    table["gb_per_s"] = table["bytes"] / table["gpu_ms"] / 1e6
    uses = {"yes": True, "no": False}
    lines = table.to_dict("records")
    for row in lines:
        peak = peak_tflops(gpu, row["precision"], uses.get(row["tensor_cores"]))
        peak = math.nan if row["transformed"] else peak
        least = _least(gpu, 1e9 * row["call_gflop"], row["call_bytes"], peak, row["mean_us"])
        row["peak_tflops_per_s"] = peak
        row["limit"], row["least_us"], row["share_of_ceiling"] = least
    table = pd.DataFrame(lines)
    table["reason"] = [why(row, gpus[0]) if gpus else "" for row in lines]  # type: ignore[arg-type]
    table["rate"] = [rate_text(row, gpus, gpu is not None) for row in lines]  # type: ignore[arg-type]
    return table


def gpus_of(profile: Profile) -> tuple[Device, ...]:
    """The GPU that a recording names; where it names none, those that it may be of; none where
    no data sheet of the named one is listed."""
    gpu = device_of(profile.meta)
    if gpu is not None or profile.meta.get("device_name"):
        return (gpu,) if gpu else ()
    chosen = profile.of_kind("kernel") | profile.of_kind("runtime")
    return gpus_by_names(map(str, profile.contexts["name"][chosen].unique()))


def kernel_paces(profile: Profile) -> dict[str, tuple[str, str]]:
    """Full name of each kernel to the operator at which it does most and how near the limits that
    runs: (```aten::mm` (256 x 512)(512 x 64) in bf16``, ``runs at 4.5% of the rate of bf16
    products: 2 output tiles for 132 multiprocessors``), or that it cannot be judged.

    Kernels that no operator launches are left out, and all where no shapes were recorded.
    """
    if not profile.contexts["shapes"].ne("").any():
        return {}
    work = _Work(profile)
    names, shapes = (profile.contexts[name].to_numpy() for name in ("name", "shapes"))
    above = nearest(profile.contexts["parent"].to_numpy(), profile.of_kind("operator"))
    rates = _rates(work)
    for column in ("gb_per_s", "tflops_per_s"):
        rates[f"most_{column}"] = rates[column].max()
    judged: list[Any] = rates.to_dict("records")
    kernels = np.flatnonzero(work.is_kernel & (work.own_ms > 0) & (above >= 0))
    table = pd.DataFrame({"name": names[kernels], "ms": work.own_ms[kernels]})
    rate = [work.rate.get(int(operator), -1) for operator in work.operator[kernels]]
    table["rate"], table["above"] = rate, np.where(np.array(rate) < 0, above[kernels], -1)
    times = table.groupby(["name", "rate", "above"])["ms"].sum().sort_values()
    paces = {}
    for name, row, at in times.index:
        if row >= 0:
            paces[str(name)] = _pace(judged[row], gpus_of(profile))
        else:
            place = operator_text(str(names[at]), str(shapes[at]))
            what = "its work" if shapes[at] else "its inputs"
            if EXPERTS.search(str(names[at])):
                what = "how many rows each expert gets"
            paces[str(name)] = place, f"{UNJUDGED}, which does not tell {what}"
    return paces


EXPERTS = re.compile(r"moe\b|moe_|expert|fused_moe", re.I)
UNJUDGED = "cannot be judged from what was recorded"


def _pace(row: dict[str, Any], gpus: tuple[Device, ...]) -> tuple[str, str]:
    """An operator, and what it reaches and why no more, of a row of :func:`_rates`."""
    kind = f" in {row['precision']}" if row["precision"] not in ("", "unknown") else ""
    place = f"{operator_text(row['name'], row['shapes'])}{kind}"
    if row["rate"]:
        return place, f"runs {row['rate']}" + (f": {row['reason']}" if row["reason"] else "")
    reason = "by which it is faster than the data sheet allows, or of a precision without a rate"
    if row["transformed"]:
        reason = "since its kernels multiply less than its definition (Winograd, FFT)"
    elif not gpus:
        reason = "since no data sheet of its device is listed"
        column, does, unit = "gb_per_s", "moves", "GB/s"
        if math.isfinite(row["tflops_per_s"]):
            column, does, unit = "tflops_per_s", "computes", "TFLOP/s"
        reached, most = digits(row[column]), digits(row[f"most_{column}"])
        does = f"{does} {reached} {unit} of up to {most} that operators reach here"
        return place, f"{does}, and {UNJUDGED}, {reason}"
    return place, f"{UNJUDGED}, {reason}"


RATE_KNOWN = "rate is known"
COVERAGE = ["reason", "kernel_ms", "share_of_kernels"]


def rate_coverage(profile: Profile) -> pd.DataFrame:
    """How much of the kernels' time has a rate, which comes first, and why the rest has none.

    Empty with a reason where no operator's work is known.
    """
    work = _Work(profile)
    kernels = np.flatnonzero(work.is_kernel)
    if not work.known.any() or not len(kernels):
        return unmeasured(COVERAGE, _why_no_work(profile))
    names = profile.contexts["name"].to_numpy()[kernels]
    parent = profile.contexts["parent"].to_numpy()
    above = nearest(parent, profile.of_kind("operator"))[kernels]
    shapes = profile.contexts["shapes"].to_numpy()
    operator = work.operator[kernels]
    reasons = np.select(
        [
            work.share_of_work(kernels) > 0,
            (operator >= 0) & work.known[operator],
            operator >= 0,
            [bool(COMMUNICATION.search(str(name))) for name in names],
            above < 0,
            shapes[above] == "",
        ],
        [
            RATE_KNOWN,
            "the rate of the whole operator is known, but several kernels share its work",
            "fewer kernels of the operator than calls were recorded",
            "communication: its time is the network's and the other ranks'",
            "no operator above the kernel: a graph, compiled code or a library launched it",
            "the operator's inputs were not recorded",
        ],
        "shapes and types of the operator's inputs do not tell its work",
    )
    table = pd.DataFrame({"reason": reasons, "kernel_ms": work.own_ms[kernels]})
    table = table.groupby("reason")["kernel_ms"].sum().reset_index()
    table["share_of_kernels"] = table["kernel_ms"] / table["kernel_ms"].sum()
    table["known"] = table["reason"].eq(RATE_KNOWN)
    table = table.sort_values(["known", "kernel_ms"], ascending=False, ignore_index=True)
    return table[COVERAGE]


def kernel_work(profile: Profile, places: Ints) -> pd.DataFrame:
    """What kernels did, as far as the operators above them tell.

    An operator's work goes to its product kernel (not to what fills or reduces beside it); where it
    has several, by launches, as long as all calls are of one shape. ``places`` are contexts (k,) of
    kernels. Returns a row for each: ``flops``, ``bytes``, ``work_ms`` (its time, where its work is
    known), ``least_ms`` (at the GPU's limits), ``bytes_ms`` (its time, where its bytes are known).
    """
    work = _Work(profile)
    gpu = device_of(profile.meta)
    operator, share = work.operator[places], work.share_of_work(places)
    share = np.where((operator >= 0) & (share > 0), share, np.nan)
    flops, size = work.flops[operator] * share, work.bytes[operator] * share
    time = work.own_ms[places]
    least = np.full(len(places), np.nan)
    names = profile.contexts["name"].to_numpy()[places]
    for row in np.flatnonzero(np.isfinite(size) & (time > 0)):
        kind = kernel_name(str(names[row]))
        precision, uses = _arithmetic(kind, str(work.precision[operator[row]]), gpu)
        peak = peak_tflops(gpu, precision, uses)
        limit, micros, _ = _least(gpu, flops[row], size[row], peak, 1e3 * time[row])
        least[row] = micros / 1e3 if limit in (ARITHMETIC, MEMORY) else math.nan
    return pd.DataFrame(
        {
            "flops": flops,
            "bytes": size,
            "work_ms": np.where(np.isfinite(flops), time, np.nan),
            "bytes_ms": np.where(np.isfinite(size), time, np.nan),
            "least_ms": least,
            "least_of_ms": np.where(np.isfinite(least), time, np.nan),
        }
    )


def _least(
    gpu: Device | None, flops: float, size: float, peak: float, micros: float
) -> tuple[str, float, float]:
    """(limit, least µs, share that the least time is of ``micros``); "" and NaN where unknown.
    ``flops`` is NaN of what only moves bytes."""
    if gpu is None or not (math.isfinite(size) and micros > 0):
        return "", math.nan, math.nan
    by_memory = size / gpu.memory_gb_per_s / 1e3
    by_arithmetic = flops / peak / 1e6 if math.isfinite(flops) else 0.0
    # no GPU computes faster than it can: the precision or the sheet is another
    if not by_arithmetic <= micros:
        return "", math.nan, math.nan
    if by_memory > micros:
        return CACHE_BANDWIDTH, math.nan, math.nan
    least = max(by_arithmetic, by_memory)
    return ARITHMETIC if by_arithmetic >= by_memory else MEMORY, least, least / micros


def _arithmetic(kernel: Any, operands: str, gpu: Device | None) -> tuple[str, bool | None]:
    """Precision and use of tensor cores of a kernel whose operator's operands are known."""
    if not kernel.is_product:
        # additions of rows and the like: no unit but the ordinary ones does them
        return operands, False
    precision = kernel.precision or operands
    if kernel.tensor_cores is None and precision == "fp32" and gpu and "tf32" not in gpu.tflops:
        return precision, False  # its tensor cores take no operands of this type
    return precision, kernel.tensor_cores


def _why_no_work(profile: Profile) -> str:
    if profile.meta.get("engine") == "hpctoolkit":
        return (
            "HPCToolkit does not record the shapes of operators' inputs; "
            "`dlrm run profile -f FILE -p profiling.engine=torch` does"
        )
    if not profile.has("gpu_time_ms"):
        return missing_reason(profile, ["gpu_time_ms"], "no GPU kernel was measured")
    return NO_SHAPES


class _Work:
    """Operators of known work in a profile: columns over its contexts (n,)."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        operations = operations_by_precision(profile)
        flops: Floats = operations.sum(axis=1).to_numpy(dtype=float)
        self.flops = np.where(flops > 0, flops, np.nan)
        size = profile.value_table(OPERAND_BYTES).to_numpy()
        self.bytes: Floats = np.where(size > 0, size, np.nan)
        self.known: Bools = (flops > 0) | (size > 0)
        self.precision = np.where(flops > 0, "unknown", "").astype(object)
        for precision, column in operations.items():
            # operands of several precisions in one context have none
            self.precision[((column > 0) & (column == flops)).to_numpy()] = precision
        self.calls = profile.value_table("calls").to_numpy()
        self.gpu_ms = profile.value_table("gpu_time_ms", "inclusive").fillna(0.0).to_numpy()
        self.own_ms = self.gpu_ms
        self.launches = profile.value_table("launches", "inclusive").fillna(0.0).to_numpy()
        parent = profile.contexts["parent"].to_numpy()
        self.is_kernel = profile.of_kind("kernel")
        self.operator: Ints = nearest(parent, self.known | profile.of_kind("operator"))
        # what an operator without work of its own launches for a product above it is the product's
        product = nearest(parent, flops > 0)
        self.operator = np.where(self.known[self.operator], self.operator, product)
        self.tensor_cores = np.where(flops > 0, "unknown", "").astype(object)
        self.main: dict[int, list[int]] = {}
        """Operator to its kernels (contexts) that do its work."""
        self.transformed: set[int] = set()
        """Operators whose kernels do fewer operations than the definition: see _TRANSFORMED."""
        self.below: dict[int, list[int]] = {}
        self.rate: dict[int, int] = {}
        """Operator to its row in what :func:`_rates` gives."""
        self._look_at_kernels()

    def _look_at_kernels(self) -> None:
        names = self.profile.contexts["name"].to_numpy()
        gpu = device_of(self.profile.meta)
        kernels = np.flatnonzero(self.is_kernel & (self.operator >= 0))
        for kernel in kernels:
            self.below.setdefault(int(self.operator[kernel]), []).append(int(kernel))
        for operator, below in self.below.items():
            kinds = {k: kernel_name(str(names[k])) for k in below}
            main = [k for k in below if kinds[k].is_product]
            if not self.precision[operator]:
                main = below  # what only moves bytes has no product among its kernels
            elif not main:
                main = [k for k in below if not kinds[k].short.lower().startswith(_IGNORED)]
            launched = sum(self.launches[k] for k in main)
            if launched < self.calls[operator]:
                # some of its kernels are not in the recording: a rate would be too high
                self.known[operator] = False
                continue
            self.main[operator] = main
            if not self.precision[operator]:
                continue
            if any(_TRANSFORMED.search(str(names[k])) for k in below):
                self.transformed.add(operator)
            arithmetic = {_arithmetic(kinds[k], str(self.precision[operator]), gpu) for k in main}
            uses = {cores for _, cores in arithmetic}
            precisions = {precision for precision, _ in arithmetic}
            self.tensor_cores[operator] = yes_no_unknown(uses.pop() if len(uses) == 1 else None)
            if len(precisions) == 1:
                self.precision[operator] = precisions.pop()
        # what ran on the host, or as a copy, has no kernel of its own
        self.known[[o for o in np.flatnonzero(self.known) if o not in self.main]] = False

    def share_of_work(self, kernels: Ints) -> Floats:
        """Share (k,) of its operator's work that each kernel does; 0 where that is unknown."""
        shapes = self.profile.contexts["shapes"].to_numpy()
        share = np.zeros(len(kernels))
        for row, kernel in enumerate(kernels):
            operator = int(self.operator[kernel])
            main = self.main.get(operator, [])
            is_judged = self.known[operator] and operator not in self.transformed
            if int(kernel) not in main or not is_judged:
                continue
            launched = sum(self.launches[k] for k in main)
            is_mixed = "*" in str(shapes[operator]) or launched != self.calls[operator]
            if len(main) == 1 or not is_mixed:
                share[row] = self.launches[kernel] / launched
        return share

    def blocks(self, operators: Ints) -> Floats:
        """Mean blocks (k,) of a launch of the kernels that do each operator's work; or NaN."""
        blocks = self.profile.value_table("GKER:BLKS_ACUMU", "inclusive").to_numpy()
        main = [self.main[int(operator)] for operator in operators]
        return np.array([blocks[few].sum() / self.launches[few].sum() for few in main])

    def notes(self) -> Any:
        """What is noted (n,) of each operator's inputs: see :data:`~.shape_work.NOTES`."""
        texts = np.full(len(self.known), "", dtype=object)
        for note in NOTES:
            noted = self.profile.value_table(NOTE + note).to_numpy() == self.calls
            texts[noted] = [f"{text} {note}".strip() for text in texts[noted]]
        return texts

    def kernel_texts(self) -> Any:
        """Short names (n,) of the kernels that do each operator's work, the longest first."""
        names = self.profile.contexts["name"].to_numpy()
        short = short_names(str(names[k]) for main in self.main.values() for k in main)
        texts = np.full(len(names), "", dtype=object)
        for operator, main in self.main.items():
            ordered = sorted(main, key=lambda k: -self.own_ms[k])
            texts[operator] = ", ".join(dict.fromkeys(short[str(names[k])] for k in ordered))
        return texts
