"""The entry point of the program `gpuquota`: a missing extra gives a message, not a traceback.

Nothing is imported here that every start would pay for: `gpuquota --help` reads a file.
"""

from __future__ import annotations

import os
import sys

NEEDED = ("typer", "msgspec")
HELP_FILE = os.path.join(os.path.dirname(__file__), "help.txt")  # noqa: PTH118, PTH120 (pathlib takes 8 ms)
HELP_WIDTH = 80


def main() -> None:
    """Run the command line, if what it needs is installed."""
    _open_closed_streams()
    if sys.argv[1:] in (["--help"], ["-h"]) and _shows_help():
        return
    import importlib.util  # noqa: PLC0415 (help needs none)

    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        lacks = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        sys.stderr.write(f"Error: {lacks}; run: pip install 'kfp-gpuquota[cluster]'\n")
        sys.exit(1)
    from kfp_gpuquota.cli.main import main as run  # noqa: PLC0415

    run()


def _open_closed_streams() -> None:
    """Open /dev/null for standard streams that the caller has closed, as some schedulers of commands do.

    Otherwise the next file or socket that is opened gets the number of one of them, and what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            while (opened := os.open(os.devnull, os.O_RDWR)) < number:
                pass
            setattr(sys, name, open(opened, "w" if number else "r", encoding="utf-8"))  # noqa: PTH123, SIM115


def _shows_help() -> bool:
    """Print the stored help, which is 80 columns wide; return False where it does not fit or cannot be written."""
    try:
        if sys.stdout.isatty() and os.get_terminal_size().columns < HELP_WIDTH:
            return False
        with open(HELP_FILE, encoding="utf-8") as file:  # noqa: PTH123
            sys.stdout.write(file.read())
        sys.stdout.flush()
    except OSError:
        return False
    return True


def kubectl_plugin() -> None:
    """`kubectl gpuquota ...`: the same on the kubeconfig's current context."""
    os.environ.setdefault("GPUQUOTA_CONTEXT", ".")
    main()
