"""Settings from a TOML file and the command line, through pydantic-settings; one line on error.

The file comes first, ``--section.key value`` on top. Unknown keys are refused with their path.
A ``ConfigError`` is what comes out; `echo2p2p.net.program` prints it and exits with 2.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from echo2p2p.errors import ConfigError

SettingsT = TypeVar("SettingsT", bound=BaseModel)


class _Values(PydanticBaseSettingsSource):
    """Values that are already at hand, as a source."""

    def __init__(self, settings_cls: type[BaseSettings], values: Mapping[str, Any]) -> None:
        super().__init__(settings_cls)
        self._given = dict(values)

    def get_field_value(self, field: object, field_name: str) -> tuple[Any, str, bool]:
        """Return one value."""
        del field
        return self._given.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        """Return all values."""
        return self._given


def load_settings(
    kind: type[SettingsT],
    argv: Sequence[str],
    *,
    program: str,
    presets: Mapping[str, Path],
    values: Mapping[str, Any] | None = None,
    notes: str = "",
) -> SettingsT:
    """Return settings of ``kind``.

    Args:
        kind: A frozen model whose sections forbid extra keys.
        argv: What follows the command's name; ``--config FILE`` may be among it.
        program: For ``--help``.
        presets: Shipped files that ``--config @name`` stands for.
        values: Defaults of this call, under the file.
        notes: More for ``--help``, of options that the caller has taken out of ``argv``.

    Raises:
        ConfigError: With the path of the key.
        SystemExit: 0 after ``--help``, 2 after an unknown option, as argparse does.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    found, rest = finder.parse_known_args(list(argv))
    merged = _merged(dict(values or {}), _read(found.config, presets))

    class Command(kind, BaseSettings):  # type: ignore[valid-type,misc]
        model_config = SettingsConfigDict(
            extra="forbid",
            frozen=True,
            use_attribute_docstrings=True,
            cli_prog_name=program,
            cli_hide_none_type=True,
            cli_avoid_json=True,
        )

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            """Command line over file; the environment has no say."""
            del init_settings, env_settings, dotenv_settings, file_secret_settings
            line: CliSettingsSource[Any] = CliSettingsSource(settings_cls, cli_parse_args=rest)
            return line, _Values(settings_cls, merged)

    Command.__doc__ = f"{kind.__doc__ or ''}\n\n--config FILE reads a TOML file first. {notes}"
    try:
        built = Command()
        return kind.model_validate(built.model_dump())
    except ValidationError as error:
        raise _one_line(error) from error
    except SettingsError as error:
        path = "".join(re.findall('field "(.*?)"', str(error))[:1])
        detail = "is a section: write the setting behind it, as --help shows them"
        raise ConfigError(path, detail) from error


def _read(config: str | None, presets: Mapping[str, Path]) -> dict[str, Any]:
    if config is None:
        return {}
    if config.startswith("@"):
        if config not in presets:
            known = ", ".join(sorted(presets)) or "none"
            raise ConfigError("config", f"no preset {config!r}; there is: {known}")
        path = presets[config]
    else:
        path = Path(config)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config", f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", f"{path} is not TOML: {error}") from error


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(under)
    for key, value in over.items():
        old = result.get(key)
        result[key] = (
            _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return result


def _one_line(error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"]) or "settings"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "there is no such setting; see --help"
    elif path == "settings" and ": " not in message:
        path, _, message = message.partition(" ")
    return ConfigError(path, message)
