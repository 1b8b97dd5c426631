"""The membership service in separate processes, sharded by job: independent of the planner and of its failover.

Belongs here: the two ends of the connection between the leader and a shard, what they send, and a shard's process.
Does not: the membership machines (`kfp_gpuquota.membership`), workers' connections (`server.membership`), and what
follows from a membership's notices for jobs and pods (`elastic_membership`).

    leader ── JobState, JobClosed, Synced ─► shard ─► MembershipService ◄─► workers of its jobs
      ▲                                        │
      └──────── Notice ◄───────────────────────┘

Invariants:

- The leader sends levels, never edges: all that a shard must know of a job is in one `JobState`, sent at each change
  and for all jobs after each connection. So either end may be killed at any time, and nothing has to be acknowledged.
- A shard serves its jobs while no leader is connected. What it would report stands, and is sent to the next one.
- A shard sends no generation number that is not stored (`JobState.stored`), and a shard that was restarted is given
  numbers that were never used: it says which process it is (`Hello.process`), and the leader opens its jobs anew.
- Of two leaders the one of the higher epoch is obeyed.

Rejected: shards that watch the API server themselves (each would need the rights of the controller, while these
processes talk to every team's workers); a message queue between them (one more thing to run and to lose); one shard for
each job (a process of 60 MiB for each); membership as threads of the controller (the planner holds the interpreter's
lock, and a failover ends all of them).
"""
