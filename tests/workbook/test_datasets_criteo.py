"""Criteo's text: parsed, counted, numbered and written as a plain reading of it would be."""

import gzip
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from same_files import assert_same_files

from dlrm_core.base.errors import InputError
from dlrm_core.data.files.sources import open_source
from dlrm_core.data.files.spec import read_spec
from dlrm_workbook.cli import main
from dlrm_workbook.datasets import criteo as preprocess
from dlrm_workbook.datasets import loops, vocabulary
from dlrm_workbook.datasets.criteo import Request
from dlrm_workbook.datasets.inspection import examine_data


@pytest.fixture(autouse=True, scope="module")
def small_pieces():
    """The small texts here still come in several pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocess, "PIECE_BYTES", 2500)
        yield


Row = tuple[int, list[int | None], list[str | None]]


def as_text(rows: list[Row]) -> bytes:
    lines = [
        "\t".join(
            [
                str(label),
                *("" if number is None else str(number) for number in numbers),
                *("" if category is None else category for category in categories),
            ]
        )
        for label, numbers, categories in rows
    ]
    return "".join(line + "\n" for line in lines).encode()


def plainly(rows: list[Row], threshold: int) -> tuple[list[list[int]], list[dict[int, int]]]:
    """Row numbers of each feature, and its vocabulary: an oracle in plain Python."""
    columns, vocabularies = [], []
    for table in range(26):
        column = [row[2][table] for row in rows]
        counts = Counter(int(text, 16) for text in column if text is not None)
        kept = sorted((-count, key) for key, count in counts.items() if count >= threshold)
        numbers = {key: place + 1 for place, (_, key) in enumerate(kept)}
        columns.append([0 if c is None else numbers.get(int(c, 16), 0) for c in column])
        vocabularies.append(numbers)
    return columns, vocabularies


def random_rows(count: int, seed: int, different: int = 40) -> list[Row]:
    random = np.random.default_rng(seed)
    rows: list[Row] = []
    for _ in range(count):
        numbers = [
            None if random.random() < 0.2 else int(random.integers(-3, 10 ** random.integers(1, 9)))
            for _ in range(13)
        ]
        # spread over all 32 bits, 0 and ffffffff included; the first feature without skew
        places = random.zipf(1.3, 26) % different
        places[0] = random.integers(different)
        categories = [
            None if random.random() < 0.1 else f"{place * (0xFFFFFFFF // (different - 1)):08x}"
            for place in places.tolist()
        ]
        rows.append((int(random.integers(0, 2)), numbers, categories))
    return rows


def run(tmp_path: Path, rows: list[Row], threshold: int = 1, name: str = "set", **options):
    file = tmp_path / f"{name}.txt"
    file.write_bytes(as_text(rows))
    request = Request("kaggle", [file], threshold, **{"threads": 2} | options)
    return preprocess.preprocess(request, tmp_path / name)


def check(folder: Path, rows: list[Row], threshold: int) -> None:
    """The data set is what the oracle says."""
    columns, vocabularies = plainly(rows, threshold)
    spec = read_spec(folder)
    assert spec.table_rows == tuple(len(numbers) + 1 for numbers in vocabularies)
    train, test = (open_source(folder, "split_binary", split) for split in ("train", "test"))
    assert train.samples + test.samples == len(rows)
    for table, (expected, numbers) in enumerate(zip(columns, vocabularies, strict=True)):
        found = np.concatenate([train.tables[table].values, test.tables[table].values])
        assert found.tolist() == expected
        keys = np.fromfile(folder / "vocabulary" / f"cat_{table}.keys", np.uint32)
        assert {int(key): place + 1 for place, key in enumerate(keys)} == numbers
        counts = np.fromfile(folder / "vocabulary" / f"cat_{table}.counts", np.int64)
        assert (np.diff(counts) <= 0).all() and (counts >= threshold).all()
    labels = np.concatenate([train.label.values, test.label.values])
    assert labels.tolist() == [row[0] for row in rows]
    dense = np.concatenate([train.dense, test.dense])
    for row, (_, numbers, _) in zip(dense, rows, strict=True):
        expected = [0.0 if n is None else math.log(max(n, -2) + 3) for n in numbers]
        assert np.array_equal(row, np.array(expected, np.float32).astype(np.float16))
    assert not (folder / "raw").exists() and not (folder / "progress.json").exists()


field = st.one_of(st.none(), st.integers(-(2**31) + 1, 2**31 - 1))
category = st.one_of(
    st.none(), st.sampled_from(["00000000", "ffffffff", "0", "00000001"]), st.from_regex(
        "[0-9a-f]{1,8}", fullmatch=True
    )
)  # fmt: skip


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    first=st.lists(
        st.tuples(
            st.integers(0, 1),
            st.lists(field, min_size=13, max_size=13),
            st.lists(category, min_size=26, max_size=26),
        ),
        min_size=2,
        max_size=8,
    ),
    repeats=st.integers(1, 3),
    threshold=st.integers(1, 4),
    threads=st.integers(1, 3),
)
def test_any_rows_become_what_the_plain_reading_says(
    first, repeats, threshold, threads, tmp_path_factory
):
    rows = first * repeats
    folder = run(
        tmp_path_factory.mktemp("any", numbered=True), rows, threshold, threads=threads
    ).folder
    check(folder, rows, threshold)


@pytest.mark.parametrize("threshold", [1, 3])
def test_little_memory_gives_the_same_bytes(tmp_path, monkeypatch, threshold):
    rows = random_rows(2500, 5, different=2000)
    plenty = run(tmp_path, rows, threshold, name="plenty").folder
    check(plenty, rows, threshold)
    runs: list[int] = []
    merge = vocabulary._merge
    monkeypatch.setattr(
        vocabulary, "_merge", lambda r, *rest: runs.append(len(r)) or merge(r, *rest)
    )
    monkeypatch.setattr(vocabulary, "MERGE_ENTRIES", 64)
    monkeypatch.setattr(preprocess, "PIECE_BYTES", 700)
    # room for 1024 entries: several runs on disk, several passes to look up
    monkeypatch.setattr(preprocess, "ROWS_AT_ONCE", 900)
    little = run(tmp_path, rows, threshold, name="little", memory=1 << 10).folder
    assert max(runs) > 1
    (tmp_path / "little.txt").unlink()
    assert_same_files(plenty, little, but="inputs")


def test_common_categories_are_sorted_with_the_rare_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary, "COMMON_COUNT", 4)
    rows = random_rows(400, 9, different=60)
    check(run(tmp_path, rows, 2).folder, rows, 2)


def test_without_numba_the_bytes_are_the_same(tmp_path, monkeypatch):
    rows = random_rows(40, 2)
    one = run(tmp_path, rows, 2, name="one").folder
    monkeypatch.setattr(loops, "machine_code", lambda: None)
    other = run(tmp_path, rows, 2, name="other").folder
    assert_same_files(one, other, but="inputs")


def test_several_files_gzip_line_ends_and_a_limit(tmp_path):
    rows = random_rows(300, 4)
    text = as_text(rows)
    cut = text.index(b"\n", len(text) // 3) + 1
    (tmp_path / "one.txt").write_bytes(text[:cut].replace(b"\n", b"\r\n"))
    with gzip.open(tmp_path / "two.gz", "wb") as file:
        # and no newline at the very end
        file.write(text[cut:-1])
    request = Request("terabyte", [tmp_path / "one.txt", tmp_path / "two.gz"], 2, threads=2)
    result = preprocess.preprocess(request, tmp_path / "set")
    check(result.folder, rows, 2)
    assert result.rows == {"train": 288, "test": 12}
    limited = Request("kaggle", list(request.inputs), 1, max_rows=170, test_fraction=0.5)
    result = preprocess.preprocess(limited, tmp_path / "limited")
    assert result.rows == {"train": 85, "test": 85}
    check(result.folder, rows[:170], 1)


GOOD = as_text(random_rows(5, 8)).split(b"\n")[2]


def spoil(number: int, text: bytes) -> bytes:
    fields = GOOD.split(b"\t")
    fields[number] = text
    return b"\t".join(fields)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (spoil(0, b"2"), r"field 1 \(label\): '2', expected 0 or 1"),
        (spoil(0, b""), r"field 1 \(label\): '', expected 0 or 1"),
        (spoil(3, b"4x"), r"field 4 \(I3\): '4x', expected a whole number"),
        (spoil(3, b"-"), r"field 4 \(I3\): '-', expected a whole number"),
        (spoil(13, b"2147483648"), r"field 14 \(I13\): '2147483648'"),
        (spoil(13, b"9" * 30), r"field 14 \(I13\)"),
        (spoil(14, b"123456789"), r"field 15 \(C1\): '123456789', expected at most 8"),
        (spoil(39, b"xyz"), r"field 40 \(C26\): 'xyz', expected at most 8"),
        (spoil(20, b"\xff\x00"), r"field 21 \(C7\): '\\xff\\x00'"),
        (GOOD + b"\t", "has 41 fields, expected 40"),
        (GOOD.split(b"\t", 1)[1], r"has 39 fields, expected 40 \(a test file without labels"),
        (b"", "has 1 fields, expected 40"),
        (b"\x00" * 50, "has 1 fields, expected 40"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_field(tmp_path, line, words):
    file = tmp_path / "train.txt"
    good = as_text(random_rows(50, 8))
    file.write_bytes(good + line + b"\n" + good)
    request = Request("kaggle", [file], 1, threads=2)
    with pytest.raises(InputError, match=rf"train.txt: line 51\b.*{words}"):
        preprocess.preprocess(request, tmp_path / "set")
    assert not (tmp_path / "set").exists()
    (problem,) = examine_data(file)["problems"]
    with pytest.raises(InputError, match=words):
        raise InputError(problem)


@settings(max_examples=100, deadline=None)
@given(text=st.binary(max_size=300), prefix=st.integers(0, 3))
def test_rubbish_is_refused_in_one_sentence(text, prefix, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "rubbish.txt"
    file.write_bytes((GOOD + b"\n") * prefix + text)
    problems = examine_data(file)["problems"]
    assert len(problems) <= 1
    assert all("rubbish.txt" in problem and "\n" not in problem for problem in problems)


def test_what_cannot_be_converted_is_refused(tmp_path, capsys):
    command = ["data", "preprocess", "--layout", "kaggle", "--output", str(tmp_path / "set")]
    assert main([*command, "--input", str(tmp_path / "none")]) == 2
    assert "none: no such file" in capsys.readouterr().err
    assert main([*command, "--input", str(tmp_path)]) == 2
    assert f"--input {tmp_path} is a folder" in capsys.readouterr().err
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"")
    assert main([*command, "--input", str(empty)]) == 2
    assert "has no lines" in capsys.readouterr().err
    endless = tmp_path / "endless.txt"
    endless.write_bytes(b"x" * (10 << 20))
    assert main([*command, "--input", str(endless)]) == 2
    assert "line 1 has more than" in capsys.readouterr().err
    (tmp_path / "bad.gz").write_bytes(b"not gzip at all")
    assert main([*command, "--input", str(tmp_path / "bad.gz")]) == 2
    assert "bad.gz cannot be read" in capsys.readouterr().err
    one = tmp_path / "one.txt"
    one.write_bytes(GOOD + b"\n")
    assert main([*command, "--input", str(one)]) == 2
    assert "have 1 rows, of which 1 would be the test split" in capsys.readouterr().err
    assert main([*command, "--input", str(one), "--frequency-threshold", "0"]) == 2
    assert "--frequency-threshold is 0" in capsys.readouterr().err


def test_the_command_converts_and_says_what_it_did(tmp_path, capsys):
    file = tmp_path / "train.txt"
    file.write_bytes(as_text(random_rows(200, 6)))
    target = tmp_path / "set"
    command = ["data", "preprocess", "--layout", "kaggle", "--input", str(file)]
    assert main([*command, "--output", str(target), "--frequency-threshold", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == str(target) and lines[0].startswith("171 train and 29 test samples")
    check(target, random_rows(200, 6), 3)
    report = examine_data(target)
    assert report["problems"] == [] and report["metadata"]["frequency_threshold"] == 3
    text = examine_data(file)
    assert text["splits"]["all"]["samples"] == 200
    rates = [report["splits"][split]["click_rate"] for split in ("train", "test")]
    assert text["splits"]["all"]["click_rate"] == pytest.approx(
        (rates[0] * 171 + rates[1] * 29) / 200
    )


def test_logarithms_are_rounded_through_float32_as_nvidia_s_chain_does():
    numbers = np.arange(-2, 1 << 20, dtype=np.int32)
    exact = np.log(numbers + 3.0)
    once, found = exact.astype(np.float16), preprocess.transform(numbers)
    assert np.array_equal(found, exact.astype(np.float32).astype(np.float16))
    # 10,361 is the first integer at which it matters
    assert numbers[np.flatnonzero(found != once)[0]] == 10_361
