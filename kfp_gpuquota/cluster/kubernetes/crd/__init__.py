"""CustomResourceDefinitions of the project's kinds, generated from the structs in `objects` and `api`.

Not here: what the controller does with objects of these kinds (`quota`, `elasticjob`).
"""
