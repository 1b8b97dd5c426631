"""The directory that an agent shares with a workload that may mean harm: the agent is root there."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.fractions.agent import UsageMessage, read_limit, read_usage, write_limit

if TYPE_CHECKING:
    from pathlib import Path


def test_what_was_told_is_read_back_and_another_user_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_limit(tmp_path, 12_288)
    finally:
        os.umask(before)
    assert read_limit(tmp_path) == 12_288
    assert (tmp_path / "limit.json").stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in tmp_path.iterdir()] == ["limit.json"]


@pytest.mark.parametrize("planted", ["limit.json", "limit.json.new"])
def test_a_link_that_the_workload_has_planted_is_replaced_and_not_followed(tmp_path: Path, planted: str) -> None:
    (directory := tmp_path / "memory").mkdir()
    (elsewhere := tmp_path / "somebody-elses").write_text("untouched")
    (directory / planted).symlink_to(elsewhere)
    write_limit(directory, 1)
    assert elsewhere.read_text() == "untouched"
    assert read_limit(directory) == 1


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (target := tmp_path / "target").mkdir()
    (tmp_path / "memory").symlink_to(target)
    with pytest.raises(OSError, match="memory"):
        write_limit(tmp_path / "memory", 1)
    assert not list(target.iterdir())


def test_nothing_is_heard_from_a_link_a_pipe_or_a_folder_and_nobody_waits_for_them(tmp_path: Path) -> None:
    usage = tmp_path / "usage.json"
    (other := tmp_path / "other").write_text(json.dumps({"follows_mib": 1}))
    usage.symlink_to(other)
    assert read_usage(tmp_path) is None
    usage.unlink()
    os.mkfifo(usage)
    assert read_usage(tmp_path) is None
    usage.unlink()
    usage.mkdir()
    assert read_usage(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"follows_mib": "much"}', "9" * 10_000])
def test_what_cannot_be_read_is_not_heard(tmp_path: Path, content: str) -> None:
    (tmp_path / "usage.json").write_text(content)
    assert read_usage(tmp_path) is None


def test_what_is_said_is_heard(tmp_path: Path) -> None:
    (tmp_path / "usage.json").write_text('{"follows_mib": 4096, "wanted_mib": null, "more": "is skipped"}')
    assert read_usage(tmp_path) == UsageMessage(follows_mib=4096)
