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

BASE_US = 4387468570235.702
"""Time stamps are microseconds since boot, as large as on a real machine."""


def _span(
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


def _on_gpu(category: str, name: str, start: float, end: float, stream: int, **args: Any) -> Any:
    return _span(category, name, start, end, tid=stream, device=0, stream=stream, **args)


def events() -> list[dict[str, Any]]:
    addmm = [[8], [4, 16], [16, 8], [], []]
    return [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 10, "args": {"name": "python"}},
        _span("user_annotation", "dlrm::iteration", 0, 100),
        _span("user_annotation", "dlrm::data::forward", 2, 18),
        _span("user_annotation", "dlrm::bottom_mlp::forward", 20, 58),
        _span("cpu_op", "aten::addmm", 22, 40, **{"External id": 5, "Input Dims": addmm}),
        _span("cuda_runtime", "cudaLaunchKernel", 25, 30, correlation=100, **{"External id": 5}),
        _span("cuda_driver", "cuLaunchKernelEx", 33, 35, correlation=101, **{"External id": 5}),
        _span("cpu_op", "aten::copy_", 42, 57, **{"External id": 6}),
        _span("cuda_runtime", "cudaMemcpyAsync", 43, 50, correlation=102, **{"External id": 6}),
        _span("user_annotation", "dlrm::loss::forward", 60, 98),
        _span("cuda_runtime", "cudaLaunchKernel", 60.5, 61, correlation=103),
        _span("cuda_runtime", "cudaDeviceSynchronize", 62, 96, correlation=104),
        _span("overhead", "Activity Buffer Request", 20, 24, tid=999),
        _on_gpu("kernel", "gemm", 32, 52, 7, correlation=100, **{"External id": 5}),
        _on_gpu("kernel", "side", 45, 60, 9, correlation=101, **{"External id": 5}),
        _on_gpu("gpu_memcpy", "Memcpy DtoH", 56, 66, 7, correlation=102, bytes=4096),
        _on_gpu("kernel", "reduce", 70, 95, 7, correlation=103),
        # What repeats the above and must not be counted again:
        _on_gpu("gpu_user_annotation", "dlrm::bottom_mlp::forward", 32, 66, 7),
        _on_gpu("cuda_sync", "Stream Sync", 62, 96, 7, correlation=104),
        {"ph": "s", "id": 100, "pid": 1, "tid": 10, "ts": BASE_US + 25, "cat": "ac2g",
         "name": "ac2g"},
        {"ph": "f", "id": 100, "pid": 0, "tid": 7, "ts": BASE_US + 32, "cat": "ac2g",
         "name": "ac2g", "bp": "e"},
    ]  # fmt: skip


def write(path: Path, traced: list[dict[str, Any]]) -> Path:
    document = {"schemaVersion": 1, "distributedInfo": {"rank": 3}, "traceEvents": traced}
    path.write_text(json.dumps(document), encoding="utf-8")
    return path
