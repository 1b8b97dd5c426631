"""Tests of the decorators, and of what is made of a pipeline.

kfp asks `inspect` for the whole stack at each setting of a step. While a test module is imported, the stack has frames
of the import machinery, for each of which `inspect` searches all modules: thousands, once torch is imported. It does
not for files that are in its table.
"""

import inspect
from pathlib import Path

for name in ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>", "<string>"):
    for file in (name, str(Path.cwd() / name)):
        inspect.modulesbyfile[file] = "importlib._bootstrap"
