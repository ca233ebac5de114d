"""The base of every group of settings: unknown names and wrong types are refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Params(BaseModel):
    """Settings of one stage or one part; strict, so that a bool is no integer and "5" is no number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
