"""Builds what a release publishes, the same bytes from the same sources.

    python -m tools.release out/release --registry REGISTRY [--images]

distributions.py   sdist and wheel of kfp-gpuquota, and of elastic-runtime, which a training image installs alone
manifests.py       the chart's archive, and one YAML for each overlay
images.py          what is in each image: a layer of Debian's packages (debian.py), one of Python's (wheels.py)
oci.py, layer.py   the archive of an image for several architectures
sbom.py            an SPDX document of them, and SHA256SUMS

The working tree is one project with both packages, so that `pip install -e .` gives both without an index. The two
distributions are built of copies of the sources with a pyproject.toml of their own, made of the tree's.
"""
