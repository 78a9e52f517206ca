"""Generate docs/agents.md: `python docs/agents_page.py > docs/agents.md`."""

import sys
from collections.abc import Iterator

from envs.programs.profiles import PROFILES
from workers.rollout.agent_endpoint.fields import FIELDS

HEAD = """# Agents that run their own loop

After reading this page you can train an agent whose loop is yours: a program or a class that asks a model by the API of
OpenAI or Anthropic. You know which of its requests share a row, which limits hold, and which fields have an effect.

## A class with a loop

```python
from openai import AsyncOpenAI

import penstock


class Adder(penstock.AgentEnvironment):
    def reset(self, a: int, b: int) -> None:
        self.question, self.expected, self.said = f"What is {a} + {b}?", str(a + b), ""

    async def run_episode(self, endpoint: str, sampling: dict) -> None:
        async with AsyncOpenAI(base_url=endpoint, api_key="none") as client:
            messages = [{"role": "user", "content": self.question}]
            for _ in range(3):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                self.said = answer.choices[0].message.content or ""
                if self.said.strip().isdigit():
                    break
                messages.append({"role": "assistant", "content": self.said})
                messages.append({"role": "user", "content": "Only the number, please."})

    def get_reward(self) -> float:
        return float(self.said.strip() == self.expected)
```

The class holds the conversation and calls its own tools. The worker samples its turns and keeps their tokens: what is
trained is what was sampled, whatever the class sends back.

## A program

Claude Code, Codex, opencode and mini-swe-agent are environments by their names. They need Linux,
[bubblewrap](rewards.md), and the program on the PATH of the rollout worker.

```toml
[environments.fix]
ref = "agent:claude-code"              # or agent:codex, agent:opencode, agent:mini-swe-agent

[environments.fix.args]
folder = "tasks/{task}"                # copied for each episode; the program starts in the copy
reward = { command = ["bash", "check.sh"] }   # afterwards, in the copy: its last line is the reward
```

The row's prompt is the task. The name stands for a profile:

| `agent:` | tried with | installed by | starts |
|---|---|---|---|
@PROFILES@
A profile also sets variables and files of the home, so that the program asks the endpoint alone and knows how long its
context may be. What it calls elsewhere is turned off: updates, telemetry, lists of models and plugins.

- `command = "/opt/claude/bin/claude"`, a text, says where the program is.
- `command = ["claude", "--print", "{prompt}"]`, a list, replaces the arguments.
- `env` and `readable` are added to the profile's.

**Length of the context.** Codex compacts at 70 % of it, by the numbers of tokens, and ends if the engine refuses a
context. Claude Code and opencode compact if the engine refuses one. Claude Code keeps its last exchange then, and ends
if that alone is too long. First requests are long: 77 kB from Claude Code, 40 kB from Codex, 30 kB from opencode. Codex
compacts again and again where its first request alone has 70 % of the context.

**Before a run**, `penstock check agent:codex --field prompt="Say hello."` plays one episode with a scripted model. It
shows routes, refused requests, fields without effect, rows, and the reward of the untouched folder. It also names hosts
that the program wants to reach, if it asks them through a proxy (`HTTPS_PROXY`). `penstock check run.toml` does the
same with the first row of the data and the run's own chat template. It names roles that the template refuses, counts
tokens, and says if a context is too long for `engine.max_model_len`. Without a settings file, add
`--set model.path=FOLDER` for the template.

### Any command

```toml
[environments.fix]
ref = "agent:command"

[environments.fix.args]
command = ["python3", "agent.py", "{prompt}"]
env = { OPENAI_BASE_URL = "{endpoint}", OPENAI_API_KEY = "{key}", ANTHROPIC_BASE_URL = "{base_url}" }
folder = "tasks/{task}"                # as above
readable = ["/opt/my-agent"]           # what the program may read, besides /usr
limits = { timeout_s = 900 }           # also processes, file_mb and folder_mb
reward = { command = ["bash", "check.sh"] }
```

`{endpoint}`, `{base_url}`, `{key}`, `{folder}`, `{prompt}` and the row's columns can stand in `command`, `env` and
`folder`. The program sees the copy, an empty home and the system's files. It sees no process but its own, and no
environment variable but those given. Its network is the endpoint alone; with `network = "host"`, that of the machine.
When it ends, all that it has started ends with it. So it is when its time is up: SIGTERM, and SIGKILL 5 s later.

| what happens | completion |
|---|---|
| the program ends, or its time is up | measured; `exit_code`, `timed_out`, `output` are attributes |
| it adds more than `limits.folder_mb` (10,240) to its folder | killed, measured; `over_quota`; `output` says why |
| it had not asked for a turn | invalid; the message has the end of what it wrote |
| the reward's command writes no number, hangs or fails | `worst` (0), its second key: the program may have caused it |
| the reward's command cannot be started | invalid |

Files of the folder that `reward` names are copied anew before it runs, so the program cannot change them. What else
stands there may be the program's: start Python with `-I` there, so that it imports nothing from the folder. Without
`reward`, [reward functions](rewards.md) score the conversation and the attributes.

## The endpoint

Each episode has a URL, valid until the episode ends: `http://HOST:PORT/KEY/v1`. Clients that send a key take the two
apart: base URL `http://HOST:PORT` (OpenAI's clients: with `/v1`), and the key as `Authorization: Bearer` or
`x-api-key`.

| route | dialect |
|---|---|
| `POST /v1/chat/completions` | OpenAI chat completions |
| `POST /v1/responses` | OpenAI Responses, with the whole conversation in each request |
| `POST /v1/messages` | Anthropic Messages |
| `POST /v1/messages/count_tokens` | tokens of such a request, by the run's chat template; nothing is sampled |
| `GET /v1/models` | the policy, with `context_length` (also as `max_model_len`, `max_input_tokens`) |

All three stream if they are asked to. `make test-agents` lets the four programs, LangGraph and the OpenAI Agents SDK
do a task in their sandbox, with a scripted model. Three of the programs also compact, start three sub-agents at once,
and lose an answer on its way. A training with them and a real model has not been tried.

- **Reasoning** is a part of its own in Responses and Messages, and comes back as it was. In chat completions it stays
  in the content; clients that take it out and send `reasoning_content` (LiteLLM) continue their row. A program that
  drops it starts a new row.
- **Calls that cannot be read** are text, as everywhere.
- **Roles.** Programs send `system` messages after user messages, or several of one role. Where the chat template
  refuses them or leaves them out, they become a part of the message before. The first request tries what it takes.

## Branches

```text
main      task ── turn 1 ── turn 2 ── turn 3     a row: the program sent back what it got, and more
other           └── turn 2'                      a second answer to the same: its prompt ends with turn 1
sub       part of the task ── turn 4             a sub-agent's conversation
compact   ... ── turn 5                          a summary of the history
main      summary ── turn 6                      the task goes on with it
```

A request continues the deepest recorded turn whose conversation it begins with: same messages, same answers, same
tools. The row grows if the template leaves the earlier turns unchanged. Otherwise a new row of the same branch starts,
in which known turns keep their sampled tokens. So it is where the program itself changes its history, by dropping
reasoning or shortening results.

Each sampled token is trained in one row at most. All rows of an episode have one reward, and count as one completion.
`penstock show` and the dashboard show the tree.

**Roles** follow from what a program says in its headers, as Claude Code, Codex and opencode do for sub-agents. Without
headers, the first conversation with tools is `main`, and later ones are `sub`. A call that holds a history, and whose
answer a later conversation begins with, is `compact`. A call without tools whose answer appears nowhere is `side`,
such as one for a title. Your own loop can say so:

| header | meaning |
|---|---|
| `X-Penstock-Role` | `main`, `sub`, `compact`, `side` or `other` |
| `X-Penstock-Branch` | your name for the conversation |
| `X-Penstock-Parent` | the name of the one that started it |
| `X-Penstock-Train: 0` | it is not trained |

A branch that is not trained is recorded with its reason:

| reason | why |
|---|---|
| `role` | `agents.train` does not name its role; by default, `side` is left out |
| `program` | the program asked for it |
| `superseded` | the same context was sampled again, and only the other answer was continued or quoted |

A rollout weighs the same however it branched: [the table of weights](training.md#branched-rollouts).

**At once.** Up to 16 requests of an episode are sampled together, others wait. The seed of a turn follows from its
conversation, and not from the order in which requests come.

**A repeated request** gets the same answer in three cases:

- the client says so (`x-stainless-retry-count`, `Idempotency-Key`);
- within 30 s, the connection of the first one broke before the answer was sent;
- within 30 s and once, Claude Code, Codex or opencode sends it again with nothing between. They do so if they did not
  get the answer, which may be lost after it was sent.

A turn is sampled to its end even if nobody waits. Any other request with the same conversation is a second answer.

**Long episodes.** Each turn is [kept on the server](resuming.md#in-mid-episode) until its group ends. If the worker is
killed, the next one starts the programs again, and gives them the answers that they had, token for token. A program
that does the same for the same answers then repeats no turn but those that were being sampled.

## Limits

| limit | holds for | reached |
|---|---|---|
| `rollout.max_tokens_per_turn`, the request's own | one answer | the answer is cut, and says so |
| `rollout.max_tokens`, `rollout.max_turns` | each branch, without its prompt | three empty answers, then 400 |
| `agents.max_rollout_tokens`, `agents.max_rollout_turns` | all branches; by default 8 and 16 times those | the same |
| `rollout.episode_timeout_s` | the time of the engine; and as much for the program's own | the episode ends |
| 256 | rows of an episode | as above |
| 100 | contexts of an episode that are too long for the engine | 400: it compacts without end |

A limit truncates the completion if it had the last word in `main`. A context that is too long for the engine is
answered with 400 in each vendor's words, so that a program can shorten its history. If the task goes on, nothing was
truncated. If the last request of a program was refused for a field or a role, its completion is invalid and says why.

## Errors

| what | status | body |
|---|---|---|
| the context is too long | 400 | `context_length_exceeded`; Messages: "prompt is too long: P tokens > M maximum" |
| a field, its value or a role is refused | 400 | `invalid_request_error` with the field's name |
| the key is unknown, or the episode is over | 400 | a 401 would make some programs wait for minutes |
| no engine answers | 503, Messages: 529 | `Retry-After`; the group is given back |

A stream begins when the answer is there, or after 5 s; so early errors keep their status. Later ones are an event.

## Every field of a request

A field that stands nowhere here is ignored, and named once in the log (`endpoint.field_without_effect`).
"""
TITLES = {"chat": "Chat completions", "responses": "Responses", "messages": "Messages"}


def _profile_rows() -> Iterator[str]:
    for name, profile in PROFILES.items():
        command = " ".join((profile.executable, *profile.arguments))
        given = ", the prompt as its input" if profile.stdin else ""
        yield f"| `{name}` | {profile.version} | `{profile.install}` | `{command}`{given} |\n"
    yield "\n"


def main() -> None:
    """Print the page."""
    write = sys.stdout.write
    write(HEAD.replace("@PROFILES@\n", "".join(_profile_rows())))
    for dialect, rules in FIELDS.items():
        write(f"\n### {TITLES[dialect]}\n\n| field | | why |\n|---|---|---|\n")
        groups: dict[tuple[str, str], list[str]] = {}
        for name, rule in rules.items():
            groups.setdefault((rule.use, rule.why), []).append(f"`{name}`")
        for (use, why), names in groups.items():
            write(f"| {', '.join(names)} | {use} | {why} |\n")


if __name__ == "__main__":
    main()
