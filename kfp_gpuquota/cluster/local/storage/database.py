"""The state file: its format, how it is opened, and copies of it.

A file of an earlier format is copied to `state.db.formatN`, then migrated in one transaction; one of a later format is
left alone. Each opening verifies the file (`PRAGMA quick_check`): a damaged one is left alone as well, with the way
out: `gpuquota cluster repair` keeps what can be read, `gpuquota cluster restore` takes a backup.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.errors import StateFileError

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA_VERSION: Final = 4
BUSY_TIMEOUT_S: Final = 5.0
TABLES: Final = ("meta", "projects", "jobs", "workers", "events", "quarantine", "reports", "usage", "held")
_FIRST: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE projects (name TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
CREATE TABLE jobs (
    uid TEXT PRIMARY KEY, project TEXT NOT NULL, name TEXT NOT NULL, request_id TEXT NOT NULL UNIQUE,
    body TEXT NOT NULL, UNIQUE (project, name)
) STRICT;
CREATE TABLE workers (id TEXT PRIMARY KEY, job_uid TEXT NOT NULL, body TEXT NOT NULL) STRICT;
CREATE INDEX workers_by_job ON workers (job_uid);
CREATE TABLE events (revision INTEGER PRIMARY KEY AUTOINCREMENT, body TEXT NOT NULL) STRICT;
"""
_SECOND: Final = """
CREATE TABLE quarantine (
    kind TEXT NOT NULL, key TEXT NOT NULL, body TEXT NOT NULL, why TEXT NOT NULL, at REAL NOT NULL
) STRICT;
"""
_THIRD: Final = """
CREATE TABLE reports (
    job_uid TEXT NOT NULL, number INTEGER NOT NULL, body TEXT NOT NULL, UNIQUE (job_uid, number)
) STRICT;
CREATE TABLE usage (
    width_s INTEGER NOT NULL, at INTEGER NOT NULL, project TEXT NOT NULL, seconds REAL NOT NULL, held REAL NOT NULL,
    borrowed REAL NOT NULL, wanted REAL NOT NULL, guaranteed REAL NOT NULL, UNIQUE (width_s, at, project)
) STRICT;
CREATE INDEX events_by_job ON events (CASE WHEN json_valid(body) THEN json_extract(body, '$.job_uid') END);
"""
_FOURTH: Final = """
CREATE TABLE held (
    width_s INTEGER NOT NULL, at INTEGER NOT NULL, project TEXT NOT NULL, user TEXT NOT NULL, gpu_type TEXT NOT NULL,
    gpu_s REAL NOT NULL, UNIQUE (width_s, at, project, user, gpu_type)
) STRICT;
"""
MIGRATIONS: Final = {0: _FIRST, 1: _SECOND, 2: _THIRD, 3: _FOURTH}
"""The migration from each format to the next one."""


def open_database(path: Path) -> sqlite3.Connection:
    """Open the file, in this version's format. Raises StateFileError where it cannot be used as it is."""
    database = connect(path)
    try:
        found = _checked_version(path, database)
        path.chmod(0o600)
        database.execute("PRAGMA journal_mode=WAL")
        if 0 < found < SCHEMA_VERSION:
            back_up(path, path.with_name(f"{path.name}.format{found}"))
        for version in range(found, SCHEMA_VERSION):
            script = f"BEGIN IMMEDIATE; {MIGRATIONS[version]} PRAGMA user_version = {version + 1}; COMMIT;"
            database.executescript(script)
    except BaseException:
        database.close()
        raise
    return database


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Return a connection, without a look at what the file holds."""
    mode = "ro" if read_only else "rwc"
    target = f"file:{path.as_posix().replace('%', '%25').replace('?', '%3f').replace('#', '%23')}?mode={mode}"
    return sqlite3.connect(target, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S)


def stored_config(path: Path) -> ClusterConfig:
    """Return the configuration that a cluster has, also while it runs; the default one if there is no cluster."""
    if not path.exists():
        return ClusterConfig()
    try:
        with contextlib.closing(connect(path, read_only=True)) as found:
            return config_in(found)
    except (sqlite3.Error, msgspec.DecodeError) as error:
        raise StateFileError(f"the configuration in {path} could not be read: {error}") from error


def config_in(database: sqlite3.Connection) -> ClusterConfig:
    """Return the configuration as last saved."""
    row = database.execute("SELECT value FROM meta WHERE key = 'config'").fetchone()
    return msgspec.json.decode(row[0], type=ClusterConfig) if row else ClusterConfig()


def back_up(path: Path, target: Path) -> None:
    """Copy the state to `target`, whole and synced, also while a daemon writes. Raises StateFileError, OSError."""
    if not path.exists():
        raise StateFileError(
            f"{path.parent} holds no cluster; name its directory in GPUQUOTA_HOME: that of one which users of this "
            "machine share is root's, /var/lib/gpuquota"
        )
    partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    partial.unlink(missing_ok=True)
    try:
        with contextlib.closing(connect(path, read_only=True)) as source:
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            with contextlib.closing(connect(partial)) as copy:
                source.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(target)
    except sqlite3.Error as error:
        raise StateFileError(f"{path} could not be copied to {target}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def restore(backup: Path, path: Path) -> Path | None:
    """Replace the state by a backup, and return the path of the former state. Raises StateFileError."""
    if not backup.is_file():
        raise StateFileError(f"there is no backup {backup}")
    with contextlib.closing(connect(backup, read_only=True)) as database:
        try:
            version = _checked_version(backup, database)
        except sqlite3.Error as error:
            raise StateFileError(f"{backup} cannot be read: {error}") from error
    if version == 0:
        raise StateFileError(f"{backup} is no backup of a cluster's state")
    copied = path.with_name(f"{path.name}.restored")
    back_up(backup, copied)
    former = set_aside(path, "former")
    copied.replace(path)
    return former


def set_aside(path: Path, word: str) -> Path | None:
    """Rename the state file and what belongs to it, and return its new name; None where there is none."""
    if not path.exists():
        return None
    aside = path.with_name(f"{path.name}.{word}-{time.strftime('%Y%m%dT%H%M%S')}")
    for suffix in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    return aside


def salvage(path: Path) -> tuple[Path, dict[str, int]]:
    """Replace a damaged state file by one of all rows that can be read.

    Returns where the damaged one is, and how many rows of each table were kept. Raises StateFileError.
    """
    damaged = set_aside(path, "damaged")
    if damaged is None:
        raise StateFileError(f"there is no state file {path}")
    with contextlib.closing(open_database(path)) as fresh, contextlib.closing(connect(damaged)) as old:
        kept = {table: _copy_rows(old, fresh, table) for table in TABLES}
    return damaged, kept


def _copy_rows(old: sqlite3.Connection, fresh: sqlite3.Connection, table: str) -> int:
    """Row by row in order, and from the other end where the order breaks off."""
    kept = 0
    for direction in ("ASC", "DESC"):
        with contextlib.suppress(sqlite3.Error):
            for row in old.execute(f"SELECT * FROM {table} ORDER BY rowid {direction}"):  # noqa: S608
                places = ", ".join("?" * len(row))
                kept += fresh.execute(f"INSERT OR IGNORE INTO {table} VALUES ({places})", row).rowcount  # noqa: S608
            break
    return kept


def _checked_version(path: Path, database: sqlite3.Connection) -> int:
    """The file's format, before anything is written to it."""
    found = int(database.execute("PRAGMA user_version").fetchone()[0])
    if found > SCHEMA_VERSION:
        raise StateFileError(
            f"{path} was written by a newer version (format {found}, this one knows {SCHEMA_VERSION}); upgrade "
            "kfp-gpuquota, or choose another directory with GPUQUOTA_HOME"
        )
    (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise StateFileError(
            f"the state file {path} is damaged ({verdict}); keep what can be read with: gpuquota cluster repair, or "
            "go back to a copy with: gpuquota cluster restore FILE"
        )
    return found
