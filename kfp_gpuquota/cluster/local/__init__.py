"""The embedded cluster: real worker processes on this machine, state in SQLite, one daemon that may die at any time.

home.py      the directory, its lock, endpoint and token          store.py   SQLite, the only truth
devices.py   GPUs by NVML, or CPU slots                           shim.py    the process above each worker
shims.py     starting, watching, adopting and ending shims        cluster.py plans and events carried out
runtime.py   where workers run: here, or over Ray             driver.py  starts what is planned
daemon.py    the process that holds them together                 start.py   starting it on demand
"""
