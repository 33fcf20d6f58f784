"""Tables in two places: the same training as with all of them in one."""

from dataclasses import replace

import pytest
import torch
from commands import run_python
from hypothesis import given
from hypothesis import strategies as st
from small_training import parameters_with

from dlrm_core.base.errors import InputError
from dlrm_core.config import Parameters
from dlrm_core.data.loader import make_generator
from dlrm_core.run.resume import optimizer_state, weights_of
from dlrm_core.train import Trainer, train
from dlrm_kernels.embeddings.host_tables import (
    GPU_SPAN,
    HOST_SPAN,
    PlacedTables,
    SplitTables,
    divide,
    ranges,
)
from dlrm_kernels.placement import plan_placement, smallest_first
from dlrm_kernels.staging import staged

ROWS = [300, 50, 400, 20, 50]
CPU = torch.device("cpu")


SECTIONS = {
    "model": {"bottom_mlp": [16, 32, 8], "top_mlp": [16, 1], "embedding_dim": 8}
    | {"table_rows": ROWS},
    "data": {"generator": "facebook", "indices_per_lookup": 5},
    "training": {"batch_size": 64, "batches": 6, "learning_rate": 0.5, "device": "cpu"}
    | {"threads": 1, "log_every": 1},
}


def parameters(data: dict | None = None, **training) -> Parameters:
    return parameters_with(SECTIONS, data=data, **training)


def run(given: Parameters) -> tuple[list[float], dict[str, torch.Tensor], Trainer]:
    trainer = Trainer(given)
    try:
        losses = trainer.train().losses
        state = weights_of(trainer.model) | optimizer_state(trainer.step)[0]
        return losses, {name: tensor.clone() for name, tensor in state.items()}, trainer
    finally:
        trainer.close()


def assert_same(one, other) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, tensor in one[1].items():
        assert torch.equal(tensor, other[1][name]), name


# ---- the plan --------------------------------------------------------------------


def test_the_smallest_tables_go_to_the_gpu_first():
    assert smallest_first(ROWS, 32, 0) == ()
    assert smallest_first(ROWS, 32, 20 * 32) == (3,)
    # of two equal ones the first
    assert smallest_first(ROWS, 32, (20 + 50) * 32) == (1, 3)
    # the next by size ends it, though a later one could not be smaller anyway
    assert smallest_first(ROWS, 32, (20 + 50 + 50 + 299) * 32) == (1, 3, 4)
    assert smallest_first(ROWS, 32, 10**9) == (0, 1, 2, 3, 4)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.integers(0, 100_000))
def test_what_goes_to_the_gpu_fits_and_the_smallest_left_over_would_not(rows, limit):
    chosen = smallest_first(rows, 16, limit)
    taken = sum(rows[t] for t in chosen) * 16
    assert taken <= limit
    left = [rows[t] for t in range(len(rows)) if t not in chosen]
    if left:
        assert taken + min(left) * 16 > limit
        assert max((rows[t] for t in chosen), default=0) <= min(left)


def test_without_a_limit_all_tables_lie_where_the_dense_part_is():
    assert plan_placement(parameters(), gpu=True).on_gpu == (0, 1, 2, 3, 4)
    assert plan_placement(parameters(), gpu=False).on_host == (0, 1, 2, 3, 4)
    assert not plan_placement(parameters(), gpu=True).split


def test_what_earlier_versions_recorded_of_tables_on_a_disk_is_read_unless_it_was_used():
    assert parameters(tables_on_disk="") == parameters()
    with pytest.raises(InputError, match=r"unknown parameter training\.tables_on_disk"):
        parameters(tables_on_disk="/data")


def test_ranges_are_named_in_few_words():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


# ---- batches ---------------------------------------------------------------------


def test_a_divided_batch_holds_each_lookup_once():
    given = parameters(embeddings_on_gpu_bytes=(20 + 50) * 32)
    batch = make_generator(given, CPU).next_batch()
    placement = plan_placement(given, gpu=True)
    parts = divide(batch, placement)
    assert divide(parts, placement) is parts
    for ids, part in ((placement.on_gpu, parts), (placement.on_host, parts.host)):
        assert part.tables == len(ids)
        for place, t in enumerate(ids):
            assert torch.equal(part.table_indices(place), batch.table_indices(t))
            assert torch.equal(part.offsets[place], batch.offsets[t])
    # the host's lookups stay when the rest moves
    moved = parts.to(torch.device("meta"))
    assert moved.indices.device.type == "meta" and moved.host is parts.host


class HostCopies:
    """A device that is the host: what a loader for GPUs does, without one."""

    def host_buffer(self, size):
        return torch.empty(size, dtype=torch.uint8)

    device_buffer = host_buffer

    def copy(self, into, source):
        into.copy_(source)

    def mark(self, copying):
        return object()

    def wait(self, event, copying):
        pass

    def join(self, event):
        pass


def test_a_loader_for_gpus_keeps_the_hosts_lookups():
    given = parameters(embeddings_on_gpu_bytes=2240)
    placement = plan_placement(given, gpu=True)
    source = make_generator(given, CPU)
    plain = make_generator(given, CPU)
    stream = staged(lambda: divide(source.next_batch(), placement), 2, CPU, HostCopies())
    for _ in range(6):
        found, expected = next(stream), divide(plain.next_batch(), placement)
        assert torch.equal(found.indices, expected.indices)
        assert torch.equal(found.host.indices, expected.host.indices)
        assert found.table_starts == expected.table_starts
    stream.close()


# ---- two places ------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, (20 + 50) * 32, 10**9])
@pytest.mark.parametrize("backend", ["torch", "fused"])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_two_places_train_as_one(limit, backend, optimizer):
    given = parameters(embedding_backend=backend, optimizer=optimizer)
    split = replace(given, training=replace(given.training, embeddings_on_gpu_bytes=limit))
    one, two = run(given), run(split)
    assert isinstance(two[2].model.embeddings.backend, SplitTables)
    assert_same(one, two)


@pytest.mark.parametrize(
    "training",
    [
        {"optimizer": "adam"},
        {"optimizer": "adagrad", "embedding_backend": "fused"},
        {"micro_batch": 24},
        {"precision": "bf16", "embedding_backend": "fused"},
        {"lr_warmup_steps": 3, "lr_decay_start": 4, "lr_decay_steps": 2},
    ],
)
def test_two_places_take_every_option(training):
    assert_same(
        run(parameters(**training)), run(parameters(embeddings_on_gpu_bytes=2240, **training))
    )


def test_a_prefetching_loader_divides_batches_too():
    data = {"loader": "prefetch", "generator": "uniform"}
    assert_same(run(parameters(data)), run(parameters(data, embeddings_on_gpu_bytes=2240)))


def test_auto_chooses_for_each_side():
    trainer = Trainer(parameters(embedding_backend="auto", embeddings_on_gpu_bytes=2240))
    trainer.close()
    said = [notice for notice in trainer.notices if "auto" in notice]
    assert [notice.split(":")[0] for notice in said] == ["on the host", "beside the dense part"]
    assert trainer.model.embeddings.host_backend in ("torch", "fused", "fbgemm")


def test_which_tables_lie_where_is_said():
    trainer = Trainer(parameters(embeddings_on_gpu_bytes=2240))
    trainer.close()
    assert trainer.notices[0] == (
        "training.embeddings_on_gpu_bytes: tables 1, 3 (2.19 KiB) lie beside the dense part, "
        "tables 0, 2, 4 (23.44 KiB) on the host; without a GPU both sides are the CPU"
    )


def test_a_wrong_index_of_the_host_is_named():
    trainer = Trainer(parameters(embeddings_on_gpu_bytes=2240, embedding_backend="fused"))
    batch = make_generator(parameters(), CPU).next_batch()
    batch.indices[batch.table_starts[2]] = 400
    with pytest.raises(InputError, match=r"has 400 rows.*asks for row 400"):
        trainer.step(batch)
    trainer.close()


def test_tables_on_the_host_stay_there_when_the_model_moves():
    placement = plan_placement(parameters(embeddings_on_gpu_bytes=2240), gpu=True)
    tables = PlacedTables(ROWS, 8, placement)
    tables.to("meta")
    where = [weight.device.type for weight in tables.weights]
    assert where == ["cpu", "meta", "cpu", "meta", "cpu"]
    assert list(tables.state_dict()) == [f"tables.{t}.weight" for t in range(5)]


def test_evaluation_reads_both_places():
    given = parameters({"round_targets": True}, eval_batches=2)
    found = []
    for limit in (None, 2240):
        trainer = Trainer(
            replace(given, training=replace(given.training, embeddings_on_gpu_bytes=limit))
        )
        trainer.train()
        found.append(trainer.evaluate())
        trainer.close()
    assert found[0].auc == found[1].auc and found[0].loss == found[1].loss


def test_the_crossing_is_a_transfer_in_both_directions():
    from dlrm_core.parts import log_spans

    trainer = Trainer(parameters(embeddings_on_gpu_bytes=2240))
    with log_spans() as spans:
        trainer.iterate()
    trainer.close()
    inner = {name: (start, end) for name, start, end in spans}
    for phase in ("forward", "backward"):
        start, end = inner[f"dlrm::transfer::{phase}"]
        around = inner[f"dlrm::embedding::{phase}"]
        assert around[0] <= start <= end <= around[1]


def test_a_profile_shows_each_side_of_the_tables(tmp_path):
    from dlrm_workbook.analysis.attribution import attribute
    from dlrm_workbook.recordings.torch.recorder import record_workload
    from dlrm_workbook.recordings.torch.trace import read_recording

    given = parameters(embeddings_on_gpu_bytes=2240, embedding_backend="fused")
    given = replace(given, profiling=replace(given.profiling, iterations=5, probes=False))
    profile = read_recording(record_workload(given, tmp_path / "recording", lambda *_: None))
    sides = profile.contexts[profile.contexts["name"].isin([HOST_SPAN, GPU_SPAN])]
    assert set(sides["name"]) == {HOST_SPAN, GPU_SPAN}
    assert set(sides["component"]) == {"embedding"}
    assert set(sides["phase"]) == {"forward", "backward"}
    parts = attribute(profile)
    crossing = parts[parts["component"] == "transfer"]
    assert set(crossing["phase"]) == {"forward", "backward"}
    assert (crossing["time_ms"] > 0).all()


@pytest.mark.parametrize("first", [None, 2240])
@pytest.mark.parametrize("backend", ["torch", "fused"])
def test_a_checkpoint_moves_between_one_place_and_two(tmp_path, first, backend):
    given = parameters(optimizer="rowwise_adagrad", embedding_backend=backend)

    def part(**changes) -> Parameters:
        return replace(given, training=replace(given.training, **changes))

    folder = str(tmp_path / "checkpoints")
    before = part(max_steps=3, embeddings_on_gpu_bytes=first, checkpoint_folder=folder)
    train(replace(before, training=replace(before.training, checkpoint_every=3)))
    second = 2240 if first is None else None
    rest = part(resume="latest", checkpoint_folder=folder, embeddings_on_gpu_bytes=second)
    assert train(rest).losses == run(given)[0][3:]


# ---- too large for the host ------------------------------------------------------


LIMITED = """
import resource
from pathlib import Path
from dlrm_core.config import parameters_from_sections
from dlrm_core.base.errors import InputError
from dlrm_core.train import Trainer

def run(**training):
    trainer = Trainer(parameters_from_sections({
        "model": {"bottom_mlp": [8, 64], "top_mlp": 1, "tables": 4, "table_rows": 200_000,
                  "init": "torch"},
        "data": {"generator": "uniform", "indices_per_lookup": 2},
        "training": {"batch_size": 64, "batches": 2, "device": "cpu", "threads": 1} | training,
    }))
    losses = trainer.train().losses
    trainer.close()
    return losses

run()
used = next(int(line.split()[1]) * 1024 for line in
            Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
resource.setrlimit(resource.RLIMIT_DATA, (used + (160 << 20), resource.RLIM_INFINITY))
try:
    run()
    raise SystemExit("not refused")
except InputError as error:
    print(str(error).splitlines()[0])
"""
"""The system itself grants 160 MiB beyond what the process has; the tables take 195 MiB."""


def test_under_a_small_limit_tables_are_refused_with_both_numbers():
    said = run_python(LIMITED, timeout=120)
    assert "MiB are available" in said and "too few" in said
