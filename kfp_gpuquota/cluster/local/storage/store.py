"""SQLite: the only truth of an embedded cluster.

One writer, the daemon. WAL with synchronous=FULL: what was acknowledged survives a power loss. Facts that are learnt
again from processes (progress, that a worker runs) are committed with NORMAL: they reach the disk with the next
decision. Rows hold the structs as JSON, beside the columns that are searched by.

A row that cannot be read is moved to the table `quarantine` with the reason: the rest is served without it.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from kfp_gpuquota.api import Node, Project
from kfp_gpuquota.api.history import Holder, Report, Usage
from kfp_gpuquota.api.policy import WorkloadPolicy
from kfp_gpuquota.api.wire import Event
from kfp_gpuquota.cluster.local.storage.database import config_in, open_database
from kfp_gpuquota.engine.records import JobRecord, WorkerRecord
from kfp_gpuquota.errors import StateFileError
from kfp_gpuquota.scheduler import Defragmented, UsageRecalled

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from kfp_gpuquota.cluster.local.devices import ClusterConfig

Record = TypeVar("Record", Project, JobRecord, WorkerRecord)

KEPT_EVENTS: Final = 100_000
_KEYS: Final = {"projects": "name", "jobs": "uid", "workers": "id"}

log = logging.getLogger(__name__)


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """A row that was set aside; `kind` is its table."""

    kind: str
    key: str
    why: str
    at: float
    body: str = ""


class Store:
    """Reads everything once, at start; writes within `transaction`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._durable = True
        with self._errors():
            self._db = open_database(path)
            self._db.execute("PRAGMA synchronous=FULL")

    def close(self) -> None:
        """Fold the write-ahead log into the file and let go of it."""
        self._db.close()

    @contextlib.contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[None]:
        """All of it or nothing. Raises StateFileError, and has changed nothing then.

        `durable`: on disk when this returns; else when the next durable one does, or the system writes it.
        """
        with self._errors():
            if durable != self._durable:
                self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
                self._durable = durable
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
        return config_in(self._db)

    def load_projects(self) -> list[Project]:
        """All projects that can be read, by name."""
        return self._decoded("projects", "name", Project)

    def load_jobs(self) -> list[JobRecord]:
        """All jobs that can be read, in the order of their submission."""
        return self._decoded("jobs", "rowid", JobRecord)

    def load_workers(self) -> list[WorkerRecord]:
        """All workers that can be read, in the order of their start."""
        return self._decoded("workers", "rowid", WorkerRecord)

    def load_events(self, after: int, limit: int = 10_000) -> list[Event]:
        """The history after a revision, oldest first."""
        query = "SELECT body, revision FROM events WHERE revision > ? ORDER BY revision LIMIT ?"
        found = self._db.execute(query, (after, limit)).fetchall()
        return [
            msgspec.structs.replace(msgspec.json.decode(body, type=Event), revision=number) for body, number in found
        ]

    def load_job_events(self, uid: str, limit: int = 2_000) -> list[Event]:
        """Return the newest events of a job, oldest first."""
        query = (
            "SELECT body FROM events WHERE CASE WHEN json_valid(body) THEN json_extract(body, '$.job_uid') END = ? "
            "ORDER BY revision DESC LIMIT ?"
        )
        found = self._db.execute(query, (uid, limit)).fetchall()
        return [msgspec.json.decode(body, type=Event) for (body,) in reversed(found)]

    def load_reports(self, uid: str) -> list[tuple[int, Report]]:
        """Return the stored reports of a training with their numbers, oldest first."""
        found = self._db.execute("SELECT number, body FROM reports WHERE job_uid = ? ORDER BY number", (uid,))
        return [(number, msgspec.json.decode(body, type=Report)) for number, body in found]

    def load_usage(self, width_s: int, since: float) -> list[Usage]:
        """Return the projects' usage in intervals of that width which end after `since`, oldest first."""
        query = (
            "SELECT project, at, seconds, held, borrowed, wanted, guaranteed FROM usage "
            "WHERE width_s = ? AND at > ? AND seconds > 0 ORDER BY at, project"
        )
        return [
            Usage(
                project=project,
                at=at,
                width_s=width_s,
                seconds=seconds,
                held=held / seconds,
                borrowed=borrowed / seconds,
                wanted=wanted / seconds,
                guaranteed=guaranteed / seconds,
            )
            for project, at, seconds, held, borrowed, wanted, guaranteed in self._db.execute(
                query, (width_s, since - width_s)
            )
        ]

    def load_held(self, width_s: int, since: float) -> dict[Holder, float]:
        """Return the GPU-seconds held in intervals of that width which end after `since`."""
        query = (
            "SELECT project, user, gpu_type, sum(gpu_s) FROM held WHERE width_s = ? AND at > ? "
            "GROUP BY project, user, gpu_type"
        )
        found = self._db.execute(query, (width_s, since - width_s))
        return {Holder(project, user, gpu_type): gpu_s for project, user, gpu_type, gpu_s in found}

    def holders(self, width_s: int, at: int) -> set[Holder]:
        """Return who held GPUs in the interval that begins at `at`."""
        query = "SELECT project, user, gpu_type FROM held WHERE width_s = ? AND at = ?"
        return {Holder(*row) for row in self._db.execute(query, (width_s, at))}

    def revision(self) -> int:
        """The number of the newest event ever written."""
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
        return int(row[0]) if row else 0

    def load_policies(self) -> list[WorkloadPolicy]:
        """All policies, by name."""
        row = self._db.execute("SELECT value FROM meta WHERE key = 'policies'").fetchone()
        return msgspec.json.decode(row[0], type=list[WorkloadPolicy]) if row else []

    def load_members(self) -> dict[str, tuple[str, ...]]:
        """Return the members of each project that has some, by its name."""
        row = self._db.execute("SELECT value FROM meta WHERE key = 'members'").fetchone()
        return msgspec.json.decode(row[0], type=dict[str, tuple[str, ...]]) if row else {}

    def load_nodes(self) -> list[Node]:
        """The nodes as last saved, where they are not this machine's own."""
        row = self._db.execute("SELECT value FROM meta WHERE key = 'nodes'").fetchone()
        return msgspec.json.decode(row[0], type=list[Node]) if row else []

    def load_past_use(self) -> list[UsageRecalled]:
        """What projects and their users have used, each in a node pool. One that cannot be read is left out."""
        found: list[UsageRecalled] = []
        for key, value in self._db.execute("SELECT key, value FROM meta WHERE key GLOB 'past-use/*' ORDER BY key"):
            try:
                found.append(msgspec.json.decode(value, type=UsageRecalled))
            except msgspec.DecodeError as error:
                log.error("%s cannot be read (%s), and is computed from the history", key, error)
        return found

    def load_defragmented(self) -> Defragmented | None:
        """Return when a plan last looked for moves that gather GPUs, and what those of its window have cost."""
        row = self._db.execute("SELECT value FROM meta WHERE key = 'defragmented'").fetchone()
        return msgspec.json.decode(row[0], type=Defragmented) if row else None

    # Writing, inside a transaction

    def save_defragmented(self, done: Defragmented) -> None:
        """Replace it."""
        body = msgspec.json.encode(done).decode()
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('defragmented', ?)", (body,))

    def save_past_use(self, used: UsageRecalled) -> None:
        """Store what a project and its users have used in a node pool."""
        key, body = f"past-use/{used.project}@{used.pool}", msgspec.json.encode(used).decode()
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, body))

    def forget_past_use(self, project: str = "*") -> None:
        """Delete what a project has used, or all of them."""
        self._db.execute("DELETE FROM meta WHERE key GLOB ?", (f"past-use/{project}@*",))

    def save_policies(self, policies: Iterable[WorkloadPolicy]) -> None:
        """Replace all of them."""
        body = msgspec.json.encode(sorted(policies, key=lambda policy: policy.name)).decode()
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('policies', ?)", (body,))

    def save_members(self, members: Mapping[str, Sequence[str]]) -> None:
        """Replace those of all projects."""
        body = msgspec.json.encode(members).decode()
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('members', ?)", (body,))

    def save_nodes(self, nodes: Iterable[Node]) -> None:
        """Replace all of them."""
        body = msgspec.json.encode(list(nodes)).decode()
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('nodes', ?)", (body,))

    def save_config(self, config: ClusterConfig) -> None:
        """Store the cluster's shape."""
        body = msgspec.json.encode(config).decode()
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('config', ?)", (body,))

    def save_project(self, project: Project) -> None:
        """Insert or change."""
        body = msgspec.json.encode(project).decode()
        self._db.execute("INSERT OR REPLACE INTO projects VALUES (?, ?)", (project.name, body))

    def delete_project(self, name: str) -> None:
        """Delete the record."""
        self._db.execute("DELETE FROM projects WHERE name = ?", (name,))

    def save_job(self, job: JobRecord) -> None:
        """Insert, or change what is there; a job keeps its place in the order."""
        body = msgspec.json.encode(job).decode()
        self._db.execute(
            "INSERT INTO jobs VALUES (?, ?, ?, ?, ?) ON CONFLICT (uid) DO UPDATE SET body = excluded.body",
            (job.uid, job.spec.project, job.spec.name, job.request_id or job.uid, body),
        )

    def delete_job(self, uid: str) -> None:
        """Delete the job and its workers."""
        self._db.execute("DELETE FROM workers WHERE job_uid = ?", (uid,))
        self._db.execute("DELETE FROM reports WHERE job_uid = ?", (uid,))
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

    def save_report(self, uid: str, number: int, report: Report) -> None:
        """Add a report of a training."""
        body = msgspec.json.encode(report).decode()
        self._db.execute("INSERT OR REPLACE INTO reports VALUES (?, ?, ?)", (uid, number, body))

    def thin_reports(self, uid: str, stride: int) -> None:
        """Delete all reports of a training but those whose number is a multiple of `stride`."""
        self._db.execute("DELETE FROM reports WHERE job_uid = ? AND number % ? != 0", (uid, stride))

    def add_usage(self, rows: Iterable[tuple[int, int, str, float, float, float, float, float]]) -> None:
        """Add (width_s, at, project, seconds, then GPU-seconds held, borrowed, wanted, guaranteed) to the intervals."""
        self._db.executemany(
            "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (width_s, at, project) DO UPDATE SET "
            "seconds = seconds + excluded.seconds, held = held + excluded.held, "
            "borrowed = borrowed + excluded.borrowed, wanted = wanted + excluded.wanted, "
            "guaranteed = guaranteed + excluded.guaranteed",
            rows,
        )

    def add_held(self, rows: Iterable[tuple[int, int, str, str, str, float]]) -> None:
        """Add (width_s, at, project, user, GPU type, GPU-seconds) to the intervals."""
        self._db.executemany(
            "INSERT INTO held VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (width_s, at, project, user, gpu_type) "
            "DO UPDATE SET gpu_s = gpu_s + excluded.gpu_s",
            rows,
        )

    def forget_usage(self, width_s: int, before: float) -> None:
        """Delete intervals of that width which began before `before`."""
        for table in ("usage", "held"):
            self._db.execute(f"DELETE FROM {table} WHERE width_s = ? AND at < ?", (width_s, before))  # noqa: S608

    # Rows that cannot be used

    def quarantine(self, kind: str, key: str, why: str, *, keep: bool = False) -> None:
        """Set a row aside, in a transaction of its own; with `keep` as a copy: a corrected one takes its place."""
        log.error("%s %r is set aside: %s; see: gpuquota cluster repair", kind.removesuffix("s"), key, why)
        column = _KEYS[kind]
        with self.transaction():
            self._db.execute(
                f"INSERT INTO quarantine SELECT ?, {column}, body, ?, ? FROM {kind} WHERE {column} = ?",  # noqa: S608
                (kind, why, time.time(), key),
            )
            if not keep:
                self._db.execute(f"DELETE FROM {kind} WHERE {column} = ?", (key,))  # noqa: S608

    def discard_quarantined(self) -> int:
        """Delete for good what was set aside; returns how many rows."""
        with self.transaction():
            return self._db.execute("DELETE FROM quarantine").rowcount

    # Inside

    def _decoded(self, table: str, order: str, kind: type[Record]) -> list[Record]:
        found, damaged = [], []
        query = f"SELECT {_KEYS[table]}, body FROM {table} ORDER BY {order}"  # noqa: S608
        for key, body in self._db.execute(query).fetchall():
            try:
                found.append(msgspec.json.decode(body, type=kind))
            except Exception as error:  # noqa: BLE001  (whatever is wrong with one row, the others are served)
                damaged.append((key, str(error)))
        for key, why in damaged:
            self.quarantine(table, key, f"it cannot be read: {why}")
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
