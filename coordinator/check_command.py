"""``echo2-coordinator check``: the settings as a run would use them, as TOML, or what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from coordinator.config import Settings
from coordinator.fetched import MODELS
from coordinator.memory import memory_lines
from coordinator.model import TINY_QWEN3, model_folder, prepare_model
from echo2p2p.net.tokenizer import read_json
from echo2p2p.tasks.registry import check_task

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


def check(settings: Settings) -> str:
    """Return the settings as TOML, every one of them, with what follows from others filled in.

    Nothing is written or started; the file may be given to ``run`` and means the same.

    Raises:
        ConfigError: The task or the model cannot be what the settings say.
    """
    check_task(settings.task.name, settings.task.options)
    notes = [f"# {note}\n" for note in _notes(settings)]
    rollouts, server = settings.rollouts, settings.server
    resolved = {
        "rollouts": rollouts.model_copy(update={"publication_period": rollouts.kappa}),
        "server": server.model_copy(update={"tls": "on" if server.uses_tls else "off"}),
    }
    space = "\n" if notes else ""
    return "".join(notes) + space + settings_toml(settings.model_copy(update=resolved))


def _notes(settings: Settings) -> Iterator[str]:
    """Yield what a reader should know beside the settings: how much memory, what to fetch first.

    Raises:
        ConfigError: There is no such model, and no command that would bring it.
    """
    spec, rollouts = settings.model.path, settings.rollouts
    if spec == TINY_QWEN3:
        return
    folder = model_folder(spec, Path(settings.run.folder).expanduser())
    config = read_json(folder / "config.json")
    if not config and spec in MODELS:
        yield f"model.path: {spec} is not in {folder} yet; run: echo2-coordinator fetch {spec}"
        config = dict(MODELS[spec].shape)
    else:
        prepare_model(spec, folder)  # anything that is not made on the spot it only looks at
    yield from memory_lines(
        config,
        micro_batch=settings.learner.micro_batch,
        tokens_max=rollouts.tokens_max,
        samples=rollouts.samples_per_prompt,
    )


def settings_toml(settings: BaseModel) -> str:
    """Return settings as TOML; those that are not set (TOML has no nil) as comments."""
    return "\n".join(_section("", settings)).lstrip() + "\n"


def _section(path: str, section: BaseModel) -> Iterator[str]:
    inner: list[tuple[str, BaseModel]] = []
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, BaseModel):
            inner.append((key, value))
        elif value is None:
            yield f"# {key} is not set"
        else:
            yield f"{_key(key)} = {_value(value)}"
    for key, child in inner:
        full = f"{path}.{_key(key)}" if path else _key(key)
        yield from ("", f"[{full}]", *_section(full, child))


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _value(key)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)  # shortest that reads back the same; "inf" and "nan" are TOML too
    if isinstance(value, str):
        # JSON escapes what TOML's basic strings must escape, in the same way, but for DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(str(key))} = {_value(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    raise AssertionError(f"no setting is a {type(value).__name__}")
