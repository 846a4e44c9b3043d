"""Conversations formatted as text with the tokenizer's chat template, as in transformers."""

from __future__ import annotations

import functools
import json
from typing import Any, ClassVar, TypeGuard

from conf.values import UserError
from data.tokenizer_base import Tokenizer
from data.tokenizer_file import JSONTokenizer

Messages = list[dict[str, Any]]


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """As transformers has it, but for the time of day, by which texts would differ from run to run."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}, around what the model is to say: its text."""

        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), True), lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template)


def render(tokenizer: JSONTokenizer, messages: Messages, ask: bool = False) -> str:
    """The text of a conversation; ask: up to where the next answer begins. UserError where the template does
    not take it."""
    try:
        special = {"bos_token": tokenizer.bos or "", "eos_token": tokenizer.eos or ""}
        return _compiled(tokenizer.chat_template).render(
            messages=messages, add_generation_prompt=ask, tools=None, documents=None, **special
        )
    except Exception as error:  # whatever a template can do wrong
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"the tokenizer's chat template does not take a conversation: {said[:200]}") from None


def has_template(tokenizer: Tokenizer) -> TypeGuard[JSONTokenizer]:
    return isinstance(tokenizer, JSONTokenizer) and tokenizer.chat_template is not None


def encode_question(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a conversation that a user begins with `text`, up to where the answer is to begin."""
    if not has_template(tokenizer):
        raise UserError(
            "chat=true needs a model whose tokenizer has a chat template: a run with data=chat, or a "
            "pretrained model for chats. Leave chat out to have the prompt continued as it is."
        )
    text = render(tokenizer, [{"role": "user", "content": text}], ask=True)
    return tokenizer.encode_special(text)[0].tolist()
