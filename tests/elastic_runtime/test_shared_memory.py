"""Memory that a worker's mirror maps stays when the worker is killed, and is taken for no other memory."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from elastic_runtime.sharded.shared_memory import Address, new_segment, open_segment
from tests.forked import context

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def own_a_segment(connection: Connection) -> None:
    segment = new_segment(1000)
    assert segment is not None
    segment.body.fill_(7)
    segment.mark((1, 2, 3, 4))
    connection.send(segment.address)
    connection.recv()  # until it is killed


def test_a_mapped_segment_survives_its_owner() -> None:
    here, there = context.Pipe()
    owner = context.Process(target=own_a_segment, args=(there,))
    owner.start()
    mapped = open_segment(here.recv())
    assert owner.pid is not None
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    assert mapped is not None
    assert mapped.version == (1, 2, 3, 4)
    assert mapped.body.tolist() == [7] * 1000
    assert open_segment(mapped.address) is None


def test_memory_of_another_process_or_size_is_not_mapped() -> None:
    segment = new_segment(8)
    assert segment is not None
    address = segment.address
    assert open_segment(address) is not None
    assert open_segment(address._replace(token=1)) is None
    assert open_segment(address._replace(nbytes=9)) is None
    assert open_segment(Address()) is None
    del segment
    assert open_segment(address) is None
