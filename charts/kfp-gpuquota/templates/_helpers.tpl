{{- /* The image NAME: include "gpuquota.image" (list . NAME) */}}
{{- define "gpuquota.image" -}}
{{- $image := (index . 0).Values.image -}}
{{- $name := printf "%s/%s" (trimSuffix "/" $image.registry) (index . 1) -}}
{{- $tagged := printf "%s:%s" $name ($image.tag | default (index . 0).Chart.AppVersion) -}}
{{- with get $image.digests (index . 1) }}{{ printf "%s@%s" $name . }}{{ else }}{{ $tagged }}{{ end -}}
{{- end }}

{{- /* The URLs of the membership's shards, in order */}}
{{- define "gpuquota.shards" -}}
{{- $shards := list -}}
{{- range $index := until (.Values.membership.replicas | int) -}}
{{- $shards = append $shards (printf "https://gpuquota-membership-%d.gpuquota-membership.$(POD_NAMESPACE).svc:8444" $index) -}}
{{- end -}}
{{- join "," $shards -}}
{{- end }}
