"""Generate docs/log-events.md: `python docs/log_events_page.py > docs/log-events.md`, or `make reference`.

A test fails for an event that has no meaning here, and for a meaning whose event is gone.
"""

import ast
import functools
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEVELS = {"debug": "debug", "info": "info", "warning": "warning", "error": "error", "exception": "error"}
MEANINGS = {
    "attempt.cancelled": "A rollout became too old (`pacing.stale_policy`); its prompt is rolled out again.",
    "bottleneck.changed": "Another part of the pipeline limited most of the last 30 seconds.",
    "call_memory.unavailable": "Should user code end or stop this process, its supervisor cannot name the call.",
    "call.cancellation_ignored": "User code caught its cancellation; the worker closed the coroutine.",
    "checkpoint.removed": "An old checkpoint was deleted (`train.max_checkpoints`).",
    "checkpoint.saved": "A checkpoint is durable; its groups are acknowledged.",
    "checkpoint.skipped": "A damaged checkpoint is not used; the next older one is.",
    "completion.not_restored": "Turns that an earlier worker sampled are not used: it begins `anew`, or `never`.",
    "consumer.started": "Another trainer is attached to the run.",
    "dashboard.exited": "The dashboard of the run ended; the run goes on.",
    "dashboard.failed": "The dashboard could not start; the run goes on.",
    "disk.full": "A disk of the run has no room, or cannot be written; the run waits.",
    "disk.recovered": "What waited for room on a full disk was written.",
    "disk.waiting": "A write found no room on its disk; it is repeated until there is some.",
    "disk.writable": "The disk has room again.",
    "drain.started": "The first SIGTERM or SIGINT: finish what was begun, claim nothing new.",
    "endpoint.listening": "Environments with an own loop sample at this address.",
    "endpoint.field_without_effect": "An agent's request has a field, or a tool of its vendor's, that changes nothing "
    "([agents](agents.md#every-field-of-a-request)); once for each.",
    "engine.announced": "`penstock run` added an engine that it started.",
    "engine.backend_unknown": "The engine does not say which weight transfer it has; the update is tried.",
    "engine.busy": "The engine refused a request and said for how long; requests go to others until then.",
    "engine.context_too_short": "The engine takes fewer tokens than `rollout.max_tokens`; completions end earlier.",
    "engine.ejected": "The engine failed; requests go to others until it answers again.",
    "engine.exposed": "The engine listens for other machines: everyone who reaches it can change its weights.",
    "engine.failed": "The local engine's model thread failed; the process ends.",
    "engine.foreign_weights": "The engine serves weights that no trainer of Penstock sent; they are replaced.",
    "engine.found": "An engine answers; its version, model and limits.",
    "engine.left_paused": "An update failed half-way; the engine stays paused until weights are known.",
    "engine.listening": "An engine that Penstock started takes requests.",
    "engine.loading": "vLLM is still starting; the last line that it printed.",
    "engine.logprobs_measured": "The probe's ratio between returned and expected log-probs; 1 is right.",
    "engine.max_length_reduced": "The model takes fewer tokens than asked for.",
    "engine.metrics_missing": "The engine has no metrics; `limit` bounds its requests instead.",
    "engine.push_failed": "An engine did not take new weights; it is tried again, and gets no requests meanwhile.",
    "engine.push_timed_out": "These engines took far longer than others; they are updated separately.",
    "engine.recovered": "The engine answers again.",
    "engine.refreshed": "An engine that came later or again has the newest weights.",
    "engine.request_failed": "A request failed after all its attempts.",
    "engine.resume_failed": "An engine could not be resumed after a failed update.",
    "engine.started": "vLLM was started with this command.",
    "engine.waiting": "The engine does not answer; logged once until it recovers.",
    "engines.changed": "Engines were added to, or removed from, the run.",
    "engines.lookup_failed": "A `dns+` name does not resolve, or a `file:` has no engines; the last ones stay.",
    "engines.lookup_recovered": "It can be looked up again.",
    "entry.dead_lettered": "No worker could finish the entry: `penstock dead list`.",
    "entry.isolated": "The entry killed workers before; it runs alone now.",
    "entry.released": "A worker gave the entry back; another attempt follows.",
    "environment.close_failed": "`close` of an environment raised or hung.",
    "evaluation.ended": "The result of an evaluation.",
    "evaluation.prompts_uploaded": "The feeder stored the held-out prompts on the server.",
    "evaluation.skipped": "An evaluation was due, and cannot be made.",
    "evaluation.started": "Held-out prompts are sampled with this version.",
    "evaluation.state_lost": "The server lost the state of an evaluation; it is begun again.",
    "evaluation.timed_out": "No progress for half of `abort.stall_timeout_s`; publication does not wait.",
    "event_loop.blocked": "Code in `by` keeps the event loop from running; no lease is renewed meanwhile.",
    "feed.cursor_moved": "Another feeder moved the cursor; this one goes on from there.",
    "feed.finished": "All prompts are fed.",
    "feed.state_lost": "The server lost writes; the feeder feeds again what has no outcome.",
    "feed.waiting": "The server's memory is needed for groups; feeding waits.",
    "folder_lock.unsupported": "The file system has no locks; the lease alone protects the run's folder.",
    "group.duplicate": "A second copy of a group arrived; it ends as a duplicate, and counts nowhere.",
    "history.not_shared": "Rows that begin alike are each forwarded whole; why this model cannot share them.",
    "http.cannot_accept": "A server cannot take a connection, for want of files mostly; it tries again.",
    "http.connections_limited": "A server has too many connections; those that brought no request made room.",
    "hub.downloading": "A role downloads a model or data that its settings name on a hub.",
    "in_flight.report_failed": "A worker's report for `penstock queues --in-flight` was not stored.",
    "ledger.rebuilt": "The ledger was damaged; archive and server have all that it had, and it was written anew.",
    "lease.lost": "The lease expired or was taken; another worker has the entry, and this result is discarded.",
    "lm_head.unknown": "The output layer is not recognized; logits are computed by the whole model, with more memory.",
    "memory.enough": "The machine no longer swaps.",
    "memory.report_failed": "A report of the memory that processes hold was not stored.",
    "memory.short": "The machine swaps, or processes wait for memory; this process holds most.",
    "memory.unmeasured": "The memory of this model's passes cannot be computed; a small `micro_batch_tokens` is used.",
    "micro_batch.chosen": '`train.micro_batch_tokens = "auto"` chose this number of tokens.',
    "metrics.listening": "This process serves Prometheus metrics here.",
    "metrics.not_served": "The address is taken; the role works without metrics.",
    "metrics.read_failed": "One scrape could not read the run's status.",
    "model.downloaded": "The tokenizer and chat template came from the trainer, through the server.",
    "model.exported": "A model was copied out of a checkpoint.",
    "packing.disabled": "Sequences are padded instead of packed, with the reasons.",
    "packing.enabled": "Sequences are packed, with this attention.",
    "progress.refused": "The server does not keep the progress of unfinished groups now; they go on without it.",
    "progress.unreadable": "A saved turn is damaged; it and those after it are sampled again.",
    "partial_completion.unreadable": "A saved completion cannot be read; it is sampled again.",
    "page.failed": "A page of the dashboard, or a part of it, cannot be shown: an unexpected exception.",
    "plot.skipped": "The plot of the run could not be drawn.",
    "policy.not_published": "A stopping trainer found no engine for its weights; the next start publishes them.",
    "policy.published": "A new policy version is served.",
    "policy.state_lost": "The server lost a publication; the trainer announces the version again.",
    "private_server.data_repaired": "Zeros at the end of the private server's file were cut, after a power failure.",
    "private_server.data_set_aside": "Damaged files of the private server; it is rebuilt from ledger and checkpoint.",
    "private_server.digests_not_written": "The disk was full when the private Redis stopped; nothing else is missing.",
    "private_server.restarted": "The private Redis died and was started again.",
    "private_server.waiting": "The private Redis died of a full disk, and is started again once there is room.",
    "private_server.started": "The private Redis of the run started.",
    "process_pool.child_not_started": "A child process for rewards or environments could not start.",
    "harbor.control_wrote_nothing": "A task's tests write no reward on its untouched image either: it is unmeasured.",
    "harbor.tampered": "A policy changed system files that its verifier may run or load ([Harbor tasks](harbor.md)).",
    "harbor.task_refused": "A task in Harbor's format needs what Penstock does not do, or cannot be read; not fed.",
    "harbor.tasks_unchecked": "Tasks are not fed, because `penstock check harbor` has not found them sound.",
    "harbor.verifier_lost": "A verifier's sandbox was lost; it is made again from the policy's files, twice.",
    "rank.joined": "A follower rank is ready.",
    "rank.left": "A follower rank ended as asked.",
    "rank.lost": "Another rank is gone; this one ends, and all start again.",
    "ranks.connected": "All ranks of the trainer are connected.",
    "ranks.failed": "A rank failed; all others were ended.",
    "python.warned": "Python or a library warned, for example of a deprecation; once for each place in the code.",
    "redis.persistence_off": "A crash of the server would lose the queues; set `appendonly yes`.",
    "redis.recovered": "The server answers again.",
    "redis.redirected": "The cluster moved the run to another node.",
    "redis.setting_unknown": "The server does not report a setting that is checked.",
    "redis.waiting": "The server does not answer; calls are repeated.",
    "result.discarded": "A result came after its lease was lost.",
    "reward_model.found": "A reward model answers: scores of the test conversations; its context, 0 if unknown.",
    "reward_model.served": "Statistics of a reward server since the last such event.",
    "role.ended": "The role's process ends.",
    "role.exited": "The supervisor saw a process end.",
    "role.failed": "The role failed; the supervisor quotes the error.",
    "role.hanging": "A process's event loop did not turn for `queue.hang_timeout_s`; it is killed. `call` held it up.",
    "role.killed": "A process did not end in time (`run.shutdown_timeout_s`), and was killed.",
    "role.restarted": "A process is started again after a pause.",
    "role.started": "A process was started.",
    "rollout.truncated_sampling": "Top-k, top-p or a similar option is set, so the log-probs differ from the policy's.",
    "row.rejected": "A row of the data is no prompt; it is counted and left out.",
    "rows.written": "The rows that environments provide are in the run's folder.",
    "run.failed": "The first error, which ends the run.",
    "run.finished": "There is nothing left to claim.",
    "run.unreadable": "The dashboard cannot read a run: an unexpected exception.",
    "run.restored": "The run's folder was lost; it was restored from [object storage](resuming.md#object-storage).",
    "run_status.failed": "The supervisor could not read the run's status once.",
    "sample.failed": "The supervisor could not read a completion to show.",
    "sandbox.disk_measured": "The engine's storage has no quotas: what sandboxes write is measured now and then.",
    "sandbox.not_adopted": "The sandbox of an episode in mid-course is gone; the episode is replayed, or begins anew.",
    "sandbox.reaped": "A sandbox whose owner had lost it was removed.",
    "sandbox.removal_failed": "A sandbox could not be removed; the reaper of some rollout worker removes it.",
    "sandbox.stray": "A sandbox of this run without a record was removed: the server lost writes, or a suspended "
    "worker woke up.",
    "sandbox.unavailable": "Code that models influence runs here without a sandbox: which, why, and what it can reach.",
    "sandboxes.left": "The run has finished, and sandboxes are left that could not be removed (`penstock sandboxes`).",
    "sandboxes.unreachable": "The place of the sandboxes, or the server, does not answer the reaper; it tries again.",
    "server.rebuilt": "The server's state was made again from the ledger.",
    "setting.changed": "A setting, or code that one names, differs from the trainer's last start.",
    "service.recovered": "A reward or judge server answers again.",
    "service.waiting": "A reward or judge server does not answer; logged once until it recovers.",
    "signal.received": "The supervisor got a signal: the first drains, the next kills.",
    "step.skipped": "The optimizer did not move: nothing bore loss, or a gradient was not finite.",
    "stop.received": "`penstock stop`: the role drains and ends.",
    "storage.failed": "A checkpoint could not be copied to object storage; it is tried again, ten times in all.",
    "storage.saved": "A checkpoint is copied to object storage, with all that belongs to it.",
    "storage.stopped": "Copying stopped, because it would overwrite the copies of another run or of a newer trainer.",
    "stragglers.abandoned": "The step goes on without these groups, after half of `abort.stall_timeout_s`.",
    "stragglers.waiting": "A full batch waits for groups of older versions.",
    "stream.ended": "A page of the dashboard lost its live updates; the browser connects again.",
    "summary.not_written": "`summary.json` could not be written.",
    "template.conversation_rewritten": "The template changes old messages of a conversation, which forks from now on.",
    "template.inspected": "What was found out about the chat template, and why.",
    "template.tool_format_unknown": "The tool-call format of the model was not recognized.",
    "template.tools_not_rendered": "The template leaves out tools: describe them in `data.system`.",
    "tracker.failed": "A tracker did not take a step, or did not start; the run goes on.",
    "tracker.not_finished": "A tracker had steps left at the end; the next start logs them.",
    "tracker.queue_full": "A tracker is slow: later steps are missing until the next start.",
    "tracker.started": "A tracker works; first it gets the steps that it lacks.",
    "tracker.state_not_written": "It is not recorded which step the tracker has; some may be logged twice.",
    "trainer.finished": "The last step is done.",
    "trainer.opt_out_possible": "Under these settings a policy may gain by being invalid ([masking](masking.md)).",
    "trainer.started": "The trainer has the lease and its checkpoint.",
    "trainer.waiting": "Another trainer has the lease, or the feeder waits for the trainer's state.",
    "training.warning": "A [warning](troubleshooting.md#warnings) about the training, also in `warnings.jsonl`.",
    "weights.served": "Engines download weights here.",
    "weights.unverified": "This weight transport has not run on GPUs; compare log-probs first.",
    "work.available": "There is work again, after `work.waiting`.",
    "work.failed": "User code or the engine failed for this entry; it is given back.",
    "work.waiting": "The worker has had nothing to claim for a while.",
    "user_code.waiting": "A call of user code has not returned for 10 seconds, or for 30, 90, 270, 810.",
    "worker.died": "A worker's process ended while it held these prompts; after two deaths in a row each runs alone.",
    "worker.recycle_requested": "User code left threads or memory behind: the worker drains and is restarted.",
    "worker.recycled": "The supervisor started a worker anew.",
    "worker.released": "What a worker held when its process ended was given back.",
}
HEAD = """# Log events

With this page you can look up an event of a role's log, `RUN/logs/ROLE-N.log`, one JSON object per line:

```json
{"event": "lease.lost", "level": "warning", "role": "rollout", "timestamp": "2026-01-05T10:12:44Z", "stage": "groups"}
```

```sh
jq -cR 'fromjson? | select(.level != "info")' runs/my-run/logs/*.log    # needs jq; skips lines of other programs
```

On a terminal the same events are lines for people. An event is named `noun.verb`. The table is generated from the code.

| event | meaning | level | keys |
|---|---|---|---|"""


class LogCall(NamedTuple):
    """One place that logs an event."""

    event: str
    level: str
    keys: tuple[str, ...]


@functools.cache
def log_calls() -> tuple[LogCall, ...]:
    """Return each call of a logger in `stream`, `envs` and `workers`."""
    files = (file for package in ("stream", "envs", "workers") for file in sorted((ROOT / package).rglob("*.py")))
    texts = (file.read_text() for file in files)
    return tuple(
        LogCall(
            ast.literal_eval(node.args[0]),
            LEVELS[node.func.attr],
            tuple(key.arg for key in node.keywords if key.arg and key.arg != "exc_info"),
        )
        for text in texts
        if re.search(r"\blog\.[a-z]+\(", text)
        for node in ast.walk(ast.parse(text))
        if is_log_call(node)
    )


def is_log_call(node: ast.AST) -> bool:
    """Return whether this is `log.warning("noun.verb", ...)` or the like."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in LEVELS
        and ast.unparse(node.func.value) == "log"
    )


def page() -> str:
    """Return the whole page."""
    calls: dict[str, list[LogCall]] = {}
    for call in log_calls():
        calls.setdefault(call.event, []).append(call)
    rows = [HEAD]
    for event, places in sorted(calls.items()):
        levels = ", ".join(dict.fromkeys(place.level for place in places))
        keys = ", ".join(f"`{key}`" for key in dict.fromkeys(key for place in places for key in place.keys))
        rows.append(f"| `{event}` | {MEANINGS.get(event, '')} | {levels} | {keys} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
