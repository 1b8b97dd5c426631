"""Converts administrators' objects (GpuQuota, Profile, WorkloadPolicy, QuotaPolicy) to projects and rules."""
