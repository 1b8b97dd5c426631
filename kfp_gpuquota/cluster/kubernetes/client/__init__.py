"""The connection to the API server as the controller's account: calls, watches, writes, leader election.

Nothing here depends on what the objects mean; that is `objects`, `convert` and above.
"""
