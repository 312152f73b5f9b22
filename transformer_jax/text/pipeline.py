"""Documents to batches of packed windows, in an order that depends on nothing but the seed.

All documents stand in one stream, an end-of-text token before each and one after the last, cut into windows of T:

    stream      <eot>  a1  a2 <eot>  b1 <eot>  c1  c2  c3 <eot>
    inputs     |<eot>  a1  a2 <eot>| b1 <eot>  c1  c2| c3           T = 4; the last window is padded
    targets    |  a1   a2 <eot> b1 |<eot> c1   c2  c3|<eot>
    positions  |   0    1   2    0 |  0    0    1   2|  0   -1 -1 -1
    segments   |   1    1   1    2 |  1    2    2   2|  1    0  0  0

So every token is a target once an epoch, the first token of a document is predicted from <eot>, and its end is
predicted as <eot>. A model whose attention stays inside a segment never lets a token see another document. A
conversation is never cut where it fits into a window: where it does not fit into the rest of one, it begins the next.

This file knows nothing of files, models or devices: its arrays are NumPy's, and a process can ask for its own rows of
each batch.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grain
import numpy as np
from absl import flags
from jaxtyping import Array, Float32, Int32, Int64

from transformer_jax.errors import UserError
from transformer_jax.text.tokens import Tokens


class Batch(NamedTuple):
    """Packed windows, in one batch (B T) or alone (T).

    A pytree: NumPy arrays as the pipeline makes them, `jax.Array`s once they are on devices.
    """

    tokens: Int32[np.ndarray | Array, "*B T"]
    """Inputs; 0 where there is padding."""
    targets: Int32[np.ndarray | Array, "*B T"]
    """The token after each input; 0 where there is padding."""
    positions: Int32[np.ndarray | Array, "*B T"]
    """Place counted from the start of the document or the window, whichever is later; -1 where there is padding."""
    segment_ids: Int32[np.ndarray | Array, "*B T"]
    """Number of the document within its window, from 1; 0 where there is padding."""
    loss_weights: Float32[np.ndarray | Array, "*B T"]
    """How much the target counts: usually 1; 0 where there is padding, or what is not to be learnt."""
    domains: Int32[np.ndarray | Array, "*B T"]
    """Number of the corpus that the document of each input is from; 0 where there is padding."""
    prefix_lengths: Int32[np.ndarray | Array, "*B T"] | None = None
    """Inputs of the document that each of its inputs may see, whatever lies later; None: there is no such prefix."""


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of a stream of documents, each made when it is asked for."""

    tokens: Tokens
    seq_len: int
    """Inputs in a window (T)."""
    bounds: Int64[np.ndarray, "windows 2"] | None
    """Where the inputs of each window begin and end; None: every T."""
    weights: Float32[np.ndarray, "documents"] | None
    """How much each document counts; None: all alike."""

    @property
    def num_targets(self) -> int:
        """Tokens that follow another one."""
        return len(self.tokens.stream) - 1

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of what is to be learnt: what bits per byte are divided by."""
        return self.tokens.num_bytes

    def __len__(self) -> int:
        return -(-self.num_targets // self.seq_len) if self.bounds is None else len(self.bounds)

    def __getitem__(self, index: int) -> Batch:
        """Make one window (T). Takes time in T and the logarithm of the number of documents."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        begin, end = self._bounds(index)
        tokens = self.tokens
        where = np.arange(begin, end)
        document = np.searchsorted(tokens.starts, where, side="right") - 1
        weights = np.ones(end - begin, np.float32) if self.weights is None else self.weights[document]
        if tokens.counted is not None:
            weights = weights * tokens.counted[begin + 1 : end + 1]
        return Batch(
            tokens=self._pad(tokens.stream[begin:end], 0),
            targets=self._pad(tokens.stream[begin + 1 : end + 1], 0),
            positions=self._pad(where - np.maximum(tokens.starts[document], begin), -1),
            segment_ids=self._pad(document - document[0] + 1, 0),
            loss_weights=self._pad(weights, 0),
            domains=self._pad(tokens.domains[document], 0),
        )

    def _bounds(self, index: int) -> tuple[int, int]:
        if self.bounds is not None:
            begin, end = self.bounds[index].tolist()
            return begin, end
        begin = index * self.seq_len
        return begin, min(begin + self.seq_len, self.num_targets)

    def _pad(self, values: np.ndarray, filler: int) -> Int32[np.ndarray, "T"] | Float32[np.ndarray, "T"]:
        padded = np.full(self.seq_len, filler, np.float32 if values.dtype == np.float32 else np.int32)
        padded[: len(values)] = values
        return padded


def make_windows(tokens: Tokens, seq_len: int, domain_weights: Sequence[float] = (), weighted: bool = False) -> Windows:
    """Cut a stream into windows of `seq_len` inputs.

    With `weighted` the targets of a document count as much as it does, and the `domain_weights` times as much.
    """
    weights = None
    if weighted and (domain_weights or (tokens.weights != 1).any()):
        weights = np.asarray(tokens.weights)
        if domain_weights:
            weights = weights * np.array(domain_weights, np.float32)[tokens.domains]
    return Windows(tokens, seq_len, _whole_conversations(tokens, seq_len) if tokens.chats.any() else None, weights)


def cut_conversations(windows: Windows) -> int:
    """Count the conversations that are longer than a window, of which the end is left out."""
    tokens = windows.tokens
    return int((np.diff(tokens.starts, append=windows.num_targets)[tokens.chats] > windows.seq_len).sum())


def _whole_conversations(tokens: Tokens, seq_len: int) -> Int64[np.ndarray, "windows 2"]:
    """Place documents into windows so that no conversation is cut that fits into one."""
    bounds: list[tuple[int, int]] = []
    begin = 0
    end_of_stream = len(tokens.stream) - 1
    ends = np.append(tokens.starts[1:], end_of_stream)
    for start, end, chat in zip(tokens.starts.tolist(), ends.tolist(), tokens.chats.tolist(), strict=True):
        if not chat:
            while end - begin >= seq_len:
                bounds.append((begin, begin + seq_len))
                begin += seq_len
        elif end - begin > seq_len:
            bounds += [(begin, start)] if start > begin else []
            begin = start
            if end - start > seq_len:
                bounds.append((start, start + seq_len))
                begin = end
    bounds += [(begin, end_of_stream)] if end_of_stream > begin else []
    return np.array(bounds, np.int64).reshape(-1, 2)


def make_batches(
    windows: Windows | Sequence[Windows],
    batch_size: int,
    *,
    seed: int,
    start: int = 0,
    workers: int = 0,
    shard_index: int = 0,
    shard_count: int = 1,
    mixture: Sequence[float] = (),
) -> Generator[Batch, None, None]:
    """Draw batches (B T) for training without end, every window once an epoch and each epoch in a new order.

    The whole place in the stream is the number of batches taken: `start=n` goes on as if n batches had been drawn, in
    no time, whatever the number of workers was or is. An epoch's last batch is filled up from the next epoch. Of
    `shard_count` processes that share each batch, number `shard_index` gets its rows: B / shard_count of them, next to
    each other. Of several corpora each has epochs of its own, and is drawn from as often as its number in the
    `mixture` says. Close the generator to end the workers.
    """
    rows = _rows_of_shard(batch_size, shard_index, shard_count)
    if start < 0:
        raise UserError(f"batches cannot start at number {start}; expected 0 or more")
    corpora = [windows] if isinstance(windows, Windows) else list(windows)
    longest = max((len(one.tokens.stream) for one in corpora), default=0)
    needed = corpora[0].seq_len + 1
    if longest < needed:
        raise UserError(
            f"the training text is {longest} tokens long and one window needs {needed};"
            " give more text, or make DataConfig.seq_len smaller"
        )
    orders = [_endless(one, seed, number) for number, one in enumerate(corpora)]
    order = orders[0] if len(orders) == 1 else grain.MapDataset.mix(orders, list(mixture))
    # A worker gets every n-th whole batch, so batches are the same for any number of them.
    batches = order.batch(rows)[start * shard_count + shard_index :: shard_count]
    dataset = batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    if workers:
        # Grain's worker processes read absl flags, which only an absl program has parsed.
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
        dataset = dataset.mp_prefetch(options, worker_init_fn=_live_with_parent)
    return _draw(dataset)


def _endless(windows: Windows, seed: int, corpus: int) -> grain.MapDataset:
    """All windows in an order of their own in every epoch."""
    if corpus:
        # Not the seed plus a number, which would be another run's seed.
        seed = int(np.random.SeedSequence(seed, spawn_key=(corpus,)).generate_state(1)[0])
    # Grain's own endless repeat is too long for the length of a batched dataset when a batch is one row.
    return grain.MapDataset.source(windows).seed(seed).shuffle().repeat(2**62 // len(windows))


def _live_with_parent(worker_index: int, worker_count: int) -> None:
    """Tie the life of this worker process to the training process."""
    del worker_index, worker_count
    # Ctrl-C reaches every process of the terminal; it is the training process that decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:

        def end_with_parent() -> None:
            parent.join()
            os._exit(1)

        # A parent that is killed cannot end its workers.
        threading.Thread(target=end_with_parent, daemon=True).start()


def _draw(dataset: grain.IterDataset[Batch]) -> Generator[Batch, None, None]:
    with contextlib.closing(iter(dataset)) as iterator:
        yield from iterator


def eval_batches(windows: Windows, batch_size: int, *, shard_index: int = 0, shard_count: int = 1) -> Iterator[Batch]:
    """Go through all windows once, in order, in batches (B T); the last is filled up with rows that are all padding."""
    rows = _rows_of_shard(batch_size, shard_index, shard_count)
    padding = Batch(*(np.zeros_like(row) for row in windows[0] if row is not None))
    padding.positions[:] = -1
    for begin in range(0, len(windows), batch_size):
        mine = range(begin + shard_index * rows, begin + (shard_index + 1) * rows)
        batch = [windows[i] if i < len(windows) else padding for i in mine]
        yield Batch(*(np.stack(parts) for parts in zip(*batch, strict=True) if parts[0] is not None))


def _rows_of_shard(batch_size: int, shard_index: int, shard_count: int) -> int:
    if batch_size % shard_count:
        raise UserError(
            f"DataConfig.batch_size is {batch_size}; expected a multiple of the {shard_count} processes that share it"
        )
    if not 0 <= shard_index < shard_count:
        raise UserError(f"this is process {shard_index} of those that share a batch; expected 0 to {shard_count - 1}")
    return batch_size // shard_count
