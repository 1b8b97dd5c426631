"""Accounts of this machine for the time of the tests, and programs that run as them."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import pytest

from tests import forked
from tests.polling import TIMEOUT_S
from tests.security.other_user import as_root
from tests.shared import programs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

forked.preload("tests.shared.programs")

MARKS = [as_root, pytest.mark.xdist_group("accounts")]
"""Of each test: one process adds and removes accounts."""

ACCESS = f"gqlab{os.getpid()}"
"""The group of those who may connect."""
ADMINS = f"gqadm{os.getpid()}"


@dataclass(frozen=True)
class Person:
    """An account."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: Path

    def ask(self, socket: Path, requests: Iterable[tuple[str, str, object]]) -> list[tuple[int, Any]]:
        """Return (status, body) of each (method, path, body); status 0 and the error if there is no connection."""
        asked = json.dumps([str(socket), list(requests)])
        return [(status, body) for status, body in json.loads(self.python(_REQUESTS, standard_input=asked))]

    def python(self, script: str, *arguments: object, standard_input: str = "") -> str:
        """Return what a script of the standard library prints."""
        program = self.start(script, *arguments)
        output, errors = program.communicate(standard_input, timeout=TIMEOUT_S)
        assert program.returncode == 0, errors
        return output

    def start(self, script: str, *arguments: object) -> subprocess.Popen[str]:
        """Start such a script."""
        ids = json.dumps([self.uid, self.gid, self.groups])
        pipe = subprocess.PIPE
        command = [sys.executable, "-I", "-c", _BECOME + script, ids, *map(str, arguments)]
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd="/")

    def gpuquota(self, *words: str, variables: dict[str, str]) -> forked.Completed:
        """Run a command as this user, in a login's environment and these variables."""
        return self.run("command_line", *words, variables=variables)

    def run(self, main: str, *words: str, variables: dict[str, str]) -> forked.Completed:
        """Run a function of `programs` as this user."""
        environment = {"HOME": str(self.home), "USER": self.name, "PATH": os.environ["PATH"], **variables}
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            program = forked.Program(
                programs.as_user,
                *(json.dumps([self.uid, self.gid, self.groups]), main, *words),
                stdout=output.fileno(),
                stderr=errors.fileno(),
                environment=environment,
                cwd=self.home,
                new_session=True,
            )
            code = program.wait(TIMEOUT_S)
            return forked.Completed(code, _content(output), _content(errors))


def make(name: str, home: Path, groups: Sequence[str] = ()) -> Person:
    """Add an account."""
    account = f"gq{name}{os.getpid()}"
    more = ["--groups", ",".join(groups)] if groups else []
    options = ["--system", "--user-group", "--create-home", "--home-dir", str(home), "--shell", "/bin/sh", *more]
    subprocess.run(["useradd", *options, account], check=True, capture_output=True)
    made = pwd.getpwnam(account)
    return Person(account, made.pw_uid, made.pw_gid, tuple(os.getgrouplist(account, made.pw_gid)), home)


def remove(people: Iterable[Person]) -> None:
    """Remove the accounts, and their groups."""
    for person in people:
        subprocess.run(["userdel", person.name], check=True, capture_output=True)


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


_BECOME = """
# Imported before: the library may lie where only root may read.
import encodings.idna, http.client, json, os, resource, socket, sys
uid, gid, groups = json.loads(sys.argv.pop(1))
os.setgroups(groups); os.setgid(gid); os.setuid(uid)
"""

_REQUESTS = """
path, requests = json.load(sys.stdin)
answers = []
for method, target, body in requests:
    connection = http.client.HTTPConnection("localhost", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.connect(path)
        connection.request(method, target, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        content = answer.read()
        try:
            answers.append((answer.status, json.loads(content) if content else None))
        except ValueError:
            answers.append((answer.status, content.decode()))
    except OSError as error:
        answers.append((0, str(error)))
    connection.close()
print(json.dumps(answers))
"""


def environment_of(cluster_socket: Path) -> dict[str, str]:
    """Return the variables by which a command finds the shared cluster of a test."""
    return {"GPUQUOTA_SHARED_SOCKET": str(cluster_socket)}
