"""The membership service in separate processes, sharded by job: independent of the planner and of its failover.

Belongs here: the two ends of the connection between the leader and a shard, what they send, and a shard's process.
Does not: the membership machines (`kfp_gpuquota.membership`), workers' connections (`server.membership`), and what
follows from a membership's notices for jobs and pods (`elasticjob.membership`).

    leader ── JobState, JobClosed, Synced ─► shard ─► MembershipService ◄─► workers of its jobs
      ▲                                        │
      └──────── Notice ◄───────────────────────┘

Invariants:

- The leader sends whole states, never changes: one `JobState` has all that a shard needs of a job. It is sent at each
  change, and for all jobs after each connection. So either end may be killed at any time, without acknowledgements.
- A shard serves its jobs while no leader is connected. It keeps its latest notices, and sends them to the next leader.
- A shard sends no generation number that is not stored (`JobState.stored`). A restarted shard gets unused numbers: it
  identifies its process (`Hello.process`), and the leader opens its jobs again.
- Of two leaders a shard accepts the one with the higher epoch.

Rejected: shards that watch the API server themselves (each would need the rights of the controller, while these
processes talk to every team's workers); a message queue between them (one more thing to run and to lose); one shard for
each job (a process of 60 MiB for each); membership as threads of the controller (the planner holds the interpreter's
lock, and a failover ends all of them).
"""
