#!/usr/bin/env bash
# Verifies an installation on the current context: the doctor's checks, and in a namespace of its own a pod that waits at
# the gate and runs, and an elastic job that runs to its end. It needs one idle GPU, and leaves nothing behind.
#   charts/verify.sh [IMAGE]        IMAGE: any with a shell; busybox:1.37 by default
set -euo pipefail
image=${1:-busybox:1.37}
team=verify-$$-$RANDOM

cleanup() {
  kubectl delete namespace "$team" --ignore-not-found --wait=false > /dev/null
  kubectl delete gpuquotas "$team" --ignore-not-found > /dev/null
}
trap cleanup EXIT

gpuquota --context . doctor
kubectl create namespace "$team"
kubectl label namespace "$team" gpuquota.dev/managed=true
kubectl apply -f - << END
apiVersion: gpuquota.dev/v1alpha1
kind: GpuQuota
metadata: {name: $team}
spec: {guaranteed: 0, limit: 1}
---
apiVersion: gpuquota.dev/v1alpha1
kind: ElasticJob
metadata: {name: job, namespace: $team}
spec:
  gpus: 1
  template:
    spec:
      containers:
      - {name: main, image: "$image", command: [sh, -c, "echo an elastic job ran"]}
END
kubectl wait -n "$team" elasticjob/job --for=jsonpath='{.status.phase}'=Succeeded --timeout=180s
gpuquota --context . logs job -p "$team"
kubectl apply -n "$team" -f - << END
apiVersion: v1
kind: Pod
metadata: {name: pod}
spec:
  restartPolicy: Never
  containers:
  - name: main
    image: "$image"
    command: [sh, -c, "echo a pod ran"]
    resources: {limits: {nvidia.com/gpu: 1}}
END
kubectl wait -n "$team" pod/pod --for=jsonpath='{.status.phase}'=Succeeded --timeout=180s
kubectl get -n "$team" pod/pod -o jsonpath='{.metadata.annotations.gpuquota\.dev/devices}' | grep -q . || {
  echo "the pod ran outside of the quota" >&2
  exit 1
}
echo "verified: the quota starts pods and elastic jobs"
