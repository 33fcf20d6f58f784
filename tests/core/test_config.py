"""Parameters: what is accepted, and what is refused with which words."""

import json
import math
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dlrm_core.base.errors import InputError
from dlrm_core.config import (
    RETIRED,
    SECTIONS,
    Parameters,
    load_parameters,
    parameters_from_sections,
)
from dlrm_core.interactions import INTERACTIONS, DotInteraction, Interaction
from dlrm_core.losses import LOSSES, Loss
from dlrm_core.optimizers import OPTIMIZERS, Optimizer

PRESETS = sorted((Path(__file__).parents[2] / "parameters").glob("*.yaml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_load_and_survive_a_round_trip(path):
    parameters = load_parameters(path)
    assert parameters.source == str(path)
    # what a notebook is given is one point, so the grid is not among its sections
    sections = parameters.to_sections() | {"sweep": parameters.sweep}
    again = parameters_from_sections(sections, source=str(path))
    assert again == parameters
    assert yaml.safe_load(yaml.safe_dump(parameters.to_sections())) == parameters.to_sections()


def test_the_seed_is_the_experiment():
    seed = load_parameters(PRESETS[0].parent / "seed.yaml")
    assert seed.model.bottom_widths == (512, 512, 64)
    assert seed.model.top_widths == (100, 1024, 1024, 1024, 1)
    assert seed.model.table_rows == (1_000_000,) * 8
    assert (seed.training.batch_size, seed.training.batches) == (2048, 100)
    assert (seed.data.generator, seed.data.indices_per_lookup) == ("facebook_loop", 100)


def test_the_tuned_preset_differs_from_the_seed_in_speed_only():
    folder = PRESETS[0].parent
    seed, tuned = load_parameters(folder / "seed.yaml"), load_parameters(folder / "tuned.yaml")
    assert tuned.model == seed.model
    changed = {
        f"{section}.{name}"
        for section, values in tuned.to_sections().items()
        if isinstance(values, dict)
        for name, value in values.items()
        if value != seed.to_sections()[section][name]
    }
    assert changed == {
        "data.generator",
        "data.loader",
        "training.fused_optimizer",
        "training.fp32_matmul",
        "training.embedding_backend",
        "training.dense_backend",
    }


def test_both_ways_of_counting_mlp_sizes_give_the_same_widths():
    shape = {"embedding_dim": 64, "top_mlp": [16, 1]}
    facebook = parameters_from_sections(
        {"model": shape | {"mlp_sizes": "facebook", "bottom_mlp": "13-512-64"}}
    )
    nvidia = parameters_from_sections(
        {"model": shape | {"mlp_sizes": "nvidia", "dense_features": 13, "bottom_mlp": [512, 64]}}
    )
    assert facebook.model.bottom_widths == nvidia.model.bottom_widths == (13, 512, 64)
    assert facebook.model.top_widths == nvidia.model.top_widths


@pytest.mark.parametrize(
    ("interaction", "itself", "expected"),
    [
        *(("dot", False, 36 + 64), ("dot", True, 45 + 64)),
        *(("cat", False, 9 * 64), ("dcn", False, 9 * 64)),
    ],
)
def test_interaction_width(interaction, itself, expected):
    parameters = parameters_from_sections(
        {"model": {"interaction": interaction, "interaction_itself": itself}}
    )
    assert parameters.model.interaction_kind.width == expected


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"botom_mlp": [4, 2]}}, ["model.botom_mlp", "model.bottom_mlp"]),
        ({"modle": {}}, ["modle", "did you mean model"]),
        ({"training": {"batch_size": 0}}, ["training.batch_size", "0", "at least 1"]),
        ({"training": {"batch_size": -3}}, ["training.batch_size", "-3"]),
        ({"training": {"batch_size": "many"}}, ["training.batch_size", "'many'", "whole number"]),
        ({"training": {"batch_size": True}}, ["training.batch_size", "True"]),
        ({"training": {"batch_size": 1.5}}, ["training.batch_size", "1.5"]),
        ({"training": {"learning_rate": float("nan")}}, ["training.learning_rate", "finite"]),
        ({"training": []}, ["training is []", "expected a section"]),
        ({"model": 0}, ["model is 0", "expected a section"]),
        ({"training": False}, ["training is False", "expected a section"]),
        ({"sweep": ""}, ["sweep is ''", "expected parameters"]),
        (
            {"model": 0, "data": {"generator": "dataset", "path": "made"}},
            ["model is 0", "expected a section"],
        ),
        ({"title": "a\0b"}, ["title is 'a\\x00b'", "expected no character"]),
        ({"title": "a" * 5000}, ["title has 5,000 characters, expected at most 4,096"]),
        ({"training": {"batch_size": 10**400}}, ["training.batch_size", "401 digits", "at most"]),
        ({"training": {"batch_size": 2**63}}, ["training.batch_size", str(2**63), "at most"]),
        ({"training": {"learning_rate": 10**400}}, ["training.learning_rate", "finite"]),
        ({"model": {"table_rows": [[1] * 10**6] * 3}}, ["model.table_rows[0]", "[1, 1, 1, 1, 1"]),
        ({"training": {"threads": 100_000}}, ["training.threads", "100000", "at most 1024"]),
        ({"training": {"seed": 2**32}}, ["training.seed", str(2**32), str(2**32 - 1)]),
        ({"model": {"bottom_mlp": [512, 32]}}, ["ends in 32", "embedding_dim is 64"]),
        ({"model": {"bottom_mlp": [64]}}, ["model.bottom_mlp", "1 width", "at least 2"]),
        ({"model": {"top_mlp": [64, 2]}}, ["model.top_mlp", "ends in 2", "1"]),
        ({"model": {"tables": 3, "table_rows": [5, 6]}}, ["model.tables is 3", "lists 2"]),
        ({"model": {"table_rows": [5, 0]}}, ["model.table_rows[1]", "0", "at least 1"]),
        ({"model": {"table_rows": []}}, ["model.table_rows", "empty"]),
        ({"model": {"mlp_sizes": "nvidia"}}, ["model.dense_features", "missing"]),
        ({"model": {"dense_features": 7}}, ["model.dense_features is 7", "512"]),
        ({"model": {"interaction": "sum"}}, ["'sum'", "dot, cat, dcn"]),
        ({"model": {"dcn_rank": 8}}, ["dcn_rank is 8, but model.interaction is 'dot'", "leave it"]),
        ({"model": {"interaction": "cat", "dcn_layers": 3}}, ["dcn_layers is 3, but", "'cat'"]),
        ({"model": {"interaction": "dcn", "dcn_rank": 0}}, ["model.dcn_rank is 0", "at least 1"]),
        ({"model": {"interaction": "dcn", "dcn_layers": -1}}, ["model.dcn_layers is -1"]),
        ({"model": {"loss_weights": [1]}}, ["model.loss_weights", "1 numbers", "2"]),
        ({"data": {"place": "device"}}, ["data.place", "facebook"]),
        ({"data": {"multi_hot_sizes": [1]}}, ["data.multi_hot_sizes", "'facebook'", "for uniform"]),
        (
            {"data": {"multi_hot_sizes": [1, 2], "generator": "uniform"}},
            ["data.multi_hot_sizes has 2 sizes, but the model has 8 tables"],
        ),
        (
            {"data": {"multi_hot_sizes": [1, 0], "generator": "uniform"}},
            ["data.multi_hot_sizes[1] is 0", "at least 1"],
        ),
        ({"title": 3}, ["title", "3"]),
    ],
)
def test_what_cannot_work_is_refused_by_name(sections, words):
    with pytest.raises(InputError) as error:
        parameters_from_sections(sections, source="mine.yaml")
    message = str(error.value)
    assert message.startswith("mine.yaml: ")
    for word in words:
        assert word in message
    assert "\n" not in message


@pytest.mark.parametrize("empty", [{}, None])
def test_an_empty_section_has_the_defaults(empty):
    given = parameters_from_sections(dict.fromkeys([*SECTIONS, "sweep"], empty))
    assert given == parameters_from_sections({})


@pytest.mark.parametrize("value", ["0", "false", "[]", "''"])
def test_what_overrides_add_to_is_refused_all_the_same(tmp_path, value):
    path = tmp_path / "mine.yaml"
    for section, override in (("sweep", "training.seed=[1, 2]"), ("training", "seed=1")):
        path.write_text(f"{section}: {value}\n")
        with pytest.raises(InputError, match=rf"{section} is "):
            load_parameters(path, [f"{section}.{override}"])
    path.write_text(f"profiling: {{command: [python, x.py], command_folder: {value}}}\n")
    if value != "''":
        with pytest.raises(InputError, match=r"profiling\.command_folder is "):
            load_parameters(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", ["the file is empty (0 bytes)"]),
        (
            b"training: {batch_size: 4}\ntraining: {}\n",
            ["training is given twice, in lines 1 and 2"],
        ),
        (b"training:\n  seed: 1\n  seed: 2\n", ["seed is given twice, in lines 2 and 3"]),
        (b"training: {seed: 2020-13-45}\n", ["not valid YAML", "month must be in 1..12"]),
        (b"training: " + b"[" * 5000, ["it is nested more than 50 levels deep"]),
        (b"training: {seed: " + b"9" * 5000 + b"}", ["not valid YAML", "5000 digits"]),
        (b"training: !!python/object/apply:os.getcwd []\n", ["not valid YAML", "constructor"]),
        (b"? [1, 2]\n: 3\n", ["not valid YAML", "unhashable key"]),
        (b"title: caf\xe9\n", ["cannot be read as text"]),
        (b"\xff\xfe\x00title", ["cannot be read as text"]),
        (b"a: [", ["not valid YAML"]),
        (b"\0\1\2", ["not valid YAML"]),
        (b"- 1\n- 2\n", ["is [1, 2], expected the sections"]),
    ],
)
def test_files_that_are_no_parameters_are_refused_in_one_sentence(tmp_path, text, words):
    path = tmp_path / "mine.yaml"
    path.write_bytes(text)
    with pytest.raises(InputError) as error:
        load_parameters(path)
    message = str(error.value)
    assert message.startswith(str(path))
    for word in words:
        assert word in message
    assert "\n" not in message


def test_a_merged_mapping_may_be_overridden(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("training: {<<: {seed: 1, batch_size: 8}, seed: 2}\nmodel: {tables: 3}\n")
    parameters = load_parameters(path)
    assert (parameters.training.seed, parameters.training.batch_size) == (2, 8)


def test_files_that_have_no_end_or_are_too_large_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10**12)
    (tmp_path / "link").symlink_to("/dev/zero")
    for place, reason in (
        (Path("/dev/zero"), "it is no regular file"),
        (tmp_path / "pipe", "it is no regular file"),
        (tmp_path / "link", "it is no regular file"),
        (tmp_path / "sparse", "it has 1,000,000,000,000 bytes, expected at most 1,000,000"),
        (tmp_path / ("a" * 300), "File name too long"),
        (tmp_path / "a\0b", "embedded null byte"),
        (tmp_path / "missing.yaml", "no such"),
        (tmp_path, "cannot be read: it is a folder$"),
    ):
        with pytest.raises(InputError, match=reason):
            load_parameters(place)


def test_what_a_file_multiplies_is_refused_in_one_sentence(tmp_path):
    laughs = ["a0: &a0 {x: 1}"] + [
        f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 40)}]}}" for i in range(1, 9)
    ]
    lists = ["b0: &b0 [1, 1]"] + [
        f"b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 9)}]" for i in range(1, 10)
    ]
    for text in ("\n".join(laughs), "\n".join([*lists, "model: {table_rows: *b9}"]),
                 "a: " + "[" * 100_000, "a: [" + "1," * 200_000 + "]"):  # fmt: skip
        (tmp_path / "mine.yaml").write_text(text)
        with pytest.raises(InputError) as error:
            load_parameters(tmp_path / "mine.yaml")
        assert len(str(error.value)) < 500


def test_no_value_of_any_leaf_makes_a_message_long():
    many = {f"k{i}" * 10: "v" * 3000 for i in range(99)}
    odd = [
        many,
        ["x" * 3000] * 99,
        "x" * 4000,
        "-".join(["64"] * 3000),
        [64] * 3000,
        {"x": "y" * 3000},
    ]
    odd += [[[1] * 99] * 99, {"x" * 3000: "y"}, 10**4000, -(10**4000), [10**4000], "a\0b", b"x", 1j]
    odd += [math.inf, math.nan, -math.inf, 1e308, False, 0, "", [], {}, None, "\ud800", "*", "["]
    for section, kind in SECTIONS.items():
        for value in odd:
            for content in [value, *({leaf.name: value} for leaf in fields(kind))]:
                try:
                    parameters_from_sections({section: content})
                except InputError as error:
                    assert len(str(error)) <= 500 and "\n" not in str(error)
                else:
                    assert isinstance(content, dict | None), f"{section}: {content!r:.50}"


@pytest.mark.parametrize("name", RETIRED)
def test_a_retired_parameter_with_the_value_that_does_nothing_is_taken(name):
    value = json.dumps(RETIRED[name])
    assert load_parameters(None, [f"{name}={value}"]) == load_parameters(None)
    with pytest.raises(InputError, match=f"unknown parameter {re.escape(name)}"):
        load_parameters(None, [f"{name}=another"])


def test_overrides_replace_one_leaf(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("training: {batch_size: 8, learning_rate: 1e-3}\nmodel:\n")
    parameters = load_parameters(
        path, ["training.batch_size=4096", "model.tables=2", "model.table_rows=[3, 4]", "title=a=b"]
    )
    assert parameters.training.batch_size == 4096
    # YAML 1.1 reads 1e-3 as text; we do not
    assert parameters.training.learning_rate == pytest.approx(1e-3)
    assert parameters.model.table_rows == (3, 4)
    assert parameters.title == "a=b"


@pytest.mark.parametrize(
    "override",
    [
        "batch_size=3",
        "training.batch_size",
        "nothing.x=1",
        "training.x=1",
        "model.tables=[1",
        "training.seed=2020-13-45",
    ],
)
def test_an_override_that_names_nothing_is_refused(tmp_path, override):
    path = tmp_path / "p.yaml"
    path.write_text("title: x\n")
    with pytest.raises(InputError):
        load_parameters(path, [override])


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())
)


@given(
    st.sampled_from(
        [
            f"{section}.{name}"
            for section, values in Parameters().to_sections().items()
            if isinstance(values, dict)
            for name in values
        ]
    ),
    VALUES,
)
def test_any_value_is_taken_or_refused_in_one_sentence(name, value):
    section, _, leaf = name.partition(".")
    try:
        parameters = parameters_from_sections({section: {leaf: value}}, source="f.yaml")
    except InputError as error:
        assert section in str(error)
    else:
        assert parameters_from_sections(parameters.to_sections(), "f.yaml") == parameters


def test_a_kind_that_leaves_something_out_fails_where_it_is_defined():
    with pytest.raises(TypeError, match="Half: does not say width, forward, forward_work"):

        class Half(Interaction):
            kind = "half"
            about = "half of one"

    with pytest.raises(TypeError, match="'dot' is taken"):

        class Again(DotInteraction):
            pass

    with pytest.raises(TypeError, match="does not say operator"):

        class NoLoss(Loss):
            kind = "none"
            about = "nothing"

    with pytest.raises(TypeError, match="does not say dense, tables"):

        class NoUpdate(Optimizer):
            kind = "none"
            about = "nothing"

    assert "half" not in INTERACTIONS and "none" not in {*LOSSES, *OPTIMIZERS}
