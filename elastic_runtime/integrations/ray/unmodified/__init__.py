"""Loops that were written for TorchTrainer, as they are: what they prepare is prepared by an elastic job.

Such a loop has no line at which a job could begin: it makes a model, an optimizer and a loader, and iterates. So the
names of Ray Train and torch that it calls are replaced in the worker's process before it runs (`names`), and `driver`
makes a job of what they got once the loop over the training loader begins.

Belongs here: what stands between such a loop and a job. Does not: the job, which is `elastic_runtime.loop`'s, and how
Lightning, Transformers and Accelerate train with one, which is their integration's.
"""
