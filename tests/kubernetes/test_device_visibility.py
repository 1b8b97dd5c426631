"""Containers that request no GPUs see none, also those of an ElasticJob's template beside the training's."""

from __future__ import annotations

import pytest

from kfp_gpuquota.cluster.kubernetes.admission.device_visibility import NO_DEVICES, VARIABLE, hidden_in_template

OTHER = {"name": "A", "value": "1"}
OWN = {"name": VARIABLE, "value": "all"}


@pytest.mark.parametrize(
    ("given", "expected"), [(None, [NO_DEVICES]), ([], [NO_DEVICES]), ([OTHER], [OTHER, NO_DEVICES]), ([OWN], [OWN])]
)
def test_a_template_container_gets_the_variable_unless_it_sets_it_itself(
    given: list[dict[str, str]] | None, expected: list[dict[str, str]]
) -> None:
    container = {"name": "log", "image": "log:1", **({} if given is None else {"env": given})}
    assert hidden_in_template(container) == {**container, "env": expected}
