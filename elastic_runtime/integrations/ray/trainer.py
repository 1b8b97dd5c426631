"""`ElasticTorchTrainer`: Ray Train's TorchTrainer, whose workers stay where it would stop them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.train.torch import TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_runtime.errors import RunError, UsageError
from elastic_runtime.integrations.ray.controller import NAMESPACE, Controller
from elastic_runtime.integrations.ray.datasets import shards_of
from elastic_runtime.integrations.ray.group import Shape
from elastic_runtime.integrations.ray.in_process import fit, in_elastic_job
from elastic_runtime.integrations.ray.ray_internals import resources_of, training_function
from elastic_runtime.integrations.ray.unmodified.driver import LoopOptions

if TYPE_CHECKING:
    from ray.train import Result


class ElasticTorchTrainer(TorchTrainer):  # type: ignore[misc]
    """TorchTrainer whose group changes in place, at the end of a step: for its own loops, and those of elastic_runtime.

    The arguments are TorchTrainer's, and `global_batch_size`: the samples of a step at every size, for loops that call
    no `elastic_runtime.init`. Without it each worker has the loader's batch_size, as in TorchTrainer.
    `scaling_config=ScalingConfig(num_workers=(least, most))`: it begins with `least` workers, and each further one
    joins when Ray has resources for it. UsageError for what cannot be elastic.
    """

    def __init__(self, *args: Any, global_batch_size: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._shape = self._checked_shape()
        self._options = LoopOptions(global_batch_size, self._shape.least)
        if self.validation_config is not None:
            raise UsageError("validation_config is not supported by ElasticTorchTrainer; validate in the loop")

    def fit(self) -> Result:
        """Train, and return the Result; raises the TrainingFailedError that TorchTrainer would raise.

        In a worker of a job of our cluster the loop runs in this process, with the workers that the quota allows.
        """
        if in_elastic_job():
            return fit(
                self.train_run_context, training_function(self), self._options, with_datasets=bool(self.datasets)
            )
        function = ray.put(training_function(self))
        shards = shards_of(self.datasets)
        controller = self._start(function, shards)
        try:
            result = ray.get(controller.run.remote())
        except ray.exceptions.RayActorError as error:
            raise RunError(f"the controller of the training has ended: {error}") from error
        finally:
            if ray.is_initialized():  # else this call would connect to any cluster that it finds
                ray.kill(controller)  # its workers end with it
                shards.end()
        if result.error:
            raise result.error
        return result

    def _start(self, function: Any, shards: Any) -> Any:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        name = self.run_config.name
        actor = ray.remote(Controller).options(
            num_cpus=0, name=name, namespace=NAMESPACE, scheduling_strategy=here, max_concurrency=1000
        )
        try:
            return actor.remote(self.train_run_context, self._shape, (function,), shards, self._options)
        except ValueError as error:
            raise UsageError(
                f"a training named {name!r} runs on this Ray cluster; choose another RunConfig(name=...), or wait"
            ) from error

    def _checked_shape(self) -> Shape:
        scaling = self.scaling_config
        if scaling.min_workers < 1:
            raise UsageError(f"ScalingConfig(num_workers={scaling.num_workers}) must be 1 at least")
        if scaling.use_tpu:
            raise UsageError("ScalingConfig(use_tpu=True) is not supported: elastic_runtime trains on CPUs and GPUs")
        if isinstance(scaling.label_selector, list):
            raise UsageError("ScalingConfig(label_selector=[...]) must be one dict: workers come and go")
        if scaling.placement_strategy.startswith("STRICT") and scaling.max_workers > scaling.min_workers:
            raise UsageError(
                f"ScalingConfig(placement_strategy={scaling.placement_strategy!r}) holds for a fixed group only; use "
                "'PACK' or 'SPREAD'"
            )
        return Shape(
            least=scaling.min_workers,
            most=scaling.max_workers,
            resources=resources_of(scaling),
            strategy=scaling.placement_strategy,
            selector=scaling.label_selector,
            runtime_env=dict(self.run_config.worker_runtime_env),
        )


def limit_workers(run: str, workers: int | None) -> None:
    """Limit the workers of the training of this RunConfig(name=...); None: the limit of its ScalingConfig.

    From any program that is connected to the Ray cluster. Returns at once: the size changes at the end of a step.
    UsageError for a training that does not run, and for a number outside of its ScalingConfig.
    """
    if why := ray.get(_controller(run).limit_workers.remote(workers)):
        raise UsageError(why)


def current_workers(run: str) -> int:
    """Return how many workers the training of this RunConfig(name=...) has now. UsageError as `limit_workers`."""
    return int(ray.get(_controller(run).size.remote()))


def _controller(run: str) -> Any:
    try:
        return ray.get_actor(run, NAMESPACE)
    except ValueError as error:
        raise UsageError(f"no training named {run!r} runs on this Ray cluster; see RunConfig(name=...)") from error
