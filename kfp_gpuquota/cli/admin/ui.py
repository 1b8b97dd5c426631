"""`gpuquota ui`: the web page of the embedded cluster."""

from __future__ import annotations

import html
import webbrowser
from typing import Annotated

import typer

from kfp_gpuquota.api.wire import PageAddress
from kfp_gpuquota.cli.arguments.options import client
from kfp_gpuquota.cli.display.terminal import echo

app = typer.Typer()


NoBrowserOption = Annotated[bool, typer.Option("--no-browser", help="Print the link instead; it opens once.")]
LogOutOption = Annotated[bool, typer.Option("--log-out", help="First log out every browser that was let in.")]
OriginOption = Annotated[
    str,
    typer.Option("--origin", metavar="URL", help="Scheme and host in the browser, where a proxy leads to the page."),
]
BasePathOption = Annotated[
    str, typer.Option("--base-path", metavar="PATH", help="Path at which that proxy has the page; {port} is its port.")
]


@app.command("ui", short_help="Open the web page.")
def ui(
    *,
    no_browser: NoBrowserOption = False,
    log_out: LogOutOption = False,
    origin: OriginOption = "",
    base_path: BasePathOption = "",
) -> None:
    """Open the cluster's web page in a browser: teams, the queue, each job, nodes and GPUs.

    The page is served on a port of 127.0.0.1, to browsers that this command has let in during the last 14 days. From
    another machine: ssh -N -L PORT:127.0.0.1:PORT HOST, then open the link there. Behind a proxy that keeps the path,
    name its address once; --base-path / without an origin forgets it.

    Examples:
      gpuquota ui
      gpuquota ui --no-browser --log-out
      gpuquota ui --origin https://hub.example.org --base-path '/user/ann/proxy/absolute/{port}'
    """
    address = PageAddress(origin=origin, base_path=base_path) if origin or base_path else None
    link = client().open_page(address, log_out=log_out)
    if no_browser or not _opened(link.url):
        echo(f"open this link within {link.valid_s / 60:.0f} minutes, once: {link.url}")
    else:
        echo("the page opens in your browser; if it does not: gpuquota ui --no-browser")


def _opened(url: str) -> bool:
    """Open the link by way of a private file: other users of the machine see the command lines of programs."""
    from kfp_gpuquota.cluster.connect import embedded_home  # noqa: PLC0415
    from kfp_gpuquota.cluster.local.home import write_private  # noqa: PLC0415

    file = embedded_home().root / "open-page.html"
    refresh = f'<meta http-equiv="refresh" content="0; url={html.escape(url)}">'
    write_private(file, f"<!doctype html><title>gpuquota</title>{refresh}\n")
    return webbrowser.open(file.as_uri())
