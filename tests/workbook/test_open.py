"""Whatever was recorded opens by one function, or is refused in one sentence."""

import gzip
import io
import json
import shutil
import tarfile
import zipfile
from pathlib import Path

import gpu_trace
import pytest
from databases import folder_of
from recordings import SEVERAL, recording

from dlrm_core.base.errors import InputError
from dlrm_workbook.recordings import open as opening
from dlrm_workbook.recordings.nesting import union_ns
from dlrm_workbook.recordings.open import open_recording
from dlrm_workbook.runner.notebook import find_profile


def trace_of(rank: int | None, world: int = 2, wait: float = 0.0) -> bytes:
    """One rank's trace; ``wait`` us more in its collective."""
    events = gpu_trace.events()
    events[-3]["args"]["correlation"] = 200
    kernel = gpu_trace.kernel("ncclKernel_AllReduce", 96, 97 + wait, 105, 9)
    document = {"traceEvents": [*events, kernel]}
    if rank is not None:
        document["distributedInfo"] = {"rank": rank, "world_size": world, "backend": "nccl"}
    return json.dumps(document).encode()


def tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def two(rank: int) -> bytes:
    return trace_of(rank, wait=10.0 if rank == 0 else 1.0)


@pytest.mark.parametrize("kind", ["folder", "tar", "tar.gz", "zip"])
def test_ranks_open_from_folders_and_archives(tmp_path: Path, kind: str) -> None:
    members = {"a/first.json": two(1), "a/other.json.gz": gzip.compress(two(0))}
    members |= {"a/notes.txt": b"n", "a/._first.json": b"\x00", "a/config.json": b"{}"}
    path = tmp_path / f"ranks.{kind}"
    if kind == "folder":
        for name, data in members.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
    elif kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
    else:
        tar(path, members)
    before = sorted(tmp_path.rglob("*"))
    found = open_recording(path)
    assert sorted(found.ranks) == [0, 1] and found.rank == 1, "rank 0 waits for rank 1"
    assert found.profile is found.ranks[1] and set(found.profile.threads["rank"]) == {1}
    (caution,) = found.cautions
    assert "no traces" in caution and "config.json" in caution
    assert sorted(tmp_path.rglob("*")) == before, "nothing is unpacked"
    source = find_profile(str(path), tmp_path)
    assert "rank 1" in source.sentence and sorted(source.ranks) == [0, 1]


def test_ranks_are_told_by_names_where_traces_do_not(tmp_path: Path) -> None:
    path = tar(tmp_path / "t.tar", {f"worker{n}_x.json": trace_of(None) for n in (3, 5)})
    assert sorted(open_recording(path).ranks) == [3, 5]
    path = tar(tmp_path / "u.tar", {"a.json": trace_of(None), "b.json": trace_of(None)})
    with pytest.raises(InputError, match=r"u\.tar: a\.json tells its rank neither"):
        open_recording(path)
    path = tar(tmp_path / "v.tar", {"a.json": trace_of(1), "b.json": trace_of(1)})
    with pytest.raises(InputError, match=r"v\.tar: a\.json and b\.json are both of rank 1"):
        open_recording(path)


def test_missing_ranks_and_a_single_one_are_said(tmp_path: Path) -> None:
    found = open_recording(tar(tmp_path / "t.tar", {"x.json": trace_of(6, world=8)}))
    assert found.ranks == {} and found.rank is None
    assert "1 of 8 ranks" in found.cautions[0]
    assert set(found.profile.threads["rank"]) == {6}
    members = {"x.json": trace_of(0, world=8), "y.json": trace_of(1, world=4)}
    assert "disagree" in open_recording(tar(tmp_path / "u.tar", members)).cautions[0]


def test_a_member_that_is_cut_short_is_refused_by_name(tmp_path: Path) -> None:
    members = {"x.json": trace_of(0), "y.json": trace_of(1)[:-30]}
    with pytest.raises(InputError, match=r"y\.json cannot be read: it is cut short"):
        open_recording(tar(tmp_path / "t.tar", members))
    whole = tar(tmp_path / "u.tar.gz", {"x.json": trace_of(0), "y.json": trace_of(1)})
    for share in (0.2, 0.6, 0.95):
        cut = tmp_path / "cut.tar.gz"
        cut.write_bytes(whole.read_bytes()[: int(whole.stat().st_size * share)])
        with pytest.raises(InputError, match=r"cut\.tar\.gz.* cannot be read: it is"):
            open_recording(cut)


def test_archives_that_are_no_recordings_are_refused(tmp_path, monkeypatch) -> None:
    with pytest.raises(InputError, match=r"t\.tar holds no trace"):
        open_recording(tar(tmp_path / "t.tar", {"../../evil.txt": b"x"}))
    odd = tmp_path / "odd.zip"
    odd.write_bytes(b"PK\x03\x04" + b"\x00" * 60)
    with pytest.raises(InputError, match=r"odd\.zip cannot be read"):
        open_recording(odd)
    monkeypatch.setattr(opening, "UNSUSPICIOUS", 1 << 20)
    bomb = tar(tmp_path / "bomb.tar.gz", {"x.bin": bytes(4 << 20), "r0.json": trace_of(0)})
    with pytest.raises(InputError, match=r"bomb\.tar\.gz is not read"):
        open_recording(bomb)
    # a link out of the archive is not followed
    linked = tmp_path / "linked.tar"
    with tarfile.open(linked, "w") as archive:
        info = tarfile.TarInfo("rank0.json")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(InputError, match="holds no trace"):
        open_recording(linked)


def test_folders_that_are_no_recordings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no profile; expected"):
        open_recording(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        open_recording(tmp_path / "nowhere")
    explained = tmp_path / "bottlenecks"
    explained.mkdir()
    for name in ("run.json", "bottlenecks.json"):
        (explained / name).write_text("{}")
    with pytest.raises(InputError, match="holds no profile; expected a run folder of the profile"):
        open_recording(explained)
    (tmp_path / "x.hpcrun").touch()
    with pytest.raises(InputError, match=r"measurements of hpcrun.*hpcprof"):
        open_recording(tmp_path)


@pytest.mark.parametrize("missing", ["meta.db", "profile.db", "cct.db", "trace.db", "metrics"])
def test_a_partial_database_is_read_or_refused_in_one_sentence(tmp_path, missing) -> None:
    folder = tmp_path / "partial.d"
    shutil.copytree(folder_of("loops-cuda-nvidia-t"), folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
    place = folder / missing
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    try:
        assert open_recording(folder).profile.meta["engine"] == "hpctoolkit"
    except InputError as error:
        assert missing in str(error) and "\n" not in str(error)


def test_a_file_stands_for_its_database_and_several_ranks_are_one(tmp_path: Path) -> None:
    found = open_recording(folder_of("small") / "meta.db")
    assert found.profile.meta["engine"] == "hpctoolkit"
    for rank in (0, 1):
        shutil.copytree(folder_of("loops-cputime-t"), tmp_path / f"rank{rank}.d")
    both = open_recording(tmp_path)
    assert sorted(both.ranks) == [0, 1] and "rank 0, and another took as long" in both.sentence
    (tmp_path / "rank1.d").rename(tmp_path / "other.d")
    with pytest.raises(InputError, match="2 databases of HPCToolkit, whose names do not tell"):
        open_recording(tmp_path)


def test_the_rank_that_limits_a_real_training(tmp_path: Path) -> None:
    source = find_profile(str(recording(SEVERAL)), tmp_path)
    assert len(source.ranks) == 8 and "this is rank 7" in source.sentence


def test_the_union_of_intervals() -> None:
    import numpy as np

    start, end = np.array([10, 0, 3, 30]), np.array([12, 5, 4, 31])
    assert union_ns(start, end) == 5 + 2 + 1
    assert union_ns(start[:0], end[:0]) == 0
