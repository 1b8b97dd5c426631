"""What the page keeps for each of its users."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from multidict import CIMultiDict

from kfp_gpuquota.api import Reason, ReasonCode, Resize
from kfp_gpuquota.cluster.kubernetes.web import entrance
from kfp_gpuquota.cluster.kubernetes.web.entrance import KEPT_S, Entrance
from kfp_gpuquota.cluster.kubernetes.web.options import parsed
from kfp_gpuquota.cluster.kubernetes.web.pages import UserPages
from kfp_gpuquota.cluster.kubernetes.web.rights import Identity
from kfp_gpuquota.web.setting import Setting
from tests.web.listed import job


def test_what_was_rendered_for_a_user_is_kept_while_the_user_looks(monkeypatch: Any) -> None:
    now = 0.0
    made: list[str] = []
    options = parsed(["--trusted-proxy=127.0.0.0/8"])
    door = Entrance(Setting("", frozenset()), lambda user: cast("Any", made.append(user.name)), options, lambda: now)

    def visit(user: str) -> object:
        return door.visit(
            cast("Any", SimpleNamespace(remote="127.0.0.1", headers=CIMultiDict({"kubeflow-userid": user})))
        )

    first = visit("ann")
    visit("bob")
    now = KEPT_S - 1
    assert visit("ann") is first
    now = KEPT_S
    visit("carl")
    assert made == ["ann", "bob", "carl"]
    assert visit("ann") is first
    visit("bob")
    assert made == ["ann", "bob", "carl", "bob"], "what he saw was forgotten"
    monkeypatch.setattr(entrance, "MAX_USERS", 2)
    visit("ann")
    visit("dora")
    assert [user.name for user in door._visits] == ["ann", "dora"]


def test_an_ended_job_whose_size_never_changed_held_what_it_asked_for() -> None:
    """Its status says 0 GPUs, which is what it holds now."""
    nothing = cast("Any", None)
    pages = UserPages(Identity("ann"), *[nothing] * 6)
    assert pages.sizes_of(job("ended", gpus=4, started_at=10.0, finished_at=20.0)) == [(10.0, 4), (20.0, 0.0)]
    assert pages.sizes_of(job("never", gpus=4, finished_at=20.0)) == []
    assert pages.sizes_of(job("suspended", gpus=4, started_at=10.0)) == []
    change = Resize(
        at=15.0, from_gpus=2, to_gpus=3, generation=1, step=1, reason=Reason(code=ReasonCode.FITS, message="")
    )
    grown = job("grown", gpus=4, started_at=10.0, finished_at=20.0, resizes=(change,))
    assert pages.sizes_of(grown) == [(10.0, 2), (15.0, 3), (20.0, 0.0)]
