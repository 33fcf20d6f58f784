"""Small notebooks for tests of the runner and the pages, built where a test needs them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from dlrm_workbook.runner.pages import render_html

PARAMETERS = """\
title: str = "a title"
model: dict = {}
data: dict = {}
training: dict = {}
profiling: dict = {}
output_folder: str = ""  # set by dlrm run
count: int = 3  # how many
rate: float = 0.5
word: str = ""
"""

REPORT = [
    "# A report\n\nText with **bold**, `code` and a list:\n\n- one\n- two\n\n"
    "| part | share |\n|---|--:|\n| top MLP | 44 % |\n",
    "## Figures",
    "import plotly.graph_objects as go\n"
    'figure = go.Figure(go.Bar(x=["bottom", "top"], y=[3, 9], name="time"))\n'
    'figure.update_layout(title="Time of each part", xaxis_title="part", yaxis_title="ms")\n'
    "figure.show()",
    'go.Figure(go.Scattergl(x=list(range(50)), y=[i % 7 for i in range(50)], mode="markers"))',
    'go.Figure(go.Icicle(labels=["step", "a", "b"], parents=["", "step", "step"],\n'
    '    values=[10, 4, 6], branchvalues="total"))',
    "### A table",
    'import pandas as pd\npd.DataFrame({"part": ["a", "b"], "time_ms": [1.25, 2.5]})',
    "## Progress",
    "import time\nfrom tqdm.auto import tqdm\n"
    'for _ in tqdm(range(5), desc="iterations"):\n    time.sleep(0.01)',
    'print("count is", count)',
]

PAYLOADS = [
    "<svg><style><img src=x onerror=RUN></style></svg>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;<img src=x onerror=RUN>'>",
    "<noscript><p title='</noscript><img src=x onerror=RUN>'></p>",
    "<textarea><p title='</textarea><img src=x onerror=RUN>'></p></textarea>",
    "<select><xmp><img src=x onerror=RUN></xmp></select>",
    "<noembed><img title='</noembed><img src=x onerror=RUN>'></noembed>",
    "<script>RUN</script>",
    "<scr<script>ipt>RUN</scr</script>ipt>",
    "<img src=x onerror=RUN//",
    "<svg/onload=RUN>",
    "<svg><animate onbegin=RUN attributeName=x dur=1s></svg>",
    "<details open ontoggle=RUN>words</details>",
    "<iframe srcdoc='<script>parent.RUN</script>'></iframe>",
    "<iframe src='javascript:parent.RUN'></iframe>",
    "<a href='jav&#x09;ascript:RUN' id=lure>words</a>",
    "<a href='data:text/html,<script>RUN</script>'>words</a>",
    "<object data='data:text/html,<script>RUN</script>'></object><embed src='javascript:RUN'>",
    "<style>@import 'data:text/css,*{position:fixed}'; a{background:url(x)}</style>",
    "<div style='position:fixed; inset:0; background:url(x)' onclick=RUN>words</div>",
    "<form action='javascript:RUN'><button>words</button><input onfocus=RUN autofocus></form>",
    "<plaintext><b onmouseover=RUN>",
    "<meta http-equiv=refresh content='0;url=javascript:RUN'><base href='javascript:RUN//'>",
    # what Markdown would make of a name
    '[words](javascript:RUN) ![words](x"onerror=RUN)',
    "` <img src=x onerror=RUN> `` <img src=x onerror=RUN>",
    "<javascript:RUN> <https://x.org/'onmouseover=RUN>",
    "\n\n<img src=x onerror=RUN>\n\n```\n</code></pre><img src=x onerror=RUN>\n",
    "[a]: javascript:RUN\n[a] **b** _c_ ~~d~~ | e | # f",
    "\\` <img src=x onerror=RUN> \\`",
    "$$<img src=x onerror=RUN>$$ \\(x\\) &lt;img src=x onerror=RUN&gt;",
    # what plotly.js would
    "<a href='javascript:RUN'>words</a> <b>b</b> %{x} %{customdata[0]} <extra></extra>",
]
"""HTML that a name may hold and that, in a page that trusts it, runs the statement RUN."""


def shown(data: Mapping[str, Any]) -> Any:
    """An output of a cell, by MIME type."""
    return new_output("display_data", data)


def cell(*outputs: Any, source: str = "x", **metadata: Any) -> Any:
    """A cell that has run and shown these outputs; ``metadata`` such as ``tags=[...]``."""
    return new_code_cell(source, outputs=list(outputs), metadata=metadata)


def write_page(
    folder: Path,
    *cells: Any,
    metadata: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
) -> Path:
    """The page of a notebook of these cells, both called ``n``; strings are Markdown."""
    made = [new_markdown_cell(each) if isinstance(each, str) else each for each in cells]
    nbformat.write(new_notebook(cells=made, metadata=metadata or {}), folder / "n.ipynb")
    return render_html(folder / "n.ipynb", folder / "n.html", run=run)


def code(source: str) -> bool:
    """Whether a cell's source is code: markdown cells here begin with a heading."""
    return not source.startswith("#")


def write_notebook(path: Path, cells: list[str], parameters: str | None = PARAMETERS) -> Path:
    """Write a notebook of these cells, after a cell tagged ``parameters`` if there is one."""
    nb = new_notebook(
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
        }
    )
    if parameters is not None:
        nb.cells.append(new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    nb.cells += [new_code_cell(c) if code(c) else new_markdown_cell(c) for c in cells]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, path)
    return path
