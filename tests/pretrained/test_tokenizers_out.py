"""A tokenizer with all that belongs to it, out with a model and in again: as a folder, and as a GGUF file."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from transformer_jax.architecture import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import build
from transformer_jax.pretrained.convert import convert
from transformer_jax.pretrained.gguf import load_gguf
from transformer_jax.pretrained.gguf_file import open_gguf
from transformer_jax.pretrained.gguf_tokenizer import read_gguf_tokenizer
from transformer_jax.pretrained.gguf_tokenizer_export import describe_tokenizer
from transformer_jax.pretrained.huggingface import load_folder, read_json
from transformer_jax.pretrained.source import load_published
from transformer_jax.text.chat import encode_chat
from transformer_jax.text.tokenizer import Tokenizer, byte_tokenizer, read_tokenizer, train_bpe
from transformer_jax.text.tokenizer_files import read_tokenizer_files

FIXTURES = Path(__file__).parent.parent / "text" / "fixtures"
CONFIG = ModelConfig(vocab_size=420, num_layers=1, d_model=32, d_ff=32, num_heads=2, max_seq_len=64, dtype="float32")
PARAMS = build(CONFIG).init(jax.random.key(0))
TOKENIZER = read_tokenizer_files(FIXTURES / "byte_level")
SAID = [{"role": "user", "content": "What is <|im_end|>\n<s>?"}]


def word_pieces(*, lowercase: bool = True, words: tuple[str, ...] = ()) -> Tokenizer:
    """A tokenizer like BERT's."""
    control = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = ["un", "##able", "##a", "##b", "a", "caf", "##e", "##é", "Caf", ",", "你", "[", "]", *words]
    vocabulary = {word: i for i, word in enumerate([*control, *pieces])}
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    around = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    made.add_special_tokens(control)
    special = {f"{name[1:-1].lower()}_token": name for name in control}
    return read_tokenizer(made.to_str(), "word pieces", special_tokens=special)


def like_roberta() -> Tokenizer:
    """A byte-level BPE with what stands around a text of RoBERTa's, and a mask that takes the spaces before it."""
    made = tokenizers.Tokenizer.from_str(train_bpe(["the theory of the thing, don't"] * 3, 280).json)
    mask = tokenizers.AddedToken("<mask>", lstrip=True, normalized=False)
    made.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    made.add_special_tokens([mask])
    ids = made.get_vocab()
    made.post_processor = processors.RobertaProcessing(
        ("</s>", ids["</s>"]), ("<s>", ids["<s>"]), add_prefix_space=False
    )
    names = {"bos": "<s>", "cls": "<s>", "pad": "<pad>", "sep": "</s>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
    return read_tokenizer(made.to_str(), "like RoBERTa's", special_tokens={f"{k}_token": v for k, v in names.items()})


@pytest.mark.parametrize("make", [word_pieces, lambda: word_pieces(lowercase=False), like_roberta])
def test_the_tokenizer_of_an_encoder_goes_through_a_gguf_file(make, tmp_path):
    tokenizer = make()
    convert(tmp_path / "out.gguf", CONFIG, PARAMS, tokenizer, "float32")
    again = load_gguf(tmp_path / "out.gguf").tokenizer
    assert again is not None
    for name in ("prefix", "suffix", "stop_ids", "special_tokens", "control_tokens"):
        assert getattr(again, name) == getattr(tokenizer, name), name
    assert len(tokenizer.prefix) == len(tokenizer.suffix) == 1
    for text in ("unable Café,a ab 你你 [MASK] zz", "a b\tthe  theory don't", ""):
        assert again.encode(text) == tokenizer.encode(text)
    found, wanted = (
        {token["content"]: token["lstrip"] for token in json.loads(x.json)["added_tokens"]} for x in (again, tokenizer)
    )
    assert found == wanted


def test_word_pieces_are_written_as_llama_cpp_spells_them(tmp_path):
    convert(tmp_path / "out.gguf", CONFIG, PARAMS, word_pieces(), "float32")
    settings = open_gguf(tmp_path / "out.gguf").settings
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁un", "able", "a", "b", "▁a", "▁caf", "e"]
    assert settings["tokenizer.ggml.tokens"][:12] == words
    assert settings["tokenizer.ggml.model"] == "bert"


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
    bare = TOKENIZER
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
    many = dataclasses.replace(TOKENIZER, stop_ids=(TOKENIZER.end_of_text, 5, 6, 7))
    with pytest.raises(UserError, match="4 tokens end a text; a GGUF file can name 3"):
        convert(tmp_path / "out.gguf", CONFIG, PARAMS, many, "float32")
    for name, match in (("instruct", "no name for the tokenizer's way"), ("turns", "cannot strip what stands beside")):
        with pytest.raises(UserError, match=match):
            convert(tmp_path / "out.gguf", CONFIG, PARAMS, read_tokenizer_files(FIXTURES / name), "float32")
    with pytest.raises(UserError, match="cannot tell from those that go on with a word"):
        convert(tmp_path / "out.gguf", CONFIG, PARAMS, word_pieces(words=("##[x]",)), "float32")
    tree = json.loads(word_pieces().json)
    for part, other, match in (
        ("pre_tokenizer", {"type": "Whitespace"}, "splits text into words as BERT does alone"),
        ("normalizer", {"type": "NFC"}, "splits text into words as BERT does alone"),
        ("post_processor", None, "one token before a text and one behind it"),
        ("model", {"type": "Unigram", "unk_id": 0, "vocab": [["[SEP]", 0.0], ["a", -1.0]]}, "is a Unigram"),
    ):
        changed = read_tokenizer(json.dumps(tree | {part: other}), "changed", special_tokens={"eos_token": "[SEP]"})
        with pytest.raises(UserError, match=match):
            convert(tmp_path / "out.gguf", CONFIG, PARAMS, changed, "float32")
    added = {**tree["added_tokens"][0], "id": 18, "content": "foo", "special": False}
    for changed, match in (
        ({"added_tokens": [*tree["added_tokens"], added]}, "does not look for the added token 'foo'"),
        ({"model": tree["model"] | {"max_input_chars_per_word": 3}}, "a word of more than 3 letters is unknown"),
    ):
        odd = read_tokenizer(json.dumps(tree | changed), "changed", special_tokens={"eos_token": "[SEP]"})
        with pytest.raises(UserError, match=match):
            convert(tmp_path / "new" / "out.gguf", CONFIG, PARAMS, odd, "float32")
    two = dataclasses.replace(TOKENIZER, suffix=(TOKENIZER.end_of_text, 5))
    with pytest.raises(UserError, match="puts more around a text than a GGUF file can say"):
        convert(tmp_path / "out.gguf", CONFIG, PARAMS, two, "float32")
    assert not list(tmp_path.iterdir())


def test_pieces_begin_with_a_space_unless_a_gguf_file_says_otherwise(tmp_path):
    words = ["<unk>", "<s>", "</s>", "a", "\u2581", "\u2581a"]
    settings = {"model": "llama", "tokens": words, "token_type": [2, 3, 3, 1, 1, 1], "scores": [0.0, 0, 0, -2, -3, -1]}
    settings |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    named = {f"tokenizer.ggml.{name}": value for name, value in settings.items()}
    assert read_gguf_tokenizer(named, tmp_path).begin("a") == [1, 5]
    assert read_gguf_tokenizer(named | {"tokenizer.ggml.add_space_prefix": False}, tmp_path).begin("a") == [1, 3]
    with pytest.raises(UserError, match="the token 'a' stands twice"):
        read_gguf_tokenizer(named | {"tokenizer.ggml.tokens": [*words[:5], "a"]}, tmp_path)


def settings_of(tokenizer, **changes):
    """The settings of a file for a tokenizer, some of them changed, or left out where they are None."""
    described = describe_tokenizer(tokenizer, tokenizer.vocab_size)
    described |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return {name: value for name, value in described.items() if value is not None}


def test_what_stands_around_a_text_is_what_llama_cpp_puts_there(tmp_path):
    """Llama 3 begins with a token unless it is told not to; BERT's first token goes by either of two names."""
    bytes_alone = byte_tokenizer()
    for split, added, expected in (
        ("llama-bpe", None, (256,)),
        ("llama-bpe", False, ()),
        ("gpt-2", None, ()),
        ("gpt-2", True, (256,)),
    ):
        settings = settings_of(bytes_alone, pre=split, add_bos_token=added, add_eos_token=True)
        found = read_gguf_tokenizer(settings, tmp_path)
        assert (found.prefix, found.suffix) == (expected, (256,))
    bert = word_pieces()
    for changes, first in (({"cls_token_id": None}, 2), ({"bos_token_id": None}, 2), ({"bos_token_id": 4}, 4)):
        found = read_gguf_tokenizer(settings_of(bert, **changes), tmp_path)
        assert (found.prefix, found.suffix) == ((first,), (3,))
        assert found.special_tokens["cls_token"] == ("[CLS]" if first == 2 else "[MASK]")
    for changes, match in (
        ({"cls_token_id": None, "bos_token_id": None}, "cls_token_id is missing"),
        ({"bos_token_id": 99}, "bos_token_id is 99; there are"),
        ({"seperator_token_id": -1}, "seperator_token_id is -1; there are"),
    ):
        with pytest.raises(UserError, match=match):
            read_gguf_tokenizer(settings_of(bert, **changes), tmp_path)


def test_an_id_without_a_word_gets_one_that_no_other_has():
    tokenizer = word_pieces(words=("[unused19]",))
    words = describe_tokenizer(tokenizer, 24)["tokenizer.ggml.tokens"]
    assert len(set(words)) == 24
    assert (words[18], words[19], words[20]) == ("[unused19]", "[[unused19]]", "[unused20]")


def test_the_files_of_a_folder_are_readable_alike(tmp_path):
    convert(tmp_path / "out", CONFIG, PARAMS, TOKENIZER, "float32")
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_rows_that_do_not_divide_into_blocks_are_stored_in_float16(tmp_path):
    c = dataclasses.replace(CONFIG, d_ff=24)
    convert(tmp_path / "out.gguf", c, build(c).init(jax.random.key(0)), TOKENIZER, "q8_0")
    tensors = open_gguf(tmp_path / "out.gguf").tensors
    assert tensors["blk.0.ffn_down.weight"].kind.name == "F16"
    assert tensors["blk.0.ffn_up.weight"].kind.name == "Q8_0"
    load_gguf(tmp_path / "out.gguf")


def test_a_path_that_is_not_there_is_no_name_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no model at 'models/mine'"):
        load_published("models/mine")
