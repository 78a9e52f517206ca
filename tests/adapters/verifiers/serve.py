"""Serve verifiers 0.4's bundled OpenEnv environment: `python serve.py ADDRESS OPENENV_URL`."""

import sys

from verifiers.v1.serve import serve_env
from verifiers.v1.utils.loaders import resolve_env_config

if __name__ == "__main__":
    address, url = sys.argv[1:]
    player = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 4}
    config = resolve_env_config({"taskset": {"id": "openenv", "base_url": url}, "player": player})
    serve_env(config=config, max_workers=1, address=address)
