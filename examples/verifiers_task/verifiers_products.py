"""Products of two numbers as an environment of `verifiers`: a taskset, and a harness whose program is a subprocess.

    user     12*34=
    policy   12*34?      a call of the tool: agent.py computes what comes before the "?"
    user     408
    policy   408         the answer, with reward 1 if it is right

With `compacts`, the agent gives up its context behind the tool's result, as agents do whose context is full: the policy
writes down what matters, and answers in a new context that has only that. Its answer can be right only if its note was,
so the note's tokens must get the credit.

    user     408#                                    user     408=      its own note
    policy   408         its note                    policy   408       the answer

The package is found by its name on PYTHONPATH; the commands are at the top of recipe.yaml.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

__all__ = ["ProductsHarness", "ProductsTaskset"]


class ProductsData(vf.TaskData):
    answer: str


class ProductsTask(vf.Task[ProductsData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: Any) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def calls(self, trace: Any) -> float:
        return float(sum("?" in (message.content or "") for message in trace.assistant_messages))

    @vf.metric
    async def right_notes(self, trace: Any) -> float:
        texts = [message.content for message in trace.assistant_messages]
        return float(len(texts) == 3 and texts[1] == self.data.answer)


class ProductsConfig(vf.TasksetConfig):
    held_out: bool = False
    """Whether these are the products that are not trained on."""


class ProductsTaskset(vf.Taskset[ProductsTask, ProductsConfig]):
    def load(self) -> Iterator[ProductsTask]:
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        random.Random(0).shuffle(pairs)
        for a, b in pairs[:200] if self.config.held_out else pairs[200:4200]:
            yield ProductsTask(ProductsData(prompt=f"{a}*{b}=", answer=str(a * b)), self.config.task)


class ProductsHarnessConfig(vf.HarnessConfig):
    compacts: bool = False
    """Whether the agent goes on in a new context behind the tool's result."""


class ProductsHarness(vf.Harness[ProductsHarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        await runtime.write("agent.py", Path(__file__).with_name("agent.py").read_bytes())
        arguments = [endpoint, secret, data.prompt, str(int(self.config.compacts))]
        return await runtime.run_program([sys.executable, "-I", "-S", "agent.py", *arguments], {})
