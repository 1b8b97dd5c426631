"""An administrator's operations on an installation: its checks, what belongs to it, and its removal.

They use the administrator's own rights. Nothing here runs in the cluster, and nothing needs the controller to answer.
"""
