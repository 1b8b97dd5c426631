"""A script that a team submits as a job: the same trainer as on a plain Ray cluster. DIRECTORY EPOCHS"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ray.train import RunConfig, ScalingConfig

from elastic_runtime.integrations.ray import ElasticTorchTrainer
from tests.ray.train_loops import train

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    result = ElasticTorchTrainer(
        train,
        train_loop_config={"directory": str(directory), "epochs": int(sys.argv[2]), "alone": False},
        scaling_config=ScalingConfig(num_workers=(1, 2)),
        run_config=RunConfig(storage_path=str(directory / "results")),
    ).fit()
    ended = {"metrics": result.metrics, "value": result.return_value, "path": result.checkpoint.path}
    (directory / "result").write_text(json.dumps(ended))
