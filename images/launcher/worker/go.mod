module github.com/kfp-gpuquota/kfp-gpuquota/images/launcher/worker

go 1.26
