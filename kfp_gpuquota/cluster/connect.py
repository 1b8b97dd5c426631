"""How a client finds its cluster: what the environment names, else the embedded one, which is started on demand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kfp_gpuquota.cluster.local.home import Home, default_home, write_private
from kfp_gpuquota.cluster.local.start import ensure_running
from kfp_gpuquota.errors import UsageError
from kfp_gpuquota.server.client import RETRY_FOR_S, Client

if TYPE_CHECKING:
    from collections.abc import Mapping

URL_VARIABLE: Final = "GPUQUOTA_URL"
TOKEN_FILE_VARIABLE: Final = "GPUQUOTA_TOKEN_FILE"  # noqa: S105 (a variable's name)
PROJECT_VARIABLE: Final = "GPUQUOTA_PROJECT"


class Settings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a user has set once: config.json in the cluster's directory."""

    project: str = ""


def connect(environment: Mapping[str, str] | None = None, *, retry_for_s: float = RETRY_FOR_S) -> Client:
    """A client for $GPUQUOTA_URL (with $GPUQUOTA_TOKEN_FILE), else for the embedded cluster.

    Raises ClusterStartError when the embedded cluster does not come up.
    """
    environment = os.environ if environment is None else environment
    if url := environment.get(URL_VARIABLE):
        token_file = _token_file(environment)
        return Client(lambda: (url, token_file.read_text().strip()), retry_for_s=retry_for_s)
    home = embedded_home(environment)

    def locate() -> tuple[str, str]:
        ensure_running(home)
        return home.url_file.read_text().strip(), home.token_file.read_text().strip()

    return Client(locate, retry_for_s=retry_for_s)


def embedded_home(environment: Mapping[str, str] | None = None) -> Home:
    """The embedded cluster's directory."""
    return Home(default_home(os.environ if environment is None else environment))


def load_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """The user's settings, or the defaults."""
    path = _settings_file(os.environ if environment is None else environment)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Settings)
    except FileNotFoundError:
        return Settings()
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} cannot be read ({error}); correct it, or delete it") from error


def save_settings(settings: Settings, environment: Mapping[str, str] | None = None) -> None:
    """Remember the user's settings."""
    path = _settings_file(os.environ if environment is None else environment)
    Home(path.parent).create()
    write_private(path, msgspec.json.encode(settings).decode())


def current_project(given: str = "", environment: Mapping[str, str] | None = None) -> str:
    """The project to work in: the one given, else $GPUQUOTA_PROJECT, else the configured one. Raises UsageError."""
    environment = os.environ if environment is None else environment
    found = given or environment.get(PROJECT_VARIABLE, "") or load_settings(environment).project
    if not found:
        raise UsageError("no project is given; add -p PROJECT, or set it once: gpuquota config project PROJECT")
    return found


def _settings_file(environment: Mapping[str, str]) -> Path:
    return default_home(environment) / "config.json"


def _token_file(environment: Mapping[str, str]) -> Path:
    if TOKEN_FILE_VARIABLE not in environment:
        raise UsageError(f"{URL_VARIABLE} is set, but {TOKEN_FILE_VARIABLE} is not: name the file with the token")
    return Path(environment[TOKEN_FILE_VARIABLE])
