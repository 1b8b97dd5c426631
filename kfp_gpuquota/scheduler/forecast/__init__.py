"""When waiting jobs are expected to start: the state is played forward with the scheduler's own cycles.

Belongs here: the distribution of a job's run time, the play, the range of starts, how right past ones were. Does not
belong here: which run times are known of a job, which is for the engine's records to say. Nothing here is called while
a plan is made.
"""

from kfp_gpuquota.scheduler.forecast.accuracy import Accuracy
from kfp_gpuquota.scheduler.forecast.play import Effort
from kfp_gpuquota.scheduler.forecast.run_time import UNKNOWN, RunTime, examples_of
from kfp_gpuquota.scheduler.forecast.starts import Forecast, expected_starts

__all__ = ["UNKNOWN", "Accuracy", "Effort", "Forecast", "RunTime", "examples_of", "expected_starts"]
