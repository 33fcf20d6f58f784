"""Spoilt data sets: what is wrong is named with file, row and feature."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_data_set import ROWS

from dlrm_core.base.errors import InputError
from dlrm_core.data.files.samples import read_batch
from dlrm_core.data.files.sources import open_source
from dlrm_core.data.files.spec import read_spec
from dlrm_workbook.cli import main
from dlrm_workbook.datasets.inspection import examine_data
from dlrm_workbook.datasets.write_spec import write_spec


@pytest.fixture
def copy(small_data_set, tmp_path):
    """A small data set, 3000 and 700 samples, to be spoilt."""
    return Path(shutil.copytree(small_data_set, tmp_path / "copy"))


# ---------------------------------------------------------------- spoilt data


def patch(file: Path, dtype: str, place: int, value: float) -> None:
    values = np.fromfile(file, dtype)
    values[place] = value
    values.tofile(file)


@pytest.mark.parametrize(
    ("file", "dtype", "place", "value", "words"),
    [
        ("cat_0.bin", "i2", 1234, 1000, "cat_0.bin: sample 1234, feature .*: row 1000, .* 1000 r"),
        ("cat_1.bin", "i1", 17, -1, "cat_1.bin: sample 17, feature cat_1.bin: row -1, .* 3 rows"),
        ("cat_2.bin", "i4", 2999, -(2**31), "sample 2999, feature cat_2.bin: row -2147483648"),
        ("label.bin", "u1", 5, 2, "label.bin: sample 5, feature label: 2, expected 0 or 1"),
        ("numerical.bin", "f2", 5 * 77 + 3, np.nan, "numerical.bin: sample 77, feature num_3: nan"),
        ("numerical.bin", "f2", 1, np.inf, "sample 0, feature num_1: inf, expected a finite"),
    ],
)  # fmt: skip
def test_a_bad_value_is_named_with_file_row_and_feature(copy, file, dtype, place, value, words):
    patch(copy / "train" / file, dtype, place, value)
    source = open_source(copy, "split_binary", "train")
    with pytest.raises(InputError, match=words):
        read_batch(source, ROWS, 0, 3000)
    problems = examine_data(copy)["problems"]
    assert len(problems) == 1
    with pytest.raises(InputError, match=words):
        raise InputError(problems[0])


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n"])
def test_an_empty_specification_is_called_empty(tmp_path, text):
    (tmp_path / "feature_spec.yaml").write_text(text)
    with pytest.raises(InputError) as refused:
        read_spec(tmp_path)
    assert "feature_spec.yaml: the file is empty;" in str(refused.value)
    assert "None" not in str(refused.value)


def test_a_file_cut_short_is_named_with_both_numbers(copy, capsys):
    file = copy / "test" / "cat_2.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    with pytest.raises(InputError, match=r"cat_2.bin has 2797 bytes, expected a multiple of 4"):
        open_source(copy, "split_binary", "test")
    file.write_bytes(whole[:-400])
    words = r"cat_2.bin has 600 samples \(2400 bytes\), but .* have 700 \(2800 bytes\)"
    with pytest.raises(InputError, match=words):
        open_source(copy, "split_binary", "test")
    assert main(["data", "inspect", str(copy)]) == 1
    assert "PROBLEM" in capsys.readouterr().out
    file.unlink()
    with pytest.raises(InputError, match=r"cat_2.bin cannot be read: No such file"):
        open_source(copy, "split_binary", "test")


def test_all_files_cut_alike_are_found_by_the_metadata(copy):
    for file in (copy / "test").iterdir():
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 700 * 500])
    (problem,) = examine_data(copy)["problems"]
    assert "split test has 500 samples, but its metadata say 700" in problem


def test_a_value_changed_within_its_range_is_found_by_making_the_set_again(copy):
    assert examine_data(copy, verify=True)["problems"] == []
    values = np.fromfile(copy / "train" / "cat_0.bin", "i2")
    patch(copy / "train" / "cat_0.bin", "i2", 2000, (values[2000] + 1) % 1000)
    assert examine_data(copy)["problems"] == []
    (problem,) = examine_data(copy, verify=True)["problems"]
    assert (
        f"sample 2000, feature cat_0.bin: {(values[2000] + 1) % 1000}, but it was made as"
        in problem
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t["feature_spec"]["cat_0.bin"].update(cardinality=40000), "dtype int16 ends"),
        (lambda t: t["feature_spec"]["cat_0.bin"].update(cardinality="x"), "cardinality is 'x'"),
        (lambda t: t["feature_spec"]["cat_0.bin"].update(dtype="float16"), "expected integers"),
        (lambda t: t["feature_spec"]["num_1"].update(dtype="object"), "dtype is 'object'"),
        (lambda t: t["feature_spec"].pop("label"), "feature_spec.label is None"),
        (lambda t: t["channel_spec"]["label"].append("num_0"), "label has 2 features"),
        (lambda t: t["source_spec"]["train"].pop(), "has no chunk with feature"),
        (lambda t: t["source_spec"]["train"][0]["files"].append("x"), "with 2 files"),
        (lambda t: t["source_spec"]["train"][1].update(files=["/etc/passwd"]), "leads out of"),
        (lambda t: t["source_spec"]["train"][1].update(files=["../x"]), "leads out of"),
        (lambda t: t.pop("source_spec"), "source_spec is None"),
    ],
)  # fmt: skip
def test_a_wrong_feature_spec_is_refused_with_its_field(copy, change, words):
    file = copy / "feature_spec.yaml"
    tree = yaml.safe_load(file.read_text())
    change(tree)
    file.write_text(yaml.safe_dump(tree))
    with pytest.raises(InputError, match=words) as refused:
        read_spec(copy)
    assert str(file) in str(refused.value)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_rubbish_is_refused_in_one_sentence(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rubbish", numbered=True)
    write_spec(folder, 2, [5, 300], {})
    file = folder / "feature_spec.yaml"
    text = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place : place + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=8))
    file.write_bytes(text)
    try:
        read_spec(folder)
    except InputError as error:
        assert str(file) in str(error) and "\n" not in str(error)


def test_a_data_set_that_is_not_there_or_not_finished_says_so(tmp_path):
    with pytest.raises(InputError, match=r"no such data set"):
        examine_data(tmp_path / "none")
    partial = tmp_path / "some.partial"
    partial.mkdir()
    note = {"request": {}, "done": {"train": 5}}
    (partial / "progress.json").write_text(json.dumps(note))
    with pytest.raises(InputError, match=r"not finished"):
        examine_data(tmp_path / "some")
    report = examine_data(partial)
    assert report["format"] == "unfinished" and "'train': 5" not in str(report["splits"])
    assert '"train": 5' in report["problems"][0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds no data set"):
        examine_data(tmp_path / "empty")


@pytest.mark.parametrize("loader", ["synchronous", "prefetch"])
def test_a_bad_row_ends_a_training_in_one_sentence(loader, tmp_path, capsys):
    target = tmp_path / "set"
    command = ["data", "generate", "--variant", "custom", "--table-rows", "500,20", "--output"]
    assert main([*command, str(target), "--dense-features", "4", "--samples", "400/50"]) == 0
    with (target / "train/cat_1.bin").open("r+b") as file:
        file.seek(123)
        file.write(bytes([77]))
    sections = {
        "model": {"bottom_mlp": "4-8-4", "top_mlp": "8-1", "embedding_dim": 4, "loss": "bce"}
        | {"table_rows": [500, 20]},
        "data": {"generator": "dataset", "path": str(target), "loader": loader},
        "training": {"batch_size": 50, "batches": 8, "device": "cpu", "threads": 1},
    }
    (tmp_path / "p.json").write_text(json.dumps(sections))
    capsys.readouterr()
    assert main(["train", "-f", str(tmp_path / "p.json")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "train/cat_1.bin: sample 123, feature cat_1.bin: row 77" in said
