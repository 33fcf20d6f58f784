"""``--like``: facebookresearch/dlrm's command line becomes the same training here."""

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from observers import Calling

from dlrm_core.base.errors import InputError
from dlrm_core.config import GivenSections, Parameters, load_parameters
from dlrm_core.train import train
from dlrm_workbook import cli
from dlrm_workbook.ground import like as commands
from dlrm_workbook.ground.vendors import FACEBOOK, SCRIPTS

FLAGS, (SCRIPT,) = FACEBOOK.flags, FACEBOOK.names
ROOT = Path(__file__).parents[2]
NAMES = (ROOT / "tests" / "data" / "dlrm_s_pytorch_flags.txt").read_text().split()
RUNS = json.loads((ROOT / "tests" / "data" / "facebook_losses.json").read_text())["runs"]
PEER = os.environ.get("DLRM_PEER", "")


def translated(command: str) -> tuple[GivenSections, list[str]]:
    return commands.translated(command, SCRIPTS)


def like(arguments: str, *overrides: str) -> Parameters:
    return load_parameters(translated(f"python {SCRIPT} {arguments}")[0], overrides)


def test_every_flag_of_the_script_is_mapped_refused_or_said_to_have_no_effect() -> None:
    assert [flag.name for flag in FLAGS] == NAMES
    every = [flag for script in SCRIPTS for flag in script.flags]
    verdicts = [(flag.parameter, flag.refused, flag.unused) for flag in every]
    assert all(sum(map(bool, each)) == 1 for each in verdicts)


@pytest.mark.skipif(not PEER, reason="DLRM_PEER names no facebookresearch/dlrm checkout")
def test_flags_and_defaults_are_those_of_the_scripts_own_parser() -> None:
    def default_of(call: ast.Call) -> Any:
        said = {word.arg: word.value for word in call.keywords}
        return ast.literal_eval(said["default"])

    tree = ast.parse((Path(PEER) / SCRIPT).read_text(encoding="utf-8"))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
    ]
    assert [ast.literal_eval(call.args[0]) for call in calls] == [flag.name for flag in FLAGS]
    for flag, call in zip(FLAGS, calls, strict=True):
        switch = any(word.arg == "action" for word in call.keywords)
        assert switch == (flag.read is None), flag.name
        default = default_of(call)
        if isinstance(flag.default, list):
            assert flag.read is not None
            default = flag.read(default)
        assert default == flag.default, flag.name


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.refused], ids=lambda flag: flag.name)
def test_a_flag_without_counterpart_is_refused_by_its_name(flag: Any) -> None:
    word = "" if flag.read is None else {int: "=7", str: "=gaussian"}[flag.read]
    with pytest.raises(InputError, match=re.escape(f"--like: {flag.name}{word} is not supported:")):
        translated(f"{SCRIPT} {flag.name}{word}")
    if flag.read is not None and flag.default is not None:
        # the default is what the script does without the flag
        assert translated(f"{SCRIPT} {flag.name}={flag.default}")[1] == []


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.unused], ids=lambda flag: flag.name)
def test_a_flag_without_effect_is_not_dropped_silently(flag: Any) -> None:
    word = "" if flag.read is None else "=7"
    plain, _ = translated(SCRIPT)
    sections, notes = translated(f"{SCRIPT} {flag.name}{word}")
    assert sections.tree == plain.tree
    assert notes == [f"{flag.name} has no effect: {flag.unused}"]


@pytest.mark.parametrize(
    ("word", "leaf", "expected"),
    [
        ("--arch-embedding-size=7-8", "model.table_rows", [7, 8]),
        ("--arch-mlp-bot=9-2", "model.bottom_mlp", [9, 2]),
        ("--arch-mlp-top 5-1", "model.top_mlp", [5, 1]),
        ("--arch-interaction-op=cat", "model.interaction", "cat"),
        ("--arch-interaction-itself", "model.interaction_itself", True),
        ("--loss-f=wbce", "model.loss", "wbce"),
        ("--loss-weights=0.5-2.0", "model.loss_weights", [0.5, 2.0]),
        ("--loss-threshold=1e-7", "model.loss_threshold", 1e-7),
        ("--data-size=12", "training.batches", 12),
        ("--data-size=12 --mini-batch-size=4", "training.batches", 3),
        ("--num-batches=5 --data-size=3", "training.batches", 5),
        ("--data-size=11 --mini-batch-size=4", "data.samples", 11),
        ("--data-size=11 --mini-batch-size=4", "data.drop_last", False),
        ("--num-batches=5 --mini-batch-size=2 --nepochs=3", "data.samples", 10),
        ("--nepochs=3", "training.epochs", 3.0),
        ("--mini-batch-size=2 --num-batches=1", "training.batch_size", 2),
        ("--num-indices-per-lookup=3", "data.indices_per_lookup", 3),
        ("--num-indices-per-lookup-fixed=1", "data.fixed_pooling", True),
        ("--learning-rate=0.5", "training.learning_rate", 0.5),
        ("--numpy-rand-seed=9", "training.seed", 9),
        ("--optimizer=rwsadagrad", "training.optimizer", "rowwise_adagrad"),
        ("--use-gpu", "training.device", "auto"),
        ("--print-freq=4", "training.log_every", 4),
        ("--lr-decay-start-step=3 --lr-num-d=2", "training.lr_decay_steps", 2),
        ("--lr-decay-start=2 --lr-num-warmup-steps=2", "training.lr_schedule", "facebook"),
    ],
)
def test_a_flag_becomes_its_parameter(word: str, leaf: str, expected: Any) -> None:
    if leaf == "training.lr_decay_steps":
        word += " --lr-num-warmup-steps=2"
    section, _, name = leaf.partition(".")
    assert like("").to_sections()[section][name] != expected
    assert like(word).to_sections()[section][name] == expected


def test_an_interaction_that_the_script_lacks_is_refused_under_its_flag() -> None:
    with pytest.raises(InputError, match="--arch-interaction-op is 'dcn', expected one of dot, ca"):
        like("--arch-interaction-op=dcn")


def test_text_after_a_flag_of_type_bool_means_true_as_in_the_script() -> None:
    sections, notes = translated(f"{SCRIPT} --round-targets=False")
    assert sections.tree["data"]["round_targets"] is True
    assert notes == ["--round-targets is true whatever word follows: the script reads it so"]


def test_the_experiments_command_gives_the_parameters_of_seed_yaml() -> None:
    document = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    command = re.search(r"python (dlrm_s_pytorch\.py(?:[^\n]*\\\n)+[^\n]*)", document)
    assert command
    ours = load_parameters(ROOT / "parameters" / "seed.yaml").to_sections()
    theirs = load_parameters(translated(command[0])[0]).to_sections()
    assert ours["training"].pop("log_every") == 10
    assert theirs["training"].pop("log_every") == 1  # --print-freq=1
    for section in ("model", "data", "training"):
        assert theirs[section] == ours[section]


def test_epochs_of_random_data_begin_again_and_end_in_a_short_batch_as_the_scripts_do() -> None:
    command = like(RUNS["epochs"]["arguments"])
    result = train(command)
    # five batches of 96, one of 20, and all of them again
    assert result.samples == 2 * command.data.samples == 2 * 500
    assert result.losses == pytest.approx(RUNS["epochs"]["losses"], abs=1e-5)
    lines: list[Any] = []
    rarely = like(RUNS["epochs"]["arguments"], "training.log_every=6")
    train(rarely, observer=Calling(lines.append))
    # a mean over samples, not over batches
    printed = RUNS["epochs"]["losses_of_six"]
    assert [line["loss"] for line in lines] == pytest.approx(printed, abs=1e-6)


@pytest.mark.parametrize("name", ["small", "bce", "wbce"])
def test_a_command_trains_here_to_the_losses_that_the_script_printed(name: str) -> None:
    result = train(like(RUNS[name]["arguments"], "training.max_steps=3"))
    assert result.losses == pytest.approx(RUNS[name]["losses"][:3], abs=1e-5)


def test_the_title_says_whose_tables_they_are() -> None:
    default = like("--mini-batch-size=128 --num-batches=2")
    assert default.model.table_rows == (4, 3, 2)
    assert default.title == (
        "Like dlrm_s_pytorch.py: batch 128, 3 tables of 4, 3 and 2 rows (the script's default: "
        "the command has no --arch-embedding-size)"
    )
    assert default.preset == "like-dlrm_s_pytorch"
    given = like("--arch-embedding-size=4-3-2-900-1000")
    assert given.title == "Like dlrm_s_pytorch.py: batch 1, 5 tables of 2 to 1,000 rows"
    assert like("--arch-embedding-size=5").title.endswith("1 table of 5 rows")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("python mine.py", "names no script that is known: dlrm_s_pytorch.py, dlrm.py, train.py"),
        ("dlrm.py --dataset_path d --mode=inference", "--mode=inference is not supported: this tr"),
        ("dlrm.py --dataset_path d --amp=maybe", "'maybe', expected true or false"),
        (
            "dlrm.py --dataset_path d --interaction=own",
            "--interaction is 'own', expected one of do",
        ),
        ("dlrm.py", "dlrm.py needs --dataset_path"),
        ("train.py --dataset d", "DeepSpark's script needs --model_config"),
        ("train.py --dataset d --model_config no.json", "no.json: no such file"),
        ("numactl -m 0 python dlrm_s_pytorch.py", "before dlrm_s_pytorch.py stands 'numactl"),
        ("dlrm_s_pytorch.py 'x", "is no command: No closing quotation"),
        ("dlrm_s_pytorch.py --batch=3", "takes no '--batch=3'"),
        ("dlrm_s_pytorch.py --arch-mlp=3", "ambiguous option"),
        ("dlrm_s_pytorch.py --arch-mlp-bot=4-x", "'4-x', expected whole numbers such as 4-3-2"),
        ("dlrm_s_pytorch.py --num-batches=-1", "--num-batches is -1, expected at least 1"),
        ("dlrm_s_pytorch.py --arch-mlp-bot=4-3", "--arch-mlp-bot ends in 3, but --arch-sparse-fea"),
        ("dlrm_s_pytorch.py --optimizer=adam", "--optimizer is 'adam', expected one of"),
        ("dlrm_s_pytorch.py --data-size=0", "--data-size is 0, expected at least 1"),
        ("dlrm_s_pytorch.py --nepochs=0", "--nepochs is 0, expected at least 1"),
        ("dlrm_s_pytorch.py --lr-num-warmup-steps=3", "--lr-decay-start-step is 0, but"),
        (f"dlrm_s_pytorch.py --num-batches={'9' * 9000}", "argument --num-batches"),
    ],
)
def test_what_cannot_be_translated_is_one_sentence(command, message, capsys) -> None:
    assert cli.main(["train", "--like", command]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("dlrm train: --like: ") and message in err
    assert err.count("\n") == 1 and len(err) < 500


def test_nvidias_documented_command_is_its_preset(tmp_path: Path) -> None:
    command = (
        "horovodrun -np 8 -H localhost:8 --mpi-args=--oversubscribe numactl --interleave=all -- "
        "python -u dlrm.py --dataset_path DATA --amp --xla --noconcat_embedding "
        "--save_checkpoint_path /data/checkpoint/ |& tee log"
    )
    sections, notes = translated(command)
    assert "horovodrun -np" in notes[0] and "torchrun" in notes[0] and "|& tee log" in notes[1]
    assert [note.split()[0] for note in notes[2:]] == [
        "--concat_embedding",
        "--xla",
        "--save_checkpoint_path",
    ]
    rows = "[" + ",".join(["7"] * 26) + "]"
    shape = [f"model.table_rows={rows}", "model.dense_features=13"]
    theirs = load_parameters(sections, shape).to_sections()
    ours = load_parameters("nvidia_t15", [*shape, "training.precision=fp16"]).to_sections()
    # ours says how fast to do the same
    speed = ("embedding_backend", "fused_optimizer", "loss_scale", "log_every", "evals_per_epoch")
    theirs["data"]["path"] = ours["data"]["path"]
    assert theirs["training"]["loss_scale"] == 65536
    for leaf in (*speed, "seed"):
        assert theirs["training"].pop(leaf) is not None and ours["training"].pop(leaf, 0) != "no"
    for section in ("model", "data", "training"):
        assert theirs[section] == ours[section]
    adam, _ = translated("dlrm.py --dataset_path d --optimizer adam --interaction cross --cpu")
    assert adam.tree["training"]["optimizer"] == "adam" and adam.tree["model"]["dcn_rank"] == 512


def test_deepsparks_documented_command_is_its_preset(tmp_path: Path) -> None:
    readme = (
        "python3 -u -m torch.distributed.launch --nproc_per_node=8 --use_env scripts/dist_train.py "
        "--model_config dlrm/config/official_config.json --dataset data/Criteo_Terabyte --lr 0.1 "
        "--warmup_steps 2750 --decay_end_lr 0 --decay_steps 27772 --decay_start_step 49315 "
        "--batch_size 2048 --epochs 5 |& tee 8cards.txt"
    )
    theirs = load_parameters(translated(readme)[0]).to_sections()
    ours = load_parameters("deepspark").to_sections()
    for leaf in ("embedding_backend", "fused_optimizer", "log_every", "seed", "tf32"):
        del theirs["training"][leaf], ours["training"][leaf]
    for section in ("model", "data", "training"):
        assert theirs[section] == ours[section]


def test_deepsparks_model_configuration_is_read_as_a_parameters_file(tmp_path, capsys) -> None:
    model = load_parameters("deepspark").model
    config = {
        "num_numerical_features": 13,
        "categorical_feature_sizes": list(model.table_rows),
        "bottom_mlp_sizes": [512, 256, 64],
        "top_mlp_sizes": [512, 512, 256, 1],
        "embedding_dim": 64,
        "interaction_op": "dot",
        "hash_indices": True,
    }
    file = tmp_path / "official_config.json"
    file.write_text(json.dumps(config))
    assert cli.main(["capacity", "-f", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["tables"] == 64 * sum(model.table_rows)
    file.write_text(json.dumps(config | {"dropout": 1}))
    assert cli.main(["capacity", "-f", str(file)]) == 2
    assert "official_config.json: 'dropout' is not known" in capsys.readouterr().err


def test_lines_broken_by_backslashes_are_one_command() -> None:
    broken = translated(f"/usr/bin/python3.11 /there/{SCRIPT} \\\n  --num-batches=3 \\\n")[0]
    assert broken.tree == translated(f"{SCRIPT} --num-batches=3")[0].tree


def test_parameters_of_a_command_can_be_saved(tmp_path, capsys) -> None:
    command = f"{SCRIPT} {RUNS['wbce']['arguments']}"
    assert cli.main(["parameters", "--like", command]) == 0
    file = tmp_path / "mine.yaml"
    file.write_text(capsys.readouterr().out)
    assert load_parameters(file).to_sections() == like(RUNS["wbce"]["arguments"]).to_sections()
