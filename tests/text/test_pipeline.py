import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.documents import windows_of
from transformer_jax.errors import UserError
from transformer_jax.text import tokens
from transformer_jax.text.pipeline import Batch, Windows, eval_batches, make_batches, make_windows
from transformer_jax.text.tokenizer import byte_tokenizer
from transformer_jax.text.tokens import Tokens

BYTES = byte_tokenizer()
EOT = BYTES.end_of_text
some_texts = st.lists(st.text("abé", min_size=1, max_size=9), min_size=1, max_size=6)


def numbered_windows(count: int, seq_len: int = 4) -> Windows:
    """Windows of one document whose first token is the number of the window."""
    numbers = "".join(f"{chr(number)}{'-' * (seq_len - 1)}" for number in range(1, count + 1))
    stream = np.frombuffer((numbers + "-").encode(), np.uint8).astype(np.int32)
    one = np.zeros(1, np.int32)
    weights, chats = one.astype(np.float32), one.astype(bool)
    return make_windows(Tokens(stream, np.array([0]), one, weights, chats, None, len(numbers)), seq_len)


def numbers_of(batches: Iterable[Batch]) -> list[list[int]]:
    return [batch.tokens[:, 0].tolist() for batch in batches]


def joined(shards: Sequence[Batch]) -> Batch:
    return Batch(*map(np.concatenate, zip(*(shard[:6] for shard in shards), strict=True)))


def take(count: int, batches: Iterable[Batch]) -> list[Batch]:
    return list(itertools.islice(batches, count))


def assert_equal(some: Sequence[Batch], others: Sequence[Batch]) -> None:
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.prefix_lengths is other.prefix_lengths is None
        for name, ours, theirs in zip(Batch._fields, one[:6], other[:6], strict=False):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


def pack_slowly(texts: Sequence[str], seq_len: int) -> list[list[tuple[int, int, int, int, float, int]]]:
    """(token, target, position, segment, weight, domain) of every window, counted token by token."""
    stream = [(token, number) for number, text in enumerate(texts) for token in [EOT, *text.encode()]] + [(EOT, -1)]
    windows = []
    while len(stream) > 1:
        window, position, segment, document = [], 0, 0, None
        for (token, number), (target, _) in itertools.islice(itertools.pairwise(stream), seq_len):
            position, segment, document = (
                (position + 1, segment, number) if number == document else (0, segment + 1, number)
            )
            window.append((token, target, position, segment, 1.0, number % 3))
        stream = stream[seq_len:]
        windows.append(window + [(0, 0, -1, 0, 0.0, 0)] * (seq_len - len(window)))
    return windows


@given(texts=some_texts, seq_len=st.integers(1, 7))
def test_windows_are_packed_as_counted_token_by_token(texts: list[str], seq_len: int) -> None:
    windows = windows_of(texts, seq_len, domains=[number % 3 for number in range(len(texts))])
    packed = [
        list(zip(*(row.tolist() for row in window[:6]), strict=True))
        for window in (windows[i] for i in range(len(windows)))
    ]
    assert packed == pack_slowly(texts, seq_len)


@given(texts=some_texts, seq_len=st.integers(1, 7))
def test_an_epoch_has_every_token_as_target_exactly_once(texts: list[str], seq_len: int) -> None:
    windows = windows_of(texts, seq_len)
    batches = list(eval_batches(windows, 2))
    targets = np.concatenate([batch.targets[batch.loss_weights == 1] for batch in batches])
    tokens = np.concatenate([batch.tokens[batch.loss_weights == 1] for batch in batches])
    stream = [EOT] + [token for text in texts for token in [*text.encode(), EOT]]
    assert targets.tolist() == stream[1:]
    assert tokens.tolist() == stream[:-1]
    assert windows.num_targets == len(stream) - 1 == sum(batch.loss_weights.sum() for batch in batches)
    assert windows.num_bytes == sum(len(text.encode()) for text in texts)


def test_the_picture_of_the_module() -> None:
    windows = windows_of(["12", "3", "456"], 4)
    (batch,) = eval_batches(windows, 3)
    a, b, c, d, e, f = b"123456"
    assert batch.tokens.tolist() == [[EOT, a, b, EOT], [c, EOT, d, e], [f, 0, 0, 0]]
    assert batch.targets.tolist() == [[a, b, EOT, c], [EOT, d, e, f], [EOT, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0], [0, 0, 1, 2], [0, -1, -1, -1]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2], [1, 2, 2, 2], [1, 0, 0, 0]]
    assert batch.loss_weights.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert [array.dtype for array in batch[:6]] == [np.int32] * 4 + [np.float32, np.int32]


def test_each_input_is_of_the_domain_of_its_document() -> None:
    windows = windows_of(["12", "3", "456"], 4, domains=[2, 0, 1])
    (batch,) = eval_batches(windows, 3)
    assert batch.domains.tolist() == [[2, 2, 2, 0], [0, 1, 1, 1], [1, 0, 0, 0]]


def test_padding_is_told_by_segments_and_weights_whatever_ids_the_text_has() -> None:
    windows = windows_of(["\0\0\0\0"], 4)
    window = windows[0]
    assert window.tokens.tolist() == [EOT, 0, 0, 0]
    assert window.segment_ids.tolist() == [1, 1, 1, 1]
    assert window.loss_weights.tolist() == [1, 1, 1, 1]


def test_tokenizing_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["a" * length for length in (5, 1, 30, 2, 2, 9)]
    whole = windows_of(texts, 4)
    for size in (1, 6, 10, 49):
        monkeypatch.setattr(tokens, "_CHARACTERS_AT_ONCE", size)
        pieces = windows_of(texts, 4)
        np.testing.assert_array_equal(pieces.tokens.stream, whole.tokens.stream)
        np.testing.assert_array_equal(pieces.tokens.starts, whole.tokens.starts)
        assert pieces.num_bytes == whole.num_bytes == 49


def test_a_window_outside_is_an_error() -> None:
    windows = numbered_windows(3)
    for outside in (-1, 3):
        with pytest.raises(IndexError):
            windows[outside]


@pytest.mark.parametrize(("count", "batch_size"), [(12, 4), (10, 4), (3, 8), (1, 2)])
def test_every_epoch_has_every_window_once(count: int, batch_size: int) -> None:
    epochs = 4
    batches = take(-(-epochs * count // batch_size), make_batches(numbered_windows(count), batch_size, seed=1))
    drawn = np.concatenate(numbers_of(batches))
    for epoch in range(epochs):
        assert sorted(drawn[epoch * count : (epoch + 1) * count]) == list(range(1, count + 1))


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        batches = take(5 * (epoch + 1), make_batches(numbered_windows(20), 4, seed=seed))
        return tuple(np.concatenate(numbers_of(batches))[20 * epoch :].tolist())

    # Were an epoch's order drawn from seed + epoch, one run's second epoch would be the next seed's first.
    orders = [order(seed, epoch) for seed in (0, 1, 2) for epoch in (0, 1, 2)] + [tuple(range(1, 21))]
    assert len(set(orders)) == len(orders)
    assert order(1, 2) == order(1, 2)


def test_the_order_of_a_seed_is_the_one_that_runs_were_trained_with() -> None:
    drawn = numbers_of(take(3, make_batches(numbered_windows(8), 4, seed=7)))
    golden = [[8, 2, 1, 4], [5, 3, 6, 7], [7, 1, 5, 3]]
    assert drawn == golden, "another order than in earlier versions: old runs no longer resume exactly"


def test_resuming_at_every_step_gives_the_uninterrupted_rest() -> None:
    windows = windows_of([f"document {i} " * (i % 3 + 1) for i in range(9)], 8)
    batch_size = 4
    steps = 5 * len(windows) // (2 * batch_size)
    assert len(windows) % batch_size, "a batch has to reach over the end of an epoch"
    uninterrupted = take(steps, make_batches(windows, batch_size, seed=3))
    for start in range(steps + 1):
        rest = take(steps - start, make_batches(windows, batch_size, seed=3, start=start))
        assert_equal(rest, uninterrupted[start:])


def test_a_distant_start_costs_nothing() -> None:
    (batch,) = take(1, make_batches(numbered_windows(10), 4, seed=3, start=10**9))
    # 4 * 10**9 windows are whole epochs of 10, so the batch begins one.
    assert len(set(batch.tokens[:, 0].tolist())) == 4


@pytest.mark.parametrize("shard_count", [1, 2, 3])
def test_shards_together_are_the_whole_stream(shard_count: int) -> None:
    windows = numbered_windows(10)
    whole = take(7, make_batches(windows, 6, seed=5, start=2))
    shards = [
        take(7, make_batches(windows, 6, seed=5, start=2, shard_index=index, shard_count=shard_count))
        for index in range(shard_count)
    ]
    assert_equal([joined(rows) for rows in zip(*shards, strict=True)], whole)
    held_out = [
        list(eval_batches(windows, 6, shard_index=index, shard_count=shard_count)) for index in range(shard_count)
    ]
    together = [joined(rows) for rows in zip(*held_out, strict=True)]
    assert_equal(together, list(eval_batches(windows, 6)))


@pytest.mark.parametrize(("workers", "start"), [(2, 3), pytest.param(1, 0, marks=pytest.mark.slow)])
def test_workers_change_nothing_and_may_change_on_resume(workers: int, start: int) -> None:
    windows = windows_of([f"document {i} " * (i % 3 + 1) for i in range(9)], 8)
    alone = take(9, make_batches(windows, 4, seed=3))
    with contextlib.closing(make_batches(windows, 4, seed=3, workers=workers, start=start)) as batches:
        assert_equal(take(9 - start, batches), alone[start:])


@pytest.mark.slow
def test_workers_outlive_ctrl_c_and_end_when_the_training_process_is_killed() -> None:
    code = (
        "import os, signal\n"
        "from tests.text.documents import windows_of\n"
        "from transformer_jax.text.pipeline import make_batches\n"
        "if __name__ == '__main__':\n"
        "    batches = make_batches(windows_of(['text'] * 9, 4), 2, seed=0, workers=1)\n"
        "    next(batches)\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "    os.killpg(0, signal.SIGINT)\n"
        "    print(len([next(batches) for _ in range(20)]), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The call returns when the last process that holds its output is gone.
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, timeout=60, check=False, start_new_session=True)
    assert (result.returncode, result.stdout.strip()) == (-9, b"20"), result.stderr


def test_evaluation_is_in_order_once_and_filled_with_padding() -> None:
    batches = list(eval_batches(numbered_windows(5), 3))
    assert numbers_of(batches) == [[1, 2, 3], [4, 5, 0]]
    empty = Batch(*(array[2] for array in batches[1][:6]))
    assert empty.positions.tolist() == [-1] * 4
    assert not any(array.any() for array in (empty.tokens, empty.targets, empty.segment_ids, empty.loss_weights))


def test_text_shorter_than_a_window_is_refused_for_training_and_can_be_evaluated_on() -> None:
    fits = windows_of(["abc"], 4)  # <eot> a b c <eot>
    assert take(1, make_batches(fits, 1, seed=0))[0].loss_weights.all()
    short = windows_of(["abc"], 5)
    with pytest.raises(UserError, match=r"5 tokens long and one window needs 6.*DataConfig\.seq_len"):
        make_batches(short, 1, seed=0)
    assert sum(batch.loss_weights.sum() for batch in eval_batches(short, 1)) == 4


def test_no_documents_bad_shards_and_bad_starts_are_refused() -> None:
    with pytest.raises(UserError, match="no document"):
        windows_of([], 4)
    windows = numbered_windows(5)
    with pytest.raises(UserError, match=r"batch_size is 5; expected a multiple of the 2"):
        make_batches(windows, 5, seed=0, shard_count=2)
    with pytest.raises(UserError, match="process 2"):
        make_batches(windows, 4, seed=0, shard_index=2, shard_count=2)
    with pytest.raises(UserError, match="-1"):
        make_batches(windows, 4, seed=0, start=-1)
