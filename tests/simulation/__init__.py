"""The real engine of the embedded cluster, with its scheduler, store and membership, in simulated time.

    loop       an event loop whose time advances to the next timer
    processes  workers as models: they start late, exit late or never, and are lost
    trainings  their elastic trainings: they join, train, switch generations, hang
    cluster    the engine above them, which can be restarted at any moment, and the requests of its users
    kubernetes the controller above the objects of an API server, through the same histories
    kubelets   what binds, runs and ends its pods
    histories  what happens, as data: drawn from a seed, or by hypothesis, which shrinks it
    invariants what must hold after each commit, and once nothing happens any more
    records    what a restarted engine must know, and what both kinds of cluster must have in common
    search     which waiting job could start, found by trying everything: it shares no code with the scheduler

Nothing of the engine is replaced but the processes, the machine's clock and the names of jobs.
"""
