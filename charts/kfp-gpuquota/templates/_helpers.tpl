{{- /* The image NAME: include "gpuquota.image" (list . NAME) */}}
{{- define "gpuquota.image" -}}
{{- $image := (index . 0).Values.image -}}
{{- printf "%s/%s:%s" (trimSuffix "/" $image.registry) (index . 1) ($image.tag | default (index . 0).Chart.AppVersion) -}}
{{- end }}

{{- /* The URLs of the membership's shards, in order */}}
{{- define "gpuquota.shards" -}}
{{- $shards := list -}}
{{- range $index := until (.Values.membership.replicas | int) -}}
{{- $shards = append $shards (printf "https://gpuquota-membership-%d.gpuquota-membership.$(POD_NAMESPACE).svc:8444" $index) -}}
{{- end -}}
{{- join "," $shards -}}
{{- end }}
