"""Mends the one kind of Python frame record that makes hpcprof abort.

hpcrun writes the names of Python functions to ``logical/`` of a measurement:
``HPCLOGICAL``, then one stanza per function: a 4-byte id, the function's name,
one byte of mangling, the file's name, a 4-byte line number; integers are
big-endian, strings have their 4-byte length in front. (Source: HPCToolkit's
``src/hpcrun/logical/common.c`` and ``src/hpcprof/finalizers/logical.cpp``.)

Module-level code that was compiled without a file name gets a stanza with both
names empty, on which hpcprof ends with "FATAL: Invalid logical stanza, both
names are empty!". Whether a sample meets such code is chance; in short runs of
torch programs it happened about every second time. The time is measured all the
same, so the stanza is given a name instead of measuring again.
"""

from __future__ import annotations

import struct
from pathlib import Path

MAGIC = b"HPCLOGICAL"
STAND_IN = b"<module of unknown file>"


def name_unnamed_modules(measurements: Path) -> int:
    """Name what has no name in a measurement's records of Python functions.

    Files that hpcprof can read, and those that are not understood, stay as they are.

    Returns:
        How many stanzas were named.
    """
    named = 0
    for path in sorted(measurements.glob("logical/*")):
        try:
            data = path.read_bytes()
            mended, count = _mend(data)
            if count:
                path.write_bytes(mended)
                named += count
        except (OSError, struct.error):
            continue  # not readable, or cut short: hpcprof's to judge
    return named


def _mend(data: bytes) -> tuple[bytes, int]:
    """A logical file with its unnamed stanzas named, and how many there were.

    Raises:
        struct.error: the file ends inside a stanza.
    """
    if not data.startswith(MAGIC):
        return data, 0
    pieces = [MAGIC]
    count = 0
    position = len(MAGIC)
    while position < len(data):
        start = position
        function_at = position + 4
        function_length = _length(data, function_at)
        mangling_at = function_at + 4 + function_length
        file_at = mangling_at + 1
        file_length = _length(data, file_at)
        position = file_at + 4 + file_length + 4
        if position > len(data):
            raise struct.error("the last stanza is cut short")
        if function_length == 0 and file_length == 0:
            count += 1
            pieces += [
                data[start:function_at],
                struct.pack(">I", len(STAND_IN)) + STAND_IN,
                data[mangling_at:position],
            ]
        else:
            pieces.append(data[start:position])
    return b"".join(pieces), count


def _length(data: bytes, position: int) -> int:
    (length,) = struct.unpack_from(">I", data, position)
    return int(length)
