"""Databases that are refused, and in which words."""

from pathlib import Path

import pytest
from databases import written

from dlrm_core.base.errors import InputError
from dlrm_workbook.recordings.hpctoolkit.database import read_database
from dlrm_workbook.recordings.hpctoolkit.format import DatabaseError
from dlrm_workbook.recordings.hpctoolkit.to_profile import profile_from_database
from dlrm_workbook.recordings.hpctoolkit.views import database_facts, database_summary

# ---- what is refused, and in which words ------------------------------------------


@pytest.mark.parametrize("name", ["meta.db", "profile.db", "cct.db", "trace.db"])
def test_files_cut_short_are_refused_with_both_numbers(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    whole = (folder / name).read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        (folder / name).write_bytes(whole[:size])
        with pytest.raises(DatabaseError) as refused:
            read_database(folder)
        assert name in str(refused.value) and str(size) in str(refused.value)
        assert "cut short" in str(refused.value)
        assert isinstance(refused.value, InputError)


@pytest.mark.parametrize("name", ["cct.db", "trace.db"])
def test_missing_files_are_reported(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / name).unlink()
    database = read_database(folder)
    assert name in database.absent
    assert name in database_summary(database)
    assert database_facts(database)["summary_values"] > 0
    profile = profile_from_database(database)
    if name == "trace.db":
        assert "hpcrun -t" in profile.not_measured["trace"]


def test_another_major_version_is_refused_with_advice(tmp_path: Path) -> None:
    folder = written(tmp_path)
    data = bytearray((folder / "meta.db").read_bytes())
    data[14] = 5
    (folder / "meta.db").write_bytes(data)
    with pytest.raises(DatabaseError, match=r"format 5\.0.*4\.x.*hpcprof"):
        read_database(folder)


def test_other_folders_are_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="does not exist"):
        read_database(tmp_path / "nothing")
    with pytest.raises(DatabaseError, match=r"no meta\.db"):
        read_database(tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DatabaseError, match="is a file"):
        read_database(file)
    (tmp_path / "a-000.hpcrun").write_text("")
    with pytest.raises(DatabaseError, match="hpcprof -o"):
        read_database(tmp_path)
    (tmp_path / "experiment.xml").write_text("")
    with pytest.raises(DatabaseError, match=r"experiment\.xml.*hpcprof -o"):
        read_database(tmp_path)
    folder = written(tmp_path)
    (folder / "profile.db").unlink()
    with pytest.raises(DatabaseError, match=r"no profile\.db"):
        read_database(folder)


def test_cycles_and_shared_children_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path)
    whole = (folder / "meta.db").read_bytes()
    start = int.from_bytes(whole[16 + 48 + 8 : 16 + 56 + 8], "little")
    entry = int.from_bytes(whole[start : start + 8], "little")
    size, children = (whole[entry + i : entry + i + 8] for i in (0, 8))
    first = int.from_bytes(children, "little")
    data = bytearray(whole)
    data[first : first + 8], data[first + 8 : first + 16] = size, children
    (folder / "meta.db").write_bytes(data)
    with pytest.raises(DatabaseError, match=r"overlap|twice"):
        read_database(folder)
