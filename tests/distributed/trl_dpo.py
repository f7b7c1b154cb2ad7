"""One batch of TRL's DPOTrainer: `python tests/distributed/trl_dpo.py` records it in trl_dpo.json.

Needs an environment with trl 1.16.0, accelerate and the versions of torch and transformers of this project. TRL is no
dependency of the project, so test_dpo.py compares with the recorded numbers. Weights follow from a formula, not from a
random generator, so that every version of torch makes the same models.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

RECORD = Path(__file__).with_suffix(".json")
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
PAIRS = [
    ("w5 w9 w33", "w7 w8 w9 w10", "w11"),
    ("w2 w3", "w60", "w61 w62 w63 w20 w21 w22"),
    ("w40 w41 w42 w43 w44 w45 w46", "w12 w13", "w13 w12"),
    ("w50", "w51 w52 w53 w54 w55 w56 w57 w58", "w50 w50 w50"),
]
BETA = 0.3


def write_model(folder: Path, phase: float) -> Path:
    """Write a Qwen3 whose weights are sines; another `phase` gives another model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).float()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            positions = torch.arange(parameter.numel(), dtype=torch.float64)
            wave = torch.sin(phase + 1.7 * number + 12.9898 * positions).reshape(parameter.shape)
            parameter.copy_(1 + 0.2 * wave if "norm" in name else 0.4 * wave)
    model.save_pretrained(folder)
    return folder


def record(out: Path) -> None:
    """Write what TRL's trainer computes for all pairs in one batch: token ids, loss, rewards, log-probs."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    words = {"<pad>": 0, "<eos>": 1} | {f"w{number}": number for number in range(2, SIZES["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    rows = [{"prompt": p + " ", "chosen": f"{c} ", "rejected": f"{r} "} for p, c, r in PAIRS]
    found: dict[str, Any] = {"beta": BETA, "losses": {}}
    with tempfile.TemporaryDirectory() as work:
        folders = [write_model(Path(work, name), phase) for name, phase in (("policy", 0.0), ("reference", 0.4))]
        for kind in ("sigmoid", "ipo"):
            policy, reference = (
                AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders
            )
            settings = DPOConfig(
                output_dir=work, loss_type=[kind], beta=BETA, per_device_train_batch_size=len(PAIRS), report_to=[],
                use_cpu=True, bf16=False, gradient_checkpointing=False,
            )  # fmt: skip
            trainer = DPOTrainer(
                policy, reference, args=settings, train_dataset=Dataset.from_list(rows), processing_class=fast
            )
            batch = next(iter(torch.utils.data.DataLoader(
                trainer.train_dataset, batch_size=len(PAIRS), collate_fn=trainer.data_collator
            )))  # fmt: skip
            loss = trainer.compute_loss(trainer.model.train(), batch)
            metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
            found["losses"][kind] = {"loss": loss.item()} | {
                name: metrics[name]
                for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
            }
            found["answers"] = [
                {"tokens": ids[mask.bool()].tolist(), "trained": trained[mask.bool()].tolist()}
                for ids, mask, trained in zip(
                    batch["input_ids"], batch["attention_mask"], batch["completion_mask"], strict=True
                )
            ]  # the chosen answers, then the rejected ones
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    out.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    record(RECORD)
