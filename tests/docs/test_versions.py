"""Every file that carries the version of this package has the same one."""

from __future__ import annotations

import re
from pathlib import Path

from kfp_gpuquota.version import __version__

ROOT = Path(__file__).parents[2]
OWN_IMAGE = re.compile(r"kfp-gpuquota/[a-z]+(?::|\n\s+newTag: )([\w.]+)")


def test_manifests_images_and_documents_name_the_images_of_this_version() -> None:
    files = [*ROOT.glob("manifests/**/*.yaml"), *ROOT.glob("images/*/Dockerfile"), *ROOT.glob("docs/**/*.md")]
    found = {(str(file.relative_to(ROOT)), tag) for file in files for tag in OWN_IMAGE.findall(file.read_text())}
    assert len(found) >= 7
    assert {tag for _, tag in found} == {__version__}, found


def test_the_chart_is_of_this_version() -> None:
    chart = (ROOT / "charts/kfp-gpuquota/Chart.yaml").read_text()
    assert re.findall(r"^(?:appVersion|version): (.+)$", chart, re.MULTILINE) == [__version__, __version__]


def test_the_changelog_has_a_section_for_this_version() -> None:
    assert f"\n## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()
