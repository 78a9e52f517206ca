{{/*
The run's settings with the defaults of what the chart reads, as JSON. Values of the chart do not repeat settings: the file
decides. It reaches the roles as it is written, since the order of its tables matters.
*/}}
{{- define "penstock.settings" -}}
{{- if gt (len .Release.Name) 40 }}{{ fail "the release's name has more than 40 characters" }}{{ end -}}
{{- $text := required "run.settings is empty: helm install ... --set-file run.settings=run.toml" .Values.run.settings -}}
{{- $given := fromToml $text -}}
{{- if hasKey $given "Error" }}{{ fail (printf "run.settings is not TOML: %s" $given.Error) }}{{ end -}}
{{- $settings := mergeOverwrite (.Files.Get "defaults.toml" | fromToml) $given -}}
{{- if not $settings.run.name }}{{ fail "run.settings: run.name is empty: the roles of a run find each other by its name; set it" }}{{ end -}}
{{- if not (regexMatch "^/runs/[^/]+$" $settings.run.folder) -}}
{{- fail (printf "run.settings: run.folder is %q; set it to \"/runs/%s\": the run's claim is mounted at /runs" $settings.run.folder $settings.run.name) -}}
{{- end -}}
{{- if mod (int $settings.train.ranks) (int .Values.train.nodes) -}}
{{- fail (printf "run.settings: train.ranks is %v, which train.nodes (%v) does not divide" $settings.train.ranks .Values.train.nodes) -}}
{{- end -}}
{{- if and (eq $settings.sandboxes.provider "kubernetes") (not .Values.sandboxes.enabled) -}}
{{- fail "run.settings: sandboxes.provider is \"kubernetes\", for which rollout workers need an account; set the value sandboxes.enabled to true" -}}
{{- end -}}
{{- if and .Values.sandboxes.enabled (eq (include "penstock.sandboxes" .) .Release.Namespace) -}}
{{- fail (printf "sandboxes.namespace is %q, the release's own: who may make Pods there can read its Secrets; name another one" .Release.Namespace) -}}
{{- end -}}
{{- $settings | toJson -}}
{{- end }}

{{/* Settings that the chart overrides, as arguments of each role. Arguments: root, address. */}}
{{- define "penstock.overrides" -}}
{{- $values := .root.Values -}}
{{- $urls := list (printf "dns+http://%s-engine:8000" .root.Release.Name) -}}
{{- if eq $values.engine.server "external" -}}
{{- $urls = $values.engine.urls -}}
{{- if not $urls }}{{ fail "engine.urls is empty: with engine.server=external, name the addresses of your engines" }}{{ end -}}
{{- end -}}
- --set=engine.urls={{ $urls | toJson }}
- --set=run.address={{ .address | quote }}
- --set=run.metrics_address="0.0.0.0:{{ $values.metrics.port }}"
{{- end }}

{{/* Flags of vLLM that the settings ask for, as `penstock run` builds them. Argument: the settings. */}}
{{- define "penstock.vllmFlags" -}}
- --dtype={{ .model.dtype }}
{{- if .engine.max_model_len }}
- --max-model-len={{ .engine.max_model_len }}
{{- end }}
- --max-num-seqs={{ .engine.max_batch_size }}
- --enable-scale-out
- --logprobs-mode=processed_logprobs
- --generation-config=vllm
{{- if eq .weights.transport "adapter" }}
{{- $rank := int .lora.rank }}
{{- $room := 0 }}
{{- range list 512 320 256 128 64 32 16 8 1 }}{{ if ge . $rank }}{{ $room = . }}{{ end }}{{ end }}
- --enable-lora
- --max-lora-rank={{ $room }}
- --max-loras=4
{{- else }}
- '--weight-transfer-config={"backend": "{{ ternary "nccl" "penstock" (eq .weights.transport "nccl") }}"}'
{{- end }}
- --disable-uvicorn-access-log
{{- with .engine.flags }}
{{ toYaml . }}
{{- end }}
{{- end }}
