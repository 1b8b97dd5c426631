"""All scripts of tests/elastic_runtime/zoo: alone, and through 1 -> 2 -> 1 -> 2 workers and a kill -9 of rank 0.

`passed`: the same samples in each step and the same parameters (within rounding with "fast", to the bit with "exact"),
in each mode that the script has; `refused`: ended alone, with the message that the script names; `wrong`: neither.

`--generated N`: N scripts composed of parts instead, each in one mode and through a history of stops, resumes, joins,
leaves and losses (tests/elastic_runtime/zoo/generated). `refused`: ended by a message that a part of it names;
`rehearsed`: went wrong, and its rehearsal says so; `wrong`: anything else.
Last line: JSON.

Usage: python benchmarks/zoo.py [NAME...] | --generated N [--seed S]
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
from tests.elastic_runtime.zoo.generated.drawing import drawn
from tests.elastic_runtime.zoo.generated.recipes import PREFIX
from tests.elastic_runtime.zoo.generated.verdicts import judge_all
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


def judge_generated(count: int, seed: int) -> None:
    """Draw scripts, print what is not `passed`, and the sums."""
    print_conditions("generated training scripts through histories", scripts=count, seed=seed)
    found = dict.fromkeys(("passed", "refused", "rehearsed", "wrong"), 0)
    began = time.perf_counter()
    for case, verdict in judge_all(drawn(count, seed)):
        found[verdict.result] += 1
        if verdict.result != "passed":
            name = f"{case.script.removeprefix(PREFIX)} ({case.reduction}; {', '.join(case.histories)})"
            print(f"{verdict.result:9} {name}: {verdict.why[: 1000 if verdict.result == 'wrong' else 160]}", flush=True)
    print_result(scripts=sum(found.values()), **found, seconds=round(time.perf_counter() - began))


def main() -> None:
    """Run them, print a line for each, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="scripts; default: all")
    parser.add_argument("--generated", type=int, metavar="N", help="so many scripts composed of parts")
    parser.add_argument("--seed", type=int, default=0, help="of the parts that are drawn")
    options = parser.parse_args()
    if options.generated:
        judge_generated(options.generated, options.seed)
        return
    chosen = options.names or list(SCRIPTS)
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
