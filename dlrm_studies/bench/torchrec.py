"""TorchRec's own DLRM as a contestant of ``dlrm bench --torchrec``, in its own process.

torchrec.models.dlrm.DLRM, or DLRM_DCN for cross layers, with a FusedEmbeddingBagCollection
(FBGEMM's tables, the update inside backward) is the fastest that TorchRec offers in one
process. It gets our batches and our initial weights, so its losses can be compared with
ours. Its dot interaction lists the same pairs in another order; the top MLP's first weights
are permuted to fit.

``python -m dlrm_studies.bench.torchrec JOB RESULT`` is that process.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from typing import Any

import torch

from dlrm_core.base.errors import InputError, MissingToolError
from dlrm_core.base.machine import resolve_device
from dlrm_core.config import Parameters, parameters_from_sections
from dlrm_core.data.batch import Batch
from dlrm_core.data.loader import batches
from dlrm_core.interactions import CrossInteraction, DotInteraction
from dlrm_core.model import DLRM, ClickLoss, InteractionLayer, Probability, build_model
from dlrm_core.optimizers import OPTIMIZERS
from dlrm_workbook.evidence.contestants import WARMUP, Run, environment_of
from dlrm_workbook.ground.processes import do_job, run_job

INSTALL = (
    "pip install fbgemm-gpu-cpu==1.8.0 tensordict==0.15.3 torchmetrics==1.0.3 "
    "pyre-extensions==0.0.32 and then pip install --no-deps torchrec==1.8.0 (with torch 2.13)"
)


def require_torchrec() -> None:
    """Refuse a benchmark with TorchRec where it is not installed (MissingToolError)."""
    for name in ("torchrec", "fbgemm_gpu"):
        if importlib.util.find_spec(name) is None:
            raise MissingToolError(f"--torchrec needs {name}, which is not installed: {INSTALL}")


def run_torchrec(parameters: Parameters, iterations: int, threads: int) -> Run:
    """Train TorchRec's DLRM on the run's data and initial weights, in a fresh process.

    Raises:
        InputError: TorchRec's DLRM cannot be this model, or the run fails.
        MissingToolError: TorchRec is not installed.
    """
    require_torchrec()
    require_same_model(parameters)
    sections = parameters.to_sections()
    sections["training"] |= {"batches": iterations + WARMUP, "threads": threads}
    result = run_job(
        __name__,
        parameters_from_sections(sections).to_sections(),
        stage="TorchRec's DLRM",
        environment=environment_of(threads),
    )
    steps, wholes = result["step_ms"][WARMUP:], result["end_to_end_ms"][WARMUP:]
    losses = [round(loss, 6) for loss in result["losses"]]
    return Run(statistics.median(steps), statistics.median(wholes), losses)


def require_same_model(parameters: Parameters) -> None:
    """Refuse what TorchRec's DLRM cannot be (InputError)."""
    model, training = parameters.model, parameters.training
    kind = model.interaction_kind
    if not isinstance(kind, DotInteraction | CrossInteraction):
        known = f"{DotInteraction.kind!r} or {CrossInteraction.kind!r}"
        raise InputError(
            f"model.interaction is {kind.kind!r}, but TorchRec's DLRM is run with {known} only"
        )
    for leaf, found, wanted in (
        ("model.interaction_itself", getattr(kind, "interaction_itself", False), False),
        ("training.precision", training.precision, "fp32"),
    ):
        if found != wanted:
            raise InputError(
                f"{leaf} is {found!r}, but TorchRec's DLRM is run with {wanted!r} only"
            )
    if not OPTIMIZERS[training.optimizer].fbgemm:
        able = " or ".join(name for name, each in OPTIMIZERS.items() if each.fbgemm)
        raise InputError(
            f"training.optimizer is {training.optimizer!r}, but TorchRec's DLRM is run with "
            f"{able} only"
        )
    if model.embedding_dim % 4:
        raise InputError(
            f"model.embedding_dim is {model.embedding_dim}, but FBGEMM, which TorchRec uses, "
            "works on multiples of 4 only"
        )


class TorchRecStep:
    """Forward, backward and update by TorchRec's DLRM, on the CPU or a GPU.

    Args:
        ours: the model whose weights it starts from.
    """

    def __init__(self, parameters: Parameters, ours: DLRM, device: torch.device) -> None:
        from torchrec import EmbeddingBagConfig
        from torchrec.models import dlrm
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

        model, training = parameters.model, parameters.training
        self.keys = [f"f{t}" for t in range(len(model.table_rows))]
        kind, options = _optimizer(training.optimizer)
        tables = FusedEmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t{t}",
                    embedding_dim=model.embedding_dim,
                    num_embeddings=rows,
                    feature_names=[self.keys[t]],
                )
                for t, rows in enumerate(model.table_rows)
            ],
            optimizer_type=kind,
            optimizer_kwargs={"lr": training.learning_rate, **options},
            device=device,
        )
        cross, interaction = {}, model.interaction_kind
        if isinstance(interaction, CrossInteraction):
            cross["dcn_num_layers"] = interaction.dcn_layers
            cross["dcn_low_rank_dim"] = interaction.dcn_rank
        self.model = (dlrm.DLRM_DCN if cross else dlrm.DLRM)(
            tables,
            dense_in_features=model.bottom_widths[0],
            dense_arch_layer_sizes=list(model.bottom_widths[1:]),
            over_arch_layer_sizes=list(model.top_widths[1:]),
            dense_device=device,
            **cross,
        ).to(device)
        self._take_weights(ours)
        archs = (self.model.dense_arch, self.model.inter_arch, self.model.over_arch)
        dense = [weight for arch in archs for weight in arch.parameters()]
        # as in our own step: Adagrad of the dense part has torch's defaults
        dense_kind = getattr(torch.optim, OPTIMIZERS[training.optimizer].dense)
        self.optimizer = dense_kind(dense, lr=training.learning_rate)
        self.probability = Probability(model.loss_threshold)
        self.loss = ClickLoss.of(model).to(device)

    @torch.no_grad()
    def _take_weights(self, ours: DLRM) -> None:
        theirs = self.model
        collection = theirs.sparse_arch.embedding_bag_collection
        for weight, own in zip(
            collection.state_dict().values(), ours.embeddings.weights, strict=True
        ):
            weight.copy_(own)
        for mlp, arch in ((ours.bottom_mlp, theirs.dense_arch), (ours.top_mlp, theirs.over_arch)):
            found = [m for m in arch.modules() if isinstance(m, torch.nn.Linear)]
            for linear, own_linear in zip(found, mlp.linears, strict=True):
                linear.weight.copy_(own_linear.weight)
                linear.bias.copy_(own_linear.bias)
        if isinstance(ours.interaction.kind, CrossInteraction):
            take_cross_weights(ours.interaction, theirs.inter_arch.crossnet)
            return
        first = next(m for m in theirs.over_arch.modules() if isinstance(m, torch.nn.Linear))
        order = pair_order(len(self.keys) + 1).to(first.weight.device)
        dim = first.weight.shape[1] - len(order)
        first.weight[:, dim:] = first.weight[:, dim:][:, order]

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Train on a batch; its loss, detached."""
        from torchrec import KeyedJaggedTensor

        self.optimizer.zero_grad(set_to_none=True)
        starts = torch.tensor(batch.table_starts, device=batch.offsets.device)
        offsets = torch.cat([(batch.offsets + starts[:-1, None]).flatten(), starts[-1:]])
        lookups = KeyedJaggedTensor(keys=self.keys, values=batch.indices, offsets=offsets)
        logits = self.model(dense_features=batch.dense, sparse_features=lookups)
        loss: torch.Tensor = self.loss(self.probability(logits), batch.targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@torch.no_grad()
def take_cross_weights(ours: InteractionLayer, theirs: Any) -> None:
    """Copy our cross layers' weights into TorchRec's LowRankCrossNet."""
    own = ours.weights
    for layer, (narrow, widen, bias) in enumerate(zip(own[::3], own[1::3], own[2::3], strict=True)):
        theirs.V_kernels[layer].copy_(narrow)
        theirs.W_kernels[layer].copy_(widen)
        theirs.bias[layer].copy_(bias)


def pair_order(features: int) -> torch.Tensor:
    """For each of TorchRec's pairs the place of the same pair in ours.

    TorchRec's are the upper triangle row by row, facebook's and ours the lower.
    """
    rows, columns = torch.tril_indices(features, features, offset=-1)
    ours = {(int(j), int(i)): place for place, (i, j) in enumerate(zip(rows, columns, strict=True))}
    theirs = torch.triu_indices(features, features, offset=1).T.tolist()
    return torch.tensor([ours[i, j] for i, j in theirs], dtype=torch.int64)


def _optimizer(name: str) -> tuple[Any, dict[str, Any]]:
    kind, options = OPTIMIZERS[name].tables
    options = {leaf: value for leaf, value in options.items() if leaf != "foreach"}
    if OPTIMIZERS[name].per_row:
        from torchrec.optim import RowWiseAdagrad

        return RowWiseAdagrad, options
    return getattr(torch.optim, kind), options


def train(sections: dict[str, Any]) -> dict[str, list[float]]:
    """Train: ``step_ms``, ``end_to_end_ms`` and ``losses`` of every iteration."""
    parameters = parameters_from_sections(sections)
    training = parameters.training
    device = resolve_device(training)
    if training.threads is not None:
        torch.set_num_threads(training.threads)
    step = TorchRecStep(parameters, build_model(parameters.model, training.seed, device), device)
    stream = batches(parameters, device)
    steps, wholes, losses = [], [], []
    for _ in range(training.batches):
        started = time.perf_counter()
        batch = next(stream)
        made = time.perf_counter()
        losses.append(float(step(batch.to(device))))  # waits for the device
        ended = time.perf_counter()
        steps.append(1e3 * (ended - made))
        wholes.append(1e3 * (ended - started))
    return {"step_ms": steps, "end_to_end_ms": wholes, "losses": losses}


if __name__ == "__main__":
    do_job(train)
