"""What axe finds on a page."""

from __future__ import annotations

from typing import Any

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page

__all__ = ["violations"]


async def violations(page: Page) -> list[Any]:  # Any: of JSON
    """Only what is serious or critical."""
    found = (await Axe().run(page)).response["violations"]
    return [
        (one["id"], one["impact"], [node["html"][:200] for node in one["nodes"]])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
