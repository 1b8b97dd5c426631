"""Computes how much of one device each workload may use now. Pure.

Memory that workloads leave unused of their requests is lent to workloads that want more than their request, up to their
limit: the higher priority first, within a priority in proportion to the requests.

Memory that is *reserved* is not lent: the request of a workload that waits to start; of a workload that listens, what
it reports to want, because it asks before it allocates more; of a silent workload its whole request, because its next
allocation cannot be predicted, unless the policy lends it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.fractions.claims import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kfp_gpuquota.fractions.claims import Claim


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The agent's permissions on one node.

    `killer`: end processes that hold what an owner needs, or that are over their limit; off, it only reports them.
    `lend_silent`: lend also what silent owners leave unused of their request; their guarantee then holds at arrival
    only. `yield_s`: how long a listening borrower has to give memory back before it counts as silent. `term_s`: from
    SIGTERM to SIGKILL. `slack_mib`: how far a process may be above its limit, for what a driver's context takes
    beside the allocator. A limit is raised by at least `grain` of the device at a time, so that it does not flap.
    """

    killer: bool = False
    lend_silent: bool = False
    yield_s: float = 1.0
    term_s: float = 2.0
    slack_mib: int = 0
    grain: float = 1 / 32


def reserved(claim: Claim, used_mib: int, policy: Policy) -> int:
    """Return the part of the claim's request that no other workload may use now, in MiB."""
    if not claim.running:
        return claim.request_mib
    if claim.listens:
        return claim.request_mib if claim.wanted_mib is None else min(claim.request_mib, claim.wanted_mib)
    return min(claim.request_mib, used_mib) if policy.lend_silent else claim.request_mib


def targets(
    total_mib: int,
    claims: Sequence[Claim],
    used: Mapping[str, int],
    policy: Policy,
    unresponsive: frozenset[str] = frozenset(),
) -> dict[str, int]:
    """Return the limit that each listening workload should have now; `unresponsive` ones are treated as silent."""
    listening = [claim for claim in claims if _cooperates(claim, unresponsive)]
    limits = {claim.workload: reserved(claim, used[claim.workload], policy) for claim in listening}
    others = sum(
        committed(claim, used[claim.workload], policy, unresponsive)
        for claim in claims
        if not _cooperates(claim, unresponsive)
    )
    pool = total_mib - used[UNKNOWN] - others - sum(limits.values())
    for priority in sorted({claim.priority for claim in listening}, reverse=True):
        pool -= _lend(pool, [claim for claim in listening if claim.priority == priority], limits)
    return limits


def committed(claim: Claim, used_mib: int, policy: Policy, unresponsive: frozenset[str] = frozenset()) -> int:
    """Return the memory that the claim's workload holds, or may allocate under the limits sent to it, in MiB.

    For `unresponsive` workloads sent limits do not count: their time to yield has passed, and they may be ended.
    """
    firm = max(used_mib, reserved(claim, used_mib, policy))
    return max(firm, claim.follows_mib or 0, claim.assigned_mib or 0) if _cooperates(claim, unresponsive) else firm


def most(claim: Claim) -> int:
    """Return the memory that the workload would use on an idle device, in MiB."""
    return claim.limit_mib if claim.wanted_mib is None else min(claim.limit_mib, claim.wanted_mib)


def _cooperates(claim: Claim, unresponsive: frozenset[str]) -> bool:
    return claim.listens and claim.running and claim.workload not in unresponsive


def _lend(pool: int, claims: Iterable[Claim], limits: dict[str, int]) -> int:
    """Raise the limits from the pool in proportion to the requests, up to what each wants; return the sum."""
    wanting = {claim.workload: (claim.request_mib or 1, most(claim)) for claim in claims}
    lent = 0
    while wanting := {name: want for name, want in wanting.items() if limits[name] < want[1]}:
        weight = sum(request for request, _ in wanting.values())
        left = pool - lent
        steps = {n: min(left * request // weight, top - limits[n]) for n, (request, top) in wanting.items()}
        if left <= 0 or not any(steps.values()):
            break
        for name, step in steps.items():
            limits[name] += step
        lent += sum(steps.values())
    return lent
