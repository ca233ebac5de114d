"""LlmGrader: a chat model says whether a passage answers a query; what was paid for once is not paid for again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from threading import Lock

import stamina

from contracts.errors import InvalidAnswerError, ModelError, RefusedError, TransientError
from models.chat import chat_endpoint
from models.endpoint import Reply, UnansweredError
from models.grade_request import GradeRequest, body_of, grade_request, hash_of, parsed, read_grade, usage_in
from models.grader import Grade, Pair
from models.grader_settings import GraderParams, llm_model_id
from models.outcomes import Outcome, Spending, outcome_of
from models.token_budget import TokenBudget
from models.transcript import Transcript, TranscriptOutcome, Transcripts, Usage

_LONGEST_PAUSE = 60  # in first pauses
_MILLION = 1_000_000


class LlmGrader:
    """Asks for one pair a call, so that a grade depends on nothing but its pair. Safe for threads.

    A request that any run was answered before is not made again, nor one that is in flight. A call that was, or
    may have been, charged for has its transcript before its answer is used. An answer that is no grade is asked
    for again, `retries` times in the life of this object; then the pair is one that the model cannot grade.

    Args:
        params: the settings.
        transcripts: of this model; they name the run that pays.
        keys: as `models.api_keys.read_keys` gives them.
    """

    def __init__(self, params: GraderParams, transcripts: Transcripts, keys: Sequence[str]) -> None:
        self._params = params
        self._transcripts = transcripts
        self._endpoint = chat_endpoint(params, keys)
        self._budget = TokenBudget(params.token_budget, transcripts.spent(), transcripts.run_id)
        self._pool = ThreadPoolExecutor(params.concurrent_requests, "grader")
        self._where = f"grader {params.model}"
        self._asked: dict[str, Future[Grade]] = {}  # by hash of the request
        self._invalid = Counter[str]()
        self._lock = Lock()

    @property
    def model_id(self) -> str:
        """Endpoint, model and length of answers; the prompt is code."""
        return llm_model_id(self._params)

    def grade(self, pairs: Sequence[Pair]) -> list[Grade | None]:
        """A grade for each pair, in order; see `counting`."""
        return self.counting(Spending()).grade(pairs)

    def counting(self, spending: Spending) -> CountingLlmGrader:
        """The same grader, which notes in `spending` what it calls."""
        return CountingLlmGrader(self, spending)

    def grade_noting(self, pairs: Sequence[Pair], spending: Spending) -> list[Grade | None]:
        """A grade for each pair, in order, whatever the order of the answers.

        Pairs that can be graded are, and kept, before an error is raised; only a refusal or an outage leaves those
        alone that were not begun.

        Raises:
            RefusedError: no key is left, the service refuses, or the token budget has no room.
            TransientError: the service failed, as often as it was asked.
            InvalidAnswerError: the model gave no grade, as often as it was asked; names the chunk.
            ModelError: the service does not take the request for a pair; names the chunk.
            CheckpointError: a transcript cannot be written.
        """
        asked = [self._future(pair, spending) for pair in pairs]
        futures = [future for _, future in asked]
        try:
            for future in as_completed(set(futures)):
                if isinstance(_error_of(future), RefusedError | TransientError):
                    _cancel(futures)
        except BaseException:
            _cancel(futures)
            raise
        finally:
            self._forget(asked)
        errors = [
            _named(error, pair)
            for pair, future in zip(pairs, futures, strict=True)
            if (error := _error_of(future)) is not None
        ]
        if errors:
            raise min(errors, key=_rank)
        return [future.result() for future in futures]

    def _future(self, pair: Pair, spending: Spending) -> tuple[str, Future[Grade]]:
        """The grade of a pair, which is there, on its way, or asked for now; with the hash of its request."""
        request = grade_request(pair, str(self._params.model), self._params.max_answer_tokens)
        with self._lock:
            future = self._asked.get(request.hash)
            if future is None:
                future = self._pool.submit(self._grade_of, request, spending)
                self._asked[request.hash] = future
                return request.hash, future
        spending.note("reused")
        return request.hash, future

    def _forget(self, asked: Sequence[tuple[str, Future[Grade]]]) -> None:
        """Keeps grades, and errors that the same request would meet again; the others may be asked for once more."""
        with self._lock:
            for request_hash, future in asked:
                if not _is_final(future) and self._asked.get(request_hash) is future:
                    del self._asked[request_hash]

    def _grade_of(self, request: GradeRequest, spending: Spending) -> Grade:
        known = self._known(request)
        if known is not None:
            spending.note("reused")
            return known
        for attempt in stamina.retry_context(
            on=(TransientError, InvalidAnswerError),
            attempts=1 + self._params.retries - self._invalid[request.hash],
            timeout=None,
            wait_initial=self._params.retry_seconds,
            wait_jitter=self._params.retry_seconds,
            wait_max=_LONGEST_PAUSE * self._params.retry_seconds,
        ):
            with attempt:
                return self._ask(request, spending)
        raise AssertionError  # never: the last attempt returns or raises

    def _known(self, request: GradeRequest) -> Grade | None:
        """What was answered to the same request before, read as an answer is read now."""
        for transcript in self._transcripts.answered(request.hash):
            if hash_of(body_of(transcript.request)) == request.hash and transcript.answer is not None:
                try:
                    return read_grade(parsed(transcript.answer), request.passage_id, self._where)
                except InvalidAnswerError:
                    continue
        return None

    def _ask(self, request: GradeRequest, spending: Spending) -> Grade:
        """Makes one call within the budget, and writes it down before its answer is used."""
        most = Usage(prompt_tokens=len(request.body), answer_tokens=self._params.max_answer_tokens, estimated=True)
        self._budget.reserve(most.tokens)
        charged = 0
        try:
            try:
                reply = self._endpoint.post(request.body)
            except UnansweredError as error:
                charged = most.tokens
                self._keep(request, spending, "unanswered", most, because=str(error), ended=outcome_of(error))
                raise
            except ModelError as error:
                spending.note(outcome_of(error))
                raise
            spending.note("refused", times=reply.refused_keys)
            content = parsed(reply.text)
            usage = usage_in(content, most)
            charged = usage.tokens
            try:
                grade = read_grade(content, request.passage_id, self._where)
            except InvalidAnswerError as error:
                self._invalid[request.hash] += 1
                self._keep(request, spending, "invalid", usage, because=str(error), ended="invalid", reply=reply)
                raise
            self._keep(request, spending, "ok", usage, because=None, ended="ok", reply=reply)
            return grade
        finally:
            self._budget.settle(most.tokens, charged)

    def _keep(
        self,
        request: GradeRequest,
        spending: Spending,
        outcome: TranscriptOutcome,
        usage: Usage,
        *,
        because: str | None,
        ended: Outcome,
        reply: Reply | None = None,
    ) -> None:
        """Writes a call down, and notes it."""
        prices = self._params.prices
        cost = (usage.prompt_tokens * prices.input + usage.answer_tokens * prices.output) / _MILLION
        spending.note(ended, tokens=usage.tokens, cost=cost)
        self._transcripts.keep(
            Transcript(
                model_id=self.model_id,
                run_id=self._transcripts.run_id,
                request_hash=request.hash,
                attempt=1 + self._transcripts.attempts(request.hash),
                outcome=outcome,
                because=because,
                request=request.content,
                answer=None if reply is None else reply.text,
                usage=usage,
                cost=cost,
                seconds=None if reply is None else round(reply.seconds, 6),
                key=None if reply is None else reply.key,
            )
        )


class CountingLlmGrader:
    """An LlmGrader as one caller holds it: what is called for that caller is noted in `spending`."""

    def __init__(self, grader: LlmGrader, spending: Spending) -> None:
        self._grader = grader
        self._spending = spending

    @property
    def model_id(self) -> str:
        """That of the grader."""
        return self._grader.model_id

    def grade(self, pairs: Sequence[Pair]) -> list[Grade | None]:
        """The grades of the grader."""
        return self._grader.grade_noting(pairs, self._spending)


def _cancel(futures: Sequence[Future[Grade]]) -> None:
    """Drops what has not begun."""
    for future in futures:
        future.cancel()


def _error_of(future: Future[Grade]) -> BaseException | None:
    """What a future that is done ended with; None for a grade."""
    if future.cancelled():
        return TransientError("grader", "gave a call up, since others failed", next_step="See the other failures.")
    return future.exception()


def _is_final(future: Future[Grade]) -> bool:
    """Whether the same request would end in the same way: a grade, or a fault of the pair."""
    if not future.done() or future.cancelled():
        return False
    error = future.exception()
    return error is None or _is_of_the_pair(error)


def _is_of_the_pair(error: BaseException) -> bool:
    return isinstance(error, ModelError) and not isinstance(error, RefusedError | TransientError)


def _named(error: BaseException, pair: Pair) -> BaseException:
    """An error of a pair, with the chunk that it is about; the same request may be made for several."""
    if not _is_of_the_pair(error) or not isinstance(error, ModelError):
        return error
    where = f"{error.where}, chunk {pair.chunk_id}"
    return type(error)(where, error.problem, got=error.got, want=error.want, next_step=error.next_step)


def _rank(error: BaseException) -> int:
    """The weightiest first: a refusal, then what else is no fault of a pair, of which a dropped call says least."""
    if isinstance(error, RefusedError):
        return 0
    if _is_of_the_pair(error):
        return 3
    return 2 if isinstance(error, TransientError) else 1
