"""The environment of `openenv init echo_env`, unchanged, served to several sessions.

`PYTHONPATH=echo_env python -m uvicorn echo_app:app`. The generated app allows one session, and its comment tells the
user to raise the number: a group needs one session per member.
"""

from models import EchoAction, EchoObservation
from openenv.core.env_server.http_server import create_app
from server.echo_env_environment import EchoEnvironment

app = create_app(EchoEnvironment, EchoAction, EchoObservation, env_name="echo_env", max_concurrent_envs=64)
