"""SQLite: the only truth of an embedded cluster.

One writer, the daemon. WAL with synchronous=NORMAL: a commit survives kill -9 at any moment; a power loss may take the
last commits, never the file. Rows hold the structs as JSON, beside the columns that are searched by.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.api import Project
from kfp_gpuquota.api.policy import WorkloadPolicy
from kfp_gpuquota.api.wire import Event
from kfp_gpuquota.cluster.local.devices import ClusterConfig
from kfp_gpuquota.cluster.records import JobRecord, WorkerRecord
from kfp_gpuquota.errors import StateFileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

SCHEMA_VERSION: Final = 1
BUSY_TIMEOUT_S: Final = 5.0
KEPT_EVENTS: Final = 100_000

_SCHEMA = """
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


class Store:
    """Reads everything once, at start; writes within `transaction`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._errors():
            self._db = sqlite3.connect(path, isolation_level=None, timeout=BUSY_TIMEOUT_S)
            found = self._known_version()
            path.chmod(0o600)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            if found < SCHEMA_VERSION:
                self._db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")

    def close(self) -> None:
        """Fold the write-ahead log into the file and let go of it."""
        self._db.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it or nothing. Raises StateFileError, and has changed nothing then."""
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise

    # Reading

    def load_config(self) -> ClusterConfig:
        """The cluster's shape, as last saved."""
        row = self._db.execute("SELECT value FROM meta WHERE key = 'config'").fetchone()
        return msgspec.json.decode(row[0], type=ClusterConfig) if row else ClusterConfig()

    def load_projects(self) -> list[Project]:
        """All projects, by name."""
        return [msgspec.json.decode(body, type=Project) for (body,) in self._rows("projects", "name")]

    def load_jobs(self) -> list[JobRecord]:
        """All jobs, in the order of their submission."""
        return [msgspec.json.decode(body, type=JobRecord) for (body,) in self._rows("jobs", "rowid")]

    def load_workers(self) -> list[WorkerRecord]:
        """All workers, in the order of their start."""
        return [msgspec.json.decode(body, type=WorkerRecord) for (body,) in self._rows("workers", "rowid")]

    def load_events(self, after: int, limit: int = 10_000) -> list[Event]:
        """The history after a revision, oldest first."""
        query = "SELECT body, revision FROM events WHERE revision > ? ORDER BY revision LIMIT ?"
        found = self._db.execute(query, (after, limit)).fetchall()
        return [
            msgspec.structs.replace(msgspec.json.decode(body, type=Event), revision=number) for body, number in found
        ]

    def revision(self) -> int:
        """The number of the newest event ever written."""
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
        return int(row[0]) if row else 0

    def load_policies(self) -> list[WorkloadPolicy]:
        """All policies, by name."""
        row = self._db.execute("SELECT value FROM meta WHERE key = 'policies'").fetchone()
        return msgspec.json.decode(row[0], type=list[WorkloadPolicy]) if row else []

    # Writing, inside a transaction

    def save_policies(self, policies: Iterable[WorkloadPolicy]) -> None:
        """Replace all of them."""
        body = msgspec.json.encode(sorted(policies, key=lambda policy: policy.name)).decode()
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('policies', ?)", (body,))

    def save_config(self, config: ClusterConfig) -> None:
        """Remember the cluster's shape."""
        body = msgspec.json.encode(config).decode()
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('config', ?)", (body,))

    def save_project(self, project: Project) -> None:
        """Insert or change."""
        body = msgspec.json.encode(project).decode()
        self._db.execute("INSERT OR REPLACE INTO projects VALUES (?, ?)", (project.name, body))

    def delete_project(self, name: str) -> None:
        """Forget it."""
        self._db.execute("DELETE FROM projects WHERE name = ?", (name,))

    def save_job(self, job: JobRecord) -> None:
        """Insert, or change what is there; a job keeps its place in the order."""
        body = msgspec.json.encode(job).decode()
        self._db.execute(
            "INSERT INTO jobs VALUES (?, ?, ?, ?, ?) ON CONFLICT (uid) DO UPDATE SET body = excluded.body",
            (job.uid, job.spec.project, job.spec.name, job.request_id or job.uid, body),
        )

    def delete_job(self, uid: str) -> None:
        """Forget it and its workers."""
        self._db.execute("DELETE FROM workers WHERE job_uid = ?", (uid,))
        self._db.execute("DELETE FROM jobs WHERE uid = ?", (uid,))

    def save_worker(self, worker: WorkerRecord) -> None:
        """Insert, or change what is there."""
        body = msgspec.json.encode(worker).decode()
        self._db.execute(
            "INSERT INTO workers VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET body = excluded.body",
            (worker.worker.id, worker.worker.job_uid, body),
        )

    def append_event(self, event: Event) -> int:
        """Add to the history; returns its revision. The oldest entries beyond a limit go."""
        body = msgspec.json.encode(event).decode()
        revision = self._db.execute("INSERT INTO events (body) VALUES (?)", (body,)).lastrowid or 0
        if revision % 1000 == 0:
            self._db.execute("DELETE FROM events WHERE revision <= ?", (revision - KEPT_EVENTS,))
        return revision

    # Inside

    def _rows(self, table: str, order: str) -> list[tuple[str]]:
        return self._db.execute(f"SELECT body FROM {table} ORDER BY {order}").fetchall()  # noqa: S608

    def _known_version(self) -> int:
        """The format of what is there, before anything is written to it. Raises StateFileError for a newer one."""
        found = int(self._db.execute("PRAGMA user_version").fetchone()[0])
        if found > SCHEMA_VERSION:
            raise StateFileError(
                f"{self._path} was written by a newer version (format {found}, this one knows {SCHEMA_VERSION}); "
                "upgrade kfp-gpuquota, or choose another directory with GPUQUOTA_HOME"
            )
        return found

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StateFileError(
                f"the state file {self._path} cannot be used ({error}); nothing was changed: free some space or "
                "check its permissions, then try again"
            ) from error
