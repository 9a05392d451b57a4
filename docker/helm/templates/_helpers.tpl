{{/* The name of a component's objects. Input: (list $ component). A pod adds 17 characters, and its name is a host name. */}}
{{- define "inference.name" -}}
{{- $name := printf "%s-%s" ((index . 0).Values.fullnameOverride | default (index . 0).Release.Name) (index . 1) -}}
{{- if gt (len $name) 46 }}{{ fail (printf "%s is longer than 46 characters: choose a shorter name for the release or the model" $name) }}{{ end -}}
{{- $name -}}
{{- end -}}

{{- define "inference.selector" -}}
app.kubernetes.io/name: inference
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "inference.metadata" -}}
name: {{ include "inference.name" . }}
namespace: {{ (index . 0).Release.Namespace }}
labels:
  {{- include "inference.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
  helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end -}}

{{- define "inference.image" -}}
{{- $image := (index . 0).Values.image -}}
{{- $spec := index . 1 -}}
{{ $spec.repository | default (printf "%s-%s" $image.prefix (index . 2)) }}:{{ $spec.tag | default $image.tag | default (index . 0).Chart.AppVersion }}
{{- end -}}

{{- define "inference.fileStoreClaim" -}}
{{ .Values.fileStore.existingClaim | default (include "inference.name" (list . "files")) }}
{{- end -}}

{{/* REDIS_URL, as an item of `env`. */}}
{{- define "inference.redisUrl" -}}
{{- if regexMatch "@|password=" (.Values.redis.url | default "") }}{{ fail "redis.url has a user or a password, which all may read here: put it into a Secret, and name that in redis.existingSecret" }}{{ end -}}
- name: REDIS_URL
  {{- with .Values.redis }}
  {{- if .existingSecret }}
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret | quote }}, key: {{ .secretKey | quote }}}
  {{- else }}
  value: {{ required "there is no Redis server: set redis.url, or redis.existingSecret to a Secret that has its URL" .url | quote }}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* Where the queue and the files are, as items of `env`; a volume is where the image looks for it. */}}
{{- define "inference.storeEnv" -}}
{{ include "inference.redisUrl" . }}
{{- with .Values.fileStore.uri }}
- {name: FILE_STORE, value: {{ . | quote }}}
{{- end }}
{{- end -}}

{{/* Variables, of which the last one of a name counts. Input: (list those-of-the-chart-as-YAML spec). */}}
{{- define "inference.env" -}}
{{- $all := concat (index . 0 | fromYamlArray) ((index . 1).env | default list) -}}
{{- $entries := dict -}}
{{- range $all }}{{ $_ := set $entries .name . }}{{ end -}}
env:
{{- range $entry := $all }}
{{- if hasKey $entries $entry.name }}
  - {{ get $entries $entry.name | toJson }}
{{- $_ := unset $entries $entry.name }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What the pods of all components have. Input: (list $ spec). */}}
{{- define "inference.pod" -}}
{{- $spec := index . 1 -}}
automountServiceAccountToken: false
enableServiceLinks: false  # a Service named pipeline would set PIPELINE_PORT
shareProcessNamespace: true  # so that something reaps orphans
securityContext:
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  runAsNonRoot: true
  seccompProfile: {type: RuntimeDefault}
{{- with (index . 0).Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- range $name := list "serviceAccountName" "priorityClassName" "runtimeClassName" "nodeSelector" "affinity" "tolerations" }}
{{- with get $spec $name }}
{{ $name }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What the containers of all components have. Input: (list $ spec). */}}
{{- define "inference.container" -}}
imagePullPolicy: {{ (index . 0).Values.image.pullPolicy }}
{{- with (index . 1).envFromSecret }}
envFrom:
  - secretRef: {name: {{ .name | quote }}}
{{- end }}
securityContext:
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* A budget that lets one pod at a time be evicted, and every pod that is not ready. */}}
{{- define "inference.budget" -}}
{{- if (index . 0).Values.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "inference.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "inference.selector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{/* The entries of modelSpec over the defaults, as JSON. */}}
{{- define "inference.models" -}}
{{- $models := list -}}
{{- range .Values.servingEngineSpec.modelSpec -}}
{{- $spec := mergeOverwrite (deepCopy $.Values.servingEngineSpec.modelDefaults) . -}}
{{- $models = append $models (merge $spec (dict "servedModelName" (list .modelURL))) -}}
{{- end -}}
{{- toJson $models -}}
{{- end -}}

{{/* The models that KEDA starts from zero, by all their names, as JSON. */}}
{{- define "inference.onDemand" -}}
{{- $names := list -}}
{{- range include "inference.models" . | fromJsonArray -}}
{{- if and .keda.enabled (eq (int .keda.minReplicaCount) 0) }}{{ $names = concat $names .servedModelName }}{{ end -}}
{{- end -}}
{{- toJson $names -}}
{{- end -}}

{{/* A claim. Input: (list $ component size accessModes storageClass). */}}
{{- define "inference.claim" -}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  {{- include "inference.metadata" . | nindent 2 }}
  annotations: {helm.sh/resource-policy: keep}
spec:
  accessModes: {{ index . 3 | toJson }}
  {{- with index . 4 }}
  storageClassName: {{ . | quote }}
  {{- end }}
  resources: {requests: {storage: {{ index . 2 }}}}
{{- end -}}

{{/* The series of the API, as Prometheus has them through the ServiceMonitor. Input: (list $ name matchers). */}}
{{- define "inference.series" -}}
{{ index . 1 }}{namespace="{{ (index . 0).Release.Namespace }}",job="{{ include "inference.name" (list (index . 0) "api") }}"{{ with index . 2 }},{{ . }}{{ end }}}
{{- end -}}

{{/* A trigger of KEDA. Where the query finds nothing, KEDA leaves the replicas as they are. Input: (list $ query threshold). */}}
{{- define "inference.trigger" -}}
- type: prometheus
  metadata:
    serverAddress: {{ required "keda.serverAddress is missing: the address of the Prometheus that scrapes the API" (index . 0).Values.keda.serverAddress | quote }}
    query: {{ index . 1 | toJson }}
    threshold: {{ index . 2 | toJson | quote }}
    ignoreNullValues: "false"
{{- end -}}
