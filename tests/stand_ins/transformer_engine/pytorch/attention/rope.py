from transformer_engine.pytorch.kernels import kernel

apply_rotary_pos_emb = apply_fused_qkv_rotary_pos_emb = kernel
