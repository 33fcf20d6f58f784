"""What ranks say when a run ends early: once, and where torchrun's report shows it."""

import dataclasses
import sys

import pytest
import torch.distributed as dist
from optional_tools import needs_torchrec
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from dlrm_core.base.errors import InputError
from dlrm_core.config import TrainingConfig, load_parameters
from dlrm_ranks import watch as refusal
from dlrm_ranks.watch import said_once, tell_launcher
from dlrm_studies.scaling.launch import environment


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """The environment of a rank, whose launcher keeps a store; its error file."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in environment(0, 2, store.port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    yield tmp_path / "error.json"
    del store


def refused(sentence, capsys):
    """What a rank with this refusal says; its exit status is 2."""
    with pytest.raises(SystemExit) as left, said_once(2, 130):
        raise InputError(sentence)
    assert left.value.code == 2
    return capsys.readouterr().err


def test_ranks_say_a_refusal_once(launched, monkeypatch, capsys):
    monkeypatch.setattr(refusal, "leave", sys.exit)
    monkeypatch.setattr(refusal, "_REFUSAL_S", 0.0)
    a, b, c, d = (f"dlrm train: {name}\n" for name in "abcd")
    assert [refused(name, capsys) for name in "aaba"] == [a, "", b, ""]
    # a launcher without a store of its own: better twice than not at all
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert [refused("c", capsys) for _ in range(2)] == [c, c]
    # the store is gone
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(refusal, "_STORE_S", 0.2)
    assert refused("d", capsys) == d
    # the launcher ends the others; Ctrl-C all of them
    for rank, said in (("0", "dlrm train: interrupted\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as left, said_once(2, 130):
            raise KeyboardInterrupt
        assert (left.value.code, capsys.readouterr().err) == (130, said)


def test_torchrun_reports_our_sentence(launched, monkeypatch):
    tell_launcher("rank 1 is gone")
    failure = ProcessFailure(local_rank=0, pid=7, exitcode=3, error_file=str(launched))
    report = str(ChildFailedError("dlrm_core", {0: failure}))
    assert "traceback : rank 1 is gone\n" in report and "N/A" not in report
    # nowhere to put it: nothing happens
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(launched / "not" / "a folder"))
    tell_launcher("unheard")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    tell_launcher("unheard")


@needs_torchrec
def test_tables_held_alike_are_named_together():
    from dlrm_ranks.plan import Shard, describe

    shards = [Shard(t, "table_wise", t in (2, 5), 0, 10, 0, 4) for t in range(7)]
    shards += [Shard(t, "row_wise", rank, 5 * rank, 5, 0, 4) for t in (7, 8) for rank in (0, 1)]
    shards += [Shard(9, "replicated", rank, 0, 10, 0, 4) for rank in (0, 1)]
    assert [line.partition(" holds ")[2] for line in describe(shards, ["a", "b", "c"])] == [
        "1.09 KiB: tables 0-1, 3-4, 6; tables 7-8: rows 0-4; table 9 (replicated)",
        "640 B: tables 2, 5; tables 7-8: rows 5-9; table 9 (replicated)",
        "0 B: no table",
    ]


def test_options_of_one_process_do_nothing_on_ranks_and_that_is_said():
    from dlrm_ranks.step import config_of_rank

    tuned = load_parameters("parameters/kalamkar_small.yaml").training
    # the tables are TorchRec's, whose lookups and updates the fused kernels do all the same
    assert config_of_rank(tuned) == (dataclasses.replace(tuned, embedding_backend="torch"), [])
    graphs = TrainingConfig(embedding_backend="fused", cuda_graphs=True, fp32_matmul="onednn")
    config, notices = config_of_rank(graphs)
    assert not config.cuda_graphs and config.fp32_matmul == "onednn" and "captured" in notices[0]
