"""NAME=VALUE, read as the pipeline declares it."""

from __future__ import annotations

from typing import Any

import pytest

from kfp_gpuquota.dsl.pipelines.arguments import arguments_from
from kfp_gpuquota.errors import UsageError

TYPES = {
    "text": "STRING",
    "count": "NUMBER_INTEGER",
    "rate": "NUMBER_DOUBLE",
    "strict": "BOOLEAN",
    "names": "LIST",
    "options": "STRUCT",
}


def _spec(**more: Any) -> dict[str, Any]:
    parameters = {name: {"parameterType": kind, "isOptional": True} for name, kind in TYPES.items()}
    return {"root": {"inputDefinitions": {"parameters": {**parameters, **more}}}}


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("text=3", "3"),
        ("text=a=b", "a=b"),
        ("text=", ""),
        ("count=3", 3),
        ("rate=1e-3", 0.001),
        ("strict=True", True),
        ("strict=false", False),
        ('names=["a", 1]', ["a", 1]),
        ('options={"a": {"b": 1}}', {"a": {"b": 1}}),
    ],
)
def test_a_value_has_the_type_that_the_pipeline_declares(given: str, value: object) -> None:
    (read,) = arguments_from(_spec(), [given]).values()
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("count", "--arg is 'count', but an argument is given as NAME=VALUE"),
        ("count=1.5", "--arg count is '1.5', but the pipeline declares a whole number"),
        ("rate=fast", "--arg rate is 'fast', but the pipeline declares a number"),
        ("strict=1", "--arg strict is '1', but the pipeline declares true or false"),
        ("names={}", """--arg names is '{}', but the pipeline declares a list, as JSON: ["a", 1]"""),
        ("options=a", """--arg options is 'a', but the pipeline declares an object, as JSON: {"a": 1}"""),
        ("speed=1", f"the pipeline takes no parameter 'speed'; it takes: {', '.join(TYPES)}"),
    ],
)
def test_a_mistake_is_one_sentence(given: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        arguments_from(_spec(), [given])
    assert caught.value.message == message


def test_what_is_missing_is_named_before_anything_runs() -> None:
    needed = {"parameterType": "NUMBER_INTEGER"}
    with_default = {**needed, "defaultValue": 0}
    with pytest.raises(UsageError, match=r"^the pipeline needs epochs, depth; add: --arg epochs=VALUE$"):
        arguments_from(_spec(epochs=needed, depth=needed, width=with_default), ["count=1"])


def test_a_pipeline_that_takes_an_artifact_cannot_be_started_with_arguments() -> None:
    spec: dict[str, Any] = {"root": {"inputDefinitions": {"artifacts": {"data": {}}}}}
    with pytest.raises(UsageError, match="takes the artifact 'data'"):
        arguments_from(spec, [])


def test_a_pipeline_without_parameters() -> None:
    assert arguments_from({"root": {}}, []) == {}
    with pytest.raises(UsageError, match="takes no parameter 'x'; it takes: none"):
        arguments_from({"root": {}}, ["x=1"])
