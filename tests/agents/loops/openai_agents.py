"""A loop of the OpenAI Agents SDK: python openai_agents.py chat|responses PROMPT."""

import asyncio
import os
import subprocess
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI


@function_tool
def bash(command: str) -> str:
    """Run a command in a shell, and return what it writes."""
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False).stdout


async def main() -> None:
    kind = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[sys.argv[1]]
    client = AsyncOpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = Agent(
        name="a", instructions="You work in a shell.", tools=[bash], model=kind(model="policy", openai_client=client)
    )
    done = await Runner.run(agent, sys.argv[2])
    print(done.final_output)


asyncio.run(main())
