{{- define "kera.name" -}}
{{- printf "%s-%s" .root.Release.Name .kind | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "kera.labels" -}}
app.kubernetes.io/name: kera
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .kind }}
{{- end -}}

{{/* Of each coordinator, as all others reach it. */}}
{{- define "kera.coordinators" -}}
{{- $name := include "kera.name" (dict "root" . "kind" "coordinator") -}}
{{- $found := list -}}
{{- range $number := until (int .Values.coordinator.replicas) -}}
{{- $found = append $found (printf "%s-%d.%s.%s.svc.%s:7400" $name $number $name $.Release.Namespace $.Values.clusterDomain) -}}
{{- end -}}
{{- join "," $found -}}
{{- end -}}

{{/* Bytes of a quantity with one of the suffixes that memory has here. */}}
{{- define "kera.bytes" -}}
{{- $text := toString . -}}
{{- if hasSuffix "Gi" $text }}{{ mul (trimSuffix "Gi" $text | int64) 1073741824 }}
{{- else if hasSuffix "Mi" $text }}{{ mul (trimSuffix "Mi" $text | int64) 1048576 }}
{{- else }}{{ fail (printf "%s: give memory in Mi or Gi, whole numbers" $text) }}{{ end -}}
{{- end -}}

{{- define "kera.settings" -}}
{{- $kind := .kind -}}
{{- range $name, $value := .settings }}
- name: KERA_{{ upper $kind }}_{{ upper $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{- define "kera.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (.Values.serviceAccount.create | ternary (printf "%s" (.Release.Name | trunc 50 | trimSuffix "-")) "default") -}}
{{- end -}}

{{- define "kera.image" -}}
{{- .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion -}}
{{- end -}}

{{- define "kera.podSecurity" -}}
runAsNonRoot: true
runAsUser: 7400
runAsGroup: 7400
fsGroup: 7400
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kera.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Where pods may run, of the values of a daemon or a copy. */}}
{{- define "kera.scheduling" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "kera.scrapeTls" -}}
{{- if .Values.tls.secretName }}
scheme: https
{{- with .Values.metrics.podMonitor.tlsConfig }}
tlsConfig: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}
