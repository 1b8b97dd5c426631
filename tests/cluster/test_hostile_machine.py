"""Random histories on a machine that is against it: a full disk, a clock that jumps, restarts, other users.

pytest tests/cluster/test_hostile_machine.py --seeds 7,8,9
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from typing import TYPE_CHECKING

import pytest

from kfp_gpuquota.cluster.local.devices import ClusterConfig
from tests.cluster.test_chaos import TEAMS, History
from tests.conftest import running_cluster
from tests.polling import until
from tests.security.other_user import as_root, open_to_everybody, run
from tests.security.test_full_machine import fill, small_disk
from tests.security.test_local_sockets import INTRUDER

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.real_trainings import Trainings
    from tests.conftest import EmbeddedCluster

DAY_S = 86_400
SQUATTER = """
for name in ("socket", "socket.new"):
    try:
        socket.socket(socket.AF_UNIX).bind(os.path.join(sys.argv[1], name))
        print("bound")
    except OSError as error:
        print("refused", error)
"""


class HostileHistory(History):
    """A history with a small disk, a clock that is set, and another user of the machine."""

    def __init__(
        self, cluster: EmbeddedCluster, seed: int, tally: Path, trainings: Trainings, disk: Path, clock: Path
    ) -> None:
        super().__init__(cluster, seed, tally, trainings)
        self.disk, self.clock = disk, clock
        self.actions += [
            self.fill_disk, self.take_inodes, self.free_disk, self.set_clock,
            self.restart_machine, self.intrude, self.squat,
        ]  # fmt: skip

    def fill_disk(self) -> str:
        with contextlib.suppress(OSError):  # no inode is left
            fill(self.disk)
        return "fill the disk"

    def take_inodes(self) -> str:
        files = self.disk / "files"
        with contextlib.suppress(OSError):
            files.mkdir(exist_ok=True)
            for number in itertools.count():
                (files / str(number)).touch()
        return "take all inodes"

    def free_disk(self) -> str:
        (self.disk / "filler").unlink(missing_ok=True)
        shutil.rmtree(self.disk / "files", ignore_errors=True)
        return "free the disk"

    def restart_machine(self) -> str:
        """End every process at once, and have what they wrote be of an earlier boot."""
        self.trainings.faults += 1
        until(self.ended, self.cluster.processes)
        for record in self.cluster.home.jobs.glob("*/workers/*/process.json"):
            identity = json.loads(record.read_text())
            in_place = json.dumps({**identity, "boot_id": "an earlier one"})
            with record.open("r+") as file:  # the disk may be full: no new file
                file.write(in_place)
                file.truncate()
        return "restart the machine"

    def set_clock(self) -> str:
        offset = self.random.choice([-DAY_S, -3600, 0, 60, DAY_S])
        self.clock.write_text(str(offset))
        return f"set the clock to {offset} s"

    def ended(self) -> bool:
        self.cluster.kill_everything()  # again, where the daemon has started another process meanwhile
        return not self.cluster.processes()

    def intrude(self) -> str:
        """Have another user talk to the daemon, with a token that they have guessed."""
        answer = run(INTRUDER, self.cluster.home.socket_file, "token")
        assert answer.startswith("refused"), answer
        return "intrude"

    def squat(self) -> str:
        """Have another user take the place of a daemon that was killed, which the next client starts again."""
        self.cluster.kill_daemon()
        assert "bound" not in run(SQUATTER, self.cluster.home.root)
        return "kill the daemon, and squat"

    def settle(self) -> None:
        self.free_disk()
        self.clock.write_text("0")
        super().settle()


@as_root
@pytest.mark.slow
def test_nothing_is_lost_or_held_twice_on_a_machine_that_is_against_it(
    jumping_clock: Path, tmp_path: Path, seed: int, trainings: Trainings
) -> None:
    tally = tmp_path / "tally"
    tally.touch()
    config = ClusterConfig(nodes=2, gpus_per_node=3)
    with (
        small_disk(tmp_path / "disk", "size=64m,nr_inodes=3000") as disk,
        running_cluster(disk / "home", config, new_interpreter=True) as cluster,
    ):
        disk.chmod(0o755)
        open_to_everybody(disk / "home")
        for name, (guaranteed, limit) in TEAMS.items():
            cluster.project(name, guaranteed, limit=limit)
        HostileHistory(cluster, seed, tally, trainings, disk, jumping_clock).play()
