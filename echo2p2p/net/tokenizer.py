"""The tokenizer of a model's folder, without torch.

Task workers, the learner's warm start and a peer that answers people must tokenise, but
`transformers.AutoTokenizer` imports torch. So the folder's ``tokenizer.json`` is read with
`tokenizers`, and its chat template is rendered with a sandboxed `jinja2`, as `transformers` does.
Both are imported when first needed: the simulation does without.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from echo2p2p.errors import ConfigError
from echo2p2p.tasks.base import Prompt

MODEL_FILES: Final = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""What a tokenizer is made of; nothing else of the folder is given out."""

REPLACEMENT: Final = "\ufffd"
"""Stands for a token id that the tokenizer does not know (a model's vocabulary is often larger)."""


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in ``file``, empty if there is no such file.

    Raises:
        ConfigError: It is not a JSON object.
    """
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("model.path", f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError("model.path", f"{file} holds no JSON object")
    return value


class FolderTokenizer:
    """The tokenizer of a Hugging Face folder.

    Raises:
        ConfigError: The folder lacks a file, or names no token that ends an answer.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError("model.path", f"{folder} has no tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises Exception itself
            raise ConfigError("model.path", f"{file} is no tokenizer: {error}") from error
        self._settings = read_json(folder / "tokenizer_config.json")
        config = read_json(folder / "config.json")
        text_config = {**config, **config.get("text_config", {})}
        self.vocab_size = int(text_config.get("vocab_size", self._tokenizer.get_vocab_size()))
        self.positions_max: int | None = text_config.get("max_position_embeddings")
        self.stop_ids = self._find_stop_ids(read_json(folder / "generation_config.json"), config)
        if not self.stop_ids:
            raise ConfigError("model.path", f"{folder} names no end-of-sequence token")
        self._template = self._find_template(folder)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt.

        Plain text gets the special tokens that the tokenizer adds (a BOS); messages go through
        the chat template, which writes its own.

        Raises:
            ConfigError: Messages, but the model has no chat template.
        """
        if prompt.text is not None:
            return list(self._tokenizer.encode(prompt.text).ids)
        messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
        text = self._render(messages)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_answer(self, text: str) -> list[int]:
        """Return the token ids of a model's answer, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer, special tokens spelt out.

        Nothing is skipped: an answer with a stray special or unknown token must not read like
        one without.
        """
        parts: list[str] = []
        known: list[int] = []
        for token in tokens:
            if self._tokenizer.id_to_token(int(token)) is None:
                parts += [self._decode_known(known), REPLACEMENT]
                known = []
            else:
                known.append(int(token))
        return "".join([*parts, self._decode_known(known)])

    def _decode_known(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False)) if tokens else ""

    def _token(self, key: str) -> str:
        value = self._settings.get(key)
        return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")

    def _find_stop_ids(
        self, generation: Mapping[str, Any], config: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Return what ends an answer: as generation (else the model) is configured, then ours.

        A chat model's end of turn is often the tokenizer's EOS and not the base model's.
        """
        found = generation.get("eos_token_id", config.get("eos_token_id"))
        ids = list(found) if isinstance(found, list) else [] if found is None else [found]
        ids.append(self._tokenizer.token_to_id(self._token("eos_token")))
        return tuple(dict.fromkeys(int(token) for token in ids if token is not None))

    def _find_template(self, folder: Path) -> str | None:
        file = folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self._settings.get("chat_template")
        if isinstance(template, list):
            template = {t["name"]: t["template"] for t in template}.get("default")
        return template if isinstance(template, str) else None

    def _render(self, messages: list[dict[str, str]]) -> str:
        if self._template is None:
            raise ConfigError("model.path", "the task speaks in messages; no chat template here")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            return environment.from_string(self._template).render(
                messages=messages,
                add_generation_prompt=True,
                bos_token=self._token("bos_token"),
                eos_token=self._token("eos_token"),
            )
        except TemplateError as error:
            raise ConfigError("model.path", f"its chat template fails: {error}") from error


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(form)
