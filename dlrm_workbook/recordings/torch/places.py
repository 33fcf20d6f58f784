"""Where in its own code a program makes or calls something. Needs the standard library only."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from dlrm_workbook.recordings.torch.sampling import is_user_code

MADE: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The place of the program at which an object of the classes of :func:`note_places` was made."""


def note_places(*classes: Any) -> None:
    """Note from now on where objects of some classes are made."""

    def noting(make: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            with contextlib.suppress(Exception):  # a class of the program may have no hash
                frame = user_frame()
                while frame is not None and _constructs(frame, self):
                    frame = user_frame(frame.f_back)
                if frame is not None:
                    MADE[self] = place_of(frame)
            make(self, *args, **kwargs)

        # not functools.wraps: torch looks at the dictionary of what it decorates
        __init__.__wrapped__ = make  # type: ignore[attr-defined]
        return __init__

    for one in classes:
        one.__init__ = noting(one.__init__)


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the program's own code, from a frame on outwards."""
    while frame is not None:
        if is_user_code(frame.f_code.co_filename, frame.f_code.co_qualname):
            yield frame
        frame = frame.f_back


def user_frame(frame: FrameType | None = None) -> FrameType | None:
    """The innermost frame of the program's own code, from a frame or here; None for none."""
    return next(user_frames(frame or sys._getframe(1)), None)


def line_of(code: CodeType, line: int | None) -> dict[str, Any]:
    """``file``, ``line`` and ``function``, as recordings keep a line of the program."""
    return {"file": code.co_filename, "line": line, "function": code.co_qualname}


def place_of(frame: FrameType | None) -> str:
    """``train.py:41``, relative to where the program runs; '' without a frame."""
    if frame is None:
        return ""
    file = Path(frame.f_code.co_filename).absolute()
    with contextlib.suppress(ValueError, OSError):  # the working folder may be gone
        file = file.relative_to(Path.cwd())
    return f"{file}:{frame.f_lineno}"


def name_at(frame: FrameType | None, value: object, otherwise: str) -> str:
    """How the program's code at a frame calls an object: ``model``, ``self.tower``."""
    if frame is None:
        return otherwise
    owner = getattr(frame.f_locals.get("self"), "__dict__", {})
    parts = owner.get("_modules") or {}
    places = (("", frame.f_locals), ("", frame.f_globals), ("self.", owner), ("self.", parts))
    for prefix, names in places:
        for name, held in list(names.items()):
            if held is value:
                return prefix + name
    return otherwise


def _constructs(frame: FrameType, made: object) -> bool:
    code = frame.f_code
    return code.co_name == "__init__" and frame.f_locals.get(code.co_varnames[0]) is made
