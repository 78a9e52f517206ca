"""The sandboxes of a run, by its server and by the places where they live; and those of all runs in one place."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import anyio.to_thread

from envs.references import resolve
from envs.sandboxes.contract import ListedSandbox, SandboxProvider
from stream.connection.run_connection import RunConnection
from stream.errors import PenstockError, SettingsError
from stream.operator.sandboxes import ListedPlace, SandboxAccount, account_for_sandboxes, scan_sandboxes
from stream.queue.sandboxes import read_sandbox_places, sandbox_run_id
from workers.settings.sandboxes import SandboxSettings

PlacedSandbox = ListedSandbox
"""A sandbox or a snapshot as its place lists it, of whatever run."""
PROVIDERS: Final = "penstock.sandboxes"
"""Group of the entry points of providers."""


def load_provider(settings: SandboxSettings) -> SandboxProvider:
    """Return the provider that the settings name, not yet entered. Imports it, which may block.

    Raises:
        SettingsError: it is no provider, or cannot be imported.
    """
    try:
        found = resolve(settings.provider, PROVIDERS).target
    except PenstockError as error:
        raise SettingsError(f"sandboxes.provider = {settings.provider!r}: {error}") from error
    if not isinstance(found, type) or not issubclass(found, SandboxProvider):
        raise SettingsError(f"sandboxes.provider = {settings.provider!r} is no class of providers")
    return found(settings.options)


@asynccontextmanager
async def open_provider(settings: SandboxSettings) -> AsyncIterator[SandboxProvider]:
    """Connect to the place of the settings.

    Raises:
        SandboxFailure: it cannot be reached.
        SettingsError: the provider is not one.
    """
    async with await anyio.to_thread.run_sync(load_provider, settings) as provider:
        yield provider


async def audit_sandboxes(settings: SandboxSettings, connection: RunConnection) -> SandboxAccount:
    """Account for a run's sandboxes, and compare them with what their place says, if this machine reaches it."""
    listed: dict[str, ListedPlace | str] = {}
    if places := await read_sandbox_places(connection):
        run_id = await sandbox_run_id(connection)
        try:
            async with open_provider(settings) as provider:
                place = await provider.place()
                begun = {each.name: each.begun for each in await provider.list(run_id)}
                listed[place] = ListedPlace(begun=begun)
        except PenstockError as error:
            listed = dict.fromkeys(places, str(error))
    return account_for_sandboxes(await scan_sandboxes(connection), listed, settings.created_within_s)


async def list_place(settings: SandboxSettings, older_than_s: float = 0.0) -> list[PlacedSandbox]:
    """Return the sandboxes of all runs in a place, the oldest first.

    Args:
        settings: name the place.
        older_than_s: only those that were begun before this many seconds.

    Raises:
        SandboxFailure: it cannot be reached.
    """
    begun_before = time.time() - older_than_s
    async with open_provider(settings) as provider:
        listed = await provider.list()
    return sorted((each for each in listed if each.begun <= begun_before), key=lambda each: each.begun)


async def remove_listed(settings: SandboxSettings, names: list[str]) -> dict[str, str]:
    """Remove sandboxes by their names. Returns why one is not removed, by name.

    Raises:
        SandboxFailure: their place cannot be reached.
    """
    problems: dict[str, str] = {}
    async with open_provider(settings) as provider:
        for name in dict.fromkeys(names):
            try:
                await provider.remove(name)
            except PenstockError as error:
                problems[name] = str(error)
    return problems
