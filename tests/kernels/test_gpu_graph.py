"""Capturing a step piece by piece: what is captured, replayed, copied and refused.

CUDA's own capture needs a GPU (``dlrm gpu-check`` holds it to the CPU there). Here a stand-in
records which parts were to be captured; replaying the first piece runs the whole step on the
static buffers, so what those hold decides the weights, as on a GPU.
"""

import contextlib
import sys

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: the GPU's kernels cannot run")

from test_embeddings import lookups, make_batch, make_tables

from dlrm_core.base.errors import InputError
from dlrm_core.config import TrainingConfig, parameters_from_sections
from dlrm_core.data.batch import Batch
from dlrm_core.model import ClickLoss, build_model
from dlrm_core.parts import log_spans, parse_span, run_part
from dlrm_core.step import TrainingStep, optimizer_of
from dlrm_kernels.cuda_graphs import (
    DeviceAdagrad,
    StepGraph,
    captured_optimizer,
    static_batch,
    why_not_graphs,
)
from dlrm_kernels.embeddings.fused_gpu import FusedGpu

CPU = torch.device("cpu")
ROWS = [30, 1, 6]
PIECES = [
    ("embedding", "forward"),
    ("bottom_mlp", "forward"),
    ("interaction", "forward"),
    ("top_mlp", "forward"),
    ("loss", "forward"),
    ("loss", "backward"),
    ("top_mlp", "backward"),
    ("interaction", "backward"),
    ("bottom_mlp", "backward"),
    ("embedding", "backward"),
    ("top_mlp", "update"),
    ("bottom_mlp", "update"),
]


class Recorder:
    """Stands in for CUDA. What is captured must not count: weights are put back."""

    def __init__(self):
        self.captured = 0
        self.replay_first = lambda: None
        self.log = []

    @contextlib.contextmanager
    def apart(self):
        yield

    @contextlib.contextmanager
    def capture(self):
        recorder, number = self, self.captured
        self.captured += 1

        class Graph:
            def replay(self):
                recorder.log.append(number)
                if number % len(PIECES) == 0:
                    recorder.replay_first()

        yield Graph()


def batch_of(seed, size=8, largest=4):
    made = make_batch(ROWS, size, largest, seed)
    random = torch.Generator().manual_seed(seed)
    dense = torch.randn(size, 5, generator=random)
    return Batch(
        **(vars(made) | {"dense": dense, "targets": torch.rand(size, 1, generator=random)})
    )


def step_of(**training):
    sections = {
        "model": {
            "bottom_mlp": "5-8",
            "top_mlp": "8-1",
            "embedding_dim": 8,
            "table_rows": ROWS,
            "init": "torch",
        },
        "training": {"device": "cpu", "learning_rate": 0.1} | training,
    }
    parameters = parameters_from_sections(sections)
    model = build_model(parameters.model, 3, CPU)
    step = TrainingStep(model, ClickLoss("mse", (1.0, 1.0)), parameters.training)
    backend = FusedGpu(model.embeddings, parameters.training.optimizer, 0.1)
    model.embeddings.backend = step.optimizers["embedding"] = backend
    return step


def graph_of(step):
    recorder = Recorder()
    graph = StepGraph(step.run, step.model.embeddings.backend, recorder)
    begin = graph._begin

    def without_capturing(batch):
        run, weights = graph._run, []

        def once(static):
            if weights:  # the second run is the captured one
                for weight, kept in zip(step.model.parameters(), weights, strict=True):
                    kept.copy_(weight.detach())
                loss = run(static)
                with torch.no_grad():
                    for weight, kept in zip(step.model.parameters(), weights, strict=True):
                        weight.copy_(kept)
                return loss
            loss = run(static)
            weights.extend(w.detach().clone() for w in step.model.parameters())
            return loss

        graph._run = once
        try:
            return begin(batch)
        finally:
            graph._run = run

    graph._begin = without_capturing
    recorder.replay_first = lambda: graph._loss.copy_(step.run(graph._static))
    return graph, recorder


def weights_of(step):
    return [weight.detach().clone() for weight in step.model.parameters()]


def test_every_part_that_computes_is_captured_once_and_in_order():
    step = step_of()
    graph, recorder = graph_of(step)
    graph(batch_of(0))
    assert recorder.captured == len(PIECES)
    with log_spans() as rows:
        graph(batch_of(1))
    seen = [parse_span(name) for name, _, _ in rows if parse_span(name)]
    # (the stand-in's first replay runs the step, whose parts lie inside its range)
    assert [(component, phase) for component, phase, _ in graph._pieces] == PIECES
    assert recorder.log == list(range(len(PIECES)))
    assert seen[0] == ("transfer", "forward") and seen[-len(PIECES) + 1 :] == PIECES[1:]


@pytest.mark.parametrize(
    ("batches", "captures", "replays"),
    [
        ([{"seed": seed} for seed in range(5)], 1, 3),
        # another size is trained on as usual, and more lookups are made room for
        ([{"seed": 0}, {"seed": 1, "size": 5}, {"seed": 2}], 1, 1),
        ([{"seed": s, "largest": n} for s, n in ((0, 2), (1, 9), (2, 2), (1, 9))], 2, 1),
    ],
)
def test_replays_train_as_the_plain_step_does(batches, captures, replays):
    plain, captured = step_of(), step_of()
    graph, recorder = graph_of(captured)
    for about in batches:
        batch = batch_of(**about)
        assert torch.equal(graph(batch), plain.run(batch))
        assert all(map(torch.equal, weights_of(captured), weights_of(plain)))
    assert recorder.captured == captures * len(PIECES)
    assert len(recorder.log) >= replays * len(PIECES)


def test_a_wrong_index_is_told_before_the_next_replay():
    graph, _ = graph_of(step_of())
    graph(batch_of(0))
    batch = batch_of(1)
    batch.indices[0] = 99
    graph(batch)
    with pytest.raises(InputError, match=r"table 0 has 30 rows.*row 99"):
        graph(batch_of(2))


def test_buffers_have_room_where_bags_vary_and_none_where_they_do_not():
    varying = batch_of(0)
    count = varying.indices.numel()
    assert static_batch(varying).indices.numel() == count + count // 16
    indices, offsets = torch.zeros(24, dtype=torch.int64), torch.arange(0, 12, 3).repeat(2, 1)
    fixed = lookups(indices, offsets, (0, 12, 24))
    assert static_batch(fixed).indices.numel() == 24


def test_functions_of_parts_carry_their_names():
    """By which HPCToolkit's Python frames tell parts apart."""
    for component, phase in PIECES:
        seen = run_part(component, phase, lambda: sys._getframe(1).f_code.co_name)
        assert seen == f"{component}_{phase}"


def test_what_cannot_be_captured_is_said():
    config = TrainingConfig(cuda_graphs=True)
    assert "no effect on a CPU" in why_not_graphs(config, CPU, None)
    gpu = torch.device("cuda")
    assert "choose fused" in why_not_graphs(config, gpu, None)
    backend = FusedGpu(make_tables([3], 4), "sgd", 0.1)
    assert why_not_graphs(config, gpu, backend) == ""


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_captured_optimisers_read_their_rate_where_graphs_can(optimizer):
    config = TrainingConfig(optimizer=optimizer, learning_rate=0.1)
    weights = []
    for captured in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 3)
        make = captured_optimizer if captured else optimizer_of
        update = make(config, layer.parameters(), CPU)
        for number in range(3):
            layer(torch.ones(2, 4) + number).square().sum().backward()
            update.step()
            update.zero_grad()
            for group in update.param_groups:
                assert isinstance(group["lr"], torch.Tensor) == captured
        weights.append([w.detach().clone() for w in layer.parameters()])
    for plain, other in zip(*weights, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-5, atol=1e-6)
    assert isinstance(update, DeviceAdagrad) == (optimizer in ("adagrad", "rowwise_adagrad"))


def test_a_new_rate_is_written_into_the_tensor():
    step = step_of()
    weights = step.model.bottom_mlp.parameters()
    captured = captured_optimizer(TrainingConfig(), weights, CPU)
    step.optimizers["bottom_mlp"] = captured
    rate = captured.param_groups[0]["lr"]
    step.set_learning_rate(0.25)
    assert captured.param_groups[0]["lr"] is rate and float(rate) == 0.25
    assert step.optimizers["top_mlp"].param_groups[0]["lr"] == 0.25
    assert step.embedding_optimizer.learning_rate == 0.25
