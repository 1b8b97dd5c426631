"""The cluster that several users of a machine share: its options and its service."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kfp_gpuquota.cli.arguments.options import client
from kfp_gpuquota.cli.display.terminal import echo, echo_data
from kfp_gpuquota.errors import ConflictError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kfp_gpuquota.cluster.local.devices import ClusterConfig
    from kfp_gpuquota.cluster.local.home import Home
    from kfp_gpuquota.cluster.local.shared.config import SharedConfig

SharedOption = Annotated[
    bool, typer.Option("--shared", help="One cluster for the users of this machine; jobs run as their owners (root).")
]
GroupOption = Annotated[
    str, typer.Option("--group", metavar="GROUP", help="With --shared: only users in it reach the cluster; else all.")
]
AdminGroupOption = Annotated[
    str, typer.Option("--admin-group", metavar="GROUP", help="With --shared: its users may do what root may.")
]
JobsPerUserOption = Annotated[
    int | None,
    typer.Option(
        "--jobs-per-user", min=1, help="With --shared: a user's jobs that have not ended, at most; else 1000."
    ),
]
ForegroundOption = Annotated[
    bool, typer.Option("--foreground", help="With --shared: be the daemon, as a service of systemd.")
]
PrintUnitOption = Annotated[
    bool,
    typer.Option("--print-unit", help="With --shared: print a systemd unit with these options."),
]
InstallUnitOption = Annotated[
    bool, typer.Option("--install-unit", help="With --shared: write that unit to /etc/systemd/system.")
]
_UNIT_OPTIONS = frozenset({"--print-unit", "--install-unit", "--foreground"})


def shared_settings(
    *, shared: bool, group: str, admin_group: str, jobs_per_user: int | None, service: Mapping[str, bool]
) -> SharedConfig | None:
    """Return the settings of a shared cluster, whose directory the command then works with; None without `--shared`.

    Raises UsageError for options that need it, and for a user who is not root.
    """
    given = {"--group": bool(group), "--admin-group": bool(admin_group)}
    given |= {"--jobs-per-user": jobs_per_user is not None, **service}
    if not shared:
        if needing := next((name for name, is_given in given.items() if is_given), ""):
            raise UsageError(f"{needing} is for a cluster that several users share; add --shared")
        return None
    from kfp_gpuquota.cluster.local.home import HOME_VARIABLE  # noqa: PLC0415
    from kfp_gpuquota.cluster.local.shared.config import (  # noqa: PLC0415
        SHARED_HOME,
        SHARED_SOCKET,
        SHARED_VARIABLE,
        SharedConfig,
    )

    if os.geteuid() != 0 and not service["--print-unit"]:
        raise UsageError("only root can start jobs as their users: sudo gpuquota cluster start --shared")
    os.environ.setdefault(HOME_VARIABLE, str(SHARED_HOME))
    socket = os.environ.get(SHARED_VARIABLE) or str(SHARED_SOCKET)
    limit = {} if jobs_per_user is None else {"jobs_per_user": jobs_per_user}
    return SharedConfig(socket=socket, group=group, admin_group=admin_group, **limit)


def show_unit(home: Home, shared: SharedConfig, *, install: bool) -> None:
    """Print or install the unit of a service with the options and places of this command."""
    from kfp_gpuquota.cluster.local.shared import service  # noqa: PLC0415

    words = [word for word in sys.argv[1:] if word not in _UNIT_OPTIONS]
    text = service.unit([*words, "--foreground"], home.root, Path(shared.socket))
    if not install:
        echo_data(text.rstrip())
        return
    _check_installation()
    service.UNIT_FILE.write_text(text)
    service.UNIT_FILE.chmod(0o644)
    echo(f"{service.UNIT_FILE} is written; start it: systemctl daemon-reload && systemctl enable --now gpuquota")


def check_start() -> None:
    """Raise ConflictError where the cluster is a service of systemd, UsageError for an unsafe installation."""
    from kfp_gpuquota.cluster.local.shared.service import UNIT_FILE  # noqa: PLC0415

    if UNIT_FILE.exists():
        raise ConflictError(
            f"the cluster is a service ({UNIT_FILE}); change its options with --install-unit, then: systemctl "
            "daemon-reload && systemctl restart gpuquota"
        )
    _check_installation()


def refuse_beside_shared(socket: Path, *, plain: bool) -> None:
    """Raise ConflictError for a start with options where commands use the cluster that users of this machine share."""
    if not plain:
        raise ConflictError(
            f"users of this machine share a cluster ({socket}), and root chooses its options; to start one of your "
            "own, name its directory in GPUQUOTA_HOME"
        )


def serve_here(home: Home, config: ClusterConfig) -> None:
    """Become the daemon; what it reports at its start goes to this process's stderr."""
    _check_installation()
    home.create()
    ready = os.dup(2)
    os.set_inheritable(ready, True)  # noqa: FBT003 (it takes no name)
    os.chdir("/")
    words = [str(home.root), str(ready), msgspec.json.encode(config).decode()]
    os.execv(sys.executable, [sys.executable, "-m", "kfp_gpuquota.cluster.local.daemon", *words])


def stop_shared(socket: Path) -> None:
    """Stop the daemon of a shared cluster; what runs goes on."""
    from kfp_gpuquota.cluster.local.start import await_socket_closed  # noqa: PLC0415

    client().stop_cluster()
    await_socket_closed(socket)
    echo("the cluster of this machine's users has stopped; its jobs go on. Root starts it again")


def _check_installation() -> None:
    import kfp_gpuquota  # noqa: PLC0415
    from kfp_gpuquota.cluster.local.shared.service import check_installation  # noqa: PLC0415

    check_installation((Path(sys.executable), Path(sys.prefix), Path(kfp_gpuquota.__file__)))
