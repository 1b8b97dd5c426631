"""A cluster whose page is open."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from tests.web.visitor import Visitor

if TYPE_CHECKING:
    from kfp_gpuquota.server.client import Client
    from tests.conftest import EmbeddedCluster


def visitor_of(cluster: EmbeddedCluster) -> Visitor:
    """A visitor that has a link, and has not opened it yet."""
    return Visitor(cast("Client", cluster.client).open_page().url)


@pytest.fixture
def visitor(embedded_cluster: EmbeddedCluster) -> Visitor:
    """A visitor that was let in."""
    made = visitor_of(embedded_cluster)
    assert made.enter().status == 200
    return made
