"""The job as a training script sees it."""

from __future__ import annotations

import dataclasses
import logging
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.data import IterableDataset

from elastic_runtime.data.loader import check
from elastic_runtime.data.sources import Source
from elastic_runtime.errors import LoopError, UsageError
from elastic_runtime.loop.global_steps import GlobalSteps
from elastic_runtime.loop.job_builder import JobBuilder
from elastic_runtime.loop.job_collectives import JobCollectives
from elastic_runtime.loop.member import Member
from elastic_runtime.loop.optimizer_guards import guard_class, normalizes
from elastic_runtime.loop.prepared_objects import WARMUP, PreparedObjects, take_schedulers
from elastic_runtime.loop.trainings_of_process import (
    check_only_one,
    fail_untrained,
    note_coordinated,
    note_session,
    note_training,
    take_from_others,
)
from elastic_runtime.plan.position import Position
from elastic_runtime.process.process_exit import at_exit, note_exit_codes, report_errors
from elastic_runtime.reduction.backward_pass import Loss
from elastic_runtime.reduction.step_modes import Clipping
from elastic_runtime.state.optimizer_state import with_kept_apart
from elastic_runtime.state.training_state import Stateful, Totals, TrainingState
from elastic_runtime.torch_internals.modules import uncompiled
from elastic_runtime.validation.prepare_checks import (
    check_default_device,
    check_embeddings,
    check_kinds,
    check_parameters,
    check_sparse,
    check_stateful,
    check_synchronized,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from torch.utils.data import DataLoader

    from elastic_runtime.loop.options import TrainingOptions
    from elastic_runtime.loop.session import Session
    from elastic_runtime.membership.environment import Environment
    from elastic_runtime.plan.batch_sizes import GlobalBatch
    from elastic_runtime.sharded.wrap import ShardFunction

    Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    Schedulers = Stateful | Sequence[Stateful] | None


Result = TypeVar("Result")
_log = logging.getLogger("elastic_runtime")


class Job(JobCollectives):
    """One elastic training job, as this worker takes part in it. Made by `elastic_runtime.init`."""

    def __init__(
        self,
        environment: Environment,
        options: TrainingOptions,
    ) -> None:
        super().__init__()
        self._environment, self._options = environment, options
        if environment.rehearse:
            check_only_one(self)  # before it begins a second rehearsal
        self._member = Member(
            environment,
            options.seed,
            checkpoint_every_s=options.checkpoint_every_s,
            keep_checkpoints=options.keep_checkpoints,
            progress=options.progress,
        )
        if environment.coordinator:
            report_errors(environment.error_file)
        if self._member.awaited:
            note_exit_codes()
        if environment.coordinator:
            at_exit(self._check_trained)
        self._state: TrainingState | None = None
        if environment.coordinator:
            note_coordinated(self)

    def begin_at(self, position: Position) -> None:
        """Begin there, unless a peer or a checkpoint is further. After `prepare`, before the loop: else LoopError."""
        if self._prepared.started:
            raise LoopError("job.begin_at comes before job.epochs")
        assert self._state is not None
        self._state.position = position

    def act(self, acts: bool) -> None:  # noqa: FBT001
        """Whether optimizers, schedulers and scaler may act: not while an integration's loop runs again what the other
        workers have run. After `prepare`.
        """
        self._prepared.passive = not acts

    def changing_state(self) -> AbstractContextManager[None]:
        """`with job.changing_state():` around changes of model and buffers before the first pass of a step, which a
        repeated step does not make again: for integrations, which carry along whether they are made.
        """
        return self._prepared.changing_state()

    def finish(self) -> None:
        """End the training after this epoch, once all workers have come to this call: for integrations, whose loops
        have an end that the job is not given.
        """
        session = self._prepared
        session.leave_epoch(session.position.epoch)
        while not session.finished:
            session.finish()

    def keep_epochs_whole(self) -> None:
        """Keep all steps of a rehearsal's first epoch: for integrations whose loop counts them. After `prepare`."""
        self._prepared.whole_epochs = True

    def settle_batch(self, *, global_batch_size: int, max_batch_per_gpu: int | None) -> None:
        """Set options that `init` was not given, before `prepare`: for integrations, which get the loader later.

        Options that `init` was given stay. BatchPlanError for invalid values.
        """
        given = self._options
        self._options = dataclasses.replace(
            given,
            global_batch_size=given.global_batch_size or global_batch_size,
            max_batch_per_gpu=given.max_batch_per_gpu or max_batch_per_gpu,
        )

    def prepare(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: Optimizers,
        loader: DataLoader[Any] | Sequence[DataLoader[Any]],
        scheduler: Schedulers = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        shard: ShardFunction | None = None,
        shard_size: int | None = None,
    ) -> tuple[Any, ...]:
        """Make the objects elastic, and return them in the same order: (model, optimizer, loader[, scheduler]).

        Model, optimizers and schedulers are returned as they are, the optimizers' and schedulers' methods guarded; the
        loader is a new one over the same dataset. There may be several models, optimizers and schedulers, as lists. A
        `scaler` is given the loss by `backward` itself. Of several loaders the first one makes the steps, the others
        give a batch in each of its iterations. UsageError where one of them cannot be used.

        `shard(model, mesh)` wraps the model by `fully_shard` (FSDP2) for a mesh of all workers; it is called again at
        each change of size. The model given is the plain one, and the optimizers are made of its parameters. With
        `shard_size=S` each S workers hold one copy of the model (HSDP), and the mesh has two dimensions: the copies,
        and the shards of one.
        """
        if shard_size is not None and shard is None:
            raise UsageError("shard_size= is of use with shard= only: give prepare the function that calls fully_shard")
        if self._session is not None:
            raise LoopError("prepare was called twice; make one job for each training")
        check_default_device()
        optimizers, schedulers = _several(optimizer), _several(scheduler)
        models = _several(model)
        check_kinds(models, optimizers)
        check_stateful("scheduler", schedulers)
        check_synchronized(models, exact=self._options.exact, sharded=shard is not None)
        loaders = _several(loader)
        for each in loaders:
            check(each)
        batch = self._batch(loaders[0])
        parts = [*with_kept_apart(_named("optimizer", optimizers)), *_named("scheduler", schedulers)]
        parts += [("scaler", scaler)] if scaler is not None else []
        whole = uncompiled(models[0]) if len(models) == 1 else torch.nn.ModuleList(map(uncompiled, models))
        check_embeddings(whole)
        sharded, measured = shard is not None, self._options.measures_noise
        check_sparse(whole, optimizers, exact=self._options.exact, sharded=sharded, measured=measured)
        check_parameters(whole, optimizers)
        take_from_others(whole)
        state = TrainingState(whole, parts, reduction=self._options.reduction_text)
        builder = JobBuilder(self._options, self._member, self._environment.memory_dir)
        if shard is not None:
            session, plan = builder.sharded(state, models, shard, shard_size, scaler)
        else:
            session, plan = builder.session(state, scaler, batch)
        session.loader = builder.loader(loaders, session, batch, plan, state)
        if session.noise is not None:
            noise = session.noise
            self._member.reporter.noise_scale = lambda: noise.averages.noise_scale
            self._member.reporter.gain = lambda: noise.gain
        prepared = PreparedObjects(models, optimizers, schedulers, scaler)
        prepared.guard(session, partial(self._at_lr, batch) if batch.bounds else None)
        prepared.watch(session, whole, sharded=shard is not None)
        if self._member.rehearsed:
            self._rehearse(session, state, models)
        self._session, self._state = session, state
        note_session(session)
        several = isinstance(loader, list | tuple)
        found = (model, optimizer, [session.loader, *session.loader.seconds] if several else session.loader)
        return found if scheduler is None else (*found, scheduler)

    def _rehearse(self, session: Session, state: TrainingState, models: list[Any]) -> None:
        """Attach the rehearsal's observer."""
        from elastic_runtime.rehearsal.observer import Observer  # noqa: PLC0415  (nothing else needs it)

        orders, sharding, draws = self._member.rehearsed, self._member.sharding, session.loader.processes_may_draw
        assert orders is not None
        if sharding is None:
            session.observe(Observer(orders, state, lambda: self.world_size, models, draws))
            return
        from elastic_runtime.rehearsal.sharded_observer import ShardedObserver  # noqa: PLC0415  (imports FSDP)

        session.observe(ShardedObserver(orders, state, lambda: self.world_size, models, draws, sharding))

    def track(self, **objects: Stateful) -> None:
        """Carry more objects with a `state_dict` along (averaged weights, counters): to joiners, in checkpoints.

        Their `update_parameters`, if they have one, acts only where a global step is complete. Before the loop.
        """
        session = self._prepared
        assert self._state is not None
        if session.started:
            raise LoopError("job.track comes before job.epochs")
        if self._member.sharding and any(isinstance(each, torch.nn.Module) for each in objects.values()):
            raise UsageError("job.track got a module, whose parameters would not be sharded: it cannot be with shard=")
        check_stateful("object of job.track", objects.values())
        for name, each in objects.items():
            self._state.parts.append((f"track:{name}", each))
            if hasattr(each, "update_parameters"):
                guard_class(each, ("update_parameters",), session.may_act)
            elif hasattr(each, "dampening"):
                guard_class(each, (), session.may_act, WARMUP)

    def steps_per_epoch(self, loader: DataLoader[Any]) -> int:
        """Return the global steps of an epoch of this loader, which need not be prepared yet: for schedules.

        UsageError if it cannot be determined.
        """
        if isinstance(loader.dataset, IterableDataset):
            raise UsageError("the loader reads an IterableDataset, whose length is known when an epoch ends")
        check(loader)
        return Source(loader, self._options.seed).steps(self._batch(loader).samples)

    def epochs(self, count: int | None, *, start: int = 0) -> Iterator[int]:
        """Yield the epochs from where the training stands up to `count`; a joiner begins in the middle of one.

        `start`: the number of epochs after which a checkpoint was saved that the script has loaded by itself. A
        checkpoint of the job's, or a worker that trains already, counts more. `count` is the same on every worker.
        None: `finish` ends the training.

        Left by `break`, at the same place on every worker, the training has finished when the process ends well.
        """
        session = self._prepared
        steps = session.loader.steps
        if start and not session.started:
            self.begin_at(Position(start, 0, start * (steps or 0)))
        assert self._state is not None
        end = sys.maxsize if count is None else count
        self._state.totals = Totals(-1 if count is None else count, -1, -1 if steps is None else steps)
        self._start(total_steps=None if steps is None or count is None else count * steps)
        if session.position.epoch >= end:
            _log.warning("%d epochs are trained already: nothing to do (a new job starts from the beginning)", count)
        with session.left_early():
            while not session.finished:
                while session.position.epoch < end:
                    epoch = session.position.epoch
                    session.begin_epoch()
                    yield epoch
                    session.leave_epoch(epoch)
                session.finish()

    def steps(self, count: int) -> Iterator[Any]:
        """Yield the batches, epoch after epoch, until `count` global steps are applied: in place of both loops.

        With `scale_lr="adascale"`: until steps are applied that are worth `count` steps of `global_batch_size`.
        """
        session = self._prepared
        assert self._state is not None
        self._state.totals = Totals(-1, count)
        self._start(total_steps=None if session.counts_gain else count, last_step=count)
        if session.has_trained(count):
            _log.warning("%d steps are trained already: nothing to do (a new job starts from the beginning)", count)
        with session.left_early():
            while not session.finished:
                while not session.has_trained(count):
                    epoch = session.position.epoch
                    yield from session.loader
                    if not session.has_trained(count):
                        session.leave_epoch(epoch)
                session.finish()

    def global_steps(self, batches: Iterable[Any]) -> GlobalSteps:
        """Iterate over global steps: `for step, micro_batches in job.global_steps(loader)`.

        One turn of this loop is one step at every size, so counters, progress bars and `step % n` are those of a plain
        loop. `for x, y in micro_batches` in it computes the step's gradients, by job.backward in each iteration;
        `optimizer.step()` and all else follows after that inner loop. `step` counts the steps applied before. `batches`
        is the prepared loader, or what yields its batches, as job.steps(n) and zip(first, second) do.
        """
        return GlobalSteps(self._prepared, batches)

    def backward(
        self,
        loss: torch.Tensor,
        *,
        weight: float | None = None,
        reduction: str = "mean",
        more: bool = False,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Backpropagate this micro-batch's share of the global batch, in place of `loss.backward()`.

        `loss` is a scalar: the mean over the micro-batch's samples; or with `weight=n` the mean over n units of this
        micro-batch (tokens, pixels that count), to become the mean over all units of the global batch; or with
        `reduction="sum"` a sum, to become the sum over the global batch.

        After the last micro-batch of a step the gradients are those of the whole global batch; or the step is going to
        be repeated, and they are None. LoopError where it is not called exactly once in an iteration.

        `more=True`: an optimizer acts on these gradients now, and another backward pass follows in the same iteration
        (a GAN's critic, then its generator). The step ends with the call without it; where a worker is lost before
        that, the whole iteration is repeated from the state of its beginning, of which a copy is kept. It needs a
        step's whole share in one iteration, so no smaller max_batch_per_gpu, and reduction="fast" without shard=.

        `retain_graph` and `inputs` are those of `torch.Tensor.backward`. UsageError for its `create_graph=True`: what
        is summed over all workers has no graph.
        """
        if create_graph:
            raise UsageError(
                "job.backward got create_graph=True, but gradients that are summed over all workers have no graph: an "
                "optimizer that differentiates them once more (AdaHessian, Sophia) cannot be used; a gradient in the "
                "loss (a penalty) is one of torch.autograd.grad(..., create_graph=True)"
            )
        given = Loss(loss, weight, reduction)
        if retain_graph is not None or inputs is not None:
            options = {"retain_graph": retain_graph, "inputs": inputs}
            given.options = {name: value for name, value in options.items() if value}
        self._prepared.run_pass(given, more=more)

    def skip(self) -> None:
        """Count this micro-batch for nothing, in place of `backward` (a loss that is not finite, a broken sample).

        The step's mean is over what the other micro-batches and workers have; the rest of the iteration stays as it is.
        Where all are skipped, optimizer, scheduler and scaler do nothing in that step. Not with shard=: LoopError.
        """
        self._prepared.skip()

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002  (torch's own signature)
        foreach: bool | None = None,  # noqa: FBT001
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` for replicated and sharded models; returns the total norm, a scalar.

        It acts where a global step is complete. Elsewhere, and where a peer is lost in the middle of it (the step is
        going to be repeated then), there are no gradients: it returns 0, as torch does for none. With a GradScaler,
        `scaler.unscale_(optimizer)` comes before it, as in torch.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        how = Clipping(float(max_norm), float(norm_type), error_if_nonfinite, foreach)
        return self._prepared.clip_grad_norm_(given, how)

    def retrying(self) -> Retrying:
        """`with job.retrying():` around an iteration's body: what does not fit into memory is repeated in halves.

        `job.backward` ensures it by itself; this adds the forward pass.
        """
        return Retrying(self._prepared)

    def warm_up(self, forward: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
        """`forward(batch)` returns the loss of one batch of the loader: a joiner computes it and its gradients once,
        drops both, and is ready then; so that the others do not wait while it compiles or loads kernels.

        A decorator. Before the loop; not with shard=. Batches of an IterableDataset are not available out of order.
        """
        session = self._prepared
        if session.started:
            raise LoopError("job.warm_up comes before job.epochs")
        if self._member.sharding:
            raise UsageError("job.warm_up cannot be with shard=: a forward pass needs all workers")
        session.warm_up = forward
        return forward

    def close(self) -> None:
        """End a training whose loop was left by `break`, and send all events to the coordinator.

        The process's end does both; this is for a process that goes on.
        """
        if self._session is not None and not self.leaving:
            self._session.finish_early()
        self._member.close()

    def _start(self, *, total_steps: int | None, last_step: int | None = None) -> None:
        if not self._prepared.started:
            note_training(self, self._environment.checkpoint_dir, coordinated=self._member.coordinated)
            check_default_device()
            assert self._state is not None
            take_schedulers(self._prepared, self._state)
        self._prepared.start(total_steps=total_steps, last_step=last_step)
        self._call_leader()

    def _check_trained(self) -> None:
        began = self._session is not None and self._session.started
        if not began and not self.leaving:
            fail_untrained()

    def _batch(self, loader: DataLoader[Any]) -> GlobalBatch:
        per_worker = getattr(loader, "batch_size", None) or 1
        samples = self._options.global_batch_size or per_worker
        self._options.check(samples)
        return self._options.batch(samples, per_worker)

    @contextmanager
    def _at_lr(self, batch: GlobalBatch, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Set the learning rates that suit the size, while the optimizer steps; schedulers see those of the script."""
        noise = self._prepared.noise
        gain = 1.0 if noise is None else noise.gain
        factor = batch.lr_factor(self.world_size, gain, normalizes=normalizes(optimizer))
        if factor == 1.0:
            yield
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


class Retrying:
    """The context manager that `Job.retrying` returns."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return self._session.out_of_memory(error)


def _several(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _named(name: str, parts: list[Any]) -> list[tuple[str, Stateful]]:
    return [(name if number == 0 else f"{name}{number + 1}", part) for number, part in enumerate(parts)]
