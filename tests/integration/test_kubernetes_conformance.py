"""The conformance suite on the provider `kubernetes`, with a cluster of this machine."""

import pytest

from envs.sandboxes.conformance import run_case
from envs.sandboxes.conformance_bench import CaseSkipped
from envs.sandboxes.conformance_cases import CASES
from envs.sandboxes.contract import ProviderOptions
from tests.cases.kubernetes_api import BUSYBOX, cluster  # noqa: F401  (a fixture)
from tests.cases.sandboxes import needs_sandbox  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.usefixtures("needs_sandbox"), pytest.mark.timeout(120)]
REFERENCE = "envs.sandboxes.kubernetes:KubernetesProvider"


LONG = ("client_killed", "limits", "max_life", "unkillable")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.full] * (case in LONG)) for case in CASES])
async def test_the_provider_conforms(case, cluster):  # noqa: F811
    try:
        await run_case(REFERENCE, case, ProviderOptions(), BUSYBOX)
    except CaseSkipped as skipped:
        pytest.skip(str(skipped))
    assert not cluster.pods
