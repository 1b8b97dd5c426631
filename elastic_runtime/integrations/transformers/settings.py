"""Which of Trainer's arguments go together with an elastic job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_runtime.errors import SettingsError

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

DISTRIBUTING = ("deepspeed", "fsdp", "parallelism_config")
REFUSED = {
    "load_best_model_at_end": "the best checkpoint may be on a removed machine; save the best in a callback",
    "resume_from_checkpoint": "a job resumes at the newest checkpoint in ELASTIC_CHECKPOINT_DIR by itself",
    "auto_find_batch_size": 'elastic={"max_batch_per_gpu": "auto"} does that',
    "include_num_input_tokens_seen": "what a worker has seen is lost with it",
}
REPLACED = (
    "_inner_training_loop",
    "_run_epoch",
    "_prepare_for_training",
    "_finalize_training",
    "_maybe_log_save_evaluate",
    "_clip_grad_norm",
    "_get_num_items_in_batch",
    "get_batch_samples",
    "set_initial_training_values",
)
"""Parts of Trainer's own loop, in place of which the job's runs."""
STEPPING_IN_BACKWARD = ("lomo", "adalomo")


def check_arguments(args: TrainingArguments) -> None:
    """SettingsError for what would be done twice, or not at all."""
    for name in DISTRIBUTING:
        if getattr(args, name, None):
            raise SettingsError(f"args.{name} is set, but ElasticTrainer distributes by itself; leave it out")
    for name, instead in REFUSED.items():
        if getattr(args, name, None) not in {None, False, "", "no"}:
            raise SettingsError(f"args.{name} is set, but {instead}")
    if str(getattr(args.optim, "value", args.optim)) in STEPPING_IN_BACKWARD:
        raise SettingsError(
            f"args.optim is {args.optim!s}, which steps within the backward pass, before the workers' gradients are "
            "summed; use another one"
        )
    if args.n_gpu > 1:
        raise SettingsError(
            f"this process sees {args.n_gpu} GPUs, but a worker of an elastic job has one; let the cluster "
            "choose it, or set CUDA_VISIBLE_DEVICES"
        )


def check_class(trainer: Trainer) -> None:
    """SettingsError for a Trainer with a loop of its own, which would be left out, or that makes its samples itself."""
    for kind in type(trainer).__mro__:
        own = [name for name in REPLACED if name in vars(kind)]
        if own and not kind.__module__.startswith((__package__ or "", "transformers.")):
            raise SettingsError(
                f"{kind.__name__} overrides {own[0]}, a part of Trainer's own loop, which is not used: the loop is the "
                "job's; override compute_loss, training_step, create_optimizer, get_train_dataloader, log or evaluate, "
                "or use a callback"
            )
    if hasattr(trainer, "num_generations"):
        raise SettingsError(
            f"{type(trainer).__name__} generates what it trains on, in groups that have to stay together; an elastic "
            "job deals samples out one by one"
        )
