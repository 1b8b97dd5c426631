"""The client in a program that ends by an exception out of a signal's handler, as the launcher and the examples do."""

from __future__ import annotations

from http.client import HTTPResponse
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster


class Stopped(BaseException):
    """The program must stop."""


def test_a_signal_that_comes_while_an_answer_is_closed_is_not_lost(
    embedded_cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = HTTPResponse.close

    def told_meanwhile(response: HTTPResponse) -> None:
        close(response)
        raise Stopped

    monkeypatch.setattr(HTTPResponse, "close", told_meanwhile)  # no signal comes at this very moment when asked to
    with pytest.raises(Stopped):
        embedded_cluster.client.health()
