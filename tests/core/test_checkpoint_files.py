"""The files of a checkpoint: whole or refused, whatever was flipped, cut or changed."""

import json
import random
import shutil
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_training import parameters, trained, whole_checkpoint

from dlrm_core.base.errors import InputError
from dlrm_core.run.checkpoint import MANIFEST, OPTIMIZER, VERSION, WEIGHTS, _digest, read_checkpoint
from dlrm_core.run.tensor_files import read_tensors, write_tensors
from dlrm_core.train import train

# ---- the files --------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        max_size=4,
    )
)
def test_the_library_reads_what_is_streamed(tmp_path_factory, wanted):
    tensors = {
        f"t{i}": torch.arange(torch.Size(shape).numel()).to(kind).view(shape)
        for i, (kind, shape) in enumerate(wanted)
    }
    path = tmp_path_factory.mktemp("f") / "x.safetensors"
    record = write_tensors(path, tensors)
    read = safetensors.torch.load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    empty = {name: torch.full_like(tensor, 7) for name, tensor in tensors.items()}
    read_tensors(path, record, empty)
    assert all(torch.equal(empty[name], tensors[name]) for name in tensors)


def test_parts_of_tensors_and_portions_of_rows_are_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrm_core.run.tensor_files.PIECE_BYTES", 100)
    whole = torch.randn(40, 12)
    tensors = {"strided": whole[:, 3:7], "transposed": whole.T, "column": whole[:, :1][:, 0]}
    record = write_tensors(tmp_path / "x", tensors)
    read = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    read_tensors(tmp_path / "x", record, read)
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_writing_takes_no_second_copy(tmp_path):
    """Peak resident memory while a table of 256 MiB is saved."""
    code = f"""
import torch, pathlib
from dlrm_core.run.tensor_files import write_tensors
from dlrm_core.base.machine import peak_memory
table = {{"table": torch.ones(1 << 20, 64)}}
path = pathlib.Path({str(tmp_path / "x")!r})
cpu = torch.device("cpu")
write_tensors(path.with_name("warm"), {{"a": torch.ones(3)}})
before = peak_memory(cpu)
record = write_tensors(path, table)
print(peak_memory(cpu) - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) < 64 << 20


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    place = tmp_path_factory.mktemp("written")
    trained(parameters(optimizer="adagrad", max_steps=4), place)
    return place / "step-00000004"


def damaged(written, tmp_path, file, change):
    copy = tmp_path / written.name
    if copy.exists():
        shutil.rmtree(copy)
    shutil.copytree(written, copy)
    data = bytearray((copy / file).read_bytes())
    (copy / file).write_bytes(change(data))
    return copy


@pytest.mark.parametrize("file", [WEIGHTS, OPTIMIZER, MANIFEST])
def test_any_flipped_bit_is_found(written, tmp_path, file):
    size = (written / file).stat().st_size
    chosen = random.Random(file)
    for _ in range(40):
        place, bit = chosen.randrange(size), chosen.randrange(8)

        def flip(data, place=place, bit=bit):
            data[place] ^= 1 << bit
            return data

        copy = damaged(written, tmp_path, file, flip)
        with pytest.raises(InputError) as error:
            whole_checkpoint(copy)
        assert file in str(error.value)


@pytest.mark.parametrize("file", [WEIGHTS, OPTIMIZER, MANIFEST])
@pytest.mark.parametrize("left", [0, 7, 100, -1])
def test_any_truncation_is_found(written, tmp_path, file, left):
    copy = damaged(written, tmp_path, file, lambda data: data[:left])
    with pytest.raises(InputError) as error:
        whole_checkpoint(copy)
    assert file in str(error.value)
    if file != MANIFEST:
        size = (written / file).stat().st_size
        assert f"{size:,} were written" in str(error.value) and "cut short" in str(error.value)


def test_a_missing_file_is_found(written, tmp_path):
    copy = damaged(written, tmp_path, WEIGHTS, lambda data: data)
    (copy / OPTIMIZER).unlink()
    with pytest.raises(InputError, match=r"optimizer\.safetensors is missing"):
        read_checkpoint(copy)


def test_a_corrupted_checkpoint_is_not_resumed(written, tmp_path):
    def flip_last(data):
        data[-1] ^= 1
        return data

    copy = damaged(written, tmp_path, OPTIMIZER, flip_last)
    with pytest.raises(InputError, match=r"optimizer\.safetensors: .* has checksum"):
        train(parameters(optimizer="adagrad", resume=str(copy)))


def test_checkpoints_are_written_and_read_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    result, _, _ = trained(parameters(max_steps=2), tmp_path)
    assert result.checkpoint.endswith("step-00000002")
    whole_checkpoint(tmp_path / "step-00000002")
    again, _, _ = trained(
        parameters(max_steps=3), checkpoint=read_checkpoint(tmp_path / "step-00000002")
    )
    assert again.losses == trained(parameters(max_steps=3))[0].losses[2:]


def test_a_newer_version_is_refused_with_both_numbers(written, tmp_path):
    def newer(data):
        manifest = json.loads(data)
        manifest["version"] = VERSION + 6
        del manifest["sha256"]
        return json.dumps(manifest | {"sha256": _digest(manifest)}).encode()

    copy = damaged(written, tmp_path, MANIFEST, newer)
    with pytest.raises(InputError, match=rf"version {VERSION + 6}.*up to {VERSION}"):
        read_checkpoint(copy)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"table_rows": [50, 4, 200]}}, ["model.table_rows[1] = 3", "has 4"]),
        ({"model": {"table_rows": [50, 3]}}, ["model.tables = 3", "has 2"]),
        ({"model": {"top_mlp": "9-1"}}, ["model.top_mlp = 10-8-1", "has 10-9-1"]),
        (
            {"model": {"interaction": "dcn"}},
            ["model.interaction = 'dot', but this run has 'dcn'"],
        ),
        ({"model": {"loss": "mse"}}, ["model.loss = 'bce'", "'mse'"]),
        ({"data": {"indices_per_lookup": 5}}, ["data.indices_per_lookup = 4", "has 5"]),
        ({"data": {"generator": "uniform"}}, ["data.generator = 'facebook'", "'uniform'"]),
        ({"training": {"batch_size": 17}}, ["training.batch_size = 16", "has 17"]),
        ({"training": {"seed": 5}}, ["training.seed = 123", "has 5"]),
        ({"training": {"optimizer": "sgd"}}, ["training.optimizer = 'adagrad'", "'sgd'"]),
    ],
)
def test_another_run_is_refused_with_both_values(written, changes, words):
    changes = {"training": {}} | changes
    changes["training"] = {
        "optimizer": "adagrad",
        "resume": str(written),
    } | changes["training"]
    model, data = changes.get("model"), changes.get("data")
    with pytest.raises(InputError) as error:
        train(parameters(data, model, **changes["training"]))
    for word in words:
        assert word in str(error.value)


def test_tensors_of_another_shape_are_refused(written):
    checkpoint = read_checkpoint(written)
    targets = {name: torch.zeros(shape) for name, shape in checkpoint.shapes(WEIGHTS).items()}
    name = "embeddings.tables.2.weight"
    with pytest.raises(InputError, match=r"tables\.2\.weight is 200 x 4, but .* 201 x 4 .*rows\[2"):
        checkpoint.read_into(WEIGHTS, targets | {name: torch.zeros(201, 4)})
    with pytest.raises(InputError, match=r"does not contain more"):
        checkpoint.read_into(WEIGHTS, targets | {"more": torch.zeros(1)})
    del targets[name]
    with pytest.raises(InputError, match=r"contains embeddings\.tables\.2\.weight, which this run"):
        checkpoint.read_into(WEIGHTS, targets)
