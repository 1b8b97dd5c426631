"""Removes the values of environment variables from exported objects: users pass secrets in them."""

from __future__ import annotations

from typing import Any, Final

REDACTED: Final = "<redacted>"
_MAPPINGS: Final = frozenset({"environment", "env_vars"})
_LISTS: Final = frozenset({"env"})


def redacted(value: Any) -> Any:
    """Return a copy of a JSON value in which the values of environment variables are REDACTED; names stay."""
    if isinstance(value, list):
        return [redacted(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: _field(key, one) for key, one in value.items()}


def is_redacted(value: Any) -> bool:
    """Return whether `redacted` has removed something of it."""
    if isinstance(value, dict):
        return any(map(is_redacted, value.values()))
    return any(map(is_redacted, value)) if isinstance(value, list) else value == REDACTED


def _field(key: str, value: Any) -> Any:
    if key in _MAPPINGS and isinstance(value, dict):
        return dict.fromkeys(value, REDACTED)
    if key in _LISTS and isinstance(value, list):
        return [{**one, "value": REDACTED} if isinstance(one, dict) and "value" in one else one for one in value]
    return redacted(value)
