"""Names as kubectl's users write them, and selection by label. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KINDS = {"job": {"job", "jobs"}, "project": {"project", "projects"}, "node": {"node", "nodes"}}


def resource(text: str, kind: str) -> str:
    """Return the name in "train1", "job/train1" or "jobs/train1". Raises UsageError for another kind's."""
    prefix, slash, name = text.partition("/")
    if not slash:
        return text
    singular = next((one for one, words in _KINDS.items() if kind in words), kind)
    if prefix not in _KINDS.get(singular, {singular}):
        raise UsageError(f"{text!r} names a {prefix}, and this is about a {singular}: write {singular}/{name}")
    return name


def job_names(words: Sequence[str]) -> list[str]:
    """Return the names in "x y", "job x y" and "job/x job/y"."""
    if len(words) > 1 and words[0] in _KINDS["job"]:
        words = words[1:]
    return [resource(word, "job") for word in words]


def job_name(words: Sequence[str]) -> str:
    """Return the name in "x", "job x" and "job/x". Raises UsageError for several."""
    names = job_names(words)
    if len(names) != 1:
        raise UsageError(f"one job is described at a time, and {len(names)} are named: {' '.join(names)}")
    return names[0]


def matches(labels: Mapping[str, str], selector: str) -> bool:
    """Return whether the labels satisfy "K=V,K!=V,K,!K". Raises UsageError for an invalid selector."""
    return all(_satisfies(labels, term.strip()) for term in selector.split(",") if term.strip())


def _satisfies(labels: Mapping[str, str], term: str) -> bool:
    if "!=" in term:
        key, _, value = term.partition("!=")
        return labels.get(key.strip()) != value.strip()
    if "=" in term:
        key, _, value = term.replace("==", "=").partition("=")
        if not key.strip():
            raise UsageError(f"--selector has the term {term!r}, but a label is given as KEY=VALUE")
        return labels.get(key.strip()) == value.strip()
    return term[1:].strip() not in labels if term.startswith("!") else term in labels
