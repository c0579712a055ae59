{{- define "drahealth.name" -}}
{{- if contains "drahealth" .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}{{ else }}{{ printf "%s-drahealth" .Release.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "drahealth.selector" -}}
app.kubernetes.io/name: drahealth
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "drahealth.labels" -}}
{{ include "drahealth.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "drahealth.clusterConfig" -}}
{{- if .Values.cluster.enabled -}}
[k8s]
enabled = true
condition-kinds = {{ .Values.cluster.conditionKinds | default list | toJson }}
events = {{ .Values.cluster.events | default false }}
taint-rules = {{ .Values.cluster.taintRules | default list | toJson }}
{{ end }}
{{- if .Values.nvsentinel.enabled -}}
[nvsentinel]
socket = {{ printf "/run/nvsentinel/%s" (base .Values.nvsentinel.socket) | toJson }}
remediate = {{ .Values.nvsentinel.remediate | default false }}
{{ end }}
{{- end }}

{{- define "drahealth.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "drahealth.name" .) .Values.serviceAccount.name }}{{ else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "drahealth.priorityClass" -}}
{{- if .Values.priorityClass.create }}{{ default (include "drahealth.name" .) .Values.priorityClass.name }}{{ else }}{{ .Values.priorityClass.name }}{{ end }}
{{- end }}
