"""Small training scripts of the shapes that people write, each run alone and through changes of size and a loss.

Each script is a function of the keywords that it passes to `elastic_runtime.init`; it returns the modules that it has
trained. What cannot be right on several workers is refused alone, by name. `driver` runs them, `benchmarks/zoo.py` all
of them.
"""
