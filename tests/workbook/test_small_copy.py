"""The copy of a model that the ``train`` notebook hands out to try things on."""

import pytest
import torch

from dlrm_core.config import load_parameters
from dlrm_core.train import Trainer
from dlrm_workbook.analysis.training import bags, small_copy, weights
from dlrm_workbook.ground.machine import REPOSITORY

PRESETS = sorted((REPOSITORY / "parameters").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_has_a_small_copy(preset: object) -> None:
    parameters = load_parameters(str(preset))
    copy = small_copy(parameters)
    assert copy.model.bottom_widths == parameters.model.bottom_widths
    assert copy.model.top_widths == parameters.model.top_widths
    assert len(copy.model.table_rows) == len(parameters.model.table_rows)
    assert max(copy.model.table_rows) <= 1000 and copy.training.batch_size <= 64
    assert copy.training.optimizer == parameters.training.optimizer


def test_a_step_on_the_small_copy_lowers_the_loss_of_its_batch() -> None:
    toy = Trainer(small_copy(load_parameters(str(REPOSITORY / "parameters" / "seed.yaml"))))
    batch = toy.next_batch()
    losses = [toy.learn(batch).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert toy.predict(batch).shape == (64, 1)
    table = weights(toy.model)
    assert table["count"].sum() == sum(p.numel() for p in toy.model.parameters())
    assert table["bytes"].equals(4 * table["count"])


def test_bags_count_what_a_batch_looks_up() -> None:
    toy = Trainer(small_copy(load_parameters(str(REPOSITORY / "parameters" / "quick.yaml"))))
    batch = toy.next_batch()
    table = bags(batch)
    assert table["lookups"].sum() == len(batch.indices)
    first = batch.table_indices(0)
    assert table["rows"][0] == len(set(first.tolist()))
    bounds = torch.cat([batch.offsets[0], torch.tensor([len(first)])])
    assert table["longest_bag"][0] == int(bounds.diff().max()) <= 10
