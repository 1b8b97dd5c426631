"""An SPDX 2.3 document of a release, and its checksums."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import urllib.parse
from typing import TYPE_CHECKING, Any, Final

from kfp_gpuquota.version import __version__
from tools.release import distributions
from tools.release.debian import RELEASE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from tools.release.debian import Package
    from tools.release.images import Built

Json = dict[str, Any]

SUMS: Final = "SHA256SUMS"
_HOME: Final = "https://github.com/kfp-gpuquota/kfp-gpuquota"
_NAME: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(\[[^]]*\])?")


def write(target: Path, artifacts: Iterable[Path], epoch: int, images: Sequence[Built] = ()) -> list[Path]:
    """Write the SBOM and SHA256SUMS of the artifacts, of which some are images; return both."""
    document = target / f"kfp-gpuquota-{__version__}.spdx.json"
    document.write_text(json.dumps(_document(sorted(artifacts), epoch, images), indent=2) + "\n")
    sums = target / SUMS
    sums.write_text("".join(f"{sha256(path)}  {path.name}\n" for path in sorted([*artifacts, document])))
    return [document, sums]


def sha256(path: Path) -> str:
    """Return a file's digest, as sha256sum shows it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def dependencies(name: str) -> dict[str, str]:
    """Return what a distribution and its extras require directly, with the versions of constraints.txt."""
    about = distributions.project(name)["project"]
    wanted = [
        *about.get("dependencies", ()),
        *(one for extra in about["optional-dependencies"].values() for one in extra),
    ]
    tested = dict(_constraints())
    found = {}
    for requirement in wanted:
        match = _NAME.match(requirement)
        assert match, requirement
        key = match[1].lower().replace("_", "-")
        if key not in {distributions.SERVER, distributions.RUNTIME}:
            found[key] = tested.get(key, "NOASSERTION")
    return dict(sorted(found.items()))


def _constraints() -> Iterator[tuple[str, str]]:
    for line in (distributions.REPOSITORY / "constraints.txt").read_text().splitlines():
        name, separator, version = line.partition("==")
        if separator:
            yield name.strip().lower().replace("_", "-"), version.split(";")[0].strip()


def _document(artifacts: list[Path], epoch: int, images: Sequence[Built]) -> Json:
    names = (distributions.SERVER, distributions.RUNTIME)
    of_ours = {name: _package(name, __version__, "Apache-2.0") for name in names}
    of_others: dict[str, Json] = {}
    relations = [_relation("SPDXRef-DOCUMENT", "DESCRIBES", one["SPDXID"]) for one in of_ours.values()]
    server, runtime = (of_ours[name]["SPDXID"] for name in names)
    relations.append(_relation(server, "DEPENDS_ON", runtime))
    for name, ours in of_ours.items():
        for required, version in dependencies(name).items():
            one = of_others.setdefault(required, _package(required, version, "NOASSERTION"))
            relations.append(_relation(one["SPDXID"], "OPTIONAL_DEPENDENCY_OF", ours["SPDXID"]))
    of_images = {package for image in images for package in image.packages}
    inside = {package: _inside(package, [*of_ours.values(), *of_others.values()]) for package in sorted(of_images)}
    for image in images:
        file = f"SPDXRef-File-{_identifier(image.path.name)}"
        relations += [_relation(file, "CONTAINS", inside[package]["SPDXID"]) for package in sorted(image.packages)]
    archives = {image.path for image in images}
    packages = {one["SPDXID"]: one for one in (*of_ours.values(), *of_others.values(), *inside.values())}
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"kfp-gpuquota-{__version__}",
        "documentNamespace": f"{_HOME}/releases/{__version__}/sbom-{epoch}",
        "creationInfo": {
            "created": datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "creators": ["Organization: kfp-gpuquota"],
        },
        "packages": list(packages.values()),
        "files": [_file(path, "NOASSERTION" if path in archives else "Apache-2.0") for path in artifacts],
        "relationships": relations,
    }


def _inside(package: Package, listed: Iterable[Json]) -> Json:
    """Return a package of an image; `listed` are those that the document has already."""
    if package.kind == "pypi":
        one = _package(package.name, package.version, "NOASSERTION", f"-{package.version}")
        same = (one["name"], one["versionInfo"])
        return next((other for other in listed if (other["name"], other["versionInfo"]) == same), one)
    suffix = f"-{package.version}-{package.architecture or package.kind}"
    one = _package(package.name, package.version, "NOASSERTION", suffix)
    version = urllib.parse.quote(package.version, safe="")
    locator = (
        f"pkg:deb/debian/{urllib.parse.quote(package.name)}@{version}?arch={package.architecture}&distro={RELEASE}"
        if package.kind == "deb"
        else f"pkg:{package.kind}/{package.name}@{version}"
    )
    one["externalRefs"][0]["referenceLocator"] = locator
    return one


def _package(name: str, version: str, declared: str, suffix: str = "") -> Json:
    located = [f"pkg:pypi/{name}@{version}"] if version != "NOASSERTION" else []
    return {
        "SPDXID": f"SPDXRef-Package-{_identifier(name + suffix)}",
        "name": name,
        "versionInfo": version,
        "downloadLocation": _HOME if declared == "Apache-2.0" else "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": declared,
        "licenseDeclared": declared,
        "copyrightText": "NOASSERTION",
        "externalRefs": [
            {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": locator}
            for locator in located
        ],
    }


def _file(path: Path, licensed: str) -> Json:
    return {
        "SPDXID": f"SPDXRef-File-{_identifier(path.name)}",
        "fileName": f"./{path.name}",
        "checksums": [
            {"algorithm": "SHA1", "checksumValue": hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()},
            {"algorithm": "SHA256", "checksumValue": sha256(path)},
        ],
        "licenseConcluded": licensed,
        "copyrightText": "NOASSERTION",
    }


def _relation(one: str, kind: str, other: str) -> Json:
    return {"spdxElementId": one, "relationshipType": kind, "relatedSpdxElement": other}


def _identifier(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "-", name)
