"""Why an operator runs far below its GPU's limits, in words.

What shapes, the kernel's name, its launch and the data sheet tell: too few output tiles or blocks
for the GPU's multiprocessors, a last wave of them that is nearly empty, sizes that fill their
tiles badly or are no multiple of what is loaded at once, filters of one channel or with gaps, heads
that fit no block, operands that are read with gaps. Where nothing of it is there, that is said.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dlrm_workbook.analysis.devices import Device, device
from dlrm_workbook.ground.units import percent, thousands
from dlrm_workbook.recordings.torch.seen_shapes import product_of
from dlrm_workbook.recordings.torch.shape_work import (
    AT_LEAST,
    ATTENTION,
    CONVOLUTIONS,
    ELEMENT_BYTES,
)

NEAR_LIMIT = 0.5
"""From this share of a limit on an operator is not asked why it is no faster."""

FAR_NEARER = 3.0
"""Times nearer than the rate of products from which on the bandwidth alone is the limit."""

FULL_WAVES = 0.75
"""Less of the waves of tiles that is used makes a reason; so does less of the tiles themselves."""

LOADED_BYTES = 16
"""Bytes of a row that a thread loads at once: rows that begin elsewhere are loaded in pieces."""

WIDE_HEAD = 192
"""Numbers of a head from which on few queries fit into a block's registers and shared memory."""

START_UP_US = 5.0
"""Time in which a kernel starts and ends, whatever it does."""

_FAMILIES = (
    (r"ISA950|gfx950", ("MI355X",)),
    (r"ISA942|gfx94", ("MI300X",)),
    (r"ISA90a|gfx90a", ("MI250X",)),
    (r"ISA908|gfx908", ("MI100",)),
    (r"\bCijk_|igemm_\w*gtc|aiter|\bck::|\bck_tile|\.kd$|miopen|rocblas|hip[A-Z]", ("MI300X",)),
    (r"sm100|blackwell", ("B200",)),
    (r"sm90|hopper|nvjet", ("H100-SXM",)),
    (r"sm80|ampere", ("A100-80GB",)),
    (r"volta_", ("V100-16GB",)),
    (r"turing_", ("T4",)),
)
_COMMON = ("H100-SXM", "MI300X")
_TILE = re.compile(r"(?<![\d.])(\d{2,3})x(\d{2,3})(?:x\d+)?")


def gpus_by_names(names: Iterable[str]) -> tuple[Device, ...]:
    """GPUs that a recording which names none may be of, by the names of its kernels and calls.

    One of the architecture that a name tells, or a common one of each vendor: figures for them
    show the order of magnitude, and the page says that the recording names no GPU.
    """
    text = "\n".join(names)
    for pattern, short in _FAMILIES:
        if re.search(pattern, text, re.MULTILINE):
            return tuple(map(device, short))
    return tuple(map(device, _COMMON))


def operator_text(name: str, shapes: str) -> str:
    """An operator with the shapes of its operands: ```aten::mm` (256 x 512)(512 x 64)``."""
    listed = [shape for shape in _shapes(shapes) if isinstance(shape, list) and len(shape) > 1]
    if any(not isinstance(size, int) for shape in listed for size in shape):
        listed = []
    texts = ["(" + " x ".join(f"{size:,}" for size in shape) + ")" for shape in listed[:3]]
    if product_of(name, shapes) is None:  # operands of one shape are told once
        texts = list(dict.fromkeys(texts))
    return f"`{name}` {''.join(texts)}".rstrip()


def _shapes(text: str) -> list[Any]:
    """Shapes of an operator's inputs; none where sizes differ from call to call."""
    try:
        shapes = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return shapes if isinstance(shapes, list) else []


def _shares(row: Mapping[str, Any], gpu: Device) -> tuple[float, float]:
    """Shares of the rate of products and of memory bandwidth that a call reaches, or NaN."""
    seconds = row["mean_us"] / 1e6
    memory = row["call_bytes"] / (1e9 * gpu.memory_gb_per_s) / seconds
    rate = 1e12 * gpu.tflops.get(row["precision"], math.nan)
    return 1e9 * row["call_gflop"] / rate / seconds, memory


def rate_text(row: Mapping[str, Any], gpus: Sequence[Device], is_named: bool) -> str:
    """How near the limits of these GPUs an operator runs: ``at 4.5% of the rate of bf16 products``.
    ``row`` is of :func:`dlrm_workbook.analysis.gpu_limits.operator_rates`, with ``transformed``;
    ``is_named`` says whether the recording names the GPU. Returns "" where nothing can be said: of
    operations that no rate is known of, and of rates above the data sheet's, where the precision or
    the GPU is another, or bytes come from a cache."""
    texts = []
    for gpu in () if row["transformed"] else gpus:
        arithmetic, memory = _shares(row, gpu)
        whose = "the" if is_named else f"{_article(gpu.name)} {gpu.name}'s"
        multiplies = row["call_gflop"] == row["call_gflop"]
        if multiplies and not arithmetic <= 1:
            continue
        only_bytes = not multiplies or memory > FAR_NEARER * arithmetic
        if not only_bytes:
            what = f"rate of {row['precision']} products"
            text = f"{percent(arithmetic)} of {whose} {what}"
            best = gpu.achieved.get(row["precision"], 0.0)
            if best >= arithmetic * gpu.tflops[row["precision"]] > 0:
                share = percent(arithmetic * gpu.tflops[row["precision"]] / best)
                on = f"{gpu.vendor} measured on {_article(gpu.name)} {gpu.name}"
                text = (
                    f"{share} of the {what} that {on} ({percent(arithmetic)} of the data sheet's)"
                )
            texts.append(text)
        if memory <= 1 and not arithmetic >= memory:
            least = "no less than " if row["bytes_are"] == AT_LEAST else ""
            whose = whose if only_bytes else "its"
            texts.append(f"{least}{percent(memory)} of {whose} memory bandwidth")
    if not texts:
        return ""
    unnamed = "" if is_named else ", if that is the GPU, which the recording does not name"
    return f"at {' and '.join(texts)}{unnamed if len(gpus) == 1 else unnamed and NO_GPU}"


NO_GPU = " (the recording names no GPU)"


def _article(name: str) -> str:
    return "an" if name[0] in "AHMRL" else "a"


def why(row: Mapping[str, Any], gpu: Device) -> str:
    """What keeps an operator from its nearer limit on this GPU; "" where it is near or unknown.
    ``row`` is of :func:`dlrm_workbook.analysis.gpu_limits.operator_rates`, with ``blocks`` (a
    launch), ``notes`` and ``transformed``."""
    arithmetic, memory = _shares(row, gpu)
    if row["transformed"] or arithmetic > 1 or not np.fmax(arithmetic, memory) < NEAR_LIMIT:
        return ""
    shapes = [one for one in _shapes(row["shapes"]) if isinstance(one, list)]
    reasons = [*_of_sizes(row), *_of_filters(row, shapes), *_of_heads(row, shapes)]
    reasons += [*(_of_bytes(row, gpu) if not arithmetic >= memory else []), *_of_tiles(row, gpu)]
    return "; ".join(dict.fromkeys(reasons)) or "its shapes do not show why"


def _sizes(row: Mapping[str, Any]) -> tuple[int, int, int, int] | None:
    """(batch, m, n, k) of a product or of a convolution forward as one; None of others."""
    if (sizes := product_of(row["name"], row["shapes"])) is not None:
        return sizes if all(isinstance(size, int) for size in sizes) else None
    shapes = _shapes(row["shapes"])
    if row["name"] not in CONVOLUTIONS or len(shapes) < 2 or "transpose" in row["name"]:
        return None
    n, k = shapes[1][0], math.prod(shapes[1][1:])
    # the size of the result depends on strides and padding: the operations tell it
    return (1, max(round(1e9 * row["call_gflop"] / (2 * n * k)), 1), n, k) if n * k else None


def _of_tiles(row: Mapping[str, Any], gpu: Device) -> list[str]:
    sizes, tile = _sizes(row), _TILE.search(row["kernels"])
    if sizes is None or tile is None:
        blocks = row["blocks"]
        few = blocks == blocks and 0 < blocks < gpu.units
        return [f"its {blocks:,.0f} blocks are too few for {gpu.units_text}"] if few else []
    batch, m, n, k = sizes
    high, wide = int(tile[1]), int(tile[2])
    count = batch * math.ceil(m / high) * math.ceil(n / wide)
    reasons = []
    waves = count / gpu.units
    if waves < 1:
        text = f"{count:,} output tile{'s' * (count > 1)} of {high} x {wide} for "
        text += gpu.units_text
        reasons.append(text + ("; split along k" if k > 2 * max(m, n) else ""))
    elif waves / math.ceil(waves) < FULL_WAVES:
        idle = math.ceil(waves) - waves
        reasons.append(
            f"{count:,} output tiles of {high} x {wide} leave {idle:.0%} of "
            f"{gpu.units_text} idle in the last wave"
        )
    if (fill := batch * m * n / (count * high * wide)) < FULL_WAVES:
        reasons.append(f"sizes that fill {fill:.0%} of its tiles")
    return reasons


def _of_sizes(row: Mapping[str, Any]) -> list[str]:
    sizes = _sizes(row)
    if sizes is None or row["name"] in CONVOLUTIONS:
        return []
    step = LOADED_BYTES // ELEMENT_BYTES.get(row["precision"], 4)
    odd = [size for size in dict.fromkeys(sizes[2:]) if size % step]
    if not odd:
        return []
    numbers = " and ".join(f"{size:,}" for size in odd)
    text = f"misaligned sizes: {numbers} {'is' if len(odd) == 1 else 'are'} no multiple of {step}"
    return [f"{text} (pad to {', '.join(f'{-(-size // step) * step:,}' for size in odd)})"]


def _of_filters(row: Mapping[str, Any], shapes: list[Any]) -> list[str]:
    backward = row["name"] == "aten::convolution_backward"
    if (row["name"] not in CONVOLUTIONS and not backward) or len(shapes) < 2 + backward:
        return []
    given, weight = shapes[backward : 2 + backward]
    if len(given) != len(weight) or len(weight) < 3:
        return []
    reasons = []
    if "transpose" not in row["name"] and weight[1] < given[1]:
        groups = given[1] // weight[1]
        each = "depthwise" if weight[1] == 1 else f"{groups} groups of {weight[1]} channels"
        reasons.append(f"{each}: few operations for each byte, so that memory limits it")
    elif min(weight[:2]) < LOADED_BYTES:
        reasons.append(f"only {min(weight[:2])} channels on one side")
    if row["notes"].count("dilated") or re.search("dilat", row["kernels"]):
        reasons.append("dilation: its filter reads with gaps")
    if math.prod(given[2:]) <= 64:
        reasons.append(f"only {math.prod(given[2:])} places of {given[1]:,} channels an image")
    return reasons


def _of_heads(row: Mapping[str, Any], shapes: list[Any]) -> list[str]:
    if row["name"] not in ATTENTION:
        return []
    head = next((shape[-1] for shape in shapes if len(shape) == 4), 0)
    reasons = []
    if head & (head - 1):
        reasons.append(f"heads of {head} numbers, no power of two, to which many kernels pad")
    if head >= WIDE_HEAD:
        reasons.append(f"heads of {head} numbers leave a block room for few queries")
    return reasons


def _of_bytes(row: Mapping[str, Any], gpu: Device) -> list[str]:
    reasons = []
    if row["call_bytes"] / (1e3 * gpu.memory_gb_per_s) < START_UP_US:
        size = thousands(row["call_bytes"], "B")
        reasons.append(f"a call moves only {size}, less than a kernel's start-up is worth")
    if "strided" in row["notes"]:
        reasons.append("operands in different layouts or with gaps, read in pieces")
    return reasons
