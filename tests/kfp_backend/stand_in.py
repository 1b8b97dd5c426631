"""Runs in an executor's pod in place of Argo's emissary and KFP's launcher: `python3 -I -c SOURCE OPTIONS -- ARGV`.

The standard library only: it is handed to whatever Python the step's image has. It does what a step can see of KFP's
launcher. The inputs have the paths of the executor input (content: GPUQUOTA_TEST_INPUTS, JSON by path). `{{$}}` and the
placeholders of the inputs are filled in, and none of the run or the task is. A failure ends it with 1 whatever the
step's code. On SIGTERM it passes the signal on and exits half a second later (0.4 to 1.7 s were recorded, whatever the
grace period). It prints what a real one uploads, each output under its path.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GONE_AFTER_S = 0.5


def main(arguments: list[str]) -> int:
    """Run the step as KFP's launcher does."""
    options, argv = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    executor_input = options[options.index("--executor_input") + 1]
    for path, content in json.loads(os.environ.pop("GPUQUOTA_TEST_INPUTS", "{}")).items():
        write(path, content)
    outputs = places(json.loads(executor_input))
    for path in outputs:
        path.parent.mkdir(parents=True, exist_ok=True)
    filled = {"{{$}}": executor_input}
    for name, value in json.loads(executor_input).get("inputs", {}).get("parameterValues", {}).items():
        filled[f"{{{{$.inputs.parameters['{name}']}}}}"] = str(value)
    for placeholder, text in filled.items():
        argv = [element.replace(placeholder, text) for element in argv]
    child = subprocess.Popen(argv)

    def stop(number: int, _frame: object) -> None:
        child.send_signal(number)
        signal.setitimer(signal.ITIMER_REAL, GONE_AFTER_S)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(143))
    code = child.wait()
    ended, peak_mib = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    print(f"kfp-launcher: the step ended at {ended:.3f} with {code}, at most {peak_mib} MiB", flush=True)
    if code:
        if signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.pause()
        return 1
    for path in outputs:
        if path.is_file():
            print(f"kfp-launcher: {path}: {path.read_text()[:2000]}", flush=True)
    return 0


def places(executor_input: dict[str, Any]) -> list[Path]:
    """Where the step writes."""
    outputs = executor_input["outputs"]
    found = [outputs["outputFile"], *(one["outputFile"] for one in outputs.get("parameters", {}).values())]
    for kind in outputs.get("artifacts", {}).values():
        found += [one["uri"].replace("minio:/", "/minio") for one in kind["artifacts"]]
    return [Path(path) for path in found]


def write(path: str, content: str) -> None:
    """Return the content of one input."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(content)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
