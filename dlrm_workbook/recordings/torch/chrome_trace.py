"""What a chrome trace of torch.profiler holds, as tables of spans.

``ts`` and ``dur`` are microseconds with three decimals; here they are integer
nanoseconds from the first event on. The events are walked once; all else is on columns.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.errors import InputError
from dlrm_core.parts import SPAN_PREFIX

HOST_KINDS = {
    "cpu_op": "operator",
    "user_annotation": "annotation",
    "python_function": "python",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
}
"""Chrome trace category to context kind, for spans of CPU threads."""

DEVICE_KINDS = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
"""For spans of GPU streams. ``gpu_user_annotation`` repeats a range over its
kernels and ``cuda_sync`` a wait: counting them would count time twice."""

UTILITY = frozenset({"aten::is_leaf", "aten::output_nr", "aten::_version"})
"""Operators that ``key_averages`` leaves out; their time stays with the caller."""


@dataclass
class Events:
    """The events of one trace. Times are int ns from the first event on."""

    host: pd.DataFrame
    """start, end, duration, line (process/thread), name, kind, shapes, correlation, external."""
    device: pd.DataFrame
    """start, end, duration, line (GPU/stream), name, kind, correlation, external, bytes."""
    memory: pd.DataFrame
    """start, line, bytes (negative when freed), total (allocated after it), device."""
    names: dict[str, str]
    """Line to the name of the thread."""
    rank: int


def read_events(path: Path) -> Events:
    """The spans and memory events of a chrome trace.

    Raises:
        InputError: the file is missing, cut short, not JSON or no such trace.
    """
    with without_collection():
        document = load_json(path)
        events = document.get("traceEvents") if isinstance(document, dict) else document
        if not isinstance(events, list):
            raise InputError(f"{path} is no chrome trace: it has no list 'traceEvents'")
        distributed = document.get("distributedInfo") if isinstance(document, dict) else None
        try:
            host, device, memory, names = _sort_events(events)
            rank = int((distributed or {}).get("rank", 0))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(
                f"{path}: an event is not as torch.profiler writes it: {error!r}"
            ) from None
        del document, events
    if host.empty and device.empty:
        raise InputError(f"{path} holds no operator, range or kernel of torch.profiler")
    return Events(host, device, memory, names, rank)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pause Python's cycle collector: it made parsing 50,000 events ten times slower."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def load_json(path: Path) -> Any:
    """A JSON file, gzipped or not.

    Raises:
        InputError: it is missing, cut short or not JSON.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return json.loads(data)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (EOFError, zlib.error):
        raise InputError(f"{path} is cut short") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def _sort_events(
    events: list[dict[str, Any]],
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, dict[str, str]]:
    """Host spans, device spans, memory events (columns of ns) and names of threads."""
    host: list[tuple[Any, ...]] = []
    device: list[tuple[Any, ...]] = []
    memory: list[tuple[Any, ...]] = []
    names: dict[str, str] = {}
    none: dict[str, Any] = {}
    for event in events:
        phase = event.get("ph")
        if phase == "X":
            category = event.get("cat")
            args = event.get("args", none)
            if category in HOST_KINDS:
                name = event["name"]
                if name in UTILITY:
                    continue
                host.append(
                    (
                        event["ts"],
                        event.get("dur", 0),
                        f"{event['pid']}/{event['tid']}",
                        name,
                        # our ranges may be written as operators, see dlrm_core/parts.py
                        "annotation" if name.startswith(SPAN_PREFIX) else HOST_KINDS[category],
                        str(args["Input Dims"]) if "Input Dims" in args else "",
                        args.get("correlation", -1),
                        args.get("External id", -1),
                    )
                )
            elif category in DEVICE_KINDS:
                device.append(
                    (
                        event["ts"],
                        event.get("dur", 0),
                        f"{args.get('device', event['pid'])}/{args.get('stream', event['tid'])}",
                        event["name"],
                        DEVICE_KINDS[category],
                        args.get("correlation", -1),
                        args.get("External id", -1),
                        args.get("bytes", 0),
                    )
                )
        elif phase == "i" and event.get("name") == "[memory]":
            args = event["args"]
            memory.append(
                (
                    event["ts"],
                    f"{event['pid']}/{event['tid']}",
                    args["Bytes"],
                    args.get("Total Allocated", 0),
                    # c10's device types: 0 CPU, 1 CUDA
                    "cpu" if args.get("Device Type", 0) == 0 else f"gpu {args.get('Device Id', 0)}",
                )
            )
        elif phase == "M" and event.get("name") == "thread_name":
            names[f"{event['pid']}/{event['tid']}"] = event["args"]["name"]
    spans = ["start", "duration", "line", "name", "kind"]
    frames = (
        pd.DataFrame(host, columns=[*spans, "shapes", "correlation", "external"]),
        pd.DataFrame(device, columns=[*spans, "correlation", "external", "bytes"]),
        pd.DataFrame(memory, columns=["start", "line", "bytes", "total", "device"]),
    )
    first = min((float(frame["start"].min()) for frame in frames if len(frame)), default=0.0)
    zero = round(first * 1000)
    for frame in frames:
        frame["start"] = _nanoseconds(frame["start"]) - zero
        if "duration" in frame:
            frame["end"] = frame["start"] + np.maximum(_nanoseconds(frame["duration"]), 0)
    return *frames, names


def _nanoseconds(microseconds: pd.Series) -> pd.Series:
    return (microseconds.astype("float64") * 1000).round().astype("int64")
