"""Data sets: NVIDIA's layout written and read, other layouts, presets, the command."""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from commands import run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from same_files import assert_same_files
from small_data_set import ROWS, SMALL

from dlrm_core.base.errors import InputError
from dlrm_core.config import load_parameters, parameters_from_sections
from dlrm_core.data.epochs import Epoch
from dlrm_core.data.files.samples import SampleBatches, evaluation_batches, read_batch
from dlrm_core.data.files.sources import open_source
from dlrm_core.data.files.spec import index_dtype
from dlrm_core.data.files.teacher import Law, SampleMaker
from dlrm_core.data.loader import make_generator
from dlrm_workbook.cli import main
from dlrm_workbook.datasets import generate as generating
from dlrm_workbook.datasets.generate import VARIANTS, generate, scaled_variant
from dlrm_workbook.datasets.inspection import examine_data

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(small_data_set):
    """A small data set, 3000 and 700 samples."""
    return small_data_set


# ---------------------------------------------------------------- NVIDIA's layout


def test_the_variants_are_nvidias():
    t15 = VARIANTS["criteo_t15_synthetic"]
    assert sum(t15.table_rows) == 32_709_138 and len(t15.table_rows) == 26
    assert sum(VARIANTS["criteo_t3_synthetic"].table_rows) == 177_944_291
    assert sum(VARIANTS["criteo_t0_synthetic"].table_rows) == 882_774_575
    small = scaled_variant(t15, 0.01)
    assert small.table_rows[0] == 79129
    # small tables keep their rows, no table is larger than it was
    assert small.table_rows[5] == 4
    assert all(a <= b for a, b in zip(small.table_rows, t15.table_rows, strict=True))
    with pytest.raises(InputError, match=r"--scale is 1.5"):
        scaled_variant(t15, 1.5)


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


def test_threads_and_blocks_do_not_change_a_byte(made, tmp_path, monkeypatch):
    monkeypatch.setattr(generating, "BLOCK", 640)
    samples = {"train": 3000, "test": 700}
    result = generate(SMALL, samples, tmp_path / "again", threads=1)
    assert_same_files(made, result.folder)
    assert result.bytes == sum(f.stat().st_size for f in made.rglob("*.bin"))
    assert result.bytes_written_now == result.bytes


def test_an_interrupted_data_set_is_gone_on_with_not_begun_anew(made, tmp_path, monkeypatch):
    monkeypatch.setattr(generating, "BLOCK", 1024)
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
    result = generate(SMALL, samples, tmp_path / "set", threads=1)
    differing = np.flatnonzero(
        np.frombuffer((result.folder / "train/label.bin").read_bytes(), np.uint8)
        != np.frombuffer((made / "train/label.bin").read_bytes(), np.uint8)
    )
    assert differing.tolist() == [100]
    assert result.bytes_written_now < result.bytes
    problems = examine_data(result.folder, verify=True)["problems"]
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
    with pytest.raises(InputError, match=r"was begun with samples.train 10, but now it is 20"):
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


def train_stream(folder: Path, batch_size: int, order_seed: int | None = None) -> SampleBatches:
    source = open_source(folder, "split_binary", "train")
    return SampleBatches(
        functools.partial(read_batch, source, ROWS), Epoch(source.samples, batch_size), order_seed
    )


def test_batches_are_the_files_rows(made):
    stream = train_stream(made, 128)
    labels, dense, rows, _ = SampleMaker(SMALL, "train").block(0, 3000)
    assert stream.epoch.batches == 23
    for number in range(50):
        batch = stream.next_batch()
        at = slice((number % 23) * 128, (number % 23) * 128 + 128)
        assert torch.equal(batch.dense, torch.from_numpy(dense[at].astype(np.float32)))
        assert torch.equal(batch.targets[:, 0], torch.from_numpy(labels[at].astype(np.float32)))
        for table, column in enumerate(rows):
            found = batch.table_indices(table)
            assert torch.equal(found, torch.from_numpy(column[at].astype(np.int64)))
            assert torch.equal(batch.offsets[table], torch.arange(128))
    assert stream.taken == 50


@settings(max_examples=20, deadline=None)
@given(taken=st.integers(0, 100), size=st.integers(1, 900), seed=st.integers(0, 2**32 - 1))
def test_a_restored_stream_goes_on_where_it_was(made, taken, size, seed):
    one = train_stream(made, size, seed)
    for _ in range(taken):
        one.next_batch()
    state = json.loads(json.dumps(one.state()))
    other = train_stream(made, size, seed)
    other.restore(state)
    for _ in range(3):
        expected, found = one.next_batch(), other.next_batch()
        assert torch.equal(expected.indices, found.indices)
        assert torch.equal(expected.dense, found.dense)


def test_a_shuffled_epoch_has_every_batch_once_and_no_two_epochs_are_alike(made):
    def epochs(seed: int) -> list[list[bytes]]:
        stream = train_stream(made, 100, seed)
        return [[stream.next_batch().dense.numpy().tobytes() for _ in range(30)] for _ in range(2)]

    first, second = epochs(1)
    assert sorted(first) == sorted(second) and first != second
    assert len(set(first)) == 30
    assert epochs(1) == [first, second]
    assert epochs(2)[0] != first


def test_a_short_batch_comes_last_in_a_shuffled_epoch(made):
    source = open_source(made, "split_binary", "train")
    read = functools.partial(read_batch, source, ROWS)
    stream = SampleBatches(read, Epoch(source.samples, 128, drop_last=False), order_seed=3)
    epochs = [[stream.next_batch() for _ in range(24)] for _ in range(2)]
    for batches in epochs:
        assert [batch.size for batch in batches] == [128] * 23 + [3000 - 23 * 128]
        last = read(23 * 128, 3000)
        assert torch.equal(batches[-1].dense, last.dense)
    first, second = (sorted(b.dense.numpy().tobytes() for b in batches) for batches in epochs)
    assert first == second
    assert not torch.equal(epochs[0][0].dense, epochs[1][0].dense)


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
    assert dataset_parameters(made, table_rows=None).model.table_rows == ROWS
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
    assert examine_data(tmp_path)["splits"]["val"]["samples"] == 200
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
        examine_data(tmp_path)
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


# ---------------------------------------------------------------- presets


@pytest.mark.parametrize("name", ["nvidia_t15", "nvidia_t3", "nvidia_t0", "deepspark"])
def test_the_presets_have_the_published_shapes_and_twins_that_need_no_files(name):
    folder = Path(__file__).parents[2] / "parameters"
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
    file = Path(__file__).parents[2] / "parameters" / f"{name}-small.yaml"
    short = ["max_steps=3", "eval_every=3", "eval_batches=1", "threads=1"]
    given = [word for setting in short for word in ("-p", f"training.{setting}")]
    assert main(["train", "-f", str(file), "--output", str(tmp_path / "run"), *given]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["status"], result["iterations"]) == ("finished", 3)
    assert 0.0 < result["auc"] < 1.0


def test_deepspark_s_preset_trains_its_files_as_its_command_does(tmp_path):
    file = Path(__file__).parents[2] / "parameters" / "deepspark.yaml"
    random = np.random.default_rng(3)
    for split, samples in (("train", 202), ("test", 70)):
        rows = random.integers(0, 4, (samples, 40), dtype=np.int32)
        rows[:, 0] &= 1
        rows.tofile(tmp_path / f"terabyte_processed_{split}.bin")
    given = load_parameters(file)
    assert (given.data.order, given.training.loss_scale) == ("shuffled", 1024)
    assert (given.training.auc_target, given.training.evals_per_epoch) == (0.8025, 20)

    def trained(*more: str) -> dict:
        settings = [
            *(f"data.path={tmp_path}", f"model.table_rows={[4] * 26}", "training.batch_size=4"),
            *("training.lr_warmup_steps=0", "training.threads=1", "training.log_every=1", *more),
        ]
        words = [word for setting in settings for word in ("-p", setting)]
        assert main(["train", "-f", str(file), "--output", str(tmp_path / "run"), *words]) == 0
        return json.loads((tmp_path / "run" / "result.json").read_text())

    # 51 batches, the last of two samples: a test every second one, and at the end
    result = trained("training.epochs=1", "training.auc_target=1.0")
    assert (result["iterations"], result["samples"]) == (51, 202)
    tested = [line["iteration"] for line in result["evaluations"]]
    assert tested == [*range(2, 51, 2), 51]
    # labels are random: a target that any test reaches ends the run of five epochs at the first
    result = trained("training.auc_target=0.01")
    assert result["reached_target"] and result["iterations"] == 2


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
    assert main(["data", "inspect", str(target / "train" / "label.bin")]) == 2
    assert f"is one file of the data set {target}; give that folder" in capsys.readouterr().err


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


def test_a_variant_of_ones_own_needs_its_tables(tmp_path, capsys):
    assert main(["data", "generate", "--variant", "custom", "--output", str(tmp_path / "s")]) == 2
    assert "--variant custom needs --table-rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--teacher-seed --teacher-strength --teacher-rows", "--labels teacher, not random"),
        ("--table-rows --dense-features --alpha", "--variant custom, not criteo_t15_synthetic"),
    ],
)
def test_a_published_variant_refuses_what_only_others_take(tmp_path, capsys, flags, why):
    for flag in flags.split():
        command = ["data", "generate", "--variant", "criteo_t15_synthetic", flag, "2"]
        assert main([*command, "--output", str(tmp_path / "s")]) == 2
        assert f"{flag} is for {why}" in capsys.readouterr().err


def test_variants_are_computed_and_measured_only_where_asked(tmp_path, capsys):
    assert main(["data", "variants", "--json"]) == 0
    rows = {row["data_set"]: row for row in json.loads(capsys.readouterr().out)}
    t15 = rows["criteo_t15_synthetic"]
    assert t15["parameters"] == 32_709_138 * 128 + 2_368_897
    # 1 + 26 bytes of label and features beside the rows
    sizes = [index_dtype(count).itemsize for count in VARIANTS["criteo_t15_synthetic"].table_rows]
    assert t15["final_gib"] == pytest.approx((27 + sum(sizes)) * 1100 * 65536 / 2**30)
    assert rows["criteo_t15"]["intermediate_gib"] == pytest.approx(135 * 4_373_472_329 / 2**30)
    # as NVIDIA's document has them
    totals = [rows[f"criteo_{name}"]["embedding_gib"] for name in ("t15", "t3", "t0")]
    assert totals == pytest.approx([15.6, 84.9, 421], rel=0.001)
    assert t15["final_gib"] == pytest.approx(6, rel=0.01)
    assert t15["accuracy"].startswith("no") and rows["criteo_t15"]["accuracy"] == "yes"
    assert all(row["making_s"] is None and row["share_made"] is None for row in rows.values())
    command = ["data", "variants", "--measure", "1e-5", "--work", str(tmp_path), "--threads", "1"]
    assert main([*command, "--json"]) == 0
    rows = {row["data_set"]: row for row in json.loads(capsys.readouterr().out)}
    made = rows["criteo_t3_synthetic"]
    assert made["whole_s"] == pytest.approx(1e5 * made["making_s"])
    assert made["making_s"] > 0 and 20 < made["making_peak_mib"] < 1000
    assert rows["criteo_t3"]["making_s"] is None
    assert list(tmp_path.iterdir()) == []
    assert main(["data", "variants", "--measure", "2"]) == 2
    assert "--measure is 2, expected a number above 0 and at most 1" in capsys.readouterr().err


def test_making_data_sets_needs_no_torch():
    """torch takes seconds to import, and memory."""
    code = (
        "import sys; import dlrm_workbook.datasets.command; from dlrm_kernels import data_sets; "
        "data_sets.fill_words(1, 0, data_sets.np.empty(4, 'u8')); sys.exit('torch' in sys.modules)"
    )
    run_python(code)
