"""What the machine can do at best, measured on the spot: the roofline's ceilings.

On the run's device, with the run's threads, at the run's own shapes: matrix products in
every precision, bandwidth of streaming and of random rows, the cost of starting an
operator or a kernel, of copying to and from a GPU. Each figure is the best of several
tries in turns with the others, since what disturbs a measurement only ever slows it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from dlrm_core.base.machine import available_memory, cpu_flags
from dlrm_core.base.text import format_bytes
from dlrm_core.config import Parameters, mean_bag_size
from dlrm_core.precision import CPU_FLAGS, DTYPES, GPU_CAPABILITY
from dlrm_kernels.dense import parts_of, why_not_fused
from dlrm_kernels.tiles.machine import cpu_caches
from dlrm_workbook.ground.turns import CPU, Action, best_times_ms, threads_of, waited_ns

if TYPE_CHECKING:
    from dlrm_kernels.tiles.layout import Engine

PRECISIONS = ("fp32", "fp32_onednn", "tf32", "bf16", "fp16")
"""fp32_onednn and tf32 take and give fp32, and are free to round inside."""

TILE_PARTS = {"bf16_tiles": 1, "fp32_bf16x2": 2, "fp32_bf16x3": 3}
"""Products of :mod:`dlrm_kernels.tiles` to the bf16 numbers an operand's entry is made of."""

MEMORY_SHARE = 0.8
"""No measurement allocates more than this share of what is available."""

CHECKED_ROWS = 64
"""Rows (or products of a batch) of a result that are compared with float64."""

GEMM_BUDGET_S = 2.5
MEMORY_BUDGET_S = 1.2
"""Seconds of timing; making the arrays comes on top, about half a second."""

STREAM_BYTES = (32 << 20, 256 << 20)
"""Least and most of each of the three arrays that are to lie in memory."""

STREAM_ARRAYS = {"read": 1, "copy": 2, "triad": 3}
"""Arrays that cross the memory bus, by STREAM's count (no write-allocate)."""

TABLE_BYTES = {"cpu": 1 << 30, "cuda": 64 << 30}
"""Largest table that is gathered from: a larger one takes long to fill and is no slower."""

GATHER_LOOKUPS = 1 << 16
"""Least number of rows gathered in a call, so that its start does not count."""

INDEX_SETS = 4
"""Random rows are drawn anew for successive calls, or the last call's would be in cache."""

COPY_BYTES = 64 << 20
"""Copied in one call between host and device."""

# The matrix products of a model, one by one, in every precision that the device has.


@dataclass(frozen=True)
class Product:
    """``batch`` products (m, k) x (k, n) of one layer of a part of the model."""

    part: str
    layer: int
    phase: str
    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def shape(self) -> tuple[str, int, int, int, int]:
        """What the time depends on: products of one shape are timed once.

        A phase has its own layout of the operands in memory, and forward adds a bias.
        """
        return (self.phase, self.m, self.n, self.k, self.batch)

    @property
    def values(self) -> int:
        """Numbers in both operands and the result."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)


def model_products(parameters: Parameters) -> list[Product]:
    """All products of one iteration; the interaction's backward stands for two of its shape."""
    model, size = parameters.model, parameters.training.batch_size
    found = []
    for part, widths in (("bottom_mlp", model.bottom_widths), ("top_mlp", model.top_widths)):
        for layer, (n, m) in enumerate(itertools.pairwise(widths)):
            found.append(Product(part, layer, "forward", size, m, n))
            if part != "bottom_mlp" or layer > 0:  # nobody asks for the dense features' gradient
                found.append(Product(part, layer, "backward_input", size, n, m))
            found.append(Product(part, layer, "backward_weight", m, n, size))
    found += [
        Product("interaction", work.layer, work.product, work.m, work.n, work.k, work.batch)
        for work in model.interaction_kind.products(size)
    ]
    return found


def tile_precision(parameters: Parameters, device: torch.device) -> str | None:
    """Name of the tile kernels' products, where the run's dense part multiplies by them."""
    training, interaction = parameters.training, parameters.model.interaction_kind
    if training.dense_backend != "fused" or why_not_fused(training, device, interaction):
        return None
    names = {parts: name for name, parts in TILE_PARTS.items()}
    return names[parts_of(training)]


def native_precisions(device: torch.device) -> tuple[list[str], dict[str, str]]:
    """The precisions that the device computes without emulation; and why not the others."""
    reasons = _missing_on_gpu(device) if device.type == "cuda" else _missing_on_cpu()
    return [name for name in PRECISIONS if name not in reasons], reasons


def _missing_on_cpu() -> dict[str, str]:
    reasons = {"tf32": "only NVIDIA GPUs have it"}
    if _onednn_switch() is None:
        reasons["fp32_onednn"] = f"torch {torch.__version__} cannot choose the library"
    for precision, names in CPU_FLAGS.items():
        if not cpu_flags() & set(names):
            reasons[precision] = f"this CPU would emulate it (none of {', '.join(names)})"
    return reasons


def _missing_on_gpu(device: torch.device) -> dict[str, str]:
    have = torch.cuda.get_device_capability(device)
    text = "compute capability {}.{} has no tensor cores for it, {}.{} has"
    return {"fp32_onednn": "only CPUs have it"} | {
        precision: text.format(*have, *least)
        for precision, least in GPU_CAPABILITY.items()
        if have < least
    }


@contextlib.contextmanager
def precision_setting(precision: str, device: torch.device) -> Iterator[None]:
    """torch's settings under which an fp32 product is one of ``precision``, for a while."""
    value: bool | str
    if device.type == "cuda":
        # the older of torch's two switches, as precision.set_tf32: mixing them is an error
        place, name, value = torch.backends.cuda.matmul, "allow_tf32", precision == "tf32"
    else:
        # torch's word for "may round inside"; on a CPU without such units oneDNN does not
        place, name = _onednn_switch(), "fp32_precision"
        value = "bf16" if precision == "fp32_onednn" else "none"
    if place is None:
        yield
        return
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def time_products(
    products: Sequence[Product], precisions: Sequence[str], device: torch.device, budget_s: float
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Time products alone, each in every precision, by the library that torch calls.

    Returns:
        rows ``part``, ``layer``, ``phase``, ``m``, ``n``, ``k``, ``batch``, ``precision``,
        ``ms`` (best), ``gflops`` (10^9 operations a second), ``relative_error``
        (||C - C64|| / ||C64|| against float64, operands' rounding included); and
        "precision, part, layer, phase" to the reason of what could not be timed.
    """
    chosen = {product.shape: product for product in reversed(products)}
    room = available_memory(device)
    operands = _Operands(device)
    actions: dict[tuple[Any, str], Action] = {}
    failed: dict[tuple[Any, str], str] = {}
    for precision in precisions:
        for shape, product in chosen.items():
            if precision in TILE_PARTS and product.batch > 1:
                continue  # these kernels multiply no batches: their interaction is of vectors
            need = 4 * product.values * 2  # fp32 and the copy in another precision
            if room is not None and need + operands.bytes > MEMORY_SHARE * room:
                failed[shape, precision] = (
                    f"needs {format_bytes(need)} beside {format_bytes(operands.bytes)} of other "
                    f"products, of {format_bytes(room)} available"
                )
                continue
            setting = functools.partial(precision_setting, precision, device)
            actions[shape, precision] = Action(operands.call(product, precision), setting)
    times, late = best_times_ms(actions, device, budget_s)
    failed |= late
    errors = {
        (shape, precision): _relative_error(chosen[shape], actions[shape, precision], operands)
        for shape, precision in times
    }
    rows, reasons = [], {}
    for product, precision in itertools.product(products, precisions):
        key = product.shape, precision
        if key in times:
            speed = {"ms": times[key], "gflops": product.flops / times[key] / 1e6}
            facts = {"precision": precision} | speed | {"relative_error": errors[key]}
            rows.append(asdict(product) | facts)
        elif key in failed:
            name = f"{precision}, {product.part} layer {product.layer}, {product.phase}"
            reasons[name] = failed[key]
    return rows, reasons


def product_calls(
    products: Sequence[Product], precision: str, device: torch.device
) -> dict[tuple[str, int, int, int, int], Callable[[], object]]:
    """One call for each shape of product in a precision, its operands made beforehand."""
    operands, inside = _Operands(device), precision_setting(precision, device)
    chosen = {product.shape: product for product in products}
    calls = {shape: operands.call(found, precision) for shape, found in chosen.items()}
    return {shape: inside(torch.no_grad()(call)) for shape, call in calls.items()}


class _Operands:
    """Random matrices, made once a shape and precision, and the calls on them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0
        self._random = torch.Generator(device).manual_seed(0)
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}
        self._engine: Engine | None = None

    def pair(self, product: Product, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Left (m, k) and right (k, n), laid out in memory as the step has them."""
        m, n, k, batch = product.m, product.n, product.k, product.batch
        if batch > 1:
            left = self._matrix("left", (batch, m, k), dtype)
            if product.phase == "forward" and m == n:  # features by their own transpose
                return left, left.transpose(1, 2)
            return left, self._matrix("right", (batch, k, n), dtype)
        if product.phase == "forward":  # x W^T
            return self._matrix("left", (m, k), dtype), self._matrix("right", (n, k), dtype).t()
        if product.phase == "backward_weight":  # dy^T x
            return self._matrix("left", (k, m), dtype).t(), self._matrix("right", (k, n), dtype)
        return self._matrix("left", (m, k), dtype), self._matrix("right", (k, n), dtype)

    def call(self, product: Product, precision: str) -> Callable[[], torch.Tensor]:
        """The operation that the dense part would run for this product."""
        if precision in TILE_PARTS:
            return self._tile_call(product, TILE_PARTS[precision])
        dtype = DTYPES.get(precision, torch.float32)
        left, right = self.pair(product, dtype)
        if product.batch > 1:
            return lambda: torch.bmm(left, right)
        if product.phase == "forward":
            bias = torch.zeros(product.n, dtype=dtype, device=self.device)
            return lambda: torch.addmm(bias, left, right)
        return lambda: torch.mm(left, right)

    def _tile_call(self, product: Product, parts: int) -> Callable[[], torch.Tensor]:
        from dlrm_kernels.tiles.layout import Engine, Result, Tiled, blocks_of

        engine = self._engine = self._engine or Engine()
        m, n, k = (blocks_of(size) for size in (product.m, product.n, product.k))
        left, right = self.pair(product, torch.float32)
        tiled_left, tiled_right = Tiled.empty(m, k, parts), Tiled.empty(n, k, parts)
        engine.pack(left.contiguous(), parts, Result(rows=tiled_left))
        engine.pack(right.contiguous(), parts, Result(columns=tiled_right))
        self.bytes += 2 * (tiled_left.memory.numel() + tiled_right.memory.numel())
        target = torch.empty(product.m, product.n)
        result = Result(target=target)

        def call() -> torch.Tensor:
            engine.product(tiled_left, tiled_right, (product.m, product.n), result)
            return target

        return call

    def _matrix(self, side: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        key = (side, shape, dtype)
        if key not in self._made:
            if dtype == torch.float32:
                made = torch.randn(shape, generator=self._random, device=self.device)
            else:  # the same numbers, rounded
                made = self._matrix(side, shape, torch.float32).to(dtype)
            self._made[key] = made
            self.bytes += made.numel() * made.element_size()
        return self._made[key]


def _relative_error(product: Product, action: Action, operands: _Operands) -> float:
    """||C - C64|| / ||C64|| over the first rows of the result; both norms in float64."""
    left, right = operands.pair(product, torch.float32)
    left = left[:CHECKED_ROWS]
    if product.batch > 1:
        right = right[:CHECKED_ROWS]
    exact = left.double() @ right.double()
    with action.setting(), torch.no_grad():
        result = action.call()
    assert isinstance(result, torch.Tensor)
    return float((result[:CHECKED_ROWS].double() - exact).norm() / exact.norm())


def _onednn_switch() -> Any:
    """torch's settings of oneDNN's products, where they can be changed (torch 2.9)."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    return matmul if hasattr(matmul, "fp32_precision") else None


# All ceilings of a run's device.


@dataclass(frozen=True)
class Shapes:
    """The shapes at which the ceilings of a machine are measured.

    Attributes:
        products: the matrix products of an iteration.
        threads: CPU threads of one operator; None leaves torch's own choice.
        row_values: fp32 numbers in the bytes of an embedding row; 0 for a program without
            embeddings.
        table_rows: rows of the largest table.
        bag: rows that one lookup adds up.
        bags: lookups of a call.
        tiles: precision of the tile kernels, where the program multiplies with them.
    """

    products: Sequence[Product]
    threads: int | None = None
    row_values: int = 0
    table_rows: int = 0
    bag: int = 1
    bags: int = 1
    tiles: str | None = None


def model_shapes(parameters: Parameters, device: torch.device) -> Shapes:
    tables = parameters.model.table_rows
    rows = max(tables)
    return Shapes(
        model_products(parameters),
        parameters.training.threads,
        max(1, parameters.model.row_bytes // 4),
        rows,
        max(1, round(mean_bag_size(parameters, tables.index(rows)))),
        parameters.training.batch_size,
        tile_precision(parameters, device),
    )


def measure_ceilings(shapes: Shapes, device: torch.device) -> tuple[dict[str, Any], dict[str, str]]:
    """Measure everything; about six seconds at the experiment's shape, less for small ones.

    Returns:
        ``device``, ``threads``, ``seconds`` (that measuring took), ``run_queue_share`` (of
        that time in which the measuring thread waited for a core: above a few percent the
        machine was busy and the ceilings are low), ``gemm`` (rows of :func:`time_products`),
        ``stream``, ``gather``, ``dispatch_us``, ``last_level_cache_bytes``; on a GPU
        ``launch_us``, ``kernel_us`` and ``copy``; and what could not be measured, name to reason.
    """
    missing: dict[str, str] = {}
    found: dict[str, Any] = {"device": str(device)}
    with threads_of(shapes.threads), torch.no_grad():
        began, waited = time.perf_counter(), waited_ns()
        found["threads"] = torch.get_num_threads()
        precisions, emulated = native_precisions(device)
        if shapes.tiles is not None:
            precisions.append(shapes.tiles)
        found["gemm"], late = time_products(shapes.products, precisions, device, GEMM_BUDGET_S)
        missing |= {f"gemm.{name}": why for name, why in (emulated | late).items()}
        found["last_level_cache_bytes"] = last_level_cache(device)
        if found["last_level_cache_bytes"] is None:
            missing["last_level_cache_bytes"] = "the system does not say"
        found["stream"], found["gather"], late = _memory(shapes, device)
        missing |= late
        found["dispatch_us"] = dispatch_us()
        if device.type == "cuda":
            found |= _launches(device)
            found["copy"] = _copies(device)
            torch.cuda.empty_cache()
        found["seconds"] = time.perf_counter() - began
        now = waited_ns()
        if waited is not None and now is not None:
            found["run_queue_share"] = (now - waited) / 1e9 / found["seconds"]
    return found, {f"ceilings.{name}": why for name, why in missing.items()}


def last_level_cache(device: torch.device) -> int | None:
    """Bytes of the largest cache that the system reports; virtual machines share theirs."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    levels = cpu_caches()
    return levels[max(levels)] if levels else None


def dispatch_us() -> float:
    """Microseconds of the host for one tiny torch operator, called from Python."""
    one = torch.ones(1)
    best, _ = best_times_ms({"add": Action(lambda: one.add_(1.0))}, CPU, 0.1)
    return 1e3 * best["add"]


def stream_actions(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> dict[str, Action]:
    """Read, copy and triad (McCalpin's STREAM) over float32 arrays (n,)."""
    return {
        "read": Action(lambda: torch.dot(a, a)),
        "copy": Action(lambda: b.copy_(a)),
        "triad": Action(lambda: torch.add(b, c, alpha=3.0, out=a)),
    }


def gather_action(table: torch.Tensor, bags: int, bag: int) -> Action:
    """Sum ``bag`` random rows of a table (rows, d) into each of ``bags`` results.

    The access of a pooled embedding: embedding_bag, other rows at every call.
    """
    device = table.device
    random = torch.Generator(device).manual_seed(0)
    sets = [
        torch.randint(table.shape[0], (bags * bag,), generator=random, device=device)
        for _ in range(INDEX_SETS)
    ]
    turns = itertools.cycle(sets)
    offsets = torch.arange(bags, device=device) * bag
    lookup = functools.partial(torch.nn.functional.embedding_bag, mode="sum")
    return Action(lambda: lookup(next(turns), table, offsets))


def _memory(
    shapes: Shapes, device: torch.device
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, str]]:
    """Rows of ``stream`` and of ``gather``, in cache and in memory, and what is missing."""
    row_values, bag = shapes.row_values, shapes.bag
    row_bytes = 4 * row_values
    cached = _cached_bytes(device)
    low, high = STREAM_BYTES
    outer = min(max(4 * (last_level_cache(device) or 0) // 3, low), high)
    table = min(shapes.table_rows * row_bytes, TABLE_BYTES[device.type])
    bags = max(shapes.bags, -(-GATHER_LOOKUPS // bag))
    room = available_memory(device)
    lookups = 8 * INDEX_SETS * bags * bag + bags * row_bytes if table else 0
    need = max(3 * outer, table) + 3 * cached + lookups
    if room is not None and need > MEMORY_SHARE * room:
        why = f"needs {format_bytes(need)}, of {format_bytes(room)} available"
        return [], [], {"stream": why, "gather": why}
    # one block for the streams and the table: a page's first touch costs more than reading it
    block = torch.empty(max(3 * outer, table) // 4, device=device).fill_(1.0)
    inner = torch.ones(3 * cached // 4, device=device)
    actions: dict[tuple[str, int], Action] = {}
    for size, memory in ((cached, inner), (outer, block)):
        count = size // 4
        thirds = (memory[i * count : (i + 1) * count] for i in range(3))
        actions |= {(kind, size): made for kind, made in stream_actions(*thirds).items()}
    # after the streams, which have driven the table out of the caches
    ends = {min(table, max(cached, row_bytes)), table} if table else set()
    sizes = sorted({size // row_bytes for size in ends})
    for rows in sizes:
        view = block[: rows * row_values].view(rows, row_values)
        actions["gather", rows] = gather_action(view, bags, bag)
    times, late = best_times_ms(actions, device, MEMORY_BUDGET_S)
    missing = {f"{kind} of {size}": why for (kind, size), why in late.items()}
    stream = [
        {"level": level, "bytes": size}
        | {
            f"{kind}_gb_per_s": arrays * size / times[kind, size] / 1e6
            for kind, arrays in STREAM_ARRAYS.items()
            if (kind, size) in times
        }
        for level, size in (("cache", cached), ("memory", outer))
    ]
    gather = [
        {
            "row_bytes": row_bytes,
            "table_bytes": rows * row_bytes,
            "gb_per_s": bags * bag * row_bytes / times["gather", rows] / 1e6,
        }
        for rows in sizes
        if ("gather", rows) in times
    ]
    return stream, gather, missing


def _cached_bytes(device: torch.device) -> int:
    """Bytes of an array of which three fit well into the caches next to the cores."""
    if device.type == "cuda":
        near = (last_level_cache(device) or (4 << 20)) // 2
    else:
        near = cpu_caches().get(2, 1 << 20) * torch.get_num_threads() // 2
    return near // 3 // 4096 * 4096


def _launches(device: torch.device) -> dict[str, float]:
    """Cost of small kernels, in microseconds.

    ``launch_us``: of the host, for one operator that is one kernel; ``kernel_us``: of the
    device, from one queued kernel to the next, the least that any kernel takes.
    """
    one = torch.ones(1, device=device)
    large = torch.ones(4096, 4096, device=device)
    count, host, kernel = 200, [], []
    for _ in range(10):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # work that keeps the device busy while the small kernels queue up behind it
        for _ in range(4):
            large @ large
        first.record()
        began = time.perf_counter()
        for _ in range(count):
            one.add_(1.0)
        host.append(1e6 * (time.perf_counter() - began) / count)
        last.record()
        last.synchronize()
        kernel.append(1e3 * first.elapsed_time(last) / count)
    return {"launch_us": min(host), "kernel_us": min(kernel)}


def _copies(device: torch.device) -> list[dict[str, Any]]:
    """Bandwidth between host and device, both ways, from pageable and from pinned memory."""
    there = torch.ones(COPY_BYTES // 4, device=device)
    actions: dict[tuple[str, str], Action] = {}
    for kind in ("pageable", "pinned"):
        here = torch.ones(COPY_BYTES // 4, pin_memory=kind == "pinned")
        for direction, target, source in (("h2d", there, here), ("d2h", here, there)):
            copy = functools.partial(target.copy_, source, non_blocking=True)
            actions[kind, direction] = Action(copy)
    times, _ = best_times_ms(actions, device, 1.0)
    return [
        {"kind": kind, "direction": direction}
        | {"bytes": COPY_BYTES, "gb_per_s": COPY_BYTES / ms / 1e6}
        for (kind, direction), ms in times.items()
    ]
