"""Three dialects of programs: OpenAI chat completions, OpenAI Responses, Anthropic Messages. No I/O."""

from workers.rollout.agent_endpoint.dialects.anthropic_messages import AnthropicMessages
from workers.rollout.agent_endpoint.dialects.base import Dialect
from workers.rollout.agent_endpoint.dialects.openai_chat import OpenAIChat
from workers.rollout.agent_endpoint.dialects.openai_responses import OpenAIResponses

CHAT, RESPONSES, MESSAGES = OpenAIChat(), OpenAIResponses(), AnthropicMessages()
DIALECTS: tuple[Dialect, ...] = (CHAT, RESPONSES, MESSAGES)
