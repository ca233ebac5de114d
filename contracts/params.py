"""The base of every group of settings: unknown names and wrong types are refused."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict

# How many of something: from 1 to what a column of counts can hold.
Count = Annotated[int, Ge(1), Le(2**31 - 1)]


class Params(BaseModel):
    """Settings of one stage or one part; strict, so that a bool is no integer and "5" is no number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
