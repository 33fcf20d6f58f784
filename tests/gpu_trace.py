"""A chrome trace as torch.profiler writes it on a CUDA machine, made by hand.

One iteration of 100 us on the host::

    host    |0 iteration                                             100|
            |2 data 18|  |20 bottom_mlp forward      58|  |60 loss     98|
                           addmm 22..40, launch 25..30      sync 62..96
    stream 7                     [32 gemm 52]   [56 copy 66] [70 kernel 95]
    stream 9                          [45 side 60]

so the device is busy 32..66 and 70..95 (59 us) and idle for the other 41 us.
"""

import json
from pathlib import Path
from typing import Any

from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.trace import read_trace

BASE_US = 4387468570235.702
"""Time stamps are microseconds since boot, as large as on a real machine."""


def span(
    category: str, name: str, start: float, end: float, tid: Any = 10, **args: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0 if category.startswith(("kernel", "gpu_")) else 1,
        "tid": tid,
        "ts": BASE_US + start,
        "dur": end - start,
        "args": args,
    }


def on_gpu(category: str, name: str, start: float, end: float, stream: int, **args: Any) -> Any:
    return span(category, name, start, end, tid=stream, device=0, stream=stream, **args)


def mark(name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
    return span("user_annotation", name, start, end, **args)


def operator(name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
    return span("cpu_op", name, start, end, **args)


def call(name: str, start: float, end: float, number: int | None = None) -> dict[str, Any]:
    """A call of CUDA on the host; ``number`` joins it to what it launches."""
    joined = {} if number is None else {"correlation": number}
    return span("cuda_runtime", name, start, end, **joined)


def kernel(name: str, start: float, end: float, number: int, stream: int = 7, **args: Any) -> Any:
    return on_gpu("kernel", name, start, end, stream, correlation=number, **args)


def launched(
    number: int, launch: tuple[float, float], name: str, run: tuple[float, float], **args: Any
) -> list[dict[str, Any]]:
    """A launch from and to these times, and the kernel of that name that it runs."""
    return [call("cudaLaunchKernel", *launch, number), kernel(name, *run, number, **args)]


def events() -> list[dict[str, Any]]:
    addmm = [[8], [4, 16], [16, 8], [], []]
    return [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 10, "args": {"name": "python"}},
        span("user_annotation", "dlrm::iteration", 0, 100),
        span("user_annotation", "dlrm::data::forward", 2, 18),
        span("user_annotation", "dlrm::bottom_mlp::forward", 20, 58),
        span("cpu_op", "aten::addmm", 22, 40, **{"External id": 5, "Input Dims": addmm}),
        span("cuda_runtime", "cudaLaunchKernel", 25, 30, correlation=100, **{"External id": 5}),
        span("cuda_driver", "cuLaunchKernelEx", 33, 35, correlation=101, **{"External id": 5}),
        span("cpu_op", "aten::copy_", 42, 57, **{"External id": 6}),
        span("cuda_runtime", "cudaMemcpyAsync", 43, 50, correlation=102, **{"External id": 6}),
        span("user_annotation", "dlrm::loss::forward", 60, 98),
        span("cuda_runtime", "cudaLaunchKernel", 60.5, 61, correlation=103),
        span("cuda_runtime", "cudaDeviceSynchronize", 62, 96, correlation=104),
        span("overhead", "Activity Buffer Request", 20, 24, tid=999),
        on_gpu("kernel", "gemm", 32, 52, 7, correlation=100, **{"External id": 5}),
        on_gpu("kernel", "side", 45, 60, 9, correlation=101, **{"External id": 5}),
        on_gpu("gpu_memcpy", "Memcpy DtoH", 56, 66, 7, correlation=102, bytes=4096),
        on_gpu("kernel", "reduce", 70, 95, 7, correlation=103),
        # What repeats the above and must not be counted again:
        on_gpu("gpu_user_annotation", "dlrm::bottom_mlp::forward", 32, 66, 7),
        on_gpu("cuda_sync", "Stream Sync", 62, 96, 7, correlation=104),
        {"ph": "s", "id": 100, "pid": 1, "tid": 10, "ts": BASE_US + 25, "cat": "ac2g",
         "name": "ac2g"},
        {"ph": "f", "id": 100, "pid": 0, "tid": 7, "ts": BASE_US + 32, "cat": "ac2g",
         "name": "ac2g", "bp": "e"},
    ]  # fmt: skip


def write(path: Path, traced: list[dict[str, Any]]) -> Path:
    document = {"schemaVersion": 1, "distributedInfo": {"rank": 3}, "traceEvents": traced}
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def read(folder: Path, traced: list[dict[str, Any]], *parts: dict[str, str]) -> Profile:
    """The profile of a trace of these events, which is written into ``folder``."""
    return read_trace(write(folder / "trace.json", traced), *parts)


def host_events() -> list[dict[str, Any]]:
    """What is left of :func:`events` where no GPU is recorded."""
    return [event for event in events() if event.get("cat") not in ("kernel", "gpu_memcpy")]
