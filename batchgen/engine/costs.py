"""Whether swapping a request's blocks is cheaper than computing them again."""

from dataclasses import dataclass

# Weight of the newest step in the running mean.
_NEWEST = 0.1


@dataclass(slots=True)
class PreemptionCosts:
    """Measured speeds.

    Attributes:
        swap_s_per_block: seconds to copy a block one way over the link.
        compute_s_per_token: seconds of a step for each of its tokens; a running mean.
    """

    swap_s_per_block: float = 0.0
    compute_s_per_token: float | None = None

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """Take note of a step."""
        newest = seconds / num_tokens
        if self.compute_s_per_token is None:
            self.compute_s_per_token = newest
        else:
            self.compute_s_per_token += _NEWEST * (newest - self.compute_s_per_token)

    def swap_is_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        """Compare both ways over the link with computing these tokens again."""
        if self.compute_s_per_token is None:
            return True
        return 2 * num_blocks * self.swap_s_per_block <= num_tokens * self.compute_s_per_token
