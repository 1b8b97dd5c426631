"""Pods whose GPUs are unused: their owners are warned, then suspended, as policies say (engine/unused_gpus.py decides).

    exporters of the nodes ─► readings ─► used, unused or not measured     dcgm (pure), exporters
    pods ─► workloads, each with its rule                                  workloads (pure)
    both ─► warnings, suspensions; what is counted ─► GpuQuota's status    unused_workloads

What is counted is in the status of the team's GpuQuota, which only the controller writes: the next one continues.
Who is suspended is in the object: `spec.suspend` and the annotation gpuquota.dev/suspended, written in one patch.
"""
