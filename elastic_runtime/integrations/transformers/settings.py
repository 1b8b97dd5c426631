"""Which of Trainer's arguments go together with an elastic job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_runtime.errors import SettingsError

if TYPE_CHECKING:
    from transformers import TrainingArguments

DISTRIBUTING = ("deepspeed", "fsdp", "parallelism_config")
REFUSED = {
    "load_best_model_at_end": "the best checkpoint may be on a machine that is gone; save the best in a callback",
    "resume_from_checkpoint": "a job goes on at the newest checkpoint in ELASTIC_CHECKPOINT_DIR by itself",
    "auto_find_batch_size": 'elastic={"max_batch_per_gpu": "auto"} does that',
    "include_num_input_tokens_seen": "what a worker has seen is lost with it",
}
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
