"""``echo2-coordinator check``: the settings as a run would use them, as TOML, or what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from coordinator.config import Settings
from coordinator.model import TINY_QWEN3, prepare_model
from echo2p2p.tasks.registry import check_task

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


def check(settings: Settings) -> str:
    """Return the settings as TOML, every one of them, with what follows from others filled in.

    Nothing is written or started; the file may be given to ``run`` and means the same.

    Raises:
        ConfigError: The task or the model cannot be what the settings say.
    """
    check_task(settings.task.name, settings.task.options)
    if (spec := settings.model.path) != TINY_QWEN3:
        prepare_model(spec, Path(spec).expanduser())  # anything else it only looks at
    rollouts, server = settings.rollouts, settings.server
    resolved = {
        "rollouts": rollouts.model_copy(update={"publication_period": rollouts.kappa}),
        "server": server.model_copy(update={"tls": "on" if server.uses_tls else "off"}),
    }
    return settings_toml(settings.model_copy(update=resolved))


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
