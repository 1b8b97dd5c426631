"""Imports the parts of the official package `kubernetes` that a command needs, in a third of the package's own time.

`import kubernetes` executes all of it: 700 classes of objects, Google's authentication, in newer versions pydantic.
This client reads and writes plain JSON and needs the reader of kubeconfig files and the HTTP client alone. So packages
that collect names of others are registered without being executed. Each is executed as soon as somebody uses a name of
it: to other importers in the same process (kfp) it is the whole package, merely later.

Rejected: a copy of the package's kubeconfig reader (it was one of ours that lacked most of it), and importing in a
thread beside the rest of a command (the interpreter lock makes it no faster).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kfp_gpuquota.errors import UsageError

if TYPE_CHECKING:
    from types import ModuleType

_DEFERRED: Final = (
    "kubernetes",
    "kubernetes.client",
    "kubernetes.client.models",
    "kubernetes.utils",
    "google.auth",
    "google.auth.transport.requests",
)
_API_CLIENT: Final = "kubernetes.client.api_client"
_lock = threading.RLock()


class Package(NamedTuple):
    """The modules of `kubernetes` that this client uses; the same names in version 30 and in the newest."""

    kube_config: ModuleType
    configuration: ModuleType
    rest: ModuleType


def load() -> Package:
    """Return the modules. Raises UsageError with the remedy if the package is not installed."""
    with _lock:
        try:
            return _loaded()
        except ImportError as error:
            raise UsageError(
                f"a cluster on Kubernetes needs the Python package kubernetes, and {error.name or error} is not "
                "installed here; install it with: pip install 'kfp-gpuquota[kubernetes]'"
            ) from error


def _loaded() -> Package:
    if "kubernetes.client" not in sys.modules:
        for name in _DEFERRED:
            _defer(name)
        if "kubernetes.client" not in sys.modules:
            raise ModuleNotFoundError("No module named 'kubernetes'", name="kubernetes")
        _import_reader(sys.modules["kubernetes.client"])
    names = ("config.kube_config", "client.configuration", "client.rest")
    return Package(*(importlib.import_module(f"kubernetes.{name}") for name in names))


def _import_reader(client: ModuleType) -> None:
    """Import the reader of kubeconfig files, which takes two classes from `kubernetes.client`.

    It calls one of them, ApiClient, only to refresh a token of OpenID Connect; importing it takes half of the time.
    """
    names = vars(client)
    names["Configuration"] = importlib.import_module("kubernetes.client.configuration").Configuration
    names["ApiClient"] = _api_client
    try:
        importlib.import_module("kubernetes.config.kube_config")
    finally:
        names.pop("ApiClient", None)


def _api_client(*arguments: object, **options: object) -> object:
    return importlib.import_module(_API_CLIENT).ApiClient(*arguments, **options)


def _defer(name: str) -> None:
    """Register a package that is executed when a name that it lacks is looked up; nothing if it is imported already."""
    parent, _, child = name.rpartition(".")
    spec = None if name in sys.modules else _spec(name)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    vars(module)["__getattr__"] = _Execution(module).attribute
    sys.modules[name] = module
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)


def _spec(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its parent is not installed: the package can do without it
        return None


class _Execution:
    """Looks up names that a deferred module lacks: submodules, or after executing it any name."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._running = module, False

    def attribute(self, name: str) -> object:
        """Return the module's attribute (PEP 562). Raises AttributeError."""
        if name.startswith("__") and name not in {"__all__", "__version__"}:
            raise AttributeError(name)
        names = vars(self._module)
        with _lock:  # another thread may execute it
            if name not in names and not self._running:
                self._find(name)
        if name in names or names.get("__getattr__") != self.attribute:
            return getattr(self._module, name)
        raise AttributeError(f"module {self._module.__name__!r} has no attribute {name!r}")

    def _find(self, name: str) -> None:
        whole = f"{self._module.__name__}.{name}"
        if _spec(whole) is not None:
            importlib.import_module(whole)
            return
        spec, names = self._module.__spec__, vars(self._module)
        assert spec is not None
        assert spec.loader is not None
        self._running = True
        spec.loader.exec_module(self._module)
        if names["__getattr__"] == self.attribute:  # newer versions have one of their own
            del names["__getattr__"]
