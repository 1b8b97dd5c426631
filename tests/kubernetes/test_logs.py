"""The controller's log: each line is an object with the id of its plan."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kfp_gpuquota.cluster.kubernetes.client.process.logging_setup import (
    JsonFormatter,
    TextFormatter,
    because_of,
    cause,
    fields,
)
from tests.kubernetes.controlled import Controlled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tools.devcluster import DevCluster


def record(message: str, *arguments: object, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("a.b", logging.INFO, "x.py", 1, message, arguments, more.get("exc_info"))
    made.__dict__.update(fields(**more.get("extra", {})))
    return made


def test_a_line_is_an_object_whatever_is_in_it() -> None:
    with because_of("plan-1"):
        line = JsonFormatter().format(record("two\n%s", "lines", extra={"pod": "team/p", "odd": object}))
    found = json.loads(line)
    assert "\n" not in line
    assert (found["message"], found["cause"], found["pod"], found["level"]) == (
        "two\nlines",
        "plan-1",
        "team/p",
        "info",
    )
    assert "cause" not in json.loads(JsonFormatter().format(record("x")))


def test_a_traceback_is_a_field() -> None:
    try:
        int("no")
    except ValueError:
        found = json.loads(JsonFormatter().format(record("failed", exc_info=sys.exc_info())))
    assert "ValueError: invalid" in found["error"]


def test_people_see_the_cause_too() -> None:
    with because_of("plan-1"):
        assert TextFormatter().format(record("done")).endswith("INFO a.b: done [plan-1]")
    assert TextFormatter().format(record("done")).endswith("INFO a.b: done")


def test_what_is_started_later_keeps_its_cause() -> None:
    async def run() -> list[str]:
        seen: list[str] = []
        done = asyncio.Event()

        def note() -> None:
            seen.append(cause())
            done.set()

        with because_of("first"):
            asyncio.get_running_loop().call_later(0, note)
        with because_of("second"):
            seen.append(cause())
        await done.wait()
        return [*seen, cause()]

    assert asyncio.run(run()) == ["second", "first", ""]


@pytest.fixture
def controlled(system_cluster: DevCluster, tmp_path: Path) -> Iterator[Controlled]:
    """Without nodes and without a controller yet; checked and taken away when the test ends."""
    running = Controlled(system_cluster, tmp_path, arguments=["--log-format=json"])
    yield running
    running.close()


def reported(controlled: Controlled) -> list[dict[str, Any]]:
    """The log, line by line, as far as it is written."""
    return [json.loads(line) for line in controlled.log().rpartition("\n")[0].splitlines()]


def test_an_eviction_can_be_followed_from_its_plan_to_its_writes_and_events(controlled: Controlled) -> None:
    controlled.add_nodes(1, gpus=1)
    borrower, owner = controlled.team(guaranteed=0), controlled.team(guaranteed=1)
    controlled.start()
    controlled.until_bound(controlled.pod(borrower, "lent"))
    controlled.until_bound(controlled.pod(owner, "mine"))
    # a call is logged when it is answered, and the pod may have its node before that
    controlled.wait(lambda: any(line.get("object") == f"{owner}/mine" for line in reported(controlled)), controlled.log)
    controlled.wait(
        lambda: any(line.get("path", "").endswith("/events") for line in reported(controlled)), controlled.log
    )
    lines = reported(controlled)
    (plan,) = (line for line in lines if line.get("plan", {}).get("evict"))
    follows = [line for line in lines if line.get("cause") == plan["cause"]]
    assert [line["decision"] for line in follows if "decision" in line] == ["evict"]
    assert [line["verb"] for line in follows if line.get("object") == f"{borrower}/lent" and "eviction" in line["path"]]
    assert [line for line in follows if "Evicted" in line["message"]]
    assert [line for line in follows if line.get("path", "").endswith("/events")]
    (admitted,) = (line for line in lines if line.get("object") == f"{owner}/mine")
    assert admitted["cause"] not in {"", plan["cause"]}  # it was admitted when the GPU was free: by a later plan
