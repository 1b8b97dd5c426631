"""What the webhook costs for each GPU pod: the decision alone, and a call over HTTPS with all that belongs to it.

    python benchmarks/reviews.py --reviews 5000 --connections 8

The server is a process of its own, and its CPU time is what counts; the caller's is not in it. The last line is JSON:
decision_us, share_us (a pod that asks for a part of a GPU, with 100 policies in force), call_cpu_us, calls_per_s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import ssl
import subprocess
import sys
import time
from typing import Any

import aiohttp
from common import print_conditions, print_result

from kfp_gpuquota.api.policy import PartRule, WorkloadPolicy
from kfp_gpuquota.cluster.kubernetes.admission import pods
from kfp_gpuquota.cluster.kubernetes.admission import server as webhook

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SERVER = """
import asyncio, ssl, sys, time
from aiohttp import web
from kfp_gpuquota.cluster.kubernetes.admission import server as webhook
from kfp_gpuquota.cluster.certificates import maintained
from kfp_gpuquota.cluster.kubernetes.quota.quota_policy import CurrentRules
from kfp_gpuquota.cluster.kubernetes.quota.workload_policies import CurrentPolicies
from kfp_gpuquota.server.transport.tls import load_pair
async def main():
    material = maintained(None, ["127.0.0.1"], time.time())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    load_pair(context, material.serving.certificate, material.serving.key)
    runner = web.AppRunner(webhook.build_app("controller", CurrentPolicies(), CurrentRules()), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    print(runner.addresses[0][1], material.trusted.hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


POLICIES = tuple(
    WorkloadPolicy(name=f"team-{number}", project=f"team-{number}", gpu_fraction_limit=PartRule(default=0.9, most=1.0))
    for number in range(100)
)


def review(share: dict[str, str] | None = None) -> bytes:
    """A pod as a Job's controller makes it, about as long as such bodies are: for one GPU, or for a share of one."""
    amounts = {"cpu": "8", "memory": "64Gi"} | ({} if share else {"nvidia.com/gpu": "1"})
    container: dict[str, Any] = {
        "name": "main",
        "image": "registry/team/train:latest",
        "resources": {"limits": amounts, "requests": amounts},
        "env": [{"name": f"SETTING_{number}", "value": "value"} for number in range(20)],
        "volumeMounts": [{"name": f"volume-{number}", "mountPath": f"/data/{number}"} for number in range(4)],
    }
    pod = {
        "metadata": {
            "generateName": "train-",
            "namespace": "team-a",
            "labels": {"job-name": "train", "gpuquota.dev/priority": "60"},
            "annotations": {"note": "x" * 100, **(share or {})},
            "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "1"}],
        },
        "spec": {
            "containers": [container],
            "volumes": [{"name": f"volume-{number}", "emptyDir": {}} for number in range(4)],
            "tolerations": [{"key": f"node.kubernetes.io/{key}"} for key in ("not-ready", "unreachable")],
        },
    }
    user = {"username": "alice", "groups": ["system:authenticated"]}
    request = {"uid": "1", "operation": "CREATE", "namespace": "team-a", "userInfo": user, "object": pod}
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()


def decision_us(body: bytes, count: int, policies: tuple[WorkloadPolicy, ...] = ()) -> float:
    """Microseconds for one decision, without HTTP."""
    started = time.process_time()
    for _ in range(count):
        pods.answer(body, "controller", policies)
    return (time.process_time() - started) / count * 1e6


async def call(url: str, context: ssl.SSLContext, body: bytes, count: int, connections: int) -> float:
    """Seconds for `count` calls over so many connections, as an API server keeps them open."""
    connector = aiohttp.TCPConnector(ssl=context, limit=connections)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def caller() -> None:
            for _ in range(count // connections):
                async with session.post(url, data=body) as answer:
                    assert json.loads(await answer.read())["response"]["allowed"]

        started = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(connections)))
        return time.perf_counter() - started


def cpu_s(pid: int) -> float:
    """CPU time that a process has used."""
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reviews", type=int, default=5000)
    parser.add_argument("--connections", type=int, default=8)
    options = parser.parse_args()
    body = review()
    print_conditions(
        "reviews of pods", bytes_a_review=len(body), reviews=options.reviews, connections=options.connections
    )
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout
    port, trusted = server.stdout.readline().split()
    context = ssl.create_default_context(cadata=bytes.fromhex(trusted.decode()).decode())
    url = f"https://127.0.0.1:{int(port)}{webhook.PATH}"
    asyncio.run(call(url, context, body, options.connections * 20, options.connections))  # handshakes and warm-up
    before = cpu_s(server.pid)
    seconds = asyncio.run(call(url, context, body, options.reviews, options.connections))
    used = cpu_s(server.pid) - before
    server.communicate()
    print_result(
        decision_us=round(decision_us(body, options.reviews), 1),
        share_us=round(decision_us(review({"gpu-fraction": "0.25"}), options.reviews, POLICIES), 1),
        call_cpu_us=round(used / options.reviews * 1e6, 1),
        calls_per_s=round(options.reviews / seconds),
    )


if __name__ == "__main__":
    main()
