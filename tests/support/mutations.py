"""Mistakes that the tests must notice: each replaces one piece of the code, and the tests named beside it must fail.

`make test-mutations` applies them one at a time, on a copy of the tree; tests/test_mutations.py looks whether the list
still fits the code.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    file: str
    old: str  # occurs once
    new: str
    tests: tuple[str, ...]  # node ids of pytest
    equivalent: str = ""  # why nothing changes: then the tests must pass


ALPHA = "affine_attn/nn/alpha.py"
EPILOGUE, KERNELS = "affine_attn/kernels/epilogue/eager.py", "affine_attn/kernels/epilogue/kernels.py"
FUSED, TILES = "affine_attn/kernels/epilogue/launch.py", "affine_attn/kernels/epilogue/tiles.py"
LAUNCH, SCHEDULER = "affine_attn/kernels/launch.py", "affine_attn/kernels/sm90/scheduler.py"
SM90_BACKWARD = "affine_attn/kernels/sm90/backward.py"
MASKS, SUMS = "affine_attn/core/masks.py", "affine_attn/kernels/visible_sums/launch.py"
NONFINITE, BLOCKS = "affine_attn/core/nonfinite.py", "affine_attn/core/blocks.py"
STATS = "affine_attn/core/stats.py"
BLOCKED, DECODE = "affine_attn/engines/blocked.py", "affine_attn/kernels/decode/launch.py"
FLEX, STOCK = "affine_attn/engines/flex.py", "affine_attn/engines/aten.py"
PIECES = "affine_attn/core/pieces.py"
TRITON, SCORES = "affine_attn/kernels/flash/launch.py", "affine_attn/kernels/flash/scores.py"
FLASH, TANH = "affine_attn/kernels/flash/backward_kernels.py", "affine_attn/kernels/tanh.py"
LOCKS = "affine_attn/runs/locks.py"
CACHE, LOSSES = "affine_attn/distill/cache.py", "affine_attn/distill/losses.py"
SAMPLER, TEACHER = "affine_attn/data/sampler.py", "affine_attn/distill/teacher.py"
PREPARED_MASK, MODELING = "affine_attn/models/masks.py", "affine_attn/models/modeling.py"


def _in(file: str, *names: str) -> tuple[str, ...]:
    """The tests of tests/ROOM/test_FILE.py, which is given as ROOM/FILE."""
    room, name_of_file = file.split("/")
    return tuple(f"tests/{room}/test_{name_of_file}.py::test_{name}" for name in names)


def _epilogue(*cases: str) -> tuple[str, ...]:
    return _in("kernels/interpreter", *(f"values_and_gradients[{case}]" for case in cases))


_OF_GROUPS = "B1-H3-K1-T70x133-D80"  # a group of 3 heads, chunked prefill, two slices of columns
_SINKS = (
    *_in("engines/engines", "sinks_of_both_shapes_and_infinite_ones", "flex_on_rows_without_keys_and_infinite_sinks"),
    *_in("kernels/interpreter", "sinks_of_both_shapes_and_infinite_ones", "rows_without_keys_and_infinite_sinks"),
)
_ROUNDED_ONCE = _in("engines/engines", "gradients_of_the_torch_epilogue_are_fp32_sums_that_are_rounded_once")

MUTATIONS: dict[str, Mutation] = {
    # Sampler, statistics, alpha.
    "seed 1 in epoch 11 has the order of seed 11 in epoch 1": Mutation(
        SAMPLER, 'f"{seed} {epoch}"', 'f"{seed}{epoch}"', _in("data/sampler", "the_order_is_random_enough")
    ),
    "a sampler stands within a batch of all ranks": Mutation(
        SAMPLER, "consumed % (self.batch_size * self.world)", "consumed % self.batch_size",
        _in("data/sampler", "sampler_refusals"),
    ),
    "0 log 0 is NaN": Mutation(
        STATS, "torch.xlogy(kept, kept)", "kept * kept.log()",
        _in("core/stats", "a_sink_that_takes_everything_leaves_no_entropy"),
    ),
    "logits of a long sequence are summed in fp32": Mutation(
        STATS, "rows.total.sum(-1, dtype=torch.float64)", "rows.total.sum(-1)",
        _in("core/stats", "the_mean_of_many_logits_that_cancel"),
    ),
    "a copy does not warn where its original has": Mutation(
        ALPHA, '"_warned": False, ', "", _in("nn/alpha", "a_copy_warns_anew")
    ),
    "a single token is not committed": Mutation(
        ALPHA, "(count > 0)", "(count > 1)", _in("nn/alpha", "a_single_token_is_averaged")
    ),
    # Epilogues: of torch, kernels, launchers.
    "a sink of -inf on a row without keys, in torch": Mutation(
        EPILOGUE, 'torch.where(z == float("-inf"), 0.0, torch.sigmoid(z - sink))', "torch.sigmoid(z - sink)",
        _SINKS[1:2],
    ),
    "a sink of inf in the backward, in torch": Mutation(
        EPILOGUE, "torch.where(self.saved_lse == sink, 0.0, sink - self.saved_lse)", "(sink - self.saved_lse)",
        _SINKS[:1],
    ),
    "dv is rounded twice": Mutation(
        EPILOGUE, "dv += _values_backward(self.du, call)", "dv += _values_backward(self.du, call).to(dv.dtype)",
        _ROUNDED_ONCE,
    ),
    "the gradient of a sink is summed in 16 bits": Mutation(
        EPILOGUE, "dsink.sum((0, 2)) if", "dsink.to(call.q.dtype).sum((0, 2)) if", _ROUNDED_ONCE
    ),
    "row statistics are sums of rounded products": Mutation(
        EPILOGUE, "g, o_rows = _rows(dy, rows).to(dtype), ", "g, o_rows = _rows(dy, rows), ", _ROUNDED_ONCE
    ),
    "a sink of -inf on a row without keys, in a kernel": Mutation(
        KERNELS, 'tl.where(b_lse == float("-inf"), 0.0, tl.sigmoid(b_lse - b_sink))', "tl.sigmoid(b_lse - b_sink)",
        _SINKS[3:],
    ),
    "a sink of inf in the backward, in a kernel": Mutation(
        KERNELS, "tl.exp(tl.where(b_lses[i] == b_sinks[i], 0.0, b_sinks[i] - b_lses[i]))",
        "tl.exp(b_sinks[i] - b_lses[i])", _SINKS[2:],
    ),
    "a query that is not finite spoils a row without keys": Mutation(
        NONFINITE, "(bad_q & sees_any[..., None])", "bad_q",
        _in("api/decoding", "an_inf_or_nan_of_a_query_changes_nothing"),
    ),
    "a segment of older keys is left out": Mutation(
        TILES, "max(0, cdiv(older, tile.segment))", "max(0, older // tile.segment)",
        _epilogue(f"affine-{_OF_GROUPS}-causal-positive"),
    ),
    "chunks of heads do not add up to a group": Mutation(
        TILES, "if group % n == 0", "if n", _epilogue(f"affine-{_OF_GROUPS}-causal-positive")
    ),
    "rows of the last tile are not negated": Mutation(
        FUSED, "cdiv(queries, ROWS)", "queries // ROWS",
        _epilogue("alpha_only-B2-H4-K2-T100x100-D32-causal-negative"),
    ),
    "keys that every query sees get the sum of the last segment": Mutation(
        FUSED, "self.totals[:, 0]", "self.totals[:, -1]", _epilogue(f"affine-{_OF_GROUPS}-causal-positive")
    ),
    "gradients of row statistics are those of the first columns": Mutation(
        FUSED, "functools.reduce(torch.add, x)", "x[0]",
        _in("kernels/interpreter", "slices_of_columns_of_several_sequences"),
    ),
    "slices of columns write into each other's part": Mutation(
        FUSED, "tiling.batch * tiling.heads * tiling.queries", "tiling.heads * tiling.queries",
        _in("kernels/interpreter", "slices_of_columns_of_several_sequences"),
    ),
    "a failed backward leaves rows negated": Mutation(
        FUSED, "                negate_rows(self.call, self.dy)  # which is the caller's\n", "",
        _in("kernels/interpreter", "a_failed_backward_leaves_the_incoming_gradient_as_it_was"),
    ),
    "rows of an input are negated": Mutation(
        FUSED, "is_dense and not is_shared", "is_dense",
        _in("kernels/sm90_backward", "a_gradient_of_y_that_is_an_input"),
    ),
    "sinks of heads are taken for neighbours in memory": Mutation(
        LAUNCH, "\"stride_sh\": steps[0]", "\"stride_sh\": 1",
        _in("kernels/interpreter", "any_memory_layout_will_do"),
    ),
    "every sequence has LogN's scale of the first": Mutation(
        FUSED, "row_scale.stride(0) if row_scale is not None and row_scale.shape[0] > 1 else 0", "0",
        _in("kernels/interpreter", "masks_of_any_size_type_and_layout[padding]"),
    ),
    "a sum of fp32 is rounded before it joins dv": Mutation(
        FUSED, "dv[:, :, seen_by_all] += whole", "dv[:, :, seen_by_all] += whole.to(dv.dtype)",
        _in("kernels/interpreter", "gradients_of_the_fused_epilogue_are_fp32_sums"),
    ),
    "tiles of heads that share no values are half as long": Mutation(
        TILES, "tile._replace(tokens=2 * tile.tokens)", "tile",
        _in("kernels/interpreter", "slices_of_columns_of_several_sequences[affine-K2]"),
        equivalent="how many tokens a program has at a time changes its speed alone; both passes read the same plan",
    ),
    # Engines.
    "the zero head of a beta is left out": Mutation(
        DECODE, "(group + (call.beta is not None)) * queries", "group * queries",
        _in("kernels/interpreter", "decoding_over_a_cache[1-affine-full-5]"),
    ),
    "rows of two programs are finished by one": Mutation(
        DECODE, "splits == 1 and row_blocks == 1", "splits == 1",
        _in("kernels/interpreter", "decoding_over_a_cache[1-affine-full-5]"),
    ),
    "every sequence has the padding of the first": Mutation(
        DECODE, "0 if padding is None else padding.stride(0)", "0",
        _in("kernels/interpreter", "decoding_with_padding_and_documents_by_name"),
    ),
    "a window of decoding leaves out its oldest key": Mutation(
        DECODE, '"window": min(mask.window or 0, keys)', '"window": min((mask.window or 1) - 1, keys)',
        _in("kernels/interpreter", "decoding_over_a_cache[1-softmax-lengths_window-5]"),
    ),
    "a block mask outlives its mask": Mutation(
        FLEX, "masks[shape][0] != versions", "masks[shape][0] is None",
        _in("engines/engines", "a_mask_whose_tensors_are_changed_in_place"),
    ),
    "blocks of all sequences are those of the first": Mutation(
        FLEX, "call.q.shape[0] if call.mask.tensors else None", "None",
        _in("engines/engines", "a_mask_whose_tensors_are_changed_in_place"),
    ),
    "dk is that of the last block of queries": Mutation(
        BLOCKED, "dk[:, :, keys] +=", "dk[:, :, keys] =", _in("engines/engines", "blocks_of_rows_add_up[causal]")
    ),
    "the gradient of a sink is that of the last block": Mutation(
        BLOCKED, "dsink += row.sum((0, 2))", "dsink = row.sum((0, 2))",
        _in("engines/engines", "blocks_of_rows_add_up[causal]"),
    ),
    "pieces are merged by the wrong log-sum-exp": Mutation(
        STOCK, "o2 * torch.exp(z2 - z)", "o2 * torch.exp(z1 - z)",
        _in("core/reference", "gradients_are_those_of_finite_differences[every_stage-sdpa]"),
    ),
    "older keys reach into the square": Mutation(
        PIECES, "slice(0, tk - tq))", "slice(0, tk - tq + 1))",
        _in("core/reference", "gradients_are_those_of_finite_differences[every_stage-sdpa]"),
    ),
    "a padded row is one of the document": Mutation(
        PIECES, "while start < stop and low[start] >= high[start]:", "while start < stop and False:",
        _in("core/pieces", "padding_is_in_no_piece"),
    ),
    "rows of a band see one key more": Mutation(
        PIECES, "(place < high), 0.0", "(place <= high), 0.0",
        _in("engines/engines", "pieces_of_masks_add_up[window7-sink+affine+gate-torch.float32]"),
    ),
    "gradients of keys in several pieces are those of the last": Mutation(
        STOCK, "total[:, :, some] += part", "total[:, :, some] = part",
        _in("engines/engines", "pieces_of_masks_add_up[window7-sink+affine+gate-torch.float32]"),
    ),
    "gradients of scores lack the factor's unit": Mutation(
        TRITON, "call.scale / unit if self.logit == SCALE_INVARIANT else call.scale", "call.scale",
        _in("kernels/interpreter", "far_tiles_are_as_exact_as_near_ones"),
    ),
    "far tiles of queries take the table of keys": Mutation(
        TRITON, 'shared.arguments(of_keys, "queries")', 'shared.arguments(of_keys, "keys")',
        _in("kernels/interpreter", "far_tiles_are_as_exact_as_near_ones"),
    ),
    "a window that hides one key is none": Mutation(
        TRITON, "mask.window < self.keys else", "mask.window < self.keys - 1 else",
        _in("kernels/interpreter", "masks_of_any_size_type_and_layout[window]"),
    ),
    "a window of all keys is one": Mutation(
        TRITON, "mask.window < self.keys else", "mask.window <= self.keys else",
        _in("kernels/interpreter", "masks_of_any_size_type_and_layout[window]"),
        equivalent="a query's own slot and all before it are at most as many as there are keys: it hides none",
    ),
    "documents are told apart by 32 bits of their ids": Mutation(
        TRITON, "self.documents = self.first\n", "self.documents = mask.documents.int()\n",
        _in("kernels/interpreter", "masks_of_any_size_type_and_layout[documents]"),
    ),
    "padding is read in the order of memory": Mutation(
        TRITON, "mask.padding.to(torch.uint8).contiguous()", "mask.padding.to(torch.uint8)",
        _in("kernels/interpreter", "masks_of_any_size_type_and_layout[padding]"),
    ),
    "channels of a gradient are taken for neighbours in memory": Mutation(
        TRITON, "do = do if do.stride(-1) == 1 else do.contiguous()", "do = do.detach()",
        _in("kernels/interpreter", "a_gradient_of_y_in_any_memory_layout"),
    ),
    "scores with a soft cap have the slope of those without": Mutation(
        SCORES, "b_p * (1.0 - b_qk * b_qk)", "b_p", _in("kernels/interpreter", "scores_with_a_soft_cap")
    ),
    "the slope of a soft cap is that of the whole score": Mutation(
        FLASH, "_times_slope(b_p, b_kq, b_factor, cap_factor, LOGIT)",
        "_times_slope(b_p, b_score2, b_factor, cap_factor, LOGIT)",
        _in("kernels/interpreter", "scores_with_a_soft_cap"),
    ),
    "a tanh has the scale of q.k": Mutation(
        TRITON, "self.qk_factor = (call.scale if cap is None else cap) * unit", "self.qk_factor = call.scale * unit",
        _in("kernels/interpreter", "scores_with_a_soft_cap"),
    ),
    "decoding puts the scale where the cap is": Mutation(
        DECODE, "(call.scale if cap is None else cap) * LOG2E", "call.scale * LOG2E",
        _in("kernels/interpreter", "decoding_with_a_soft_cap_and_values_of_another_width"),
    ),
    "small scores lose digits below their cap": Mutation(
        TANH, "b_size < 0.6", "b_size < 0.06", _in("kernels/interpreter", "tanh_of_every_size")
    ),
    "tanh is even": Mutation(
        TANH, "tl.where(b_x < 0.0, -b_large, b_large)", "b_large", _in("kernels/interpreter", "tanh_of_every_size")
    ),
    "tiles are those of the keys' width": Mutation(
        TRITON, "max(call.q.shape[-1], call.value_dim)", "call.q.shape[-1]",
        _in("kernels/aot", "kernels_compile_within_limits[flash_other_width-sm90-bf16-D64]"),
    ),
    "values are as wide as keys to the epilogue": Mutation(
        TILES, "make(call.q.shape[:3], call.v.shape, mask.causal, sums, restarts, window)",
        "make(call.q.shape[:3], call.k.shape, mask.causal, sums, restarts, window)",
        _in("kernels/interpreter", "values_of_another_width_than_keys"),
    ),
    "sums for values are as wide as keys": Mutation(
        FUSED, "(batch, kv_heads, queries, call.value_dim)", "(batch, kv_heads, queries, call.k.shape[3])",
        _in("kernels/interpreter", "values_of_another_width_than_keys"),
    ),
    "decoding finishes as many channels as keys have": Mutation(
        DECODE, '"DV": value_dim', '"DV": dim',
        _in("kernels/interpreter", "decoding_with_a_soft_cap_and_values_of_another_width"),
    ),
    # Sums of visible values.
    "keys are seen by the queries that they see": Mutation(
        SUMS, "back, ahead = ahead, back", "back, ahead = back, ahead",
        _in("kernels/visible_sums", "against_the_dense_formula[window7-B2-H2-K1-T37x37-D32-torch.float32]"),
    ),
    "rows that are keys are shifted like queries": Mutation(
        SUMS, '"row_offset": 0 if transposed else older', '"row_offset": older',
        _in("kernels/visible_sums", "against_the_dense_formula[window7-B1-H3-K1-T70x200-D80-torch.bfloat16]"),
    ),
    "padding hides queries": Mutation(
        SUMS, "real is not None and not transposed", "real is not None",
        _in("kernels/visible_sums", "against_the_dense_formula[padding_both_ways-B1-H2-K1-T300x300-D64-torch.float32]"),
    ),
    "the last tile has no total": Mutation(
        SUMS, "tiles = cdiv(sources, n)", "tiles = sources // n",
        _in("kernels/visible_sums", "against_the_dense_formula[causal-B2-H2-K1-T37x37-D32-torch.float32]"),
    ),
    "gradients of values are those of the last block": Mutation(
        BLOCKS, "dx[:, :, keys] +=", "dx[:, :, keys] =", _in("engines/engines", "blocks_of_rows_add_up[causal]")
    ),
    # Kernels for Hopper.
    "loads of a flash kernel are not pipelined": Mutation(
        TRITON, "256: Config(128, 32, num_warps=8, num_stages=2)", "256: Config(128, 32, num_warps=8, num_stages=1)",
        _in("kernels/aot", "kernels_compile_within_limits[flash-sm90-bf16-D256]"),
    ),
    "query heads read the kv head of another group": Mutation(
        SCHEDULER, "head * kv_heads // heads", "head % kv_heads",
        _in("kernels/sm90_forward", "programs_share_the_tiles_evenly"),
    ),
    "a head of those at once is left out": Mutation(
        SCHEDULER, "places[first : first + heads_together]", "places[first : first + heads_together - 1]",
        _in("kernels/sm90_forward", "programs_share_the_tiles_evenly"),
    ),
    "a list of tiles ends where its program still looks": Mutation(
        SCHEDULER, "max(map(len, lists)) + 1", "max(map(len, lists))",
        _in("kernels/sm90_forward", "programs_share_the_tiles_evenly"),
    ),
    "rows that TMA cannot load are let through": Mutation(
        SCHEDULER, "b % 8 or h % 8 or t % 8 or ", "", _in("kernels/sm90_forward", "rows_that_tma_cannot_load_are_told")
    ),
    "beta in units of the scores is not scaled back": Mutation(
        SM90_BACKWARD, "1 / scale", "scale",
        _in("kernels/sm90_backward", "gradients[affine-B1-H2-K1-T300x300-D64]"),
    ),
    "dq lacks the scale of the scores": Mutation(
        SM90_BACKWARD, "sums[:, :, : call.tq], call.scale", "sums[:, :, : call.tq], 1.0",
        _in("kernels/sm90_backward", "gradients[sink-B1-H2-K1-T300x300-D64]"),
    ),
    "dq is added to what memory held": Mutation(
        SM90_BACKWARD, "torch.zeros(shape", "torch.empty(shape",
        _in("kernels/sm90_backward", "gradients[sink-B1-H2-K1-T300x300-D64]"),
    ),
    "the caller's gradient stays negated": Mutation(
        SM90_BACKWARD, "if rows.do is dy:", "if rows.do is not dy:",
        _in("kernels/sm90_backward", "a_failed_launch_leaves_the_gradient_of_y_as_it_was"),
    ),
    # Masks.
    "a window has a key more": Mutation(
        MASKS, "p - j < window", "p - j <= window", _in("core/masks", "visible_is_the_definition")
    ),
    "the query's own key is not counted": Mutation(
        MASKS, "+ high).contiguous(), right=True)", "+ high).contiguous())",
        _in("core/masks", "count_is_the_number_of_visible_keys"),
    ),
    "a block of rows begins a key late": Mutation(
        MASKS, "first - self.window + 1)", "first - self.window + 2)",
        _in("core/masks", "key_range_covers_what_a_block_of_rows_sees"),
    ),
    "ids of documents overflow": Mutation(
        MASKS, "own = found.start.gather(1, p.clamp(min=0))", "own = self.documents.long().gather(1, p.clamp(min=0))",
        _in("core/masks", "document_ids_may_be_any_integer_of_their_type"),
    ),
    "queries before the first slot are of its document": Mutation(
        MASKS, " & (p >= 0)", "", _in("core/masks", "visible_is_the_definition")
    ),
    # Losses and teachers.
    "the gradient knows no temperature": Mutation(
        LOSSES, "share = (1 - hard) * spec.temperature", "share = 1 - hard",
        _in("distill/losses", "every_loss_in_float64"),
    ),
    "a top-k target is not renormalised": Mutation(
        LOSSES, "else _log_sum_exp(target, spec.temperature)",
        "else _log_sum_exp(target, spec.temperature) * (target.shape == logits.shape)",
        _in("distill/losses", "top_k_target_is_exact_for_the_truncated_teacher"),
    ),
    "tokens of two chunks count twice": Mutation(
        LOSSES, "valid[: first - start] = False", "valid[:0] = False", _in("distill/losses", "every_loss_in_float64")
    ),
    "entries that are not shared have a gradient": Mutation(
        LOSSES, "dweight[job.vocabulary :] = 0", "dweight[job.vocabulary :] = 1",
        _in("distill/losses", "a_restricted_vocabulary_is_as_if_the_rest_did_not_exist"),
    ),
    "labels take the place of the mask": Mutation(
        LOSSES, "valid & (labels != ignore_index)", "labels != ignore_index",
        _in("distill/losses", "masked_tokens_have_no_influence_whatever_they_hold"),
    ),
    "student and teacher change places in the mixture": Mutation(
        LOSSES, "(beta * q + (1 - beta) * p)", "((1 - beta) * q + beta * p)",
        _in("distill/losses", "every_loss_in_float64"),
    ),
    "an unused entry hides one that is used": Mutation(
        LOSSES, '"amin", include_self=False', '"amax", include_self=False',
        _in("distill/losses", "entries_that_are_not_used_may_repeat_one_that_is"),
    ),
    "the head's gradient adds up in 16 bits": Mutation(
        LOSSES, "torch.empty(weight.shape, dtype=statistics", "torch.empty(weight.shape, dtype=job.dtype",
        _in("distill/losses", "the_head_s_gradient_adds_up_in_fp32"),
    ),
    "a token has the targets of the next": Mutation(
        CACHE, "first = row * self.sequence_length", "first = row * self.sequence_length + 1",
        _in("distill/cache", "entries_that_do_not_count_are_left_out", "items_have_the_targets_of_the_live_teacher"),
    ),
    "a file that another process writes is taken": Mutation(
        LOCKS, "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass",
        _in("distill/cache", "processes_share_the_work"),
    ),
    "what a killed process wrote is left at the end": Mutation(
        LOCKS, "        file.truncate()\n", "", _in("distill/cache", "processes_share_the_work")
    ),
    "entries that do not count are cached": Mutation(
        CACHE, "plan.k, plan.vocabulary)", "plan.k)", _in("distill/cache", "entries_that_do_not_count_are_left_out")
    ),
    "log-sum-exp is taken in 16 bits": Mutation(
        TEACHER, "of_all.float().logsumexp(-1)", "of_all.logsumexp(-1).float()",
        _in("distill/cache", "the_largest_are_those_of_the_whole_logits"),
    ),
    # Models.
    "queries turn by the places of the oldest keys": Mutation(
        MODELING, "cos[:, -q.shape[2] :]", "cos[:, : q.shape[2]]",
        _in("models/streaming", "with_eviction_it_is_attention_on_the_kept_tokens"),
    ),
    "a layer has no window": Mutation(
        MODELING, "attention_mask.windowed(self.window)", "attention_mask.mask",
        _in("models/model", "windows_per_layer"),
    ),
    "the average starts at 0": Mutation(
        MODELING, "init.constant_(module.alpha_ma, module.affine.start)", "init.zeros_(module.alpha_ma)",
        _in("models/model", "the_average_starts_where_its_spec_says"),
    ),
    "tensors of another attention are dropped": Mutation(
        MODELING, '("missing_keys", "unexpected_keys")', '("missing_keys",)',
        _in("models/model", "checkpoints_of_another_attention_are_refused"),
    ),
    "padding inside of a document cuts it": Mutation(
        PREPARED_MASK, "steps != 1, steps <= 0)", "steps != 1, steps != 1)",
        _in("models/model", "padding_inside_of_a_document_does_not_cut_it"),
    ),
}  # fmt: skip
