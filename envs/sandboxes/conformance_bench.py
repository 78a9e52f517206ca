"""What the cases of the conformance suite work with: a provider, the sandboxes that a case makes of it, and demands."""

import importlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, Final

import anyio
from anyio import to_thread

from envs.sandboxes.contract import (
    BEGUN_LABEL,
    RUN_LABEL,
    ExecResult,
    ListedSandbox,
    ProviderOptions,
    Sandbox,
    SandboxFailure,
    SandboxProvider,
    SandboxSpec,
)

TIMEOUT_S: Final = 20.0
_NO_VARIABLES: Final[Mapping[str, str]] = MappingProxyType({})


def conformance_spec(image: str, *, env: Mapping[str, str] = _NO_VARIABLES, max_life_s: float = 600.0) -> SandboxSpec:
    """Return what the cases make sandboxes of."""
    return SandboxSpec(image=image, memory_mb=256, disk_mb=64, pids=64, env=dict(env), max_life_s=max_life_s)


class ConformanceError(Exception):
    """A provider does not do what the contract demands."""


class CaseSkipped(Exception):  # noqa: N818  (it is no error)
    """A provider lacks the trait that a case is about."""


@dataclass
class Bench:
    """A provider, and the sandboxes that a case has made of it."""

    provider: SandboxProvider
    reference: str
    image: str = ""
    run_id: str = field(default_factory=lambda: f"conformance-{secrets.token_hex(4)}")
    names: list[str] = field(default_factory=list)

    def new_name(self) -> str:
        """Return a name that the end of the case removes."""
        self.names.append(f"penstock-{secrets.token_hex(8)}")
        return self.names[-1]

    def labels(self, run_id: str = "") -> dict[str, str]:
        """Return the labels of a sandbox that begins now."""
        return {RUN_LABEL: run_id or self.run_id, BEGUN_LABEL: f"{time.time():.3f}"}

    async def open(self, name: str = "", spec: SandboxSpec | None = None) -> Sandbox:
        """Create a sandbox."""
        spec = spec or conformance_spec(self.image)
        return await self.provider.create(name or self.new_name(), spec, self.labels())

    async def find(self, name: str) -> ListedSandbox | None:
        """Return how a sandbox of this run is listed."""
        return next((one for one in await self.provider.list(self.run_id) if one.name == name), None)

    def need(self, trait: str) -> None:
        """Skip the case unless the provider isolates something."""
        if trait not in self.provider.isolates:
            raise CaseSkipped(f"it does not bound or keep apart: {trait}")


@asynccontextmanager
async def open_bench(reference: str, options: ProviderOptions, image: str = "") -> AsyncIterator[Bench]:
    """Connect to a provider, and remove what the cases leave.

    Raises:
        SandboxFailure: the place cannot be reached.
    """
    found = await to_thread.run_sync(load_provider, reference)
    async with found(options) as provider:
        bench = Bench(provider, reference, image)
        try:
            yield bench
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(60):
                for name in bench.names:
                    with suppress(SandboxFailure):
                        await provider.remove(name)


def load_provider(reference: str) -> type[SandboxProvider]:
    """Return a provider's class by its entry point, or by `module:Class`. Blocks.

    Raises:
        LookupError: there is no such provider.
    """
    module, colon, name = reference.partition(":")
    if colon:
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
    found = entry_points(group="penstock.sandboxes")
    if reference in found.names:
        return found[reference].load()  # type: ignore[no-any-return]
    raise LookupError(f"there is no provider {reference!r}; those installed are: {', '.join(sorted(found.names))}")


def expect(condition: object, demand: str, seen: object = "") -> None:
    """Raise `ConformanceError` unless a demand of the contract is met."""
    if not condition:
        raise ConformanceError(f"{demand}; seen: {seen!r}")


async def sh(sandbox: Sandbox, script: str, **options: Any) -> ExecResult:
    """Run a shell script in a sandbox."""
    return await sandbox.exec(["sh", "-c", script], **({"timeout_s": TIMEOUT_S} | options))


async def expect_alive(sandbox: Sandbox, after: str) -> None:
    """Raise `ConformanceError` unless a sandbox runs commands."""
    result = await sh(sandbox, "echo alive")
    expect(result.stdout == b"alive\n", f"a sandbox goes on after {after}", result)


async def expect_raised(kinds: Sequence[type[BaseException]], call: Awaitable[Any], demand: str) -> BaseException:
    """Return the error of a call; raise `ConformanceError` if it raises none of these kinds."""
    try:
        result = await call
    except tuple(kinds) as error:
        return error
    raise ConformanceError(f"{demand}; seen: {result!r}")
