"""A small program with the ranges of a training step, to be profiled in tests."""

import torch

from dlrm_core.parts import ITERATION_SPAN, part


class SmallProgram:
    """Two layers and a table; each call is an iteration under ``ITERATION_SPAN``."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU())
        self.table = torch.nn.EmbeddingBag(100, 32, mode="sum")
        self.optimizer = torch.optim.SGD([*self.mlp.parameters(), *self.table.parameters()], lr=0.1)

    def __call__(self, number: int = 0) -> None:
        with torch.profiler.record_function(ITERATION_SPAN):
            dense, indices = data_forward()
            x = bottom_mlp_forward(self, dense)
            loss = loss_forward(x, embedding_forward(self, indices))
            # Not cut into parts: what matters here is only that ranges nest.
            loss_backward(loss)
            optimizer_update(self)


@part("data", "forward")
def data_forward() -> tuple[torch.Tensor, torch.Tensor]:
    dense = torch.tensor([[float(row + column) for column in range(16)] for row in range(8)])
    return dense, torch.randint(0, 100, (8, 4))


@part("bottom_mlp", "forward")
def bottom_mlp_forward(program: SmallProgram, dense: torch.Tensor) -> torch.Tensor:
    return program.mlp(dense)


@part("embedding", "forward")
def embedding_forward(program: SmallProgram, indices: torch.Tensor) -> torch.Tensor:
    return program.table(indices)


@part("loss", "forward")
def loss_forward(x: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
    return ((x - pooled) ** 2).mean()


@part("loss", "backward")
def loss_backward(loss: torch.Tensor) -> None:
    loss.backward()


@part("optimizer", "update")
def optimizer_update(program: SmallProgram) -> None:
    program.optimizer.step()
    program.optimizer.zero_grad()
