"""How pages are made of templates: text is escaped, and scripts are told by their hashes."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import jinja2

TEMPLATES = Path(__file__).parent / "templates"


def template_text(name: str) -> str:
    """Content of a file beside the templates, such as a script."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def prepare(environment: jinja2.Environment) -> jinja2.Environment:
    """The environment with our rules; whatever a template shows is escaped."""
    environment.autoescape = True
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.undefined = jinja2.StrictUndefined
    environment.filters["hash_source"] = hash_source
    return environment


def hash_source(script: str) -> str:
    """What a content security policy calls this script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
