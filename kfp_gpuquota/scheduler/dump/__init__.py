"""A scheduler's state as a file, and the same plan from it elsewhere.

Belongs here: the records of the file, writing a state, reading one, replaying its plan. Does not: where a dump is
served, and who may read it. A state has no environment, command or image of any job, so that a dump has none either.
"""

from kfp_gpuquota.scheduler.dump.records import FORMAT, StateDump
from kfp_gpuquota.scheduler.dump.replay import Replay, decode_dump, load_state, replay, take_dump

__all__ = ["FORMAT", "Replay", "StateDump", "decode_dump", "load_state", "replay", "take_dump"]
