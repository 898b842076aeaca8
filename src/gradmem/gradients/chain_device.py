"""The small parts of a chain's pass on a GPU, as few kernels.

In a recorded step every kernel takes some microseconds, however little it does, and cuBLAS takes a
single pass over the inputs' features whatever their number. So the first product is shared out over
parts of the features, what it gives is summed up where the bias is added, and the gradients of
biases, of small layers and of the batch are one kernel for all layers and tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

__all__ = ["first_layer", "fits", "reduce_small"]

#: Most layers: a kernel has a part for each, which takes a second or two to compile.
LAYERS = 4
#: Most examples of a batch whose products are left to the kernels here.
BATCH = 64
#: Weights of a layer from which on cuBLAS has the memories' gradients.
LARGE = 8192
#: Blocks that a product should have to keep a large GPU busy, and their size.
BLOCKS, BLOCK = 264, 64
#: Outputs, inputs and rows of a block in `_reduce`, and its warps.
TILE = (32, 32, 32, 2)


def fits(n_layers: int, batch: Tensor | None) -> bool:
    """Whether a chain is short enough, and a batch small enough, for the kernels here."""
    return n_layers <= LAYERS and (batch is None or len(batch) <= BATCH)


def first_layer(layer: nn.Linear, relu: bool, x: Tensor, batch: Tensor | None, y: Tensor) -> None:
    """Write what a layer and a ReLU, if one follows, give for x and the batch into y: (n, out)."""
    (n, width), out = x.shape, layer.out_features
    parts = _parts(n, width, out)
    sums = x.new_empty((parts, n, out)) if parts > 1 else y[None, :n]
    of_x, of_weights = (
        tensor.unflatten(1, (parts, width // parts)).movedim(1, 0) for tensor in (x, layer.weight)
    )
    torch.bmm(of_x, of_weights.mT, out=sums)
    block, rows = 1024, 16
    n_batch = 0 if batch is None else len(batch)
    blocks = triton.cdiv(n * out, block)
    _first[(blocks + out * triton.cdiv(n_batch, rows),)](
        sums, x if batch is None else batch, layer.weight, layer.bias, y,
        n * out, parts, n_batch, blocks,
        WIDTH=width, OUT=out, RELU=relu, BLOCK=block, ROWS=rows, COLUMNS=256,
    )  # fmt: skip


def _parts(n: int, width: int, out: int) -> int:
    """Parts of the features that a product is shared out over, each a multiple of 4."""
    blocks = triton.cdiv(n, BLOCK) * triton.cdiv(out, BLOCK)
    fitting = [s for s in range(1, 17) if width % (4 * s) == 0 and width // s >= BLOCK]
    return next((s for s in fitting if s * blocks >= BLOCKS), max(fitting, default=1))


@triton.jit(do_not_specialize=["n", "parts", "n_batch", "blocks"])
def _first(
    sums, batch, weight, bias, y, n, parts, n_batch, blocks,
    WIDTH: tl.constexpr, OUT: tl.constexpr, RELU: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What a layer gives: of the memories from its parts, of the batch from the start."""
    program = tl.program_id(0)
    if program < blocks:
        _from_parts(sums, bias, y, n, parts, program, OUT, RELU, BLOCK)
    else:
        _from_start(
            batch, weight, bias, y + n, n_batch, program - blocks,
            WIDTH, OUT, RELU, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit
def _from_parts(
    sums, bias, y, n, parts, program,
    OUT: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = program * BLOCK + tl.arange(0, BLOCK)
    place = sums + i
    z = tl.load(place, mask=i < n, other=0.0)
    for _ in range(1, parts):
        place += n
        z += tl.load(place, mask=i < n, other=0.0)
    if bias is not None:
        z += tl.load(bias + i % OUT)
    if RELU:
        z = tl.maximum(z, 0.0)
    tl.store(y + i, z, mask=i < n)


@triton.jit
def _from_start(
    batch, weight, bias, y, n, program,
    WIDTH: tl.constexpr, OUT: tl.constexpr, RELU: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One output for some rows of the batch."""
    column = program % OUT
    r = program // OUT * ROWS + tl.arange(0, ROWS)
    products = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        c = first + tl.arange(0, COLUMNS)
        inside = (r < n)[:, None] & (c < WIDTH)[None, :]
        w = tl.load(weight + column * WIDTH + c, mask=c < WIDTH, other=0.0)
        x = tl.load(batch + r[:, None] * WIDTH + c[None, :], mask=inside, other=0.0)
        products += x * w[None, :]
    z = tl.sum(products, 1)
    if bias is not None:
        z += tl.load(bias + column)
    if RELU:
        z = tl.maximum(z, 0.0)
    tl.store(y + r * OUT + column, z, mask=r < n)


def reduce_small(
    layers: Sequence[nn.Linear],
    inputs: Sequence[Tensor],
    batch: Tensor | None,
    grads: Sequence[Tensor],
    room: tuple[int, int],
    out: Tensor,
    g: Tensor | None,
) -> list[int]:
    """Write all gradients but those of large layers' weights at the memories; the latter's numbers.

    `inputs` are what went into each layer, of the first one for the memories only; `grads` the
    gradients of what came out. Rows are those of the k · m memories, then those of the batch.
    `out`: (k, p) is the memories' G, `g`: (p,) the batch's gradient.
    """
    k, m = room
    large = [i for i, layer in enumerate(layers) if layer.weight.numel() >= LARGE]
    down, across, rows, warps = TILE
    sizes, tiles, tiles_of_batch, start = [], 0, 0, 0
    for i, layer in enumerate(layers):
        n, width = layer.weight.shape
        after = start + n * width
        has_bias = layer.bias is not None
        sizes += [n, width, start, after, int(has_bias), int(i in large)]
        start = after + n * has_bias
        tiles += triton.cdiv(n, down) * (triton.cdiv(width, across) * (i not in large) + has_bias)
        tiles_of_batch += triton.cdiv(n, down) * (triton.cdiv(width, across) + has_bias)
    n_batch = 0 if batch is None else len(batch)
    if programs := k * tiles + (tiles_of_batch if n_batch else 0):
        _reduce[(programs,)](
            inputs[0] if batch is None else batch, tuple(inputs), tuple(grads),
            out, out if g is None else g, out.stride(0), k, m, tiles, n_batch,
            LAYERS=len(layers), SIZES=tuple(sizes), DOWN=down, ACROSS=across, ROWS=rows,
            num_warps=warps,
        )  # fmt: skip
    return large


@triton.jit(do_not_specialize=["k", "m", "tiles", "n_batch"])
def _reduce(
    batch, inputs, grads, out, g, stride, k, m, tiles, n_batch,
    LAYERS: tl.constexpr, SIZES: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of one layer's gradient at one task's memories or, after them, of the batch's."""
    program = tl.program_id(0)
    task = tl.where(program < k * tiles, program // tl.maximum(tiles, 1), k)
    tile = program - task * tiles
    start = task * m
    for i in tl.static_range(LAYERS):
        x = inputs[i] + start.to(tl.int64) * SIZES[6 * i + 1]
        dy = grads[i] + start.to(tl.int64) * SIZES[6 * i]
        row = out + task.to(tl.int64) * stride
        n = m
        own = tl.cdiv(SIZES[6 * i], DOWN) * tl.cdiv(SIZES[6 * i + 1], ACROSS)
        if SIZES[6 * i + 5]:
            own = tl.where(task < k, 0, own)
        if task >= k:
            row = g
            n = n_batch
            if i == 0:
                x = batch
        if (tile >= 0) & (tile < own):
            _weights(
                x, dy, row + SIZES[6 * i + 2], n, tile,
                SIZES[6 * i], SIZES[6 * i + 1], DOWN, ACROSS, ROWS,
            )  # fmt: skip
        tile -= own
        if SIZES[6 * i + 4]:
            if (tile >= 0) & (tile < tl.cdiv(SIZES[6 * i], DOWN)):
                _bias(dy, row + SIZES[6 * i + 3], n, tile, SIZES[6 * i], DOWN, ROWS)
            tile -= tl.cdiv(SIZES[6 * i], DOWN)


@triton.jit
def _weights(
    x, dy, out, n, tile, OUT: tl.constexpr, WIDTH: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of dyᵀx for x: (n, WIDTH) and dy: (n, OUT), in single precision."""
    o = tile // tl.cdiv(WIDTH, ACROSS) * DOWN + tl.arange(0, DOWN)
    c = tile % tl.cdiv(WIDTH, ACROSS) * ACROSS + tl.arange(0, ACROSS)
    total = tl.zeros((DOWN, ACROSS), dtype=tl.float32)
    for first in range(0, n, ROWS):
        r = first + tl.arange(0, ROWS)
        one = tl.load(
            dy + r[None, :] * OUT + o[:, None],
            mask=(r < n)[None, :] & (o < OUT)[:, None], other=0.0,
        )  # fmt: skip
        other = tl.load(
            x + r[:, None] * WIDTH + c[None, :],
            mask=(r < n)[:, None] & (c < WIDTH)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(one, other, total, input_precision="ieee")
    place = out + o[:, None] * WIDTH + c[None, :]
    tl.store(place, total, mask=(o < OUT)[:, None] & (c < WIDTH)[None, :])


@triton.jit
def _bias(
    dy, out, n, tile, OUT: tl.constexpr, DOWN: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    o = tile * DOWN + tl.arange(0, DOWN)
    total = tl.zeros((ROWS, DOWN), dtype=tl.float32)
    for first in range(0, n, ROWS):
        r = first + tl.arange(0, ROWS)
        inside = (r < n)[:, None] & (o < OUT)[None, :]
        total += tl.load(dy + r[:, None] * OUT + o[None, :], mask=inside, other=0.0)
    tl.store(out + o, tl.sum(total, 0), mask=o < OUT)
