"""Client of the API server with the controller's service account: calls, watches, writes and leader election.

Nothing in this package interprets the objects; `objects`, `convert` and the packages above them do.
"""
