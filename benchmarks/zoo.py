"""All scripts of tests/elastic_runtime/zoo: alone, and through 1 -> 2 -> 1 -> 2 workers and a kill -9 of rank 0.

`passed`: the same samples in each step and the same parameters (within rounding with "fast", to the bit with "exact"),
in each mode that the script has; `refused`: ended alone, with the message that the script names; `wrong`: neither.
Last line: JSON.

Usage: python benchmarks/zoo.py [NAME...]
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import print_conditions, print_result

from tests.elastic_runtime.zoo import driver
from tests.elastic_runtime.zoo.parts import SCRIPTS, Script


def outcome(script: Script, directory: Path) -> tuple[str, str]:
    """("passed", "refused" or "wrong", why)."""
    if script.refused:
        messages = [driver.refusal(script, mode, directory / mode) for mode in script.modes]
        wrong = [message for message in messages if not re.search(script.refused, message)]
        return ("wrong", f"the message was {wrong[0]!r}") if wrong else ("refused", messages[0][:80])
    for mode in script.modes:
        expected = driver.alone(script, mode, directory / f"{mode}-alone")
        found = driver.changed(script, mode, directory / mode)
        driver.compare(found, expected, exact=mode == "exact")
    return "passed", " and ".join(script.modes)


def main() -> None:
    """Run them, print a line for each, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="scripts; default: all")
    chosen = parser.parse_args().names or list(SCRIPTS)
    print_conditions("training scripts through changes of size and a loss", scripts=len(chosen))
    found = dict.fromkeys(("passed", "refused", "wrong"), 0)
    seconds = []
    for name in chosen:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            try:
                result, why = outcome(SCRIPTS[name], Path(directory))
            except (Exception, SystemExit) as error:  # noqa: BLE001  (one script that fails leaves the others)
                result, why = "wrong", f"{type(error).__name__}: {str(error)[-1500:]}"
        seconds.append(time.perf_counter() - began)
        found[result] += 1
        print(f"{result:8} {seconds[-1]:5.1f} s  {name}: {why}", flush=True)
    print_result(scripts=len(chosen), **found, slowest_s=round(max(seconds), 1))


if __name__ == "__main__":
    main()
