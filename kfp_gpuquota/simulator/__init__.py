"""The scheduler over traces, in simulated time: what would have become of these jobs under another policy.

Belongs here: reading traces, policies to compare, simulated time, measures, the picture. Does not: scheduling, which is
`kfp_gpuquota.scheduler`, the very same that runs clusters.
"""

from kfp_gpuquota.simulator.measures import Result, Spread
from kfp_gpuquota.simulator.policies import POLICIES, Policy, Quotas, defragmenting
from kfp_gpuquota.simulator.recorded import History, Twin, history, trace_node
from kfp_gpuquota.simulator.simulation import SimulationOptions, simulate
from kfp_gpuquota.simulator.trace import (
    Pace,
    TraceJob,
    TraceNode,
    Training,
    make_elastic,
    read_jobs,
    read_nodes,
    sped_up,
    thinned,
)

__all__ = [
    "POLICIES",
    "History",
    "Pace",
    "Policy",
    "Quotas",
    "Result",
    "SimulationOptions",
    "Spread",
    "TraceJob",
    "TraceNode",
    "Training",
    "Twin",
    "defragmenting",
    "history",
    "make_elastic",
    "read_jobs",
    "read_nodes",
    "simulate",
    "sped_up",
    "thinned",
    "trace_node",
]
