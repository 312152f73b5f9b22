"""Conversations to token ids, by the template that a chat model was trained with.

    [{"role": "user", "content": "Hi"}]  ->  "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"  ->  ids

A template is a program in Jinja that came with somebody's weights, so it runs in a sandbox. The control tokens that it
writes become control tokens; what reads like one in a message stays ordinary text, so no message can end its own turn.

This file knows nothing of models or of files.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from transformer_jax.errors import UserError
from transformer_jax.text.tokenizer import CONTROL_MARK, Tokenizer

Message = dict[str, str]
"""A "role", such as system, user or assistant, and the "content"."""

TEXT_MARK = "\ufdd1"
"""Stands before what reads like a control token in a message while the template runs. No character has this code."""


LONGEST_TEXT = 50_000_000
"""Letters; no context is as long."""


def encode_chat(tokenizer: Tokenizer, messages: Any, *, add_generation_prompt: bool = True) -> list[int]:
    """Encode a conversation, a list of messages, up to where the model is to answer.

    What the tokenizer puts before every text stands there once, whether or not the template writes it too. Raises
    `UserError` for a tokenizer without a template, and for messages that are none or that the template refuses.
    """
    return _encode(tokenizer, _marked(tokenizer, messages, add_generation_prompt))


def encode_lesson(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Encode a whole conversation, and tell which of its tokens the assistant has to know how to say.

        <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
        .            . . .  .         .  .            .         . x    x         x

    They are what the template puts between the prompt of a turn and what comes after the turn. Raises `UserError` for a
    template that shows a turn otherwise once the conversation has gone on, as those do that drop earlier thoughts.
    """
    text = _marked(tokenizer, messages, False)
    ids = _encode(tokenizer, text)
    said = [False] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number == 0:
            raise UserError("message 0 is the assistant's; expected a conversation that somebody else begins")
        parts = (_marked(tokenizer, messages[:number], True), _marked(tokenizer, messages[: number + 1], False))
        if not all(text.startswith(part) for part in parts):
            raise UserError(
                f"the chat template does not show message {number} in the whole conversation as it shows it alone:"
                " give it conversations that end with the one answer to be learnt"
            )
        begin, end = (_common(_encode(tokenizer, part), ids) for part in parts)
        said[begin:end] = [True] * (end - begin)
    return ids, said


def _common(some: Sequence[int], others: Sequence[int]) -> int:
    """Count the ids that two texts have in common from their beginning: the border of a part may lie in a token."""
    pairs = zip(some, others, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(some), len(others)))


def _control(tokenizer: Tokenizer) -> re.Pattern[str]:
    names = sorted(tokenizer.control_tokens, key=len, reverse=True)
    return re.compile(f"{TEXT_MARK}?({'|'.join(map(re.escape, names))})")


def _marked(tokenizer: Tokenizer, messages: Any, add_generation_prompt: bool) -> str:
    """Run the template. What reads like a control token in a message stands behind a mark."""
    if tokenizer.chat_template is None:
        raise UserError("the model has no chat template, so it does not know conversations; give it a prompt instead")
    control = _control(tokenizer)
    guarded = [
        {field: control.sub(rf"{TEXT_MARK}\1", value) for field, value in message.items()}
        for message in _check_messages(messages)
    ]
    return render(tokenizer.chat_template, guarded, tokenizer.special_tokens, add_generation_prompt)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode what the template made."""
    control = _control(tokenizer)
    text = control.sub(lambda found: found[0] if found[0] != found[1] else CONTROL_MARK + found[1], text)
    ids = tokenizer.encode_marked(text.replace(TEXT_MARK, ""))
    begins = tuple(ids[: len(tokenizer.prefix)]) == tokenizer.prefix
    return ids if begins else [*tokenizer.prefix, *ids]


def _check_messages(messages: Any) -> list[Message]:
    """Return a conversation as it was given. Raises `UserError` unless it is one."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise UserError(f"messages is {messages!r}; expected a list of objects with a role and a content")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise UserError(f"message {number} is {message!r}; expected an object with a role and a content")
        for field, value in message.items():
            if not isinstance(value, str):
                raise UserError(f"message {number} has the {field} {value!r}; expected text")
            if CONTROL_MARK in value or TEXT_MARK in value:
                raise UserError(f"message {number} has U+FDD0 or U+FDD1 in its {field}, which no text may hold")
    return list(messages)


def render(
    template: str, messages: Sequence[Message], special_tokens: Mapping[str, str], add_generation_prompt: bool
) -> str:
    """Run a template. Raises `UserError` with what it says, or with what is wrong with it."""
    variables = {"messages": messages, "add_generation_prompt": add_generation_prompt, **special_tokens}
    try:
        # Templates ask whether there are any.
        text = _compile(template).render(variables, tools=None, documents=None)
    except Exception as error:  # Whatever a program of somebody else's can raise.
        raise UserError(f"the chat template cannot be used with these messages: {error!s:.500}") from None
    if len(text) > LONGEST_TEXT:
        raise UserError(f"the chat template makes {len(text):,} letters of these messages; expected {LONGEST_TEXT:,}")
    return text


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    """Compile a template, with the tags, filters and functions that published ones find in transformers."""
    from jinja2 import Environment, TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag around what the assistant says, which changes nothing of the text."""

        def __init__(self, environment: Environment) -> None:
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        # Jinja's own escapes what has a meaning in HTML.
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)
