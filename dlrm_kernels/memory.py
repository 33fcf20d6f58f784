"""Memory a run will need, item by item, before anything is allocated; what would fit."""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlrm_core.base.engines import engine, find_engine
from dlrm_core.base.errors import InputError
from dlrm_core.base.machine import available_memory
from dlrm_core.base.text import format_bytes
from dlrm_core.config import Parameters, mean_bag_size
from dlrm_core.operations import FLOAT_BYTES, INDEX_BYTES, NUMBER_BYTES
from dlrm_core.optimizers import OPTIMIZERS
from dlrm_kernels.placement import Placement, plan_placement

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DensePeak:
    """Bytes alive at the highest point of the dense part.

    Attributes:
        activations: what forward has left for backward.
        gradients: gradients of activations, and an operator's temporaries.
        where: the part and phase in which that is.
    """

    activations: int
    gradients: int
    where: str


def dense_peak(parameters: Parameters, gpu: bool = False) -> DensePeak:
    """The highest point of the dense part's forward and backward pass.

    Not counted: pooled vectors and their gradients, weights' gradients and the batch,
    which live longer than the dense part runs. With ``training.compile`` a part keeps no
    more than this.
    """
    model, training, kind = parameters.model, parameters.training, parameters.model.interaction_kind
    rows = min(training.batch_size, training.micro_batch or training.batch_size)
    if training.dense_backend == "auto" and not gpu:
        chooser = find_engine("choice of dense part")
        each = map(dense_peak, chooser.possible(parameters)) if chooser is not None else ()
        widest = max(each, key=lambda peak: peak.activations + peak.gradients, default=None)
        if widest is not None:
            return widest
    if training.dense_backend == "fused" and not gpu:
        import torch

        kernels = engine("fused dense part")
        if not kernels.why_not_fused(training, torch.device("cpu"), kind):
            peak: DensePeak = kernels.fused_peak(parameters, rows)
            return peak
    n = NUMBER_BYTES[training.precision]
    bottom, top, z = model.bottom_widths, model.top_widths, kind.width
    # autocast saves the input that it has cast; in fp32 it is the batch's own tensor
    bottom_kept = sum(bottom[1:]) + (bottom[0] if n < FLOAT_BYTES else 0)
    kept, forward, backward = kind.memory(n, widens=n < FLOAT_BYTES and not gpu)
    moments = [
        DensePeak(bottom_kept + kept + z, forward, "interaction forward"),
        *(
            DensePeak(bottom_kept + kept + z + acts, gradients, "top MLP backward")
            for acts, gradients in _mlp_backward(top)
        ),
        DensePeak(bottom_kept + kept + z, backward, "interaction backward"),
        *(
            DensePeak(acts + z, gradients + z, "bottom MLP backward")
            for acts, gradients in _mlp_backward(bottom)
        ),
    ]
    peak = max(moments, key=lambda moment: moment.activations + moment.gradients)
    return DensePeak(rows * n * peak.activations, rows * n * peak.gradients, peak.where)


def _mlp_backward(widths: Sequence[int]) -> list[tuple[int, int]]:
    """(activations, gradients) in numbers a row while each layer's backward runs, last first.

    A layer's output is saved once: ReLU works in place. Its gradient is made anew by ReLU's
    backward, before the output is freed.
    """
    moments = []
    for layer in range(len(widths) - 1, 0, -1):
        moments.append((sum(widths[1 : layer + 1]), 2 * widths[layer]))
        moments.append((sum(widths[1:layer]), widths[layer] + widths[layer - 1]))
    return moments


SORTED_LOOKUP_BYTES = 28
"""Of a GPU's fused update: 4 + 8 for key and place, twice, and 4 for the bag."""

ALWAYS, INITIAL, DATA = "always", "making the model", "making a batch"
DENSE, EMBEDDINGS = "dense part", "embedding update"
"""When an item is alive. All but the first follow each other, so only the largest counts."""

PLACES = ("gpu", "host")

LIBRARIES_BYTES = 48 << 20
"""Resident once torch and its libraries have run a step, beyond what importing them takes;
the median of ten shapes on a Xeon (docs/training.md)."""

NUMBA_BYTES = 96 << 20
"""As much again with compiled kernels: numba and LLVM."""

ALLOCATOR_SHARE = 0.15
"""Of what is allocated anew every step, glibc holds so much more: freed pieces of other sizes
(median of the same shapes; 0.08 to 0.3)."""

CUBLAS_BYTES = 32 << 20
"""torch's workspace for cuBLAS on Hopper, 8 MiB on others
(https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/cuda/CublasHandlePool.cpp)."""

WORD_TEMPORARIES = 8
"""Arrays of 8 bytes a number alive while torch's operators round a table's rows."""

INITIAL_CHUNK = 1 << 16
"""Weights drawn at a time (:mod:`dlrm_core.model`): 20 bytes each in facebook's stream."""


@dataclass(frozen=True)
class MemoryItem:
    """One line of the forecast: what, how large, how many bytes, where and when."""

    name: str
    shape: str
    bytes: int
    place: str = "host"
    """``gpu`` or ``host`` memory."""
    when: str = ALWAYS


def total_bytes(items: Iterable[MemoryItem], place: str | None = None) -> int:
    """Bytes at the highest point in one place; None: wherever the items are.

    What is alive all the time, and of the stages of a step the one that needs most.
    """
    sums: dict[str, int] = {}
    for item in items:
        if place is None or item.place == place:
            sums[item.when] = sums.get(item.when, 0) + item.bytes
    return sums.pop(ALWAYS, 0) + max(sums.values(), default=0)


def forecast_memory(parameters: Parameters, gpu: bool = False, ranks: int = 1) -> list[MemoryItem]:
    """What one training process allocates, on a CPU or with the dense part on a GPU.

    Args:
        ranks: processes that share the tables and the batch (docs/scaling.md); the forecast is
            then of the one that keeps most.

    Formulas (B batch, T tables of R rows, d embedding width, k mean bag size; b bytes of a
    number of ``training.precision``):
    table 4 R d (2 R d with ``model.embedding_precision`` bf16 or fp16); MLP 4 sum(n m + m)
    (cross layer 4 (2 F d r + F d), rank r, F = T + 1), in bf16 and fp16 also b a number for their
    copy, as much again in fp32 for gradients; activations and their gradients: see
    :func:`dense_peak`; pooled vectors and their gradients 2 * 4 B T d;
    batch 4 B (D + 1) + 8 T B (k + 1); sparse gradients of an embedding T B k (4 d + 8),
    less with the fused back ends; optimiser state 4 R (row-wise Adagrad), 4 R d (Adagrad) or
    8 R d (Adam) a table. Tables on the host beside a GPU (``training.embeddings_on_gpu_bytes``)
    take what is theirs there, and page-locked copies of their pooled vectors and gradients.
    """
    if ranks > 1:
        share = _rank_share(parameters, ranks)
        items = forecast_memory(share, gpu)
        # a table of which this rank keeps no row is one of a single row here
        kept = sum(rows > 1 for rows in share.model.table_rows)
        name, place = "vectors exchanged with other ranks", "gpu" if gpu else "host"
        return [*items, _vectors(name, parameters, kept, place)]
    placement, where = plan_placement(parameters, gpu), "gpu" if gpu else "host"
    made_anew = [
        *_dense(parameters, placement, where),
        *_batches(parameters, placement, gpu),
        *_embedding_update(parameters, placement.on_gpu, where, ""),
        *_embedding_update(
            parameters, placement.on_host, "host", " of the host" if placement.split else ""
        ),
    ]
    return [
        *_tables(parameters, placement, where),
        *_mlps(parameters, where),
        *_optimizer(parameters, placement, where),
        *made_anew,
        *_workspace(parameters, total_bytes(made_anew, "host"), gpu),
    ]


def _rank_share(parameters: Parameters, ranks: int) -> Parameters:
    """The fullest of several ranks, as the parameters of one process: its rows, its samples.

    Some of the largest tables are cut into rows for all ranks: so many that the fullest rank
    needs least. Each other one goes whole, largest first, to the rank that has least.
    """
    rows, size = parameters.model.table_rows, parameters.training.batch_size
    largest_first = sorted(range(len(rows)), key=lambda t: -rows[t])
    exchanged = 2 * size * parameters.model.embedding_dim * FLOAT_BYTES

    def share(cut: int) -> dict[int, int]:
        """Rows of each table that the fullest rank keeps."""
        loads: list[tuple[int, int, list[int]]] = [(0, rank, []) for rank in range(ranks)]
        for table in largest_first[cut:]:
            load, rank, tables = loads[0]
            heapq.heapreplace(loads, (load + rows[table], rank, [*tables, table]))
        whole = {table: rows[table] for table in max(loads)[2]}
        return {table: -(-rows[table] // ranks) for table in largest_first[:cut]} | whole

    shares = (share(cut) for cut in range(len(rows) + 1))
    kept = min(
        shares,
        key=lambda share: sum(share.values()) * parameters.model.row_bytes + len(share) * exchanged,
    )
    # a process has a row of each table at least
    model = dataclasses.replace(
        parameters.model, table_rows=tuple(kept.get(t, 1) for t in range(len(rows)))
    )
    changed = dataclasses.replace(parameters, model=model)
    return changed.with_training(batch_size=max(1, -(-size // ranks)))


def _tables(parameters: Parameters, placement: Placement, where: str) -> Iterator[MemoryItem]:
    model, on_host = parameters.model, set(placement.on_host)
    for t, rows in enumerate(model.table_rows):
        place = "host" if t in on_host else where
        name, size = f"embedding table {t}", rows * model.row_bytes
        yield MemoryItem(name, f"{rows:,} x {model.embedding_dim}", size, place)


def _mlps(parameters: Parameters, where: str) -> Iterator[MemoryItem]:
    model = parameters.model
    number = NUMBER_BYTES[parameters.training.precision]
    shapes = ["x".join(map(str, weight.shape)) for weight in model.interaction_kind.weights()]
    described = {
        "bottom_mlp": ("bottom MLP", "-".join(map(str, model.bottom_widths))),
        "interaction": (model.interaction_kind.layers, ", ".join(shapes)),
        "top_mlp": ("top MLP", "-".join(map(str, model.top_widths))),
    }
    for part, weights in model.dense_weights.items():
        name, shape = described[part]
        narrowed = sum(model.narrowed_sizes.get(part, ()))
        copied = number * narrowed if number < FLOAT_BYTES else 0
        yield MemoryItem(f"{name} weights", shape, weights * FLOAT_BYTES + copied, where)
        yield MemoryItem(f"{name} gradients", shape, weights * FLOAT_BYTES, where)


def _dense(parameters: Parameters, placement: Placement, where: str) -> Iterator[MemoryItem]:
    peak, size = dense_peak(parameters, where == "gpu"), parameters.training.batch_size
    rows = min(size, parameters.training.micro_batch or size)
    shape = f"{rows:,} rows, {peak.where}"
    yield MemoryItem("activations", shape, peak.activations, where, DENSE)
    yield MemoryItem("gradients of activations", shape, peak.gradients, where, DENSE)
    name, of_host = "pooled vectors and gradients", len(placement.on_host)
    yield _vectors(name, parameters, len(parameters.model.table_rows), where)
    if placement.split and of_host:
        yield _vectors(f"copies of {name}", parameters, of_host, "host")
        yield _vectors("pooled vectors of the host", parameters, of_host, "host")


def _vectors(name: str, parameters: Parameters, tables: int, place: str) -> MemoryItem:
    """A vector a sample of some tables, and another for its gradient, or its copy."""
    size, width = parameters.training.batch_size, tables * parameters.model.embedding_dim
    return MemoryItem(name, f"{size:,} x {width:,}", 2 * size * width * FLOAT_BYTES, place)


def _batches(parameters: Parameters, placement: Placement, gpu: bool) -> Iterator[MemoryItem]:
    model, data, size = parameters.model, parameters.data, parameters.training.batch_size
    assert model.dense_features is not None
    dense = size * (model.dense_features + 1) * FLOAT_BYTES

    def lookups(tables: Iterable[int]) -> int:
        bags = [mean_bag_size(parameters, t) + 1 for t in tables]
        return int(size * sum(bags) * INDEX_BYTES)

    on_gpu, on_host = lookups(placement.on_gpu), lookups(placement.on_host)
    # one in use, those that wait, and the one that the thread holds until there is room
    kept = 1 + (data.prefetch_batches + 1 if data.loader == "prefetch" else 0)
    if gpu:
        size_there = kept * (dense + on_gpu)
        yield MemoryItem("batches", f"{kept} x {size:,} samples", size_there, "gpu")
    if gpu and data.place == "device":
        return
    whole = dense + on_gpu + on_host
    yield MemoryItem("batches", f"{kept} x {size:,} samples", kept * whole, "host")
    when = ALWAYS if data.loader == "prefetch" else DATA
    yield MemoryItem("making a batch", data.generator, _making(parameters), "host", when)


def _making(parameters: Parameters) -> int:
    """Bytes of a generator's temporaries: numbers of 8 bytes for each lookup.

    facebook's stream keeps all tables' indices until they are joined, and some six arrays of
    one table's; its loop has Python lists, 40 bytes a number; a power law four arrays, the law
    of reuse seven.
    """
    size = parameters.training.batch_size
    counts = [size * mean_bag_size(parameters, t) for t in range(len(parameters.model.table_rows))]
    most, every = INDEX_BYTES * max(counts), INDEX_BYTES * sum(counts)
    kind = parameters.data.generator
    if kind.startswith("facebook"):
        return int(every + (11 if kind == "facebook_loop" else 6) * most)
    return int({"zipf": 4, "reuse": 7}.get(kind, 1) * most)


def _optimizer(parameters: Parameters, placement: Placement, where: str) -> Iterator[MemoryItem]:
    """State kept beside the weights: SGD has none.

    Adagrad keeps R d 4 of sums a table and as much as the dense weights, Adam twice that;
    row-wise Adagrad R 4 a table.
    """
    model, kind = parameters.model, OPTIMIZERS[parameters.training.optimizer]
    width = kind.row_state(model.embedding_dim)
    if not width and not kind.dense_state:
        return
    dense = sum(model.dense_weights.values())
    on_host = sum(model.table_rows[t] for t in placement.on_host)
    rows = sum(model.table_rows) - (on_host if where == "gpu" else 0)
    size = FLOAT_BYTES * (rows * width + kind.dense_state * dense)
    yield MemoryItem("optimiser state", f"{rows:,} x {width}, {dense:,}", size, where)
    if where == "gpu" and on_host:
        size, shape = FLOAT_BYTES * on_host * width, f"{on_host:,} x {width}"
        yield MemoryItem("optimiser state of the host", shape, size, "host")


def _embedding_update(
    parameters: Parameters, tables: Sequence[int], place: str, whose: str
) -> Iterator[MemoryItem]:
    """What lies between the tables' backward and their update.

    torch's back end keeps sparse gradients; its optimisers but SGD work on one table's at a
    time, coalesced and with temporaries of the same size; the fused one keeps 16 bytes a
    lookup to sort (Adagrads and rows of 2 bytes a number; FBGEMM always; on a GPU 28 and what
    tiles leave over, always). 'auto' chooses among what fits, so the least of them is what it
    needs.
    """
    model, training = parameters.model, parameters.training
    if not tables:
        return
    size, dim = training.batch_size, model.embedding_dim
    counts = [size * mean_bag_size(parameters, t) for t in tables]
    looked_up = sum(counts)
    backend, narrow = training.embedding_backend, model.embedding_precision != "fp32"
    kind = OPTIMIZERS[training.optimizer]
    sorts = not kind.adds or place == "gpu" or narrow

    def item(name: str, shape: str, count: float) -> MemoryItem:
        shape = f"{round(looked_up):,} x {shape}"
        return MemoryItem(f"{name}{whose}", shape, int(count), place, EMBEDDINGS)

    if backend == "torch" and narrow:
        # one table at a time: its rows or bags' gradients widened, and random words of 8 bytes
        row = dim * (2 * FLOAT_BYTES + WORD_TEMPORARIES * INDEX_BYTES)
        yield item("one table's widened rows and random words", str(dim), max(counts) * row)
        merged = dim * FLOAT_BYTES + INDEX_BYTES
        yield item("sparse embedding gradients", str(dim), looked_up * merged)
    elif backend == "torch":
        row = dim * FLOAT_BYTES + INDEX_BYTES
        yield item("sparse embedding gradients", str(dim), looked_up * row)
        if (copies := kind.table_copies) > 0:
            yield item("temporaries of one table's update", str(dim), copies * max(counts) * row)
    elif place == "gpu" and backend != "fbgemm":
        # a tile of 4096 numbers leaves at most two rows over, an eighth above that
        rows = 2.25 * looked_up / max(8, min(64, 4096 // dim))
        needed = looked_up * SORTED_LOOKUP_BYTES + rows * dim * FLOAT_BYTES
        yield item("sorted lookups", "keys, order, sums", needed)
    elif sorts or backend == "fbgemm":
        yield item("sorted lookups", "2", looked_up * 2 * INDEX_BYTES)


def _workspace(parameters: Parameters, made_anew: int, gpu: bool) -> Iterator[MemoryItem]:
    """What libraries and allocators take beside tensors, as far as it is known."""
    if parameters.model.init == "facebook":
        largest = max(parameters.model.table_rows) * parameters.model.embedding_dim
        count = min(INITIAL_CHUNK, largest)
        yield MemoryItem("drawing weights", f"{count:,}", 20 * count, "host", INITIAL)
    if gpu:
        yield MemoryItem("cuBLAS workspace", "", CUBLAS_BYTES, "gpu")
    compiled = parameters.training.embedding_backend in ("fused", "auto")
    libraries = LIBRARIES_BYTES + (NUMBA_BYTES if compiled else 0)
    yield MemoryItem("libraries, once they have run", "", libraries, "host")
    share = f"{ALLOCATOR_SHARE:.0%} of {format_bytes(made_anew)}"
    size = int(ALLOCATOR_SHARE * made_anew)
    yield MemoryItem("freed pieces in the C library's heap", share, size, "host")


def require_memory(parameters: Parameters, device: torch.device) -> None:
    """Refuse a run that cannot fit, with the forecast as the reason."""
    import torch

    gpu = device.type == "cuda"
    items = forecast_memory(parameters, gpu)
    source = f"{parameters.source}: " if parameters.source else ""
    for place, where in (("gpu", device), ("host", torch.device("cpu"))):
        needed = total_bytes(items, place)
        available = available_memory(where) if needed else None
        if available is not None and needed > available:
            raise InputError(
                f"{source}model.table_rows and training.batch_size ask for {format_bytes(needed)} "
                f"of {'GPU memory' if place == 'gpu' else 'memory'}, but "
                f"{format_bytes(available)} are available, {format_bytes(needed - available)} too "
                f"few; {advice(parameters, place, available, gpu)}:\n"
                + _listed([item for item in items if item.place == place])
            )


def _listed(items: list[MemoryItem]) -> str:
    """Largest first, at most twelve lines; what is left out is summed."""
    ordered = sorted(items, key=lambda item: -item.bytes)
    lines, rest = ordered[:12], ordered[12:]
    if rest:
        left_out = sum(item.bytes for item in rest)
        lines.append(MemoryItem(f"{len(rest)} smaller items", "", left_out))
    return "\n".join(
        f"  {line.name:<34}{line.shape:>24}{format_bytes(line.bytes):>12}" for line in lines
    )


# What would fit, for a run that does not.

MOST_SAMPLES = 1 << 28
"""A batch beyond which no search for the largest goes."""


def largest_batch(parameters: Parameters, place: str, limit: int, gpu: bool) -> int | None:
    """The largest ``training.batch_size`` that fits; None if not even one sample does."""

    def needed(size: int) -> int:
        changed = parameters.with_training(batch_size=size)
        return total_bytes(forecast_memory(changed, gpu), place)

    return _largest(needed, limit, MOST_SAMPLES)


def largest_rows(parameters: Parameters, place: str, limit: int, gpu: bool) -> int | None:
    """Rows of all tables together that fit when all are scaled alike; None if none do."""
    every = sum(parameters.model.table_rows)

    def needed(total: int) -> int:
        changed = _scaled(parameters, total / every)
        return total_bytes(forecast_memory(changed, gpu), place)

    row_bytes = parameters.model.row_bytes
    most = max(every, limit // row_bytes + len(parameters.model.table_rows))
    found = _largest(needed, limit, most)
    return None if found is None else sum(_scaled(parameters, found / every).model.table_rows)


def largest_on_gpu(parameters: Parameters, limit: int) -> int | None:
    """The most of ``training.embeddings_on_gpu_bytes`` that fits on a GPU of ``limit`` bytes."""
    sums = [0]
    for rows in sorted(parameters.model.table_rows):
        sums.append(sums[-1] + rows * parameters.model.row_bytes)

    def needed(count: int) -> int:
        changed = parameters.with_training(embeddings_on_gpu_bytes=sums[count - 1])
        return total_bytes(forecast_memory(changed, True), "gpu")

    found = _largest(needed, limit, len(sums))
    return None if found is None else sums[found - 1]


def _largest(needed: Callable[[int], int], limit: int, most: int) -> int | None:
    """The largest number from 1 to ``most`` whose need, which grows with it, is within limit;
    None if that of 1 is not."""
    return bisect.bisect_right(range(1, most + 1), limit, key=needed) or None


def advice(parameters: Parameters, place: str, limit: int, gpu: bool) -> str:
    """What would fit, for a run that does not: a clause without a stop."""
    batch = largest_batch(parameters, place, limit, gpu)
    rows = largest_rows(parameters, place, limit, gpu)
    every = sum(parameters.model.table_rows)
    said = [
        f"training.batch_size: {batch} would fit" if batch else "no training.batch_size would fit",
        f"tables of {rows:,} rows in all would fit ({rows / every:.3g} of these {every:,})"
        if rows
        else "no table would fit beside this batch",
    ]
    if place == "gpu":
        most = largest_on_gpu(parameters, limit)
        if most is not None:
            split = forecast_memory(parameters.with_training(embeddings_on_gpu_bytes=most), True)
            said.append(
                f"training.embeddings_on_gpu_bytes: {most} would fit, with "
                f"{format_bytes(total_bytes(split, 'host'))} in host memory"
            )
    return "; ".join(said)


def _scaled(parameters: Parameters, factor: float) -> Parameters:
    rows = tuple(max(1, int(count * factor)) for count in parameters.model.table_rows)
    model = dataclasses.replace(parameters.model, table_rows=rows)
    return dataclasses.replace(parameters, model=model)
