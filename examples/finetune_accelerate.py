"""A pipeline whose step fine-tunes a transformer with Hugging Face's Accelerate, elastically.

    gpuquota project create team-a --guaranteed 1
    python examples/finetune_accelerate.py

A small vision transformer is made from a config (nothing is downloaded), and reads scikit-learn's handwritten digits.
It needs `pip install transformers accelerate`. What differs from a script for Accelerate are the decorator, the class's
name, `accelerator.epochs(...)` in place of `range(...)`, and that the evaluation is a function, which
`accelerator.repeat` shares out and does again where a worker is lost in it.
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
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch.utils.data import DataLoader
    from transformers import ViTConfig, ViTForImageClassification, get_cosine_schedule_with_warmup

    from elastic_runtime.integrations.accelerate import ElasticAccelerator

    precision = "bf16" if torch.cuda.is_available() else "no"
    accelerator = ElasticAccelerator(mixed_precision=precision, gradient_accumulation_steps=2)
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
    model = ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train_loader, test_loader = DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=64)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    steps = epochs * len(train_loader) // accelerator.gradient_accumulation_steps
    scheduler = accelerator.prepare(get_cosine_schedule_with_warmup(optimizer, steps // 10, steps))

    def evaluate() -> float:
        model.eval()
        right = []
        for batch in test_loader:
            with torch.no_grad():
                answers = model(pixel_values=batch["pixel_values"]).logits.argmax(-1)
            right.append(accelerator.gather_for_metrics(answers == batch["labels"]))
        return torch.cat(right).float().mean().item()

    accuracy = 0.0
    for epoch in accelerator.epochs(epochs):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accuracy = accelerator.repeat(evaluate)
        accelerator.log({"loss": loss.item(), "accuracy": accuracy})
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.3f} ({accelerator.num_processes} workers)")
    if accelerator.is_main_process:
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
