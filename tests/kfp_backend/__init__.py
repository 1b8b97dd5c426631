"""A test double of the parts of Kubeflow Pipelines and Argo Workflows that a routed step meets.

`shapes` makes the objects (the Workflow, its nodes, the executor's pod) as a real backend makes them: KFP 2.17.0 and
Argo Workflows 4.0.5, with the configuration that KFP ships. `argo` decides as Argo's controller does what follows from
the states of pods. `backend` does it on a real API server and kubelet. `test_shapes` compares all of it with recordings
of that backend where GPUQUOTA_KFP_RECORDINGS names them, so that the double cannot drift.

Not played: driver pods (a step starts at once), caching, MLMD and the object store. In the executor's pod the program
`stand_in` takes the place of Argo's emissary and KFP's launcher: it brings the inputs, fills in the executor input and
nothing else, passes SIGTERM on and exits half a second later, and exits with 1 for every failure, as recorded. The
init containers and Argo's `wait` are left out when a pod is run; `shapes` has them. What KFP's Retry of a run does to a
Workflow is made from KFP's documentation, not from a recording.
"""
