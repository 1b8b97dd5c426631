"""The content of a state file, read without its daemon."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.api.redaction import REDACTED, redacted
from kfp_gpuquota.cluster.local.storage.database import connect
from kfp_gpuquota.cluster.local.storage.store import Quarantined
from kfp_gpuquota.errors import StateFileError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def exported(path: Path, *, secrets: bool = False) -> str:
    """Return projects, policies, jobs, workers and history as JSON. Raises StateFileError.

    Without `secrets` the values of environment variables are left out, and rows that are no JSON.
    """
    with _reading(path) as database:
        found: dict[str, list[object]] = {
            table: [_raw(body) for (body,) in database.execute(f"SELECT body FROM {table} ORDER BY rowid")]  # noqa: S608
            for table in ("projects", "jobs", "workers", "events")
        }
        policies = database.execute("SELECT value FROM meta WHERE key = 'policies'").fetchone()
        members = database.execute("SELECT value FROM meta WHERE key = 'members'").fetchone()
    found["policies"] = _rows(policies[0]) if policies else []
    if members:  # of a cluster that several users share
        found["members"] = _rows(members[0])
    if not secrets:
        found = {table: [_without_secrets(row) for row in rows] for table, rows in found.items()}
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


def quarantined(path: Path) -> list[Quarantined]:
    """Return what was set aside, oldest first. Raises StateFileError."""
    with _reading(path) as database:
        rows = database.execute("SELECT kind, key, why, at, body FROM quarantine ORDER BY rowid").fetchall()
    return [Quarantined(kind=kind, key=key, why=why, at=at, body=body) for kind, key, why, at, body in rows]


def _raw(body: str) -> object:
    """The row's JSON; its text where it is none."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body


def _without_secrets(row: object) -> object:
    return REDACTED if isinstance(row, str) else redacted(row)


def _rows(body: str) -> list[object]:
    found = _raw(body)
    return found if isinstance(found, list) else [found]


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        with contextlib.closing(connect(path, read_only=True)) as database:
            yield database
    except sqlite3.Error as error:
        raise StateFileError(f"the state file {path} cannot be read: {error}") from error
