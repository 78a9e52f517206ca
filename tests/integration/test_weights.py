"""The folder of published weights, after a trainer was killed while it wrote to it."""

import anyio

from stream.training import Tenure
from workers.fleet.roster import Roster
from workers.testing.scripted_engine import ScriptedEngine
from workers.train.keeping.durable import new_folder
from workers.train.publishing.files import Files
from workers.train.publishing.in_flight import InFlight
from workers.train.publishing.publisher import EnginePublisher
from workers.train.publishing.weights import Weights


def write(path) -> None:
    with new_folder(path) as folder:
        (folder / "model.safetensors").write_bytes(b"weights")


async def test_what_a_killed_trainer_left_half_written_goes_with_the_next_publication(tmp_path, link):
    half_written = tmp_path / "weights" / ".v000001.0a1b.tmp"
    half_written.mkdir(parents=True)
    (half_written / "model.safetensors").write_bytes(b"half")
    tenure = await Tenure.begin(link, 5.0)
    async with ScriptedEngine(lambda *_: [1]) as engine, anyio.create_task_group() as tasks:
        way = InFlight(Files())
        publisher = EnginePublisher(Roster([engine.url]), way, patience_s=5, update_timeout_s=20)
        weights = Weights(tmp_path / "weights", tenure, publisher, tasks)
        for step in range(2):
            await weights.publish(write, known=-1, step=step, metrics={})
    assert [path.name for path in sorted((tmp_path / "weights").iterdir())] == ["v000000", "v000001"]
