import json
import random
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from transformer_jax.errors import UserError
from transformer_jax.text.tokenizer import END_OF_TEXT, Tokenizer, byte_tokenizer, load_tokenizer, train_bpe

TEXTS = [
    "def f(x):\n    return x + 1\n" * 20,
    "hello world, hello there " * 10,
    f"the text names {END_OF_TEXT} and {END_OF_TEXT}{END_OF_TEXT} " * 5,
    "été 中文 😀\r\n",
]
BPE = train_bpe(TEXTS, 300)
BYTES = byte_tokenizer()
any_text = st.text() | st.lists(
    st.sampled_from([END_OF_TEXT, "<|", "endoftext", "|>", " ", "\n", "\0", "é", "😀"])
).map("".join)


def save(tokenizer: tokenizers.Tokenizer, folder: Path, **changes: object) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(tokenizer.to_str()) | changes))
    return path


def word_level(vocabulary: dict[str, int], *added: AddedToken) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens(list(added))
    return tokenizer


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
@given(text=any_text)
def test_decode_undoes_encode_and_no_text_becomes_a_control_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_of_text not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@given(texts=st.lists(any_text, max_size=4))
def test_a_batch_is_encoded_as_its_texts_alone(texts: list[str]) -> None:
    for tokenizer in (BYTES, BPE):
        assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [tokenizer.encode(text) for text in texts]


def test_byte_ids_are_the_bytes() -> None:
    assert BYTES.encode("aé\n") == [97, 0xC3, 0xA9, 10]
    assert (BYTES.vocab_size, BYTES.end_of_text) == (257, 256)


@given(ids=st.lists(st.integers(0, 256) | st.integers(0x80, 0xFF)))
def test_the_byte_tokenizer_is_what_its_file_says_to_other_programs(ids: list[int]) -> None:
    theirs = tokenizers.Tokenizer.from_str(BYTES.json)
    assert BYTES.decode(ids) == theirs.decode(ids)
    text = BYTES.decode(ids)
    assert BYTES.begin(text) == theirs.encode(text).ids
    assert theirs.token_to_id(END_OF_TEXT) == BYTES.end_of_text


def test_bytes_need_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().json)
    assert load_tokenizer(tmp_path / "tokenizer.json").encode("a") == [97]


@given(ids=st.lists(st.integers(0, BPE.vocab_size - 1), max_size=20))
def test_decoding_any_ids_of_the_vocabulary_never_raises(ids: list[int]) -> None:
    text = BPE.decode(ids)
    text.encode()
    assert END_OF_TEXT not in BPE.decode([BPE.end_of_text, *BPE.encode("a"), BPE.end_of_text])


def test_broken_utf8_becomes_replacement_characters() -> None:
    assert BYTES.decode([0xE2, 0x82, 32, 0xFF]) == "\ufffd \ufffd"


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
@pytest.mark.parametrize("past_the_end", [False, True])
def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer, past_the_end: bool) -> None:
    bad = tokenizer.vocab_size if past_the_end else -1
    with pytest.raises(UserError, match=rf"token id {bad} .* 0 to {tokenizer.vocab_size - 1}"):
        tokenizer.decode([1, bad])


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
def test_half_of_a_character_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"surrogate .* at character 1"):
        tokenizer.encode("a\ud800b")


def test_training_depends_neither_on_the_order_of_the_texts_nor_on_the_run() -> None:
    shuffled = random.Random(0).sample(TEXTS, len(TEXTS))
    assert train_bpe(shuffled, 300) == BPE


def test_training_gives_the_asked_vocabulary_and_shortens_the_text() -> None:
    assert BPE.vocab_size == 300
    assert len(BPE.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    assert train_bpe(["ab"], 300).vocab_size == 258  # One pair can be merged.
    with pytest.raises(UserError, match="257"):
        train_bpe(TEXTS, 256)


def test_a_foreign_file_keeps_its_ids_but_neither_truncates_nor_pads_nor_adds(tmp_path: Path) -> None:
    theirs = word_level({"a": 0, "b": 5, "[UNK]": 7}, AddedToken("</s>", special=True))
    theirs.post_processor = processors.TemplateProcessing(single="</s> $A </s>", special_tokens=[("</s>", 3)])
    theirs.enable_truncation(2)
    theirs.enable_padding(length=9, pad_id=7)
    ours = load_tokenizer(save(theirs, tmp_path))
    assert ours.encode("a b a b a") == [0, 5, 0, 5, 0]
    # Ids may have holes: 1 to 4 are 3, the added token, and nothing.
    assert (ours.vocab_size, ours.end_of_text) == (8, 3)
    assert [ours.decode([i]) for i in range(8)] == ["a", "", "", "", "", "b", "", "[UNK]"]
    (tmp_path / "again.json").write_text(ours.json, encoding="utf-8")
    assert load_tokenizer(tmp_path / "again.json") == ours


def test_literal_control_text_stays_text_even_in_a_file_that_does_not_protect_it(tmp_path: Path) -> None:
    unmarked = word_level({"a": 0, "[UNK]": 1}, AddedToken("<eos>", special=False))
    ours = load_tokenizer(save(unmarked, tmp_path))
    assert ours.end_of_text not in ours.encode("a <eos> a<eos>")
    assert ours.decode([0, ours.end_of_text, 0]) == "a a"

    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -3.0), *((letter, -4.0) for letter in "ab</s>")]
    word_of_the_model = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    word_of_the_model.pre_tokenizer, word_of_the_model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    word_of_the_model.add_special_tokens(["</s>"])
    ours = load_tokenizer(save(word_of_the_model, tmp_path))
    assert ours.end_of_text == 1
    assert 1 not in ours.encode("a</s>b\0</s>")
    assert ours.decode(ours.encode("ab")) == "ab"


def test_the_literal_text_of_every_control_token_stays_text(tmp_path: Path) -> None:
    added = [AddedToken(name, special=True) for name in ("</s>", "<|im_start|>")]
    ours = load_tokenizer(save(word_level({"a": 0, "[UNK]": 1}, *added), tmp_path))
    assert ours.encode("a <|im_start|> </s>") == [0, 1, 1]


def test_text_that_only_end_of_text_could_stand_for_is_refused(tmp_path: Path) -> None:
    theirs = tokenizers.Tokenizer(models.WordLevel({"a": 0, "[SEP]": 1}, "[SEP]"))
    theirs.add_special_tokens(["[SEP]"])
    ours = load_tokenizer(save(theirs, tmp_path))
    with pytest.raises(UserError, match=r"ordinary text to its end-of-text token \[SEP\]"):
        ours.encode("unknown")


def test_the_first_well_known_name_ends_the_text(tmp_path: Path) -> None:
    theirs = word_level(
        {"a": 0, "[UNK]": 1}, *(AddedToken(name, special=True) for name in ("<|im_end|>", "</s>", "<pad>"))
    )
    ours = load_tokenizer(save(theirs, tmp_path))
    assert ours.end_of_text == theirs.token_to_id("</s>")


def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    without_end = save(word_level({"a": 0, "[UNK]": 1}, AddedToken("<pad>", special=True)), tmp_path)
    with pytest.raises(UserError, match=r"no end-of-text token; expected one of <\|endoftext\|>.*found <pad>"):
        load_tokenizer(without_end)
    path = tmp_path / "bad.json"
    for content, message in [
        (b"", "not JSON"),
        (b"[1, 2]", 'no "model"'),
        (b'{"a": 1}', 'no "model"'),
        (b'{"model": {"type": "Nothing"}}', "cannot|not a tokenizer"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "not JSON"),
    ]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=message) as caught:
            load_tokenizer(path)
        assert str(path) in str(caught.value)
    with pytest.raises(UserError, match=r"cannot read .*missing\.json"):
        load_tokenizer(tmp_path / "missing.json")
    with pytest.raises(UserError, match="is a folder"):
        load_tokenizer(tmp_path)


def test_what_follows_other_tokens_keeps_its_space(tmp_path: Path) -> None:
    """A Metaspace decoder drops the space of the first token that it sees, and only there may it."""
    theirs = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁def": 0, "▁return": 1, "▁": 2}, unk_token="▁"))
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    theirs.decoder = tokenizers.decoders.Metaspace()
    theirs.add_special_tokens(["</s>"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    assert ours.decode([1]) == "return"
    assert ours.decode_after([0], [1]) == " return"
    assert ours.decode_after([], [1]) == "return"
    assert ours.decode([0]) + ours.decode_after([0], [1, 0]) == ours.decode([0, 1, 0])
