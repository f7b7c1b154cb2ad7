"""Jobs of two and three nodes as the tests of the launchers render them."""

from pathlib import Path

from grpo_mcore import __version__

ROOT = Path(__file__).resolve().parents[4]
IMAGE = f"launch.container=ghcr.io/your-org/grpo-mcore:{__version__}"
CLAIM = "launch.k8s.volume_claim=grpo-runs"
# The manifests in launchers/k8s are for a cluster of H100 nodes with RDMA and gang scheduling.
H100 = (
    IMAGE, CLAIM, "launch.k8s.scheduler=kueue", "launch.k8s.queue=training", "launch.k8s.rdma_resource=rdma/ib",
    "launch.k8s.rdma_count=8", "launch.cpus_per_node=96", "launch.memory_gb_per_node=1024", "launch.k8s.shm_gb=256",
    "launch.k8s.secrets={HF_TOKEN: huggingface/token, WANDB_API_KEY: wandb/key}",
    "launch.k8s.node_selector={nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}",
)  # fmt: skip
TWO_NODES = "recipes/grpo-llama3.1-8B-2n8g.yaml"
# Two nodes train, a third generates.
DISAGGREGATED = (
    "launch.name=grpo-3n8g-disaggregated", "cluster.num_nodes=3",
    "policy.generation.colocated={enabled: false, resources: {num_nodes: 1}}",
)  # fmt: skip
