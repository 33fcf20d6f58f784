"""Opens a recording of any kind as a :class:`Profile`: one function for every way in.

A run folder, a saved profile, a folder that ``dlrm record`` wrote, an HPCToolkit database, a
Chrome trace of torch.profiler of any program, or the traces of several ranks in a folder or in
an archive (``.tar``, ``.tar.gz``, ``.zip``), whose members are read in place.
"""

from __future__ import annotations

import codecs
import re
import shlex
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import open_binary
from dlrm_workbook.recordings import cache
from dlrm_workbook.recordings.foreign import exchange_kernels
from dlrm_workbook.recordings.hpctoolkit.database import read_database
from dlrm_workbook.recordings.hpctoolkit.format import DATABASE_FILES
from dlrm_workbook.recordings.hpctoolkit.to_profile import profile_from_database
from dlrm_workbook.recordings.nesting import start_and_end, union_ns
from dlrm_workbook.recordings.nsight import MAGIC, REPORTS, read_nsight
from dlrm_workbook.recordings.profile import Profile
from dlrm_workbook.recordings.torch.chrome_trace import NoTraceError, read_events
from dlrm_workbook.recordings.torch.json_stream import (
    ARCHIVE_ERRORS,
    MOST_PACKED,
    UNSUSPICIOUS,
    reason,
)
from dlrm_workbook.recordings.torch.trace import profile_of, read_recording, read_trace

TRACE_SUFFIXES = (".json", ".json.gz")

TAR_HEADER = 512
"""Bytes of the first block of a tar archive, which holds the word that tells it."""

MOST_HEADER = 1 << 20
"""Bytes of the headers of one member of a tar archive: its name, and what else is said of it."""

MOST_MEMBERS = 10_000
"""Files that a folder or archive of traces may hold."""

_RANK = re.compile(r"(?:rank|worker|gpu|node|proc(?:ess)?)[-_. ]?(\d{1,9})(?!\d)", re.IGNORECASE)
"""A rank in a file's name, where the trace itself does not tell it."""


@dataclass
class Recording:
    """What was opened."""

    path: Path
    profile: Profile
    """The recording; of several ranks, the one that limits the others."""
    rank: int | None = None
    """Which rank ``profile`` is, where there are several."""
    ranks: dict[int, Profile] = field(default_factory=dict)
    """Every rank's profile, where there are several."""
    cautions: list[str] = field(default_factory=list)
    """Sentences about the folder or archive; those about a trace are in its profile."""

    @property
    def sentence(self) -> str:
        """Which rank is explained, and why; "" where there is only one."""
        if self.rank is None:
            return ""
        limiting, why = limiting_rank(self.ranks)
        return f"It holds {len(self.ranks)} ranks; this is rank {limiting}, {why}."


def open_recording(path: Path | str, parts: Mapping[str, str] | None = None) -> Recording:
    """Open whatever was recorded; ``parts`` has patterns of names to parts for recordings of other
    programs, as in ``profiling.parts``. An InputError names the file and why it cannot be opened,
    in one sentence."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist")
    if path.is_dir():
        return _open_folder(path, parts)
    return _remembered(path, [path], parts, lambda: _open_file(path, parts))


def _open_file(path: Path, parts: Mapping[str, str] | None) -> Recording:
    kind = _kind_of(path)  # one sentence for a file that is none, whichever command opens it
    if kind == "database":
        return _open_folder(path.parent, parts)
    if kind == "nsight":
        return of_ranks(path, read_nsight(path, parts))
    if kind == "zip":
        return _several(path, _zip_members(path), parts)
    if _is_tar(path):
        return _several(path, _tar_members(path), parts)
    return Recording(path, read_trace(path, parts))


def _kind_of(path: Path) -> str:
    """What a file is at a glance: ``database``, ``nsight``, ``zip``, or ``trace`` (or a tar).
    Raises InputError: it is no recording; the message says what was expected."""
    with open_binary(path) as file:
        start = file.read(TAR_HEADER)
    text = start.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"{", b"[")
    if path.name in DATABASE_FILES and not (text or start.startswith(b"\x1f\x8b")):
        return "database"
    if start.startswith(MAGIC) or path.suffix in REPORTS:
        return "nsight"
    if start.startswith(b"PK"):
        return "zip"
    if text or start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ")) or b"ustar" in start[257:]:
        return "trace"
    begins = f"begins with {start[:8]!r}" if start else "is empty (0 bytes)"
    raise InputError(
        f"{path} is no recording: it {begins}, expected the JSON of a trace, "
        "packed or not, an archive of traces, or an SQLite export of Nsight Systems"
    )


def _remembered(
    path: Path, files: list[Path], parts: Mapping[str, str] | None, read: Callable[[], Recording]
) -> Recording:
    """What the files hold: from the cache, or read."""
    regular = all(file.is_file() for file in files)
    key = cache.key_of(path, files, parts) if regular else None
    if key is not None and (kept := cache.load(key)) is not None:
        facts, profiles = kept
        ranks = {int(name): profile for name, profile in profiles.items() if name != "one"}
        rank = facts["rank"]
        profile = profiles["one"] if rank is None else ranks[rank]
        return Recording(path, profile, rank, ranks, facts["cautions"])
    recording = read()
    if key is not None:
        named = {str(rank): profile for rank, profile in recording.ranks.items()}
        facts = {"rank": recording.rank, "cautions": recording.cautions}
        cache.keep(key, facts, named or {"one": recording.profile})
    return recording


def _open_folder(folder: Path, parts: Mapping[str, str] | None) -> Recording:
    readers: dict[str, Callable[[Path], Profile]] = {"profile": Profile.load}
    readers["recording"] = lambda place: read_recording(place, parts)
    for kind, read in readers.items():
        for place in (folder / kind, folder):
            if (place / f"{kind}.json").is_file():
                profile = read(place)
                for measured in profile.meta.get("passes", []):
                    if measured.get("database"):
                        measured["database"] = str(folder.absolute() / str(measured["database"]))
                return Recording(folder, profile)
            if numbered := _of_ranks(place, f"{kind}.json"):
                return of_ranks(folder, {rank: read(at) for rank, at in numbered})
    if any((folder / name).is_file() for name in DATABASE_FILES):
        return Recording(folder, profile_from_database(read_database(folder), parts))
    databases = sorted(islice(folder.glob("*/meta.db"), MOST_MEMBERS))
    if databases and not (folder / "run.json").is_file():
        places = [file.parent for file in databases]
        opened = [profile_from_database(read_database(place), parts) for place in places]
        if len(opened) == 1:
            return Recording(places[0], opened[0])
        return _by_names(folder, places, opened, "databases of HPCToolkit")
    if exports := _exports_in(folder):
        ranks = [read_nsight(file, parts) for file in exports]
        if len(ranks) == 1:
            return of_ranks(folder, ranks[0])
        # one export of each rank, as nsys can write them
        single = [next(iter(held.values())) if len(held) == 1 else None for held in ranks]
        return _by_names(folder, exports, single, "exports of Nsight Systems")
    files = _traces_in(folder)
    return _remembered(folder, files, parts, lambda: _several(folder, _files(folder, files), parts))


def require_recording(path: Path | str) -> None:
    """Refuse what is no recording at a glance, before time is spent on what needs one; the
    InputError names the file or folder, and what was expected."""
    path = Path(path)
    if path.is_dir():
        heads = ("profile.json", "recording.json", *DATABASE_FILES, "*/meta.db")
        places = (path, path / "profile", path / "recording")
        if not any(next(place.glob(name), None) for place in places for name in heads):
            _exports_in(path) or _traces_in(path)
        return
    _kind_of(path)


def _exports_in(folder: Path) -> list[Path]:
    """The exports of Nsight Systems in a folder that is no run's."""
    held = [] if (folder / "run.json").is_file() else folder.glob("*.sqlite")
    return sorted(islice(held, MOST_MEMBERS))


def _by_names(
    folder: Path, files: Sequence[Path], profiles: Sequence[Profile | None], what: str
) -> Recording:
    """Profiles of one rank each, by the numbers in the names of their files. Raises InputError: a
    name does not tell its rank, or a profile is None."""
    ranks: dict[int, Profile] = {}
    for file, profile in zip(files, profiles, strict=True):
        named = _RANK.search(file.name) or re.search(r"(\d+)$", file.stem)
        if named and profile is not None:
            ranks[int(named[1])] = profile
            profile.threads["rank"] = int(named[1])
    if len(ranks) < len(files):
        raise InputError(
            f"{folder} holds {len(files)} {what}, whose names do not tell one "
            "rank each; give one of them, or names that hold rank0, rank1, ..."
        )
    return of_ranks(folder, dict(sorted(ranks.items())))


def _traces_in(folder: Path) -> list[Path]:
    """The traces in a folder; an InputError says what it holds, or should hold, where none is."""
    held = list(islice(folder.rglob("*"), MOST_MEMBERS + 1))
    _refuse_many(folder, len(held))
    measured = next((file.parent for file in held if file.suffix == ".hpcrun"), None)
    if measured is not None:
        database = measured.with_suffix(".database")
        raise InputError(
            f"{folder} holds measurements of hpcrun, not a database: run `"
            f"{shlex.join(['hpcprof', '-o', str(database), str(measured)])}` and give {database}"
        )
    files = sorted(file for file in held if _may_be_trace(file.name) and file.is_file())
    if (folder / "run.json").is_file():  # what a run says of itself is no trace
        files = [file for file in files if file.parent != folder]
    if not files:
        raise InputError(
            f"{folder} holds no profile; expected a run folder of the profile notebook, a folder "
            "that dlrm record wrote, an HPCToolkit database, or traces of torch.profiler"
        )
    return files


# ---- several ranks --------------------------------------------------------------------


def _of_ranks(folder: Path, file: str) -> list[tuple[int, Path]]:
    """The folders ``rank0``, ``rank1``, ... of a folder that hold a file."""
    places = [path.parent for path in folder.glob(f"rank*/{file}")]
    numbered = [(re.fullmatch(r"rank(\d+)", place.name), place) for place in places]
    return sorted((int(rank[1]), place) for rank, place in numbered if rank)


def of_ranks(path: Path, ranks: dict[int, Profile], cautions: Sequence[str] = ()) -> Recording:
    """The recording of several ranks, of which the limiting one is explained."""
    limiting, _ = limiting_rank(ranks)
    if len(ranks) == 1:
        return Recording(path, ranks[limiting], cautions=list(cautions))
    return Recording(path, ranks[limiting], limiting, ranks, list(cautions))


@dataclass
class _Member:
    """One file of a folder or archive."""

    name: str
    file: IO[bytes] | None
    packed_bytes: int


def _may_be_trace(name: str) -> bool:
    """Whether a file is named like a trace; what macOS and editors leave beside is not."""
    path = PurePosixPath(name)
    hidden = path.name.startswith(".") or "__MACOSX" in path.parts
    return path.name.lower().endswith(TRACE_SUFFIXES) and not hidden


def _files(folder: Path, files: list[Path]) -> Iterator[_Member]:
    for file in files:
        with open_binary(file) as opened:
            yield _Member(str(file.relative_to(folder)), opened, file.stat().st_size)


class _ShortHeader:
    """A tar archive's file while a header is read from it, which may be of any size."""

    def __init__(self, file: Any) -> None:
        self._file, self._left = file, MOST_HEADER

    def read(self, size: int) -> bytes:
        self._left -= size
        if self._left < 0:
            raise tarfile.ReadError(f"a header of more than {MOST_HEADER:,} bytes")
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _TarInfo(tarfile.TarInfo):
    """A member of a tar archive, whose header tarfile would hold whole, however long it is."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _TarInfo:
        file = archive.fileobj
        archive.fileobj = _ShortHeader(file)
        try:
            return super().fromtarfile(archive)
        finally:
            archive.fileobj = file


def _is_tar(path: Path) -> bool:
    try:
        with tarfile.open(path, tarinfo=_TarInfo):
            return True
    except ARCHIVE_ERRORS:  # of gzip that is cut short too
        return False


def _tar_members(path: Path) -> Iterator[_Member]:
    packed, unpacked = path.stat().st_size, 0
    try:
        with tarfile.open(path, tarinfo=_TarInfo) as archive:
            for count, member in enumerate(archive):
                _refuse_many(path, count)
                unpacked += member.size
                _refuse_bomb(path, packed, unpacked)
                if member.isreg():
                    yield _Member(member.name, archive.extractfile(member), packed)
    except ARCHIVE_ERRORS as error:
        raise InputError(f"{path} cannot be read: {reason(error)}") from None


def _zip_members(path: Path) -> Iterator[_Member]:
    packed = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            _refuse_many(path, len(members))
            _refuse_bomb(path, packed, sum(member.file_size for member in members))
            for member in members:
                with archive.open(member) as file:
                    yield _Member(member.filename, file, packed)
    except ARCHIVE_ERRORS as error:
        raise InputError(f"{path} cannot be read: {reason(error)}") from None


def _refuse_many(path: Path, count: int) -> None:
    if count > MOST_MEMBERS:
        raise InputError(f"{path} is not read: it holds more than {MOST_MEMBERS:,} files")


def _refuse_bomb(path: Path, packed: int, unpacked: int) -> None:
    if unpacked > max(UNSUSPICIOUS, MOST_PACKED * packed):
        raise InputError(
            f"{path} is not read: {packed:,} bytes unpack to {unpacked:,} or more, which no "
            "archive of traces does"
        )


def _several(path: Path, members: Iterator[_Member], parts: Mapping[str, str] | None) -> Recording:
    """The traces of several ranks; of one, where only one is there. Raises InputError: there is no
    trace, one of them cannot be read, or ranks are not distinct."""
    profiles: dict[int | str, tuple[str, Profile]] = {}
    others: list[str] = []
    worlds: set[Any] = set()
    for member in members:
        if not _may_be_trace(member.name) or member.file is None:
            others.append(member.name)
            continue
        try:
            events = read_events(path / member.name, member.file, member.packed_bytes)
        except NoTraceError:
            others.append(member.name)
            continue
        rank: int | str | None = events.distributed["rank"]
        if not isinstance(rank, int):
            named = _RANK.search(PurePosixPath(member.name).name)
            rank = int(named[1]) if named else member.name
        if rank in profiles:
            raise InputError(
                f"{path}: {profiles[rank][0]} and {member.name} are both of rank {rank}; give one "
                "trace of each rank, or one file"
            )
        events.rank = rank if isinstance(rank, int) else 0
        worlds.add(events.distributed["world_size"])
        profiles[rank] = member.name, profile_of(events, parts)
    if not profiles:
        raise InputError(f"{path} holds no trace of torch.profiler")
    cautions = []
    if others:
        listed = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        cautions.append(f"{len(others)} of the files are no traces and were not read: {listed}.")
    unknown = [rank for rank in profiles if isinstance(rank, str)]
    if unknown and len(profiles) > 1:
        raise InputError(
            f"{path}: {unknown[0]} tells its rank neither inside nor in its name; give one file, "
            "or traces whose names hold rank0, rank1, ..."
        )
    named_ranks = [(0 if isinstance(rank, str) else rank, of) for rank, (_, of) in profiles.items()]
    ranks = dict(sorted(named_ranks, key=lambda pair: pair[0]))
    return of_ranks(path, ranks, [*cautions, *_of_world(len(ranks), worlds)])


def _of_world(count: int, worlds: set[Any]) -> list[str]:
    """A sentence where ranks are missing, or traces disagree on how many there are."""
    sizes = sorted(size for size in worlds if isinstance(size, int))
    if len(sizes) > 1:
        return [f"The traces disagree on the number of ranks: {', '.join(map(str, sizes))}."]
    if sizes and sizes[0] > count:
        return [f"Traces of {count} of {sizes[0]} ranks are here: nothing is known of the others."]
    return []


def limiting_rank(ranks: dict[int, Profile]) -> tuple[int, str]:
    """The rank that the others wait for, and why it is that one.

    Communication kernels run from when a rank arrives until all have: the last to arrive
    spends the least time in them. Without any, the rank whose recording is longest. A difference
    of less than 1 % is none.
    """
    spent = {rank: -communication_ns(profile) for rank, profile in ranks.items()}
    why = "which spent the least time in communication, where the others wait for it"
    alike = "and another spent as long in communication"
    if not any(spent.values()):
        spent = {rank: _length_ns(profile) for rank, profile in ranks.items()}
        why, alike = "which took longest", "and another took as long"
    first, *others = sorted(spent, key=spent.__getitem__, reverse=True)
    none = others and spent[first] - spent[others[0]] <= 0.01 * abs(spent[first])
    return first, alike if none else why


def communication_ns(profile: Profile) -> int:
    """Time in which at least one kernel of communication ran, or, where no kernel did, in which
    the thread that runs the steps was in communication, ns."""
    chosen, trace = exchange_kernels(profile), profile.trace
    if not profile.of_kind("kernel").any() and "main_thread" in profile.meta:
        chosen = profile.contexts["component"].eq("communication").to_numpy()
        trace = trace[trace["profile"].eq(profile.meta["main_thread"])]
    return union_ns(*start_and_end(trace[chosen[trace["context"].to_numpy()]]))


def _length_ns(profile: Profile) -> int:
    table = profile.iterations if len(profile.iterations) else profile.trace
    return int(table["end_ns"].max() - table["start_ns"].min()) if len(table) else 0
