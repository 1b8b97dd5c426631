"""A pipeline whose step fine-tunes a transformer with Hugging Face's Trainer, elastically.

    gpuquota project create team-a --guaranteed 1
    python examples/finetune_trainer.py

A small vision transformer is made from a config (nothing is downloaded), and reads scikit-learn's handwritten digits.
It needs `pip install transformers accelerate`. What differs from a plain Trainer are the decorator, the import and the
class's name.
"""

# ruff: noqa: PLC0415  # KFP runs a component's source by itself, so it imports what it uses

import argparse
import tempfile

from kfp import dsl, local

import kfp_gpuquota as gpuquota


@gpuquota.component(gpus=1, min_gpus=1, max_gpus=2)
@dsl.component(packages_to_install=[])
def finetune(epochs: int, metrics: dsl.Output[dsl.Metrics]) -> float:  # type: ignore[valid-type]
    """Train a vision transformer on digits; returns its accuracy on digits that it has not seen."""
    import tempfile

    import numpy as np
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from transformers import TrainingArguments, ViTConfig, ViTForImageClassification

    from elastic_runtime.integrations.transformers import ElasticTrainer

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    data = [{"pixel_values": image, "labels": int(label)} for image, label in zip(images, digits.target, strict=True)]
    train, test = train_test_split(data, test_size=0.2, random_state=0)
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=10,
    )
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),  # nothing is saved there: checkpoints are the job's
        num_train_epochs=epochs,
        per_device_train_batch_size=64,
        learning_rate=2e-3,
        logging_steps=20,
        report_to="none",
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = ElasticTrainer(
        model=ViTForImageClassification(config),
        args=arguments,
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=lambda found: {"accuracy": float(np.mean(found.predictions.argmax(-1) == found.label_ids))},
        global_batch_size=128,
    )
    trainer.train()
    accuracy = float(trainer.evaluate()["eval_accuracy"])
    if trainer.job.is_leader:
        metrics.log_metric("accuracy", accuracy)
    return accuracy


@gpuquota.pipeline(project="team-a")
@dsl.pipeline(name="finetune")
def finetune_pipeline(epochs: int = 15) -> float:  # type: ignore[valid-type]
    """A pipeline with one step, which fine-tunes the model."""
    return finetune(epochs=epochs).outputs["Output"]


def main() -> None:
    """Run the pipeline on this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    epochs = parser.parse_args().epochs
    with tempfile.TemporaryDirectory() as root:
        local.init(local.SubprocessRunner(use_venv=False), pipeline_root=root)
        print("accuracy:", finetune_pipeline(epochs=epochs).output)


if __name__ == "__main__":
    main()
