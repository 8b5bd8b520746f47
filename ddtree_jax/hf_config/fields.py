"""Owns typed access to a JSON object, with messages that name file and key."""

import json
import math
from collections.abc import Callable
from pathlib import Path

from ddtree_jax.errors import ConfigError

type Json = bool | int | float | str | list[Json] | dict[str, Json] | None


class Fields:
    """One JSON object of a configuration file.

    Attributes:
      values: The object.
      name: The file and the place in it, for messages.
    """

    def __init__(self, values: dict[str, Json], name: str):
        self.values = values
        self.name = name

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str) -> Json:
        """Returns the value as it stands, or None when it is absent."""
        return self.values.get(key)

    def error(self, message: str) -> ConfigError:
        """Returns a ConfigError that begins with the file and place."""
        return ConfigError(f"{self.name}: {message}")

    def child(self, key: str) -> "Fields":
        """Returns the object under `key`."""
        value = self._require(key, "an object")
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Fields(value, f"{self.name}: {key}")

    def integer(self, key: str, *, minimum: int = 1) -> int:
        """Returns the integer under `key`, which is at least `minimum`."""
        expected = f"an integer ≥ {minimum}"
        value = self._require(key, expected)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._wrong(key, value, expected)
        return value

    def number(self, key: str) -> float:
        """Returns the positive finite number under `key`."""
        expected = "a positive number"
        value = self._require(key, expected)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, expected)
        if not (math.isfinite(value) and value > 0):
            raise self._wrong(key, value, expected)
        return float(value)

    def integers(self, key: str, *, minimum: int = 0) -> tuple[int, ...]:
        """Returns the integers under `key`: one, or a list that is not empty."""
        expected = f"an integer ≥ {minimum} or a list of them"
        value = self._require(key, expected)
        items = value if isinstance(value, list) else [value]
        good: list[int] = []
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or item < minimum:
                raise self._wrong(key, value, expected)
            good.append(item)
        if not good:
            raise self._wrong(key, value, expected)
        return tuple(good)

    def expect(self, key: str, *allowed: Json) -> None:
        """Raises ConfigError when `key` is present with another value."""
        value = self.get(key)
        if key in self and not any(same(value, a) for a in allowed):
            wanted = " or ".join(json.dumps(a) for a in allowed)
            raise self._wrong(key, value, f"{wanted}, the only supported value")

    def _require(self, key: str, expected: str) -> Json:
        if key not in self:
            raise self.error(f"{key} is missing; expected {expected}")
        return self.values[key]

    def _wrong(self, key: str, value: Json, expected: str) -> ConfigError:
        return self.error(f"{key} is {json.dumps(value)}; expected {expected}")


def same(a: Json, b: Json) -> bool:
    """Says whether two JSON values are equal; unlike Python's, true is not 1."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def read_json(path: Path) -> Fields:
    """Returns the JSON object in `path`.

    Raises:
      ConfigError: The file is missing, not JSON, no object, or repeats a key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    try:
        values = json.loads(text, object_pairs_hook=_object(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return Fields(values, str(path))


def config_path(path: Path) -> Path:
    """Returns the config.json that `path` is or holds."""
    return path / "config.json" if path.is_dir() else path


def _object(path: Path) -> Callable[[list[tuple[str, Json]]], dict[str, Json]]:
    def build(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        values = dict(pairs)
        if len(values) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ConfigError(f"{path}: {twice} stands twice in one object")
        return values

    return build
