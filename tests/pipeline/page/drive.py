"""Drives Chromium over the pages of a project, in a process of its own: selenium need not be installed beside the tests.

It reads JSON objects, one a line: the page's address, what to do there, a folder for screenshots ("" for none). It answers
each, in a new window of one browser, with a JSON object: what was seen; and before, with "now" if it waits for a line: then
a run is begun in another process.
"""

import json
import sys
import time
from pathlib import Path
from urllib.parse import urljoin

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.expected_conditions import alert_is_present

STUDIO = {"projects": "/", "new-project": "/new"}
SECONDS = 600  # until a page counts as hanging, on a busy machine too


def browser(chromium, driver):
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-background-networking"):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


def wait(window, script):
    """Until a script, or a function, returns something true, which is returned."""
    began = time.monotonic()
    while not (found := script() if callable(script) else window.execute_script(f"return {script}")):
        assert time.monotonic() - began < SECONDS, script
        time.sleep(0.3)
    return found


def resize(window, width, height):
    """A narrow one is that of a phone, whose scroll bars take no room."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 800}
    window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def paint(window, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


# Violations of axe-core's rules: the rule, and the first element that breaks it.
AXE = """
const [rules, done] = arguments, first = (each) => [each.id, each.nodes[0].html], options = {resultTypes: ["violations"]};
if (rules.length) options.runOnly = rules;
axe.run(document, options).then((found) => done(found.violations.map(first)), (error) => done([String(error)]))
"""


def violations(window, axe, schemes=("light", "dark"), rules=()):
    """Of a page as it is now by `rules` or all, and of its colours in further schemes. `axe`: a file, or "" for none."""
    if not axe:
        return []
    if not window.execute_script("return window.axe !== undefined"):
        window.execute_script(Path(axe).read_text())
    found = []
    for number, scheme in enumerate(schemes):
        paint(window, scheme)
        found += window.execute_async_script(AXE, ["color-contrast"] if number else rules)
    return found


def overflow(window):
    return window.execute_script("const root = document.documentElement; return root.scrollWidth - root.clientWidth")


def look(window, address, name, width, folder, axe, load=True):
    """A narrow one is dark. `load`: else the window only gets another width."""
    resize(window, width, 1000)
    scheme = "dark" if width < 800 else "light"
    paint(window, scheme)
    if load:
        window.get(urljoin(f"{address}/", STUDIO.get(name, name.removeprefix("overview"))))
    wait(window, "document.body.dataset.shown || document.body.dataset.whole !== undefined")
    wait(window, "[...document.images].filter(i => !i.hidden && i.getBoundingClientRect().top < 900).every(i => i.complete)")
    charts = "[...document.querySelectorAll('[data-chart]')]"
    wait(window, f"{charts}.every(c => c.querySelector('svg') || c.textContent)")
    wait(window, f"{charts}.every(c => (c.querySelector('svg')?.clientWidth ?? 0) <= {width})")  # drawn again after a resize
    height = window.execute_script("return document.documentElement.scrollHeight")
    resize(window, width, min(height, 6000))
    if folder:
        window.save_screenshot(f"{folder}/{name.split('?')[0]}-{width}.png")
    asked = "performance.getEntriesByType('resource').map((entry) => entry.name.split('?')[0].slice(0, 120))"
    return {
        "page": name,
        "width": width,
        "overflow": overflow(window),
        "shown_ms": window.execute_script("return performance.getEntriesByName('shown')[0]?.startTime"),
        "console": [entry["message"] for entry in window.get_log("browser")],
        "requests": window.execute_script(f"return {asked}"),
        # Of a page that only got another width, those that a width or a scheme decides.
        "violations": violations(window, axe, (scheme,), [] if load else ["color-contrast", "scrollable-region-focusable"]),
        "nameless": window.execute_script("return [...document.images].filter(i => !i.hasAttribute('alt')).length"),
        "errors": window.execute_script("return [...document.querySelectorAll('.error')].map(e => e.textContent)"),
    }


def write(window, text):
    window.execute_script(
        "const a = document.querySelector('textarea[data-key]'); a.value = arguments[0];"
        "a.dispatchEvent(new Event('input', {bubbles: true})); document.querySelector('[data-save]').click()",
        text,
    )
    return wait(window, "document.querySelector('[data-said]').textContent")


FIRST = "document.querySelector('textarea[data-key]').value"


def edit(window, address):
    resize(window, 390, 844)
    tabs = [window.current_window_handle]
    window.get(f"{address}/captions")
    wait(window, "document.querySelector('textarea[data-key]') !== null")
    original = window.execute_script(f"return {FIRST}")
    window.switch_to.new_window("tab")
    tabs.append(window.current_window_handle)
    window.get(f"{address}/captions")
    wait(window, "document.querySelector('textarea[data-key]') !== null")
    window.execute_script("document.querySelector('textarea[data-key]').closest('li').classList.add('changed')")  # as if typed in
    window.switch_to.window(tabs[0])
    seen = {"said": write(window, "edited <b>here</b>"), "text": window.execute_script(f"return {FIRST}")}
    seen["in_sight"] = window.execute_script(
        "scrollTo(0, document.body.scrollHeight); const box = document.querySelector('[data-said]').parentElement"
        ".getBoundingClientRect(); return scrollY > 500 && box.top >= 0 && box.bottom <= innerHeight"
    )
    window.switch_to.window(tabs[1])
    seen |= {"second": write(window, "edited there"), "mine": window.execute_script(f"return {FIRST}")}
    seen["theirs"] = window.execute_script("return document.querySelector('.theirs q').textContent")
    window.execute_script("document.querySelector('.theirs button').click()")
    wait(window, "document.querySelector('[data-said]').textContent === '1 saved'")
    window.execute_script("document.querySelector('[data-undo]').click()")
    wait(window, "document.querySelector('[data-said]').textContent === 'undone'")
    seen["undone"] = window.execute_script(f"return {FIRST}")
    window.close()
    window.switch_to.window(tabs[0])
    wait(window, f"{FIRST} === 'edited <b>here</b>'")
    window.execute_script("document.querySelector('[data-undo]').click()")
    wait(window, "document.querySelector('[data-said]').textContent === 'undone'")
    return seen | {"back": window.execute_script(f"return {FIRST}") == original}


LAST_X = "Math.max(...document.querySelector('[data-chart]').data.map((curve) => curve.x.at(-1)))"


def follow_run(window):
    """On the page of training, while a run goes on; the focus was on the table of runs."""
    window.execute_script("window.sameDocument = true; document.querySelector('.wide').focus()")
    before = window.execute_script(f"return {LAST_X}")
    print('"now"', flush=True)
    sys.stdin.readline()
    wait(window, f"{LAST_X} > {before}")
    return {
        "before": before,
        "after": window.execute_script(f"return {LAST_X}"),
        "same": window.execute_script("return sameDocument"),
        "focus": window.execute_script("return document.activeElement.getAttribute('aria-label')"),
    }


SAID = "document.querySelector('[data-said]').textContent"


# A browser without a screen shows no notification: this one keeps what it is told.
NOTIFIED = """
window.notified = [];
window.Notification = class { static permission = "granted"; constructor(text) { window.notified.push(text); } };
"""


# Whether the wanted element has the focus. Until atWanted() is called, Tab does not leave it: many are pressed at once.
AT = """
const there = () => document.activeElement.matches(arguments[0]);
window.atWanted?.();
const stay = (event) => { if (event.key === "Tab" && there()) { event.preventDefault(); event.stopImmediatePropagation(); } };
window.addEventListener("keydown", stay, true);
window.atWanted = () => window.removeEventListener("keydown", stay, true);
return there();
"""


def press(window, wanted, *keys):
    """Press Tab until the element with that selector has the focus, then the keys."""
    for _ in range(30):
        if window.execute_script(AT, wanted):
            break
        ActionChains(window).send_keys(Keys.TAB * 10).perform()
    else:
        raise AssertionError(f"Tab does not lead to {wanted}")
    window.execute_script("window.atWanted()")
    ActionChains(window).send_keys(*keys).perform()


def control(window, key):
    ActionChains(window).key_down(Keys.CONTROL).send_keys(key).key_up(Keys.CONTROL).perform()


def by_keyboard(window, name):
    """What the page of that name, which is there, answers to keys."""
    if name == "samples":
        press(window, "img.result", Keys.ENTER)
        return wait(window, "document.querySelector('dialog[open] img')?.alt")
    press(window, "#sql", "select count(*) as files from images")
    control(window, Keys.ENTER)
    return wait(window, "document.querySelector('#ask td')?.textContent.trim()")


# From an empty folder to an adapter, 390 pixels wide and by the keyboard alone


def fill(window, wanted, text, *keys):
    """Type over what is in a field, or choose from a list by its first letters."""
    press(window, wanted)
    control(window, "a")
    ActionChains(window).send_keys(text, *keys).perform()


def follow(window, wanted, path):
    """Follow a link to an address that ends so, and wait until the page is whole."""
    press(window, wanted, Keys.ENTER)
    wait(window, f"location.pathname.endsWith('{path}') && document.readyState === 'complete'")
    wait(window, "document.body.dataset.shown || document.body.dataset.whole !== undefined")


def to(window, page):
    """The project's page of that name, "" for Home."""
    follow(window, f"nav a[href='{page or './'}']", page or "/my%20cats/")


def do(window, wanted, said, asked=""):
    """Press a button; `asked`: words of the question that it asks first."""
    wait(window, f'document.querySelector("{wanted}")')
    press(window, wanted, Keys.ENTER)
    if asked:
        question = wait(window, lambda: alert_is_present()(window))
        assert asked in question.text, question.text
        question.accept()
    wait(window, f"[...document.querySelectorAll('[data-said]')].some((place) => place.textContent.includes('{said}'))")


def change(window, **values):
    """Settings, in the order in which they stand there."""
    to(window, "settings")
    for key, text in values.items():
        fill(window, f"[name='{key.replace('__', '.')}']", text)
    press(window, "button[value=save]", Keys.ENTER)
    return wait(window, "document.querySelector('#settings [role=status], #settings .error')?.textContent")


STEP = "Number(document.querySelector('[data-progress]')?.textContent.match(/train: (\\d+) of/)?.[1] || 0)"


def state(job):
    rows = "[...document.querySelectorAll('#queue tbody tr')]"
    return f"{rows}.find((row) => row.cells[0].textContent === '{job}')?.cells[2].textContent"


def ends(window, job, wanted):
    wait(window, f"!/waiting|running/.test({state(job)} || 'waiting')")
    found = window.execute_script(f"return {state(job)}")
    assert found == wanted, f"job {job}: {found}, {window.execute_script('return document.body.innerText')}"


class Looks(dict):
    """What axe and the window's width say of pages in a state that only a journey reaches."""

    def __init__(self, window, axe, folder):
        super().__init__()
        self.window, self.axe, self.folder = window, axe, folder

    def at(self, place):
        self[place] = [overflow(self.window), violations(self.window, self.axe)]


def turn(window):
    to(window, "images")
    wait(window, "document.querySelector('.cards a')")
    follow(window, ".cards li:not(.bad) a", "/one")
    shown = "document.body.dataset.shown && new URLSearchParams(location.search).get('key')"
    names = [wait(window, shown)]
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_LEFT):
        ActionChains(window).send_keys(key).perform()
        wait(window, f"({shown} || {json.dumps(names[-1])}) !== {json.dumps(names[-1])}")
        names.append(wait(window, shown))
    return names


def begin(window, address, looks, files, more):
    """Make a project of `files` and, of the same names, `more`; train it, stop, go on, and add a second run behind the first."""
    chooser = "#pictures input:not([webkitdirectory])"
    window.get(address)
    wait(window, "document.body.dataset.shown")
    follow(window, "#projects a", "/new")
    for each in (files, more):
        press(window, chooser)  # Enter would open a window of the system, which no driver reaches: the field is given the files
        window.find_element("css selector", chooser).send_keys("\n".join(each))
        wait(window, f"{SAID}.startsWith('{len(each)} of {len(each)} files') && !document.querySelector('{chooser}').value")
    seen = {"uploaded": wait(window, "document.querySelector('#draft strong')?.textContent")}
    looks.at("new")
    for name, text in {"name": "my cats", "trigger": "ohwx", "preset": "style", "family": "micro"}.items():
        fill(window, f"[data-act=create] [name={name}]", text)
    press(window, "[data-act=create] button", Keys.ENTER)
    wait(window, "location.pathname === '/p/my%20cats/' && document.body.dataset.shown")
    endless = "30000"  # which no machine reaches before the run is stopped
    small = {"buckets__resolutions": "128", "train__steps": endless, "train__batch_size": "1"}
    seen["saved"] = change(window, **small, samples__width="64", samples__height="64")
    to(window, "")
    do(window, "[data-do=train]", "job 1 is in the queue")
    seen["stopped"] = wait(window, STEP)
    do(window, "[data-do=cancel]", "keeps what it has")
    ends(window, 1, "stopped")
    do(window, "[data-do=train]", "job 2 is in the queue")
    seen["went_on"] = wait(window, STEP)
    to(window, "captions")
    wait(window, "document.querySelector('textarea[data-key]')")
    fill(window, "textarea[data-key]", "ohwx, an edited caption")
    control(window, "s")
    seen["edited"] = wait(window, SAID)
    looks.at("captions")
    seen["turned"] = turn(window)
    press(window, "[name=times]", "2", Keys.ENTER)
    wait(window, "[...document.querySelectorAll('[data-said]')].some((e) => e.textContent.includes('2 times per epoch'))")
    looks.at("one")
    change(window, train__steps="4", train__lr="0.002", train__checkpoint_every="2")
    to(window, "")
    do(window, "[data-do=train]", "job 3 is in the queue", "a new run of 4 steps")
    seen |= {"behind": wait(window, state(3)), "killed": wait(window, STEP)}
    looks.at("home")
    return seen | {"looks": looks}


def finish(window, address, looks):
    """After the server was killed: see that the run went on, end it, and use the result of the second."""
    window.get(address)
    seen = {"told": wait(window, "document.querySelector('.projects strong')?.textContent")}
    looks.at("projects")
    follow(window, ".projects a", "/my%20cats/")
    seen["went_on"] = wait(window, STEP)
    do(window, "[data-do=cancel][data-job='2']", "keeps what it has")
    ends(window, 3, "finished")
    to(window, "images")
    wait(window, "document.querySelector('.cards strong')")
    card = "[c.querySelector('strong').textContent, c.className]"
    seen["cards"] = dict(window.execute_script(f"return [...document.querySelectorAll('.cards li')].map((c) => {card})"))
    looks.at("images")
    to(window, "compare")
    seen["runs"] = window.execute_script("return document.querySelectorAll('#compared tbody tr').length")
    press(window, "#compared select", Keys.ARROW_DOWN)
    press(window, "#compared form button", Keys.ENTER)
    seen["marked"] = wait(window, "document.querySelector('#compared [data-said]').textContent")
    looks.at("compare")
    to(window, "draw")
    drawn = "[...document.querySelectorAll('img.result[alt^=\"ohwx, a drawn fox\"]')].map((image) => image.alt)"
    fields = {
        "argument": "ohwx, a drawn fox",
        "--adapter": "best",
        "--size": "64x64",
        "--steps": "2",
        "--reference": "photo.heic",
    }
    for name, text in fields.items():
        fill(window, f"form[data-act] [name='{name}']", text)
    window.execute_script(NOTIFIED)
    for seed in range(2):
        fill(window, "form[data-act] [name='--seed']", str(seed), Keys.ENTER)
        wait(window, f"{SAID} === 'job {4 + seed} is in the queue'")
    wait(window, f"{drawn}.length === 2")  # without a reload
    seen["typed"] = window.execute_script("return document.querySelector('[name=\"--seed\"]').value")
    seen["live"] = wait(window, "document.getElementById('live').textContent")
    seen["notified"] = wait(window, "window.notified.at(-1)")
    looks.at("draw")
    seen["drawn"] = window.execute_script(f"return {drawn}")
    to(window, "export")
    for block in range(3):
        press(window, f"form[data-block='{block}'] button", Keys.ENTER)
        wait(window, f"[...document.querySelectorAll('[data-said]')].some((e) => e.textContent.includes('job {6 + block} is'))")
    links = "[...document.querySelectorAll('a[download][href^=\"export\"]')].map((link) => link.getAttribute('href'))"
    wait(window, f"{links}.some((link) => link.endsWith('README.md'))")
    looks.at("export")
    seen["files"] = window.execute_script(f"return {links}")
    got = looks.folder / "downloads"
    window.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(got)})
    for link in seen["files"]:
        press(window, f"a[href='{link}']", Keys.ENTER)
        wait(window, (got / link.rpartition("/")[2]).exists)  # under another name until it is whole
    return seen | {"looks": looks}


def visit(window, asked):
    address, folder = asked["address"], asked["folder"]
    if address.startswith("file:"):
        window.get(address)
        charts = wait(window, "document.querySelectorAll('[data-chart] svg').length")
        return {"charts": charts, "console": [entry["message"] for entry in window.get_log("browser")]}
    if asked.get("journey") is not None:
        resize(window, 390, 844)
        step, looks = (begin if asked["journey"] else finish), Looks(window, asked["axe"], Path(folder))
        return step(window, address, looks, *asked["journey"])
    seen = {"looks": [], "keyboard": {}} | ({"edited": edit(window, address)} if asked["follow"] else {})
    window.get_log("browser")  # a refusal is an error there
    # Each page is loaded once, and then seen with every width.
    for name in asked["pages"]:
        widths = asked["widths"][:1] if name in asked["once"] else asked["widths"]
        for width in widths:
            seen["looks"].append(look(window, address, name, width, folder, asked["axe"], load=width == widths[0]))
        if asked["follow"] and name in ("samples", "sql"):
            seen["keyboard"][name] = by_keyboard(window, name)
    return seen | ({"moved": follow_run(window)} if asked["follow"] else {})


def main():
    window = browser(*sys.argv[1:])
    try:
        for line in sys.stdin:
            before = window.current_window_handle
            window.switch_to.new_window("tab")
            after = window.current_window_handle
            window.switch_to.window(before)
            window.close()
            window.switch_to.window(after)
            window.get_log("browser")  # of the tab before
            print(json.dumps(visit(window, json.loads(line))), flush=True)
    finally:
        window.quit()


if __name__ == "__main__":
    main()
