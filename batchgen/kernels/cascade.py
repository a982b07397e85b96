"""Paged attention that reads a shared prefix once for all the rows that share it.

A row's keys fall into segments that it shares with its neighbours, and its own. Each is
attended to by itself; the results join by their log-sum-exp, which is exact (Hydragen,
FlashInfer's cascade). Everything works on whole groups of rows: on a CPU one call a row
costs more than its arithmetic.

Shapes: T packed tokens, Hq query heads, Hkv key/value heads, G query heads to each of
them, D head size, N pool blocks of B tokens. Query head ``h`` reads key/value head
``h // G``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

# Scores computed at a time, in elements, where torch's fused attention cannot be used.
_MAX_SCORES = 1 << 21
# Elements of a mask for the fused one, which wants it written out for every query head.
_MAX_BIAS = 1 << 24


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """Blocks that a range of tokens sees as a whole.

    Attributes:
        blocks: [n] int64 blocks, all full.
        first_token, end_token: the packed tokens that see them.
    """

    blocks: torch.Tensor
    first_token: int
    end_token: int


@dataclass(frozen=True, slots=True)
class OwnKeys:
    """Rows of like size with the keys behind their shared segments, padded to one shape.

    R rows, n queries and W blocks a row at most, C = W * B keys.

    Attributes:
        tokens: [R, n] packed tokens; padding repeats a row's last one.
        real: [Q] places in the flattened [R, n] that are no padding.
        blocks: [R, W] int64 blocks; padding is any valid block.
        hidden: [R, n, C] what a query may not see: later keys and padding.
        unused: [U] places in the flattened [R, C] that no query may see; they may hold NaN.
    """

    tokens: torch.Tensor
    real: torch.Tensor
    blocks: torch.Tensor
    hidden: torch.Tensor
    unused: torch.Tensor
    _biases: dict[int, torch.Tensor] = field(default_factory=dict)

    def bias(self, group: int, queries: slice) -> torch.Tensor:
        """Return what to add to some queries' scores: [R, 1, q * G, C] float32.

        It is the same in every layer; that of all queries at once is kept.
        """
        hidden = self.hidden[:, queries]
        is_whole = hidden.shape == self.hidden.shape
        if is_whole and group in self._biases:
            return self._biases[group]
        bias = torch.zeros(hidden.shape, device=hidden.device)
        bias.masked_fill_(hidden, float("-inf"))
        wide = bias[:, None, :, None].expand(-1, -1, -1, group, -1).flatten(2, 3)
        if is_whole:
            self._biases[group] = wide
        return wide


@dataclass(frozen=True, slots=True)
class CascadeLayout:
    """How a step's rows share their keys.

    Every token is in exactly one of ``own``; it may be in several segments.
    """

    segments: Sequence[SharedSegment]
    own: Sequence[OwnKeys]


def cascade_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    layout: CascadeLayout,
    *,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend causally to each row's blocks, in float32.

    Args:
        query: [T, Hq, D].
        key_cache: [N, B, Hkv, D].
        value_cache: [N, B, Hkv, Dv].
        layout: which keys each token sees.
        scale: factor on the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``.

    Returns:
        [T, Hq, Dv] in the query's dtype.
    """
    attention = _Attention(scale, softcap)
    num_tokens, num_heads, _ = query.shape
    num_kv_heads = key_cache.shape[2]
    # By key/value head: the queries that read it stand together.
    grouped = query.float().view(num_tokens, num_kv_heads, num_heads // num_kv_heads, -1)
    out = grouped.new_empty(*grouped.shape[:3], value_cache.shape[-1])
    lse = grouped.new_empty(grouped.shape[:3])
    for rows in layout.own:
        _attend_own(grouped, key_cache, value_cache, rows, attention, out, lse)
    for segment in layout.segments:
        _join_segment(grouped, key_cache, value_cache, segment, attention, out, lse)
    return out.view(num_tokens, num_heads, -1).to(query.dtype)


def _attend_own(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: OwnKeys,
    attention: "_Attention",
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Fill ``out`` [T, Hkv, G, Dv] and ``lse`` [T, Hkv, G] of some rows from their own keys."""
    num_rows, n = rows.tokens.shape
    key, value = (_gather(cache, rows) for cache in (key_cache, value_cache))
    chosen = query.index_select(0, rows.tokens.flatten()).view(num_rows, n, *query.shape[1:])
    mixed, sums = attention(chosen.transpose(1, 2), key, value, rows)
    places = rows.tokens.flatten().index_select(0, rows.real)
    for target, result in ((out, mixed), (lse, sums)):
        flat = result.transpose(1, 2).reshape(num_rows * n, *target.shape[1:])
        target.index_copy_(0, places, flat.index_select(0, rows.real))


def _gather(cache: torch.Tensor, rows: OwnKeys) -> torch.Tensor:
    """Copy the rows' keys or values: [R, Hkv, C, D] float32, zeros where none may look."""
    num_rows, width = rows.blocks.shape
    found = cache.index_select(0, rows.blocks.flatten()).float()
    found.flatten(0, 1).index_fill_(0, rows.unused, 0.0)
    return found.view(num_rows, width * cache.shape[1], *cache.shape[2:]).transpose(1, 2)


def _join_segment(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    segment: SharedSegment,
    attention: "_Attention",
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attend a range of tokens to a segment and join the result to theirs."""
    tokens = slice(segment.first_token, segment.end_token)
    # [1, Hkv, P, D] views with strides.
    key, value = (
        cache.index_select(0, segment.blocks).flatten(0, 1).float().transpose(0, 1)[None]
        for cache in (key_cache, value_cache)
    )
    found = attention(query[tokens].transpose(0, 1)[None], key, value, None)
    mixed, other = (result[0].transpose(0, 1) for result in found)
    joined = torch.logaddexp(lse[tokens], other)
    out[tokens].mul_((lse[tokens] - joined).exp_()[..., None])
    out[tokens].addcmul_(mixed, (other - joined).exp_()[..., None])
    lse[tokens] = joined


@dataclass(frozen=True, slots=True)
class _Attention:
    """Softmax attention that also gives the logarithm of its normaliser."""

    scale: float
    softcap: float | None

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: OwnKeys | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend [R, H, n, G, D] queries to [R, H, C, D] keys, a bounded part at a time.

        Args:
            query: float32, as all others, in any strides.
            key: as many heads as the queries have groups.
            value: [R, H, C, Dv].
            rows: says what is hidden; None if nothing is.

        Returns:
            [R, H, n, G, Dv] and the [R, H, n, G] log-sum-exp of the scores.
        """
        num_rows, num_heads, n, group, size = query.shape
        is_fused = self.softcap is None and size == value.shape[-1] and query.device.type == "cpu"
        of_one_query = num_rows * group * key.shape[2]
        if is_fused:
            piece = n if rows is None else _MAX_BIAS // of_one_query
        else:
            piece = _MAX_SCORES // (num_heads * of_one_query)
        attend = self._fused if is_fused else self._explicit
        piece = max(1, piece)
        parts = [
            attend(query[:, :, at : at + piece], key, value, rows, slice(at, at + piece))
            for at in range(0, n, piece)
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)

    def _fused(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: OwnKeys | None,
        queries: slice,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Use what torch's scaled_dot_product_attention calls; it alone gives the sums."""
        group = query.shape[3]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query.flatten(2, 3),
            key,
            value,
            0.0,
            False,
            attn_mask=None if rows is None else rows.bias(group, queries),
            scale=self.scale,
        )
        return _by_group(out, group), _by_group(lse, group)

    def _explicit(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: OwnKeys | None,
        queries: slice,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group = query.shape[3]
        scores = torch.matmul(query.flatten(2, 3) * self.scale, key.transpose(2, 3))
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if rows is not None:
            hidden = rows.hidden[:, None, queries, None]
            _by_group(scores, group).masked_fill_(hidden, float("-inf"))
        highest = scores.amax(dim=-1, keepdim=True)
        weights = scores.sub_(highest).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        out = torch.matmul(weights, value).div_(total)
        lse = (total.log_() + highest)[..., 0]
        return _by_group(out, group), _by_group(lse, group)


def _by_group(tensor: torch.Tensor, group: int) -> torch.Tensor:
    """View [R, H, n * G, ...] as [R, H, n, G, ...]."""
    return tensor.view(*tensor.shape[:2], -1, group, *tensor.shape[3:])
