"""Checks of an installation: `facts` reads the cluster, `checks_*` judge what was read, `examination` runs them all.

A check is a pure function of the facts that yields findings. It does not repeat what another one has found: where the
webhook does not answer since its image cannot be pulled, the program's check names the image.
"""
