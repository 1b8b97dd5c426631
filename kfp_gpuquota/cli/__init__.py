"""The command line: `gpuquota`.

Belongs here: options, tables, messages. Does not: what a command does (server.client, cluster). Whatever is slow to
import is imported by the command that needs it.
"""
