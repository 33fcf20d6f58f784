"""What all back ends share: the law, where weights lie, who refuses what; and how auto chooses."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from optional_tools import needs_fbgemm
from test_embeddings import (
    OPTIMIZERS,
    assert_same_training,
    config,
    lookups,
    make_batch,
    make_tables,
    parameters,
)

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.base.machine import available_memory
from dlrm_core.data.batch import Batch
from dlrm_core.embeddings import FBGEMM_ROWWISE_ELEMENTS, EmbeddingTables, attach
from dlrm_core.train import Trainer, train
from dlrm_kernels.embeddings import choose
from dlrm_kernels.embeddings import fbgemm as fbgemm_backend
from dlrm_kernels.embeddings.fbgemm import find_fault, load_fbgemm, one_piece

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


FAST = ["fused", pytest.param("fbgemm", marks=needs_fbgemm)]
ALL = ["torch", *FAST]


# ---- every back end against plain arithmetic -------------------------------------------------


def expected_step(weights, batch, gradients, optimizer, rate, state):
    """Pooled vectors and weights after one step, in float64, from the formulas alone."""
    pooled, after = [], []
    for t, weight in enumerate(weights):
        indices = batch.table_indices(t).numpy()
        ends = [*batch.offsets[t, 1:].tolist(), len(indices)]
        bags = np.repeat(np.arange(len(ends)), np.diff([0, *ends]))
        vectors = np.zeros((len(ends), weight.shape[1]))
        np.add.at(vectors, bags, weight[indices])
        pooled.append(vectors)
        g = np.zeros_like(weight)
        np.add.at(g, indices, gradients[t].double().numpy()[bags])
        rows = np.unique(indices)
        if optimizer == "sgd":
            change = g[rows]
        elif optimizer == "adagrad":
            state[t][rows] += g[rows] ** 2
            change = g[rows] / (np.sqrt(state[t][rows]) + 1e-10)
        else:
            state[t][rows] += (g[rows] ** 2).mean(axis=1, keepdims=True)
            change = g[rows] / (np.sqrt(state[t][rows]) + 1e-10)
        new = weight.copy()
        new[rows] -= rate * change
        after.append(new)
    return pooled, after


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("skew", [False, True])
def test_lookups_and_updates_are_those_of_the_formulas(backend, optimizer, skew):
    rows, dim, bags = [500, 1, 9, 60], 20, 50
    tables = make_tables(rows, dim, huge_pages=True)
    update = attach(tables, config(embedding_backend=backend, optimizer=optimizer))
    weights = [w.detach().double().numpy().copy() for w in tables.weights]
    state = [np.zeros((r, dim if optimizer == "adagrad" else 1)) for r in rows]
    for step in range(3):
        batch = make_batch(rows, bags, 6, step, skew)
        random = torch.Generator().manual_seed(step)
        # positive: without cancellation float32's error is some eps of the sum, whatever the order
        gradients = [torch.rand(bags, dim, generator=random) + 0.1 for _ in rows]
        pooled, weights = expected_step(weights, batch, gradients, optimizer, 0.1, state)
        update.zero_grad()
        found = tables(batch)
        for mine, vector in zip(found, pooled, strict=True):
            np.testing.assert_allclose(mine.detach().numpy(), vector, rtol=2e-5, atol=2e-4)
        torch.autograd.backward(found, gradients)
        update.step()
        for mine, weight in zip(tables.weights, weights, strict=True):
            np.testing.assert_allclose(mine.detach().numpy(), weight, rtol=2e-5, atol=1e-4)


@needs_fbgemm
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 9),
    st.sampled_from(OPTIMIZERS),
)
def test_fbgemm_holds_for_any_shape(rows, quarter, bags, largest, optimizer):
    chosen = config(optimizer=optimizer, embedding_backend="fbgemm")
    how = {"steps": 2, "bags": bags, "largest": largest}
    assert_same_training(chosen, rows, 4 * quarter, optimizer, atol=1e-4, **how)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_loses_as_one_on_torchs_tables(backend, optimizer):
    losses, states = [], []
    for name in ("torch", backend):
        run = parameters(embedding_backend=name, optimizer=optimizer, learning_rate=0.05)
        trainer = Trainer(run)
        losses.append(trainer.train().losses)
        states.append(trainer.model.state_dict())
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert len(set(losses[0])) == 15
    torch.testing.assert_close(states[1], states[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("wrong", [50, -1, 2**40])
@pytest.mark.parametrize("threads", [1, 2])
def test_an_index_outside_its_table_is_named_and_nothing_is_touched(backend, wrong, threads):
    torch.set_num_threads(threads)
    tables = make_tables([1000, 50], 16)
    attach(tables, config(embedding_backend=backend))
    start = [w.detach().clone() for w in tables.weights]
    batch = make_batch([1000, 50], 20, 5, 3)
    batch.indices[batch.table_starts[1] + 7] = wrong
    with pytest.raises(
        InputError, match=rf"table 1 has 50 rows.*lookup 7 .*row {wrong}, .*0 to 49"
    ):
        tables(batch)
    assert all(torch.equal(a, b) for a, b in zip(start, tables.weights, strict=True))


@pytest.mark.parametrize("backend", FAST)
def test_no_bags_and_no_lookups_are_fine(backend):
    tables = make_tables([60, 3], 16)
    attach(tables, config(embedding_backend=backend, optimizer="adagrad"))
    for bags, largest in ((0, 0), (5, 0)):
        pooled = tables(make_batch([60, 3], bags, largest, 0))
        assert all(vector.shape == (bags, 16) and not vector.any() for vector in pooled)
        torch.autograd.backward(pooled, [torch.ones(bags, 16)] * 2)


# ---- 2^31 elements -----------------------------------------------------------------------------


def sparse_tables(folder, rows, dim):
    """Tables in a file that is a hole: only rows that are used take memory."""
    with (folder / "tables").open("wb") as opened:
        opened.truncate(sum(rows) * dim * 4)
    size = sum(rows) * dim
    memory = torch.from_file(str(folder / "tables"), shared=True, size=size).view(-1, dim)
    tables = EmbeddingTables([1] * len(rows), dim)
    for weight, place in zip(tables.weights, memory.split(rows), strict=True):
        weight.data = place
    return tables, memory


@pytest.mark.skipif(sys.platform != "linux", reason="needs a sparse file that is mapped")
@pytest.mark.parametrize(
    ("backend", "optimizer"),
    [
        ("torch", "sgd"),
        ("torch", "rowwise_adagrad"),
        ("fused", "sgd"),
        ("fused", "rowwise_adagrad"),
        pytest.param("fbgemm", "sgd", marks=needs_fbgemm),
    ],
)
def test_two_tables_of_which_one_passes_2_to_the_31_elements(tmp_path, backend, optimizer):
    large, small, dim = 2**31 // 64 + 1000, 50, 64
    needed = 4 * (large + small) + (256 << 20)  # row-wise state, and what torch needs beside it
    room = available_memory(CPU)
    if room is not None and room < needed:
        pytest.skip(f"needs {needed} bytes of memory, {room} are available")
    tables, memory = sparse_tables(tmp_path, [large, small], dim)
    touched = torch.tensor([large - 1, 3, large - 1, 2**31 // 64])
    memory[touched.unique()] = 1.0
    update = attach(tables, config(embedding_backend=backend, optimizer=optimizer))
    assert tables.weights[0].data_ptr() == memory.data_ptr()  # no copy of 8 GiB
    indices = torch.cat((touched, torch.tensor([small - 1])))
    offsets = torch.tensor([[0, 2], [0, 1]])
    batch = lookups(indices, offsets, (0, 4, 5))
    update.zero_grad()
    pooled = tables(batch)
    assert torch.equal(pooled[0].detach(), torch.full((2, dim), 2.0))
    torch.autograd.backward(pooled, [torch.full((2, dim), 0.25)] * 2)
    update.step()
    twice, once = {"sgd": (0.05, 0.025), "rowwise_adagrad": (0.1, 0.1)}[optimizer]
    assert torch.allclose(memory[large - 1], torch.tensor(1 - twice))
    assert torch.allclose(memory[[3, 2**31 // 64]], torch.tensor(1 - once))
    assert torch.allclose(memory[large + small - 1], torch.tensor(-once))
    assert not memory[[2, 4, large - 2, large, large + small - 2]].any()


@needs_fbgemm
@pytest.mark.skipif(sys.platform != "linux", reason="needs a sparse file that is mapped")
def test_fbgemms_rowwise_adagrad_is_right_up_to_its_limit_and_refused_beyond(tmp_path):
    limit, dim = FBGEMM_ROWWISE_ELEMENTS, 64
    rows = [limit // dim, limit // dim]
    tables, memory = sparse_tables(tmp_path, rows, dim)
    attach(tables, config(embedding_backend="fbgemm", optimizer="rowwise_adagrad"))
    last = rows[0] - 1
    batch = lookups(torch.tensor([0, last, last]), torch.tensor([[0], [0]]), (0, 2, 3))
    torch.autograd.backward(tables(batch), [torch.full((1, dim), 0.25)] * 2)
    assert torch.allclose(memory[[0, last, rows[0] + last]], torch.tensor(-0.1))
    assert not memory[[1, last - 1, rows[0]]].any()
    too_large, _ = sparse_tables(tmp_path, [5, rows[0] + 1], dim)
    with pytest.raises(InputError, match=r"embedding table 1 has 1,073,741,888 floats"):
        attach(too_large, config(embedding_backend="fbgemm", optimizer="rowwise_adagrad"))
    attach(too_large, config(embedding_backend="fbgemm", optimizer="sgd"))


# ---- fbgemm's own: memory, states, refusals ------------------------------------------------------


@needs_fbgemm
def test_fbgemm_works_on_the_tables_own_memory():
    tables = make_tables([30, 7, 50], 8, huge_pages=True)
    before = [w.data_ptr() for w in tables.weights]
    parameters_before = list(tables.parameters())
    attach(tables, config(embedding_backend="fbgemm"))
    assert [w.data_ptr() for w in tables.weights] == before
    assert all(a is b for a, b in zip(tables.parameters(), parameters_before, strict=True))
    assert list(tables.state_dict()) == [f"tables.{t}.weight" for t in range(3)]


@needs_fbgemm
def test_tables_apart_are_moved_into_fbgemms_memory_and_alias_it():
    tables = make_tables([30, 7, 50], 8)
    values = [w.detach().clone() for w in tables.weights]
    assert one_piece(tables.weights) is None
    attach(tables, config(embedding_backend="fbgemm"))
    assert one_piece(tables.weights) is not None
    assert all(torch.equal(a, b) for a, b in zip(values, tables.weights, strict=True))
    # a weight that is replaced later is taken in as well
    tables.weights[1].data = torch.full((7, 8), 3.0)
    batch = make_batch([30, 7, 50], 5, 3, 0)
    pooled = tables(batch)
    sizes = batch.offsets[1].diff(append=torch.tensor([len(batch.table_indices(1))]))
    assert torch.equal(pooled[1].detach()[:, 0], 3.0 * sizes)
    torch.autograd.backward(pooled, [torch.ones(5, 8)] * 3)
    assert tables.weights[1].min() < 3.0


@needs_fbgemm
@pytest.mark.parametrize(("optimizer", "width"), [("adagrad", 8), ("rowwise_adagrad", 1)])
def test_fbgemms_states_are_laid_out_as_the_fused_back_ends(optimizer, width):
    rows, states = [30, 7], []
    for backend in ("fused", "fbgemm"):
        tables = make_tables(rows, 8, huge_pages=True)
        attach(tables, config(embedding_backend=backend, optimizer=optimizer))
        torch.autograd.backward(tables(make_batch(rows, 9, 4, 0)), [torch.ones(9, 8)] * 2)
        states.append(tables.backend.states)
    assert [tuple(s.shape) for s in states[1]] == [(30, width), (7, width)]
    torch.testing.assert_close(states[1], states[0])
    assert all(s.any() for s in states[1])


@needs_fbgemm
def test_a_schedule_can_set_fbgemms_learning_rate():
    tables = make_tables([30], 8)
    attach(tables, config(embedding_backend="fbgemm"))
    tables.backend.learning_rate = 0.0
    start = tables.weights[0].detach().clone()
    torch.autograd.backward(tables(make_batch([30], 9, 4, 0)), [torch.ones(9, 8)])
    assert torch.equal(tables.weights[0], start)
    assert tables.backend.learning_rate == 0.0


@needs_fbgemm
def test_fbgemm_names_offsets_that_fall():
    tables = make_tables([100, 50], 16)
    attach(tables, config(embedding_backend="fbgemm"))
    batch = make_batch([100, 50], 6, 5, 4)
    wrong = Batch(**(vars(batch) | {"offsets": batch.offsets.flip(1).contiguous()}))
    with pytest.raises(InputError, match="offsets of embedding table 0"):
        tables(wrong)


def test_a_batch_without_fault_has_none():
    assert find_fault(make_batch([100, 50], 6, 5, 4), [100, 50]) is None


@needs_fbgemm
def test_a_width_that_fbgemm_cannot_do_is_refused():
    with pytest.raises(InputError, match=r"model.embedding_dim is 6: .*multiples of 4"):
        attach(make_tables([5], 6), config(embedding_backend="fbgemm"))


@needs_fbgemm
def test_fbgemm_is_loaded_only_where_it_is_chosen_and_leaves_the_root_logger_alone():
    code = (
        "import logging, sys, dlrm_core.train\n"
        "from dlrm_core.embeddings import EmbeddingTables, attach\n"
        "from dlrm_core.config import TrainingConfig\n"
        "attach(EmbeddingTables([5], 4), TrainingConfig(embedding_backend='fused'))\n"
        "print('fbgemm_gpu' in sys.modules)\n"
        "attach(EmbeddingTables([5], 4), TrainingConfig(embedding_backend='fbgemm'))\n"
        "print(logging.getLogger().handlers, logging.getLogger().level)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"False\n[] {logging.WARNING}\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("installed", "device", "message"),
    [
        ({}, "cpu", r"not installed: pip install fbgemm-gpu-cpu==1\.\d+\.0"),
        ({"fbgemm-gpu-cpu": "0.1.0"}, "cpu", r"0\.1\.0 does not belong to torch .*pip install"),
        ({"fbgemm-gpu-cpu": "1.8.0"}, "cuda", r"on a GPU.*pip install fbgemm-gpu==1"),
    ],
)
def test_without_the_right_fbgemm_the_message_says_what_to_install(
    monkeypatch, installed, device, message
):
    monkeypatch.setattr(fbgemm_backend, "_version", installed.get)
    with pytest.raises(MissingToolError, match=message):
        load_fbgemm(torch.device(device))


# ---- auto ----------------------------------------------------------------------------------------


def chosen(monkeypatch, times_ms, optimizer="sgd", refused=None):
    """What auto makes of given times; the tables and batches are real."""
    real = choose._Contestant.time_ms

    def time_ms(self, number):
        real(self, number)
        return times_ms[type(self.backend).__name__]

    monkeypatch.setattr(choose._Contestant, "time_ms", time_ms)
    made = [make_batch([40, 9], 8, 4, seed) for seed in range(3)]
    return choose.choose(make_tables([40, 9], 8), config(optimizer=optimizer), made, refused)


@needs_fbgemm
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_auto_takes_the_fastest_and_says_so(monkeypatch, optimizer):
    torch.set_num_threads(1)
    choice = chosen(monkeypatch, {"FusedCpu": 20.0, "Fbgemm": 5.0, "NoneType": 80.0}, optimizer)
    assert choice.chosen == "fbgemm"
    assert choice.times_ms == {"fused": 20.0, "fbgemm": 5.0, "torch": 80.0}
    assert choice.notice == (
        "training.embedding_backend auto: fbgemm, 5.0 ms; fused 20.0; torch 80.0 "
        "(forward, backward and update, batch of 8, 2 tables, 1 thread)"
    )


@needs_fbgemm
def test_auto_prefers_fused_among_equals(monkeypatch):
    times = {"FusedCpu": 10.3, "Fbgemm": 10.0, "NoneType": 10.1}
    assert chosen(monkeypatch, times).chosen == "fused"
    assert chosen(monkeypatch, times, refused={"fused": "no"}).chosen == "fbgemm"


def test_auto_names_who_cannot_work_and_goes_on_without(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(fbgemm_backend, "_version", lambda name: None)
    choice = choose.choose(make_tables([40], 8), config(), [make_batch([40], 8, 4, 0)])
    assert choice.chosen == "torch"
    assert set(choice.refused) == {"fused", "fbgemm"}
    assert "left out: fused: numba" in choice.notice
    assert "fbgemm: FBGEMM is not installed: pip install" in choice.notice


def test_auto_refuses_a_batch_that_nobody_can_use():
    batch = make_batch([40], 8, 4, 0)
    batch.indices[0] = 40
    with pytest.raises(InputError, match="table 0 has 40 rows"):
        choose.choose(make_tables([40], 8), config(), [batch])


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "adam"])
@pytest.mark.parametrize("huge_pages", [False, True])
def test_choosing_changes_no_bit_of_the_weights(optimizer, huge_pages):
    tables = make_tables([300, 1, 40], 12, huge_pages=huge_pages)
    with torch.no_grad():
        tables.weights[0][::3] = -0.0
        tables.weights[2][::2] = 1e-42  # denormal
    before = [w.detach().clone().view(torch.int32) for w in tables.weights]
    state = torch.random.get_rng_state()
    made = [make_batch([300, 1, 40], 30, 5, seed) for seed in range(2)]
    choice = choose.choose(tables, config(optimizer=optimizer), made)
    assert choice.chosen in choice.times_ms
    after = [w.detach().view(torch.int32) for w in tables.weights]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert tables.backend is None
    assert all(w.grad is None for w in tables.weights)
    if optimizer == "adam":
        assert choice.chosen == "torch"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_that_chooses_is_the_run_it_chose(monkeypatch, tmp_path, optimizer):
    given = parameters(embedding_backend="auto", optimizer=optimizer, learning_rate=0.05)
    result = train(given, tmp_path)
    name = result.embedding_backend
    assert name in choose.CANDIDATES
    assert json.loads((tmp_path / "result.json").read_text())["embedding_backend"] == name
    (notice,) = [n for n in result.notices if n.startswith("training.embedding_backend auto: ")]
    assert notice.startswith(f"training.embedding_backend auto: {name}, ")
    same = parameters(embedding_backend=name, optimizer=optimizer, learning_rate=0.05)
    assert train(same).losses == result.losses


def test_what_does_not_fit_is_left_out(monkeypatch):
    monkeypatch.setattr(choose, "available_memory", lambda device: 20_000)
    given = parameters(embedding_backend="auto", optimizer="adagrad")
    refused = choose._too_large(given, CPU)
    assert refused.keys() == {"fused", "fbgemm", "torch"}
    assert all("are available" in why for why in refused.values())
    monkeypatch.setattr(choose, "available_memory", lambda device: None)
    assert choose._too_large(given, CPU) == {}


def test_processes_of_one_measurement_are_told_one_choice(tmp_path):
    file, output = tmp_path / "run.yaml", tmp_path / "chosen.json"
    file.write_text(yaml.safe_dump(parameters(embedding_backend="auto").to_sections()))
    assert choose.main([str(file), str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["training"].pop("embedding_backend") in choose.CANDIDATES
    assert found["training"] == {"dense_backend": "torch", "fp32_matmul": "default"}
    assert len(found["notices"]) == 1


def test_a_recording_tells_the_back_end_that_ran(tmp_path):
    from dlrm_core.config import parameters_from_sections
    from dlrm_workbook.recordings.torch.recorder import record_workload

    sections = parameters(embedding_backend="auto").to_sections()
    sections["profiling"] |= {"probes": False, "warmup": 1, "iterations": 2}
    folder = record_workload(parameters_from_sections(sections), tmp_path / "recording")
    head = json.loads((folder / "recording.json").read_text())
    name = head["parameters"]["training"]["embedding_backend"]
    assert name in choose.CANDIDATES
    assert head["notices"][0].startswith(f"training.embedding_backend auto: {name}, ")
