"""`python -m tools.release FOLDER`: builds everything that a release publishes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from kfp_gpuquota.version import __version__
from tools.devcluster import UnavailableError
from tools.release import debian, distributions, images, manifests, sbom

FIRST_DAY: int = 1_767_225_600  # 2026-01-01: of a tree without a history


def release(target: Path, registry: str, tag: str, epoch: int, *, with_images: bool = False) -> list[Path]:
    """Build a release into a folder, which is new, empty or has an earlier release; return its files.

    Raises BuildError for any other folder, whose files would be lost.
    """
    if with_images and (lack := debian.missing()):
        raise distributions.BuildError(lack)
    target.mkdir(parents=True, exist_ok=True)
    found = list(target.iterdir())
    if found and not (target / sbom.SUMS).exists():
        raise distributions.BuildError(f"{target} has other files; name a new folder")
    for old in found:
        old.unlink()
    artifacts = [*distributions.build(target, epoch), *distributions.requirement_files(target)]
    built = images.build(target, registry, tag, epoch) if with_images else []
    digests = {image.name: image.digest for image in built}
    artifacts += [manifests.package(target, epoch), *manifests.render(target, registry, tag, digests)]
    artifacts += [image.path for image in built]
    return [*artifacts, *sbom.write(target, artifacts, epoch, built)]


def source_date_epoch() -> int:
    """Return $SOURCE_DATE_EPOCH, else the time of the last commit, in seconds since 1970."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    asked = ["git", "-C", str(distributions.REPOSITORY), "log", "-1", "--format=%ct"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip() else FIRST_DAY


def main(arguments: list[str] | None = None) -> int:
    """Build a release; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--registry", default="kfp-gpuquota", help="registry of the images and of the install files")
    parser.add_argument("--tag", default=__version__, help="tag of the images; by default the version")
    parser.add_argument("--images", action="store_true", help="also build the images, of packages that are downloaded")
    given = parser.parse_args(arguments)
    try:
        built = release(given.folder, given.registry, given.tag, source_date_epoch(), with_images=given.images)
    except (distributions.BuildError, UnavailableError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for path in built:
        sys.stdout.write(f"{sbom.sha256(path)}  {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
