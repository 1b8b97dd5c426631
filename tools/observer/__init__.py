"""An independent observer of a cluster: it watches the API server only, and reports what must never be.

It shares no code with the controller: what it counts, it counts from the objects' JSON. `rules` is pure and has what it
checks, `watching` feeds it from watches, `churn` makes the operations of a soak.

    python -m tools.observer --kubeconfig FILE [--seconds 3600]      # watch, and exit with 1 after a violation
    python -m tools.observer --kubeconfig FILE --churn 20            # with 20 operations a second
"""
