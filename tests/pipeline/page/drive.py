"""Drives Chromium over the pages of a project, in a process of its own: selenium need not be installed beside the tests.

It is called with the page's address, a folder for screenshots, and the widths. It prints one JSON object: what was seen on each
page.
"""

import json
import sys
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

PAGES = ("overview", "images", "captions", "training", "samples", "scores", "sql", "one?key=picture0.png")
SECONDS = 600  # until a page counts as hanging, on a busy machine too


def browser(chromium, driver):
    """A headless Chromium that logs its console and its requests."""
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


def wait(window, script):
    """Wait until a script returns something true, and return that."""
    began = time.monotonic()
    while not (found := window.execute_script(f"return {script}")):
        assert time.monotonic() - began < SECONDS, script
        time.sleep(0.1)
    return found


def resize(window, width, height):
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def look(window, address, name, width, folder):
    """Open a page and say what is there."""
    resize(window, width, 1000)
    window.get(f"{address}/{'' if name == 'overview' else name}")
    wait(window, "document.body.dataset.shown")
    wait(window, "[...document.images].filter(i => !i.hidden && i.getBoundingClientRect().top < 900).every(i => i.complete)")
    charts = "[...document.querySelectorAll('[data-chart]')]"
    wait(window, f"{charts}.every(c => c.querySelector('svg') || c.textContent)")
    height = window.execute_script("return document.documentElement.scrollHeight")
    resize(window, width, min(height, 6000))
    window.save_screenshot(str(folder / f"{name.split('?')[0]}-{width}.png"))
    sent = [json.loads(entry["message"])["message"] for entry in window.get_log("performance")]
    return {
        "page": name,
        "width": width,
        "scroll": window.execute_script("return document.documentElement.scrollWidth"),
        "paint_ms": window.execute_script("return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"),
        "console": [entry["message"] for entry in window.get_log("browser")],
        "requests": sorted(
            {m["params"]["request"]["url"].split("?")[0][:120] for m in sent if m["method"] == "Network.requestWillBeSent"}
        ),
        "nameless": window.execute_script("return [...document.images].filter(i => !i.hasAttribute('alt')).length"),
        "errors": window.execute_script("return [...document.querySelectorAll('.error')].map(e => e.textContent)"),
    }


def edit(window, address):
    """Edit the first caption on the page, and return what the page says."""
    window.get(f"{address}/captions")
    wait(window, "document.querySelector('textarea[data-key]') !== null")
    window.execute_script(
        "const a = document.querySelector('textarea[data-key]'); a.value = 'edited <b>here</b>';"
        "a.dispatchEvent(new Event('input', {bubbles: true})); document.querySelector('[data-save]').click()"
    )
    said = wait(window, "document.querySelector('[data-said]').textContent")
    return {"said": said, "text": window.execute_script("return document.querySelector('textarea[data-key]').value")}


def main():
    address, folder, chromium, driver, widths, changing = sys.argv[1:7]
    window = browser(chromium, driver)
    try:
        if address.startswith("file:"):
            window.get(address)
            charts = wait(window, "document.querySelectorAll('[data-chart] svg').length")
            print(json.dumps({"charts": charts, "console": [entry["message"] for entry in window.get_log("browser")]}))
            return
        looks = [look(window, address, name, int(width), Path(folder)) for width in widths.split(",") for name in PAGES]
        edited = edit(window, address)
        moved = ""
        if changing:
            window.get(f"{address}/images")
            wait(window, "document.body.dataset.shown")
            Path(changing).touch()
            moved = wait(window, "Number(document.body.dataset.shown) > 1 && document.body.textContent.includes('late.png')")
        print(json.dumps({"looks": looks, "edited": edited, "moved": moved}))
    finally:
        window.quit()


if __name__ == "__main__":
    main()
