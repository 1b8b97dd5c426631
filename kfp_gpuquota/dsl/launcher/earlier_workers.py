"""Workers of jobs that release 0.2 submitted, whose launcher was replaced by one of this release.

Their start program runs in the image's Python, downloads `/package`, and calls `gpuquota_remote.remote.main` in it.
Here that is CONTINUE, which replaces it by the workers' program of this release. Workers that had the package of 0.2
already use the requests of `relay.py` that have not changed, and `/step`. To be removed with support for 0.2.
"""

from __future__ import annotations

import importlib.util
import io
import zipfile
from functools import cache
from pathlib import Path
from typing import Final

CONTINUE: Final = """\
import http.client, os, ssl, sys

def main(directory):
    url, token = (open(os.path.join(directory, name)).read().strip() for name in ("url", "token"))
    tls = ssl.create_default_context(cafile=os.path.join(directory, "ca.crt"))
    relay = http.client.HTTPSConnection(url.split("/")[2], timeout=60, context=tls)
    relay.request("GET", "/program", headers={"Authorization": "Bearer " + token})
    answer = relay.getresponse()
    content = answer.read()
    if answer.status != 200:
        sys.exit("gpuquota: the launcher's image has no gpuquota-worker: %s %s" % (answer.status, answer.reason))
    package = sys.path[0]
    program = os.path.join(os.path.dirname(package), "gpuquota-worker")
    with open(program, "wb") as file:
        file.write(content)
    os.chmod(program, 0o700)
    os.execv(program, [program, "run", "--runtime=" + package, directory])
"""


@cache
def package() -> bytes:
    """Return a zip with CONTINUE and elastic_runtime, from which Python can import."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("gpuquota_remote/__init__.py", "")
        archive.writestr("gpuquota_remote/remote.py", CONTINUE)
        for name, path in _elastic_runtime():
            archive.write(path, f"elastic_runtime/{name}")
    return content.getvalue()


def _elastic_runtime() -> list[tuple[str, Path]]:
    """Return elastic_runtime's source files as (relative path, path). Not imported: the launcher has no torch."""
    found = importlib.util.find_spec("elastic_runtime")
    assert found is not None
    assert found.submodule_search_locations
    root = Path(found.submodule_search_locations[0])
    return [(str(path.relative_to(root)), path) for path in sorted(root.rglob("*.py"))]
