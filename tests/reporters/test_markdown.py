"""Markdown, read back by a CommonMark parser."""

from hypothesis import example, given
from hypothesis import strategies as st
from report_readers import MARKDOWN
from report_samples import POINTS, case, crashed, report, scenario

from moedoctor.reporters.markdown import MarkdownReporter
from moedoctor.reporters.markdown_page import escape, link_source, to_markdown
from moedoctor.reporters.page import Paragraph
from moedoctor.text import join_lines


def _shown(markdown: str) -> list[str]:
    """Return the text of each block as a reader sees it; markup appears as `<type>`."""
    blocks = []
    for token in MARKDOWN.parse(markdown):
        if token.type == "inline":
            parts = [
                inner.content
                if inner.type == "text"
                else f"`{inner.content}`"
                if inner.type == "code_inline"
                else (
                    "" if inner.type == "html_inline" and inner.content == "<!-- -->" else f"<{inner.type}>"
                )
                for inner in token.children or ()
            ]
            blocks.append("".join(parts))
    return blocks


@given(st.text() | st.text(alphabet="*_`|[]()<>&#-+.1~!\\@a \n$=:;"))
@example("# a")
@example("- a")
@example("+ a")
@example("1. a")
@example("12) a")
@example("---")
@example("> a")
@example("* a")
@example("~~a~~ <b>a</b> &amp; &#42;")
def test_escaped_text_is_shown_as_it_is(text: str) -> None:
    plain = join_lines(text)
    for frame in ("{}", "- {}", "# {}", "| a | b |\n| --- | --- |\n| {} | x |"):
        if plain:
            shown = _shown(frame.format(escape(text)))
            assert plain in [block.strip() for block in shown]


def test_escaping_leaves_ordinary_text_readable() -> None:
    plain = "first_fixed_release 0.20.0 vllm@0.19.1 2.13.0"
    assert escape(plain) == plain
    for text in ("for @somebody", "@somebody", "(@somebody", "`@somebody", "_@somebody", "é@somebody/team"):
        assert "@<!-- -->somebody" in escape(text)


def test_sources_become_links() -> None:
    assert link_source("vllm-project/vllm#39593") == (
        "[vllm-project/vllm#39593](https://github.com/vllm-project/vllm/issues/39593)"
    )
    assert link_source("a/b#1, c/d#2 and *x*") == (
        "[a/b#1](https://github.com/a/b/issues/1), [c/d#2](https://github.com/c/d/issues/2) and \\*x\\*"
    )
    assert link_source("a blog](javascript:x)") == "a blog\\](javascript:x)"


def test_stderr_of_a_crash_cannot_end_its_code_block() -> None:
    tail = ["```", "# heading", "`````", "\x1b[1m<b>"]
    evidence = {"death": "silent", "message": "gone", "stderr_tail": tail}
    cases = [case("faulty", "error", evidence=evidence), crashed("installed", POINTS[0])]
    text = MarkdownReporter(full=True).render(report(scenario("error", *cases)))
    fences = [token.content for token in MARKDOWN.parse(text) if token.type == "fence"]
    assert fences == ["```\n# heading\n`````\n<b>\n", "Traceback\n[red]last words[/]\n"]
    assert "Died: installed kernel tokens=128 top_k=2 scoring=softmax: illegal memory access: CUDA error" in (
        text.replace("*", "")
    )


def test_a_command_in_backticks_is_code_and_nothing_else_becomes_it() -> None:
    text = to_markdown([Paragraph("`moedoctor check -o *.md` @one `@two` `a|b` ``c`` and ` *alone*")])
    assert text == (
        "`moedoctor check -o *.md` @<!-- -->one `@two` \\`a\\|b\\` \\`\\`c\\`\\` and \\` \\*alone\\*\n"
    )
