"""Our reading of quantities against that of the real API server: what one takes the other takes, for the same value."""

from __future__ import annotations

import http.client
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kfp_gpuquota.api.quantity import LARGEST, parse_quantity
from kfp_gpuquota.errors import InvalidFieldError
from tools.devcluster import ApiError

if TYPE_CHECKING:
    from fractions import Fraction

    from tools.devcluster import DevCluster

# The one kind with a bare quantity: those in lists of resources are rounded up to thousandths before they are shown.
CAPACITIES = "/apis/storage.k8s.io/v1/namespaces/default/csistoragecapacities"
NUMBERS = st.from_regex(r"[+-]?([0-9]{1,12}(\.[0-9]{0,12})?|\.[0-9]{1,12})", fullmatch=True)
SUFFIXES = st.sampled_from(["", *"numkMGTPE", *(f"{letter}i" for letter in "KMGTPE"), "e3", "E3", "e-3", "E+2", "e0"])
SLIPS = st.sampled_from(
    ["GB", "gi", "K", "ki", "mi", "B", "e", "E1.5", "ee3", "Gi1", "%", "i", "MiB", "Zi", "e3Gi", "_"]
)
QUANTITIES = st.builds(str.__add__, NUMBERS, SUFFIXES)
TEXTS = QUANTITIES | st.builds(str.__add__, NUMBERS, SLIPS) | st.text("0123456789.+-eEkKmMGiTnu", max_size=8)


def judged(cluster: DevCluster, text: str) -> str | None:
    """The quantity as the API server writes it; None where it is none to it. Nothing is created."""
    body = {"metadata": {"name": "judge"}, "storageClassName": "none", "capacity": text}
    try:
        return str(cluster.api.create(CAPACITIES, body, dryRun="All")["capacity"])
    except ApiError as error:
        return None if error.status == http.client.BAD_REQUEST else _shown_as_negative(error.message)


def _shown_as_negative(message: str) -> str:
    """It was read, and refused for being below 0: the message has it as the server writes it."""
    found = re.search(r'Invalid value: "([^"]+)": must be greater than or equal to 0', message)
    assert found, message
    return found[1]


def read(text: str) -> Fraction | None:
    try:
        return parse_quantity("memory", text)
    except InvalidFieldError:
        return None


@given(text=TEXTS)
@example("4Gi")
@example("0.5GB")
@example("1e3")
@example("1E")
@example("1Ei")
@example("9223372036854775807")
@example("9223372036854775808")
@example("100000000000E")
@example("-1")
@example("-0")
@example("+.5")
@example("1.")
@example(".")
@example("")
@example("0.0000000001")
@example("1n")
@example("1e-12")
@example("0.1Ki")
@example("E0")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_text_is_a_quantity_to_us_where_it_is_one_to_kubernetes_and_has_the_same_value(
    cluster: DevCluster, text: str
) -> None:
    theirs, ours = judged(cluster, text), read(text)
    if not re.match(r"[+-]?\.?[0-9]", text):
        assert ours is None, "Kubernetes takes Ki, E0 or + for 0, against its own grammar: to us they are slips"
        return
    assert (theirs is None) == (ours is None), (text, theirs, ours)
    if theirs is not None and ours is not None and abs(ours) < LARGEST:  # beyond, 1000E is 1 to Kubernetes
        assert read(theirs) == ours, (text, theirs)


@pytest.mark.parametrize(
    ("text", "theirs"),
    [("1024Ki", "1Mi"), ("0.5", "500m"), ("1000", "1k"), ("1500M", "1500M"), ("0.1Ki", "102400m"), ("1n", "1n")],
)
def test_the_judge_writes_quantities_in_other_units_than_they_were_given(
    cluster: DevCluster, text: str, theirs: str
) -> None:
    assert judged(cluster, text) == theirs
