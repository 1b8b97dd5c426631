"""The alerts of manifests/components/monitoring, checked and evaluated by Prometheus' own promtool."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.kubernetes.conftest import skip_or_fail
from tools.devcluster import promtool
from tools.devcluster.binaries import UnavailableError

RULES = Path(__file__).parents[2] / "manifests" / "components" / "monitoring" / "rules.yaml"


@dataclass(frozen=True)
class Case:
    """Series by minute, in promtool's notation, and the minutes at which the alert does not fire and fires."""

    series: dict[str, str]
    quiet_at: int
    fires_at: int
    labels: dict[str, str] = field(default_factory=dict)


REJECTED = "apiserver_admission_webhook_rejection_count"
CASES = {
    "GpuquotaNoLeader": Case({'gpuquota_leader{pod="a"}': "1x10 0x20", 'gpuquota_leader{pod="b"}': "0x30"}, 10, 14),
    "GpuquotaPlanOverdue": Case({'gpuquota_plan_overdue_seconds{pod="a"}': "0x5 90x10"}, 5, 8),
    "GpuquotaPlanFails": Case({'gpuquota_plan_failures_total{pod="a"}': "0x10 1x30"}, 10, 12),
    "GpuquotaWebhookErrors": Case(
        {
            f'{REJECTED}{{name="pods.gpuquota.dev",error_type="no_error"}}': "0+5x40",
            f'{REJECTED}{{name="x.other.dev",error_type="calling_webhook_error"}}': "0+5x40",
            f'{REJECTED}{{name="pods.gpuquota.dev",error_type="calling_webhook_error"}}': "0x20 1+1x20",
        },
        20,
        30,
    ),
    "GpuquotaCertificateExpires": Case(  # 20 days and 2 hours after the start; another process has no certificate
        {
            'gpuquota_certificate_expiry_timestamp_seconds{pod="a"}': f"{20 * 86_400 + 7200}x300",
            'gpuquota_certificate_expiry_timestamp_seconds{pod="b"}': "0x300",
        },
        170,
        190,
    ),
    "GpuquotaQuotaNotHonoured": Case(
        {
            'gpuquota_unmet_guarantee_gpus{project="a"}': "0x5 2x30",
            'gpuquota_unmet_guarantee_gpus{project="b"}': "0x35",
        },
        15,
        25,
        {"project": "a"},
    ),
    "GpuquotaPodNotBound": Case({'gpuquota_unbound_pod_seconds{pod="a"}': "0x5 60+60x30"}, 19, 24),
    "GpuquotaEvictionBlocked": Case({'gpuquota_blocked_evictions{pod="a"}': "0x5 1x30"}, 10, 20),
    "GpuquotaReclaimOverdue": Case(
        {
            'gpuquota_reclaim_steps_total{step="evicted"}': "0+1x40",
            'gpuquota_reclaim_steps_total{step="overdue"}': "0x20 1x20",
        },
        20,
        22,
    ),
    "GpuquotaWritesBehind": Case(
        {'gpuquota_queued_writes{lane="bind"}': "600x40", 'gpuquota_queued_writes{lane="status"}': "0x10 600x30"},
        10,
        20,
    ),
    "GpuquotaWatchLost": Case({'gpuquota_lists{path="/api/v1/pods"}': "1x30 1+1x40"}, 30, 65),
    "GpuquotaObjectsSetAside": Case({'gpuquota_quarantined_objects{kind="Pod"}': "0x5 1x30"}, 15, 25, {"kind": "Pod"}),
}


@pytest.fixture(scope="module")
def program() -> Path:
    """Promtool; skipped, or failed where it must not be, without Go."""
    try:
        return promtool.provide()
    except UnavailableError as lack:
        skip_or_fail(lack)


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    """The rules as Prometheus reads them: the operator writes `spec` into a file."""
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(RULES.read_text())["spec"]))
    return file


def alerts() -> dict[str, dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["spec"]["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def unit_test(name: str, case: Case) -> dict[str, Any]:
    rule = alerts()[name]
    fired = {"exp_labels": {**rule["labels"], **case.labels}, "exp_annotations": rule["annotations"]}
    expected: dict[int, list[dict[str, Any]]] = {case.quiet_at: [], case.fires_at: [fired]}
    return {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": fires} for minute, fires in expected.items()
        ],
    }


def run(program: Path, *words: str) -> str:
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_alert_has_a_case() -> None:
    assert set(CASES) == set(alerts())


@pytest.mark.slow  # the first time promtool is built, which takes minutes
@pytest.mark.timeout(2400)
def test_prometheus_accepts_the_rules_and_each_alert_fires_when_it_should(
    program: Path, groups: Path, tmp_path: Path
) -> None:
    assert f"{len(CASES)} rules found" in run(program, "check", "rules", "--lint-fatal", str(groups))
    tests = {
        "rule_files": [str(groups)],
        "evaluation_interval": "1m",
        "tests": [unit_test(name, case) for name, case in CASES.items()],
    }
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump(tests))
    assert "SUCCESS" in run(program, "test", "rules", str(file))
