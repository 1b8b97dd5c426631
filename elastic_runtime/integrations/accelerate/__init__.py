"""Hugging Face Accelerate, elastic: `ElasticAccelerator` in place of `Accelerator`, and its epochs.

    from elastic_runtime.integrations.accelerate import ElasticAccelerator

    accelerator = ElasticAccelerator(mixed_precision="bf16")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in accelerator.epochs(3):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

How it works: Accelerate is set up as for one process, so that it wraps no model and makes no process group. Once the
loop begins, its state has the job's current rank and size, and its functions (`gather`, `reduce`, its loggers)
use torch's default process group, which is the job's.
"""

from elastic_runtime.integrations.accelerate.accelerator import ElasticAccelerator

__all__ = ["ElasticAccelerator"]
