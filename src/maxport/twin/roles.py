"""What kind of number a config field holds, read from the field's name.

The names are the vocabulary that config classes share (`hidden_size`, `n_embd`, ...); no model
name occurs here. A name that no rule knows is classified by its type and size in `shrink`.
"""

from __future__ import annotations

import re

Role = str

_EXACT: dict[Role, str] = {
    "hidden": "hidden_size d_model n_embd emb_dim embedding_dim dim n_embed model_dim hidden_dim",
    "width": "word_embed_proj_dim input_embedding_size output_embedding_size embedding_size "
    "lru_width hidden_size_global backbone_hidden_size input_size out_hidden_size "
    "cross_attention_hidden_size attention_hidden_size vision_output_dim projector_input_dim "
    "projector_output_dim output_channels",
    "intermediate": "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size "
    "dim_ff dff d_inner feed_forward_size intermediate_size_mlp dense_intermediate_size mlp_dim "
    "n_inner prefix_dense_intermediate_size mlp_hidden_size inner_dim",
    "expert_intermediate": "moe_intermediate_size expert_ffn_hidden_size shared_intermediate_size "
    "moe_shared_expert_intermediate_size shared_expert_intermediate_size moe_latent_size",
    "layers": "num_hidden_layers num_layers n_layer n_layers decoder_layers encoder_layers "
    "num_encoder_layers num_decoder_layers num_blocks num_layers_per_stack",
    "one": "conf_num_hidden_layers num_global_layers depth num_nextn_predict_layers",
    "heads": "num_attention_heads n_head n_heads num_heads attention_heads "
    "decoder_attention_heads encoder_attention_heads num_encoder_attention_heads "
    "num_decoder_attention_heads num_query_heads",
    "kv_heads": "num_key_value_heads num_kv_heads kv_n_heads num_query_groups n_kv_heads "
    "multi_query_group_num n_head_kv",
    "head_dim": "head_dim d_head dim_head kv_channels attention_head_size attention_head_dim",
    "global_head_dim": "global_head_dim",
    "global_kv_heads": "num_global_key_value_heads",
    "vocab": "vocab_size decoder_vocab_size audio_vocab_size padded_vocab_size",
    "same_vocab": "vocab_size_per_layer_input",
    "positions": "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions "
    "max_source_positions context_length seq_length max_sequence_length position_bias_num_buckets",
    "original_positions": "original_max_position_embeddings",
    "window": "sliding_window window_size attention_window_size keep_window_size "
    "local_attn_chunk_length lsh_attn_chunk_length mem_len sliding_window_size",
    "double_window": "local_attention",
    "chunk": "attention_chunk_size",
    "rotary_dim": "rotary_dim rotary_ndims",
    "experts": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "top_k": "num_experts_per_tok moe_topk moe_k moe_top_k top_k_experts",
    "expert_groups": "n_group",
    "top_groups": "topk_group",
    "layer_index": "first_k_dense_replace num_dense_layers moe_layer_start_index max_window_layers",
    "last_layer_index": "moe_layer_end_index",
    "shared_kv_layers": "num_kv_shared_layers",
    "period": "attn_layer_period expert_layer_period sliding_window_pattern "
    "_sliding_window_pattern no_rope_layer_interval global_attn_every_n_layers "
    "interleave_moe_layer_step decoder_sparse_step full_attention_interval moe_layer_interval "
    "moe_layer_freq",
    "offset": "attn_layer_offset expert_layer_offset",
    "rank": "q_lora_rank kv_lora_rank o_lora_rank laurel_rank adapter_rank "
    "hidden_size_per_layer_input prompt_mid_dim",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
    "nope_rope_dim": "qk_head_dim",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "tiny": "index_topk index_block_size index_topk_blocks o_groups num_centroids "
    "centroid_intermediate_top_k zero_expert_num num_codebooks",
    "state": "mamba_d_state state_size ssm_state_size",
    "mamba_head_dim": "mamba_d_head mamba_head_dim mamba_headdim",
    "mamba_heads": "mamba_n_heads mamba_num_heads n_mamba_heads",
    "mamba_groups": "mamba_n_groups n_groups mamba_ngroups",
    "mamba_width": "mamba_d_ssm",
    "scan_chunk": "mamba_chunk_size chunk_size",
    "dt_rank": "time_step_rank mamba_dt_rank",
    "linear_key_heads": "linear_num_key_heads",
    "linear_value_heads": "linear_num_value_heads",
    "linear_key_dim": "linear_key_head_dim",
    "linear_value_dim": "linear_value_head_dim",
    "block": "block_size",
    "scalar_int": "query_pre_attn_scalar",
    "scale_positions": "floor_scale",
    "small_vocab": "pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab "
    "codebook_size num_position_embeddings",
    "small_dim": "pronunciation_embed_dim shape_embed_dim base_channels num_filters",
    "kernel": "conv_kernel conv_L_cache linear_conv_kernel_dim mamba_d_conv conv1d_width d_conv",
    "small_scalar": "expansion_ratio alibi_bias_max intermediate_multiple_size "
    "position_bias_max_distance",
    "image": "image_size",
    "patch": "patch_size",
    "partial_rotary": "partial_rotary_factor rotary_pct rotary_percentage rope_pct "
    "rotary_emb_fraction",
    "theta": "rope_theta rotary_emb_base rope_local_base_freq global_rope_theta local_rope_theta "
    "compress_rope_theta rotary_base",
}
_BY_NAME: dict[str, Role] = {n: role for role, names in _EXACT.items() for n in names.split()}

_PATTERNS: tuple[tuple[Role, str], ...] = (
    ("keep", r"dropout|pdrop|initializer|^init_|_init_?|_std$|loss|coef$|aux|layerdrop|smoothing"
     r"|jitter|_prob$|std_dev|variance|time_step|_dt_|a_log|threshold|norm_min|noise"
     r"|num_labels|pretraining_tp|chunk_size_feed_forward"),
    ("token", r"token_ids?$|token_index$"),
    ("eps", r"(^|_)eps$|epsilon$"),
    ("softcap", r"soft_?cap(ping)?$|_cap$"),
    ("clip", r"clip|_limit$"),
    ("scalar", r"multiplier|scal(e|ing)|scale_factor|alpha|beta|_factor$|temperature|fraction"),
)  # fmt: skip


def role_of(name: str, canonical: str | None = None) -> Role | None:
    """The role of a config field, or None when its name says nothing.

    Args:
        name: The field as the config class spells it (`n_embd`).
        canonical: Its common name through `attribute_map` (`hidden_size`), if it has one.
    """
    for spelling in (name, canonical):
        if spelling in _BY_NAME:
            return _BY_NAME[spelling]
    for role, pattern in _PATTERNS:
        if re.search(pattern, name):
            return role
    return None
