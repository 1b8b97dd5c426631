"""Tests of kfp_gpuquota.dsl."""
