"""A run that trains only an adapter, on the local engine, which receives merged weights or adds the adapter itself."""

import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stream.codec import decode
from stream.records import Group
from stream.trainer.archive import scan_archive
from tests.e2e.harness import balanced, summary_of
from tests.integration.test_exactness import TOLERANCE, forward, versions
from workers.settings.toml_file import load_settings
from workers.train.checkpointing.checkpoint import CheckpointStore
from workers.train.checkpointing.export import export
from workers.train.checkpointing.replayer import Replayer
from workers.train.model.adapter import merge_adapter

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("preloaded")]


@pytest.mark.parametrize("transport", ["files", "auto"])
def test_log_probs_match_the_merged_weights_and_the_replay_is_exact(project, random_model, transport):
    project.table["train"] |= {"batch_size": 2, "learning_rate": 3e-3, "save_every": 1, "max_checkpoints": 99}
    project.table["lora"] = {"rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    project.table["weights"] = {"transport": transport}
    project.table["algorithm"] = {"kl_coefficient": 0.05}
    project.table["archive"] = {"keep": "all"}
    summary = summary_of(project.run("run", str(project.write()), "--json"), project)
    assert balanced(summary)
    assert summary["steps"] >= 3

    published = {file.name for file in (project.run_folder / "weights").glob("v*/*.safetensors")}
    assert published == {"adapter_model.safetensors" if transport == "auto" else "model.safetensors"}
    policies = {0: random_model}
    for checkpoint in CheckpointStore(project.run_folder / "checkpoints").list_all():
        policies[checkpoint.progress.version] = folder = project.folder / checkpoint.folder.name
        folder.mkdir()
        merge_adapter(checkpoint.model, folder)
    models = {v: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for v, path in policies.items()}
    seen = set()
    for _, place in scan_archive(project.run_folder / "groups"):
        for row in (row for c in decode(place.read_payload(), Group).completions for row in c.rows):
            right = {v: forward(model, row) for v, model in models.items()}
            for i, (stored, version) in enumerate(zip(row.sampled_logprobs, versions(row), strict=True)):
                assert math.isclose(stored, right[version][i], abs_tol=TOLERANCE)
                seen.add(version)
    assert len(seen) >= 2, f"all tokens are of versions {seen}"

    report = Replayer(load_settings(project.run_folder / "run.toml"), project.run_folder).run()
    assert report.is_identical, report.mismatch
    assert report.steps == summary["steps"]

    out = project.folder / "exported"
    export(project.run_folder, out)
    begun, ended = (load_file(folder / "model.safetensors") for folder in (random_model, out))
    moved = {name.rpartition(".weight")[0].rpartition(".")[2] for name in ended if not begun[name].equal(ended[name])}
    assert moved == {"q_proj", "v_proj", "down_proj"}
    size = sum(
        path.stat().st_size for path in CheckpointStore(project.run_folder / "checkpoints").latest().model.iterdir()
    )
    assert size < (random_model / "model.safetensors").stat().st_size / 4
