"""The web page of a Kubernetes cluster: a process of its own, which shows each user what that user may read.

    objects    watches the cluster's objects, and converts them to what the pages show
    usage      what teams held since the process was started
    rights     what a user may do, by SubjectAccessReview
    pages      `web.source.Source` for one user: the objects that the user may list, and the user's actions
    pod_logs   workers' logs in parts, from the API server
    kube_events  Events of jobs and their pods, from the API server
    planner    what-ifs, from the leading controller
    entrance   who a request is from: the user whom a trusted proxy names
    audit      a line of the log for each change that was asked for

Rejected: impersonation of the user in each request, for which the process would need the right to be anybody, the
cluster's administrators included.
"""
