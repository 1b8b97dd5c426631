"""Owners of pods that give way by their own `suspend`: Jobs, JobSets, TrainJobs and other kinds that have it.

    plan ─► victims ─► the pods' topmost owner (read, not watched) ─► suspend, with label and annotation    suspending
    owners with the label (watched) ─► their pods have ended ─► resume                                       resuming
    which kinds, and where their `suspend` is                                                               kinds

Suspending ends the pods without a failure: no `backoffLimit` is burned. The owner is resumed as soon as its pods have
ended, so that its new pods wait at the gate as they did at first, with their reasons and their place in the
queue. A further kind is a row in kinds.py, and its resource in the controller's role and policy.

Who has suspended an object is in the object: the label and the annotation are written in one patch with `suspend`, and
removed in one patch with the resumption. So a controller that was killed between any two writes continues.

Not here: RayJobs, which are units with a size (`kuberay`).

Rejected: to leave the owner suspended until its pods would start, because a TrainJob has no pod template to plan by,
and a user could not see from its pods why it waits.
"""
