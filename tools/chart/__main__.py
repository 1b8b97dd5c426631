"""`python -m tools.chart`: writes what charts/kfp-gpuquota and the package copy of manifests/, or checks it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from kfp_gpuquota.cluster.kubernetes.operations import definitions, doctor
from kfp_gpuquota.cluster.kubernetes.operations.doctor.checks_installation import digest
from tools.chart.templates import PART_OF, SYSTEM, TEMPLATES, render

REPOSITORY: Final = Path(__file__).parents[2]
MANIFESTS: Final = REPOSITORY / "manifests"
CHART: Final = REPOSITORY / "charts" / "kfp-gpuquota"
POLICIES: Final = Path(str(doctor.__file__)).with_name("policies.json")
DEFINITIONS: Final = Path(str(definitions.__file__)).with_suffix(".json")


def generated() -> dict[Path, str]:
    """Return the content of each generated file of the chart."""
    files = {
        CHART / "templates" / template.name: render(
            template, [(MANIFESTS / source).read_text() for source in template.sources]
        )
        for template in TEMPLATES
    }
    dashboard = "components/monitoring/gpuquota.json"
    files[CHART / "files" / "gpuquota.json"] = (MANIFESTS / dashboard).read_text()
    kinds = (MANIFESTS / "crds" / "crds.yaml").read_text()
    label = f"metadata:\n  labels:\n    {PART_OF}\n  name: "
    files[CHART / "crds" / "crds.yaml"] = kinds.replace("metadata:\n  name: ", label)
    files[DEFINITIONS] = "[\n" + ",\n".join(map(json.dumps, yaml.safe_load_all(kinds))) + "\n]\n"
    files[POLICIES] = json.dumps(_policies(), indent=2) + "\n"
    return files


def _policies() -> dict[str, dict[str, Any]]:
    """Return the digests of the policies' rules, which `gpuquota doctor` compares with a cluster's."""
    found = {}
    for source in sorted({source for template in TEMPLATES for source in template.sources}):
        for one in filter(None, yaml.safe_load_all((MANIFESTS / source).read_text())):
            if one["kind"] != "ValidatingAdmissionPolicy":
                continue
            digests, name = [digest(one, SYSTEM)], one["metadata"]["name"]
            if name == "gpuquota-pods":  # as components/fail-open has it
                del one["spec"]["validations"][0]
                digests.append(digest(one, SYSTEM))
            found[name] = {"always": source.startswith("base/"), "digests": digests}
    return found


def main(arguments: list[str] | None = None) -> int:
    """Write the files, or name those that differ; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.chart", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    check = parser.parse_args(arguments).check
    files = generated()
    stale = [path for path, content in files.items() if not path.exists() or path.read_text() != content]
    for path in stale:
        if check:
            sys.stdout.write(f"{path.relative_to(REPOSITORY)} is out of date; run: python -m tools.chart\n")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
