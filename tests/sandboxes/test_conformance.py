"""The provider `docker` on a real engine, by the suite for authors of providers."""

import pytest

from envs.sandboxes.conformance_bench import Bench, CaseSkipped
from envs.sandboxes.conformance_cases import CASES
from tests.cases.docker_engine import IMAGE

pytestmark = [pytest.mark.sandboxes, pytest.mark.timeout(120)]


@pytest.mark.parametrize("case", CASES)
async def test_docker_conforms(case, place, blockbuster):
    for function in blockbuster.functions.values():
        function.can_block_in("conformance_cases.py", "write_files")  # its folder; it runs in no worker
    bench = Bench(place.provider, "docker", IMAGE, place.run_id)
    try:
        await CASES[case](bench)
    except CaseSkipped as skipped:
        pytest.fail(f"every case applies to docker: {skipped}")
    finally:
        for name in bench.names:
            await place.provider.remove(name)
