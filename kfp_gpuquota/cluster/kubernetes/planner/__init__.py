"""The planner: it makes plans of a state that events feed, in a process of its own, within a bound of time.

Belongs here: which part of the waiting jobs a plan considers, the process, and what it is sent. Carrying plans out does
not belong here (controller/).
"""
