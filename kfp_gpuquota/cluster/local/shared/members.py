"""The members of projects: the users, and the groups as @GROUP, that may submit jobs to each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.cluster.local.shared.accounts import check_member

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kfp_gpuquota.api.wire import MembersChange, ProjectView
    from kfp_gpuquota.cluster.local.storage.store import Store


class Members:
    """Those of all projects of one cluster; a project that was just made has none."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_project = store.load_members()

    def of(self, project: str) -> tuple[str, ...]:
        """Return a project's members."""
        return self._by_project.get(project, ())

    def change(self, project: str, change: MembersChange) -> None:
        """Add and remove members. Raises InvalidFieldError for one without an account, StateFileError."""
        for member in change.add:
            check_member(member)
        kept = {*self.of(project), *change.add} - {*change.remove}
        self._save({**self._by_project, project: tuple(sorted(kept))})

    def forget(self, project: str) -> None:
        """Remove all of a project's, so that a later one of that name has none of them."""
        if project in self._by_project:
            self._save({name: members for name, members in self._by_project.items() if name != project})

    def shown(self, views: Iterable[ProjectView]) -> tuple[ProjectView, ...]:
        """Return the projects with their members."""
        return tuple(msgspec.structs.replace(view, members=self.of(view.project.name)) for view in views)

    def _save(self, by_project: dict[str, tuple[str, ...]]) -> None:
        with self._store.transaction():
            self._store.save_members(by_project)
        self._by_project = by_project
