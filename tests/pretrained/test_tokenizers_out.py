"""A tokenizer with all that belongs to it, out with a model and in again: as a folder, and as a GGUF file."""

import dataclasses
from pathlib import Path

import jax
import pytest

from transformer_jax.architecture import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import build
from transformer_jax.pretrained.convert import convert
from transformer_jax.pretrained.gguf import load_gguf
from transformer_jax.pretrained.gguf_file import open_gguf
from transformer_jax.pretrained.huggingface import load_folder, read_json
from transformer_jax.text.chat import encode_chat
from transformer_jax.text.tokenizer_files import read_tokenizer_files

FIXTURES = Path(__file__).parent.parent / "text" / "fixtures"
CONFIG = ModelConfig(vocab_size=420, num_layers=1, d_model=32, d_ff=32, num_heads=2, max_seq_len=64, dtype="float32")
PARAMS = build(CONFIG).init(jax.random.key(0))
SAID = [{"role": "user", "content": "What is <|im_end|>\n<s>?"}]


@pytest.mark.parametrize("name", ["byte_level", "instruct", "turns"])
def test_a_folder_gives_back_the_whole_tokenizer(name, tmp_path):
    tokenizer = read_tokenizer_files(FIXTURES / name)
    convert(tmp_path / "out", CONFIG, PARAMS, tokenizer, "float32")
    assert load_folder(tmp_path / "out").tokenizer == tokenizer
    ids = {"eos_token_id": tokenizer.end_of_text}
    if name != "byte_level":
        ids["bos_token_id"] = tokenizer.control_tokens["<s>"]
    for file in ("config.json", "generation_config.json"):
        assert read_json(tmp_path / "out" / file).items() >= ids.items()


def test_a_gguf_file_gives_back_ids_template_and_what_ends_a_text(tmp_path):
    bare = read_tokenizer_files(FIXTURES / "byte_level")
    start = bare.control_tokens["<|im_start|>"]
    tokenizer = dataclasses.replace(bare, stop_ids=(bare.end_of_text, start, 7))
    convert(tmp_path / "out.gguf", CONFIG, PARAMS, tokenizer, "float32")
    again = load_gguf(tmp_path / "out.gguf").tokenizer
    assert again is not None
    assert again.stop_ids == tokenizer.stop_ids
    assert again.special_tokens == tokenizer.special_tokens
    assert again.chat_template == tokenizer.chat_template
    assert encode_chat(again, SAID) == encode_chat(tokenizer, SAID)
    settings = open_gguf(tmp_path / "out.gguf").settings
    names = ("eos", "eot", "eom")
    assert [settings[f"tokenizer.ggml.{name}_token_id"] for name in names] == [bare.end_of_text, start, 7]


def test_what_a_gguf_file_cannot_say_is_refused(tmp_path):
    bare = read_tokenizer_files(FIXTURES / "byte_level")
    many = dataclasses.replace(bare, stop_ids=(bare.end_of_text, 5, 6, 7))
    with pytest.raises(UserError, match="4 tokens end a text; a GGUF file can name 3"):
        convert(tmp_path / "out.gguf", CONFIG, PARAMS, many, "float32")
    for name, match in (("instruct", "no name for the tokenizer's way"), ("turns", "cannot strip what stands beside")):
        with pytest.raises(UserError, match=match):
            convert(tmp_path / "out.gguf", CONFIG, PARAMS, read_tokenizer_files(FIXTURES / name), "float32")
    assert not list(tmp_path.iterdir())
