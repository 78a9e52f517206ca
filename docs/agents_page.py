"""Generate docs/agents.md: `python docs/agents_page.py > docs/agents.md`."""

import sys

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

Any command is an environment, too. It needs [bubblewrap](rewards.md) and Linux.

```toml
[environments.fix]
ref = "agent:command"

[environments.fix.args]
command = ["python3", "agent.py", "{prompt}"]
env = { OPENAI_BASE_URL = "{endpoint}", OPENAI_API_KEY = "none", ANTHROPIC_BASE_URL = "{base_url}" }
folder = "tasks/{task}"                # copied for each episode; the program starts in the copy
readable = ["/opt/my-agent"]           # what the program may read, besides /usr
limits = { timeout_s = 900 }           # also processes and file_mb
reward = { command = ["bash", "check.sh"] }   # afterwards, in the copy: its last line is the reward
```

`{endpoint}`, `{base_url}`, `{key}`, `{folder}`, `{prompt}` and the row's columns can stand in `command`, `env` and
`folder`. The program sees the copy, an empty home and the system's files. It sees no process but its own, and no
environment variable but those given. Its network is the endpoint alone; with `network = "host"`, that of the machine.
When it ends, all that it has started ends with it. So it is when its time is up: SIGTERM, and SIGKILL 5 s later.

| what happens | completion |
|---|---|
| the program ends, or its time is up | measured; `exit_code`, `timed_out`, `output` are attributes |
| it had not asked for a turn | invalid; the message has the end of what it wrote |
| the reward's command writes no number, hangs or fails | `worst` (0), its second key: the program may have caused it |
| the reward's command cannot be started | invalid |

Files of the folder that `reward` names are copied anew before it runs, so the program cannot change them. What else
stands
there may be the program's: start Python with `-I` there, so that it imports nothing from the folder. Without
`reward`,
[reward functions](rewards.md) score the conversation and the attributes.

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
| `GET /v1/models` | the policy |

All three stream if they are asked to. Requests that Claude Code 2.1, Codex 0.169, opencode 1.18, mini-swe-agent 2.4,
LangGraph and the OpenAI Agents SDK sent are tests of ours. A whole run of these programs is not tested yet.

- **Reasoning** is a part of its own in Responses and Messages, and comes back as it was. In chat completions it stays
  in the content. A program that drops it starts a new row.
- **Calls that cannot be read** are text, as everywhere.
- **Roles.** Programs send `system` messages after user messages, or several of one role. Where the chat template
  refuses them or leaves them out, they become a part of the message before. The first request tries what it takes.

## Which requests share a row

```text
task ── turn 1 ── turn 2 ── turn 3       a row: the program sent back what it got, and more
            └──── turn 2'                a second answer to the same: a row whose prompt ends with turn 1
summary ── turn 4                        another history: a row of its own
```

A request continues the deepest recorded turn whose conversation it begins with: same messages, same answers, same
tools. The row grows if the template leaves the earlier turns unchanged. Otherwise a new row starts, in which known
turns keep their sampled tokens. Each sampled token is trained in one row. All rows of an episode have one reward and
count as
one completion.

Requests may come at once, for sub-agents: up to 16 are sampled together, others wait. The seed of a turn follows from
its conversation, and not from the order in which requests come.

**A repeated request** gets the same answer: if the client says so (`x-stainless-retry-count`), or if the connection of
the first one broke before the answer was sent (for 30 s). A turn is sampled to its end even if nobody waits. Any other
request with the same conversation is a second answer.

## Limits

| limit | holds for | reached |
|---|---|---|
| `rollout.max_tokens_per_turn`, the request's own | one answer | the answer is cut, and says so |
| `rollout.max_tokens`, `rollout.max_turns` | each branch | three empty answers (`length`), then 400 |
| eight times these two | all branches together | the same |
| `rollout.episode_timeout_s` | the time of the engine; and as much for the program's own | the episode ends |
| 256 | rows of an episode | as above |

A branch is the path from a first turn to a last one. A limit truncates the completion if the first conversation
reached it. A context that is too long for the engine is
answered with 400 in each vendor's words, so that a program can shorten its history. If a turn follows, nothing was
truncated.

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


def main() -> None:
    """Print the page."""
    write = sys.stdout.write
    write(HEAD)
    for dialect, rules in FIELDS.items():
        write(f"\n### {TITLES[dialect]}\n\n| field | | why |\n|---|---|---|\n")
        groups: dict[tuple[str, str], list[str]] = {}
        for name, rule in rules.items():
            groups.setdefault((rule.use, rule.why), []).append(f"`{name}`")
        for (use, why), names in groups.items():
            write(f"| {', '.join(names)} | {use} | {why} |\n")


if __name__ == "__main__":
    main()
