"""GPU memory shares on one node: who holds how much, what is lent, who yields, who is ended.

`Enforcer` and what it rests on are pure. Belongs here: the ledger, lending, devices and processes as an agent
sees them, the agent's loop. Does not: placing fractions (scheduler), what a user may ask for (api).
"""

from kfp_gpuquota.fractions.claims import UNKNOWN, Claim, Process, Row, Sample
from kfp_gpuquota.fractions.enforcer import Enforcer, Kill, Round
from kfp_gpuquota.fractions.lending import Policy

__all__ = ["UNKNOWN", "Claim", "Enforcer", "Kill", "Policy", "Process", "Round", "Row", "Sample"]
