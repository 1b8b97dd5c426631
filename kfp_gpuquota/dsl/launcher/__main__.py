"""Entry point of the launcher, which a routed step runs instead of its own command."""

import sys

from kfp_gpuquota.dsl.launcher.main import main

sys.exit(main())
