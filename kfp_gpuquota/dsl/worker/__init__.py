"""The start program of a step's workers on one machine. It runs in the Python of the step: the standard library only.

Workers in pods have a program of their own (`images/launcher/worker`), for images without Python.
"""
