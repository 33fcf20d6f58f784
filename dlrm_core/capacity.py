"""Memory a run will need, table by table, before anything is allocated."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch

from dlrm_core.config import Parameters
from dlrm_core.errors import InputError

FLOAT_BYTES = 4
HALF_BYTES = 2
INDEX_BYTES = 8


@dataclass(frozen=True)
class MemoryItem:
    """One line of the forecast: what, how large, how many bytes."""

    name: str
    shape: str
    bytes: int


def forecast_memory(parameters: Parameters) -> list[MemoryItem]:
    """What one training process allocates on its device at its peak.

    Formulas (SGD; B batch, d embedding width, k mean bag size; b bytes of a number of
    ``training.precision``, M rows of a micro-batch, else B):
    table R d 4; MLP 4 sum(n m + m), as much again for gradients, in bf16 and fp16 also
    b sum(n m + m) for their copy; activations and their gradients
    2 b M (sum of layer widths + F d + F^2), with b or M less than 4 and B also
    2 * 4 B T d for pooled vectors and their gradients, which stay whole and fp32;
    batch B (D + 1) 4 + T B (k + 1) 8; sparse gradients of an embedding T B k (4 d + 8),
    less with the fused back end, and an Adagrad's state (see :func:`_embedding_update`).
    """
    model, data = parameters.model, parameters.data
    size, dim = parameters.training.batch_size, model.embedding_dim
    rows = min(size, parameters.training.micro_batch or size)
    number = FLOAT_BYTES if parameters.training.precision == "fp32" else HALF_BYTES
    items = [
        MemoryItem(f"embedding table {t}", f"{length:,} x {dim}", length * dim * FLOAT_BYTES)
        for t, length in enumerate(model.table_rows)
    ]
    for name, widths in (("bottom MLP", model.bottom_widths), ("top MLP", model.top_widths)):
        weights = sum(n * m + m for n, m in itertools.pairwise(widths))
        shape = "-".join(map(str, widths))
        copied = number if number < FLOAT_BYTES else 0
        total = weights * (2 * FLOAT_BYTES + copied)
        items.append(MemoryItem(f"{name} weights and gradients", shape, total))
    features = len(model.table_rows) + 1
    width = sum(model.bottom_widths) + sum(model.top_widths) + features * (dim + features)
    items.append(
        MemoryItem("activations and gradients", f"{rows:,} x {width:,}", 2 * rows * width * number)
    )
    if number < FLOAT_BYTES or rows < size:
        pooled = (features - 1) * dim
        items.append(
            MemoryItem(
                "pooled vectors and gradients",
                f"{size:,} x {pooled:,}",
                2 * size * pooled * FLOAT_BYTES,
            )
        )
    looked_up = sum(size * mean_bag_size(parameters, length) for length in model.table_rows)
    assert model.dense_features is not None
    batch = size * (model.dense_features + 1) * FLOAT_BYTES
    batch += int((looked_up + size * len(model.table_rows)) * INDEX_BYTES)
    kept = 1 + (data.prefetch_batches if data.loader == "prefetch" else 0)
    items.append(MemoryItem("batches", f"{kept} x {size:,} samples", kept * batch))
    items += _embedding_update(parameters, looked_up)
    return items


def _embedding_update(parameters: Parameters, looked_up: float) -> list[MemoryItem]:
    """The optimiser's state, and what lies between the tables' backward and update.

    Adagrad keeps R d 4 of sums a table and as much as the MLPs' weights, Adam twice that;
    row-wise Adagrad R 4 a table. torch's back end keeps sparse gradients, and coalesces them into
    a second copy for an Adagrad; the fused one keeps 16 bytes a lookup to sort
    (Adagrads; FBGEMM always), and with 'naive' the rows of the gradient. 'auto' chooses
    among what fits, so the least of them is what it needs.
    """
    model, training = parameters.model, parameters.training
    dim, items = model.embedding_dim, []
    if training.optimizer != "sgd":
        width = 1 if training.optimizer == "rowwise_adagrad" else dim
        rows = sum(model.table_rows)
        dense = sum(
            n * m + m
            for widths in (model.bottom_widths, model.top_widths)
            for n, m in itertools.pairwise(widths)
        )
        kept = 2 if training.optimizer == "adam" else 1
        size = kept * FLOAT_BYTES * (rows * width + dense)
        items.append(MemoryItem("optimiser state", f"{rows:,} x {width}, {dense:,}", size))
    gradients = looked_up * (dim * FLOAT_BYTES + INDEX_BYTES)
    if training.embedding_backend == "torch":
        copies = 1 if training.optimizer == "sgd" else 2
        shape = f"{round(looked_up):,} x {dim}"
        items.append(MemoryItem("sparse embedding gradients", shape, int(copies * gradients)))
    elif training.embedding_update == "naive":
        shape = f"{round(looked_up):,} x {dim}"
        size = int(looked_up * dim * FLOAT_BYTES)
        items.append(MemoryItem("sparse embedding gradients", shape, size))
    elif training.optimizer != "sgd" or training.embedding_backend == "fbgemm":
        size = int(looked_up * 2 * INDEX_BYTES)
        items.append(MemoryItem("sorted lookups", f"{round(looked_up):,} x 2", size))
    return items


def mean_bag_size(parameters: Parameters, rows: int) -> float:
    """Expected indices per bag of a table, before facebook's deduplication."""
    data = parameters.data
    if data.fixed_pooling:
        return float(data.indices_per_lookup)
    bound = min(rows, data.indices_per_lookup)
    # max(1, round(r k)): sizes 1..k-1 have width 1/k, size k half of that, size 1 the rest
    sizes = [(j, 1.0 / bound) for j in range(2, bound)]
    sizes.append((bound, 0.5 / bound if bound > 1 else 1.0))
    if bound > 1:
        sizes.append((1, 1.5 / bound))
    return sum(count * probability for count, probability in sizes)


def require_memory(parameters: Parameters, device: torch.device) -> None:
    """Refuse a run that cannot fit, with the forecast as the reason.

    Raises:
        InputError: naming the total, what is available, and every item.
    """
    items = forecast_memory(parameters)
    needed = sum(item.bytes for item in items)
    available = available_memory(device)
    if available is None or needed <= available:
        return
    place = "GPU memory" if device.type == "cuda" else "memory"
    lines = _merged(items)
    where = f"{parameters.source}: " if parameters.source else ""
    raise InputError(
        f"{where}model.table_rows and training.batch_size ask for {format_bytes(needed)} of "
        f"{place}, but {format_bytes(available)} are available:\n"
        + "\n".join(
            f"  {name:<34}{shape:>24}{format_bytes(size):>12}" for name, shape, size in lines
        )
    )


def _merged(items: list[MemoryItem]) -> list[tuple[str, str, int]]:
    """Largest first, at most twelve lines; what is left out is summed."""
    ordered = sorted(items, key=lambda item: -item.bytes)
    lines = [(item.name, item.shape, item.bytes) for item in ordered[:12]]
    rest = ordered[12:]
    if rest:
        lines.append((f"{len(rest)} smaller items", "", sum(item.bytes for item in rest)))
    return lines


def available_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on the device now; None where nobody says.

    On the CPU the lesser of the kernel's estimate and the control group's
    limit: in a container the former is the whole machine's.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
            # "used" counts the page cache, which the kernel gives back on demand
            statistics = Path(used).with_name("memory.stat").read_text().splitlines()
            counted = dict(line.split()[:2] for line in statistics)
            found.append(left + int(counted.get("inactive_file", 0)))
        except (OSError, ValueError):
            continue
    return min(found) if found else None


def format_bytes(count: float) -> str:
    """Bytes with a binary unit: 1.50 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
