"""Kubernetes as the cluster: this project decides which jobs run, where and with how many GPUs; kube-scheduler binds.

client         calls to the API server            objects      typed objects, names of labels and annotations
convert        objects to the scheduler's types   quota        quotas, Profiles and cluster-wide policies
pods           plain pods: admission, eviction    elasticjob   the reconciler of ElasticJobs
controller     carries out the scheduler's plans  sharing      shared GPUs: reservation pods, node agent
admission      the webhook that reviews pods      user_client  the API of the command line
shards         processes of the membership        crd          schemas of the custom resources

Belongs here: code that depends on an API server. Does not belong here: decisions (scheduler, membership).
"""
