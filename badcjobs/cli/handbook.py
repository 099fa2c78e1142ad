"""The handbook behind ``badcjobs guide``: pages in guide/, some of them made from the code they describe."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from badcjobs import paths as resources
from badcjobs.errors import BadInput
from badcjobs.store.job_schema import JOB_TABLES, JOB_VIEWS, ViewDef
from badcjobs.store.schema import TableDef


def list_topics() -> str:
    """Return the list of pages, each with its first line."""
    lines = [f"  {topic:<12} {_heading(text)}" for topic, text in sorted(_pages().items())]
    return "\n".join(["Pages of the guide (badcjobs guide TOPIC):", "", *lines])


def read_topic(topic: str) -> str:
    """Return one page, with its placeholders filled in."""
    pages = _pages()
    if topic not in pages:
        raise BadInput(f"there is no page {topic!r}", why="pages are " + ", ".join(sorted(pages)), fix="badcjobs guide")
    text = pages[topic]
    for placeholder, make in _MADE.items():
        if placeholder in text:
            text = text.replace(placeholder, make())
    return text.rstrip()


def _pages() -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in resources.folder("guide").glob("*.md")}


def _heading(text: str) -> str:
    return text.partition("\n")[0].lstrip("# ")


def _template() -> str:
    text = (resources.folder("templates") / "array.sbatch").read_text(encoding="utf-8")
    return "\n".join("    " + line if line else "" for line in text.splitlines())


def _tables() -> str:
    return _sections(JOB_TABLES)


def _views() -> str:
    return _sections(JOB_VIEWS)


def _sections(tables: Iterable[TableDef | ViewDef]) -> str:
    sections = []
    for table in tables:
        width = max(len(column.name) for column in table.columns)
        rows = [f"    {column.name:<{width}}  {column.help}" for column in table.columns]
        sections.append("\n".join([f"## {table.name}", "", table.help, "", *rows]))
    return "\n\n".join(sections)


_MADE: dict[str, Callable[[], str]] = {
    "{{template}}": _template,
    "{{tables}}": _tables,
    "{{views}}": _views,
    "{{view names}}": lambda: ", ".join(f"`{view.name}`" for view in JOB_VIEWS),
    "{{folder:templates}}": lambda: str(resources.folder("templates")),
}
