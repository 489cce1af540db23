{{- define "swarm.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- /* Labels of a role: dict "root" $ "role" "seed" */}}
{{- define "swarm.selector" -}}
app.kubernetes.io/name: swarm
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "swarm.labels" -}}
{{ include "swarm.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "swarm.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* What all pods say about themselves. A larger drainSeconds gives the pod longer to end. */}}
{{- define "swarm.pod" -}}
# Otherwise Kubernetes sets variables such as SWARM_SEED_SERVICE_HOST, which swarm-node refuses as unknown settings
enableServiceLinks: false
automountServiceAccountToken: false
terminationGracePeriodSeconds: {{ add .Values.drainSeconds 30 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "swarm.container" -}}
image: {{ include "swarm.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{- /* A daemon answers `status` from its start to its end; it leaves by `drain`, as it would on SIGTERM. */}}
{{- define "swarm.life" -}}
startupProbe:
  exec:
    command: [swarm-node, status, --json]
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 120
livenessProbe:
  exec:
    command: [swarm-node, status, --json]
  periodSeconds: 30
  timeoutSeconds: 15
  failureThreshold: 4
readinessProbe:
  exec:
    command: [swarm-node, status, --json]
  periodSeconds: 15
  timeoutSeconds: 10
lifecycle:
  preStop:
    exec:
      command: [swarm-node, drain]
{{- end }}

{{- define "swarm.environment" -}}
- name: SWARM_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: SWARM_NETWORK_ID
  value: {{ .Values.networkId | quote }}
- name: SWARM_DRAIN_S
  value: {{ .Values.drainSeconds | quote }}
- name: SWARM_METRICS
  value: "0.0.0.0:{{ .Values.metricsPort }}"
{{- end }}

{{- /* Whom to join through: the seed of this release, known by its peer id, and others. */}}
{{- define "swarm.peers" -}}
{{- $peers := .Values.peers }}
{{- if .Values.seed.enabled }}
{{- $peerId := required "seed.peerId is missing: make it with `swarm-node identity --new`, see deploy/README.md" .Values.seed.peerId }}
{{- $host := printf "%s-seed.%s.svc" (include "swarm.name" .) .Release.Namespace }}
{{- $peers = prepend $peers (printf "/dns4/%s/tcp/%d/p2p/%s" $host (int .Values.seed.service.port) $peerId) }}
{{- end }}
{{- if not $peers }}
{{- fail "there is nobody to join through: enable the seed or name peers" }}
{{- end }}
{{- join "," $peers }}
{{- end }}

{{- /* The same, with the addresses that peers outside the cluster use before it. */}}
{{- define "swarm.toldPeers" -}}
{{- if .Values.seed.enabled }}
{{- range .Values.seed.announce }}{{ . }}/p2p/{{ $.Values.seed.peerId }},{{ end }}
{{- end }}
{{- include "swarm.peers" . }}
{{- end }}

{{- /* A volume of its own for each pod, its home: dict "size" "1Gi" */}}
{{- define "swarm.home" -}}
- metadata:
    name: home
  spec:
    accessModes: [ReadWriteOnce]
    resources:
      requests:
        storage: {{ .size }}
{{- end }}

{{- define "swarm.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
