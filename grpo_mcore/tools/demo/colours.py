"""A task that needs no download and cannot be solved without its images: which colour is the square?

The prompt is the same for all rows, so that nothing but the image tells the answer. The model is a tiny Qwen3-VL with
random weights; its tower stays as it is.
"""

import base64
import json
import random
from io import BytesIO
from pathlib import Path

from grpo_mcore.tools.demo.arithmetic import make_tokenizer
from grpo_mcore.tools.demo.tiny_models import make_tiny_model

COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 60, 220), "yellow": (230, 210, 40)}
QUESTION = "which colour?"
SIDE, SQUARE = 64, 24
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_colour_task(folder: Path, model: Path, seed: int = 0, *, rows: int = 480, shuffled: bool = False) -> None:
    """Write `train.jsonl` with so many rows and `val.jsonl` with a quarter of that into `folder`, and the model with
    its tokenizer into `model`. `shuffled`: the answers are those of other rows, so that nothing can be learned."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    for name, count in (("train", rows), ("val", rows // 4)):
        answers = [name for name, _ in zip(list(COLOURS) * count, range(count), strict=False)]
        images = [_square(COLOURS[answer], draw) for answer in answers]
        if shuffled:
            draw.shuffle(answers)
        lines = [
            json.dumps({"input": QUESTION, "image": image, "output": answer})
            for image, answer in zip(images, answers, strict=True)
        ]
        draw.shuffle(lines)
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    make_tiny_model("qwen3_vl", model, seed=seed, vocab_size=32, eos_token_id=2, bos_token_id=1, pad_token_id=0)
    make_tokenizer(model, "", (QUESTION, *COLOURS), marks=MARKS, chat_template=CHAT_TEMPLATE)


def _square(colour: tuple[int, int, int], draw: random.Random) -> str:
    """Return a square of a colour somewhere in grey noise, as a data URL."""
    from PIL import Image

    noise = Image.frombytes("L", (SIDE, SIDE), draw.randbytes(SIDE * SIDE)).convert("RGB")
    place = draw.randrange(SIDE - SQUARE), draw.randrange(SIDE - SQUARE)
    noise.paste(colour, (*place, place[0] + SQUARE, place[1] + SQUARE))
    file = BytesIO()
    noise.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def named(response: str, ground_truth: str) -> float:
    """Reward: 1 if the answer is the colour, else 0."""
    return float(response.strip() == ground_truth)
