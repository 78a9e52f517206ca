"""Environments that answer turns, or ask for them."""

import aiohttp

from envs.contract import AgentEnvironment


class Cave:
    """Opens at the right word, which has to be said twice."""

    def reset(self, **row):
        self.words = []
        return "You stand before a cave."

    def open(self, key: int) -> str:
        """Use a key."""
        return "No lock."

    def respond(self, message):
        self.words.append(message)
        return None if self.words.count("Sesame") == 2 else "A rumble."

    def get_reward(self):
        return float(self.words.count("Sesame") == 2)


class Agent(AgentEnvironment):
    """Asks two questions in its own loop."""

    def reset(self, fail=False, **row):
        self.fail, self.answers = fail, []

    async def run_episode(self, endpoint, sampling):
        if self.fail:
            raise OSError("no route")
        messages = []
        async with aiohttp.ClientSession() as session:
            for question in ("2 + 2?", "And 2 + 3?"):
                messages.append({"role": "user", "content": question})
                async with session.post(f"{endpoint}/chat/completions", json={"messages": messages}) as response:
                    messages.append((await response.json())["choices"][0]["message"])
        self.answers = [message["content"] for message in messages[1::2]]

    def get_reward(self):
        return float(self.answers == ["Four", "Five"])
