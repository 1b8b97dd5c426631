"""The last module that the server of `tests.forked` imports: what is loaded by then is kept from garbage collections.

A collection writes to each object that it visits: in a forked process to a copy of each page, a quarter of a second.
"""

import gc

gc.collect()
gc.freeze()
gc.enable()
