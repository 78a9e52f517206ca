{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* The selector of one role's pods. Arguments: the chart's context, role. */}}
{{- define "penstock.peer" -}}
{{ include "penstock.selector" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* The claim of the run's folder. */}}
{{- define "penstock.claim" -}}
{{ .Values.storage.existingClaim | default (printf "%s-run" .Release.Name) }}
{{- end }}

{{/* The namespace of sandboxes. */}}
{{- define "penstock.sandboxes" -}}
{{ .Values.sandboxes.namespace | default (printf "%s-sandboxes" .Release.Name) }}
{{- end }}
