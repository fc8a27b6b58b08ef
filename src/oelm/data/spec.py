"""Which data a run reads, and how it is cut. A value; no torch here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from oelm.values import Value


class DataSpec(Value):
    """A named data set (oelm data list), or files of the user's own with `path` and `task`.

    A run's identity takes the data set's name and fingerprint-relevant settings; where the files lie
    (`folder`) is left out of it, what they hold is recorded as a fingerprint.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    path: str | None = None  # name = "local": a file or folder of the user's
    task: Literal["lm", "classify", "tag", "qa", "recall"] | None = None  # only for name = "local"
    columns: dict[str, str] = Field(
        default_factory=dict
    )  # local files: text, text2, label, tokens, tags, question, context, answers
    tokenizer: Annotated[str, Field(min_length=1)] = "gpt2"  # gpt2 | bert | bytes | demo-bpe | a tokenizer.json
    context: Annotated[int, Field(ge=2, le=2**20)] = 512  # tokens of a window or the longest example
    packing: Literal["windows", "documents"] = "windows"
    selection: Literal["validation", "test"] = "validation"  # "test" is the original's leak, for replication only
    tokens: Annotated[int, Field(ge=1, le=10**12)] | None = None  # lm: read only this many training tokens
    examples: Annotated[int, Field(ge=1, le=10**8)] | None = None  # read only this many training examples
    bucketing: bool = True  # examples of similar length share a batch
    # the synthetic recall task
    pairs: Annotated[int, Field(ge=1, le=4096)] = 16
    symbols: Annotated[int, Field(ge=4, le=60000)] = 512
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # of made or carved splits; not the run's seed

    @model_validator(mode="after")
    def _local(self) -> DataSpec:
        if self.name == "local" and (self.path is None or self.task is None):
            raise ValueError('name = "local" needs path and task')
        if self.name != "local" and (self.path is not None or self.task is not None or self.columns):
            raise ValueError('path, task and columns belong to name = "local"')
        return self


def as_data(value: Any) -> Any:
    """A table from a bare data set name."""
    return {"name": value} if isinstance(value, str) else value
