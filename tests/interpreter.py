"""What CPython's main program does around a script, for a forked process that has imported modules already.

`become` prepares the process, `run` is pymain_run_python with PyErr_Print and Py_FinalizeEx: hooks, exit codes, threads
and `atexit` are as an interpreter has them; tests/test_interpreter.py compares both. A forked process does not have the
options and variables that an interpreter reads before it starts (`-O`, `-W`, PYTHONHASHSEED), so `run` refuses options.
After `atexit` it destroys what `__main__` holds, and no module: that is seconds of CPU with torch.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import io
import linecache
import multiprocessing
import multiprocessing.process
import os
import runpy
import signal
import subprocess
import sys
import types
from importlib.machinery import BuiltinImporter, SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from elastic_runtime.process import process_exit

if TYPE_CHECKING:
    from collections.abc import Callable

MOST = 1 << 63  # of a long
STANDARD_ERROR = 2


def search_path() -> list[str]:
    """Return what each interpreter has in `sys.path` after the script's folder and PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import sys; print(*sys.path[1:], sep='\\n')"]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def become(environment: dict[str, str], directory: str, path: list[str]) -> None:
    """Let this process have an interpreter's environment, streams, search path and name."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    given = environment.get("PYTHONPATH", "")
    sys.path[:] = [*([str(Path(part).absolute()) for part in given.split(os.pathsep)] if given else []), *path]
    sys.path_importer_cache.clear()
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, f"<{name}>", unbuffered=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    process: Any = multiprocessing.process
    main_process = next(each for each in process.BaseProcess.__subclasses__() if each.__name__ == "_MainProcess")
    process._current_process, process._parent_process = main_process(), None
    multiprocessing.set_start_method(None, force=True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _stream(number: int, name: str, *, unbuffered: bool) -> io.TextIOWrapper:
    """Open a standard stream, as create_stdio does."""
    mode, errors = (
        ("r", "surrogateescape") if number == 0 else ("w", ("surrogateescape", "backslashreplace")[number - 1])
    )
    raw: Any = io.FileIO(number, mode, closefd=False)
    raw.name = name
    buffered = number == 0 or not unbuffered
    binary = (io.BufferedReader if number == 0 else io.BufferedWriter)(raw) if buffered else raw
    lines = buffered and (number == STANDARD_ERROR or raw.isatty())
    stream = io.TextIOWrapper(binary, "utf-8", errors, "\n", line_buffering=lines, write_through=not buffered)
    stream.mode = mode  # type: ignore[misc]
    return stream


def run(arguments: list[str]) -> NoReturn:
    """Run SCRIPT, -m MODULE or -c CODE, and end the process."""
    sys.orig_argv = [sys.executable, *arguments]
    main = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins, __loader__=BuiltinImporter)
    sys.modules["__main__"] = main
    (code, error), interrupted = _raised(lambda: _execute(arguments, main.__dict__)), False
    if error is not None and not isinstance(error, SystemExit):
        code, interrupted = _display(error)
    elif error is not None:
        code = _exit_code(error)
    del error
    builtins.__dict__["_"] = _End(code, main.__dict__, interrupted=interrupted)
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError


def _execute(arguments: list[str], names: dict[str, Any]) -> int:
    first, *rest = arguments
    if first == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        if sys.version_info >= (3, 13):  # whose tracebacks show its lines
            linecache.cache["<string>"] = (
                len(rest[0]) + 1,
                None,
                [f"{line}\n" for line in rest[0].splitlines()],
                "<string>",
            )
        exec(compile(rest[0] + "\n", "<string>", "exec"), names)
    elif first.startswith("-"):
        sys.stderr.write(f"a forked interpreter has no option {first}\n")
        return 2
    else:
        sys.argv = arguments
        return _execute_file(first, names)
    return 0


def _execute_file(file: str, names: dict[str, Any]) -> int:
    path = Path(file)
    if path.is_dir() or path.suffix in {".zip", ".pyz"}:
        sys.path.insert(0, str(path.absolute()))
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return 0
    sys.path.insert(0, str(path.resolve().parent))
    try:
        source = path.read_bytes()
    except OSError as error:
        name = f"{sys.executable}: can't open file {str(path.absolute())!r}"
        sys.stderr.write(f"{name}: [Errno {error.errno}] {error.strerror}\n")
        return 2
    file = str(path.absolute())
    names.update(__file__=file, __cached__=None, __loader__=SourceFileLoader("__main__", file))
    exec(compile(source, file, "exec"), names)
    return 0


def _raised(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return what `work` returns, and what it raises, without frames of this module; no exception is being handled."""
    try:
        return work(), None
    except BaseException as error:  # noqa: BLE001  (it ends the script)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals is globals():
            trace = trace.tb_next
        return 0, error.with_traceback(trace)


def _display(error: BaseException) -> tuple[int, bool]:
    """Call the hook, as PyErr_Print does; return the exit code, and whether the process ends by SIGINT."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    given, interrupted = (type(error), error, error.__traceback__), type(error) is KeyboardInterrupt
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        _write("sys.excepthook is missing\n")
        sys.__excepthook__(*given)
        return 1, interrupted
    _, second = _raised(lambda: hook(*given))
    if isinstance(second, SystemExit):
        return _exit_code(second), False
    if second is not None:
        _write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(second), second, second.__traceback__)
        _write("\nOriginal exception was:\n")
        sys.__excepthook__(*given)
    return 1, interrupted


def _exit_code(end: SystemExit) -> int:
    """Return the exit code, as handle_system_exit does."""
    code: object = end.code
    if isinstance(code, int):
        return code & 0xFF if -MOST <= code < MOST else 0xFF
    if code is None:
        return 0
    _write(code)
    _write("\n")
    return 1


def _write(text: object) -> None:
    with contextlib.suppress(Exception):
        if sys.stderr is None:
            os.write(2, str(text).encode())
        else:
            sys.stderr.write(str(text))


class _End:
    """The first object that the interpreter drops after the threads, `atexit` and the flush of its streams."""

    def __init__(self, code: int, names: dict[str, Any], *, interrupted: bool) -> None:
        self._code, self._names, self._interrupted = code, names, interrupted
        self._process, self._modules = os.getpid(), (os, gc, signal, sys, process_exit)

    def __del__(self) -> None:
        os, gc, signal, sys, process_exit = self._modules
        if os.getpid() != self._process or isinstance(getattr(sys, "last_traceback", None), process_exit._Last):
            return
        code = 120 if any(not _flushed(stream) for stream in (sys.stdout, sys.stderr)) else self._code
        for name in [name for name in self._names if name != "__builtins__"]:
            self._names[name] = None
        gc.collect()
        process_exit._flush_files()
        if self._interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


def _flushed(stream: Any) -> bool:
    try:
        if stream is not None and not stream.closed:
            stream.flush()
    except Exception:  # noqa: BLE001  (the interpreter has printed it)
        return False
    return True
