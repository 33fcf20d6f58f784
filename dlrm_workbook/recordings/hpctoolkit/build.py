"""From measurements to a database: hpcstruct, then hpcprof."""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

from dlrm_workbook.ground.machine import usable_cores
from dlrm_workbook.ground.processes import Completed, MeasurementError, fresh_path
from dlrm_workbook.ground.profiling import ProfilingConfig
from dlrm_workbook.recordings.hpctoolkit.failures import Failed
from dlrm_workbook.recordings.hpctoolkit.format import NEEDED_FILES
from dlrm_workbook.recordings.hpctoolkit.passes import make_safe
from dlrm_workbook.recordings.hpctoolkit.tools import Tools

RunChild = Callable[..., Completed]
"""``run_child`` with the logs, environment and progress of one measurement."""

STRUCTURE_TIMEOUT_S = 30.0
DATABASE_TIMEOUT_S = 1800.0

MB = 1_000_000

# hpcstruct: " begin parallel analysis of CPU binary NAME (size = ...)"
_BINARY = re.compile(rb"^\s*begin .* binary (\S+)")

# paths of load modules stand in a .hpcrun file as plain strings behind a length
_PATH = re.compile(rb"/[\x20-\x7e\x80-\xff]{1,4095}")

LOGICAL_MAGIC = b"HPCLOGICAL"
STAND_IN = b"<module of unknown file>"


def recover_structure(
    tools: Tools, run: RunChild, name: str, measurements: Path, config: ProfilingConfig
) -> list[str]:
    """Run hpcstruct on a measurement directory; never fails, only says what is missing, in notices
    for the reader of the figures.

    Binaries above ``profiling.structure_limit_mb`` (millions of bytes) are skipped: Python's,
    OpenBLAS's and torch's own take half a minute together, and on the 434 MB ``libtorch_cpu.so``
    hpcstruct took over 19 GB of memory and minutes without end. What it finds is kept for later
    measurements in the user's cache folder.
    """
    lost = "loops and inlined functions are missing"
    if tools.hpcstruct is None:
        return [f"hpcstruct is not installed: {lost}"]
    if not make_safe(measurements):
        return [f"hpcstruct cannot take the path {str(measurements)!r}: {lost}"]
    structs = measurements / "structs"
    structs.mkdir(exist_ok=True)
    limit_mb = config.structure_limit_mb
    skipped = oversized_binaries(measurements, limit_mb * MB)
    stand_ins = [structs / f"{binary.name}.hpcstruct" for binary in skipped]
    for stand_in in stand_ins:
        # newer than the binary: hpcstruct's make takes it for done
        stand_in.touch()
    cache = _structure_cache()
    keep = ["-c", str(cache)] if cache is not None else ["--nocache"]
    # loops of kernels need nvdisasm, and it is slow
    control = ["--gpucfg", "yes"] if config.gpu_control_flow else []
    jobs = str(usable_cores())
    try:
        done = run(
            [str(tools.hpcstruct), "-j", jobs, *keep, *control, str(measurements)],
            stage=f"{name}: hpcstruct",
            timeout_s=STRUCTURE_TIMEOUT_S,
            on_line=_binary_in,
        )
    except MeasurementError as error:
        return [f"{error}: {lost}"]
    finally:
        for stand_in in stand_ins:
            stand_in.unlink(missing_ok=True)
        _remove_unfinished(structs)
    sizes = (f"{binary.name} ({binary.stat().st_size / MB:.0f} MB)" for binary in skipped)
    listed = f"hpcstruct skipped {', '.join(sizes)}, limit {limit_mb} MB: {lost} there"
    notices = [listed] if skipped else []
    if done.timed_out:
        notices.append(
            f"hpcstruct was ended after {STRUCTURE_TIMEOUT_S:.0f} s: {lost} for the binaries it "
            "had not done"
        )
    elif done.exit_code != 0:
        notices.append(
            f"hpcstruct {done.failure()} ({done.last_words()}): {lost} for some binaries"
        )
    elif not any(structs.glob("*.hpcstruct")):
        notices.append(f"hpcstruct wrote nothing ({done.last_words()}): {lost}")
    return notices


def _binary_in(line: bytes) -> str | None:
    """The binary that hpcstruct begins to read, where a line of its output says so."""
    begun = _BINARY.search(line)
    return begun[1].decode("utf-8", "replace") if begun else None


def build_database(
    tools: Tools, run: RunChild, name: str, measurements: Path, wanted: Path
) -> Path:
    """Run hpcprof, source files left out; the folder is ``wanted`` or one with a number behind that
    name. Raises Failed: hpcprof died by a signal or an internal check, as it does each time on
    these measurements; MeasurementError: it failed in another way or wrote no database."""
    wanted = fresh_path(wanted)
    options = [tools.no_source] if tools.no_source else []
    command = [str(tools.hpcprof), "-j", str(usable_cores()), *options, "-o", str(wanted)]
    done = run(
        [*command, str(measurements)], stage=f"{name}: hpcprof", timeout_s=DATABASE_TIMEOUT_S
    )
    if done.timed_out:
        raise MeasurementError(
            f"hpcprof was ended after {DATABASE_TIMEOUT_S:.0f} s on {measurements}{done.see_log()}"
        )
    fatal = re.search(r"^.*\bFATAL\b.*$", done.stdout + done.stderr, re.MULTILINE)
    if done.exit_code >= 128 or fatal:
        why = fatal.group().strip()[:300] if fatal else done.last_words()
        raise Failed(
            "aborted",
            f"hpcprof aborts on {measurements}: it {done.failure()}: {why}{done.see_log()}",
        )
    if done.exit_code != 0:
        raise MeasurementError(
            f"hpcprof {done.failure()} on {measurements}: {done.last_words()}{done.see_log()}"
        )
    if not all((wanted / name).is_file() for name in NEEDED_FILES):
        raise MeasurementError(
            f"hpcprof ended with exit code 0 but wrote no database at {wanted}{done.see_log()}"
        )
    return wanted


def oversized_binaries(measurements: Path, limit_bytes: int) -> list[Path]:
    """Load modules of a measurement that are larger than ``limit_bytes``, by name.

    Read from the ``.hpcrun`` files, so that it is known before hpcstruct starts.
    """
    binaries: dict[str, Path] = {}
    profiles = measurements.glob("*.hpcrun")
    named = {name for profile in profiles for name in _PATH.findall(profile.read_bytes())}
    for name in named:
        path = Path(name.decode("utf-8", "surrogateescape"))
        with contextlib.suppress(OSError, ValueError):  # not a path after all
            if path.is_file() and path.stat().st_size > limit_bytes:
                with path.open("rb") as file:
                    if file.read(4) == b"\x7fELF":
                        binaries.setdefault(path.name, path)
    return [binaries[name] for name in sorted(binaries)]


def _structure_cache() -> Path | None:
    """The folder of structure files kept between measurements; None if it cannot be had."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = Path(base).absolute() / "dlrm-workbook" / "hpcstruct"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return cache if make_safe(cache) else None


def _remove_unfinished(structs: Path) -> None:
    """Take away structure files that an interrupted hpcstruct left half written."""
    for path in structs.glob("*.hpcstruct"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64))
            whole = b"</HPCToolkitStructure>" in file.read()
        if not whole:
            path.unlink()


def name_unnamed_modules(measurements: Path) -> int:
    """Name what has no name in a measurement's records of Python functions.

    hpcrun writes the names of Python functions to ``logical/``: ``HPCLOGICAL``, then one
    stanza per function: a 4-byte id, the function's name, one byte of mangling, the file's
    name, a 4-byte line number; integers are big-endian, strings have their 4-byte length in
    front (HPCToolkit's ``src/hpcrun/logical/common.c``, ``src/hpcprof/finalizers/logical.cpp``).

    Module-level code that was compiled without a file name gets a stanza with both names empty, on
    which hpcprof ends with "FATAL: Invalid logical stanza, both names are empty!". Whether a sample
    meets such code is chance; in short runs of torch programs it happened about every second time.
    The time is measured all the same, so the stanza is given a name instead of measuring again.
    Files that hpcprof can read, and those that are not understood, stay as they are. Returns how
    many stanzas were named.
    """
    named = 0
    for path in sorted(measurements.glob("logical/*")):
        try:
            mended, count = _mend(path.read_bytes())
            if count:
                path.write_bytes(mended)
                named += count
        except (OSError, struct.error):
            continue  # not readable, or cut short: hpcprof's to judge
    return named


def _mend(data: bytes) -> tuple[bytes, int]:
    """A logical file with its unnamed stanzas named, and how many there were. Raises struct.error:
    the file ends inside a stanza."""
    if not data.startswith(LOGICAL_MAGIC):
        return data, 0
    pieces = [LOGICAL_MAGIC]
    count = 0
    position = len(LOGICAL_MAGIC)
    while position < len(data):
        start, function_at = position, position + 4
        (function_length,) = struct.unpack_from(">I", data, function_at)
        mangling_at = function_at + 4 + function_length
        (file_length,) = struct.unpack_from(">I", data, mangling_at + 1)
        position = mangling_at + 1 + 4 + file_length + 4
        if position > len(data):
            raise struct.error("the last stanza is cut short")
        if function_length == 0 and file_length == 0:
            count += 1
            name = struct.pack(">I", len(STAND_IN)) + STAND_IN
            pieces += [data[start:function_at], name, data[mangling_at:position]]
        else:
            pieces.append(data[start:position])
    return b"".join(pieces), count
