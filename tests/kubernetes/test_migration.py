"""`gpuquota migrate`: what quotas of Kueue and ResourceQuotas amount to; the API server accepts what is printed.

Kueue's objects are written by hand, from its API documentation (v1beta1 and v1beta2).
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import yaml  # type: ignore[import-untyped]
from msgspec import convert

from kfp_gpuquota.cluster.kubernetes.objects import labels
from kfp_gpuquota.cluster.kubernetes.objects.custom_types import GpuQuota
from kfp_gpuquota.cluster.kubernetes.operations.cohorts import Member, Quota
from kfp_gpuquota.cluster.kubernetes.operations.migration import Old, migrated
from kfp_gpuquota.cluster.kubernetes.quota.quotas import project_of
from kfp_gpuquota.scheduler import QuotaChanged
from tests.kubernetes.installation import QUOTAS
from tests.kubernetes.test_uninstall import gpuquota
from tests.kubernetes.trainer import install_kind
from tests.scheduler.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.kubernetes.controlled import Controlled

Object = dict[str, Any]
GPU, AMD = labels.GPU_RESOURCE, "amd.com/gpu"


def cluster_queue(name: str, flavors: dict[str, list[Object]], **spec: Any) -> Object:
    groups = [{"flavors": [{"name": flavor, "resources": rows} for flavor, rows in flavors.items()]}]
    return {"metadata": {"name": name}, "spec": {"resourceGroups": groups, **spec}}


def local_queue(namespace: str, queue: str) -> Object:
    return {"metadata": {"name": "main", "namespace": namespace}, "spec": {"clusterQueue": queue}}


def row(name: str, nominal: object, **more: object) -> Object:
    return {"name": name, "nominalQuota": nominal, **more}


def kueue(*queues: Object, **more: Any) -> Old:
    return Old({GPU: 1.0, AMD: 0.5}, cluster_queues=list(queues), **more)


def specs(old: Old) -> dict[str, Object]:
    return {one["metadata"]["name"]: one["spec"] for one in migrated(old).objects}


def test_objects_without_a_specification_are_read() -> None:
    bare = {"metadata": {"name": "bare", "namespace": "team-a"}}
    profiles = {"team-a": {"metadata": {"name": "team-a"}}}
    quota = {"metadata": {"name": "q", "namespace": "team-a"}, "spec": {"hard": {f"requests.{GPU}": "2"}}}
    old = Old({GPU: 1.0}, profiles, [bare, quota], *([bare] for _ in range(5)))
    assert specs(old) == {"team-a": {"plugins": [{"kind": "GpuQuota", "spec": {"guaranteed": 2, "limit": 2}}]}}


def test_a_team_with_a_queue_of_its_own_keeps_its_numbers() -> None:
    rows = [row(GPU, "8", borrowingLimit=4), row("cpu", 64, borrowingLimit=0), row("memory", "1Gi", borrowingLimit=0)]
    queue = cluster_queue("q", {"a100": rows}, cohortName="all", fairSharing={"weight": "2"})
    other = cluster_queue("other", {"a100": [row(GPU, 20)]}, cohortName="all")
    assert specs(kueue(queue, other, local_queues=[local_queue("team-a", "q")])) == {
        "all": {
            "guaranteed": 28,
            "limit": 28,
            "guaranteedCpu": "64",
            "limitCpu": "64",
            "guaranteedMemory": "1073741824",
            "limitMemory": "1073741824",
        },
        "team-a": {
            "parent": "all",
            "guaranteed": 8,
            "limit": 12,
            "overQuotaWeight": 2.0,
            "guaranteedCpu": "64",
            "guaranteedMemory": "1073741824",
        },
    }


@pytest.mark.parametrize(
    ("spec", "limit"), [({}, 8), ({"cohort": "all"}, None), ({"cohortName": "all"}, None), ({"cohort": "own"}, 8)]
)  # fmt: skip
def test_only_a_queue_that_shares_a_cohort_borrows(spec: Object, limit: int | None) -> None:
    queue, other = cluster_queue("q", {"x": [row(GPU, 8)]}, **spec), cluster_queue("r", {"x": []}, cohort="all")
    assert specs(kueue(queue, other, local_queues=[local_queue("t", "q")]))["t"].get("limit") == limit


def test_flavors_are_node_pools_and_other_vendors_count_as_the_policy_says() -> None:
    """Outside of the pools there is no quota: it was the sum of theirs, beside theirs."""
    queue = cluster_queue("q", {"h100": [row(GPU, 8)], "amd": [row(AMD, 4)]})
    flavor = {"metadata": {"name": "h100"}, "spec": {"nodeLabels": {"gpu": "h100"}}}
    old = kueue(queue, local_queues=[local_queue("t", "q")], flavors=[flavor])
    assert specs(old)["t"] == {
        "guaranteed": 0,
        "limit": 0,
        "pools": {"h100": {"guaranteed": 8, "limit": 8}, "amd": {"guaranteed": 2, "limit": 2}},
    }
    assert any("kubectl label nodes -l gpu=h100 gpuquota.dev/pool=h100" in note for note in migrated(old).notes)


def test_a_shared_queue_and_a_cohort_are_departments() -> None:
    shared = cluster_queue("shared", {"x": [row(GPU, 6)]}, cohortName="org")
    queues = [local_queue("a", "shared"), local_queue("b", "shared")]
    cohort = {"metadata": {"name": "org"}, "spec": {"parentName": "company"}}
    assert specs(kueue(shared, local_queues=queues, cohorts=[cohort])) == {
        "shared": {"guaranteed": 6, "parent": "org"},
        "a": {"guaranteed": 0, "parent": "shared"},
        "b": {"guaranteed": 0, "parent": "shared"},
        "org": {"guaranteed": 6, "limit": 6},
    }


def test_a_department_does_not_get_the_name_of_a_namespace() -> None:
    """Else a quota was its own parent, and one of the two with its name was lost."""
    shared = cluster_queue("ml", {"x": [row(GPU, 6)]}, cohortName="ml")
    queues = [local_queue("ml", "ml"), local_queue("ml-dev", "ml")]
    old = kueue(shared, local_queues=queues, cohorts=[{"metadata": {"name": "ml"}}])
    assert len(migrated(old).objects) == 4
    assert specs(old) == {
        "ml-department": {"guaranteed": 6, "parent": "ml-department-department"},
        "ml": {"guaranteed": 0, "parent": "ml-department"},
        "ml-dev": {"guaranteed": 0, "parent": "ml-department"},
        "ml-department-department": {"guaranteed": 6, "limit": 6},
    }
    assert "the department is ml-department" in "\n".join(migrated(old).notes)


def test_what_is_not_carried_over_is_said() -> None:
    rows = [row(GPU, "many"), row("example.com/licenses", 3), row("cpu", 4)]
    queue = cluster_queue(
        "q", {"x": rows}, admissionChecks=["p"], queueingStrategy="StrictFIFO", cohort="c",
        preemption={"reclaimWithinCohort": "Never"},
    )  # fmt: skip
    other = cluster_queue("r", {"y": [row(GPU, 2, lendingLimit=1), row(AMD, 4)]}, cohort="c")
    idle = cluster_queue("idle", {"x": [row(GPU, 1)]}, cohort="c")
    loop = [{"metadata": {"name": name}, "spec": {"parentName": above}} for name, above in ("ab", "ba")]
    flavor = {
        "nodeLabels": {"gpu": "x"}, "topologyName": "t", "tolerations": [{"key": "gpu"}],
        "nodeTaints": [{"key": "gpu", "value": "x", "effect": "NoSchedule"}],
    }  # fmt: skip
    flavors = [{"metadata": {"name": "x"}, "spec": flavor}, {"metadata": {"name": "cpus"}, "spec": flavor}]
    priority = {"metadata": {"name": "urgent"}, "value": 1000}
    queues = [local_queue("t", "q"), local_queue("t", "r"), local_queue("t", "none"), local_queue("Bad_Name", "r")]
    queues[0]["spec"]["stopPolicy"] = "HoldAndDrain"
    old = kueue(
        queue, other, idle, local_queues=queues, priorities=[priority], cohorts=loop, flavors=flavors
    )  # fmt: skip
    notes = "\n".join(migrated(old).notes)
    for words in (
        "it counts as 0", "Cohort c: lendingLimit", "example.com/licenses is no GPU", "admission checks", "StrictFIFO",
        "reclaimWithinCohort Never", "namespace t: it is in ClusterQueue q and r",
        "ClusterQueue idle: it has no LocalQueue", "WorkloadPriorityClass urgent (1000)",
        "stopPolicy HoldAndDrain; gpuquota project drain t", "ClusterQueue 'none' does not exist",
        "Cohort a: it is above itself", "ResourceFlavor y does not exist", "its quotas in flavor y are one number",
        "flavors x, y: a job names its node pool", "cpu; such quotas apply to nodes without a pool",
        "kubectl label nodes -l gpu=x gpuquota.dev/pool=x", "its taints (gpu=x:NoSchedule)", "its tolerations",
        "its topology", "ResourceFlavor cpus: its node labels", "the quota 'Bad_Name'",
    ):  # fmt: skip
        assert words in notes, words


# What the origin admits, by its documentation: an oracle of our own


Row = dict[str, int | None]  # nominalQuota, borrowingLimit, lendingLimit
Tree = dict[str, tuple[str, Row]]  # of each queue (lower case) and Cohort (upper case): the Cohort above, and its quota


def quota_rows(*, borrowing: bool, lending: bool, nominal: Sequence[int] = (0, 1, 2)) -> list[Row]:
    limits = (None, 0, 1)
    return [
        {"nominalQuota": most, "borrowingLimit": one, "lendingLimit": other}
        for most in nominal
        for one in (limits if borrowing else limits[:1])
        for other in (limits if lending else limits[:1])
    ]


def trees() -> Iterator[Tree]:
    """Every pair of queues, every three that lend all, every two below a Cohort beside a third one."""
    for one, other in itertools.product(quota_rows(borrowing=True, lending=True, nominal=(0, 2)), repeat=2):
        yield {"a": ("C", one), "b": ("C", other), "C": ("", {})}
    lent = quota_rows(borrowing=True, lending=False, nominal=(0, 2))
    for one, two, three in itertools.product(lent, repeat=3):
        yield {"a": ("C", one), "b": ("C", two), "c": ("C", three), "C": ("", {})}
    own = quota_rows(borrowing=True, lending=False, nominal=(0, 1))
    for inner, one, three in itertools.product(own, lent, lent):
        yield {
            "a": ("I", one),
            "b": ("I", {"nominalQuota": 1}),
            "c": ("C", three),
            "I": ("C", inner),
            "C": ("", {"nominalQuota": 1}),
        }


def trees_that_lend_in_part() -> Iterator[Tree]:
    rows = quota_rows(borrowing=True, lending=True, nominal=(1, 2))
    for one, two, three in itertools.product(rows[::3], rows[1::4], rows[::5]):
        yield {"a": ("I", one), "b": ("I", two), "c": ("C", three), "I": ("C", rows[1]), "C": ("", {"nominalQuota": 1})}


class Admission:
    """Kueue's rules: what is free for a queue is its own, and what those above have that others do not use."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.queues = sorted(name for name in tree if name.islower())

    def admitted(self) -> set[tuple[int, ...]]:
        """Return all that the queues can hold together, admitted one GPU after the other."""
        found, new = set[tuple[int, ...]](), [(0,) * len(self.queues)]
        while new:
            held = new.pop()
            if held not in found:
                found.add(held)
                used = dict(zip(self.queues, held, strict=True))
                more = (self.queues.index(name) for name in self.queues if self._free(name, used) > 0)
                new += [(*held[:i], held[i] + 1, *held[i + 1 :]) for i in more]
        return found

    def _limit(self, name: str, field: str) -> float:
        value = self.tree[name][1].get(field)
        return math.inf if value is None else value

    def _members(self, name: str) -> list[str]:
        return [one for one, (above, _) in self.tree.items() if above == name]

    def _quota(self, name: str) -> float:
        lent = sum(self._quota(one) - self._own(one) for one in self._members(name))
        return (self.tree[name][1].get("nominalQuota") or 0) + lent

    def _own(self, name: str) -> float:
        return max(0, self._quota(name) - self._limit(name, "lendingLimit"))

    def _used(self, name: str, used: dict[str, int]) -> float:
        return used.get(name, 0) + sum(max(0, self._used(one, used) - self._own(one)) for one in self._members(name))

    def _free(self, name: str, used: dict[str, int]) -> float:
        above, quota, held = self.tree[name][0], self._quota(name), self._used(name, used)
        if not above:
            return quota - held
        own = self._own(name)
        lent = (quota - own) - max(0, held - own)
        return max(0, own - held) + min(lent + self._limit(name, "borrowingLimit"), self._free(above, used))


def objects_of(tree: Tree) -> Old:
    def groups(quota: Row) -> Object:
        given = {field: value for field, value in quota.items() if value is not None}
        return {"resourceGroups": [{"flavors": [{"name": "x", "resources": [{"name": GPU, **given}]}]}]}

    queues = [
        {"metadata": {"name": name}, "spec": {"cohortName": above, **groups(quota)}}
        for name, (above, quota) in tree.items()
        if name.islower()
    ]
    cohorts = [
        {
            "metadata": {"name": f"dept-{name.lower()}"},
            "spec": {"parentName": above and f"dept-{above.lower()}", **groups(quota)},
        }
        for name, (above, quota) in tree.items()
        if name.isupper() and (quota or above)
    ]
    for queue in queues:
        queue["spec"]["cohortName"] = f"dept-{queue['spec']['cohortName'].lower()}"
    return kueue(
        *queues,
        cohorts=cohorts,
        local_queues=[local_queue(one["metadata"]["name"], one["metadata"]["name"]) for one in queues],
    )


def admitted_here(old: Old) -> set[tuple[int, ...]]:
    """Return all that the teams can hold together by the limits of their quotas, on a cluster that has enough."""
    quotas = specs(old)
    teams = sorted(name for name in quotas if len(name) == 1)
    most = max(quota.get("limit", 0) for quota in quotas.values())

    def below(name: str, at: str) -> bool:
        return at == name or (at != "" and below(name, quotas[at].get("parent", "")))

    limited = {
        name: [i for i, team in enumerate(teams) if below(name, team)] for name in quotas if "limit" in quotas[name]
    }
    return {
        held
        for held in itertools.product(range(most + 1), repeat=len(teams))
        if all(sum(held[i] for i in inside) <= quotas[name]["limit"] for name, inside in limited.items())
    }


def test_the_migrated_quotas_admit_what_kueue_admits() -> None:
    for tree in trees():
        old, origin = objects_of(tree), Admission(tree)
        assert admitted_here(old) == origin.admitted(), tree
        assert all("lendingLimit" not in note for note in migrated(old).notes)
        for name, quota in specs(old).items():
            assert len(name) > 1 or quota["guaranteed"] == tree[name][1]["nominalQuota"]


def test_cohorts_that_are_above_each_other_are_named_and_keep_their_queues() -> None:
    """Also with members that compare before the one that is taken out; Kueue admits nothing there."""
    loop = [{"metadata": {"name": name}, "spec": {"parentName": above}} for name, above in ("xy", "yz", "zx")]
    queues = [cluster_queue(name, {"f": [row(GPU, 2)]}, cohortName="x") for name in ("a", "b")]
    made = migrated(kueue(*queues, cohorts=loop, local_queues=[local_queue("a", "a"), local_queue("b", "b")]))
    assert {one["metadata"]["name"]: one["spec"].get("parent") for one in made.objects} == {
        "a": "x", "b": "x", "x": None, "y": "z", "z": "x",
    }  # fmt: skip
    assert sum("above itself" in note for note in made.notes) == 1


def test_each_flavor_is_a_pool_with_the_limits_that_it_has_alone() -> None:
    """A queue without a quota in a flavor gets none of its nodes, as in Kueue."""
    borrows = {"nominalQuota": 2, "borrowingLimit": 1}
    whole = {"a": {"x": borrows, "y": {"nominalQuota": 1}}, "b": {"x": {"nominalQuota": 4}}}

    def of(*flavors: str) -> dict[str, Object]:
        queues = [
            cluster_queue(name, {at: [{"name": GPU, **found[at]}] for at in flavors if at in found}, cohort="all")
            for name, found in whole.items()
        ]
        return specs(kueue(*queues, local_queues=[local_queue(name, name) for name in whole]))

    both, alone = of("x", "y"), {flavor: of(flavor) for flavor in ("x", "y")}
    for name, spec in both.items():
        assert (spec["guaranteed"], spec["limit"]) == (0, 0)
        for flavor, quotas in alone.items():
            quota = {key: value for key, value in quotas[name].items() if key != "parent"}
            assert spec["pools"][flavor] == quota
    assert both["b"]["pools"]["y"] == {"guaranteed": 0, "limit": 0}
    assert both["a"]["pools"]["x"] == {"guaranteed": 2, "limit": 3}


def test_where_limits_cannot_say_what_is_lent_each_queue_alone_gets_the_same_and_a_note_says_so() -> None:
    differ = 0
    for tree in trees_that_lend_in_part():
        old, theirs = objects_of(tree), Admission(tree).admitted()
        ours = admitted_here(old)
        assert theirs <= ours, tree
        for i in range(3):
            assert max(held[i] for held in ours) == max(held[i] for held in theirs), tree
        differ += ours != theirs
        assert ours == theirs or any("lendingLimit" in note for note in migrated(old).notes), tree
    assert differ


def test_the_scheduler_gives_each_queue_its_guarantee_and_no_more_than_all_have() -> None:
    """With the real scheduler, on a cluster with more GPUs: alone, and while all want more than there is."""
    for tree in itertools.islice(trees(), 0, None, 41):
        old, queues, theirs = objects_of(tree), Admission(tree).queues, Admission(tree).admitted()
        for alone in (*queues, ""):
            world = World()
            world.node("n", 12)
            for name, spec in specs(old).items():
                world.state.apply(
                    QuotaChanged(project_of(convert({"metadata": {"name": name}, "spec": spec}, GpuQuota)))
                )
            for team in [alone] if alone else queues:
                for number in range(8):
                    world.submit(f"{team}-{number}", team)
            world.settle()
            held = tuple(int(world.held(team)) for team in queues)
            assert held in theirs, (tree, held)
            wanted = (one[queues.index(alone)] if alone else sum(one) for one in theirs)
            assert sum(held) == max(wanted), (tree, held)


def test_a_queue_that_is_held_stays_held() -> None:
    queue = cluster_queue("q", {"x": [row(GPU, 2)]}, stopPolicy="Hold")
    (made,) = migrated(kueue(queue, local_queues=[local_queue("t", "q")])).objects
    assert made["spec"]["stopPolicy"] == "Hold"


def test_a_profile_keeps_its_other_plugins() -> None:
    plugins = [{"kind": "WorkloadIdentity", "spec": {}}, {"kind": "GpuQuota", "spec": {"guaranteed": 1}}]
    profile = {"metadata": {"name": "t"}, "spec": {"plugins": plugins}}
    queue = cluster_queue("q", {"x": [row(GPU, 2)]})
    (made,) = migrated(kueue(queue, local_queues=[local_queue("t", "q")], profiles={"t": profile})).objects
    assert made["kind"] == "Profile"
    assert made["spec"]["plugins"] == [plugins[0], {"kind": "GpuQuota", "spec": {"guaranteed": 2, "limit": 2}}]


def resource_quota(name: str, hard: Object, **spec: Any) -> Object:
    return {"metadata": {"name": name, "namespace": "t"}, "spec": {"hard": hard, **spec}}


def test_of_several_resource_quotas_each_resource_has_the_smallest() -> None:
    gold = "deviceclass.resource.kubernetes.io/gold"
    gpus, amd, claimed = f"requests.{GPU}", f"requests.{AMD}", "gold.deviceclass.resource.k8s.io/devices"
    terms = [{"scopeName": "PriorityClass", "operator": "In", "values": ["high", "low"]}]
    quotas = [
        resource_quota("a", {gpus: "8", amd: "4", claimed: "3"}),
        resource_quota("b", {gpus: "4", f"requests.{gold}": "2", "pods": "9"}),
        resource_quota("c", {gpus: "1"}, scopes=["NotBestEffort"], scopeSelector={"matchExpressions": terms}),
    ]
    made = migrated(Old({GPU: 1.0, AMD: 0.5, gold: 1.0}, quotas=quotas))
    assert [one["spec"] for one in made.objects] == [{"guaranteed": 8, "limit": 8}], "4 + 4 / 2 + 2"
    notes = "\n".join(made.notes)
    assert "t/c: it counts only pods with the scope NotBestEffort and PriorityClass In high, low" in notes
    assert "one number, their sum" in notes
    assert f"t: remove {claimed}, {amd}, requests.{gold}, {gpus} from its ResourceQuotas" in notes


def test_resource_quotas_of_a_cluster_are_printed_and_accepted(controlled: Controlled, tmp_path: Path) -> None:
    api = controlled.cluster.api
    team = controlled.cluster.make_namespace("had-a-resource-quota")
    quotas = f"/api/v1/namespaces/{team}/resourcequotas"
    api.create(quotas, {"metadata": {"name": "gpus"}, "spec": {"hard": {f"requests.{GPU}": "8", "pods": "50"}}})
    api.create(quotas, {"metadata": {"name": "pods"}, "spec": {"hard": {"pods": "50"}}})
    code, output = gpuquota(controlled.cluster, tmp_path, "migrate", "--from", "resourcequota", "--dry-run")
    assert code == 0, output
    (made,) = [one for one in yaml.safe_load_all(output) if one["metadata"]["name"] == team]
    assert made["spec"] == {"guaranteed": 8, "limit": 8}
    assert f"# not carried over: {team}: remove requests.nvidia.com/gpu" in output
    api.create(QUOTAS, made, dryRun="All")
    code, output = gpuquota(controlled.cluster, tmp_path, "migrate", "--from", "resourcequota")
    assert code == 2
    assert "add --dry-run" in output
    api.delete(f"/api/v1/namespaces/{team}")


def test_kueues_objects_of_a_cluster_are_printed_and_accepted(controlled: Controlled, tmp_path: Path) -> None:
    """Kueue's kinds are minimal schemas of our own, from its API documentation."""
    api, team = controlled.cluster.api, controlled.cluster.make_namespace("had-kueue")
    version, installed = "kueue.x-k8s.io/v1beta2", list[str]()
    objects = {
        "ClusterQueue": cluster_queue("q", {"a100": [row(GPU, 2)]}, cohortName="org"),
        "Cohort": {"metadata": {"name": "org"}, "spec": {}},
        "ResourceFlavor": {"metadata": {"name": "a100"}, "spec": {"nodeLabels": {"gpu": "a100"}}},
        "WorkloadPriorityClass": {"metadata": {"name": "high"}, "value": 100},
        "LocalQueue": {"metadata": {"name": "main"}, "spec": {"clusterQueue": "q"}},
    }
    for kind, body in objects.items():
        scope = "Namespaced" if kind == "LocalQueue" else "Cluster"
        installed.append(install_kind(api, version, kind, scope=scope))
        plural = installed[-1].rpartition("/")[2].partition(".")[0]
        path = f"/apis/{version}/namespaces/{team}/{plural}" if kind == "LocalQueue" else f"/apis/{version}/{plural}"
        api.until_served(path)
        api.create(path, {"apiVersion": version, "kind": kind, **body})
    code, output = gpuquota(controlled.cluster, tmp_path, "migrate", "--from", "kueue", "--dry-run")
    assert code == 0, output
    made = {one["metadata"]["name"]: one for one in yaml.safe_load_all(output)}
    assert made[team]["spec"] == {"guaranteed": 2, "parent": "org"}
    assert made["org"]["spec"] == {"guaranteed": 2, "limit": 2}
    assert "# not carried over: WorkloadPriorityClass high (100)" in output
    assert "ResourceFlavor a100: its node labels" in output
    for one in made.values():
        api.create(QUOTAS, one, dryRun="All")
    for path in installed:
        api.delete(path)


def test_a_flat_cohort_of_many_queues_is_read_in_linear_time() -> None:
    """Each queue's limit asks what its Cohort may hold, which is computed once."""
    asked = 0

    class Counting(Member):
        def lent(self, amount: str) -> float:
            nonlocal asked
            asked += 1
            return super().lent(amount)

    cohort = Counting("Cohort", "all")
    queues = [Counting("ClusterQueue", f"q{n}", {GPU: Quota(1.0)}) for n in range(1000)]
    for one in queues:
        one.join(cohort)
    assert {one.limit(GPU) for one in queues} == {None}
    assert asked <= 10 * len(queues)
