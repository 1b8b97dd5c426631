"""The process of a script that a `script_server` runs: SOCKET, then SCRIPT, -m MODULE or -c CODE, and its arguments.

It imports little.
"""

import json
import os
import signal
import socket
import sys


def main() -> None:
    """Pass on files, environment and signals, and end as the script does."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, lambda received, _: connection.sendall(bytes([received])))
    request = {"environment": dict(os.environ), "directory": os.getcwd(), "arguments": sys.argv[2:]}  # noqa: PTH109
    raw = json.dumps(request).encode() + b"\n"
    if rest := raw[socket.send_fds(connection, [raw], [0, 1, 2]) :]:  # a short script may have ended by now
        connection.sendall(rest)
    code = int(connection.recv(16) or b"111")
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
