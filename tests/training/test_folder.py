"""A run's folder on its own: what it records, and what it refuses to go on with."""

import dataclasses
import json

import pytest

from transformer_jax.architecture import ModelConfig
from transformer_jax.config import DataConfig, RunConfig
from transformer_jax.errors import UserError
from transformer_jax.text.tokenizer import train_bpe
from transformer_jax.training.folder import locked, open_run, open_trained, record_run

SMALL = ModelConfig(num_layers=1, d_model=16, d_ff=16, num_heads=2, max_seq_len=32)


@pytest.fixture
def corpus(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * 9)
    return tmp_path


def config(corpus, **data):
    return RunConfig(SMALL, DataConfig(**({"paths": (str(corpus),), "bpe_vocab_size": 280, "seq_len": 32} | data)))


def test_a_run_below_its_own_corpus_is_no_part_of_it(corpus):
    """Twice: before anything is recorded, and then among what a run leaves."""
    folder = corpus / "runs" / "a"
    with locked(folder):
        first = open_run(folder, config(corpus))
        record_run(folder, first)
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
        for paths in ((str(corpus),), (f"{corpus}/**/*",)):
            again = open_run(folder, config(corpus, paths=paths))
            assert again.survey.fingerprint == first.survey.fingerprint


def test_the_same_text_at_another_path_is_the_same_run(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    record_run(folder, open_run(folder, config(corpus)))
    moved = tmp_path_factory.mktemp("moved") / "text"
    corpus.rename(moved)
    open_run(folder, config(moved))
    (moved / "0.txt").write_text("another text")
    with pytest.raises(UserError, match="the corpus has changed"):
        open_run(folder, config(moved))


def test_a_tokenizer_that_has_changed_is_refused(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    record_run(folder, open_run(folder, config(corpus)))
    tree = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tree["model"]["vocab"]
    vocabulary["1"], vocabulary["7"] = vocabulary["7"], vocabulary["1"]
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"tokenizer.json, or a file beside it, has changed"):
        open_run(folder, config(corpus))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"cannot read the tokenizer"):
        open_run(folder, config(corpus))


def test_the_tokenizer_of_another_model_keeps_its_template_and_what_ends_a_text(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    bpe = train_bpe(["document 1 2 3 " * 9], 270)
    theirs = dataclasses.replace(bpe, chat_template="{{ messages }}\r\n", stop_ids=(bpe.end_of_text, 5))
    record_run(folder, open_run(folder, config(corpus), lambda: theirs))
    assert open_run(folder, config(corpus)).tokenizer == theirs


def test_a_template_that_a_killed_first_try_left_is_no_part_of_the_run(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    first = open_run(folder, config(corpus))
    record_run(folder, first)
    assert open_run(folder, config(corpus)).tokenizer == first.tokenizer


def test_other_settings_are_refused_and_shown(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    record_run(folder, open_run(folder, config(corpus)))
    with pytest.raises(UserError, match=r"data.holdout: 0.03 | 0.5"):
        open_run(folder, dataclasses.replace(config(corpus), data=config(corpus, holdout=0.5).data))


def test_a_name_that_is_no_text_is_refused(tmp_path):
    with pytest.raises(UserError, match="not UTF-8 text"), locked(tmp_path / "r\udcff"):
        pass


def test_what_is_no_run_cannot_be_opened(tmp_path):
    with pytest.raises(UserError, match="holds no model, neither a run nor a published one"):
        open_trained(tmp_path)
