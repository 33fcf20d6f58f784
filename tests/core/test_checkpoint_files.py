"""The files of a checkpoint: whole or refused, whatever was flipped, cut or changed."""

import json
import random
import shutil

import numpy as np
import pytest
import torch
from commands import run_python
from hypothesis import given
from hypothesis import strategies as st
from small_training import parameters, trained, whole_checkpoint

from dlrm_core.base.errors import InputError
from dlrm_core.run.checkpoint import MANIFEST, VERSION, WEIGHTS, _digest, read_checkpoint
from dlrm_core.run.tensor_files import StoredTensor, write_tensor
from dlrm_core.train import train

# ---- the files --------------------------------------------------------------------


@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]),
    st.lists(st.integers(0, 5), max_size=3),
)
def test_numpy_reads_what_is_streamed(tmp_path_factory, kind, shape):
    tensor = torch.arange(torch.Size(shape).numel()).to(kind).view(shape)
    path = tmp_path_factory.mktemp("f") / "x.npy"
    record = write_tensor(path, tensor)
    read = torch.from_numpy(np.load(path, allow_pickle=False))
    assert torch.equal(read.view(kind) if kind == torch.bfloat16 else read, tensor)
    empty = torch.full_like(tensor, 7)
    StoredTensor(path, record).check(empty)
    assert torch.equal(empty, tensor)


def test_parts_of_tensors_and_portions_of_rows_are_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrm_core.run.tensor_files.PIECE_BYTES", 100)
    whole = torch.randn(40, 12)
    for name, tensor in (("strided", whole[:, 3:7]), ("transposed", whole.T), ("row", whole[:, 0])):
        read = torch.empty_like(tensor)
        StoredTensor(tmp_path / name, write_tensor(tmp_path / name, tensor)).check(read)
        assert torch.equal(read, tensor)


def test_writing_takes_no_second_copy(tmp_path):
    """Peak resident memory while a table of 256 MiB is saved."""
    code = f"""
import torch, pathlib
from dlrm_core.run.tensor_files import write_tensor
from dlrm_core.base.machine import peak_memory
table = torch.ones(1 << 20, 64)
path = pathlib.Path({str(tmp_path / "x")!r})
cpu = torch.device("cpu")
write_tensor(path.with_name("warm"), torch.ones(3))
before = peak_memory(cpu)
write_tensor(path, table)
print(peak_memory(cpu) - before)
"""
    assert int(run_python(code, timeout=120)) < 64 << 20


TABLE = f"{WEIGHTS}/embeddings.tables.2.weight.npy"
SUMS = "optimizer/embeddings.tables.2.weight.sum.npy"


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


@pytest.mark.parametrize("file", [TABLE, SUMS, MANIFEST])
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


@pytest.mark.parametrize("file", [TABLE, SUMS, MANIFEST])
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
    copy = damaged(written, tmp_path, TABLE, lambda data: data)
    (copy / SUMS).unlink()
    with pytest.raises(InputError, match=r"weight\.sum\.npy is missing"):
        read_checkpoint(copy)


def test_a_corrupted_checkpoint_is_not_resumed(written, tmp_path):
    def flip_last(data):
        data[-1] ^= 1
        return data

    copy = damaged(written, tmp_path, SUMS, flip_last)
    with pytest.raises(InputError, match=r"weight\.sum\.npy has checksum"):
        train(parameters(optimizer="adagrad", resume=str(copy)))


@pytest.mark.parametrize("version", [1, VERSION + 6])
def test_another_version_is_refused_with_both_numbers(written, tmp_path, version):
    def changed(data):
        return json.dumps(json.loads(data) | {"version": version}).encode()

    copy = damaged(written, tmp_path, MANIFEST, changed)
    with pytest.raises(InputError, match=rf"in version {version} .*reads version {VERSION}"):
        read_checkpoint(copy)


@pytest.mark.parametrize("name", ["../weight", "", ".hidden", "a/b", "x" * 300])
def test_a_name_that_is_no_weights_opens_no_file(written, tmp_path, name):
    def named(data):
        manifest = json.loads(data)
        weights = manifest["tensors"][WEIGHTS]
        weights[name] = next(iter(weights.values()))
        del manifest["sha256"]
        return json.dumps(manifest | {"sha256": _digest(manifest)}).encode()

    with pytest.raises(InputError, match="is no name of a weight"):
        read_checkpoint(damaged(written, tmp_path, MANIFEST, named))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"table_rows": [50, 4, 200]}}, ["model.table_rows[1] = 3", "has 4"]),
        ({"model": {"table_rows": [50, 3]}}, ["model.tables = 3", "has 2"]),
        ({"model": {"top_mlp": "9-1"}}, ["model.top_mlp = 10-8-1", "has 10-9-1"]),
        ({"model": {"interaction": "dcn"}}, ["model.interaction = 'dot', but this run has 'dcn'"]),
        ({"model": {"loss": "mse"}}, ["model.loss = 'bce'", "'mse'"]),
        ({"model": {"embedding_precision": "bf16"}}, ["precision = 'fp32'", "has 'bf16'"]),
        ({"data": {"indices_per_lookup": 5}}, ["data.indices_per_lookup = 4", "has 5"]),
        ({"data": {"generator": "uniform"}}, ["data.generator = 'facebook'", "'uniform'"]),
        ({"training": {"batch_size": 17}}, ["training.batch_size = 16", "has 17"]),
        ({"training": {"seed": 5}}, ["training.seed = 123", "has 5"]),
        ({"training": {"optimizer": "sgd"}}, ["training.optimizer = 'adagrad'", "'sgd'"]),
    ],
)
def test_another_run_is_refused_with_both_values(written, changes, words):
    changes = {"training": {}} | changes
    changes["training"] = {"optimizer": "adagrad", "resume": str(written)} | changes["training"]
    model, data = changes.get("model"), changes.get("data")
    with pytest.raises(InputError) as error:
        train(parameters(data, model, **changes["training"]))
    for word in words:
        assert word in str(error.value)


def test_tensors_of_another_shape_are_refused(written):
    checkpoint = read_checkpoint(written)
    targets = {name: torch.zeros(t.shape) for name, t in checkpoint.tensors[WEIGHTS].items()}
    name = "embeddings.tables.2.weight"
    with pytest.raises(InputError, match=r"tables\.2\.weight is 200 x 4, .* is 201 x 4, float32"):
        checkpoint.read_into(WEIGHTS, targets | {name: torch.zeros(201, 4)})
    with pytest.raises(InputError, match=r"does not contain more"):
        checkpoint.read_into(WEIGHTS, targets | {"more": torch.zeros(1)})
    del targets[name]
    with pytest.raises(InputError, match=r"contains embeddings\.tables\.2\.weight, which this run"):
        checkpoint.read_into(WEIGHTS, targets)
