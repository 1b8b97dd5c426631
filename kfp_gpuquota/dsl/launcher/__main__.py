"""The program that a routed step runs in place of its own command."""

import sys

from kfp_gpuquota.dsl.launcher.main import main

sys.exit(main())
