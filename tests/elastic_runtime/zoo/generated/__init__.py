"""Scripts that are composed of parts, and the histories that each of them is played through.

The oracle: a script that is run alone and undisturbed is the specification of the same script that is stopped and
resumed, joined, left or that loses a worker, at any point and in both reductions. Each script trains the same model in
all of them, or it is refused by name, or a rehearsal finds it.

`drafts` composes a script, `parts` are what it is made of, `recipes` names it; `drawing` draws scripts and histories,
`scripted` replaces the coordinator by a list of changes, `lives` runs the processes, `verdicts` compares. A script is
named by its recipe's text.
"""
