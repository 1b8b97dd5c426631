"""A selector selects what it selects on an API server, and is refused if it is refused there."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlencode

from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gpuquota.api.label_selector import parse_selector, selects
from kfp_gpuquota.errors import InvalidFieldError
from tools.devcluster.api import ApiError

if TYPE_CHECKING:
    from tools.devcluster import DevCluster

LABELS = {
    "none": {},
    "web": {"app": "web", "env": "prod", "n": "3"},
    "db": {"app": "db", "env": "test", "n": "10"},
    "empty": {"app": "", "n": "x"},
    "in": {"in": "a", "notin": "b", "a.b/app": "web", "n": "007"},
}
keys = st.sampled_from(
    ["app", "env", "n", "in", "notin", "a.b/app", "absent", "app", "env", "n", "-a", "a b", "A/", "é", ""]
)
values = st.sampled_from(["web", "db", "prod", "", "3", "+3", "-1", "x", "a/b", "9" * 20, "b c", "_", "007"])
symbols = st.sampled_from(["=", "==", "!=", "!", ",", "(", ")", "in", "notin", ">", "<", " ", "  "])
terms = st.one_of(
    st.tuples(keys, st.sampled_from(["=", "==", "!=", ">", "<", " = ", " !="]), values).map("".join),
    st.tuples(
        keys, st.sampled_from([" in ", " notin ", " in", " notin "]), st.lists(values, max_size=3).map(",".join)
    ).map(lambda t: f"{t[0]}{t[1]}({t[2]})"),
    keys,
    keys.map("!{}".format),
)
selectors = st.one_of(
    st.lists(terms, max_size=3).map(",".join),
    st.lists(st.one_of(keys, values, symbols), max_size=6).map("".join),
)


def test_a_selector_selects_what_it_selects_on_an_api_server(cluster: DevCluster, namespace: str) -> None:
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    for name, labels in LABELS.items():
        cluster.api.create(path, {"metadata": {"name": name, "labels": {**labels, "ours": "yes"}}})

    def there(selector: str) -> set[str] | None:
        try:
            found = cluster.api.get(f"{path}?{urlencode({'labelSelector': selector})}")["items"]
        except ApiError:
            return None
        return {one["metadata"]["name"] for one in found} & set(LABELS)

    def here(selector: str) -> set[str] | None:
        try:
            parsed = parse_selector(selector)
        except InvalidFieldError:
            return None
        return {name for name, labels in LABELS.items() if selects(parsed, {**labels, "ours": "yes"})}

    @settings(max_examples=200)
    @given(selectors)
    def same(selector: str) -> None:
        assert here(selector) == there(selector)

    same()
