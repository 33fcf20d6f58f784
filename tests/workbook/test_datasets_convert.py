"""``dlrm data convert``: there and back the same bytes, and what cannot be held is refused."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from same_files import assert_same_files

from dlrm_core.base.errors import InputError
from dlrm_core.data.files.samples import read_batch
from dlrm_core.data.files.sources import open_source
from dlrm_workbook.cli import main
from dlrm_workbook.datasets import splits
from dlrm_workbook.datasets.convert import ORIGIN, Conversion, convert
from dlrm_workbook.datasets.write_spec import write_spec

ROWS = [50 + t for t in range(26)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Splits of these tests are several blocks."""
    monkeypatch.setattr(splits, "ROW_GROUP", 128)


def terabyte(folder: Path, most: int = 2**24, sizes=(("train", 700), ("test", 301), ("val", 129))):
    """A data set in facebook's layout, counts from 0 to ``most``."""
    folder.mkdir()
    random = np.random.default_rng(3)
    for name, size in sizes:
        rows = np.empty((size, 40), np.int32)
        rows[:, 0] = random.integers(0, 2, size)
        # small counts are frequent, as Criteo's are
        rows[:, 1:14] = np.floor(most ** random.random((size, 13))) - (random.random() < 0.5)
        rows[0, 1] = most
        rows[:, 14:] = random.integers(0, ROWS, (size, 26))
        rows.tofile(folder / f"terabyte_processed_{name}.bin")
    return folder


def criteo_like(folder: Path) -> Path:
    """A data set in NVIDIA's layout whose features are log(n + 3) as float16, as Criteo's are."""
    random = np.random.default_rng(4)
    for name, size in (("train", 5000), ("test", 300)):
        (folder / name).mkdir(parents=True)
        numbers = np.maximum(np.floor(2**31 ** random.random((size, 13))) - 3, 0)
        numbers[7, :3] = 32, 253, 241
        features = np.log(numbers + 3.0).astype(np.float32).astype(np.float16)
        features.tofile(folder / name / "numerical.bin")
        random.integers(0, 2, size).astype(bool).tofile(folder / name / "label.bin")
        for t, rows in enumerate(ROWS):
            random.integers(0, rows, size).astype(np.int8).tofile(folder / name / f"cat_{t}.bin")
    facts = {"made_by": "a test", "numerical": "log(x + 3) as float16, 0 where missing"}
    write_spec(folder, 13, ROWS, facts)
    return folder


def converted(path: Path, before: str, after: str, target: Path, **more):
    return convert(Conversion(path, before, after, **more), target)


@pytest.mark.parametrize("by", ["deepspark_dist", "parquet"])
def test_terabyte_comes_back_byte_for_byte(tmp_path, by):
    source = terabyte(tmp_path / "terabyte")
    there = converted(source, "terabyte", by, tmp_path / by)
    assert there.samples == {"train": 700, "test": 301, "val": 129} and there.lost == 0
    assert there.values == 13 * 1130
    converted(tmp_path / by, by, "terabyte", tmp_path / "back")
    assert_same_files(source, tmp_path / "back")
    if by == "deepspark_dist":
        # what training reads is the same, to the last bit
        one, other = (
            read_batch(open_source(path, layout, "train"), ROWS, 0, 700)
            for path, layout in ((source, "terabyte"), (tmp_path / by, by))
        )
        assert torch.equal(one.dense, other.dense) and torch.equal(one.indices, other.indices)
        assert torch.equal(one.targets, other.targets)


@pytest.mark.parametrize("by", ["deepspark_dist", "parquet", "terabyte"])
def test_nvidia_s_layout_comes_back_byte_for_byte(tmp_path, by):
    source = criteo_like(tmp_path / "nvidia")
    assert converted(source, "split_binary", by, tmp_path / by).lost == 0
    assert (tmp_path / by / ORIGIN).read_bytes() == (source / "feature_spec.yaml").read_bytes()
    converted(tmp_path / by, by, "split_binary", tmp_path / "back")
    assert_same_files(source, tmp_path / "back")
    if by == "terabyte":
        rows = np.fromfile(tmp_path / by / "terabyte_processed_train.bin", "i4").reshape(-1, 40)
        assert rows[7, 1:4].tolist() == [32, 253, 241]
    # and by two layouts
    if by != "parquet":
        converted(tmp_path / by, by, "parquet", tmp_path / "parquet")
        converted(tmp_path / "parquet", "parquet", "split_binary", tmp_path / "again")
        assert_same_files(source, tmp_path / "again")


def test_a_generated_data_set_comes_back_with_its_metadata(small_data_set, tmp_path):
    for by in ("deepspark_dist", "parquet"):
        converted(small_data_set, "split_binary", by, tmp_path / by)
        converted(tmp_path / by, by, "split_binary", tmp_path / f"back {by}")
        assert_same_files(small_data_set, tmp_path / f"back {by}")


def test_missing_and_negative_integers_become_0_and_are_counted(tmp_path):
    source = criteo_like(tmp_path / "nvidia")
    file = source / "train" / "numerical.bin"
    values = np.fromfile(file, np.float16)
    values[:2] = 0.0, np.log(2.0)  # missing, and -1
    values.tofile(file)
    assert converted(source, "split_binary", "terabyte", tmp_path / "terabyte").lost == 2
    rows = np.fromfile(tmp_path / "terabyte" / "terabyte_processed_train.bin", "i4")
    assert rows[1:3].tolist() == [0, 0]


def test_made_up_features_become_the_nearest_counts(tmp_path, monkeypatch):
    # seconds of Monte Carlo, of which nothing is asked here
    monkeypatch.setattr("dlrm_workbook.datasets.generate.best_figures", lambda law: {})
    command = ["data", "generate", "--variant", "deepspark_synthetic", "--scale", "0.001"]
    for labels, code in (("random", 0), ("teacher", 2)):
        source = tmp_path / labels
        more = ["--samples", "300/50", "--labels", labels, "--output", str(source)]
        assert main([*command, *more]) == 0
        there = ["data", "convert", str(source), "--from", "split_binary", "--to", "terabyte"]
        assert main([*there, "--output", str(tmp_path / f"{labels}-terabyte")]) == code
    rows = np.fromfile(tmp_path / "random-terabyte" / "terabyte_processed_train.bin", "i4")
    dense = np.fromfile(tmp_path / "random" / "train" / "numerical.bin", "f2").reshape(300, 13)
    assert (rows.reshape(300, 40)[:, 1:14] == np.rint(np.expm1(dense.astype(float)))).all()


def test_every_float16_of_0_to_21_survives_as_a_count_in_float32():
    features = np.arange(np.float16(21.4).view(np.uint16) + 1, dtype=np.uint16).view(np.float16)
    counts = np.expm1(features.astype(np.float64)).astype(np.float32)
    back = np.log(counts.astype(np.float64) + 1.0).astype(np.float32).astype(np.float16)
    assert len(features) > 19_000 and np.array_equal(back, features)


def test_features_of_counts_are_those_that_training_reads_and_lost_digits_are_counted(tmp_path):
    source = terabyte(tmp_path / "terabyte")
    done = converted(source, "terabyte", "split_binary", tmp_path / "nvidia")
    made, lost = open_source(tmp_path / "nvidia", "split_binary", "train"), 0
    read = open_source(source, "terabyte", "train").read_dense(0, 700)
    assert np.array_equal(made.dense, read.astype(np.float16))
    # without another word a table has the rows that are looked up
    whole = np.concatenate([np.fromfile(file, np.int32) for file in source.iterdir()])
    whole = whole.reshape(-1, 40)
    assert [column.rows for column in made.tables] == (whole[:, 14:].max(0) + 1).tolist()
    features = np.log(whole[:, 1:14] + 1.0).astype(np.float32).astype(np.float16)
    lost = int((np.rint(np.expm1(features.astype(np.float64))) != whole[:, 1:14]).sum())
    assert done.lost == lost > 1000
    large = terabyte(tmp_path / "large", most=2**31 - 1)
    done = converted(large, "terabyte", "deepspark_dist", tmp_path / "dist")
    whole = np.concatenate([np.fromfile(file, np.int32) for file in large.iterdir()])
    counts = whole.reshape(-1, 40)[:, 1:14]
    assert done.lost == (counts.astype(np.float32).astype(np.float64) != counts).sum() > 0


def test_the_second_half_of_the_test_split_becomes_val_as_facebook_s(tmp_path):
    source = terabyte(tmp_path / "terabyte", sizes=(("train", 5), ("test", 301)))
    by = tmp_path / "dist"
    converted(source, "terabyte", "deepspark_dist", by)
    done = converted(by, "deepspark_dist", "terabyte", tmp_path / "three", halve_test=True)
    assert done.samples == {"train": 5, "test": 151, "val": 150}
    test, val = (
        (tmp_path / "three" / f"terabyte_processed_{name}.bin").read_bytes()
        for name in ("test", "val")
    )
    assert test + val == (source / "terabyte_processed_test.bin").read_bytes()
    with pytest.raises(InputError, match=r"--halve-test: .* has the splits train, test, val"):
        converted(tmp_path / "three", "terabyte", "parquet", tmp_path / "x", halve_test=True)


@pytest.mark.parametrize("after", ["split_binary", "terabyte", "parquet"])
def test_an_interrupted_conversion_goes_on_to_the_same_bytes(tmp_path, monkeypatch, after):
    source = terabyte(tmp_path / "terabyte")
    converted(source, "terabyte", "deepspark_dist", tmp_path / "dist")
    whole = converted(tmp_path / "dist", "deepspark_dist", after, tmp_path / "whole")
    monkeypatch.setattr("dlrm_workbook.datasets.resumable.SYNC_BYTES", 1)
    read = splits.FileSplit.blocks
    left = [0]

    def interrupted(split, start, stop):
        for block in read(split, start, stop):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            yield block

    monkeypatch.setattr(splits.FileSplit, "blocks", interrupted)
    # 6 + 3 + 2 blocks; the pass that counts rows is done anew each time
    counting = 11 if after == "split_binary" else 0
    for budget in (3, counting + 2, counting + 7):
        left[0] = budget
        with pytest.raises(KeyboardInterrupt):
            converted(tmp_path / "dist", "deepspark_dist", after, tmp_path / "parts")
        assert not (tmp_path / "parts").exists()
    # the first split is not read again
    left[0] = counting + 5
    done = converted(tmp_path / "dist", "deepspark_dist", after, tmp_path / "parts")
    assert done.lost == whole.lost
    assert_same_files(tmp_path / "whole", tmp_path / "parts")


def parquet(folder: Path, columns: dict, files=("train.parquet",)) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), folder / name, row_group_size=3)
    return folder


def some(**changes) -> dict:
    columns = {"label": [0, 1, 1, 0], "int_0": pa.array([0.0, 1.5, 2.5, 7.0], pa.float32())}
    return columns | {"cat_0": [3, 1, 0, 2], "cat_1": [0, 0, 5, 1]} | changes


def test_parquet_of_others_is_read_in_the_order_of_its_files(tmp_path):
    files = ("train/b.parquet", "train/a.parquet")
    source = parquet(tmp_path / "torchrec", some(), files)
    converted(source, "parquet", "deepspark_dist", tmp_path / "dist", counts=True)
    assert np.fromfile(tmp_path / "dist/train/cat_1.bin", "i4").tolist() == [0, 0, 5, 1] * 2
    assert np.fromfile(tmp_path / "dist/train/numerical.bin", "f4")[1] == 1.5
    criteo = {f"_c{i}": [i % 2 if i == 0 else i, 1] for i in range(40)}
    converted(parquet(tmp_path / "criteo", criteo), "parquet", "terabyte", tmp_path / "tb")
    rows = np.fromfile(tmp_path / "tb/terabyte_processed_train.bin", "i4").reshape(2, 40)
    assert rows.tolist() == [list(range(40)), [1] * 40]


@pytest.mark.parametrize(
    ("changes", "more", "words"),
    [
        ({}, {}, "int_0 is float32, which may be counts or features: say --dense counts"),
        ({"label": [0, 2, 1, 0]}, {"counts": True}, "sample 1, feature label: 2, expected 0 or 1"),
        ({"int_0": [0, 1, -1, 0]}, {}, "sample 2, feature int_0: -1, expected a count of 0 or mo"),
        ({"cat_1": [0, None, 0, 0]}, {"counts": True}, "sample 1, feature cat_1 is empty"),
        ({"cat_1": [0, -7, 0, 0]}, {"counts": True}, "sample 1, feature cat_1: row -7, but"),
        ({"cat_1": list("abcd")}, {}, "cat_1 is of type string, expected whole numbers"),
        ({"cat_3": [0] * 4}, {}, "expected cat_0, _1, ... without gaps"),
        ({"more": [0] * 4}, {}, "has the columns .*more, expected label, num_0"),
    ],
)
def test_what_is_wrong_in_parquet_is_one_sentence(tmp_path, changes, more, words):
    source = parquet(tmp_path / "parquet", some(**changes))
    with pytest.raises(InputError, match=words):
        converted(source, "parquet", "deepspark_dist", tmp_path / "dist", **more)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parquet"]


def test_what_cannot_be_converted_is_one_sentence(tmp_path, small_data_set, capsys):
    source = terabyte(tmp_path / "terabyte")

    def refused(path: Path, before: str, after: str, *more: str) -> str:
        target = tmp_path / "target"
        command = ["data", "convert", str(path), "--from", before, "--to", after, *more]
        assert main([*command, "--output", str(target)]) == 2
        assert not target.exists()
        # what was begun stays, to go on with when the value is mended
        shutil.rmtree(tmp_path / "target.partial", ignore_errors=True)
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    assert "both terabyte" in refused(source, "terabyte", "terabyte")
    assert "no such data set" in refused(tmp_path / "no", "parquet", "terabyte")
    assert "holds no split in the layout parquet" in refused(source, "parquet", "terabyte")
    assert "--dense is for --from parquet" in refused(
        source, "terabyte", "parquet", "--dense", "counts"
    )
    said = refused(small_data_set, "split_binary", "terabyte")
    assert "has 5 numerical and 6 categorical features, but terabyte holds 13 and 26" in said
    features = criteo_like(tmp_path / "features")
    file = features / "test" / "numerical.bin"
    values = np.fromfile(file, np.float16)
    values[13 * 207 + 4] = 2.5
    values.tofile(file)
    said = refused(features, "split_binary", "terabyte")
    assert f"{file}: sample 207, feature num_4: 2.5, expected log(x + 3) of a whole count" in said
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.parquet").write_bytes(b"PAR1 and no more")
    assert "train.parquet cannot be read as Parquet: " in refused(
        tmp_path / "broken", "parquet", "terabyte"
    )
    (source / ORIGIN).write_text((small_data_set / "feature_spec.yaml").read_text())
    said = refused(source, "terabyte", "split_binary")
    assert f"{ORIGIN} has 5 numerical and 6 categorical features, but the data set has" in said


def test_a_row_beyond_the_table_of_the_specification_is_refused(tmp_path):
    source = criteo_like(tmp_path / "nvidia")
    converted(source, "split_binary", "terabyte", tmp_path / "terabyte")
    file = tmp_path / "terabyte" / "terabyte_processed_test.bin"
    rows = np.fromfile(file, np.int32)
    rows[40 * 250 + 14 + 3] = 53
    rows.tofile(file)
    with pytest.raises(InputError, match=r"sample 250, feature cat_3: row 53, .* 53 rows"):
        converted(tmp_path / "terabyte", "terabyte", "split_binary", tmp_path / "back")


def test_metadata_that_were_edited_are_refused(tmp_path):
    for about in (b"x", b"{}", b'{"counts": 1, "table_rows": null}', b'{"counts": true}'):
        table = pa.table(some()).replace_schema_metadata({splits.ABOUT: about})
        folder = tmp_path / str(len(about))
        folder.mkdir()
        pq.write_table(table, folder / "train.parquet")
        with pytest.raises(InputError, match=r"its metadata 'dlrm' is .*, expected counts"):
            converted(folder, "parquet", "terabyte", tmp_path / "x")


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    source = terabyte(tmp_path / "terabyte")
    target = tmp_path / "nvidia"
    command = ["data", "convert", str(source), "--from", "terabyte", "--to", "split_binary"]
    assert main([*command, "--output", str(target)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("700 train, 301 test, 129 val samples, 0.000 GB, in ")
    assert lines[1].startswith("numerical features are taken to be log(x + 1) of counts x: no ")
    assert "of 14,690 numerical values lost digits: converted back they will differ" in lines[2]
    assert lines[3] == str(target)
    assert main(["data", "inspect", str(target)]) == 0
