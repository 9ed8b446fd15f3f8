"""The model's text as DOM nodes: Markdown, independent of how the text is split, and without harmful content."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import pytest
from playwright.async_api import expect
from tests.api.process import Server
from tests.browser.tab import Tab
from tests.engines.fake_upstream import SSE, FakeUpstream, chat_chunk, done

pytestmark = pytest.mark.asyncio(loop_scope="session")

OpenTab = Callable[[str], Awaitable[Tab]]
Serve = Callable[..., Server]

# Writes a text in pieces of a length.
_BEGIN = """
    const { MarkdownView } = await import("/page/markdown.js");
    const root = document.createElement("div");
    root.className = "text";
    document.querySelector("#turns").replaceChildren(root);
    const view = new MarkdownView(root);
    for (let start = 0; start < text.length; start += length) view.append(text.slice(start, start + length));
    view.end();
"""
# Returns the markup that stands for the nodes it made.
WRITE = (
    "async ([text, length]) => {"
    + _BEGIN
    + """
    while (root.dataset.isWhole !== "true") await new Promise(requestAnimationFrame);
    // Only the nodes that stand for the text:
    for (const element of root.querySelectorAll(".chunk, .code button, figcaption span"))
        element.matches(".chunk") ? element.replaceWith(element.textContent) : element.remove();
    root.normalize();
    for (const element of root.querySelectorAll("*"))
        for (const name of ["dir", "tabindex", "role", "aria-label", "rel", "target", "title"])
            element.removeAttribute(name);
    return root.innerHTML;
}"""
)


def _code(text: str) -> str:
    return f'<figure class="code"><figcaption></figcaption><pre><code>{text}</code></pre></figure>'


CASES = {
    "": "",
    "Rivers bend.": "<p>Rivers bend.</p>",
    "# Of rivers\n\nThey *bend*, **run**.": "<h3>Of rivers</h3><p>They <em>bend</em>, <strong>run</strong>.</p>",
    "- a\n- b\n  - c\n\n1. d\n2. e": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol><li>d</li><li>e</li></ol>",
    "> wise\n\n---\n\nend": "<blockquote><p>wise</p></blockquote><hr><p>end</p>",
    "Call `f(x)` twice.": "<p>Call <code>f(x)</code> twice.</p>",
    "```\nx < y\n```": _code("x &lt; y"),
    "a\n\n```text\nif x:\n    y\n\n\ndone\n```\n\nb": "<p>a</p>" + _code("if x:\n    y\n\n\ndone") + "<p>b</p>",
    "| a | b |\n|---|---|\n| 1 | 2 |\n": (
        '<div class="table"><table><thead><tr><th> a </th><th> b </th></tr></thead>'
        "<tbody><tr><td> 1 </td><td> 2 </td></tr></tbody></table></div>"
    ),
    "see arr[0], [word] and [x][1].": "<p>see arr[0], [word] and [x][1].</p>",
    "a [b": "<p>a [b</p>",
    "![no picture] x": "<p>![no picture] x</p>",
    "snake_case_name, `a_b_c` and _so_": "<p>snake_case_name, <code>a_b_c</code> and <em>so</em></p>",
    "[river](https://example.com/a?b=c)": '<p><a href="https://example.com/a?b=c">river</a></p>',
    "[write](mailto:a@example.com)": '<p><a href="mailto:a@example.com">write</a></p>',
    "[bad](javascript:alert(1))": "<p>bad)</p>",
    "[bad](JaVaScRiPt:1) [bad](data:text/html,1) [bad](//example.com) [bad](file:///etc)": "<p>bad bad bad bad</p>",
    "![map](https://example.com/a.png)": '<p><a data-is-picture="true" href="https://example.com/a.png">map</a></p>',
    "<script>alert(1)</script><b>&amp;": "<p>&lt;script&gt;alert(1)&lt;/script&gt;&lt;b&gt;&amp;amp;</p>",
    "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
}  # fmt: skip


async def test_the_same_in_any_pieces(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    for text, expected in CASES.items():
        for length in (1, 3, max(1, len(text))):
            assert await tab.page.evaluate(WRITE, [text, length]) == expected, (text, length)


PYTHON = '''```python
"""A text of several lines,

with an empty one in it."""
def answer(x):
    return 42 # why
```
'''


async def test_code_is_coloured_and_copied(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    await tab.page.evaluate(
        WRITE.replace("for (const element of root.querySelectorAll", "return;for(const element of []"), [PYTHON, 5]
    )
    code = tab.page.locator(".code")
    await expect(code.locator(".hl-keyword").first).to_have_text("def")
    await expect(code.locator(".hl-string")).to_have_text('"""A text of several lines,\n\nwith an empty one in it."""')
    await expect(code.locator("figcaption")).to_contain_text("python")
    await tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await code.get_by_role("button", name="Copy code").click()
    copied = await tab.page.evaluate("navigator.clipboard.readText()")
    assert copied.strip() == PYTHON.removeprefix("```python\n").removesuffix("```\n").strip()


# A text with formulas, how many of them are shown as such, and what one reads of the others.
FORMULAS = [
    (r"So \(x^2\) and $a_1$.", 2, []),
    ("\\[\n\\frac{a}{b} = \\sqrt{c}\n\\]\n\nend", 1, []),
    (r"As \[ E = mc^2 \] shows." + "\n\nend", 1, []),
    ("$$\n\\begin{pmatrix} a & b \\\\[2pt] c & d \\end{pmatrix}\n$$\n\nend", 1, []),
    ("$$ \\sum_{i=1}^n i $$\n\nend", 1, []),
    ("- \\(a\\)\n- b\n\n| \\(c\\) | d |\n|---|---|\n| \\(e\\) | f |\n", 3, []),
    (r"\(\unknown{x}\) \(\frac{a}\)", 0, [r"\unknown{x}", r"\frac{a}"]),
    (r"\(\def\a{\a\a}\a\)", 0, [r"\def\a{\a\a}\a"]),
    (r"\(" + "{" * 500 + "x" + "}" * 500 + r"\)", 1, []),
    (r"\(" + "x^{" * 300 + "y" + "}" * 300 + r"\)", 0, ["x^{" * 300 + "y" + "}" * 300]),
    (r"\(" + "x+" * 2000 + r"y\)", 0, ["x+" * 2000 + "y"]),
    (r"\(\href{https://example.com}{x}\)", 0, [r"\href{https://example.com}{x}"]),
    (r"\(\style{color:red}{y}\)", 0, [r"\style{color:red}{y}"]),
    ("It costs $5 and $6, and `\\[a\\]` is code.", 0, []),
]  # fmt: skip
# As WRITE. Returns how many formulas are shown, and the texts of the others.
WRITE_MATH = (
    "async ([text, length, count]) => {"
    + _BEGIN
    + """
    const shown = () => root.querySelectorAll(".math.shown > math").length;
    while (root.dataset.isWhole !== "true" || shown() < count) await new Promise(requestAnimationFrame);
    await import("/page/lib/temml.js");
    for (let frames = 0; frames < 3; frames += 1) await new Promise(requestAnimationFrame);
    return [shown(), Array.from(root.querySelectorAll(".math:not(.shown)"), (math) => math.textContent)];
}"""
)


async def test_formulas(river: Server, open_tab: OpenTab) -> None:
    """What cannot be shown stays text, and so does what could lead elsewhere."""
    tab = await open_tab(river.url)
    for text, count, others in FORMULAS:
        for length in (1, 3, len(text)):
            assert await tab.page.evaluate(WRITE_MATH, [text, length, count]) == [count, others], (text, length)
            assert await tab.page.locator("#turns :is(a, img, [href], [src], [style*=url])").count() == 0
    wide = r"\(\rule{1000em}{1000em} \kern1000em x\)"
    await tab.page.evaluate(WRITE_MATH, [wide, 50, 1])
    box = await tab.page.locator(".math.shown").bounding_box()
    assert box is not None
    assert box["height"] < 1000


OWN = "document.title='owned'"
HOSTILE = f"""<script>{OWN}</script><img src=x onerror="{OWN}"><svg onload="{OWN}"><iframe src="http://example.com">

[click](javascript:{OWN}) [click]( javascript:{OWN}) [a"onmouseover="{OWN}](https://example.com/"onmouseover="{OWN})
![pixel](http://example.com/leak.png?q=secret) ![x](javascript:{OWN})
<https://example.com> <style>*{{display:none}}</style>

\u202egnp.exe\u202c \u2066\u05d0\u2069 \x1b[31mred\x1b[0m \x1b]0;owned\x07 \x07\x08 \u200b\ufeff <!--

| <img src=x onerror="{OWN}"> | [x](vbscript:1) |
|---|---|
| ``` | <a href="javascript:{OWN}">x</a> |

```html"><script>{OWN}</script>
<iframe src="http://example.com"></iframe>
```

```__proto__
x
```

{"> " * 60}deep {"- " * 60}deep
{"*" * 500} {"[" * 500} {"`" * 501} {"_" * 500}
"""


@pytest.fixture
def upstream() -> Iterator[FakeUpstream]:
    with FakeUpstream(models={"data": [{"id": "liar"}]}) as running:
        yield running


def _says(*texts: str) -> bytes:
    end = chat_chunk({}, "stop") + done((3, len(texts)))
    return SSE + b"".join(chat_chunk({"content": text}) for text in texts) + end


@pytest.mark.deep
async def test_hostile_output_does_nothing(upstream: FakeUpstream, serve: Serve, open_tab: OpenTab) -> None:
    """No report of the policy and no request to another host, which `open_tab` sees to."""
    pieces = [HOSTILE[start : start + 7] for start in range(0, len(HOSTILE), 7)]
    upstream.answers[:] = [_says(*pieces)]
    tab = await open_tab(serve(f"openai:{upstream.url}/v1").url)
    await tab.send(f'<img src=x onerror="{OWN}">')
    text = await tab.wait_end()
    for piece in ("<script>", "onerror=", "<svg", "<iframe", "<style>", "[31mred"):
        assert piece in text
    inside = tab.page.locator("#turns article .text")
    assert await inside.locator("script, img, svg, iframe, style, form, object, embed").count() == 0
    links = await inside.locator("a").evaluate_all("(all) => all.map((one) => [one.protocol, one.rel])")
    assert {protocol for protocol, _ in links} <= {"http:", "https:", "mailto:"}
    assert all("noopener" in rel and "noreferrer" in rel for _, rel in links)
    handlers = "(all) => all.flatMap((one) => one.getAttributeNames()).filter((name) => name.startsWith('on'))"
    assert await inside.locator("*").evaluate_all(handlers) == []
    await expect(tab.questions.locator("p")).to_have_text(f'<img src=x onerror="{OWN}">')
    await expect(tab.page.locator("h1").first).to_be_visible()  # no style of the model's counts
    assert await tab.page.evaluate("document.title") != "owned"
    await tab.reload()
    assert await tab.wait_end() == text


@pytest.mark.deep
async def test_long_lines_fit_the_page(upstream: FakeUpstream, serve: Serve, open_tab: OpenTab) -> None:
    upstream.answers[:] = [_says("a" * 1_000_000 + " end"), _says("```\n" + "b" * 300_000)]
    tab = await open_tab(serve(f"openai:{upstream.url}/v1").url)
    await tab.send("A long line, please.")
    assert len(await tab.wait_end()) > 1_000_000
    await tab.send("And as code.")
    await tab.until("document.querySelectorAll('.answer').length === 2")
    assert "b" * 100_000 in await tab.wait_end()
    assert await tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def test_a_url_opens_only_conversations(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(f"{river.url}/#../models?a=")
    await expect(tab.page.locator("#welcome")).to_be_visible()
    await tab.goto(f"{river.url}/#..%2fadmin%2fkeys")
    await expect(tab.page.locator("#welcome")).to_be_visible()
    assert not [address for address in tab.requests if "admin" in address or "models?" in address.partition("#")[0]]


async def test_a_title_is_text(river: Server, open_tab: OpenTab) -> None:
    tab = await open_tab(river.url)
    title = f"</title><script>{OWN}</script>\u202egnp"
    made = river.post("/v1/conversations", {"title": title, "items": [{"role": "user", "content": title}]}).json()
    await tab.goto(f"{river.url}/#{made['id']}")
    await expect(tab.page.locator("h1")).to_have_text(title)
    assert await tab.page.title() == title
