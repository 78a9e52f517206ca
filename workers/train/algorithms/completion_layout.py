"""A completion's tokens in order, whichever rows hold them: dense tensors for estimators that run along time."""

import torch
from torch import Tensor


class CompletionLayout:
    """Maps rows (R, T) to a dense layout (C, T') with one line per completion, and back.

    A row's span runs from its first sampled token to its last, so prompts and padding take no position and tool tokens
    in between keep theirs; spans of a completion follow one another in row order. A row without a masked token is left
    out: a rejected row is equivalent to a row that never existed.

    Example, two rows of one completion (p prompt, a, b, c sampled, t from the tool)::

        tokens_RT    [[p a a t b], [p p p c .]]
        dense        [[a a t b c]]
        mask_CT      [[x x . x x]]

    Args:
        completion_ids_R: int64, the completion that each row belongs to, 0 ... num_completions - 1.
        num_completions: number of completions, C; some may have no row.
        mask_RT: bool, sampled tokens that count.
        sampled_RT: bool, tokens that the policy sampled, whether they count or not.
    """

    def __init__(self, completion_ids_R: Tensor, num_completions: int, mask_RT: Tensor, sampled_RT: Tensor) -> None:
        self.shape_RT = (rows, width) = mask_RT.shape
        used_RT = sampled_RT & mask_RT.any(dim=1, keepdim=True)
        position_T = torch.arange(width, device=mask_RT.device, dtype=torch.int32)
        first_R = _row_min(torch.where(used_RT, position_T, width))
        end_R = -_row_min(torch.where(used_RT, -1 - position_T, 0))
        length_R = (end_R - first_R).clamp(min=0)
        length_C = length_R.new_zeros(num_completions).index_add_(0, completion_ids_R, length_R)
        self.shape_CT = (num_completions, int(length_C.max()) if num_completions else 0)
        # Where each row's span begins in its completion's line: after the spans of the completion's earlier rows.
        order_R = torch.argsort(completion_ids_R, stable=True)
        before_R = torch.empty_like(length_R)
        before_R[order_R] = length_R[order_R].cumsum(0) - length_R[order_R]
        before_C = length_C.cumsum(0) - length_C
        begin_R = completion_ids_R * self.shape_CT[1] + before_R - before_C[completion_ids_R]
        # Flat index of every laid-out token among the rows, and in the dense layout.
        span_RT = (position_T >= first_R.unsqueeze(1)) & (position_T < end_R.unsqueeze(1))
        self._rows_N = span_RT.reshape(-1).nonzero().squeeze(1)
        start_R = torch.arange(rows, device=mask_RT.device) * width + first_R
        self._dense_N = self._rows_N + torch.repeat_interleave(begin_R - start_R, length_R)
        self.mask_CT = self.to_dense(mask_RT, fill=False)
        """bool, tokens that count."""

    def to_dense(self, values_RT: Tensor, fill: float = 0.0) -> Tensor:
        """Lay out row values densely, `fill` where there is no token; unmasked tokens within a span are copied too."""
        values_CT = values_RT.new_full(self.shape_CT, fill)
        return _copy_elements(values_RT, self._rows_N, values_CT, self._dense_N)

    def to_rows(self, values_CT: Tensor) -> Tensor:
        """Put dense values back into their rows; 0 elsewhere."""
        return _copy_elements(values_CT, self._dense_N, values_CT.new_zeros(self.shape_RT), self._rows_N)

    def on_last_token(self, values_C: Tensor) -> Tensor:
        """Return a dense tensor with each completion's value on its last masked token, 0 elsewhere.

        A trailing tool token or a rejected token does not lose a completion's reward.
        """
        return torch.where(self.last_CT, values_C.unsqueeze(1), 0.0)

    @property
    def last_CT(self) -> Tensor:
        """bool, each completion's last masked token; none where it has no token."""
        count_CT = self.mask_CT.cumsum(dim=1)
        return self.mask_CT & (count_CT == count_CT[:, -1:])


class LeftPacking:
    """Moves the tokens of a mask to the left of their lines, in order and without holes, and back.

    Args:
        mask_CT: bool, tokens to pack.
    """

    def __init__(self, mask_CT: Tensor) -> None:
        position_N = torch.arange(mask_CT.shape[1], device=mask_CT.device)
        self.mask_CN = position_N < mask_CT.sum(dim=1, keepdim=True)
        """bool, the packed tokens: as many in each line as in `mask_CT`."""
        self._from_N = mask_CT.reshape(-1).nonzero().squeeze(1)
        self._to_N = self.mask_CN.reshape(-1).nonzero().squeeze(1)

    def pack(self, values_CT: Tensor) -> Tensor:
        """Return the values at their packed positions; 0 behind the last one."""
        return _copy_elements(values_CT, self._from_N, values_CT.new_zeros(values_CT.shape), self._to_N)

    def unpack(self, values_CN: Tensor) -> Tensor:
        """Return packed values at their original positions; 0 outside the mask."""
        return _copy_elements(values_CN, self._to_N, values_CN.new_zeros(values_CN.shape), self._from_N)


def _copy_elements(values: Tensor, from_N: Tensor, into: Tensor, to_N: Tensor) -> Tensor:
    """Copy elements between two tensors by flat index."""
    into.view(-1).index_copy_(0, to_N, values.reshape(-1).index_select(0, from_N))
    return into


def _row_min(positions_RT: Tensor) -> Tensor:
    """Return the minimum of each row, int64; 0 where rows have no width."""
    return (positions_RT.amin(dim=1) if positions_RT.shape[1] else positions_RT.new_zeros(len(positions_RT))).long()
