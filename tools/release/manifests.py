"""The chart's archive, and the overlays as one YAML file each, with their images in one registry under one tag."""

from __future__ import annotations

import gzip
import io
import subprocess
import tarfile
from typing import TYPE_CHECKING, Final

from kfp_gpuquota.version import __version__
from tools.chart.__main__ import CHART
from tools.devcluster import helm

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

OVERLAYS: Final = {"standalone": "false", "kubeflow": "true"}
"""Each overlay, and the value kubeflow.enabled of the chart that renders it."""


def render(target: Path, registry: str, tag: str, digests: Mapping[str, str] | None = None) -> list[Path]:
    """Write install-OVERLAY.yaml for each overlay. Raises UnavailableError where helm cannot be built.

    Images of which there are `digests`, by name, are installed by digest: their tag is then for readers only.

    The QuotaPolicy is left out: kubectl cannot apply an object together with its kind, and the controller creates it.
    """
    program, written = helm.provide(), []
    for overlay, kubeflow in OVERLAYS.items():
        path = target / f"install-{overlay}.yaml"
        by_digest = "".join(f",image.digests.{name}={one}" for name, one in sorted((digests or {}).items()))
        values = f"image.registry={registry},image.tag={tag},kubeflow.enabled={kubeflow},quotaPolicy.create=false"
        command = [
            str(program),
            "template",
            "gpuquota",
            str(CHART),
            "--include-crds",
            "--namespace=default",
            "--set",
            f"{values}{by_digest}",
        ]
        path.write_bytes(subprocess.run(command, capture_output=True, check=True).stdout)
        written.append(path)
    return written


def package(target: Path, epoch: int) -> Path:
    """Write the chart's archive. `helm package` writes the present time into it, so no two archives are the same."""
    path = target / f"{CHART.name}-chart-{__version__}.tgz"
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for source in sorted(one for one in CHART.rglob("*") if one.is_file()):
            entry = tarfile.TarInfo(f"{CHART.name}/{source.relative_to(CHART)}")
            entry.size, entry.mtime, entry.mode = source.stat().st_size, epoch, 0o644
            with source.open("rb") as file:
                archive.addfile(entry, file)
    path.write_bytes(gzip.compress(content.getvalue(), mtime=epoch))
    return path
