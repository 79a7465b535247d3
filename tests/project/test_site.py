"""The documentation site: what its reference lists, and how it behaves in a real browser.

`make docs` builds site/. Where there is none, or no Chromium, the browser's tests are skipped;
JMP_REQUIRE_BROWSER=1 makes that an error.
"""

import functools
import http.server
import importlib
import re
import shutil
import threading

import pytest

import jmp
from testbed import ROOT
from tests.commands import skip_or_fail

REQUIRED = "JMP_REQUIRE_BROWSER"
DOCS, SITE = ROOT / "docs", ROOT / "site"
ADAPTERS = [f"jmp.adapters.{name}" for name in ("linen", "nnx", "equinox", "haiku")]
MODULES = ["jmp", "jmp.transforms", "jmp.diagnostics", *ADAPTERS]
# What a user's own primitives need (`autocast` and the warnings are in `jmp`), and what rules are.
HOOKS = {f"jmp.autocasting.{name}" for name in ("Category", "Rule", "all_rules", "register_rule")}
HOOKS |= {"jmp.rules"}

WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 800}


def public_names(name):
    return {f"{name}.{key}" for key in importlib.import_module(name).__all__}


def test_every_public_name_is_on_exactly_one_page_of_the_reference():
    pages = sorted((DOCS / "reference").glob("*.md"))
    listed = [n for page in pages for n in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]
    assert len(listed) == len(set(listed))
    assert set(listed) == HOOKS.union(*map(public_names, MODULES))


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        skip_or_fail("playwright is not installed: pip install -e '.[docs]'", REQUIRED)
    found = [path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))]
    if not found:
        skip_or_fail("there is no Chromium, as of `apt-get install chromium`", REQUIRED)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found[0], args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site():
    """The address of the built site, served from this machine."""
    index = SITE / "index.html"
    if not index.exists():
        skip_or_fail("there is no site: `make docs` builds it", REQUIRED)
    if any(path.stat().st_mtime > index.stat().st_mtime for path in DOCS.rglob("*.md")):
        skip_or_fail("the site is older than a page of docs/: `make docs` builds it", REQUIRED)
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


# What people type, by the page or the section that must come first. Of a public name it is the page
# that explains it, and comes before the reference.
WORDS = {
    "adapters#equinox": "eqx.filter_grad",
    "adapters#flax-nnx": "nnx, nnx.optimizer",
    "autocast#fused-attention": "flash attention, cudnn",
    "autocast#what-is-half-what-is-float32": "layernorm",
    "checkpoints": "checkpoint, orbax, pickle",
    "checks#find-what-made-a-nan": "nan, inf",
    "checks#find-what-underflows": "overflow, underflow, subnormal, range",
    "checks#the-run-metrics-and-check_skips": "skipped step, tensorboard, check_skips, metrics",
    "checks#the-exceptions-find_float32": "find_float32",
    "comparison": "comparison",
    "coming_from": "pytorch, torch.amp, torch.autocast, keras",
    "coming_from#apex": "apex, o1, o2, opt level, fp16_optimizer, fp16",
    "coming_from#deepminds-jmp-and-haiku": "hk.mixed_precision",
    "coming_from#flax-dynamicscale-and-dtype": "dynamicscale, flax dynamicscale",
    "coming_from#torchamp": "amp, gradscaler, GradScaler, unscale_, custom_fwd",
    "devices": "sharding, pmap",
    "devices#data-parallel-and-fsdp": "fsdp, ddp",
    "devices#train-on-a-tpu": "tpu",
    "float8": "fp8, float8",
    "generation#train-by-reinforcement-learning": "grpo",
    "howto#batchnorm-and-dropout-in-flax-linen": "batchnorm, batch norm, dropout",
    "memory#jaxcheckpoint": "gradient checkpointing, remat",
    "mistakes": "error message, typeerror",
    "recipes#accumulation": "multisteps, gradient accumulation",
    "recipes#clipping": "clip_grad_norm_, gradient clipping",
    "recipes#parameter-groups": "optax.masked, multi_transform, freeze, weight decay",
    "reference/transforms": "loss scale",
    "reference/transforms#jmp.transforms.with_master_params": "master weights",
    "start": "install, pip install, quickstart",
    "start#which-half-type": "bf16, bfloat16, float16, v100, t4, a100",
    "troubleshooting": "faq, troubleshooting, recompile",
    "troubleshooting#out-of-memory-oom-or-no-memory-is-saved": "out of memory, oom",
}
ASK = """query => {
    document.querySelector(".md-search-result__list").innerHTML = ""
    document.querySelector(".md-search-result__meta").textContent = ""
    const input = document.querySelector(".md-search__input")
    input.value = query
    input.dispatchEvent(new Event("keyup"))
}"""


ANSWER = '.md-search-result__item, .md-search-result__meta:has-text("No matching")'


def first_hits(page, root, queries):
    """Types each query; returns the first page found, and its first section if there is one."""
    page.keyboard.press("/")
    page.wait_for_selector('.md-search-result__meta:has-text("Type to start")', state="attached")
    hits = {}
    for query in queries:
        page.evaluate(ASK, query)
        page.wait_for_selector(ANSWER, state="attached")
        item = page.query_selector(".md-search-result__item")
        if item is None:
            hits[query] = [""]
            continue
        links = item.query_selector_all(":scope > a")  # those that are folded are deeper
        # A link names the words to mark: page.html?h=word#name.
        links = [
            re.sub(r"[.]html([?][^#]*)?", "", link.evaluate("it => it.href")) for link in links
        ]
        hits[query] = [link.removeprefix(root) for link in links[:2]]
    return hits


def public_names_found():
    """Returns the addresses of public names by their ends: of jmp.x and jmp.m.x only the first."""
    found = {}
    for page in (DOCS / "reference").glob("*.md"):
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M):
            addresses = found.setdefault(name.split(".")[-1].lower(), {})
            addresses.setdefault(name.count("."), []).append(f"reference/{page.stem}#{name}")
    return {end: addresses[min(addresses)] for end, addresses in found.items()}


@pytest.mark.full
def test_the_search_finds_names_and_words(opened, site):
    typed = {query: [place] for place, words in WORDS.items() for query in words.split(", ")}
    expected = public_names_found() | typed
    hits = first_hits(opened("index.html"), site, expected)
    wrong = {
        query: hits[query]
        for query, addresses in expected.items()
        if hits[query][-1 if "#" in addresses[0] else 0] not in addresses
    }
    assert not wrong, "see search_words in mkdocs.yml"


@pytest.mark.full
def test_the_search_works_from_a_disk(browser, site):
    page = browser.new_page(viewport=WIDE)
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    root = f"{SITE.as_uri()}/"
    page.goto(f"{root}reference/index.html")
    assert first_hits(page, root, ["gradscaler"]) == {
        "gradscaler": ["coming_from", "coming_from#torchamp"]
    }
    assert errors == []
    page.close()


# The theme moves what belongs elsewhere when a window's width changes; this takes no time.
AT_ONCE = """document.addEventListener("DOMContentLoaded", () => document.head.append(
    Object.assign(document.createElement("style"), {textContent: "* {transition: none !important}"})
))"""

# Where a wide page scrolls sideways: itself, or a program.
SCROLLS = """() => ({
    "scrolls in a window of 1280 pixels": [
        ...document.querySelectorAll("article pre, article pre code"), document.documentElement,
    ].filter(element => element.scrollWidth > element.clientWidth)
        .map(element => element.innerText.slice(0, 60)),
})"""

NO_INDEX = """{"docs": [], "config": {
    "lang": ["en"], "separator": " ", "pipeline": [],
    "fields": {"title": {}, "text": {}, "tags": {}}
}}"""

# What a reader on a phone, or of a page that is read aloud, would stumble over. `mkdocs --strict`
# finds links and anchors that lead nowhere.
FAULTS = """() => ({
    "has a picture that is not shown": [...document.images]
        .filter(image => !image.complete || !image.naturalWidth).map(image => image.src),
    "has a picture that cannot be read aloud": [...document.images]
        .filter(image => !/\\w+ \\w+ \\w+/.test(image.alt)).map(image => image.src),
    "scrolls sideways": [document.documentElement].filter(page => page.scrollWidth > innerWidth)
        .map(page => page.scrollWidth),
    "has a row of words that scrolls": [
        ...document.querySelectorAll("article .md-typeset__scrollwrap")]
        .filter(wrap => wrap.scrollWidth > wrap.clientWidth)
        .map(wrap => [...wrap.querySelectorAll("td + td")].map(cell => cell.innerText))
        .map(cells => cells.filter(text => text))
        .filter(cells => cells.join("").replace(/[^a-z]/gi, "").length >= 7 * cells.length),
    "shows Markdown that was not understood": [...document.querySelectorAll("article p")]
        .map(p => p.textContent)
        .filter(text => /^[|`]{1,3} |^```|\\n\\s*([-*]|[0-9]+[.]) /.test(text)),
    "shows marks of Markdown or of a docstring": [
        ...document.querySelectorAll("article :is(p, li, td, th)")].map(element => {
            const copy = element.cloneNode(true);
            copy.querySelectorAll("code, pre").forEach(code => code.remove());
            return copy.textContent;
        }).filter(text => /`|<!--|-->|\\]\\(|\\]\\[[\\w.]+\\]|::\\s*$|\\\\[*_[|]/.test(text)),
    "has bold letters inside a word: write 2^16": [
        ...document.querySelectorAll("article :is(strong, em)")]
        .filter(bold => /[\\w."]$/.test(bold.previousSibling?.textContent ?? ""))
        .map(bold => bold.innerText),
    "takes one of several names for a type": [...document.querySelectorAll("article li > b")]
        .map(name => name.innerText.trim()).filter(name => name.endsWith(",")),
    "has a table with a column without a title": [
        ...document.querySelectorAll("article tr:first-child")]
        .filter(row => row.querySelector("th")?.innerText && row.querySelector("th:empty"))
        .map(row => row.innerText),
    "has a program without a button that copies it": [
        ...document.querySelectorAll("article pre:not(:has(button))")].map(it => it.innerText),
    "leaves out a level of headings, or has not one first": [
        ...document.querySelectorAll(":is(h1, h2, h3, h4, h5, h6)")]
        .map(heading => Number(heading.tagName[1]))
        .filter((level, place, all) => place ? level === 1 || level > all[place - 1] + 1
                                             : level !== 1),
})"""


@pytest.mark.full
def test_every_page_has_its_pictures_and_buttons_and_fits_a_phone(opened, site):
    page = opened("index.html", PHONE)
    page.add_init_script(AT_ONCE)
    # Each page would make the index of the search anew.
    page.route("**/search_index.json", lambda route: route.fulfill(body=NO_INDEX))
    found = {}
    for path in site_pages():
        page.goto(site + path)
        page.eval_on_selector_all("details", "all => all.forEach(it => (it.open = true))")
        page.eval_on_selector_all(
            "img[loading=lazy]", "all => Promise.all(all.map(image => image.decode()))"
        )
        faults = page.evaluate(FAULTS)
        page.set_viewport_size(WIDE)
        faults |= page.evaluate(SCROLLS)
        page.set_viewport_size(PHONE)
        found |= {f"{path} {fault}": places for fault, places in faults.items() if places}
        assert f" - jmp {jmp.__version__}" in page.title()
    assert not found


@pytest.mark.full
def test_the_copy_button_copies_what_is_typed_and_no_prompt(opened):
    page = opened("reference/index.html")
    example = page.locator(".highlight", has_text="str(policy)").first
    example.hover()
    example.locator("button").first.click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert 'policy = Policy("float32"' in copied
    assert ">>>" not in copied and "p=full" not in copied
