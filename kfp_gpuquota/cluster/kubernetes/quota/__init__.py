"""What administrators write: GpuQuota, Profile, WorkloadPolicy and QuotaPolicy, as projects and rules."""
