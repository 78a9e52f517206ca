"""A loop of LangGraph: python langgraph_loop.py openai|anthropic PROMPT."""

import os
import subprocess
import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def bash(command: str) -> str:
    """Run a command in a shell, and return what it writes."""
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False).stdout


def model():
    if sys.argv[1] == "anthropic":
        return ChatAnthropic(
            model="policy", base_url=os.environ["ANTHROPIC_BASE_URL"], api_key=os.environ["ANTHROPIC_API_KEY"]
        )
    return ChatOpenAI(model="policy")


done = create_react_agent(model(), [bash]).invoke({"messages": [("user", sys.argv[2])]})
print(done["messages"][-1].content)
