"""Documents to batches of packed windows, in an order that depends on nothing but the seed.

All documents stand in one stream, an end-of-text token before each and one after the last, cut into windows of T:

    stream      <eot>  a1  a2 <eot>  b1 <eot>  c1  c2  c3 <eot>
    inputs     |<eot>  a1  a2 <eot>| b1 <eot>  c1  c2| c3           T = 4; the last window is padded
    targets    |  a1   a2 <eot> b1 |<eot> c1   c2  c3|<eot>
    positions  |   0    1   2    0 |  0    0    1   2|  0   -1 -1 -1
    segments   |   1    1   1    2 |  1    2    2   2|  1    0  0  0

So every token is a target once an epoch, the first token of a document is predicted from <eot>, and its end is
predicted as <eot>. A model whose attention stays inside a segment never lets a token see another document.

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
from transformer_jax.text.tokenizer import Tokenizer

_CHARACTERS_AT_ONCE = 1 << 22
"""Text that is tokenized in one call: enough for every core, and little beside the tokens themselves."""


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
    """1 where there is a target, 0 where there is padding."""
    domains: Int32[np.ndarray | Array, "*B T"]
    """Number of the corpus that the document of each input is from; 0 where there is padding."""


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of a stream of documents, each made when it is asked for."""

    stream: Int32[np.ndarray, "tokens"]
    """All documents, an end-of-text token before each and one after the last."""
    starts: Int64[np.ndarray, "documents"]
    """Where in the stream each document's end-of-text token stands."""
    seq_len: int
    """Inputs in a window (T)."""
    num_bytes: int
    """UTF-8 bytes of all documents: what bits per byte are divided by."""
    domains: Int32[np.ndarray, "documents"]
    """Number of the corpus that each document is from."""

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted in one epoch."""
        return len(self.stream) - 1

    def __len__(self) -> int:
        return -(-self.num_targets // self.seq_len)

    def __getitem__(self, index: int) -> Batch:
        """Make one window (T). Takes time in T and the logarithm of the number of documents."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        begin = index * self.seq_len
        end = min(begin + self.seq_len, self.num_targets)
        where = np.arange(begin, end)
        document = np.searchsorted(self.starts, where, side="right") - 1
        return Batch(
            tokens=self._pad(self.stream[begin:end], 0),
            targets=self._pad(self.stream[begin + 1 : end + 1], 0),
            positions=self._pad(where - np.maximum(self.starts[document], begin), -1),
            segment_ids=self._pad(document - document[0] + 1, 0),
            loss_weights=self._pad(np.ones(end - begin), 0).astype(np.float32),
            domains=self._pad(self.domains[document], 0),
        )

    def _pad(self, values: np.ndarray, filler: int) -> Int32[np.ndarray, "T"]:
        padded = np.full(self.seq_len, filler, np.int32)
        padded[: len(values)] = values
        return padded


def make_windows(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    seq_len: int,
    vocab_size: int | None = None,
    domains: Sequence[int] | None = None,
) -> Windows:
    """Tokenize documents and pack them into windows of `seq_len` inputs.

    `domains` are the numbers of the corpora that the documents are from, where there are several. `vocab_size` is the
    model's, when it is not the tokenizer's; a token id outside it is a `UserError`.
    """
    limit = tokenizer.vocab_size if vocab_size is None else vocab_size
    end_of_text = np.array([tokenizer.end_of_text], np.int32)
    pieces, lengths, num_bytes = [], [], 0
    for chunk in _chunks(texts):
        for ids in tokenizer.encode_batch(chunk):
            pieces += [end_of_text, ids]
            lengths.append(1 + len(ids))
        num_bytes += sum(len(text.encode()) for text in chunk)
    if not pieces:
        raise UserError("there is no document to make windows of; expected at least one")
    stream = np.concatenate([*pieces, end_of_text])
    if stream.max() >= limit or stream.min() < 0:
        raise UserError(
            f"the tokenizer gives the token id {stream.max()}, outside the vocabulary of {limit};"
            f" set ModelConfig.vocab_size to at least {tokenizer.vocab_size}, or to null"
        )
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    of_document = np.zeros(len(texts), np.int32) if domains is None else np.array(domains, np.int32)
    return Windows(stream, starts, seq_len, num_bytes, of_document)


def _chunks(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    begin = size = 0
    for i, text in enumerate(texts):
        size += len(text)
        if size >= _CHARACTERS_AT_ONCE or i == len(texts) - 1:
            yield texts[begin : i + 1]
            begin, size = i + 1, 0


def make_batches(
    windows: Windows,
    batch_size: int,
    *,
    seed: int,
    start: int = 0,
    workers: int = 0,
    shard_index: int = 0,
    shard_count: int = 1,
) -> Generator[Batch, None, None]:
    """Draw batches (B T) for training without end, every window once an epoch and each epoch in a new order.

    The whole place in the stream is the number of batches taken: `start=n` goes on as if n batches had been drawn, in
    no time, whatever the number of workers was or is. An epoch's last batch is filled up from the next epoch. Of
    `shard_count` processes that share each batch, number `shard_index` gets its rows: B / shard_count of them, next to
    each other. Close the generator to end the workers.
    """
    rows = _rows_of_shard(batch_size, shard_index, shard_count)
    if start < 0:
        raise UserError(f"batches cannot start at number {start}; expected 0 or more")
    needed = windows.seq_len + 1
    if len(windows.stream) < needed:
        raise UserError(
            f"the training text is {len(windows.stream)} tokens long and one window needs {needed};"
            " give more text, or make DataConfig.seq_len smaller"
        )
    # Grain's own endless repeat is too long for the length of a batched dataset when a batch is one row.
    order = grain.MapDataset.source(windows).seed(seed).shuffle().repeat(2**62 // len(windows))
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
    padding = Batch(
        *(np.full_like(row, -1 if name == "positions" else 0) for name, row in windows[0]._asdict().items())
    )
    for begin in range(0, len(windows), batch_size):
        mine = range(begin + shard_index * rows, begin + (shard_index + 1) * rows)
        yield Batch(*map(np.stack, zip(*(windows[i] if i < len(windows) else padding for i in mine), strict=True)))


def _rows_of_shard(batch_size: int, shard_index: int, shard_count: int) -> int:
    if batch_size % shard_count:
        raise UserError(
            f"DataConfig.batch_size is {batch_size}; expected a multiple of the {shard_count} processes that share it"
        )
    if not 0 <= shard_index < shard_count:
        raise UserError(f"this is process {shard_index} of those that share a batch; expected 0 to {shard_count - 1}")
    return batch_size // shard_count
