"""Conversations, against the ids that transformers makes of them with the same tokenizer and template.

fixtures/ is made by make_fixtures.py: ChatML on bytes, [INST] on pieces whose first alone begins with a space, and
control tokens that take the white space behind them away, with a token at the beginning that the template leaves out.
"""

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from transformer_jax.errors import UserError
from transformer_jax.text.chat import CONTROL_MARK, encode_chat
from transformer_jax.text.tokenizer import END_OF_TEXT, byte_tokenizer, read_tokenizer, train_bpe
from transformer_jax.text.tokenizer_files import digest_of, files_of, read_tokenizer_files

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
TOKENIZERS = {name: read_tokenizer_files(FIXTURES / name) for name in NAMES}
OURS = {"bytes": byte_tokenizer(), "bpe": train_bpe(["Hello there, " * 9], 280)}
CHATS = [
    pytest.param(name, chat, id=f"{name}-{chat['name']}-{chat['add_generation_prompt']}")
    for name in NAMES
    for chat in json.loads((FIXTURES / name / "chats.json").read_text())
]
SPOKEN = "{% for message in messages %}{{ message.content }}{% endfor %}"


def say(content, **more):
    return [{"role": "user", "content": content, **more}]


def encode(template, content, **options):
    return encode_chat(replace(byte_tokenizer(), chat_template=template), say(content), **options)


@pytest.mark.parametrize(("name", "chat"), CHATS)
def test_ids_are_those_of_transformers(name, chat):
    tokenizer = TOKENIZERS[name]
    ids = encode_chat(tokenizer, chat["messages"], add_generation_prompt=chat["add_generation_prompt"])
    # Its template leaves out what the tokenizer begins every text with.
    expected = chat["ids"] if name != "turns" else [*tokenizer.prefix, *chat["ids"]]
    if chat["name"] != "injected":
        assert ids == expected
        return
    # transformers breaks the text around what reads like a control token, which can split it otherwise.
    control = set(tokenizer.control_tokens.values())
    assert [i for i in ids if i in control] == [i for i in expected if i in control]
    assert tokenizer.decode_fn(ids) == tokenizer.decode_fn(expected)


@pytest.mark.parametrize("name", [*NAMES, *OURS])
def test_the_files_of_a_tokenizer_give_it_back(name, tmp_path):
    tokenizer = (TOKENIZERS | OURS)[name]
    for file, content in files_of(tokenizer).items():
        (tmp_path / file).write_text(content, encoding="utf-8")
    again = read_tokenizer_files(tmp_path)
    assert again == tokenizer
    assert digest_of(again) == digest_of(tokenizer)
    (tmp_path / "chat_template.jinja").write_text(SPOKEN)
    assert digest_of(read_tokenizer_files(tmp_path)) != digest_of(tokenizer)


def test_older_folders_have_the_template_and_tokens_in_one_file(tmp_path):
    """As several templates by name, and tokens with how they are matched; tokens that are none are left out."""
    (tmp_path / "tokenizer.json").write_text(TOKENIZERS["instruct"].json)
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": SPOKEN}]
    tokens = {"bos_token": {"content": "<s>", "lstrip": False}, "pad_token": "[PAD]"}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": templates, **tokens}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "<unk>"}))
    tokenizer = read_tokenizer_files(tmp_path, end=[2])
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert encode_chat(tokenizer, say("Hello")) == tokenizer.begin("Hello")
    for wrong in ({"bos_token": "<begin>"}, {"eos_token": 7}, {"chat_template": 7}):
        config.write_text(json.dumps(wrong))
        with pytest.raises(UserError, match=next(iter(wrong))):
            read_tokenizer_files(tmp_path, end=[2])


def test_a_token_begins_a_conversation_once_whether_or_not_the_template_writes_it():
    prefix, hello = [256], list(b"Hello")
    assert encode(SPOKEN, "Hello") == prefix + hello
    assert encode("{{ bos_token }}" + SPOKEN, "Hello") == prefix + hello
    assert encode("{{ bos_token }}" + SPOKEN + "{{ eos_token }}", "Hello") == [*prefix, *hello, 256]
    # What the user says is text, also where it reads like the token.
    assert encode(SPOKEN, END_OF_TEXT) == prefix + list(END_OF_TEXT.encode())
    bpe = replace(OURS["bpe"], chat_template="{{ bos_token }}" + SPOKEN)
    assert encode_chat(bpe, say(END_OF_TEXT)) == bpe.begin(END_OF_TEXT)


def test_text_that_is_a_control_token_in_parts_or_marked_stays_text():
    tokenizer = TOKENIZERS["byte_level"]
    end = tokenizer.end_of_text
    inside = "<|im_<|im_end|>end|>"
    assert encode_chat(tokenizer, say(inside)).count(end) == encode_chat(tokenizer, say("x")).count(end) == 1
    for mark in (CONTROL_MARK, "\ufdd1"):
        with pytest.raises(UserError, match="U\\+FDD0 or U\\+FDD1"):
            encode_chat(tokenizer, say(f"{mark}<|im_end|>"))


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "expected a list of objects"),
        ("hi", "expected a list of objects"),
        ({"role": "user"}, "expected a list of objects"),
        ([3], "message 0 is 3"),
        ([{"role": "user"}], "expected an object with a role and a content"),
        (say("a", tool="b"), "expected an object with a role and a content"),
        (say(None), "has the content None; expected text"),
        (say("half \ud800"), "lone surrogate"),
    ],
)
def test_what_is_no_conversation_is_refused(messages, match):
    with pytest.raises(UserError, match=match):
        encode_chat(TOKENIZERS["byte_level"], messages)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('no system, please') }}", "no system, please"),
        ("{% for %}", "the chat template cannot be used"),
        ("{{ messages[7].content }}", "the chat template cannot be used"),
        ("{{ messages.append(3) }}", "unsafe|not safely callable"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_a_template_that_fails_is_a_users_error(template, match):
    with pytest.raises(UserError, match=match):
        encode(template, "a")


def test_a_model_without_a_template_knows_no_conversations():
    with pytest.raises(UserError, match="has no chat template"):
        encode(None, "a")


def test_a_template_may_ask_for_the_date():
    year = encode("{{ strftime_now('%Y') }}", "a")
    assert bytes(year[1:]).decode() == str(datetime.now().year)


def of_json(change):
    """The tokenizer of bytes with another tokenizer.json."""
    tree = json.loads(TOKENIZERS["byte_level"].json)
    change(tree["added_tokens"])
    template = "{% for message in messages %}{{ message.content }}{% endfor %}<|im_end|>|"
    return read_tokenizer(json.dumps(tree), "test", special_tokens={"eos_token": "<|im_end|>"}, chat_template=template)


def test_of_two_control_tokens_that_begin_alike_the_longer_one_is_meant():
    longer = of_json(lambda added: added.append({**added[-1], "id": 302, "content": "<|im_end|>|"}))
    assert encode_chat(longer, say(""))[-1] == 302


def test_an_end_of_text_that_its_file_does_not_mark_as_control_is_no_text_either():
    unmarked = of_json(lambda added: added[-1].update(special=False))
    assert unmarked.end_of_text_name == "<|im_end|>"
    ids = encode_chat(unmarked, say("<|im_end|>"))
    assert ids.count(unmarked.end_of_text) == 1
    assert unmarked.decode(ids) == "<|im_end|>|"


def test_what_ends_a_text_is_said_by_generation_config_and_else_by_config(tmp_path):
    for file, content in files_of(TOKENIZERS["byte_level"]).items():
        (tmp_path / file).write_text(content, encoding="utf-8")
    assert read_tokenizer_files(tmp_path, end=5).stop_ids == (301,)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_tokenizer_files(tmp_path, end=[5, 301]).stop_ids == (5, 301)
    (tmp_path / "generation_config.json").unlink()
    assert read_tokenizer_files(tmp_path).stop_ids == (301,)


def test_a_template_finds_that_there_are_no_tools():
    assert encode("{% if tools is not none or documents is not none %}tools{% endif %}" + SPOKEN, "a") == [256, 97]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda tree: tree["model"]["vocab"].update(b=2**29), "a token has the id 536870912"),
        (lambda tree: tree["added_tokens"][0].update(id=-1), "a token has the id -1"),
        (
            lambda tree: tree.update(
                post_processor={
                    "type": "TemplateProcessing",
                    "single": [
                        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}},
                    ],
                    "pair": [],
                    "special_tokens": {},
                }
            ),
            "is not a tokenizer that",
        ),
    ],
)
def test_a_tokenizer_that_would_take_all_memory_or_the_process_down_is_refused(change, match):
    tree = json.loads(TOKENIZERS["byte_level"].json)
    change(tree)
    with pytest.raises(UserError, match=match):
        read_tokenizer(json.dumps(tree), "test")
