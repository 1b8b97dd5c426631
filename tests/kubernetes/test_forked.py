"""Computations in child processes: they see this process's memory, hold up nothing, and end."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kfp_gpuquota.cluster.kubernetes.client.process import forked
from kfp_gpuquota.cluster.kubernetes.client.process.forked import MEMORY, computed, free_memory
from kfp_gpuquota.errors import ClusterUnavailableError
from tests.polling import TIMEOUT_S, until


def children() -> set[str]:
    """The ids of this process's children."""
    found: set[str] = set()
    for thread in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            found.update((thread / "children").read_text().split())
    return found


def test_a_child_computes_from_this_processs_memory_and_changes_nothing_in_it() -> None:
    content = [1, 2, 3]

    def compute() -> bytes:
        content.append(4)
        return b"x" * (1 << 20) + str((content, os.getpid())).encode()

    before = children()
    answer = asyncio.run(computed(compute, TIMEOUT_S))
    assert answer[: 1 << 20] == b"x" * (1 << 20)
    assert answer[1 << 20 :].startswith(b"([1, 2, 3, 4], ")
    assert str(os.getpid()).encode() not in answer
    assert content == [1, 2, 3]
    assert children() <= before


def test_the_event_loop_goes_on_while_a_child_computes(tmp_path: Path) -> None:
    """The child waits for a file that the loop makes only after the child has made one."""
    here, there = tmp_path / "here", tmp_path / "there"

    def compute() -> bytes:
        there.touch()
        until(here.exists)
        return b"computed"

    async def run() -> bytes:
        task = asyncio.create_task(computed(compute, TIMEOUT_S))
        while not there.exists():
            await asyncio.sleep(0)
        here.touch()
        return await task

    assert asyncio.run(run()) == b"computed"


def test_a_child_that_takes_too_long_is_killed() -> None:
    before = children()

    def forever() -> bytes:
        while True:
            time.sleep(1)

    with pytest.raises(TimeoutError):
        asyncio.run(computed(forever, 0.05))
    assert children() <= before


def test_a_child_that_fails_is_an_error_and_not_an_empty_answer() -> None:
    def fails() -> bytes:
        raise ValueError("broken")

    with pytest.raises(ClusterUnavailableError, match="the computation failed"):
        asyncio.run(computed(fails, TIMEOUT_S))


def test_a_child_that_cannot_even_log_its_failure_ends_and_never_goes_on_as_its_parent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def out_of_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(forked.log, "exception", out_of_memory)
    try:
        with pytest.raises(ClusterUnavailableError, match="the process ended with status 256"):
            asyncio.run(computed(lambda: b"x" * (2 * MEMORY), TIMEOUT_S))
    finally:
        (tmp_path / str(os.getpid())).touch()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


def test_a_child_logs_nothing_after_the_process_that_asked_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(forked.log, "exception", lambda *_: (tmp_path / "logged").touch())
    read, answer = os.pipe()
    os.close(read)
    if (child := os.fork()) == 0:
        forked._compute(lambda: b"answer", answer, TIMEOUT_S, MEMORY)
    os.close(answer)
    os.waitpid(child, 0)
    assert not list(tmp_path.iterdir())


def test_a_child_that_needs_too_much_memory_fails() -> None:
    with pytest.raises(ClusterUnavailableError, match="the computation failed"):
        asyncio.run(computed(lambda: b"x" * (2 * MEMORY), TIMEOUT_S))


def control_group(folder: Path, limit: str, used: int = 0, dropped: int = 0) -> Path:
    """A control group as the kernel shows it."""
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {dropped}\n")
    return folder


def test_no_child_is_started_where_the_container_could_need_more_than_it_may_use(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None, "no control group"
    assert free_memory(control_group(tmp_path, "max", 5)) is None
    assert free_memory(control_group(tmp_path, "100", 50, 20)) == 70
    with pytest.raises(ClusterUnavailableError, match="too little memory left"):
        asyncio.run(computed(lambda: b"x", TIMEOUT_S, control_group(tmp_path, str(1 << 30), (1 << 30) - (1 << 20))))
    much = control_group(tmp_path, str(1 << 40), 1 << 20)
    assert asyncio.run(computed(lambda: b"x", TIMEOUT_S, much)) == b"x"


def test_a_child_whose_answer_nobody_waits_for_is_ended() -> None:
    before = children()

    async def run() -> None:
        task = asyncio.create_task(computed(lambda: time.sleep(TIMEOUT_S) or b"", TIMEOUT_S))  # type: ignore[func-returns-value]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(children() - before) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert children() <= before


def test_a_child_has_none_of_this_processs_connections() -> None:
    held = os.open("/dev/null", os.O_RDONLY)

    def compute() -> bytes:
        return str(sorted(one.name for one in Path("/proc/self/fd").iterdir())).encode()

    open_there = asyncio.run(computed(compute, TIMEOUT_S)).decode()
    os.close(held)
    assert len(open_there.split(",")) <= 5, open_there
