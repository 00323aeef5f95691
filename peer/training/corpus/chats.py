"""Conversations to text: a chat template writes them as the model reads them.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

The assistant's words alone are learnt; all else is *given*: read, and no target. An answer is what
the template adds to all before it, written up to where the assistant begins. It is tokenised apart
from that, as in generating. So templates need no marks of their own, and end an answer themselves.

Some templates write earlier answers otherwise once a later one is there (without its reasoning).
The text then begins again for the later one, so each answer is learnt after what it will follow.

The template stands in the run spec, in Jinja, as transformers reads it (its sandbox renders it).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from .tokenizer import BYTES, load_tokenizer, model_file

CHAT: Final = "chat"
MESSAGES: Final = "messages"
ASSISTANT: Final = "assistant"
TEMPLATE_FILE: Final = "chat_template.jinja"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TOKENS: Final = ("bos_token", "eos_token")
EXPECTED: Final = (
    'a list of messages, {"role": "user", "content": "..."}, with one at least of the role'
    f" '{ASSISTANT}'"
)
PLAIN: Final = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + (eos_token or '') + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""For tokenizers without one: a line with the role, the words, and the token that ends a text."""

Messages = list[dict[str, Any]]
TRIED: Final[Messages] = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": "!"}]
Passage = tuple[str, bool]
"""A text, and whether it is given."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    jinja: str

    def passages(self, messages: Any) -> list[Passage]:
        """Raises ValueError where these are no messages, or the template refuses them."""
        if not _are_messages(messages):
            raise ValueError(f"is not {EXPECTED}")
        try:
            return list(self._passages(messages))
        except Exception as error:  # what a template can raise is open
            raise ValueError(f"is refused by the chat template: {error}") from error

    def _passages(self, messages: Messages) -> Iterator[Passage]:
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._write(messages[:number], asks=True)
            after = self._write(messages[: number + 1])
            if not after.startswith(before) or after == before:
                raise ValueError(
                    "what it writes with the answer does not begin with what it writes to ask for"
                    " it, so the answer cannot be told from the rest: set data.chat_template"
                )
            yield before.removeprefix(done), True
            yield after.removeprefix(before), False
            done = after

    def _write(self, messages: Messages, *, asks: bool = False) -> str:
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template
        (text,), _ = render([messages], chat_template=self.jinja, add_generation_prompt=asks)
        return str(text)


def _are_messages(found: Any) -> bool:
    return (
        isinstance(found, list)
        and all(
            isinstance(each, dict)
            and isinstance(each.get("role"), str)
            and isinstance(each.get("content"), str)
            for each in found
        )
        and any(each["role"] == ASSISTANT for each in found)
    )


def template_fault(jinja: str) -> str | None:
    """Why a template cannot be used; None where it writes a first conversation."""
    try:
        ChatTemplate(jinja).passages(TRIED)
    except ValueError as error:
        return f"a question and its answer {error}"
    return None


def end_of_answer(jinja: str) -> str:
    """The text that a template writes after an answer, such as `<|im_end|>`."""
    *_, (text, _) = ChatTemplate(jinja).passages(TRIED)
    return text.removeprefix(TRIED[-1]["content"]).strip()


# --- the template of a tokenizer ------------------------------------------------------------------
def template_of(tokenizer: str, checkpoint: str | None = None) -> str:
    """The chat template of a tokenizer or checkpoint, with its special tokens; else PLAIN.

    Raises ValueError: the tokenizer cannot be read.
    """
    for source in (tokenizer, checkpoint):
        if source in (None, BYTES):
            continue
        told = _tokenizer_config(source)
        if (found := _own_template(source, told)) is not None:
            return _with_tokens(found, {name: _spelt(told.get(name)) for name in TOKENS})
    return _with_tokens(PLAIN, {"eos_token": load_tokenizer(tokenizer).end_of_text})


def _with_tokens(jinja: str, tokens: Mapping[str, str | None]) -> str:
    sets = (
        f"{{%- set {name} = {json.dumps(token)} -%}}"
        for name, token in tokens.items()
        if token is not None and name in jinja
    )
    return "".join(sets) + jinja


def _own_template(source: str, told: Mapping[str, Any]) -> str | None:
    try:
        return model_file(source, TEMPLATE_FILE).decode()
    except (ValueError, OSError):
        found = told.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _tokenizer_config(source: str) -> Mapping[str, Any]:
    try:
        told = json.loads(model_file(source, TOKENIZER_CONFIG))
    except (ValueError, OSError):
        return {}
    return told if isinstance(told, dict) else {}


def _spelt(token: Any) -> str | None:
    """A special token, which is written as text or as a table with `content`."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
