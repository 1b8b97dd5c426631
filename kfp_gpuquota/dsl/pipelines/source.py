"""The pipeline in a file that somebody names on the command line: compiled YAML, or the Python that defines it."""

from __future__ import annotations

import contextlib
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

# Not the file's own name: a pipeline in `torch.py` must not become what everybody else imports as torch.
_MODULE: Final = "gpuquota_pipeline_file"


def load(path: Path, name: str = "") -> Package:
    """The pipeline in `path`; `name` chooses among several of a Python file.

    Raises UsageError and DefinitionError, with the author's own mistakes among them.
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
    """Pipelines by the variable that holds them, less private ones; one that has several is listed under its last."""
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
    if name in pipelines:  # a variable is the only one of its name, and two pipelines may call themselves the same
        return pipelines[name]
    named = {variable: pipeline for variable, pipeline in pipelines.items() if name in ("", pipeline.name)}
    if len(named) == 1:
        return next(iter(named.values()))
    if not named:
        raise NotFoundError(f"{path} defines no pipeline {name!r}; it has: {shown}")
    raise UsageError(f"{path} defines {len(named)} pipelines; choose one with --pipeline: {', '.join(sorted(named))}")


def _imported(path: Path) -> ModuleType:
    """Import a file as `python FILE` would find its neighbours; what it prints is not the command's output."""
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode  # running it would leave no __pycache__ either
    try:
        return _executed(path)
    finally:
        sys.dont_write_bytecode = before


def _executed(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # KFP looks a component's source up there
    sys.path.insert(0, str(path.absolute().parent))
    with _mistakes_in_one_sentence(path), contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about KFP's default image: not what was asked for
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _mistakes_in_one_sentence(path: Path) -> Iterator[None]:
    try:
        yield
    except GpuQuotaError:
        raise
    except SystemExit:
        raise DefinitionError(
            f"{path} ends when it is imported{_line(path)}; put what it runs under: if __name__ == '__main__'"
        ) from None
    except Exception as error:  # noqa: BLE001  # whatever the author's code raises
        said = " ".join(str(error).split())
        raise DefinitionError(f"{path} cannot be imported: {type(error).__name__}: {said}{_line(path)}") from None


def _line(path: Path) -> str:
    """Where in the author's file it happened, for an exception that is being handled."""
    _, error, trace = sys.exc_info()
    if isinstance(error, SyntaxError):
        return ""  # says so itself
    frames = traceback.extract_tb(trace)
    lines = [frame.lineno for frame in frames if Path(frame.filename).absolute() == path.absolute()]
    return f" (line {lines[-1]})" if lines else ""
