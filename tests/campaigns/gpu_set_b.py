"""Set B of faults: kinds that no rule was written for, with the answers an expert would accept.

Kinds and answers were decided before any rule had seen one of them, by an author who had not
read the rules. What each set of kinds showed when it was first run is in ``benchmarks/results``:
``gpu_faults_set_b.json``. Kinds of a set that rules have since been mended by are held out no
more; ``gpu_set_c.py`` is the set to run then, once.
"""

from __future__ import annotations

from database_edits import DatabaseCopy
from gpu_kinds import (
    DLRM,
    ELSEWHERE,
    IDLE,
    OPEN_ENDED,
    Draw,
    Fault,
    add_copy,
    add_loading,
    add_tiny_kernels,
    each_step,
    kernels,
)
from trace_edits import Insertion, Trace

LOOKUP = (
    "void at::native::(anonymous namespace)::EmbeddingBag_updateOutputKernel_sum_mean<float, "
    "long>(long const*, long const*, float const*, float*, long*, long, long, long, long, "
    "at::native::(anonymous namespace)::EmbeddingBagMode, long*, float const*, long, long)"
)
OPTIMIZER = r"^Optimizer\.step|## optimizer"


def starved_loader(trace: Trace, draw: Draw, loss: float) -> str:
    """The loader's queue is empty in every k-th step, which then waits for its workers."""
    every = draw.choice([3, 4]) if len(trace.steps) > 6 else draw.choice([2, 3])
    slow = range(len(trace.steps))[draw.randrange(every) :: every]
    length = loss * len(trace.steps) / len(slow)
    for step in slow:
        add_loading(trace, step, length)
    return f"{len(slow)} of {len(trace.steps)} steps wait {length / 1e3:.1f} ms for their batch"


def time_sliced(trace: Trace, draw: Draw, loss: float) -> str:
    """Another process uses the GPU in turn: no stream begins anything in its time slices."""
    own = draw.uniform(1000.0, 4000.0)
    steps = len(trace.steps)
    busy = sum(float(trace.length[row]) for row in trace.device) / steps
    others = own * loss / min(busy, trace.step_us)
    trace.pauses = (own + others, others)
    return f"the GPU is another's for {others / 1e3:.1f} ms after each {own / 1e3:.1f} ms"


def throttled(trace: Trace, draw: Draw, loss: float) -> str:
    """The clocks drop in the middle: from some step on every kernel takes longer."""
    first = draw.choice([len(trace.steps) // 2, len(trace.steps) // 2 + 1])
    since = trace.steps[first][0]
    rows = [row for row in kernels(trace, r"^(?!nccl)") if trace.launch(row) >= since]
    own = sum(float(trace.length[row]) for row in rows)
    factor = 1.0 + loss * len(trace.steps) / own
    for row in rows:
        trace.length[row] *= factor
    return f"kernels take {factor:.1f} times as long from step {first} of {len(trace.steps)} on"


def table_by_table(trace: Trace, draw: Draw, loss: float) -> str:
    """The lookups of each table are a call of their own, for many small tables."""
    each = draw.uniform(12.0, 25.0)
    count = max(int(loss / each), 26)
    for points in each_step(trace, r"sparse_arch|EmbeddingBagCollection|dedup_ebc|ebc"):
        at = draw.choice(points)
        add_tiny_kernels(trace, at, count, each, ["aten::embedding_bag"], LOOKUP)
    return f"{count} embedding_bag calls per step, one small kernel each"


def optimizer_on_host(trace: Trace, draw: Draw, loss: float) -> str:
    """Gradients go to the host, which updates the parameters and sends them back."""
    there, count = draw.uniform(0.1, 0.15), draw.choice([3, 12, 40])
    for step in range(len(trace.steps)):
        at = (trace.within(OPTIMIZER, step) or trace.points(step)[-1:])[-1]
        add_copy(trace, at, "DtoH (Device -> Pinned)", there * loss, 22.0, waits=True)
        length = (1.0 - 2.0 * there) * loss / count
        names = ("aten::lerp_", "aten::mul_", "aten::addcmul_", "aten::addcdiv_")
        for _ in range(count):
            calls = [
                (length * (0.05 + 0.24 * place), length * 0.22, trace.operator(name))
                for place, name in enumerate(names)
            ]
            whole = (0.0, length - 1.0, trace.operator("aten::_fused_adam_"))
            trace.insert(Insertion(at, length, [whole, *calls]))
        add_copy(trace, at, "HtoD (Pinned -> Device)", there * loss, 22.0, waits=True)
    return f"the host updates {count} parameters per step in {loss / 1e3:.1f} ms with their copies"


def pinned_anew(trace: Trace, draw: Draw, loss: float) -> str:
    """Pages are pinned for each batch, and given back."""
    count = draw.choice([1, 3])
    for step in range(len(trace.steps)):
        at = (trace.within("copy_batch|load_batch", step) or trace.points(step))[0]
        for _ in range(count):
            taken, freed = 0.6 * loss / count, 0.4 * loss / count
            take = [
                (0.0, taken - 1.0, trace.operator("aten::pin_memory")),
                (1.0, taken - 3.0, trace.operator("aten::_pin_memory")),
                (2.0, taken - 5.0, trace.runtime_call("cudaHostAlloc")),
            ]
            give = [(1.0, OPEN_ENDED, trace.runtime_call("cudaFreeHost"))]
            trace.insert(Insertion(at, taken, take))
            trace.insert(Insertion(at, freed, give, drains=True))
    return f"cudaHostAlloc and cudaFreeHost {count} times per step, {loss / 1e3:.1f} ms in all"


def zeroed_gradients(trace: Trace, draw: Draw, loss: float) -> str:
    """A huge buffer is set to zero in each step: the dense gradient of large tables."""
    count = draw.choice([1, 2])
    for points in each_step(trace, "zero_grad"):
        for _ in range(count):
            number, at = trace.new_id(), draw.choice(points)
            work = trace.gpu_work("memset", "Memset (Device)", number)
            work["args"] |= {"bytes": int(loss / count * 1.6e6)}
            host = [
                (0.0, 20.0, trace.operator("aten::zero_")),
                (6.0, 8.0, trace.runtime_call("cudaMemsetAsync", number)),
            ]
            trace.insert(Insertion(at, 24.0, host, [(6.0, loss / count, work)]))
    return f"{count} memsets per step of {loss / count * 1.6e-3:.1f} GB each"


def longer_kernel(database: DatabaseCopy, draw: Draw, loss: float) -> str:
    """One kernel takes many times as long."""
    kernel = draw.choice(
        [name for name in database.kernels() if database.seconds(database.rows(name)) > 5e-4]
    )
    factor = database.stretch_kernel(kernel, loss)
    return f"{factor:.0f} times as long: {kernel}"


def slow_samples(database: DatabaseCopy, draw: Draw, loss: float) -> str:
    """Python that makes the samples takes long on the thread that steps."""
    rows = {name: database.rows(name) for name in ("__getitem__", "__next__", "fetch")}
    name = draw.choice([name for name, found in rows.items() if found])
    factor = database.stretch_function(name, loss)
    return f"{name} of the data path takes {factor:.0f} times as long"


FAULTS = {
    "starved_loader": Fault(
        starved_loader,
        ("meta", "resnet", "rank5*8", "bert*8"),
        (
            (r"data_generation|\bdata\b|batch|load", ""),
            ("irregular|every", ""),
            (IDLE, r"data|load|batch"),
        ),
        held_out=True,
        unless="small_batch|launch_bound|batch is too small",
    ),
    "time_sliced": Fault(
        time_sliced,
        ("meta", "resnet", "graphs"),
        ((r"other_process|another process|shared|time.slic|preempt", ""), (IDLE, "")),
        held_out=True,
        unless=ELSEWHERE,
    ),
    "throttled": Fault(
        throttled,
        ("meta", "resnet", "graphs"),
        ((r"irregular|throttl|clock|iterations (take|are)|slower|disturbed|later", ""),),
        held_out=True,
        unless=ELSEWHERE,
    ),
    "table_by_table": Fault(
        table_by_table,
        DLRM,
        ((r"launch|tiny|small kernel|dispatch", r"mbedding"),),
        held_out=True,
    ),
    "optimizer_on_host": Fault(
        optimizer_on_host,
        (*DLRM, "resnet"),
        ((IDLE, r"ptimi[sz]er|addcmul|addcdiv|[Aa]dam"), (r"optimi[sz]er", "")),
        held_out=True,
        unless=ELSEWHERE,
    ),
    "pinned_anew": Fault(
        pinned_anew,
        ("bert", "meta", "resnet", "rank0", "rank5*8"),
        (
            (r"alloc|pin(s|ned|ning)\b", ""),
            (r"idle|idles|data|batch|synchron|host|wait", r"HostAlloc|FreeHost|pin_memory"),
        ),
        held_out=True,
    ),
    "zeroed_gradients": Fault(
        zeroed_gradients,
        (*DLRM, "resnet"),
        ((r"heavy_copy|memset|memory set|zero|fill|dense_gradient", ""),),
        held_out=True,
    ),
    "longer_kernel": Fault(
        longer_kernel,
        ("h100-pc",),
        ((r"kernel|embedding|memory|ceiling|slow|stall|tensor|time", "{kernel}"),),
        held_out=True,
        unless=r"launch_bound|idle|copies",
    ),
    "slow_samples": Fault(
        slow_samples,
        ("h100-host", "cpu-python"),
        ((r"\bdata\b|data_generation|batch|sample|load", ""), (r"python|outside", r"\bdata\b")),
        held_out=True,
        unless="small_batch|batch is too small",
    ),
}
