"""A rehearsal of a training script on one machine: ELASTIC_REHEARSE=1 python train.py.

The process that the user starts runs the script as the first worker and starts the same command once more as the
second one. Both follow a fixed timetable of about ten steps: a repeated step, a joiner, a step that is repeated by both
workers, the loss of rank 0, a checkpoint that is written and read. Each worker records fingerprints of gradients and of
state; at the end the first one compares them and prints what would go wrong on a cluster.

Only the coordinator is replaced (`timetable`, `orders`): groups, state transfer, repeated steps and the loop are those
of a cluster. A second process was preferred to a simulation within the first one: nothing else finds what a fresh
process builds in another way (an unseeded split, files in another order, a variable that only an early worker has).
Forking the first process was rejected for the same reason.

Belongs here: the timetable, the records and their comparison. Does not: anything that a training on a cluster needs.
"""
