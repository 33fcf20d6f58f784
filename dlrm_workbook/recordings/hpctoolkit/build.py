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

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dlrm_workbook.processes import (
    Completed,
    MeasurementError,
    ProgressCallback,
    fresh_path,
    run_child,
)
from dlrm_workbook.recordings.hpctoolkit.passes import (
    hpcprof_command,
    hpcstruct_command,
    make_safe,
)
from dlrm_workbook.recordings.hpctoolkit.tools import Tools

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


# From measurements to a database: hpcstruct, then hpcprof.

DATABASE_FILES = ("meta.db", "profile.db", "cct.db")
"""Without these there is no database; ``trace.db`` only exists with ``-t``."""

MB = 1_000_000

# hpcstruct: " begin parallel analysis of CPU binary NAME (size = ...)"
_BINARY = re.compile(rb"^\s*begin .* binary (\S+)")

# paths of load modules stand in a .hpcrun file as plain strings behind a length
_PATH = re.compile(rb"/[\x20-\x7e\x80-\xff]{1,4095}")


class DatabaseAborted(MeasurementError):
    """hpcprof died on these measurements; it always does on the same ones."""


@dataclass(frozen=True)
class Stage:
    """What the stages of one measurement share: logs, environment, progress, threads."""

    tools: Tools
    logs: Path
    environment: Mapping[str, str]
    jobs: int
    progress: ProgressCallback | None = None


def recover_structure(
    stage: Stage, name: str, measurements: Path, *, cache: Path | None, limit_mb: int,
    timeout_s: float,
) -> list[str]:  # fmt: skip
    """Run hpcstruct on a measurement directory; never fails, only says what is missing.

    Binaries above ``limit_mb`` (millions of bytes) are skipped: on the 434 MB
    ``libtorch_cpu.so`` hpcstruct took over 19 GB of memory and minutes without end.

    Args:
        stage: tools, logs, environment, threads, progress.
        name: the pass, for progress and log names.
        measurements: hpcrun's output directory.
        cache: folder of structure files kept between runs, or None.
        limit_mb: size from which a binary is skipped.
        timeout_s: seconds for the whole stage.

    Returns:
        Notices for the reader of the figures.
    """
    lost = "loops and inlined functions are missing"
    if stage.tools.hpcstruct is None:
        return [f"hpcstruct is not installed: {lost}"]
    if not make_safe(measurements):
        return [f"hpcstruct cannot take the path {str(measurements)!r}: {lost}"]
    if cache is not None and (not make_safe(cache) or not _makes(cache)):
        cache = None
    notices = []
    structs = measurements / "structs"
    structs.mkdir(exist_ok=True)
    skipped = oversized_binaries(measurements, limit_mb * MB)
    stand_ins = [structs / f"{binary.name}.hpcstruct" for binary in skipped]
    for stand_in in stand_ins:
        # newer than the binary: hpcstruct's make takes it for done
        stand_in.touch()
    try:
        completed = run_child(
            hpcstruct_command(stage.tools, measurements, cache, stage.jobs),
            stage=f"{name}: hpcstruct",
            logs=stage.logs,
            environment=stage.environment,
            timeout_s=timeout_s,
            progress=stage.progress,
            detail=_BINARY,
        )
    except MeasurementError as error:
        return [f"{error}: {lost}"]
    finally:
        for stand_in in stand_ins:
            stand_in.unlink(missing_ok=True)
        _remove_unfinished(structs)
    for binary in skipped:
        size = binary.stat().st_size / MB
        notices.append(
            f"hpcstruct skipped {binary.name} ({size:.0f} MB, limit {limit_mb} MB): its loops and "
            "inlined functions are missing"
        )
    if completed.timed_out:
        notices.append(
            f"hpcstruct was ended after {timeout_s:.0f} s: {lost} for the binaries it had not done"
        )
    elif completed.exit_code != 0:
        notices.append(
            f"hpcstruct ended with exit code {completed.exit_code} ({completed.last_words()}): "
            f"{lost} for some binaries"
        )
    elif not any(structs.glob("*.hpcstruct")):
        notices.append(f"hpcstruct wrote nothing ({completed.last_words()}): {lost}")
    return notices


def build_database(
    stage: Stage, name: str, measurements: Path, wanted: Path, *, timeout_s: float
) -> tuple[Path, list[str]]:
    """Run hpcprof.

    Returns:
        The database's folder (``wanted`` unless somebody else made that folder
        meanwhile) and notices.

    Raises:
        DatabaseAborted: hpcprof died by a signal or an internal check.
        MeasurementError: it failed in another way or wrote no database.
    """
    wanted = fresh_path(wanted)
    completed = run_child(
        hpcprof_command(stage.tools, measurements, wanted, stage.jobs),
        stage=f"{name}: hpcprof",
        logs=stage.logs,
        environment=stage.environment,
        timeout_s=timeout_s,
        progress=stage.progress,
    )
    if completed.timed_out:
        raise MeasurementError(
            f"hpcprof was ended after {timeout_s:.0f} s on {measurements}; see {completed.log}"
        )
    if completed.exit_code >= 128 or _fatal(completed):
        raise DatabaseAborted(
            f"hpcprof aborts on {measurements} (exit code {completed.exit_code}: "
            f"{_fatal(completed) or completed.last_words()}); see {completed.log}"
        )
    if completed.exit_code != 0:
        raise MeasurementError(
            f"hpcprof failed on {measurements} with exit code {completed.exit_code}: "
            f"{completed.last_words()}; see {completed.log}"
        )
    if _is_database(wanted):
        return wanted, []
    # onto an existing folder hpcprof writes NAME-<8 hex> and says nothing by its exit code
    for other in sorted(wanted.parent.glob(f"{wanted.name}-*")):
        if re.fullmatch(r"-[0-9a-f]{8}", other.name[len(wanted.name) :]) and _is_database(other):
            return other, [f"hpcprof wrote {other.name} because {wanted.name} existed"]
    raise MeasurementError(
        f"hpcprof ended with exit code 0 but wrote no database at {wanted}; see {completed.log}"
    )


def oversized_binaries(measurements: Path, limit_bytes: int) -> list[Path]:
    """Load modules of a measurement that are larger than ``limit_bytes``, by name.

    Read from the ``.hpcrun`` files, so that it is known before hpcstruct starts.
    """
    found: dict[str, Path] = {}
    seen: set[bytes] = set()
    for profile in measurements.glob("*.hpcrun"):
        if profile.stat().st_size == 0:
            continue
        with profile.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            seen.update(match.group() for match in _PATH.finditer(data))
    for name in seen:
        path = Path(name.decode("utf-8", "surrogateescape"))
        try:
            if path.is_file() and path.stat().st_size > limit_bytes and _is_elf(path):
                found.setdefault(path.name, path)
        except (OSError, ValueError):
            continue  # not a path after all
    return [found[name] for name in sorted(found)]


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _is_database(folder: Path) -> bool:
    return all((folder / name).is_file() for name in DATABASE_FILES)


def _makes(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return True


def _remove_unfinished(structs: Path) -> None:
    """Take away structure files that an interrupted hpcstruct left half written."""
    for path in structs.glob("*.hpcstruct"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64))
            whole = b"</HPCToolkitStructure>" in file.read()
        if not whole:
            path.unlink()


def _fatal(completed: Completed) -> str:
    match = re.search(r"^.*\bFATAL\b.*$", completed.stdout + completed.stderr, re.MULTILINE)
    return match.group().strip()[:300] if match else ""
