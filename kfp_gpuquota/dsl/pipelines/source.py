"""Loads a pipeline from a file that the user names on the command line: compiled YAML, or Python that defines it."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kfp.compiler import Compiler
from kfp.dsl.base_component import BaseComponent

from kfp_gpuquota.dsl.pipelines.pipeline_file import Package, parse
from kfp_gpuquota.errors import DefinitionError, GpuQuotaError, NotFoundError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

# Not the file's own name: a pipeline in `torch.py` must not replace the module torch.
_MODULE: Final = "gpuquota_pipeline_file"


def load(path: Path, name: str = "") -> Package:
    """Return the pipeline in `path`; `name` selects one of several in a Python file.

    Raises UsageError and DefinitionError, also for errors in the user's file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise NotFoundError(f"cannot read {str(path)!r}: {why}") from None
    if path.suffix != ".py":
        return parse(text, str(path))
    return _compiled(_chosen(_pipelines_in(path), name, path))


def _compiled(pipeline: BaseComponent) -> Package:
    with tempfile.TemporaryDirectory() as directory:
        compiled = Path(directory) / "pipeline.yaml"
        Compiler().compile(pipeline, str(compiled))
        return parse(compiled.read_text(encoding="utf-8"), pipeline.name)


def _pipelines_in(path: Path) -> dict[str, BaseComponent]:
    """Return the pipelines by variable name, without private variables; of several names of one pipeline the last."""
    by_identity = {
        id(value): (variable, value)
        for variable, value in vars(_imported(path)).items()
        if not variable.startswith("_")
        and isinstance(value, BaseComponent)
        and value.component_spec.implementation.graph is not None
    }
    return dict(by_identity.values())


def _chosen(pipelines: dict[str, BaseComponent], name: str, path: Path) -> BaseComponent:
    shown = ", ".join(sorted(pipelines)) or "none"
    if not pipelines:
        raise DefinitionError(f"{path} defines no pipeline: put @dsl.pipeline above a function of it")
    if name in pipelines:  # variable names are unique, names of pipelines are not
        return pipelines[name]
    named = {variable: pipeline for variable, pipeline in pipelines.items() if name in ("", pipeline.name)}
    if len(named) == 1:
        return next(iter(named.values()))
    if not named:
        raise NotFoundError(f"{path} defines no pipeline {name!r}; it has: {shown}")
    raise UsageError(f"{path} defines {len(named)} pipelines; choose one with --pipeline: {', '.join(sorted(named))}")


class _MainFileLoader(importlib.machinery.SourceFileLoader):
    """Imports a file without writing its bytecode, as `python FILE` does."""

    def set_data(self, path: str, data: object, *, _mode: int = 0o666) -> None:
        """Write nothing."""


def _imported(path: Path) -> ModuleType:
    """Import a file with its directory on sys.path, as `python FILE` does; its output is redirected to stderr."""
    loader = _MainFileLoader(_MODULE, str(path))
    spec = importlib.util.spec_from_file_location(_MODULE, path, loader=loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # KFP looks a component's source up there
    sys.path.insert(0, str(path.absolute().parent))
    with _user_errors(path), contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about KFP's default image: not what was asked for
        loader.exec_module(module)
    return module


@contextlib.contextmanager
def _user_errors(path: Path) -> Iterator[None]:
    """Raise exceptions of the user's code as DefinitionError with a message of one sentence."""
    try:
        yield
    except GpuQuotaError:
        raise
    except SystemExit:
        raise DefinitionError(
            f"{path} exits when it is imported{_line(path)}; move its main program under: if __name__ == '__main__'"
        ) from None
    except Exception as error:  # noqa: BLE001  # whatever the author's code raises
        message = " ".join(str(error).split())
        raise DefinitionError(f"{path} cannot be imported: {type(error).__name__}: {message}{_line(path)}") from None


def _line(path: Path) -> str:
    """Return " (line N)", the line of the user's file that raised the exception that is being handled."""
    _, error, trace = sys.exc_info()
    if isinstance(error, SyntaxError):
        return ""  # its message contains the line
    frames = traceback.extract_tb(trace)
    lines = [frame.lineno for frame in frames if Path(frame.filename).absolute() == path.absolute()]
    return f" (line {lines[-1]})" if lines else ""
