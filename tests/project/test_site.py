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

import jmp
from testbed import ROOT

DOCS, SITE = ROOT / "docs", ROOT / "site"
ADAPTERS = [f"jmp.adapters.{name}" for name in ("linen", "nnx", "equinox", "haiku")]
MODULES = ["jmp", "jmp.transforms", "jmp.diagnostics", *ADAPTERS]
# What a user's own primitives need (`autocast` and the warnings are in `jmp`), and what rules are.
HOOKS = {f"jmp.autocasting.{name}" for name in ("Category", "Rule", "all_rules", "register_rule")}
HOOKS |= {"jmp.rules"}

WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 800}


def public_names(name):
    module = importlib.import_module(name)
    own = [
        key
        for key, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == name
        if not key.startswith("_")
    ]
    return {f"{name}.{key}" for key in getattr(module, "__all__", own)}


def test_every_public_name_is_on_exactly_one_page_of_the_reference():
    pages = sorted((DOCS / "reference").glob("*.md"))
    listed = [n for page in pages for n in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]
    assert len(listed) == len(set(listed))
    assert set(listed) == HOOKS.union(*map(public_names, MODULES))


PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_program_on_a_page_fits_its_column(page):
    """What it prints may be wider: the site sets it smaller, or wraps it."""
    blocks = re.findall(r"^ *```(\w+)\n(.*?)^ *```$", page.read_text(), re.M | re.S)
    for kind, block in blocks:
        lines = block.splitlines()
        if kind == "diff":  # its first column is not of the program
            lines = [line[1:] for line in lines]
        assert kind == "text" or max(map(len, lines)) <= 88


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
    seen = "See [`Policy`][jmp.Policy] and [Check a run, and find what is wrong](../checks.md)."
    assert for_the_site("See `Policy` and docs/checks.md.", {"Policy": "jmp.Policy"}) == seen


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


# What people type, by the page or the section that must come first. Of a public name it is the page
# that explains it, and comes before the reference.
WORDS = {
    "adapters": "equinox, haiku",
    "adapters#equinox": "eqx.filter_grad",
    "adapters#flax-linen": "linen",
    "adapters#flax-nnx": "nnx, nnx.optimizer",
    "autocast#float32-products": "tf32",
    "autocast#fused-attention": "flash attention, cudnn",
    "autocast#what-costs-speed-or-accuracy": "slow",
    "autocast#what-is-half-what-is-float32": "layernorm",
    "autocast#what-stays-as-written": "custom_vjp",
    "changelog": "changelog",
    "cheat_sheet": "cheat sheet",
    "checkpoints": "checkpoint, orbax, pickle",
    "checks#find-what-made-a-nan": "nan, inf",
    "checks#find-what-underflows": "overflow, underflow, subnormal, range",
    "checks#the-exceptions-find_float32": "find_float32",
    "checks#the-run-metrics-and-check_skips": (
        "skip, skipped step, tensorboard, check_skips, metrics"
    ),
    "coming_from": "pytorch, torch.amp, torch.autocast, keras",
    "coming_from#apex": "apex, o1, o2, opt level, fp16_optimizer, fp16",
    "coming_from#deepminds-jmp-and-haiku": "hk.mixed_precision",
    "coming_from#deepspeed": "deepspeed",
    "coming_from#dtype-flags-as-in-maxtext": "maxtext",
    "coming_from#fastai": "fastai",
    "coming_from#flax-dynamicscale-and-dtype": "dynamicscale, flax dynamicscale",
    "coming_from#keras": "lossscaleoptimizer",
    "coming_from#megatron-lm": "megatron",
    "coming_from#mmcv-and-mmengine": "mmcv",
    "coming_from#mpx": "filter_value_and_grad, mpx",
    "coming_from#torchamp": "amp, gradscaler, GradScaler, unscale_, custom_fwd",
    "comparison": "comparison",
    "devices": "sharding, pmap",
    "devices#a-pipeline": "pipeline",
    "devices#data-parallel-and-fsdp": "fsdp, ddp",
    "devices#several-processes": "multi host",
    "devices#shard_map": "shard_map",
    "devices#tensor-parallel-linen-and-nnx": "tensor parallel",
    "devices#train-on-a-tpu": "tpu",
    "examples": "examples, diffusion, seq2seq, actor critic",
    "explanation": "tensor cores",
    "explanation#glossary": "glossary",
    "float8": "fp8, float8",
    "float8#other-libraries": "qwix, transformer engine",
    "generation": "kv cache",
    "generation#train-by-reinforcement-learning": "grpo",
    "howto#a-float32-run-resumed-in-half": "resume",
    "howto#a-step-of-your-own-in-nnx": "gan",
    "howto#batchnorm-and-dropout-in-flax-linen": "batchnorm, batch norm, dropout",
    "howto#evaluation": "evaluation, inference",
    "howto#fine-tune-a-checkpoint-that-was-saved-in-half": "finetune",
    "howto#logits-in-float32-by-rules": "logits",
    "memory#jaxcheckpoint": "gradient checkpointing, remat",
    "memory#moments-in-one-or-two-bytes": "8-bit adam",
    "memory#stochastic-rounding-what-it-costs": "stochastic rounding",
    "mistakes": "error message, typeerror",
    "performance": "benchmark",
    "recipes#a-half-backbone-with-float32-parameters-beside-it": "lora",
    "recipes#accumulation": "multisteps, gradient accumulation",
    "recipes#an-average-of-the-parameters": "ema",
    "recipes#clipping": "clip_grad_norm_, gradient clipping",
    "recipes#parameter-groups": (
        "optax.masked, multi_transform, freeze, weight decay, learning rate"
    ),
    "recipes#several-losses-a-scale-each": "two losses",
    "reference/adapters#jmp.adapters.linen.TrainState": "trainstate",
    "reference/autocast#jmp.autocasting.register_rule": "custom op",
    "reference/diagnostics#jmp.diagnostics.precision_report": "precision report",
    "reference/index#jmp.half_dtype": "half",
    "reference/transforms": "loss scale",
    "reference/transforms#jmp.DynamicLossScale": "dynamic scale",
    "reference/transforms#jmp.scaled_value_and_grad": "value_and_grad",
    "reference/transforms#jmp.transforms.with_kahan_summation": "kahan",
    "reference/transforms#jmp.transforms.with_loss_scale": "apply_if_finite",
    "reference/transforms#jmp.transforms.with_master_params": "master weights",
    "releases": "release",
    "start": "install, pip install, quickstart",
    "start#which-half-type": "bf16, bfloat16, float16, v100, t4, a100",
    "troubleshooting": "faq, troubleshooting, recompile",
    "troubleshooting#out-of-memory-oom-or-no-memory-is-saved": "out of memory, oom",
    "tutorial": "tutorial",
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
SCROLLS = """() => [...document.querySelectorAll("article pre, article pre code")]
    .concat(document.documentElement)
    .filter(element => element.scrollWidth > element.clientWidth)
    .map(element => element.innerText.slice(0, 60))"""

# Names of pages: links to sections, and those that begin in lower case, are words of a sentence.
NAMES = """() => ({
    heading: document.querySelector("h1").firstChild.textContent,
    title: document.title,
    names: [...document.querySelectorAll("article a[href]:not(:has(code))")]
        .filter(link => /^[A-Z]/.test(link.textContent) && !link.hash)
        .map(link => [link.href, link.textContent.replace(/\\s+/g, " ")]),
})"""

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


@pytest.mark.full
def test_every_page_has_its_pictures_links_and_buttons_and_fits_a_phone(opened, site):
    contents = {}
    page = opened("index.html", PHONE)
    page.add_init_script(AT_ONCE)
    # Each page would make the index of the search anew.
    page.route("**/search_index.json", lambda route: route.fulfill(body=NO_INDEX))
    for path in site_pages():
        page.goto(site + path)
        page.eval_on_selector_all("details", "all => all.forEach(it => (it.open = true))")
        page.eval_on_selector_all(
            "img[loading=lazy]", "all => Promise.all(all.map(image => image.decode()))"
        )
        contents[path] = page.evaluate(CONTENTS) | page.evaluate(NAMES)
        page.set_viewport_size(WIDE)
        contents[path]["scrolls"] = page.evaluate(SCROLLS)
        page.set_viewport_size(PHONE)
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
        assert content["scrolls"] == [], f"{path} scrolls sideways in a window of 1280 pixels"
        assert content["title"] == f"{content['heading']} - jmp {jmp.__version__}"
        for link, name in content["names"]:
            if target := link.startswith(site) and contents.get(link.removeprefix(site)):
                assert name == target["heading"], f"{path} has another name for a page"
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
    assert len({content["heading"] for content in contents.values()}) == len(contents)
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert not re.search(r"^ *- .+: .+\.md", navigation, re.M), "a page's name is its first heading"


@pytest.mark.full
def test_the_copy_button_copies_what_is_typed_and_no_prompt(opened):
    page = opened("reference/index.html")
    example = page.locator(".highlight", has_text="str(policy)").first
    example.hover()
    example.locator("button").first.click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert 'policy = Policy("float32"' in copied
    assert ">>>" not in copied and "p=full" not in copied
