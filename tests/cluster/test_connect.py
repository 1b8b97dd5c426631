"""Which cluster the environment and the settings select."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.cluster.connect import (
    CONTEXT_VARIABLE,
    URL_VARIABLE,
    Settings,
    current_project,
    embedded_home,
    kube_context,
    kubeconfig_context,
    operations,
    save_settings,
)
from kfp_gpuquota.cluster.local.home import HOME_VARIABLE
from kfp_gpuquota.cluster.local.shared.config import SHARED_VARIABLE
from kfp_gpuquota.cluster.local.storage.store import Store
from kfp_gpuquota.errors import StateFileError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_server_at_a_socket_is_not_kubernetes_whatever_context_is_set(tmp_path: Path) -> None:
    """`connect` prefers the socket; what asks which kind of cluster is selected must do so as well."""
    environment = {HOME_VARIABLE: str(tmp_path), CONTEXT_VARIABLE: "production"}
    assert kube_context(environment) == "production"
    save_settings(Settings(project="vision", context="production"), environment)
    at_socket = environment | {URL_VARIABLE: "unix:///run/gpuquota/socket"}
    assert kube_context(at_socket) is None
    assert current_project(environment=at_socket) == "vision"


def test_kfp_is_in_the_chosen_context_whichever_cluster_has_the_jobs(tmp_path: Path) -> None:
    environment = {HOME_VARIABLE: str(tmp_path), URL_VARIABLE: "unix:///run/gpuquota/socket"}
    assert kubeconfig_context(environment) == ""
    assert kubeconfig_context(environment | {CONTEXT_VARIABLE: "production"}) == "production"
    assert kubeconfig_context(environment | {CONTEXT_VARIABLE: "embedded"}) == ""


@pytest.mark.parametrize("variable", [URL_VARIABLE, SHARED_VARIABLE])
def test_files_of_this_users_own_cluster_are_left_alone_if_another_one_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv(HOME_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    own, socket, copy = embedded_home(), tmp_path / "socket", tmp_path / "copy.db"
    own.create()
    Store(own.database).close()
    socket.touch()
    monkeypatch.setenv(variable, f"unix://{socket}" if variable == URL_VARIABLE else str(socket))
    chosen = operations()
    calls: tuple[Callable[[], object], ...] = (
        lambda: chosen.back_up(copy),
        lambda: chosen.export(jobs=False, secrets=False),
        lambda: list(chosen.restore(copy)),
        chosen.repair,
        chosen.set_aside,
        chosen.discard_set_aside,
    )
    for call in calls:
        with pytest.raises(UsageError, match="name its directory in GPUQUOTA_HOME"):
            call()
    assert not copy.exists()


def test_a_backup_is_restored_where_no_cluster_was_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path / "state.db").close()
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "new" / "home"))
    chosen = operations()
    with pytest.raises(StateFileError, match="there is no backup"):
        list(chosen.restore(tmp_path / "none.db"))
    assert not (tmp_path / "new").exists()
    assert list(chosen.restore(tmp_path / "state.db")) == [f"the state was restored from {tmp_path / 'state.db'}"]
    assert json.loads(chosen.export(jobs=False, secrets=False))["projects"] == []
