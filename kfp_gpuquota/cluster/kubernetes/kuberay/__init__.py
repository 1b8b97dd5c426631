"""Ray clusters that KubeRay operates: elastic worker groups, and RayJobs that are suspended as a whole.

    RayClusters, RayJobs ─► specs ─► units: the scheduler's jobs       specs, units
    pods ─► slots of units ─► scheduler's events                       units
    plans ─► slots ─► patches of RayClusters and RayJobs, admissions   reconciler, scaling, patches

A unit is a job of the scheduler: one elastic worker group of a labelled RayCluster, or all GPU pods of a RayJob.
KubeRay creates and deletes the pods; this package changes only the numbers that KubeRay reads. So a unit's workers are
slots: a slot holds the devices of a planned worker, before KubeRay has created its pod, and until that pod has ended.

Not here: other RayClusters, whose pods are a group that starts together (`pods`).

Rejected: deleting pods of a group to shrink it, because KubeRay creates them again; one waiting pod for each worker
that a group might get, because Ray's clients would wait for a cluster that is never complete.
"""
