"""Sharded trainings (FSDP2): `prepare(shard=...)`.

    sharding   a generation is entered: reshard in memory, go back to a checkpoint, or begin
      wrap       a model wrapped, unwrapped, and wrapped for another mesh
      state      what of a training's state is sharded
      transfer   parts on their way from old ranks to new ones; layout: which
      files      checkpoints in parts; checkpoint_schedule: when
      mirror     copies of a worker's parts in another worker's memory, for the loss of one
    mode       the steps in between; collectives: FSDP's over our group

Nothing is imported here: FSDP costs a second, and most jobs do without.
"""
