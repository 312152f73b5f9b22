"""Bits per byte against a few lines of Python, and what a run evaluates on."""

import hashlib
import math

import jax
import numpy as np
import pytest

from tests.decoding.models import bigram, uncached_logprobs
from tests.text.documents import windows_of
from transformer_jax.config import DataConfig, MeshConfig, RunConfig
from transformer_jax.sharding import make_mesh
from transformer_jax.text.pipeline import eval_batches
from transformer_jax.training.evaluation import evaluate, make_eval_step
from transformer_jax.training.folder import open_run
from transformer_jax.training.setup import set_up


def test_bits_per_byte_are_those_of_each_document_by_hand():
    """Documents with an accent and without a letter, cut into windows of 7, which begin without memory."""
    model, texts, T = bigram(), ["né à Paris", "", "abcabcabcabc"], 7
    params = model.init(jax.random.key(0))
    windows = windows_of(texts, T)
    found = evaluate(make_eval_step(model), params, eval_batches(windows, 2), windows.num_bytes)
    stream, start = [], []
    for text in texts:
        start.append(len(stream))
        stream += [256, *text.encode()]
    stream.append(256)
    bits = 0.0
    for at in range(len(stream) - 1):
        begin = max([s for s in start if s <= at] + [at // T * T])
        bits -= uncached_logprobs(model, params, stream[begin : at + 1])[-1][stream[at + 1]] / math.log(2)
    assert found.bits_per_byte == pytest.approx(bits / sum(len(text.encode()) for text in texts), rel=1e-5)
    assert found.loss == pytest.approx(bits * math.log(2) / (len(stream) - 1), rel=1e-5)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"document {number} " * 9)
    return folder


def test_no_document_is_both_trained_on_and_evaluated_on(corpus, tmp_path):
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    config = RunConfig(data=DataConfig(paths=(str(corpus),), tokenizer="bytes", seq_len=32, holdout=0.2))
    run = open_run(run_folder, config)
    setup = set_up(run, make_mesh(MeshConfig()))
    sides = [
        bytes(np.where(w.stream == 256, 10, w.stream).tolist()).decode().split("\n")
        for w in (setup.run.text.train, setup.run.text.heldout)
    ]
    train, heldout = ({text for text in side if text} for side in sides)
    assert len(train) + len(heldout) == 40
    assert not train & heldout
    hashes = {text: int(hashlib.sha256(text.encode()).hexdigest(), 16) / 16**64 for text in train | heldout}
    assert heldout == {text for text, place in hashes.items() if place < 0.2}


def test_a_tokenizer_that_loses_text_is_said(corpus, tmp_path):
    import tokenizers
    from tokenizers import models, pre_tokenizers

    lossy = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "document": 1}, unk_token="[UNK]"))
    lossy.pre_tokenizer = pre_tokenizers.Whitespace()
    lossy.add_special_tokens(["</s>"])
    lossy.save(str(tmp_path / "lossy.json"))
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    data = DataConfig(paths=(str(corpus),), tokenizer=str(tmp_path / "lossy.json"), seq_len=32, holdout=0.2)
    with pytest.warns(UserWarning, match=r"does not give back \d+ of the \d+ held-out documents"):
        set_up(open_run(run_folder, RunConfig(data=data)), make_mesh(MeshConfig()))
