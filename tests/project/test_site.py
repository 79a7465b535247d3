"""The documentation site: what its reference lists, and how it behaves in a real browser.

`make docs` builds site/. Where there is none, or no Chromium, the browser's tests are skipped;
JMP_REQUIRE_BROWSER=1 makes that an error.
"""

import functools
import http.server
import importlib
import inspect
import os
import re
import shutil
import threading

import pytest

from testbed import ROOT

DOCS, SITE = ROOT / "docs", ROOT / "site"
ADAPTERS = [f"jmp.adapters.{name}" for name in ("linen", "nnx", "equinox", "haiku")]
MODULES = ["jmp", "jmp.transforms", "jmp.diagnostics", *ADAPTERS]
# What a user's own primitives need (`autocast` and the warnings are in `jmp`), and what rules are.
HOOKS = {f"jmp.autocasting.{name}" for name in ("Category", "Rule", "all_rules", "register_rule")}
HOOKS |= {"jmp.rules"}
INTERNAL = {"jmp.adapters.equinox.with_marked_modules"}  # jmp.diagnostics calls it

WIDE, PHONE = {"width": 1400, "height": 900}, {"width": 390, "height": 800}


def public_names(name):
    module = importlib.import_module(name)
    own = [
        key
        for key, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == name
        if not key.startswith("_")
    ]
    return {f"{name}.{key}" for key in getattr(module, "__all__", own)} - INTERNAL


def test_every_public_name_is_on_exactly_one_page_of_the_reference():
    pages = sorted((DOCS / "reference").glob("*.md"))
    listed = [n for page in pages for n in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]
    assert len(listed) == len(set(listed))
    assert set(listed) == HOOKS.union(*map(public_names, MODULES))


DOCSTRING = """A rule is one of
  - a glob, such as "head*" or "*/Dense_0",
  - a class of two
    lines.
The first that matches wins::

    1 of 2

Attributes, beyond those of `Policy`:
  zeros, nans: 2**16 of args[0].

Returns: a float.
Raises:
  TypeError: it is none."""
ON_THE_SITE = """A rule is one of

  - a glob, such as "head\\*" or "\\*/Dense_0",
  - a class of two
    lines.

The first that matches wins:

    1 of 2

Attributes: Attributes, beyond those of Policy:
  zeros,\N{NO-BREAK SPACE}nans (): 2\\*\\*16 of args\\[0].


**Returns:** a float.

Raises:
  TypeError: it is none."""


def test_a_docstring_is_shown_as_it_is_read_in_a_terminal():
    try:
        from docs.site_docstrings import for_the_site
    except ImportError:
        skip("griffe is not installed: pip install -e '.[docs]'")
    assert for_the_site(DOCSTRING, {"Policy": "jmp.Policy"}) == ON_THE_SITE
    seen = "See [`Policy`][jmp.Policy] and [Ranges](../ranges.md)."
    assert for_the_site("See `Policy` and docs/ranges.md.", {"Policy": "jmp.Policy"}) == seen


def skip(reason):
    if os.environ.get("JMP_REQUIRE_BROWSER"):
        pytest.fail(f"JMP_REQUIRE_BROWSER is set, but {reason}")
    pytest.skip(reason)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        skip("playwright is not installed: pip install -e '.[docs]'")
    found = [path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))]
    if not found:
        skip("there is no Chromium, such as that of `apt-get install chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found[0], args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site():
    """The address of the built site, served from this machine."""
    index = SITE / "index.html"
    if not index.exists():
        skip("there is no site: `make docs` builds it")
    if any(path.stat().st_mtime > index.stat().st_mtime for path in DOCS.rglob("*.md")):
        skip("the site is older than a page of docs/: `make docs` builds it")
    handler = functools.partial(Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def opened(browser, site):
    """Opens pages of the site; fails if one asked for anything elsewhere, or said an error."""
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    context.set_default_timeout(10_000)
    page = context.new_page()
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("response", lambda answer: errors.append(answer.url) if answer.status >= 400 else None)

    def open_page(path, viewport=WIDE):
        page.set_viewport_size(viewport)
        page.goto(site + path)
        return page

    yield open_page
    context.close()
    assert [url for url in asked if not url.startswith((site, "data:", "blob:"))] == []
    assert errors == []


def site_pages():
    paths = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
    return [path for path in paths if path != "404.html"]  # its links count from the server's root


FOUND = {
    "with_master_params": "reference/transforms.html#jmp.transforms.with_master_params",
    "find_nonfinite": "reference/diagnostics.html#jmp.diagnostics.find_nonfinite",
    "dynamic scale": "reference/loss_scaling.html#jmp.DynamicLossScale",
    "underflow": "ranges.html",
    "oom": "troubleshooting.html#out-of-memory-oom-or-no-memory-is-saved",
}


def test_the_search_finds_names_and_words(opened, site):
    page = opened("index.html")
    page.keyboard.press("/")
    page.wait_for_selector('.md-search-result__meta:has-text("Type to start")', state="attached")
    for query, address in FOUND.items():
        page.keyboard.press("Control+a")
        page.keyboard.type(query)
        # Links of results name the words to mark: page.html?h=word#name.
        target, _, name = address.partition("#")
        link = f'.md-search-result__link[href^="{site}{target}"]'
        link += f'[href$="#{name}"]' * bool(name)
        page.wait_for_selector(link, state="attached")


NO_INDEX = """{"docs": [], "config": {
    "lang": ["en"], "separator": " ", "pipeline": [],
    "fields": {"title": {}, "text": {}, "tags": {}}
}}"""

# Every link and picture of a page, and what can be linked to in it.
CONTENTS = """() => ({
    links: [...document.links].map(link => link.href),
    anchors: [...document.querySelectorAll("[id], a[name]")].map(e => e.id || e.name),
    broken: [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src),
    too_wide: document.documentElement.scrollWidth > innerWidth,
    raw: [...document.querySelectorAll("article p")].map(p => p.textContent).filter(
        text => /^[|`]{1,3} |^```|\\n\\s*([-*]|[0-9]+[.]) /.test(text)),
    bold_inside_a_word: [...document.querySelectorAll("article :is(strong, em)")].filter(
        bold => /[\\w."]$/.test(bold.previousSibling?.textContent ?? "")).map(
        bold => bold.innerText),
    not_read: [...document.querySelectorAll("article :is(p, li, td, th)")].map(element => {
        const copy = element.cloneNode(true);
        copy.querySelectorAll("code, pre").forEach(code => code.remove());
        return copy.textContent;
    }).filter(text => /`|<!--|-->|\\]\\(|\\]\\[[\\w.]+\\]|::\\s*$|\\\\[*_[|]/.test(text)),
    levels: [...document.querySelectorAll(":is(h1, h2, h3, h4, h5, h6)")].map(
        heading => Number(heading.tagName[1])),
    no_alternative: [...document.images].filter(image => !/\\w+ \\w+ \\w+/.test(image.alt)).map(
        image => image.src),
    vague: [...document.querySelectorAll("article a[href]")].map(
        link => link.ariaLabel || link.innerText.trim() || link.querySelector("img")?.alt || ""
        ).filter(
        text => /^(|¶|here|this|this page|link|see|these lines|[\\w/]+[.]md)$/i.test(text)),
    no_title: [...document.querySelectorAll("article tr:first-child")].filter(
        row => row.querySelector("th")?.innerText && row.querySelector("th:empty")).map(
        row => row.innerText),
    torn: [...document.querySelectorAll("article li > b")].map(name => name.innerText.trim())
        .filter(name => name.endsWith(",")),
    too_wide_to_read: [...document.querySelectorAll("article .md-typeset__scrollwrap")]
        .filter(wrap => wrap.scrollWidth > wrap.clientWidth)
        .map(wrap => [...wrap.querySelectorAll("td + td")].map(cell => cell.innerText))
        .map(cells => cells.filter(text => text))
        .filter(cells => cells.join("").replace(/[^a-z]/gi, "").length >= 7 * cells.length),
    no_button: [...document.querySelectorAll("article pre:not(:has(button))")].map(
        program => program.innerText),
})"""


def test_every_page_has_its_pictures_links_and_buttons_and_fits_a_phone(opened, site):
    contents = {}
    page = opened("index.html", PHONE)
    # Each page would make the index of the search anew.
    page.route("**/search_index.json", lambda route: route.fulfill(body=NO_INDEX))
    for path in site_pages():
        page.goto(site + path)
        page.eval_on_selector_all(
            "img[loading=lazy]", "all => Promise.all(all.map(image => image.decode()))"
        )
        contents[path] = page.evaluate(CONTENTS)
    found = set()
    for path, content in contents.items():
        assert content["broken"] == [], path
        assert not content["too_wide"], f"{path} scrolls sideways on a phone"
        assert content["raw"] == [], f"{path} shows Markdown that its reader did not understand"
        assert content["bold_inside_a_word"] == [], f"{path}: write 2^16 or `2**16`"
        assert content["not_read"] == [], f"{path} shows marks of Markdown or of a docstring"
        assert content["torn"] == [], f"{path} takes one of several names for a type"
        assert content["too_wide_to_read"] == [], f"{path}: a row of words scrolls on a phone"
        assert content["no_title"] == [], f"{path} has a table with a column without a title"
        assert content["no_alternative"] == [], f"{path} has a picture that cannot be read aloud"
        assert content["vague"] == [], f"{path}: say in the link's text where it goes"
        first, *levels = content["levels"]
        assert first == 1 and 1 not in levels, f"{path} needs one first heading"
        steps = zip(content["levels"], levels, strict=False)
        assert all(below <= above + 1 for above, below in steps), f"{path} leaves out a level"
        assert content["no_button"] == [], path
        for link in content["links"]:
            if not link.startswith(site):
                continue
            target, _, anchor = link.removeprefix(site).partition("#")
            target = target or "index.html"
            assert (SITE / target).exists(), f"{path} links to {target}"
            if anchor and not anchor.startswith("__"):  # those are the theme's own
                assert anchor in contents[target]["anchors"], f"{path} links to {target}#{anchor}"
            found.add(target)
    assert set(contents) <= found, "no page links to some"


def test_the_copy_button_copies_what_is_typed_and_no_prompt(opened):
    page = opened("reference/policies.html")
    example = page.locator(".highlight", has_text="str(policy)").first
    example.hover()
    example.locator("button").first.click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert 'policy = Policy("float32"' in copied
    assert ">>>" not in copied and "p=full" not in copied
