"""Text as nodes: the same however it is cut into deltas, and never markup."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from tests.api.process import Server
from tests.browser.tab import Tab

pytestmark = pytest.mark.asyncio(loop_scope="session")

# Writes a text in pieces of a length, and returns the markup that stands for the nodes it made.
WRITE = """async ([text, length]) => {
    const { Writer } = await import("/page/writer.js");
    const root = document.createElement("div");
    const writer = new Writer(root);
    for (let start = 0; start < text.length; start += length) writer.append(text.slice(start, start + length));
    writer.end();
    root.normalize();
    for (const element of root.querySelectorAll("*")) {
        element.removeAttribute("dir");
        element.removeAttribute("tabindex");
    }
    return root.innerHTML;
}"""

CASES = {
    "": "",
    "Rivers bend.": "<p>Rivers bend.</p>",
    " \n  Rivers\n": "<p>Rivers</p>",
    "a\nb": "<p>a\nb</p>",
    "a\n\nb\n\n\n\nc": "<p>a</p><p>b</p><p>c</p>",
    "a\r\n  \r\nb": "<p>a</p><p>b</p>",
    "- a\n  - b\n    - c": "<p>- a\n  - b\n    - c</p>",
    "<script>alert(1)</script><b>&amp;": "<p>&lt;script&gt;alert(1)&lt;/script&gt;&lt;b&gt;&amp;amp;</p>",
    "Call `f(x)` twice.": "<p>Call <code>f(x)</code> twice.</p>",
    "`a`": "<p><code>a</code></p>",
    "``a`b`` c": "<p><code>a`b</code> c</p>",
    "a `b\nc` d": "<p>a <code>b\nc</code> d</p>",
    "never `closed": "<p>never `closed</p>",
    "never `closed\n\nnext `one`": "<p>never `closed</p><p>next <code>one</code></p>",
    "tail `": "<p>tail `</p>",
    "```\nx < y\n```": "<pre><code>x &lt; y</code></pre>",
    "a\n```python\nif x:\n    y = `z`\n\n\ndone\n```\nb": (
        '<p>a</p><pre><code>if x:\n    y = `z`\n\n\ndone</code></pre><p>b</p>'
    ),
    "```\nopen": "<pre><code>open</code></pre>",
    "```\nopen\n``": "<pre><code>open\n``</code></pre>",
    "```": "<p>```</p>",
    "````\n```\n````\nz": "<pre><code>```</code></pre><p>z</p>",
    "  ```\n a\n  ```": "<pre><code> a</code></pre>",
    "```a`b```": "<p><code>a`b</code></p>",
    "```js onload=\"x\"\n1\n```": '<pre><code>1</code></pre>',
    "say ``` inside": "<p>say ``` inside</p>",
    "🌊 `🐟` 水": "<p>🌊 <code>🐟</code> 水</p>",
}  # fmt: skip


async def test_the_same_in_any_pieces(river: Server, open_tab: Callable[[str], Awaitable[Tab]]) -> None:
    tab = await open_tab(river.url)
    for text, expected in CASES.items():
        for length in (1, 2, 3, 5, max(1, len(text))):
            assert await tab.page.evaluate(WRITE, [text, length]) == expected, (text, length)


@pytest.mark.deep
async def test_a_long_line_costs_what_it_weighs(river: Server, open_tab: Callable[[str], Awaitable[Tab]]) -> None:
    """What begins like a fence and never becomes one is kept back for a bounded length only."""
    tab = await open_tab(river.url)
    text = "```" + "a" * 200
    assert await tab.page.evaluate(WRITE, [text, 1]) == f"<p>{text}</p>"
