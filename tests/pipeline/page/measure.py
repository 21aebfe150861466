"""The page of a large project, measured: `python -m tests.pipeline.page.measure [EVENTS [SECONDS]]`.

5,000 pictures, 10 runs, 200,000 training rows. It prints a line of JSON: first paints and complete pages in ms, what they cost
the server until then in ms of CPU, CPU of the server per event in ms, memory of the server while the pages are made, once and
again, and of server and page after a tenth of the events, nine tenths and all. An event counts once it is in the page; SECONDS
lie between two (0.02), so that `10000 0.36` takes an hour, and the server looks twice as often for one.
"""

from __future__ import annotations

import json
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

PAGES = ("", "images", "captions", "training", "samples", "compare", "settings", "sql")
AGAIN = (*PAGES, "one?key=00007.png", "sql?sql=select+run_name,avg(loss)+from+all_train+group+by+all")
RUNS = 10
COUNT = "window.seen = 0; new EventSource('events').addEventListener('progress', () => { window.seen += 1; })"


def fill_runs(folder: Path) -> None:
    from tests.pipeline.page.large import fill

    fill(folder)
    (first,) = (folder / "tables" / "train").iterdir()
    for number in range(1, RUNS):
        run = first.with_name(f"{number:012x}")
        shutil.copytree(first, run)
        record = json.loads((run / "run.json").read_text())
        settings = {"train": {"lr": number * 1e-4, "steps": 20_000}}
        (run / "run.json").write_text(json.dumps(record | {"name": f"run {number}", "settings": settings}))
    queue = folder / "queue"
    queue.mkdir()
    job = {"number": 1, "words": ["run", "samples"], "state": "running"}
    (queue / "jobs.json").write_text(json.dumps({"jobs": [job], "paused": False, "last": 1}))


def told(folder: Path, step: int) -> None:
    """As a run tells its step."""
    now = {"stage": "train", "done": step, "total": 20_000, "unit": "steps", "before": 0, "began": 0.0, "at": float(step + 1)}
    temporary = folder / "queue" / "progress"
    temporary.write_text(json.dumps(now))
    temporary.replace(folder / "queue" / "1.progress")


def serve(folder: Path, port: int, every: float) -> None:
    import uvicorn

    from pipeline.page import app
    from pipeline.page.site import Site

    app.EVENT_SECONDS = every / 2
    app.spare_memory()
    uvicorn.run(app.make_app(Site(folder)), host="127.0.0.1", port=port, log_level="warning")


def measure(folder: Path, address: str, process: Any, events: int, every: float) -> dict[str, Any]:
    from tests.pipeline.page import drive

    drive_any: Any = drive  # its functions have no types
    browser, resize, wait = drive_any.browser, drive_any.resize, drive_any.wait

    most, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            most[0] = max(most[0], process.memory_info().rss)

    def cpu() -> float:
        return float(sum(process.cpu_times()[:2]))

    threading.Thread(target=watch, daemon=True).start()
    window = browser(shutil.which("chromium"), shutil.which("chromedriver"))
    try:
        resize(window, 1280, 1000)
        found: dict[str, Any] = {"paint_ms": {}, "shown_ms": {}, "paint_cpu_ms": {}, "shown_cpu_ms": {}}
        window.get("data:text/html,<p>the browser's own first page")
        for name in PAGES:
            used = cpu()
            window.get(f"{address}/{name}")
            wait(window, "performance.getEntriesByName('first-contentful-paint').length")
            paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            found["paint_cpu_ms"][name or "overview"] = round(1000 * (cpu() - used))
            found["paint_ms"][name or "overview"] = round(window.execute_script(f"return {paint}"))
            if name != "settings":  # it comes whole
                wait(window, "performance.getEntriesByName('shown').length")
                shown = window.execute_script("return performance.getEntriesByName('shown')[0].startTime")
                found["shown_ms"][name or "overview"] = round(shown)
                found["shown_cpu_ms"][name or "overview"] = round(1000 * (cpu() - used))
        found["pages_most_mb"] = round(most[0] / 1e6)
        for name in AGAIN * 3:
            window.get(f"{address}/{name}")
            wait(window, "document.body.dataset.shown || document.body.dataset.whole !== undefined")
        found["pages_again_most_mb"] = round(most[0] / 1e6)
        ended.set()
        window.get(f"{address}/")
        wait(window, "document.body.dataset.shown")
        window.execute_script(COUNT)
        found |= {"events": 0, "server_mb": [], "server_private_mb": [], "page_mb": []}
        step = 0
        for part, count in enumerate((events // 10, events - events // 5, events // 10)):
            used, began = cpu(), time.monotonic()
            before, delivered = found["events"], 0
            while delivered < count:
                for _ in range(min(100, count - delivered)):
                    step += 1
                    told(folder, step)
                    time.sleep(every)
                delivered = window.execute_script("return window.seen") - before
            found["events"] += delivered
            if part == 1:
                found["seconds"] = round(time.monotonic() - began, 1)
                found["cpu_ms_per_event"] = round(1000 * (cpu() - used) / delivered, 2)
            window.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
            heap = window.execute_cdp_cmd("Runtime.getHeapUsage", {})["usedSize"]
            found["page_mb"].append(round(heap / 1e6, 2))
            memory = process.memory_full_info()
            found["server_mb"].append(round(memory.rss / 1e6))
            found["server_private_mb"].append(round(memory.uss / 1e6))
        return found
    finally:
        window.quit()


def main(events: int = 10_000, every: float = 0.02) -> None:
    import psutil

    with tempfile.TemporaryDirectory() as place, socket.socket() as free:
        folder = Path(place) / "large"
        folder.mkdir()
        fill_runs(folder)
        told(folder, 0)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        # The queue's running job is this process: it holds the lock of a worker.
        from pipeline.store.lock import locked

        words = [sys.executable, "-m", "tests.pipeline.page.measure", "--serve", str(folder), str(port), str(every)]
        with locked(folder / "queue" / "worker"), subprocess.Popen(words) as server:
            try:
                while socket.socket().connect_ex(("127.0.0.1", port)):
                    time.sleep(0.1)
                found = measure(folder, f"http://127.0.0.1:{port}", psutil.Process(server.pid), events, every)
                machine = (
                    f"{psutil.cpu_count()} cores, {platform.system()} {platform.machine()}, load {psutil.getloadavg()[1]:.0f}"
                )
                about = {"proof": "the page of a large project", "machine": machine, "date": time.strftime("%Y-%m-%d")}
                sys.stdout.write(json.dumps(about | found) + "\n")
            finally:
                server.kill()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    else:
        main(*map(int, sys.argv[1:2]), *map(float, sys.argv[2:3]))
