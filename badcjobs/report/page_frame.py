"""What every page of ours has around it: a head that lets no request out and runs no script but ours."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
_SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)


def scripts_in(text: str) -> list[str]:
    """Return what stands within the script elements of a text."""
    return _SCRIPT.findall(text)


def head(title: str, scripts: Sequence[str]) -> str:
    """Return the head; its policy lets no request out, and runs only the scripts whose checksums it names."""
    sums = " ".join(f"'sha256-{_sum(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {sums}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}; form-action \'none\'">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)} – badcjobs</title>\n<style>{style}</style>\n"
        "<noscript><style>tr[hidden] { display: table-row } .controls { display: none }</style></noscript>\n"
        "</head>\n<body>\n"
    )


def _sum(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
