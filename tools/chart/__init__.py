"""Writes the Helm chart's templates from manifests/, so that both install the same objects.

    python -m tools.chart            # after each change of manifests/
    python -m tools.chart --check    # exit code 1 where the chart is out of date

templates.py   which template comes from which manifest, and what of it becomes a value

By hand are: Chart.yaml, values.yaml, values.schema.json, and of templates/ _helpers.tpl, NOTES.txt, quota-policy.yaml,
dashboard.yaml.
Rejected: a chart that reads the manifests as files and changes them as it is rendered, which nobody could review; and
templates by hand, which drift from the manifests.
"""
