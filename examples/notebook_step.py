"""A build step: a session on a GPU within the team's quota, which is never preempted.

    gpuquota project create team-a --guaranteed 1
    gpuquota pipeline run examples/notebook_step.py --project team-a

The step prints how to get a shell on its GPU, from any terminal, and how to end the session. What was left in its
directory by then is the step's output, and the next step reads it. Meanwhile a training of another team waits, and
`gpuquota explain` shows why. With Jupyter installed, `jupyter lab` in that shell is a notebook on that GPU.
"""

from kfp import dsl

import kfp_gpuquota as gpuquota

IMAGE = "python:3.11"


@gpuquota.component(gpus=1, interactive=True, max_runtime="8h", name="session")
@dsl.component(base_image=IMAGE, install_kfp_package=False)
def session(work: dsl.Output[dsl.Artifact]) -> None:
    """Hold the GPU until the user ends the session."""
    # ruff: noqa: PLC0415  # KFP runs a component's source by itself, so it imports what it uses
    import os
    import time
    from pathlib import Path

    directory = Path(work.path)
    directory.mkdir()
    job = os.environ["JOB_NAME"]
    print(f"a shell on this GPU:  gpuquota exec {job} -- bash", flush=True)
    print(f"your files go to:     {directory}", flush=True)
    print(f"the session ends by:  touch {directory}/done", flush=True)
    while not (directory / "done").exists():
        time.sleep(0.2)
    (directory / "done").unlink()


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def list_files(work: dsl.Input[dsl.Artifact]) -> list:
    """What the session left."""
    from pathlib import Path

    return sorted(path.name for path in Path(work.path).iterdir())


@gpuquota.pipeline
@dsl.pipeline(name="notebook")
def notebook() -> list:
    """A session, and a step that continues with its files."""
    return list_files(work=session().outputs["work"]).output
