"""Parses a pipeline's arguments from the command line, NAME=VALUE, by the types that the pipeline declares. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.errors import InvalidFieldError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Json = dict[str, Any]


def arguments_from(spec: Json, given: Sequence[str]) -> Json:
    """Return the values by parameter of a compiled pipeline. Raises UsageError for unknown or missing parameters."""
    declared: Json = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    values = {}
    for pair in given:
        name, equals, text = pair.partition("=")
        if not equals:
            raise InvalidFieldError("--arg", pair, "an argument is given as NAME=VALUE")
        if name not in declared:
            raise UsageError(f"the pipeline takes no parameter {name!r}; it takes: {', '.join(declared) or 'none'}")
        values[name] = _value(name, text, declared[name]["parameterType"])
    _check_complete(spec, declared, values)
    return values


def _check_complete(spec: Json, declared: Json, values: Json) -> None:
    optional = {name for name, one in declared.items() if "defaultValue" in one or one.get("isOptional")}
    if missing := [name for name in declared if name not in values and name not in optional]:
        raise UsageError(f"the pipeline needs {', '.join(missing)}; add: --arg {missing[0]}=VALUE")
    artifacts: Json = spec["root"].get("inputDefinitions", {}).get("artifacts", {})
    if needed := [name for name, one in artifacts.items() if not one.get("isOptional")]:
        raise UsageError(f"the pipeline takes the artifact {needed[0]!r}, which cannot be given as an argument")


def _value(name: str, text: str, kind: str) -> object:
    if kind not in _READERS:
        return text
    read, what = _READERS[kind]
    try:
        return read(text)
    except (ValueError, KeyError):
        raise InvalidFieldError(f"--arg {name}", text, f"the pipeline declares {what}") from None


def _list(text: str) -> object:
    return _json(text, list)


def _dict(text: str) -> object:
    return _json(text, dict)


def _json(text: str, kind: type) -> object:
    value = json.loads(text)
    if not isinstance(value, kind):
        raise ValueError(text)  # noqa: TRY004  # for the caller it is a wrong value
    return value


_READERS: Final[dict[str, tuple[Callable[[str], object], str]]] = {
    "NUMBER_INTEGER": (int, "a whole number"),
    "NUMBER_DOUBLE": (float, "a number"),
    "BOOLEAN": (lambda text: {"true": True, "false": False}[text.lower()], "true or false"),
    "LIST": (_list, 'a list, as JSON: ["a", 1]'),
    "STRUCT": (_dict, 'an object, as JSON: {"a": 1}'),
}
