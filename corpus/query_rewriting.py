"""Query rewriting: a query cut down to what tells it apart, so that one more search finds something else."""

from __future__ import annotations

from collections.abc import Sequence

from corpus.corpus import Corpus
from corpus.tokeniser import words


def rewrite_queries(texts: Sequence[str], corpus: Corpus, terms: int) -> list[str]:
    """Cuts each query down to the words of its `terms` rarest distinct terms, rarest first, ties in query order.

    A term is as rare as few chunks of the corpus hold it; terms that none holds are dropped. Words
    come out case folded but not stemmed, so that a person can read them and a search tokenises them
    to the same terms again. A query of unknown terms alone becomes the empty text.
    """
    frequencies = corpus.keywords.document_frequencies
    terms_of: dict[str, list[int]] = {}
    rewritten = []
    for text in texts:
        word_of: dict[int, str] = {}
        for word in words(text):
            if word not in terms_of:
                terms_of[word] = corpus.keywords.term_ids(corpus.tokeniser.tokens(word))
            for term in terms_of[word]:
                word_of.setdefault(term, word)
        rarest = sorted(word_of, key=lambda term: int(frequencies[term]))[:terms]
        rewritten.append(" ".join(word_of[term] for term in rarest))
    return rewritten
