"""How a published encoder makes one vector of a text: by the files that sentence-transformers keeps beside it."""

import dataclasses
import json
import shutil
from pathlib import Path

import gguf
import jax
import pytest

from transformer_jax.errors import UserError
from transformer_jax.model.transformer import build
from transformer_jax.pretrained.convert import convert
from transformer_jax.pretrained.gguf import load_gguf
from transformer_jax.pretrained.gguf_file import open_gguf
from transformer_jax.pretrained.huggingface import load_folder
from transformer_jax.text.tokenizer import byte_tokenizer
from transformer_jax.training.open_model import pooling_of_model

BERT = Path(__file__).parent / "fixtures" / "bert-bare"


def folder(tmp_path, modes=None, modules=()):
    made = tmp_path / "made"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(BERT, made)
    if modes is not None:
        (made / "1_Pooling").mkdir()
        (made / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, **modes}))
    types = [{"idx": i, "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(modules)]
    (made / "modules.json").write_text(json.dumps(types))
    return made


def test_the_folder_says_how(tmp_path):
    assert pooling_of_model(folder(tmp_path)) == "mean"
    first = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    assert pooling_of_model(folder(tmp_path, first, ["Transformer", "Pooling", "Normalize"])) == "first"
    assert pooling_of_model(folder(tmp_path, {"pooling_mode_mean_tokens": True})) == "mean"


@pytest.mark.parametrize("pooling", ["first", pytest.param("mean", marks=pytest.mark.slow)])
def test_a_model_written_says_it_too(tmp_path, pooling):
    loaded = load_folder(BERT)
    c = dataclasses.replace(loaded.config, vocab_size=257)
    params = build(c).init(jax.random.key(0))
    for name in ("out", "out.gguf"):
        convert(tmp_path / name, c, params, byte_tokenizer(), "float32", pooling=pooling)
        assert pooling_of_model(tmp_path / name) == pooling
    assert open_gguf(tmp_path / "out.gguf").settings["bert.pooling_type"] == {"mean": 1, "first": 2}[pooling]
    again = load_gguf(tmp_path / "out.gguf").config
    assert dataclasses.replace(c, dropout=0.0, attention_dropout=0.0) == again
    convert(tmp_path / "silent", c, params, byte_tokenizer(), "float32")
    assert not (tmp_path / "silent" / "modules.json").exists()


@pytest.mark.parametrize("number", [3, [1, 2], "mean"], ids=str)
def test_a_file_that_takes_another_token_is_refused(tmp_path, number):
    path = tmp_path / "last.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    add = {int: writer.add_uint32, list: writer.add_array, str: writer.add_string}[type(number)]
    add("bert.pooling_type", number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"last.gguf: bert.pooling_type is .*; expected 1, the mean, or 2"):
        pooling_of_model(path)


@pytest.mark.parametrize(
    ("modes", "modules", "match"),
    [
        ({"pooling_mode_max_tokens": True}, (), "it asks for pooling_mode_max_tokens"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, (), "expected one of"),
        ({"pooling_mode_mean_tokens": False}, (), "it asks for no pooling"),
        (None, ("Transformer", "Pooling", "Dense"), "pass through Dense"),
    ],
)
def test_another_way_is_refused(tmp_path, modes, modules, match):
    with pytest.raises(UserError, match=match):
        pooling_of_model(folder(tmp_path, modes, modules))
