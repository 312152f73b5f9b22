"""Tensors that lie in files, read a block at a time into the arrays that are to hold them, on all cores.

A whole tensor is never held beside the array that it goes to; what is held besides is one block for each thread.
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from transformer_jax.errors import UserError

BLOCK = 2**17
"""Numbers that are read at once: enough for NumPy to be quick, and few enough to stay in a core's cache."""

ALIGNMENT = 64
"""Bytes. JAX takes over an array of the host's that begins at a multiple of them, and copies any other."""


class Stored(Protocol):
    """A tensor that lies in a file."""

    @property
    def path(self) -> Path: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, first: int, count: int) -> np.ndarray:
        """Read some rows, a row being what lies along the last dimension, as an array [count width]."""
        ...


def read_bytes(path: Path, begin: int, size: int) -> np.ndarray:
    """Read a part of a file that was there when the file was opened, and not through a map, whose pages would stay."""
    content = np.fromfile(path, np.uint8, size, offset=begin)
    if content.size < size:
        raise UserError(f"{path} has become shorter while it was being read; fetch it again")
    return content


def empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Make an array for JAX to take over; its numbers are still to be set."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    content = np.empty(size + ALIGNMENT, np.uint8)
    start = -content.ctypes.data % ALIGNMENT
    return content[start : start + size].view(dtype).reshape(shape)


def fill(views: Sequence[np.ndarray], tensor: Stored, pool: Executor) -> Iterator[int]:
    """Write a tensor into views that follow one another as its rows do, each number converted to the views' type.

    Yields how many numbers have been written, as they are. A view may split the rows by several dimensions.
    """
    if len(tensor.shape) == 1:
        numbers, start = tensor.rows(0, 1)[0], 0
        for view in views:
            view[...] = numbers[start : start + view.size].reshape(view.shape)
            start += view.size
        yield start
        return

    def write(view: np.ndarray, at: tuple[int | slice, ...], first: int, count: int) -> int:
        target = view[at]
        target[...] = tensor.rows(first, count).reshape(target.shape)
        return target.size

    pieces: list[tuple[np.ndarray, tuple[int | slice, ...], int, int]] = []
    first = 0
    for view in views:
        for at, count in _cut(view.shape):
            pieces.append((view, at, first, count))
            first += count
    yield from pool.map(write, *zip(*pieces, strict=True))


def fill_beside(views: Sequence[np.ndarray], tensor: Stored, pool: Executor) -> Iterator[int]:
    """Write a tensor into views that lie beside each other, each holding a part of every row; yields as `fill`."""
    if len(tensor.shape) == 1:
        yield from fill(views, tensor, pool)
        return
    ends = np.cumsum([view.shape[-1] for view in views])

    def write(rows: slice, count: int) -> int:
        block = tensor.rows(rows.start, count)
        for view, part in zip(views, np.split(block, ends[:-1], axis=-1), strict=True):
            view[rows] = part
        return block.size

    yield from pool.map(write, *zip(*((at[0], count) for at, count in _cut(tensor.shape)), strict=True))


def _cut(shape: Sequence[int]) -> Iterator[tuple[tuple[int | slice, ...], int]]:
    """Cut an array into blocks: where each is in it, and how many rows it has."""
    inner = math.prod(shape[1:])
    if len(shape) > 2 and inner > BLOCK:
        for i in range(shape[0]):
            yield from (((i, *at), count) for at, count in _cut(shape[1:]))
        return
    step = max(1, BLOCK // inner)
    for start in range(0, shape[0], step):
        yield (slice(start, start + step),), min(step, shape[0] - start) * math.prod(shape[1:-1])


def alike(one: Stored, other: Stored) -> bool:
    """Whether two tensors hold the same numbers; a block of each is in memory at a time."""
    if one.shape != other.shape:
        return False
    rows, width = math.prod(one.shape[:-1]), math.prod(one.shape[-1:])
    step = max(1, BLOCK // max(1, width))
    return all(
        np.array_equal(one.rows(first, count), other.rows(first, count))
        for first in range(0, rows, step)
        for count in (min(step, rows - first),)
    )
