"""Data sets: NVIDIA's layout written and read, the power law, planted labels, refusals."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from same_files import assert_same_files

from dlrm_core.cli import main
from dlrm_core.config import load_parameters, parameters_from_sections
from dlrm_core.data.loader import make_generator
from dlrm_core.datasets import draw_kernels, draws
from dlrm_core.datasets.compiled import compile_function
from dlrm_core.datasets.feature_spec import default_spec, index_dtype, read_spec, write_spec
from dlrm_core.datasets.generate import Law, SampleMaker, generate, labels_and_logits
from dlrm_core.datasets.inspection import inspect
from dlrm_core.datasets.reader import DatasetBatches, evaluation_batches, read_batch, teacher_auc
from dlrm_core.datasets.sources import open_source
from dlrm_core.datasets.teacher import ScoreHistogram, Teacher, TeacherConfig, best_figures, sigmoid
from dlrm_core.datasets.variants import VARIANTS, Variant
from dlrm_core.errors import InputError

CPU = torch.device("cpu")
ROWS = (1000, 3, 40000, 126, 127, 1)
SMALL = Law(Variant("custom", 5, ROWS, 1.45), 7)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small data set, 3000 and 700 samples."""
    folder = tmp_path_factory.mktemp("data") / "set"
    generate(SMALL, {"train": 3000, "test": 700}, folder, threads=2, block=1024)
    return folder


@pytest.fixture
def copy(made, tmp_path):
    """The same, to be spoilt."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


# ---------------------------------------------------------------- the laws


@settings(max_examples=60, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 126), st.integers(127, 32766), st.integers(32767, 2**31 - 2)),
    alpha=st.one_of(st.just(1.0), st.floats(0.0, 6.0)),
    key=st.integers(0, 2**64 - 1),
    start=st.integers(0, 2**40),
    count=st.integers(0, 2500),
)
def test_machine_code_draws_the_bits_that_numpy_draws(rows, alpha, key, start, count):
    law = draws.PowerLaw.of(rows, alpha)
    found = np.empty(count, index_dtype(rows))
    draw_kernels.fill_rows(law, key, start, found)
    expected = law.draw(draws.words(key, start, count))
    assert np.array_equal(found, expected)
    assert count == 0 or (expected.min() >= 0 and expected.max() < rows)
    bits = np.empty(count, np.uint64)
    draw_kernels.fill_words(key, start, bits)
    assert np.array_equal(bits, draws.words(key, start, count))


@pytest.mark.parametrize("rows", [4, 1000, 8165896, 292775614])
@pytest.mark.parametrize("alpha", [0.0, 0.9, 1.0, 1.45])
def test_rows_are_those_of_nvidias_formula(rows, alpha):
    bits = draws.words(11, 0, 50_000)
    u, g = draws.uniform(bits), 1.0 - alpha
    if alpha == 1.0:
        exact = (rows + 1.0) ** u
    else:
        exact = (u * ((rows + 1.0) ** g - 1.0) + 1.0) ** (1.0 / g)
    # both are rounded: a place this near a whole number may fall on either side. The factor
    # 1/g stretches the error of the power's argument
    tolerance = 1e-13 * exact * max(1.0, abs(1.0 / g) if g else 1.0)
    clear = np.abs(exact - np.round(exact)) > tolerance
    assert clear.mean() > 0.9
    found = draws.PowerLaw.of(rows, alpha).draw(bits)
    assert np.array_equal(found[clear], np.minimum(np.floor(exact[clear]) - 1, rows - 1))


@pytest.mark.parametrize("rows", [10, 3000])
def test_rows_come_as_often_as_the_law_says(rows):
    law, count = draws.PowerLaw.of(rows, 1.45), 400_000
    chances = law.chances()
    assert chances.sum() == pytest.approx(1.0)
    seen = np.bincount(law.draw(draws.words(5, 0, count)), minlength=rows)
    # Kolmogorov-Smirnov: passed once in a thousand seeds; this one is fixed
    assert np.abs(np.cumsum(seen) / count - np.cumsum(chances)).max() < 1.95 / np.sqrt(count)
    assert seen.argmax() == 0


@given(st.floats(1e-300, 1e300))
def test_the_own_logarithm_and_power_are_right_to_the_stated_error(x):
    array = np.array([x])
    assert abs(draws.log2(array)[0] - np.log2(x)) < 1e-13 * max(1.0, abs(np.log2(x)))
    exponent = np.array([abs(np.log2(x)) % 62.0])
    assert draws.exp2(exponent)[0] == pytest.approx(2.0 ** exponent[0], rel=1e-13)


def test_half_floats_are_the_uniform_law_rounded_down():
    halves = draws.half_of_bits().astype(np.float64)
    exact = np.arange(65536) / 65536
    assert (halves <= exact).all() and (halves < 1.0).all()
    # a half has 11 significant bits, and steps of 2^-24 near 0
    assert (exact - halves <= np.maximum(exact * 2.0**-10, 2.0**-24)).all()
    assert np.all(np.diff(halves) >= 0)


@settings(max_examples=40, deadline=None)
@given(start=st.integers(0, 5000), count=st.integers(1, 300), teacher=st.booleans())
def test_any_rows_are_made_alone_as_they_are_made_in_a_block(start, count, teacher):
    law = Law(SMALL.variant, 3, TeacherConfig() if teacher else None)
    maker = SampleMaker(law, "test")
    whole = maker.block(0, start + count)
    part = maker.block(start, count)
    assert np.array_equal(part[0], whole[0][start:])
    assert np.array_equal(part[1], whole[1][start:])
    for one, other in zip(part[2], whole[2], strict=True):
        assert np.array_equal(one, other[start:])


def test_without_numba_the_bytes_are_the_same(monkeypatch):
    expected = SampleMaker(SMALL, "train").block(100, 500)
    monkeypatch.setattr(draw_kernels, "compile_function", lambda *_: None)
    found = SampleMaker(SMALL, "train").block(100, 500)
    assert np.array_equal(found[1], expected[1])
    for one, other in zip(found[2], expected[2], strict=True):
        assert np.array_equal(one, other)


def test_a_damaged_cache_of_machine_code_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    signatures = ("void(uint64, uint64[::1])",)
    source = Path(draw_kernels.__file__)
    for _ in range(2):
        from dlrm_core.datasets import compiled

        compiled._folder.cache_clear()
        compile_function.cache_clear()
        kernel = compile_function(draw_kernels.words_kernel, signatures, source)
        out = np.empty(4, np.uint64)
        kernel(np.uint64(draws.GAMMA), out)
        assert np.array_equal(out, draws.words(0, 0, 4))
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        assert files
        for file in files:
            file.write_bytes(b"rubbish")
    compiled._folder.cache_clear()
    compile_function.cache_clear()


# ---------------------------------------------------------------- NVIDIA's layout


def test_the_variants_are_nvidias():
    t15 = VARIANTS["criteo_t15_synthetic"]
    assert sum(t15.table_rows) == 32_709_138 and len(t15.table_rows) == 26
    assert sum(VARIANTS["criteo_t3_synthetic"].table_rows) == 177_944_291
    assert sum(VARIANTS["criteo_t0_synthetic"].table_rows) == 882_774_575
    small = t15.scaled(0.01)
    assert small.table_rows[0] == 79129
    # small tables keep their rows, no table is larger than it was
    assert small.table_rows[5] == 4
    assert all(a <= b for a, b in zip(small.table_rows, t15.table_rows, strict=True))
    with pytest.raises(InputError, match=r"--scale is 1.5"):
        t15.scaled(1.5)


@given(st.integers(1, 2**31 - 2))
def test_a_column_has_the_smallest_type_whose_maximum_exceeds_the_cardinality(rows):
    kind = index_dtype(rows)
    assert rows < np.iinfo(kind).max
    smaller = {"int32": "int16", "int16": "int8"}.get(str(kind))
    assert smaller is None or rows >= np.iinfo(smaller).max


def test_the_files_are_those_of_the_published_layout(made):
    tree = yaml.safe_load((made / "feature_spec.yaml").read_text())
    assert set(tree) == {"feature_spec", "source_spec", "channel_spec", "metadata"}
    assert tree["feature_spec"]["cat_0.bin"] == {"cardinality": 1000, "dtype": "int16"}
    assert tree["feature_spec"]["cat_3.bin"]["dtype"] == "int8"
    assert tree["feature_spec"]["cat_4.bin"]["dtype"] == "int16"
    assert tree["feature_spec"]["num_0"] == {"dtype": "float16"}
    assert tree["feature_spec"]["label"] == {"dtype": "bool"}
    assert tree["channel_spec"]["label"] == ["label"]
    for split, samples in (("train", 3000), ("test", 700)):
        sizes = {file.name: file.stat().st_size for file in (made / split).iterdir()}
        widths = {f"cat_{t}.bin": index_dtype(rows).itemsize for t, rows in enumerate(ROWS)}
        widths |= {"label.bin": 1, "numerical.bin": 10}
        assert sizes == {name: samples * width for name, width in widths.items()}
    assert sorted(file.name for file in made.iterdir()) == ["feature_spec.yaml", "test", "train"]


def test_threads_and_blocks_do_not_change_a_byte(made, tmp_path):
    samples = {"train": 3000, "test": 700}
    result = generate(SMALL, samples, tmp_path / "again", threads=1, block=640)
    assert_same_files(made, result.folder)
    assert result.bytes == sum(f.stat().st_size for f in made.rglob("*.bin"))
    assert result.bytes_written_now == result.bytes


def test_an_interrupted_data_set_is_gone_on_with_not_begun_anew(made, tmp_path):
    samples = {"train": 3000, "test": 700}
    partial = tmp_path / "set.partial"
    shutil.copytree(made, partial)
    (partial / "feature_spec.yaml").unlink()
    note = {"request": as_request(SMALL, samples), "done": {"train": 2048, "test": 0}}
    (partial / "progress.json").write_text(json.dumps(note))
    labels = partial / "train" / "label.bin"
    spoilt = bytearray(labels.read_bytes())
    # what the note calls done is left alone; what lies beyond is written again
    spoilt[100], spoilt[2500] = 1 - spoilt[100], 1 - spoilt[2500]
    labels.write_bytes(spoilt)
    result = generate(SMALL, samples, tmp_path / "set", threads=1, block=1024)
    differing = np.flatnonzero(
        np.frombuffer((result.folder / "train/label.bin").read_bytes(), np.uint8)
        != np.frombuffer((made / "train/label.bin").read_bytes(), np.uint8)
    )
    assert differing.tolist() == [100]
    assert result.bytes_written_now < result.bytes
    problems = inspect(result.folder, verify=True)["problems"]
    assert len(problems) == 1 and "train/label.bin: sample 100, feature label" in problems[0]


def as_request(law: Law, samples: dict[str, int]) -> dict:
    from dataclasses import asdict

    return json.loads(json.dumps({"law": asdict(law), "samples": samples}))


def test_a_request_other_than_the_one_begun_is_refused(tmp_path):
    partial = tmp_path / "set.partial"
    partial.mkdir()
    samples = {"train": 10, "test": 10}
    note = {"request": as_request(SMALL, samples), "done": {}}
    (partial / "progress.json").write_text(json.dumps(note))
    with pytest.raises(InputError, match=r"was begun with samples .*10.*, but now it is .*20"):
        generate(SMALL, {"train": 20, "test": 10}, tmp_path / "set", 1)
    generate(SMALL, samples, tmp_path / "set", 1)
    with pytest.raises(InputError, match=r"exists already"):
        generate(SMALL, samples, tmp_path / "set", 1)
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "mine").write_text("")
    with pytest.raises(InputError, match=r"in the way"):
        generate(SMALL, samples, tmp_path / "other", 1)


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match=r"GB free, but .* GB are to be written"):
        generate(SMALL, {"train": 10**15, "test": 1}, tmp_path / "set", 1)


# ---------------------------------------------------------------- reading


def test_batches_are_the_files_rows(made):
    source = open_source(made, "split_binary", "train")
    stream = DatasetBatches(source, ROWS, 5, 128)
    labels, dense, rows = SampleMaker(SMALL, "train").block(0, 3000)
    assert stream.batches_per_epoch == 23
    for number in range(50):
        batch = stream.next_batch()
        at = slice((number % 23) * 128, (number % 23) * 128 + 128)
        assert torch.equal(batch.dense, torch.from_numpy(dense[at].astype(np.float32)))
        assert torch.equal(batch.targets[:, 0], torch.from_numpy(labels[at].astype(np.float32)))
        for table, column in enumerate(rows):
            found = batch.table_indices(table)
            assert torch.equal(found, torch.from_numpy(column[at].astype(np.int64)))
            assert torch.equal(batch.offsets[table], torch.arange(128))
    assert stream.epoch == 2


@settings(max_examples=20, deadline=None)
@given(taken=st.integers(0, 100), size=st.integers(1, 900), seed=st.integers(0, 2**32 - 1))
def test_a_restored_stream_goes_on_where_it_was(made, taken, size, seed):
    source = open_source(made, "split_binary", "train")
    one = DatasetBatches(source, ROWS, 5, size, shuffled=True, seed=seed)
    for _ in range(taken):
        one.next_batch()
    state = json.loads(json.dumps(one.state()))
    other = DatasetBatches(source, ROWS, 5, size, shuffled=True, seed=seed)
    other.restore(state)
    for _ in range(3):
        expected, found = one.next_batch(), other.next_batch()
        assert torch.equal(expected.indices, found.indices)
        assert torch.equal(expected.dense, found.dense)


def test_a_shuffled_epoch_has_every_batch_once_and_no_two_epochs_are_alike(made):
    source = open_source(made, "split_binary", "train")

    def epochs(seed: int) -> list[list[bytes]]:
        stream = DatasetBatches(source, ROWS, 5, 100, shuffled=True, seed=seed)
        return [[stream.next_batch().dense.numpy().tobytes() for _ in range(30)] for _ in range(2)]

    first, second = epochs(1)
    assert sorted(first) == sorted(second) and first != second
    assert len(set(first)) == 30
    assert epochs(1) == [first, second]
    assert epochs(2)[0] != first


def test_evaluation_takes_every_sample_once_the_last_batch_as_small_as_it_is(made):
    parameters = dataset_parameters(made, batch=300)
    sizes = [batch.size for batch in evaluation_batches(parameters)]
    assert sizes == [300, 300, 100]
    assert [batch.size for batch in evaluation_batches(parameters, samples=301)] == [300, 1]
    columns = torch.cat([batch.table_indices(2) for batch in evaluation_batches(parameters)])
    assert torch.equal(columns, torch.from_numpy(SampleMaker(SMALL, "test").rows(2, 0, 700)).long())


def dataset_parameters(path, batch=64, **model):
    shape = {"bottom_mlp": "5-8-4", "embedding_dim": 4, "top_mlp": [4, 1]}
    return parameters_from_sections(
        {
            "model": shape | model,
            "data": {"generator": "dataset", "path": str(path)},
            "training": {"batch_size": batch},
        }
    )


def test_the_models_shape_is_taken_from_the_data_set_or_held_against_it(made):
    parameters = dataset_parameters(made)
    assert parameters.model.table_rows == ROWS
    assert parameters.model.dense_features == 5
    assert (parameters.data.indices_per_lookup, parameters.data.fixed_pooling) == (1, True)
    # what a notebook is given names every row, and needs no file to be read
    assert parameters_from_sections(parameters.to_sections()) == parameters
    larger = dataset_parameters(made, table_rows=[50000] * 6)
    assert make_generator(larger, CPU).next_batch().size == 64
    smaller = dataset_parameters(made, table_rows=[*ROWS[:2], 39999, *ROWS[3:]])
    with pytest.raises(InputError, match=r"table_rows\[2\] is 39999, .*cat_2.bin.*40000"):
        make_generator(smaller, CPU)
    with pytest.raises(InputError, match=r"model.tables is 2, but .* has 6"):
        make_generator(dataset_parameters(made, table_rows=[50000] * 2), CPU)
    wide = dataset_parameters(made, table_rows=list(ROWS), bottom_mlp="6-8-4")
    with pytest.raises(InputError, match=r"dense_features is 6, but .* has 5"):
        make_generator(wide, CPU)
    with pytest.raises(InputError, match=r"has 3000 samples, but training.batch_size is 3001"):
        make_generator(dataset_parameters(made, batch=3001), CPU)


def test_a_path_and_its_generator_belong_together(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"data.path is ''"):
        parameters_from_sections({"data": {"generator": "dataset", "format": "terabyte"}})
    with pytest.raises(InputError, match=r"data.generator is 'zipf', but data.path is 'here'"):
        parameters_from_sections({"data": {"generator": "zipf", "path": "here"}})
    with pytest.raises(InputError, match=r"place is 'device'"):
        parameters_from_sections({"data": {"generator": "teacher", "place": "device"}})
    with pytest.raises(InputError, match=r"no such file"):
        dataset_parameters(tmp_path / "nothing")
    # notebooks run elsewhere: a relative path is the caller's
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "p.yaml"
    file.write_text(
        "model: {table_rows: [4]}\ndata: {generator: dataset, path: sets/one, format: terabyte}\n"
    )
    assert load_parameters(file).data.path == str(tmp_path / "sets" / "one")


def test_training_runs_from_a_data_set(made, tmp_path, capsys):
    file = tmp_path / "p.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "model": {"bottom_mlp": [5, 8, 4], "embedding_dim": 4, "top_mlp": [4, 1]},
                "data": {"generator": "dataset", "path": str(made), "loader": "prefetch"},
                "training": {"batch_size": 256, "batches": 15, "device": "cpu"},
            }
        )
    )
    assert main(["train", "-f", str(file)]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["iterations"] == 15 and np.isfinite(summary["loss"])


# ---------------------------------------------------------------- other layouts


@pytest.fixture
def rows_of_ints():
    random = np.random.default_rng(3)
    table = random.integers(0, 50, (200, 40)).astype("<i4")
    table[:, 0] = random.integers(0, 2, 200)
    return table


def test_terabyte_files_are_rows_of_forty_integers(rows_of_ints, tmp_path):
    for split in ("train", "test", "val"):
        rows_of_ints.tofile(tmp_path / f"terabyte_processed_{split}.bin")
    for path in (tmp_path, tmp_path / "terabyte_processed_val.bin"):
        source = open_source(path, "terabyte", "val")
        assert_reads(read_batch(source, [50] * 26, 20, 150), rows_of_ints[20:150])
    assert inspect(tmp_path)["splits"]["val"]["samples"] == 200
    with pytest.raises(InputError, match=r"train.bin: sample \d+, feature cat_3: row \d+, but"):
        read_batch(open_source(tmp_path, "terabyte", "train"), [50, 50, 50, 9, *[50] * 22], 0, 200)


def assert_reads(batch, expected) -> None:
    assert torch.equal(batch.targets[:, 0], torch.from_numpy(expected[:, 0]).float())
    logs = torch.log(torch.from_numpy(expected[:, 1:14]).float() + 1.0)
    assert torch.allclose(batch.dense, logs, rtol=1e-6)
    for table in range(26):
        assert torch.equal(
            batch.table_indices(table), torch.from_numpy(expected[:, 14 + table]).long()
        )


def test_deepsparks_variant_needs_its_name(rows_of_ints, tmp_path, capsys):
    (tmp_path / "train").mkdir()
    rows_of_ints[:, 0].astype("<f4").tofile(tmp_path / "train" / "label.bin")
    rows_of_ints[:, 1:14].astype("<f4").tofile(tmp_path / "train" / "numerical.bin")
    for table in range(26):
        rows_of_ints[:, 14 + table].tofile(tmp_path / "train" / f"cat_{table}.bin")
    with pytest.raises(InputError, match=r"say --format deepspark_dist"):
        inspect(tmp_path)
    with pytest.raises(InputError, match=r"feature_spec.yaml: no such file"):
        open_source(tmp_path, "split_binary", "train")
    source = open_source(tmp_path, "deepspark_dist", "train")
    assert_reads(read_batch(source, [50] * 26, 0, 200), rows_of_ints)
    assert main(["data", "inspect", str(tmp_path), "--format", "deepspark_dist", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["splits"]["train"]["tables"][0]["cardinality"] is None
    assert report["splits"]["train"]["click_rate"] == pytest.approx(rows_of_ints[:, 0].mean())
    (tmp_path / "train" / "cat_7.bin").unlink()
    with pytest.raises(InputError, match=r"without gaps"):
        open_source(tmp_path, "deepspark_dist", "train")


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
    problems = inspect(copy)["problems"]
    assert len(problems) == 1
    with pytest.raises(InputError, match=words):
        raise InputError(problems[0])


def test_a_file_cut_short_is_named_with_both_numbers(copy, capsys):
    file = copy / "test" / "cat_2.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    with pytest.raises(InputError, match=r"cat_2.bin: has 2797 bytes, expected a multiple of 4"):
        open_source(copy, "split_binary", "test")
    file.write_bytes(whole[:-400])
    words = r"cat_2.bin: has 600 samples \(2400 bytes\), but .* have 700 \(2800 bytes\)"
    with pytest.raises(InputError, match=words):
        open_source(copy, "split_binary", "test")
    assert main(["data", "inspect", str(copy)]) == 1
    assert "PROBLEM" in capsys.readouterr().out
    file.unlink()
    with pytest.raises(InputError, match=r"cat_2.bin: cannot be read: No such file"):
        open_source(copy, "split_binary", "test")


def test_all_files_cut_alike_are_found_by_the_metadata(copy):
    for file in (copy / "test").iterdir():
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 700 * 500])
    (problem,) = inspect(copy)["problems"]
    assert "split test has 500 samples, but its metadata say 700" in problem


def test_a_value_changed_within_its_range_is_found_by_making_the_set_again(copy):
    assert inspect(copy, verify=True)["problems"] == []
    values = np.fromfile(copy / "train" / "cat_0.bin", "i2")
    patch(copy / "train" / "cat_0.bin", "i2", 2000, (values[2000] + 1) % 1000)
    assert inspect(copy)["problems"] == []
    (problem,) = inspect(copy, verify=True)["problems"]
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
    write_spec(folder, default_spec(2, [5, 300]))
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
        inspect(tmp_path / "none")
    partial = tmp_path / "some.partial"
    partial.mkdir()
    note = {"request": {}, "done": {"train": 5}}
    (partial / "progress.json").write_text(json.dumps(note))
    with pytest.raises(InputError, match=r"not finished"):
        inspect(tmp_path / "some")
    report = inspect(partial)
    assert report["format"] == "unfinished" and "'train': 5" not in str(report["splits"])
    assert '"train": 5' in report["problems"][0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds no data set"):
        inspect(tmp_path / "empty")


# ---------------------------------------------------------------- the planted teacher


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-60, 60), st.booleans()), min_size=2, max_size=60
    ).filter(lambda pairs: 0 < sum(label for _, label in pairs) < len(pairs))
)  # fmt: skip
def test_the_auc_of_a_histogram_is_the_share_of_ordered_pairs(pairs):
    # scores on whole quarters fall into bins of their own
    scores = np.array([score / 4 for score, _ in pairs])
    labels = np.array([label for _, label in pairs])
    histogram = ScoreHistogram()
    for part in (slice(0, 10), slice(10, None)):
        histogram.add(scores[part], labels[part])
    won = np.subtract.outer(scores[labels], scores[~labels])
    auc, uncertainty = histogram.auc()
    assert auc == pytest.approx((won > 0).mean() + (won == 0).mean() / 2)
    assert uncertainty == pytest.approx((won == 0).mean() / 2)
    p = 1 / (1 + np.exp(-scores))
    loss = -np.log(np.where(labels, p, 1 - p)).mean()
    assert histogram.log_loss() == pytest.approx(loss)


def test_the_sigmoid_is_the_sigmoid():
    x = np.linspace(-39, 39, 2001)
    assert np.allclose(sigmoid(x), 1 / (1 + np.exp(-x)), rtol=1e-12, atol=0)


def test_the_teachers_parts_have_the_shares_they_are_said_to_have():
    config = TeacherConfig(strength=2.0, bias=-0.5)
    teacher = Teacher(config, 5, ROWS, 1.45)
    logits = teacher.sample(99, 0, 200_000)
    # standard errors of a mean and a deviation of 200,000 draws, five times; the pairs share
    # their tables with the single effects, which adds a few percent at most
    assert logits.mean() == pytest.approx(-0.5, abs=0.05)
    assert logits.std() == pytest.approx(2.0, rel=0.06)


def test_the_best_auc_is_the_teachers_own_and_no_other_score_beats_it():
    figures = best_figures(TeacherConfig(), 5, ROWS, 1.45, rounds=8, samples=1 << 15)
    law = Law(SMALL.variant, 21, TeacherConfig())
    labels, dense, rows = SampleMaker(law, "test").block(0, 200_000)
    logits = Teacher(TeacherConfig(), 5, ROWS, 1.45).logits(dense, rows)

    def auc(scores):
        histogram = ScoreHistogram()
        histogram.add(scores, labels)
        return histogram.auc()[0]

    # Hanley and McNeil's standard error of an AUC is below 1 / (2 sqrt(min(n+, n-)))
    allowed = 5 * (0.5 / np.sqrt(labels.sum()) + figures["bayes_auc_standard_error"])
    assert auc(logits) == pytest.approx(figures["bayes_auc"], abs=allowed)
    assert auc(dense.astype(np.float64).sum(1)) < auc(logits) - 0.05
    noisy = logits + np.random.default_rng(1).normal(size=logits.size)
    assert 0.6 < auc(noisy) < auc(logits) - 0.01
    assert labels.mean() == pytest.approx(figures["click_rate"], abs=5 * 0.5 / np.sqrt(200_000))
    weak = best_figures(TeacherConfig(strength=0.0), 5, ROWS, 1.45, rounds=2, samples=1 << 12)
    assert weak["bayes_auc"] == pytest.approx(0.5)


def test_the_metadata_carry_the_best_auc_and_the_stream_is_the_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "dlrm_core.datasets.generate.best_figures", lambda *_: {"bayes_auc": 0.8}
    )  # fmt: skip
    law = Law(Variant("custom", 5, ROWS, 1.2), 9, TeacherConfig(rows=20))
    folder = generate(law, {"train": 1000, "test": 4000}, tmp_path / "set", 2).folder
    metadata = read_spec(folder).metadata
    assert metadata["bayes_auc"] == 0.8
    source = open_source(folder, "split_binary", "test")
    batch = read_batch(source, ROWS, 0, 4000)
    teacher = Teacher(law.teacher, 5, ROWS, 1.2)
    rows = [batch.table_indices(t).numpy() for t in range(6)]
    scores = teacher.logits(batch.dense.numpy().astype(np.float16), rows)
    histogram = ScoreHistogram()
    histogram.add(scores, batch.targets[:, 0].numpy())
    assert histogram.auc()[0] == pytest.approx(metadata["teacher_auc_on_test"], abs=1e-12)
    assert inspect(folder, verify=True)["problems"] == []
    # the same law without files
    parameters = parameters_from_sections(
        {
            "model": {"bottom_mlp": "5-8-4", "embedding_dim": 4, "table_rows": list(ROWS),
                      "top_mlp": [1], "tables": 6},
            "data": {"generator": "teacher", "zipf_exponent": 1.2, "teacher_rows": 20},
            "training": {"batch_size": 400, "seed": 9},
        }
    )  # fmt: skip
    stream = make_generator(parameters, CPU)
    on_disk = open_source(folder, "split_binary", "train")
    stream.restore({"batches": 1})
    found, expected = stream.next_batch(), read_batch(on_disk, ROWS, 400, 800)
    assert torch.equal(found.indices, expected.indices)
    assert torch.equal(found.dense, expected.dense)
    assert torch.equal(found.targets, expected.targets)
    assert stream.state() == {"batches": 2}
    last = list(evaluation_batches(parameters, samples=900))[-1]
    assert last.size == 100
    assert torch.equal(last.targets, read_batch(source, ROWS, 800, 900).targets)


# ---------------------------------------------------------------- presets


@pytest.mark.parametrize("name", ["nvidia_t15", "nvidia_t3", "nvidia_t0", "deepspark"])
def test_the_presets_have_the_published_shapes_and_twins_that_need_no_files(name):
    folder = Path(__file__).parent.parent / "parameters"
    large = load_parameters(folder / f"{name}.yaml")
    small = load_parameters(folder / f"{name}-small.yaml")
    synthetic = "deepspark" if name == "deepspark" else f"criteo_{name[7:]}"
    variant = VARIANTS[f"{synthetic}_synthetic"]
    assert large.model.table_rows == variant.table_rows
    width = large.model.embedding_dim
    assert large.model.bottom_widths == (13, 512, 256, width)
    # the interaction of 27 vectors: 27 * 26 / 2 products and the dense one
    tops = (512, 512, 256, 1) if name == "deepspark" else (1024, 1024, 512, 256, 1)
    assert large.model.top_widths == (351 + width, *tops)
    assert width == (64 if name == "deepspark" else 128)
    assert len(small.model.table_rows) == 26 and sum(small.model.table_rows) < 50_000
    assert (small.data.generator, small.data.zipf_exponent) == ("teacher", variant.alpha)
    assert (small.model.interaction, small.model.loss) == (
        large.model.interaction,
        large.model.loss,
    )
    batch = make_generator(small, CPU).next_batch()
    assert batch.size == 2048 and 0.15 < float(batch.targets.mean()) < 0.35


@pytest.mark.parametrize("name", ["nvidia_t15", "nvidia_t3", "nvidia_t0", "deepspark"])
def test_the_small_twins_train_and_are_evaluated(name, tmp_path, capsys):
    file = Path(__file__).parent.parent / "parameters" / f"{name}-small.yaml"
    short = ["max_steps=3", "eval_every=3", "eval_batches=1", "threads=1"]
    given = [word for setting in short for word in ("-p", f"training.{setting}")]
    assert main(["train", "-f", str(file), "--output", str(tmp_path / "run"), *given]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["status"], result["iterations"]) == ("finished", 3)
    assert 0.0 < result["auc"] < 1.0


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


def test_a_models_auc_is_held_against_the_teachers_on_the_same_samples(tmp_path):
    target = tmp_path / "set"
    law = Law(Variant("custom", 3, ROWS, 1.45), 5, TeacherConfig())
    generate(law, {"train": 10, "test": 3000}, target, threads=1)
    model = {"mlp_sizes": "nvidia", "dense_features": 3, "bottom_mlp": [4], "top_mlp": [1]}
    model |= {"embedding_dim": 4, "table_rows": list(ROWS), "loss": "bce"}

    def best(**training):
        data = {"generator": "dataset", "path": str(target)}
        sections = {"model": model, "data": data, "training": {"batch_size": 100} | training}
        return teacher_auc(parameters_from_sections(sections))

    whole = open_source(target, "split_binary", "test").metadata["teacher_auc_on_test"]
    assert best() == best(eval_batches=30) == whole
    # of the first 500 samples alone, counted pair by pair
    labels, logits = labels_and_logits(SampleMaker(law, "test"), 0, 500)
    difference = logits[labels][:, None] - logits[~labels]
    pairs = (difference > 0).mean() + (difference == 0).mean() / 2
    assert best(eval_batches=5) == pytest.approx(pairs, abs=1e-4)


# ---------------------------------------------------------------- the command


def test_the_command_generates_and_inspects(tmp_path, capsys):
    target = tmp_path / "set"
    command = ["data", "generate", "--variant", "custom", "--table-rows", "500,20", "--output"]
    assert main([*command, str(target), "--dense-features", "2", "--samples", "1e3/200"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(target)
    assert main(["data", "inspect", str(target), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["splits"]["train"]["samples"] == 1000
    table = report["splits"]["train"]["tables"][0]
    assert table["cardinality"] == 500 and 0 <= table["minimum"] <= table["maximum"] < 500
    assert table["different_rows"] <= 500 and 0.2 < table["row_0_share"] < 0.4
    assert report["metadata"]["bayes_auc"] == 0.5
    assert main(["data", "inspect", str(target)]) == 0
    assert "all values are in range" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--samples", "many"], "--samples is 'many'"),
        (["--samples", "5/0"], "--samples is '5/0'"),
        (["--scale", "0"], "--scale is 0"),
        (["--table-rows", "1,x"], "--table-rows is '1,x'"),
        (["--table-rows", "5,0"], "a table has 0 rows"),
        (["--alpha", "-1"], "alpha is -1"),
        (["--threads", "0"], "--threads is 0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--labels", "teacher", "--teacher-strength", "9"], "--teacher-strength is 9"),
    ],
)
def test_what_cannot_be_generated_is_refused(tmp_path, capsys, extra, words):
    command = ["data", "generate", "--variant", "custom", "--table-rows", "500,20"]
    assert main([*command, "--samples", "10", "--output", str(tmp_path / "s"), *extra]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
