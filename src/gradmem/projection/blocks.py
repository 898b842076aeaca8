"""Passes over G: (k, p), some columns at a time in double precision, so that no copy of it is made.

Products of float32 numbers are exact in double precision.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from gradmem.cuda.devices import has_triton
from gradmem.projection.threads import one_thread

__all__ = ["add_rows", "inner_products", "products_with"]

#: Numbers that are in double precision at a time: they stay in a processor's cache.
NUMBERS = 1 << 19
#: Columns of one matrix product.
WIDTH = 4096
#: Numbers that are worth a thread of their own.
SHARE = 1 << 21


def inner_products(G: Tensor, g: Tensor, rows: Tensor | None = None) -> Tensor:
    """[H; g][H; g]ᵀ: (n + 1, n + 1), so HHᵀ, and with Hg and |g|² in its last row and column.

    H: (n, p) are some of G's rows; all of them for None.
    """
    n, p = len(G) if rows is None else len(rows), len(g)
    if G.device.type != "cpu":
        return _products(G, g, rows)
    with one_thread() as threads:
        shares = max(1, min(threads, (n + 1) * p // SHARE))
        if shares == 1:
            return _products(G, g, rows)
        edges = [p * i // shares for i in range(shares + 1)]
        columns = [slice(*pair) for pair in itertools.pairwise(edges)]
        with ThreadPoolExecutor(shares, "gradmem", torch.set_num_threads, (1,)) as pool:
            parts = list(pool.map(lambda c: _products(G[:, c], g[c], rows), columns))
    return torch.stack(parts).sum(0)


def products_with(G: Tensor, g: Tensor) -> Tensor:
    """[Gg, |g|²]: (k + 1,) in double precision, for G: (k, p) and g: (p,)."""
    if G.is_cuda and has_triton():
        from gradmem.projection.device import products_with_on_device

        return products_with_on_device(G, g)
    return inner_products(G, g)[-1]


@torch.no_grad()  # a thread does not inherit it
def _products(G: Tensor, g: Tensor, rows: Tensor | None) -> Tensor:
    n = len(G) if rows is None else len(rows)
    width = max(256, min(WIDTH, NUMBERS // (2 * (n + 1))))
    total = G.new_zeros((n + 1, n + 1), dtype=torch.float64)
    for block in _blocks(G, g, rows, width):  # (blocks, n + 1, width)
        total += torch.bmm(block, block.mT).sum(0)
    return total


def add_rows(g: Tensor, G: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute g + Gᵀw: (p,) for w: (k,) in double precision, rounded to a dtype at the end."""
    result = torch.empty_like(g, dtype=dtype)
    both = torch.cat([weights, weights.new_ones(1)])
    width = max(256, NUMBERS // len(both))
    for i, block in enumerate(_blocks(G, g, None, width)):
        result[i * width : (i + 1) * width] = block[0].T @ both
    return result


def _blocks(G: Tensor, g: Tensor, rows: Tensor | None, width: int) -> Iterator[Tensor]:
    """[H; g] in double precision: as many blocks of (n + 1, width) as there may be at a time."""
    n, p = len(G) if rows is None else len(rows), len(g)
    whole, rest = divmod(p, width)
    most = max(1, min(NUMBERS // ((n + 1) * width), whole))
    buffer = G.new_empty((most, n + 1, min(width, p)), dtype=torch.float64)
    parts = [(i * width, min(most, whole - i), width) for i in range(0, whole, most)]
    for start, blocks, size in [*parts, *([(p - rest, 1, rest)] if rest else [])]:
        columns = slice(start, start + blocks * size)
        block = buffer[:blocks, :, :size]
        H = G[:, columns] if rows is None else G[:, columns].index_select(0, rows)
        block[:, :n].copy_(H.unflatten(1, (blocks, size)).transpose(0, 1))
        block[:, n].copy_(g[columns].unflatten(0, (blocks, size)))
        yield block
