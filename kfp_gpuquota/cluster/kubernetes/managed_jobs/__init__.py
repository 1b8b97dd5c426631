"""Jobs (batch/v1) that this controller runs as ElasticJobs, by their `spec.managedBy`: also those below a TrainJob.

    TrainJob ─► JobSet ─► Job with managedBy: gpuquota.dev/elastic      their own controllers
    Job ─► ElasticJob of the same name, owned by the Job                conversion, reconciler
    ElasticJob's status ─► Job's status ─► JobSet, TrainJob             conversion, reconciler

`managedBy` is how Kubernetes lets another controller run a Job: the Job controller leaves it alone, and for JobSet,
kubectl and Argo it is a Job. So the number of pods changes in place, and no controller above
restarts anything. Beside `managedBy` such a Job has the label gpuquota.dev/elastic, by which it is watched.

State is in the two objects only. What was derived from the Job is known by digests of the fields in an annotation of
the ElasticJob: a change of the Job changes these fields, and what `gpuquota update` or `suspend` has changed stays.
Size and pool of an ElasticJob cannot be changed: the Job has an event that says so.

Rejected: to let the Job controller run the pods and to change `parallelism`. It ends the pods with the highest index,
not those that the plan names, and a pod that was asked to leave would count as failed or be replaced.
"""
