"""What truncation did to the rows of a job, and which rows have less room than they ask for."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from batchgen.prompts.store import PromptStore

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TruncationAudit:
    """Rows that are too long beside their output; without those that are errors.

    Attributes:
        policy: ``prompt.truncation``.
        cut_rows: rows whose prompt was cut.
        cut_tokens: tokens cut from all of them.
        short_rows: rows whose prompt leaves less room than their ``max_tokens``.
        short_tokens: tokens of ``max_tokens`` that have no room, at least.
    """

    policy: str
    cut_rows: int
    cut_tokens: int
    short_rows: int
    short_tokens: int

    @classmethod
    def of(
        cls, policy: str, store: PromptStore, rows: Rows, max_tokens: Rows, max_model_len: int
    ) -> Self:
        """Count over some store rows.

        Args:
            policy: ``prompt.truncation``.
            store: the prompts, cut already.
            rows: [R] the store rows that count.
            max_tokens: [store rows] most tokens of an output, as far as the model's length goes.
            max_model_len: tokens of a prompt and its output together.
        """
        cut = store.cut_tokens[rows]
        short = np.maximum(0, store.lengths[rows] + max_tokens[rows] - max_model_len)
        return cls(
            policy=policy,
            cut_rows=int((cut > 0).sum()),
            cut_tokens=int(cut.sum(dtype=np.int64)),
            short_rows=int((short > 0).sum()),
            short_tokens=int(short.sum()),
        )

    def describe(self) -> list[str]:
        """Say it in lines for a person; none where every row fits."""
        lines = []
        if self.cut_rows:
            lines.append(
                f"prompt.truncation={self.policy}: {self.cut_tokens:,} prompt tokens are cut from "
                f"{self.cut_rows:,} rows"
            )
        if self.short_rows and self.policy == "shrink_max_tokens":
            lines.append(
                f"prompt.truncation={self.policy}: {self.short_rows:,} rows get fewer tokens than "
                "their max_tokens"
            )
        elif self.short_rows:
            lines.append(
                f"warning: {self.short_rows:,} rows have less room for their output than "
                "max_tokens and may end early; prompt.truncation=shrink_max_tokens says that this "
                "is meant, prompt.truncation=truncate_left, _right or _middle cuts the prompts"
            )
        return lines
