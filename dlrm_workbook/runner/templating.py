"""How pages are made of templates: text is escaped, and scripts are told by their hashes."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import jinja2

TEMPLATES = Path(__file__).parent / "templates"


def template_text(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def filled(name: str, **values: Any) -> str:
    """A template with these values; whatever it shows is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["hash_source"] = hash_source
    return environment.get_template(name).render(values)


def hash_source(script: str) -> str:
    """What a content security policy calls this script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
