"""The names of Lightning, Transformers and Accelerate that are replaced in a worker's process, as a loop imports them.

They are replaced right after the import of their module: importing them for every loop would cost seconds.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType


def _adapt_lightning(module: ModuleType) -> None:
    from elastic_runtime.integrations.ray.unmodified import lightning  # noqa: PLC0415  (imports Lightning)

    for name in ("RayDDPStrategy", "RayFSDPStrategy", "RayDeepSpeedStrategy"):
        _set(module, "ray.train.lightning", name, getattr(lightning, name))


def _adapt_ray_transformers(module: ModuleType) -> None:
    from elastic_runtime.integrations.ray.unmodified import transformers  # noqa: PLC0415  (imports Transformers)

    _set(module, "ray.train.huggingface.transformers", "prepare_trainer", transformers.prepare_trainer)


def _adapt_accelerate(module: Any) -> None:
    from elastic_runtime.integrations.ray.unmodified import accelerate  # noqa: PLC0415  (imports Accelerate)

    module.Accelerator = accelerate.RayAccelerator
    if "transformers.trainer" in sys.modules:
        _keep_accelerator(sys.modules["transformers.trainer"])


def _keep_accelerator(module: Any) -> None:
    """Trainer has an Accelerator of its own, whose place `ElasticTrainer` takes."""
    from accelerate.accelerator import Accelerator  # noqa: PLC0415

    module.Accelerator = Accelerator


def _set(module: ModuleType, package: str, name: str, value: object) -> None:
    for each in (module, sys.modules.get(package)):
        if each is not None and (each is module or hasattr(each, name)):
            setattr(each, name, value)


ADAPTED: dict[str, Callable[[ModuleType], None]] = {
    "ray.train.lightning._lightning_utils": _adapt_lightning,
    "ray.train.huggingface.transformers._transformers_utils": _adapt_ray_transformers,
    "accelerate": _adapt_accelerate,
    "transformers.trainer": _keep_accelerator,
}


def adapt_libraries() -> None:
    """Replace the names now, where the modules are imported, and else when they are."""
    for name, adapt in ADAPTED.items():
        if name in sys.modules:
            adapt(sys.modules[name])
    sys.meta_path.insert(0, _AfterImport())


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds a module as it is found without it, and adapts it once it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> Any:  # noqa: ARG002
        adapt = ADAPTED.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if adapt is not None else None
        if spec is None or spec.loader is None or adapt is None:
            return None
        loader, run = spec.loader, spec.loader.exec_module

        def run_and_adapt(module: ModuleType) -> None:
            run(module)
            adapt(module)

        loader.exec_module = run_and_adapt  # type: ignore[method-assign]
        return spec
