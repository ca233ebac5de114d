"""Exact tokens: identifiers, codes and quotations of a query that should stand in a passage letter by letter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from contracts.columns import Array, Ragged
from corpus.corpus import Corpus

_QUOTED = re.compile(
    r"""(?<!\w)["“„](?=\S)([^"“”„]+)["“”]|«([^«»]+)»|`([^`]+)`"""
    r"""|(?<!\w)['\u2018](?=\S)([^'\u2018\u2019]+)['\u2019](?!\w)"""  # a quotation mark, not an apostrophe
)
_AROUND = "([{<>}])\"'“”„\u2018\u2019«»`,;:!?…"
_ABBREVIATION = re.compile(r"[^\W\d_](\.[^\W\d_])+")
_MADE_UP = re.compile(
    r"\w(?:[.:=@\\]{1,2}|_)\w"  # spec.nodeName, std::move, max_tokens, key=value
    r"|^[/~]|/.*/"  # /etc/hosts, docs/tasks/run; but not and/or
    r"|^-\w$|^--\w|^[$@#.]\w"  # -v, --dry-run, $HOME, .gitignore
    r"|^\w(?:\+\+|#)$"  # C++
)
_CAPITALS = re.compile(r"[^\W\d_]+(-[^\W\d_]+)+")  # ERR-TIMEOUT
_NUMBERS = re.compile(r"\d[-.:/]\d+[-.:/]\d|^#\d")  # 10.0.0.1, 2021-07-22, #1234; but not 3.5 and not 10:30


def _looks_made_up(word: str) -> bool:
    """Whether a word looks like a name that a machine gave or reads."""
    if word.isalpha() and (word.islower() or word.istitle() or word.isupper()):
        return False  # nearly every word
    if not any(map(str.isalpha, word)):
        return _NUMBERS.search(word) is not None
    if any(map(str.isdigit, word)):
        return True
    if any(left.islower() and right.isupper() for left, right in pairwise(word)):
        return True
    if word.isupper() and _CAPITALS.fullmatch(word):
        return True
    return _MADE_UP.search(word) is not None and not _ABBREVIATION.fullmatch(word)


def exact_tokens(text: str) -> tuple[str, ...]:
    r"""What of a raw query text should stand in a passage letter by letter: each once, in order.

    Strings in quotation marks or backticks, and words that look made up rather than spoken: letters
    mixed with digits, inner `_ . : = @ \`, paths, options, inner capitals, capitals joined by hyphens,
    numbers of three groups or more. Plain words, acronyms, bare numbers (they count more often than
    they name) and hyphenated words are not: `kube-apiserver` cannot be told from `well-known`; who
    means it exactly puts it in quotation marks. Inside quotation marks no further token is looked for.
    """
    quoted = [next(filter(None, groups)).strip().rstrip(".,;").rstrip() for groups in _QUOTED.findall(text)]
    words = [word.lstrip(_AROUND).rstrip(_AROUND + ".") for word in _QUOTED.sub(" ", text).split()]
    named = [word for word in words if _looks_made_up(word)]
    return tuple(dict.fromkeys(token for token in (*quoted, *named) if token))


def _standing_alone(token: str) -> re.Pattern[str]:
    """Finds a token that no letter, digit or underscore continues: ERR-410 is not in ERR-4102."""
    before = r"(?<!\w)" if re.match(r"\w", token) else ""
    after = r"(?!\w)" if re.search(r"\w$", token) else ""
    return re.compile(f"{before}{re.escape(token)}{after}")


def exact_shares(texts: Sequence[str], candidates: Ragged, corpus: Corpus) -> Array:
    """(candidates,) float64 in [0, 1]: the share of the query's exact tokens that the passage has verbatim.

    Args:
        texts: (queries,) raw query texts.
        candidates: for each query the chunk rows.
        corpus: gives the passages, with their titles if those are searched.
    """
    shares = np.zeros(len(candidates.values))
    tokens = {query: found for query, text in enumerate(texts) if (found := exact_tokens(text))}
    concerned = np.unique(candidates.values[np.isin(candidates.rows, list(tokens))])
    passages = corpus.passage_texts(concerned)
    for query, found in tokens.items():
        part = slice(candidates.offsets[query], candidates.offsets[query + 1])
        own = [passages[place] for place in np.searchsorted(concerned, candidates.values[part])]
        for token in found:
            pattern = _standing_alone(token)  # for the few passages that hold the token at all
            # Python looks for a token ten times as fast as Arrow, which reads character by character.
            shares[part] += [token in text and pattern.search(text) is not None for text in own]
        shares[part] /= len(found)
    return shares
