"""GPU quotas for Kubeflow Pipelines: decorate a step, and it runs when its team's quota says so."""
