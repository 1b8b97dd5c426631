"""How much of one device each workload may use now. Pure.

A device is a loan business: every workload's request is its deposit, and what owners leave unused is lent to those that
want more than their request, up to their limit, the higher priority first, in proportion to the requests within one.

What may be lent is what is not *reserved*: a newcomer's request; of a listening owner what it says it wants, for it
asks before it grows; of a silent owner its whole request, for nobody can know when it will allocate, unless the policy
lends that, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kfp_gpuquota.fractions.claims import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kfp_gpuquota.fractions.claims import Claim


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the agent may do on one node.

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
    """What of the claim's request nobody else may use now."""
    if not claim.running:
        return claim.request_mib
    if claim.listens:
        return claim.request_mib if claim.wanted_mib is None else min(claim.request_mib, claim.wanted_mib)
    return min(claim.request_mib, used_mib) if policy.lend_silent else claim.request_mib


def targets(
    total_mib: int, claims: Sequence[Claim], used: Mapping[str, int], policy: Policy, deaf: frozenset[str] = frozenset()
) -> dict[str, int]:
    """The limit that each listening workload should have now; the `deaf` ones are treated as silent."""
    listening = [claim for claim in claims if _hears(claim, deaf)]
    limits = {claim.workload: reserved(claim, used[claim.workload], policy) for claim in listening}
    others = sum(committed(claim, used[claim.workload], policy, deaf) for claim in claims if not _hears(claim, deaf))
    pool = total_mib - used[UNKNOWN] - others - sum(limits.values())
    for priority in sorted({claim.priority for claim in listening}, reverse=True):
        pool -= _lend(pool, [claim for claim in listening if claim.priority == priority], limits)
    return limits


def committed(claim: Claim, used_mib: int, policy: Policy, deaf: frozenset[str] = frozenset()) -> int:
    """What the claim's workload holds, or may come to hold without asking anybody.

    What the `deaf` may do is not waited for: they had their time to yield, and borrow at the risk of being ended.
    """
    firm = max(used_mib, reserved(claim, used_mib, policy))
    return max(firm, claim.follows_mib or 0, claim.told_mib or 0) if _hears(claim, deaf) else firm


def most(claim: Claim) -> int:
    """What it would use if all was free."""
    return claim.limit_mib if claim.wanted_mib is None else min(claim.limit_mib, claim.wanted_mib)


def _hears(claim: Claim, deaf: frozenset[str]) -> bool:
    return claim.listens and claim.running and claim.workload not in deaf


def _lend(pool: int, claims: Iterable[Claim], limits: dict[str, int]) -> int:
    """Raise the limits out of the pool, evenly by request until each has what it wants. Returns what was lent."""
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
