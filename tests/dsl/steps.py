"""A step as KFP starts it, without KFP: the launcher with an executor input, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kfp_gpuquota.dsl.pipelines.route import masked
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    import signal
    from pathlib import Path

    from tests.conftest import EmbeddedCluster

RESULT = masked("{{$.outputs.parameters['result'].output_file}}")


@dataclass
class Step:
    """One step of one run: its shell script, and where its output goes."""

    cluster: EmbeddedCluster
    directory: Path
    script: str
    run_id: str = "run-1"
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def result(self) -> Path:
        """The final place of the step's one output."""
        return self.directory / "step" / "result"

    def start(self, *more: str) -> Launcher:
        """One attempt."""
        outputs = {"parameters": {"result": {"outputFile": str(self.result)}}}
        executor_input = {"outputs": {**outputs, "outputFile": str(self.directory / "step" / "executor_output.json")}}
        command = [sys.executable, "-m", "kfp_gpuquota.dsl.launcher", f"--task={self.run_id}/train"]
        command += ["--executor-input", json.dumps(executor_input), *more, "--", "sh", "-c", self.script, RESULT]
        environment = {**self.cluster.environment, "GPUQUOTA_PROJECT": "team-a", "GPUQUOTA_GPUS": "1"}
        process = subprocess.Popen(
            command,
            env={**environment, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.directory,
        )
        return Launcher(process)

    def run(self, *more: str) -> tuple[int, str]:
        """One attempt to its end: (exit code, log)."""
        return self.start(*more).wait()


@dataclass
class Launcher:
    """A running launcher."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def read_until(self, part: str) -> str:
        """The next line that holds `part`."""
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if part in line:
                return self.lines[-1]
        raise AssertionError(f"{part!r} was not said: {self.lines}")

    def send(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal; returns (exit code, log)."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """(exit code, log)."""
        rest, _ = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, "\n".join([*self.lines, rest])


def reasons(job: Any) -> str:
    """A job's reason, for messages of failed assertions."""
    return job.status.reason.message if job.status.reason else ""
