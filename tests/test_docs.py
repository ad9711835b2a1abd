"""The documentation holds together: links lead somewhere, lists are in order, figures name the test that holds them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from hawker.http.api_page import page as api
from hawker.model.machine import diagram
from hawker.worker.machine.kind import MACHINE

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("changelog.d/*.md"), *DOCS.rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_one_step_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in DOCS.glob("*.md") if f"(docs/{page.name})" not in readme] == []


def test_links_to_headings_name_one_that_is_there() -> None:
    """As GitHub names them: lower case, without punctuation, with dashes for spaces."""
    broken = []
    for page in PAGES:
        for path, heading in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            headings = re.findall(r"^#+ (.*)", (page.parent / path if path else page).read_text(), re.MULTILINE)
            if heading not in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}:
                broken.append(f"{page.relative_to(ROOT)}: {path}#{heading}")
    assert broken == []


def test_the_machine_states_page_shows_the_table_of_the_code() -> None:
    drawn = re.search(r"```mermaid\n(.*?)\n```", (DOCS / "machine-states.md").read_text(), re.DOTALL)
    assert drawn is not None
    assert drawn[1] == diagram(), f"put this into docs/machine-states.md:\n{diagram()}"


def test_the_page_of_the_api_says_what_is_declared() -> None:
    assert (DOCS / "api.md").read_text() == api(), "python -m hawker.http.api_page > docs/api.md"


def test_the_machine_states_page_shows_the_tables_of_a_machines_life() -> None:
    life = MACHINE.life()
    assert (DOCS / "machine-states.md").read_text().endswith(f"{life}\n"), f"end docs/machine-states.md so:\n{life}"


def test_the_picture_of_the_architecture_has_the_layers_that_the_linter_holds() -> None:
    page = (DOCS / "architecture.md").read_text()
    drawn = re.search(r"```\n(sim -> .*?)\n```", page, re.DOTALL)
    assert drawn
    [rooms, *_] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert rooms["containers"] == ["hawker"]
    assert re.split(r"\s+->\s+", drawn[1]) == rooms["layers"]
    for room in re.findall(r"\w+", " ".join(rooms["layers"])):
        assert f"**{room}**" in page, f"docs/architecture.md says what {room} is"


def test_the_glossary_names_each_term_once_in_order() -> None:
    terms = re.findall(r"^\*\*(.+?)\*\*", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert len(terms) > 60
    assert terms == sorted(set(terms))


def test_words_of_modules_names_are_in_the_glossary_or_plain() -> None:
    """`tests/plain_words` has the words that a reader knows: the field's, the system's, and everyday ones."""
    terms = re.findall(r"^\*\*(.+?)\*\*", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    known = {stem(word) for word in re.findall(r"[a-z]+", " ".join(terms).lower())}
    known |= {stem(word) for word in (ROOT / "tests/plain_words").read_text().split()}
    modules = [path.relative_to(ROOT / "src/hawker").with_suffix("") for path in (ROOT / "src/hawker").rglob("*.py")]
    words = {word: str(module) for module in modules for word in re.findall(r"[a-z]{3,}", str(module))}
    unknown = {word: module for word, module in words.items() if stem(word) not in known}
    assert unknown == {}, "define the word in docs/glossary.md, or, if everybody knows it, add it to tests/plain_words"


def stem(word: str) -> str:
    """Without its ending, so that `drains`, `drained` and `draining` are one word."""
    root = re.sub(r"(ings?|ed|ers?|es|s|ship|e)$", "", word)
    return root if len(root) > 2 else word


def test_decisions_are_numbered_without_gaps_and_have_the_four_sections() -> None:
    template, *decisions = sorted((DOCS / "decisions").glob("*.md"))
    sections = re.findall(r"^## .*", template.read_text(), re.MULTILINE)
    assert len(sections) == 4
    for number, page in enumerate(decisions, start=1):
        text = page.read_text()
        assert page.name.startswith(f"{number:04d}-")
        assert text.startswith(f"# {number:04d}: ")
        assert re.findall(r"^## .*", text, re.MULTILINE) == sections, page.name


def test_metrics_that_the_documentation_names_are_there() -> None:
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = {name for page in DOCS.glob("*.md") for name in re.findall(r"\bhawker_[a-z_]+[a-z]\b", page.read_text())}
    assert len(named) > 20
    bases = {re.sub("_(total|bucket|sum|count)$", "", name) for name in named}
    words = set(re.findall(r"[\"`]([a-z_]+)", code))
    assert {base for base in bases if not {base, base.removeprefix("hawker_proxy_")} & words} == set()


def test_changelog_fragments_name_their_kind() -> None:
    fragments = [page.name for page in ROOT.glob("changelog.d/*") if page.name != "README.md"]
    assert [
        name for name in fragments if not re.fullmatch(r"[a-z0-9-]+\.(added|changed|fixed|removed)\.md", name)
    ] == []


def test_every_promise_names_what_holds_it_and_no_figure_stands_without() -> None:
    """Rows are `promise | number | held by | measured`. What is named must exist; "nothing yet" has no figure."""
    rows = re.findall(
        r"^\|([^|]+)\|([^|]+)\|([^|]+)\|([^|]+)\|$", (DOCS / "specification.md").read_text(), re.MULTILINE
    )
    promises = [[cell.strip() for cell in row] for row in rows if row[0].strip() not in ("promise", "---")]
    assert len(promises) > 20
    for promise, _, held_by, measured in promises:
        paths = re.findall(r"`([^`]+)`", held_by)
        assert [path for path in paths if not (ROOT / path).exists()] == [], promise
        assert paths or (held_by, measured) == ("nothing yet", "not measured yet"), promise
