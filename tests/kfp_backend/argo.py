"""What Argo's controller makes of the states of a Workflow's pods: its nodes, and the pods to create. Pure.

With KFP's templateDefaults every template is under a Retry node, which repeats what ended as Error (a pod that was
deleted) and nothing that Failed (a program that ended with another code than 0): `run(0).root(0).step(0).executor(0)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tests.kfp_backend import shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Json = dict[str, Any]

FINAL: Final = frozenset({"Succeeded", "Failed", "Error"})
DEADLINE: Final = "Step exceeded its deadline"
EXCEEDED: Final = "retry exceeded workflow deadline"


@dataclass
class Node:
    """An entry of status.nodes."""

    name: str
    type: str
    template: str
    boundary: str = ""
    phase: str = "Running"
    message: str = ""
    started: float = 0.0
    finished: float | None = None
    retried: bool = False
    children: list[str] = field(default_factory=list)
    exit_code: int | None = None


@dataclass(frozen=True)
class Wanted:
    """A pod to create."""

    node: str
    step: shapes.Step
    template: str


class Nodes:
    """The nodes of one run of some steps, which start together."""

    def __init__(self, workflow: str, steps: Sequence[shapes.Step], *, defaults: bool) -> None:
        self.workflow, self._steps, self._defaults = workflow, steps, defaults
        self.by_name: dict[str, Node] = {}

    @property
    def root(self) -> Node:
        """Return the node of the run itself."""
        return self.by_name[self.workflow]

    def template(self, node: str) -> str:
        """The template of a pod's node, made already or not."""
        step = next((step for step in self._steps if f".{step.name}." in node or f".{step.name}(" in node), None)
        return shapes.EXECUTOR if step is None or step.retries is None else shapes.RETRY_EXECUTOR

    def operate(self, pods: Mapping[str, Json], now: float, *, ended: bool = False) -> list[Wanted]:
        """Take the pods (by their node's name) into account; `ended`: the Workflow's deadline has passed."""
        self._assess(pods, now, ended=ended)
        wanted: list[Wanted] = []
        limit = shapes.RETRY_LIMIT if self._defaults else None

        def executor(step: shapes.Step, name: str, boundary: str) -> None:
            # set_retry's own strategy has no policy of its own, and takes that of the defaults where there are any
            retries = step.retries if step.retries is not None else limit
            template = shapes.EXECUTOR if step.retries is None else shapes.RETRY_EXECUTOR
            failed_too = step.retries is not None and not self._defaults
            self._retry(
                f"{name}.executor",
                template,
                boundary,
                lambda attempt: self._pod(attempt, step, template, boundary, wanted, now, ended=ended),
                retries,
                now,
                failed_too=failed_too,
                ended=ended,
            )

        def one(step: shapes.Step, name: str, boundary: str) -> None:
            self._level(
                f"{name}.{step.name}",
                "system-container-executor",
                boundary,
                lambda at: executor(step, at, at),
                now,
                ended,
            )

        def root(name: str) -> None:
            for step in self._steps:
                one(step, name, name)

        self._level(
            self.workflow,
            "entrypoint",
            "",
            lambda at: self._level(f"{at}.root", "root", at, root, now, ended),
            now,
            ended,
        )
        return wanted

    def keep_succeeded(self) -> list[str]:
        """As KFP's API server does for a Retry of a run: forget what did not succeed; the names of the pods' nodes."""
        lost = [node for node in self.by_name.values() if node.phase != "Succeeded"]
        for node in lost:
            del self.by_name[node.name]
        names = set(self.by_name)
        for node in self.by_name.values():
            node.children = [child for child in node.children if child in names]
        return [node.name for node in lost if node.type == "Pod"]

    def status(self) -> Json:
        """Return the nodes for the Workflow's status."""
        return {shapes.node_id(self.workflow, node.name): self._shown(node) for node in self.by_name.values()}

    def _level(
        self, name: str, template: str, boundary: str, inside: Callable[[str], None], now: float, ended: bool
    ) -> None:
        """A DAG, under a Retry node where there are defaults."""
        limit = shapes.RETRY_LIMIT if self._defaults else None
        self._retry(
            name, template, boundary, lambda at: self._dag(at, template, boundary, inside, now), limit, now, ended=ended
        )

    def _retry(
        self,
        name: str,
        template: str,
        boundary: str,
        attempt: Callable[[str], Node],
        limit: int | None,
        now: float,
        *,
        failed_too: bool = False,
        ended: bool = False,
    ) -> None:
        if limit is None:
            attempt(name)
            self._adopt(name, boundary)
            return
        retry = self._node(name, "Retry", template, boundary, now)
        self._adopt(name, boundary)
        again = {"Error", "Failed"} if failed_too else {"Error"}
        while retry.phase not in FINAL:
            number = max(0, len(retry.children) - 1)
            child = self.by_name.get(f"{name}({number})")
            if child is not None and child.phase in again and number < limit and not ended:
                number += 1
            child = attempt(f"{name}({number})")
            child.retried = True
            if child.name not in retry.children:
                retry.children.append(child.name)
            if child.phase not in FINAL:
                return
            if child.phase not in again or number >= limit or ended:
                retry.exit_code = child.exit_code
                exceeded = ended and child.phase != "Succeeded"
                self._finish(retry, child.phase, EXCEEDED if exceeded else child.message, now)

    def _dag(self, name: str, template: str, boundary: str, inside: Callable[[str], None], now: float) -> Node:
        dag = self._node(name, "DAG", template, boundary, now)
        if dag.phase in FINAL:
            return dag
        inside(name)
        phases = {self.by_name[child].phase for child in dag.children}
        if phases <= FINAL:
            self._finish(dag, next(p for p in ("Error", "Failed", "Succeeded") if p in phases), "", now)
        return dag

    def _pod(
        self,
        name: str,
        step: shapes.Step,
        template: str,
        boundary: str,
        wanted: list[Wanted],
        now: float,
        *,
        ended: bool,
    ) -> Node:
        if (found := self.by_name.get(name)) is not None:
            return found
        node = self._node(name, "Pod", template, boundary, now)
        node.phase = "Pending"
        if ended:
            self._finish(node, "Failed", DEADLINE, now)
        else:
            wanted.append(Wanted(name, step, template))
        return node

    def _assess(self, pods: Mapping[str, Json], now: float, *, ended: bool) -> None:
        for node in [node for node in self.by_name.values() if node.type == "Pod" and node.phase not in FINAL]:
            pod = pods.get(node.name)
            if pod is None:
                self._finish(node, "Error", "pod deleted", now)
                continue
            phase, message, node.exit_code = assessed(pod)
            if phase in FINAL:
                self._finish(node, phase, DEADLINE if ended and phase != "Succeeded" else message, now)
            else:
                node.phase = phase

    def _node(self, name: str, kind: str, template: str, boundary: str, now: float) -> Node:
        return self.by_name.setdefault(name, Node(name, kind, template, boundary, started=now))

    def _adopt(self, name: str, boundary: str) -> None:
        if boundary and name not in (children := self.by_name[boundary].children):
            children.append(name)

    def _finish(self, node: Node, phase: str, message: str, now: float) -> None:
        node.phase, node.message, node.finished = phase, message, now

    def _shown(self, node: Node) -> Json:
        shown = {
            "id": shapes.node_id(self.workflow, node.name),
            "name": node.name,
            "displayName": node.name.rpartition(".")[2] if node.name != self.workflow else node.name,
            "type": node.type,
            "phase": node.phase,
            "templateName": node.template,
            "startedAt": shapes.moment(node.started),
            "finishedAt": None if node.finished is None else shapes.moment(node.finished),
            "children": [shapes.node_id(self.workflow, child) for child in node.children],
            "message": node.message,
            "boundaryID": shapes.node_id(self.workflow, node.boundary) if node.boundary else "",
            "nodeFlag": {"retried": True} if node.retried else None,
            "outputs": None if node.exit_code is None else {"exitCode": str(node.exit_code)},
        }
        return {name: value for name, value in shown.items() if value or name == "finishedAt"}


def assessed(pod: Json) -> tuple[str, str, int | None]:
    """(phase, message, exit code of main) of the node of a pod."""
    status = pod.get("status", {})
    ended = {
        one["name"]: one["state"]["terminated"]
        for one in status.get("containerStatuses", [])
        if "terminated" in one.get("state", {})
    }
    main = ended.get("main")
    code = None if main is None else int(main["exitCode"])
    phase = str(status.get("phase", "Pending"))
    if phase != "Failed":
        return phase, "", code
    if status.get("message"):
        return "Failed", str(status["message"]), code
    if main is None or code == 0:
        return "Failed", "pod failed: main container did not complete successfully", code
    output = f": {main['message']}" if main.get("message") else ""
    return "Failed", f"main: {main.get('reason', 'Error')} (exit code {code}){output}", code
