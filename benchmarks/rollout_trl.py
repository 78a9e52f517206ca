"""TRL's AsyncRolloutWorker on the case of `rollout.py`. Runs in a virtual environment of its own.

    .cache/benchmarks/trl/bin/python benchmarks/rollout_trl.py CASE.json --engine URL --concurrency 64

It prints the process id of the worker's child, which does the work, and takes its samples off the queue.
"""

import argparse
import json
from pathlib import Path


class Adder:
    """The environment of `rollout_case.py`; that module needs packages which TRL's environment may lack."""

    def reset(self, **row: object) -> None:  # noqa: ARG002
        self.calls = 0

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first one.
            b: the second one.
        """
        self.calls += 1
        return a + b

    def get_reward(self) -> float:
        return float(self.calls)


def main() -> None:
    from accelerate import PartialState
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import async_rollout_worker as trl

    PartialState()  # TRL's loggers need it
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", type=Path)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--concurrency", type=int, default=64)
    arguments = parser.parse_args()
    case = json.loads(arguments.case.read_text())
    tokenizer = AutoTokenizer.from_pretrained(case["folder"])
    trl.is_vllm_available = lambda **_: True  # the worker only talks to a server
    worker = trl.AsyncRolloutWorker(
        model_name="policy",
        dataset=Dataset.from_list([{"prompt": messages} for messages in case["conversations"]]),
        reward_funcs=[],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        environment_factory=Adder,
        num_generations=case["group_size"],
        max_inflight_tasks=arguments.concurrency,
        vllm_server_url=arguments.engine,
        max_tokens=len(case["turns"][0]),
    )
    worker.start()
    print(worker._process.pid, flush=True)
    while True:
        worker.rollout_buffer.get()


if __name__ == "__main__":
    main()
