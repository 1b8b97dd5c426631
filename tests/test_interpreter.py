"""A script in a forked process against the interpreter: exit code, outputs and files are equal, byte for byte."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.effort import effort
from tests.polling import TIMEOUT_S

if TYPE_CHECKING:
    from pathlib import Path

HABITS = {
    "excepthook": "sys.excepthook = lambda kind, error, trace: print('hook', kind.__name__, error, frames(trace))",
    "excepthook fails": "sys.excepthook = lambda *_: 1 / 0",
    "excepthook exits": "sys.excepthook = lambda *_: sys.exit(6)",
    "excepthook exits with a text": "sys.excepthook = lambda *_: sys.exit('of the hook')",
    "excepthook is interrupted": "def hook(*_): raise KeyboardInterrupt\nsys.excepthook = hook",
    "excepthook sees none": "sys.excepthook = lambda *_: print('handled', sys.exc_info())",
    "no excepthook": "del sys.excepthook",
    "last error": "atexit.register(lambda: print('last', last()))",
    "atexit": "atexit.register(print, 'first'); atexit.register(print, 'second')",
    "atexit fails": "atexit.register(lambda: 1 / 0)",
    "atexit exits": "atexit.register(lambda: sys.exit(5))",
    "atexit exits with a text": "atexit.register(lambda: sys.exit('of atexit'))",
    "atexit is interrupted": "def late(): raise KeyboardInterrupt\natexit.register(late)",
    "atexit prints": "atexit.register(print, 'late', end='')",
    "atexit ends": "atexit.register(lambda: (sys.stdout.flush(), os._exit(8)))",
    "later thread": """
def later():
    threading.main_thread().join(); print('later')
threading.Thread(target=later).start()
""",
    "broken thread": "broken = threading.Thread(target=lambda: 1 / 0, name='broken'); broken.start(); broken.join()",
    "daemon": "threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "generator": """
def waiting():
    try: yield
    finally: print('finally')
kept = waiting(); next(kept)
""",
    "destructor": """
class Kept:
    def __del__(self, print=print, sys=sys): sys.stdout and (sys.stdout.closed or print('dropped'))
kept_too = Kept()
""",
    "unraisable": "class Broken:\n    def __del__(self): raise LookupError\nBroken()",
    "left open": "left_open = open('left', 'w'); left_open.write('all of it')",
    "no stdout": "sys.stdout = None",
    "closed stdout": "sys.stdout.close()",
    "no stderr": "sys.stderr = None",
    "closed stderr": "sys.stderr.close()",
    "moved stdout": "sys.stdout = open('moved', 'w')",
    "broken pipe": "reading, writing = os.pipe(); os.dup2(writing, 1); os.close(reading); print('lost')",
    "partial line": "print('partial', end='')",
    "binary": "sys.stdout.buffer.write(b'bytes')",
    "to both": "print('out'); print('err', file=sys.stderr)",
    "main": "print(sorted(n for n in globals() if n.startswith('__')), __name__, type(__loader__).__name__, __doc__)",
    "main module": "print(sys.modules['__main__'].__dict__ is globals(), __package__, __builtins__)",
    "spec": "print(__spec__ and __spec__.name, __spec__ and __spec__.origin, globals().get('__file__'))",
    "argv": "print(sys.argv, sys.orig_argv)",
    "path": "print(sys.path); import beside; print(beside.NAME)",
    "streams": "print([(s.line_buffering, s.encoding, s.errors, s.isatty()) for s in (sys.stdout, sys.stderr)])",
    "input": "print(repr(sys.stdin.read()), sys.stdin.encoding)",
    "pickle": "class Mine: pass\nprint(pickle.loads(pickle.dumps(Mine())).__class__)",
    "dataclass": "@dataclasses.dataclass\nclass Point:\n    x: 'int' = 3\nprint(Point(), typing.get_type_hints(Point))",
    "process": "print(multiprocessing.current_process().name, multiprocessing.parent_process())",
    "start method": "print(multiprocessing.get_start_method())",
    "thread": "print(threading.current_thread(), threading.active_count(), threading.main_thread().ident != 0)",
    "handlers": "print([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)])",
    "fork": """
sys.stdout.flush()
child = os.fork()
if child == 0: sys.exit(5)
print('child', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
    "fork fails": """
sys.stdout.flush()
child = os.fork()
if child == 0: raise LookupError('of the child')
print('child', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
    "multiprocessing": """
if __name__ == '__main__':
    def work(): print('in process', flush=True); sys.exit(4)
    sys.stdout and sys.stdout.flush()
    child = multiprocessing.get_context('fork').Process(target=work)
    child.start(); child.join(); print(child.exitcode)
""",
    "daemonic process": """
if __name__ == '__main__':
    held, holding = os.pipe()
    def waits(): os.close(holding); os.read(held, 1)
    child = multiprocessing.get_context('fork').Process(target=waits, daemon=True)
    child.start()
    atexit.register(lambda: print('alive', child.is_alive()))
""",
    "logging": "logging.basicConfig(stream=sys.stdout); logging.warning('of the script')",
    "buffered logging": """
class Late(logging.StreamHandler):
    def close(self): print('closed')
logging.getLogger().addHandler(Late())
""",
    "handled": "try: 1 / 0\nexcept ZeroDivisionError: pass",
    "trace": "traceback.print_stack(limit=1)",
    "int handler": "signal.signal(signal.SIGINT, lambda *_: print('int'))",
    "term handler": "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))",
}

CODES = ("", "0", "3", "256", "-1", "1 << 40", "1 << 70", "True", "1.5")

ENDS = {
    "returns": "pass",
    **{
        f"exit {code}": f"sys.exit({code})" for code in ("", "0", "3", "256", "-1", "1 << 40", "1 << 70", "True", "1.5")
    },
    **{f"exit with {code}": f"raise SystemExit({code})" for code in ("'a text'", "''", "(1, 2)", "None", "[]", "1, 2")},
    "exit from a text that fails": "class Bad:\n    def __str__(self): 1 / 0\nsys.exit(Bad())",
    "error": "raise ValueError('of the script')",
    "error with notes": "error = ValueError('noted'); error.add_note('a note'); raise error",
    "error in an error": "try: 1 / 0\nexcept ZeroDivisionError: raise KeyError('second')",
    "error with a cause": "raise OSError(3, 'no') from LookupError()",
    "group": "raise ExceptionGroup('several', [ValueError(1), KeyError(2)])",
    "deep": "def deep(n): return deep(n + 1)\ndeep(0)",
    "interrupt": "raise KeyboardInterrupt",
    "own interrupt": "class Own(KeyboardInterrupt): pass\nraise Own",
    "generator exit": "raise GeneratorExit",
    "code attribute": "class Own(ValueError): exit_code = 9\nraise Own",
    "syntax error": "eval('1 +')",
    "syntax error in the script": "1 +",
    "import error": "import no_such_module",
    "os._exit": "sys.stdout and not sys.stdout.closed and sys.stdout.flush(); os._exit(9)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "SIGINT": "os.kill(os.getpid(), signal.SIGINT)",
    "SIGUSR1": "os.kill(os.getpid(), signal.SIGUSR1)",
    "quit": "quit(2)",
    "aborts": "os.abort()",
}

BEGINNING = """
import atexit, dataclasses, gc, logging, multiprocessing, os, pickle, signal, sys, threading, traceback, typing
os.environ['PYTHONUNBUFFERED'] = ''
import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
def frames(trace):
    return [frame.name for frame in traceback.extract_tb(trace)]
def last():
    return [type(getattr(sys, 'last_value', None)), frames(getattr(sys, 'last_traceback', None))]
"""

VARYING = "|".join(
    [
        r"(?<=0x)[0-9a-f]+|(?<=started )[0-9]+",
        r"(?<=line repeated )[0-9]+",
        r"(?<=refcount : )[0-9]+",
        r"Traceback.*\n.*\n.*Py_Exit.*\n",
        r"Exception ignored on threading shutdown:\nTraceback.*\n(  .*\n)+SystemError: .* with an exception set\n",
    ]
)
"""Addresses, counts, how deep the interpreter is in its stack, where the forked process calls the end of it, and that
Python 3.13.0 forgets that the text of an exit has failed.
"""

WAYS = ("file", "relative", "link", "-c", "-m", "-m of a package", "folder", "zip")


@dataclass(frozen=True)
class Draft:
    """A script, and how it is started."""

    habits: tuple[str, ...]
    end: str
    way: str
    unbuffered: bool = False

    def source(self) -> str:
        parts = [HABITS[name] for name in self.habits]
        return "\n".join([BEGINNING, *parts, "if __name__ == '__main__':", *self._end()]) + "\n"

    def _end(self) -> list[str]:
        return [f"    {line}" for line in ENDS[self.end].splitlines()]

    def command(self, folder: Path) -> list[str]:
        """Write it, and return what follows the interpreter's name."""
        (folder / "beside.py").write_text("NAME = __name__")
        file, source = folder / "script.py", self.source()
        if self.way == "-c":
            return ["-c", source, "a", "-b"]
        if self.way in {"folder", "zip"}:
            with zipfile.ZipFile(folder / "app.zip", "w") as packed:
                packed.writestr("__main__.py", source)
                packed.writestr("beside.py", "NAME = 'packed'")
                packed.extractall(folder / "app")
            return [str(folder / ("app.zip" if self.way == "zip" else "app")), "a"]
        if self.way == "-m of a package":
            file = folder / "package" / "__main__.py"
            file.parent.mkdir()
            (folder / "package" / "__init__.py").write_text("import sys; print('package', sys.argv)")
        if self.way == "link":
            (folder / "elsewhere").mkdir()
            (folder / "elsewhere" / "link.py").symlink_to(file)
        file.write_text(source)
        return {
            "file": [str(file), "a", "-b"],
            "relative": ["script.py"],
            "link": ["elsewhere/link.py", "a"],
            "-m": ["-m", "script", "a", "-b"],
            "-m of a package": ["-m", "package", "a"],
        }[self.way]


def draw(seed: int) -> Draft:
    draws = random.Random(seed)
    habits = tuple(draws.choice(list(HABITS)) for _ in range(draws.randint(0, 3)))
    return Draft(habits, draws.choice(list(ENDS)), draws.choice(WAYS), draws.random() < 0.2)


def left(draft: Draft, python: tuple[str, ...], folder: Path) -> dict[str, object]:
    """Run it in a folder, which has the same name for both, and return all that it leaves."""
    folder.mkdir()
    command = draft.command(folder)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", **({"PYTHONUNBUFFERED": "1"} if draft.unbuffered else {})}
    done = subprocess.run(
        [*python, *command],
        cwd=folder,
        env=environment,
        input=b"given",
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    files = {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.suffix != ".zip" and file.is_file()
    }
    folder.rename(folder.with_name(f"{folder.name}-{len(python)}"))
    stdout, stderr = (re.sub(VARYING, "", output.decode()) for output in (done.stdout, done.stderr))
    return {"code": done.returncode, "stdout": stdout, "stderr": stderr, "files": files}


def compare(draft: Draft, forked_python: tuple[str, ...], folder: Path) -> None:
    expected = left(draft, (sys.executable,), folder / "run")
    assert left(draft, forked_python, folder / "run") == expected, draft


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", ["returns", "exit with 'a text'", "error", "interrupt"])
def test_each_way_ends_as_with_the_interpreter(
    way: str, end: str, forked_python: tuple[str, ...], tmp_path: Path
) -> None:
    compare(Draft(("spec", "argv", "path", "main", "last error"), end, way), forked_python, tmp_path)


@pytest.mark.parametrize("seed", range(effort(20, 2000)))
def test_drawn_scripts_leave_what_they_leave_with_the_interpreter(
    seed: int, forked_python: tuple[str, ...], tmp_path: Path
) -> None:
    compare(draw(seed), forked_python, tmp_path)


@pytest.mark.parametrize("missing", [["no_such.py"], ["-m", "no_such_module"], ["-m", "email"]])
def test_a_script_that_is_not_there_is_refused_as_by_the_interpreter(
    missing: list[str], forked_python: tuple[str, ...], tmp_path: Path
) -> None:
    ended = [
        subprocess.run([*python, *missing], cwd=tmp_path, capture_output=True, check=False)
        for python in ((sys.executable,), forked_python)
    ]
    if len(missing) > 1:
        assert ended[0].stderr == ended[1].stderr
    assert ended[0].returncode == ended[1].returncode != 0
