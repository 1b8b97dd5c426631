"""The CustomResourceDefinitions of our kinds, generated from the structs in `objects` and `api` into manifests/crds.

Not here: what the controller does with objects of these kinds (`quota`, `elasticjob`).
"""
