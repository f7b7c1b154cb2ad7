from tests.unit.data.conftest import tokenizer, write_jsonl  # noqa: F401
