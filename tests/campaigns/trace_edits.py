"""Edits of real GPU traces: work is added or changed, and what follows is timed anew.

A trace of torch.profiler is replayed with edits: the host's calls keep their order and their
lengths, except that calls which waited for the GPU now wait for its new end; a kernel starts
when it has been launched, its stream is free and the other stream that it waited for is done,
as it did in the recording. Without edits the replay gives every event its own time again.
"""

import bisect
import copy
import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Event = dict[str, Any]

DEVICE = ("kernel", "memcpy", "memset", "gpu_memcpy", "gpu_memset")
RUNTIME = ("runtime", "cuda_runtime", "cuda_driver")
OPERATOR = ("operator", "cpu_op")
RANGE = re.compile(r"ProfilerStep#|Optimizer\.|enumerate\(|## |nccl:|DistributedDataParallel")
"""Names of ranges, which are operators by category in traces of 2021."""

WAITS = re.compile(r"cuda(Device|Stream|Event)Synchronize|cudaMemcpy(Async)?$")
"""Calls that may return only when work of the GPU is done."""

NEAR_US = 60.0
"""From the end of a GPU's operation to the end of the call that waited for it, at most."""

QUEUE_GAP_US = 4.0
"""Between two operations of a stream of which the second was waiting for the first, at most."""

LAUNCH_LAG_US = 20.0
"""From a launch to the start of a kernel that waits for nothing else, at most."""

QUEUE = 1000
"""Launches that the host can be ahead of a GPU before the driver makes it wait."""


@dataclass
class Insertion:
    """Something that the host does at a time when the recorded program did not."""

    at: float
    length: float
    host: list[tuple[float, float, Event]] = field(default_factory=list)
    """(offset, length, event); an event of infinite length lasts to the end of the wait."""
    device: list[tuple[float, float, Event]] = field(default_factory=list)
    """(offset of the launch, length, event)."""
    drains: bool = False
    """Whether the host then waits until all that has been launched is done."""


class Trace:
    """A Chrome trace that can be edited, and written again."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = {name: value for name, value in document.items() if name != "traceEvents"}
        self.events: list[Event] = [
            event
            for event in document["traceEvents"]
            if isinstance(event.get("ts", 0), int | float)
        ]
        times = [event["ts"] for event in self.events if event.get("ph") == "X"]
        self.base = int(min(times))
        self.insertions: list[Insertion] = []
        self.serial = False
        """Whether no two operations of the GPU may overlap."""
        self._index()

    def _index(self) -> None:
        self._likes: dict[tuple[tuple[str, ...], str], Event] = {}
        self._points: dict[Any, list[float]] = {}
        self.start = np.array([event.get("ts", self.base) - self.base for event in self.events])
        self.length = np.array([event.get("dur", 0) or 0 for event in self.events], dtype=float)
        category = [str(event.get("cat", "")).lower() for event in self.events]
        span = [event.get("ph") == "X" for event in self.events]
        self.device = [row for row, cat in enumerate(category) if cat in DEVICE and span[row]]
        self.runtime = [row for row, cat in enumerate(category) if cat in RUNTIME and span[row]]
        self.operators = [
            row
            for row, cat in enumerate(category)
            if cat in OPERATOR and span[row] and not RANGE.match(self.events[row]["name"])
        ]
        streams = Counter(self.events[row]["tid"] for row in self.device)
        busiest = streams.most_common(1)[0][0]
        self._main_stream = next(
            self.events[row] for row in self.device if self.events[row]["tid"] == busiest
        )
        self.call = {
            self.events[row]["args"].get("correlation"): row
            for row in self.runtime
            if "correlation" in self.events[row]["args"]
        }
        self.next_id = 1 + max(
            (
                int(value)
                for event in self.events
                for name, value in (event.get("args") or {}).items()
                if isinstance(value, int) and name.lower() in ("correlation", "external id")
            ),
            default=0,
        )
        marks = [
            row
            for row, event in enumerate(self.events)
            if span[row]
            and str(event["name"]).startswith("ProfilerStep#")
            and not category[row].startswith("gpu")
        ]
        self.marks = sorted(marks, key=lambda row: self.start[row])
        self.thread = (self.events[marks[0]]["pid"], self.events[marks[0]]["tid"])

    # ---- what is there ------------------------------------------------------------------

    @property
    def steps(self) -> list[tuple[float, float]]:
        """(start, end) of each iteration on the host, us."""
        return [(self.start[row], self.start[row] + self.length[row]) for row in self.marks]

    @property
    def step_us(self) -> float:
        """Mean length of an iteration."""
        return float(np.mean([end - start for start, end in self.steps]))

    def points(self, step: int) -> list[float]:
        """Times in an iteration at which its thread enters an operator from none."""
        key = self.thread, step
        if key in self._points:
            return self._points[key]
        first, last = self.steps[step]
        own = sorted(
            (self.start[row], -self.length[row])
            for row in self.operators
            if (self.events[row]["pid"], self.events[row]["tid"]) == self.thread
            and first < self.start[row] < last
        )
        found: list[float] = []
        until = first
        for start, minus_length in own:
            if start >= until:
                found.append(start)
                until = start - minus_length
        waits = [
            (self.start[row], self.start[row] + self.length[row])
            for row in self.runtime
            if WAITS.match(self.events[row]["name"])
        ]
        self._points[key] = [
            at for at in found if not any(start < at < end for start, end in waits)
        ]
        return self._points[key]

    def model_points(self, step: int) -> list[float]:
        """The points of an iteration in the model's forward, where that is marked; else those
        of its middle."""
        points = self.points(step)
        middle = points[len(points) // 5 : len(points) // 2]
        return self.within(r"## forward ##|DataParallel\.forward", step) or middle

    def within(self, pattern: str, step: int) -> list[float]:
        """The points of an iteration inside ranges whose name matches."""
        first, last = self.steps[step]
        ranges = [
            (self.start[row], self.start[row] + self.length[row])
            for row, event in enumerate(self.events)
            if first <= self.start[row] < last
            and event.get("ph") == "X"
            and (event["pid"], event["tid"]) == self.thread
            and re.search(pattern, str(event["name"]))
        ]
        return [at for at in self.points(step) if any(start <= at < end for start, end in ranges)]

    def launched_in(self, step: int) -> list[int]:
        """Rows of the GPU's operations that an iteration launched, in order."""
        first, last = self.steps[step]
        launch = {row: self.launch(row) for row in self.device}
        own = [row for row in self.device if first <= launch[row] < last]
        return sorted(own, key=lambda row: launch[row])

    def launch(self, row: int) -> float:
        """When a GPU's operation was launched; long ago where that was not recorded."""
        call = self.call.get(self.events[row]["args"].get("correlation"))
        return float(self.start[call]) if call is not None else -1e12

    def problems(self) -> list[str]:
        """What cannot be: work before its launch, two things at once on a stream."""
        found = []
        free: dict[Any, float] = {}
        for row in sorted(self.device, key=lambda row: self.start[row]):
            stream = self.events[row]["pid"], self.events[row]["tid"]
            if self.start[row] < self.launch(row) - 1.0:
                found.append(f"{self.events[row]['name'][:60]} starts before its launch")
            if self.start[row] < free.get(stream, -1e12) - 1.0:
                found.append(f"{self.events[row]['name'][:60]} overlaps on its stream")
            free[stream] = max(free.get(stream, -1e12), self.start[row] + self.length[row])
        return found

    # ---- events to insert ---------------------------------------------------------------

    def _like(self, categories: tuple[str, ...], name: str, pattern: str = "") -> Event:
        """A copy of the first event of a category, preferably of one whose name matches."""
        if (categories, pattern) not in self._likes:
            chosen = [
                event
                for event in self.events
                if event.get("ph") == "X" and str(event.get("cat")).lower() in categories
            ]
            like = next((e for e in chosen if re.search(pattern, e["name"])), chosen[0])
            self._likes[categories, pattern] = like
        like = self._likes[categories, pattern]
        return like | {"name": name, "args": dict(like.get("args") or {})}

    def operator(self, name: str, like: str = "") -> Event:
        """An operator on the stepping thread."""
        event = self._like(OPERATOR, name, like or re.escape(name))
        event["pid"], event["tid"] = self.thread
        args = event.setdefault("args", {})
        for stale in ("Sequence number", "Fwd thread id", "Module Hierarchy", "Call stack"):
            args.pop(stale, None)
        return event

    def python(self, name: str) -> list[Event]:
        """A Python frame on the stepping thread, in traces that have such frames."""
        has = any(event.get("cat") == "python_function" for event in self.events)
        if not has:
            return []
        event = self._like(("python_function",), name)
        event["pid"], event["tid"] = self.thread
        event["args"] = {"Python id": self.new_id(), "Python parent id": None}
        return [event]

    def runtime_call(self, name: str, correlation: int | None = None) -> Event:
        """A call of the CUDA runtime on the stepping thread."""
        event = self._like(RUNTIME, name, re.escape(name))
        event["pid"], event["tid"] = self.thread
        self._number(event, self.new_id() if correlation is None else correlation)
        return event

    def gpu_work(self, kind: str, name: str, correlation: int, stream: Any = None) -> Event:
        """A kernel, ``memcpy`` or ``memset``; on the stream of most kernels."""
        categories = {"kernel": ("kernel",), "memcpy": ("memcpy", "gpu_memcpy")}
        wanted = categories.get(kind, ("memset", "gpu_memset"))
        if any(str(self.events[row]["cat"]).lower() in wanted for row in self.device):
            event = self._like(wanted, name, "elementwise|elemwise" if kind == "kernel" else "")
        else:
            event = self._like(categories["memcpy"], name)
            event["cat"] = event["cat"].replace("memcpy", kind).replace("Memcpy", "Memset")
        main = self._main_stream
        event["pid"], event["tid"] = main["pid"], main["tid"]
        event["args"]["stream"] = main["args"]["stream"]
        self._number(event, correlation)
        return event

    def collective(self, correlation: int) -> Event:
        """An all-reduce, on the stream of the recorded collectives."""
        names = sorted({self.events[row]["name"] for row in self.device})
        recorded = next(name for name in names if name.startswith("nccl"))  # AllReduce is first
        name = re.sub(r"SendRecv(\w*)Sum_int8_t", r"AllReduce\1Sum_float", recorded)
        event = self._like(("kernel",), name, re.escape(recorded))
        self._number(event, correlation)
        return event

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def _number(self, event: Event, correlation: int) -> None:
        args = event.setdefault("args", {})
        args["correlation"] = correlation
        for name in ("External id", "external id"):
            if name in args:
                args[name] = correlation
        args.pop("external ts", None)

    def insert(self, insertion: Insertion) -> None:
        self.insertions.append(insertion)

    # ---- the replay ---------------------------------------------------------------------

    def replay(self) -> "Trace":
        """The trace with its edits, every event at its new time."""
        return _Replay(self).run()

    def save(self, folder: Path, name: str = "trace") -> Path:
        """Write the trace into a folder; returns what a user opens."""
        path = folder / f"{name}.json"
        path.write_text(json.dumps(self.document | {"traceEvents": self.events}))
        return path


class _Clock:
    """The host's old time to its new one: steps forward, stretched and shrunk waits."""

    def __init__(self) -> None:
        self.old, self.new = [-1e12], [-1e12]

    def __call__(self, time: float) -> float:
        """New time of what starts at the old ``time``."""
        at = bisect.bisect_right(self.old, time) - 1
        slope = 1.0
        if at + 1 < len(self.old) and self.old[at + 1] > self.old[at]:
            slope = (self.new[at + 1] - self.new[at]) / (self.old[at + 1] - self.old[at])
        return self.new[at] + (time - self.old[at]) * slope

    def all(self, times: npt.NDArray[Any], ends: bool = False) -> npt.NDArray[np.float64]:
        """New times of what starts (or ends, that is before what is inserted there) then."""
        old, new = np.array([*self.old, 1e13]), np.array(self.new)
        new = np.append(new, new[-1] + old[-1] - old[-2])
        at = np.searchsorted(old, times, "left" if ends else "right") - 1
        width = np.diff(old)
        slope = np.divide(np.diff(new), width, out=np.ones_like(width), where=width > 0)
        return np.asarray(new[at] + (times - old[at]) * slope[at], dtype=np.float64)

    def reach(self, time: float, new: float) -> None:
        """From here on ``time`` is at ``new``."""
        time = max(time, self.old[-1])
        self.old.append(time)
        self.new.append(new)

    def step(self, time: float, length: float) -> float:
        """Insert a pause; returns the new time at which it starts."""
        time = max(time, self.old[-1])
        start = self(time)
        self.reach(time, start)
        self.reach(time, start + length)
        return start


class _Replay:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.clock = _Clock()
        self.free: dict[Any, float] = {}
        """New time at which each stream is done."""
        self.begun: list[float] = []
        """New starts of all operations of the GPU, in the order of their launches."""
        self.start: dict[int, float] = {}
        self.inserted: list[tuple[float, float, Event]] = []
        """(new start, new length, event)."""

    def run(self) -> Trace:
        trace = self.trace
        self._learn()
        actions: list[tuple[float, int, int, Any]] = []
        for order, row in enumerate(self.in_order):
            actions.append((trace.launch(row), 1, order, row))
        for row, (_, waited_for) in self.waits.items():
            actions.append((float(trace.start[row]), 2, row, waited_for))
        for order, insertion in enumerate(trace.insertions):
            actions.append((insertion.at, 0, order, insertion))
        for time, what, number, detail in sorted(actions, key=lambda action: action[:3]):
            if what == 0:
                self._insert(detail)
            elif what == 1:
                self._run_on_gpu(detail, time)
            else:
                self._wait(number, detail)
        return self._written()

    def _learn(self) -> None:
        """What each operation of the GPU, and each waiting call, waited for."""
        trace = self.trace
        recorded = np.array([event.get("dur", 0) or 0 for event in trace.events], dtype=float)
        self.recorded = recorded
        self.in_order = sorted(
            trace.device, key=lambda row: (trace.launch(row), float(trace.start[row]))
        )
        ends: dict[Any, list[tuple[float, int]]] = defaultdict(list)
        reach: dict[Any, float] = {}
        self.overlap: dict[int, float] = {}
        self.needs: dict[int, tuple[float, float, int | None, float]] = {}
        """Row to least lag behind the launch, gap on the stream, row waited for, its lag."""
        self.behind: dict[int, list[int]] = {}
        """Row to the work of other streams that its stream was told to wait for."""
        told = defaultdict(list)
        for call in trace.runtime:
            if "StreamWaitEvent" in trace.events[call]["name"]:
                told[trace.events[call]["tid"]].append(float(trace.start[call]))
        for times in told.values():
            times.sort()
        launched: dict[Any, float] = {}
        for row in self.in_order:
            start, stream = float(trace.start[row]), self._stream(row)
            by = trace.call.get(trace.events[row]["args"].get("correlation"))
            if by is not None:
                thread, when = trace.events[by]["tid"], float(trace.start[by])
                before = bisect.bisect_left(told[thread], when)
                if before and told[thread][before - 1] >= launched.get(thread, -1e12):
                    self.behind[row] = [
                        done[-1][1]
                        for name, done in ends.items()
                        if name != stream and done and done[-1][0] <= start
                    ]
                launched[thread] = when
            self.overlap[row] = max(reach.get(stream, -1e12) - start, 0.0)
            lag = start - trace.launch(row)
            gap = start - reach.get(stream, -1e12)
            other, behind = None, 0.0
            least = min(lag, 5.0)
            if gap > QUEUE_GAP_US:
                if lag > LAUNCH_LAG_US:
                    found = [
                        place[-1]
                        for name, done in ends.items()
                        if name != stream
                        and (place := done[: bisect.bisect_right(done, (start + 0.5, 1 << 60))])
                    ]
                    if found and start - max(found)[0] < NEAR_US:
                        behind, other = start - max(found)[0], max(found)[1]
                    else:
                        least = lag
                else:
                    least = lag
                gap = 0.0
            self.needs[row] = least, min(gap, QUEUE_GAP_US), other, behind
            end = start + recorded[row]
            reach[stream] = max(reach.get(stream, -1e12), end)
            done = ends[stream]
            done.append((max(end, done[-1][0] if done else end), row))
        launches = [trace.launch(row) for row in self.in_order]
        known = [row for row in self.in_order if trace.launch(row) > -1e11]
        self.queue = QUEUE  # of graphs the host may be further ahead
        while any(
            trace.start[early] > trace.launch(late)
            for early, late in zip(known, known[self.queue :], strict=False)
        ):
            self.queue *= 2
        finish = [(float(trace.start[row] + recorded[row]), row) for row in self.in_order]
        self.waits: dict[int, tuple[float, int | None]] = {}
        """Call to how long after the work that it waits for it ends; None: after all work."""
        for row in trace.runtime:
            if not WAITS.match(trace.events[row]["name"]) or trace.length[row] <= 0:
                continue
            first, last = float(trace.start[row]), float(trace.start[row] + trace.length[row])
            before = finish[: bisect.bisect_right(launches, first)]
            near = [
                (end, done)
                for end, done in before[-3 * QUEUE :]
                if first < end <= last + 1.0 and last - end < NEAR_US
            ]
            if near:
                self.waits[row] = (last - max(near)[0], max(near)[1])
            elif "DeviceSynchronize" in trace.events[row]["name"] and len(known) == len(finish):
                self.waits[row] = (3.0, None)

    def _stream(self, row: int) -> Any:
        event = self.trace.events[row]
        return event["pid"], event["tid"]

    def _run_on_gpu(self, row: int, launch: float) -> None:
        trace = self.trace
        stream = self._stream(row)
        if launch < -1e11:  # launched before the recording: only work before it can delay it
            start = max(float(trace.start[row]), self.free.get(stream, -1e12) - self.overlap[row])
        else:
            least, gap, other, behind = self.needs[row]
            ahead = self.begun[-self.queue] if len(self.begun) >= self.queue else -1e12
            if ahead > self.clock(launch):
                self.clock.step(launch, ahead - self.clock(launch))
            start = max(self.clock(launch) + least, self.free.get(stream, -1e12) + gap)
            if other is not None:
                start = max(start, self.start[other] + float(trace.length[other]) + behind)
            for earlier in self.behind.get(row, []):
                start = max(start, self.start[earlier] + float(trace.length[earlier]))
            if trace.serial and self.free:
                start = max(start, *self.free.values())
            self.begun.append(start)
        self.start[row] = start
        self._runs(stream, start, float(trace.length[row]))

    def _runs(self, stream: Any, start: float, length: float) -> None:
        self.free[stream] = max(self.free.get(stream, -1e12), start + length)

    def _wait(self, row: int, waited_for: int | None) -> None:
        trace, clock = self.trace, self.clock
        behind = self.waits[row][0]
        first, last = float(trace.start[row]), float(trace.start[row] + trace.length[row])
        if waited_for is None:
            done = max(self.free.values(), default=-1e12) + behind
        else:
            done = self.start[waited_for] + float(trace.length[waited_for]) + behind
        if clock.old[-1] > first:  # inside another thread's wait
            if done > clock(last):
                clock.step(last, done - clock(last))
            return
        start = clock(first)
        clock.reach(first, start)
        least = 3.0 if waited_for is not None else float(trace.length[row])
        clock.reach(last, max(done, start + min(float(trace.length[row]), least)))

    def _insert(self, insertion: Insertion) -> None:
        start = self.clock.step(insertion.at, insertion.length)
        end = start + insertion.length
        for offset, length, event in insertion.device:
            stream = event["pid"], event["tid"]
            begins = max(start + offset + 5.0, self.free.get(stream, -1e12) + 1.0)
            self.begun.append(begins)
            self._runs(stream, begins, length)
            self.inserted.append((begins, length, event))
        if insertion.drains and self.free:
            done = max(self.free.values()) + 6.0
            if done > end:
                self.clock.step(insertion.at, done - end)
                end = done
        for offset, length, event in insertion.host:
            self.inserted.append((start + offset, min(length, end - start - offset), event))

    def _written(self) -> Trace:
        trace, clock = self.trace, self.clock
        new = copy.copy(trace)
        start = clock.all(trace.start)
        end = clock.all(trace.start + trace.length, ends=True)
        for row, time in self.start.items():
            start[row], end[row] = time, time + trace.length[row]
        self._annotations(start, end)
        self._arrows(start)
        events: list[Event] = []
        for row, event in enumerate(trace.events):
            events.append(self._timed(event, start[row], end[row] - start[row]))
        events += [self._timed(event, begins, length) for begins, length, event in self.inserted]
        new.events, new.insertions, new.serial = events, [], False
        new._index()
        return new

    def _timed(self, event: Event, start: float, length: float) -> Event:
        timed = event | {"ts": round(self.trace.base + float(start), 3)}
        if "dur" in event or event.get("ph") == "X":
            timed["dur"] = round(max(float(length), 0.0), 3)
        return timed

    def _annotations(self, start: npt.NDArray[np.float64], end: npt.NDArray[np.float64]) -> None:
        """Ranges on the GPU's streams span what they spanned."""
        trace = self.trace
        lines: dict[Any, list[int]] = defaultdict(list)
        for row in trace.device:
            lines[self._stream(row)].append(row)
        old = {line: np.array([trace.start[row] for row in rows]) for line, rows in lines.items()}
        for row, event in enumerate(trace.events):
            if event.get("cat") == "gpu_user_annotation" and self._stream(row) in lines:
                rows, begun = lines[self._stream(row)], old[self._stream(row)]
                last = trace.start[row] + self.recorded[row]
                inside = [
                    rows[at]
                    for at in np.flatnonzero((begun >= trace.start[row] - 1) & (begun < last))
                ]
                if inside:
                    start[row], end[row] = min(start[inside]), max(end[inside])

    def _arrows(self, start: npt.NDArray[np.float64]) -> None:
        """Flow arrows end where the operation of the GPU starts to which they lead."""
        trace = self.trace
        to = {
            (trace.events[row]["args"].get("correlation"), float(trace.start[row])): row
            for row in trace.device
        }
        for row, event in enumerate(trace.events):
            target = to.get((event.get("id"), float(trace.start[row])))
            if event.get("ph") == "f" and target is not None:
                start[row] = start[target]


# ---- longer recordings ------------------------------------------------------------------

NUMBERS = (
    *("correlation", "External id", "external id", "Ev Idx", "Record function id"),
    *("Sequence number", "Python id", "Python parent id"),
)


def repeated(trace: Trace, times: int) -> Trace:
    """The recording with its iterations again and again, numbered on."""
    first, last = trace.steps[0][0], trace.steps[-1][1]
    rows = trace.device
    last = max([last, *(trace.start[row] + trace.length[row] for row in rows)]) + 20.0
    window = last - first
    events: list[Event] = []
    for row, event in enumerate(trace.events):
        begins, ends = trace.start[row], trace.start[row] + trace.length[row]
        if begins < first or "ts" not in event:
            if ends > last:
                event = event | {"dur": round(float(trace.length[row] + (times - 1) * window), 3)}
            events.append(event)
            continue
        events += [_again(trace, event, turn, window) for turn in range(times)]
    return Trace(trace.document | {"traceEvents": events})


def _again(trace: Trace, event: Event, turn: int, window: float) -> Event:
    args = dict(event.get("args") or {})
    made = event | {"ts": round(event["ts"] + turn * window, 3)} | ({"args": args} if args else {})
    for name in NUMBERS:
        if isinstance(args.get(name), int) and args[name] >= 0:
            args[name] += turn * 10_000_000
    if made.get("ph") in ("s", "f") and isinstance(made.get("id"), int):
        made["id"] += turn * 10_000_000
    if str(event["name"]).startswith("ProfilerStep#"):
        number = int(event["name"].split("#")[1])
        made["name"] = f"ProfilerStep#{number + turn * len(trace.steps)}"
    return made
