"""Names as kubectl's users write them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kfp_gpuquota.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def kind_and_name(words: Sequence[str]) -> tuple[str, str]:
    """Return "job", "project" or "node", and the name, of "x", "project x" or "node/x". Raises UsageError."""
    prefix, slash, rest = words[0].partition("/")
    kind = next((one for one, spelled in _KINDS.items() if prefix in spelled), "")
    if kind and slash and len(words) == 1:
        return kind, rest
    if kind and not slash and len(words) == 2:
        return kind, resource(words[1], kind)
    return "job", job_name(words)


def job_name(words: Sequence[str]) -> str:
    """Return the name in "x", "job x" and "job/x". Raises UsageError for several."""
    names = job_names(words)
    if len(names) != 1:
        raise UsageError(f"one job is described at a time, and {len(names)} are named: {' '.join(names)}")
    return names[0]
