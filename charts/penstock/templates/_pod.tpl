{{/*
The pod of a role. Arguments: root (the chart's context), role, values (of the role), image, command, port (a name, or "none"
for a pod that serves none), portNumber; and optionally: redisKey (of the Secret), runFolder ("rw" or "ro"), restartPolicy, env,
moreVolumes, moreMounts, lifecycle, readyPath, startupSeconds,
serviceAccount (whose token the pod has).
*/}}
{{- define "penstock.pod" -}}
{{- $root := .root -}}
{{- $settings := include "penstock.settings" $root | fromJson -}}
metadata:
  labels:
    {{- include "penstock.peer" (list $root .role) | nindent 4 }}
    {{- with $root.Values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    kubectl.kubernetes.io/default-container: {{ .role }}
    {{- if ne (first .command) "vllm" }}
    # Changed settings or files start new pods.
    checksum/settings: {{ $root.Values.run | toJson | sha256sum }}
    {{- end }}
    {{- with $root.Values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  serviceAccountName: {{ .serviceAccount | default $root.Release.Name }}
  # Only a rollout worker speaks to Kubernetes, and only to make sandboxes: templates/sandboxes.yaml.
  automountServiceAccountToken: {{ not (empty .serviceAccount) }}
  enableServiceLinks: false
  # SIGTERM starts the drain: nothing more is claimed, leases are finished or given back. No preStop hook is needed.
  # The grace period is queue.shutdown_timeout_s of the settings, and 15 s to exit.
  terminationGracePeriodSeconds: {{ add (ceil $settings.queue.shutdown_timeout_s) 15 }}
  {{- with .restartPolicy }}
  restartPolicy: {{ . }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with .values.nodeSelector }}
  nodeSelector: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.tolerations }}
  tolerations: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.affinity }}
  affinity: {{ toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ .image | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: {{ toYaml .command | nindent 8 }}
      workingDir: /etc/penstock
      {{- include "penstock.container" . | nindent 6 }}
  volumes:
    - {name: settings, configMap: {name: {{ $root.Release.Name }}-settings}}
    - {name: tmp, emptyDir: {}}
    {{- with .redisKey }}
    - name: redis
      secret: {secretName: {{ $root.Values.redis.secret | quote }}, items: [{key: {{ . }}, path: url}]}
    {{- if $root.Values.redis.caSecret }}
    - name: redis-ca
      secret: {secretName: {{ $root.Values.redis.caSecret | quote }}, items: [{key: ca.crt, path: ca.crt}]}
    {{- end }}
    {{- end }}
    {{- if .runFolder }}
    - name: run
      persistentVolumeClaim: {claimName: {{ include "penstock.claim" $root | quote }}, readOnly: {{ eq .runFolder "ro" }}}
    {{- end }}
    {{- with .moreVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- with .values.volumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end }}

{{/* What a container has besides its command. */}}
{{- define "penstock.container" -}}
{{- $root := .root -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
env:
  - {name: HOME, value: /tmp}
  {{- if .redisKey }}
  - {name: PENSTOCK_REDIS_FILE, value: /run/secrets/penstock-redis/url}
  - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
  {{- end }}
  {{- with .env }}{{ toYaml . | nindent 2 }}{{ end }}
  {{- with .values.env }}{{ toYaml . | nindent 2 }}{{ end }}
resources: {{ toYaml .values.resources | nindent 2 }}
{{- if ne .port "none" }}
ports:
  - {name: {{ .port }}, containerPort: {{ .portNumber }}}
startupProbe:
  httpGet: {path: /health, port: {{ .port }}}
  periodSeconds: 5
  failureThreshold: {{ div (int (.startupSeconds | default 300)) 5 }}
livenessProbe:
  httpGet: {path: /health, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
readinessProbe:
  httpGet: {path: {{ .readyPath | default "/ready" }}, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}
{{- with .lifecycle }}
lifecycle: {{ toYaml . | nindent 2 }}
{{- end }}
volumeMounts:
  - {name: settings, mountPath: /etc/penstock, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  {{- if .redisKey }}
  - {name: redis, mountPath: /run/secrets/penstock-redis, readOnly: true}
  {{- if $root.Values.redis.caSecret }}
  - {name: redis-ca, mountPath: /etc/penstock-redis, readOnly: true}
  {{- end }}
  {{- end }}
  {{- if .runFolder }}
  - {name: run, mountPath: /runs, readOnly: {{ eq .runFolder "ro" }}}
  {{- end }}
  {{- with .moreMounts }}{{ toYaml . | nindent 2 }}{{ end }}
  {{- with .values.volumeMounts }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
