"""How often each line of the user's code runs in one iteration, and what its tensors become.

One iteration runs under a trace function of Python, which sees each line of the user's
functions on the thread that trains. From that follow, without any change to the program:

* how often each line runs;
* which line built which nodes of the backward pass: autograd numbers them, and the number is read
  whenever a line ends;
* which line calls ``backward``;
* which functions made the batch: they returned a tensor, or an array, that the outermost module
  got as an input.

Such an iteration is slow, so none of its times is used. Needs Python, torch and numpy.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from dlrm_workbook.recordings.torch.modules import has_compiled
from dlrm_workbook.recordings.torch.places import user_frames
from dlrm_workbook.recordings.torch.sampling import is_user_code

LIMIT_S = 5.0
"""Seconds after which the trace function gives up."""

MOST_LINES = 200_000
"""Lines of a function that are counted; from then on only its calls are seen."""

HELD_BYTES = 256 << 20
"""Of results that are kept meanwhile, so that nothing else has their address."""

BACKWARD = ("backward", "grad", "_engine_run_backward")
"""Functions of torch that run the backward pass."""

COMPILED = "torch.compile would compile anew for a trace function"

Path = tuple[tuple[str, int, str, int], ...]
"""User's frames, outermost first: (file, first line of the function, function, line)."""


class LineCounter:
    """A trace function for one iteration, between :meth:`start` and :meth:`stop`.

    Attributes:
        missing: why nothing, or not everything, was counted; None if everything was.
    """

    def __init__(self) -> None:
        self.missing: str | None = None
        self._runs: Counter[tuple[CodeType, int, int]] = Counter()
        self._counted: Counter[CodeType] = Counter()
        """Lines of each function that have been counted."""
        self._built: list[tuple[int, int, Path]] = []
        self._backward: dict[Path, None] = {}
        self._makers: dict[int, list[CodeType]] = {}
        self._held: list[Any] = []
        self._room = HELD_BYTES
        self._batch: dict[CodeType, None] = {}
        self._frame: FrameType | None = None
        """The user's frame that runs, at :attr:`_line`: its own number has moved on already when
        a line ends."""
        self._line = 0
        self._module: FrameType | None = None
        """The outermost call of a module that runs."""
        self._frames: list[FrameType] = []

    def start(self, frame: FrameType | None) -> None:
        """Trace from now on, from the innermost ``frame`` that runs; those of the user's on its
        stack are traced."""
        if sys.gettrace() is not None:
            self.missing = "another trace function, of a debugger or of coverage, is installed"
            return
        if has_compiled():
            self.missing = COMPILED
            return
        self._deadline = time.perf_counter() + LIMIT_S
        self._frames = list(user_frames(frame))
        self._frame = next(iter(self._frames), None)
        for user in self._frames:
            user.f_trace = self._local
        try:
            self._first = self._sequence = torch.autograd._get_sequence_nr()
        except AttributeError:
            self.missing = "this version of torch does not number the nodes of the backward pass"
            return
        self._line = self._frame.f_lineno or 0 if self._frame else 0
        sys.settrace(self._called)

    def stop(self) -> None:
        if sys.gettrace() == self._called:
            sys.settrace(None)
            self._close()
        for frame in self._frames:
            frame.f_trace = None
        self._frames, self._held, self._makers = [], [], {}
        self._frame = self._module = None

    def document(self) -> dict[str, Any]:
        """What was seen, as JSON holds it; ``missing`` alone where nothing was.

        ``calls`` are (file, line, how often it ran), ``built`` (first and last number of the
        nodes, the path that built them, outermost first) and ``advance`` how many there were,
        ``backward`` paths that call it, and ``batch`` (file, first line, function) what made it.
        """
        if self.missing is not None:
            return {"missing": self.missing}
        # a statement that spans lines comes back to its first one: at another place in its code
        calls: dict[tuple[str, int], int] = {}
        for (code, line, _), count in self._runs.items():
            if self._is_hot(code):
                continue
            key = code.co_filename, line
            calls[key] = max(calls.get(key, 0), count)
        return {
            "calls": [(*key, count) for key, count in calls.items()],
            "built": [(a - self._first, b - self._first, path) for a, b, path in self._built],
            "advance": self._sequence - self._first,
            "backward": list(self._backward),
            "batch": [(c.co_filename, c.co_firstlineno, c.co_qualname) for c in self._batch],
        }

    def codes(self) -> list[CodeType]:
        """The user's functions that ran."""
        return list(dict.fromkeys(code for code, _, _ in self._runs))

    # ---- the trace function -----------------------------------------------------------

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        try:
            if is_user_code(code.co_filename, code.co_qualname):
                self._close()
                self._frame, self._line = frame, code.co_firstlineno
                frame.f_trace_lines = not self._is_hot(code)
                return self._local
            if code.co_name == "_call_impl" and self._module is None:
                if code.co_filename.endswith("/torch/nn/modules/module.py"):
                    self._module = frame
                    self._note_inputs(frame)
                    frame.f_trace_lines = False
                    return self._module_ends
            elif code.co_name in BACKWARD and "/torch/" in code.co_filename:
                self._backward.setdefault(self._path())
            self._is_late()
        except Exception as error:
            self._fail(error)
        return None

    def _module_ends(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "return" and frame is self._module:
            self._module = None
        return self._module_ends

    def _local(self, frame: FrameType, event: str, value: Any) -> Any:
        try:
            if event == "line":
                self._close()
                self._frame, self._line = frame, frame.f_lineno or 0
                self._runs[frame.f_code, self._line, frame.f_lasti] += 1
                self._counted[frame.f_code] += 1
                frame.f_trace_lines = not self._is_hot(frame.f_code)
                if self._is_late():
                    return None
            elif event == "return":
                self._close()
                if self._module is None:
                    self._note_result(frame.f_code, value)
                outer = next(user_frames(frame.f_back), None)
                self._frame, self._line = outer, outer.f_lineno or 0 if outer else 0
        except Exception as error:
            self._fail(error)
            return None
        return self._local

    def _give_up(self, why: str) -> None:
        sys.settrace(None)
        self.missing = why

    def _fail(self, error: Exception) -> None:
        self._give_up(f"counting failed: {type(error).__name__}: {error}")

    def _is_late(self) -> bool:
        """Whether it takes too long; then nothing more is traced."""
        late = time.perf_counter() > self._deadline
        if late:
            self._give_up(
                f"one iteration took longer than {LIMIT_S:.0f} s while lines were counted"
            )
        return late

    def _close(self) -> None:
        """The nodes built since the last line ended are of the line that runs."""
        now = torch.autograd._get_sequence_nr()
        if now > self._sequence:
            # of a function whose lines are seen no more, which built them is not known
            if self._frame is None or not self._is_hot(self._frame.f_code):
                self._built.append((self._sequence, now, self._path()))
            self._sequence = now

    def _is_hot(self, code: CodeType) -> bool:
        return self._counted[code] >= MOST_LINES

    def _path(self) -> Path:
        path: list[tuple[str, int, str, int]] = []
        for frame in user_frames(self._frame):
            code, line = frame.f_code, (frame.f_lineno or 0) if path else self._line
            path.append((code.co_filename, code.co_firstlineno, code.co_qualname, line))
        return tuple(reversed(path))

    def _note_result(self, code: CodeType, value: Any) -> None:
        found = dict(_addresses(value))
        if self._room < sum(found.values()):
            return
        for address, size in found.items():
            makers = self._makers.setdefault(address, [])
            if code not in makers:
                makers.append(code)
                self._room -= size
                self._held.append(value)

    def _note_inputs(self, frame: FrameType) -> None:
        inputs = [frame.f_locals.get(name) for name in ("args", "kwargs")]
        for address, _ in _addresses(inputs):
            self._batch.update(dict.fromkeys(self._makers.get(address, ())))


def _addresses(value: Any, depth: int = 3) -> Iterator[tuple[int, int]]:
    """Address and bytes of tensors without gradients, and of arrays, among a value."""
    if isinstance(value, torch.Tensor):
        if not value.requires_grad and value.layout == torch.strided and value.numel():
            with contextlib.suppress(RuntimeError):  # of one that holds no numbers
                yield value.untyped_storage().data_ptr(), value.untyped_storage().nbytes()
    elif isinstance(value, np.ndarray):
        yield value.__array_interface__["data"][0], value.nbytes
    elif depth and isinstance(value, (tuple, list, dict)):
        inner = value.values() if isinstance(value, dict) else value
        for one in list(inner)[:100]:
            yield from _addresses(one, depth - 1)
    elif depth and type(value).__module__ not in ("builtins", "torch"):
        held = getattr(value, "__dict__", None)
        if type(held) is dict and not isinstance(value, torch.nn.Module):
            yield from _addresses(held, depth - 1)
