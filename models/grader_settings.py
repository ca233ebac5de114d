"""Settings of the grader: who says whether a passage answers a query."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from annotated_types import Ge, Gt, Le
from pydantic import model_validator

from contracts.params import Count, Params
from models.endpoint_settings import Address, KeyPlace


class PriceParams(Params):
    """What tokens cost, in any currency; only for the accounts.

    Attributes:
        input: of a million tokens of prompts, >= 0. 0 counts nothing.
        output: of a million tokens of answers, >= 0. 0 counts nothing.
    """

    input: Annotated[float, Ge(0), Le(1e9)] = 0.0
    output: Annotated[float, Ge(0), Le(1e9)] = 0.0


class GraderParams(Params):
    """Who grades passages for crag_grading.

    Attributes:
        provider: `score` grades by the score of the ranking; `llm` asks a chat model behind an
            OpenAI-compatible endpoint, one call a passage.
        base_url: for `llm`, what stands before `/chat/completions`, as in http://127.0.0.1:8080/v1.
        model: for `llm`, the name of the model, as the endpoint knows it.
        keys: for `llm`, where API keys are: the name of an environment variable in capitals, or a path that
            begins with /, ./, ../ or ~/: a file with one key a line, or a folder of such files. Several keys
            are used in turn. Null sends none. A key itself is refused here.
        requests_per_minute: calls over all keys, evenly spaced, >= 1. At 1 a passage takes a minute; null
            sets no limit, and a service that is asked too often says so.
        concurrent_requests: calls at a time, over all shards of the process, 1 to 1024. 1 waits for every
            answer before the next question; many are limited by the service. Grades do not depend on it.
        token_budget: tokens that the calls of one run may be charged for, >= 1; a call is made only where
            its longest prompt and answer still fit. Little stops the run early, and it can be resumed with
            more; null sets no limit.
        max_answer_tokens: of one answer, 1 to 65536. Below some 30 no answer is whole, and a model that
            thinks first needs hundreds; what is not used is not charged for, but it is reserved.
        timeout_seconds: for one call, > 0. A short one gives up answers that may be charged for; a long one
            waits for a service that is silent.
        retries: how often a call is made again after a failure or an answer that is none, 0 to 20. 0 gives
            up at once; many bridge long outages, and pay for as many answers of a model that cannot.
        retry_seconds: the first pause before that, >= 0; it doubles each time, with as much jitter.
        prices: what tokens cost.
        file: grades that come before the provider's: a JSONL or CSV file with query_id, chunk_id and decision, as
            `dartflow review export` writes it, or decisions/DIGEST.parquet, as `dartflow review import` keeps it
            in the store. Pairs that it does not name are the provider's; null names none.
    """

    provider: Literal["score", "llm"] = "score"
    base_url: Address | None = None
    model: str | None = None
    keys: KeyPlace | None = None
    requests_per_minute: Count | None = None
    concurrent_requests: Annotated[int, Ge(1), Le(1024)] = 4
    token_budget: Annotated[int, Ge(1)] | None = 1_000_000
    max_answer_tokens: Annotated[int, Ge(1), Le(65536)] = 100
    timeout_seconds: Annotated[float, Gt(0), Le(86400)] = 60.0
    retries: Annotated[int, Ge(0), Le(20)] = 3
    retry_seconds: Annotated[float, Ge(0), Le(3600)] = 1.0
    prices: PriceParams = PriceParams()
    file: str | None = None

    @model_validator(mode="after")
    def _model_is_named(self) -> Self:
        if self.provider == "llm" and not (self.base_url and self.model):
            raise ValueError("provider llm needs base_url and model")
        return self


def llm_model_id(params: GraderParams) -> str:
    """The id of the LLM grader of these settings: all of them that can change a grade."""
    return f"{params.model} at {params.base_url}, {params.max_answer_tokens} answer tokens"
