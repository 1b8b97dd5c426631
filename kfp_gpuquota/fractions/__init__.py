"""GPU memory shares on one node: the ledger of usage, limits for workloads, lending of idle memory, and kills.

`Enforcer` and the modules that it imports are pure. Belongs here: the ledger, lending, an agent's access to devices and
processes, and the agent's loop. Does not belong here: placing fractions (scheduler), and their specification (api).
"""

from kfp_gpuquota.fractions.claims import UNKNOWN, Claim, Process, Row, Sample
from kfp_gpuquota.fractions.enforcer import Enforcer, Kill, Round
from kfp_gpuquota.fractions.lending import Policy

__all__ = ["UNKNOWN", "Claim", "Enforcer", "Kill", "Policy", "Process", "Round", "Row", "Sample"]
