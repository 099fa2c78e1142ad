"""The databases in a real Datasette, without a port: all tables and views open, and the queries of the guide work."""

import asyncio
import re
from urllib.parse import urlencode

import pytest
from datasette.app import Datasette
from rooms.root import folder
from support.task_files import TaskFile, merge_run

IN_QUOTES = re.compile(r'"(select [^"]+)"')
IN_BLOCKS = re.compile(r"^    (select .*(?:\n    .*)*)", re.MULTILINE)


@pytest.fixture(scope="module")
def databases(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    for index in range(2):
        task = TaskFile(run, index=index, states={f"a{index}": "done", "b": "failed"}, gaps=[(1, 2, "x")]).write()
    merge_run(run)
    return [task, run / "job.sqlite"]


def pages_of(databases, paths_of):
    """Return the status of pages by their path."""

    async def fetch():
        datasette = Datasette([str(path) for path in databases])
        await datasette.invoke_startup()
        return {path: (await datasette.client.get(path)).status_code for path in await paths_of(datasette)}

    return asyncio.run(fetch())


def test_every_table_and_view_opens(databases):
    async def every(datasette):
        names = {}
        for name in (name for name in datasette.databases if not name.startswith("_")):
            there = datasette.databases[name]
            names[name] = [*await there.table_names(), *await there.view_names()]
        return [f"{datasette.urls.table(name, one)}{form}" for name in names for one in names[name]
                for form in ("", ".json?_labels=on")]  # fmt: skip

    statuses = pages_of(databases, every)
    assert len(statuses) > 2 * (27 + 38) - 1
    assert {path: status for path, status in statuses.items() if status != 200} == {}


def test_the_queries_of_the_guide_are_answered(databases):
    texts = [page.read_text() for page in folder("guide").glob("*.md")]
    queries = [query for text in texts for form in (IN_QUOTES, IN_BLOCKS) for query in form.findall(text)]
    queries = [query for query in queries if "= ?" not in query and ".parquet" not in query]
    assert len(queries) >= 5

    async def every(datasette):
        return [f"/job.json?{urlencode({'sql': query})}" for query in queries]

    assert set(pages_of(databases[1:], every).values()) == {200}
