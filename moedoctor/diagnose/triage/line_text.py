"""One line of a log or report without what terminals, containers and web pages put around it."""

from __future__ import annotations

import enum
import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

_ANSI = (
    r"(?:\x1b|\^\[|#033|\\x1b|\\u001b|\\033|\\e)\[[0-9;?]{0,20}[A-Za-z]"
    r"|\x1b\][^\x07\x1b]{0,300}(?:\x07|\x1b\\)|\x1b[@-Z\\^_]"
)
_TAG = (
    r"</?(?:a|b|blockquote|br|code|dd|details|div|dl|dt|em|font|h[1-6]|hr|i|img|kbd|li|ol|p|pre|s|span"
    r"|strong|sub|summary|sup|table|tbody|td|th|thead|tr|tt|u|ul)\b[^<>]{0,2000}>|<!--|-->"
)
_STAMP = r"\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"
_PREFIX = "|".join(
    (
        rf"{_STAMP} [\w.-]{{1,80}} [\w./@-]{{1,80}}\[\d{{1,8}}\]:(?:\s|$)",  # journalctl -o short-iso
        rf"\[?{_STAMP}\]?(?: (?:stdout|stderr) [FP](?:\s|$)|\s?[:|-]?(?:\s|$))",  # docker, kubectl
        # journald, syslog
        r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?:[\w.-]{1,80} )?[\w./@-]{1,80}(?:\[\d{1,8}\])?:(?:\s|$)",
        r"\[(?:pod/)[\w./-]{1,200}\](?:\s|$)",  # kubectl logs --prefix
        r"[\w.-]{1,80}(?:[-_]\d{1,3} {1,20}| {2,20})\|(?:\s|$)",  # docker compose
        r"\[(?:default\d{1,4}|rank ?\d{1,5}|\d{1,4},\d{1,4})\](?:<std(?:out|err)>)?: ?",  # torchrun, mpirun
        r"\((?=[^()]{0,200}\b(?:pid|rank)=)[^()]{1,200}\) ?",  # vLLM's and Ray's workers
        # vLLM, today and before
        r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) {1,8}(?:\d\d-\d\d \d\d:\d\d:\d\d )?"
        r"(?:\[[^\]]{1,100}|[\w.]{1,60}:\d{1,6})\] ?",
        r"(?:&gt;|>)+ ?",  # a quotation
        r"(?:[-*+•]|\d{1,3}[.)]) {1,4}(?:\[[ xX]\] )?",  # a list
        r"#{1,6} {1,4}",  # a heading
    )
)
_STRIPPED = {
    **str.maketrans("", "", "`\x00\ufeff\u200b\u200c\u200d\u2060\xad"),
    **dict.fromkeys(map(ord, "\u2018\u2019\u201a\u201b\u2032\xb4"), "'"),
    **dict.fromkeys(map(ord, "\u201c\u201d\u201e\u201f\u2033"), '"'),
    **dict.fromkeys(map(ord, "\u2010\u2011\u2212"), "-"),
}
"""What is removed, and what word processors and web pages put in place of quotes and hyphens."""
_CJK = "[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]"
_SCRIPTS = re.compile(rf"(?<=\w)(?={_CJK})(?<!{_CJK})|(?<={_CJK})(?=\w)(?!{_CJK})")
"""A joint of words of another script: `\b` finds none."""
_CLAUSE = 120
"""Characters before a phrase that may deny it."""
_QUOTATION = 60
"""Lines of a quotation in which its introduction is looked for."""
_OWN = re.compile(rb"\b(?:i|we|my|our|mine|it|log|output|traceback|server|with)\b[^.]{0,80}:\W{0,3}$")
_CHANGE = re.compile(
    rb"\s{0,8}[-*+] {1,4}(?:\[[\w /+-]{1,30}\] ?){0,3}(?:fix|avoid|prevent|handle|resolve|correct)\w{0,3} "
)
OF_VLLM = re.compile(
    r"\((?:enginecore|apiserver|worker|vllmworker|rayworkerwrapper|mainprocess)[^()]{0,80}pid="
    r"|\[?(?:core|multiproc_executor|uniproc_executor|gpu_worker|gpu_model_runner|api_server|serve"
    r"|async_llm|llm_engine|kv_cache_utils|ray_executor)\.py:\d"
)
"""Prefixes of log lines that only vLLM writes, in lower case."""

BELOW_ERROR = re.compile(r"\b(?:debug|info|warning) ")
"""The level of a line that tells of no failure, in a prefix in lower case."""
_FOUND = (
    r"(?:reproduc|se(?:e|en|ing)\b|saw\b|show|get\b|getting\b|got\b|hit\b|observ|find\b|found\b"
    r"|log(?:s|ged)?\b|print|contain|encounter|produce|trigger|rais|throw|give)"
)
_SAME_CLAUSE = (
    r"(?:(?!\b(?:but|yet|however|why|how|what|unless|until|always|every|reliably|only)\b)[^:.;?!]){0,60}"
)
_QUOTED = r"(?: (?:the|this|that|my|our|an?|error|message|crash|line)){0,3}[ \"'(]{1,3}$"
_DENIED_BEFORE = re.compile(
    r"(?:\b(?:could|do|does|did|was|were|is|are|have|has|would)(?: not|n't)|\bcan(?: ?not|'t)|\bunable to"
    rf"|\bfail(?:s|ed)? to|\bnever|\bno longer|\bnobody) "
    rf"(?:\w{{1,12}} ){{0,2}}{_FOUND}\w{{0,6}}\b{_SAME_CLAUSE}$"
    r"|\b(?:no|without|neither|nor)(?: (?:more|any|an?|single|such|sign of|trace of)){0,2} \W{0,3}$"
    r"|\bnot (?:an?|the|this|that)? ?\W{0,3}$"
    r"|\b(?:unlike|instead of|rather than|different (?:from|than)|not the same as|contrary to)"
    r"(?: [\w#']{1,20}){0,5}[ \"'(:]{1,3}$"
    r"|(?<!not )(?<!n't )(?<!never )\b(?:fixed|solved|resolved|mended|cured|avoided|got rid of)"
    rf"{_QUOTED}"
    r"|\b(?:tr(?:y|ied|ying)|want(?:ed)?)(?: hard)?"
    rf" to (?:get|see|hit|trigger|provoke|reproduce|raise){_QUOTED}|\bwhether{_QUOTED}"
)
_ATTRIBUTED = re.compile(
    r"(?:#\d{2,6}|\b(?:thread|report|issue|post|ticket|page)s?|\bother (?:people|users)|\bsomebody else"
    r"|\bothers)(?: \w{1,12}){0,3} (?:(?:has|had|have|was|is|are|about|mention|report|show|say|quote)s?\b"
    r"(?: the| an?)?)(?: (?:error|message|line|crash))?[ \"':(]{1,3}$"
    rf"|\b(?:others|other (?:people|users)|somebody else) (?:see|saw|get|got|have|had|hit)(?: that)?{_QUOTED}"
)
_DENIED_AFTER = re.compile(
    r"[\"') ]{0,3}(?:(?:error|warning|crash|message|bug|failure) )?"
    r"(?:(?:with|on|in|under|for|from|of|during|at) [^;,:?!\"]{1,50}? )?"
    r"(?:(?:(?:do|did|does|was|is|has)(?: not|n't)|never|no longer) "
    r"(?:happen|occur|appear|seen|show up|comes? up|reproducible|in (?:my|our|the) logs?)\w{0,4}"
    r"(?: (?:any ?more|here|for (?:me|us)|on (?:my|our) \w{1,12}))?\W{0,3}(?:$|[.;,!?])"
    r"|(?:(?:is|was|are|were|got|has been|have been) (?:now |long )?"
    r"(?:gone|fixed|solved|resolved|mended|history|past|over|no more"
    r"|(?:my|our|a user's) (?:own )?(?:mistake|fault))|went away|disappeared)\b)"
    r"|[^.;?!]{0,40}\b(?:found|finds?) (?:nothing|none|no match)\b"
    r"|[^.;?!]{0,80}\b(?:but|and|yet|though) (?:i|we|it|(?:the|my|our) (?:server|engine|model))\b"
    r"[^.;?!]{0,40}? (?:never|(?:do|did|does)(?: not|n't))"
    r" (?:happen|occur|appear|rais|show|see|saw|get|got|hit)\w{0,4}"
    r"(?: it| that| this)?(?: here| at all| for (?:me|us))?\W{0,3}(?:$|[.;,!?])"
)
_SENTENCE = r"(?:[^.;?!]|\.(?=\S)){0,100}$"
"""The rest of a sentence up to a phrase. A point inside a release ends no sentence."""
_BUT_NOW = r"(?:(?!\b(?:but|yet|however|now|today|since|works?|worked|fine)\b)(?:[^.;?!]|\.(?=\S))){0,100}$"
_TOLD_BEFORE = re.compile(
    r"\b(?:suppos(?:e|ing)|assum(?:e|ing)|imagine|in case|in the event|for (?:reference|comparison)"
    rf"|for the record)\b{_SENTENCE}"
    rf"|\b(?:would|could|may|might)(?! not\b| (?:like|love|appreciate|be (?:glad|happy|grateful)))"
    r" (?:\w{1,12} ){1,6}\W{0,3}$"
    r"|\b(?:used to|no longer) (?:see|get|hav|hit|die|crash|fail|stop|end|abort|rais|hang|giv|show|print"
    rf"|be|suffer)\w{{0,3}}\b{_BUT_NOW}"
    rf"|\b(?:previously|formerly|earlier|in the past|back then|until (?:last|the|we|i|then"
    rf"|v?0\.))\b{_BUT_NOW}"
    r"|\b(?:afraid|scared|worr(?:y|ied)|fear|wonder(?:ing)?|tests? (?:that|which) (?:check|assert"
    r"|expect)s?)\b"
    rf"{_SENTENCE}|(?:^|[.;!?] )had (?:i|we|it|the|you)\b{_SENTENCE}"
    r"|\b(?:no longer|used to) \W{0,2}$"
    r"|\b(?:old|former|earlier|previous|known) (?:(?:crash|error|failure|message|bug) )?\W{0,2}$"
    r"|\b(?:about|avoid(?:s|ing)?|document|explain|mention(?:s|ed|ing)?|prevent(?:s|ing)?|retry"
    r"|handles?|catch(?:es)?|against|(?:search|look|grep|ask)(?:e?s|ed|ing)? for)(?: the| an?)? \W{0,2}$"
    r"|\btest_\w{1,80}\W{0,3}$"
)
"""What tells of others, of an earlier time, of a test, or of what may happen, in the same line."""
_QUESTION = re.compile(
    r"(?:^|[.;!?] )(?:do|does|did|is|are|was|has|have|had|will|can|could|would) "
    r"(?:(?!\b(?:why|how|what|fix|solve|know|help)\b)(?:[^.;?!]|\.(?=\S))){0,100}$"
)
_OPEN_END = re.compile(r"(?!.{0,80}\b(?:normal|expected|intended|right|correct)\b)[^.;!]{0,120}\?")
"""The end of a question about an event; one that asks if the event is right says that it happened."""
_HAPPENED = re.compile(
    r"(?:(?:[:;,.!?>(|-]|= |--|\b(?:hi|but|and|then|is|this|why|with one))"
    r"|\b(?:gets?|got|getting|sees?|saw|seeing|hits?|hitting|ha[sd]|have|receiv\w{1,3}"
    r"|thr[eo]w\w{0,3}|rais\w{1,3}"
    r"|die[sd]?|dying|crash\w{0,3}|fail\w{0,3}|end\w{0,3}|stop\w{0,4}|abort\w{0,3}|exit\w{0,3}"
    r"|says?|said|shows?|prints?|printed|gives?|gave|reports?|returns?|produces?|logs?|logged|errors?"
    r"|encounter\w{0,3}|caus\w{1,3}"
    r"|trigger\w{0,3}|leads?|led|results?|resulted|find|found|caught|runs?|ran|went|goes|comes?|came|due)"
    r"(?:(?: [\w-]{1,20}){0,5} (?:with|of|by|on|in|at|up|out|down|to|into|as|from|for))?)"
    r"(?: (?:the|an?|this|that|following|same|such|error|message|exception|crash|traceback|log|warning|again"
    r"|my|our)){0,4}[ \"'(:]{0,3}$"
)
"""What a text says right before a message that came: a verb, or only punctuation."""
_TOLD_AFTER = re.compile(
    r"[\"')]{0,2} (?:(?:error|warning|crash|message|line) )?(?:should|could|would|may|might|ought|can)\b"
    r"|[^.;?!]{0,60}\bis (?:documented|expected|known"
    r"|what (?:#|the (?:issue|thread|report|docs)|others|those|anybody|somebody))\b"
    r"|\W{1,3}(?:passed|skipped|xfail)\b"
    r"|[^.;?!]{0,60}, (?:says|said|according to|as \w{1,12} (?:says|writes|wrote))\b"
    r"|[^.;?!]{0,20} (?:is|was) (?:[\w']{1,12} ){0,2}(?:problem|bug|issue|history)\b"
    r"|[^;?!]{0,200} \(#\d{3,6}\)(?: by @[\w-]{1,40})?$|[^.;?!]{0,60}\b(?:works|runs) (?:now|again)\b"
)
_OWNER = re.compile(r"\b(?:i|i'm|i've|i'd|we|we're|we've|my|mine|our|ours|me|us|here)\b")
_OTHERS = re.compile(
    r"^\W{0,3}(?:(?:and|so|what|that|then|because|since|as|for|if|when|whenever|once|should|the|an?|any)"
    r" ){0,2}(?:you|your|they|he|she|who|whoever|(?:their|his|her) (?:\w{1,12} )?(?:server|engine|setup|machine|log|model|report|vllm)|one|others|folks|those|nobody"
    r"|(?:any|some|every)(?:body|one)|users?|people|customers?|colleagues?|reviewers?|vendors?|docs|guide"
    r"|documentation|(?:early|earlier|former|previous) \w{1,20}|\w{1,20} (?:that|which|who) (?:has|gets))"
    r"\b|\b(?:will|would|should|must|shall|might|may) (?:(?!not\b)\w{1,12} ){0,3}?(?:see|print|raise|get|say"
    r"|show|log|hit|find|expect|met|end|stop|answer|appear|fail|crash|die)\b|\bguards? against\b"
)
_CONDITION = re.compile(
    r"\W{0,3}(?:if|unless|when(?:ever)? (?:you|they|he|she|users?|people|(?:some|any)(?:one|body))"
    r"|for (?:you|them|him|her|others))\b"
)
"""A condition; "when loading" is a circumstance of what happened."""
_CLAUSE_END = re.compile(r"(?:[.;!?]|(?<!say)(?<!says)(?<!said):)(?:\s|$)|, (?:but|and|so|though|yet) ")
"""A clause that names others, or a condition, and no owner, tells of others."""
_ERROR_NAME = re.compile(
    r"\b(?:(?:cuda|triton|nccl) )?[\w.]{0,60}(?:error|warning|exception): "
    r"(?:(?:cuda|triton|nccl) (?:driver )?error: )?(?:[^:.;?!\"]{0,200})$"
)
_POSSIBLE = re.compile(
    r"\b(?:may|might|could|can|would|will|should|avoids?|prevents?|risk of|potentially)"
    r"(?: (?:be|also|still|even|then|cause|lead to|result in|produce|give|become|an?|the)){0,4} \W{0,2}$"
)


class Stance(enum.Enum):
    """The way in which a text speaks of an event."""

    STATED = ""
    """It happened here."""
    TOLD = "told"
    """It happened to others or earlier, or it may happen: here it is possible at most."""
    DENIED = "denied"


def read_stance(text: str, start: int, end: int, line: tuple[int, int]) -> Stance:
    """Return how a text in lower case speaks of what is written from `start` to `end`.

    `line` is the place of its line in the text: a pasted line is no part of the sentence before it.
    """
    start, end = _find_quotation(text, start, end)
    before = text[max(0, start - _CLAUSE) : start]
    if _DENIED_BEFORE.search(before) or _ATTRIBUTED.search(before) or _DENIED_AFTER.match(text, end):
        return Stance.DENIED
    in_line = text[max(line[0], start - 2 * _CLAUSE) : start]
    after = text[end : max(end, line[1])]
    possible = _TOLD_BEFORE.search(in_line) or (_QUESTION.search(in_line) and _OPEN_END.match(after))
    clause = _CLAUSE_END.split(in_line.rstrip(" :\"'("))[-1]
    rest = _CLAUSE_END.split(after, maxsplit=1)[0].partition(", ")[0]
    others = _OTHERS.search(clause.rpartition(", ")[2]) or _CONDITION.match(rest)
    of_others = others and not _OWNER.search(f"{clause} {rest}")
    mentioned = text[start] == '"' and in_line and not _HAPPENED.search(in_line)
    return Stance.TOLD if possible or of_others or mentioned or _TOLD_AFTER.match(after) else Stance.STATED


@dataclass
class Quotations:
    """Knows the lines that tell of another text: items of a list of changes, quotations (``> …``), code."""

    alone: bool
    """The answer for a quotation without words above it."""
    _before: Sequence[bytes] = ()
    """The last lines before those that are looked at."""
    _lines: Sequence[bytes] = ()
    _fenced: bool = False
    """True if `_lines`, or those before them, have a block of code: most logs have none."""

    def is_of_another(self, lines: Sequence[bytes], index: int) -> bool:
        """Return True for an item, and for a quotation or code below words that tell of others."""
        if lines is not self._lines:
            self._lines, self._fenced = lines, b"```" in b"\n".join([*self._before, *lines])
        if not self._fenced and not is_quoted(lines[index]):
            return _CHANGE.match(lines[index].lower()) is not None
        above = self._list_above(lines, index)
        if is_quoted(lines[index]):
            words = next((line for line in reversed(above) if line.strip() and not is_quoted(line)), None)
            return self.alone if words is None else not _OWN.search(words.lower())
        fence = max((at for at, line in enumerate(above) if line.startswith(b"```")), default=0)
        words = next((line.rstrip() for line in reversed(above[:fence]) if line.strip()), b"")
        text = f'{words.decode(errors="replace").lower() if words.endswith(b":") else ":"} "'
        stance = read_stance(text, len(text) - 1, len(text), (0, len(text)))
        return stance is not Stance.STATED or _CHANGE.match(lines[index].lower()) is not None

    def leave(self, lines: Sequence[bytes], end: int) -> None:
        """Forget the lines before `end`, but for the last ones: the next ones come without them."""
        self._before = self._list_above(lines, end)

    def _list_above(self, lines: Sequence[bytes], index: int) -> Sequence[bytes]:
        return [*self._before, *lines[max(0, index - _QUOTATION) : index]][-_QUOTATION:]


def is_quoted(line: bytes) -> bool:
    """Return True for a line of a quotation in Markdown."""
    return line.lstrip().startswith((b">", b"&gt;"))


def _find_quotation(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the place of the quotation or of the message with its error's name that holds a place."""
    first = max(0, start - 2 * _CLAUSE)
    opening, closing = text.rfind('"', first, start), text.find('"', end, end + 2 * _CLAUSE)
    if opening >= 0 and text.count('"', first, start) % 2 == 1:
        return opening, closing + 1 if closing >= 0 else end
    name = _ERROR_NAME.search(text, first, start)
    return (name.start() if name else start), end


def is_possible(text: str, start: int) -> bool:
    """Return True if a text in lower case says that what begins at `start` may happen, not that it did."""
    return bool(_POSSIBLE.search(text[max(0, start - _CLAUSE) : start]))


def split_prefix(line: bytes) -> tuple[str, str]:
    """Return the prefixes of a line, in lower case, and its words with single spaces.

    A line of decoration has no words.
    """
    text = _decode(line).replace("\r", " ").strip()
    if text[:1] == "{" and '"' in text:
        text = _read_json_message(text)
    if "\x1b" in text or "[" in text:
        text = re.sub(_ANSI, "", text)
    if "<" in text:
        text = re.sub(_TAG, " ", text)
    if "&" in text:
        text = html.unescape(html.unescape(text))
    if "\\" in text:
        text = re.sub(r"\\[nrt]", " ", text)
        text = re.sub(r"\\([`*_\[\]#<>\"'~|-])", r"\1", text)
    text = text.translate(_STRIPPED).replace("**", "")
    if "\u2013" in text or "\u2014" in text:
        text = re.sub("(?<![^ ])[\u2013\u2014](?=[a-z])", "--", text)  # an option after a correction
    text = text if text.isascii() else re.sub(_SCRIPTS, " ", text)
    whole = text
    for _ in range(8):
        text = text.lstrip()
        prefix = re.match(_PREFIX, text)
        if prefix is None:
            break
        text = text[prefix.end() :]
    prefixes = whole[: len(whole) - len(text)].lower()
    if not text.strip("^~-=_|━─ "):
        return prefixes, ""
    return prefixes, " ".join(text.split())


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        # A character cut at the end of a piece, or another encoding: cp1252 is what Windows writes.
        return line.decode("cp1252", "replace")


def _read_json_message(text: str) -> str:
    """Return the message of a log line written as JSON, as docker and structured loggers do."""
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(entry, dict):
        for key in ("log", "message", "msg", "MESSAGE", "text"):
            if isinstance(message := entry.get(key), str):
                return message
    return text
