"""An MLP whose weights, activations and gradients live in tiles: forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from dlrm_kernels.tiles.layout import BLOCK, Arena, Engine, Result, Tiled, blocks_of


class TiledMLP:
    """Linear layers of B samples, with ReLU behind each, or behind all but the last.

    Each :meth:`forward` reads the layers' fp32 weights, :meth:`backward` writes their fp32
    gradients. Memory for activations is kept from step to step.

    Args:
        engine: runs the kernels.
        linears: the layers, input side first.
        parts: bf16 numbers an operand's entry is made of: 1 for bf16, 2 or 3 for fp32.
        capacity: most samples at once.
        relu_last: whether the last layer has a ReLU too.
        input_gradient: whether anybody asks for the gradient of the input.
    """

    def __init__(
        self,
        engine: Engine,
        linears: Sequence[nn.Linear],
        parts: int,
        capacity: int,
        *,
        relu_last: bool,
        input_gradient: bool,
    ) -> None:
        self.engine, self.parts = engine, parts
        self.widths = [linears[0].in_features, *(linear.out_features for linear in linears)]
        self.relu_last, self.input_gradient = relu_last, input_gradient
        self._linears = list(linears)
        self._blocks = [blocks_of(width) for width in self.widths]
        rows = blocks_of(capacity)
        outputs = self._blocks[1:]
        self.arena = arena = Arena()
        # inputs of each layer, and behind them the last output, for its ReLU's mask
        self._x_rows = [Tiled.empty(rows, n, parts, arena) for n in self._blocks]
        self._x_columns = [Tiled.empty(n, rows, parts, arena) for n in self._blocks[:-1]]
        # gradients of outputs: those of a layer are needed until the one before has its own
        most = max(outputs)
        self._dy_rows = [Tiled.empty(rows, most, parts, arena) for _ in range(2)]
        self._dy_rows_t = [Tiled.empty(most, rows, parts, arena) for _ in range(2)]
        self._sums = [arena.floats(rows, BLOCK * m) for m in outputs]
        pairs = list(itertools.pairwise(self._blocks))
        self._forward = [Tiled.empty(m, n, parts, arena) for n, m in pairs]
        self._backward = [Tiled.empty(n, m, parts, arena) for n, m in pairs]
        self._biases = [arena.floats(BLOCK * m).zero_() for m in outputs]
        self._output = arena.floats(capacity, self.widths[-1])
        self._input_gradient = arena.floats(capacity if input_gradient else 0, self.widths[0])
        self._gradients = [
            (arena.floats(*linear.weight.shape), arena.floats(*linear.bias.shape))
            for linear in linears
        ]

    def _read_weights(self) -> None:
        for layer, linear in enumerate(self._linears):
            wanted = Result(columns_t=self._forward[layer])
            if layer > 0 or self.input_gradient:
                wanted.columns = self._backward[layer]
            self.engine.pack(linear.weight.detach(), self.parts, wanted)
            self._biases[layer][: linear.out_features] = linear.bias.detach()

    def input(self, size: int) -> Result:
        """Where the first layer's input of so many samples is to be put, in tiles."""
        blocks = blocks_of(size)
        return Result(
            rows=self._x_rows[0].first(blocks, self._blocks[0]),
            columns=self._x_columns[0].first(self._blocks[0], blocks),
        )

    def forward(self, size: int) -> torch.Tensor:
        """The output (size, widths[-1]) float32 of an input in tiles; overwritten next time."""
        self._read_weights()
        blocks, last = blocks_of(size), len(self._linears) - 1
        output = self._output[:size]
        for layer in range(last + 1):
            n, m = self._blocks[layer], self._blocks[layer + 1]
            result = Result(bias=self._biases[layer], relu=layer < last or self.relu_last)
            if result.relu:
                result.rows = self._x_rows[layer + 1].first(blocks, m)
            if layer < last:
                result.columns = self._x_columns[layer + 1].first(m, blocks)
            else:
                result.target = output
            shape = (size, self.widths[layer + 1])
            left = self._x_rows[layer].first(blocks, n)
            self.engine.product(left, self._forward[layer], shape, result)
        return output

    def backward(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Gradients of weights and input, given that of the output.

        Args:
            gradient: (size, widths[-1]) float32, for the input of the last :meth:`forward`.

        Returns:
            The input's gradient (size, widths[0]), overwritten next time; None unless
            asked for. The weights' are added to their ``grad``, where there is one.
        """
        size = gradient.shape[0]
        blocks, last = blocks_of(size), len(self._linears) - 1
        wanted = self._gradient_forms(last, blocks)
        if self.relu_last:
            wanted.mask = self._x_rows[-1].first(blocks, self._blocks[-1])
        self.engine.pack(gradient, self.parts, wanted)
        for layer in range(last, -1, -1):
            n, m = self._blocks[layer], self._blocks[layer + 1]
            rows = self._dy_rows[layer % 2].first(blocks, m)
            # first, while the rows just written are in the cache
            if layer > 0:
                result = self._gradient_forms(layer - 1, blocks)
                result.mask = self._x_rows[layer].first(blocks, n)
                shape = (size, self.widths[layer])
                self.engine.product(rows, self._backward[layer], shape, result)
            elif self.input_gradient:
                result = Result(target=self._input_gradient[:size])
                shape = (size, self.widths[0])
                self.engine.product(rows, self._backward[0], shape, result)
            self._weight_gradient(layer, blocks)
        return self._input_gradient[:size] if self.input_gradient else None

    def _gradient_forms(self, layer: int, blocks: int) -> Result:
        """The forms in which a layer's output gradient is needed."""
        m = self._blocks[layer + 1]
        return Result(
            sums=self._sums[layer][:blocks],
            rows=self._dy_rows[layer % 2].first(blocks, m),
            rows_t=self._dy_rows_t[layer % 2].first(m, blocks),
        )

    def _weight_gradient(self, layer: int, blocks: int) -> None:
        n, m = self._blocks[layer], self._blocks[layer + 1]
        linear = self._linears[layer]
        target, bias = self._gradients[layer]
        sums = self._sums[layer][:blocks].sum(0)[: linear.out_features]
        accumulate = linear.weight.grad is not None
        if linear.weight.grad is None or linear.bias.grad is None:
            linear.weight.grad, linear.bias.grad = target, bias
            bias.copy_(sums)
        else:
            target = linear.weight.grad
            linear.bias.grad.add_(sums)
        left = self._dy_rows_t[layer % 2].first(m, blocks)
        right = self._x_columns[layer].first(n, blocks)
        shape = (self.widths[layer + 1], self.widths[layer])
        self.engine.product(left, right, shape, Result(target=target, accumulate=accumulate))
