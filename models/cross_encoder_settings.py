"""Settings of cross-encoders: which one reads the candidates, where it is, and by which id it is known."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, MinLen
from pydantic import Field, model_validator

from contracts.params import Count, Params
from models.endpoint_settings import Address, KeyPlace

# What a given score is: a sigmoid makes a probability of a logit.
Scores = Literal["probability", "logit"]


class HttpParams(Params):
    """A rerank service.

    Attributes:
        base_url: where its `/rerank` lies, as in https://api.jina.ai/v1 or http://localhost:8000. It is written
            down with the run and is no place for a key.
        model: the name of the model, as the service knows it.
        keys: where API keys are: the name of an environment variable in capitals, as in JINA_API_KEY, or a path
            that begins with /, ./, ../ or ~/: a file with one key a line, or a folder of such files. Several keys
            are used in turn. Null sends none. A key itself is refused here.
        scores: what the service calls relevance_score: a `probability` in [0, 1] (0 and 1 count as within 1e-9
            of them), or a `logit`.
        passages_per_request: how many passages of a query go in one request at the most, >= 1. A service that
            pads may give a passage a score that depends on the others of its request, by rounding as a rule: at 1
            it cannot, but every passage is a request.
        passage_characters: where passages are cut before they are sent, >= 1: the model should be able to read so
            many. A query is not cut.
        timeout_seconds: when a request is given up, > 0; the shard is then tried again (executor.retries).
    """

    base_url: Address | None = None
    model: Annotated[str, MinLen(1)] | None = None
    keys: KeyPlace | None = None
    scores: Scores = "probability"
    passages_per_request: Count = 64
    passage_characters: Count = 8000
    timeout_seconds: Annotated[float, Gt(0)] = 60.0


class ColumnParams(Params):
    """Scores that were made elsewhere.

    Attributes:
        file: a Parquet file with the columns `query` (text), `chunk_id` and `score`, a row a pair. Queries are
            normalised like those of the log. A pair that a run needs and the file lacks is an error: its query
            becomes a dead letter. crag_grading asks for hits of its corrective search too.
        scores: what `score` is: a `probability` in [0, 1] (0 and 1 count as within 1e-9 of them), or a `logit`.
    """

    file: Annotated[str, MinLen(1)] | None = None
    scores: Scores = "probability"


class CrossEncoderParams(Params):
    """Which cross-encoder reads the candidates.

    Attributes:
        provider: `onnx` reads a model from a folder; `http` asks a service for `/rerank` in the shape of Cohere,
            Jina and vLLM; `column` takes scores from a file; `none` has no cross-encoder, and the other parts of
            the blended score then carry its weight.
        folder: for `onnx`, a folder with model.onnx and tokenizer.json; null takes the embedded model
            (ms-marco-MiniLM-L-12-v2, English, about 6 passages a second and core).
        threads: how many pairs (`onnx`) or requests (`http`) are under way at once, over all shards of the process;
            null means one a core. More is faster up to the cores there are, or to what the service takes. Scores do
            not depend on it.
    """

    provider: Literal["none", "onnx", "http", "column"] = "onnx"
    folder: str | None = None
    threads: Annotated[int, Ge(1)] | None = None
    http: HttpParams = Field(default_factory=HttpParams)
    column: ColumnParams = Field(default_factory=ColumnParams)

    @model_validator(mode="after")
    def _the_provider_has_what_it_needs(self) -> Self:
        if self.provider == "http" and (self.http.base_url is None or self.http.model is None):
            raise ValueError("the provider http needs http.base_url and http.model")
        if self.provider == "column" and self.column.file is None:
            raise ValueError("the provider column needs column.file")
        return self


def http_model_id(params: HttpParams) -> str:
    """Everything that a score of the service may depend on, but for what it changes behind the same name."""
    address = (params.base_url or "").partition("://")[2].rstrip("/")
    return (
        f"http {address} {params.model} {params.scores}, {params.passage_characters} characters, "
        f"{params.passages_per_request} a request"
    )
