{{- define "tailrace.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "tailrace.selector" -}}
app.kubernetes.io/name: tailrace
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tailrace.labels" -}}
{{ include "tailrace.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "tailrace.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "tailrace.isShared" -}}
{{- if .Values.journal.redisUrl.secretName }}true{{ end -}}
{{- end }}

{{- define "tailrace.modelsClaim" -}}
{{- if .Values.models.existingClaim }}{{ .Values.models.existingClaim }}{{ else if .Values.models.size }}{{ include "tailrace.name" . }}-models{{ end -}}
{{- end }}

{{- define "tailrace.database" -}}
{{- with .Values.database }}{{ if .secretName }}
- name: TAILRACE_DATABASE
  valueFrom:
    secretKeyRef:
      name: {{ .secretName }}
      key: {{ .key }}
{{- end }}{{ end }}
{{- end }}

{{- define "tailrace.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- /* One pod at a time, and not before it has drained. */}}
{{- define "tailrace.behavior" -}}
scaleDown:
  stabilizationWindowSeconds: 300
  policies:
    - type: Pods
      value: 1
      periodSeconds: {{ add .Values.preStopSeconds .Values.drainSeconds 15 }}
{{- end }}
