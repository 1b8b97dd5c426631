"""What importing the two packages costs, in seconds of the processor, beyond what their users import anyway.

    python benchmarks/imports.py [TIMES]

The last line is JSON: the least of so many new processes, of elastic_runtime beyond torch (bar: 0.03 s) and of the
decorators beyond kfp (bar: 0.05 s).
"""

import subprocess
import sys

from common import print_conditions, print_result

TIMES = 5
ELASTIC = ("import torch", "import elastic_runtime")
DECORATORS = ("import kfp, kfp.dsl", "import kfp_gpuquota as g; g.component, g.pipeline, g.set_gpus")


def _seconds(before: str, measured: str) -> float:
    program = f"import time; {before}; began = time.process_time(); {measured}; print(time.process_time() - began)"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Measure the imports and print the figures."""
    times = int(sys.argv[1]) if len(sys.argv) > 1 else TIMES
    print_conditions("imports", new_processes=times)
    print_result(
        elastic_runtime_s=round(min(_seconds(*ELASTIC) for _ in range(times)), 4),
        decorators_s=round(min(_seconds(*DECORATORS) for _ in range(times)), 4),
    )


if __name__ == "__main__":
    main()
