"""What becomes a keyword term, and what does not."""

from __future__ import annotations

import sys
import threading
import unicodedata
from typing import get_args

import pytest
import Stemmer
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from corpus.tokeniser import ENGLISH_STOP_WORDS, Language, Tokeniser, TokeniserParams

PLAIN = Tokeniser(TokeniserParams(language="none", stop_words="none"))
ENGLISH = Tokeniser(TokeniserParams())


SINGLE_NAMES = ("CJK UNIFIED", "CJK COMPATIBILITY IDEOGRAPH", "HIRAGANA", "HENTAIGANA")


def slow_words(text: str) -> list[str]:
    """The rule, character by character."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    words, word = [], ""
    for character in folded:
        if character in "\u00ad\u200c\u200d\u2060\ufeff":
            continue
        mark = unicodedata.category(character).startswith("M")
        if character in "々〆〇" or (character.isalnum() and unicodedata.name(character, "").startswith(SINGLE_NAMES)):
            words += [word, character]
            word = ""
        elif character.isalnum() or character == "_" or (word and mark):
            word += character
        else:
            words.append(word)
            word = ""
    return [word for word in [*words, word] if word]


def test_words_are_runs_of_letters_digits_and_underscores():
    assert PLAIN.tokens("Reset: the ERR_404, v2.10 (really)!") == ["reset", "the", "err_404", "v2", "10", "really"]


def test_english_drops_stop_words_and_stems_the_rest():
    assert ENGLISH.tokens("The passwords were reset by an administrator, and resetting is not logged") == [
        "password", "were", "reset", "administr", "reset", "log",
    ]  # fmt: skip


def test_repeated_words_are_kept_in_their_order():
    assert PLAIN.tokens("b a b") == ["b", "a", "b"]


@pytest.mark.parametrize("text", ["", "   ", "?!", "\n", "…"])
def test_a_text_without_words_has_no_terms(text):
    assert PLAIN.tokens(text) == []


def test_a_text_of_stop_words_alone_has_no_terms():
    assert ENGLISH.tokens("To be, or not to be") == []


def test_case_and_compatible_forms_make_no_difference():
    assert PLAIN.tokens("STRASSE ﬁle ①") == PLAIN.tokens("straße FILE 1") == ["strasse", "file", "1"]


def test_composed_and_decomposed_letters_are_the_same_word():
    assert PLAIN.tokens("e\u0301cole") == PLAIN.tokens("école") == ["école"]
    # U+0390 falls apart when its case is folded.
    assert PLAIN.tokens("\u0390ota") == ["\u0390ota"]


def test_vowel_signs_stay_within_their_word():
    assert PLAIN.tokens("हिन्दी भाषा, தமிழ்") == ["हिन्दी", "भाषा", "தமிழ்"]


def test_han_and_hiragana_are_words_one_by_one_and_other_scripts_are_not():
    assert PLAIN.tokens("東京のカタカナ 한국어 v2版") == ["東", "京", "の", "カタカナ", "한국어", "v2", "版"]


def test_signs_that_nobody_sees_do_not_cut_a_word():
    assert PLAIN.tokens("infor\u00admation pass\u200dword \ufefffirst") == ["information", "password", "first"]


def test_other_languages_are_stemmed_by_their_own_stemmer():
    spanish = Tokeniser(TokeniserParams(language="spanish", stop_words="none"))
    polish = Tokeniser(TokeniserParams(language="polish", stop_words="none"))
    assert spanish.tokens("contraseñas") == spanish.tokens("contraseña")
    assert polish.tokens("hasłami") == polish.tokens("hasłem")


def test_every_language_of_the_settings_has_a_stemmer():
    assert set(get_args(Language)) - {"none"} == set(Stemmer.algorithms()) - {"porter", "dutch_porter"}


def test_an_unknown_language_is_refused():
    with pytest.raises(ValidationError, match="language"):
        TokeniserParams(language="klingon")


def test_there_are_33_english_stop_words():
    assert len(ENGLISH_STOP_WORDS) == 33


def test_threads_that_share_a_tokeniser_agree():
    words = [
        f"{stem}{end}" for stem in ("connect", "relat", "nation", "hop") for end in ("ed", "ing", "ion", "al")
    ] * 50
    text, results = " ".join(words), []
    threads = [threading.Thread(target=lambda: results.append(ENGLISH.tokens(text))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [ENGLISH.tokens(text)] * 4


def test_every_character_of_unicode_follows_the_rule():
    characters = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code))[0] != "C"]
    text = " ".join(f"a{character}b" for character in characters)
    assert len(characters) > 100_000
    assert PLAIN.tokens(text) == slow_words(text)


TEXTS = st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("aB_9 .ßéのन\u093f東\u00ad")))


@settings(deadline=None, max_examples=100)
@given(TEXTS)
def test_words_follow_the_rule_character_by_character(text):
    assert PLAIN.tokens(text) == slow_words(text)


@settings(deadline=None, max_examples=100)
@given(TEXTS)
def test_a_normalised_text_has_the_terms_of_the_raw_text(text):
    normalised = " ".join(unicodedata.normalize("NFKC", text).split())
    assert ENGLISH.tokens(normalised) == ENGLISH.tokens(text)


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet=st.characters(max_codepoint=127)))
def test_plain_ascii_takes_a_short_cut_to_the_same_words(text):
    assert PLAIN.tokens(text) == PLAIN.tokens(text + " é")[:-1]
