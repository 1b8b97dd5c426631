"""Kubernetes as the cluster: we decide who runs, where and how large; kube-scheduler binds, kubelets run.

labels.py        the names that both sides read          crds.py, job_rules.py, structural.py   our kinds, from api/
admission.py     one review of one pod, pure             webhook.py       reviews over HTTPS
certificates.py  the webhook's own authority             connection.py, watch.py   the API server, read and written
controller.py    plans carried out

Belongs here: what knows an API server. Does not: decisions (scheduler, membership).
"""
