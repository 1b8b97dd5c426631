"""Lists in pages and the map of GPUs: what a query string chooses, also one that cannot be read, at any size."""

from __future__ import annotations

import random
import re
from typing import Any
from urllib.parse import parse_qsl

import pytest
from msgspec.structs import replace

from kfp_gpuquota.api import Job, Order, Phase, Project, Reason, ReasonCode, StopPolicy
from kfp_gpuquota.api.affinity import GPU_PRODUCT
from kfp_gpuquota.api.queue import has_places
from kfp_gpuquota.api.start_conditions import ArrayTask
from kfp_gpuquota.api.wire import ProjectView, ResourceView
from kfp_gpuquota.errors import NotFoundError
from kfp_gpuquota.web.query import Slice
from kfp_gpuquota.web.views import gpu_map, nodes, queue, teams
from kfp_gpuquota.web.views.board import JobFacts, label_keys, natural
from tests.web.listed import NOW, Cluster, job, on, view


def named(cluster: Cluster, query: str) -> list[str]:
    chosen = queue.Filter.of(dict(parse_qsl(query)))
    return [each.spec.name for each in queue.admitted(cluster.board(), chosen)]


MIXED = [
    job("idle", reason=Reason(code=ReasonCode.NO_FREE_GPUS, message="m"), owner="ann", submitted_at=NOW - 9),
    job("runs", worker=on("runs", "n-1", 0, 1), owner="bob", gpus=2),
    job("picky", node_selector={GPU_PRODUCT: "H100"}, priority=60),
    job("over", phase=Phase.SUCCEEDED, finished_at=NOW),
]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("", ["picky", "idle", "runs"]),
        ("state=all&sort=job", ["idle", "over", "picky", "runs"]),
        ("state=all&sort=-job", ["runs", "picky", "over", "idle"]),
        ("sort=-gpus", ["runs", "picky", "idle"]),
        ("sort=submitted", ["idle", "picky", "runs"]),
        ("reason=no-free-gpus", ["idle"]),
        ("user=bob", ["runs"]),
        ("gpu=A100", ["runs"]),
        ("gpu=H100", ["picky"]),
        ("gpu=B200", []),
    ],
)
def test_jobs_are_filtered_and_sorted_by_the_query_string(query: str, names: list[str]) -> None:
    assert named(Cluster(MIXED, [view("n-1")]), query) == names


def test_jobs_of_an_array_are_one_row_unless_they_run_and_the_row_opens_them() -> None:
    waits = Reason(code=ReasonCode.ARRAY_LIMIT, message="waits for its turn")
    members = [
        job(f"sweep-{i}", array=ArrayTask(name="sweep", index=i), submitted_at=NOW + i, reason=waits) for i in range(5)
    ]
    members[2] = replace(members[2], status=replace(members[2].status, phase=Phase.RUNNING))
    alone = job("alone", submitted_at=NOW - 1)
    cluster = Cluster([alone, *members])
    shown = cluster.show("/queue?word=s")
    assert list(shown.lists["jobs"]) == ["array-uid-sweep-0", "job-uid-sweep-2"]
    row = shown.lists["jobs"]["array-uid-sweep-0"]
    assert "sweep-[0-1,3-4]" in row
    assert "waits for its turn" in row
    assert "5 jobs, of which 4 wait" in shown.parts["counts"]
    opened = cluster.show("/queue" + re.findall('href="(.*?)"', row)[0].replace("&amp;", "&"))
    assert set(opened.lists["jobs"]) == {f"job-uid-sweep-{i}" for i in range(5)}
    assert "5 jobs of array sweep" in opened.parts["counts"]
    none = cluster.show("/queue?array=sweep&state=ended").parts["counts"]
    assert "None of 6 jobs is as chosen above of array sweep (<a href=" in none, (
        "the choice is shown, and can be undone"
    )
    hostile = cluster.show("/queue?array=%3Cscript%3E&page=7")
    assert "<script>" not in str(hostile.parts)


def test_a_team_that_is_held_or_drained_says_so_and_can_be_chosen() -> None:
    policies = {"a": StopPolicy.NONE, "b": StopPolicy.HOLD, "c": StopPolicy.HOLD_AND_DRAIN}
    views = [
        ProjectView(project=Project(name=name, stop_policy=policy), allocated=0, over_quota=0, requested=0)
        for name, policy in policies.items()
    ]
    shown = {team.name: list(team.flags()) for team in teams.tree(views)}
    assert shown == {"a": [], "b": [("stopped", "held")], "c": [("stopped", "drained")]}
    (limited,) = teams.tree([replace(views[0], project=Project(name="a", max_runtime_s=5400))])
    assert limited.run_times == "at most 1h30m"
    wanted = teams.Filter.of({"show": "stopped"})
    assert [team.name for team in teams.tree(views) if wanted.admits(team)] == ["b", "c"]
    below = ProjectView(project=Project(name="below", parent="c"), allocated=0, over_quota=0, requested=0)
    (shown_below,) = (team for team in teams.tree([*views, below]) if team.name == "below")
    assert list(shown_below.flags()) == [("stopped", "drained")]


def test_a_departments_figures_are_exact_sums_of_parts_of_gpus() -> None:
    """Random parts, in thousandths: a sum of binary numbers borrows 0 GPUs, or waits for 0 GPUs."""
    chance = random.Random(4)
    for _ in range(300):
        held, wanted = ([chance.randrange(2000) for _ in range(4)] for _ in range(2))
        wanted = chance.choice([held, wanted])
        guaranteed = chance.choice([sum(held), chance.randrange(8000)])
        views = [
            ProjectView(
                project=Project(name=f"p-{i}", parent="top"), allocated=h / 1000, over_quota=0, requested=w / 1000
            )
            for i, (h, w) in enumerate(zip(held, wanted, strict=True))
        ]
        top = ProjectView(
            project=Project(name="top", guaranteed=guaranteed / 1000), allocated=0, over_quota=0, requested=0
        )
        team = next(teams.tree([top, *views]))
        amounts = team.amounts
        shown = [amounts.held, amounts.borrowed, amounts.unused, amounts.waiting]
        more, less, waits = sum(held) - guaranteed, guaranteed - sum(held), sum(wanted) - sum(held)
        assert shown == [each / 1000 for each in (sum(held), max(0, more), max(0, less), max(0, waits))]
        assert not re.search(r"\b0 GPUs", str(list(team.flags())))


def test_a_page_has_its_part_of_the_list_and_links_to_the_others() -> None:
    cluster = Cluster([job(f"j-{i:03}", submitted_at=NOW + i) for i in range(260)])
    shown = cluster.show("/queue?size=100&page=2&word=j-")
    assert len(shown.lists["jobs"]) == 100
    assert next(iter(shown.lists["jobs"])) == "job-uid-j-100"
    assert "shown are 101 to 200" in shown.parts["counts"]
    links = [
        dict(parse_qsl(one)) for one in re.findall(r'href="\?([^"]*)"', str(shown.parts["pager"]).replace("&amp;", "&"))
    ]
    assert {"word": "j-", "page": "3"} in links
    assert {"word": "j-", "size": "1000"} in links
    assert "the last page is 3" in cluster.show("/queue?page=9").parts["counts"]


def test_every_link_leads_to_the_same_choices_with_one_changed() -> None:
    every = "project=p&kind=train&state=ended&word=w&selector=a%3Db&reason=fits&gpu=g&user=u&sort=-gpus&size=25&page=4"
    chosen = queue.Filter.of(dict(parse_qsl(every)))
    assert chosen.link(page=4) == f"?{every}"
    assert queue.Filter.of(dict(parse_qsl(chosen.sorted_by("gpus")[1:]))).sort == ""
    assert queue.Filter().sorted_by("job") == "?sort=job"
    assert queue.Filter.of({"sort": "job"}).sorted_by("job") == "?sort=-job"
    assert queue.Filter.of({"sort": "-job"}).direction("job") == "descending"


@pytest.mark.parametrize("kind", [queue.Filter, nodes.Filter])
@pytest.mark.parametrize(
    "query", ["page=-1", "page=0", "page=1e9", "page=٣", "size=0", "size=99999", "sort=x", "state=x", "selector=~"]
)
def test_a_value_that_cannot_be_read_is_named_and_ignored(kind: Any, query: str) -> None:
    name, _, value = query.partition("=")
    found = kind.of({name: value})
    assert len(found.problems) == 1
    assert name in found.problems[0]
    assert value in found.problems[0]
    if name != "selector":
        assert found.link() == "?"


def test_a_slice_is_empty_beyond_the_last_page() -> None:
    assert Slice.of(queue.Filter(size=100, page=3), 250) == Slice(200, 250, 250, 3, 3)
    assert Slice.of(queue.Filter(size=100, page=4), 250) == Slice(250, 250, 250, 4, 3)
    assert Slice.of(queue.Filter(), 0).pages == 1


def test_what_is_derived_step_by_step_is_what_is_derived_at_once() -> None:
    """Random changes: jobs that are added, removed, or have another phase, priority or reason."""
    chance = random.Random(7)
    jobs: list[Job] = []
    facts = JobFacts((), ())
    for step in range(60):
        for _ in range(chance.randrange(4)):
            fresh = job(f"j-{chance.randrange(10**9)}", project=chance.choice("pq"), priority=chance.randrange(3))
            jobs.append(replace(fresh, uid=f"{step:02}-{chance.random()}"))
        for i in chance.sample(range(len(jobs)), min(len(jobs), 3)):
            phase = chance.choice(list(Phase))
            code = chance.choice([ReasonCode.FRAGMENTED, ReasonCode.FITS])
            status = replace(jobs[i].status, phase=phase, reason=Reason(code=code, message="m"))
            jobs[i] = replace(jobs[i], status=status)
        if jobs and chance.random() < 0.2:
            jobs.pop(chance.randrange(len(jobs)))
        facts = facts.followed_by(tuple(jobs))
        whole = JobFacts((), ()).followed_by(tuple(jobs))
        assert list(map(id, facts.in_order)) == list(map(id, whole.in_order))
        assert facts.fragmented == whole.fragmented
        assert [facts.place(one) for one in jobs] == [whole.place(one) for one in jobs]


@pytest.mark.parametrize("uses_known", [True, False])
@pytest.mark.parametrize("order", list(Order))
def test_a_job_has_a_place_where_the_command_line_shows_one(order: Order, uses_known: bool) -> None:
    cluster = Cluster([job("waits", project="team-a")])
    cluster.order = order
    place = cluster.board(uses_known=uses_known).place(cluster.listed[0])
    assert bool(place) is has_places(order, uses_known=uses_known)


def test_names_are_in_the_order_of_their_numbers() -> None:
    assert sorted(["n-10", "n-9", "m", "7", "n"], key=natural) == ["7", "m", "n", "n-9", "n-10"]


def test_labels_group_nodes_unless_each_has_its_own_value() -> None:
    views = [view(f"n-{i}", labels={"rack": f"r-{i % 2}", "host": f"n-{i}", "zone": "z"}) for i in range(4)]
    assert label_keys(views) == ["rack"]


def cells(html: str) -> dict[str, int]:
    """The number of cells of each kind in a tile."""
    return {kind: drawn.count("M") for kind, drawn in re.findall(r'<path class="([\w-]+)" d="([^"]+)"', html)}


def test_the_map_has_a_cell_for_each_gpu_in_the_color_of_its_state_project_or_use() -> None:
    jobs = [
        job("a", worker=on("a", "n", 0, 1)),
        job("b", project="team-b", worker=on("b", "n", 2, share=0.5)),
        job("c", worker=on("c", "n", 2, share=0.25)),
    ]
    held = {0: ("a-0",), 1: ("a-0",), 2: ("b-0", "c-0")}
    cluster = Cluster(jobs, [view("n", held=held, used={0: 1, 1: 1, 2: 0.75, 3: 1}), view("out", 2, ready=False)])

    def tiles(color: str) -> list[dict[str, int]]:
        return [cells(html) for html in cluster.show(f"/nodes?color={color}").lists["map-0"].values()]

    assert tiles("state") == [{"used": 2, "part": 1, "others": 1, "idle": 4}, {"down": 2}]
    assert tiles("project") == [{"project-0": 2, "project-several": 1, "others": 1, "idle": 4}, {"down": 2}]
    assert tiles("use") == [{"part-5": 3, "part-3": 1, "part-0": 4}, {"part-0": 2}]
    legend = cluster.show("/nodes?color=project").parts["legend"]
    assert re.search(r'href="\?project=team-a&amp;color=project">team-a</a> 2', legend)


AMD = ResourceView(name="amd.com/gpu", count=4, counts_as=1, type="MI300X", held={"team-a/a-0": 1, "": 2})
MIG = ResourceView(name="nvidia.com/mig-1g.10gb", count=7, counts_as=1 / 7, held={"team-b/b-0": 3})


@pytest.mark.parametrize(
    ("color", "tiles", "legend"),
    [
        (
            "state",
            [{"used": 1, "others": 2, "idle": 1}, {"used": 3, "idle": 4}],
            {"used": 1.43, "others": 2, "idle": 1.57},
        ),
        (
            "project",
            [{"project-0": 1, "others": 2, "idle": 1}, {"project-1": 3, "idle": 4}],
            {"project-0": 1, "project-1": 0.43, "others": 2, "idle": 1.57},
        ),
        (
            "use",
            [{"part-5": 3, "part-0": 1}, {"part-5": 3, "part-0": 4}],
            {"part-0": 1.57, **dict.fromkeys(["part-1", "part-2", "part-3", "part-4"], 0), "part-5": 3.43},
        ),
    ],
)
def test_the_map_has_a_cell_for_each_unit_of_other_resources_and_its_legend_counts_gpus(
    color: str, tiles: list[dict[str, int]], legend: dict[str, float]
) -> None:
    """On a node without any device of NVIDIA, and one with MIG devices only. What the reader may not see is others'."""
    shown = Cluster([], [view("amd", 0, resources=(AMD,)), view("mig", 0, resources=(MIG,))]).show(
        f"/nodes?color={color}"
    )
    assert [cells(html) for html in shown.lists["map-0"].values()] == tiles
    rows = re.findall(r'path class="([\w-]+)".*</svg>.* ([\d.]+)</li>', shown.parts["legend"])
    assert {kind: float(gpus) for kind, gpus in rows} == legend
    assert "3.43 of 5 GPUs in use on 2 nodes" in shown.parts["map-0-title"]


def test_nodes_with_other_resources_only_are_filtered_as_all_are() -> None:
    runs = job("runs", worker=on("runs", "amd"))
    cluster = Cluster([runs], [view("amd", 0, resources=(AMD,)), view("mig", 0, resources=(MIG,)), view("n")])
    names = {"amd": "node-amd", "mig": "node-mig", "n": "node-n"}
    for query, found in (
        ("gpu=MI300X", "amd"),
        ("gpu=nvidia.com/mig-1g.10gb", "mig"),
        ("state=others", "amd"),
        ("state=used", "amd mig"),
        ("state=idle", "amd mig n"),
        ("project=team-a", "amd"),
        ("project=team-b", "mig"),
        ("sort=-idle", "n amd mig"),
    ):
        assert list(cluster.show(f"/nodes?{query}").lists["nodes"]) == [names[name] for name in found.split()], query
    assert cluster.board().models() == ["A100", "MI300X", "nvidia.com/mig-1g.10gb"]
    assert named(cluster, "gpu=MI300X") == ["runs"]
    page = cluster.show("/nodes/amd")
    assert "3 of 4 in use, 2 by others" in page.parts["node-amd"]
    assert "each counts as 0.143 GPUs" in cluster.show("/nodes/mig").parts["node-mig"]
    assert "MI300X" in page.parts["facts"]
    assert not cluster.show("/nodes?word=amd&state=down").lists["nodes"]


def test_a_resource_of_many_units_has_few_cells_whatever_a_pod_asks_for() -> None:
    memory = ResourceView(name="example.com/gpu-memory-mib", count=80_000, counts_as=0.001, held={"t/p": 20_000})
    asked = replace(memory, count=0, held={"t/p": 10**12})
    cluster = Cluster([], [view("n", 0, resources=(memory,)), view("m", 0, resources=(asked,))])
    shown = cluster.show("/nodes")
    assert [cells(html) for html in shown.lists["map-0"].values()] == [{"used": 64}, {"used": 16, "idle": 48}]
    assert "</a> 60</li>" in shown.parts["legend"]


def test_tiles_of_nodes_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "MOST_TILES", 4)
    tiles = nodes.Tiles("/b")
    for i in range(20):
        board = Cluster([], [view(f"n-{2 * i}"), view(f"n-{2 * i + 1}")]).board()
        assert len(nodes.elements(board, "/b", nodes.Filter(), tiles).lists["map-0"]) == 2
    assert len(tiles._tiles) <= 6


def test_the_map_is_grouped_by_pool_or_label_and_filtered() -> None:
    views = [view(f"n-{i}", pool="" if i < 2 else "big", labels={"rack": f"r-{i % 2}"}) for i in range(4)]
    views.append(view("other", model="H100", held={0: ("x/y",)}))
    cluster = Cluster([], views)
    pools = cluster.show("/nodes")
    assert [len(pools.lists[name]) for name in ("map-0", "map-1")] == [3, 2]
    assert "no pool <small>1 of 24 GPUs in use on 3 nodes" in pools.parts["map-0-title"]
    racks = cluster.show("/nodes?group=rack")
    assert "without rack" in racks.parts["map-0-title"]
    assert list(racks.lists["map-1"]) == ["n-n-0", "n-n-2"]
    for query in ("gpu=H100", "state=used", "word=OTHER", "selector=!rack", "project=x"):
        assert list(cluster.show(f"/nodes?{query}").lists["nodes"]) == ["node-other"], query
    assert next(iter(cluster.show("/nodes?sort=-used").lists["nodes"])) == "node-other"
    assert list(cluster.show("/nodes?sort=-name&size=1&page=2").lists["nodes"]) == ["node-n-3"]


def test_only_tiles_of_nodes_that_changed_are_rendered_again() -> None:
    cluster = Cluster([], [view(f"n-{i}") for i in range(3)])
    board, tiles = cluster.board(), nodes.Tiles("/b")
    before = nodes.elements(board, "/b", nodes.Filter(), tiles).lists["map-0"]
    cluster.views = (view("n-0"), view("n-1", held={3: ("x/y",)}), view("n-2"))  # the first and last are equal
    after = nodes.elements(board, "/b", nodes.Filter(), tiles).lists["map-0"]
    assert [before[name] is after[name] for name in before] == [True, False, True]


def test_gpus_of_a_node_that_is_not_ready_do_not_count_as_idle() -> None:
    cluster = Cluster([], [view("n", 2, held={0: ("x/y",)}), view("down", 8, ready=False)])
    assert "1 GPU is idle." in cluster.show("/nodes").parts["fragments"]
    totals = re.findall(r"<dd>([^<]*)</dd>", cluster.show("/teams").parts["totals"])
    assert totals == ["10", "1", "1", "0", "0"]


def test_a_node_has_a_page_of_its_own() -> None:
    cluster = Cluster([job("a", worker=on("a", "n", 0))], [view("n", held={0: ("a-0",)}, labels={"rack": "r-1"})])
    shown = cluster.show("/nodes/n")
    assert "rack" in shown.parts["facts"]
    assert "/b/jobs/team-a/a" in shown.parts["jobs-here"]
    with pytest.raises(NotFoundError):
        cluster.show("/nodes/m")


def test_a_tile_is_as_wide_as_its_gpus() -> None:
    sizes = {1: (8, 8), 3: (28, 8), 4: (38, 8), 8: (38, 18), 16: (38, 38), 17: (158, 18), 100: (158, 68)}
    for gpus, (width, height) in sizes.items():
        html = gpu_map.tile(view("n", gpus), [gpu_map.Run("idle", gpus, gpus)], "/n", roomy=False)
        assert f'<svg width="{width}" height="{height}"' in html, gpus
