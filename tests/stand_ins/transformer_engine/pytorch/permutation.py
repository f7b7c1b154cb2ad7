from transformer_engine.pytorch.kernels import kernel

moe_permute = moe_permute_with_probs = moe_unpermute = kernel
moe_sort_chunks_by_index = moe_sort_chunks_by_index_with_probs = kernel
