"""A browser without a window, where there is one: what it makes of a page, and what it saves."""

import html
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no browser")

_PRESS = """<script>
const tell = (text) => {{
  const told = document.createElement("pre");
  told.className = "saved";
  told.textContent = text;
  document.body.append(told);
}};
URL.createObjectURL = (blob) => {{ blob.text().then(tell); return "#"; }};
HTMLAnchorElement.prototype.click = function () {{
  if (!this.href.endsWith("#")) tell(decodeURIComponent(this.href));
}};
const ready = setInterval(() => {{
  if (!document.documentElement.dataset.drawn) return;
  clearInterval(ready);
  for (const one of document.querySelectorAll('{buttons}')) one.click();
}}, 50);
</script>"""


def browsed(page: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Return what a browser makes of a page, and its console."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        return subprocess.run(
            [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu",
             "--disable-background-networking", f"--user-data-dir={profile}",
             "--enable-logging=stderr", "--virtual-time-budget=60000", *more, "--dump-dom",
             page.as_uri()],
            capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip


def with_script(page: Path, script: str) -> None:
    """Add a script to a page, which lets none run but its own."""
    text, end, rest = page.read_text("utf-8").rpartition("</body>")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    page.write_text(text + script + end + rest, "utf-8")


def saved_by(page: Path, buttons: str) -> list[str]:
    """Return what a page saves when buttons are pressed."""
    with_script(page, _PRESS.format(buttons=buttons))
    found = re.findall(r'(?s)<pre class="saved">(.*?)</pre>', browsed(page).stdout)
    return [html.unescape(each) for each in found]
