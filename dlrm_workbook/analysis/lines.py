"""Every moment of a step by the line of the user's code that it belongs to.

A moment belongs to the innermost frame of the user's: what a library does is in the line that
calls it. Time of the backward pass is in the lines that built its nodes, in proportion to the
times of these; time of an optimizer in the line that calls its step. Where a GPU ran, a moment
belongs to the line that launched what runs, and idle time to the line that the host was in.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import PurePath
from typing import Any

import numpy as np
import pandas as pd

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis.attribution import iteration_count, main_thread
from dlrm_workbook.analysis.context_tree import (
    context_at,
    distinct,
    edges,
    reason_of,
    running,
    unmeasured,
)
from dlrm_workbook.analysis.step_source import Source
from dlrm_workbook.ground.arrays import Bools, Floats, Names
from dlrm_workbook.ground.units import milliseconds
from dlrm_workbook.recordings.foreign import START_UP, node_key
from dlrm_workbook.recordings.nesting import start_and_end, stretch_at
from dlrm_workbook.recordings.profile import Profile, nearest, of_streams
from dlrm_workbook.recordings.torch.lines import MAIN, mark_of, role_of
from dlrm_workbook.recordings.torch.sampling import is_user_code
from dlrm_workbook.recordings.torch.workers import NAME as WORKER

LINES = ["file", "line", "function", "source", "thread", "role", "time_ms", "backward_ms"]
LINES += ["inclusive_ms", "share_of_step", "inclusive_share", "calls", "operators"]
LINES += ["in_iterations", "growth_ms"]
FUNCTIONS = [name for name in LINES if name not in ("source", "calls", "operators")]
LISTING = ["line", "source", "time_ms", "share"]

LOADING = ("loader", "received", "started")
"""Marks of a line in whose call a DataLoader makes or waits for a batch."""

BATCH_WORDS = ("batch", "collate", "loader", "sample", "dataset", "fetch")
"""In names of functions that make batches, where nothing better tells which do."""

LEAST_THREAD = 1e-3
"""Share of the step from which on a line of another thread is listed."""

LEAST_SAMPLES = 5
"""Samples of a line from which on it is told in how many iterations it runs."""

LEAST_ITERATIONS, SURE = 8, 4.0
"""Iterations, and standard errors of the slope, from which on a line's time is said to grow."""

MOST_LISTED = 30
"""Lines of a function beside which a figure shows their time."""

MOST_OPERATORS = 3
"""Operators named below a line."""

LEAST_SHARE, LEAST_LINE = 0.1, 0.01
"""Share of a line's time that an operator takes which is named below it, and share of the step
that such a line takes, where only sampled frames tell the line of an operator."""

Path = Sequence[tuple[int, str]]
Place = tuple[str, int]


def lines(profile: Profile) -> pd.DataFrame:
    """Time by line of the user's code, most first.

    Shares of the main thread add up to 1; ``file`` "" is what is in no line of the user's. Of other
    threads it is the time that they computed. Empty, with the reason, where no stack is known.
    """
    return _table(profile, "line")


def functions(profile: Profile) -> pd.DataFrame:
    """As :func:`lines`, by function; ``line`` is the one with the most time in it."""
    return _table(profile, "function")


def statements(profile: Profile) -> pd.DataFrame:
    """As :func:`lines`, by the statement of the training step that a moment belongs to.

    A step is the function that calls ``backward``, and those above it. Each moment is in one row
    by itself: the statements of the step divide it, and none of them is counted twice. So what is
    around the model is the rows of role ``around``, each called from one line of the step.
    ``time_ms`` and ``inclusive_ms`` are the same.
    """
    return _table(profile, "statement")


def listing(profile: Profile, file: str, function: str) -> pd.DataFrame:
    """The source of a function with the time of each line beside it, of all threads together.

    ``source`` keeps its indentation; times are 0 where none was seen. Empty where the source is not
    known.
    """
    table = lines(profile)
    chosen = table[table["file"].eq(file) & table["function"].eq(function)]
    text = _Texts(known_moments(profile))
    rows = text.function(file, int(chosen["line"].min())) if len(chosen) else {}
    if not rows:
        return unmeasured(LISTING, "the source of this function was not recorded")
    by_line = chosen.groupby("line")[["time_ms", "share_of_step"]].sum()
    by_line = by_line.reindex(list(rows), fill_value=0.0)
    times = {"time_ms": by_line["time_ms"].tolist(), "share": by_line["share_of_step"].tolist()}
    return pd.DataFrame({"line": list(rows), "source": list(rows.values())} | times)


def hottest(profile: Profile) -> pd.DataFrame:
    """The :func:`listing` of the function with the most time itself, around its hottest line.
    Returns at most :data:`MOST_LISTED` rows; ``attrs["function"]`` is its name."""
    table = functions(profile)
    if reason_of(table):
        return unmeasured(LISTING, reason_of(table))
    table = table[table["file"].ne("") & table["thread"].eq(MAIN) & table["time_ms"].gt(0)]
    for row in table.head(1).to_dict("records"):
        rows = listing(profile, row["file"], row["function"])
        if len(rows) > MOST_LISTED:
            # where a window of that length holds the most time
            sums = rows["time_ms"].rolling(MOST_LISTED).sum()
            last = int(sums.to_numpy()[MOST_LISTED - 1 :].argmax()) + MOST_LISTED
            rows = rows.iloc[last - MOST_LISTED : last]
        rows.attrs["function"] = f"{row['function']} ({PurePath(row['file']).name})"
        return rows
    return unmeasured(LISTING, "no time is in a line of the user's")


ROLE_WORDS = {
    "model": "the model",
    "optimizer": "its optimizer",
    "batch": "making the batch",
    "around": "everything else",
}


def line_table(profile: Profile) -> LineTable | None:
    """What :func:`lines` is made of, at the samples' pace; None where no line is known."""
    known = known_moments(profile)
    return LineTable(known) if known and known.get("iteration_ms") else None


def by_role(profile: Profile) -> str:
    """One sentence: how the step divides among what its statements are for, and the line of the
    user's with most of it; "" where the statements of a step are not known."""
    steps, table = statements(profile), lines(profile)
    if steps.empty or table.empty or not steps["file"].ne("").any():
        return ""
    steps, table = (each[each["thread"].eq(MAIN)] for each in (steps, table))
    shares = steps.groupby("role")["share_of_step"].sum()
    named = [
        f"{words} ({shares[role]:.0%})"
        for role, words in ROLE_WORDS.items()
        if round(shares.get(role, 0.0), 2)
    ]
    first = table[table["file"].ne("")].iloc[0]
    return (
        f"The {milliseconds(float(steps['time_ms'].sum()))} of an iteration go into "
        f"{', '.join(named)}; the line with most of them is `{place(first['file'], first['line'])}`"
        f" in `{first['function']}` ({first['share_of_step']:.0%})."
    )


def place(file: str, line: int) -> str:
    """FILE:LINE, as a sentence names a line."""
    return f"{PurePath(file).name}:{line}"


# ---- where the moments come from --------------------------------------------------------------


def known_moments(profile: Profile) -> dict[str, Any] | None:
    """Moments by path, as ``Profile.meta["lines"]`` holds them, of any recording."""
    sampled = profile.meta.get("lines")
    if sampled and profile.device != "cuda":
        return dict(sampled)
    name = f"moments, {'some' if sampled else 'none'} sampled"
    return profile.once(name, lambda: _of_contexts(profile, sampled or {}) or sampled or {}) or None


def _of_contexts(profile: Profile, sampled: dict[str, Any]) -> dict[str, Any] | None:
    """As :func:`known_moments`, from Python frames in the call paths of a recording; None without
    any. ``sampled`` is ``Profile.meta["lines"]`` of a run on a GPU, empty of other recordings: it
    knows which line built what runs backward, what lines are for, and their text."""
    contexts = profile.contexts
    is_python = profile.of_kind("python") | contexts["file"].str.endswith(".py").to_numpy()
    is_python &= profile.of_kind("python", "function", "line")
    users, files, names = _user_frames(profile, is_python)
    if not users.any():
        return None
    frames: dict[tuple[str, int, str, int], int] = {}
    paths: dict[tuple[tuple[int, str], ...], int] = {}
    number = np.zeros(len(contexts), dtype=np.int64)
    held: list[tuple[tuple[int, str], ...]] = []
    line, kind = contexts["line"].to_numpy(), contexts["kind"].to_numpy(dtype=object)
    roles = [role_of(*part) for part in zip(contexts["component"], contexts["phase"], strict=True)]
    functions_of: list[str] = []
    known_frames = [tuple(frame) for frame in sampled.get("frames", [])]
    begins = {(file, function): first for file, first, function, _ in known_frames}
    for row, over in enumerate(contexts["parent"].tolist()):
        path = held[over] if over >= 0 else ()
        function = functions_of[over] if over >= 0 else ""
        if users[row]:
            inner = kind[row] == "line"  # within the function above it
            function = function if inner else str(names[row])
            first = begins.get((str(files[row]), function), 0)
            frame = (str(files[row]), first, function, int(line[row]))
            path = (*path[: len(path) - inner], (frames.setdefault(frame, len(frames)), ""))
        elif path and is_python[row] and (mark := mark_of(f"{files[row]}:{names[row]}")):
            path = (*path[:-1], (path[-1][0], f" {mark}"))
        held.append(path)
        functions_of.append(function)
        if path and roles[row]:
            path = (*path[:-1], (path[-1][0], roles[row] + path[-1][1]))
        number[row] = paths.setdefault(path, len(paths))
    # on a GPU autograd has a thread of its own, which no frame of Python stands above
    calls = [one for path, one in paths.items() if _is_marked(path, "backward")]
    nodes = profile.of_kind("operator") & profile.which("name", lambda n: node_key(n) is not None)
    inside = nearest(contexts["parent"].to_numpy(), nodes) >= 0
    number[inside & (number == paths.get((), -1))] = calls[0] if calls else paths.get((), -1)
    backward = dict(sampled.get("backward") or {})
    for place, one in enumerate(backward.get("path", [])):
        if one >= 0:
            built = tuple(
                (frames.setdefault(known_frames[frame], len(frames)), mark)
                for frame, mark in sampled["paths"][one]
            )
            backward["path"] = [*backward["path"]]
            backward["path"][place] = paths.setdefault(built, len(paths))
    times = _moments(profile)
    times["path"] = number[times.pop("context")]
    keys = ["iteration", "thread", "path"]
    times = times.groupby(keys)["ms"].sum().reset_index().assign(samples=0)
    threads = profile.threads.set_index("profile")["name"]
    main = main_thread(profile)
    order = [main, *sorted(set(times["thread"]) - {main})]
    times["thread"] = [order.index(thread) for thread in times["thread"]]
    ms = times[times["thread"].eq(0)].groupby("iteration")["ms"].sum()
    return {
        "frames": list(frames),
        "paths": list(paths),
        "threads": [MAIN, *(str(threads[thread]) for thread in order[1:])],
        "times": times.to_dict("list"),
        "iteration_ms": ms.tolist(),
        "counted": {"calls": (sampled.get("counted") or {}).get("calls", [])},
        "backward": backward,
        "roles": LineTable(sampled).roles_of_lines() if sampled else {},
        "sources": sampled.get("sources", []),
    }


def _user_frames(profile: Profile, is_python: Bools) -> tuple[Bools, Names, Names]:
    """(which contexts (n,) are Python frames of the user's, file and function of all contexts)."""
    files = profile.contexts["file"].to_numpy(dtype=object)
    names = profile.contexts["name"].str.split(": ", n=1).str[-1].to_numpy(dtype=object)
    users = is_python & (files != "")
    rows = np.flatnonzero(users)
    users[rows] = [is_user_code(files[row], names[row]) for row in rows.tolist()]
    return users, files, names


def _moments(profile: Profile) -> pd.DataFrame:
    """``iteration``, ``thread``, ``context`` and ``ms`` of each stretch of the recording.

    On the main thread of a run on a GPU a stretch belongs to what the GPU runs, if it runs
    anything. Without a trace, all values are of one iteration.
    """
    main = main_thread(profile)
    if profile.trace.empty or profile.iterations.empty:
        rows = profile.values[profile.rows("cpu_time_ms", "exclusive")]
        rows = rows[profile.contexts["phase"].ne(START_UP).to_numpy()[rows["context"]]]
        table = rows.rename(columns={"profile": "thread", "value": "ms"})
        table["ms"] /= iteration_count(profile)
        return table[["thread", "context", "ms"]].assign(iteration=0)
    spans = start_and_end(profile.iterations)
    streams = of_streams(profile).assign(profile=-2)
    gpu = [running(replace(profile, trace=streams), -2)] if len(streams) else []
    parts = []
    for thread in profile.threads.loc[profile.threads["kind"].eq("cpu_thread"), "profile"]:
        lanes = [running(profile, int(thread)), *(gpu if thread == main else [])]
        cuts = distinct([*spans, *edges(*lanes)])
        begin = cuts[:-1]
        context = np.full(len(begin), -1)
        for lane in lanes:
            here = context_at(lane, begin)
            context = np.where(here >= 0, here, context)
        table = pd.DataFrame({"iteration": stretch_at(*spans, begin), "context": context})
        table = table.assign(thread=thread, ms=np.diff(cuts) / 1e6)
        seen = table["context"].ge(0) if thread != main else True
        parts.append(table[table["iteration"].ge(0) & seen])
    table = pd.concat(parts, ignore_index=True)
    root = int(np.flatnonzero(profile.contexts["parent"].lt(0))[0])
    return table.assign(context=table["context"].where(table["context"].ge(0), root))


# ---- the table -----------------------------------------------------------------------------


def _table(profile: Profile, by: str) -> pd.DataFrame:
    pace = (profile.meta.get("reference") or {}).get("ms")
    return profile.once(f"lines by {by} at {pace}", lambda: _made_table(profile, by))


def _made_table(profile: Profile, by: str) -> pd.DataFrame:
    columns = FUNCTIONS if by == "function" else LINES
    known = known_moments(profile)
    if known is None or not known.get("iteration_ms"):
        reason = "no stack of Python code was sampled, and the recording has no Python frames"
        return unmeasured(columns, reason, profile, "lines")
    if by == "statement" and known.get("roles") is not None:
        return unmeasured(columns, "this recording does not tell which statements make up the step")
    try:
        table = LineTable(known).table(by)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InputError(f"the recording's lines (meta.lines) are damaged: {error!r}") from None
    if by != "function":
        inclusive_ms = dict(zip(_places(table), table["inclusive_ms"], strict=True))
        operators = _operators(profile, known, inclusive_ms)
        table["operators"] = [operators.get(at, "") for at in _places(table)]
    if step := profile.meta.get("reference"):  # sampling costs time of its own
        pace = step["ms"] / np.mean(known["iteration_ms"])
        for name in ("time_ms", "backward_ms", "inclusive_ms", "growth_ms"):
            table[name] *= pace
    return table[columns]


CHECKPOINT = ("", 0, "torch.utils.checkpoint")
"""Stands for the function that runs again where all of it is a library's."""


def _is_marked(path: Path, mark: str) -> bool:
    """Whether a library function of a mark runs below the last frame of a path."""
    return bool(path) and path[-1][1].endswith(mark)


class LineTable:
    """Moments by path, and the tables made of them."""

    def __init__(self, known: dict[str, Any]) -> None:
        self.known = known
        self.frames = [tuple(frame) for frame in known["frames"]]
        self.paths = [[(int(f), str(mark)) for f, mark in path] for path in known["paths"]]
        self.times = pd.DataFrame(known["times"])
        self.count = len(known["iteration_ms"])
        self.step_ms = float(np.mean(known["iteration_ms"]))
        self.counted = known["counted"]
        self.texts = _Texts(known)
        self._names: dict[str, int] = {}
        self.roles = _Roles(self)

    @cached_property
    def moments(self) -> pd.DataFrame:
        """Columns ``iteration``, ``thread``, ``path``, ``built`` (the path that built what
        runs backward, -1 for none), ``ms`` and ``samples``."""
        times = self.times.assign(built=-1)
        backward = pd.DataFrame(self.known.get("backward") or {"path": [], "ns": []})
        if backward["ns"].sum() <= 0:
            return times
        runs = self._in_marked("backward")
        shares = backward.assign(part=backward["ns"] / backward["ns"].sum())
        divided = times[runs].drop(columns="built")
        divided = divided.merge(shares[["path", "part"]].rename(columns={"path": "built"}), "cross")
        divided[["ms", "samples"]] = divided[["ms", "samples"]].mul(divided["part"], axis=0)
        return pd.concat([times[~runs], divided.drop(columns="part")], ignore_index=True)

    def roles_of_lines(self) -> dict[Place, str]:
        """The role of each line of the main thread."""
        table = self.table("line").query("thread == @MAIN")
        return dict(zip(_places(table), table["role"], strict=True))

    def backward_callers(self) -> pd.DataFrame:
        """The user's lines that run the backward pass, in the order in which they first do:
        ``file``, ``line``, ``function``, ``time_ms`` of a mean iteration and ``calls`` in it."""
        times = self.times[self._in_marked("backward")]
        last = [self.frames[self.paths[path][-1][0]] for path in times["path"]]
        table = pd.DataFrame(last, columns=["file", "first", "function", "line"])
        table["time_ms"] = times["ms"].to_numpy() / self.count
        keys = ["file", "line", "function"]
        table = table.groupby(keys, sort=False)["time_ms"].sum().reset_index()
        return table.assign(calls=[self.calls.get(at, np.nan) for at in _places(table)])

    @cached_property
    def calls(self) -> dict[Place, float]:
        """How often each line runs in the counted iteration."""
        return {(file, line): float(n) for file, line, n in self.counted.get("calls", [])}

    def forward_again(self) -> pd.DataFrame:
        """Functions of the forward pass that run below the backward pass too: ``function``,
        ``time_ms`` of a mean iteration, most first, and where the forward pass calls them
        (``file``, ``line``, ``caller``)."""
        callers, below = dict[Any, Any](), dict[int, Any]()
        backward = {path[-1][0] for path in self.paths if _is_marked(path, "backward")}
        for number, path in enumerate(self.paths):
            ran = [self.frames[frame] for frame, _ in path]
            places = (place for place, (frame, _) in enumerate(path) if frame in backward)
            first = next(places, len(ran))
            for caller, frame in itertools.pairwise(ran[: first + 1]):
                callers.setdefault(frame[:3], caller)
            if first + 1 < len(ran):
                below[number] = ran[first + 1][:3]
            elif _is_marked(path, "again"):
                below[number] = CHECKPOINT
            if _is_marked(path, "checkpoint"):
                callers.setdefault(CHECKPOINT, ran[-1])
        times = self.times[self.times["thread"].eq(0) & self.times["path"].isin(list(below))]
        sums = times["ms"].groupby(times["path"].map(below)).sum() / self.count
        ms_of: dict[Any, float] = sums.sort_values(ascending=False).to_dict()
        rows = [
            (function[2], ms, callers[function][0], callers[function][3], callers[function][2])
            for function, ms in ms_of.items()
            if function in callers  # else the backward pass of a function of the program's own
        ]
        return pd.DataFrame(rows, columns=["function", "time_ms", "file", "line", "caller"])

    def marked_ms(self, mark: str) -> float:
        """Time of the step's thread in library functions of a mark, ms of a mean iteration."""
        return float(self.times.loc[self._in_marked(mark), "ms"].sum()) / self.count

    def outside_modules(self) -> pd.DataFrame:
        """Functions of the model and of the loss that compute by themselves, in no layer of
        torch.nn: ``file``, ``function``, ``time_ms`` of a mean iteration with its backward pass,
        most first, the ``line`` with most of it, ``in_module``, whether a module of the
        program's holds them (if none does, the function counts with all that it calls), and
        ``weights``, whether it is weights that a layer's use computes anew."""
        modules = {
            self.frames[frame][:3]
            for path in self.paths
            for place, (frame, _) in enumerate(path)
            if any(mark.endswith("module") for _, mark in path[place:])
        }
        layers = {self.frames[path[-1][0]] for path in self.paths if _is_marked(path, "module")}
        main = self.moments[self.moments["thread"].eq(0)]
        times = main.groupby(["path", "built"], as_index=False)[["ms"]].sum()
        rows = []
        for path, built, ms in times.itertuples(index=False):
            ran = self.paths[path if built < 0 else built]
            role, depth = self.roles.of(ran)
            below = [self.frames[frame] for frame, _ in ran[depth + 1 :]]
            if role != "model" or not below or not modules:
                continue
            in_module = any(f[:3] in modules or f[2].endswith(".forward") for f in below)
            weights = ran[-1][1].endswith("weights")
            if weights or not in_module or below[-1] not in layers:
                file, _, function, line = below[-1 if in_module or weights else 0]
                rows.append((file, function, line, in_module, weights, ms / self.count))
        keys = ["file", "function", "in_module", "weights"]
        table = pd.DataFrame(rows, columns=[*keys[:2], "line", *keys[2:], "time_ms"])
        table = table.groupby([*keys, "line"], as_index=False)[["time_ms"]].sum()
        table = table.sort_values("time_ms", ascending=False)
        table["time_ms"] = table.groupby(keys)["time_ms"].transform("sum")
        return table.drop_duplicates(keys).sort_values("time_ms", ascending=False)

    def _in_marked(self, mark: str) -> Bools:
        """Which of the times (n,) of the step's thread are in library functions of a mark."""
        marked = np.array([_is_marked(path, mark) for path in self.paths])[self.times["path"]]
        return marked & self.times["thread"].eq(0).to_numpy()

    def table(self, by: str) -> pd.DataFrame:
        """Rows of :func:`lines` or :func:`functions`, without operators, at the samples' pace."""
        moments = self.moments
        pairs = moments[["path", "built"]].drop_duplicates()
        rows = []
        for path, built in pairs.itertuples(index=False):
            frames = [frame for frame, _ in self.paths[path]]
            if built >= 0:
                frames += [frame for frame, _ in self.paths[built]]
            if "ours" in str(self.paths[path][-1:]):
                frames = []
            role, depth = self.roles.of(self.paths[path])
            if by == "statement" and frames:
                frames = [frames[depth]]
            held = {self._key(frame, by): frame for frame in frames} or {("", 0): -1}
            last = self._key(frames[-1], by) if frames else ("", 0)
            for key, frame in held.items():
                rows.append((path, built, *key, frame, key == last, role))
        names = ["path", "built", "file", "number", "frame", "own", "role"]
        table = moments.merge(pd.DataFrame(rows, columns=names), on=["path", "built"])
        # a statement may make the batch and run the model: ``model(tokens(texts))``
        keys = ["file", "number", "thread", *(["role"] if by == "statement" else [])]
        table["own_ms"] = table["ms"] * table["own"]
        table["back_ms"] = table["own_ms"] * table["built"].ge(0)
        grouped = table.groupby(keys, sort=False)
        result: pd.DataFrame = grouped[["own_ms", "back_ms", "ms"]].sum() / self.count
        result.columns = pd.Index(["time_ms", "backward_ms", "inclusive_ms"])
        # the one with the most time, for a frame its own first
        for column in ("frame",) if "role" in keys else ("role", "frame"):
            weight = table["ms"] * (1e-6 + table["own"] if column == "frame" else 1.0)
            sums = table.assign(weight=weight).groupby([*keys, column])["weight"].sum()
            ranked = sums.sort_values().reset_index(column)
            result[column] = ranked.groupby(level=keys)[column].last()
        seen = table.groupby([*keys, "iteration"])["samples"].sum().unstack(fill_value=0)
        result["in_iterations"] = pd.Series(self._presence(seen.to_numpy()), index=seen.index)
        own = table.groupby([*keys, "iteration"])["own_ms"].sum().unstack(fill_value=0)
        own = own.reindex(columns=range(self.count), fill_value=0.0)
        result["growth_ms"] = pd.Series(growth(own.to_numpy()), index=own.index)
        # another thread's time counts where it computes in the program's own code
        file, thread = (result.index.get_level_values(name) for name in ("file", "thread"))
        idle = (file == "") | (result["inclusive_ms"] < LEAST_THREAD * self.step_ms)
        result = result[~(idle & (thread > 0))]
        result = result.reset_index().sort_values("time_ms", ascending=False, kind="stable")
        result["function"] = [self.frames[f][2] if f >= 0 else "" for f in result["frame"]]
        result["line"] = [self.frames[f][3] if f >= 0 else 0 for f in result["frame"]]
        result["thread"] = [self.known["threads"][thread] for thread in result["thread"]]
        result["share_of_step"] = result["time_ms"] / self.step_ms
        result["inclusive_share"] = result["inclusive_ms"] / self.step_ms
        result.loc[result["file"].eq(""), ["role", "in_iterations"]] = "around", 1.0
        result.loc[result["thread"].astype(str).str.startswith(WORKER), "role"] = "batch"
        places = _places(result)
        result["calls"] = [self.calls.get(at, np.nan) for at in places]
        result.loc[result["thread"].ne(MAIN), "calls"] = np.nan
        # the samples of a short line come in clusters: that it ran when it was counted tells more
        often = result["calls"].gt(0) & result["in_iterations"].gt(0.5)
        result.loc[often, "in_iterations"] = 1.0
        result["source"] = [self.texts.line(*at).strip() for at in places]
        return result.reset_index(drop=True)

    def _key(self, frame: int, by: str) -> tuple[str, int]:
        file, first, function, line = self.frames[frame]
        if by != "function":
            return file, line
        # a trace does not say where a function begins: its name tells it from others of the file
        return file, first or -1 - self._names.setdefault(function, len(self._names))

    def _presence(self, samples: Floats) -> Floats:
        """In which share of the iterations each line (n, iterations) runs; NaN where few samples
        say nothing.

        A short line is missed by the samples of some iterations in which it runs: as often as
        the number of samples where it is seen implies.
        """
        seen = (samples > 0).sum(axis=1)
        total = samples.sum(axis=1)
        mean = np.maximum(total / np.maximum(seen, 1), 1.0)
        rate = mean.copy()
        for _ in range(40):  # rate / (1 - exp(-rate)) is the mean where there is any
            rate = mean * -np.expm1(-rate)
        share = seen / np.maximum(self.count * -np.expm1(-rate), 1e-9)
        return np.where(total < LEAST_SAMPLES, np.nan, np.minimum(share, 1.0))


def growth(series: Floats) -> Floats:
    """Slope of each row (n, iterations) by least squares; 0 where it is not significant."""
    count = series.shape[1]
    if count < LEAST_ITERATIONS:
        return np.zeros(len(series))
    at = np.arange(count) - (count - 1) / 2
    slope = series @ at / (at @ at)
    rest = series - series.mean(axis=1, keepdims=True) - np.outer(slope, at)
    error = np.sqrt((rest**2).sum(axis=1) / (count - 2) / (at @ at))
    return np.where(np.abs(slope) > SURE * error, slope, 0.0)


# ---- roles -----------------------------------------------------------------------------------


class _Roles:
    """What the line of a path is for.

    A step function is one that calls ``backward``, or is above it, called from where it was seen
    there. Its source tells which of its lines make the batch and which are the model; what is
    below these is so too.
    """

    def __init__(self, table: LineTable) -> None:
        self.frames, self.texts = table.frames, table.texts
        counted = table.counted
        self.batch_functions = {(file, first) for file, first, _ in counted.get("batch", [])}
        paths = [table.paths[number] for number in counted.get("backward", [])]
        paths += [path for path in table.paths if _is_marked(path, "backward")]
        built = [table.paths[number] for _, _, number in counted.get("built", [])]
        built += [path for path in table.paths if any(m.endswith("module") for _, m in path)]
        self.built: dict[tuple[Any, ...], set[int]] = {}
        for path in built:
            for depth, (frame, _) in enumerate(path):
                key = self._instance(path, depth)
                self.built.setdefault(key, set()).add(self.frames[frame][3])
        self.steps: dict[tuple[Any, ...], tuple[set[int], set[int]]] = {}
        self.given: dict[Place, str] | None = table.known.get("roles")
        for path in paths if self.given is None else []:
            self._learn(path)

    def _instance(self, path: Path, depth: int) -> tuple[Any, ...]:
        """A function as it is called in a path: the lines above it, and itself."""
        file, first, function, _ = self.frames[path[depth][0]]
        return (*(self.frames[frame] for frame, _ in path[:depth]), (file, first, function))

    def _learn(self, path: Path) -> None:
        wanted: set[str] | None = None
        inner: tuple[str, Source] | None = None
        for depth in range(len(path) - 1, -1, -1):
            file, first, function, line = self.frames[path[depth][0]]
            key = self._instance(path, depth)
            batch, model = self.steps.setdefault(key, (set(), set()))
            model.add(line)
            source = self.texts.source(file, first)
            if source is None:
                inner, wanted = None, set()
                continue
            if inner is not None:
                wanted = source.passed(line, inner[0], inner[1], wanted or set())
            methods = self.texts.methods(file, function.rpartition(".")[0])
            step = source.step(line, wanted, self.built.get(key, set()), methods)
            model |= step.model
            batch |= step.batch - model
            wanted = step.parameters
            inner = (function.rpartition(".")[2], source)

    def of(self, path: Path) -> tuple[str, int]:
        """The role of what a path runs, and the place in it of the statement of the step."""
        if not path:
            return "around", 0
        depth = max(
            (d for d in range(len(path)) if self._instance(path, d) in self.steps), default=-1
        )
        marks = [mark.partition(" ")[2] for _, mark in path]
        given = [mark.partition(" ")[0] for _, mark in path]
        functions = [self.frames[frame][:3] for frame, _ in path]
        last = self.frames[path[-1][0]]
        if self.given and (last[0], last[3]) in self.given:
            return self.given[last[0], last[3]], 0
        if any(given):  # a part of our own step
            return [role for role in given if role][-1], max(depth, 0)
        ends = [name.endswith(".step") for _, _, name in functions[1:]] + [True]
        if any(m == "optimizer" and end for m, end in zip(marks, ends, strict=True)):
            return "optimizer", max(depth, 0)
        module = marks.index("module") if "module" in marks else len(path)
        makes = any(
            function[:2] in self.batch_functions for function in functions[depth + 1 : module + 1]
        )
        if depth >= 0:
            batch, model = self.steps[self._instance(path, depth)]
            line = self.frames[path[depth][0]][3]
            if line in batch or marks[depth] in LOADING or (line in model and makes):
                return "batch", depth
            return "model" if line in model else "around", depth
        if any(mark in LOADING for mark in marks) or makes:
            return "batch", 0
        if "backward" in marks or (module < len(path) and not self.steps):
            return "model", 0
        names = " ".join(name.lower() for _, _, name in functions)
        return "batch" if any(word in names for word in BATCH_WORDS) else "around", 0


class _Texts:
    """Source text of the user's functions, as it was when they were recorded."""

    def __init__(self, known: dict[str, Any] | None) -> None:
        self._blocks = [(str(f), int(n), str(t)) for f, n, t in (known or {}).get("sources", [])]
        self._functions = {
            (str(f), int(n), str(name)) for f, n, name, _ in (known or {}).get("frames", [])
        }
        self._parsed: dict[tuple[str, int], Source | None] = {}

    def function(self, file: str, line: int) -> dict[int, str]:
        """The lines, by number, of the innermost known function around a line."""
        best: dict[int, str] = {}
        for name, first, text in self._blocks:
            rows = text.splitlines()
            inside = name == file and first <= line < first + len(rows)
            if inside and (not best or len(rows) < len(best)):
                best = dict(enumerate(rows, first))
        return best

    def line(self, file: str, line: int) -> str:
        return self.function(file, line).get(line, "")

    def methods(self, file: str, owner: str) -> dict[str, set[str]]:
        """Attributes that the methods of a class bind, by the name that calls one, ``self.x``."""
        bound: dict[str, set[str]] = {}
        for name, first, function in self._functions:
            if owner and name == file and function.rpartition(".")[0] == owner:
                source = self.source(file, first)
                called = f"self.{function.rpartition('.')[2]}"
                bound[called] = source.attributes() if source else set()
        return bound

    def source(self, file: str, first: int) -> Source | None:
        """The parsed function that begins at a line; None where its text is not known."""
        key = (file, max(first, 1))
        if key not in self._parsed:
            text = next((text for *at, text in self._blocks if tuple(at) == key), None)
            try:
                self._parsed[key] = Source(text, key[1]) if text else None
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                self._parsed[key] = None
        return self._parsed[key]


def _operators(
    profile: Profile, known: dict[str, Any], inclusive_ms: dict[Place, float]
) -> dict[Place, str]:
    """The largest operators below each (file, line), as text.

    Those that build nodes of the backward pass are known exactly. Of others a sampled frame
    around them tells the line, which is trusted where they take a good part of its time.
    """
    contexts = profile.contexts
    users, files, _ = _user_frames(profile, profile.of_kind("python"))
    line = nearest(contexts["parent"].to_numpy(), users)
    metric = "gpu_time_ms" if profile.has("gpu_time_ms") else "cpu_time_ms"
    kinds = ["kernel", "copy"] if metric == "gpu_time_ms" else ["operator"]
    chosen = contexts["kind"].isin(kinds).to_numpy() & (line >= 0)
    keys = ["file", "line", "name"]
    table = contexts.loc[chosen, ["name"]].assign(ms=profile.value_table(metric)[chosen])
    table["file"], table["line"] = files[line[chosen]], contexts["line"].to_numpy()[line[chosen]]
    table = table.groupby(keys)["ms"].sum().reset_index()
    table["ms"] /= iteration_count(profile)
    whole_ms = [inclusive_ms.get(at, 0.0) for at in _places(table)]
    sure = np.array(whole_ms) > LEAST_LINE * np.mean(known["iteration_ms"])
    table = table[sure & (table["ms"] > LEAST_SHARE * np.array(whole_ms))]
    exact = pd.DataFrame(known.get("operators") or {"path": [], "name": [], "ns": []})
    last = [known["frames"][known["paths"][path][-1][0]] for path in exact["path"]]
    exact["file"], exact["line"] = [f[0] for f in last], [f[3] for f in last]
    exact["ms"] = exact["ns"] / 1e6
    places = set(_places(exact))
    unsure = [at not in places for at in _places(table)]
    table = pd.concat([exact[[*keys, "ms"]], table[unsure]])
    table = table.sort_values("ms", ascending=False).groupby(keys[:2]).head(MOST_OPERATORS)
    named: dict[Place, list[str]] = {}
    for row in table[table["ms"] > 0].to_dict("records"):
        named.setdefault((row["file"], row["line"]), []).append(row["name"])
    return {at: ", ".join(names) for at, names in named.items()}


def _places(table: pd.DataFrame) -> list[Place]:
    return list(zip(table["file"], table["line"], strict=True))
