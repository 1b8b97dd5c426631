"""Which cluster the environment and the settings select."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.cluster.connect import (
    CONTEXT_VARIABLE,
    URL_VARIABLE,
    Settings,
    current_project,
    kube_context,
    kubeconfig_context,
    save_settings,
)
from kfp_gpuquota.cluster.local.home import HOME_VARIABLE

if TYPE_CHECKING:
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
