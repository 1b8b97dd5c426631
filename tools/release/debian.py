"""Files of Debian's packages for a layer: without a container engine, without root, for any architecture.

`mmdebstrap` resolves, downloads and verifies the packages. They are only extracted: no script of a package runs, so an
architecture needs no emulator, and nothing of this machine (its mirror, its certificates, its logs) can enter. What the
scripts would have made and our programs need is made here: users, the bundle of certificates.

Rejected: a whole Debian, as the tests' images have it. It runs scripts, and brings a package manager, a shell and perl
into images that start one Python program.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tools.release.distributions import BuildError
from tools.release.layer import File, Layer, merged

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

RELEASE: Final = "bookworm"
PYTHON_VERSION: Final = (3, 11)
USER: Final = 65532
PYTHON: Final = (
    "base-files",
    "ca-certificates",
    "gcc-12-base",
    "libbz2-1.0",
    "libc6",
    "libcrypt1",
    "libexpat1",
    "libffi8",
    "libgcc-s1",
    "liblzma5",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "libsqlite3-0",
    "libssl3",
    "libstdc++6",
    "libuuid1",
    "media-types",
    "netbase",
    "python3.11-minimal",
    "tzdata",
    "zlib1g",
)
"""What Python and the wheels of our images load. What else these packages depend on serves their scripts only."""

SHELL: Final = ("busybox-static",)

_KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
_PROGRAMS: Final = {"mmdebstrap": "mmdebstrap", "dpkg-deb": "dpkg"}
_UNUSED: Final = (
    "etc/apt/",
    "usr/share/doc/",
    "usr/share/man/",
    "usr/share/locale/",
    "usr/share/lintian/",
    "usr/share/bug/",
)
_APPLETS: Final = (
    "[ awk basename cat chmod cp cut date df dirname echo env expr false find grep gunzip gzip head hostname id ln ls "
    "mkdir mktemp mv nc printf ps pwd readlink realpath rm rmdir sed seq sh sleep sort stat tail tar tee test timeout "
    "touch tr true uname uniq wc wget which xargs"
)


@dataclass(frozen=True, slots=True, order=True)
class Package:
    """A package of an image: `kind` is that of its package URL (deb, golang, pypi); `architecture` may be ""."""

    kind: str
    name: str
    version: str
    architecture: str = ""


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A folder of packages for an architecture."""

    folder: Path

    def layer(self, names: Iterable[str]) -> tuple[Layer, list[Package]]:
        """Return the files of the named packages, and the packages. Raises BuildError for one that is absent."""
        layer = Layer()
        return layer, [self._extract(name, layer) for name in names]

    def _extract(self, name: str, layer: Layer) -> Package:
        found = list(self.folder.glob(f"{name}_*.deb"))
        if len(found) != 1:
            raise BuildError(f"Debian {RELEASE} has no package {name}")
        control = _run("dpkg-deb", "--field", str(found[0])).decode()
        fields = dict(line.split(": ", 1) for line in control.splitlines() if ": " in line and line[0] != " ")
        with tempfile.TemporaryFile() as content:
            content.write(_run("dpkg-deb", "--fsys-tarfile", str(found[0])))
            content.seek(0)
            with tarfile.open(fileobj=content) as archive:
                for entry in archive:
                    _add(archive, entry, layer)
        layer.add(f"var/lib/dpkg/status.d/{name}", control)  # where scanners look for packages without a manager
        return Package("deb", name, fields["Version"], fields["Architecture"])


def missing() -> str:
    """Return what this machine lacks to build images, in one sentence; "" when nothing."""
    absent = sorted(package for program, package in _PROGRAMS.items() if shutil.which(program) is None)
    return f"images are built of Debian's packages, which needs: apt-get install {' '.join(absent)}" if absent else ""


def host_sources() -> list[str]:
    """Return apt's lines for RELEASE as this machine is configured.

    Where apt has no such source there are none, and mmdebstrap takes those of Debian's own archive.
    """
    suites = [RELEASE, f"{RELEASE}-updates", f"{RELEASE}-security"]
    found: dict[str, str] = {}
    if shutil.which("apt-get"):
        asked = "$(CREATED_BY) $(COMPONENT) $(RELEASE) $(REPO_URI)"
        listed = _run("apt-get", "indextargets", "--format", asked).decode()
        for line in listed.splitlines():
            kind, component, suite, address = line.split(maxsplit=3)
            if kind == "Packages" and component == "main" and suite in suites:
                found.setdefault(suite, address)
    return [source(found[suite], suite) for suite in suites if suite in found] if RELEASE in found else []


def source(address: str, suite: str) -> str:
    """Return apt's line for a suite of Debian."""
    signed = f"[signed-by={_KEYRING}] " if Path(_KEYRING).exists() else ""
    return f"deb {signed}{address} {suite} main"


def download(names: Sequence[str], architecture: str, sources: Sequence[str], folder: Path, epoch: int) -> Downloaded:
    """Download packages and what they depend on into a new folder. Raises BuildError with mmdebstrap's output."""
    folder.mkdir()
    _run(
        "mmdebstrap",
        "--quiet",
        "--variant=extract",
        "--mode=chrootless",
        f"--architectures={architecture}",
        f"--include={','.join(names)}",
        f"--extract-hook=sync-out /var/cache/apt/archives '{folder}'",
        "--format=null",
        RELEASE,
        "/dev/null",
        *sources,
        epoch=epoch,
    )
    return Downloaded(folder)


def complete_system(layer: Layer) -> None:
    """Add what the scripts of Debian's packages would have made, as far as a Python program needs it."""
    users = {"root": (0, "/root"), "nonroot": (USER, "/home/nonroot"), "nobody": (65534, "/nonexistent")}
    layer.add(
        "etc/passwd",
        "".join(f"{name}:x:{number}:{number}:{name}:{home}:/sbin/nologin\n" for name, (number, home) in users.items()),
    )
    layer.add("etc/group", "".join(f"{name}:x:{number}:\n" for name, (number, _) in users.items()))
    layer.add("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")
    authorities = sorted(
        path for path in layer.files if path.startswith("usr/share/ca-certificates/") and path.endswith(".crt")
    )
    layer.add("etc/ssl/certs/ca-certificates.crt", b"".join(layer.files[path].content for path in authorities))
    layer.link("usr/lib/ssl/cert.pem", "/etc/ssl/certs/ca-certificates.crt")  # where OpenSSL looks for it
    layer.folder("home/nonroot", 0o700, USER)
    layer.folder("tmp", 0o1777)
    layer.merge_usr()


def add_applets(layer: Layer) -> None:
    """Add the names under which scripts call busybox."""
    for applet in _APPLETS.split():
        layer.link(f"bin/{applet}", "busybox")


def _add(archive: tarfile.TarFile, entry: tarfile.TarInfo, layer: Layer) -> None:
    path = merged(entry.name)
    if not path or (path.startswith(_UNUSED) and not _is_license(entry)):
        return
    if entry.isdir():
        layer.folder(path, entry.mode)
    elif entry.islnk():
        layer.files[path] = File(tarfile.LNKTYPE, mode=entry.mode, target=merged(entry.linkname))
    elif entry.issym():
        layer.link(path, entry.linkname)
    elif file := archive.extractfile(entry):
        layer.add(path, file.read(), entry.mode)


def _is_license(entry: tarfile.TarInfo) -> bool:
    """Whether an entry of usr/share/doc is a license, or the link of a package that has another one's."""
    return entry.name.endswith("/copyright") or (entry.issym() and entry.name.count("/") == 4)


def _run(*command: str, epoch: int = 0) -> bytes:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    if done.returncode:
        raise BuildError(f"{command[0]} failed ({done.returncode}): {done.stderr.decode(errors='replace')[-3000:]}")
    return done.stdout
