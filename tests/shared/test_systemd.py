"""The service under a real systemd, in a kernel of its own: a job outlives a restart and a stop of the service."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kfp_gpuquota.cluster.local.shared.service import unit
from tests.user_mode_linux import boot

INIT = """
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t tmpfs tmpfs /run; mount -t tmpfs tmpfs /mnt
cp DIRECTORY/gpuquota.service DIRECTORY/driver.service DIRECTORY/driver.sh DIRECTORY/submit.py /mnt
cp -a /etc /mnt/etc; mount --bind /mnt/etc /etc; rm -rf /etc/systemd/system/*
mount -t tmpfs -o mode=755 tmpfs /var; mkdir -p /var/lib /var/tmp /var/log /var/cache
mount -t tmpfs -o mode=1777 tmpfs /tmp
ip link set lo up
groupadd --system lab; useradd --system -m -d /tmp/anna -s /bin/sh -G lab anna
cp /mnt/*.service /etc/systemd/system
exec /lib/systemd/systemd --unit=driver.service --log-target=console --log-level=err --show-status=false
"""

DRIVER_UNIT = """
[Unit]
DefaultDependencies=no
After=gpuquota.service
Wants=gpuquota.service
[Service]
Type=oneshot
TimeoutStartSec=infinity
ExecStart=/bin/sh /mnt/driver.sh
StandardOutput=tty
StandardError=tty
TTYPath=/dev/console
"""

DRIVER = """
alias gpuquota=PROGRAM
pid() { gpuquota get -p vision job/train -o jsonpath='{.status.workers[0].pid}'; }
gpuquota project create vision -g 1 --member anna
setpriv --reuid anna --regid anna --init-groups /usr/bin/python3 /mnt/submit.py
gpuquota wait -p vision --for=Running job/train > /dev/null; first=$(pid)
echo "runs as $(stat -c %U /proc/$first)"
systemctl restart gpuquota; echo "after a restart: same $([ "$(pid)" = "$first" ] && echo yes)"
systemctl stop gpuquota
echo "while it is stopped: $(cat /proc/$first/comm), $(ls /run/gpuquota 2>&1 | grep -o 'No such file')"
systemctl start gpuquota; echo "after a start: same $([ "$(pid)" = "$first" ] && echo yes)"
gpuquota cluster stop
until [ "$(systemctl is-active gpuquota)" = inactive ]; do sleep 0.1; done; echo "stopped by the command"
poweroff -f
"""

SUBMIT = """
import http.client, json, socket
connection = http.client.HTTPConnection("localhost")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect("/run/gpuquota/socket")
spec = {"name": "train", "project": "vision", "command": ["sleep", "1000"]}
connection.request("POST", "/v1/jobs", json.dumps({"spec": spec, "request_id": "1"}))
print("submitted", connection.getresponse().status)
"""


@pytest.mark.slow
@pytest.mark.xdist_group("user-mode-linux")
def test_jobs_outlive_a_restart_of_the_service_and_its_end(tmp_path: Path) -> None:
    service = unit(["cluster", "start", "--shared", "--gpus", "1", "--cpu-slots", "--group", "lab", "--foreground"])
    program = Path(sys.executable).with_name("gpuquota")
    files = {
        "gpuquota.service": service.replace("[Service]", "DefaultDependencies=no\n[Service]"),
        "driver.service": DRIVER_UNIT,
        "driver.sh": DRIVER.replace("PROGRAM", str(program)),
        "submit.py": SUBMIT,
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    console = boot(tmp_path, INIT.replace("DIRECTORY", str(tmp_path)), access="ro")
    for line in (
        "submitted 201",
        "runs as anna",
        "after a restart: same yes",
        "while it is stopped: sleep, No such file",
        "after a start: same yes",
        "stopped by the command",
    ):
        assert line in console, console[-6000:]
