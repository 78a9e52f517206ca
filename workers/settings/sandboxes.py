"""Settings of sandboxes: where they live, how they are reached, and what an environment may ask of them."""

import os

from envs.sandboxes.contract import Network, ProviderOptions, SandboxSpec
from workers.settings.section import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seconds, Section

_NETWORKS = tuple(Network)
_MAX_SPARE_S = 30.0
"""Time after its deadline in which a creation may still succeed; at most as long as that deadline."""


class SandboxSettings(Section, frozen=True):
    """`[sandboxes]`: for environments that open sandboxes, one or more for each episode."""

    provider: str = "process"
    """What makes them: `process` (bubblewrap on the worker's machine), `docker`, `kubernetes`, another name in the
    entry point group `penstock.sandboxes`, or a class as `MODULE:CLASS` or `FILE.py:CLASS`."""
    address: str = ""
    """Where the provider is reached: `unix:///run/docker.sock`; for `kubernetes` `NAMESPACE` or `CONTEXT/NAMESPACE`;
    empty: where its own tools look."""
    runtime: str = ""
    """For `docker`: `runc`, `crun` or `runsc`; for `kubernetes`: a RuntimeClass; empty: the place's default."""
    create_timeout_s: Seconds = 120.0
    """Deadline for creating and starting one sandbox."""
    call_timeout_s: Seconds = 30.0
    """Deadline of every other request to the provider, in addition to a command's own."""
    starts_at_once: NonNegativeInt = 0
    """Sandboxes that one worker starts at the same time; others wait. 0: one for each CPU core."""
    grace_s: NonNegativeFloat = 20.0
    """After a worker has died, or lost its lease: time in which another may go on with a sandbox before it is
    removed."""
    network: Network = Network.OFF
    """The most that a sandbox may reach: `off`; `endpoint` (the agent endpoint of its worker); `allowlist` (hosts that
    its task names, too); `open`."""
    max_cpus: PositiveFloat = 4.0
    """CPU cores that a sandbox may ask for."""
    max_memory_mb: PositiveInt = 8192
    """Memory that a sandbox may ask for, in MiB."""
    max_disk_mb: PositiveInt = 20480
    """Disk space that a sandbox may ask for, in MiB."""
    image_cache_gb: PositiveFloat = 50.0
    """For `docker`: images built from tasks' folders beyond this size are removed before another is built, the longest
    unused first."""

    @property
    def starts(self) -> int:
        """Sandboxes that one worker starts at the same time."""
        return self.starts_at_once or len(os.sched_getaffinity(0))

    @property
    def created_within_s(self) -> float:
        """Time within which a creation succeeds or never does, though its worker or its connection be gone."""
        return self.create_timeout_s + min(_MAX_SPARE_S, self.create_timeout_s)

    @property
    def options(self) -> ProviderOptions:
        """What the provider is made with."""
        return ProviderOptions(
            address=self.address,
            runtime=self.runtime,
            create_timeout_s=self.create_timeout_s,
            call_timeout_s=self.call_timeout_s,
            image_cache_gb=self.image_cache_gb,
        )

    def refusal(self, spec: SandboxSpec) -> str:
        """Return why a sandbox may not have what it asks for; empty if it may."""
        for key, asked, most in (
            ("max_cpus", spec.cpus, self.max_cpus),
            ("max_memory_mb", spec.memory_mb, self.max_memory_mb),
            ("max_disk_mb", spec.disk_mb, self.max_disk_mb),
        ):
            if asked > most:
                return f"it asks for {key.removeprefix('max_')} = {asked:g}; sandboxes.{key} allows {most:g}"
        if _NETWORKS.index(spec.network) > _NETWORKS.index(self.network):
            return f"it asks for network = {spec.network}; sandboxes.network allows {self.network}"
        return ""
