"""A reader of the dashboard's pages."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import anyio.to_thread

from workers.dashboard.access import Access
from workers.dashboard.app import serve_dashboard
from workers.runs.catalog import Runs


@asynccontextmanager
async def browser(folder: Path, access: Access = Access(), **headers: str) -> AsyncIterator[aiohttp.ClientSession]:  # noqa: B008
    """Serve the dashboard of the runs in a folder; yield a session on it."""
    catalog = await anyio.to_thread.run_sync(Runs, [str(folder)])
    async with serve_dashboard(catalog, access, 0) as url:
        timeout = aiohttp.ClientTimeout(total=20)
        async with aiohttp.ClientSession(url, headers=headers, timeout=timeout) as session:
            yield session


async def text_of(session: aiohttp.ClientSession, path: str, status: int = 200) -> str:
    """Return a page."""
    async with session.get(path) as response:
        text = await response.text()
        assert response.status == status, text
        return text
